"""Local SGD against torch's own optimizer, option by option."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import models
from anycostfl.device import Samples, Training, batches, count_correct, train
from anycostfl.shrink import calibration_batches, recalibrate


def reference(
    module: nn.Module, samples: Samples, training: Training, epochs: int, seed: int
) -> dict[str, Tensor]:
    """The textbook loop."""
    images, labels = samples
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(labels), training.batch):
            chosen = order[start : start + training.batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(module(images[chosen]), labels[chosen])
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
    samples = torch.randn(20, 1, 28, 28), torch.randint(10, (20,))
    wanted = reference(copy.deepcopy(module), samples, training, epochs, 3)
    got = train(module, samples, training, torch.Generator().manual_seed(3), epochs=epochs)
    for name, update in wanted.items():
        assert torch.allclose(got[name], update, rtol=1e-3, atol=1e-5)


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
    images, labels = torch.randn(9, 4), torch.arange(9) % 3
    update = train(module, (images, labels), Training(0.1, 8), torch.Generator())
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
    images, labels = torch.randn(16, 4), torch.arange(16) % 3

    def trained(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return train(copy.deepcopy(module), (images, labels), Training(0.1, 16), generator)

    before = torch.get_rng_state()
    first = trained(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(100)
    again, other = trained(5), trained(6)  # one batch: the order of samples does not matter
    assert all(torch.equal(first[n], u) for n, u in again.items())
    assert not torch.allclose(first["0.weight"], other["0.weight"], rtol=1e-2)


def test_convolutions_over_three_dimensions_train_and_count() -> None:
    class Bands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep, self.flat = nn.Conv3d(1, 4, 3, padding=1), nn.Conv2d(8, 4, 3)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.flat(self.deep(x[:, None]).flatten(1, 2)).mean((2, 3)))
            return out

    module, images, labels = Bands(), torch.randn(8, 2, 6, 6), torch.arange(8) % 3
    update = train(module, (images, labels), Training(0.1, 4), torch.Generator())
    assert update["deep.weight"].any()
    right = int((module(images).argmax(1) == labels).sum())
    assert count_correct(module, (images, labels), Training(0.1, 4)) == right


def test_what_a_batch_does_not_use_stays() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x) if float(x.sum()) > 0 else self.other(x)
            return out

    images, labels = torch.ones(4, 4), torch.arange(4) % 3
    update = train(Either(), (images, labels), Training(0.1, 4), torch.Generator())
    assert update["one.weight"].any()
    assert not update["other.weight"].any()


def test_the_update_is_before_minus_after() -> None:
    module = models.load("cnn").build()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    images, labels = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    update = train(module, (images, labels), Training(0.1, 4), torch.Generator())
    for name, parameter in module.named_parameters():
        assert torch.equal(update[name], before[name] - parameter.detach())
        assert update[name].is_contiguous()


def test_bfloat16_is_close() -> None:
    images, labels = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    module = models.load("cnn").build()
    ways = [Training(0.1, 8, precision=precision) for precision in ("fp32", "bf16")]
    exact, rough = (
        train(copy.deepcopy(module), (images, labels), way, torch.Generator()) for way in ways
    )
    for name, update in exact.items():
        assert float((rough[name] - update).norm() / update.norm()) < 0.2


def test_text_models_train_too() -> None:
    module = models.load("lstm").build()
    tokens, labels = torch.randint(80, (6, 10)), torch.randint(80, (6,))
    update = train(module, (tokens, labels), Training(0.5, 3), torch.Generator())
    assert all(u.abs().max() > 0 for u in update.values())


def test_counting_is_exact_for_any_batch() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.randn(11, 1, 2, 2), torch.randint(3, (11,))
    wanted = int((module(images).argmax(1) == labels).sum())
    training = Training(0.1, 4)
    counts = {count_correct(module, (images, labels), training, batch) for batch in (1, 4, 100)}
    assert counts == {wanted}
