"""One file from which a model of any width is cut when it is loaded.

    net = load_elastic("cnn-elastic.safetensors")
    sub = net.shrink(0.25)                          # sub.module: a plain, smaller nn.Module

It is a safetensors file of the full model, with channels in the order in which they are cut; its
metadata names the architecture and the width rule. A model with BatchNorm needs a few unlabelled
batches at every width: `recalibrate(sub.module, batches)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from anycostfl import models
from anycostfl.errors import AnycostError
from anycostfl.shrink import ElasticModel
from anycostfl.state import tensors_of

METADATA = "anycostfl"


class ElasticFileError(AnycostError, ValueError):
    """A file that does not contain an elastic model."""


def save_elastic(net: ElasticModel, path: Path | str, *, model: str, **metadata: Any) -> None:
    """Write the full model, an architecture of `anycostfl.models`, in its current channel order."""
    described = {"kind": "elastic", "model": model, "widths": net.rule, **metadata}
    save_tensors(tensors_of(net.module), path, described)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, Any]
) -> None:
    """Write tensors and metadata as safetensors."""
    # Copies, because safetensors refuses tensors that share memory (tied weights).
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    # Not save_file, which creates the file readable by its owner only.
    Path(path).write_bytes(save(copies, {METADATA: json.dumps(metadata)}))


def load_elastic(path: Path | str) -> ElasticModel:
    """Load a file written by `save_elastic` or `anycostfl export --format elastic`."""
    metadata, state = _read(path)
    spec = models.load(str(metadata.get("model")))
    with torch.random.fork_rng():  # building draws initial weights and the example
        net = ElasticModel(spec.build(), spec.example(2), rule=str(metadata.get("widths")))
    net.load(state)
    net.module.eval()
    return net


def _read(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ElasticFileError(f"cannot read an elastic model from {path}: {error}") from error
    metadata = metadata if isinstance(metadata, dict) else {}
    if metadata.get("kind") != "elastic":
        content = f"only the width α = {metadata['alpha']}" if "alpha" in metadata else "no model"
        raise ElasticFileError(
            f"{path} contains {content}; write one with all widths using: "
            "anycostfl export RUN --format elastic"
        )
    return metadata, tensors
