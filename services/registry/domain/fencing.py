"""Which of several announcements of one server counts: the newest record, and then the newest stream.

A server's own stream counts before a record that was adopted on its behalf: it knows more, and renews the lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.wire.errors import AlreadyExists, LeaseExpired, NotPermitted, ShoalError

NEW_STREAM = 0
# The stream of a lease that was adopted: there is none.
ADOPTED_STREAM = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a stream says: this server, with this record, is here.

    `stream` orders the streams of a server by age, `NEW_STREAM` before the store has given it a number. `entry` is
    the encoded `ServerEntry` to show to others. `adopted`: the record came another way than on a stream of the server.
    """

    server_id: str
    sequence: int
    account: str
    stream: int
    entry: bytes
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lease now."""

    sequence: int
    account: str
    stream: int

    @property
    def adopted(self) -> bool:
        """Tell whether no stream holds the lease."""
        return self.stream == ADOPTED_STREAM


class Verdict(StrEnum):
    """What becomes of a claim."""

    GRANTED = "granted"
    OLD_RECORD = "old record"
    OLD_STREAM = "old stream"
    OTHER_ACCOUNT = "other account"
    HELD = "held"


def judge(claim: Claim, holder: Holder | None) -> Verdict:
    """Decide a claim. The Lua script of the Redis store decides by the same rules; one test suite holds for both.

    A greater sequence proves possession of the server's key, so it wins over any account. An equal one may be a copy
    that somebody else has read, so only the account that holds the lease may use it on another stream. A stream that
    held the lease before it was adopted takes it back with the record that it began with.
    """
    if holder is None:
        return Verdict.GRANTED
    if claim.adopted and not holder.adopted:
        return Verdict.HELD
    takes_back = holder.adopted and not claim.adopted and claim.stream != NEW_STREAM
    if claim.sequence < holder.sequence and not takes_back:
        return Verdict.OLD_RECORD
    if claim.stream != NEW_STREAM and claim.stream < holder.stream:
        return Verdict.OLD_STREAM
    if claim.sequence == holder.sequence and claim.account != holder.account:
        return Verdict.OTHER_ACCOUNT
    return Verdict.GRANTED


def stream_number(claim: Claim, holder: Holder | None, now_us: int) -> int:
    """Return the number of the claim's stream: greater than any that the server had before."""
    if claim.adopted:
        return ADOPTED_STREAM
    if claim.stream != NEW_STREAM:
        return claim.stream
    return max(now_us, holder.stream + 1 if holder else 0)


def refusal(verdict: Verdict, claim: Claim) -> ShoalError:
    """Return the error that tells the server why its claim was refused, and what to do."""
    server = f"server {claim.server_id}"
    if verdict is Verdict.OLD_RECORD:
        return LeaseExpired(
            f"{server} has announced a newer record than sequence {claim.sequence}; sign one with a greater sequence"
        )
    if verdict is Verdict.OLD_STREAM:
        return AlreadyExists(
            f"{server} announces itself on a newer stream, so this one ends; two processes need a key each"
        )
    if verdict is Verdict.HELD:
        return AlreadyExists(f"{server} holds its lease itself; nothing needs to be adopted")
    return NotPermitted(
        f"{server} is announced by another account with the same record; sign a record with a greater sequence"
    )
