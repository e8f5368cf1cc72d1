"""Width rules, plans, scattering back, and everything that can be asked wrongly."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anycostfl import (
    AlphaError,
    CalibrationError,
    ElasticModel,
    NotShrinkableError,
    ShapeMismatchError,
    TraceError,
    UnknownNameError,
    models,
    recalibrate,
)
from anycostfl.shrink import verify, widths
from anycostfl.shrink.widths import TiedWidths
from anycostfl.state import tensors_of
from architectures import ZOO


@cache
def elastic(name: str, rule: str = "sqrt") -> ElasticModel:
    """A model that tests share; one that changes its weights takes a copy."""
    spec = models.load(name)
    return ElasticModel(spec.build(), spec.example(2), rule=rule)


@pytest.fixture(scope="module")
def cnn() -> ElasticModel:
    return elastic("cnn")


@pytest.fixture(scope="module")
def fast_cnn() -> ElasticModel:
    return elastic("cnn", "fast")


def test_one_channel_is_not_cut_to_where_a_model_cannot_have_it() -> None:
    net = ElasticModel(ZOO["squeezed"].build(), ZOO["squeezed"].example(2))
    assert net.plan(1e-6).widths == {"conv": 2}


class Encoder(nn.Module):
    """Several of torch's transformer layers: all their heads belong to one width."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.embed, self.layers = nn.Linear(5, width), nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(x)).mean(1))
        return out


@pytest.mark.parametrize(("layers", "width", "heads"), [(2, 16, 4), (3, 16, 4), (2, 8, 2)])
def test_heads_of_all_layers_are_tied_to_the_width(layers: int, width: int, heads: int) -> None:
    net = ElasticModel(Encoder(layers, width, heads), torch.randn(2, 6, 5), rule="fast")
    shared = next(d for d in net.tied_widths if d.sizes[0][0] == "embed")
    assert len(shared.sizes) == 1 + layers
    for alpha in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert net.shrink(alpha).module.train()(torch.randn(3, 6, 5)).shape == (3, 3)


def test_a_part_that_is_taken_by_number_follows_its_channels() -> None:
    """h[:, 8:] is h[:, 5:] where 5 of the first 8 channels are left."""
    module = ZOO["literal_slice"].build()
    net = ElasticModel(module, ZOO["literal_slice"].example(2))
    assert net.plan(0.4).widths == {"fc1": 5, "fc1[8:]": 5}
    sub, x = net.shrink(0.4), ZOO["literal_slice"].example(3)
    fc1, fc2 = (sub.module.get_submodule(name) for name in ("fc1", "fc2"))
    h = fc1(x).relu()
    assert torch.equal(sub.module(x), fc2(h * torch.sigmoid(h[:, 5:].mean(1, keepdim=True))))


def test_tensors_that_share_memory_only_are_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    module[2].weight.data = module[0].weight.data
    with pytest.raises(TraceError, match=r"0\.weight and 2\.weight share memory"):
        ElasticModel(module, torch.randn(2, 8))


