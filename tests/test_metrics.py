"""Metrics are what they say, whatever the chunks, and add up over owners."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anycostfl.errors import TaskError, UnknownNameError
from anycostfl.metrics import METRICS, Metric, MetricInfo, find_metric, score


def value_of(name: str, outputs: Any, targets: Tensor) -> float:
    metric = METRICS[name]
    return metric.value(metric.rows(outputs, targets).double().sum(0))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


CLASSES = torch.arange(40) % 5


def test_accuracy_by_hand() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 1.0]])
    assert value_of("accuracy", scores, torch.tensor([1, 1, 1])) == pytest.approx(2 / 3)
    assert value_of("accuracy", {"loss": scores[0], "logits": scores}, torch.ones(3).long()) > 0.6
    assert value_of("accuracy", (scores, None), torch.ones(3).long()) > 0.6
    assert value_of("accuracy", torch.tensor([[2.0], [-1.0]]), torch.tensor([1.0, 1.0])) == 0.5


def test_classes_may_be_the_second_or_the_last_dimension() -> None:
    scores, targets = draw(4, 7, 9), torch.randint(7, (4, 9))
    first = value_of("perplexity", scores, targets)
    assert first == pytest.approx(value_of("perplexity", scores.movedim(1, -1), targets))
    assert first == pytest.approx(math.exp(float(F.cross_entropy(scores, targets))), rel=1e-6)


def test_errors_by_hand() -> None:
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.tensor([2.0, 2.0])
    assert value_of("mae", outputs, targets) == 2.0
    assert value_of("rmse", outputs, targets) == pytest.approx(math.sqrt(5))


def test_overlap_by_hand() -> None:
    """Class 0: 1 shared of 3; class 1: 2 of 4; class 2 occurs nowhere."""
    predicted, targets = torch.tensor([[0, 1, 1, 1, 0]]), torch.tensor([[0, 1, 1, 0, 1]])
    scores = F.one_hot(predicted, 3).movedim(-1, 1).float()
    assert value_of("iou", scores, targets) == pytest.approx((1 / 3 + 2 / 4) / 2)


@pytest.mark.parametrize("name", METRICS)
@given(cuts=st.lists(st.integers(1, 39), max_size=4))
def test_sums_do_not_depend_on_the_chunks(name: str, cuts: list[int]) -> None:
    metric = METRICS[name]
    outputs = draw(40, 5) if name in ("accuracy", "perplexity", "iou") else draw(40)
    targets = CLASSES if outputs.dim() == 2 else draw(40) + 1
    if name == "iou":
        outputs, targets = outputs[:, :, None], targets[:, None]
    rows = metric.rows(outputs, targets).double()
    ends = [0, *sorted(cuts), 40]
    parts = [
        metric.rows(outputs[a:b], targets[a:b]).double().sum(0)
        for a, b in itertools.pairwise(ends)
        if a < b
    ]
    assert metric.value(torch.stack(parts).sum(0)) == pytest.approx(metric.value(rows.sum(0)))


def test_known_and_new_owners_are_told_apart() -> None:
    metrics = (METRICS["accuracy"], METRICS["perplexity"])
    scores = 10 * F.one_hot(CLASSES, 5).float()
    targets = torch.where(torch.arange(40) < 30, CLASSES, (CLASSES + 1) % 5)
    sums = []
    for metric in metrics:
        rows = metric.rows(scores, targets).double()
        zeros = torch.zeros(4, rows.shape[1]).double()
        sums.append(zeros.index_add_(0, torch.arange(40) // 10, rows))
    found = score(metrics, [sums], torch.tensor([0, 0, 1, 2]))
    assert found is not None
    assert found.value == 0.75
    assert found.others["accuracy, known owners"] == 1.0
    assert found.others["accuracy, new owners"] == 0.0
    assert found.others["perplexity"] > 1
    only = score(metrics, [sums], torch.arange(4))
    assert only is not None
    assert list(only.others) == ["perplexity"]
    assert score(metrics, []) is None


def test_a_function_of_a_batch_becomes_a_mean_over_samples() -> None:
    metric = Metric.mean("loss", F.cross_entropy, higher_is_better=False)
    scores = draw(40, 5)
    rows = [metric.rows(scores[a:b], CLASSES[a:b]) for a, b in ((0, 10), (10, 40))]
    value = metric.value(torch.cat(rows).sum(0))
    assert value == pytest.approx(float(F.cross_entropy(scores, CLASSES)))
    broken = Metric.mean("odd", lambda *_: "x", higher_is_better=True)
    with pytest.raises(TaskError, match="metric odd: the function returned 'x', must be"):
        broken.rows(scores, CLASSES)


def test_directions_and_units() -> None:
    accuracy, perplexity = MetricInfo(), METRICS["perplexity"].info
    assert accuracy.show(0.8365) == "83.65 %"
    assert METRICS["mae"].info.show(12.3456) == "12.35"
    assert accuracy.show(None) == accuracy.show(math.nan) == "–"
    assert accuracy.reaches(0.8, 0.8)
    assert not accuracy.reaches(0.79, 0.8)
    assert perplexity.reaches(4.0, 4.5)
    assert not perplexity.reaches(None, 4.5)
    assert not perplexity.reaches(math.nan, 4.5)
    assert (accuracy.best([0.1, 0.3]), perplexity.best([2.0, 9.0])) == (0.3, 2.0)
    assert accuracy.best([]) is None


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(TaskError, match=r"returned \(4, 3\) for targets \(5,\)"):
        METRICS["accuracy"].rows(draw(4, 3), torch.arange(5))
    with pytest.raises(TaskError, match="one number for each target"):
        METRICS["mae"].rows(draw(4, 3), draw(4))
    with pytest.raises(UnknownNameError, match="no metric 'f2'; there are accuracy"):
        find_metric("f2")
    with pytest.raises(TaskError, match=r"Metric\.mean"):
        find_metric(F.cross_entropy)  # type: ignore[arg-type]
