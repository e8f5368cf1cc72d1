"""One file from which a model of any width is cut when it is loaded.

    net = load_elastic("cnn-elastic.safetensors")
    sub = net.shrink(0.25)                          # sub.module: a plain, smaller nn.Module

It is a safetensors file of the full model, channels in the order in which they are cut; its
metadata names the architecture and the rule for widths. A model with BatchNorm needs a few
unlabelled batches of its own at every width: `recalibrate(sub.module, batches)`.
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
    """A file that holds no elastic model."""


def save_elastic(net: ElasticModel, path: Path | str, *, model: str, **about: Any) -> None:
    """Write the whole model, an architecture of `anycostfl.models`, as it is sorted now."""
    described = {"kind": "elastic", "model": model, "widths": net.rule, **about}
    save_tensors(tensors_of(net.module), path, described)


def save_tensors(tensors: Mapping[str, Tensor], path: Path | str, about: Mapping[str, Any]) -> None:
    """Write tensors as safetensors, with what they are in the metadata."""
    # Copies, for safetensors refuses tensors that share memory (tied weights).
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    Path(path).write_bytes(save(copies, {METADATA: json.dumps(about)}))  # readable as others are


def load_elastic(path: Path | str) -> ElasticModel:
    """The model of a file that `save_elastic` or `anycostfl export --format elastic` wrote."""
    about, state = _read(path)
    spec = models.load(str(about.get("model")))
    with torch.random.fork_rng():  # initial weights and the example are drawn
        net = ElasticModel(spec.build(), spec.example(2), rule=str(about.get("widths")))
    net.load(state)
    net.module.eval()
    return net


def _read(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ElasticFileError(f"cannot read an elastic model from {path}: {error}") from error
    about = about if isinstance(about, dict) else {}
    if about.get("kind") != "elastic":
        holds = f"the width α = {about['alpha']} alone" if "alpha" in about else "something else"
        raise ElasticFileError(
            f"{path} holds {holds}; write one with all widths by: "
            "anycostfl export RUN --format elastic"
        )
    return about, tensors
