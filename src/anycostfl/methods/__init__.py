"""Federated methods, one file each: `methods/NAME.py` has a constant `METHOD`, maybe `VARIANTS`.

A method is five functions. `rounds` and `device` call them, wherever devices run. None
remembers anything: what a device keeps from round to round is the residual of `feedback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from anycostfl.checks import FloatArray
from anycostfl.codec import Shapes, Upload
from anycostfl.errors import UnknownNameError
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.strategy import Limits, Strategies
from anycostfl.registry import load_file, module_name, modules_in, own_folders, unknown
from anycostfl.state import State, Update

__path__ = [*__path__, *own_folders("methods")]


@dataclass(frozen=True, slots=True)
class Method:
    """One federated method.

    plan: the strategy of every device of the cohort.
    plans_alone: whether that of a device follows from the device alone, which then plans itself.
    encode: an update and how to upload it → payload.
    decode: payload, expected shapes and what the server issued → update; PayloadError on anything
        malformed.
    weigh: α, the quality of β (mostly β) and sample counts of those who take part →
        aggregation weights; the counts are all one unless the method weighs by them (`by_samples`)
        or the configuration asks for it.
    prepare: what a device does to a sub-model, cut from that whole, before it trains, if anything.
    codec, feedback, momentum: what updates are coded with, if the method has no coding of its own,
        whether error feedback is part of it, and the server's momentum; the configuration may ask
        otherwise.
    server, step, average: the server's optimizer (`server.aggregate`, `server.adaptive`), its step,
        and how much of the averaged model stays when a round is added to it.
    takes_upload_ratio: whether αβ can be set by `[upload_ratio]`; not where its plan decides.
    rolls_channels: whether channels move on by one every round, instead of being sorted.
    proximal: what pulls local weights back to the global ones.
    levels: nested widths that local steps alternate between.
    rescale: weights, local steps and local momentum of those who take part → a factor for each
        update.
    strict: the same method as its users would run it where every budget has to be kept.
    """

    summary: str
    plan: Callable[[Devices, Workload, Limits], Strategies]
    encode: Callable[[State, Upload], bytes]
    decode: Callable[[bytes, Shapes, Upload], Update]
    weigh: Callable[[FloatArray, FloatArray, FloatArray], FloatArray]
    sorts_channels: bool
    plans_alone: bool = False
    by_samples: bool = False
    codec: str = "kernel"
    feedback: bool = False
    momentum: float = 0.0
    server: str = "sgd"
    step: float = 1.0
    average: float = 0.0
    takes_upload_ratio: bool = True
    rolls_channels: bool = False
    proximal: float = 0.0
    levels: tuple[float, ...] = ()
    prepare: Callable[[nn.Module, nn.Module], None] | None = None
    rescale: Callable[[FloatArray, FloatArray, float], FloatArray] | None = None
    strict: Method | None = None


def elements(shapes: Shapes) -> int:
    """How many elements an update of these shapes has."""
    return sum(map(math.prod, shapes.values()))


def names() -> list[str]:
    """Every method that can be loaded by name."""
    return [name.replace("_plus", "+") for name in modules_in("methods", __path__)]


def variants(name: str) -> list[str]:
    """The names of a method's variants, as `load` takes them."""
    return [f"{name}/{variant}" for variant in getattr(_module(name), "VARIANTS", {})]


def load(name: str) -> Method:
    """The method of that name, or a variant of it: `method/variant`."""
    base, _, variant = name.partition("/")
    if base not in names():
        raise unknown("method", name, names())
    module = _module(base)
    known: Mapping[str, Method] = {"": module.METHOD, **getattr(module, "VARIANTS", {})}
    if not all(isinstance(method, Method) for method in known.values()):
        raise UnknownNameError(f"{module.__file__}: METHOD and VARIANTS must be Methods")
    if variant not in known:
        there = ", ".join(variants(base)) or "none"
        raise UnknownNameError(f"no variant {name!r}; of {base} there are {there}")
    return known[variant]


def file_of(name: str) -> str:
    """The file of a method, in the package or in a custom folder."""
    return f"methods/{_module_name(name)}.py"


def _module(name: str) -> ModuleType:
    return load_file(__name__, _module_name(name), "METHOD")


def _module_name(name: str) -> str:
    return module_name(name.partition("/")[0])
