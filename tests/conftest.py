"""Fixtures for all tests, and the settings that hold in every one of them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Two cores are shared by many processes; one thread each is also what the exactness tests compare.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when grpc is imported; else it writes "Got goaway" for every server that a test stops.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Clients remember swarms beside the user's swarm file, where tests have no business.
if "SHOAL_CONFIG_DIR" not in os.environ:
    os.environ["SHOAL_CONFIG_DIR"] = tempfile.mkdtemp(prefix="shoal-config-")
    atexit.register(shutil.rmtree, os.environ["SHOAL_CONFIG_DIR"], ignore_errors=True)

pytest_plugins = ["tests.support.leftovers", "tests.support.ports", "tests.support.stores"]
