"""`anycostfl data`: the samples of a preset and their split over the devices."""

from __future__ import annotations

import numpy as np

from anycostfl.cli._console import Json, emit_json, print_table, say
from anycostfl.cli._options import Overrides, Plot, Preset
from anycostfl.config import load_preset
from anycostfl.data.samples import Samples, describe
from anycostfl.data.split import Labels, class_labels
from anycostfl.experiment import load_data, split
from anycostfl.report.figures import draw_partition


def data(
    preset: Preset = "demo",
    set_: Overrides = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show the samples of a preset and how they are split over the fleet."""
    config = load_preset(preset, set_ or [])
    dataset = load_data(config)
    parts, labels = split(config, dataset.train), _kinds(dataset.train)
    kinds = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[part], minlength=kinds) for part in parts])
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    if json:
        emit_json({"dataset": config.data.name, "samples_per_class": counts.tolist()})
    else:
        rows = [
            ("training samples", f"{len(dataset.train):,}"),
            ("test samples", f"{len(dataset.test):,}"),
            ("input", describe(dataset.train.inputs)),
            ("target", describe(dataset.train.targets)),
            ("devices", len(parts)),
            ("samples per device", f"{sizes.min()} … {sizes.mean():.0f} … {sizes.max()}"),
        ]
        if kinds > 1:
            least, mean, most = held.min(), held.mean(), held.max()
            rows += [("classes", kinds), ("classes per device", f"{least} … {mean:.1f} … {most}")]
        if dataset.owner_names:
            rows.append(("owners", len(dataset.owner_names)))
        title = f"{config.data.name}, split {config.data.partition} (min … mean … max)"
        print_table(title, ("", ">"), rows)
    if plot:
        draw_partition(counts, plot)
        if not json:
            say(f"Plotted into {plot}")


def _kinds(samples: Samples) -> Labels:
    """The class of every sample, one for all where targets are not classes."""
    labels = class_labels(samples)
    return np.zeros(len(samples), np.int64) if labels is None else labels
