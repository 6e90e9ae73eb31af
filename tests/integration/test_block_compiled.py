"""Compiled blocks give the same numbers; where nothing can be compiled, the plain ones run and the log says why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from services.block_server.weights.compiled import compiled
from services.block_server.weights.fused import FusedLayers
from services.block_server.weights.span_model import load_span
from shoal.models.checkpoint import Checkpoint
from shoal.swarm.spans import Span
from tests.support.engines import Rows
from tests.support.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.mark.timeout(300)
def test_compiled_blocks_give_the_same_numbers(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny(tmp_path / "tiny-llama"))
    plain = load_span(checkpoint, Span(0, 3), torch.float32, CPU)
    made = load_span(checkpoint, Span(0, 3), torch.float32, CPU, how="on")
    assert isinstance(made._layers, FusedLayers)
    rows = [Rows(model, Span(0, 3), torch.float32) for model in (plain, made)]
    for lengths in ([3, 40, 1], [1, 1, 1], [1, 0, 0], [1, 9, 1]):
        hidden = torch.randn(sum(lengths), checkpoint.family.hidden_size)
        with torch.inference_mode():
            wanted, given = (row.run(lengths, hidden) for row in rows)
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=0)


def test_without_a_compiler_the_plain_function_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unable(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(torch, "compile", unable)

    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    with caplog.at_level(logging.WARNING):
        assert compiled(double, [(torch.ones(2),)], "on") is double
    assert "no C++ compiler here" in caplog.text


def test_graphs_need_a_cuda_device(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []

    def note(function: object, **options: object) -> object:
        modes.append(options["mode"])
        return function

    monkeypatch.setattr(torch, "compile", note)

    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    with caplog.at_level(logging.WARNING):
        compiled(double, [(torch.ones(2),)], "graphs")
    assert modes == [None]
    assert "CUDA graphs need a CUDA device" in caplog.text
