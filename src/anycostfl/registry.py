"""Methods, models and tasks by name: one file each, in this package, a custom folder or a plugin.

With ANYCOSTFL_PATH=FOLDER, FOLDER/methods/NAME.py, FOLDER/models/NAME.py and FOLDER/tasks/NAME.py
are found as if they were in the package. An installed distribution adds modules by entry points of
the groups `anycostfl.methods`, `anycostfl.models` and `anycostfl.tasks` (and files of
`anycostfl.profiles`, see `config.loading`). Both are set by the user who runs a process, so a
server cannot make a device run a file that its owner did not put there.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
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


@cache
def plugins(kind: str) -> dict[str, EntryPoint]:
    """What installed distributions add to a kind, by the names of modules."""
    found = sorted(entry_points(group=f"anycostfl.{kind}"), key=lambda point: point.value)
    return {module_name(point.name): point for point in found}


def module_name(name: str) -> str:
    """The name of the module that holds a method, model or task."""
    return name.replace("+", "_plus").replace("-", "_")


def own_files() -> dict[str, str]:
    """The SHA-256 of the user's own files, such as methods/mine.py; the first of a name counts."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for path in (path for folder in own_folders(kind) for path in Path(folder).glob("*.py")):
            found.setdefault(f"{kind}/{path.name}", digest(path))
        for name, point in plugins(kind).items():
            if source := _file_of(point):
                found.setdefault(f"{kind}/{name}.py", digest(source))
    return found


def _file_of(point: EntryPoint) -> Path | None:
    """The file of a plugin, if its package can be imported at all."""
    try:
        spec = find_spec(point.module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def modules_in(kind: str, folders: Sequence[str]) -> list[str]:
    """The names of the files that hold something to load, plugins included."""
    found = {info.name for info in pkgutil.iter_modules(folders)}
    return sorted(name for name in found | plugins(kind).keys() if not name.startswith("_"))


def load_file(package: str, module: str, constant: str) -> ModuleType:
    """The module with that constant; whatever is wrong with it is said with its name."""
    kind = package.rpartition(".")[2]
    point = plugins(kind).get(module)
    full_name = point.module if point else f"{package}.{module}"
    try:
        loaded = importlib.import_module(full_name)
    except Exception as error:
        raise UnknownNameError(
            f"{full_name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if point and find_spec(f"{package}.{module}"):
        raise UnknownNameError(
            f"the entry point {point.group}: {point.name} = {point.value} has the name of another "
            f"of the {kind}; rename it"
        )
    file = Path(str(loaded.__file__))
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
