"""LoRA: adapters train, the base model stays on disk and is only read; optimizer state exists for
the adapters alone.

    python examples/lora.py MODEL OUT [--text FILE ...] [--steps 20] [--dram 8MiB]

MODEL: a local folder with a causal language model in safetensors whose tokens are bytes, as
examples/trainer.py leaves one in its OUT/model. The adapter goes to OUT/adapter, the merged model
to OUT/merged. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import stoker

WINDOW = 64


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument(
        "--text", type=Path, nargs="*", default=[Path(__file__).parent.parent / "README.md"]
    )
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--dram", default="8MiB")
    given = options.parse_args()

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(given.model),
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj", "up_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    # all of them: those that are frozen are known by requires_grad
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, opt = stoker.offload(model, opt, store=given.out / "store", dram=given.dram)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    print(f"{trained} of {sum(param.numel() for param in model.parameters())} parameters train")

    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in given.text)))
    windows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    for step in range(given.steps):
        batch = windows[torch.randint(0, len(windows), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}")

    opt.flush()
    totals = opt.ledger.summary()
    print(
        f"written a step: {sum(totals['written_bytes'].values()) // max(1, totals['steps'])} bytes"
    )
    model.save_pretrained(given.out / "adapter")
    with stoker.gather(model.parameters()):  # in here the weights are ordinary tensors in memory
        model.merge_adapter()
        merged = {
            name.replace("base_layer.", ""): value
            for name, value in model.get_base_model().state_dict().items()
            if "lora_" not in name
        }
        model.unmerge_adapter()
    AutoModelForCausalLM.from_pretrained(given.model).save_pretrained(
        given.out / "merged", state_dict=merged
    )
    opt.close()


if __name__ == "__main__":
    main()
