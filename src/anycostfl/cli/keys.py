"""`anycostfl keys`: certificates and keys for a fleet of real devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from anycostfl.cli._console import Json, emit_json, note, print_table, say
from anycostfl.cli._flower import need_flower
from anycostfl.errors import ConfigError


def keys(
    devices: Annotated[list[str] | None, Argument(help="Names of devices")] = None,
    host: Annotated[list[str] | None, Option(help="Name or address of the server")] = None,
    folder: Annotated[Path, Option("--out", help="Folder of the keys")] = Path("keys"),
    json: Json = False,
) -> None:
    """Create what is missing: an authority, the server's certificate, a key for each named device.

    A running `anycostfl serve --keys` admits devices as soon as their .pub file exists and removes
    those whose file is deleted. Another --host is added to the server's certificate.
    """
    need_flower()
    from anycostfl.flower.keys import ALWAYS, KeyFolder, make_keys, names_of  # noqa: PLC0415 - optional

    try:
        made = make_keys(folder, host or [], devices or [])
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
        rows.append((name, f"ca.crt, devices/{name}", "new" if path in made else ""))
    print_table(f"keys in {folder}", ("who", "gets", ""), rows)
    if set(hosts) <= set(ALWAYS):
        note("only this machine can reach the server; for others, give its address with --host")
    elif known.certificate in made and known.certificate_key not in made:
        say(
            f"{known.certificate} is new, for all hosts so far, with the same key: copy it to the "
            "server and restart `anycostfl serve`."
        )
    say(f"{known.authority_key} signs all of them: keep it secret.")
