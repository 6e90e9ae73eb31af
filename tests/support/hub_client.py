"""Points the hub client of this process at another hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from tests.support.fake_hub import FakeHub


@contextmanager
def client_of(hub: FakeHub, patch: pytest.MonkeyPatch, folder: Path) -> Iterator[FakeHub]:
    """Point the hub client of this process at the hub, with a cache of its own in `folder`; `patch` takes it back."""
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(variable, raising=False)
    patch.setenv("NO_PROXY", "127.0.0.1")
    close_session()
    try:
        yield hub
    finally:
        close_session()
