"""transformers.Trainer and accelerate drive an offloaded model as they drive any other, and give
the same bits."""

from __future__ import annotations

import gc
import os
import sys
import types

import pytest
import torch

import reference
import stoker
from stoker import errors
from stoker.offload.observe.ledger import Ledger

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from stoker.integrations import huggingface  # noqa: E402
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # noqa: E402

# 37 samples by 2 by 4: the last step of an epoch has fewer micro-batches
VOCABULARY, SAMPLES = 96, 37


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        tokens = torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, attention_dropout=0.1, **shape)
    ).to(dtype)


def arguments(folder, **changed) -> TrainingArguments:
    options = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **changed,
    }
    return TrainingArguments(output_dir=str(folder), **options)


def trainer_of(model, args, callbacks=None, kind=Trainer, **options) -> Trainer:
    return kind(
        model,
        args,
        train_dataset=Samples(),
        eval_dataset=Samples(6),
        callbacks=callbacks,
        **options,
    )


def history(trainer: Trainer) -> list[tuple]:
    """What each step and each evaluation saw."""
    return [
        (
            row["step"],
            row.get("loss", row.get("eval_loss")),
            row.get("grad_norm"),
            row.get("learning_rate"),
        )
        for row in trainer.state.log_history
        if "train_runtime" not in row
    ]


def control_of(model, args, **options) -> Trainer:
    """The un-offloaded Trainer with the same kernels."""
    trainer = trainer_of(model, args, **options)
    trainer.create_optimizer()
    trainer.optimizer = reference.ReferenceOptimizer(trainer.optimizer)
    return trainer


def same_weights(ours, theirs) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name


@pytest.fixture
def offload(tmp_path):
    """huggingface.offload() into a store of the test's own; closed at the end."""
    opened = []

    def start(trainer, path="store", **options):
        options = {"store": tmp_path / path, "dram": "8MiB", "policy": "speculate", **options}
        opened.append(huggingface.offload(trainer, **options))
        return opened[-1]

    yield start
    for optimizer in opened:
        optimizer.close()
    gc.collect()


class StopAt(TrainerCallback):
    """As a kill would: in the middle of training, with nothing said to anybody."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


# -- the Trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 1e9}, {"bf16": True}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_trainer_gives_the_same_bits(offload, tmp_path, options):
    """Clipping that fires, accumulation with a short last step, evaluation in between, autocast,
    checkpointed blocks."""
    control = control_of(llama(), arguments(tmp_path / "control", **options))
    control.train()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options))
    opt = offload(trainer)
    trainer.train()
    assert history(trainer) == history(control)
    assert [row[0] for row in history(trainer)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10]
    same_weights(trainer.model, control.model)
    assert opt.step_count == opt.committed_step == 10
    ledger = opt.ledger.summary()
    assert ledger["steps"] == 10
    units = len([unit for block in opt._session.blocks for unit in block.updated_units])
    if options == {"max_grad_norm": 1e9}:  # each step knew its last backward, also the short ones
        assert (ledger["kept"], ledger["redone"]) == (10 * units, 0)
    assert trainer.evaluate()["eval_loss"] == control.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("dtype", "policy"), [(torch.float32, "speculate"), (torch.bfloat16, "lazy")]
)
def test_trainer_resumes_with_the_same_bits(offload, tmp_path, dtype, policy):
    """Stopped at step 7 with a checkpoint of step 6: the Trainer resumes at 6 as it always does,
    and so does the store."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    control = control_of(
        llama(dtype), arguments(tmp_path / "control", **saving, save_only_model=True)
    )
    control.train()
    trainer = trainer_of(llama(dtype), arguments(tmp_path / "ours", **saving), [StopAt(7)])
    opt = offload(trainer, policy=policy)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert opt.snapshots == [3, 6]
    size = os.path.getsize(tmp_path / "ours" / "checkpoint-6" / "optimizer.pt")
    assert size < 8192  # references
    opt.close()
    trainer = trainer_of(llama(dtype), arguments(tmp_path / "ours", **saving))
    opt = offload(trainer, policy=policy)
    assert opt.step_count == 7
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer) == history(control)
    same_weights(trainer.model, control.model)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-9", dtype=dtype)
    kept = LlamaForCausalLM.from_pretrained(tmp_path / "control" / "checkpoint-9", dtype=dtype)
    same_weights(again, kept)


