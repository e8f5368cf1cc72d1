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
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from anycostfl.errors import ConfigError
from anycostfl.files import atomic_write

AUTHORITY_DAYS, SERVER_DAYS, RENEW_DAYS = 3650, 825, 30
AUTHORITY = "anycostfl authority"
CURVES_ONLY = "must be an elliptic-curve key, as `anycostfl keys` makes"
RENEW = "Renew it with `anycostfl keys`, and copy it to the server"
RENEW_AUTHORITY = (
    "Move it and ca.key away, make new ones with `anycostfl keys`, and copy ca.crt to every device"
)
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own processes come this way


class KeyFolder:
    """The files of a fleet's keys."""

    def __init__(self, folder: Path, passphrase: str = "") -> None:
        self.folder, self.passphrase = folder, passphrase  # of the authority's key
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


def make_keys(
    folder: Path, hosts: Sequence[str], devices: Sequence[str], passphrase: str = ""
) -> list[Path]:
    """Make what is missing or empty; the files that are new. Keys that exist are never replaced.

    A certificate that lacks a host, is about to expire or is that of a lost authority is made anew,
    for all it was good for. A passphrase encrypts the authority's key.
    """
    problems = [
        f"device name: given {name!r}, allowed letters, digits, . _ - and no .pub at the end"
        for name in devices
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".pub")
    ]
    names = {host: _name(host) for host in hosts}
    problems += [
        f"--host: given {host!r}, allowed a name such as board.lan or an address such as "
        "192.168.1.10, without a port"
        for host, name in names.items()
        if name is None
    ]
    if problems:
        raise ConfigError(problems)
    keys = KeyFolder(folder, passphrase)
    paths = [keys.authority, keys.authority_key, keys.certificate, keys.certificate_key]
    for name in devices:
        paths += [keys.device(name), keys.device(f"{name}.pub")]
    before = {path: _content(path) for path in paths}
    (folder / "devices").mkdir(parents=True, exist_ok=True)
    if passphrase and before[keys.authority_key]:
        _encrypt_authority(keys)
    if not before[keys.authority]:
        _make_authority(keys)
    wanted = [str(name.value) for name in names.values() if name]
    if not _is_good(keys, wanted):
        _make_certificate(keys, wanted)
    for name in devices:
        _make_device(keys.device(name))
    return [path for path, content in before.items() if _content(path) != content]


def _content(path: Path) -> bytes:
    """What a file holds; nothing if there is none, or an empty one that a full disk left."""
    return path.read_bytes() if path.is_file() else b""


def _is_good(keys: KeyFolder, hosts: Sequence[str]) -> bool:
    """Whether the server has a certificate of this authority's, for these hosts, and its key."""
    if not (_content(keys.certificate) and _content(keys.certificate_key)):
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


def expiry(path: Path) -> datetime:
    """When a certificate ends."""
    return _certificate(path).not_valid_after_utc


def check_expiry(keys: KeyFolder, *, strict: bool = True) -> list[str]:
    """Warnings about certificates that end soon; ConfigError for those that have, if strict."""
    problems, warnings, now = [], [], datetime.now(UTC)
    for path, remedy in ((keys.certificate, RENEW), (keys.authority, RENEW_AUTHORITY)):
        end = expiry(path)
        if end <= now:
            problems.append(f"{path}: expired on {end:%Y-%m-%d}. {remedy}")
        elif end <= now + timedelta(days=RENEW_DAYS):
            warnings.append(f"{path} expires on {end:%Y-%m-%d}. {remedy}")
    if problems and strict:
        raise ConfigError(problems)
    return [*problems, *warnings]


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form by which Flower registers nodes."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_key(path: Path) -> bytes:
    """The public key in a file, in Flower's form."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except ValueError as error:
        raise ConfigError([f"{path}: not a public key ({error})"]) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError([f"{path}: {CURVES_ONLY}"])
    return public_pem(key)


def private_key(
    path: Path,
    load: Callable[..., object] = serialization.load_ssh_private_key,
    passphrase: str = "",
) -> ec.EllipticCurvePrivateKey:
    """A private key, in the form of a device's unless it is loaded otherwise."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error
    if b"ENCRYPTED" in content and not passphrase:
        raise ConfigError([f"{path}: encrypted; give its passphrase with --passphrase"])
    try:
        key = load(content, password=passphrase.encode() if b"ENCRYPTED" in content else None)
    except (TypeError, ValueError) as error:  # TypeError: it has a password
        if b"ENCRYPTED" in content:
            raise ConfigError([f"{path}: this is not its passphrase"]) from error
        raise ConfigError([f"{path}: not a key that `anycostfl keys` made ({error})"]) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError([f"{path}: {CURVES_ONLY}"])
    return key


