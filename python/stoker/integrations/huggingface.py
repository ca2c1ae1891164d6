"""transformers.Trainer and accelerate, in one line:

- `offload(trainer, store=..., dram=...)`
- `connect(trainer)`, where the model was offloaded before (it does not fit anywhere else)
- `follow(optimizer, accelerator)`, for a loop of your own.

Nothing in here is needed for exactness: an offloaded optimizer is a torch.optim.Optimizer. What it
adds is what the optimizer cannot know:

- which backward is a step's last
- above which norm gradients will be clipped
- when a checkpoint was saved that one may want to return to (the checkpoint holds references; the
  store keeps the step they name)
- for the ledger: when batches are waited for, when a checkpoint is written, what was an evaluation.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback

import stoker
from stoker.errors import InvalidArgument
from stoker.offload.run.optimizer import OffloadedOptimizer

OPTIMIZER_FILE = "optimizer.pt"


def offload(
    trainer: Trainer, *, store: str | os.PathLike, dram: int | str, **options: Any
) -> OffloadedOptimizer:
    """Moves the weights and optimizer state of a Trainer into `store`; call it between Trainer(...)
    and trainer.train().

    The optimizer is the one that the Trainer was given, or else makes from its arguments.
    `options`: those of stoker.offload(). By default a run that the store holds is resumed, and the
    steps of the newest two checkpoints are kept (snapshots=2: the one being written and the whole
    one before it), so that trainer.train(resume_from_checkpoint=True) goes on from there with the
    same bits.

    InvalidArgument says what of the Trainer's arguments does not go with it.
    """
    _check(trainer)
    if isinstance(_plain(trainer.optimizer), OffloadedOptimizer):
        raise InvalidArgument(
            "this Trainer's optimizer is offloaded already; call connect(trainer) only"
        )
    args = trainer.args
    saves = (
        str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        and not args.save_only_model
    )
    options = {"resume": "auto", "snapshots": 2 if saves else 0, **options}
    made_here = trainer.optimizer is None
    if made_here:
        trainer.create_optimizer()
    try:
        _, optimizer = stoker.offload(
            trainer.model, trainer.optimizer, store=store, dram=dram, **options
        )
    except BaseException:
        if made_here:
            trainer.optimizer = None  # a second try must find the Trainer as it was
        raise
    trainer.optimizer = optimizer
    connect(trainer)
    return optimizer


def connect(trainer: Trainer) -> None:
    """For Trainer(model, optimizers=(optimizer, None)) with what stoker.offload() returned."""
    _check(trainer)
    optimizer = _plain(trainer.optimizer)
    if not isinstance(optimizer, OffloadedOptimizer):
        raise InvalidArgument(
            "this Trainer's optimizer is not offloaded; call offload(trainer, store=..., dram=...),"
            " or pass optimizers=(optimizer, None) with what stoker.offload() returned"
        )
    if any(isinstance(callback, StokerCallback) for callback in trainer.callback_handler.callbacks):
        raise InvalidArgument(
            "this Trainer is connected to its offloaded optimizer already; connect it once"
        )
    # the Trainer may make another accelerator
    optimizer._session.gradients.sync = lambda: trainer.accelerator.sync_gradients
    trainer.add_callback(StokerCallback(optimizer))
    trainer.get_batch_samples = functools.partial(
        _waited, optimizer, "data", trainer.get_batch_samples
    )
    trainer._save_checkpoint = functools.partial(
        _waited, optimizer, "checkpoint", trainer._save_checkpoint
    )
    trainer.evaluate = functools.partial(_apart, optimizer, trainer.evaluate)
    trainer.predict = functools.partial(_apart, optimizer, trainer.predict)
    trainer._load_from_checkpoint = functools.partial(
        _load_from_checkpoint, optimizer, trainer._load_from_checkpoint
    )


def follow(optimizer: OffloadedOptimizer, accelerator: Accelerator) -> None:
    """For a loop of one's own: `accelerator.accumulate(model)` then tells which backward is a
    step's last, and accelerator.save_state() keeps the step where the store has room for it
    (stoker.offload(snapshots=...)).
    """
    if accelerator.num_processes > 1:
        raise InvalidArgument(
            "an Accelerator of several processes copies gradients between them, which offloading "
            "does not support; start one process"
        )
    optimizer._session.gradients.sync = lambda: accelerator.sync_gradients
    if optimizer._session.snapshots.keep:
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: optimizer.snapshot()
        )


def _check(trainer: Trainer) -> None:
    args = trainer.args
    wrong = {
        "model_init": (
            trainer.model_init is not None,
            "makes the model again in train(); pass model= instead",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "begins again after steps were made; choose a batch size",
        ),
        "deepspeed": (trainer.is_deepspeed_enabled, "offloads on its own; leave it out"),
        "fsdp": (trainer.is_fsdp_enabled, "replaces the parameters; leave it out"),
        "torch_compile": (
            args.torch_compile,
            (
                "compiles the whole model, which offloading cuts apart; call compile() of each"
                " layer before the Trainer is offloaded"
            ),
        ),
        "a Trainer of several processes": (
            args.world_size > 1,
            "copies gradients between them, which offloading does not support; start one process",
        ),
        "several GPUs in one process": (
            args.n_gpu > 1,
            "would copy the model to each; show one with CUDA_VISIBLE_DEVICES",
        ),
    }
    for name, (found, why) in wrong.items():
        if found:
            raise InvalidArgument(f"{name} does not work with an offloaded Trainer: it {why}")


def _plain(optimizer: Any) -> Any:
    """What accelerate wraps in train()."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _waited(optimizer: OffloadedOptimizer, cause: str, run, *args: Any, **kwargs: Any) -> Any:
    """Around what the Trainer draws a step's batches from its loader with, and what it writes a
    checkpoint with."""
    with optimizer.ledger.waiting(cause):
        return run(*args, **kwargs)


