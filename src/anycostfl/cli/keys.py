"""`anycostfl keys`: certificates and keys for a fleet of real devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, prompt

from anycostfl.cli._console import Json, emit_json, note, print_table, say
from anycostfl.cli._flower import need_flower
from anycostfl.errors import ConfigError

PASSPHRASE = "ANYCOSTFL_PASSPHRASE"  # noqa: S105 - the name of an environment variable
SHORTEST = 12  # characters of a passphrase

RenewServer = Annotated[
    bool, Option("--renew-server", help="Replace the server's key and certificate")
]
RenewAuthority = Annotated[
    bool, Option("--renew-authority", help="Replace the authority too: if a key of it leaked")
]
Passphrase = Annotated[
    bool, Option("--passphrase", help=f"ca.key is encrypted; asked for, or ${PASSPHRASE}")
]


def keys(
    devices: Annotated[list[str] | None, Argument(help="Names of devices")] = None,
    host: Annotated[list[str] | None, Option(help="Name or address of the server")] = None,
    folder: Annotated[Path, Option("--out", help="Folder of the keys")] = Path("keys"),
    bundle: Annotated[
        list[str] | None,
        Option(metavar="DEVICE", help="Also write one file with all that this device needs"),
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="Port of the server, for bundles")] = 9443,
    renew: Annotated[list[str] | None, Option(help="Replace the key of this device")] = None,
    revoke: Annotated[list[str] | None, Option(help="Delete the key of this device")] = None,
    renew_server: RenewServer = False,
    renew_authority: RenewAuthority = False,
    passphrase: Passphrase = False,
    json: Json = False,
) -> None:
    """Create what is missing: an authority, the server's certificate, a key for each named device.

    A running `anycostfl serve --keys` admits devices as soon as their .pub file exists and removes
    those whose file is deleted. Another --host is added to the server's certificate.
    """
    need_flower()
    from anycostfl.flower import keys as files  # noqa: PLC0415 - optional
    from anycostfl.flower.bundle import write_bundle  # noqa: PLC0415
    from anycostfl.flower.keys import ALWAYS, KeyFolder, names_of  # noqa: PLC0415

    secret = _ask() if passphrase else ""
    try:
        files.revoke(folder, [*(renew or []), *(revoke or [])])
        if renew_server or renew_authority:
            files.forget_server(folder, authority=renew_authority)
        named = [*(devices or []), *(bundle or []), *(renew or [])]
        made = files.make_keys(folder, host or [], named, secret)
        made += [write_bundle(folder, name, port) for name in bundle or []]
    except OSError as error:
        raise ConfigError([f"--out: given {folder}, but {error}"]) from error
    known = KeyFolder(folder)
    hosts, registered = names_of(known.certificate), known.registered()
    if json:
        paths = [str(path) for path in made]
        emit_json({"made": paths, "server_names": hosts, "devices": list(registered)})
        return
    rows = [("server", "ca.crt, server.crt, server.key, devices/*.pub", ", ".join(hosts))]
    for name, path in registered.items():
        bundled = folder / "bundles" / f"{name}.bundle"
        gets = f"bundles/{bundled.name}" if bundled.exists() else f"ca.crt, devices/{name}"
        rows.append((name, gets, "new" if path in made else ""))
    print_table(f"keys in {folder}", ("who", "gets", ""), rows)
    if set(hosts) <= set(ALWAYS):
        note("only this machine can reach the server; for others, give its address with --host")
    elif known.certificate in made and known.certificate_key not in made:
        say(
            f"{known.certificate} is new, for all hosts so far, with the same key: copy it to the "
            "server and restart `anycostfl serve`."
        )
    if renew_authority:
        say(f"{known.authority} is new: copy it to the server and to every device.")
    note(*files.check_expiry(known, strict=False))
    say(f"{known.authority_key} signs all of them: keep it secret.")


def _ask() -> str:
    """The passphrase of the authority's key."""
    given = os.environ.get(PASSPHRASE) or str(prompt("Passphrase of ca.key", hide_input=True))
    if len(given) < SHORTEST:
        raise ConfigError([f"--passphrase: must have at least {SHORTEST} characters"])
    return given
