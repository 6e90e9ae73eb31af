"""The order of moves from one layout to another: make before break.

Promises that a block which some server can be used for stays so at every moment, whichever moves of a step are done,
still going on, or failed: a server that moves counts only for the blocks that it holds before and after. Where the
moves block each other, a server is made wider for a while, if it has the room; what cannot be done without a gap is
named and left out. Does not decide where servers should be (`shoal.swarm.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.swarm.layouts import Candidate, Move, Spans
from shoal.swarm.spans import Span

# Moves of one step take at most this share of the servers from their sessions at the same time, and one at least.
_AT_ONCE = 0.25


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Steps of moves; those of a step may run at the same time, the next step begins when all are done.

    `spans` is the layout after all steps. `unsafe` are moves that no order makes without a gap: they are left out.
    """

    steps: tuple[tuple[Move, ...], ...]
    spans: Spans
    unsafe: tuple[Move, ...] = ()


def order_moves(num_blocks: int, candidates: Sequence[Candidate], target: Spans) -> MoveOrder:
    """Order the moves from the candidates' spans to `target` (by server id; who is not named stays).

    Raises:
        ValueError: if `target` gives a span to a server that is not a candidate or cannot be moved.
    """
    known = {one.server_id: one for one in candidates}
    for server_id, span in target.items():
        if server_id not in known:
            raise ValueError(f"{server_id} is no candidate")
        if span != known[server_id].span and not known[server_id].movable:
            raise ValueError(f"{server_id} holds {known[server_id].span} and cannot be moved")
    state = _State(num_blocks, known, target)
    steps: list[tuple[Move, ...]] = []
    while step := state.safe_step() or state.bridge():
        state.make(step)
        steps.append(step)
    return MoveOrder(tuple(steps), dict(state.spans), tuple(state.pending()))


class _State:
    """Where the servers are, and who has been made wider."""

    def __init__(self, num_blocks: int, known: dict[str, Candidate], target: Spans) -> None:
        self._num_blocks = num_blocks
        self._known = known
        self._target = {server_id: target.get(server_id, one.span) for server_id, one in known.items()}
        self._serving = {server_id for server_id, one in known.items() if one.serving}
        self._widened: set[str] = set()
        self._most = max(1, int(len(known) * _AT_ONCE))
        self.spans = {server_id: one.span for server_id, one in known.items()}

    def pending(self) -> list[Move]:
        """Return the moves left: first what closes holes, then what leaves least, last what was made wider."""
        covered = self._covered()
        moves = [
            Move(server_id, self.spans[server_id], span)
            for server_id, span in self._target.items()
            if self.spans[server_id] != span
        ]

        def urgency(move: Move) -> tuple[bool, int, int, str]:
            closes = sum(1 for block in _blocks(move.after) if not covered[block])
            return move.server_id in self._widened, -closes, len(_left(move)), move.server_id

        return sorted(moves, key=urgency)

    def safe_step(self) -> tuple[Move, ...]:
        """Return moves that may be made at once: for all that they leave, somebody who stays is there."""
        covered, step, disturbed = self._covered(), [], 0
        for move in self.pending():
            takes = 1 if move.before and move.server_id in self._serving else 0
            if disturbed + takes > self._most or self._alone(move, covered):
                continue
            if takes:
                disturbed += 1
                for block in _left(move):
                    covered[block] -= 1
            step.append(move)
        return tuple(step)

    def bridge(self) -> tuple[Move, ...]:
        """Return a step in which one server is made wider so that a blocked move becomes safe, or nothing."""
        covered = self._covered()
        found = [
            wider
            for move in self.pending()
            if (needed := self._alone(move, covered))
            for wider in (*self._helpers(move, needed), *self._own_widening(move))
        ]
        if not found:
            return ()
        best = min(found, key=lambda move: (move.loads, move.server_id))
        self._widened.add(best.server_id)
        return (best,)

    def make(self, step: Iterable[Move]) -> None:
        """Follow moves that are done."""
        for move in step:
            self.spans[move.server_id] = move.after
            self._serving.add(move.server_id)

    def _covered(self) -> list[int]:
        covered = [0] * self._num_blocks
        for server_id in self._serving:
            for block in _blocks(self.spans[server_id]):
                covered[block] += 1
        return covered

    def _alone(self, move: Move, covered: Sequence[int]) -> list[int]:
        """Return the blocks that the move would leave to nobody."""
        if move.server_id not in self._serving:
            return []
        return [block for block in _left(move) if covered[block] < 2]

    def _helpers(self, move: Move, needed: Sequence[int]) -> Iterable[Move]:
        """Other servers that can hold the needed blocks beside their own."""
        for server_id, one in self._known.items():
            if server_id != move.server_id and self._may_widen(one):
                span = self.spans[server_id]
                wide = _hull(span, Span(min(needed), max(needed) + 1))
                if len(wide) <= one.max_blocks and wide != span:
                    yield Move(server_id, span, wide)

    def _own_widening(self, move: Move) -> Iterable[Move]:
        """The server itself, holding both places, if that lets another one move."""
        one = self._known[move.server_id]
        if not self._may_widen(one) or move.before is None or move.after is None:
            return
        wide = _hull(move.before, move.after)
        if len(wide) > one.max_blocks or wide in (move.before, move.after):
            return
        covered = self._covered()
        for block in set(wide.blocks()) - set(move.before.blocks()):
            covered[block] += 1
        others = [other for other in self.pending() if other.server_id != move.server_id]
        if any(not self._alone(other, covered) for other in others):
            yield Move(move.server_id, move.before, wide)

    def _may_widen(self, one: Candidate) -> bool:
        return one.movable and not one.whole_only and one.server_id not in self._widened


def _blocks(span: Span | None) -> range:
    return span.blocks() if span else range(0)


def _left(move: Move) -> list[int]:
    after = _blocks(move.after)
    return [block for block in _blocks(move.before) if block not in after]


def _hull(span: Span | None, other: Span) -> Span:
    return Span(min(span.start, other.start), max(span.end, other.end)) if span else other
