"""Several processes and one cache: one downloads for all, and what a killed one left is taken up by the next."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub, Hold, Slow
from tests.support.waiting import wait_until

NAME = "owner/tiny"
SHARD = "model-00001-of-00003.safetensors"
# Loads no torch: what is tested is how files come.
FETCH = """
import sys
from pathlib import Path
from shoal.models.files import HubOptions
from shoal.models.hub import HubFiles
files = HubFiles.open(sys.argv[1], HubOptions(cache_dir=Path(sys.argv[2])))
files.fetch(dict.fromkeys(sys.argv[3:], ""))
print(files.folder)
"""


def start(hub: FakeHub, cache: Path, *files: str, token: str = "") -> subprocess.Popen[str]:
    env = {**os.environ, **hub.environment(), **({"HF_TOKEN": token} if token else {})}
    command = [sys.executable, "-c", FETCH, NAME, str(cache), *files]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def folder_of(process: subprocess.Popen[str]) -> Path:
    """Wait for the end of a process that went well and return where it put the files."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return Path(output.strip())


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_ml07_what_a_killed_download_left_is_taken_up(share: float, hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a file: the next process asks for the rest only."""
    whole = (folder / SHARD).read_bytes()
    after = int(len(whole) * share)
    hub.break_next(SHARD, Hold(after))
    victim = start(hub, tmp_path / "cache", SHARD)
    partial = tmp_path / "cache" / "models--owner--tiny" / "blobs"
    try:
        arrived = f"{hashlib.sha256(whole).hexdigest()}.shoal.incomplete"
        assert wait_until(lambda: (partial / arrived).is_file() and (partial / arrived).stat().st_size == after, 60)
    finally:
        victim.kill()
        victim.communicate()
    hub.release.set()
    hub.forget()
    found = folder_of(start(hub, tmp_path / "cache", SHARD))
    assert (found / SHARD).read_bytes() == whole
    assert hub.sent(SHARD) == len(whole) - after
    assert not list(partial.glob("*.incomplete"))


def test_processes_that_share_a_cache_download_once(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    hub.break_next("*.safetensors", *[Slow(0.02)] * 3)
    tokens = list(hub.tokens)
    processes = [start(hub, tmp_path / "cache", *files, token=token) for token in tokens]
    for process in processes:
        found = folder_of(process)
        for file in files:
            assert (found / file).read_bytes() == (folder / file).read_bytes()
    for file in files:
        assert hub.sent(file) == (folder / file).stat().st_size
    # Both were there: each of them asked what a file's content is.
    assert {hit.who for hit in hub.hits if hit.file in files} >= {"alice", "bob"}


def test_caches_that_are_not_shared_each_download(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    for cache in ("one", "two"):
        folder_of(start(hub, tmp_path / cache, SHARD))
    assert hub.sent(SHARD) == 2 * (folder / SHARD).stat().st_size
