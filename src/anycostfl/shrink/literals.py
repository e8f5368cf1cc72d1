"""Sizes in a model's code (`x.view(-1, 1024)`, `h[:, 8:]`), replaced while a sub-model runs.

A narrower copy runs the same code. A size that still has its value of the full model, where the
trace knows which channels it counts, is replaced by their number in the sub-model; a size that the
code computes from what it sees has another value already, and stays. Hooks switch this on only in
the modules that need it, so a sub-model remains an nn.Module of the same class and names.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from anycostfl.coupling.result import Site, Widths
from anycostfl.coupling.sizes import FAMILIES, Place, place_of_call

Replacements = Mapping[int, tuple[int, int | list[int]]]
"""By position among a call's sizes: the size in the full model, and the one instead."""

Table = Mapping[Place, Sequence[Replacements]]
"""What one module replaces: by place in its code, visit by visit."""


@dataclass
class Running:
    """A module that is running, and how often each place in its code was passed."""

    table: Table
    visits: Counter[Place] = field(default_factory=Counter)


class LiteralSizes(TorchFunctionMode):
    """On while a module with literal sizes runs; one for all modules of a sub-model."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Running] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the function, with other sizes if the running module says so."""
        del types
        kwargs = kwargs or {}
        family = FAMILIES.get(getattr(func, "__name__", ""))
        if family is not None and self.stack:
            running, place = self.stack[-1], place_of_call(sys._getframe(1))
            visits = running.table.get(place)
            if visits is not None:
                visit = running.visits[place]
                running.visits[place] += 1
                given = family.read(func, args, kwargs)
                replaced = visits[min(visit, len(visits) - 1)]
                return given.call([_fitting(s, replaced.get(i)) for i, s in enumerate(given.sizes)])
        return func(*args, **kwargs)


def _fitting(size: Any, replaced: tuple[int, int | list[int]] | None) -> Any:
    return replaced[1] if replaced is not None and size == replaced[0] else size


@dataclass
class Enter:
    """A hook before a module runs."""

    mode: LiteralSizes
    table: Table

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        """Switch the replacement on."""
        if not self.mode.stack:
            self.mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.mode.stack.append(Running(self.table))


@dataclass
class Leave:
    """A hook after a module ran, or failed."""

    mode: LiteralSizes

    def __call__(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        """Switch the replacement off."""
        self.mode.stack.pop()
        if not self.mode.stack:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def replace_sizes(model: nn.Module, sites: Sequence[Site], widths: Widths) -> None:
    """Let a sub-model of these widths replace the sizes in its code, in place."""
    tables: dict[str, dict[Place, dict[int, Replacements]]] = defaultdict(lambda: defaultdict(dict))
    for site in sites:
        tables[site.module][site.place][site.visit] = site.at(widths)
    mode = LiteralSizes()
    for name, places in tables.items():
        table = {
            place: _by_visit(visits) for place, visits in places.items() if any(visits.values())
        }
        if table:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(Enter(mode, table))
            module.register_forward_hook(Leave(mode), always_call=True)


def _by_visit(visits: Mapping[int, Replacements]) -> list[Replacements]:
    return [visits.get(visit, {}) for visit in range(max(visits) + 1)]
