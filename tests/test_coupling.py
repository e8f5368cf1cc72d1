"""What a trace finds: hand-checked couplings, reasons for pins, FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from anycostfl import models
from anycostfl.coupling import trace
from anycostfl.coupling.atoms import AtomClasses, Reason
from anycostfl.coupling.result import Coupling
from architectures import ZOO


def coupling_of(name: str) -> Coupling:
    return trace(ZOO[name].build(), [ZOO[name].example(2)])


def slots_of(coupling: Coupling, group: str) -> set[tuple[str, int, int]]:
    found = next(g for g in coupling.groups if g.name == group)
    return {(slot.tensor, slot.dim, slot.owned) for slot in found.slots}


def test_joining_atoms_is_transitive() -> None:
    classes = AtomClasses()
    a, b, c = classes.new(4), classes.new(4), classes.new(4)
    classes.join(a, b)
    classes.join(b[::-1], c)
    assert classes.roots(c).tolist() == a[::-1].tolist()


def test_joining_repeated_atoms_merges_all_of_them() -> None:
    classes = AtomClasses()
    one, many = classes.new(1), classes.new(5)
    classes.join(one.repeat(5), many)
    assert set(classes.roots(many).tolist()) == {0}


def test_a_pin_reaches_the_whole_class_and_keeps_its_first_reason() -> None:
    classes = AtomClasses()
    a, b = classes.new(2), classes.new(2)
    first, second = Reason("sort", "x", "why"), Reason("flip", "y", "why")
    classes.pin(b[:1], first)
    classes.pin(a, second)
    classes.join(a, b)
    assert classes.pinned() == {0: first, 1: second}


def test_a_channel_owns_its_whole_map_after_flatten() -> None:
    assert slots_of(coupling_of("cnn"), "conv2") == {
        ("conv2.weight", 0, 1),
        ("conv2.bias", 0, 1),
        ("fc1.weight", 1, 49),
    }


def test_a_residual_stream_has_several_producers() -> None:
    stem = next(g for g in coupling_of("resnet18").groups if g.name == "stem.0")
    assert [slot.tensor for slot in stem.slots if slot.produces] == [
        "stem.0.weight",
        "stages.0.0.conv2.weight",
        "stages.0.1.conv2.weight",
    ]


def test_depthwise_filters_follow_their_channel() -> None:
    slots = slots_of(coupling_of("mobilenet"), "blocks.0.expand")
    assert ("blocks.0.depthwise.weight", 0, 1) in slots
    assert ("blocks.0.project.weight", 1, 1) in slots


def test_recurrent_gates_move_together() -> None:
    slots = slots_of(coupling_of("lstm"), "lstm.weight_ih_l0")
    assert ("lstm.weight_ih_l0", 0, 4) in slots
    assert ("lstm.weight_hh_l0", 1, 1) in slots


def test_halves_of_a_gate_move_together() -> None:
    up = next(g for g in coupling_of("glu").groups if g.name == "up")
    weight = next(slot for slot in up.slots if slot.tensor == "up.weight")
    assert weight.index.tolist() == [[i, i + 12] for i in range(12)]


def test_tied_weights_are_one_tensor() -> None:
    coupling = coupling_of("tied_embedding")
    assert coupling.aliases["head.weight"] == "embedding.weight"
    assert {s.tensor for g in coupling.groups for s in g.slots}.isdisjoint({"head.weight"})


def test_group_norm_picks_the_finer_units() -> None:
    sizes = {group.name: group.size for group in coupling_of("group_norms").groups}
    assert sizes == {"a": 12, "b": 8}  # 2 groups of 12: by place; 8 groups of 3: whole


def test_different_treatment_keeps_channels_apart() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.a(x).chunk(2, 1)
            result: Tensor = self.head(torch.cat([F.relu(first), torch.sigmoid(second)], 1))
            return result

    coupling = trace(Halves(), [torch.randn(2, 4)])
    assert coupling.full() == {"a": 4, "a[4:]": 4}


def test_an_operation_without_a_rule_pins_its_channels_and_says_so() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 9), nn.Linear(9, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.linalg.qr(self.a(x).view(-1, 3, 3)).Q.flatten(1)
            result: Tensor = self.head(F.relu(self.b(y)))
            return result

    coupling = trace(Inverse(), [torch.randn(2, 4)])
    assert coupling.full() == {"b": 6}
    pin = next(p for p in coupling.pins if (p.tensor, p.dim) == ("a.weight", 0))
    assert pin.reason.operation == "linalg_qr"
    assert pin.reason.why == "no rule for this operation"


def test_position_dependent_operations_pin_only_their_dimension() -> None:
    coupling = coupling_of("cumulative")
    assert coupling.full() == {"b": 8}
    reasons = {pin.reason.operation for pin in coupling.pins if pin.tensor == "a.weight"}
    assert "cumsum" in reasons


def test_a_branch_not_taken_is_explored() -> None:
    positive = trace(ZOO["data_dependent"].build(), [torch.ones(2, 6)])
    assert positive.unused == ()
    assert {"b.weight", "c.weight"} <= {s.tensor for g in positive.groups for s in g.slots}


class TwoHeads(nn.Module):
    """Which head answers depends on the mode, or on the data."""

    def __init__(self, *, by_mode: bool) -> None:
        super().__init__()
        self.by_mode = by_mode
        self.body, self.head, self.other = nn.Linear(6, 16), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).relu()
        if self.by_mode:
            return (self.head(h), self.other(h)) if self.training else self.head(h)
        return self.head(h) if x.mean() > 0 else self.other(h)


@pytest.mark.parametrize("by_mode", [True, False])
def test_what_only_training_or_another_branch_returns_is_an_output_too(by_mode: bool) -> None:
    coupling = trace(TwoHeads(by_mode=by_mode), [torch.rand(2, 6)])
    assert coupling.full() == {"body": 16}


class Either(nn.Module):
    """One way through two layers, or another."""

    def __init__(self, other: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.other = other
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        result: Tensor = self.head(h.flip(1) if self.other(self, x) else h)
        return result


@pytest.mark.parametrize(
    "other", [lambda _, x: bool(x.mean() < 0), lambda model, _: bool(model.training)]
)
def test_another_branch_is_explored_even_if_every_tensor_was_used(
    other: Callable[[nn.Module, Tensor], bool],
) -> None:
    coupling = trace(Either(other), [torch.rand(2, 6)])
    assert coupling.groups == ()
    assert any(pin.reason.operation == "flip" for pin in coupling.pins)


def test_noise_that_only_training_adds_pins_nothing() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x).relu()
            result: Tensor = self.head(h + torch.randn(h.shape) if self.training else h)
            return result

    assert trace(Noisy(), [torch.rand(2, 6)]).full() == {"body": 16}


def test_channels_that_may_feed_a_tensor_nothing_used_stay() -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 16)
            self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

        def forward(self, x: Tensor, task: Tensor) -> Tensor:
            result: Tensor = self.heads[int(task[0])](self.b(self.a(x).relu()).relu())
            return result

    coupling = trace(Tasks(), [torch.randn(2, 6), torch.zeros(2, dtype=torch.long)])
    assert coupling.full() == {"a": 12}
    reasons = {str(p.reason) for p in coupling.pins if (p.tensor, p.dim) == ("b.weight", 0)}
    assert reasons == {"unused: may feed heads.1.weight, which the example did not use"}


def test_tensors_that_nothing_uses_are_reported() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.spare, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(F.relu(self.a(x)))
            return result

    assert trace(Spare(), [torch.randn(2, 4)]).unused == ("spare.weight", "spare.bias")


@pytest.mark.parametrize("name", ["group_norms", "lstm"])
def test_a_tensor_that_nothing_uses_changes_nothing_else(name: str) -> None:
    model = ZOO[name].build()
    model.register_parameter("spare", nn.Parameter(torch.ones(7, 7)))
    coupling = trace(model, [ZOO[name].example(2)])
    assert coupling.unused == ("spare",)
    assert coupling.full() == coupling_of(name).full()


def test_tracing_leaves_model_and_settings_alone() -> None:
    model = ZOO["encoder_layer"].build().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    trace(model, [ZOO["encoder_layer"].example(2)])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert settings == (torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("name", "mflop"), [("cnn", 72.4), ("vgg9", 810.4)])
def test_training_flops_are_the_recovered_ones(name: str, mflop: float) -> None:
    coupling = coupling_of(name)
    assert coupling.flops(coupling.full()) / 1e6 == pytest.approx(mflop, abs=0.05)


@pytest.mark.parametrize("name", ["cnn", "vgg9", "resnet18_gn", "vit"])
def test_flops_agree_with_torchs_counter_where_it_is_right(name: str) -> None:
    """It is wrong for the backward of grouped convolutions, and for LSTMs on a CPU."""
    spec = models.load(name)
    model, x = spec.build(), spec.example(2)
    coupling = trace(model, [x])
    # The fused attention kernel of CPUs counts as zero, so let torch take the plain one.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    forward = coupling.flops(coupling.full(), training=False)
    assert forward == pytest.approx(counter.get_total_flops() / 2, rel=1e-9)


def test_recurrent_flops_are_counted() -> None:
    """One LSTM layer: 8 · h · (input + h) per step forward.

    Training takes twice that where no gradient is needed of what enters, the data and the first
    state, and three times elsewhere.
    """
    coupling = trace(nn.LSTM(5, 8, batch_first=True), [torch.randn(2, 7, 5)])
    forward = 7 * 2 * 4 * 8 * (5 + 8)
    assert coupling.flops(coupling.full(), training=False) == forward
    data, first, later = 7 * 2 * 4 * 8 * 5, 2 * 4 * 8 * 8, 6 * 2 * 4 * 8 * 8
    assert coupling.flops(coupling.full()) == 2 * data + 2 * first + 3 * later


def test_depthwise_flops_are_counted_per_channel() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    coupling = trace(conv, [torch.randn(2, 8, 4, 4)])
    assert coupling.flops({}, training=False) == 2 * 8 * 9 * 16
    assert coupling.flops({}) == 2 * 2 * 8 * 9 * 16  # the input needs no gradient


def test_a_weight_of_given_norms_shrinks_with_its_layer() -> None:
    """Norms per filter follow the filter; one norm per tap of the kernel follows nothing."""
    for dim in (0, 2):
        conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3), dim=dim)
        model = nn.Sequential(conv, nn.ReLU(), nn.Conv1d(8, 5, 1))
        coupling = trace(model, [torch.randn(2, 4, 9)])
        (group,) = coupling.groups
        norms = {slot.tensor for slot in group.slots if "original0" in slot.tensor}
        assert group.size == 8
        assert bool(norms) == (dim == 0)


def test_pooling_that_sets_strides_lets_channels_through() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).permute(0, 3, 1, 2)  # channels last in memory
            out: Tensor = self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))
            return out

    assert trace(Pooled(), [torch.randn(2, 5, 5, 4)]).full() == {"a": 8}


def test_of_two_hidden_dimensions_flattened_into_one_only_the_last_moves() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(4, 5), nn.Linear(30, 3)

        def forward(self, x: Tensor) -> Tensor:
            pairs = self.a(x)[:, :, None] * self.b(x)[:, None, :]
            out: Tensor = self.head(pairs.relu().flatten(1))
            return out

    coupling = trace(Outer(), [torch.randn(2, 4)])
    assert coupling.full() == {"b": 5}
    assert {(s.tensor, s.owned) for s in coupling.groups[0].slots} >= {("head.weight", 6)}
    whys = {pin.reason.why for pin in coupling.pins if pin.tensor == "a.weight"}
    assert "merges two channel dimensions" in whys
