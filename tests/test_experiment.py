"""From a configuration to an experiment: what does not fit together is refused with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import Metric, MetricInfo
from anycostfl.config import Config, load_preset
from anycostfl.data.samples import Samples
from anycostfl.errors import AnycostError, ConfigError, TaskError
from anycostfl.experiment import Experiment, build_experiment, check_fit, elastic, load_data
from anycostfl.metrics import ratio
from anycostfl.tasks import Task, no_data
from small_runs import small_config


def build(config: Config) -> Experiment:
    return build_experiment(config, load_data(config))


def test_the_workload_is_that_of_the_images_in_the_dataset(tmp_path: Path) -> None:
    images, labels = np.zeros((24, 64, 64, 3), np.uint8), np.arange(24) % 10
    np.savez(
        tmp_path / "large.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    changes = [f"data.name={tmp_path}/large.npz", "model.name=mobilenet"]
    told = r"samples of float32 \(3, 64, 64\) mobilenet takes"
    with pytest.raises(ConfigError, match=told) as caught:
        build(load_preset("cifar10-iid", changes))
    advice = str(caught.value).split("--set ")[1]
    given = float(advice.split("=")[1])
    built = build(load_preset("cifar10-iid", [*changes, advice]))
    assert built.config.workload.flops_per_sample == given
    assert built.net.training_flops == pytest.approx(given, rel=1e-5)


def test_images_that_the_model_does_not_take_are_named_beside_those_it_does(tmp_path: Path) -> None:
    told = (
        r"given samples of float32 \(1, 28, 28\), but model vgg9 takes float32 \(3, 32, 32\); "
        "choose another model"
    )
    with pytest.raises(ConfigError, match=told):
        build(small_config(tmp_path, "model.name=vgg9"))


def test_server_momentum_is_the_methods_unless_configured(tmp_path: Path) -> None:
    def momentum(*changes: str) -> float | None:
        return build_experiment(small_config(tmp_path, *changes)).optimizer.momentum

    assert momentum() == 0.0
    assert momentum("run.method=anycostfl+") == 0.5
    assert momentum("run.method=anycostfl+", "server_optimizer.momentum=0") == 0.0
    assert momentum("server_optimizer.momentum=0.3") == 0.3


def test_without_a_dataset_the_server_has_no_test_data(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    alone, with_data = build_experiment(config), build(config)
    assert (alone.test, alone.fitted, alone.calibration) == (None, {}, ())
    assert alone.evaluate(alone.initial_weights) is None
    found = with_data.evaluate(with_data.initial_weights)
    assert found is not None
    assert 0 <= found.value <= 1
    assert with_data.fitted.keys() == {"mean", "std"}
    assert alone.fingerprint == with_data.fingerprint


def test_another_learning_rate_makes_the_experiment_that_has_it_configured(tmp_path: Path) -> None:
    rate, downlink = "training.learning_rate=0.7", "compression.downlink=0.1"
    first = build(small_config(tmp_path, downlink))
    other, wanted = (
        first.with_training(learning_rate=0.7),
        build(small_config(tmp_path, downlink, rate)),
    )
    assert other.config == wanted.config != first.config
    assert other.runtime.training == wanted.runtime.training != first.runtime.training
    assert other.fingerprint == wanted.fingerprint != first.fingerprint
    assert other.downlink is not None
    assert other.downlink.fingerprint == other.fingerprint


# --- does everything fit together? ----------------------------------------------------------------


class Pair(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Any:
        scores = self.head(self.hidden(torch.cat([left, right], dim=1)).relu())
        return {"logits": scores, "cache": None}


LEFT, RIGHT, LABELS = torch.randn(6, 3), torch.randn(6, 2), torch.arange(6) % 3
INPUTS: list[Any] = [(LEFT, RIGHT), {"right": RIGHT, "left": LEFT}]


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_model_of_several_inputs_is_traced_as_its_samples_are_passed(inputs: Any) -> None:
    samples = Samples(inputs, LABELS)
    net = elastic(Pair(), samples.take(slice(0, 2)).inputs, "even")
    assert net.plan(0.5).flops_ratio < 0.6
    check_fit(Task(load=no_data, metric=("accuracy", "perplexity")), net, samples)


def test_targets_that_a_loss_leaves_out_are_no_classes() -> None:
    net = elastic(Pair(), (LEFT[:2], RIGHT[:2]), "even")
    check_fit(Task(load=no_data), net, Samples((LEFT, RIGHT), LABELS.where(LABELS > 0, -100)))


NOTHING = Metric(MetricInfo("nothing"), lambda *_: torch.zeros(2, 2), ratio)
FLAT = Metric(MetricInfo("flat"), lambda *_: torch.ones(3), ratio)


def as_number(*_: Any) -> Any:
    return 3.0


UNFIT: list[tuple[Callable[..., Task], Tensor, str]] = [
    (lambda: Task(load=no_data), LABELS + 1, "targets: sample 2 is of class 3, .* has 3 outputs"),
    (lambda: Task(load=no_data), LABELS - 1, "sample 0 is of class -1, .*; must be 0 to 2"),
    (lambda: Task(load=no_data, loss=F.mse_loss), LABELS, r"loss fails on outputs .*\['logits'\]"),
    (
        lambda: Task(load=no_data, loss=lambda o, _: o["logits"].square()),
        LABELS,
        r"the loss returned \(2, 3\) .*must be one number",
    ),
    (lambda: Task(load=no_data, loss=as_number), LABELS, "the loss returned float"),
    (
        lambda: Task(load=no_data, loss=lambda o, _: o["logits"].detach().mean()),
        LABELS,
        "has no gradient",
    ),
    (
        lambda: Task(load=no_data, loss=lambda o, _: o["logits"].mean() / 0),
        LABELS,
        "loss of the untrained model is (nan|-?inf) on two samples",
    ),
    (lambda: Task(load=no_data, metric="mae"), LABELS, "one number for each target"),
    (lambda: Task(load=no_data, metric=NOTHING), LABELS, "nothing: returned no number"),
    (lambda: Task(load=no_data, metric=FLAT), LABELS, r"flat: its rows have shape \(3,\)"),
    (
        lambda: Task(load=no_data, metric=Metric.mean("odd", F.mse_loss, higher_is_better=False)),
        LABELS,
        "metric odd fails on outputs",
    ),
]


@pytest.mark.parametrize(("make", "targets", "told"), UNFIT)
def test_what_does_not_fit_is_told_before_any_round(
    make: Callable[[], Task], targets: Tensor, told: str
) -> None:
    net = elastic(Pair(), (LEFT[:2], RIGHT[:2]), "even")
    with pytest.raises(AnycostError, match=told) as caught:
        check_fit(make(), net, Samples((LEFT, RIGHT), targets))
    assert isinstance(caught.value, TaskError | ConfigError)
