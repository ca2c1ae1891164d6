"""PEFT: the frozen base is only ever read, and state exists for what trains alone."""

from __future__ import annotations

import pytest
import torch

import stoker
from stoker import errors

peft = pytest.importorskip("peft")
from test_huggingface import (
    Samples,
    StopAt,
    arguments,
    control_of,
    history,
    huggingface,
    llama,
    offload,
    same_weights,
    trainer_of,
)  # noqa: E402, F401


def lora(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    base = llama(dtype)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config)


def batch_of(index: int) -> dict:
    return {name: value[None] for name, value in Samples()[index].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_writes_no_frozen_byte(offload, tmp_path, dtype):
    control = control_of(lora(dtype), arguments(tmp_path / "control"))
    control.train()
    trainer = trainer_of(lora(dtype), arguments(tmp_path / "ours"))
    opt = offload(trainer, dram="5MiB", snapshots=0)
    session = opt._session
    frozen = [
        f"w/{unit.name}" for block in session.blocks for unit in block.units if not unit.updated
    ]
    trained = [unit for block in session.blocks for unit in block.updated_units]
    assert len(frozen) == 4 and len(trained) == 2
    made = {key: session.planes.store.stat(key)["version"] for key in frozen}
    before = session.planes.session.counters()["written_bytes"]
    trainer.train()
    after = session.planes.session.counters()["written_bytes"]
    elements = sum(unit.elements for unit in trained)
    assert {unit.dtype for unit in trained} == {torch.float32}  # adapters are, over whatever base
    state = {"m": 4, "v": 4, "weights": 4, "remainder": 0}
    assert {name: after[name] - before[name] for name in state} == {
        name: 10 * size * elements for name, size in state.items()
    }
    assert {key: session.planes.store.stat(key)["version"] for key in frozen} == made
    planes = {
        entry["key"]
        for entry in session.planes.store.list()
        if not entry["key"].startswith(("meta/", "w/", "b/"))
    }
    assert planes == {f"{plane}/{unit.name}" for unit in trained for plane in "mv"}
    assert history(trainer) == history(control)
    same_weights(trainer.model, control.model)


def test_lora_resumes_with_the_same_bits(offload, tmp_path):
    """The checkpoint holds the adapter only; loading it touches nothing else."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    control = control_of(
        lora(torch.bfloat16), arguments(tmp_path / "control", **saving, save_only_model=True)
    )
    control.train()
    trainer = trainer_of(lora(torch.bfloat16), arguments(tmp_path / "ours", **saving), [StopAt(7)])
    opt = offload(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    opt.close()
    trainer = trainer_of(lora(torch.bfloat16), arguments(tmp_path / "ours", **saving))
    offload(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer) == history(control)
    same_weights(trainer.model, control.model)
    assert not (tmp_path / "ours" / "checkpoint-6" / "model.safetensors").exists()
    back = peft.PeftModel.from_pretrained(llama(torch.bfloat16), tmp_path / "ours" / "checkpoint-9")
    there = peft.PeftModel.from_pretrained(
        llama(torch.bfloat16), tmp_path / "control" / "checkpoint-9"
    )
    same_weights(back, there)


def test_adapters_off_and_on(tmp_path):
    """What a preference loss does between the steps: the base model's opinion, without
    gradients."""

    def train(model, opt):
        seen = []
        for step in range(4):
            with torch.no_grad(), model.disable_adapter():
                seen.append(model(**batch_of(step)).loss.item())
            loss = model(**batch_of(step)).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        return seen

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    control, model = lora(), lora()
    torch.manual_seed(5)
    expected = train(control, adamw(control))
    model, opt = stoker.offload(
        model, adamw(model), store=tmp_path / "store", dram="5MiB", policy="speculate"
    )
    torch.manual_seed(5)
    assert train(model, opt) == expected
    # gradients were known to be final although requires_grad went off and on
    assert opt.ledger.summary()["kept"] == 4 * 2
    with (
        model.disable_adapter(),
        pytest.raises(errors.InvalidArgument, match="lora_A.* changed from True to False"),
    ):
        model(**batch_of(0))
    opt.close()


def test_merging_inside_gather(tmp_path):
    control, model = lora(), lora()
    for param in (*control.parameters(), *model.parameters()):
        if param.requires_grad:
            torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(param.numel()))
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters()), store=tmp_path / "store", dram="5MiB"
    )
    with stoker.gather(model.parameters()):
        model.merge_adapter()
        merged = {name: value.clone() for name, value in model.state_dict().items()}
        model.unmerge_adapter()
    control.merge_adapter()
    expected = control.state_dict()
    assert merged.keys() == expected.keys() and all(
        torch.equal(merged[name], value) for name, value in expected.items()
    )
    opt.close()
