"""Translations lose nothing; damaged bytes are refused by a typed error and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.snapshot import Load, ServerState
from shoal.v1 import common_pb2, swarm_pb2
from shoal.wire.clock import from_duration, from_timestamp, now_s, to_duration, to_timestamp
from shoal.wire.errors import NotAuthenticated, ShoalError
from shoal.wire.identity import IdentityKey
from shoal.wire.records import RECORD_CONTEXT, open_record, server_from_entry, server_to_entry, signed_to_proto
from shoal.wire.swarm_url import SwarmUrl
from shoal.wire.tokens import Role, TokenSigner
from tests.support.records import make_record, make_signed_server

KEY = IdentityKey.generate()
SERVER = make_signed_server(expires_at=to_timestamp(now_s() + 3600))
SIGNER = TokenSigner(KEY, "swarm")
TOKEN = SIGNER.issue("alice", Role.USER, 60, 1e9)


@given(st.floats(-1e9, 4e9))
def test_times(seconds: float) -> None:
    assert from_timestamp(to_timestamp(seconds)) == pytest.approx(seconds, abs=2e-6)
    assert from_duration(to_duration(seconds)) == pytest.approx(seconds, abs=2e-6)


@given(st.text())
def test_url_is_parsed_or_refused(text: str) -> None:
    try:
        url = SwarmUrl.parse(text)
    except ShoalError:
        return
    assert SwarmUrl.parse(str(url)) == url


@given(
    st.builds(Load, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.just(0.5)),
    st.sampled_from(ServerState),
    st.dictionaries(st.text(min_size=1, max_size=5), st.just(0.25), max_size=5),
)
@settings(max_examples=50, deadline=None)
def test_entries(load: Load, state: ServerState, rtts_s: dict[str, float]) -> None:
    server = replace(SERVER, load=load, state=state, rtts_s=rtts_s)
    assert server_from_entry(server_to_entry(server), now_s()) == server


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_change_of_an_envelope_is_refused(at: int, junk: bytes) -> None:
    good = signed_to_proto(SERVER.record).SerializeToString()
    at %= len(good)
    changed = good[:at] + junk + good[at + len(junk) :]
    try:
        envelope = common_pb2.SignedEnvelope.FromString(changed)
    except Exception:  # noqa: BLE001 - protobuf refuses by several classes; only our own checks are tested here
        return
    if envelope == signed_to_proto(SERVER.record):
        return
    with pytest.raises(ShoalError):
        open_record(envelope, now_s())


_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "certificate": st.binary(max_size=40),
        "address": st.text(max_size=40),
        "num_blocks": st.integers(0, 2**32 - 1),
        "span": st.builds(
            lambda a, b: common_pb2.Span(start=a, end=b), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
        ),
        "block_hashes": st.lists(st.binary(max_size=33), max_size=4),
        "public_name": st.text(max_size=300),
        "issued_at": st.floats(-1e9, 1e10).map(to_timestamp),
        "expires_at": st.floats(-1e9, 1e10).map(to_timestamp),
        "load": st.floats(-1e5, 1e5).map(lambda s: swarm_pb2.ServerLoad(queue_delay=to_duration(s))),
    },
)


@given(_FIELDS)
@settings(max_examples=200, deadline=None)
def test_signed_nonsense_is_refused_or_harmless(fields: dict[str, Any]) -> None:
    """SE-01: whoever holds a key can sign anything."""
    record = make_record(KEY, protocol=1, server_id=KEY.server_id, public_key=KEY.public_key, **fields)
    envelope = signed_to_proto(KEY.sign(RECORD_CONTEXT, record.SerializeToString()))
    try:
        server = open_record(envelope, now_s())
    except ShoalError:
        return
    assert len(server.block_hashes) == len(server.span) <= server.num_blocks


@given(st.integers(0, 10_000), st.characters(codec="ascii"))
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_token_is_refused(at: int, character: str) -> None:
    at %= len(TOKEN) - 1  # the last base64 character has bits that mean nothing
    changed = TOKEN[:at] + character + TOKEN[at + 1 :]
    if changed == TOKEN:
        return
    with pytest.raises(NotAuthenticated):
        SIGNER.key_set().verify(changed, 1e9)
