"""Combines the head's products of threads that generate at the same time into one.

The first who comes while no product runs computes for all that are there by then; who comes meanwhile waits, and the
first of those computes for all of them. Threads that shared a product are expected to come together again: the first
of them waits for the others, no longer than pays (`shoal.swarm.gathering`). A single caller waits for nobody.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from shoal.swarm.gathering import Gathering

MAX_ROWS = 64
# A CPU's product of so many rows with a large matrix first makes a copy of the matrix, in the order that it likes. That
# takes most of the time, unless it is done piece by piece in the cache.
_FEW = range(4, 16)
_PIECE_VALUES = 256 * 576
_LEAST_PIECE_ROWS = 16


def piece_rows(rows: int, columns: int) -> int | None:
    """Return how many rows of a matrix make a piece that fits the cache and divides it evenly; None if none does."""
    most = _PIECE_VALUES // columns
    return next((size for size in range(most, max(most // 4, _LEAST_PIECE_ROWS) - 1, -1) if rows % size == 0), None)


def by_pieces(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the product of `[n, in]` with the transpose of `[out, in]`, computed over pieces of so many rows."""
    pieces = weight.view(-1, rows, weight.shape[1])
    products = torch.bmm(hidden.expand(len(pieces), *hidden.shape), pieces.transpose(1, 2))
    return products.transpose(0, 1).reshape(len(hidden), -1)


@dataclass(slots=True, eq=False)
class _Ticket:
    """One waiting call of a thread: hidden states `[rows, hidden]`.

    `woken` is set when it has to look again: `result` or `error` may be there, or it `leads` and is to compute for
    all that are there.
    """

    hidden: torch.Tensor
    thread: int = field(default_factory=threading.get_ident)
    woken: threading.Event = field(default_factory=threading.Event)
    came_s: float = field(default_factory=time.perf_counter)
    leads: bool = False
    result: torch.Tensor | None = None
    error: Exception | None = None


class CombinedHead(torch.nn.Linear):
    """A head that gives each row the result of that row alone, whoever shares its product."""

    def __init__(self, head: torch.nn.Linear) -> None:
        """Take over the weight and bias of `head`, which may stay on the meta device for now."""
        with torch.device("meta"):
            super().__init__(head.in_features, head.out_features, head.bias is not None)
        self.weight, self.bias = head.weight, head.bias
        self._biased = head.bias is not None
        self._lock = threading.Lock()
        # Whoever computes or is about to is not replaced until it hands over.
        self._leader: _Ticket | None = None
        self._waiting: list[_Ticket] = []
        self._gathering: Gathering[int] = Gathering()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of `[..., hidden]` with the head, `[..., vocabulary]`, from any thread."""
        hidden = input
        if not self._combines(hidden):
            return self._product(hidden)
        ticket = _Ticket(hidden.reshape(-1, hidden.shape[-1]))
        with self._lock:
            self._gathering.come(ticket.thread, ticket.came_s)
            self._waiting.append(ticket)
            if self._leader is None:
                self._leader, ticket.leads = ticket, True
            else:
                self._leader.woken.set()
        try:
            return self._wait(ticket).view(*hidden.shape[:-1], -1)
        except BaseException:  # an interrupt: whoever waits behind must not wait for this one
            self._leave(ticket)
            raise

    def _combines(self, hidden: torch.Tensor) -> bool:
        """Tell whether a call may share a product: few rows, nothing that autograd would have to follow."""
        return (
            0 < hidden.numel() <= MAX_ROWS * hidden.shape[-1]
            and hidden.dtype == self.weight.dtype
            and hidden.device == self.weight.device
            and not torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._biased and hidden.dim() == 2 and len(hidden) in _FEW and hidden.device.type == "cpu":
            rows = piece_rows(*self.weight.shape)
            if rows is not None:
                return by_pieces(hidden, self.weight, rows)
        return super().forward(hidden)

    def _wait(self, ticket: _Ticket) -> torch.Tensor:
        while ticket.result is None and ticket.error is None:
            if not ticket.leads:
                ticket.woken.wait()
                ticket.woken.clear()
            elif (held_s := self._held_s()) > 0:
                ticket.woken.wait(held_s)
                ticket.woken.clear()
            else:
                self._lead()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    def _held_s(self) -> float:
        """Return how long the leader had better wait for more; 0 or less if no longer."""
        with self._lock:
            threads = [ticket.thread for ticket in self._waiting]
            return self._gathering.held_until_s(threads, self._waiting[-1].came_s) - time.perf_counter()

    def _lead(self) -> None:
        """Compute for as many as fit, the own call among them, and tell the others."""
        tickets = self._take()
        try:
            started_s = time.perf_counter()
            hidden = tickets[0].hidden if len(tickets) == 1 else torch.cat([ticket.hidden for ticket in tickets])
            logits = self._product(hidden)
            self._gathering.observe(time.perf_counter() - started_s)
            for ticket, part in zip(tickets, torch.split(logits, [len(t.hidden) for t in tickets]), strict=True):
                ticket.result = part
        except Exception as error:  # noqa: BLE001 - whoever computes for others passes on to them whatever went wrong
            for ticket in tickets:
                ticket.error = error
        except BaseException:  # an interrupt of this thread alone
            with self._lock:
                self._waiting[:0] = tickets[1:]
            raise
        finally:
            self._hand_over()
            for ticket in tickets[1:]:
                ticket.woken.set()

    def _take(self) -> list[_Ticket]:
        with self._lock:
            taken, rows = 0, 0
            for ticket in self._waiting:
                rows += len(ticket.hidden)
                if rows > MAX_ROWS:
                    break
                taken += 1
            tickets, self._waiting = self._waiting[:taken], self._waiting[taken:]
            self._gathering.leave([ticket.thread for ticket in tickets], tickets[-1].came_s)
            return tickets

    def _hand_over(self) -> None:
        """Let the first of those who wait lead, if there is one."""
        with self._lock:
            self._leader = self._waiting[0] if self._waiting else None
            if self._leader is not None:
                self._leader.leads = True
                self._leader.woken.set()

    def _leave(self, ticket: _Ticket) -> None:
        """Forget a call that was interrupted; if it was to compute for others, the next one does."""
        with self._lock:
            self._gathering.forget(ticket.thread)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            leads = self._leader is ticket
        if leads:
            self._hand_over()
