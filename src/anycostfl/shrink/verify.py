"""A trace checks itself before anyone relies on it.

Two experiments on the real model. First, moving channels must not move the output: a group that
does when it is turned or shuffled is pinned. Second, a cut must follow the trace: at random widths
and at the narrowest, every module of the sub-model, and whatever slices, splits or reshapes, must
return the shapes that the trace predicts, and the sub-model must run in training too. If one does
not, each dial is also cut alone, lest a remedy pass by luck. The remedies, in this order: a single
channel is not enough and two are, or the groups of that module turn together (one dial), or the
model's literal sizes are rewritten, with or without one dial, or those groups are pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from anycostfl.coupling import Coupling, Observer, Reason, evaluation, follow, practice, trace
from anycostfl.shrink.cut import cut, fix_bare_norm
from anycostfl.shrink.literals import as_graph, rewrite, silent, trace_graph
from anycostfl.shrink.order import Order, permute
from anycostfl.shrink.widths import Dial, regions
from anycostfl.state import tensors_of

TOLERANCE = 1e-5
"""How far permuted channels may move the output, relative to its largest entry."""

TRIALS = 2
"""Random widths, beside the narrowest."""

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to cut a model: what to copy, its coupling, and which groups turn together."""

    source: nn.Module
    coupling: Coupling
    dials: tuple[Dial, ...]

    def build(self, widths: Mapping[str, int]) -> nn.Module:
        """The sub-model of these widths."""
        small = cut(self.source, regions(self.coupling, widths, tensors_of(self.source)))
        if isinstance(small, fx.GraphModule):
            watched = self.coupling.watched.items()
            rewrite(small, {name: [round(e.at(widths)) for e in dims] for name, dims in watched})
        for call in self.coupling.returned:
            fix_bare_norm(small.get_submodule(call.module), call.at(widths))
        return small


def verified_recipe(model: nn.Module, inputs: Sequence[Any]) -> Recipe:
    """Trace a model and keep only what both experiments confirm."""
    coupling = pin_movers(model, inputs, trace(model, inputs))
    recipe = Recipe(model, coupling, _free_dials(coupling))
    if first_failure(recipe, inputs, alone=False) is None:
        return recipe
    failure = first_failure(recipe, inputs)
    while failure is not None:
        recipe, failure = _mend(recipe, failure, model, inputs)
    return recipe


def _free_dials(coupling: Coupling) -> tuple[Dial, ...]:
    return tuple(Dial(((group.name, group.size),)) for group in coupling.groups)


# --- moving channels must not move the output ---------------------------------------------------


def pin_movers(model: nn.Module, inputs: Sequence[Any], coupling: Coupling) -> Coupling:
    """Pin every group whose channels are not exchangeable after all."""
    with evaluation(model):
        names = [group.name for group in coupling.groups]
        if _displacement(model, inputs, coupling, names) <= TOLERANCE:
            return coupling
        for name in names:
            moved = _displacement(model, inputs, coupling, [name])
            if not moved <= TOLERANCE:
                why = f"moving its channels moved the output by {moved:.1e}"
                coupling = coupling.freeze([name], Reason("permutation", "", why))
    return coupling


def _displacement(
    model: nn.Module, inputs: Sequence[Any], coupling: Coupling, names: Sequence[str]
) -> float:
    """How far the output moves, relative to its size, when these groups are turned or shuffled."""
    generator = torch.Generator().manual_seed(0)
    own = {n: t for n, t in tensors_of(model).items() if coupling.aliases[n] == n}
    state = _stirred(own, generator)
    turned = {g.name: torch.arange(g.size).roll(int(g.name in names)) for g in coupling.groups}
    shuffled = {
        name: places[torch.randperm(len(places), generator=generator)] if name in names else places
        for name, places in turned.items()
    }
    return max(_moved(model, inputs, coupling, state, order) for order in (turned, shuffled))


def _moved(
    model: nn.Module, inputs: Sequence[Any], coupling: Coupling, state: State, order: Order
) -> float:
    """How far the output moves by one order of channels."""
    moved = _distance(model, inputs, state, permute(coupling, state, order))
    if moved <= TOLERANCE:
        return moved
    # Deep models can lose this much to rounding: look again with twice the digits.
    state = {n: x.double() if x.is_floating_point() else x for n, x in state.items()}
    try:
        return _distance(model, inputs, state, permute(coupling, state, order))
    except RuntimeError:  # a model that insists on a dtype of its own
        return moved


def _distance(model: nn.Module, inputs: Sequence[Any], state: State, moved: State) -> float:
    """The largest difference between the outputs of two states, relative to the largest output."""
    before, after = (torch.cat(_outputs(model, s, inputs)) for s in (state, moved))
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-30))


