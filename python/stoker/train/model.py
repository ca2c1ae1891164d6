"""A small decoder whose weights are, name by name, those of transformers' LlamaForCausalLM.

RMSNorm before attention and before a SwiGLU feed-forward, rotary positions, no biases. Needs torch
only; the export (export.py) writes the same names and a config, so transformers computes the same
logits.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. hidden is a multiple of 2 * heads; initial_std is the spread of the
    new weights."""

    vocabulary: int
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    feed_forward: int = 1408
    window: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initial_std: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean of squares in float32 as Llama does it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden, dtype=dtype))
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary(length: int, config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary positions, each [length, head_dim], in the type and place of
    `like`."""
    half = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=like.device)
        / config.head_dim
    )
    angles = torch.outer(
        torch.arange(length, dtype=torch.float32, device=like.device), config.rope_theta**-half
    )
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, length, head_dim] turned by its positions."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(config.hidden, config.hidden, bias=False, dtype=dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Written out: at windows of a few hundred tokens this is about twice as fast on a CPU as
        # torch's fused one.
        scores = rotate(q, cos, sin) * q.shape[-1] ** -0.5 @ rotate(k, cos, sin).transpose(-1, -2)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.feed_forward, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(config.hidden, config.feed_forward, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(config.feed_forward, config.hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config, dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks, last norm: everything but the head (the part transformers calls
    `model`)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.layers))
        self.norm = RMSNorm(config, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.config, x)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.norm(x)


class Model(nn.Module):
    """The language model. tokens int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dtype)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def initialise(model: Model) -> None:
    """Draw the weights: normal; what writes into the residual stream is scaled down by the
    depth."""
    std = model.config.initial_std
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            shrink = (
                (2 * model.config.layers) ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight"))
                else 1.0
            )
            nn.init.normal_(parameter, std=std * shrink)


def compute_seconds(
    config: ModelConfig, dtype: torch.dtype, batch: int, device: torch.device
) -> float:
    """Forward and backward of a step with nothing beside them: one block is timed for all, and the
    head with the loss. In about two seconds: where they are slow, a part of the batch is timed."""
    block, head = (
        Block(config, dtype).to(device),
        nn.Linear(config.hidden, config.vocabulary, bias=False, dtype=dtype, device=device),
    )
    x = torch.randn(
        batch, config.window, config.hidden, dtype=dtype, device=device, requires_grad=True
    )
    cos, sin = rotary(config.window, config, x)
    targets = torch.zeros(batch * config.window, dtype=torch.int64, device=device)

    def layer(part: int) -> None:
        block(x[:part], cos, sin).backward(x[:part])

    def ends(part: int) -> None:
        F.cross_entropy(
            head(x[:part]).flatten(0, 1).float(), targets[: part * config.window]
        ).backward()

    return config.layers * _seconds(layer, batch, device) + _seconds(ends, batch, device)


def _seconds(
    run: Callable[[int], object], batch: int, device: torch.device, bound: float = 1.0
) -> float:
    """Of run(batch), from as large a part of the batch as `bound` seconds allow. The first call
    does not count. In the one before that a GPU may start."""
    run(1)
    begun, part, took = time.perf_counter(), 1, []
    while True:
        started = time.perf_counter()
        run(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if part == batch:
            took.append(now - started)
        if len(took) == 4:
            return statistics.median(took[1:])
        if now - begun + (now - started) * min(4, batch / part) > bound:
            return min(took, default=(now - started) * batch / part)
        part = min(batch, 4 * part)


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all targets of windows int64 [batch, window + 1], computed in
    float32."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