def test_what_a_model_returns_must_hold_tensors() -> None:
    class Returns(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
            return cast("Tensor", SimpleNamespace(logits=super().forward(input)))

    with pytest.raises(TraceError, match="returned SimpleNamespace"):
        ElasticModel(Returns(4, 3), torch.randn(2, 4))


def test_frozen_parameters_need_no_update() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    net = ElasticModel(module, torch.randn(2, 8))
    plan = net.plan(0.5)
    trained = {n: torch.ones(plan.shapes[n]) for n in ("2.weight", "2.bias")}
    assert net.scatter(trained, plan).values.keys() == trained.keys()


def test_a_buffer_that_is_one_number_for_all_channels_stays_as_it_is() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 3)
            self.register_buffer("scale", torch.full((1,), 2.0).expand(8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc2(self.fc1(x) * self.scale)
            return out

    x = torch.randn(2, 5)
    net = ElasticModel(Scaled(), x)
    before = net.module(x)
    net.sort_channels()
    assert torch.allclose(net.module(x), before, atol=1e-5)
    assert net.shrink(0.25).module(x).shape == (2, 3)


def test_a_trial_in_training_mode_leaves_no_trace() -> None:
    class Both(nn.Module):
        """An expanded buffer, BatchNorm, dropout, and a layer that only training uses."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
            self.helper, self.drop = nn.Linear(8, 3), nn.Dropout(0.5)
            self.register_buffer("scale", torch.full((1,), 2.0).expand(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(self.norm(self.fc1(x)) * self.scale)
            out: Tensor = self.fc2(h) + self.helper(h) if self.training else self.fc2(h)
            return out

    module = Both().eval()
    before = {n: t.clone() for n, t in tensors_of(module).items()}
    random = torch.get_rng_state()
    net = ElasticModel(module, torch.randn(2, 5, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(module).items())
    assert not module.training
    assert net.shrink(0.25).module.train()(torch.randn(2, 5)).shape == (2, 3)


def test_the_papers_example_halves_every_hidden_layer() -> None:
    layers = [nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64)]
    net = ElasticModel(nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 3)), torch.randn(2, 5))
    assert list(net.plan(0.25).widths.values()) == [8, 16, 32]


@given(alpha=st.floats(1e-6, 1.0))
def test_sqrt_widths_are_the_papers(cnn: ElasticModel, alpha: float) -> None:
    wanted = [max(1, math.floor(math.sqrt(alpha) * n + 1e-9)) for n in (32, 64, 512)]
    assert list(cnn.plan(alpha).widths.values()) == wanted


@given(alpha=st.floats(0.01, 1.0))
def test_fast_widths_never_cost_more_than_alpha(fast_cnn: ElasticModel, alpha: float) -> None:
    assert fast_cnn.plan(alpha).flops_ratio <= 1.01 * alpha


@pytest.mark.parametrize("name", ["vgg9", "resnet18"])
def test_fast_widths_use_up_most_of_alpha(name: str) -> None:
    net = elastic(name, "fast")
    for alpha in torch.linspace(0.1, 1, 19).tolist():
        assert net.plan(alpha).flops_ratio >= 0.9 * alpha


def test_even_widths_are_friendly_all_the_way_and_nest() -> None:
    net = elastic("cnn", "even")
    plans = [net.plan(i / 50) for i in range(6, 51)]
    for narrow, wide in itertools.pairwise(plans):
        assert all(narrow.widths[group] <= wide.widths[group] for group in wide.widths)
    for plan in plans:
        assert plan.flops_ratio <= plan.alpha
        assert plan.widths["conv1"] % 8 == plan.widths["conv2"] % 8 == plan.widths["fc1"] % 16 == 0


def test_fast_widths_are_multiples_that_hardware_likes() -> None:
    net = elastic("vgg9", "fast")
    for alpha in (0.75, 0.5, 0.25):
        assert all(width % 8 == 0 for width in net.plan(alpha).widths.values())


class Factors(nn.Module):
    """Matrix factorisation: no matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 16), nn.Embedding(20, 16)

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(-1)
        return out


@pytest.mark.parametrize(("rule", "width"), [("sqrt", 4), ("fast", 1), ("even", 1)])
def test_without_products_the_share_of_channels_counts(rule: str, width: int) -> None:
    net = ElasticModel(Factors(), torch.randint(20, (2, 2)), rule=rule)
    plan = net.plan(1 / 16)
    assert plan.widths == {"users": width}
    assert plan.flops_ratio == width / 16
    assert net.plan(1.0).flops_ratio == 1


def test_tied_widths_keep_proportions() -> None:
    tied = TiedWidths((("stream", 64), ("head", 16)))
    assert tied.steps == 16
    assert tied.widths(5) == {"stream": 20, "head": 5}


@pytest.mark.parametrize("rule", ["sqrt", "fast", "even"])
def test_a_plan_depends_on_alpha_only_through_its_widths(rule: str) -> None:
    net = elastic("cnn", rule)
    one, other = net.plan(0.5), net.plan(0.5 + 1e-6)
    assert (one.alpha, other.alpha) == (0.5, 0.5 + 1e-6)
    assert one.widths == other.widths
    assert one.index is other.index
    assert one.flops_ratio == net.coupling.share(one.widths)
    assert net.plan(0.3).shapes == {n: tuple(t.shape) for n, t in parts(net, 0.3).items()}


def parts(net: ElasticModel, alpha: float) -> dict[str, Tensor]:
    return net.take(tensors_of(net.module), net.plan(alpha))


def test_a_model_remembers_a_bounded_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "MOST_PLANS", 3)
    net = ElasticModel(nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 3)), torch.randn(2, 5))
    first = net.plan(1 / 256)
    for width in range(2, 9):
        assert net.plan((width / 16) ** 2).widths == {"0": width}
    assert len(net._planner._plans) == 3
    again = net.plan(1 / 256)
    assert again.index is not first.index
    assert again.shapes == first.shapes


