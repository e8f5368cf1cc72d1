"""Rules for a server that takes updates from machines it does not own (docs/security.md).

Sizes are clipped to their round's median, updates that point away from the others are excluded,
elements that too few devices sent stay as they are, and trimmed means or medians can replace the
paper's weighted mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from anycostfl.checks import Count, Interval, OneOf, check_fields
from anycostfl.server.aggregate import Contribution, Move
from anycostfl.shrink.widths import add, take
from anycostfl.state import State


@dataclass(frozen=True, slots=True)
class Robustness:
    """Which updates are believed, and how far; the first two hold against single devices.

    clip: no update counts as larger than this many times its round's median; 0 is off.
    agree: a device is excluded while its updates so far agreed with the others less than this share
        of what the median update does; 0 is off.
    least: an element that fewer devices sent stays as it is.
    combine: `mean` is the paper's; `trimmed` and `median` ignore weights and hold all updates of a
        round in memory.
    trim: the share that `trimmed` drops at either end.
    history: over how many rounds sizes are remembered, for their median to bound that of a round
        both ways; 0 is off.
    max_weight: no device weighs more than this many times its cohort's median; 0 is off.
    rollback: go back to the best model so far where the model is not finite or has lost half of
        what it had gained.

    The last three unset: off in simulation, on for real devices (`served`).
    """

    clip: Annotated[float, Interval(0.0)] = 5.0
    agree: Annotated[float, Interval(0.0, 1.0)] = 0.0
    least: Count = 1
    combine: Annotated[str, OneOf(("mean", "trimmed", "median"))] = "mean"
    trim: Annotated[float, Interval(0.0, 0.5)] = 0.2
    history: Annotated[int | None, Interval(0.0, 1000.0)] = None
    max_weight: Annotated[float | None, Interval(0.0)] = None
    rollback: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)


OPEN = Robustness(clip=0.0)
"""The paper's rules: every update is believed."""
DEFENCE = Robustness(clip=2.0, agree=0.2)
"""For fleets with attackers (docs/security.md)."""


def served(rules: Robustness) -> Robustness:
    """The rules for real devices: what is left open is on."""
    return replace(
        rules,
        history=20 if rules.history is None else rules.history,
        max_weight=4.0 if rules.max_weight is None else rules.max_weight,
        rollback=True if rules.rollback is None else rules.rollback,
    )


def ranked_means(
    like: State, contributions: Sequence[Contribution], rules: Robustness
) -> dict[str, Move]:
    """The mean of the middle ranks among the devices that sent an element."""
    names = dict.fromkeys(n for c in contributions for n in c.update.values)
    moves = {}
    for name in names:
        shape = (len(contributions), *like[name].shape)
        values, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
        for i, c in enumerate(contributions):
            if name in c.update.values:
                add(values[i], c.plan.index[name], c.update.values[name], 1.0)
                add(sent[i], c.plan.index[name], c.update.masks[name], 1.0)
        moves[name] = _middle(values, sent > 0, rules)
    return moves


def _middle(values: Tensor, sent: Tensor, rules: Robustness) -> Move:
    count = sent.sum(0)
    trim = 0.5 if rules.combine == "median" else rules.trim
    out = torch.minimum((trim * count).long(), (count - 1) // 2)  # at least one is left
    ordered = torch.where(sent, values, torch.inf).sort(0).values
    rank = torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1))
    inside = (rank >= out) & (rank < count - out)
    mean = torch.where(inside, ordered, 0.0).sum(0) / (count - 2 * out)
    enough = count >= rules.least
    return Move(torch.where(enough, mean, 0.0), enough)


def agreements(like: State, contributions: Callable[[], Iterable[Contribution]]) -> list[float]:
    """The cosine of each update with the sum of all others, over the elements it sent."""
    total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in like.items()}
    for c in contributions():
        for name, values in c.update.values.items():
            add(total[name], c.plan.index[name], values, c.weight)
    found = []
    for c in contributions():
        product = own = others = 0.0
        for name, values in c.update.values.items():
            rest = take(total[name], c.plan.index[name]) - c.weight * values.double()
            rest = rest * c.update.masks[name]
            product += float((rest * values).sum())
            own += float(values.double().square().sum())
            others += float(rest.square().sum())
        found.append(product / math.sqrt(own * others) if own and others else 0.0)
    return found
