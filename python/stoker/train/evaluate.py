"""Held-out loss, the entropy it is compared with, and a sampled continuation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from tokenizers import Tokenizer

from ..data import Windows
from .model import next_token_loss


def chosen_windows(heldout: Windows, most: int) -> list[int]:
    """At most `most` windows, evenly spread over the held-out split."""
    count = min(most, len(heldout))
    return [i * len(heldout) // count for i in range(count)]


def unigram_entropy(heldout: Windows, chosen: list[int]) -> float:
    """Entropy in nats of the token frequencies of the targets of these windows.

    It is the loss of the best predictor that knows these very frequencies but no context: a model
    that only learned how common each token is cannot get below it.
    """
    counts = np.bincount(np.concatenate([heldout[i][1:] for i in chosen]))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


@torch.no_grad()
def heldout_loss(
    model: nn.Module,
    heldout: Windows,
    chosen: list[int],
    batch: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
) -> float:
    """Mean loss in nats a token over the chosen windows. Leaves the model in the mode in which it
    was."""
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(chosen), batch):
        windows = np.stack([heldout[i] for i in chosen[start : start + batch]])
        total += next_token_loss(model, torch.from_numpy(windows).to(device)).item() * len(windows)
        progress(len(windows))
    model.train(was_training)
    return total / len(chosen)


@torch.no_grad()
def continuation(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    window: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
    top: int = 40,
) -> str:
    """`count` tokens drawn after `prompt`, each from the `top` likeliest. Its own generator: the
    run's RNG is left alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    begin = len(tokens)
    was_training = model.training
    model.eval()
    for _ in range(count):
        logits = (
            model(torch.tensor([tokens[-window:]], device=device))[0, -1].float().cpu()
            / temperature
        )
        best, index = logits.topk(min(top, len(logits)))
        tokens.append(index[torch.multinomial(best.softmax(-1), 1, generator=generator)].item())
    model.train(was_training)
    return tokenizer.decode(tokens[begin:], skip_special_tokens=False)
