"""Directives for servers: taken from callers, handed to announce streams, followed until they have ended.

Each registry keeps a copy of what has not ended and looks for changes all the time, so the one that holds a server's
stream delivers what was given to another. A server hears of a directive with its next heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from services.registry.domain.leaving import orphans
from services.registry.hub import SwarmHub
from services.registry.store_directives import ENDED, Board, RedisDirectives
from shoal.swarm.coverage import spell_blocks
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import from_timestamp, now_s, to_timestamp
from shoal.wire.errors import Contended, InvalidRequest, NotFound, PreconditionFailed, Unavailable
from shoal.wire.logs import get_logger

MOST_DIRECTIVES = 1000
MOST_ID_CHARACTERS = 256
MOST_MESSAGE_CHARACTERS = 500
# An operator's directive waits so long for its server.
OPERATORS_S = 3600.0
_TRIES = 5


class DirectiveDesk:
    """Gives and follows directives. `run` keeps the copy of what has not ended up to date."""

    def __init__(self, store: RedisDirectives, hub: SwarmHub, poll_s: float, lease_ttl_s: float) -> None:
        self._store = store
        self._hub = hub
        self._poll_s = poll_s
        self._lease_ttl_s = lease_ttl_s
        self._board = Board()
        self._by_server: dict[str, list[pb.DirectiveEntry]] = {}
        self._log = get_logger("services.registry.directives")

    async def run(self) -> None:
        """Look for changes for ever; the store's absence is waited out."""
        while True:
            try:
                await self.refresh()
                await self._expire()
            except Unavailable:
                self._log.debug("directives.away")
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> None:
        """Read what has not ended.

        Raises:
            Unavailable: if the store does not answer; the last copy stays.
        """
        board = await self._store.board()
        if board.version == self._board.version and len(board.live) == len(self._board.live):
            return
        by_server: dict[str, list[pb.DirectiveEntry]] = {}
        for entry in board.live:
            by_server.setdefault(entry.server_id, []).append(entry)
        self._board, self._by_server = board, by_server

    def of_server(self, server_id: str, sent: Collection[str]) -> list[pb.Directive]:
        """Return the directives that a server is to hear of, oldest first, but those in `sent`."""
        return [
            entry.directive for entry in self._by_server.get(server_id, ()) if entry.directive.directive_id not in sent
        ]

    async def take_reports(self, server_id: str, reports: Iterable[pb.DirectiveReport]) -> None:
        """Note what a server says about its directives; what cannot be noted now, it says again."""
        known = {entry.directive.directive_id: entry.report for entry in self._by_server.get(server_id, ())}
        for report in list(reports)[:MOST_DIRECTIVES]:
            report.message = report.message[:MOST_MESSAGE_CHARACTERS]
            if known.get(report.directive_id) == report:
                continue
            try:
                # One that counted as expired was taken in time after all.
                noted = await self._store.report(server_id, report, revive=report.state not in ENDED)
            except Unavailable as error:
                self._log.warning("report.lost", server_id=server_id, reason=error.message)
                return
            if noted and report.state in ENDED:
                name = pb.DirectiveState.Name(report.state)
                self._log.info("directive.ended", directive_id=report.directive_id, state=name, says=report.message)

    async def give(self, wanted: Sequence[pb.DirectiveFor]) -> list[pb.DirectiveEntry]:
        """Keep directives, all or none, and return them as they are kept, in the order given.

        Raises:
            InvalidRequest: if one is not whole, an id appears twice, or there are too many.
            NotFound: if a server has no lease.
            AlreadyExists: if an id is known with other content.
        """
        _check(wanted)
        known = {entry.directive.directive_id for entry in await self._store.of_ids(_ids(wanted))}
        for one in wanted:
            if one.directive.directive_id not in known:
                self._server_must_be_there(one.server_id)
        await self._store.put(wanted)
        return await self._kept(wanted)

    async def give_leaving(self, one: pb.DirectiveFor, *, force: bool) -> pb.DirectiveEntry:
        """Keep an operator's directive to drain or to pause a server.

        Raises:
            PreconditionFailed: if blocks would be left to nobody, others that leave counted in, unless `force`.
            InvalidRequest, NotFound, AlreadyExists: as `give`.
        """
        one.directive.expires_at.CopyFrom(to_timestamp(now_s() + OPERATORS_S))
        _check([one])
        for _ in range(_TRIES):
            if await self._store.of_ids([one.directive.directive_id]):
                break
            self._server_must_be_there(one.server_id)
            board = await self._store.board()
            if not force:
                self._check_orphans(one.server_id, board)
            try:
                await self._store.put([one], board.version)
                break
            except Contended:
                continue
        await self._store.put([one])
        return (await self._kept([one]))[0]

    async def find(self, request: pb.GetDirectivesRequest) -> list[pb.DirectiveEntry]:
        """Return directives by ids, server or plan.

        Raises:
            InvalidRequest: if none of them is given, or too many ids.
        """
        if len(request.directive_ids) > MOST_DIRECTIVES:
            raise InvalidRequest(f"at most {MOST_DIRECTIVES} ids can be asked for, got {len(request.directive_ids)}")
        if request.directive_ids:
            found = await self._store.of_ids(request.directive_ids)
        elif request.plan_id:
            found = await self._store.of_plan(request.plan_id)
        elif request.server_id:
            found = await self._store.of_server(request.server_id)
        else:
            raise InvalidRequest("name directives, a server or a plan")
        return [
            entry
            for entry in found
            if request.server_id in ("", entry.server_id) and request.plan_id in ("", entry.directive.plan_id)
        ]

    def _server_must_be_there(self, server_id: str) -> None:
        if server_id not in self._hub.snapshot.servers:
            raise NotFound(f"there is no server {server_id!r}; `shoal server list` shows those that are there")

    def _check_orphans(self, server_id: str, board: Board) -> None:
        if self._hub.partial:
            raise PreconditionFailed("servers may be missing in the registry's picture now; try again in a minute")
        orders = ("drain", "pause")
        leaving = {one.server_id for one in board.live if one.directive.WhichOneof("order") in orders}
        if left := orphans(self._hub.snapshot, server_id, leaving):
            raise PreconditionFailed(
                f"without server {server_id} nobody would serve blocks {spell_blocks(left)}: start another server for "
                "them first, or force it"
            )

    async def _kept(self, wanted: Sequence[pb.DirectiveFor]) -> list[pb.DirectiveEntry]:
        await self.refresh()
        kept = {entry.directive.directive_id: entry for entry in await self._store.of_ids(_ids(wanted))}
        missing = [key for key in _ids(wanted) if key not in kept]
        if missing:
            raise Unavailable("the store lost the directives as they were given; give them again")
        return [kept[key] for key in _ids(wanted)]

    async def _expire(self) -> None:
        """End what no server took in time, a lease later: a report may be under way."""
        late_s = now_s() - self._lease_ttl_s
        for entry in self._board.live:
            pending = entry.report.state == pb.DIRECTIVE_STATE_PENDING
            if pending and from_timestamp(entry.directive.expires_at) < late_s:
                report = pb.DirectiveReport(
                    directive_id=entry.directive.directive_id,
                    state=pb.DIRECTIVE_STATE_EXPIRED,
                    message="the server did not take it in time",
                )
                await self._store.report(entry.server_id, report)


