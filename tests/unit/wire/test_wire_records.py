"""Signed server records: what is believed and what is refused, and the translations around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from shoal.swarm.snapshot import Delta, Load, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire import errors
from shoal.wire.clock import now_s, to_duration, to_timestamp
from shoal.wire.identity import IdentityKey
from shoal.wire.records import (
    RECORD_CONTEXT,
    check_protocol,
    delta_from_proto,
    delta_to_proto,
    load_from_proto,
    load_to_proto,
    model_from_proto,
    model_to_proto,
    open_record,
    server_from_entry,
    server_to_entry,
    sign_record,
    signed_to_proto,
    snapshot_from_proto,
    snapshot_to_proto,
    span_from_proto,
    span_to_proto,
    speed_from_proto,
    speed_to_proto,
    state_from_proto,
    state_to_proto,
)
from shoal.wire.tls import make_certificate
from tests.support.records import make_record, make_signed_server

KEY = IdentityKey.generate()


def test_record_arrives_with_all_it_says() -> None:
    envelope = sign_record(KEY, make_record(KEY, 1, 3))
    server = open_record(envelope, now_s())
    assert server.server_id == KEY.server_id
    assert (server.span, server.num_blocks, server.address) == (Span(1, 3), 4, "127.0.0.1:4000")
    assert server.block_hash(2) == make_record(KEY, 1, 3).block_hashes[1]
    assert server.state is ServerState.ONLINE
    assert server.load == Load(4096, queue_delay_s=0.25)
    assert server.capacity.max_step_tokens == 256
    assert server.speed.decode_block_s == pytest.approx(0.001)
    assert dict(server.rtts_s) == {"other": pytest.approx(0.002)}
    assert (server.adapters, server.public_name, server.sequence) == (frozenset({"style"}), "lab box 1", 1)
    assert signed_to_proto(server.record) == envelope


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"expires_at": to_timestamp(now_s() - 5)}, errors.LeaseExpired),
        ({"expires_at": to_timestamp(now_s() + 1e6)}, errors.InvalidRequest),
        ({"expires_at": None}, errors.LeaseExpired),
        (
            {"issued_at": to_timestamp(now_s() + 5000), "expires_at": to_timestamp(now_s() + 6000)},
            errors.InvalidRequest,
        ),
        ({"span": common_pb2.Span(start=2, end=2), "block_hashes": []}, errors.SpanMismatch),
        ({"span": common_pb2.Span(start=3, end=1)}, errors.SpanMismatch),
        ({"span": common_pb2.Span(start=3, end=5)}, errors.SpanMismatch),
        ({"span": None}, errors.SpanMismatch),
        ({"num_blocks": 0}, errors.SpanMismatch),
        ({"num_blocks": 2**32 - 1}, errors.SpanMismatch),
        ({"block_hashes": [b"h" * 32]}, errors.InvalidRequest),
        ({"block_hashes": [b"h" * 32, b"short"]}, errors.InvalidRequest),
        ({"certificate": b"garbage"}, errors.Corrupted),
        ({"certificate": make_certificate("somebody.else").der}, errors.Corrupted),
        ({"address": "nowhere"}, errors.InvalidRequest),
        ({"address": "127.0.0.1:0"}, errors.InvalidRequest),
        ({"model": None}, errors.InvalidRequest),
        ({"model": common_pb2.ModelId(prefix="m", config_digest=b"x", numeric_class="fp32")}, errors.InvalidRequest),
        ({"state": swarm_pb2.SERVER_STATE_UNSPECIFIED}, errors.InvalidRequest),
        ({"speed": swarm_pb2.ServerSpeed(step_overhead=to_duration(-1))}, errors.InvalidRequest),
        ({"load": swarm_pb2.ServerLoad(queue_delay=Duration(seconds=2**62))}, errors.InvalidRequest),
        ({"pings": [swarm_pb2.NeighbourPing(server_id=str(n)) for n in range(65)]}, errors.InvalidRequest),
        ({"adapters": [str(number) for number in range(1001)]}, errors.InvalidRequest),
        ({"public_name": "x" * 300}, errors.InvalidRequest),
        ({"public_name": "\x1b[2Jboo"}, errors.InvalidRequest),
    ],
)
def test_wrong_records_are_refused_by_class(changes: dict[str, Any], expected: type[errors.ShoalError]) -> None:
    with pytest.raises(errors.ShoalError) as caught:
        open_record(sign_record(KEY, make_record(KEY, **changes)), now_s())
    assert type(caught.value) is expected


def test_other_protocol_is_incompatible() -> None:
    record = make_record(KEY, protocol=2, server_id=KEY.server_id, public_key=KEY.public_key)
    envelope = signed_to_proto(KEY.sign(RECORD_CONTEXT, record.SerializeToString()))
    with pytest.raises(errors.Incompatible, match="protocol 2, this side 1; upgrade this side"):
        open_record(envelope, now_s())
    with pytest.raises(errors.Incompatible, match="upgrade the other side"):
        check_protocol(0, "the caller")


def test_forgeries_are_corrupted() -> None:
    good = sign_record(KEY, make_record(KEY))
    other = IdentityKey.generate()
    stolen = make_record(KEY, server_id=KEY.server_id, public_key=KEY.public_key, protocol=1)
    forged = [
        common_pb2.SignedEnvelope(payload=good.payload + b"\0", key_id=good.key_id, signature=good.signature),
        common_pb2.SignedEnvelope(payload=b"", key_id=good.key_id, signature=good.signature),
        common_pb2.SignedEnvelope(payload=b"\xff\xff", key_id=good.key_id, signature=good.signature),
        common_pb2.SignedEnvelope(payload=good.payload, key_id=other.server_id, signature=good.signature),
        common_pb2.SignedEnvelope(payload=good.payload, key_id=good.key_id),
        signed_to_proto(other.sign(RECORD_CONTEXT, stolen.SerializeToString())),
        signed_to_proto(KEY.sign("another purpose", good.payload)),
    ]
    for envelope in forged:
        with pytest.raises(errors.Corrupted):
            open_record(envelope, now_s())
    too_big = common_pb2.SignedEnvelope(payload=bytes(600_000))
    with pytest.raises(errors.InvalidRequest):
        open_record(too_big, now_s())


def test_entry_carries_what_changed_since_the_record() -> None:
    server = replace(
        make_signed_server(), state=ServerState.DRAINING, load=Load(7, 1, 2, 0.5), lease_expires_at_s=1e9, rtts_s={}
    )
    assert server_from_entry(server_to_entry(server), now_s()) == server


def test_snapshot_and_delta_round_trip() -> None:
    first, second = make_signed_server(0, 2), make_signed_server(2, 4)
    snapshot = SwarmSnapshot.of([first, second], 9, "epoch")
    assert snapshot_from_proto(snapshot_to_proto(snapshot), now_s()) == snapshot
    delta = Delta(9, 10, (second,), (first.server_id,))
    assert delta_from_proto(delta_to_proto(delta), now_s()) == delta


def test_one_bad_entry_does_not_blind_a_watcher() -> None:
    good, bad = make_signed_server(0, 2), make_signed_server(2, 4)
    proto = snapshot_to_proto(SwarmSnapshot.of([good, bad], 3))
    for entry in proto.servers:
        if entry.record.key_id == bad.server_id:
            entry.record.signature = bytes(64)
    told: list[tuple[str, str]] = []
    read = snapshot_from_proto(proto, now_s(), lambda server_id, error: told.append((server_id, error.reason)))
    assert set(read.servers) == {good.server_id}
    assert told == [(bad.server_id, "Corrupted")]
    # A known server whose new entry is bad is no longer trusted at all.
    delta = delta_to_proto(Delta(3, 4, (good,)))
    delta.upserts[0].record.signature = bytes(64)
    assert delta_from_proto(delta, now_s()) == Delta(3, 4, (), (good.server_id,))


def test_small_translations() -> None:
    server = make_signed_server()
    assert model_from_proto(model_to_proto(server.model)) == server.model
    assert span_from_proto(span_to_proto(server.span)) == server.span
    assert load_from_proto(load_to_proto(server.load)) == server.load
    assert speed_from_proto(speed_to_proto(server.speed)) == server.speed
    assert [state_from_proto(state_to_proto(state)) for state in ServerState] == list(ServerState)
