"""An inference session: the positions that all hops share, and steps that go on when servers fail.

What callers see; `Pipeline` does the work on the connection's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from shoal.client.fed import FedIds
from shoal.client.legs import Recovery
from shoal.client.outputs import StepTiming
from shoal.client.pipeline import Pipeline
from shoal.swarm.routing import Hop
from shoal.swarm.spans import Span
from shoal.wire.errors import BadTensor, InvalidRequest, SessionLost, TooLong

if TYPE_CHECKING:
    from shoal.client.connection import SwarmConnection


# The session of the innermost `with` block around the running code: of this thread or task, and no other.
_ACTIVE: ContextVar[InferenceSession | None] = ContextVar("shoal_session", default=None)


def active_session(connection: SwarmConnection) -> InferenceSession | None:
    """Return the session of the innermost `with` block of this thread or task, if it is over all of these blocks."""
    session = _ACTIVE.get()
    if session is None or session.connection is not connection or session.span != connection.model.blocks:
        return None
    return session


class InferenceSession:
    """The state of one batch of sequences on the servers of a route.

    Rows may be of different lengths. One thread at a time may step; `close` may be called from any thread, more than
    once, and frees the cache on all servers. A step that fails leaves the session where it was before the step: it
    can be tried again. `recoveries` tells what was replaced so far.
    """

    def __init__(self, connection: SwarmConnection, span: Span, rows: int, max_tokens: int) -> None:
        self.connection = connection
        # Streams know the pipeline, never the session: it can be collected, and is closed then.
        self._pipeline = Pipeline(connection, span, rows, max_tokens)
        self._closed = False
        # What the next step does to the rows before it adds to them.
        self._sources: tuple[int, ...] = ()
        self._kept: tuple[int, ...] | None = None
        self._outer: Token[InferenceSession | None] | None = None
        self.fed = FedIds()
        self.span = span
        self.max_tokens = max_tokens
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """Tokens held by each row."""
        if self._kept is not None:
            return self._kept
        held = self._pipeline.positions
        return tuple(held[source] for source in self._sources) if self._sources else held

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self._pipeline.rows

    @property
    def timings(self) -> tuple[StepTiming, ...]:
        """What each server reported of its newest step, in block order."""
        return tuple(leg.timing for leg in self._pipeline.legs if leg.timing is not None)

    @property
    def recoveries(self) -> list[Recovery]:
        """The lost servers that were replaced so far."""
        return self._pipeline.recoveries

    @property
    def moves(self) -> list[Recovery]:
        """The servers that asked the session to move and were left so far."""
        return self._pipeline.mover.moves

    @property
    def position(self) -> int:
        """Tokens held by the longest row. Setting it rolls all longer rows back."""
        return max(self.positions)

    @position.setter
    def position(self, tokens: int) -> None:
        if not 0 <= tokens <= self.position:
            raise InvalidRequest(f"a session at position {self.position} cannot be set to {tokens}")
        self.roll_back([min(tokens, held) for held in self.positions])

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The servers that hold the session now, in block order."""
        return tuple(leg.stream.hop for leg in self._pipeline.legs if leg.stream is not None)

    @property
    def closed(self) -> bool:
        """Tell whether the session has ended."""
        return self._closed

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        """Send hidden states `[rows, tokens, hidden]`, or ids `[rows, tokens]`, through all blocks.

        Returns the hidden states after the last block, `[rows, tokens, hidden]`.

        Raises:
            BadTensor: if the shape or type is not the session's.
            TooLong: if a row would hold more than `max_tokens`.
            ShoalError: what a server answered, when others could not take over.
        """
        hidden = inputs
        if inputs.dim() == 2 and not inputs.is_floating_point():
            if self.embed is None:
                raise BadTensor("this session does not start at the first block, so it takes hidden states only")
            hidden = self.embed(inputs)
        if hidden.dim() != 3 or hidden.shape[0] != self.rows:
            raise BadTensor(f"step takes [{self.rows}, tokens, hidden], got {list(hidden.shape)}")
        tokens = hidden.shape[1]
        packed = self.step_packed(hidden.reshape(-1, hidden.shape[-1]), (tokens,) * self.rows)
        return packed.view_as(hidden)

    def step_packed(
        self, hidden: torch.Tensor, lengths: Sequence[int], needed: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send ragged rows `[tokens, hidden]`, row after row with these lengths, through all blocks.

        `needed` says how many of each row's last outputs are wanted, None that all are. What servers hold of the prompt
        already is not sent then, and its outputs are zero.

        Raises: as `step`.
        """
        self._check_step(hidden, lengths)
        if needed is not None and any(self._pipeline.cached) and not any(self.positions):
            known = zip(self._pipeline.cached, lengths, needed, strict=True)
            skipped = [max(0, min(cached, length - max(1, wanted))) for cached, length, wanted in known]
            if any(skipped):
                return self._step_rest(hidden, lengths, skipped)
        step = self._pipeline.step(hidden.detach(), tuple(lengths), self._sources, self._kept)
        output = self.connection.run(step)
        self._sources, self._kept = (), None
        return output

    def _step_rest(self, hidden: torch.Tensor, lengths: Sequence[int], skipped: Sequence[int]) -> torch.Tensor:
        rows = list(torch.split(hidden, list(lengths)))
        known = torch.cat([row[:count] for row, count in zip(rows, skipped, strict=True)])
        if not self.connection.run(self._pipeline.adopt(known.detach(), tuple(skipped))):
            return self.step_packed(hidden, lengths)
        rest = [length - count for length, count in zip(lengths, skipped, strict=True)]
        packed = self.step_packed(torch.cat([row[count:] for row, count in zip(rows, skipped, strict=True)]), rest)
        output = torch.zeros_like(hidden)
        ends = torch.tensor(list(lengths)).cumsum(0).tolist()
        cells = [torch.arange(end - new, end) for end, new in zip(ends, rest, strict=True)]
        output[torch.cat(cells)] = packed
        return output

    def reorder(self, sources: Sequence[int]) -> None:
        """Make each row go on from the tokens of the row of `sources`; done along with the next step.

        Raises:
            InvalidRequest: if `sources` does not name a row for each row.
        """
        self._check_open()
        if len(sources) != self.rows or any(not 0 <= source < self.rows for source in sources):
            raise InvalidRequest(f"sources must name one of the {self.rows} rows for each of them, got {list(sources)}")
        self._sources = tuple(self._sources[source] if self._sources else source for source in sources)
        if self._kept is not None:
            self._kept = tuple(self._kept[source] for source in sources)

    def cut(self, kept: Sequence[int]) -> None:
        """Make each row forget all but its first `kept` tokens; done along with the next step.

        Raises:
            InvalidRequest: if a row does not hold that many.
        """
        self._check_open()
        self._kept = self._checked(kept)

    def _checked(self, positions: Sequence[int]) -> tuple[int, ...]:
        wanted = tuple(positions)
        if len(wanted) != self.rows or any(not 0 <= n <= held for n, held in zip(wanted, self.positions, strict=True)):
            raise InvalidRequest(f"rows hold {self.positions} tokens and cannot be rolled back to {wanted}")
        return wanted

    def roll_back(self, positions: Sequence[int]) -> None:
        """Make each row forget all but its first `positions` tokens, on all servers and in the journal.

        Raises:
            InvalidRequest: if a row does not hold that many.
        """
        self._check_open()
        wanted = self._checked(positions)
        if self._sources or self._kept is not None:
            self._kept = wanted
        elif wanted != self.positions:
            self.connection.run(self._pipeline.roll_back(wanted))

    def open(self, prompt_tokens: int = 1, prefixes: Sequence[Sequence[bytes]] = ()) -> Self:
        """Open the session on its servers now instead of at the first step.

        `prefixes` name the pages that each row begins with; see `page_chains`.

        Raises:
            NoRoute, CacheFull, ...: when the time for opening is over.
        """
        self._pipeline.prompt_tokens = prompt_tokens
        self._pipeline.prefixes = [list(chain) for chain in prefixes]
        self.connection.run(self._pipeline.open())
        return self

    def _check_open(self) -> None:
        if self._closed:
            raise SessionLost("the session is closed; open a new one")

    def _check_step(self, hidden: torch.Tensor, lengths: Sequence[int]) -> None:
        self._check_open()
        expected = (self.connection.hidden_size, self.connection.dtype)
        if hidden.dim() != 2 or (hidden.shape[-1], hidden.dtype) != expected:
            raise BadTensor(
                f"hidden states must be [tokens, {expected[0]}] of {expected[1]}, "
                f"got {list(hidden.shape)} of {hidden.dtype}"
            )
        if len(lengths) != self.rows or sum(lengths) != hidden.shape[0] or hidden.shape[0] == 0:
            raise InvalidRequest(
                f"{len(lengths)} rows of {sum(lengths)} tokens do not fit {hidden.shape[0]} hidden states"
            )
        held, new = max(zip(self.positions, lengths, strict=True), key=sum)
        if held + new > self.max_tokens:
            raise TooLong(
                f"a row holds {held} tokens and {new} more would make {held + new}, the session was opened for "
                f"{self.max_tokens}: open it with a larger max_tokens",
                prefix=str(held),
                new=str(new),
                limit=str(self.max_tokens),
            )

    def close(self) -> None:
        """Free the session on all servers and wait for their answer, at most two seconds."""
        if not self._closed:
            self._closed = True
            self.connection.finish(self._pipeline.close())

    def __enter__(self) -> Self:
        self._outer = _ACTIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            _ACTIVE.reset(self._outer)
            self._outer = None
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self.connection.abandon(self._pipeline.close())
