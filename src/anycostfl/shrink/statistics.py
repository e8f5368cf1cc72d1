"""BatchNorm's running statistics: never sent, never averaged, measured anew (docs/decisions/0003).

A sub-model's activations have other means and variances than the full model's, so statistics from
different widths cannot be averaged. Devices train on batch statistics; whoever needs a model for
inference runs a few batches through `recalibrate` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from anycostfl.coupling import evaluation
from anycostfl.errors import CalibrationError

RECALIBRATION_IMAGES = 1024


def recalibrate(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set every BatchNorm's running statistics to their average over these batches, in place."""
    norms = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if not norms:
        return
    first = next(remaining := iter(batches), None)
    if first is None:
        raise CalibrationError(
            "no batch was given to measure BatchNorm statistics on; give at least one "
            "(a generator that has been read through gives none)"
        )
    with evaluation(module), _plain_average(norms):  # dropout stays off
        for batch in chain([first], remaining):
            module(batch)


@contextmanager
def _plain_average(norms: Sequence[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Statistics begin anew and average all batches alike."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def calibration_batches(images: Tensor) -> Iterator[Tensor]:
    """The training images on which BatchNorm statistics are measured (docs/decisions/0003).

    They are drawn, always the same ones: in a file that is sorted by class the first images are all
    of one class. A last batch of one is left out: it has no variance.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = torch.split(order[:RECALIBRATION_IMAGES], 128)
    for batch in batches:
        if len(batch) > 1 or len(batches) == 1:
            yield images[batch.to(images.device)]
