"""3×3 convolutions with a quarter of the multiplications, for one thread of a CPU.

Winograd's minimal filtering F(4×4, 3×3) as Lavin and Gray give it in "Fast algorithms for
convolutional neural networks" (CVPR 2016): tiles of the image and kernels are transformed, the sum
over shifts becomes a product of matrices at every place of a tile, products are transformed back.

    V = Bᵀ d B,   U = G w Gᵀ,   M = V U (over channels),   y = Aᵀ M A

All of it is linear in image and kernel, so gradients are the same steps transposed. Nothing but
image and kernel is kept for them. The result is within 4e-6 of the exact one.

Channels come last in memory, so that a transform takes many of them at a time, and tiles go through
in portions that stay in the cache. Transforms use one thread. With more of them torch's own
convolution is the faster one, as it is for narrow layers; both are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from anycostfl.compiled import compiled

SIDE = 4  # outputs of a tile along each side; it covers two inputs more
LANES = 32  # channels that are transformed at a time
PORTION = 128  # tiles of one product
NARROW = 32  # fewer channels than this are left to torch

Floats = NDArray[np.float32]
Sizes = tuple[int, ...]  # a size as the length of a tuple: compiled code knows it by the type
Transform = tuple[Floats, Sizes, Sizes]


def _transform(rows: Sequence[Sequence[float]]) -> Transform:
    """A matrix with its width and height."""
    return np.array(rows, dtype=np.float32), (0,) * len(rows[0]), (0,) * len(rows)


def _transposed(transform: Transform) -> Transform:
    matrix, width, height = transform
    return np.ascontiguousarray(matrix.T), height, width


TO_TILES = _transform(  # Bᵀ
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
FROM_PRODUCTS = _transform(  # Aᵀ
    [
        [1, 1, 1, 1, 1, 0],
        [0, 1, -1, 2, -2, 0],
        [0, 1, 1, 4, 4, 0],
        [0, 1, -1, 8, -8, 1],
    ]
)
FROM_TILES, TO_PRODUCTS = _transposed(TO_TILES), _transposed(FROM_PRODUCTS)
_G = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
KERNELS = torch.from_numpy(np.kron(_G, _G)).float()


# --- any module -----------------------------------------------------------------------------------


def fast_convolutions() -> AbstractContextManager[object]:
    """Within it, convolutions of any module go this way where that is faster."""
    return _Faster() if torch.get_num_threads() == 1 else nullcontext()


class _Faster(TorchFunctionMode):
    """Takes over calls of torch.conv2d."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called in place of every function of torch."""
        del types
        if func is torch.conv2d and len(args) == len(Call._fields) and Call(*args).suits():
            call = Call(*args)
            return convolve(call.image, call.weight, call.bias, call.padding[0])
        return func(*args, **(kwargs or {}))


class Call(NamedTuple):
    """A convolution as nn.Conv2d asks for it."""

    image: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: Any
    dilation: tuple[int, int]
    groups: int

    def suits(self) -> bool:
        """Whether it can be computed this way, and is faster so."""
        return (
            self.weight.shape[2:] == (3, 3)
            and min(self.weight.shape[:2]) >= NARROW
            and self.image.dim() == 4
            and min(self.image.shape[2:]) > SIDE  # else most of a tile would be thrown away
            and self.stride == self.dilation == (1, 1)
            and self.groups == 1
            and self.padding in ((0, 0), (1, 1))
            and self.image.device.type == "cpu"
            and self.image.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )


def convolve(image: Tensor, weight: Tensor, bias: Tensor | None = None, padding: int = 0) -> Tensor:
    """As torch.conv2d with 3×3 kernels and stride 1; channels come last in the output's memory."""
    output: Tensor = _Convolution.apply(image, weight, bias, padding)  # type: ignore[no-untyped-call]
    return output


class _Convolution(torch.autograd.Function):
    """A convolution and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, padding: int
    ) -> Tensor:
        """Portion by portion: tiles, products, outputs."""
        ctx.save_for_backward(image, weight)  # as torch does, so that either can recompute for it
        ctx.padding = padding
        image, kernels = _channels_last(image), _to_kernels(weight)
        samples, height, width, _ = image.shape
        shape = samples, len(weight), height + 2 * padding - 2, width + 2 * padding - 2
        # What is returned is no view, so that later operations may write to it in place.
        output = torch.empty(shape, dtype=image.dtype, memory_format=torch.channels_last)
        last = output.permute(0, 2, 3, 1)
        last.copy_(image.new_zeros(()) if bias is None else bias)
        for portion in _portions(last.shape):
            tiles = portion.gather(image, TO_TILES, padding)
            portion.scatter(torch.bmm(tiles, kernels), FROM_PRODUCTS, last)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of image, weight and bias that are asked for."""
        image, weight = ctx.saved_tensors
        wants_image, wants_weight, wants_bias, _ = ctx.needs_input_grad
        image, gradient = _channels_last(image), _channels_last(gradient)
        kernels = _to_kernels(weight)
        of_image, of_kernels = torch.zeros_like(image), torch.zeros_like(kernels)
        for portion in _portions(gradient.shape):
            products = portion.gather(gradient, TO_PRODUCTS)
            if wants_image:
                tiles = torch.bmm(products, kernels.mT)
                portion.scatter(tiles, FROM_TILES, of_image, ctx.padding)
            if wants_weight:
                tiles = portion.gather(image, TO_TILES, ctx.padding)
                of_kernels.baddbmm_(tiles.mT, products)
        return (
            of_image.permute(0, 3, 1, 2) if wants_image else None,
            _from_kernels(of_kernels) if wants_weight else None,
            gradient.sum((0, 1, 2)) if wants_bias else None,
            None,
        )


