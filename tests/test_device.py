"""Local training against torch's own optimizers, option by option, on samples of any structure."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anycostfl import ElasticModel, Metric, methods, models
from anycostfl import device as local
from anycostfl.data.samples import Samples, Tree
from anycostfl.device import (
    DeviceRuntime,
    Training,
    batches,
    measure,
    optimizer_of,
    train,
    train_until,
)
from anycostfl.errors import ConfigError
from anycostfl.metrics import ACCURACY, MAE, PERPLEXITY
from anycostfl.shrink import calibration_batches, recalibrate
from anycostfl.tasks import Augment, Task, no_data

CLASSES = Task(load=no_data)  # its loss is cross-entropy


def torchs_own(weights: list[Tensor], training: Training) -> torch.optim.Optimizer:
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=rate, momentum=training.momentum, weight_decay=decay)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(weights, lr=rate, weight_decay=decay)


def reference(
    module: nn.Module, samples: Samples, training: Training, epochs: int, seed: int
) -> dict[str, Tensor]:
    """The textbook loop."""
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torchs_own(list(module.parameters()), training)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=generator)
        for start in range(0, len(samples), training.batch):
            chosen = order[start : start + training.batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(module(samples.inputs[chosen]), samples.targets[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            if training.clip_norm:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)
            optimizer.step()
    return {n: before[n] - p.detach() for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("training", "epochs"),
    [
        (Training(0.05, 8), 1),
        (Training(0.05, 8, momentum=0.9), 2),
        (Training(0.05, 8, weight_decay=0.1), 1),
        (Training(0.05, 8, clip_norm=0.5), 1),
        (Training(0.05, 7, channels_last=False), 1),
    ],
)
def test_equals_the_textbook_loop(training: Training, epochs: int) -> None:
    module = models.load("cnn").build()
    samples = Samples(torch.randn(20, 1, 28, 28), torch.randint(10, (20,)))
    wanted = reference(copy.deepcopy(module), samples, training, epochs, 3)
    got = train(module, samples, CLASSES, training, 3, epochs=epochs)
    for name, update in wanted.items():
        assert torch.allclose(got[name], update, rtol=1e-3, atol=1e-5)


def test_training_that_is_late_ends_after_its_first_step() -> None:
    """The update is that of one step; in time, nothing differs from training without a deadline."""
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    samples = Samples(torch.randn(20, 6), torch.randint(3, (20,)))
    given = samples, CLASSES, Training(0.05, 5), 3
    late = train_until(copy.deepcopy(module), *given, epochs=2, until=time.perf_counter() - 1.0)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    first = Samples(samples.inputs[order[:5]], samples.targets[order[:5]])
    wanted = train(copy.deepcopy(module), first, CLASSES, Training(0.05, 5), 3)
    assert late.done == 1 / 8
    for name, update in wanted.items():
        torch.testing.assert_close(late.update[name], update)
    in_time = train_until(copy.deepcopy(module), *given, until=time.perf_counter() + 1e3)
    endless = train(copy.deepcopy(module), *given)
    assert in_time.done == 1.0
    assert all(torch.equal(in_time.update[name], update) for name, update in endless.items())


OPTIMIZERS = [
    Training(0.05, 7),
    Training(0.05, 7, momentum=0.9),
    Training(0.05, 7, momentum=0.9, weight_decay=0.1),
    Training(0.05, 7, optimizer="adam"),
    Training(0.05, 7, optimizer="adam", weight_decay=0.1),
    Training(0.05, 7, optimizer="adamw"),
    Training(0.05, 7, optimizer="adamw", weight_decay=0.1),
    Training(0.05, 7, optimizer="adamw", weight_decay=0.1, clip_norm=0.5),
    Training(0.05, 7, clip_norm=0.5, weight_decay=0.1),
]


@pytest.mark.parametrize("training", OPTIMIZERS)
def test_every_optimizer_trains_as_torchs_own(training: Training) -> None:
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    samples = Samples(torch.randn(20, 6), torch.randint(3, (20,)))
    wanted = reference(copy.deepcopy(module), samples, training, 2, 3)
    got = train(module, samples, CLASSES, training, 3, epochs=2)
    for name, update in wanted.items():
        assert torch.allclose(got[name], update, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", OPTIMIZERS)
def test_every_optimizer_steps_as_torchs_own(training: Training) -> None:
    """In double precision, with gradients from tiny to large and some that are zero."""
    shapes = [(4, 3), (5,), ()]
    given = [[torch.randn(shape).double() * 10**n for shape in shapes] for n in (-4, 0, 2, 0, -2)]
    given[1][0][1] = 0.0
    start = [torch.randn(shape).double() for shape in shapes]
    ours, theirs = ([w.clone() for w in start] for _ in range(2))
    step = optimizer_of(ours, training, training.learning_rate)
    optimizer = torchs_own(theirs, training)
    for gradients in given:
        step([g.clone() for g in gradients])
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        if training.clip_norm:
            nn.utils.clip_grad_norm_(theirs, training.clip_norm)
        optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-6 if training.clip_norm else 1e-12, atol=0)


@pytest.mark.parametrize("training", [OPTIMIZERS[1], OPTIMIZERS[3]])
def test_what_an_optimizer_remembers_starts_at_zero_every_round(training: Training) -> None:
    samples = Samples(torch.randn(14, 4), torch.arange(14) % 3)
    start, module = nn.Linear(4, 3), nn.Linear(4, 3)
    rounds = []
    for _ in range(2):
        module.load_state_dict(start.state_dict())
        rounds.append(train(module, samples, CLASSES, training, 5))
    assert all(torch.equal(rounds[0][name], update) for name, update in rounds[1].items())


# --- the learning rate of a round -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0]),
        ("constant", 1, [0.5, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1.0, 0.5]),
        ("cosine", 0, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        ("cosine", 2, [1 / 3, 2 / 3, 1.0, 0.5]),
        ("cosine", 9, [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_schedules_by_hand(schedule: str, warmup: int, wanted: list[float]) -> None:
    training = Training(2.0, 8, schedule=schedule, warmup=warmup)
    rates = [training.rate_in(number, 4) for number in range(4)]
    assert rates == pytest.approx([2 * share for share in wanted])


@given(st.sampled_from(("constant", "linear", "cosine")), st.integers(0, 9), st.integers(1, 40))
def test_a_schedule_rises_to_its_rate_and_never_ends_at_zero(
    schedule: str, warmup: int, rounds: int
) -> None:
    training = Training(0.3, 8, schedule=schedule, warmup=warmup)
    rates = [training.rate_in(number, rounds) for number in range(rounds)]
    first, later = rates[:warmup], rates[warmup:]
    assert first == sorted(first)
    assert later == sorted(later, reverse=True)
    assert all(0 < rate <= 0.3 for rate in rates)
    assert later[:1] in ([], [0.3])
    if schedule != "constant" and later:
        assert training.rate_in(rounds, rounds) == pytest.approx(0.0, abs=1e-12)


def test_the_rate_of_the_round_is_the_one_that_trains() -> None:
    module = nn.Linear(4, 3)
    samples = Samples(torch.randn(8, 4), torch.arange(8) % 3)

    def trained(training: Training, rate: float | None = None) -> Tensor:
        own = copy.deepcopy(module)
        return train(own, samples, CLASSES, training, 3, rate=rate)["weight"]

    first = Training(0.1, 4, schedule="cosine")
    assert torch.equal(trained(first, 0.02), trained(replace(first, learning_rate=0.02)))
    assert torch.equal(trained(first), trained(first, 0.1))
    assert not trained(first, 0.0).any()  # nothing is learnt, not as much as in the first round


@pytest.mark.parametrize(
    "wrong", [{"optimizer": "lion"}, {"schedule": "step"}, {"warmup": -1}, {"weight_decay": -0.1}]
)
def test_training_that_does_not_exist_is_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Training(0.1, 8, **wrong)


# --- batches and statistics -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "size", "wanted"),
    [
        (20, 7, [7, 7, 6]),
        (21, 7, [7, 7, 7]),
        (15, 7, [7, 8]),
        (1, 7, [1]),
        (8, 7, [8]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_no_batch_of_one_is_left_over(samples: int, size: int, wanted: list[int]) -> None:
    parts = batches(torch.arange(samples), size)
    assert [len(part) for part in parts] == wanted
    assert torch.equal(torch.cat(parts), torch.arange(samples))


def test_batch_norm_trains_on_any_number_of_samples() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    samples = Samples(torch.randn(9, 4), torch.arange(9) % 3)
    update = train(module, samples, CLASSES, Training(0.1, 8), 0)
    assert update["0.weight"].any()


def test_statistics_of_any_number_of_samples() -> None:
    module, images = nn.Sequential(nn.BatchNorm1d(4)), 3 + 2 * torch.randn(129, 4)
    recalibrate(module, calibration_batches(images))
    norm = cast("nn.BatchNorm1d", module[0])
    assert torch.allclose(cast("Tensor", norm.running_mean), images.mean(0), atol=0.1)
    assert torch.allclose(cast("Tensor", norm.running_var), images.var(0), rtol=0.1)


def test_statistics_do_not_depend_on_how_a_file_is_sorted() -> None:
    """Ten classes with different means, one after the other."""
    module, classes = nn.Sequential(nn.BatchNorm1d(4)), torch.arange(10).repeat_interleave(500)
    draw = torch.Generator().manual_seed(31337)
    images = torch.randn(5000, 4, generator=draw) + classes[:, None]
    recalibrate(module, calibration_batches(images))
    norm = cast("nn.BatchNorm1d", module[0])
    assert torch.allclose(cast("Tensor", norm.running_mean), images.mean(0), atol=0.5)
    assert torch.allclose(cast("Tensor", norm.running_var), images.var(0), rtol=0.2)


def test_what_a_module_draws_follows_from_the_seed_and_from_nothing_else() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 3))
    samples = Samples(torch.randn(16, 4), torch.arange(16) % 3)

    def trained(seed: int) -> dict[str, Tensor]:
        return train(copy.deepcopy(module), samples, CLASSES, Training(0.1, 16), seed)

    before = torch.get_rng_state()
    first = trained(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(100)
    again, other = trained(5), trained(6)  # one batch: the order of samples does not matter
    assert all(torch.equal(first[n], u) for n, u in again.items())
    assert not torch.allclose(first["0.weight"], other["0.weight"], rtol=1e-2)


# --- augmentation ---------------------------------------------------------------------------------


def noisy(inputs: Tree, targets: Tree, random: torch.Generator) -> tuple[Tree, Tree]:
    return inputs + torch.randn(inputs.shape, generator=random), targets


def augmented(augment: Augment | None, seed: int, *, on: bool = True) -> Tensor:
    module = nn.Linear(4, 3)
    with torch.no_grad():
        module.weight.fill_(0.1)
        module.bias.zero_()
    samples = Samples(torch.arange(80.0).view(20, 4) / 40 - 1, torch.arange(20) % 3)
    task = Task(load=no_data, augment=augment)
    return train(module, samples, task, Training(0.1, 8, augment=on), seed, epochs=2)["weight"]


def test_augmentation_follows_from_the_seed() -> None:
    first = augmented(noisy, 5)
    torch.randn(100)
    assert torch.equal(augmented(noisy, 5), first)
    assert not torch.equal(augmented(noisy, 6), first)


def test_samples_are_augmented_only_when_asked() -> None:
    plain = augmented(None, 5, on=False)
    assert torch.equal(augmented(noisy, 5, on=False), plain)
    assert torch.equal(augmented(None, 5), plain)  # the task does not say how
    assert not torch.equal(augmented(noisy, 5), plain)


def test_augmentation_sees_every_batch_anew_and_changes_no_order() -> None:
    seen: list[Tensor] = []

    def watch(inputs: Tree, targets: Tree, random: torch.Generator) -> tuple[Tree, Tree]:
        torch.rand(7, generator=random)
        seen.append(targets)
        return inputs, targets

    assert torch.equal(augmented(watch, 5), augmented(None, 5))
    assert [len(targets) for targets in seen] == [8, 8, 4] * 2
    one, two = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert torch.equal(one.sort().values, two.sort().values)


def test_augmentation_may_change_targets_too() -> None:
    def others(inputs: Tree, targets: Tree, _: torch.Generator) -> tuple[Tree, Tree]:
        return inputs, (targets + 1) % 3

    assert not torch.allclose(augmented(others, 5), augmented(None, 5))


# --- samples, outputs and models of any structure -------------------------------------------------


class Bands(nn.Module):
    """Convolutions over three dimensions, then over two."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.flat = nn.Conv3d(1, 4, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.flat(self.deep(x[:, None]).flatten(1, 2)).mean((2, 3)))
        return out


