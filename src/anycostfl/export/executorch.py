"""ExecuTorch files (.pte): the model for phones and boards without Python, by XNNPACK.

A file takes one sample at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anycostfl.errors import MissingExtraError

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            "ExecuTorch files need: pip install 'anycostfl[executorch]'"
        ) from error


def write_pte(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path: Path,
) -> None:
    """Lower a module for one sample to XNNPACK."""
    exir = _optional("executorch.exir")
    xnnpack = _optional("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    program = torch.export.export(module, args, kwargs=dict(kwargs) or None)
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
    path.write_bytes(lowered.to_executorch().buffer)


def open_pte(path: Path) -> Run:
    """The program of a file; inputs in the order of the module's."""
    runtime = _optional("executorch.runtime").Runtime.get()
    method = runtime.load_program(path).load_method("forward")

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [output.clone() for output in method.execute(list(inputs))]

    return run
