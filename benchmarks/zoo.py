"""Public models made elastic: how long it takes, how much shrinks, whether the function is kept.

Every model runs in a process of its own, one thread, with a limit on CPU time and on memory. The
models come from torchvision, timm, transformers and segmentation-models-pytorch, with random
weights (nothing is downloaded). They are not dependencies of anycostfl: make an environment that
sees this project's torch, and install them there without theirs.

    python -m venv zoo && zoo/bin/pip install torch==2.13.0 anycostfl
    zoo/bin/pip install -r benchmarks/zoo-requirements.txt --no-deps
    zoo/bin/python benchmarks/zoo.py [NAME …] [--out zoo.jsonl] [--page docs/results/zoo.md]

A model passes if sorting keeps its function (1e-4), α = .25 leaves at most .40 of the FLOPs, and
a sub-model trains. CPU seconds are those of `ElasticModel(module, *inputs)` alone; memory is the
peak it adds, relative to the peak that one training step of the full model adds.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anycostfl import ElasticModel
from anycostfl.shrink import verify

Example = Callable[[], tuple[Any, ...]]
ALPHA = 0.25
LEAST_MEMORY = 64 * 1024  # kB: below, the interpreter's own objects decide
LIMITS = {"output error": 1e-4, "FLOPs": 0.40, "CPU seconds": 15.0, "memory": 3.0}


@dataclass(frozen=True)
class Public:
    """A model nobody here wrote, and inputs for it."""

    source: str
    build: Callable[[], nn.Module]
    example: Example


def image(size: int) -> Example:
    """Two images."""
    return lambda: (torch.randn(2, 3, size, size),)


def tokens(length: int = 12, vocabulary: int = 90) -> Example:
    """Two sentences."""
    return lambda: (torch.randint(vocabulary, (2, length)),)


def torchvision(name: str, size: int = 64, **options: Any) -> Public:
    """A model of torchvision."""

    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        module: nn.Module = models.get_model(name, weights=None, **options)
        return module

    return Public("torchvision", build, image(size))


OPERATORS: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
"""torchvision's compiled operators do not fit every torch; its models do not need them."""


class Logits(nn.Module):
    """A model of transformers reduced to its predictions: what an encoder leaves is no output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Tensor:
        """Return the predictions."""
        result = self.inner(*given)
        for name in ("logits", "prediction_logits", "prediction_outputs"):
            if getattr(result, name, None) is not None:
                found: Tensor = getattr(result, name)
                return found
        raise TypeError(f"{type(result).__name__} holds no predictions")


def pyramid() -> Public:
    """A detection neck: ResNet-18 with torchvision's feature pyramid."""

    def build() -> nn.Module:
        detection = importlib.import_module("torchvision.models.detection.backbone_utils")
        module: nn.Module = detection.resnet_fpn_backbone(
            backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d
        )
        return module

    return Public("torchvision", build, image(64))


def timm(name: str, size: int = 64, **options: Any) -> Public:
    """A model of timm."""

    def build() -> nn.Module:
        create = importlib.import_module("timm").create_model
        module: nn.Module = create(name, pretrained=False, **options)
        return module

    return Public("timm", build, image(size))


def smp(name: str, encoder: str = "resnet18", size: int = 64) -> Public:
    """A segmentation model."""

    def build() -> nn.Module:
        models = importlib.import_module("segmentation_models_pytorch")
        module: nn.Module = getattr(models, name)(encoder, encoder_weights=None)
        return module

    return Public("smp", build, image(size))


def transformers(kind: str, model: str, example: Example, **options: Any) -> Public:
    """A model of transformers with its own small configuration."""

    def build() -> nn.Module:
        hub = importlib.import_module("transformers")
        config = getattr(hub, f"{kind}Config")(**options)
        config.use_cache = False
        return Logits(getattr(hub, model)(config))

    return Public("transformers", build, example)


TEXT: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 70,
}  # fmt: skip
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
VISION: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 30, "mask_time_prob": 0.0,
}  # fmt: skip


def sentence_pair() -> tuple[Any, ...]:
    """What an encoder-decoder takes: tokens, their mask, tokens."""
    return (
        torch.randint(90, (2, 10)),
        torch.ones(2, 10, dtype=torch.long),
        torch.randint(90, (2, 7)),
    )


