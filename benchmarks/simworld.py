"""A swarm with a virtual clock: servers that come, move and crash, a stale picture of them, sessions that need routes.

What decides is what decides in production: `shoal.swarm.routing` routes sessions on the picture that a client would
have, `services.router.domain` plans, and advances plans by what servers report. Only time, links and servers are made
up. Everything is drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

from services.router.domain.plans import Plan, PlanState, Report, ReportState, advance, untold
from shoal.swarm.costs import RouteRequest
from shoal.swarm.routing import MissingBlocks, Route, plan_route, predict
from shoal.swarm.snapshot import Capacity, Load, ModelKey, Server, ServerState, Signed, Speed, SwarmSnapshot
from shoal.swarm.spans import Span

MODEL = ModelKey("simulated", b"s" * 32, "bf16")
LEASE_S = 15.0
HEARTBEAT_S = 5.0
LOAD_S_PER_BLOCK = 2.0
CACHE_TOKENS = 16_384
# A row more in a batch makes a step longer by this part.
_BATCH_SLOPE = 0.05
_NEIGHBOURS = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a swarm is, and how restless.

    `life_s` is the mean time that a server stays, `away_s` until it or another comes for it; `stale_s` the age of the
    picture that clients have; `lost` the share of heartbeats that do not come; `sessions_per_s` those that begin;
    `compared` the share of routes that are compared with the best.
    """

    name: str
    servers: int
    blocks: int
    life_s: float
    away_s: float = 120.0
    stale_s: float = 1.0
    lost: float = 0.02
    sessions_per_s: float = 0.5
    prompt_tokens: int = 128
    new_tokens: int = 128
    compared: float = 1.0


@dataclass(slots=True)
class Machine:
    """A server as it really is. `until_s` is when it crashes, or comes back; `ready_s` when what it loads is loaded."""

    server: Server
    place: tuple[float, float]
    alive: bool
    until_s: float
    ready_s: float = 0.0
    next_span: Span | None = None
    sessions: int = 0
    heard: Server | None = None
    heard_s: float = -math.inf


@dataclass(slots=True)
class Session:
    """A generation: how many tokens are left, on which route, at which speed."""

    place: tuple[float, float]
    left: float
    route: Route | None = None
    step_s: float = 0.0
    busy_until_s: float = 0.0
    banned: dict[str, float] = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(slots=True)
class Count:
    """What came of it. `gap_s` is block-seconds without a server; `quality` route costs over the best there was."""

    tokens: float = 0.0
    begun: int = 0
    done: int = 0
    failed: int = 0
    gap_s: float = 0.0
    block_s: float = 0.0
    moves: int = 0
    quality: list[float] = field(default_factory=list)
    plans: dict[str, int] = field(default_factory=dict)


