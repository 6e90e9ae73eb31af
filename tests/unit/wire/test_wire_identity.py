"""Keys, ids, signatures and private files."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.swarm.snapshot import Signed
from shoal.wire.errors import Corrupted, InvalidRequest
from shoal.wire.identity import IdentityKey, server_id_of, verify
from shoal.wire.private_files import load_or_create_private, write_private


def test_id_is_a_dns_label_that_follows_from_the_key() -> None:
    key = IdentityKey.generate()
    assert re.fullmatch("[a-z2-7]{32}", key.server_id)
    assert server_id_of(key.public_key) == key.server_id


def test_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    first = IdentityKey.load_or_create(path)
    assert IdentityKey.load_or_create(path).public_key == first.public_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["identity.pem"]


def test_key_does_not_show_itself() -> None:
    key = IdentityKey.generate()
    assert repr(key) == f"IdentityKey({key.server_id})"


def test_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    IdentityKey.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        IdentityKey.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"])
def test_damaged_key_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    write_private(path, content)
    with pytest.raises(InvalidRequest, match=r"identity\.pem is not an Ed25519 private key"):
        IdentityKey.load_or_create(path)


def test_processes_that_create_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    code = (
        "import sys, pathlib; from shoal.wire.identity import IdentityKey;"
        "print(IdentityKey.load_or_create(pathlib.Path(sys.argv[1])).server_id)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert len({child.communicate(timeout=60)[0] for child in children}) == 1
    assert all(child.returncode == 0 for child in children)


def test_the_first_writer_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def slow_create() -> bytes:
        write_private(path, b"the other was faster")
        return b"too late"

    assert load_or_create_private(path, slow_create) == b"the other was faster"


def test_signature_covers_context_and_payload() -> None:
    key, other = IdentityKey.generate(), IdentityKey.generate()
    signed = key.sign("context", b"payload")
    verify(signed, "context", key.public_key)
    wrong = [
        (replace(signed, payload=b"payloae"), "context", key.public_key),
        (replace(signed, signature=bytes(64)), "context", key.public_key),
        (replace(signed, signature=b"short"), "context", key.public_key),
        (replace(signed, key_id=other.server_id), "context", key.public_key),
        (signed, "contex", key.public_key),
        (signed, "context", other.public_key),
        (signed, "context", b"short"),
        (Signed(b"textpayload", signed.key_id, signed.signature), "con", key.public_key),
    ]
    for forged, context, public_key in wrong:
        with pytest.raises(Corrupted):
            verify(forged, context, public_key)
