"""Runs a DHT node: `python -m services.dht_node --listen HOST:PORT`."""

from __future__ import annotations

from services.chassis.settings import parse_settings
from services.dht_node.app import run
from services.dht_node.settings import DhtNodeSettings


def main() -> int:
    """Run the node with the settings of this process."""
    return run(parse_settings(DhtNodeSettings))


if __name__ == "__main__":
    raise SystemExit(main())
