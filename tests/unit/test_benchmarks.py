"""The harness of the benchmarks: targets, lines of JSON, the command line, clean ends. Measures nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import catalog
from benchmarks.bench import ONE_THREAD, Bench, BenchmarkError, Figures, Measurement
from benchmarks.stats import percentile
from benchmarks.targets import Target, load_targets
from shoal.wire.errors import NoRoute

TARGETS = """
[P1.one]
what = "first"
unit = "ratio"
target = ">=1.0"

[P1.two]
what = "second"
unit = "s"
target = "<=2"
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Put a function in the place of P1, the only benchmark, with the targets above."""
    targets_file = tmp_path / "targets.toml"
    targets_file.write_text(TARGETS, encoding="utf-8")
    before = signal.getsignal(signal.SIGTERM)

    def install(run: Any) -> None:
        module = ModuleType("fake_benchmark")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_benchmark", module)
        for holder in (catalog, command):
            monkeypatch.setattr(holder, "CATALOG", {"P1": "fake_benchmark"})
        monkeypatch.setattr(command, "load_targets", lambda: load_targets(targets_file))
        for name in ONE_THREAD:
            monkeypatch.setenv(name, os.environ.get(name, "1"))

    yield install
    signal.signal(signal.SIGTERM, before)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def both(bench: Bench) -> Figures:
    yield Measurement("one", 1.0, {"raw": [1, 2]})
    yield Measurement("two", 2.5)


def test_every_number_to_reach_has_its_targets() -> None:
    targets = load_targets()
    assert list(targets) == [*(f"P{number}" for number in range(1, 17)), "SIMULATE"]
    texts = {f"{id_}.{name}": target.text for id_, figures in targets.items() for name, target in figures.items()}
    assert len(texts) == 35
    assert (texts["P1.decode"], texts["P2.p50"], texts["P2.p99"]) == (">=1.0", "<=1.5", "<=4")
    assert (texts["P15.start"], texts["P15.import"]) == ("<=4", "<=1.2")


def test_catalog_and_targets_agree() -> None:
    assert set(catalog.CATALOG) <= set(load_targets())


@pytest.mark.parametrize(
    ("text", "value", "reached"),
    [(">=1.0", 1.0, True), (">=1.0", 0.999, False), ("<=4", 4.0, True), ("<=4", 4.01, False), ("==0", 0, True)],
)
def test_comparisons(text: str, value: float, reached: bool) -> None:
    assert Target("P1", "x", "what", "s", text).reached_by(value) is reached


@pytest.mark.parametrize("target", ['"fast"', '">1"', '">= 1"', "1.0"])
def test_a_wrong_target_is_named(tmp_path: Path, target: str) -> None:
    file = tmp_path / "targets.toml"
    file.write_text(f'[P1.one]\nwhat = "w"\nunit = "s"\ntarget = {target}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"\[P1\.one\]"):
        load_targets(file)


def test_percentile_is_a_sample() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert [percentile(samples, percent) for percent in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    with pytest.raises(ValueError):
        percentile([], 50)


def test_a_line_for_each_figure(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fakes(both)
    assert command.main(["p1", "P1"]) == 0
    first, second = lines(capsys)
    assert list(first) == ["id", "value", "unit", "target", "ok", "detail"]
    assert (first["id"], first["value"], first["unit"], first["target"], first["ok"]) == (
        "P1",
        1.0,
        "ratio",
        ">=1.0",
        True,
    )
    assert first["detail"]["figure"] == "one"
    assert first["detail"]["raw"] == [1, 2]
    assert (second["id"], second["detail"]["figure"], second["ok"]) == ("P1", "two", False)


def test_strict_fails_on_a_missed_target(fakes: Any) -> None:
    fakes(both)
    assert command.main(["--strict"]) == 1


def test_smoke_and_model_reach_the_benchmark(fakes: Any, tmp_path: Path) -> None:
    seen: list[Bench] = []

    def run(bench: Bench) -> Figures:
        seen.append(bench)
        (bench.scratch / "file").write_text("left behind", encoding="utf-8")
        yield from both(bench)

    fakes(run)
    command.main(["--smoke", "--model", str(tmp_path)])
    assert (seen[0].pick(100, 3), seen[0].model_folder) == (3, tmp_path)
    assert not seen[0].scratch.exists()
    with pytest.raises(BenchmarkError, match="make demo"):
        seen[0].small_model()


@pytest.mark.parametrize("error", [BenchmarkError("not the same ids"), NoRoute("not the same ids"), KeyError("ids")])
def test_what_fails_is_an_error_and_not_a_figure(
    fakes: Any, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def run(bench: Bench) -> Figures:
        yield Measurement("one", 1.5)
        raise error

    fakes(run)
    assert command.main([]) == 1
    first, second = lines(capsys)
    assert first["ok"] is True
    assert (second["value"], second["ok"]) == (None, False)
    assert "ids" in second["detail"]["error"]


def test_a_figure_that_does_not_come_is_an_error(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(bench: Bench) -> Figures:
        yield Measurement("two", 1.0)

    fakes(run)
    assert command.main([]) == 1
    assert [line["value"] for line in lines(capsys)] == [1.0, None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cleans_up(fakes: Any, number: signal.Signals) -> None:
    events: list[str] = []

    def run(bench: Bench) -> Figures:
        events.append(str(bench.scratch))
        try:
            yield Measurement("one", 1.0)
            os.kill(os.getpid(), number)
        finally:
            events.append("cleaned")

    fakes(run)
    assert command.main([]) == 130
    assert events[1:] == ["cleaned"]
    assert not Path(events[0]).exists()


def test_list_names_the_figures_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    targets = load_targets()
    assert listed == [[id_, figure] for id_ in catalog.CATALOG for figure in targets[id_]]
    assert ["P1", "decode"] in listed


def test_an_unknown_id_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["P1", "P99"])
    assert ended.value.code == 2
    assert "P99; known: P1, P2, " in capsys.readouterr().err