def test_tensors_are_looked_up_and_not_remembered() -> None:
    """`double()` replaces buffers, and parameters can be frozen later."""
    net = ElasticModel(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.randn(2, 5)
    )
    before = net.bytes_of(net.plan(1.0))
    net.module.double().get_parameter("0.bias").requires_grad_(False)
    assert "0.bias" not in net.trained_names
    assert net.bytes_of(net.plan(1.0)) == 2 * before - 8  # BatchNorm's counter stays an integer
    with torch.no_grad():
        net.module.get_buffer("1.running_mean").copy_(torch.arange(8))
    order = net.sort_channels()["0"]
    assert torch.equal(net.module.get_buffer("1.running_mean"), torch.arange(8.0).double()[order])


def test_size_is_32_bits_per_parameter(cnn: ElasticModel) -> None:
    assert cnn.size_bits == 32 * 1_663_370


def test_frozen_parameters_are_no_part_of_an_update() -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    module[0].requires_grad_(False)
    assert ElasticModel(module, torch.randn(2, 8)).size_bits == 32 * (6 * 3 + 3)


def test_blocks_are_those_of_matrices(cnn: ElasticModel) -> None:
    """Channels of a GroupNorm come in twos or more, but a convolution's kernels stay k × k."""
    assert cnn.blocks() == {"fc1.weight": 49}
    assert elastic("resnet18_gn").blocks() == {"head.weight": 16}


def test_importance_counts_all_producers_in_float64() -> None:
    """Hand-computed: channel norms of two producers are added before sorting."""
    net = ElasticModel(Residual(), torch.randn(2, 2))
    with torch.no_grad():
        net.module.get_parameter("a.weight").copy_(torch.tensor([[3.0, 0], [0, 1], [2, 0]]))
        net.module.get_parameter("b.weight").copy_(
            torch.tensor([[0.0, 0, 0], [0, 4, 0], [0, 0, 1]])
        )
    # squared norms: 9 + 0, 1 + 16, 4 + 1
    assert net.sort_channels()["a"].tolist() == [1, 0, 2]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        result: Tensor = self.head(F.relu(x + self.b(x)))
        return result


def test_equal_channels_keep_their_order() -> None:
    net = copy.deepcopy(elastic("cnn"))
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.fill_(0.5)
    for order in net.sort_channels().values():
        assert torch.equal(order, torch.arange(len(order)))


def test_scatter_puts_values_where_they_came_from(cnn: ElasticModel) -> None:
    plan = cnn.plan(0.3)
    state = {n: p.detach() for n, p in cnn.module.named_parameters()}
    update = cnn.scatter(cnn.take(state, plan), plan)
    for key, tensor in state.items():
        assert torch.equal(update.values[key], tensor * update.masks[key])
        assert int(update.masks[key].sum()) == math.prod(plan.shapes[key])


def test_scatter_handles_indices_that_are_no_prefix() -> None:
    """A fused query-key-value weight keeps the start of every head."""
    net = elastic("vit")
    plan = net.plan(0.25)
    mask = net.scatter(
        {n: torch.ones(plan.shapes[n]) for n, _ in net.module.named_parameters()}, plan
    ).masks["blocks.0.attention.qkv.weight"]
    rows = mask[:, 0].view(3, 4, 32)  # (query key value, head, size)
    assert rows[..., :16].all()
    assert not rows[..., 16:].any()


@settings(max_examples=40)
@given(
    widths=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    residual=st.booleans(),
    norm=st.booleans(),
    alpha=st.floats(0.05, 1),
)
def test_random_networks_sort_and_shrink(
    widths: list[int], residual: bool, norm: bool, alpha: float
) -> None:
    module = RandomNet(widths, residual=residual, norm=norm).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    net = ElasticModel(module, x)
    before = module(x)
    net.sort_channels()
    assert torch.allclose(before, module(x), rtol=1e-9, atol=1e-12)
    assert net.shrink(alpha).module(x).shape == before.shape


