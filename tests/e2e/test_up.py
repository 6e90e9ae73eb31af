"""`shoal up` as a person meets it: it comes up, answers, tells what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import VOCABULARY, load_reference, make_tiny

WAIT_S = 120
SHOAL = (sys.executable, "-m", "shoal.cli")


class Place:
    """Folders of one test, the environment of its commands, and the `shoal up` that runs in it."""

    def __init__(self, root: Path, model: Path) -> None:
        self.data = root / "data"
        self.model = model
        self.env = {**os.environ, "SHOAL_CONFIG_DIR": str(root / "config"), "COLUMNS": "200"}
        for name in ("SHOAL_SWARM", "SHOAL_API_KEY"):
            self.env.pop(name, None)

    @property
    def swarm_file(self) -> Path:
        return Path(self.env["SHOAL_CONFIG_DIR"]) / "swarm.json"

    def up_command(self, *more: str, servers: int = 1) -> list[str]:
        sizes = ("--servers", str(servers), "--threads", "1", "--cache-tokens", "256")
        return [*SHOAL, "up", str(self.model), *sizes, "--data-dir", str(self.data), *more]

    def start(self, servers: int = 1) -> subprocess.Popen[str]:
        """Start `shoal up` and wait until it is ready; `self.told` is what it printed."""
        command = self.up_command("--json", servers=servers)
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"shoal up ended with {process.wait(WAIT_S)}"
        self.told = json.loads(line)
        return process

    def shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command to its end."""
        return subprocess.run(
            [*SHOAL, *arguments], env=self.env, capture_output=True, text=True, check=False, timeout=WAIT_S
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of the words w0, w1, ..."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(str(folder))
    return folder


@pytest.fixture
def place(model: Path) -> Iterator[Place]:
    """A temporary folder that PostgreSQL's account can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-") as root:
        Path(root).chmod(0o711)
        yield Place(Path(root), model)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert alive == []


def test_up_answers_shows_itself_and_stops_clean(place: Place) -> None:
    process = place.start(servers=2)
    started = family(process)
    try:
        status = json.loads(place.shoal("status", "--json").stdout)
        assert [server["span"] for server in status["servers"]] == ["0:3", "3:6"]
        assert {server["state"] for server in status["servers"]} == {"online"}
        assert status["models"][0]["complete"]
        assert json.loads(place.swarm_file.read_text())["initial_peers"][0].startswith("/ip4/127.0.0.1/tcp/")
        shown = place.shoal("status").stdout
        assert "blocks 111111" in shown
        assert "server-1" in shown

        assert_generates_as_local(place)

        second = place.shoal(*place.up_command()[len(SHOAL) :])
        assert second.returncode == 1
        assert f"(process {process.pid})" in second.stderr
        assert process.poll() is None
        assert json.loads(place.swarm_file.read_text())["url"] == place.told["swarm"]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert_gone(started)
    assert not place.swarm_file.exists()


def assert_generates_as_local(place: Place) -> None:
    answer: dict[str, Any] = json.loads(
        place.shoal("generate", "w5 w9 w7", "--raw", "--json", "--max-new-tokens", "12").stdout
    )
    assert answer["prompt_ids"] == [5, 9, 7]
    ids = load_reference(place.model).generate(torch.tensor([[5, 9, 7]]), max_new_tokens=12, do_sample=False)
    assert answer["new_ids"] == ids[0, 3:].tolist()
    assert [hop["span"] for hop in answer["route"]] == ["0:3", "3:6"]
    text = place.shoal("generate", "w5 w9 w7", "--raw", "--max-new-tokens", "12")
    assert text.stdout.split() == answer["text"].split() == [f"w{token}" for token in answer["new_ids"]]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_nothing_outlives_it_and_the_next_start_keeps_the_url(place: Place, signum: signal.Signals) -> None:
    process = place.start()
    first, started = place.told, family(process)
    process.send_signal(signum)
    process.communicate(timeout=WAIT_S)
    assert_gone(started)
    process = place.start()
    started = family(process)
    assert place.told["swarm"] == first["swarm"]
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert_gone(started)


def test_when_a_part_dies_it_is_named_and_the_rest_stops(place: Place) -> None:
    process = subprocess.Popen(
        place.up_command("--json"), env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    started = family(process)
    victim = next(
        child for child in started if "--public-name" in child.cmdline() and "leash" not in str(child.cmdline())
    )
    name = victim.cmdline()[victim.cmdline().index("--public-name") + 1]
    victim.kill()
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert f"error: {name} ended with code 137 and the swarm stops" in told
    assert_gone(started)


def test_a_stop_during_the_start_leaves_nothing(place: Place) -> None:
    process = subprocess.Popen(place.up_command(), env=place.env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("starting server-1"):
            break
    started = family(process)
    assert started
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert_gone(started)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["up", "/no/such/folder"], 1, "is no model folder"),
        (["up", "MODEL", "--servers", "7"], 2, "--servers must be 1 to 6"),
        (["up", "MODEL", "--dtype", "int3"], 2, "--dtype must be fp32, bf16 or fp16"),
    ],
)
def test_bad_calls_are_refused_before_anything_starts(place: Place, arguments: list[str], code: int, told: str) -> None:
    named = [str(place.model) if word == "MODEL" else word for word in arguments]
    done = place.shoal(*named, "--data-dir", str(place.data))
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place.data / "postgres").exists()
