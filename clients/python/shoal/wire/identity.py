"""Ed25519 identities: the key, the id that follows from it, and signatures over exact bytes.

A signature covers a context string, a zero byte and the payload, so that bytes signed for one purpose are
worthless for another. Does not know what is signed.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.swarm.snapshot import Signed
from shoal.wire.errors import Corrupted, InvalidRequest
from shoal.wire.private_files import load_or_create_private

PUBLIC_KEY_BYTES = 32
ID_CHARACTERS = 32


def server_id_of(public_key: bytes) -> str:
    """Return the id of a public key (32 bytes).

    It is the first 32 characters of the lower-case base32 of the key's SHA-256, so it is a valid DNS label.
    """
    return base64.b32encode(hashlib.sha256(public_key).digest()).decode("ascii").lower()[:ID_CHARACTERS]


class IdentityKey:
    """A private key and what follows from it. `repr` never shows the key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.server_id: str = server_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"IdentityKey({self.server_id})"

    @classmethod
    def generate(cls) -> IdentityKey:
        """Make a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> IdentityKey:
        """Read the key from a PEM file (PKCS 8, mode 0600), or make one and store it there.

        Raises:
            InvalidRequest: if the file is not an Ed25519 key, or other users may read it.
        """
        pem = load_or_create_private(path, lambda: _to_pem(Ed25519PrivateKey.generate()))
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidRequest(f"{path} is not an Ed25519 private key in PEM; move it away to have a new one made")
        return cls(key)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """The key itself, for libraries that sign with it."""
        return self._private_key

    def sign(self, context: str, payload: bytes) -> Signed:
        """Sign `payload` for the purpose that `context` names."""
        return Signed(payload, self.server_id, self._private_key.sign(_message(context, payload)))


def verify(signed: Signed, context: str, public_key: bytes) -> None:
    """Check that the holder of `public_key` (32 bytes) signed these bytes for this purpose.

    Raises:
        Corrupted: if not.
    """
    if signed.key_id != server_id_of(public_key):
        raise Corrupted(f"the {context} names key {signed.key_id[:64]!r} but carries another public key")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, _message(context, signed.payload))
    except (InvalidSignature, ValueError):
        raise Corrupted(f"the signature of the {context} of {signed.key_id} does not fit its bytes") from None


def _message(context: str, payload: bytes) -> bytes:
    return context.encode() + b"\0" + payload


def _to_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
