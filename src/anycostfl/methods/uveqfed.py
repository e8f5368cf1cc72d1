"""UVeQFed (Shlezinger et al., 2021) on the largest elements: a dithered lattice, a shared seed.

    v = the k largest elements of u in pairs x,   ℓ = Q_Λ(x/ζ + z),   x̃ = ζ·(ℓ − z)

Λ is the hexagonal lattice, Q_Λ the nearest point, z a dither uniform over its cell that server and
device draw from the same seed, ζ = STEP root-mean-squares of v. Subtracting the dither makes the
error uniform over the cell and independent of x. A lattice point is one symbol for the entropy
coder, as in the authors' program. Full width at a fixed rate; the clock meets the latency budget;
weights by sample count.

The seed is that of the upload, which the server issued.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from anycostfl.codec import Shapes, Upload, dense_update
from anycostfl.codec.arrays import Doubles, Floats, Integers, Ints
from anycostfl.codec.frame import payload_binding
from anycostfl.codec.sparse import (
    LARGEST,
    Layout,
    Ranked,
    Sparse,
    unpack_sparse,
    unzigzag,
    zigzag,
)
from anycostfl.methods import Method, elements
from anycostfl.methods._common import (
    encode_largest,
    full_width_at,
    partial_work_at,
    weigh_by_samples,
)
from anycostfl.state import State, Update

RATE = 1 / 34  # of S, recovered from the paper's table
CHUNK = 1 << 16  # pairs decoded at a time
STEP = 0.5  # in root-mean-squares of what is kept; about the least error at this rate
FURTHEST = 1024  # steps from the origin to the largest element, at most
BASIS = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])  # rows; cells of width 1


def nearest(points: Doubles) -> Ints:
    """The coordinates, in the basis, of the lattice point nearest to each point."""
    # The lattice is two rectangular ones, shifted by (1/2, √3/2): take the nearer of the two.
    width, height = 1.0, 2 * BASIS[1, 1]
    first = np.rint(points / (width, height))
    shifted = np.rint((points - BASIS[1]) / (width, height))
    to_first = points - first * (width, height)
    to_shifted = points - BASIS[1] - shifted * (width, height)
    nearer = (to_first**2).sum(1) <= (to_shifted**2).sum(1)
    # (a, 2b·√3/2) = (a − b)·e₁ + 2b·e₂, and the shift is one e₂ more.
    best = np.where(nearer[:, None], first, shifted)
    up = 2 * best[:, 1] + ~nearer
    across = best[:, 0] - best[:, 1]
    return np.stack([across, up], 1).astype(np.int64)


def dither(random: np.random.Generator, pairs: int) -> Doubles:
    """The next points that both sides draw: uniform over the cell around the origin."""
    spread = random.random((pairs, 2)) @ BASIS
    inside: Doubles = spread - nearest(spread) @ BASIS
    return inside


def number(points: Ints) -> Integers:
    """One integer for each lattice point, near 0 for those near the origin."""
    across, up = (zigzag(points[:, axis]) for axis in (0, 1))
    # Along the edge of ever larger squares: up to (m, m) there are (m + 1)² points.
    return unzigzag(np.where(across < up, up * up + across, across * across + across + up))


def point(numbers: Integers) -> Integers:
    """The coordinates of the lattice point that each integer stands for."""
    symbols = zigzag(numbers)
    edge = np.sqrt(symbols.astype(np.float64)).astype(np.uint32)
    rest = symbols - edge * edge
    across, up = np.where(rest < edge, (rest, edge), (edge, rest - edge))
    return unzigzag(np.stack([across, up], 1).ravel()).reshape(-1, 2)


def encode(update: State, upload: Upload) -> bytes:
    """Top-k, then the dithered lattice."""
    return encode_largest(update, upload, partial(quantize, seed=upload.seed), per_byte=1.0)


def quantize(flat: Floats, ranked: Ranked, count: int, seed: int) -> Sparse:
    """The `count` largest elements as lattice coordinates; the scalar is ζ."""
    kept = ranked.largest(count)
    chosen = flat[kept].astype(np.float64)
    usual = STEP * np.sqrt(np.mean(chosen**2)) if chosen.size else 0.0
    scale = np.float32(max(usual, np.abs(chosen).max(initial=0.0) / FURTHEST))
    if not scale > 0:
        return Sparse.nothing(flat.size)
    pairs = np.resize(np.append(chosen, 0.0), (-(-chosen.size // 2), 2))
    points = nearest(pairs / np.float64(scale) + dither(np.random.default_rng(seed), len(pairs)))
    return Sparse(kept, (float(scale),), number(points))


def dequantize(sparse: Sparse, seed: int) -> Floats:
    """The lattice points without the dither, in their places."""
    numbers, random = sparse.integers.astype(np.int32, copy=False), np.random.default_rng(seed)
    values = np.empty(2 * numbers.size, np.float32)
    for begin in range(0, numbers.size, CHUNK):  # a lattice point takes ten times its element
        chunk = point(numbers[begin : begin + CHUNK])
        points = sparse.scalars[0] * (chunk @ BASIS - dither(random, len(chunk)))
        values[2 * begin : 2 * (begin + len(chunk))] = np.clip(points.ravel(), -LARGEST, LARGEST)
    flat = np.zeros(sparse.kept.size, np.float32)
    flat[sparse.kept] = values[: np.count_nonzero(sparse.kept)]
    return flat


def decode(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The quantized update; elements that were not sent count as zero."""
    layout = Layout(elements(shapes), scalars=1, group=2)
    sparse = unpack_sparse(payload, payload_binding(upload.binding, shapes), layout)
    return dense_update(dequantize(sparse, upload.seed), shapes)


METHOD = Method(
    summary="UVeQFed: top-k elements on a dithered hexagonal lattice, full models",
    plan=full_width_at(RATE),
    encode=encode,
    decode=decode,
    weigh=weigh_by_samples,
    sorts_channels=False,
    by_samples=True,
)
METHOD = replace(METHOD, strict=replace(METHOD, plan=partial_work_at(RATE)))