def correct(module: nn.Module, samples: Samples) -> float:
    [sums] = measure(module, samples, (ACCURACY,), Training(0.1, 4))
    assert sums.shape == (1, 2)
    assert sums[0, 1] == len(samples)
    return float(sums[0, 0])


def test_convolutions_over_three_dimensions_train_and_count() -> None:
    module, samples = Bands(), Samples(torch.randn(8, 2, 6, 6), torch.arange(8) % 3)
    update = train(module, samples, CLASSES, Training(0.1, 4), 0)
    assert update["deep.weight"].any()
    right = int((module(samples.inputs).argmax(1) == samples.targets).sum())
    assert correct(module, samples) == right


def test_what_a_batch_does_not_use_stays() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x) if float(x.sum()) > 0 else self.other(x)
            return out

    samples = Samples(torch.ones(4, 4), torch.arange(4) % 3)
    update = train(Either(), samples, CLASSES, Training(0.1, 4), 0)
    assert update["one.weight"].any()
    assert not update["other.weight"].any()


def test_the_update_is_before_minus_after() -> None:
    module = models.load("cnn").build()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    samples = Samples(torch.randn(8, 1, 28, 28), torch.randint(10, (8,)))
    update = train(module, samples, CLASSES, Training(0.1, 4), 0)
    for name, parameter in module.named_parameters():
        assert torch.equal(update[name], before[name] - parameter.detach())
        assert update[name].is_contiguous()