def test_trainer_that_was_interrupted_goes_on_in_the_same_process(offload, tmp_path):
    """In the middle of a backward of step 5, with a checkpoint of step 3: what lay about is given
    up."""
    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    control = control_of(llama(), arguments(tmp_path / "control", **saving, save_only_model=True))
    control.train()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **saving))
    offload(trainer)
    layer, calls = trainer.model.model.layers[0], []

    def interrupt(grad):
        calls.append(None)
        if len(calls) == 18:  # four micro-batches a step
            raise KeyboardInterrupt

    handle = layer.register_forward_hook(
        lambda module, args, out: out.register_hook(interrupt) and None
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer)[-5:] == history(control)[-5:]
    same_weights(trainer.model, control.model)


def test_trainer_that_ended_with_a_checkpoint_goes_on(offload, tmp_path):
    """More epochs than last time: nothing has to go back, and nothing is written before the first
    step."""
    saving = {"save_strategy": "epoch", "lr_scheduler_type": "constant", "eval_strategy": "no"}
    control = control_of(
        llama(torch.bfloat16), arguments(tmp_path / "control", **saving, save_only_model=True)
    )
    control.train()
    trainer = trainer_of(
        llama(torch.bfloat16), arguments(tmp_path / "ours", **{**saving, "num_train_epochs": 1})
    )
    opt = offload(trainer)
    trainer.train()
    opt.close()
    trainer = trainer_of(llama(torch.bfloat16), arguments(tmp_path / "ours", **saving))
    opt = offload(trainer)
    version = opt._session.planes.store.info()["committed"]
    at_begin = []
    trainer.add_callback(
        AtBegin(lambda: at_begin.append(opt._session.planes.store.info()["committed"]))
    )
    trainer.train(resume_from_checkpoint=True)
    assert at_begin == [version]
    assert history(trainer)[-1] == history(control)[-1]
    same_weights(trainer.model, control.model)


class AtBegin(TrainerCallback):
    def __init__(self, call) -> None:
        self.call = call

    def on_train_begin(self, args, state, control, **_):
        self.call()


def test_checkpoints_are_rotated_and_the_best_is_loaded(offload, tmp_path):
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "save_total_limit": 2,
    }
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options))
    opt = offload(trainer, snapshots=3)  # of the best, the newest, and the one being written
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert trainer.state.best_global_step < 10
    same_weights(trainer.model, LlamaForCausalLM.from_pretrained(best))
    there = sorted(int(name.rpartition("-")[2]) for name in os.listdir(tmp_path / "ours"))
    assert opt.snapshots == there
    rows = [
        row["eval_loss"]
        for row in trainer.state.log_history
        if row.get("step") == trainer.state.best_global_step and "eval_loss" in row
    ]
    assert trainer.evaluate()["eval_loss"] == rows[0]


