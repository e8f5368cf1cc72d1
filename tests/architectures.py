"""The zoo on which elasticity must hold: our own models and modules odd enough to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import models


class UNet(nn.Module):
    """Skip connections by concatenation, transposed convolution, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.head = nn.Conv2d(16, 12, 3, padding=1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Any:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        c = torch.cat([a, self.up(b)], 1)
        return self.head(F.relu(self.merge(c)))


class ConcatGroupedSqueeze(nn.Module):
    """Concatenation, grouped convolution, squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)
        self.grouped = nn.Conv2d(16, 24, 3, padding=1, groups=2)
        self.squeeze, self.excite = nn.Linear(24, 6), nn.Linear(6, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.grouped(torch.cat([F.relu(self.a(x)), torch.sigmoid(self.b(x))], 1)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return self.head((y * gate[:, :, None, None]).mean((2, 3)))


class Glu(nn.Module):
    """A gated linear unit: halves of one layer meet place by place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.glu(self.up(x), -1))


class ChannelShuffle(nn.Module):
    """ShuffleNet's grouped 1×1 convolutions with shuffled channels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 1)
        self.first, self.second = nn.Conv2d(24, 24, 1, groups=3), nn.Conv2d(24, 24, 1, groups=3)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(F.relu(self.stem(x))))
        batch, channels, height, width = x.shape
        x = x.view(batch, 3, channels // 3, height, width).transpose(1, 2).flatten(1, 2)
        return self.head(self.second(x).mean((2, 3)))


class SharedConv(nn.Module):
    """One convolution applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for _ in range(3):
            x = F.relu(self.shared(x))
        return self.head(x.mean((2, 3)))


class Gru(nn.Module):
    """A GRU and its last state."""

    def __init__(self, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 8, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.gru(x)[0][:, -1])


