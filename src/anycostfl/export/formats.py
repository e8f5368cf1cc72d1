"""File formats: ONNX, int8, ExecuTorch, torch, safetensors; each is read back and compared.

A file that prepares its inputs takes them raw, and names them so (`raw_input`): prepared ones, or
bytes where it wants numbers, are refused by its runtime.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
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

from anycostfl.data.prepare import PreparedModule
from anycostfl.data.samples import Tree, call
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.export import executorch, int8
from anycostfl.export.elastic_file import METADATA, save_elastic, save_tensors
from anycostfl.export.trained import (
    Deployed,
    TrainedModel,
    calibration_inputs,
    deploy,
    metadata_of,
)
from anycostfl.files import refuse_special
from anycostfl.shrink import SubModel, recalibrate
from anycostfl.state import tensors_of

TOLERANCE = 1e-4  # of a number of an exported file, from PyTorch's
RAW = "raw_"  # how the names of inputs begin that the file prepares itself

Metadata = Mapping[str, Any]
Infer = Callable[[Tree], Tree]


class ExportError(AnycostError):
    """A file that could not be written, or whose outputs differ from the model's."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: how to write a module and how to run the file.

    examples: how many samples `write` is given, to trace or to calibrate with.
    tolerance: the largest difference of a number from PyTorch.
    prepares: whether the file can hold the preparation of raw inputs.
    """

    suffix: str
    write: Callable[[nn.Module, Tree, Path, Metadata], None]
    read: Callable[[nn.Module, Path], Infer]
    examples: int = 2
    tolerance: float = TOLERANCE
    prepares: bool = True


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
        prefix = RAW if isinstance(module, PreparedModule) else ""
        args, kwargs = _arguments(example)
        program = torch.onnx.export(
            module,
            args,
            kwargs=kwargs or None,
            dynamo=True,
            dynamic_shapes=_dynamic(module, example, "batch"),
            input_names=[prefix + name for name in named_arrays(example)],
            output_names=["logits"] if is_single else None,
            verbose=False,
        )
    if program is None:
        raise ExportError("torch's ONNX exporter returned nothing")
    for node in program.model.graph:  # stack traces with the paths of this machine
        node.metadata_props.clear()
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
    return lambda x: list(map(torch.from_numpy, session.run(None, feed_of(session, x))))


def _write_program(module: nn.Module, example: Tree, path: Path, metadata: Metadata) -> None:
    """A torch.export program (.pt2): runs without this package, also from C++."""
    with _quiet():
        batch = torch.export.Dim("batch")
        shapes = _dynamic(module, example, batch)
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


def _dynamic(module: nn.Module, example: Tree, batch: object) -> Any:
    """That the first dimension of every input is free."""
    args, kwargs = _arguments(example)
    shapes = tree_map(lambda _: {0: batch}, kwargs or args)
    if isinstance(module, PreparedModule):  # whose forward takes *inputs, **named
        return {"named": shapes} if kwargs else (shapes,)
    return shapes


def named_arrays(example: Tree) -> dict[str, Any]:
    """The inputs of an ONNX file by their names, without the prefix of raw ones."""
    args, kwargs = _arguments(example)
    names = [f"input{i}" if len(args) > 1 else "input" for i in range(len(args))]
    return {name: x.numpy() for name, x in (*zip(names, args, strict=True), *kwargs.items())}


def feed_of(session: Any, example: Tree) -> dict[str, Any]:
    """The inputs by the names that a session has for them."""
    arrays = named_arrays(example)
    known = {one.name: one.name.removeprefix(RAW) for one in session.get_inputs()}
    return {name: arrays[plain] for name, plain in known.items() if plain in arrays}


def _write_int8(module: nn.Module, example: Tree, path: Path, metadata: Metadata) -> None:
    """ONNX with weights and activations of 8 bits, calibrated on the example."""
    _optional("onnxruntime")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, "fp32.onnx")
        traced = tree_map(lambda leaf: leaf[:2], example)
        write_onnx(module, traced, whole, {**metadata, "precision": "int8"})
        names = {one.name for one in open_onnx(whole).get_inputs()}
        prefix = RAW if any(name.startswith(RAW) for name in names) else ""
        feeds = [
            {
                prefix + name: array[i : i + int8.BATCH]
                for name, array in named_arrays(example).items()
            }
            for i in range(0, len(tree_leaves(example)[0]), int8.BATCH)
        ]
        int8.quantize(whole, path, feeds)


def _write_pte(module: nn.Module, example: Tree, path: Path, _metadata: Metadata) -> None:
    one = tree_map(lambda leaf: leaf[:1], example)
    with _quiet():
        executorch.write_pte(module, *_arguments(one), path)


def _read_pte(_module: nn.Module, path: Path) -> Infer:
    """One sample at a time, which is what the file takes."""
    run = executorch.open_pte(path)

    def infer(example: Tree) -> Tree:
        leaves = tree_leaves(example)
        rows = [run([leaf[i : i + 1] for leaf in leaves]) for i in range(len(leaves[0]))]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    return infer


FORMATS = {
    "onnx": Format(".onnx", write_onnx, _read_onnx),
    "int8": Format(".onnx", _write_int8, _read_onnx, examples=int8.SAMPLES, tolerance=math.inf),
    "executorch": Format(".pte", _write_pte, _read_pte),
    "torch": Format(".pt2", _write_program, _read_program),
    "safetensors": Format(".safetensors", _write_state, _read_state, prepares=False),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch's exporters about their own internals."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def deployed_for(
    trained: TrainedModel, sub: SubModel, format_name: str, *, prepare: bool = True
) -> Deployed:
    """What a file of that format computes: with preparation if it is asked for and can be."""
    return deploy(trained, sub, prepare=prepare and FORMATS[format_name].prepares)


def write(
    trained: TrainedModel, sub: SubModel, path: Path, format_name: str, *, prepare: bool = True
) -> float:
    """Write a sub-model, read it back and compare; returns the largest difference of a number.

    The file appears under its name only after it has passed. Comparison is on real samples where
    the file takes them raw.
    """
    kind, deployed = FORMATS[format_name], deployed_for(trained, sub, format_name, prepare=prepare)
    about = metadata_of(trained, sub) | {"raw_input": isinstance(deployed.module, PreparedModule)}
    with _staged(path, kind.suffix) as part:
        try:
            kind.write(
                deployed.module, calibration_of(trained, deployed, kind.examples), part, about
            )
            difference = _difference(
                deployed.module, kind.read(deployed.module, part), deployed.inputs
            )
        except (AnycostError, OSError, SafetensorError):
            raise
        except Exception as error:  # torch's exporters raise anything
            why = str(error.__cause__ or error).partition("\n")[0]
            raise ExportError(
                f"torch cannot export this model: {why}; "
                "--format safetensors and elastic do not need its exporters"
            ) from error
        if not difference <= kind.tolerance or math.isinf(difference):
            raise ExportError(
                f"the {format_name} file differs from PyTorch by {difference:.2g} "
                f"(it must be at most {kind.tolerance:g}) and was deleted"
            )
    return difference


def calibration_of(trained: TrainedModel, deployed: Deployed, samples: int) -> Tree:
    """Inputs to trace with, or for more than that, training samples drawn at random."""
    if samples <= 2:
        return deployed.inputs(2)
    is_prepared = isinstance(deployed.module, PreparedModule)
    whole = (trained.raw() if is_prepared else trained.data()).train
    drawn = torch.Generator().manual_seed(0)
    return whole.take(torch.randperm(len(whole), generator=drawn)[:samples]).inputs


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
