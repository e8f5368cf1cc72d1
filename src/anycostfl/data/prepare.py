"""Preparation of samples: fitted once from sums over all holders, then applied by each of them.

Sums add up, so a server without data fits the same from what its devices send as from all samples
in one place (up to rounding). What was fitted is named tensors, and travels as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from anycostfl.data.samples import Dataset, Samples, Tree, call, places
from anycostfl.errors import ConfigError
from anycostfl.state import State

CHUNK = 1000  # samples that are converted to float64 at a time


@dataclass(frozen=True, slots=True)
class Prepare:
    """How inputs are prepared.

    measure: samples → named sums, which add up over holders.
    fit: sums over all samples → named tensors.
    apply: samples, and what was fitted → prepared samples.
    """

    measure: Callable[[Samples], State]
    fit: Callable[[State], State]
    apply: Callable[[Samples, State], Samples]


def prepare_dataset(how: Prepare | None, raw: Dataset, fitted: State | None = None) -> Dataset:
    """A dataset as models take it, prepared by what was fitted, or else is fitted on it now."""
    if how is None:
        return raw
    known = how.fit(how.measure(raw.train)) if fitted is None else fitted
    train, test = (how.apply(part, known) for part in (raw.train, raw.test))
    return replace(raw, train=train, test=test, fitted=known)


class PreparedModule(nn.Module):
    """A module that takes inputs as they are and prepares them itself."""

    def __init__(self, module: nn.Module, how: Prepare, fitted: State) -> None:
        super().__init__()
        self.module = module
        self._how, self._names = how, tuple(fitted)
        for i, name in enumerate(self._names):
            self.register_buffer(f"fitted{i}", fitted[name])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the module."""
        tree = named or (inputs[0] if len(inputs) == 1 else inputs)
        fitted = {name: self.get_buffer(f"fitted{i}") for i, name in enumerate(self._names)}
        return call(self.module, self._how.apply(Samples(tree, ()), fitted).inputs)


def add_sums(parts: Iterable[State]) -> dict[str, Tensor]:
    """The sums over several holders."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


# --- each channel by its own statistics -----------------------------------------------------------


def _floats(leaf: Tensor) -> Tensor:
    """Numbers as they are normalised: bytes as shares of 255."""
    return leaf.float() / 255 if leaf.dtype == torch.uint8 else leaf


def _normalised(inputs: Tree) -> Mapping[str, Tensor]:
    """The tensors that are normalised: numbers and bytes with channels, not whole numbers."""
    kinds = (torch.uint8, torch.float32)
    return {p: leaf for p, leaf in places(inputs) if leaf.dtype in kinds and leaf.dim() > 1}


def _measure_channels(samples: Samples) -> State:
    """Count, sum and sum of squares of every channel (dimension 1), in float64."""
    sums: dict[str, Tensor] = {}
    for place, leaf in _normalised(samples.inputs).items():
        total = torch.zeros(leaf.shape[1], dtype=torch.float64)
        squares = torch.zeros_like(total)
        others = [dim for dim in range(leaf.dim()) if dim != 1]
        for start in range(0, len(leaf), CHUNK):  # not all samples at once
            wide = _floats(leaf[start : start + CHUNK]).double()
            total += wide.sum(dim=others)
            squares += wide.square().sum(dim=others)
        count = torch.full_like(total, leaf.numel() / leaf.shape[1])
        sums |= {f"count{place}": count, f"sum{place}": total, f"squares{place}": squares}
    return sums


def _fit_channels(sums: State) -> State:
    """Mean and standard deviation of every channel."""
    fitted: dict[str, Tensor] = {}
    for name in sums:
        if name.startswith("count"):
            place = name.removeprefix("count")
            count = sums[name]
            mean = sums[f"sum{place}"] / count
            spread = sums[f"squares{place}"] - count * mean.square()
            std = (spread / (count - 1).clamp(min=1)).clamp(min=0).sqrt()
            fitted |= {f"mean{place}": mean.float(), f"std{place}": std.float().clamp(min=1e-6)}
    return fitted


def _apply_channels(samples: Samples, fitted: State) -> Samples:
    """Minus the mean, divided by the standard deviation of the channel."""
    done = {}
    for place, leaf in _normalised(samples.inputs).items():
        mean, std = (fitted.get(f"{name}{place}", torch.zeros(0)) for name in ("mean", "std"))
        if mean.numel() != leaf.shape[1]:
            raise ConfigError(
                [f"inputs{place}: given {leaf.shape[1]} channels, must have {mean.numel()} here"]
            )
        is_traced = torch.compiler.is_compiling()  # an exported graph cannot ask
        if std.numel() != mean.numel() or not (is_traced or (std > 0).all()):
            raise ConfigError(
                [f"std{place}: given {std.tolist()}, must be one number > 0 for each channel"]
            )
        shape = (1, -1, *(1 for _ in leaf.shape[2:]))
        done[place] = (_floats(leaf) - mean.view(shape)) / std.view(shape)
    leaves = iter([done.get(place, leaf) for place, leaf in places(samples.inputs)])
    inputs = tree_map(lambda _: next(leaves), samples.inputs)
    return Samples(inputs, samples.targets, samples.owners)


STANDARDIZE = Prepare(_measure_channels, _fit_channels, _apply_channels)
"""Every channel (dimension 1) to mean 0 and standard deviation 1 over all training samples."""


USUAL_MEAN, USUAL_STD = 3.0, (0.1, 10.0)


def is_unscaled(samples: Samples) -> bool:
    """Whether inputs are bytes, or numbers far from mean 0 and standard deviation 1."""
    if any(leaf.dtype == torch.uint8 for leaf in _normalised(samples.inputs).values()):
        return True
    fitted = _fit_channels(_measure_channels(samples))
    means = torch.cat(
        [v for name, v in fitted.items() if name.startswith("mean")] or [torch.zeros(1)]
    )
    stds = torch.cat([v for name, v in fitted.items() if name.startswith("std")] or [torch.ones(1)])
    varies = stds > 1e-5
    low, high = USUAL_STD
    usual = (means.abs() <= USUAL_MEAN) & (low <= stds) & (stds <= high)
    return bool((varies & ~usual).any())


# --- characters by their place in a vocabulary ----------------------------------------------------


def _measure_codes(samples: Samples) -> State:
    """How often every code occurs in inputs and targets."""
    codes = torch.cat([samples.inputs.flatten(), samples.targets.flatten()]).long()
    return {"counts": torch.bincount(codes, minlength=256).double()}


def _fit_codes(sums: State) -> State:
    """The codes that occur, in ascending order."""
    return {"codes": sums["counts"].nonzero().flatten()}


def _apply_codes(samples: Samples, fitted: State) -> Samples:
    """Codes as places in the vocabulary from 1 on; 0 stands for all that it does not have."""
    codes = fitted["codes"]
    table = codes.new_zeros(256)
    table[codes] = torch.arange(1, len(codes) + 1)
    inputs, targets = (
        tree_map(lambda leaf: table[leaf.long()], tree)
        for tree in (samples.inputs, samples.targets)
    )
    return Samples(inputs, targets, samples.owners)


VOCABULARY = Prepare(_measure_codes, _fit_codes, _apply_codes)
"""Bytes of text as places in the vocabulary of all training samples."""
