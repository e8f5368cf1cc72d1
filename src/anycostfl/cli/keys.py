"""`anycostfl keys`: certificates and keys of a fleet of real devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anycostfl.cli._console import Json, emit_json, note, out, say, table
from anycostfl.cli._flower import need_flower
from anycostfl.errors import ConfigError


def keys(
    devices: Annotated[list[str] | None, typer.Argument(help="Names of devices")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which devices reach the server")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where the keys lie")] = Path("keys"),
    json: Json = False,
) -> None:
    """Make what is missing: an authority, the server's certificate, a key for every device named.

    A running `anycostfl serve --keys` lets new devices in as soon as their .pub file is there, and
    puts out those whose file is removed. A further --host is added to the server's certificate.
    """
    need_flower()
    from anycostfl.flower.keys import ALWAYS, KeyFolder, make_keys, names_of  # noqa: PLC0415 - optional

    try:
        made = make_keys(folder, host or [], devices or [])
    except OSError as error:
        raise ConfigError([f"--out: given {folder}, but {error}"]) from error
    known = KeyFolder(folder)
    if json:
        emit_json(
            {
                "made": [str(path) for path in made],
                "server_names": names_of(known.certificate),
                "devices": list(known.registered()),
            }
        )
        return
    rows = [
        ("server", "ca.crt, server.crt, server.key, devices/*.pub",
         ", ".join(names_of(known.certificate))),
        *(
            (name, f"ca.crt, devices/{name}", "new" if path in made else "")
            for name, path in known.registered().items()
        ),
    ]  # fmt: skip
    out.print(table(f"keys in {folder}", ("who", "gets", ""), rows))
    if set(names_of(known.certificate)) <= set(ALWAYS):
        note(
            "the server can be reached from this machine only; for others, give its name or "
            "address with --host"
        )
    elif known.certificate in made and known.certificate_key not in made:
        say(
            f"{known.certificate} is new, for these hosts and those before, with the key it had: "
            "copy it to the server and start `anycostfl serve` again."
        )
    say(f"{known.authority_key} signs for all of them: keep it to yourself.")