def test_bfloat16_is_close() -> None:
    samples = Samples(torch.randn(8, 1, 28, 28), torch.randint(10, (8,)))
    module = models.load("cnn").build()
    ways = [Training(0.1, 8, precision=precision) for precision in ("fp32", "bf16")]
    exact, rough = (train(copy.deepcopy(module), samples, CLASSES, way, 0) for way in ways)
    for name, update in exact.items():
        assert float((rough[name] - update).norm() / update.norm()) < 0.2


def test_text_models_train_too() -> None:
    module = models.load("lstm").build()
    samples = Samples(torch.randint(80, (6, 10)), torch.randint(80, (6,)))
    update = train(module, samples, CLASSES, Training(0.5, 3), 0)
    assert all(u.abs().max() > 0 for u in update.values())


class Two(nn.Module):
    """An image and some numbers, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 + 2, 3)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        seen = self.conv(image).relu().mean((2, 3))
        out: Tensor = self.head(torch.cat([seen, numbers], dim=1))
        return out


@pytest.mark.parametrize("wide", [True, False])
def test_inputs_of_any_structure_train_alike(wide: bool) -> None:
    module, training = Two(), Training(0.1, 4, channels_last=wide)
    image, numbers, classes = torch.randn(10, 1, 6, 6), torch.randn(10, 2), torch.arange(10) % 3

    class Joined(nn.Module):
        def __init__(self, two: nn.Module) -> None:
            super().__init__()
            self.two = two

        def forward(self, flat: Tensor) -> Any:
            return self.two(flat[:, :36].view(-1, 1, 6, 6), flat[:, 36:])

    flat = Samples(torch.cat([image.flatten(1), numbers], dim=1), classes)
    wanted = train(Joined(copy.deepcopy(module)), flat, CLASSES, training, 3)
    for inputs in ((image, numbers), {"numbers": numbers, "image": image}):
        samples = Samples(inputs, classes)
        update = train(copy.deepcopy(module), samples, CLASSES, training, 3)
        for name, tensor in update.items():
            assert torch.allclose(tensor, wanted[f"two.{name}"], rtol=1e-4, atol=1e-6)
        assert correct(module, samples) == correct(Joined(module), flat)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "one tensor": lambda scores: scores,
    "a tuple": lambda scores: (scores, scores.detach().square()),
    "a tuple with nothing": lambda scores: (scores, None),
    "a dict": lambda scores: {"logits": scores, "hidden": scores.detach() + 1},
    "a dict in another order": lambda scores: {"hidden": scores.detach() + 1, "logits": scores},
    "a dict with nothing": lambda scores: {"cache": None, "logits": scores},
    "a dict of another name": lambda scores: {"cache": None, "scores": scores},
    "beside a number": lambda scores: (scores, 0.5),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_may_return_more_than_its_scores(kind: str, precision: str) -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return OUTPUTS[kind](super().forward(x))

    module, training = nn.Linear(4, 3), Training(0.1, 4, precision=precision)
    wrapped = Wrapped(4, 3)
    wrapped.load_state_dict(module.state_dict())
    samples = Samples(torch.randn(9, 4), torch.arange(9) % 3)
    wanted, got = (train(m, samples, CLASSES, training, 3) for m in (module, wrapped))
    assert all(torch.equal(got[name], update) for name, update in wanted.items())
    assert correct(wrapped, samples) == correct(module, samples)


def test_a_loss_gets_outputs_and_targets_as_they_are_in_single_precision() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"kind": self.kind(x), "size": self.size(x), "count": x[:, 0].long()}

    seen: list[torch.dtype] = []

    def loss(outputs: Any, targets: Any) -> Tensor:
        seen.extend(outputs[name].dtype for name in ("kind", "size", "count"))
        return F.cross_entropy(outputs["kind"], targets["kind"]) + F.mse_loss(
            outputs["size"], targets["size"]
        )

    targets = {"kind": torch.arange(8) % 3, "size": torch.randn(8, 1)}
    task, training = Task(load=no_data, loss=loss), Training(0.1, 8, precision="bf16")
    update = train(Heads(), Samples(torch.randn(8, 4), targets), task, training, 0)
    assert seen == [torch.float32, torch.float32, torch.int64]
    assert all(tensor.any() for tensor in update.values())


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_counting_is_exact_for_any_batch(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TEST_BATCH", batch)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    samples = Samples(torch.randn(11, 1, 2, 2), torch.randint(3, (11,)))
    assert correct(module, samples) == int(
        (module(samples.inputs).argmax(1) == samples.targets).sum()
    )


def test_sums_are_told_apart_by_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TEST_BATCH", 3)
    module, whose = nn.Linear(4, 3), torch.tensor([2, 0, 2, 2, 0, 3, 3])
    samples = Samples(torch.randn(7, 4), torch.arange(7) % 3, whose)
    right = (module(samples.inputs).argmax(1) == samples.targets).double()
    [sums] = measure(module, samples, (ACCURACY,), Training(0.1, 4), owners=5)
    for owner in range(5):
        assert sums[owner].tolist() == [right[whose == owner].sum(), (whose == owner).sum()]


def test_every_metric_is_measured_in_one_pass_in_evaluation_mode() -> None:
    module, calls = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9)), []
    module.register_forward_hook(lambda *_: calls.append(1))
    samples = Samples(torch.randn(7, 4), torch.arange(7) % 3)
    loss = Metric.mean("loss", F.cross_entropy, higher_is_better=False)
    module.train()
    accuracy, likelihood, mean = measure(
        module, samples, (ACCURACY, PERPLEXITY, loss), Training(0.1, 4)
    )
    assert len(calls) == 1
    assert not module.training
    assert (accuracy.shape, likelihood.shape, mean.shape) == ((1, 2), (1, 2), (1, 2))
    wanted = F.cross_entropy(module(samples.inputs), samples.targets).item()
    assert loss.value(mean[0]) == pytest.approx(wanted)
    assert PERPLEXITY.value(likelihood[0]) == pytest.approx(math.exp(wanted))
    assert not any(sums.requires_grad for sums in (accuracy, likelihood, mean))


def test_nothing_is_measured_on_no_samples() -> None:
    none = Samples(torch.zeros(0, 4), torch.zeros(0))
    assert measure(nn.Linear(4, 1), none, (MAE,), Training(0.1, 4)) == []


def test_a_runtime_measures_chunk_by_chunk_and_counts_owners_only_when_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "TEST_CHUNK", 4)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net = ElasticModel(module, torch.randn(2, 4))
    runtime = DeviceRuntime(CLASSES, methods.load("fedavg"), net, Training(0.1, 4))
    samples = Samples(torch.randn(10, 4), torch.arange(10) % 3, torch.arange(10) % 2)
    together, apart = (list(runtime.measure(module, samples, owners)) for owners in (1, 2))
    assert [len(chunks) for chunks in (together, apart)] == [3, 3]
    for (one,), (two,) in zip(together, apart, strict=True):
        assert (one.shape, two.shape) == ((1, 2), (2, 2))
        assert torch.equal(one[0], two.sum(0))
    assert sum(float(one[0, 0]) for (one,) in together) == correct(
        module, Samples(samples.inputs, samples.targets)
    )
