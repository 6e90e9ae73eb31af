"""The command line: what it says, how it ends, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.generate import Sampling, TextGrower, model_named
from shoal.cli.output import bytes_or_count
from shoal.cli.status import ModelStatus as Status
from shoal.cli.status import completeness, coverage_bar
from shoal.v1 import swarm_pb2
from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import SwarmFile


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("SHOAL_SWARM", "SHOAL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def test_help_lists_all_commands_and_loads_no_torch() -> None:
    script = (
        "import sys; from shoal.cli.main import run; code = run(['--help']); print(sorted(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for command in (*main.OWN, *main.OF_SERVICES):
        assert f" {command} " in done.stdout
    loaded = done.stdout.rpartition("[")[2]
    for heavy in ("torch", "transformers", "sqlalchemy"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize("command", ["generate", "status", "up", "model convert"])
def test_help_of_a_command_shows_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command.split(), "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_defaults_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["generate", "--help"])
    assert "[default: 128]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["generate"], ["status", "--no-such-option"]])
def test_a_wrong_call_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    assert "shoal --help" in (told := capsys.readouterr().err) or "--help" in told


def test_without_a_swarm_one_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: no swarm given")
    assert "shoal up" in told.err
    assert told.err.count("\n") == 1


def test_a_swarm_that_does_not_answer_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"shoal://127.0.0.1:1#{'0' * 64}"
    SwarmFile(url, "key").write()
    assert main.run(["status"]) == 1
    assert capsys.readouterr().err.startswith("error: no registry answers at 127.0.0.1:1")


def test_without_the_services_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "plugged_in", dict)
    assert main.run(["up", "--servers", "2"]) == 1
    assert "pip install 'shoal-services[control,block]'" in capsys.readouterr().err
    main.run(["--help"])
    assert "pip install 'shoal-services[control,block]'" in capsys.readouterr().out


def test_convert_tells_that_a_file_is_no_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    assert main.run(["model", "convert", str(tmp_path / "a.gguf"), str(tmp_path / "out")]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convert_leaves_a_converted_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main.run(["model", "convert", "/no/such.gguf", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path)}


def test_the_model_of_the_running_swarm_is_the_default(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--model FOLDER.*shoal up"):
        model_named(None)
    SwarmFile(f"shoal://127.0.0.1:1#{'0' * 64}", "key", model=str(tmp_path)).write()
    assert model_named(None) == str(tmp_path)


def coverage(online: list[int], joining: list[int], free: int = 5) -> tuple[swarm_pb2.BlockCoverage, ...]:
    return tuple(
        swarm_pb2.BlockCoverage(block=block, online_servers=count, joining_servers=coming, free_tokens=free + block)
        for block, (count, coming) in enumerate(zip(online, joining, strict=True))
    )


def test_coverage_bar_has_one_sign_for_each_block() -> None:
    assert coverage_bar(coverage([1, 2, 9, 10, 0, 0], [0, 1, 0, 0, 1, 0])) == "blocks 129+~."


def test_gaps_are_named() -> None:
    assert completeness(Status("m", "fp32", coverage([1, 0, 0], [0, 0, 0]))) == "no server for blocks 1, 2"
    assert completeness(Status("m", "fp32", coverage([1, 0], [0, 0]))) == "no server for block 1"
    assert completeness(Status("m", "fp32", coverage([1, 1], [0, 0]))) == "complete, room for 5 tokens"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1.0k"), (16384, "16.4k"), (250_000, "250k"), (5e9, "5.0G")]
)
def test_counts_are_short(number: float, text: str) -> None:
    assert bytes_or_count(int(number)) == text


class ByteTokenizer:
    """One id for each byte of UTF-8."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_grows_by_whole_characters_only() -> None:
    grower = TextGrower(ByteTokenizer())
    pieces = [grower.add(byte) for byte in "aé€b".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "b"]


def test_temperature_zero_is_greedy() -> None:
    assert Sampling().options()["do_sample"] is False
    assert Sampling(temperature=0.7, top_p=0.9).options() == {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": None,
    }
