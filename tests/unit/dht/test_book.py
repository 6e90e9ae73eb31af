"""What is believed of the DHT, and what is refused and counted for which reason."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.dht.book import MOST_LIFE_S, Reason, RecordBook
from shoal.dht.keys import MODELS_KEY, bucket_key, bucket_of, server_key
from shoal.swarm.spans import Span
from shoal.v1 import swarm_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.identity import IdentityKey
from shoal.wire.records import sign_record
from tests.support.dht import Enroller
from tests.support.records import make_record


@pytest.fixture
def swarm() -> Enroller:
    return Enroller()


@pytest.fixture
def key() -> IdentityKey:
    return IdentityKey.generate()


def take(book: RecordBook, key: IdentityKey, value: object, *, at: str = "", subkey: object = None) -> list[Any]:
    place = at or server_key("tiny", key.server_id)
    return book.take(place, {key.server_id if subkey is None else subkey: value}, now_s())


def test_a_good_record_is_believed_as_often_as_it_is_read(swarm: Enroller, key: IdentityKey) -> None:
    book, value = swarm.book(), swarm.record(key, 1, 3).SerializeToString()
    for _ in range(3):
        (server,) = take(book, key, value)
        assert (server.server_id, server.span, server.model.prefix) == (key.server_id, Span(1, 3), "tiny")
    assert not book.rejected


def test_the_same_record_lists_its_model(swarm: Enroller, key: IdentityKey) -> None:
    book, value = swarm.book(), swarm.record(key).SerializeToString()
    assert take(book, key, value, at=MODELS_KEY, subkey="tiny")
    assert not take(book, key, value, at=MODELS_KEY, subkey="other")
    assert not take(book, key, value, at=MODELS_KEY)
    assert book.rejected == {Reason.WRONG_KEY: 2}


def refusals(swarm: Enroller, key: IdentityKey) -> dict[str, tuple[Reason, object]]:
    good = swarm.record(key)
    forged, other_key, cut = swarm.record(key), swarm.record(key), good.SerializeToString()[:-3]
    forged.signature = bytes(64)
    other_key.key_id = IdentityKey.generate().server_id
    tampered = swarm.record(key)
    tampered.payload = tampered.payload.replace(b"lab box 1", b"lab box 2")
    now = now_s()
    ended = swarm.record(key, issued_at=to_timestamp(now - 60), expires_at=to_timestamp(now - 1))
    foreign = Enroller().record(key)
    stolen = swarm.signer.enrol("ann", IdentityKey.generate().server_id, 600, now)
    over = swarm.signer.enrol("ann", key.server_id, 600, now - 700)
    token = swarm.signer.issue("ann", "server", 600, now)  # type: ignore[arg-type]
    envelopes = {
        "forged": (Reason.FORGED, forged),
        "of another key": (Reason.FORGED, other_key),
        "tampered": (Reason.FORGED, tampered),
        "ended": (Reason.EXPIRED, ended),
        "of another swarm": (Reason.STRANGER, foreign),
        "not enrolled": (Reason.STRANGER, swarm.record(key, enrolment="")),
        "enrolled as another server": (Reason.STRANGER, swarm.record(key, enrolment=stolen)),
        "enrolled long ago": (Reason.STRANGER, swarm.record(key, enrolment=over)),
        "with an access token": (Reason.STRANGER, swarm.record(key, enrolment=token)),
        "without a state": (Reason.MALFORMED, swarm.record(key, state=swarm_pb2.SERVER_STATE_UNSPECIFIED)),
        "without hashes": (Reason.MALFORMED, swarm.record(key, block_hashes=[])),
        "of an hour, meant for the registry": (Reason.MALFORMED, swarm.record(key, life_s=MOST_LIFE_S + 1)),
        "of the future": (Reason.MALFORMED, swarm.record(key, issued_at=to_timestamp(now + 900), life_s=950)),
    }
    values: dict[str, tuple[Reason, object]] = {
        what: (reason, envelope.SerializeToString()) for what, (reason, envelope) in envelopes.items()
    }
    return values | {
        "cut off": (Reason.MALFORMED, cut),
        "text": (Reason.MALFORMED, "text"),
        "noise": (Reason.MALFORMED, b"\xff" * 40),
        "nothing": (Reason.FORGED, b""),
    }


def test_what_nobody_can_vouch_for_is_refused_and_counted(swarm: Enroller, key: IdentityKey) -> None:
    for what, (reason, value) in refusals(swarm, key).items():
        book = swarm.book()
        assert not take(book, key, value), what
        assert book.rejected == {reason: 1}, what
        assert not take(book, key, value), what
        assert book.rejected == {reason: 2}, what


def test_one_bad_record_hides_no_other(swarm: Enroller, key: IdentityKey) -> None:
    bucket = bucket_of(key.server_id)
    neighbours = [
        other for other in (IdentityKey.generate() for _ in range(200)) if bucket_of(other.server_id) == bucket
    ]
    entries: dict[object, object] = {other.server_id: b"noise" for other in neighbours[:3]}
    entries |= {other.server_id: swarm.record(other).SerializeToString() for other in neighbours[3:6]}
    entries |= {7: b"a number as key", key.server_id: swarm.record(key).SerializeToString()}
    book = swarm.book()
    found = book.take(bucket_key("tiny", bucket), entries, now_s())
    assert {server.server_id for server in found} == {key.server_id, *(other.server_id for other in neighbours[3:6])}
    assert book.rejected == {Reason.MALFORMED: 4}


def test_a_record_under_another_key_is_refused(swarm: Enroller, key: IdentityKey) -> None:
    book, value = swarm.book(), swarm.record(key).SerializeToString()
    assert not take(book, key, value, subkey=IdentityKey.generate().server_id)
    assert not take(book, key, value, at=bucket_key("tiny", (bucket_of(key.server_id) + 1) % 8))
    assert not take(book, key, value, at=server_key("other", key.server_id))
    assert book.rejected == {Reason.WRONG_KEY: 3}


def test_an_older_record_is_a_replay(swarm: Enroller, key: IdentityKey) -> None:
    book = swarm.book()
    old, new = (swarm.record(key, sequence=sequence).SerializeToString() for sequence in (5, 6))
    assert take(book, key, old)
    assert take(book, key, new)
    assert not take(book, key, old)
    assert book.rejected == {Reason.REPLAYED: 1}
    assert take(book, key, new)
    assert take(book, key, old, at=MODELS_KEY, subkey="tiny"), "a model may be listed by an older record"


def test_another_protocol_is_told_apart(swarm: Enroller, key: IdentityKey) -> None:
    record = swarm_pb2.ServerRecord.FromString(sign_record(key, make_record(key)).payload)
    record.protocol = 99
    signed = key.sign("shoal.v1.ServerRecord", record.SerializeToString())
    from shoal.wire.records import signed_to_proto

    book = swarm.book()
    assert not take(book, key, signed_to_proto(signed).SerializeToString())
    assert book.rejected == {Reason.INCOMPATIBLE: 1}


def test_a_node_that_knows_no_swarm_keeps_records_all_the_same(swarm: Enroller, key: IdentityKey) -> None:
    book = RecordBook(lambda: None)
    assert take(book, key, swarm.record(key, enrolment="").SerializeToString())
