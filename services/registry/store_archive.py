"""What the registry keeps for good: pinned weights, the history of servers, API keys. The port, and memory.

Pinning is atomic: a server's claims are pinned whole or not at all. Adding what is there already changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from services.registry.domain.pins import Pins, check_agreement
from shoal.swarm.snapshot import ModelKey, Server
from shoal.swarm.spans import Span
from shoal.wire.tokens import Role


@dataclass(frozen=True, slots=True)
class Placement:
    """A server that served a span of a model at an address; the key of its history."""

    server_id: str
    model: ModelKey
    span: Span
    address: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """A placement that was announced: by which account, and by its newest record."""

    placement: Placement
    account: str
    public_name: str
    sequence: int
    seen_at_s: float


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Whose an API key is."""

    account: str
    role: Role


class Archive(Protocol):
    """Keeps things for good. All methods raise Unavailable if the database cannot be reached."""

    async def pin(self, model: ModelKey, claimed: Pins) -> Pins:
        """Pin the claimed blocks that are not pinned yet; return what is pinned of the claimed ones.

        Raises:
            BlockHashMismatch, PreconditionFailed: if the claims contradict the pins; then nothing is pinned.
        """
        ...

    async def note(self, sightings: Sequence[Sighting]) -> None:
        """Write sightings into the history: one row for each placement, with its first and last time."""
        ...

    async def add_keys(self, owners: Mapping[str, KeyOwner]) -> None:
        """Store API keys by digest; the owner of one that is known is replaced."""
        ...

    async def find_key(self, digest: str) -> KeyOwner | None:
        """Return the owner of the API key with this digest."""
        ...

    async def ping(self) -> None:
        """Return if the database answers."""
        ...


def sighting_of(server: Server, account: str, now_s: float) -> Sighting:
    """Return what the history keeps of an announced server."""
    placement = Placement(server.server_id, server.model, server.span, server.address)
    return Sighting(placement, account, server.public_name, server.sequence, now_s)


class MemoryArchive:
    """An archive that forgets, for tests."""

    def __init__(self) -> None:
        self.pins: dict[ModelKey, Pins] = {}
        self.history: dict[Placement, tuple[float, Sighting]] = {}
        self._keys: dict[str, KeyOwner] = {}

    async def pin(self, model: ModelKey, claimed: Pins) -> Pins:
        """See `Archive.pin`."""
        pinned = self.pins.get(model, Pins(claimed.num_blocks))
        check_agreement(model, pinned, claimed)
        self.pins[model] = pinned.merged(claimed.hashes)
        hashes = {block: self.pins[model].hashes[block] for block in claimed.hashes}
        return Pins(pinned.num_blocks, MappingProxyType(hashes))

    async def note(self, sightings: Sequence[Sighting]) -> None:
        """See `Archive.note`."""
        for sighting in sightings:
            first_s, _ = self.history.get(sighting.placement, (sighting.seen_at_s, sighting))
            self.history[sighting.placement] = (first_s, sighting)

    async def add_keys(self, owners: Mapping[str, KeyOwner]) -> None:
        """See `Archive.add_keys`."""
        self._keys.update(owners)

    async def find_key(self, digest: str) -> KeyOwner | None:
        """See `Archive.find_key`."""
        return self._keys.get(digest)

    async def ping(self) -> None:
        """See `Archive.ping`."""
