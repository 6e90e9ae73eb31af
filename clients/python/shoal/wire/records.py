"""Between the protos and the values of `shoal.swarm`, and the signed server record with all its checks.

Everything that comes from another machine passes `open_record`: nobody else decides whether a record may be
believed. Does not decide whether a server is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from google.protobuf.message import DecodeError

from shoal.swarm.snapshot import (
    Capacity,
    Delta,
    Load,
    ModelKey,
    Server,
    ServerState,
    Signed,
    Speed,
    SwarmSnapshot,
)
from shoal.swarm.spans import Span
from shoal.v1 import common_pb2, registry_pb2, swarm_pb2
from shoal.wire.clock import from_duration, from_timestamp, to_duration, to_timestamp
from shoal.wire.errors import Corrupted, Incompatible, InvalidRequest, LeaseExpired, ShoalError, SpanMismatch
from shoal.wire.identity import PUBLIC_KEY_BYTES, IdentityKey, server_id_of, verify
from shoal.wire.swarm_url import split_address
from shoal.wire.tls import certificate_name

PROTOCOL = 1
RECORD_CONTEXT = "shoal.v1.ServerRecord"
DIGEST_BYTES = 32
MAX_RECORD_BYTES = 512 * 1024
MAX_BLOCKS = 10_000
MAX_NAME_CHARACTERS = 256
MAX_ADAPTERS = 1000
MAX_PINGS = 64
MAX_LIFE_S = 86_400.0
MAX_CLOCK_SKEW_S = 300.0
MAX_DURATION_S = 3600.0

_STATES: Mapping[int, ServerState] = MappingProxyType(
    {swarm_pb2.ServerState.Value(f"SERVER_STATE_{state.name}"): state for state in ServerState}
)

Rejected = Callable[[str, ShoalError], None]


def check_protocol(protocol: int, who: str) -> None:
    """Compare the other side's wire protocol with ours.

    Raises:
        Incompatible: if they differ.
    """
    if protocol != PROTOCOL:
        older = "the other side" if protocol < PROTOCOL else "this side"
        raise Incompatible(f"{who} speaks wire protocol {protocol}, this side {PROTOCOL}; upgrade {older}")


def span_to_proto(span: Span) -> common_pb2.Span:
    """Translate a span."""
    return common_pb2.Span(start=span.start, end=span.end)


def span_from_proto(span: common_pb2.Span) -> Span:
    """Translate a span.

    Raises:
        SpanMismatch: if it is empty or upside down.
    """
    try:
        return Span(span.start, span.end)
    except ValueError as error:
        raise SpanMismatch(str(error)) from None


def model_to_proto(model: ModelKey) -> common_pb2.ModelId:
    """Translate a model's identity."""
    return common_pb2.ModelId(prefix=model.prefix, config_digest=model.config_digest, numeric_class=model.numeric_class)


