"""Files for devices: any width of a trained model, checked, measured, fitted to a limit.

The paper ends with sub-models that work at every width (Sec. V). A width is cut from the newest
checkpoint of a run, its BatchNorm statistics are measured on training data, it is written as ONNX,
as a torch program or as safetensors, read back, and compared with PyTorch at two batch sizes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from anycostfl import data, methods, models
from anycostfl.config import Config, parse_config
from anycostfl.elastic_file import METADATA, save_elastic, save_tensors
from anycostfl.errors import (
    AlphaError,
    AnycostError,
    ConfigError,
    InfeasibleBudgetError,
    MissingExtraError,
)
from anycostfl.files import StorageError, refuse_special, write_whole
from anycostfl.records import WIDTHS, SavedRun, read_run
from anycostfl.shrink import ElasticModel, SubModel, calibration_batches, recalibrate
from anycostfl.state import tensors_of
from anycostfl.train import count_correct

TOLERANCE = 1e-4
"""The most by which a logit of an exported file may differ from PyTorch's."""

TABLE_ALPHAS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


class ExportError(AnycostError):
    """A file that could not be written, or does not compute what the model computes."""


# --- the model of a run ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The model of a run after so many rounds, in the order in which channels are cut."""

    config: Config
    rounds: int
    net: ElasticModel
    order: str
    remarks: tuple[str, ...]

    def example(self, batch: int) -> Tensor:
        """Something the model eats."""
        return models.load(self.config.model.name).example(batch)


def open_trained(folder: Path) -> Trained:
    """The newest whole checkpoint of a run directory, important channels first."""
    saved = read_run(folder)
    if saved.checkpoint is None:
        why = "".join(f"; {remark}" for remark in saved.remarks)
        raise StorageError(
            f"{folder} has no checkpoint to export{why}; train on with: "
            f"anycostfl run --resume {folder}"
        )
    config = parse_config(saved.config, str(folder))
    spec = models.load(config.model.name)
    # Prefixes of any width work, so inference need not take the half steps of training.
    rule = "even" if config.model.widths == "fast" else config.model.widths
    net = ElasticModel(spec.build(), spec.example(2), rule=rule)
    net.load(saved.checkpoint.state)
    sorts = _sorts(config, saved)
    if sorts:
        net.sort_channels()
    order = "importance" if sorts else "as trained"
    return Trained(config, saved.checkpoint.rounds, net, order, saved.remarks)


def _sorts(config: Config, saved: SavedRun) -> bool:
    """Whether to sort: not where sub-models were trained in the order as it is."""
    cut = any(0 < d.alpha < 1 for record in saved.records for d in record.devices)
    return methods.load(config.run.method).sorts_channels or not cut


def cut(trained: Trained, alpha: float) -> SubModel:
    """A sub-model ready for inference: BatchNorm statistics are those of its own width."""
    least = least_alpha(trained.net)
    if 0 < alpha < least:
        raise AlphaError(
            f"no group of {trained.config.model.name} goes as narrow as alpha = {alpha:g}; "
            f"allowed at least {least:.4g}"
        )
    sub = trained.net.shrink(alpha)
    recalibrate(sub.module, _calibration(trained.config))
    sub.module.eval()
    return sub


def least_alpha(net: ElasticModel) -> float:
    """The FLOPs ratio of the narrowest sub-model there is."""
    return net.plan(1e-12).flops_ratio if net.tied_widths else 1.0


def _calibration(config: Config) -> Iterator[Tensor]:
    """Batches of training images; they are read only when somebody asks for the first one."""
    yield from calibration_batches(_dataset(config.data.name, config.data.path).train_images)


@lru_cache(maxsize=1)
def _dataset(name: str, path: str) -> data.Dataset:
    return data.load(name, path)