def spectrogram(bins: int, length: int) -> Example:
    """Two spectrograms, (bins, length)."""
    return lambda: (torch.randn(2, bins, length),)


def wave() -> tuple[Any, ...]:
    """Two sounds."""
    return (torch.randn(2, 3200),)


def whisper() -> tuple[Any, ...]:
    """Spectrograms, no mask, tokens."""
    return torch.randn(2, 80, 60), None, torch.randint(90, (2, 7))


MODELS: dict[str, Public] = {
    **{
        name: torchvision(name)
        for name in (
            "alexnet", "vgg11", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d",
            "wide_resnet50_2", "squeezenet1_1", "densenet121", "mobilenet_v2",
            "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "efficientnet_b0",
            "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "shufflenet_v2_x1_0",
            "convnext_tiny",
        )
    },
    "googlenet": torchvision("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": torchvision("inception_v3", 96, aux_logits=False, init_weights=False),
    "vit_b_32": torchvision("vit_b_32", 64, image_size=64),
    "swin_t": torchvision("swin_t", 224),
    "swin_v2_t": torchvision("swin_v2_t", 256),
    "maxvit_t": torchvision("maxvit_t", 224),
    "fcn_resnet50": torchvision("fcn_resnet50", 64, weights_backbone=None),
    "deeplabv3_mobilenet_v3_large": torchvision(
        "deeplabv3_mobilenet_v3_large", 64, weights_backbone=None
    ),
    "lraspp_mobilenet_v3_large": torchvision(
        "lraspp_mobilenet_v3_large", 64, weights_backbone=None
    ),
    "resnet18_fpn": pyramid(),
    **{
        name: timm(name)
        for name in (
            "skresnet18", "res2net50_26w_4s", "cspresnet50", "cspdarknet53", "lcnet_050",
            "ghostnet_100", "repvgg_a0", "hrnet_w18_small", "dla34", "resnest14d", "darknet53",
            "mobilenetv4_conv_small", "tinynet_e", "tf_efficientnetv2_b0", "starnet_s1",
            "nfnet_l0", "resnetv2_50", "eca_resnet33ts", "seresnet18", "inception_next_tiny",
            "convnextv2_atto", "edgenext_xx_small", "mobilevit_s", "fastvit_t8", "poolformer_s12",
            "repvit_m0_9", "efficientvit_b0", "selecsls42", "ese_vovnet19b_dw", "rexnet_100",
            "hardcorenas_a", "fbnetc_100", "dpn48b", "convmixer_768_32", "caformer_s18",
            "pvt_v2_b0", "regnetz_005",
        )
    },
    **{
        name: timm(name, 224)
        for name in (
            "efficientformer_l1", "levit_128s", "pit_ti_224", "resmlp_12_224", "gmlp_ti16_224",
            "mixer_s32_224", "visformer_tiny", "deit_tiny_patch16_224", "xcit_nano_12_p16_224",
            "coat_tiny", "twins_svt_small", "volo_d1_224", "cait_xxs24_224", "convit_tiny",
            "tiny_vit_5m_224", "sequencer2d_s", "hiera_tiny_224", "davit_tiny", "mvitv2_tiny",
            "beit_base_patch16_224", "eva02_tiny_patch14_224",
        )
    },
    "crossvit_tiny_240": timm("crossvit_tiny_240", 240),
    "maxvit_nano_rw_256": timm("maxvit_nano_rw_256", 256),
    "unet_resnet18": smp("Unet"),
    "unetplusplus_resnet18": smp("UnetPlusPlus"),
    "fpn_mobilenet_v2": smp("FPN", "mobilenet_v2"),
    "linknet_resnet18": smp("Linknet"),
    "manet_resnet18": smp("MAnet"),
    "bert": transformers("Bert", "BertForSequenceClassification", tokens(), **TEXT),
    "roberta": transformers("Roberta", "RobertaForSequenceClassification", tokens(), **TEXT),
    "electra": transformers(
        "Electra", "ElectraForSequenceClassification", tokens(), **TEXT, embedding_size=32
    ),
    "albert": transformers(
        "Albert", "AlbertForSequenceClassification", tokens(), **TEXT, embedding_size=32
    ),
    "distilbert": transformers(
        "DistilBert", "DistilBertForSequenceClassification", tokens(),
        vocab_size=100, dim=64, n_layers=3, n_heads=4, hidden_dim=128, max_position_embeddings=64,
    ),
    "gpt2": transformers(
        "GPT2", "GPT2LMHeadModel", tokens(), vocab_size=100, n_embd=64, n_layer=3, n_head=4,
        n_positions=64,
    ),
    "llama": transformers("Llama", "LlamaForCausalLM", tokens(), **DECODER),
    "qwen2": transformers("Qwen2", "Qwen2ForCausalLM", tokens(), **DECODER),
    "gemma2": transformers("Gemma2", "Gemma2ForCausalLM", tokens(), **DECODER, head_dim=16),
    "t5": transformers(
        "T5", "T5ForConditionalGeneration", sentence_pair, vocab_size=100, d_model=64, d_kv=16,
        d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "vit_hf": transformers("ViT", "ViTForImageClassification", image(32), **VISION),
    "swin_hf": transformers(
        "Swin", "SwinForImageClassification", image(32), image_size=32, patch_size=4,
        embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4,
    ),
    "resnet_hf": transformers(
        "ResNet", "ResNetForImageClassification", image(64), embedding_size=32,
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2],
    ),
    "segformer": transformers("Segformer", "SegformerForSemanticSegmentation", image(64)),
    "wav2vec2": transformers("Wav2Vec2", "Wav2Vec2ForCTC", wave, **SPEECH),
    "hubert": transformers("Hubert", "HubertForCTC", wave, **SPEECH),
    "whisper_tiny": transformers(
        "Whisper", "WhisperForConditionalGeneration", whisper, vocab_size=100, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=30,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "patchtst": transformers(
        "PatchTST", "PatchTSTForClassification", lambda: (torch.randn(2, 48, 5),),
        num_input_channels=5, context_length=48, patch_length=8, patch_stride=8, d_model=64,
        ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, num_targets=6,
    ),
}  # fmt: skip


for _operator in ("nms", "qnms"):
    OPERATORS.define(f"{_operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")


PACKAGES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
    "smp": "segmentation_models_pytorch",
}


# --- one model ---------------------------------------------------------------------------------


def measure(name: str) -> dict[str, Any]:
    """Everything about one model, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    public = MODELS[name]
    module, inputs = public.build().eval(), public.example()
    _perturb(module)
    with torch.no_grad():
        module(*inputs)  # whatever is done once
    start = _peak()
    _step(module, inputs, rate=0.0)
    module.zero_grad(set_to_none=True)
    stepped = _peak()
    cuts = _counted(verify)
    seconds = time.process_time()
    net = ElasticModel(module.eval(), *inputs)
    seconds = time.process_time() - seconds
    traced = _peak()
    inputs = public.example()
    before = _outputs(module, inputs)
    net.sort_channels()
    error = max(map(_moved, before, _outputs(module, inputs)), default=math.nan)
    sub = net.shrink(ALPHA)
    pins = Counter(f"{p.reason.operation}: {p.reason.why}" for p in net.coupling.pins)
    return {
        "name": name,
        "source": public.source,
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": round(seconds, 2),
        "cuts": cuts[0],
        "memory": round(max(traced - start, 0) / max(stepped - start, LEAST_MEMORY), 2),
        "groups": len(net.coupling.groups),
        "tied": sum(len(tied.sizes) > 1 for tied in net.tied_widths),
        "rewritten": net.rewritten,
        "error": error,
        "flops": round(sub.plan.flops_ratio, 3),
        "kept": round(_size(sub.module) / _size(module), 3),
        "trains": _trains(sub.module, inputs),
        "pinned": pins.most_common(5),
    }


def _perturb(module: nn.Module) -> None:
    """Random values everywhere: fresh norms and layer scales would hide mistakes."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and tensor.numel() and 0 not in tensor.stride():
                tensor.add_(0.1 * (tensor.square().mean().sqrt() + 0.1) * torch.rand_like(tensor))


def _counted(verify: Any) -> list[int]:
    """Count the trial cuts of a module."""
    count, plain = [0], verify._try_cut

    def counting(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return plain(*given, **named)

    verify._try_cut = counting
    return count


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _outputs(module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [x for x in tree_leaves(module(*inputs)) if isinstance(x, Tensor)]


def _moved(before: Tensor, after: Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max().clamp(min=1e-30))


def _step(module: nn.Module, inputs: tuple[Any, ...], rate: float) -> None:
    """One step of SGD on an arbitrary loss."""
    training = module.training
    module.train()
    results = [x for x in tree_leaves(module(*inputs)) if isinstance(x, Tensor)]
    parts = [x.float().square().mean() for x in results if x.requires_grad]
    torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(module.parameters(), lr=rate).step()
    module.train(training)


def _trains(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a step of SGD moves nearly every parameter, and the result is finite."""
    before = copy.deepcopy(module.state_dict())
    _step(module, inputs, rate=1e-3)
    moved = [not torch.equal(p, before[n]) for n, p in module.named_parameters()]
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    return finite and sum(moved) > len(moved) / 2


# --- all models --------------------------------------------------------------------------------


def limited(name: str, seconds: int, gigabytes: float) -> dict[str, Any]:
    """Measure one model in its own process, within limits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
        try:
            row = measure(name)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {str(error)[:150]}"}
        os.write(writing, json.dumps(row).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    row = json.loads(text) if text else {"failed": f"more than {seconds} s or {gigabytes} GB"}
    return {"name": name, "source": MODELS[name].source, **row}


def passes(row: dict[str, Any]) -> bool:
    """Whether a model keeps its function, shrinks and trains."""
    return (
        "failed" not in row
        and row["error"] <= LIMITS["output error"]
        and row["flops"] <= LIMITS["FLOPs"]
        and row["trains"]
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """The claims in figures."""
    done = [row for row in rows if "failed" not in row]
    times = sorted(row["seconds"] for row in done)
    memory = sorted(row["memory"] for row in done)
    good = sum(map(passes, rows))
    return (
        f"{good} of {len(rows)} pass ({good / len(rows):.0%}). Tracing takes "
        f"{statistics.median(times):.1f} s at the median, "
        f"{times[int(0.95 * (len(times) - 1))]:.1f} s at the 95th percentile and "
        f"{times[-1]:.1f} s at most; memory at most {memory[-1]:.1f} times a training step "
        f"(95th percentile {memory[int(0.95 * (len(memory) - 1))]:.1f})."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """One line a model, those that fail first."""
    lines = [
        "| model | from | parameters, M | CPU s | trial cuts | memory | FLOPs | error | trains |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in sorted(rows, key=passes):
        if "failed" in row:
            lines.append(f"| **{row['name']}** | {row['source']} | {row['failed']} |")
            continue
        mark = "" if passes(row) else "**"
        lines.append(
            f"| {mark}{row['name']}{mark} | {row['source']} | {row['parameters'] / 1e6:.1f} | "
            f"{row['seconds']:.1f} | {row['cuts']} | {row['memory']:.1f} | {row['flops']:.3f} | "
            f"{row['error']:.0e} | {'yes' if row['trains'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the models that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=int, default=180, help="CPU time of each process")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--out", type=Path, help="append results as JSON; those there are kept")
    parser.add_argument("--page", type=Path, help="write the table between this page's marks")
    arguments = parser.parse_args()
    rows = []
    if arguments.out and arguments.out.exists():
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    measured = {row["name"] for row in rows}
    names = [n for n in arguments.names or MODELS if n not in measured]
    for package in {PACKAGES[MODELS[name].source] for name in names}:
        importlib.import_module(package)  # once, not in every process
    for name in names:
        rows.append(limited(name, arguments.seconds, arguments.gigabytes))
        print("ok  " if passes(rows[-1]) else "FAIL", json.dumps(rows[-1]), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(summary(rows))
    if arguments.page:
        begin, end = "<!-- figures -->\n", "<!-- end of figures -->\n"
        before, _, rest = arguments.page.read_text().partition(begin)
        after = rest.partition(end)[2]
        figures = f"{begin}{summary(rows)}\n\n{table(rows)}\n{end}"
        arguments.page.write_text(before + figures + after)


if __name__ == "__main__":
    main()
