"""`anycostfl data`: the dataset of a preset and its split over the devices."""

from __future__ import annotations

import numpy as np

from anycostfl.cli._console import Json, emit_json, out, say, table
from anycostfl.cli._options import Overrides, Plot, Preset
from anycostfl.config import load_preset
from anycostfl.experiment import load_data, split
from anycostfl.report.figures import draw_partition


def data(
    preset: Preset = "demo",
    set_: Overrides = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show the dataset of a preset and how it is split over the fleet."""
    config = load_preset(preset, set_ or [])
    dataset = load_data(config)
    parts = split(config.data, config.fleet.devices, config.run.seed, dataset)
    labels = dataset.train_labels.numpy()
    counts = np.stack([np.bincount(labels[part], minlength=dataset.classes) for part in parts])
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    if json:
        emit_json({"dataset": dataset.name, "samples_per_class": counts.tolist()})
    else:
        rows = [
            ("training samples", f"{len(labels):,}"),
            ("test samples", f"{len(dataset.test_labels):,}"),
            ("one sample", " × ".join(map(str, dataset.train_images.shape[1:]))),
            ("classes", dataset.classes),
            ("devices", len(parts)),
            ("samples per device", f"{sizes.min()} … {sizes.mean():.0f} … {sizes.max()}"),
            ("classes per device", f"{held.min()} … {held.mean():.1f} … {held.max()}"),
        ]
        title = f"{dataset.name}, split {config.data.partition} (min … mean … max)"
        out.print(table(title, ("", ">"), rows))
    if plot:
        draw_partition(counts, plot)
        if not json:
            say(f"Plotted into {plot}")
