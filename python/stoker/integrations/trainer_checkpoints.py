"""transformers.Trainer whose checkpoints stoker.Checkpoints saves, beside training.

ckpt = stoker.Checkpoints("/nvme0/run", keep=3, every="auto")
trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), ...)
saver = Saver(trainer, ckpt)
trainer.train(resume_from_checkpoint=saver.newest())
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from stoker.checkpoint import Checkpoints
from stoker.checkpoint.manifest import Name
from stoker.errors import InvalidArgument, NotFound
from stoker.offload.run.optimizer import OffloadedOptimizer

STATE = "trainer_state.json"  # the Trainer looks for it in what it resumes from


class Saver(TrainerCallback):
    """Saves after each step for which one is due (`every=` of the checkpoints): model, optimizer,
    schedule, random states, and the Trainer's own state. `trainer.train()` then goes on from
    `newest()` with the same bits.

    The Trainer must be one process, and not offloaded: an offloaded one keeps its steps in its
    store (stoker.integrations.huggingface).
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        if trainer.args.world_size > 1:
            raise InvalidArgument("Saver saves a Trainer of one process; start one")
        if any(isinstance(each, Saver) for each in trainer.callback_handler.callbacks):
            raise InvalidArgument("this Trainer has a Saver already; add one only")
        self._trainer, self._checkpoints = trainer, checkpoints
        self._resumed = tempfile.TemporaryDirectory(prefix="stoker-trainer-")
        self._saved: int | None = None  # the step
        trainer.add_callback(self)
        # behind it, the Trainer's state holds what was logged and evaluated at the step
        self._log = trainer._maybe_log_save_evaluate
        trainer._maybe_log_save_evaluate = self._log_and_save
        for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
            setattr(trainer, name, _Load(getattr(self, name), getattr(trainer, name)))

    def newest(self) -> str | None:
        """For trainer.train(resume_from_checkpoint=): the newest checkpoint that verifies, or None
        where there is none. Only the Trainer's state is read now."""
        for reader in self._checkpoints.readers():
            if all(file.name != STATE for file in reader.manifest.files):
                raise NotFound(
                    f"{reader.where} was not saved by a Saver: it has no {STATE}; restore it by"
                    " stoker.Checkpoints.restore()"
                )
            folder = Path(self._resumed.name) / str(reader.manifest.name)
            folder.mkdir(exist_ok=True)
            (folder / STATE).write_bytes(reader.bytes_of(STATE))
            return str(folder)
        return None

    # -- what the Trainer calls ------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(_plain(self._trainer.optimizer), OffloadedOptimizer):
            raise InvalidArgument(
                "the store of an offloaded Trainer keeps its steps already; use "
                "stoker.integrations.huggingface without a Saver"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._checkpoints.wait()

    def _log_and_save(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        result = self._log(*args, **kwargs)
        # an epoch's end calls it once more
        if (step := trainer.state.global_step) != self._saved:
            self._saved = step
            self._checkpoints.save(
                step,
                model=trainer.model,
                optimizer=_plain(trainer.optimizer),
                extra={"schedule": trainer.lr_scheduler},
                files={STATE: self._state(trainer.state)},
            )
        return result

    def _state(self, state: Any) -> bytes:
        """What the Trainer would write."""
        state = copy.deepcopy(state)
        handler = self._trainer.callback_handler
        for each in [*handler.callbacks, self._trainer.control]:
            if isinstance(each, ExportableState):
                name, said = type(each).__name__, each.state()
                if isinstance(state.stateful_callbacks.get(name), list):
                    state.stateful_callbacks[name].append(said)
                else:
                    state.stateful_callbacks[name] = said
        return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True).encode()

    # -- in place of the Trainer's, for a folder that newest() gave ------------------------------

    def _load_from_checkpoint(self, step: int, model: Any = None) -> None:
        self._checkpoints.restore(model=self._trainer.model, step=step)

    def _load_optimizer_and_scheduler(self, step: int) -> None:
        trainer = self._trainer
        self._checkpoints.restore(
            optimizer=_plain(trainer.optimizer),
            extra={"schedule": trainer.lr_scheduler},
            step=step,
        )

    def _load_rng_state(self, step: int) -> None:
        self._checkpoints.restore(step=step)


class _Load:
    """Loads from the checkpoint where newest() gave the folder, else as ever."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs

    def __call__(self, folder: str | None, *args: Any, **kwargs: Any) -> Any:
        name = Name.of(os.path.basename(folder)) if folder else None
        if name is None:
            return self._theirs(folder, *args, **kwargs)
        return self._ours(name.step, *args, **kwargs)


def _plain(optimizer: Any) -> Any:
    """What accelerate wraps in train()."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


__all__ = ["Saver"]
