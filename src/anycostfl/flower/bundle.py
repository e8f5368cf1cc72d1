"""One file for one device: its key, the certificate it trusts, the server's address, its number.

A bundle is TOML, readable by its owner only. Anyone who holds it can take the device's place.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from anycostfl.errors import ConfigError
from anycostfl.files import atomic_write
from anycostfl.flower.keys import ALWAYS, KeyFolder, names_of

VERSION = 1
LARGEST = 1 << 16  # bytes of a bundle
HEAD = "# anycostfl join --bundle FILE. It holds a private key: copy it to its device only.\n"
UNIT = """[Unit]
Description=anycostfl device {name}
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
Restart=always

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a device needs to join."""

    version: int
    name: str
    device: int
    server: str  # host:port
    ca: str
    key: str


def write_bundle(folder: Path, name: str, port: int) -> Path:
    """Write keys/bundles/NAME.bundle; a device keeps the number of its first bundle."""
    keys, target = KeyFolder(folder), folder / "bundles" / f"{name}.bundle"
    hosts = [host for host in names_of(keys.certificate) if host not in ALWAYS]
    others = {path: read_bundle(path) for path in sorted(target.parent.glob("*.bundle"))}
    taken = {bundle.device for path, bundle in others.items() if path != target}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    host = (hosts or ["127.0.0.1"])[0]
    bundle = Bundle(
        version=VERSION,
        name=name,
        device=others[target].device if target in others else free,
        server=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        ca=keys.authority.read_text(),
        key=keys.device(name).read_text(),
    )
    target.parent.mkdir(exist_ok=True)
    text = HEAD + tomli_w.dumps(asdict(bundle), multiline_strings=True)
    atomic_write(target, text.encode(), secret=True)
    return target


def read_bundle(path: Path) -> Bundle:
    """The bundle in a file."""
    try:
        with path.open("rb") as file:
            table = tomllib.loads(file.read(LARGEST).decode())
    except (OSError, ValueError) as error:
        raise ConfigError([f"--bundle: {path} cannot be read: {error}"]) from error
    kinds = {item.name: str if item.type == "str" else int for item in fields(Bundle)}
    wrong = [name for name, kind in kinds.items() if type(table.get(name)) is not kind]
    problems = [f"--bundle: {path} has no valid {name}" for name in wrong]
    if "version" not in wrong and table["version"] != VERSION:
        problems = [f"--bundle: given version {table['version']}, must be {VERSION}"]
    if problems:
        raise ConfigError(problems)
    return Bundle(**{name: table[name] for name in kinds})


@dataclass(frozen=True, slots=True)
class Identity:
    """Which device this is, where its server is, and the files that prove both."""

    server: str
    device: int
    trust: Path | None
    key: Path | None


@contextmanager
def identity_of(path: Path) -> Iterator[Identity]:
    """The identity in a bundle; its files are this user's only, and removed at the end."""
    bundle = read_bundle(path)
    with TemporaryDirectory(prefix="anycostfl-") as folder:
        trust, key = Path(folder, "ca.crt"), Path(folder, "key")
        atomic_write(trust, bundle.ca.encode())
        atomic_write(key, bundle.key.encode(), secret=True)
        yield Identity(bundle.server, bundle.device, trust, key)


def unit_of(bundle: Bundle, arguments: Sequence[str]) -> str:
    """A systemd unit that joins with these arguments."""
    command = shlex.join([sys.executable, "-P", "-m", "anycostfl", *arguments])
    return UNIT.format(name=bundle.name, command=command)
