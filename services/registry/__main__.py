"""`python -m services.registry`."""

from __future__ import annotations

import sys
from functools import partial

from services.chassis.logs import configure_logs
from services.chassis.loops import run_service
from services.chassis.settings import parse_settings
from services.registry.app import run
from services.registry.settings import RegistrySettings
from shoal.wire.errors import ShoalError


def main() -> None:
    """Run the registry with the settings of this process."""
    settings = parse_settings(RegistrySettings)
    configure_logs("registry", settings.log_level)
    try:
        run_service(partial(run, settings), settings)
    except ShoalError as error:
        sys.stderr.write(f"registry: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
