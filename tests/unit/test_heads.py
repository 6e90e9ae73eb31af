"""Threads that need the head at the same time share one product, and each gets what it would get alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from shoal.client.heads import MAX_ROWS, CombinedHead, _Ticket, piece_rows

WAIT_S = 30.0
HIDDEN = 8


class Gate:
    """A product that notes the rows of each call, holds back the first until `opened`, and fails when told."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self.rows: list[int] = []
        self.entered, self.opened = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._product = head.forward

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        first = not self.rows
        self.rows.append(hidden.numel() // HIDDEN)
        if first:
            self.entered.set()
            assert self.opened.wait(WAIT_S)
        elif self.error is not None:
            raise self.error
        return self._product(hidden)


@pytest.fixture
def head() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(HIDDEN, 21, bias=False).requires_grad_(False)


def held_by(gate: Gate, head: torch.nn.Linear) -> CombinedHead:
    """Return a combined head whose products go through the gate."""
    combined = CombinedHead(head)
    combined._product = gate  # type: ignore[method-assign]
    return combined


@torch.no_grad()
def call(combined: CombinedHead, hidden: torch.Tensor) -> torch.Tensor:
    """Call from a thread, whose own grad mode counts."""
    output: torch.Tensor = combined(hidden)
    return output


def start(
    pool: ThreadPoolExecutor, gate: Gate, combined: CombinedHead, inputs: list[torch.Tensor]
) -> list[Future[torch.Tensor]]:
    """Start one call that stays in the product, then the others one by one until each of them waits."""
    calls = [pool.submit(call, combined, inputs[0])]
    assert gate.entered.wait(WAIT_S)
    for number, hidden in enumerate(inputs[1:], start=1):
        calls.append(pool.submit(call, combined, hidden))
        ready = threading.Event()
        while len(combined._waiting) < number:
            ready.wait(0.001)
    return calls


def test_those_who_wait_share_one_product(head: torch.nn.Linear) -> None:
    gate = Gate(head)
    combined = held_by(gate, head)
    inputs = [torch.randn(1, 1, HIDDEN), torch.randn(1, 1, HIDDEN), torch.randn(3, 1, HIDDEN), torch.randn(2, HIDDEN)]
    with ThreadPoolExecutor(4) as pool:
        calls = start(pool, gate, combined, inputs)
        gate.opened.set()
        for hidden, done in zip(inputs, calls, strict=True):
            torch.testing.assert_close(done.result(WAIT_S), head(hidden))
    assert gate.rows == [1, 6]
    assert combined._leader is None


def test_no_product_has_more_rows_than_the_limit(head: torch.nn.Linear) -> None:
    gate = Gate(head)
    combined = held_by(gate, head)
    inputs = [torch.randn(rows, 1, HIDDEN) for rows in (1, 40, 24, 1, MAX_ROWS)]
    with ThreadPoolExecutor(5) as pool:
        calls = start(pool, gate, combined, inputs)
        gate.opened.set()
        for hidden, done in zip(inputs, calls, strict=True):
            torch.testing.assert_close(done.result(WAIT_S), head(hidden))
    assert gate.rows == [1, 64, 1, 64]


def test_an_error_reaches_all_who_shared_the_product_and_nobody_after(head: torch.nn.Linear) -> None:
    gate = Gate(head)
    gate.error = RuntimeError("no memory")
    combined = held_by(gate, head)
    with ThreadPoolExecutor(3) as pool:
        calls = start(pool, gate, combined, [torch.randn(1, HIDDEN)] * 3)
        gate.opened.set()
        assert calls[0].exception(WAIT_S) is None
        assert [one.exception(WAIT_S) for one in calls[1:]] == [gate.error] * 2
        gate.error = None
        torch.testing.assert_close(
            pool.submit(call, combined, torch.ones(1, HIDDEN)).result(WAIT_S), head(torch.ones(1, HIDDEN))
        )


def test_a_caller_that_is_interrupted_leaves_the_others_their_results(head: torch.nn.Linear) -> None:
    gate = Gate(head)
    combined = held_by(gate, head)
    with ThreadPoolExecutor(3) as pool:
        calls = start(pool, gate, combined, [torch.randn(1, HIDDEN), *torch.randn(2, 1, HIDDEN)])
        first = combined._waiting[0]
        combined._leave(first)
        gate.opened.set()
        assert calls[0].result(WAIT_S).shape == calls[2].result(WAIT_S).shape == (1, 21)
        first.result = torch.zeros(1, 21)
        first.woken.set()
        assert calls[1].result(WAIT_S).shape == (1, 21)
        assert combined._leader is None


def test_a_leader_that_is_interrupted_is_followed_by_another(head: torch.nn.Linear) -> None:
    gate = Gate(head)
    gate.error = KeyboardInterrupt()
    combined = held_by(gate, head)
    with ThreadPoolExecutor(4) as pool:
        calls = start(pool, gate, combined, list(torch.randn(3, 1, HIDDEN)))
        product = combined._product

        def once(hidden: torch.Tensor) -> torch.Tensor:
            try:
                return product(hidden)
            finally:
                gate.error = None

        combined._product = once  # type: ignore[method-assign]
        gate.opened.set()
        assert isinstance(calls[1].exception(WAIT_S), KeyboardInterrupt)
        assert calls[2].result(WAIT_S).shape == (1, 21)
        assert combined._leader is None


def test_threads_that_shared_a_product_wait_for_each_other() -> None:
    """Eight threads call with pauses of different lengths: soon four share each product, where alone none would."""
    head = torch.nn.Linear(1024, 20_000, bias=False).requires_grad_(False)
    combined = CombinedHead(head)
    counted: list[int] = []
    product = combined._product

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        counted.append(len(hidden))
        return product(hidden)

    combined._product = counting  # type: ignore[method-assign]
    start_together = threading.Barrier(8)

    def run(thread: int) -> None:
        start_together.wait(WAIT_S)
        for hidden in torch.randn(40, 1, 1024):
            call(combined, hidden)
            time.sleep(0.05 + 0.0002 * thread)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert sum(counted) == 8 * 40
    assert len(counted) < 8 * 40 * 0.6


@pytest.mark.parametrize("rows", [4, 7, 15])
@pytest.mark.parametrize(("out", "inner"), [(49152, 576), (1152, 64), (50257, 64)])
def test_few_rows_by_pieces_give_the_same(rows: int, out: int, inner: int) -> None:
    head = torch.nn.Linear(inner, out, bias=False).requires_grad_(False)
    hidden = torch.randn(rows, inner)
    torch.testing.assert_close(call(CombinedHead(head), hidden), head(hidden))


def test_pieces_divide_the_matrix_and_fit_the_cache() -> None:
    assert piece_rows(49152, 576) == 256
    assert piece_rows(128_256, 4096) == 32
    assert piece_rows(50_257, 576) is None
    assert piece_rows(1000, 100_000) is None


@pytest.mark.parametrize("reason", ["rows", "dtype", "grad", "inference"])
def test_other_calls_pass_through_without_waiting(reason: str, head: torch.nn.Linear) -> None:
    """Each runs while another call is held back in the product."""
    combined = CombinedHead(head)
    combined._leader = _Ticket(torch.zeros(1, HIDDEN))
    hidden = torch.randn(1, MAX_ROWS + (reason == "rows"), HIDDEN, requires_grad=reason == "grad")
    if reason == "dtype":
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            combined(hidden.double())
    elif reason == "inference":
        with torch.inference_mode():
            assert combined(hidden).is_inference()
    else:
        with torch.set_grad_enabled(reason == "grad"):
            output = combined(hidden)
        assert output.requires_grad is (reason == "grad")
    assert not combined._waiting


def test_many_threads_many_times(head: torch.nn.Linear) -> None:
    combined = CombinedHead(head)
    inputs = torch.randn(8, 50, 1, HIDDEN)

    def run(thread: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [combined(hidden) for hidden in inputs[thread]]

    with ThreadPoolExecutor(8) as pool:
        for thread, outputs in enumerate(pool.map(run, range(8))):
            torch.testing.assert_close(torch.stack(outputs), inputs[thread] @ head.weight.T)
