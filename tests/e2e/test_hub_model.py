"""Models served from the hub by real processes: the ids of plain transformers, and each file downloaded once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from shoal import AutoDistributedModelForCausalLM
from shoal.wire.errors import NotAuthenticated
from tests.support.fake_hub import FakeHub, Hit, Hold
from tests.support.hub_client import client_of
from tests.support.swarm import LiveSwarm
from tests.support.tiny_models import VOCABULARY, load_reference, make_tiny
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODELS = ("llama", "llama-tied", "bloom", "bloom-tied")
PRIVATE = "bloom-tied"
# Both hold blocks 2 and 3, which lie in the second of three shards.
SPANS = {"alice": "0:4", "bob": "2:6"}
TOKENS = {"alice": "hf_alices_own_token_0001", "bob": "hf_bobs_own_token_000002"}
SMALL = {"config.json", "model.safetensors.index.json"}
SHOAL = (sys.executable, "-m", "shoal.cli")
PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])


@dataclass
class Place:
    """A swarm with two servers for each model, all with one cache. `served` is what they asked the hub for."""

    hub: FakeHub
    swarm: LiveSwarm
    root: Path
    served: list[Hit]


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def asked(hits: list[Hit], name: str, who: str) -> set[str]:
    """Return the files of a model that somebody asked for."""
    start = f"/owner/{name}/resolve/"
    return {hit.path.rpartition("/")[2] for hit in hits if hit.path.startswith(start) and hit.who == who}


def sent(hits: list[Hit], file: Path) -> int:
    """Return how many bytes of a big file were sent, to whomever: the storage host sees no tokens."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return sum(hit.sent for hit in hits if hit.path == f"/storage/{digest}")


