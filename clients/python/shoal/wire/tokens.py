"""Access tokens and enrolments, EdDSA JWTs that the registry issues and everybody checks offline, and API keys.

Checking needs only the public keys and a clock, so it goes on when the registry is gone. Never logs a token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from jwt.types import Options

from shoal.v1 import registry_pb2
from shoal.wire.errors import Corrupted, NotAuthenticated, NotPermitted
from shoal.wire.identity import IdentityKey

ALGORITHM = "EdDSA"
AUDIENCE = "shoal"
# Enrolments are public, so they must never pass for access tokens.
ENROLMENT_AUDIENCE = "shoal-enrolment"
API_KEY_PREFIX = "shoal_"
MAX_TOKEN_CHARACTERS = 4096

# Times are checked against the caller's clock argument instead of the library's own clock.
_UNTIMED: Options = {"verify_exp": False, "verify_iat": False, "verify_nbf": False}
_TOKEN_CLAIMS = ("iss", "aud", "sub", "role", "iat", "exp")
_ENROLMENT_CLAIMS = ("iss", "aud", "sub", "server_id", "iat", "exp")


class Role(StrEnum):
    """What an account may do."""

    USER = "user"
    SERVER = "server"
    OPERATOR = "operator"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Claims:
    """Who calls, as its credentials prove."""

    account: str
    role: Role
    swarm_id: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Whose a server is, as the swarm states it. Worth something only beside a proof of the server's own key."""

    server_id: str
    account: str
    expires_at_s: float


class TokenSigner:
    """Issues access tokens and enrolments of one swarm."""

    def __init__(self, key: IdentityKey, swarm_id: str) -> None:
        self._key = key
        self.swarm_id = swarm_id

    def key_set(self) -> KeySet:
        """Return the key set that accepts this signer's tokens."""
        return KeySet({self._key.server_id: self._key.public_key}, self.swarm_id)

    def issue(self, account: str, role: Role, ttl_s: float, now_s: float) -> str:
        """Return a token for the account and role that ends `ttl_s` seconds after `now_s`."""
        claims = {
            "iss": self.swarm_id,
            "aud": AUDIENCE,
            "sub": account,
            "role": str(role),
            "iat": int(now_s),
            "exp": int(now_s + ttl_s),
        }
        return self._sign(claims)

    def enrol(self, account: str, server_id: str, ttl_s: float, now_s: float) -> str:
        """Return the statement that the server belongs to the account, an account with the role server."""
        claims = {
            "iss": self.swarm_id,
            "aud": ENROLMENT_AUDIENCE,
            "sub": account,
            "server_id": server_id,
            "iat": int(now_s),
            "exp": int(now_s + ttl_s),
        }
        return self._sign(claims)

    def _sign(self, claims: dict[str, Any]) -> str:
        return jwt.encode(claims, self._key.private_key, ALGORITHM, headers={"kid": self._key.server_id})


class KeySet:
    """The public keys that sign a swarm's tokens, by key id. Immutable; a new set replaces an old one.

    Raises:
        Corrupted: if a key is not 32 bytes of an Ed25519 public key.
    """

    def __init__(self, public_keys: Mapping[str, bytes], swarm_id: str | None = None) -> None:
        try:
            self._keys = {kid: Ed25519PublicKey.from_public_bytes(raw) for kid, raw in public_keys.items()}
        except ValueError:
            raise Corrupted("a token key is not an Ed25519 public key (32 bytes)") from None
        self.public_keys: Mapping[str, bytes] = dict(public_keys)
        self.swarm_id = swarm_id

    @classmethod
    def from_protos(cls, keys: Iterable[registry_pb2.TokenKey], swarm_id: str | None = None) -> KeySet:
        """Read the keys that the registry sent.

        Raises:
            Corrupted: if one is not a key.
        """
        return cls({key.key_id: key.public_key for key in keys}, swarm_id)

    def to_protos(self) -> list[registry_pb2.TokenKey]:
        """Return the keys, ordered by id."""
        return [registry_pb2.TokenKey(key_id=kid, public_key=self.public_keys[kid]) for kid in sorted(self.public_keys)]

    def verify(self, token: str, now_s: float) -> Claims:
        """Return what the token proves.

        Raises:
            NotAuthenticated: if it is not a token of this swarm, or has ended; the message says what to do.
        """
        claims = self._decode(token, AUDIENCE, _TOKEN_CLAIMS)
        expires_at_s, account, role = claims["exp"], claims["sub"], claims["role"]
        if not isinstance(expires_at_s, int) or not isinstance(account, str) or role not in list(Role):
            raise NotAuthenticated("the access token's claims are malformed; get a new one with GetSwarmInfo")
        if self.swarm_id is not None and claims["iss"] != self.swarm_id:
            raise NotAuthenticated("the access token is of another swarm; join this one and use its token")
        if now_s >= expires_at_s:
            raise NotAuthenticated(
                f"the access token ended {now_s - expires_at_s:.0f} s ago; get a new one with GetSwarmInfo"
            )
        return Claims(account, Role(role), str(claims["iss"]), float(expires_at_s))

    def verify_enrolment(self, enrolment: str, server_id: str, now_s: float) -> Enrolment:
        """Return what the enrolment in a record of this server proves.

        Raises:
            NotPermitted: if it is not one of this swarm and server, or has ended.
        """
        try:
            claims = self._decode(enrolment, ENROLMENT_AUDIENCE, _ENROLMENT_CLAIMS)
        except NotAuthenticated:
            raise NotPermitted(f"server {server_id} carries no enrolment of this swarm") from None
        expires_at_s, account = claims["exp"], claims["sub"]
        swarm_id = self.swarm_id or claims["iss"]
        if (claims["server_id"], claims["iss"]) != (server_id, swarm_id) or not isinstance(expires_at_s, int):
            raise NotPermitted(f"the enrolment of server {server_id} is that of another server or swarm")
        if now_s >= expires_at_s:
            raise NotPermitted(f"the enrolment of server {server_id} has ended; it gets a new one with its next lease")
        return Enrolment(server_id, str(account), float(expires_at_s))

    def _decode(self, token: str, audience: str, required: Sequence[str]) -> dict[str, Any]:
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise NotAuthenticated("the access token is too long to be one; get a new one with GetSwarmInfo")
        options: Options = {**_UNTIMED, "require": list(required)}
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(kid) if isinstance(kid, str) else None
            if key is None:
                raise NotAuthenticated("the access token is signed by an unknown key; get a new one with GetSwarmInfo")
            return jwt.decode(token, key, [ALGORITHM], audience=audience, options=options)
        except (jwt.PyJWTError, ValueError):
            raise NotAuthenticated("the access token is not valid; get a new one with GetSwarmInfo") from None


def new_api_key() -> str:
    """Return a new API key. Its prefix lets log filters and secret scanners recognise it."""
    return API_KEY_PREFIX + secrets.token_urlsafe(32)


def api_key_digest(api_key: str) -> str:
    """Return what to store of an API key: SHA-256, 64 hexadecimal digits.

    Keys are random, so no salt is needed.
    """
    return hashlib.sha256(api_key.encode()).hexdigest()
