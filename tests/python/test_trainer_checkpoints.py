"""transformers.Trainer goes on from what stoker.Checkpoints saved of it, with the same bits."""

from __future__ import annotations

import pytest
import torch

import stoker
from stoker import errors

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from stoker.integrations.trainer_checkpoints import Saver  # noqa: E402
from test_huggingface import arguments, history, llama, trainer_of  # noqa: E402
from transformers import TrainerCallback  # noqa: E402


class Stop(TrainerCallback):
    """The power goes after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def run(tmp_path, checkpoints, **options):
    trainer = trainer_of(llama(), arguments(tmp_path / "out", max_steps=8), **options)
    saver = Saver(trainer, checkpoints)
    trainer.train(resume_from_checkpoint=saver.newest())
    return trainer


@pytest.mark.parametrize("stop", [3, 6])  # in the first epoch, and in the second
def test_a_trainer_goes_on_with_the_same_bits(tmp_path, stop):
    whole = trainer_of(llama(), arguments(tmp_path / "whole", max_steps=8))
    whole.train()
    store = tmp_path / "run"
    with stoker.Checkpoints(store, keep=2, staging="16MiB") as ckpt:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, ckpt, callbacks=[Stop(stop)])
        ckpt.wait()
        torch.manual_seed(99)
        again = run(tmp_path, ckpt)
    assert history(again) == history(whole)
    expected = whole.model.state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert len(list(store.glob("step-*"))) == 2
    (newest,) = store.glob("step-000008-*")
    assert torch.equal(
        type(again.model).from_pretrained(newest).state_dict()["model.norm.weight"],
        expected["model.norm.weight"],
    )


def test_what_it_cannot_do_is_refused(tmp_path):
    trainer = trainer_of(llama(), arguments(tmp_path / "out", max_steps=1))
    with stoker.Checkpoints(tmp_path / "run", staging="16MiB") as ckpt:
        ckpt.save(1, model=torch.nn.Linear(2, 2)).wait()
        saver = Saver(trainer, ckpt)
        with pytest.raises(errors.NotFound, match="was not saved by a Saver"):
            saver.newest()
        with pytest.raises(errors.InvalidArgument, match="has a Saver already"):
            Saver(trainer, ckpt)