def _stirred(state: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The state with some noise: layers fresh from their maker are often all zeros or ones."""
    stirred = {}
    for name, tensor in state.items():
        stirred[name] = tensor.detach()
        if tensor.is_floating_point() and tensor.numel():
            scale = 0.1 * (tensor.detach().square().mean().sqrt() + 0.1)
            noise = torch.rand(tensor.shape, generator=generator).to(tensor)
            stirred[name] = tensor.detach() + scale * noise  # upwards: variances stay positive
    return stirred


def _outputs(model: nn.Module, state: State, inputs: Sequence[Any]) -> list[Tensor]:
    dtype = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    given = tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )
    result = torch.func.functional_call(model, state, given)
    return [x.double().flatten() for x in tree_leaves(result) if isinstance(x, Tensor)]


# --- a cut must follow the trace ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """The first module call or operation whose result is not what the trace predicts."""

    position: int
    module: str
    message: str


def first_failure(recipe: Recipe, inputs: Sequence[Any], *, alone: bool = True) -> Failure | None:
    """Try cuts at several widths; the earliest failure of any, or None."""
    failures = []
    for chosen in _positions(recipe.dials, alone=alone) if recipe.dials else []:
        widths: dict[str, int] = {}
        for dial, position in zip(recipe.dials, chosen, strict=True):
            widths |= dial.widths(position)
        failure = _try_cut(recipe, widths, inputs)
        if failure is not None:
            failures.append(failure)
    return min(failures, key=lambda failure: failure.position, default=None)


def _positions(dials: Sequence[Dial], *, alone: bool) -> list[list[int]]:
    """Where to turn the dials: all to their least, at random, and perhaps each one alone."""
    random = np.random.default_rng(0)
    positions = [[dial.least for dial in dials]]
    positions += [
        [int(random.integers(d.least, max(d.steps, d.least + 1))) for d in dials]
        for _ in range(TRIALS)
    ]
    if alone:
        positions += [[d.least if d is one else d.steps for d in dials] for one in dials]
    return positions


def _try_cut(recipe: Recipe, widths: Mapping[str, int], inputs: Sequence[Any]) -> Failure | None:
    expected = [(e.module, e.at(widths)) for e in recipe.coupling.returned]
    try:
        small = recipe.build(widths)
    except Exception as error:
        return Failure(-1, "", f"cannot be copied: {error}")
    observer = Observer()
    message = _run(small, inputs, observer)
    seen = [(o.module, o.shapes) for o in observer.outputs]
    for position, (wanted, got) in enumerate(zip(expected, seen, strict=False)):
        if wanted != got:
            return Failure(position, got[0], f"returned {got[1]} where {wanted[1]} was expected")
    if message is not None:
        module = expected[len(seen)][0] if len(seen) < len(expected) else ""
        return Failure(len(seen), module, message)
    if not _practises(small, inputs) and _practises(recipe.source, inputs):
        return Failure(len(seen), "", "does not run in training mode")
    return None


def _run(model: nn.Module, inputs: Sequence[Any], observer: Observer) -> str | None:
    """Let the model run as when it was traced; the message if it fails on the way."""
    try:
        with silent(), evaluation(model, plain=True), follow(model, observer), observer:
            model(*inputs)
    except Exception as error:
        return str(error).partition("\n")[0]
    return None


def _practises(model: nn.Module, inputs: Sequence[Any]) -> bool:
    try:
        with silent(), practice(model):
            model(*inputs)
    except Exception:
        return False
    return True


# --- what to do about a failure ----------------------------------------------------------------


def _mend(
    recipe: Recipe, failure: Failure, model: nn.Module, inputs: Sequence[Any]
) -> tuple[Recipe, Failure | None]:
    """The first remedy that gets further than the failure; see the module docstring."""
    names = _groups_of(recipe, failure.module)
    for remedy in (_two_at_least(recipe, names), _turn_together(recipe, names)):
        after = first_failure(remedy, inputs)
        if after is None or after.position > failure.position:
            return remedy, after
    if recipe.source is model and (graph := as_graph(model, inputs)) is not None:
        rewritten = _through_graph(recipe, graph, inputs)
        names_there = _groups_of(rewritten, failure.module)
        for remedy in (rewritten, _turn_together(rewritten, names_there)):
            after = first_failure(remedy, inputs)
            if after is None or after.module != failure.module:
                return remedy, after
    reason = Reason("cut", failure.module, f"a narrower copy fails: {failure.message}")
    for pinned in [*({name} for name in sorted(names)), names]:  # one if it is enough, or all
        smaller = _without(recipe, pinned, reason)
        after = first_failure(smaller, inputs)
        if after is None or after.position > failure.position:
            break
    return smaller, after


def _through_graph(recipe: Recipe, graph: fx.GraphModule, inputs: Sequence[Any]) -> Recipe:
    """The same recipe with the forward captured as a graph, whose literals can be rewritten."""
    coupling = pin_movers(graph, inputs, trace_graph(graph, inputs))
    same = coupling.full() == recipe.coupling.full()
    return Recipe(graph, coupling, recipe.dials if same else _free_dials(coupling))


def _groups_of(recipe: Recipe, module: str) -> set[str]:
    """The groups that run through a module's own tensors; of its parents' if it has none."""
    while True:
        prefix = f"{module}." if module else ""
        found = {
            group.name
            for group in recipe.coupling.groups
            for slot in group.slots
            if slot.tensor.startswith(prefix)
        }
        if found or not module:
            return found
        module = module.rpartition(".")[0]


def _two_at_least(recipe: Recipe, names: set[str]) -> Recipe:
    """Let no dial of these groups go down to its last position."""
    dials = (
        replace(dial, least=min(2, dial.steps))
        if names & {name for name, _ in dial.sizes}
        else dial
        for dial in recipe.dials
    )
    return replace(recipe, dials=tuple(dials))


def _turn_together(recipe: Recipe, names: set[str]) -> Recipe:
    """Merge the dials of these groups into one."""
    merged = [dial for dial in recipe.dials if names & {name for name, _ in dial.sizes}]
    one = Dial(tuple(size for dial in merged for size in dial.sizes))
    if len(merged) < 2 or one.steps < 2:
        return recipe
    return replace(recipe, dials=(one, *(d for d in recipe.dials if d not in merged)))


def _without(recipe: Recipe, names: set[str], reason: Reason) -> Recipe:
    """Pin these groups."""
    kept = tuple(d for d in recipe.dials if not names & {name for name, _ in d.sizes})
    lost = {name for d in recipe.dials if d not in kept for name, _ in d.sizes}
    return Recipe(recipe.source, recipe.coupling.freeze(lost, reason), kept)