class World:
    """The swarm itself. `tick` lets time pass."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """Fill the swarm."""
        self.shape = shape
        self.now_s = 0.0
        self.count = Count()
        # One for each matter, so that what is planned does not change who comes and goes, and when.
        self._random, self._life, self._arrivals = (
            random.Random(f"{shape.name} {seed} {matter}") for matter in ("swarm", "life", "arrivals")
        )
        self._number = 0
        self.machines: dict[str, Machine] = {}
        self.sessions: list[Session] = []
        self._pictures: list[tuple[float, SwarmSnapshot]] = []
        self.plan: Plan | None = None
        self._told: dict[str, tuple[str, Span]] = {}
        # Who came first holds its blocks still: owners choose when they come.
        self._holders = [0] * shape.blocks
        for _ in range(shape.servers):
            self._join()

    @property
    def picture(self) -> SwarmSnapshot:
        """What clients and the router know: the last picture that is old enough."""
        old = [picture for at_s, picture in self._pictures if at_s <= self.now_s - self.shape.stale_s]
        return old[-1] if old else SwarmSnapshot(partial=True)

    def truth(self) -> SwarmSnapshot:
        """The swarm as it is."""
        alive = [machine.server for machine in self.machines.values() if machine.alive]
        return SwarmSnapshot.of([self._loaded(server) for server in alive], epoch="truth")

    def tick(self, step_s: float) -> None:
        """Let `step_s` seconds pass."""
        self.now_s += step_s
        self._live()
        self._hear()
        self._drive()
        self._begin_sessions(step_s)
        for session in self.sessions:
            self._generate(session, step_s)
        self.sessions = [session for session in self.sessions if session.left > 0]
        self._measure(step_s)

    def _join(self) -> None:
        rng, shape = self._random, self.shape
        self._number += 1
        server_id = f"s{self._number:05d}"
        held = min(shape.blocks, rng.randint(max(1, shape.blocks // 8), max(2, shape.blocks // 3)))
        first = self._fewest(held)
        block_s = 0.002 * rng.lognormvariate(0.0, 0.5)
        place = (rng.uniform(0, 0.05), rng.uniform(0, 0.05))
        some = rng.sample(list(self.machines.values()), min(len(self.machines), 10 * _NEIGHBOURS))
        near = sorted(some, key=lambda other: math.dist(other.place, place))[:_NEIGHBOURS]
        rtts = {other.server.server_id: 0.001 + 2 * math.dist(other.place, place) for other in near}
        server = Server(
            server_id,
            "",
            b"",
            MODEL,
            shape.blocks,
            Span(first, first + held),
            (b"h" * 32,) * held,
            ServerState.ONLINE,
            Capacity(CACHE_TOKENS * held, 4096, 8, 256),
            Speed(block_s, block_s / 20, 0.001, 50_000_000),
            Load(CACHE_TOKENS * held),
            Signed(b"", server_id, b""),
            rtts_s=MappingProxyType(rtts),
        )
        self.machines[server_id] = Machine(server, place, True, self._lifetime())

    def _fewest(self, held: int) -> int:
        """Return where a window of blocks begins that the fewest servers hold, as owners choose who come and stay."""
        totals = list(accumulate(self._holders, initial=0))
        sums = [totals[first + held] - totals[first] for first in range(self.shape.blocks - held + 1)]
        least = min(sums)
        first = self._random.choice([first for first, total in enumerate(sums) if total == least])
        for block in range(first, first + held):
            self._holders[block] += 1
        return first

    def _lifetime(self) -> float:
        return self.now_s + self._life.expovariate(1 / self.shape.life_s)

    def _live(self) -> None:
        for machine in list(self.machines.values()):
            if machine.alive and machine.ready_s and machine.ready_s <= self.now_s:
                self._finish_load(machine)
            if machine.until_s > self.now_s:
                continue
            if machine.alive:
                machine.alive, machine.ready_s = False, 0.0
                machine.until_s = self.now_s + self._life.expovariate(1 / self.shape.away_s)
            else:
                machine.alive, machine.until_s = True, self._lifetime()
                machine.ready_s = self.now_s + LOAD_S_PER_BLOCK * len(machine.server.span)
                machine.next_span = machine.server.span
                machine.server = replace(machine.server, state=ServerState.JOINING)

    def _finish_load(self, machine: Machine) -> None:
        span = machine.next_span or machine.server.span
        machine.server = replace(
            machine.server, span=span, block_hashes=(b"h" * 32,) * len(span), state=ServerState.ONLINE
        )
        machine.ready_s, machine.next_span = 0.0, None

    def _hear(self) -> None:
        """Take heartbeats, and make a picture of the leases that last."""
        for machine in self.machines.values():
            due = self.now_s - machine.heard_s >= HEARTBEAT_S or machine.heard is not machine.server
            if machine.alive and due and self._random.random() >= self.shape.lost:
                machine.heard, machine.heard_s = machine.server, self.now_s
        known = [
            self._loaded(machine.heard)
            for machine in self.machines.values()
            if machine.heard is not None and self.now_s - machine.heard_s < LEASE_S
        ]
        picture = SwarmSnapshot.of(known, len(self._pictures), "simulated")
        kept = [entry for entry in self._pictures if entry[0] > self.now_s - self.shape.stale_s - 5]
        self._pictures = [*kept, (self.now_s, picture)]

    def _loaded(self, server: Server) -> Server:
        sessions = self.machines[server.server_id].sessions
        used = sessions * (self.shape.prompt_tokens + self.shape.new_tokens) * len(server.span)
        queue_s = server.speed.decode_block_s * len(server.span) * _BATCH_SLOPE * sessions
        free = max(0, server.capacity.cache_token_blocks - used)
        return replace(server, load=Load(free, sessions, 0, queue_s))

    def _drive(self) -> None:
        """Advance the plan as the router's driver does; servers obey at once and take the time that loading takes."""
        if self.plan is None or self.plan.state is not PlanState.APPLYING:
            return
        reports = {directive_id: Report(ReportState.RUNNING) for directive_id in self._told}
        self.plan = advance(self.plan, reports, self.picture, self.now_s)
        for move in untold(self.plan, reports):
            machine = self.machines[move.server_id]
            if machine.alive and move.after is not None:
                self._told[move.directive_id] = (move.server_id, move.after)
                loads = len(set(move.after.blocks()) - set(machine.server.span.blocks()))
                machine.next_span, machine.ready_s = move.after, self.now_s + max(LOAD_S_PER_BLOCK * loads, 0.1)
                self.count.moves += 1
        if self.plan.state.ended:
            state = self.plan.state.value
            self.count.plans[state] = self.count.plans.get(state, 0) + 1
            self._told = {}

    def _begin_sessions(self, step_s: float) -> None:
        expected = self.shape.sessions_per_s * step_s
        for _ in range(int(expected) + (self._arrivals.random() < expected % 1)):
            place = (self._arrivals.uniform(0, 0.05), self._arrivals.uniform(0, 0.05))
            self.sessions.append(Session(place, self.shape.new_tokens))
            self.count.begun += 1

    def _generate(self, session: Session, step_s: float) -> None:
        if session.route is not None and any(self._lost(hop.server.server_id, hop.span) for hop in session.route.hops):
            self._release(session)
        if session.route is None:
            self._find_route(session)
        if session.route is None:
            session.waited_s += step_s
            if session.waited_s > 60.0:
                self.count.failed += 1
                session.left = 0
            return
        from_s = max(self.now_s - step_s, session.busy_until_s)
        tokens = min(session.left, max(0.0, self.now_s - from_s) / session.step_s)
        session.left -= tokens
        self.count.tokens += tokens
        if session.left <= 0:
            self._release(session)
            self.count.done += 1

    def _lost(self, server_id: str, span: Span) -> bool:
        machine = self.machines[server_id]
        held = machine.server.span
        return not machine.alive or not (held.start <= span.start and span.end <= held.end)

    def _release(self, session: Session) -> None:
        for hop in session.route.hops if session.route else ():
            self.machines[hop.server.server_id].sessions -= 1
        session.route = None

    def _find_route(self, session: Session) -> None:
        """Route on the stale picture; a server that turns out to be gone is banned for a while, as clients do."""
        session.banned = {key: until_s for key, until_s in session.banned.items() if until_s > self.now_s}
        for _ in range(3):
            found = plan_route(self.picture, self.request(session))
            if isinstance(found, MissingBlocks):
                return
            gone = [hop.server.server_id for hop in found[0].hops if self._lost(hop.server.server_id, hop.span)]
            if gone:
                session.banned |= dict.fromkeys(gone, self.now_s + 5.0)
                continue
            self._take(session, found[0])
            return

    def _take(self, session: Session, route: Route) -> None:
        truth = {machine.server.server_id: self._loaded(machine.server) for machine in self._machines_of(route)}
        request = self.request(session)
        real = predict(request, [replace(hop, server=truth[hop.server.server_id]) for hop in route.hops])
        if self._random.random() < self.shape.compared:
            best = plan_route(self.truth(), replace(request, blocked=frozenset()))
            if not isinstance(best, MissingBlocks):
                self.count.quality.append(real.decode_s / best[0].decode_s)
        session.route, session.step_s, session.waited_s = route, real.decode_s, 0.0
        session.busy_until_s = self.now_s + real.prefill_s
        for machine in self._machines_of(route):
            machine.sessions += 1

    def _machines_of(self, route: Route) -> Iterable[Machine]:
        return [self.machines[hop.server.server_id] for hop in route.hops]

    def request(self, session: Session) -> RouteRequest:
        """Return what a session's client asks."""
        rtts = {
            key: 0.002 + 2 * math.dist(machine.place, session.place)
            for key, machine in self.machines.items()
            if machine.alive
        }
        return RouteRequest(
            MODEL,
            Span(0, self.shape.blocks),
            prompt_tokens=self.shape.prompt_tokens,
            max_tokens=self.shape.prompt_tokens + self.shape.new_tokens,
            blocked=frozenset(session.banned),
            rtts_s=MappingProxyType(rtts),
            pushed=True,
        )

    def _measure(self, step_s: float) -> None:
        served = [0] * self.shape.blocks
        for machine in self.machines.values():
            if machine.alive and machine.server.state is ServerState.ONLINE:
                for block in machine.server.span.blocks():
                    served[block] += 1
        gaps = served.count(0) * step_s
        self.count.gap_s += gaps
        self.count.block_s += self.shape.blocks * step_s
