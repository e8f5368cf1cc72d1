"""A trace is verified on the real model before it is used.

Two experiments. First, permuting channels must not change the output: a group whose rotation or
shuffle changes it is pinned. Second, a cut must match the trace: at random widths and at the
narrowest, every module of the sub-model, and every slice, split or reshape, must return the shapes
that the trace predicts, and the sub-model must run in training mode, too. If one does not, cuts
that tell every two widths apart are tried as well, so that no repair passes by luck: half of the
widths are full, the others narrow, one cut for every bit of a width's number and one for its
complement.

A failing cut names the module and operation that returned something else, and so the groups that
meet there. The repairs, in this order: keep at least two channels, tie the widths of the failing
module, replace the sizes in the model's code (with or without tied widths), pin the groups. Blocks
that are equal but for their number are repaired together. Only the cut that failed says whether a
repair helps; in the end, all cuts must pass.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from anycostfl.coupling import trace
from anycostfl.coupling.atoms import Reason
from anycostfl.coupling.result import Coupling, Widths
from anycostfl.coupling.tracer import Observer, evaluation, follow, tensors_in, train_mode
from anycostfl.shrink.cut import CutSpec, permute_in_place
from anycostfl.shrink.widths import TiedWidths, Ties, regions
from anycostfl.state import State, tensors_of

TOLERANCE = 1e-5
"""How far permuted channels may change the output, relative to its largest entry."""

TRIALS = 2
"""Random widths, in addition to the narrowest."""


def verified_spec(
    model: nn.Module, inputs: Sequence[Any], whole: Mapping[str, Reason] | None = None
) -> CutSpec:
    """Trace a model and keep only what both experiments confirm.

    `whole` names tensors that are neither sorted nor cut, and says why.
    """
    coupling = _kept_whole(trace(model, inputs), whole or {})
    coupling = pin_order_dependent(model, inputs, coupling)
    spec = CutSpec(model, coupling, _untied(coupling))
    if first_failure(spec, inputs, range(1 + TRIALS)) is None:
        return spec
    while (failure := first_failure(spec, inputs, range(_cuts(spec)))) is not None:
        while failure is not None:
            spec, failure = _repair(spec, failure, inputs)
    return spec


def _kept_whole(coupling: Coupling, whole: Mapping[str, Reason]) -> Coupling:
    """Pin the groups that run through these tensors."""
    first = {coupling.aliases[name]: reason for name, reason in whole.items()}
    for reason in dict.fromkeys(first.values()):
        names = {
            group.name
            for group in coupling.groups
            if any(first.get(slot.tensor) == reason for slot in group.slots)
        }
        coupling = coupling.freeze(names, reason)
    return coupling


def _untied(coupling: Coupling) -> Ties:
    return tuple(TiedWidths(((group.name, group.size),)) for group in coupling.groups)


# --- permuting channels must not change the output ---------------------------------------------


def pin_order_dependent(model: nn.Module, inputs: Sequence[Any], coupling: Coupling) -> Coupling:
    """Pin every group whose channels turn out not to be exchangeable."""
    with evaluation(model):
        names = [group.name for group in coupling.groups]
        if _displacement(model, inputs, coupling, names) <= TOLERANCE:
            return coupling
        for name, moved in _moving(model, inputs, coupling, names):
            why = f"permuting its channels changed the output by {moved:.1e}"
            coupling = coupling.freeze([name], Reason("permutation", "", why))
    return coupling


def _moving(
    model: nn.Module, inputs: Sequence[Any], coupling: Coupling, names: Sequence[str]
) -> list[tuple[str, float]]:
    """The groups among these that change the output on their own, found by halving."""
    found = []
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        moved = _displacement(model, inputs, coupling, part) if part else 0.0
        if moved <= TOLERANCE:  # false for NaN
            continue
        found += [(part[0], moved)] if len(part) == 1 else _moving(model, inputs, coupling, part)
    return found


def _displacement(
    model: nn.Module, inputs: Sequence[Any], coupling: Coupling, names: Sequence[str]
) -> float:
    """The relative change of the output when these groups are rotated or shuffled."""
    found = _changes(model, inputs, coupling, names)
    if not found <= TOLERANCE:  # also true for NaN
        # Rounding alone can change the output of a deep model this much: repeat in float64.
        with contextlib.suppress(RuntimeError):  # a model may require its own dtype
            return _changes(model, inputs, coupling, names, torch.float64)
    return found


def _changes(
    model: nn.Module,
    inputs: Sequence[Any],
    coupling: Coupling,
    names: Sequence[str],
    dtype: torch.dtype | None = None,
) -> float:
    """The largest relative difference of the output, rotated or shuffled; NaN if it has one."""
    generator = torch.Generator().manual_seed(0)
    own = {n: t for n, t in tensors_of(model).items() if coupling.aliases[n] == n}
    state = _perturbed(own, generator, dtype)
    rotated = {g.name: torch.arange(g.size).roll(int(g.name in names)) for g in coupling.groups}
    shuffled = {
        name: places[torch.randperm(len(places), generator=generator)] if name in names else places
        for name, places in rotated.items()
    }
    before = torch.cat(_outputs(model, state, inputs))
    largest = before.abs().max().clamp(min=1e-30)
    found = torch.zeros((), dtype=torch.float64)
    for order in (rotated, shuffled):
        permute_in_place(coupling, state, order)
        after = torch.cat(_outputs(model, state, inputs))
        permute_in_place(coupling, state, {name: torch.argsort(p) for name, p in order.items()})
        found = torch.maximum(found, (before - after).abs().max() / largest)
    return float(found)


def _perturbed(
    state: State, generator: torch.Generator, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """A copy with noise added: freshly initialised layers are often all zeros or ones."""
    perturbed = {}
    for name, tensor in state.items():
        copied = tensor.detach().clone()
        if tensor.is_floating_point() and tensor.numel():
            scale = 0.1 * (copied.square().mean().sqrt() + 0.1)
            noise = torch.rand(tensor.shape, generator=generator).to(tensor)
            copied = copied + scale * noise  # upwards: variances stay positive
        perturbed[name] = copied.to(dtype) if dtype and tensor.is_floating_point() else copied
    return perturbed


def _outputs(model: nn.Module, state: State, inputs: Sequence[Any]) -> list[Tensor]:
    dtype = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    given = tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )
    result = torch.func.functional_call(model, dict(state), given)
    return [x.double().flatten() for x in tensors_in(result)]


# --- a cut must match the trace ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """The first module call or operation of a cut whose result is not what the trace predicts."""

    cut: int
    position: int
    module: str
    message: str


def first_failure(spec: CutSpec, inputs: Sequence[Any], cuts: Iterable[int]) -> Failure | None:
    """Try cuts in turn; return the first failure, or None."""
    for number in cuts if spec.ties else ():
        widths: dict[str, int] = {}
        for tied, position in zip(spec.ties, _positions(spec.ties, number), strict=True):
            widths |= tied.widths(position)
        failure = _try_cut(spec, widths, inputs, number)
        if failure is not None:
            return failure
    return None


def _cuts(spec: CutSpec) -> int:
    """The number of cuts that tell every two widths apart, and the first ones."""
    return 1 + TRIALS + 2 * len(spec.ties).bit_length()


def _positions(ties: Ties, number: int) -> list[int]:
    """A cut to try: all at their narrowest, random ones, or half of the widths narrow."""
    if number == 0:
        return [tied.least for tied in ties]
    if number <= TRIALS:
        random = np.random.default_rng(number)
        return [int(random.integers(t.least, max(t.steps, t.least + 1))) for t in ties]
    bit, narrow = divmod(number - TRIALS - 1, 2)
    return [t.least if (i >> bit) & 1 == narrow else t.steps for i, t in enumerate(ties, 1)]


def _try_cut(
    spec: CutSpec, widths: Widths, inputs: Sequence[Any], number: int = 0
) -> Failure | None:
    expected = [(e.module, e.at(widths)) for e in spec.coupling.returned]
    try:
        shapes = {name: tensor.shape for name, tensor in tensors_of(spec.source).items()}
        small = spec.build(widths, regions(spec.coupling, widths, shapes))
    except Exception as error:
        return Failure(number, -1, "", f"cannot be copied: {error}")
    observer = Observer()
    # The contexts of the trace, so that the same calls are seen.
    message = _error(
        small, inputs, evaluation(small, plain=True), follow(small, observer), observer
    )
    seen = [(o.module, o.shapes) for o in observer.outputs]
    for position, (wanted, got) in enumerate(zip(expected, seen, strict=False)):
        if wanted != got:
            why = f"returned {got[1]} instead of {wanted[1]}"
            return Failure(number, position, got[0], why)
    if message is not None:
        module = expected[len(seen)][0] if len(seen) < len(expected) else ""
        return Failure(number, len(seen), module, message)
    wrong = _untrainable(spec, small, inputs, number)
    return None if wrong is None else Failure(number, len(seen), "", wrong)


def _untrainable(spec: CutSpec, small: nn.Module, inputs: Sequence[Any], number: int) -> str | None:
    """What is wrong with a sub-model in use, if anything; the first cuts are enough to tell."""
    if number > TRIALS:
        return None
    trains = _error(small, inputs, train_mode(small)) is None
    if not trains and _error(spec.source, inputs, train_mode(spec.source)) is None:
        return "does not run in training mode"
    if spec.rewritten and number == 0 and not _takes_a_larger_batch(spec.source, small, inputs):
        return "does not run on a larger batch"
    return None


def _takes_a_larger_batch(full: nn.Module, small: nn.Module, inputs: Sequence[Any]) -> bool:
    """Whether replaced sizes hold for other batches than the example, if the model takes them."""
    samples = next((len(x) for x in tensors_in(inputs) if x.dim()), 0)

    def larger(x: Any) -> Any:
        same = isinstance(x, Tensor) and x.dim() and len(x) == samples
        return torch.cat([x, x[:1]]) if same else x

    batch = tree_map(larger, list(inputs))
    fails = _error(small, batch, evaluation(small)) is not None
    return not fails or _error(full, batch, evaluation(full)) is not None


def _error(
    model: nn.Module, inputs: Sequence[Any], *modes: AbstractContextManager[Any]
) -> str | None:
    """Run the model in these contexts; return the first line of its error, if it fails."""
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            model(*inputs)
    except Exception as error:
        return str(error).partition("\n")[0]
    return None


# --- repairs -----------------------------------------------------------------------------------


def _repair(
    spec: CutSpec, failure: Failure, inputs: Sequence[Any]
) -> tuple[CutSpec, Failure | None]:
    """Apply the first repair that gets further than the failure; see the module docstring."""
    alike = _alike(spec.source, failure.module)
    sets = [names for module in alike if (names := _groups_of(spec, module))]
    rewritten = replace(spec, rewritten=True)
    candidates = [_two_at_least(spec, sets), _tied(spec, sets)]
    if not spec.rewritten:
        candidates += [rewritten, _tied(rewritten, sets)]
    for repaired in candidates:
        if repaired is not spec:
            after = first_failure(repaired, inputs, [failure.cut])
            if after is None or after.position > failure.position:
                return repaired, after
    reason = Reason("cut", failure.module, f"a narrower copy fails: {failure.message}")
    names = _groups_of(spec, failure.module)
    for pinned in [*({name} for name in sorted(names)), names]:  # one if that is enough, or all
        repaired = _pinned(spec, _equal_groups(spec, pinned), reason)
        after = first_failure(repaired, inputs, [failure.cut])
        if after is None or after.position > failure.position:
            break
    return repaired, after


def _alike(model: nn.Module, module: str) -> list[str]:
    """The modules that are equal to this one but for the numbers in their names."""
    kind, pattern = type(model.get_submodule(module)), _numberless(f"{module}.")
    return [
        name
        for name, other in model.named_modules()
        if type(other) is kind and _numberless(f"{name}.") == pattern
    ]


def _equal_groups(spec: CutSpec, names: set[str]) -> set[str]:
    """These groups, and those of equal blocks."""
    patterns = set(map(_numberless, names))
    return {name for name in spec.coupling.full() if _numberless(name) in patterns}


def _numberless(name: str) -> str:
    """A name without the places of modules in lists: blocks.3.attention is blocks.#.attention."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "#", name)


