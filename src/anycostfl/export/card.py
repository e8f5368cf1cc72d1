"""The model card beside an exported file: what it computes, what it takes, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from anycostfl.data.prepare import PreparedModule
from anycostfl.data.samples import describe, places
from anycostfl.export.formats import RAW
from anycostfl.export.trained import Deployed, TrainedModel
from anycostfl.export.widths import Width

RUN = {
    ".onnx": """import onnxruntime

session = onnxruntime.InferenceSession("{file}")
outputs = session.run(None, {{{feed}}})""",
    ".pte": """from executorch.runtime import Runtime

method = Runtime.get().load_program("{file}").load_method("forward")
outputs = method.execute([{args}])  # one sample at a time""",
    ".pt2": """import torch

outputs = torch.export.load("{file}").module()({args})""",
    ".safetensors": """from safetensors.torch import load_file

state = load_file("{file}")  # for the module of the same width: anycostfl inspect""",
}


def card_of(
    trained: TrainedModel, deployed: Deployed, path: Path, format_name: str, width: Width
) -> str:
    """The card as Markdown."""
    config, info = trained.config, trained.config.metric
    metric = "not measured" if width.metric is None else info.show(width.metric)
    rows: Sequence[tuple[str, str]] = [
        ("model", f"{config.model.name}, α = {width.alpha:.4g}"),
        ("task", f"{config.data.name}: {trained.task.summary}"),
        ("trained by", f"{config.run.method}, {trained.rounds} rounds"),
        ("format", f"{format_name}, {width.precision}, {width.bytes:,} bytes"),
        ("parameters", f"{width.parameters:,}"),
        ("work", f"{width.flops / 1e6:.4g} MFLOP for one sample"),
        (f"{info.name} on the test samples", metric),
        ("latency", f"{width.latency_ms:.3g} ms on the machine that wrote this, one thread")
        if width.latency_ms is not None
        else ("latency", "not measured"),
        ("largest difference from PyTorch", f"{width.difference or 0:.2g}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"# {path.name}\n\n| | |\n|---|---|\n{table}\n\n## Input\n{_input(deployed)}\n\n"
        f"## Output\n{_output(trained)}\n\n## Run\n```python\n{_code(deployed, path)}\n```\n"
    )


def _input(deployed: Deployed) -> str:
    """What one sample has to be."""
    one = deployed.inputs(1)
    how = (
        "as recorded: the file prepares it. Do not normalise it before."
        if deployed.is_raw
        else "prepared as the metadata of the file say; raw input gives wrong results."
    )
    return f"A batch of samples, each {describe(one)}, {how}"


def _output(trained: TrainedModel) -> str:
    classes = trained.task.classes
    return (
        f"One number for each class, in this order: {', '.join(classes)}. The largest wins."
        if classes
        else "What the model returns for each sample; the metric above is computed from it."
    )


def _code(deployed: Deployed, path: Path) -> str:
    """Lines that run the file."""
    found: list[tuple[str, Tensor]] = places(deployed.inputs(1))
    raw = RAW if isinstance(deployed.module, PreparedModule) else ""
    names = [place.strip("[]'") or "input" for place, _ in found]
    names = [f"input{name}" if name.isdecimal() else name for name in names]
    feed = ", ".join(f'"{raw}{name}": {name}' for name in names)
    lines = RUN.get(path.suffix, RUN[".onnx"])
    return lines.format(file=path.name, feed=feed, args=", ".join(names))
