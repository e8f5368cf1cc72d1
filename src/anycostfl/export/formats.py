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

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.export.elastic_file import METADATA, save_elastic, save_tensors
from anycostfl.export.trained import TrainedModel, calibration_images, metadata_of
from anycostfl.files import refuse_special
from anycostfl.shrink import SubModel, recalibrate
from anycostfl.state import tensors_of

TOLERANCE = 1e-4
"""Largest difference allowed between a logit of an exported file and PyTorch's."""

Metadata = Mapping[str, Any]
Infer = Callable[[Tensor], npt.NDArray[np.float32]]


class ExportError(AnycostError):
    """A file that could not be written, or whose outputs differ from the model's."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: how to write a module and how to run the file."""

    suffix: str
    write: Callable[[nn.Module, Tensor, Path, Metadata], None]
    read: Callable[[nn.Module, Path], Infer]


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError("ONNX files need: pip install 'anycostfl[export]'") from error


def write_onnx(module: nn.Module, example: Tensor, path: Path, metadata: Metadata) -> None:
    """ONNX by torch's exporter, with a free batch size and embedded weights."""
    _optional("onnxscript")  # torch needs it
    with _quiet():
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: "batch"},),
            input_names=["input"],
            output_names=["logits"],
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
    return lambda x: np.asarray(session.run(None, {"input": x.numpy()})[0])


def _write_program(module: nn.Module, example: Tensor, path: Path, metadata: Metadata) -> None:
    """A torch.export program (.pt2): runs without this package, also from C++."""
    with _quiet():
        batch = torch.export.Dim("batch")
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        program.example_inputs = None  # torch would pickle them into the file
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})


def _read_program(_module: nn.Module, path: Path) -> Infer:
    with _quiet():
        module = torch.export.load(path).module()
    return lambda x: np.asarray(module(x).detach().numpy())


def _write_state(module: nn.Module, _example: Tensor, path: Path, metadata: Metadata) -> None:
    save_tensors(tensors_of(module), path, metadata)


def _read_state(module: nn.Module, path: Path) -> Infer:
    call = partial(torch.func.functional_call, module, load_file(path), tie_weights=False)
    return lambda x: np.asarray(call(x).detach().numpy())


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
                f"(at most {TOLERANCE:g} is allowed) and was deleted"
            )
    return difference


def write_elastic(trained: TrainedModel, path: Path) -> None:
    """Write all widths as one file; BatchNorm statistics are those of the full width."""
    recalibrate(trained.net.module, calibration_images(trained.config))
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


def _difference(module: nn.Module, infer: Infer, example: Callable[[int], Tensor]) -> float:
    """The largest difference of a logit, over a batch of one and a batch of seven."""
    with torch.no_grad():
        worst = [np.abs(infer(x) - module(x).numpy()).max() for x in (example(1), example(7))]
    return float(np.max(worst))  # NaN stays NaN
