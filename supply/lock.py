"""Write supply/requirements.lock: every package that the checks install, with its hashes.

python supply/lock.py    # asks the package index, which must offer what constraints.txt pins
pip install --require-hashes --no-deps --requirement supply/requirements.lock

pip resolves `.[dev]` within constraints.txt and reports the file that it chose for each package.
Hashes are those of files for one platform, which the first line names. With them, a file that was
replaced on the index, or on the way, is refused.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "supply" / "requirements.lock"
EXTRAS = "dev,fuzz"


def main() -> None:
    """Resolve, and write the lock."""
    LOCK.write_text(lock(resolve()))
    print(f"{LOCK.relative_to(ROOT)}: {len(read(LOCK.read_text()))} packages")


def resolve() -> list[dict[str, Any]]:
    """What pip would install."""
    with tempfile.TemporaryDirectory(prefix="lock-") as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        what = ["--constraint", "constraints.txt", "--report", str(report), f".[{EXTRAS}]"]
        subprocess.run([*pip, *what], cwd=ROOT, check=True)  # noqa: S603 - our own interpreter
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return found


def lock(found: list[dict[str, Any]]) -> str:
    """The lock of pip's report, without this project itself."""
    lines = [f"# Python {platform.python_version()}, {sys.platform}-{platform.machine()}"]
    for item in sorted(found, key=lambda item: str(item["metadata"]["name"]).lower()):
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if name.lower() == "anycostfl":
            continue
        if "sha256" not in hashes:
            raise SystemExit(f"{name} {version}: the index names no SHA-256 of it")
        lines.append(f"{name}=={version} --hash=sha256:{hashes['sha256']}")
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of every package in a lock, by its name in small letters."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pinned, _, digest = line.partition(" --hash=sha256:")
            name, _, version = pinned.partition("==")
            found[name.lower().replace("_", "-")] = version, digest
    return found


if __name__ == "__main__":
    main()
