"""Elasticity on every architecture of the zoo: the properties the whole system stands on."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.func import functional_call

from anycostfl import ElasticModel, WidthPlan
from anycostfl.server.aggregate import Contribution, aggregate
from anycostfl.shrink.cut import permute
from anycostfl.shrink.widths import RULES, WidthPlanner, put, take
from anycostfl.state import Update, clone_state, tensors_of
from architectures import ZOO

BATCH = 3
every = pytest.mark.parametrize("name", ZOO)


def perturb(module: nn.Module) -> nn.Module:
    """Random values everywhere: a fresh norm or layer scale would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in tensors_of(module).values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=generator))
    return module


@cache
def traced(name: str) -> ElasticModel:
    """A perturbed model in evaluation mode; tracing takes most of the time of these tests."""
    return ElasticModel(perturb(ZOO[name].build()).eval(), ZOO[name].example(2))


def elastic(name: str) -> tuple[ElasticModel, Tensor]:
    """A copy for one test, and a batch of other data than it was traced on."""
    return copy.deepcopy(traced(name)), ZOO[name].example(BATCH)


def run(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(x)
    return result


def moved(before: Tensor, after: Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max())


@every
def test_every_architecture_has_something_to_shrink(name: str) -> None:
    net, _ = elastic(name)
    assert net.coupling.groups
    assert net.plan(0.25).flops_ratio < 0.8


@every
def test_sorting_leaves_the_function_unchanged(name: str) -> None:
    net, x = elastic(name)
    before = run(net.module, x)
    order = net.sort_channels()
    changed = [n for n, o in order.items() if not torch.equal(o, torch.arange(len(o)))]
    assert changed
    assert moved(before, run(net.module, x)) <= 1e-5


@every
def test_random_permutations_leave_the_function_unchanged(name: str) -> None:
    net, x = elastic(name)
    before = run(net.module, x)
    order = {group.name: torch.randperm(group.size) for group in net.coupling.groups}
    net.load(net.permute(tensors_of(net.module), order))
    assert moved(before, run(net.module, x)) <= 1e-5


@every
def test_sorting_twice_is_the_identity(name: str) -> None:
    net, _ = elastic(name)
    net.sort_channels()
    once = clone_state(net.module)
    for order in net.sort_channels().values():
        assert torch.equal(order, torch.arange(len(order)))
    assert all(torch.equal(t, once[n]) for n, t in tensors_of(net.module).items())


@every
def test_alpha_one_is_the_same_model(name: str) -> None:
    net, x = elastic(name)
    sub = net.shrink(1.0)
    full, small = net.module.state_dict(), sub.module.state_dict()
    assert list(full) == list(small)
    assert all(torch.equal(full[key], small[key]) for key in full)
    assert torch.equal(run(net.module, x), run(sub.module, x))
    assert sub.plan.flops_ratio == 1


@every
@pytest.mark.parametrize("rule", RULES)
def test_sub_models_nest(name: str, rule: str) -> None:
    net = traced(name)
    shapes = {n: t.shape for n, t in tensors_of(net.module).items()}
    planner = WidthPlanner(net.coupling, net.tied_widths, shapes, rule)
    ladder = [0.05, 0.1, 0.2, 0.25, 0.33, 0.5, 0.6, 0.75, 0.9, 1.0]
    for narrow, wide in pairwise(planner.plan(alpha) for alpha in ladder):
        assert all(narrow.widths[group] <= wide.widths[group] for group in narrow.widths)
        for key, region in narrow.index.items():
            for inner, outer in zip(region, wide.index[key], strict=True):
                assert _positions(inner) <= _positions(outer)


def _positions(span: slice | Tensor) -> set[int]:
    return set(range(span.stop)) if isinstance(span, slice) else set(span.tolist())


@every
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_a_sub_model_trains_copies_saves_and_loads(name: str, alpha: float) -> None:
    net, x = elastic(name)
    sub = net.shrink(alpha).module
    before = {n: p.detach().clone() for n, p in sub.named_parameters()}
    sub.train()
    sub(x).square().mean().backward()
    torch.optim.SGD(sub.parameters(), lr=0.1).step()
    assert any(not torch.equal(p, before[n]) for n, p in sub.named_parameters())
    assert list(sub.state_dict()) == list(net.module.state_dict())
    twin = copy.deepcopy(sub).eval()
    fresh = net.shrink(alpha).module.eval()
    fresh.load_state_dict(_through_bytes(sub.state_dict()))
    assert torch.equal(run(sub.eval(), x), run(twin, x))
    assert torch.equal(run(sub, x), run(fresh, x))


def _through_bytes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    buffer = io.BytesIO(save({key: t.clone().contiguous() for key, t in state.items()}))
    return load(buffer.getvalue())


@every
def test_a_copy_of_a_model_is_a_model(name: str) -> None:
    """Copies share nothing: sorting one leaves the other, and each cuts its own weights."""
    net, x = elastic(name)
    before = clone_state(traced(name).module)
    net.sort_channels()
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(traced(name).module).items())
    assert net.rewritten == traced(name).rewritten
    assert torch.equal(run(net.shrink(1.0).module, x), run(net.module, x))


