"""Print a software bill of materials (CycloneDX 1.6, JSON) of the environment this runs in.

python supply/sbom.py > sbom.json

Names, versions and licences are what installed packages say of themselves; hashes are those of
supply/requirements.lock, where the versions are the same. The same environment gives the same
bytes.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from supply.lock import LOCK, read

OWN = "anycostfl"


def main() -> None:
    """Print the document."""
    locked = read(LOCK.read_text()) if LOCK.exists() else {}
    print(json.dumps(document(locked), indent=1))


def document(locked: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Everything that is installed, this project first."""
    found = {normal(d.metadata["Name"]): d for d in metadata.distributions()}
    own = component(found.pop(OWN), {})
    parts = [component(found[name], locked) for name in sorted(found)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": parts,
    }


def component(package: metadata.Distribution, locked: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """One package."""
    name, version = normal(package.metadata["Name"]), package.version
    known, digest = locked.get(name, ("", ""))
    purl = f"pkg:pypi/{name}@{version}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version}
    entry["purl"] = purl
    if text := licence_of(package):
        entry["licenses"] = [{"license": {"name": text}}]
    if known == version:
        entry["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return entry


def licence_of(package: metadata.Distribution) -> str:
    """What a package says of its licence, on one line."""
    about = package.metadata
    classes = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if "License" in c]
    said = str(about["License-Expression"] or ", ".join(classes) or about["License"] or "")
    return said.splitlines()[0][:100] if said else ""


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    main()
