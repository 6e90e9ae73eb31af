"""Signs the server's records: one signer for all ways in which they are announced, so that one counter orders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.block_server.facts import Facts
from services.block_server.lifecycle import Lifecycle
from shoal.swarm.snapshot import Load, ServerState, Speed
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import InvalidRequest, NotPermitted
from shoal.wire.identity import IdentityKey
from shoal.wire.private_files import read_private, write_private
from shoal.wire.records import (
    capacity_to_proto,
    load_to_proto,
    model_to_proto,
    sign_record,
    span_to_proto,
    speed_to_proto,
    state_to_proto,
)
from shoal.wire.tokens import KeySet

RECORD_LIFE_S = 3600.0
ENROLMENT_FILE = "enrolment.jwt"


@dataclass(frozen=True, slots=True)
class Announced:
    """What the record says beside the facts."""

    address: str
    certificate: bytes
    public_name: str
    software: str


class RecordSigner:
    """Signs what the server is now. `facts` and `load` give what it holds and its load at that moment."""

    def __init__(
        self,
        key: IdentityKey,
        facts: Callable[[], Facts],
        lifecycle: Lifecycle,
        announced: Announced,
        load: Callable[[], Load],
    ) -> None:
        self._key = key
        self._facts = facts
        self._lifecycle = lifecycle
        self._announced = announced
        self._load = load
        self._sequence = 0
        self.speed = Speed(0.0, 0.0, 0.0)
        self.enrolment = ""
        self.newest = self.sign()

    @property
    def server_id(self) -> str:
        """Who signs."""
        return self._key.server_id

    @property
    def state(self) -> ServerState:
        """The state that a record signed now would have."""
        return self._lifecycle.state

    def load(self) -> Load:
        """Return the load now."""
        return self._load()

    def sign(self, life_s: float = RECORD_LIFE_S, state: ServerState | None = None) -> common_pb2.SignedEnvelope:
        """Return a new record that lives so long, in the server's state unless another is given."""
        time_s = now_s()
        # Grows over restarts of the process too, as nothing but the clock is remembered.
        self._sequence = max(self._sequence + 1, int(time_s * 1000))
        facts, announced = self._facts(), self._announced
        record = swarm_pb2.ServerRecord(
            certificate=announced.certificate,
            address=announced.address,
            model=model_to_proto(facts.model),
            num_blocks=facts.family.num_blocks,
            span=span_to_proto(facts.span),
            block_hashes=facts.block_hashes,
            capacity=capacity_to_proto(facts.capacity),
            speed=speed_to_proto(self.speed),
            state=state_to_proto(state or self._lifecycle.state),
            load=load_to_proto(self._load()),
            public_name=announced.public_name,
            software=announced.software,
            sequence=self._sequence,
            issued_at=to_timestamp(time_s),
            expires_at=to_timestamp(time_s + life_s),
            enrolment=self.enrolment,
        )
        self.newest = sign_record(self._key, record)
        return self.newest


class EnrolmentKeeper:
    """Puts the swarm's statement about this server into its records, and keeps it for the next start."""

    def __init__(self, signer: RecordSigner, folder: Path) -> None:
        self._signer = signer
        self._path = folder / ENROLMENT_FILE

    def recall(self, key_set: KeySet, account: str) -> None:
        """Take the enrolment of an earlier life if it is still one of this swarm for this account."""
        try:
            kept = read_private(self._path).decode()
            if key_set.verify_enrolment(kept, self._signer.server_id, now_s()).account == account:
                self._signer.enrolment = kept
        except (OSError, ValueError, InvalidRequest, NotPermitted):
            return

    def take(self, enrolment: str) -> bool:
        """Take a new enrolment, as it came with a lease; return True if it is the first."""
        first = not self._signer.enrolment
        self._signer.enrolment = enrolment
        write_private(self._path, enrolment.encode())
        return first