class RandomNet(nn.Module):
    """Linear layers of random widths, perhaps normalised, perhaps with shortcuts."""

    def __init__(self, widths: list[int], *, residual: bool, norm: bool) -> None:
        super().__init__()
        sizes = [3, *widths]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(n) if norm else nn.Identity() for n in widths)
        self.inner = nn.ModuleList(nn.Linear(n, n) for n in widths) if residual else None
        self.head = nn.Linear(widths[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = F.relu(norm(layer(x)))
            x = x if self.inner is None else x + self.inner[i](x)
        result: Tensor = self.head(x)
        return result


# --- BatchNorm --------------------------------------------------------------------------------


def test_recalibration_measures_mean_and_variance() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    batches = [torch.randn(8, 3) for _ in range(3)]
    hidden = [net[0](batch) for batch in batches]
    recalibrate(net, batches)
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert torch.allclose(norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    assert torch.allclose(norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    assert norm.momentum == 0.1
    assert all(module.training for module in net.modules())


def test_recalibration_on_nothing_is_refused_and_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batches = (torch.randn(8, 3) + 2 for _ in range(3))
    recalibrate(net, batches)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with pytest.raises(CalibrationError, match="no batch was given"):
        recalibrate(net, batches)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_recalibration_that_fails_leaves_the_momentum() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError):
        recalibrate(net, [torch.randn(8, 5)])
    assert net[1].momentum == 0.1


@pytest.mark.filterwarnings("error")
def test_a_norm_without_tensors_knows_its_width() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Flatten()]
    net = ElasticModel(nn.Sequential(*layers, nn.Linear(288, 3)), torch.randn(2, 3, 8, 8))
    sub = net.shrink(0.25).module
    assert sub(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    assert sub.get_submodule("1").num_features == 4


def test_recalibration_rescues_a_narrow_sub_model() -> None:
    """With the full model's statistics a sub-model's normalised activations are off."""
    net = copy.deepcopy(elastic("resnet18"))
    batches = [torch.randn(16, 3, 8, 8) for _ in range(2)]
    recalibrate(net.module, batches)
    net.sort_channels()
    sub = net.shrink(0.1).module
    stale = _spread(sub, batches[0])
    recalibrate(sub, batches)
    assert abs(_spread(sub, batches[0]) - 1) < abs(stale - 1)
    assert abs(_spread(sub, batches[0]) - 1) < 0.1


def _spread(module: nn.Module, batch: Tensor) -> float:
    """The standard deviation after a norm layer half way, which should be one."""
    seen: list[Tensor] = []
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    handle = norms[5].register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        module.eval()(batch)
    handle.remove()
    return float(seen[0].std())


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.0001, 2.0, math.nan, math.inf])
def test_alpha_outside_its_range_is_refused(cnn: ElasticModel, alpha: float) -> None:
    with pytest.raises(AlphaError, match="above 0 and at most 1"):
        cnn.shrink(alpha)


def test_an_example_the_model_rejects_is_refused_with_its_shape() -> None:
    with pytest.raises(TraceError, match=r"\(2, 3, 28, 28\).*expected input"):
        ElasticModel(models.load("cnn").build(), torch.randn(2, 3, 28, 28))


def test_a_lazy_model_must_run_first() -> None:
    with pytest.raises(TraceError, match=r"0\.weight has no shape yet; run the model once first"):
        ElasticModel(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)), torch.randn(2, 6))


def test_a_missing_example_is_refused() -> None:
    with pytest.raises(TraceError, match="example input"):
        ElasticModel(models.load("cnn").build())


def test_a_model_without_free_channels_only_has_alpha_one() -> None:
    net = ElasticModel(nn.Linear(4, 3), torch.randn(2, 4))
    assert net.shrink(1.0).plan.flops_ratio == 1
    with pytest.raises(NotShrinkableError, match="is an output of the model"):
        net.shrink(0.5)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="sqrt, fast, even"):
        ElasticModel(nn.Linear(4, 3), torch.randn(2, 4), rule="cubic")


def test_a_state_that_does_not_fit_is_refused_whole(cnn: ElasticModel) -> None:
    before = {n: t.clone() for n, t in tensors_of(cnn.module).items()}
    state = {n: torch.zeros_like(t) for n, t in before.items()}
    del state["fc1.bias"]
    state["fc2.bias"] = torch.zeros(3)
    state["extra"] = torch.zeros(1)
    problems = r"fc1.bias is missing.*extra is not part.*fc2.bias has shape \(3,\) instead"
    order = cnn.sort_channels()
    sorted_state = {n: t.clone() for n, t in tensors_of(cnn.module).items()}
    with pytest.raises(ShapeMismatchError, match=problems):
        cnn.load(state)
    with pytest.raises(ShapeMismatchError, match=problems):
        cnn.permute(state, order)
    assert all(torch.equal(t, sorted_state[n]) for n, t in tensors_of(cnn.module).items())


