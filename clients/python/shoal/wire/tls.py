"""Self-signed P-256 certificates, made once, pinned by whoever calls.

There is no authority: a caller knows the exact certificate (from a signed record, the registry, or a hash
in the swarm's URL) and trusts nothing else. P-256, because grpc refuses Ed25519 certificates in its
handshake.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.wire.clock import now_s, utc_datetime
from shoal.wire.errors import Corrupted, InvalidRequest
from shoal.wire.private_files import load_or_create_private, write_private

REGISTRY_NAME = "registry.shoal"
ROUTER_NAME = "router.shoal"
DAY_S = 86_400
LIFE_S = 3650 * DAY_S


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its private key. `name` is its only TLS name."""

    der: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    name: str


def make_certificate(name: str) -> Certificate:
    """Make a self-signed P-256 certificate for the TLS name, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start_s = now_s() - DAY_S  # clocks of other machines may be behind
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_datetime(start_s))
        .not_valid_after(utc_datetime(start_s + LIFE_S))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    der = built.public_bytes(serialization.Encoding.DER)
    return Certificate(der, der_to_pem(der), key_pem, name)


def certificate_path(folder: Path, name: str) -> Path:
    """Return where `load_or_create_certificate` leaves the public certificate (PEM) for others to read."""
    return folder / f"{name}.cert.pem"


def load_or_create_certificate(folder: Path, name: str) -> Certificate:
    """Read `NAME.key.pem` (key and certificate) from the folder, or make it; leave `NAME.cert.pem` beside it.

    Raises:
        InvalidRequest: if the file is damaged, is for another name, or other users may read it.
    """
    path = folder / f"{name}.key.pem"

    def create() -> bytes:
        made = make_certificate(name)
        return made.key_pem + made.cert_pem

    key_pem, begin, rest = load_or_create_private(path, create).partition(b"-----BEGIN CERTIFICATE-----")
    cert_pem = begin + rest
    try:
        der = pem_to_der(cert_pem)
        found = certificate_name(der)
        serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, Corrupted):
        raise InvalidRequest(f"{path} is damaged; move it away to have a new certificate made") from None
    if found != name:
        raise InvalidRequest(f"{path} is a certificate for {found!r}, not for {name!r}; move it away")
    public = certificate_path(folder, name)
    if not public.exists() or public.read_bytes() != cert_pem:
        write_private(public, cert_pem)
    return Certificate(der, cert_pem, key_pem, name)


def der_to_pem(der: bytes) -> bytes:
    """Return a DER certificate as PEM."""
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def pem_to_der(pem: bytes) -> bytes:
    """Return the first certificate of a PEM file as DER.

    Raises:
        Corrupted: if there is none.
    """
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    except ValueError:
        raise Corrupted("expected a certificate in PEM") from None


_MALFORMED = (
    ValueError,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    UnsupportedAlgorithm,
)


def certificate_name(der: bytes) -> str:
    """Return the TLS name in a certificate (DER).

    Raises:
        Corrupted: if the bytes are not a certificate, or it does not have exactly one DNS name.
    """
    try:
        extensions = x509.load_der_x509_certificate(der).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns_names = names.get_values_for_type(x509.DNSName)
    except _MALFORMED:
        dns_names = []
    if len(dns_names) != 1:
        raise Corrupted("expected a certificate (DER) with one DNS name")
    return dns_names[0]


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate (DER) as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


def server_credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return what a grpc server needs to present the certificate."""
    return grpc.ssl_server_credentials([(certificate.key_pem, certificate.cert_pem)])
