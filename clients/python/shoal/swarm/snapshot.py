"""An immutable picture of the swarm, and the step from one revision to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from shoal.swarm.spans import Span


class ServerState(StrEnum):
    """Life cycle of a block server."""

    JOINING = "joining"
    ONLINE = "online"
    DRAINING = "draining"
    PAUSED = "paused"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Which model: equal only if name, config digest (32 bytes) and numeric class are."""

    prefix: str
    config_digest: bytes
    numeric_class: str

    def __str__(self) -> str:
        return f"{self.prefix} ({self.numeric_class}, config {self.config_digest.hex()[:8]})"


@dataclass(frozen=True, slots=True)
class Signed:
    """Exact bytes with a signature over them."""

    payload: bytes
    key_id: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed of a server; all times in seconds, zero bandwidth means unknown."""

    decode_block_s: float
    prefill_token_block_s: float
    step_overhead_s: float
    bandwidth_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Fixed limits of a server."""

    cache_token_blocks: int
    max_session_tokens: int
    max_session_rows: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Changing load of a server."""

    free_token_blocks: int
    open_sessions: int = 0
    queued_rows: int = 0
    queue_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server as a snapshot holds it. `record` is what it signed; the other fields were read from it."""

    server_id: str
    address: str
    certificate: bytes
    model: ModelKey
    num_blocks: int
    span: Span
    block_hashes: tuple[bytes, ...]
    state: ServerState
    capacity: Capacity
    speed: Speed
    load: Load
    record: Signed
    sequence: int = 0
    expires_at_s: float = 0.0
    lease_expires_at_s: float = 0.0
    public_name: str = ""
    adapters: frozenset[str] = frozenset()
    rtts_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    enrolment: str = ""

    def block_hash(self, block: int) -> bytes:
        """Return the hash of a block that the span covers."""
        return self.block_hashes[block - self.span.start]


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from `from_revision` to `revision`."""

    from_revision: int
    revision: int
    upserts: tuple[Server, ...] = ()
    removals: tuple[str, ...] = ()


class RevisionGap(ValueError):
    """A delta does not follow the snapshot; the watcher must start again from a snapshot."""


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """All servers at one revision. Revisions count within an `epoch`, the life of the store behind them.

    A `partial` snapshot may lack servers that are there: nobody may take a gap in it for a gap in the swarm.
    """

    revision: int = 0
    epoch: str = ""
    servers: Mapping[str, Server] = field(default_factory=lambda: MappingProxyType({}))
    partial: bool = False

    @classmethod
    def of(
        cls, servers: Iterable[Server], revision: int = 0, epoch: str = "", *, partial: bool = False
    ) -> SwarmSnapshot:
        """Build a snapshot from servers in any order."""
        return cls(revision, epoch, MappingProxyType({server.server_id: server for server in servers}), partial)

    def apply(self, delta: Delta) -> SwarmSnapshot:
        """Return the snapshot after `delta`.

        Raises:
            RevisionGap: if `delta.from_revision` is not this snapshot's revision.
        """
        if delta.from_revision != self.revision:
            raise RevisionGap(f"have revision {self.revision}, delta starts at {delta.from_revision}")
        servers = dict(self.servers)
        for server_id in delta.removals:
            servers.pop(server_id, None)
        servers.update((server.server_id, server) for server in delta.upserts)
        return replace(self, revision=delta.revision, servers=MappingProxyType(servers))

    def of_model(self, model: ModelKey) -> list[Server]:
        """Return the servers of one model, ordered by id."""
        return [self.servers[key] for key in sorted(self.servers) if self.servers[key].model == model]

    def models(self) -> dict[ModelKey, int]:
        """Return each model that has a server, with its number of blocks."""
        return {server.model: server.num_blocks for server in self.servers.values()}
