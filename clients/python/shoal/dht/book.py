"""Which values of the DHT are believed. Anybody can store anything there, so every value passes here.

Owns the counts of what was refused, by reason, and the newest sequence number seen of each server. Does not read
the DHT and loads no hivemind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError

from shoal.dht.keys import MODELS_KEY, server_key
from shoal.swarm.snapshot import Server
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire.clock import from_timestamp
from shoal.wire.errors import Corrupted, Incompatible, LeaseExpired, NotPermitted, ShoalError
from shoal.wire.records import open_record
from shoal.wire.tokens import KeySet

# Records in the DHT are renewed every few seconds. Those for the registry live for an hour and can be read by every
# member: put into the DHT by somebody else they would outlive their server.
MOST_LIFE_S = 300.0
MOST_KNOWN = 8192

K = TypeVar("K")
V = TypeVar("V")


class Reason(StrEnum):
    """Why a value was refused."""

    MALFORMED = "malformed"
    FORGED = "forged"
    WRONG_KEY = "wrong_key"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    STRANGER = "stranger"
    INCOMPATIBLE = "incompatible"


class Refused(Exception):
    """A value that is not believed."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class RecordBook:
    """Opens records found in the DHT. `rejected` counts refusals by reason.

    `key_set` gives the swarm's newest keys; while it gives None enrolments are not checked, which is right for a node
    that only keeps records for others, never for one that uses them.
    """

    def __init__(self, key_set: Callable[[], KeySet | None]) -> None:
        self._key_set = key_set
        self._opened: OrderedDict[bytes, tuple[Server, float]] = OrderedDict()
        self._newest: OrderedDict[str, int] = OrderedDict()
        self.rejected: Counter[Reason] = Counter()

    def take(self, key: str, entries: Mapping[object, object], now_s: float) -> list[Server]:
        """Return the servers whose records lie under `key` as values by subkey; count those that are refused."""
        found = []
        for subkey, value in entries.items():
            try:
                found.append(self.open(key, subkey, value, now_s))
            except Refused as refused:
                self.rejected[refused.reason] += 1
        return found

    def open(self, key: str, subkey: object, value: object, now_s: float) -> Server:
        """Return what the value under `key` and `subkey` says.

        Raises:
            Refused: if it is not to be believed.
        """
        server = self.check(subkey, value, now_s, key_fits=lambda possible: possible == key)
        if key == MODELS_KEY:
            return server  # says that the model is there; may be older than the server's own entry
        if server.sequence < self._newest.get(server.server_id, 0):
            raise Refused(Reason.REPLAYED, f"a newer record of server {server.server_id} was seen")
        _remember(self._newest, server.server_id, server.sequence)
        return server

    def check(self, subkey: object, value: object, now_s: float, key_fits: Callable[[str], bool]) -> Server:
        """Check all but the sequence number: a node may be asked for older and newer records in any order.

        `key_fits` tells whether the value lies under the given key.

        Raises:
            Refused: if the value is not to be believed.
        """
        if not isinstance(value, bytes) or not isinstance(subkey, str):
            raise Refused(Reason.MALFORMED, "a record is bytes under a text")
        known = self._opened.get(value)
        server, trusted_until_s = known or self._first_opening(value, now_s)
        if server.expires_at_s <= now_s:
            raise Refused(Reason.EXPIRED, f"the record of server {server.server_id} has ended")
        if trusted_until_s <= now_s:
            raise Refused(Reason.STRANGER, f"the enrolment of server {server.server_id} has ended")
        prefix = server.model.prefix
        possible = {server.server_id: server_key(prefix, server.server_id), prefix: MODELS_KEY}
        if subkey not in possible or not key_fits(possible[subkey]):
            raise Refused(Reason.WRONG_KEY, f"the record of server {server.server_id} lies under another key")
        _remember(self._opened, value, (server, trusted_until_s))
        return server

    def _first_opening(self, value: bytes, now_s: float) -> tuple[Server, float]:
        envelope = common_pb2.SignedEnvelope()
        try:
            envelope.ParseFromString(value)
        except DecodeError:
            raise Refused(Reason.MALFORMED, "the bytes of a record do not parse") from None
        try:
            server = open_record(envelope, now_s)
            trusted_until_s = self._trusted_until_s(server, now_s)
        except ShoalError as error:
            raise Refused(_reason_of(error), error.message) from error
        issued_at = swarm_pb2.ServerRecord.FromString(envelope.payload).issued_at
        if server.expires_at_s - from_timestamp(issued_at) > MOST_LIFE_S:
            raise Refused(Reason.MALFORMED, f"a record in the DHT lives at most {MOST_LIFE_S:.0f} s")
        return server, trusted_until_s

    def _trusted_until_s(self, server: Server, now_s: float) -> float:
        key_set = self._key_set()
        if key_set is None:
            return server.expires_at_s
        return key_set.verify_enrolment(server.enrolment, server.server_id, now_s).expires_at_s


def _reason_of(error: ShoalError) -> Reason:
    reasons = ((Corrupted, Reason.FORGED), (LeaseExpired, Reason.EXPIRED), (NotPermitted, Reason.STRANGER))
    for cls, reason in (*reasons, (Incompatible, Reason.INCOMPATIBLE)):
        if isinstance(error, cls):
            return reason
    return Reason.MALFORMED


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Keep the newest `MOST_KNOWN` entries."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MOST_KNOWN:
        memory.popitem(last=False)