@every
def test_the_global_model_is_untouched_by_training_a_sub_model(name: str) -> None:
    net, x = elastic(name)
    before = clone_state(net.module)
    sub = net.shrink(0.5).module.train()
    sub(x).sum().backward()
    torch.optim.SGD(sub.parameters(), lr=1.0).step()
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(net.module).items())


@every
def test_an_update_moves_every_parameter_it_holds(name: str) -> None:
    """Also where one tensor has several names, and the rest stays."""
    net, _ = elastic(name)
    before = clone_state(net.module)
    sub = net.shrink(0.5)
    update = {n: torch.ones_like(p) for n, p in sub.module.named_parameters()}
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in update.items()}
    net.load(aggregate(before, [Contribution(sub.plan, Update(update, masks), 1.0)]))
    after = tensors_of(net.module)
    for key, parameter in net.module.named_parameters():
        change = torch.zeros_like(parameter)
        put(change, sub.plan.index[key], torch.ones_like(update[key]))
        assert torch.equal(after[key], before[key] - change)


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.masked_equal])
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_a_cut_equals_the_masked_full_model(name: str, alpha: float) -> None:
    """In float64, forward and gradients, to 1e-10: what is cut is exactly what is masked."""
    net, x = elastic(name)
    net.sort_channels()
    net.module.double()
    x = x.double() if x.is_floating_point() else x
    sub = net.shrink(alpha)
    masked = _masked_state(net, sub.plan)
    target = functional_call(net.module, masked, (x,))
    result = sub.module(x)
    assert moved(target.detach(), result.detach()) <= 1e-10

    target.square().sum().backward()
    result.square().sum().backward()
    for key, parameter in sub.module.named_parameters():
        if parameter.grad is not None:
            gradient = masked[key].grad
            assert gradient is not None
            inside = take(gradient, sub.plan.index[key])
            limit = 1e-10 * max(1.0, float(inside.abs().max()))
            assert float((parameter.grad - inside).abs().max()) <= limit


def _masked_state(net: ElasticModel, plan: WidthPlan) -> dict[str, Tensor]:
    """The full model's tensors, zero wherever the sub-model has nothing."""
    trained = {name for name, _ in net.module.named_parameters()}
    state = {}
    for key, tensor in tensors_of(net.module).items():
        if net.coupling.aliases[key] == key and tensor.is_floating_point():
            spans = [torch.tensor(sorted(_positions(span))) for span in plan.index[key]]
            inside = torch.meshgrid(*spans, indexing="ij")
            whole = torch.zeros_like(tensor)
            whole[inside] = tensor.detach()[inside]
            state[key] = whole.requires_grad_(key in trained)
    return state


@every
def test_planned_flops_are_those_of_the_cut_model(name: str) -> None:
    """Counting the sub-model afresh gives exactly what the plan promised."""
    net, _ = elastic(name)
    plan = net.plan(0.3)
    again = ElasticModel(net.shrink(0.3).module, ZOO[name].example(2))
    assert again.training_flops == pytest.approx(net.training_flops * plan.flops_ratio, rel=1e-9)


@every
def test_permuting_any_state_follows_the_model(name: str) -> None:
    """Momentum moved with the order of a sort stays attached to its weights."""
    net, _ = elastic(name)
    momentum = {n: 2.0 * p.detach() for n, p in net.module.named_parameters()}
    order = net.sort_channels()
    moved_momentum = permute(net.coupling, momentum, order)
    for key, parameter in net.module.named_parameters():
        assert torch.equal(moved_momentum[key], 2.0 * parameter.detach())
