"""transformers.Trainer over a model whose weights and optimizer state lie on disk: one line more
than without.

    python examples/trainer.py OUT [--text FILE ...] [--steps 40] [--dram 12MiB]

Trains a small Llama on the bytes of some text (by default this repository's pages), saves a
checkpoint every five steps, and leaves the model in OUT/model, which `from_pretrained` loads. Kill
it and run it again: it goes on from the last checkpoint, with the same bits. Needs transformers and
accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from stoker.integrations import huggingface
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

WINDOW = 64  # bytes a sample


class Windows(torch.utils.data.Dataset):
    """Text as windows of bytes; a byte is a token."""

    def __init__(self, files: list[Path]) -> None:
        self.bytes = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))

    def __len__(self) -> int:
        return len(self.bytes) // WINDOW

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.bytes[index * WINDOW : (index + 1) * WINDOW]
        return {"input_ids": window, "labels": window}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument(
        "--text",
        type=Path,
        nargs="*",
        default=sorted(Path(__file__).parent.parent.glob("docs/**/*.md")),
    )
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--dram", default="12MiB")
    given = options.parse_args()

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    data = Windows(given.text)
    arguments = TrainingArguments(
        output_dir=str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=5,
        save_steps=5,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=20,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(16))
    )

    opt = huggingface.offload(trainer, store=given.out / "store", dram=given.dram)  # the one line

    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out))
    trainer.save_model(str(given.out / "model"))
    prompt = torch.tensor([list(b"The store ")])
    told = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        pad_token_id=0,
    )
    print("it says:", repr(bytes(told[0].tolist()).decode(errors="replace")))
    print(
        "steps:",
        opt.step_count,
        "bytes moved a step:",
        {
            kind: sum(opt.ledger.summary()[kind].values()) // max(1, opt.ledger.summary()["steps"])
            for kind in ("read_bytes", "written_bytes")
        },
    )
    opt.close()


if __name__ == "__main__":
    main()
