"""Certificates and keys of a fleet: an authority, the server's certificate, a key per device.

    ca.crt               every device gets a copy, to recognise the server
    ca.key               stays with the owner; signs server certificates
    server.crt/.key      the server's
    devices/NAME         a device's private key; goes to that device and nowhere else
    devices/NAME.pub     its public key; the server lets in exactly those in this folder

Elliptic curves throughout (P-384), as Flower wants them for its nodes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from anycostfl.errors import ConfigError
from anycostfl.files import atomic_write

AUTHORITY_DAYS, SERVER_DAYS, RENEW_DAYS = 3650, 825, 30
CURVES_ONLY = "must be an elliptic-curve key, as `anycostfl keys` makes"
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own processes come this way


class KeyFolder:
    """The files of a fleet's keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "ca.crt"  # the certificate that devices trust
        self.authority_key = folder / "ca.key"
        self.certificate = folder / "server.crt"
        self.certificate_key = folder / "server.key"

    def device(self, name: str) -> Path:
        """A device's private key."""
        return self.folder / "devices" / name

    def registered(self) -> dict[str, Path]:
        """The public key of every device that may take part."""
        found = (self.folder / "devices").glob("*.pub")
        return {path.stem: path for path in sorted(found)}


def make_keys(folder: Path, hosts: Sequence[str], devices: Sequence[str]) -> list[Path]:
    """Make what is missing or empty; the files that are new. Keys that exist are never replaced.

    A certificate that lacks a host, is about to expire or is that of a lost authority is made anew,
    for all it was good for.
    """
    problems = [
        f"device name: given {name!r}, allowed letters, digits, . _ - and no .pub at the end"
        for name in devices
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".pub")
    ]
    problems += [
        f"--host: given {host!r}, allowed a name such as board.lan or an address such as "
        "192.168.1.10, without a port"
        for host in hosts
        if not _is_host(host)
    ]
    if problems:
        raise ConfigError(problems)
    hosts = [str(_name(host).value) for host in hosts]
    keys = KeyFolder(folder)
    (folder / "devices").mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    if not _is_there(keys.authority):
        made += _make_authority(keys)
    if not _is_good(keys, hosts):
        made += _make_certificate(keys, hosts)
    for name in devices:
        made += _make_device(keys.device(name))
    return made


def _is_there(path: Path) -> bool:
    """Whether a file holds something; an empty one was left behind by a full disk."""
    return path.is_file() and path.stat().st_size > 0


def _is_good(keys: KeyFolder, hosts: Sequence[str]) -> bool:
    """Whether the server has a certificate of this authority's, for these hosts, and its key."""
    if not (_is_there(keys.certificate) and _is_there(keys.certificate_key)):
        return False
    loaded, authority = _certificate(keys.certificate), _certificate(keys.authority)
    try:
        loaded.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError):  # of an authority that was lost
        return False
    lasts = loaded.not_valid_after_utc - datetime.now(UTC) > timedelta(days=RENEW_DAYS)
    fits = loaded.public_key() == _own_key(keys.certificate_key).public_key()
    return lasts and fits and set(hosts) <= set(names_of(keys.certificate))


def names_of(certificate: Path) -> list[str]:
    """The names and addresses that a certificate is good for."""
    known = _certificate(certificate).extensions
    names = known.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError([f"{path}: not a certificate. Delete it to have it made anew"]) from error


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form by which Flower registers nodes."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def public_key(path: Path) -> bytes:
    """The public key in a file, in Flower's form."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except ValueError as error:
        raise ConfigError([f"{path}: not a public key ({error})"]) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError([f"{path}: {CURVES_ONLY}"])
    return public_pem(key)


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A device's private key."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError([f"--key: cannot read {path} ({error})"]) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError([f"{path}: {CURVES_ONLY}"])
    return key


def _make_authority(keys: KeyFolder) -> list[Path]:
    is_new = not _is_there(keys.authority_key)
    key = ec.generate_private_key(ec.SECP384R1()) if is_new else _own_key(keys.authority_key)
    usage = _usage(sign_certificates=True)
    builder = (
        _builder("anycostfl authority", "anycostfl authority", key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    if is_new:
        atomic_write(keys.authority_key, _pem(key), secret=True)
    atomic_write(keys.authority, _signed(builder, key))
    return [keys.authority, keys.authority_key] if is_new else [keys.authority]


def _make_certificate(keys: KeyFolder, hosts: Sequence[str]) -> list[Path]:
    if not _is_there(keys.authority_key):
        raise ConfigError(
            [f"--host: {keys.certificate} is not good for {', '.join(hosts) or keys.authority}, "
             f"and without {keys.authority_key} no other can be made"]
        )  # fmt: skip
    authority = _own_key(keys.authority_key)
    is_new = not _is_there(keys.certificate_key)
    key = ec.generate_private_key(ec.SECP384R1()) if is_new else _own_key(keys.certificate_key)
    before = names_of(keys.certificate) if _is_there(keys.certificate) else []
    names = dict.fromkeys((*(name for name in before if name not in ALWAYS), *hosts, *ALWAYS))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = (
        _builder("anycostfl server", "anycostfl authority", key.public_key(), SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
    )
    if is_new:
        atomic_write(keys.certificate_key, _pem(key), secret=True)
    atomic_write(keys.certificate, _signed(builder, authority))
    return [keys.certificate, keys.certificate_key] if is_new else [keys.certificate]


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (TypeError, ValueError):  # with a password, or no key at all
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError([f"{path}: not a key that `anycostfl keys` made"])
    return key


def _make_device(path: Path) -> list[Path]:
    """What is missing of a device's two files."""
    twin = path.with_name(f"{path.name}.pub")
    is_new = not _is_there(path)
    if not is_new and _is_there(twin):
        return []
    key = ec.generate_private_key(ec.SECP384R1()) if is_new else private_key(path)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    if is_new:
        atomic_write(path, private, secret=True)
    atomic_write(twin, public + f" {path.name}\n".encode())
    return [path, twin] if is_new else [twin]


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(hours=1)  # boards without a clock battery run late
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _is_host(host: str) -> bool:
    """Whether this is an address, or a name whose last part is not a number."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return bool(re.fullmatch(rf"({label}\.)*(?![0-9]+$){label}", host))


def _name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