def _ids(wanted: Sequence[pb.DirectiveFor]) -> list[str]:
    return [one.directive.directive_id for one in wanted]


def _check(wanted: Sequence[pb.DirectiveFor]) -> None:
    if not 1 <= len(wanted) <= MOST_DIRECTIVES:
        raise InvalidRequest(f"1 to {MOST_DIRECTIVES} directives can be given at once, got {len(wanted)}")
    if len(set(_ids(wanted))) < len(wanted):
        raise InvalidRequest("two directives have the same id")
    for one in wanted:
        names = (one.directive.directive_id, one.server_id)
        if not all(0 < len(name) <= MOST_ID_CHARACTERS and name.isprintable() for name in names):
            raise InvalidRequest(f"ids of directives and servers have 1 to {MOST_ID_CHARACTERS} printable characters")
        if len(one.directive.plan_id) > MOST_ID_CHARACTERS:
            raise InvalidRequest(f"ids of plans have at most {MOST_ID_CHARACTERS} characters")
        order = one.directive.WhichOneof("order")
        if order is None or not one.directive.HasField("expires_at"):
            raise InvalidRequest(f"directive {one.directive.directive_id} needs an order and a time when it ends")
        if order == "hold_span" and not one.directive.hold_span.span.start < one.directive.hold_span.span.end:
            raise InvalidRequest(f"directive {one.directive.directive_id} names a span without blocks")
