"""`python -m shoal.cli`, the same as `shoal`."""

from __future__ import annotations

import sys

from shoal.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
