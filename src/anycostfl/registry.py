"""Methods, models and tasks by name: one file each, in this package or in a custom folder.

With ANYCOSTFL_PATH=FOLDER, FOLDER/methods/NAME.py, FOLDER/models/NAME.py and FOLDER/tasks/NAME.py
are found as if they were in the package. The environment is set by the user who runs a process, so
a server cannot make a device run a file that its owner did not put there.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from anycostfl.errors import UnknownNameError

VARIABLE = "ANYCOSTFL_PATH"
KINDS = ("methods", "models", "tasks")
IN_MEMORY = "in-memory"  # the name of a task or model that was given as a Python object


def own_folders(kind: str) -> list[str]:
    """Folders of custom methods, models or tasks, after the package's."""
    given = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [str(Path(folder, kind).resolve()) for folder in given if folder]


def own_files() -> dict[str, str]:
    """The SHA-256 of the user's own files, such as methods/mine.py; the first of a name counts."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for path in (path for folder in own_folders(kind) for path in Path(folder).glob("*.py")):
            found.setdefault(f"{kind}/{path.name}", digest(path))
    return found


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def modules_in(folders: Sequence[str]) -> list[str]:
    """The names of the files that hold something to load."""
    found = (info.name for info in pkgutil.iter_modules(folders))
    return sorted(name for name in found if not name.startswith("_"))


def load_file(package: str, module: str, constant: str) -> ModuleType:
    """The module with that constant; whatever is wrong with it is said with its name."""
    try:
        loaded = importlib.import_module(f"{package}.{module}")
    except Exception as error:
        raise UnknownNameError(
            f"{package}.{module} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    kind, file = package.rpartition(".")[2], Path(str(loaded.__file__))
    own = own_folders(kind)
    twins = [twin for folder in own if (twin := Path(folder, file.name)).is_file()]
    if twins and str(file.parent) not in own:
        raise UnknownNameError(f"{twins[0]} has the name of one of the package's {kind}; rename it")
    if not hasattr(loaded, constant):
        raise UnknownNameError(f"{loaded.__file__} has no constant {constant}")
    return loaded


def unknown(what: str, name: str, known: Sequence[str]) -> UnknownNameError:
    """The error for a name that no file has."""
    there = f"{meant(name, known)}there are {', '.join(known)}"
    return UnknownNameError(f"no {what} {name!r}; {there}{_looked()}")


def meant(name: str, known: Sequence[str]) -> str:
    """A question after the name that was probably meant, if one is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _looked() -> str:
    """Where custom files were looked for, or how to name such a folder."""
    where = os.environ.get(VARIABLE)
    if where:
        return f" (looked in {VARIABLE}={where} too)"
    return f" (for a custom one, set {VARIABLE}; docs/tutorials/own-data.md)"
