"""Combines the head's products of threads that generate at the same time into one.

Whoever comes while no product runs computes at once and alone; who comes meanwhile waits, and the first of those
then computes for all of them. Nobody waits for a clock, and a single caller pays two uncontended locks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

MAX_ROWS = 64


@dataclass(slots=True, eq=False)
class _Ticket:
    """One waiting call: hidden states `[rows, hidden]`, and what has become of it once `done` is set.

    Then either `leads` names the tickets it must compute, itself first, or `result` or `error` is there.
    """

    hidden: torch.Tensor
    done: threading.Event = field(default_factory=threading.Event)
    leads: list[_Ticket] = field(default_factory=list)
    result: torch.Tensor | None = None
    error: Exception | None = None


class CombinedHead(torch.nn.Linear):
    """A head that gives each row the result of that row alone, whoever shares its product."""

    def __init__(self, head: torch.nn.Linear) -> None:
        """Take over the weight and bias of `head`, which may stay on the meta device for now."""
        with torch.device("meta"):
            super().__init__(head.in_features, head.out_features, head.bias is not None)
        self.weight, self.bias = head.weight, head.bias
        self._lock = threading.Lock()
        self._running = False
        self._waiting: list[_Ticket] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of `[..., hidden]` with the head, `[..., vocabulary]`, from any thread."""
        hidden = input
        if not self._combines(hidden):
            return self._product(hidden)
        with self._lock:
            alone = not self._running
            self._running = True
            if not alone:
                ticket = _Ticket(hidden.reshape(-1, hidden.shape[-1]))
                self._waiting.append(ticket)
        if alone:
            try:
                return self._product(hidden)
            finally:
                self._hand_over()
        return self._wait(ticket).view(*hidden.shape[:-1], -1)

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
        return super().forward(hidden)

    def _wait(self, ticket: _Ticket) -> torch.Tensor:
        try:
            ticket.done.wait()
        except BaseException:  # an interrupt: whoever waits behind must not wait for this one
            self._leave(ticket)
            raise
        if ticket.leads:
            self._lead(ticket.leads)
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    def _lead(self, tickets: list[_Ticket]) -> None:
        """Compute for all tickets, the own one first, and tell the others."""
        try:
            logits = self._product(torch.cat([ticket.hidden for ticket in tickets]))
            for ticket, part in zip(tickets, torch.split(logits, [len(t.hidden) for t in tickets]), strict=True):
                ticket.result = part
        except Exception as error:  # noqa: BLE001 - whoever computes for others passes on to them whatever went wrong
            for ticket in tickets:
                ticket.error = error
        finally:
            for ticket in tickets[1:]:
                ticket.done.set()
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the first of those who wait compute for as many as fit, or note that nobody does."""
        with self._lock:
            taken, rows = 0, 0
            for ticket in self._waiting:
                rows += len(ticket.hidden)
                if rows > MAX_ROWS:
                    break
                taken += 1
            tickets, self._waiting = self._waiting[:taken], self._waiting[taken:]
            self._running = bool(tickets)
            if tickets:
                tickets[0].leads = tickets
                tickets[0].done.set()

    def _leave(self, ticket: _Ticket) -> None:
        """Forget a call that was interrupted while it waited; if it was to compute for others, the next one does."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._waiting[:0] = ticket.leads[1:]
        if ticket.leads:
            self._hand_over()
