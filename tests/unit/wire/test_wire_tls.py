"""Certificates: made once, named, private."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.wire.clock import now_s
from shoal.wire.errors import Corrupted, InvalidRequest
from shoal.wire.tls import (
    LIFE_S,
    certificate_name,
    certificate_path,
    der_to_pem,
    fingerprint,
    load_or_create_certificate,
    make_certificate,
    pem_to_der,
)


def test_certificate_is_p256_for_one_name_and_ten_years() -> None:
    made = make_certificate("router.shoal")
    parsed = x509.load_der_x509_certificate(made.der)
    public_key = parsed.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    assert isinstance(public_key.curve, ec.SECP256R1)
    assert certificate_name(made.der) == "router.shoal"
    assert parsed.not_valid_before_utc.timestamp() < now_s() - 3600
    assert parsed.not_valid_after_utc.timestamp() > now_s() + LIFE_S - 2 * 86_400
    assert pem_to_der(der_to_pem(made.der)) == made.der
    assert len(fingerprint(made.der)) == 64
    assert "PRIVATE" not in repr(made)


def test_files_are_made_once_and_the_key_is_private(tmp_path: Path) -> None:
    first = load_or_create_certificate(tmp_path, "registry.shoal")
    public = certificate_path(tmp_path, "registry.shoal")
    assert b"PRIVATE" not in public.read_bytes()
    assert stat.S_IMODE((tmp_path / "registry.shoal.key.pem").stat().st_mode) == 0o600
    public.unlink()
    assert load_or_create_certificate(tmp_path, "registry.shoal") == first
    assert pem_to_der(public.read_bytes()) == first.der


def test_damaged_and_misplaced_files_are_named(tmp_path: Path) -> None:
    load_or_create_certificate(tmp_path, "a.shoal")
    (tmp_path / "a.shoal.key.pem").rename(tmp_path / "b.shoal.key.pem")
    with pytest.raises(InvalidRequest, match=r"for 'a\.shoal', not for 'b\.shoal'"):
        load_or_create_certificate(tmp_path, "b.shoal")
    (tmp_path / "b.shoal.key.pem").write_bytes(b"garbage")
    with pytest.raises(InvalidRequest, match="damaged"):
        load_or_create_certificate(tmp_path, "b.shoal")


@pytest.mark.parametrize("der", [b"", b"garbage", make_certificate("a.shoal").der[:-10]])
def test_what_is_no_certificate_is_corrupted(der: bytes) -> None:
    with pytest.raises(Corrupted):
        certificate_name(der)
