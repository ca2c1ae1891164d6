"""Small models for tests: deep enough to page, quick enough to run hundreds of steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, WINDOW = 96, 64, 16


class Block(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    """A language model of `layers` blocks. `segments`: how many blocks one checkpointed segment
    holds (0: none)."""

    def __init__(
        self,
        layers: int = 6,
        tied: bool = False,
        segments: int = 0,
        reentrant: bool = False,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.segments, self.reentrant = segments, reentrant
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(tokens)
        if self.segments and self.training:
            for start in range(0, len(self.layers), self.segments):
                part = self.layers[start : start + self.segments]
                x = checkpoint(lambda y, part=part: _run(part, y), x, use_reentrant=self.reentrant)
        else:
            x = _run(self.layers, x)
        return self.head(self.norm(x))


class Skips(Tiny):
    """Runs only some of its layers: those that `skip` does not name."""

    skip: set[int] = set()

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index not in self.skip:
                x = layer(x)
        return self.head(self.norm(x))


def _run(layers, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def batch(step: int, micro: int = 0, size: int = 2) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * step + micro)
    tokens = torch.randint(0, VOCABULARY, (size, WINDOW + 1), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