def model_from_proto(model: common_pb2.ModelId) -> ModelKey:
    """Translate a model's identity.

    Raises:
        InvalidRequest: if a field is missing or of a wrong size.
    """
    names = (model.prefix, model.numeric_class)
    if not all(0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() for name in names):
        raise InvalidRequest("a model needs a printable prefix and numeric class of at most 256 characters")
    if len(model.config_digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a model's config_digest has 32 bytes, got {len(model.config_digest)}")
    return ModelKey(model.prefix, model.config_digest, model.numeric_class)


def signed_to_proto(signed: Signed) -> common_pb2.SignedEnvelope:
    """Translate signed bytes."""
    return common_pb2.SignedEnvelope(payload=signed.payload, key_id=signed.key_id, signature=signed.signature)


def signed_from_proto(envelope: common_pb2.SignedEnvelope) -> Signed:
    """Translate signed bytes; nothing is checked."""
    return Signed(envelope.payload, envelope.key_id, envelope.signature)


def state_to_proto(state: ServerState) -> swarm_pb2.ServerState.ValueType:
    """Translate a server's state."""
    return swarm_pb2.ServerState.Value(f"SERVER_STATE_{state.name}")


def state_from_proto(state: int) -> ServerState:
    """Translate a server's state.

    Raises:
        InvalidRequest: if it is not set or unknown.
    """
    found = _STATES.get(state)
    if found is None:
        raise InvalidRequest(f"a server's state must be set to a known one, got {state}")
    return found


def load_to_proto(load: Load) -> swarm_pb2.ServerLoad:
    """Translate a server's load."""
    return swarm_pb2.ServerLoad(
        free_token_blocks=load.free_token_blocks,
        open_sessions=load.open_sessions,
        queued_rows=load.queued_rows,
        queue_delay=to_duration(load.queue_delay_s),
    )


def load_from_proto(load: swarm_pb2.ServerLoad) -> Load:
    """Translate a server's load.

    Raises:
        InvalidRequest: if the delay is not between 0 and an hour.
    """
    delay_s = _checked_duration(from_duration(load.queue_delay), "queue_delay")
    return Load(load.free_token_blocks, load.open_sessions, load.queued_rows, delay_s)


def speed_to_proto(speed: Speed) -> swarm_pb2.ServerSpeed:
    """Translate a server's speed."""
    return swarm_pb2.ServerSpeed(
        decode_block_time=to_duration(speed.decode_block_s),
        prefill_token_block_time=to_duration(speed.prefill_token_block_s),
        step_overhead=to_duration(speed.step_overhead_s),
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s,
    )


def speed_from_proto(speed: swarm_pb2.ServerSpeed) -> Speed:
    """Translate a server's speed.

    Raises:
        InvalidRequest: if a time is not between 0 and an hour.
    """
    return Speed(
        _checked_duration(from_duration(speed.decode_block_time), "decode_block_time"),
        _checked_duration(from_duration(speed.prefill_token_block_time), "prefill_token_block_time"),
        _checked_duration(from_duration(speed.step_overhead), "step_overhead"),
        speed.bandwidth_bytes_per_s,
    )


def capacity_to_proto(capacity: Capacity) -> swarm_pb2.ServerCapacity:
    """Translate a server's fixed limits."""
    return swarm_pb2.ServerCapacity(
        cache_token_blocks=capacity.cache_token_blocks,
        max_session_tokens=capacity.max_session_tokens,
        max_session_rows=capacity.max_session_rows,
        max_step_tokens=capacity.max_step_tokens,
    )


def capacity_from_proto(capacity: swarm_pb2.ServerCapacity) -> Capacity:
    """Translate a server's fixed limits."""
    limits = (capacity.max_session_tokens, capacity.max_session_rows, capacity.max_step_tokens)
    return Capacity(capacity.cache_token_blocks, *limits)


def pings_to_proto(rtts_s: Mapping[str, float]) -> list[swarm_pb2.NeighbourPing]:
    """Translate round-trip times in seconds by server id."""
    return [swarm_pb2.NeighbourPing(server_id=key, rtt=to_duration(rtts_s[key])) for key in sorted(rtts_s)]


def pings_from_proto(pings: Iterable[swarm_pb2.NeighbourPing]) -> Mapping[str, float]:
    """Translate round-trip times to seconds by server id.

    Raises:
        InvalidRequest: if there are more than 64, or one is not between 0 and an hour.
    """
    rtts_s = {ping.server_id: _checked_duration(from_duration(ping.rtt), "rtt") for ping in pings}
    if len(rtts_s) > MAX_PINGS:
        raise InvalidRequest(f"at most {MAX_PINGS} pings, got {len(rtts_s)}")
    return MappingProxyType(rtts_s)


def sign_record(key: IdentityKey, record: swarm_pb2.ServerRecord) -> common_pb2.SignedEnvelope:
    """Sign a copy of the record with `protocol`, `server_id` and `public_key` filled in."""
    filled = swarm_pb2.ServerRecord()
    filled.CopyFrom(record)
    filled.protocol = PROTOCOL
    filled.server_id = key.server_id
    filled.public_key = key.public_key
    return signed_to_proto(key.sign(RECORD_CONTEXT, filled.SerializeToString()))


def open_record(envelope: common_pb2.SignedEnvelope, now_s: float) -> Server:
    """Check a signed record and return what it says; the lease time is left at 0. The enrolment is not checked.

    Raises:
        Corrupted: if the bytes, the signature, the id or the certificate do not fit together.
        Incompatible: if it is of another wire protocol.
        LeaseExpired: if its time is over.
        InvalidRequest: if a field is missing or out of its range (SpanMismatch for the span).
    """
    signed = signed_from_proto(envelope)
    record = _parse(signed)
    check_protocol(record.protocol, f"server {record.server_id}")
    expires_at_s = _check_times(record, now_s)
    if certificate_name(record.certificate) != record.server_id:
        raise Corrupted(f"the certificate of server {record.server_id} has another name")
    host, port = split_address(record.address)
    if not port:
        raise InvalidRequest(f"server {record.server_id} announces port 0 at {host}")
    span = _check_blocks(record)
    return Server(
        server_id=record.server_id,
        address=record.address,
        certificate=record.certificate,
        model=model_from_proto(record.model),
        num_blocks=record.num_blocks,
        span=span,
        block_hashes=tuple(record.block_hashes),
        state=state_from_proto(record.state),
        capacity=capacity_from_proto(record.capacity),
        speed=speed_from_proto(record.speed),
        load=load_from_proto(record.load),
        record=signed,
        sequence=record.sequence,
        expires_at_s=expires_at_s,
        public_name=_checked_name(record.public_name),
        adapters=_checked_adapters(record.adapters),
        rtts_s=pings_from_proto(record.pings),
        enrolment=record.enrolment,
    )


def server_to_entry(server: Server) -> swarm_pb2.ServerEntry:
    """Translate a server: its record as signed, and what changed since."""
    return swarm_pb2.ServerEntry(
        record=signed_to_proto(server.record),
        state=state_to_proto(server.state),
        load=load_to_proto(server.load),
        lease_expires_at=to_timestamp(server.lease_expires_at_s),
        pings=pings_to_proto(server.rtts_s),
    )


def server_from_entry(entry: swarm_pb2.ServerEntry, now_s: float, known: Server | None = None) -> Server:
    """Translate a server after checking its record: what it signed, only its signature proves.

    A record that is the one of `known`, checked before, is only checked for its time.

    Raises:
        ShoalError: as `open_record`.
    """
    same = known is not None and known.record == signed_from_proto(entry.record) and known.expires_at_s > now_s
    return replace(
        known if known is not None and same else open_record(entry.record, now_s),
        state=state_from_proto(entry.state),
        load=load_from_proto(entry.load),
        lease_expires_at_s=from_timestamp(entry.lease_expires_at),
        rtts_s=pings_from_proto(entry.pings),
    )


def snapshot_to_proto(snapshot: SwarmSnapshot) -> registry_pb2.SwarmSnapshot:
    """Translate a snapshot; servers ordered by id."""
    return registry_pb2.SwarmSnapshot(
        revision=snapshot.revision,
        epoch=snapshot.epoch,
        servers=[server_to_entry(snapshot.servers[key]) for key in sorted(snapshot.servers)],
    )


def snapshot_from_proto(
    snapshot: registry_pb2.SwarmSnapshot, now_s: float, rejected: Rejected | None = None
) -> SwarmSnapshot:
    """Translate a snapshot.

    One bad entry must not blind the watcher: it is left out and told to `rejected`.
    """
    return SwarmSnapshot.of(_entries(snapshot.servers, now_s, rejected), snapshot.revision, snapshot.epoch)


def delta_to_proto(delta: Delta) -> registry_pb2.SwarmDelta:
    """Translate a delta."""
    return registry_pb2.SwarmDelta(
        from_revision=delta.from_revision,
        revision=delta.revision,
        upserts=[server_to_entry(server) for server in delta.upserts],
        removals=delta.removals,
    )


def delta_from_proto(
    delta: registry_pb2.SwarmDelta,
    now_s: float,
    rejected: Rejected | None = None,
    known: Mapping[str, Server] = MappingProxyType({}),
) -> Delta:
    """Translate a delta to the servers in `known`. One whose entry is bad counts as removed; `rejected` is told."""
    removals = list(delta.removals)

    def reject(server_id: str, error: ShoalError) -> None:
        removals.append(server_id)
        if rejected is not None:
            rejected(server_id, error)

    upserts = tuple(_entries(delta.upserts, now_s, reject, known))
    return Delta(delta.from_revision, delta.revision, upserts, tuple(removals))


def _entries(
    entries: Iterable[swarm_pb2.ServerEntry],
    now_s: float,
    rejected: Rejected | None,
    known: Mapping[str, Server] = MappingProxyType({}),
) -> list[Server]:
    servers = []
    for entry in entries:
        try:
            servers.append(server_from_entry(entry, now_s, known.get(entry.record.key_id)))
        except ShoalError as error:
            if rejected is not None:
                rejected(entry.record.key_id, error)
    return servers


def _parse(signed: Signed) -> swarm_pb2.ServerRecord:
    if len(signed.payload) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"a server record has at most {MAX_RECORD_BYTES} bytes, got {len(signed.payload)}")
    record = swarm_pb2.ServerRecord()
    try:
        record.ParseFromString(signed.payload)
    except DecodeError:
        raise Corrupted("the bytes of a server record do not parse") from None
    if len(record.public_key) != PUBLIC_KEY_BYTES or record.server_id != server_id_of(record.public_key):
        raise Corrupted("a server's id does not follow from its public key")
    verify(signed, RECORD_CONTEXT, record.public_key)
    return record


