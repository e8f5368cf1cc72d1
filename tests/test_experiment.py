"""From a configuration to an experiment: what does not fit together is refused with advice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anycostfl.config import Config, load_preset
from anycostfl.errors import ConfigError
from anycostfl.experiment import Experiment, build_experiment, load_data
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
    with pytest.raises(ConfigError, match=r"images of \(3, 64, 64\) mobilenet takes") as caught:
        build(load_preset("cifar10-iid", changes))
    advice = str(caught.value).split("--set ")[1]
    given = float(advice.split("=")[1])
    built = build(load_preset("cifar10-iid", [*changes, advice]))
    assert built.config.workload.flops_per_sample == given
    assert built.net.training_flops == pytest.approx(given, rel=1e-5)


def test_images_that_the_model_does_not_take_are_named_beside_those_it_does(tmp_path: Path) -> None:
    told = r"has images of \(1, 28, 28\), but model vgg9 takes \(3, 32, 32\)"
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
    assert (alone.test, alone.scale, alone.calibration) == (None, None, ())
    assert alone.accuracy(alone.initial_weights) is None
    assert 0 <= (with_data.accuracy(with_data.initial_weights) or 0) <= 1
    assert alone.fingerprint == with_data.fingerprint
