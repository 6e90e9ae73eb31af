"""What the planner of placement takes and gives: candidates, requests, moves, placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.swarm.costs import DEFAULT_RTT_S
from shoal.swarm.flow import FlowServer
from shoal.swarm.snapshot import Server, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span

DEFAULT_BLOCK_S = 0.01
DEFAULT_LOAD_S_PER_BLOCK = 1.0

Spans = Mapping[str, Span | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server as the planner sees it.

    Attributes:
        span: what it holds, or is loading; None if nothing.
        max_blocks: how many blocks it can hold at once.
        block_s: time of one block for a row of a step; `step_s` is the fixed time of a step.
        cache_token_blocks: cache in use, which it loses with the blocks that it leaves.
        can_hold: whether it can be told to hold another span.
        pinned: its owner has chosen its span.
        whole_only: it holds the whole model or nothing, and computes nothing less.
        load_s_per_block: time to load one block.
        serving: whether its span can be used now; one that is still loading counts for the plan, not for coverage.
    """

    server_id: str
    span: Span | None
    max_blocks: int
    block_s: float
    step_s: float = 0.0
    cache_token_blocks: int = 0
    can_hold: bool = True
    pinned: bool = False
    whole_only: bool = False
    load_s_per_block: float = DEFAULT_LOAD_S_PER_BLOCK
    numeric_class: str = ""
    serving: bool = True

    @property
    def movable(self) -> bool:
        """Whether the planner may give it another span."""
        return self.can_hold and not self.pinned

    def rate(self, blocks: int) -> float:
        """Return how many blocks of rows it computes per second when it computes `blocks` of them in a step."""
        return blocks / max(blocks * self.block_s + self.step_s, 1e-7 * blocks)

    def flow_server(self, span: Span) -> FlowServer:
        """Return the server for `shoal.swarm.flow` as if it held `span`."""
        return FlowServer(self.server_id, span, self.block_s, self.step_s, self.whole_only)


@dataclass(frozen=True, slots=True)
class MoveCost:
    """How moves are weighed against what they bring. The unit is rows of a step that the swarm computes.

    A gain in throughput counts for `horizon_s`. A move costs what the server would have computed while it loads
    (times `load`) and what it takes to compute lost cache again (times `cache`). A plan that gains less than
    `least_gain` of today's throughput and closes no hole is not worth it. Throughput is traded against latency as
    throughput / latency ** `latency`, when it is asked whether a slow server should be used at all.
    """

    horizon_s: float = 3600.0
    load: float = 1.0
    cache: float = 1.0
    least_gain: float = 0.02
    latency: float = 0.2


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What to plan: one model of `num_blocks` blocks and its servers.

    Attributes:
        links: round-trip times in seconds between two servers; `default_rtt_s` where none is known.
        demand: how much this model's throughput counts; 1 is normal.
        seed: of the search; the same request gives the same plan.
        evaluations: how many changes of the layout are looked at.
        programs: how many linear programs are solved; a large one counts as several.
        partial: whether servers may be missing from `candidates`; nothing is moved then.
        mix_classes: whether a route may use servers of different numeric classes. If not, each class is planned as
            a swarm of its own, and throughputs add up.
    """

    num_blocks: int
    candidates: Sequence[Candidate]
    links: Mapping[tuple[str, str], float] = field(default_factory=lambda: MappingProxyType({}))
    default_rtt_s: float = DEFAULT_RTT_S
    demand: float = 1.0
    move_cost: MoveCost = MoveCost()
    seed: int = 0
    evaluations: int = 60_000
    programs: int = 40
    partial: bool = False
    mix_classes: bool = True

    def rtt_s(self, one: str, other: str) -> float:
        """Return the round-trip time between two servers."""
        return self.links.get((one, other), self.links.get((other, one), self.default_rtt_s))


@dataclass(frozen=True, slots=True)
class Move:
    """One server's change of span; None is no span."""

    server_id: str
    before: Span | None
    after: Span | None

    @property
    def loads(self) -> int:
        """How many blocks the server must load."""
        if self.after is None:
            return 0
        return len(self.after) - (overlap(self.before, self.after) if self.before else 0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where servers should be. `moves` lead there in an order that opens no gap (see `shoal.swarm.moves`).

    Attributes:
        spans: the span of each candidate after the moves.
        steps: the moves; those of one step may run at the same time.
        throughput_before, throughput_after: rows of a step per second.
        latency_before, latency_after: mean time of one row's step over the routes of the flow, in seconds.
        bottleneck: the blocks that limit throughput after the moves; those that nobody holds if there are any.
        missing: the blocks that nobody would hold.
        dropped: moves that would have been better still but cannot be made without a gap.
    """

    spans: Spans
    steps: tuple[tuple[Move, ...], ...]
    throughput_before: float
    throughput_after: float
    latency_before: float
    latency_after: float
    bottleneck: tuple[int, ...]
    missing: tuple[int, ...] = ()
    dropped: tuple[Move, ...] = ()

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves in order."""
        return tuple(move for step in self.steps for move in step)


def overlap(one: Span, other: Span) -> int:
    """Return how many blocks two spans share."""
    return max(0, min(one.end, other.end) - max(one.start, other.start))


def candidates_of(snapshot: SwarmSnapshot, prefix: str) -> list[Candidate]:
    """Return the servers of a model that the planner counts, ordered by id.

    What is about to leave, paused or gone does not count; what is still loading does but is not moved. A server is
    taken to be able to hold as many blocks as it holds. Who knows better replaces fields.
    """
    servers = [snapshot.servers[key] for key in sorted(snapshot.servers)]
    counted = (ServerState.ONLINE, ServerState.JOINING)
    return [_candidate(server) for server in servers if server.model.prefix == prefix and server.state in counted]


def _candidate(server: Server) -> Candidate:
    online = server.state is ServerState.ONLINE
    return Candidate(
        server_id=server.server_id,
        span=server.span,
        max_blocks=len(server.span),
        block_s=server.speed.decode_block_s or DEFAULT_BLOCK_S,
        step_s=server.speed.step_overhead_s,
        cache_token_blocks=max(0, server.capacity.cache_token_blocks - server.load.free_token_blocks),
        can_hold=online,
        numeric_class=server.model.numeric_class,
        serving=online,
    )
