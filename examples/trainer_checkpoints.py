"""transformers.Trainer whose checkpoints are Stoker's: kill it and start it again.

python examples/trainer_checkpoints.py OUT [--steps 20]
stoker ckpt ls OUT/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stoker
from stoker.integrations.trainer_checkpoints import Saver


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    samples = [{"input_ids": each, "labels": each} for each in torch.randint(0, 128, (64, 16))]
    with stoker.Checkpoints(args.out / "run", keep=2, every=5, staging="64MiB") as ckpt:
        trainer = Trainer(
            LlamaForCausalLM(config),
            TrainingArguments(
                output_dir=str(args.out / "trainer"),
                max_steps=args.steps,
                per_device_train_batch_size=4,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=samples,
        )
        saver = Saver(trainer, ckpt)
        trainer.train(resume_from_checkpoint=saver.newest())
    print(f"ends at step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
