"""`python -m services.router`."""

from __future__ import annotations

import sys
from functools import partial

from services.chassis.logs import configure_logs
from services.chassis.loops import run_service
from services.chassis.settings import parse_settings
from services.router.app import run
from services.router.settings import RouterSettings
from shoal.wire.errors import ShoalError


def main() -> None:
    """Run the router with the settings of this process."""
    settings = parse_settings(RouterSettings)
    configure_logs("router", settings.log_level)
    try:
        run_service(partial(run, settings), settings)
    except ShoalError as error:
        sys.stderr.write(f"router: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
