"""β → (ρ, L): the fitted first guess, and the refinement that keeps and uses the budget."""

import numpy as np
import pytest
import torch
from torch import Tensor

from anycostfl.codec import byte_budget, compress, kernels, refine
from anycostfl.codec.fit import Fit, fit_update, shipped_fit
from anycostfl.codec.flat import flatten
from anycostfl.codec.frame import bond
from anycostfl.codec.refine import Draft, Guess

SHAPES = {"conv": (64, 32, 5, 5), "fc": (300, 1024), "bias": (300,)}
BLOCKS = {"fc": 16}


def rows_of_unequal_size(kind: str = "normal") -> dict[str, Tensor]:
    draw = np.random.default_rng(3)
    update = {}
    for name, shape in SHAPES.items():
        rows = np.exp(draw.normal(size=(shape[0],) + (1,) * (len(shape) - 1)))
        values = rows * draw.standard_normal(shape)
        if kind == "sparse":
            values *= draw.random(shape) < 0.5
        update[name] = torch.tensor(values, dtype=torch.float32)
    return update


def draft(update: dict[str, Tensor]) -> Draft:
    parts = kernels.lay_out(SHAPES, BLOCKS)
    return Draft.of(flatten(update), parts, 0, bond(b"", SHAPES))


def test_prediction_interpolates_in_the_logarithm_of_beta() -> None:
    fit = Fit((1 / 64, 1 / 4), (0.9, 0.1), (16.0, 256.0))
    for beta, sparsity, levels in ((1 / 16, 0.5, 64), (1.0, 0.1, 256), (1e-6, 0.9, 16)):
        guess = fit.predict(beta)
        assert guess.sparsity == pytest.approx(sparsity)
        assert guess.levels == levels


def test_fit_file_comes_back() -> None:
    fit = Fit((0.1, 0.2), (0.5, 0.25), (3.0, 9.0))
    assert Fit.from_json(fit.to_json()) == fit


@pytest.mark.parametrize(
    "knots",
    [((0.2, 0.1), (0.5, 0.5), (2.0, 2.0)), ((0.1,), (1.5,), (2.0,)), ((0.1,), (0.5,), (0.0,))],
)
def test_senseless_fits_are_refused(knots: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="fit"):
        Fit(*knots)


def test_the_shipped_fit_keeps_more_and_finer_as_beta_grows() -> None:
    fit = shipped_fit()
    assert (np.diff(fit.sparsity) <= 0).all()
    assert (np.diff(fit.levels) >= 0).all()


def test_fit_of_an_update_predicts_what_refinement_finds() -> None:
    update = rows_of_unequal_size()
    fit, ready = fit_update(update, BLOCKS), draft(update)
    for beta in (1 / 128, 1 / 32, 1 / 8):
        levels, kept = refine.choose(ready, byte_budget(beta, ready.flat.size), Guess(0.9, 2))
        guess = fit.predict(beta)
        assert 0.5 <= guess.levels / levels <= 2
        assert abs((1 - guess.sparsity) - kept / ready.spans.start.size) < 0.05


def error(update: dict[str, Tensor], payload: bytes) -> float:
    from anycostfl.codec import decompress

    decoded = decompress(payload, update).values
    return sum(float((decoded[n] - update[n]).double().square().sum()) for n in update)


@pytest.mark.parametrize("beta", [1 / 200, 1 / 40, 1 / 10])
def test_chosen_levels_are_as_good_as_an_exhaustive_search(beta: float) -> None:
    update = rows_of_unequal_size()
    ready = draft(update)
    budget = byte_budget(beta, ready.flat.size)
    best = min(
        error(update, payload)
        for exponent in range(1, 12)
        if (payload := refine._most_kernels(ready, 2**exponent, 500, budget)[1]) is not None
    )
    ours = compress(update, beta, seed=0, blocks=BLOCKS)
    assert error(update, ours) <= 1.03 * best


@pytest.mark.parametrize("guess", [Guess(0.0, 1), Guess(1.0, 40_000), Guess(0.5, 64)])
def test_a_wrong_guess_costs_time_not_bytes(guess: Guess) -> None:
    ready = draft(rows_of_unequal_size())
    budget = byte_budget(1 / 30, ready.flat.size)
    assert 0.97 * budget <= len(refine.fill(ready, budget, guess)) <= budget


@pytest.mark.parametrize("kind", ["normal", "sparse"])
@pytest.mark.parametrize("inverse", [4, 5, 7, 11, 15, 24, 40, 65, 100, 160, 250, 400, 630, 1000])
def test_budget_is_kept_and_wasted_by_three_per_cent_at_most(kind: str, inverse: int) -> None:
    update = rows_of_unequal_size(kind)
    budget = byte_budget(1 / inverse, sum(t.numel() for t in update.values()))
    assert budget >= 1024  # below that, docs/wire-format.md promises nothing
    payload = compress(update, 1 / inverse, seed=0, blocks=BLOCKS)
    assert 0.97 * budget <= len(payload) <= budget
