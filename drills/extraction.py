"""What a dishonest server reads off one update: images, and what keeps them (docs/security.md).

The weights are crafted, not trained (Fowl et al., 2022, "Robbing the Fed"). Convolutions pass one
channel through; every row of the first dense layer measures the same brightness h, and fires above
its own threshold; the layer after weighs all rows alike. Then two neighbouring rows differ by the
images between their thresholds alone,

    x = (∂L/∂W_i − ∂L/∂W_{i+1}) / (∂L/∂b_i − ∂L/∂b_{i+1}),

exactly, where one image is there. What the dense layer sees is the image pooled to 7×7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from anycostfl.codec import Upload
from anycostfl.config import load_preset
from anycostfl.device import DeviceRuntime, Job, Learn, Training, learn_honestly, learn_privately
from anycostfl.experiment import build_experiment, load_data
from anycostfl.methods import load
from anycostfl.server.privacy import Privacy
from anycostfl.state import Samples, State
from drills.common import Order, Report

IMAGES = 40  # of the device, all in one batch
CLOSE = 0.05  # of the pooled image's norm: as close counts as recovered
SHIFT = 3.0  # keeps normalised pixels positive through the ReLUs


@dataclass(frozen=True, slots=True)
class Case:
    """What an owner allows, and how it trains."""

    name: str
    method: str = "fedavg"
    batch: int = IMAGES
    noise: float = 0.0


CASES = (
    Case("fedavg, one batch of 40"),
    Case("fedavg, five batches of 8", batch=8),
    Case("anycostfl, β 1/15 (--methods anycostfl)", method="anycostfl"),
    Case("fedavg, --clip-norm 1 --noise 0.01", noise=0.01),
    Case("fedavg, --clip-norm 1 --noise 1", noise=1.0),
)


def drill(order: Order) -> Report:
    """Count the images that each case gives away; the defended ones give none."""
    report, found = Report("images read off one update"), {}
    for case in CASES:
        found[case.name] = recovered(case, order.seed)
        report.injected += 1
    report.note = "; ".join(f"{name}: {count} of {IMAGES}" for name, count in found.items())
    report.expect(found[CASES[0].name] > IMAGES // 2, "the attack: it recovers nothing")
    report.expect(found[CASES[-1].name] == 0, "images, in spite of noise")
    return report


def recovered(case: Case, seed: int) -> int:
    """How many of the device's images a dishonest server recovers."""
    config = load_preset("demo")
    dataset = load_data(config)
    experiment = build_experiment(config, dataset)
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(seed))
    samples = dataset.train.take(order[:IMAGES])
    crafted = craft(experiment.initial_weights, dataset.test)
    experiment.net.load(crafted)
    training = Training(0.1, case.batch, precision="fp32", device="cpu")
    method = replace(load(case.method), feedback=False)
    runtime = DeviceRuntime(experiment.task, method, experiment.net, training)
    sub = experiment.net.shrink(1.0)
    rate = 1.0 if case.method == "fedavg" else config.limits.beta_max
    upload = Upload(rate, 1, bytes(32), experiment.blocks, method.codec)
    learn: Learn = learn_honestly
    if case.noise:
        learn = learn_privately(learn, Privacy("local", 1.0, case.noise))
    reply = runtime.perform(sub, samples, Job(0, 1.0, upload, seed, 0.1), learn)
    shapes = {name: sub.plan.shapes[name] for name in experiment.trained}
    update = method.decode(reply.payload, shapes, upload)
    return count_close(read_off(update.values), pooled(samples))


def craft(weights: State, public: Samples) -> dict[str, Tensor]:
    """Weights that sort images by brightness; thresholds are those of public images."""
    crafted = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for layer in ("conv1", "conv2"):
        kernel = crafted[f"{layer}.weight"]
        kernel[0, 0, kernel.shape[2] // 2, kernel.shape[3] // 2] = 1.0
    crafted["conv1.bias"][0] = SHIFT
    rows = len(crafted["fc1.bias"])
    bright = pooled(public).mean(1)
    levels = torch.linspace(0.0, 1.0, rows + 2)[1:-1]
    inputs = crafted["fc1.weight"].shape[1]
    area = pooled(public).shape[1]
    crafted["fc1.weight"][:, :area] = 1.0 / area
    crafted["fc1.bias"][:] = -torch.quantile(bright, levels)
    classes = len(crafted["fc2.bias"])
    crafted["fc2.weight"][:] = torch.linspace(-0.1, 0.1, classes)[:, None]
    if inputs < area:
        raise AssertionError("the dense layer sees less than one channel")
    return crafted


def pooled(samples: Samples) -> Tensor:
    """What the dense layer sees of images."""
    images = torch.relu(samples.inputs[:, :1] + SHIFT)
    return F.max_pool2d(F.max_pool2d(images, 2), 2).flatten(1)


def read_off(update: Mapping[str, Tensor]) -> Tensor:
    """The candidates for images: what neighbouring rows differ by."""
    weight, bias = update["fc1.weight"].double(), update["fc1.bias"].double()
    steps, counts = weight[:-1] - weight[1:], bias[:-1] - bias[1:]
    there = counts.abs() > 1e-12
    return (steps[there] / counts[there, None]).float()


def count_close(candidates: Tensor, images: Tensor) -> int:
    """How many images have a candidate close by."""
    if not len(candidates):
        return 0
    distances = torch.cdist(images, candidates[:, : images.shape[1]])
    return int((distances.min(1).values < CLOSE * images.norm(dim=1)).sum())
