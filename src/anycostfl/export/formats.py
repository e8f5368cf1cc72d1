"""File formats: ONNX, a torch program, safetensors; each is read back and compared with PyTorch."""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from anycostfl.data.samples import Tree, call
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.export.elastic_file import METADATA, save_elastic, save_tensors
from anycostfl.export.trained import TrainedModel, calibration_inputs, metadata_of
from anycostfl.files import refuse_special
from anycostfl.shrink import SubModel, recalibrate
from anycostfl.state import tensors_of

TOLERANCE = 1e-4  # of a logit of an exported file, from PyTorch's

Metadata = Mapping[str, Any]
Infer = Callable[[Tree], Tree]


class ExportError(AnycostError):
    """A file that could not be written, or whose outputs differ from the model's."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: how to write a module and how to run the file."""

    suffix: str
    write: Callable[[nn.Module, Tree, Path, Metadata], None]
    read: Callable[[nn.Module, Path], Infer]


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError("ONNX files need: pip install 'anycostfl[export]'") from error


def write_onnx(module: nn.Module, example: Tree, path: Path, metadata: Metadata) -> None:
    """ONNX by torch's exporter, with a free batch size and embedded weights."""
    _optional("onnxscript")  # torch needs it
    with _quiet(), torch.no_grad():
        is_single = isinstance(call(module, example), Tensor)
        args, kwargs = _arguments(example)
        program = torch.onnx.export(
            module,
            args,
            kwargs=kwargs or None,
            dynamo=True,
            dynamic_shapes=_dynamic(example, "batch"),
            input_names=list(named_arrays(example)),
            output_names=["logits"] if is_single else None,
            verbose=False,
        )
    if program is None:
        raise ExportError("torch's ONNX exporter returned nothing")
    program.model.metadata_props[METADATA] = json.dumps(metadata)
    program.save(path, external_data=False)


def open_onnx(path: Path) -> Any:
    """An onnxruntime session on one thread."""
    onnxruntime = _optional("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _read_onnx(_module: nn.Module, path: Path) -> Infer:
    session = open_onnx(path)
    return lambda x: list(map(torch.from_numpy, session.run(None, named_arrays(x))))


def _write_program(module: nn.Module, example: Tree, path: Path, metadata: Metadata) -> None:
    """A torch.export program (.pt2): runs without this package, also from C++."""
    with _quiet():
        batch = torch.export.Dim("batch")
        shapes = _dynamic(example, batch)
        program = torch.export.export(module, *_arguments(example), dynamic_shapes=shapes)
        program.example_inputs = None  # torch would pickle them into the file
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})


def _read_program(_module: nn.Module, path: Path) -> Infer:
    with _quiet():
        return partial(call, torch.export.load(path).module())


def _write_state(module: nn.Module, _example: Tree, path: Path, metadata: Metadata) -> None:
    save_tensors(tensors_of(module), path, metadata)


def _read_state(module: nn.Module, path: Path) -> Infer:
    state = load_file(path)

    def infer(example: Tree) -> Tree:
        args, kwargs = _arguments(example)
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    return infer


def _arguments(example: Tree) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Inputs as they are passed: by position, or a dict of them by name."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example,) if isinstance(example, Tensor) else tuple(example), {}


def _dynamic(example: Tree, batch: object) -> Any:
    """That the first dimension of every input is free."""
    args, kwargs = _arguments(example)
    return tree_map(lambda _: {0: batch}, kwargs or args)


def named_arrays(example: Tree) -> dict[str, Any]:
    """The inputs of an ONNX file by their names."""
    args, kwargs = _arguments(example)
    names = [f"input{i}" if len(args) > 1 else "input" for i in range(len(args))]
    return {name: x.numpy() for name, x in (*zip(names, args, strict=True), *kwargs.items())}


FORMATS = {
    "onnx": Format(".onnx", write_onnx, _read_onnx),
    "torch": Format(".pt2", _write_program, _read_program),
    "safetensors": Format(".safetensors", _write_state, _read_state),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch's exporters about their own internals."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def write(trained: TrainedModel, sub: SubModel, path: Path, format_name: str) -> float:
    """Write a sub-model, read it back and compare; returns the largest difference of a logit.

    The file appears under its name only after it has passed.
    """
    kind = FORMATS[format_name]
    with _staged(path, kind.suffix) as part:
        try:
            kind.write(sub.module, trained.example(2), part, metadata_of(trained, sub))
            difference = _difference(sub.module, kind.read(sub.module, part), trained.example)
        except (AnycostError, OSError, SafetensorError):
            raise
        except Exception as error:  # torch's exporters raise anything
            why = str(error.__cause__ or error).partition("\n")[0]
            raise ExportError(
                f"torch cannot export this model: {why}; "
                "--format safetensors and elastic do not need its exporters"
            ) from error
        if not difference <= TOLERANCE:
            raise ExportError(
                f"the {format_name} file differs from PyTorch by {difference:.2g} "
                f"(it must be at most {TOLERANCE:g}) and was deleted"
            )
    return difference


def write_elastic(trained: TrainedModel, path: Path) -> None:
    """Write all widths as one file; BatchNorm statistics are those of the full width."""
    recalibrate(trained.net.module, calibration_inputs(trained))
    with _staged(path, path.suffix) as part:
        save_elastic(trained.net, part, **metadata_of(trained))


@contextmanager
def _staged(path: Path, suffix: str) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it once it is complete."""
    try:
        refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            part = Path(folder, path.stem + suffix)
            yield part
            os.replace(part, path)
    except AnycostError:  # a missing extra is an ImportError, not a failing disk
        raise
    except (OSError, SafetensorError) as error:
        raise ExportError(f"cannot write {path}: {error}") from error


def _difference(module: nn.Module, infer: Infer, example: Callable[[int], Tree]) -> float:
    """The largest difference of a number, over a batch of one and a batch of seven."""
    worst = torch.zeros(1, dtype=torch.double)
    with torch.no_grad():
        for inputs in (example(1), example(7)):
            pairs = zip(_tensors(infer(inputs)), _tensors(call(module, inputs)), strict=True)
            worst = torch.stack([worst.max(), *((a - b).abs().max() for a, b in pairs)])
    return float(worst.max())  # NaN stays NaN


def _tensors(outputs: Tree) -> list[Tensor]:
    """The tensors of a model's outputs, which may hold more, such as None for no cache."""
    return [leaf.double() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
