"""Fixtures for all tests, and the settings that hold in every one of them."""

from __future__ import annotations

import os

# Two cores are shared by many processes; one thread each is also what the exactness tests compare.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["tests.support.leftovers", "tests.support.stores"]
