"""The GPT-2-like model that benchmarks train, and its loss on made-up tokens. Needs torch alone:
bench/peers runs it beside other systems."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

TOKENS = 64


class Layer(nn.Module):
    """A GPT-2-like block: pre-norm attention and a feed-forward of four widths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def step_loss(model: nn.Module, step: int, vocabulary: int, tokens: int = TOKENS) -> torch.Tensor:
    drawn = torch.randint(
        0, vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(step)
    )
    return F.cross_entropy(model(drawn[:, :-1]).flatten(0, 1).float(), drawn[:, 1:].flatten())
