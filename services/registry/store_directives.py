"""Directives in Redis or Valkey: kept all or none, bound to their content, for a day after their end.

Whoever loses the store loses them: who directs gives them again, by the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from services.registry.redis_scripts import RedisScripts
from shoal.v1 import registry_pb2 as pb
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import AlreadyExists, Contended

KEY_PREFIX = "shoal:registry:v1:{directives}:"
KEY_NAMES = ("version", "entries", "digests", "owners", "reports", "live", "ended")
KEPT_S = 86_400
# Sets of ids outlive what they name: an id whose directive is gone is passed over.
_INDEX_KEPT_S = 2 * KEPT_S
ENDED = frozenset({pb.DIRECTIVE_STATE_DONE, pb.DIRECTIVE_STATE_FAILED, pb.DIRECTIVE_STATE_EXPIRED})


@dataclass(frozen=True, slots=True)
class Board:
    """Directives that have not ended, oldest first, at a version that grows with each change."""

    version: int = -1
    live: tuple[pb.DirectiveEntry, ...] = ()


class RedisDirectives:
    """Directives on a Redis client that the caller owns. All methods raise Unavailable if it does not answer."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        scripts = RedisScripts(client, [KEY_PREFIX + name for name in KEY_NAMES])
        self._run = scripts.run
        self._put, self._report, self._find = (scripts.load(f"directives/{name}") for name in ("put", "report", "find"))

    async def board(self) -> Board:
        """Return what has not ended."""
        version, entries = await self._found(["live"])
        return Board(version, tuple(entries))

    async def put(self, wanted: Sequence[pb.DirectiveFor], version: int = -1) -> None:
        """Keep directives that are new; those that are known stay as they are.

        Raises:
            AlreadyExists: if an id is taken by other content; nothing is kept then.
            Contended: if the version is given and not the present one.
        """
        arguments: list[Any] = [version, KEY_PREFIX, _INDEX_KEPT_S]
        for one in wanted:
            entry = pb.DirectiveEntry(
                server_id=one.server_id, directive=one.directive, created_at=to_timestamp(now_s())
            )
            directive = one.directive
            arguments += [directive.directive_id, one.server_id, directive.plan_id, _digest(one)]
            arguments.append(entry.SerializeToString())
        answer = await self._run(self._put, arguments)
        match answer[0].decode():
            case "changed":
                raise Contended("directives were given at the same time by somebody else; try again")
            case "taken":
                raise AlreadyExists(f"directive {answer[1].decode()} is known with another server or order")

    async def report(self, server_id: str, report: pb.DirectiveReport, *, revive: bool = False) -> bool:
        """Note a report; tell whether there was such a directive, and it had not ended (or may be revived)."""
        stamped = pb.DirectiveEntry(report=report, updated_at=to_timestamp(now_s())).SerializeToString()
        ended = int(report.state in ENDED)
        arguments = [server_id, report.directive_id, stamped, ended, int(now_s()), int(revive)]
        return bool(await self._run(self._report, arguments))

    async def of_ids(self, ids: Iterable[str]) -> list[pb.DirectiveEntry]:
        """Return those of these ids that are known, ordered by id."""
        return _by_id((await self._found(["ids", *ids]))[1])

    async def of_server(self, server_id: str) -> list[pb.DirectiveEntry]:
        """Return those of a server, ordered by id."""
        return _by_id((await self._found(["set", f"{KEY_PREFIX}server:{server_id}"]))[1])

    async def of_plan(self, plan_id: str) -> list[pb.DirectiveEntry]:
        """Return those of a plan, ordered by id."""
        return _by_id((await self._found(["set", f"{KEY_PREFIX}plan:{plan_id}"]))[1])

    async def _found(self, which: Sequence[str]) -> tuple[int, list[pb.DirectiveEntry]]:
        version, *flat = await self._run(self._find, [int(now_s()) - KEPT_S, *which])
        entries = [_entry(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
        entries.sort(key=lambda entry: (entry.created_at.ToNanoseconds(), entry.directive.directive_id))
        return int(version), entries


def _entry(encoded: bytes, report: bytes) -> pb.DirectiveEntry:
    entry = pb.DirectiveEntry.FromString(encoded)
    if report:
        entry.MergeFromString(report)
    else:
        entry.report.directive_id = entry.directive.directive_id
        entry.report.state = pb.DIRECTIVE_STATE_PENDING
    return entry


def _by_id(entries: list[pb.DirectiveEntry]) -> list[pb.DirectiveEntry]:
    return sorted(entries, key=lambda entry: entry.directive.directive_id)


def _digest(one: pb.DirectiveFor) -> str:
    """Return the SHA-256 of what a directive is: all but when its time is over, which only the first giving sets."""
    content = pb.DirectiveFor()
    content.CopyFrom(one)
    content.directive.ClearField("expires_at")
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()