def test_prediction_with_generate(offload, tmp_path):
    """An encoder and a decoder that share an embedding; generate() calls the encoder on its own."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )

    def make():
        torch.manual_seed(0)
        return transformers.BartForConditionalGeneration(config)

    options = {
        "predict_with_generate": True,
        "generation_max_length": 8,
        "num_train_epochs": 1,
        "eval_steps": 2,
    }

    def args(name):
        plain = {**arguments(tmp_path / name).to_dict(), **options}
        return transformers.Seq2SeqTrainingArguments(
            **{
                key: plain[key]
                for key in (
                    *options,
                    "output_dir",
                    "use_cpu",
                    "per_device_train_batch_size",
                    "gradient_accumulation_steps",
                    "learning_rate",
                    "logging_steps",
                    "eval_strategy",
                    "save_strategy",
                    "disable_tqdm",
                )
            },
            report_to=[],
        )

    control = control_of(make(), args("control"), kind=transformers.Seq2SeqTrainer)
    control.train()
    trainer = trainer_of(make(), args("ours"), kind=transformers.Seq2SeqTrainer)
    opt = offload(trainer)
    trainer.train()
    assert history(trainer) == history(control)
    theirs, ours = control.predict(Samples(5)), trainer.predict(Samples(5))
    assert (ours.predictions == theirs.predictions).all() and ours.predictions.shape[1] > 2
    assert ours.metrics["test_loss"] == theirs.metrics["test_loss"]
    assert opt.step_count == 5


def test_a_model_that_was_offloaded_before(tmp_path):
    """Made empty, its weights taken from a folder: it never was in memory, nor could the Trainer
    have moved it."""
    llama().save_pretrained(tmp_path / "weights")
    control = control_of(llama(), arguments(tmp_path / "control", weight_decay=0.0))
    control.train()
    with accelerate.init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "weights"))

    def offloaded():
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        return stoker.offload(
            model, opt, store=tmp_path / "store", dram="8MiB", weights=tmp_path / "weights"
        )

    with pytest.raises(
        errors.InvalidArgument,
        match=(
            r"has no tensor lm_head.weight, which the model needs; where it should be"
            r" tied.*tie_weights\(\)"
        ),
    ):
        offloaded()
    model.tie_weights()
    model, opt = offloaded()
    trainer = trainer_of(model, arguments(tmp_path / "ours"), optimizers=(opt, None))
    huggingface.connect(trainer)
    trainer.train()
    assert history(trainer) == history(control)
    same_weights(model, control.model)
    opt.close()


class EvictingAll(TrainerCallback):
    """Each step of an evaluation finds no weights in memory, as of a model that is far larger than
    memory."""

    def __init__(self) -> None:
        self.session, self.weights = None, 0

    def on_prediction_step(self, args, state, control, **_):
        for block in self.session.blocks:
            if not block.pinned:
                self.session.pager.discard(block)
        self.weights = self.session.counters()["read_bytes"]["weights"]


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_the_rows_of_the_ledger_have_no_evaluation_and_all_of_the_training(
    offload, tmp_path, policy
):
    options = {
        "per_device_eval_batch_size": 1,
        "max_grad_norm": 1e9,
        "eval_steps": 2,
        "num_train_epochs": 1,
    }
    evict = EvictingAll()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options), [evict])
    opt = offload(trainer, policy=policy)
    evict.session = opt._session
    rows = []
    opt.ledger.on_step(rows.append)
    trainer.train()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    paged = sum(block.slot_bytes for block in evict.session.blocks if not block.pinned)
    # six calls an evaluation, of which the first finds the weights
    assert evict.weights > 2 * 5 * paged
    assert all(row["read_bytes"]["weights"] <= 2 * paged for row in rows)  # forward and backward
    # not in each: what kernels compute meanwhile is computing
    assert sum(row["stall_seconds"]["data"] for row in rows) > 0
    before = opt._session.counters()["read_bytes"]["weights"]
    trainer.predict(Samples(6))
    assert opt._session.counters()["read_bytes"]["weights"] - before >= 5 * paged
    opt.ledger.close_step(99, opt._session.counters())  # what is left since the last step
    assert rows[-1]["read_bytes"]["weights"] <= 2 * paged
    # All that was written belongs to the steps, also what lazy ones owed when an evaluation began.
    state = sum(
        opt._session.algorithm.state_bytes(unit)["m"]
        for block in evict.session.blocks
        for unit in block.updated_units
    )
    assert sum(row["written_bytes"]["m"] for row in rows) == 5 * state
    opt.close()


class Slow(Samples):
    """A second passes while a sample is drawn; there is none at `broken`."""

    def __init__(self, count: int, clock, broken: int = -1) -> None:
        super().__init__(count)
        self.clock, self.broken = clock, broken

    def __getitem__(self, index: int) -> dict:
        self.clock.now += 1.0
        if index == self.broken:
            raise ZeroDivisionError
        return super().__getitem__(index)


def test_an_evaluation_is_in_no_row_from_its_first_sample_to_its_end_whatever_that_is(
    offload, tmp_path, monkeypatch
):
    """Of two data sets, which are two evaluations in one; and of one that raises behind some calls
    of the model. Training takes no time here."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        sys.modules[Ledger.__module__],
        "time",
        types.SimpleNamespace(perf_counter=lambda: clock.now),
    )
    options = {
        "per_device_eval_batch_size": 1,
        "max_grad_norm": 1e9,
        "eval_steps": 2,
        "num_train_epochs": 1,
    }
    evict = EvictingAll()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options), [evict])
    trainer.eval_dataset = {"a": Slow(3, clock), "b": Slow(3, clock)}
    opt = offload(trainer, policy="lazy")
    evict.session = opt._session
    rows = []
    opt.ledger.on_step(rows.append)
    trainer.train()
    assert clock.now == 3 * 2 * 3  # behind steps 2, 4 and 5
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(Slow(5, clock, broken=3))
    assert clock.now == 3 * 2 * 3 + 4
    trainer.eval_dataset = Slow(3, clock)
    trainer.train()
    paged = sum(block.slot_bytes for block in evict.session.blocks if not block.pinned)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["seconds"] for row in rows] == [0.0] * 10
    assert all(row["read_bytes"]["weights"] <= 2 * paged for row in rows)
    opt.close()