def _own_key(path: Path, passphrase: str = "") -> ec.EllipticCurvePrivateKey:
    """A key of the authority or the server, which is made if there is none."""
    if _content(path):
        return private_key(path, serialization.load_pem_private_key, passphrase)
    return _new_key(path, PrivateFormat.PKCS8, passphrase)


def _new_key(path: Path, form: PrivateFormat, passphrase: str = "") -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, form, passphrase)
    return key


def _write_key(
    path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat, passphrase: str
) -> None:
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        how = serialization.BestAvailableEncryption(passphrase.encode())
    atomic_write(path, key.private_bytes(Encoding.PEM, form, how), secret=True)


def _encrypt_authority(keys: KeyFolder) -> None:
    """Encrypt the authority's key, unless it is encrypted already."""
    path = keys.authority_key
    if b"ENCRYPTED" not in _content(path):
        _write_key(path, _own_key(path), PrivateFormat.PKCS8, keys.passphrase)


# --- the day a key leaks --------------------------------------------------------------------------


def revoke(folder: Path, devices: Sequence[str]) -> None:
    """Delete the keys of devices; a running server puts them out at once."""
    keys = KeyFolder(folder)
    if unknown := [name for name in devices if name not in keys.registered()]:
        known = ", ".join(keys.registered()) or "none"
        raise ConfigError([f"no key of {', '.join(unknown)} in {folder}; there are {known}"])
    for name in devices:
        keys.device(f"{name}.pub").unlink()
        keys.device(name).unlink(missing_ok=True)


def forget_server(folder: Path, *, authority: bool) -> None:
    """Delete the server's key, and the authority with it, so that `make_keys` makes new ones."""
    keys = KeyFolder(folder)
    keys.certificate_key.unlink(missing_ok=True)
    if authority:
        keys.authority.unlink(missing_ok=True)
        keys.authority_key.unlink(missing_ok=True)


# --- making them ----------------------------------------------------------------------------------


def _make_device(path: Path) -> None:
    """Make what is missing of a device's two files."""
    twin, is_new = path.with_name(f"{path.name}.pub"), not _content(path)
    if is_new or not _content(twin):
        key = _new_key(path, PrivateFormat.OpenSSH) if is_new else private_key(path)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        atomic_write(twin, public + f" {path.name}\n".encode())


def _make_authority(keys: KeyFolder) -> None:
    key = _own_key(keys.authority_key, keys.passphrase)
    builder = _builder(AUTHORITY, key.public_key(), AUTHORITY_DAYS, is_authority=True)
    _write(keys.authority, builder, key)


def _make_certificate(keys: KeyFolder, hosts: Sequence[str]) -> None:
    if not _content(keys.authority_key):
        raise ConfigError(
            [f"--host: {keys.certificate} is not good for {', '.join(hosts) or keys.authority}, "
             f"and without {keys.authority_key} no other can be made"]
        )  # fmt: skip
    authority = _own_key(keys.authority_key, keys.passphrase)
    key = _own_key(keys.certificate_key)
    before = names_of(keys.certificate) if _content(keys.certificate) else []
    good_for = [*(name for name in before if name not in ALWAYS), *hosts, *ALWAYS]
    names = [name for host in dict.fromkeys(good_for) if (name := _name(host))]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = (
        _builder("anycostfl server", key.public_key(), SERVER_DAYS, is_authority=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
    )
    _write(keys.certificate, builder, authority)


def _builder(
    subject: str, key: ec.EllipticCurvePublicKey, days: int, *, is_authority: bool
) -> x509.CertificateBuilder:
    """What all certificates say; the authority, and nobody else, may sign others."""
    start = datetime.now(UTC) - timedelta(hours=1)  # boards without a clock battery run late
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    path_length = 0 if is_authority else None
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(is_authority, path_length), critical=True)
        .add_extension(usage, critical=True)
    )


def _write(path: Path, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> None:
    atomic_write(path, builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))


def _name(host: str) -> x509.GeneralName | None:
    """An address, or a name whose last part is not a number; None if this is neither."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    fits = re.fullmatch(rf"({label}\.)*(?![0-9]+$){label}", host)
    return x509.DNSName(host) if fits else None
