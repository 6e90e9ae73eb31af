"""What happens when the hub refuses, breaks off, damages or disappears: an error that says what to do, or a repair.

Nothing is ever filled in: a file counts only when it is whole and its content is what the hub announced.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from services.block_server.weights.span_model import load_span
from shoal.models.checkpoint import Checkpoint, span_names
from shoal.models.files import HubOptions
from shoal.models.hash_cache import content_digest
from shoal.models.sources import open_model
from shoal.swarm.spans import Span
from shoal.wire.errors import (
    Corrupted,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    ShoalError,
    Unavailable,
)
from tests.support.fake_hub import Answer, Cut, Damage, FakeHub, Fault, Hold
from tests.support.waiting import wait_until

NAME = "owner/tiny"
ALICE, BOB = "hf_alices_own_token_0001", "hf_bobs_own_token_000002"
SHARD = "model-00001-of-00003.safetensors"


def fetch(checkpoint: Checkpoint, blocks: str = "0:2") -> None:
    """Fetch what holds these blocks; `0:2` is the first shard."""
    checkpoint.files_of(span_names(checkpoint.family, Span.parse(blocks)))


@pytest.fixture
def size(folder: Path) -> int:
    return (folder / SHARD).stat().st_size


@pytest.mark.parametrize(
    ("token", "error", "text"),
    [
        (None, NotAuthenticated, r"owner/secret is private, or does not exist.*--hub-token.*HF_TOKEN.*hf auth login"),
        ("hf_of_nobody_at_all_0001", NotAuthenticated, r"does not accept the token given for owner/secret"),
        (BOB, NotFound, r"has no model owner/secret that the token may see"),
        (ALICE, None, ""),
    ],
)
def test_ml13_private_repositories(
    token: str | None, error: type[ShoalError] | None, text: str, hub: FakeHub, options: HubOptions, folder: Path
) -> None:
    hub.push("owner/secret", folder, private_to="alice")
    options = replace(options, token=token)
    if error is None:
        fetch(open_model("owner/secret", options))
        assert hub.fetched("alice") >= {"config.json"}
        return
    with pytest.raises(error, match=text) as raised:
        open_model("owner/secret", options)
    assert token is None or token not in str(raised.value)
    assert hub.fetched() == set()


def test_ml13_the_token_of_the_environment_is_taken(
    hub: FakeHub, options: HubOptions, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("owner/secret", folder, private_to="alice")
    monkeypatch.setenv("HF_TOKEN", ALICE)
    assert open_model("owner/secret", options).source == "owner/secret"


@pytest.mark.parametrize(
    ("token", "error", "text"),
    [
        (None, NotAuthenticated, r"owner/gated is gated: ask for access at http.*/owner/gated, then pass --hub-token"),
        (BOB, NotPermitted, r"owner/gated is gated, and the token has no access to it: ask for access at"),
        (ALICE, None, ""),
    ],
)
def test_ml13_gated_repositories(
    token: str | None, error: type[ShoalError] | None, text: str, hub: FakeHub, options: HubOptions, folder: Path
) -> None:
    hub.push("owner/gated", folder, private_to="alice", gated=True)
    options = replace(options, token=token)
    if error is None:
        fetch(open_model("owner/gated", options))
        return
    with pytest.raises(error, match=text):
        open_model("owner/gated", options)
    assert hub.fetched() == set()


def test_ml13_public_repositories_need_no_token(hub: FakeHub, options: HubOptions) -> None:
    fetch(open_model(NAME, options))
    assert not any(hit.authorized for hit in hub.hits)


def test_ml13_the_token_is_never_logged_nor_sent_to_the_storage_host(
    hub: FakeHub, options: HubOptions, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.push("owner/secret", folder, private_to="alice")
    caplog.set_level(logging.DEBUG)
    hub.break_next(SHARD, Cut(1000), Damage())
    options = replace(options, token=ALICE)
    fetch(open_model("owner/secret", options))
    with pytest.raises(NotFound):
        open_model("owner/other", options)
    assert SHARD in caplog.text
    assert ALICE not in caplog.text + repr(options)
    stored = [hit for hit in hub.hits if hit.path.startswith("/storage/")]
    assert stored
    assert not any(hit.authorized for hit in stored)


def test_what_is_not_there_is_named_after_one_attempt(hub: FakeHub, options: HubOptions) -> None:
    """ML-15: what is permanent is not tried again."""
    with pytest.raises(NotAuthenticated, match=r"nobody/nothing is private, or does not exist: check the name"):
        open_model("nobody/nothing", options)
    with pytest.raises(NotFound, match=r"has no model nobody/nothing that the token may see; check the name"):
        open_model("nobody/nothing", replace(options, token=ALICE))
    with pytest.raises(NotFound, match=r"owner/tiny has no revision 'v9'; pass a branch, a tag or a commit"):
        open_model(NAME, replace(options, revision="v9"))
    with pytest.raises(NotFound, match=r"owner/tiny has no revision '0{40}'"):
        open_model(NAME, replace(options, revision="0" * 40))
    assert len(hub.hits) == 4


@pytest.mark.parametrize("listed", [True, False])
def test_ml01_a_missing_shard_stops_only_those_who_need_it(
    listed: bool, hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    """Also when the hub lists a file that it then does not have."""
    bad = shutil.copytree(folder, tmp_path / "bad")
    lost = "model-00002-of-00003.safetensors"
    if listed:
        hub.break_next(lost, Answer(404), method="HEAD")
    else:
        (bad / lost).unlink()
    hub.push("owner/bad", bad)
    checkpoint = open_model("owner/bad", options)
    with pytest.raises(NotFound, match=lost if listed else rf"no file {lost}; it holds model\.layers\.2"):
        load_span(checkpoint, Span(2, 4), torch.float32, torch.device("cpu"))
    assert checkpoint.opened == set()
    for span in (Span(0, 2), Span(4, 6)):
        load_span(checkpoint, span, torch.float32, torch.device("cpu"))
    assert lost not in hub.fetched()


@pytest.mark.parametrize("fault", [Answer(503), Answer(429, retry_after_s=0), Answer(500), Answer(408)])
@pytest.mark.parametrize(("method", "what"), [("GET", SHARD), ("HEAD", SHARD), ("GET", "info")])
def test_ml15_passing_errors_are_tried_again(
    fault: Fault, method: str, what: str, hub: FakeHub, options: HubOptions, size: int
) -> None:
    hub.break_next(what, fault, fault, method=method)
    fetch(open_model(NAME, options))
    assert hub.sent(SHARD) == size


@pytest.mark.parametrize(("method", "what"), [("GET", SHARD), ("HEAD", SHARD), ("GET", "info")])
def test_errors_that_stay_end_in_a_bounded_number_of_attempts(
    method: str, what: str, hub: FakeHub, options: HubOptions
) -> None:
    hub.break_next(what, *[Answer(503)] * 20, method=method)
    with pytest.raises(Unavailable, match=r"answers 503; try again later"):
        fetch(open_model(NAME, options))
    refused = [hit for hit in hub.hits if hit.status == 503]
    assert len(refused) == 5


def test_a_hub_that_asks_for_too_long_a_pause_is_not_waited_for(hub: FakeHub, options: HubOptions) -> None:
    hub.break_next("info", Answer(429, retry_after_s=3600))
    with pytest.raises(Unavailable, match="answers 429"):
        open_model(NAME, options)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 0.99])
def test_ml07_a_cut_download_goes_on_where_it_broke(
    share: float, hub: FakeHub, options: HubOptions, size: int, folder: Path
) -> None:
    hub.break_next(SHARD, Cut(int(size * share)), Cut(0), Cut(100))
    checkpoint = open_model(NAME, options)
    fetch(checkpoint)
    assert (checkpoint.folder / SHARD).read_bytes() == (folder / SHARD).read_bytes()
    # What had arrived was not asked for again; the last piece before a cut may get lost on its way.
    assert size <= hub.sent(SHARD) < size + 3 * 4096
    assert hub.fetches(SHARD)[-1].start > 0


def test_a_download_that_does_not_get_on_keeps_what_arrived(hub: FakeHub, options: HubOptions, size: int) -> None:
    hub.break_next(SHARD, Cut(size // 2), *[Cut(0)] * 20)
    checkpoint = open_model(NAME, options)
    with pytest.raises(Unavailable, match=r"cannot fetch model-00001.*what has arrived is kept"):
        fetch(checkpoint)
    assert not (checkpoint.folder / SHARD).exists()
    hub.mend()
    hub.forget()
    fetch(open_model(NAME, options))
    assert hub.sent(SHARD) <= size - size // 2 + 4096


def test_a_damaged_download_is_fetched_again(hub: FakeHub, options: HubOptions, size: int, folder: Path) -> None:
    hub.break_next(SHARD, Damage())
    checkpoint = open_model(NAME, options)
    fetch(checkpoint)
    assert (checkpoint.folder / SHARD).read_bytes() == (folder / SHARD).read_bytes()
    assert hub.sent(SHARD) == 2 * size


def test_a_download_that_is_damaged_twice_is_an_error_and_leaves_nothing(
    hub: FakeHub, options: HubOptions, tmp_path: Path
) -> None:
    hub.break_next(SHARD, Damage(), Damage())
    checkpoint = open_model(NAME, options)
    with pytest.raises(Corrupted, match=r"model-00001.* of owner/tiny arrived damaged 2 times"):
        fetch(checkpoint)
    assert not (checkpoint.folder / SHARD).exists()
    assert not list(tmp_path.rglob("*.incomplete"))
    fetch(checkpoint)


def test_a_file_that_is_no_safetensors_file_is_an_error(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    """The repository itself holds the broken file, so its content is what the hub announces."""
    bad = shutil.copytree(folder, tmp_path / "bad")
    (bad / SHARD).write_bytes(b"\xff" * 5000)
    hub.push("owner/bad", bad)
    with pytest.raises(Corrupted, match=rf"{SHARD} of owner/bad at"):
        load_span(open_model("owner/bad", options), Span(0, 1), torch.float32, torch.device("cpu"))
    for file in bad.glob("model*"):
        file.unlink()
    (bad / "model.safetensors").write_bytes(b"\xff" * 5000)
    hub.push("owner/bad", bad)
    with pytest.raises(Corrupted, match=r"model\.safetensors of owner/bad is no safetensors file"):
        open_model("owner/bad", options)


@pytest.mark.parametrize("harm", ["shorter", "another byte", "empty"])
def test_a_file_that_was_damaged_in_the_cache_is_fetched_again_once(
    harm: str, hub: FakeHub, options: HubOptions, size: int, folder: Path
) -> None:
    checkpoint = open_model(NAME, options)
    fetch(checkpoint)
    file = (checkpoint.folder / SHARD).resolve()
    content = file.read_bytes()
    file.write_bytes({"shorter": content[:-1], "another byte": content[:-1] + b"\x55", "empty": b""}[harm])
    hub.forget()
    fetch(open_model(NAME, options))
    assert file.read_bytes() == (folder / SHARD).read_bytes()
    assert hub.sent(SHARD) == size


def test_a_damaged_file_is_never_used_even_if_it_cannot_be_replaced(
    hub: FakeHub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_model(NAME, options)
    fetch(checkpoint)
    file = (checkpoint.folder / SHARD).resolve()
    file.write_bytes(file.read_bytes()[:-8])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = open_model(NAME, options)
    with pytest.raises(Corrupted, match=rf"{SHARD} is damaged and could not be fetched again.*HF_HUB_OFFLINE"):
        load_span(again, Span(0, 1), torch.float32, torch.device("cpu"))
    assert again.opened == set()


def test_files_are_hashed_once_until_they_change(
    hub: FakeHub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counting(file: Path, like: str) -> str:
        hashed.append(file.name)
        return content_digest(file, like)

    for module in ("hub", "hub_download"):
        monkeypatch.setattr(f"shoal.models.{module}.content_digest", counting)
    checkpoint = open_model(NAME, options)
    fetch(checkpoint)
    assert len(hashed) == 3  # config, index and shard, as they arrived
    fetch(open_model(NAME, options))
    assert len(hashed) == 3
    os.utime((checkpoint.folder / SHARD).resolve(), (1, 1))
    fetch(open_model(NAME, options))
    assert hashed[3:] == [SHARD]


def test_ml12_what_is_cached_needs_no_hub(hub: FakeHub, options: HubOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_model(NAME, options)
    assert first.files.has("generation_config.json")
    assert not first.files.has("other.json")
    fetch(first)
    hub.forget()
    fetch(open_model(NAME, replace(options, revision=first.folder.name)))
    assert hub.hits == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = open_model(NAME, options)
    fetch(again)
    assert again.folder == first.folder
    assert not again.files.has("other.json")
    with pytest.raises(Unavailable, match=r"owner/tiny.* is not in the cache .*cache, and HF_HUB_OFFLINE forbids"):
        fetch(again, "4:6")
    with pytest.raises(Unavailable, match=r"owner/new is not in the cache"):
        open_model("owner/new", options)


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("where", ["black_hole", "closed_port"])
def test_ml12_a_hub_that_is_not_there_is_an_error_after_a_bounded_time(
    where: str, hub: FakeHub, options: HubOptions, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_model(NAME, options)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    away = replace(options, endpoint=request.getfixturevalue(where))
    again = open_model(NAME, away)
    assert again.folder == first.folder
    with pytest.raises(Unavailable, match=rf"cannot fetch .*{away.endpoint} cannot be reached.*check network"):
        fetch(again)
    with pytest.raises(Unavailable, match=r"cannot fetch owner/new.* \(and there is no folder owner/new here\)"):
        open_model("owner/new", away)


def test_a_fetch_can_be_stopped_from_another_thread(hub: FakeHub, options: HubOptions, size: int) -> None:
    checkpoint = open_model(NAME, options)
    hub.break_next(SHARD, Hold(size // 2))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            fetch(checkpoint)
        except Unavailable as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: hub.sent(SHARD) >= size // 2)
    checkpoint.files.stop()
    hub.release.set()
    thread.join(30)
    assert "stopped" in str(raised[0])
    with pytest.raises(Unavailable, match="stopped"):
        fetch(checkpoint)


def test_one_file_that_fails_ends_the_others(hub: FakeHub, options: HubOptions) -> None:
    checkpoint = open_model(NAME, options)
    hub.break_next("model-00002-of-00003.safetensors", Damage(), Damage())
    hub.break_next("model-00003-of-00003.safetensors", Hold(1000))
    threading.Timer(0.5, hub.release.set).start()
    with pytest.raises(Corrupted, match="model-00002"):
        fetch(checkpoint, "0:6")


def test_a_broken_config_is_an_error(hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    (bad / "config.json").write_text("{")
    hub.push("owner/bad", bad)
    with pytest.raises(ShoalError, match="not JSON"):
        open_model("owner/bad", options)
    (bad / "config.json").unlink()
    hub.push("owner/bad", bad)
    with pytest.raises(NotFound, match=r"has no file config\.json"):
        open_model("owner/bad", options)