class SlowSaver(Trainer):
    """A second passes while a checkpoint is written."""

    clock = None

    def _save_checkpoint(self, *args, **kwargs) -> None:
        self.clock.now += 1.0
        super()._save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_a_checkpoint_is_no_computing(offload, tmp_path, monkeypatch, policy):
    """Two of them with a step behind each. Whatever else is waited for inside one belongs to it,
    once. Nothing else takes time here."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        sys.modules[Ledger.__module__],
        "time",
        types.SimpleNamespace(perf_counter=lambda: clock.now),
    )
    options = {
        "num_train_epochs": 1,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options), kind=SlowSaver)
    trainer.clock = clock
    opt = offload(trainer, policy=policy)
    rows = []
    opt.ledger.on_step(rows.append)
    trainer.train()
    assert sorted(os.listdir(tmp_path / "ours")) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert [row["seconds"] for row in rows] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert [row["stall_seconds"]["checkpoint"] for row in rows] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert all(
        sum(row["stall_seconds"].values()) + row["compute_seconds"] == row["seconds"]
        for row in rows
    )


def test_a_limit_of_a_trainer_ends_with_it(offload, tmp_path):
    """Trained with clips that fire, then without any: the second time speculates from its second
    step on."""
    options = {"num_train_epochs": 1, "eval_strategy": "no", "max_grad_norm": 1e-3}

    def train(trainer):
        trainer.train()
        trainer.args.max_grad_norm = 0.0
        trainer.train()

    control = control_of(llama(), arguments(tmp_path / "control", **options))
    train(control)
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **options))
    opt = offload(trainer)
    rows = []
    opt.ledger.on_step(rows.append)
    train(trainer)
    units = len([unit for block in opt._session.blocks for unit in block.updated_units])
    assert [(row["kept"], row["redone"]) for row in rows] == [(0, 0)] * 6 + [(units, 0)] * 4
    same_weights(trainer.model, control.model)


def test_training_twice(offload, tmp_path):
    control = control_of(llama(), arguments(tmp_path / "control"))
    control.train(), control.train()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours"))
    opt = offload(trainer)
    trainer.train(), trainer.train()
    assert opt.step_count == 20
    same_weights(trainer.model, control.model)


# -- what does not go ------------------------------------------------------------------------------


def test_sentences_about_the_trainer(offload, tmp_path):
    args = arguments(tmp_path / "ours", save_strategy="steps", save_steps=3)
    with pytest.raises(
        errors.InvalidArgument, match="model_init does not work.*pass model= instead"
    ):
        offload(trainer_of(None, args, model_init=llama))
    with pytest.raises(errors.InvalidArgument, match="Adafactor cannot be offloaded"):
        offload(trainer_of(llama(), arguments(tmp_path / "other", optim="adafactor")))
    with pytest.MonkeyPatch.context() as patch:
        # these arguments switch on compilation of whatever comes later
        patch.setattr(os, "environ", os.environ.copy())
        with pytest.raises(
            errors.InvalidArgument,
            match="torch_compile does not work.*call compile\\(\\) of each layer",
        ):
            offload(trainer_of(llama(), arguments(tmp_path / "other", torch_compile=True)))
    # it remembers them too
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    trainer = trainer_of(llama(), args)
    with pytest.raises(errors.OverBudget):
        offload(trainer, dram="2MiB")
    opt = offload(trainer)  # what was refused left the Trainer as it was
    with pytest.raises(errors.InvalidArgument, match="offloaded already"):
        offload(trainer)
    with pytest.raises(
        errors.InvalidArgument, match="connected to its offloaded optimizer already"
    ):
        huggingface.connect(trainer)
    with pytest.raises(errors.InvalidArgument, match="is not offloaded; call offload"):
        huggingface.connect(trainer_of(llama(), args))
    trainer.train()
    opt.close()
    again = trainer_of(llama(), args)
    opt = offload(again)
    with pytest.raises(
        errors.InvalidArgument,
        match=(
            "holds a run at step 10, but the Trainer starts at step 0. Pass"
            " resume_from_checkpoint=True"
        ),
    ):
        again.train()
    before = again.model.state_dict()
    with pytest.raises(
        errors.Mismatch,
        match="refers to step 3, but the run in .* is at step 10 and keeps no snapshot",
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    os.remove(tmp_path / "ours" / "checkpoint-6" / "optimizer.pt")
    with pytest.raises(
        errors.InvalidArgument,
        match="without the state of an optimizer, but the store holds a run at step 10",
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-6"))
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, before[name])  # what was refused wrote nothing
    opt.close()
    other = trainer_of(llama(), args)
    offload(other, path="another")
    with pytest.raises(
        errors.Mismatch, match="refers to a run in .*store, which is not the run in .*another"
    ):
        other.train(resume_from_checkpoint=True)


def test_checkpoint_of_an_ordinary_trainer(offload, tmp_path):
    """A run that began in memory goes on out of the store."""
    saving = {"save_strategy": "steps", "save_steps": 5}
    control = trainer_of(llama(), arguments(tmp_path / "ours", **saving))
    control.train()
    trainer = trainer_of(llama(), arguments(tmp_path / "ours", **saving))
    opt = offload(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-5"))
    assert opt.step_count == 5 and trainer.state.global_step == 10
    ours = {row[0]: row[1] for row in history(trainer)}
    theirs = {row[0]: row[1] for row in history(control)}
    assert ours.keys() == theirs.keys()
    # torch's AdamW in memory is not bit-equal in its tails
    assert all(abs(ours[step] - theirs[step]) < 1e-3 for step in theirs)


# -- accelerate ------------------------------------------------------------------------------------


def loop(accelerator, model, optimizer, save=None, load=None, stop=None) -> list:
    """The loop of accelerate's own documentation, two epochs of five steps; saves after the first,
    or goes on from there."""
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    if load:
        accelerator.load_state(load)
    for epoch in range(1 if load else 0, 2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == stop:
                return losses
        if save and epoch == 0:
            accelerator.save_state(save)
    return losses


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_accelerate_loop(tmp_path, mixed):
    def accelerator():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=4, mixed_precision=mixed
        )

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    control = llama()
    expected = loop(accelerator(), control, reference.ReferenceOptimizer(adamw(control)))

    options = {"store": tmp_path / "store", "dram": "8MiB", "policy": "speculate", "snapshots": 1}
    model = llama()
    model, opt = stoker.offload(model, adamw(model), **options)
    it = accelerator()
    huggingface.follow(opt, it)
    first = loop(it, model, opt, save=str(tmp_path / "state"), stop=29)
    assert first == expected[:29] and opt.step_count == 7 and opt.snapshots == [5]
    opt.close()
    model = llama()
    model, opt = stoker.offload(model, adamw(model), resume=True, **options)
    it = accelerator()
    huggingface.follow(opt, it)
    rest = loop(it, model, opt, load=str(tmp_path / "state"))
    assert rest == expected[19:]
    assert opt.step_count == 10
    same_weights(model, control)
    opt.close()