def _apart(optimizer: OffloadedOptimizer, run, *args: Any, **kwargs: Any) -> Any:
    """Around the Trainer's evaluate() and predict(), their loaders included: the ledger keeps no
    row of it, also where it raises."""
    with optimizer._session.apart():
        return run(*args, **kwargs)


def _load_from_checkpoint(
    optimizer: OffloadedOptimizer, load, checkpoint: str, *args: Any, **kwargs: Any
) -> None:
    """In place of the Trainer's: the run goes to the step of the checkpoint first, or is left as it
    is where it cannot. The Trainer would write the weights over those of another step before it
    looks at what else the checkpoint holds.
    """
    file = os.path.join(checkpoint, OPTIMIZER_FILE)
    state = (
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if os.path.isfile(file)
        else None
    )
    if state is not None and "stoker" in state:
        optimizer.load_state_dict(state)
    elif optimizer.step_count:
        what = (
            "of an optimizer that was not offloaded"
            if state is not None
            else "without the state of an optimizer"
        )
        raise InvalidArgument(
            f"{checkpoint} is a checkpoint {what}, but the store holds a run at step"
            f" {optimizer.step_count}; give a new store to start from it"
        )
    load(checkpoint, *args, **kwargs)


class StokerCallback(TrainerCallback):
    """Keeps the run in the store and the Trainer at the same step. `offload` adds it."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self._begun = False

    def on_train_begin(self, args, state, control, **_) -> None:
        at = self._optimizer.step_count
        if at and state.global_step == 0 and not self._begun:
            raise InvalidArgument(
                f"the store holds a run at step {at}, but the Trainer starts at step 0. Pass "
                f"resume_from_checkpoint=True to trainer.train() to continue that run, or give "
                f"another store for a new one"
            )
        self._begun = True

    def on_step_begin(self, args, state, control, **_) -> None:
        if args.max_grad_norm and not args.fp16:
            self._optimizer._session.steps.clips(args.max_grad_norm)

    def on_step_end(self, args, state, control, **_) -> None:
        if control.should_save and self._keeps(args):
            # before there is a checkpoint that names the step: a crash in between leaves none
            # without it
            self._optimizer.snapshot()

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **_) -> None:
        if not self._keeps(args):
            return
        for step in self._optimizer.snapshots:
            if not os.path.isdir(os.path.join(args.output_dir, f"checkpoint-{step}")):
                self._optimizer.drop_snapshot(step)
        if self._optimizer.step_count not in self._optimizer.snapshots:
            self._optimizer.snapshot()

    def _keeps(self, args) -> bool:
        return self._optimizer._session.snapshots.keep > 0 and not args.save_only_model

    def on_train_end(self, args, state, control, **_) -> None:
        self._optimizer.flush()
