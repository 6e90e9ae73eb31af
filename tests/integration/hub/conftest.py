"""A fake hub with a tiny model of three shards, and the hub client of this process pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.models import hub_errors
from shoal.models.files import HubOptions
from tests.support.fake_hub import FakeHub
from tests.support.hub_client import client_of
from tests.support.tiny_models import make_tiny

NAME = "owner/tiny"
TOKENS = {"hf_alices_own_token_0001": "alice", "hf_bobs_own_token_000002": "bob"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six blocks: 0 and 1 lie in the first shard, with the embeddings; 2 and 3 in the second; 4 and 5 in the last."""
    made = make_tiny(tmp_path_factory.mktemp("models") / "tiny", shards=3)
    (made / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (made / "tokenizer.json").write_text("{}")
    (made / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (made / "README.md").write_text("# Tiny")
    return made


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub_errors, "backoff_s", lambda *_: 0.01)
    with FakeHub(TOKENS) as running, client_of(running, monkeypatch, tmp_path):
        running.push(NAME, folder)
        yield running


@pytest.fixture
def options(tmp_path: Path) -> HubOptions:
    """A cache of its own."""
    return HubOptions(cache_dir=tmp_path / "cache")