def _channels_last(image: Tensor) -> Tensor:
    """The image as (sample, height, width, channel), contiguous."""
    return image.detach().permute(0, 2, 3, 1).contiguous()


def _to_kernels(weight: Tensor) -> Tensor:
    """U = G w Gᵀ as (place, input, output)."""
    outputs, inputs, _, _ = weight.shape
    flat = weight.detach().permute(2, 3, 1, 0).reshape(9, -1)
    return (KERNELS @ flat).view(-1, inputs, outputs)


def _from_kernels(kernels: Tensor) -> Tensor:
    """The same transposed: the gradient of w from that of U."""
    _, inputs, outputs = kernels.shape
    flat = KERNELS.T @ kernels.view(len(kernels), -1)
    return flat.view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


# --- tiles ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Portion:
    """Some of a layer's tiles, and how they cover an image, in rows and columns."""

    first: int
    count: int
    rows: int
    columns: int

    def gather(self, image: Tensor, by: Transform, margin: int = 0) -> Tensor:
        """Tiles, transformed, as (place, tile, channel); they begin `margin` before the image."""
        tiles = image.new_empty(len(by[2]) ** 2, self.count, image.shape[3])
        grid = self.rows, self.columns, margin
        _gather(image.numpy(), by, grid, self.first, tiles.numpy())
        return tiles

    def scatter(self, tiles: Tensor, by: Transform, image: Tensor, margin: int = 0) -> None:
        """Add tiles, transformed, to an image."""
        grid = self.rows, self.columns, margin
        _scatter(tiles.numpy(), by, grid, self.first, image.numpy())


def _portions(outputs: Sequence[int]) -> Iterator[Portion]:
    """All tiles that cover outputs of this shape."""
    samples, height, width, _ = outputs
    rows, columns = -(-height // SIDE), -(-width // SIDE)
    total = samples * rows * columns
    for first in range(0, total, PORTION):
        yield Portion(first, min(PORTION, total - first), rows, columns)


@compiled
def _gather(image: Floats, by: Transform, grid: Sizes, first: int, tiles: Floats) -> None:
    """Cut tiles out of an image, with zeros around it, and transform them."""
    _, height, width, channels = image.shape
    across, down = by[1], by[2]
    rows, columns, margin = grid
    tile = np.zeros(len(across) * len(across) * LANES, np.float32)
    half = np.empty(len(down) * len(across) * LANES, np.float32)
    done = np.empty(len(down) * len(down) * LANES, np.float32)
    for index in range(tiles.shape[1]):
        number = first + index
        sample = number // (rows * columns)
        top = number // columns % rows * SIDE - margin
        left = number % columns * SIDE - margin
        for begin in range(0, channels, LANES):
            count = min(LANES, channels - begin)
            for i in range(len(across)):
                for j in range(len(across)):
                    at, y, x = (i * len(across) + j) * LANES, top + i, left + j
                    if 0 <= y < height and 0 <= x < width:
                        for lane in range(count):
                            tile[at + lane] = image[sample, y, x, begin + lane]
                    else:
                        for lane in range(LANES):
                            tile[at + lane] = 0.0
            _both_ways(by, tile, half, done)
            for place in range(len(down) * len(down)):
                for lane in range(count):
                    tiles[place, index, begin + lane] = done[place * LANES + lane]


@compiled
def _scatter(tiles: Floats, by: Transform, grid: Sizes, first: int, image: Floats) -> None:
    """Transform tiles and add them to an image; what lies outside of it is dropped."""
    _, height, width, channels = image.shape
    across, down = by[1], by[2]
    rows, columns, margin = grid
    tile = np.zeros(len(across) * len(across) * LANES, np.float32)
    half = np.empty(len(down) * len(across) * LANES, np.float32)
    done = np.empty(len(down) * len(down) * LANES, np.float32)
    for index in range(tiles.shape[1]):
        number = first + index
        sample = number // (rows * columns)
        top = number // columns % rows * SIDE - margin
        left = number % columns * SIDE - margin
        for begin in range(0, channels, LANES):
            count = min(LANES, channels - begin)
            for place in range(len(across) * len(across)):
                for lane in range(count):
                    tile[place * LANES + lane] = tiles[place, index, begin + lane]
            _both_ways(by, tile, half, done)
            for i in range(len(down)):
                for j in range(len(down)):
                    at, y, x = (i * len(down) + j) * LANES, top + i, left + j
                    if 0 <= y < height and 0 <= x < width:
                        for lane in range(count):
                            image[sample, y, x, begin + lane] += done[at + lane]


@compiled
def _both_ways(by: Transform, tile: Floats, half: Floats, done: Floats) -> None:
    """L tile Lᵀ with LANES channels at every place."""
    matrix, across, down = by
    row = len(across) * LANES
    for i in range(len(down)):
        for q in range(row):
            total = np.float32(0.0)
            for k in range(len(across)):
                total += matrix[i, k] * tile[k * row + q]
            half[i * row + q] = total
    for i in range(len(down)):
        for j in range(len(down)):
            for lane in range(LANES):
                total = np.float32(0.0)
                for k in range(len(across)):
                    total += matrix[j, k] * half[i * row + k * LANES + lane]
                done[(i * len(down) + j) * LANES + lane] = total
