"""One file holds all that a device needs to join, for that device alone."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest

from anycostfl.errors import ConfigError
from anycostfl.flower.bundle import identity_of, read_bundle, unit_of, write_bundle
from anycostfl.flower.keys import make_keys, private_key, public_key, public_pem
from command_line import Call


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["192.168.1.10"], ["ann", "bob", "cy"])
    return tmp_path / "keys"


def test_a_bundle_holds_the_devices_key_the_authority_and_the_address(keys: Path) -> None:
    path = write_bundle(keys, "ann", 9443)
    assert path.stat().st_mode & 0o077 == 0
    with identity_of(path) as who:
        assert (who.server, who.device) == ("192.168.1.10:9443", 0)
        assert who.key is not None
        assert who.key.stat().st_mode & 0o077 == 0
        own = public_pem(private_key(who.key).public_key())
        assert own == public_key(keys / "devices/ann.pub")
        assert who.trust is not None
        assert ssl.create_default_context(cafile=who.trust).cert_store_stats()["x509_ca"] == 1
    assert not who.key.exists()
    assert "ca.key" not in path.read_text()
    assert (keys / "ca.key").read_text() not in path.read_text()


def test_numbers_are_those_of_the_first_bundle(keys: Path) -> None:
    for name in ("bob", "ann", "cy", "bob"):
        write_bundle(keys, name, 9443)
    numbers = {p.stem: read_bundle(p).device for p in (keys / "bundles").glob("*")}
    assert numbers == {"bob": 0, "ann": 1, "cy": 2}
    (keys / "bundles/ann.bundle").unlink()
    assert read_bundle(write_bundle(keys, "ann", 9443)).device == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("version = 1", "version = 2"), "given version 2, must be 1"),
        (lambda text: text.replace("device = 0", 'device = "x"'), "has no valid device"),
        (lambda text: text[: len(text) // 2], "cannot be read|has no valid"),
        (lambda _: "\x00", "cannot be read"),
    ],
)
def test_a_damaged_bundle_is_refused(keys: Path, change: object, words: str) -> None:
    path = write_bundle(keys, "ann", 9443)
    assert callable(change)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=words):
        read_bundle(path)


def test_a_unit_joins_by_absolute_paths(keys: Path) -> None:
    path = write_bundle(keys, "ann", 9443)
    unit = unit_of(read_bundle(path), ["join", "--bundle", str(path), "--data", "a b.npz"])
    [command] = re.findall("^ExecStart=(.*)$", unit, re.M)
    assert command.endswith(f"-m anycostfl join --bundle {path} --data 'a b.npz'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1", "--bundle", "x"], "--bundle: given with SERVER"),
        (["--bundle", "x", "--device", "1"], "--bundle: given with SERVER"),
        (["--bundle", "nothing.bundle"], "nothing.bundle cannot be read"),
        ([], "SERVER: missing"),
        (["127.0.0.1:1"], "--device: missing"),
    ],
)
def test_who_a_device_is_is_said_once(call: Call, arguments: list[str], words: str) -> None:
    code, _, told = call("join", *arguments)
    assert code == 2
    assert words in told


def test_keys_writes_bundles_and_says_which_file_goes_where(call: Call, tmp_path: Path) -> None:
    code, shown, _ = call("keys", "--host", "127.0.0.1", "--bundle", "pi4", "--port", "9444")
    assert code == 0
    assert "bundles/pi4.bundle" in shown
    assert read_bundle(tmp_path / "keys/bundles/pi4.bundle").server == "127.0.0.1:9444"