def add_tokenizer(folder: Path) -> None:
    """Give a model a tokenizer of words `w0`, `w1`, ..."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(str(folder))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        FakeHub({token: who for who, token in TOKENS.items()}) as hub,
        pytest.MonkeyPatch.context() as patch,
        client_of(hub, patch, Path(scratch) / "client"),
    ):
        root = Path(scratch)
        for seed, name in enumerate(MODELS):
            folder = make_tiny(root / name, name.partition("-")[0], tied=name.endswith("tied"), shards=3, seed=seed)
            add_tokenizer(folder)
            hub.push(f"owner/{name}", folder, private_to="alice bob" if name == PRIVATE else "")
        options = ("--cache-dir", str(root / "cache"))
        with LiveSwarm(root / "llama", [], options=options, env=hub.environment()) as swarm:
            names = [
                swarm.start_server(span, name=f"{name}-{who}", model=f"owner/{name}", wait=False, env=token_of(who))
                for name in MODELS
                for who, span in SPANS.items()
            ]
            for name in names:
                swarm.wait_ready(name)
            swarm.wait_until(lambda status: all(model.complete for model in status.models), "all models are complete")
            yield Place(hub, swarm, root, list(hub.hits))


@pytest.fixture(autouse=True)
def _hang_up(place: Place) -> Iterator[None]:
    """Close what is kept open for later calls after each test."""
    yield
    close_session()
    place.hub.hang_up()


def token_of(who: str) -> dict[str, str]:
    return {"SHOAL_BLOCK_SERVER_HUB_TOKEN": TOKENS[who]}


def connect(place: Place, name: str, **options: Any) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(
        f"owner/{name}",
        swarm=place.swarm.url,
        api_key=place.swarm.api_key,
        cache_dir=place.root / "of-the-client",
        **options,
    )


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_plain_transformers(name: str, place: Place) -> None:
    reference: Any = load_reference(place.root / name)
    before = len(place.hub.hits)
    model = connect(place, name, token=TOKENS["alice"] if name == PRIVATE else None)
    try:
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95}):
            torch.manual_seed(7)
            wanted = reference.generate(PROMPT, max_new_tokens=20, **options)
            torch.manual_seed(7)
            assert model.generate(PROMPT, max_new_tokens=20, **options).tolist() == wanted.tolist()
        assert len(model.connection.last_route.hops) == 2
    finally:
        model.connection.close()
    who = "alice" if name == PRIVATE else ""
    assert asked(place.hub.hits[before:], name, who) == SMALL | {shard(1), shard(3)}


@pytest.mark.parametrize("name", MODELS)
def test_servers_fetch_their_shards_and_each_only_once(name: str, place: Place) -> None:
    """Both need the second shard; the cache is theirs together, so what one has brought the other need not ask for."""
    alice, bob = (asked(place.served, name, who) for who in SPANS)
    assert alice <= SMALL | {shard(1), shard(2)}
    assert bob <= SMALL | {shard(2), shard(3)}
    assert alice | bob == SMALL | {shard(1), shard(2), shard(3)}
    for number in (1, 2, 3):
        file = place.root / name / shard(number)
        assert sent(place.served, file) == file.stat().st_size


def test_a_private_model_needs_a_token_at_the_client_too(place: Place) -> None:
    with pytest.raises(NotAuthenticated, match=r"owner/bloom-tied is private, or does not exist.*token="):
        connect(place, PRIVATE)


def test_the_command_line_asks_a_model_of_the_hub(place: Place) -> None:
    swarm = {"SHOAL_SWARM": place.swarm.url, "SHOAL_API_KEY": place.swarm.api_key}
    words = " ".join(f"w{number}" for number in PROMPT[0].tolist())
    command = (*SHOAL, "generate", words, "--model", "owner/llama", "--raw", "--json", "--max-new-tokens", "12")
    commit = place.hub.repos["owner/llama"].refs["main"]
    more = ("--cache-dir", str(place.root / "of-the-command"), "--revision", commit)
    before = len(place.hub.hits)
    done = run((*command, *more), place.hub.environment(**swarm))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    reference: Any = load_reference(place.root / "llama")
    wanted = reference.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist()
    assert answer["prompt_ids"] + answer["new_ids"] == wanted
    fetched = asked(place.hub.hits[before:], "llama", "")
    assert fetched == SMALL | {shard(1), shard(3), "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("model", "token", "told"),
    [
        ("owner/nothing", TOKENS["alice"], "has no model owner/nothing that the token may see"),
        (f"owner/{PRIVATE}", "hf_of_nobody_at_all_0001", "does not accept the token given for owner/bloom-tied"),
    ],
)
def test_a_server_that_may_not_have_its_model_says_why(model: str, token: str, told: str, place: Place) -> None:
    """ML-13: in one line, and the token is in none."""
    state = place.root / "refused"
    command = (*SHOAL, "server", "run", model, "--swarm", place.swarm.url, "--state-dir", str(state))
    secret = {"SHOAL_BLOCK_SERVER_HUB_TOKEN": token, "SHOAL_API_KEY": place.swarm.api_key}
    done = run((*command, "--log-level", "debug"), place.hub.environment(**secret))
    assert done.returncode == 1
    assert told in done.stderr.splitlines()[-1]
    assert not token or token not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_stops_in_the_middle_of_a_download_and_goes_on_later(place: Place) -> None:
    file = place.root / "late" / shard(1)
    make_tiny(place.root / "late", shards=3, seed=9)
    place.hub.push("owner/late", place.root / "late")
    size = file.stat().st_size
    place.hub.break_next(shard(1), Hold(size // 2))
    before = len(place.hub.hits)
    quick = {"HF_HUB_DOWNLOAD_TIMEOUT": "2", **token_of("alice")}
    name = place.swarm.start_server("0:2", name="late", model="owner/late", wait=False, env=quick)
    assert wait_until(lambda: sent(place.hub.hits[before:], file) == size // 2, 60)
    start = time.monotonic()
    assert place.swarm.stop(name) == 0
    assert time.monotonic() - start < 20
    place.hub.release.set()
    assert all(server.public_name != name for server in place.swarm.status().servers)
    between = len(place.hub.hits)
    place.swarm.start_server("0:2", name=name, model="owner/late", env=quick)
    assert sent(place.hub.hits[between:], file) == size - size // 2
    assert place.swarm.stop(name) == 0


def run(command: tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)