def _check_times(record: swarm_pb2.ServerRecord, now_s: float) -> float:
    issued_at_s, expires_at_s = from_timestamp(record.issued_at), from_timestamp(record.expires_at)
    if expires_at_s <= now_s:
        raise LeaseExpired(f"the record of server {record.server_id} ended {now_s - expires_at_s:.0f} s ago")
    if issued_at_s > now_s + MAX_CLOCK_SKEW_S:
        raise InvalidRequest(
            f"server {record.server_id} signed {issued_at_s - now_s:.0f} s in the future; set its clock"
        )
    if expires_at_s - issued_at_s > MAX_LIFE_S:
        raise InvalidRequest(f"a server record lives at most {MAX_LIFE_S:.0f} s")
    return expires_at_s


def _check_blocks(record: swarm_pb2.ServerRecord) -> Span:
    span = span_from_proto(record.span)
    if not 0 < record.num_blocks <= MAX_BLOCKS or span.end > record.num_blocks:
        raise SpanMismatch(f"server {record.server_id} says it holds {span} of {record.num_blocks} blocks")
    hashes = record.block_hashes
    if len(hashes) != len(span) or any(len(digest) != DIGEST_BYTES for digest in hashes):
        raise InvalidRequest(f"server {record.server_id} must send one hash of 32 bytes for each block of {span}")
    return span


def _checked_duration(seconds: float, what: str) -> float:
    if not 0 <= seconds <= MAX_DURATION_S:
        raise InvalidRequest(f"{what} must be between 0 and {MAX_DURATION_S:.0f} s, got {seconds:g}")
    return seconds


def _checked_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidRequest(f"a name has at most {MAX_NAME_CHARACTERS} printable characters")
    return name


def _checked_adapters(names: Iterable[str]) -> frozenset[str]:
    adapters = frozenset(_checked_name(name) for name in names)
    if len(adapters) > MAX_ADAPTERS:
        raise InvalidRequest(f"at most {MAX_ADAPTERS} adapters, got {len(adapters)}")
    return adapters