def test_an_update_of_another_width_is_refused(cnn: ElasticModel) -> None:
    other = {n: torch.zeros(cnn.plan(0.5).shapes[n]) for n, _ in cnn.module.named_parameters()}
    with pytest.raises(ShapeMismatchError, match=r"conv1\.weight has shape"):
        cnn.scatter(other, cnn.plan(0.25))


def test_a_batch_of_one_is_enough() -> None:
    spec = models.load("cnn")
    assert ElasticModel(spec.build(), spec.example(1)).coupling.full() == {
        "conv1": 32,
        "conv2": 64,
        "fc1": 512,
    }


def test_a_model_that_cannot_be_copied_is_pinned_not_broken() -> None:
    class Uncopyable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def __deepcopy__(self, memo: object) -> Uncopyable:
            raise TypeError("holds a socket")

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(F.relu(self.a(x))) if float(x.sum()) else x
            return result

    net = ElasticModel(Uncopyable(), torch.randn(2, 4))
    with pytest.raises(NotShrinkableError, match="holds a socket"):
        net.shrink(0.5)


def test_sizes_that_cannot_be_repaired_are_pinned_with_the_reason() -> None:
    """A model that insists on its number of channels: those stay."""

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 8, 3), nn.Linear(72, 10), nn.Linear(10, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(1)
            if y.shape[1] != 72:
                raise ValueError("expected 72 features")
            result: Tensor = self.fc2(F.relu(self.fc1(y)))
            return result

    net = ElasticModel(Stubborn(), torch.randn(2, 1, 5, 5))
    assert "conv" not in net.coupling.full()
    assert any(p.reason.operation == "cut" and p.tensor == "conv.weight" for p in net.coupling.pins)
    assert net.shrink(0.25).module(torch.randn(3, 1, 5, 5)).shape == (3, 2)


class Flat(nn.Module):
    """A literal size, and an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 8, 3), nn.Linear(72, 10), nn.Linear(10, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.conv(x) if mask is None else self.conv(x) * mask
        out: Tensor = self.fc2(F.relu(self.fc1(y.view(-1, 72))))
        return out


def test_a_literal_size_is_replaced_for_any_batch_and_branch() -> None:
    net = ElasticModel(Flat(), torch.randn(2, 1, 5, 5))
    assert net.coupling.full() == {"conv": 8, "fc1": 10}
    assert net.rewritten
    sub, x = net.shrink(0.25).module, torch.randn(7, 1, 5, 5)
    conv, fc1, fc2 = (sub.get_submodule(name) for name in ("conv", "fc1", "fc2"))
    wanted = fc2(F.relu(fc1(conv(x).flatten(1))))
    assert torch.equal(sub(x), wanted)
    assert torch.equal(copy.deepcopy(sub)(x, torch.ones(1)), wanted)


def test_a_failure_inside_leaves_no_replacement_on() -> None:
    sub = ElasticModel(Flat(), torch.randn(2, 1, 5, 5)).shrink(0.25).module
    with pytest.raises(RuntimeError):
        sub(torch.randn(2, 3, 5, 5))
    assert torch.ones(2, 72).view(-1, 72).shape == (2, 72)
    assert sub(torch.randn(3, 1, 5, 5)).shape == (3, 2)


class Layered(nn.Module):
    """The same block several times; training skips some, as LayerDrop does."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head, self.skip = nn.Linear(5, 16), nn.Linear(16, 3), 1
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(12, 16)})
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleDict)
            if not (self.training and number == self.skip):
                gate, value = block["up"](x)[:, :12], block["up"](x)[:, -12:]
                x = x + block["down"](gate.sigmoid() * value)
        out: Tensor = self.head(x)
        return out


def test_a_skipped_block_leaves_the_sizes_of_the_others_alone() -> None:
    net = ElasticModel(Layered(3), torch.randn(2, 5))
    assert net.rewritten
    assert len(net.coupling.groups) == 4
    assert net.shrink(0.3).module.train()(torch.randn(4, 5)).shape == (4, 3)