def _groups_of(spec: CutSpec, module: str) -> set[str]:
    """The groups of a module's own tensors; of its parent's if it has none."""
    while True:
        prefix = f"{module}." if module else ""
        found = {
            group.name
            for group in spec.coupling.groups
            for slot in group.slots
            if slot.tensor.startswith(prefix)
        }
        if found or not module:
            return found
        module = module.rpartition(".")[0]


def _holds(tied: TiedWidths, names: set[str]) -> bool:
    return any(name in names for name, _ in tied.sizes)


def _two_at_least(spec: CutSpec, sets: Sequence[set[str]]) -> CutSpec:
    """Keep these groups above their narrowest position."""
    names = set().union(*sets)
    ties = tuple(replace(t, least=min(2, t.steps)) if _holds(t, names) else t for t in spec.ties)
    return spec if ties == spec.ties else replace(spec, ties=ties)


def _tied(spec: CutSpec, sets: Sequence[set[str]]) -> CutSpec:
    """Tie the widths of the groups in each set."""
    for names in sets:
        merged = [tied for tied in spec.ties if _holds(tied, names)]
        one = TiedWidths(tuple(size for tied in merged for size in tied.sizes))
        if len(merged) > 1 and one.steps > 1:
            rest = (tied for tied in spec.ties if tied not in merged)
            spec = replace(spec, ties=(one, *rest))
    return spec


def _pinned(spec: CutSpec, names: set[str], reason: Reason) -> CutSpec:
    """Pin these groups, and those tied to them."""
    kept = tuple(tied for tied in spec.ties if not _holds(tied, names))
    lost = {name for tied in spec.ties if tied not in kept for name, _ in tied.sizes}
    return replace(spec, coupling=spec.coupling.freeze(lost, reason), ties=kept)
