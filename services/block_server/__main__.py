"""Runs the block server: `python -m services.block_server MODEL --swarm URL --blocks 0:12`."""

from __future__ import annotations

from services.block_server.settings import BlockServerSettings
from services.chassis.settings import parse_settings


def main() -> int:
    """Read the settings, then load what is heavy, so that `--help` and mistakes are quick."""
    settings = parse_settings(BlockServerSettings)
    from services.block_server.app import run

    return run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