@pytest.mark.parametrize("build", [ZOO["decoder"].build, ZOO["halves_shuffled"].build])
def test_equal_blocks_are_repaired_together(
    build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight blocks need hardly more trial cuts than two: only two more for each doubling."""
    tried: list[int] = []
    plain = verify._try_cut

    def counted(spec: Any, given: Any, inputs: Any, number: int) -> Any:
        tried.append(number)
        return plain(spec, given, inputs, number)

    monkeypatch.setattr(verify, "_try_cut", counted)
    example = ZOO["decoder" if build is ZOO["decoder"].build else "halves_shuffled"].example(2)
    counts = []
    for blocks in (2, 8):
        tried.clear()
        ElasticModel(build(blocks), example)
        counts.append(len(tried))
    assert counts[1] <= counts[0] + 8


def test_a_standardised_weight_keeps_all_its_channels_free() -> None:
    net = ElasticModel(ZOO["squeeze_excite"].build(), ZOO["squeeze_excite"].example(2))
    assert net.coupling.full() == {"stem": 16, "squeeze": 4, "conv": 12}


# --- frozen and whole parts ---------------------------------------------------------------------


class Adapted(nn.Module):
    """A base and a low-rank adapter beside one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
        self.down, self.up = nn.Linear(6, 8, bias=False), nn.Linear(8, 12, bias=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.base(x) + self.up(self.down(x))).relu())
        return out


def test_a_frozen_base_is_neither_sorted_nor_cut_nor_sent() -> None:
    module = Adapted()
    before = {n: t.clone() for n, t in tensors_of(module).items()}
    net = ElasticModel(module, torch.randn(2, 6), freeze=["base.*"])
    assert net.coupling.full() == {"down": 8}
    net.sort_channels()
    sub = net.shrink(0.25)
    assert sub.plan.widths == {"down": 4}
    for name in ("base.0.weight", "base.2.bias"):
        assert torch.equal(tensors_of(sub.module)[name], before[name])
    assert set(net.trained_names) == {"down.weight", "up.weight", "head.weight", "head.bias"}
    assert net.size_bits == 32 * (6 * 8 + 8 * 12 + 12 * 3 + 3)
    assert {str(pin.reason) for pin in net.coupling.pins if pin.tensor == "base.0.weight"} >= {
        "freeze: is frozen"
    }


def test_what_is_frozen_costs_no_weight_gradients() -> None:
    """Forward 2·(6·16 + 16·12), no gradient of the base's weights, nor of what enters it."""
    net = ElasticModel(Adapted(), torch.randn(2, 6), freeze=["base.*"])
    base = 2 * (6 * 16 + 16 * 12)
    down, up, head = 2 * 6 * 8, 2 * 8 * 12, 2 * 12 * 3
    assert net.training_flops == base + 2 * down + 3 * up + 3 * head


def test_freeze_true_means_what_requires_no_gradient() -> None:
    module = Adapted()
    module.base.requires_grad_(False)
    assert ElasticModel(module, torch.randn(2, 6), freeze=True).coupling.full() == {"down": 8}
    cut = ElasticModel(module, torch.randn(2, 6)).coupling.full()
    assert cut == {"base.0": 16, "base.2": 12, "down": 8}


def test_what_is_kept_whole_is_trained_all_the_same() -> None:
    net = ElasticModel(Adapted(), torch.randn(2, 6), keep=["base.2.*"])
    assert net.coupling.full() == {"down": 8}
    assert "base.2.weight" in net.trained_names


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(UnknownNameError, match=r"freeze: no tensor matches 'bass\.\*'"):
        ElasticModel(Adapted(), torch.randn(2, 6), freeze=["bass.*"])


@pytest.mark.parametrize("used", [True, False])
def test_buffers_that_are_not_saved_stay(used: bool) -> None:
    class Buffered(Flat):
        def __init__(self) -> None:
            super().__init__()
            self.scale: Tensor
            self.register_buffer("scale", torch.ones(3), persistent=False)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x * self.scale[0] if used else x, mask)

    net = ElasticModel(Buffered(), torch.randn(2, 1, 5, 5))
    net.load(net.permute(tensors_of(net.module), net.sort_channels()))
    assert list(net.shrink(0.5).module.state_dict()) == list(net.module.state_dict())


def test_what_a_submodel_takes_counts_tied_weights_once() -> None:
    net = ElasticModel(ZOO["tied_embedding"].build(), ZOO["tied_embedding"].example(2))
    whole, half = net.plan(1.0), net.plan(0.5)
    assert net.bytes_of(whole) == 4 * sum(p.numel() for p in net.module.parameters())
    sub = net.shrink(0.5).module
    assert net.bytes_of(half) == 4 * sum(p.numel() for p in sub.parameters())