class BiLstm(nn.Module):
    """Two directions, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.lstm(x)[0].mean(1))


class ConvNextBlock(nn.Module):
    """Depthwise 7×7, LayerNorm over channels last, inverted bottleneck, layer scale at 1e-6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 2, stride=2)
        self.depthwise = nn.Conv2d(12, 12, 7, padding=3, groups=12)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)
        self.scale = nn.Parameter(1e-6 * torch.ones(12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer: one layer mixes tokens, one mixes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.tokens1, self.tokens2 = nn.Linear(4, 8), nn.Linear(8, 4)
        self.channels1, self.channels2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        mixed = self.tokens2(F.gelu(self.tokens1(self.norm1(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        x = x + self.channels2(F.gelu(self.channels1(self.norm2(x))))
        return self.head(x.mean(1))


class RopeAttention(nn.Module):
    """Rotary positions: each channel of a head is bound to its partner half a head away."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        angles = torch.outer(torch.arange(6.0), 0.5 ** torch.arange(4.0))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2))).mean(1)


class TiedEmbedding(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        return self.head(x + self.down(F.relu(self.up(x))))


class EncoderLayer(nn.Module):
    """torch's own transformer layer, whose attention insists on width = heads · head size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layer(self.embed(x)).mean(1))


class InPlace(nn.Module):
    """In-place activations and an in-place write into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x).relu_()
        y = torch.zeros_like(x)
        y.add_(self.b(x)).mul_(0.5)
        y[:, :] += x
        return self.head(y.tanh_())


class DataDependent(nn.Module):
    """A branch on the data, which graph capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.a(x))
        hidden = self.b(hidden) if float(x.sum()) > 0 else self.c(hidden)
        return self.head(F.relu(hidden))


class LiteralView(nn.Module):
    """The size of the flattened image is written into forward, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1 = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 16, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.view(-1, 128))))


class LiteralHeads(nn.Module):
    """Attention with its sizes as attributes, split and joined by them."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.heads, self.size = 16, 2, 8
        self.embed, self.qkv = nn.Linear(5, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        batch, length, _ = x.shape
        x = self.embed(x)
        q, k, v = self.qkv(x).split(self.width, dim=2)
        shape = (batch, length, self.heads, self.size)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.head(x + self.out(y.reshape(batch, length, self.width))).mean(1)


class Einsum(nn.Module):
    """Weights as bare parameters, contracted by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(6, 10) / 3)
        self.w2 = nn.Parameter(torch.randn(10, 4) / 3)

    def forward(self, x: Tensor) -> Any:
        return torch.einsum("bi,io->bo", torch.einsum("bi,io->bo", x, self.w1).relu(), self.w2)


class GroupNorms(nn.Module):
    """GroupNorm with few wide groups (inside) and many narrow ones (whole)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.few, self.many = nn.GroupNorm(2, 24), nn.GroupNorm(8, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.few(self.a(x)))
        return self.head(F.relu(self.many(self.b(x))).mean((2, 3)))


class ResNeXt(nn.Module):
    """A grouped convolution with many small groups, which go as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(3, 16, 1)
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=8)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.grouped(F.relu(self.reduce(x)))).mean((2, 3)))


class PixelShuffle(nn.Module):
    """Super-resolution: blocks of four channels become 2×2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.b(F.pixel_shuffle(F.relu(self.a(x)), 2))))


class Cumulative(nn.Module):
    """One hidden width runs through cumsum, which depends on the order; the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.b(self.a(x).cumsum(1))))


class Gate(nn.Module):
    """The first channel gates all others, so it must stay the first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        out: Tensor = self.fc2(h * torch.sigmoid(h[:, :1]))
        return out


class LiteralSlice(nn.Module):
    """A part taken by numbers and averaged away: a narrower copy would take another part."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).relu()
        out: Tensor = self.fc2(h * torch.sigmoid(h[:, 8:].mean(1, keepdim=True)))
        return out


class RelativeAttention(nn.Module):
    """Attention whose mask is learned for every head, as in T5."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.stem = nn.Linear(5, 16)
        self.distances = nn.Embedding(21, heads)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        place = torch.arange(x.shape[1])
        mask = self.distances((place[:, None] - place).clamp(-10, 10) + 10).permute(2, 0, 1)[None]
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.head(seen.transpose(1, 2).flatten(2)).mean(1)
        return out


class BareNorms(nn.Module):
    """GroupNorm without weights, and as a function: nothing tells a copy how many groups remain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.norm = nn.GroupNorm(4, 16, affine=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x)).relu()
        x = F.group_norm(self.conv2(x), 4).relu()
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class TrainingHead(nn.Module):
    """A second head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.helper = nn.Linear(6, 16), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        out: Tensor = self.head(h)
        return out + 0.3 * self.helper(h) if self.training else out


class TiedAutoencoder(nn.Module):
    """One weight there and back: both of its dimensions are produced."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(8, 16, bias=False)
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.code(self.stem(x).relu()).relu()
        out: Tensor = self.head(F.linear(hidden, self.code.weight.t()).relu())
        return out


class Squeezed(nn.Module):
    """squeeze() without a dimension: at width one it takes the channels too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).relu().mean((2, 3), keepdim=True).squeeze())
        return out


class HeadSize(nn.Module):
    """Attention split by the size of a head, as in Llama: fewer channels would make fewer heads."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.embed = 4, nn.Linear(5, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.size)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2)
        out: Tensor = self.head(y.reshape(batch, length, -1)).mean(1)
        return out


class ShuffleBySize(nn.Module):
    """Channels shuffled in fours, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        batch, channels, height, width = x.shape
        x = x.view(batch, channels // 4, 4, height, width).transpose(1, 2).flatten(1, 2)
        out: Tensor = self.head(self.b(x).relu().mean((2, 3)))
        return out


class PartsByNumber(nn.Module):
    """InceptionNeXt and Res2Net: unequal parts of the channels take ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [6, 4, 6]
        self.stem, self.small = nn.Conv2d(3, 16, 3), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.wide, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        same, small, wide = torch.split(self.stem(x).relu(), self.parts, dim=1)
        x = torch.cat([same, self.small(small), self.wide(wide)], dim=1)
        return self.head(x.relu().mean((2, 3)))


class HalvesShuffled(nn.Module):
    """ShuffleNetV2: one half of the channels passes by, then both are shuffled."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        for block in self.blocks:
            passed, used = x.chunk(2, dim=1)
            x = torch.cat([passed, block(used).relu()], dim=1)
            x = x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return self.head(x.mean((2, 3)))


class StandardisedConv(nn.Conv2d):
    """A convolution whose weight is normalised per filter, seen as a matrix (NFNet, BiT)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, training=True)
        return F.conv2d(input, rows.reshape_as(self.weight), self.bias, padding=self.padding)


class SqueezeExcite(nn.Module):
    """MobileNetV3: hard activations in place, channels weighed by a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = StandardisedConv(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.act = nn.Hardswish(inplace=True)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.conv, self.head = StandardisedConv(16, 12, 3), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.norm(self.stem(x)))
        weights = self.squeeze(F.adaptive_avg_pool2d(x, 1)).relu()
        x = x * F.hardsigmoid(self.excite(weights))
        return self.head(self.conv(x).relu().mean((2, 3)))


class InputsFirst(nn.Module):
    """GPT-2's Conv1D: a linear layer whose weight is (inputs, outputs), its size an attribute."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view((*x.shape[:-1], self.outputs))


class CausalBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads, self.size = width, heads, width // heads
        self.norm, self.qkv = nn.LayerNorm(width), InputsFirst(width, 3 * width)
        self.out = InputsFirst(width, width)

    def forward(self, x: Tensor) -> Any:
        shape = (*x.shape[:2], -1, self.size)
        parts = self.qkv(self.norm(x)).split(self.width, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(y.reshape(*x.shape[:2], -1).contiguous())


class Decoder(nn.Module):
    """GPT-2: equal blocks, a causal mask."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(CausalBlock(16, 2) for _ in range(blocks))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


class KeysAndValues(nn.Module):
    """LeViT: one layer for queries, keys and values of unequal sizes, split inside every head."""

    def __init__(self, heads: int = 2, key: int = 4, value: int = 8) -> None:
        super().__init__()
        self.heads, self.key, self.value = heads, key, value
        self.stem = nn.Linear(5, 12)
        self.qkv = nn.Linear(12, heads * (2 * key + value))
        self.bias = nn.Parameter(torch.randn(heads, 6, 6))
        self.out, self.head = nn.Linear(heads * value, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.heads, -1)
        q, k, v = heads.split([self.key, self.key, self.value], dim=3)
        scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) + self.bias
        seen = scores.softmax(-1) @ v.permute(0, 2, 1, 3)
        seen = seen.transpose(1, 2).reshape(batch, length, self.heads * self.value)
        return self.head(F.hardswish(x + self.out(seen))).mean(1)


class Windows(nn.Module):
    """Swin: attention inside shifted windows with a learned bias, then patches are merged."""

    def __init__(self, width: int = 12, heads: int = 2, window: int = 2) -> None:
        super().__init__()
        self.width, self.heads, self.window = width, heads, window
        self.stem, self.norm = nn.Conv2d(3, width, 2, 2), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, window**2, window**2))
        self.merge, self.head = nn.Linear(4 * width, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1))
        batch, height, _, _ = x.shape
        size, count = self.window, height // self.window
        parts = torch.roll(x, (1, 1), (1, 2)).view(batch, count, size, count, size, self.width)
        parts = parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, self.width)
        shape = (len(parts), size * size, 3, self.heads, self.width // self.heads)
        q, k, v = self.qkv(parts).reshape(shape).permute(2, 0, 3, 1, 4)
        seen = (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v
        parts = self.out(seen.transpose(1, 2).reshape(-1, size * size, self.width))
        y = parts.view(batch, count, count, size, size, self.width)
        x = x + torch.roll(y.permute(0, 1, 3, 2, 4, 5).reshape(x.shape), (-1, -1), (1, 2))
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=-1)
        return self.head(self.merge(x).relu().mean((1, 2)))


class SelectiveKernels(nn.Module):
    """SKNet: two branches weighed against each other, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.width = nn.Conv2d(3, 12, 3), 12
        self.paths = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=p, dilation=p) for p in (1, 2))
        self.reduce, self.select = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 24, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        paths = torch.stack([path(x) for path in self.paths], dim=1)
        weights = self.select(self.reduce(paths.sum(1).mean((2, 3), keepdim=True)).relu())
        weights = weights.view(len(x), 2, self.width, 1, 1).softmax(dim=1)
        return self.head((paths * weights).sum(1).mean((2, 3)))


class CrossCovariance(nn.Module):
    """XCiT: attention between the channels of a head instead of between tokens."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.embed, self.qkv = nn.Linear(5, width), nn.Linear(width, 3 * width)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        batch, length, _ = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, self.width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 4, 1).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        seen = (scores * self.temperature).softmax(-1) @ v
        seen = seen.permute(0, 3, 1, 2).reshape(batch, length, self.width)
        return self.head(x + self.out(seen)).mean(1)


@dataclass(frozen=True)
class Case:
    """An architecture, an input for it, and whether a cut equals the masked full model.

    It does not where a norm or softmax runs over the cut dimension, or where a masked channel is
    not silent (sigmoid(0) is not 0).
    """

    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    masked_equal: bool = True


def vectors(batch: int) -> Tensor:
    return torch.randn(batch, 6)


def sequences(batch: int) -> Tensor:
    return torch.randn(batch, 6, 5)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


def _ours(name: str, example: Callable[[int], Tensor], *, masked_equal: bool = True) -> Case:
    """One of the package's models, on an input small enough for float64."""
    return Case(models.load(name).build, example, masked_equal)


ZOO: dict[str, Case] = {
    "cnn": _ours("cnn", models.load("cnn").example),
    "vgg9": _ours("vgg9", models.load("vgg9").example),
    "resnet18": _ours("resnet18", images),
    "resnet18_gn": _ours("resnet18_gn", images),
    "mobilenet": _ours("mobilenet", images),
    "vit": _ours("vit", models.load("vit").example, masked_equal=False),
    "lstm": _ours("lstm", lambda batch: torch.randint(80, (batch, 9))),
    "unet": Case(UNet, images),
    "concat_grouped_squeeze": Case(ConcatGroupedSqueeze, images),
    "glu": Case(Glu, vectors),
    "channel_shuffle": Case(ChannelShuffle, images),
    "shared_conv": Case(SharedConv, images),
    "gru": Case(Gru, sequences),
    "bilstm": Case(BiLstm, sequences),
    "convnext": Case(ConvNextBlock, images, masked_equal=False),
    "mixer": Case(Mixer, images, masked_equal=False),
    "rope": Case(RopeAttention, sequences, masked_equal=False),
    "tied_embedding": Case(TiedEmbedding, lambda batch: torch.randint(20, (batch, 6))),
    "encoder_layer": Case(EncoderLayer, sequences, masked_equal=False),
    "in_place": Case(InPlace, vectors),
    "data_dependent": Case(DataDependent, vectors),
    "literal_view": Case(LiteralView, lambda batch: torch.randn(batch, 1, 8, 8)),
    "literal_heads": Case(LiteralHeads, sequences, masked_equal=False),
    "einsum": Case(Einsum, vectors),
    "group_norms": Case(GroupNorms, images, masked_equal=False),
    "resnext": Case(ResNeXt, images),
    "pixel_shuffle": Case(PixelShuffle, images),
    "cumulative": Case(Cumulative, vectors),
    "gate": Case(Gate, vectors),
    "literal_slice": Case(LiteralSlice, vectors, masked_equal=False),
    "relative_attention": Case(RelativeAttention, sequences, masked_equal=False),
    "bare_norms": Case(BareNorms, images, masked_equal=False),
    "training_head": Case(TrainingHead, vectors),
    "tied_autoencoder": Case(TiedAutoencoder, vectors),
    "squeezed": Case(Squeezed, images),
    "head_size": Case(HeadSize, sequences),
    "shuffle_by_size": Case(ShuffleBySize, images),
    "parts_by_number": Case(PartsByNumber, images),
    "halves_shuffled": Case(HalvesShuffled, images),
    "squeeze_excite": Case(SqueezeExcite, images, masked_equal=False),
    "decoder": Case(Decoder, sequences, masked_equal=False),
    "keys_and_values": Case(KeysAndValues, sequences),
    "windows": Case(Windows, images, masked_equal=False),
    "selective_kernels": Case(SelectiveKernels, images),
    "cross_covariance": Case(CrossCovariance, sequences, masked_equal=False),
}
