"""Access tokens, key sets and API keys."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
import pytest

from shoal.wire.errors import Corrupted, NotAuthenticated, NotPermitted
from shoal.wire.identity import IdentityKey
from shoal.wire.tokens import API_KEY_PREFIX, Claims, KeySet, Role, TokenSigner, api_key_digest, new_api_key

NOW_S = 1_800_000_000.0


@pytest.fixture(scope="module")
def key() -> IdentityKey:
    return IdentityKey.generate()


@pytest.fixture
def signer(key: IdentityKey) -> TokenSigner:
    return TokenSigner(key, "swarm-1")


def test_token_proves_account_and_role_until_it_ends(signer: TokenSigner) -> None:
    token = signer.issue("alice", Role.OPERATOR, 60, NOW_S)
    keys = signer.key_set()
    assert keys.verify(token, NOW_S + 59) == Claims("alice", Role.OPERATOR, "swarm-1", NOW_S + 60)
    with pytest.raises(NotAuthenticated, match=r"ended 5 s ago; get a new one with GetSwarmInfo"):
        keys.verify(token, NOW_S + 65)


def test_key_set_travels(signer: TokenSigner) -> None:
    protos = signer.key_set().to_protos()
    again = KeySet.from_protos(protos, "swarm-1")
    assert again.verify(signer.issue("alice", Role.USER, 60, NOW_S), NOW_S).account == "alice"
    assert again.to_protos() == protos
    protos[0].public_key = b"short"
    with pytest.raises(Corrupted):
        KeySet.from_protos(protos)


def test_other_keys_and_other_swarms_are_refused(signer: TokenSigner, key: IdentityKey) -> None:
    token = signer.issue("alice", Role.USER, 60, NOW_S)
    with pytest.raises(NotAuthenticated, match="unknown key"):
        TokenSigner(IdentityKey.generate(), "swarm-1").key_set().verify(token, NOW_S)
    with pytest.raises(NotAuthenticated, match="another swarm"):
        TokenSigner(key, "swarm-2").key_set().verify(token, NOW_S)
    # The right key id with another key's signature.
    impostor = KeySet({key.server_id: IdentityKey.generate().public_key})
    with pytest.raises(NotAuthenticated, match="not valid"):
        impostor.verify(token, NOW_S)


def _forge(key: IdentityKey, algorithm: str = "EdDSA", secret: Any = None, **changes: Any) -> str:
    claims = {"iss": "swarm-1", "aud": "shoal", "sub": "alice", "role": "user", "iat": 0, "exp": int(NOW_S + 60)}
    claims = {name: value for name, value in (claims | changes).items() if value is not None}
    return jwt.encode(claims, secret or key.private_key, algorithm, headers={"kid": key.server_id})


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "other"},
        {"role": "root"},
        {"role": 7},
        {"role": None},
        {"exp": None},
        {"sub": None},
        {"iss": None},
        {"exp": "never"},
        {"exp": 1e400},
    ],
)
def test_tokens_with_wrong_claims_are_refused(key: IdentityKey, signer: TokenSigner, changes: dict[str, Any]) -> None:
    with pytest.raises(NotAuthenticated):
        signer.key_set().verify(_forge(key, **changes), NOW_S)


def test_other_algorithms_are_refused(key: IdentityKey, signer: TokenSigner) -> None:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"iss": "swarm-1", "aud": "shoal", "sub": "alice", "role": "operator", "iat": 0, "exp": int(NOW_S + 60)}
    unsigned = f"{part({'alg': 'none', 'kid': key.server_id})}.{part(claims)}."
    symmetric = _forge(key, "HS256", key.public_key)
    for token in (unsigned, symmetric):
        with pytest.raises(NotAuthenticated):
            signer.key_set().verify(token, NOW_S)


@pytest.mark.parametrize("token", ["", ".", "..", "a.b.c", "é" * 50, "x" * 10_000, "\0", "eyJhbGciOiJFZERTQSJ9..x"])
def test_garbage_is_refused(signer: TokenSigner, token: str) -> None:
    with pytest.raises(NotAuthenticated):
        signer.key_set().verify(token, NOW_S)


def test_api_keys_are_recognisable_and_stored_as_digests() -> None:
    api_key = new_api_key()
    assert api_key.startswith(API_KEY_PREFIX)
    assert api_key != new_api_key()
    assert len(api_key_digest(api_key)) == 64
    assert api_key not in api_key_digest(api_key)


def test_an_enrolment_is_of_one_server_and_no_access_token() -> None:
    signer = TokenSigner(IdentityKey.generate(), "swarm-1")
    enrolment, keys = signer.enrol("ann", "server-a", 60.0, NOW_S), signer.key_set()
    found = keys.verify_enrolment(enrolment, "server-a", NOW_S)
    assert (found.account, found.server_id, found.expires_at_s) == ("ann", "server-a", NOW_S + 60)
    with pytest.raises(NotPermitted, match="another server"):
        keys.verify_enrolment(enrolment, "server-b", NOW_S)
    with pytest.raises(NotPermitted, match="has ended"):
        keys.verify_enrolment(enrolment, "server-a", NOW_S + 60)
    with pytest.raises(NotAuthenticated):
        keys.verify(enrolment, NOW_S)
    with pytest.raises(NotPermitted, match="no enrolment"):
        keys.verify_enrolment(signer.issue("ann", Role.SERVER, 60.0, NOW_S), "server-a", NOW_S)


@pytest.mark.parametrize("enrolment", ["", "x", "a.b.c", "e" * 5000])
def test_what_is_no_enrolment_is_refused(enrolment: str) -> None:
    with pytest.raises(NotPermitted):
        TokenSigner(IdentityKey.generate(), "swarm-1").key_set().verify_enrolment(enrolment, "server-a", NOW_S)


def test_enrolments_of_other_swarms_are_refused() -> None:
    signer, other = (TokenSigner(IdentityKey.generate(), name) for name in ("swarm-1", "swarm-2"))
    with pytest.raises(NotPermitted):
        other.key_set().verify_enrolment(signer.enrol("ann", "server-a", 60.0, NOW_S), "server-a", NOW_S)
    renamed = KeySet(signer.key_set().public_keys, "swarm-2")
    with pytest.raises(NotPermitted, match="another server or swarm"):
        renamed.verify_enrolment(signer.enrol("ann", "server-a", 60.0, NOW_S), "server-a", NOW_S)