def describe(trained: Trained, sub: SubModel | None = None) -> dict[str, Any]:
    """What a file says about itself; `mean` and `std` say how its input was normalised."""
    config = trained.config
    about: dict[str, Any] = {
        "model": config.model.name,
        "widths": trained.net.rule,
        "order": trained.order,
        "rounds": trained.rounds,
        "method": config.run.method,
        "data": Path(config.data.name).name,
    }
    if sub is not None:
        about |= {"alpha": sub.plan.alpha, "flops_ratio": sub.plan.flops_ratio}
    with suppress(data.DataMissingError):
        dataset = _dataset(config.data.name, config.data.path)
        about |= {"mean": dataset.mean, "std": dataset.std}
    return about


# --- formats --------------------------------------------------------------------------------------

Infer = Callable[[Tensor], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file: how a module is written to it, and how it is run from it."""

    suffix: str
    write: Callable[[nn.Module, Tensor, Path, Mapping[str, Any]], None]
    read: Callable[[nn.Module, Path], Infer]


def write_onnx(module: nn.Module, example: Tensor, path: Path, about: Mapping[str, Any]) -> None:
    """ONNX with a free batch size, weights inside; made by torch's exporter."""
    try:
        import onnxscript  # noqa: F401, PLC0415 - torch needs it
    except ImportError as error:
        raise MissingExtraError("ONNX files need: pip install 'anycostfl[export]'") from error
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
    program.model.metadata_props[METADATA] = json.dumps(about)
    program.save(path, external_data=False)


def open_onnx(path: Path) -> Any:
    """A session of onnxruntime on one thread."""
    try:
        import onnxruntime  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise MissingExtraError(
            "running ONNX files needs: pip install 'anycostfl[export]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _read_onnx(_module: nn.Module, path: Path) -> Infer:
    session = open_onnx(path)
    return lambda x: np.asarray(session.run(None, {"input": x.numpy()})[0])


def _write_program(
    module: nn.Module, example: Tensor, path: Path, about: Mapping[str, Any]
) -> None:
    """A torch.export program (.pt2): runs without this package, also from C++."""
    with _quiet():
        batch = torch.export.Dim("batch")
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        program.example_inputs = None  # else they would be pickled into the file
        torch.export.save(program, path, extra_files={METADATA: json.dumps(about)})


def _read_program(_module: nn.Module, path: Path) -> Infer:
    with _quiet():
        module = torch.export.load(path).module()
    return lambda x: np.asarray(module(x).detach().numpy())


def _write_state(module: nn.Module, _example: Tensor, path: Path, about: Mapping[str, Any]) -> None:
    save_tensors(tensors_of(module), path, about)


def _read_state(module: nn.Module, path: Path) -> Infer:
    state = load_file(path)
    call = partial(torch.func.functional_call, module, state, tie_weights=False)
    return lambda x: np.asarray(call(x).detach().numpy())


FORMATS = {
    "onnx": Format(".onnx", write_onnx, _read_onnx),
    "torch": Format(".pt2", _write_program, _read_program),
    "safetensors": Format(".safetensors", _write_state, _read_state),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporters from talking about their own insides."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def write(trained: Trained, sub: SubModel, path: Path, format_name: str) -> float:
    """Write a sub-model, read it back and compare; the largest difference of a logit.

    The file appears under its name only after it has passed.
    """
    kind = FORMATS[format_name]
    with _folder_of(path) as folder:
        part = Path(folder, path.stem + kind.suffix)
        with _explained():
            kind.write(sub.module, trained.example(2), part, describe(trained, sub))
            difference = _difference(sub.module, kind.read(sub.module, part), trained.example)
        if not difference <= TOLERANCE:
            raise ExportError(
                f"the {format_name} file differs from PyTorch by {difference:.2g} "
                f"(allowed {TOLERANCE:g}), so it was not kept"
            )
        os.replace(part, path)
    return difference


@contextmanager
def _explained() -> Iterator[None]:
    """Whatever torch's exporters raise, in one line."""
    try:
        yield
    except (AnycostError, OSError, SafetensorError):
        raise
    except Exception as error:
        why = str(error.__cause__ or error).partition("\n")[0]
        raise ExportError(
            f"torch cannot export this model: {why}; "
            "--format safetensors or elastic needs no export"
        ) from error


@contextmanager
def _folder_of(path: Path) -> Iterator[str]:
    """A folder beside a file, for the time until the file is whole."""
    try:
        refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        if isinstance(error, AnycostError):  # a missing extra is an ImportError, not a disk
            raise
        raise ExportError(f"cannot write {path}: {error}") from error


def _difference(module: nn.Module, infer: Infer, example: Callable[[int], Tensor]) -> float:
    """The largest difference of a logit, over a batch of one and a batch of seven."""
    worst = []
    for batch in (example(1), example(7)):
        with torch.no_grad():
            expected = module(batch).numpy()
        worst.append(float(np.abs(infer(batch) - expected).max()))
    return float(np.max(worst))  # NaN stays NaN


def write_elastic(trained: Trained, path: Path) -> None:
    """Write all widths as one file; BatchNorm statistics are those of the full width."""
    recalibrate(trained.net.module, _calibration(trained.config))
    about = describe(trained)
    with _folder_of(path) as folder:
        part = Path(folder, path.name)
        save_elastic(trained.net, part, model=about.pop("model"), **about)
        os.replace(part, path)


# --- what a width costs ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Width:
    """One width of a trained model: what it knows and what it costs.

    `flops` are those of one forward pass of one sample, `latency_ms` is that of one sample in
    onnxruntime on one thread of this machine, `bytes` the size of the file.
    """

    alpha: float
    accuracy: float | None
    parameters: int
    flops: float
    bytes: int
    latency_ms: float | None


def weigh(trained: Trained, sub: SubModel, path: Path) -> Width:
    """What can be known of a written width without running it."""
    return Width(
        alpha=sub.plan.alpha,
        accuracy=None,
        parameters=sum(p.numel() for p in sub.module.parameters()),
        flops=trained.net.coupling.flops(sub.plan.widths, training=False),
        bytes=path.stat().st_size,
        latency_ms=None,
    )


TURN = 5
"""Consecutive runs of one file; the first of them, which warms caches, does not count."""


def measure_latency_ms(
    paths: Sequence[Path],
    example: Tensor,
    *,
    repeats: int = 60,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median milliseconds of ONNX files on one sample each, a few runs of each in turns."""
    sessions = [open_onnx(path) for path in paths]
    feed = {"input": example[:1].numpy()}
    seen: list[list[float]] = [[] for _ in paths]
    for _ in range(1 + repeats // (TURN - 1)):
        for session, times in zip(sessions, seen, strict=True):
            for run in range(TURN):
                start = clock()
                session.run(None, feed)
                if run > 0:
                    times.append(1e3 * (clock() - start))
    return [statistics.median(times[TURN - 1 :]) for times in seen]


def measure_widths(
    trained: Trained, alphas: Sequence[float], show: Callable[[float], None] = lambda _: None
) -> list[Width]:
    """Accuracy, size and latency of several widths; `show` hears of each before it is measured."""
    found: list[Width] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.onnx") for number in range(len(alphas))]
        for alpha, path in zip(alphas, paths, strict=True):
            show(alpha)
            sub = cut(trained, alpha)
            write(trained, sub, path, "onnx")
            found.append(replace(weigh(trained, sub, path), accuracy=accuracy_of(trained, sub)))
        latencies = measure_latency_ms(paths, trained.example(1))
    return [replace(w, latency_ms=ms) for w, ms in zip(found, latencies, strict=True)]


def accuracy_of(trained: Trained, sub: SubModel) -> float:
    """The share of the run's test images that a sub-model classifies rightly."""
    dataset = _dataset(trained.config.data.name, trained.config.data.path)
    wide = trained.config.training.channels_last
    right = count_correct(sub.module, dataset.test_images, dataset.test_labels, channels_last=wide)
    return right / len(dataset.test_labels)


def save_widths(folder: Path, widths: Sequence[Width]) -> Path:
    """Keep what was measured in the run directory, for its report."""
    path = folder / WIDTHS
    try:
        write_whole(path, (json.dumps([asdict(w) for w in widths], indent=1) + "\n").encode())
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error}") from error
    return path


# --- the widest that fits -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a width may cost: a field of `Width`, and how many of a unit."""

    field: str
    amount: float
    unit: str
    scale: float

    def cost(self, width: Width) -> float:
        """What a width costs, in the unit of the limit."""
        return float(getattr(width, self.field)) / self.scale


UNITS: dict[str, tuple[str, float]] = {
    "us": ("latency_ms", 1e-3), "ms": ("latency_ms", 1.0), "s": ("latency_ms", 1e3),
    "B": ("bytes", 1.0), "kB": ("bytes", 1e3), "MB": ("bytes", 1e6), "GB": ("bytes", 1e9),
    "kFLOP": ("flops", 1e3), "MFLOP": ("flops", 1e6), "GFLOP": ("flops", 1e9),
}  # fmt: skip


def parse_limit(text: str) -> Limit:
    """A limit such as 3ms, 2MB or 50MFLOP."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text)
    units = {name.lower(): name for name in UNITS}
    if not found or found[2].lower() not in units or float(found[1]) <= 0:
        raise ConfigError(
            [f"--fit: given {text!r}, allowed a number and a unit ({', '.join(UNITS)}), as in 3ms"]
        )
    unit = units[found[2].lower()]
    field, scale = UNITS[unit]
    return Limit(field, float(found[1]), unit, scale)


def widest(trained: Trained, limit: Limit, format_name: str) -> Width:
    """The widest sub-model (α to a hundredth) that costs no more than the limit.

    A latency that fits is measured once more, for the first time may have been lucky.
    """
    probe = partial(_probe, trained, limit, format_name)
    least = least_alpha(trained.net)
    alphas = [least, *(i / 100 for i in range(1, 101) if i / 100 > least)]
    narrowest = found = probe(least)
    if limit.cost(narrowest) > limit.amount:
        raise InfeasibleBudgetError(
            f"nothing fits into {limit.amount:g} {limit.unit}: the narrowest sub-model (alpha = "
            f"{least:.4g}) takes {_up(limit.cost(narrowest))} {limit.unit}; allow at least that"
        )
    low, high = 0, len(alphas)  # the one at `low` fits, the one at `high` is too wide
    while high - low > 1:
        middle = (low + high) // 2
        if limit.cost(probed := probe(alphas[middle])) <= limit.amount:
            low, found = middle, probed
        else:
            high = middle
    if limit.field == "latency_ms":
        while low > 0 and limit.cost(found := probe(alphas[low])) > limit.amount:
            low -= 1
    return found if low > 0 else narrowest


def _up(amount: float) -> str:
    """Three digits, rounded up: whoever allows that much has allowed enough."""
    digits = 2 - math.floor(math.log10(amount)) if amount > 0 else 0
    return f"{math.ceil(amount * 10**digits - 1e-9) / 10**digits:g}"


def _probe(trained: Trained, limit: Limit, format_name: str, alpha: float) -> Width:
    """What a width costs, as far as the limit asks."""
    sub = trained.net.shrink(alpha)  # statistics change neither size nor speed
    sub.module.eval()
    name = "onnx" if limit.field == "latency_ms" else format_name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"probe{FORMATS[name].suffix}")
        if limit.field == "flops":
            path.touch()
        else:
            write(trained, sub, path, name)
        width = weigh(trained, sub, path)
        if limit.field == "latency_ms":
            return replace(width, latency_ms=measure_latency_ms([path], trained.example(1))[0])
    return width


def warnings_of(trained: Trained, alphas: Sequence[float]) -> list[str]:
    """What a user should know before trusting these widths."""
    least = trained.config.limits.alpha_min
    below = [f"{alpha:g}" for alpha in alphas if alpha < least]
    if not below:
        return []
    return [
        f"α = {', '.join(below)} is below the run's α^min = {least:g}: "
        "no device trained a model so narrow, so it may know little"
    ]


def default_name(trained: Trained, format_name: str, alpha: float) -> str:
    """Such as cnn-alpha-0.25.onnx."""
    return f"{trained.config.model.name}-alpha-{alpha:.4g}{FORMATS[format_name].suffix}"
