"""Steps that a store keeps beside the current one, references to them, and what loading a
checkpoint may and may not write."""

from __future__ import annotations

import io

import pytest
import torch

import reference
from kill_run import Position
from models import batch, loss_of
from stoker import errors
from test_offload_features import (
    adamw,
    assert_same,
    offload,
    tiny,
    train_step,
    weights,
)  # noqa: F401 (offload is a fixture)


def everything(model, opt) -> dict[str, torch.Tensor]:
    full = opt.state_dict(full=True)["state"]
    state = {
        f"{index}.{name}": value for index, entry in full.items() for name, value in entry.items()
    }
    return {**weights(model), **{name: value.clone() for name, value in state.items()}}


def saved(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_leads_back_to_its_snapshot(offload, dtype):
    """Trained on, killed or not, a state_dict that was saved with a snapshot brings everything
    back; the steps after it are the same."""
    model, opt = offload(tiny(dtype), snapshots=2)
    scheduler, position = (
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1 / (1 + 0.5 * s)),
        Position(),
    )
    opt.attach(scheduler=scheduler, position=position)
    references, states, losses = {}, {}, []
    for step in range(7):
        losses.append(train_step(model, opt, next(position)))
        scheduler.step()
        if step in (1, 3, 4):
            assert opt.snapshot() == step + 1
            references[step + 1], states[step + 1] = saved(opt.state_dict()), everything(model, opt)
    assert opt.snapshots == [4, 5]  # the newest two
    end = everything(model, opt)
    for back in (4, 5, 4):
        opt.load_state_dict(references[back])
        assert (opt.step_count, opt.committed_step, position.next, scheduler.last_epoch) == (
            back,
        ) * 4
        assert (
            opt.param_groups[0]["lr"]
            == scheduler.get_last_lr()[0]
            == pytest.approx(3e-3 / (1 + 0.5 * back))
        )
        assert_same(everything(model, opt), states[back])
    with pytest.raises(
        errors.Mismatch,
        match="refers to step 2, but the run in .* is at step 4 and keeps no snapshot",
    ):
        opt.load_state_dict(references[2])
    opt.close()
    model, opt = offload(tiny(dtype), snapshots=2, resume=True)
    assert opt.step_count == 4
    scheduler, position = (
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1 / (1 + 0.5 * s)),
        Position(),
    )
    opt.attach(scheduler=scheduler, position=position)
    while position.next < 7:
        assert train_step(model, opt, position.next) == losses[next(position)]
        scheduler.step()
    opt.flush()
    assert_same(everything(model, opt), end)


def test_references_of_another_run(offload, tmp_path):
    model, opt = offload(tiny())
    theirs = opt.state_dict()
    opt.close()
    model, opt = offload(tiny(), path="other")
    assert opt.state_dict()["stoker"]["step"] == theirs["stoker"]["step"] == 0
    with pytest.raises(
        errors.Mismatch, match="refers to a run in .*/store, which is not the run in .*/other"
    ):
        opt.load_state_dict(theirs)


def test_a_state_dict_of_now_moves_nothing(offload):
    """What accelerate does when it prepares an optimizer, also after other weights were loaded on
    top of a snapshot."""
    model, opt = offload(tiny(torch.bfloat16), snapshots=1)
    train_step(model, opt, 0)
    opt.snapshot()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    other = weights(model)
    store = opt._session.planes.store
    version, counters = store.info()["committed"], opt._session.planes.session.counters()
    opt.load_state_dict(saved(opt.state_dict()))
    assert store.info()["committed"] == version
    now = opt._session.planes.session.counters()
    assert (now["read_bytes"], now["written_bytes"]) == (
        counters["read_bytes"],
        counters["written_bytes"],
    )
    assert_same(weights(model), other)


def test_sentences_about_snapshots(offload):
    model, opt = offload(tiny())
    with pytest.raises(errors.InvalidArgument, match=r"no room for snapshots; pass snapshots=1"):
        opt.snapshot()
    opt.close()
    with pytest.raises(errors.InvalidArgument, match="made with room for 0 snapshots, not 2"):
        offload(tiny(), snapshots=2, resume=True)
    with pytest.raises(errors.NotFound):
        offload(tiny(), resume=True, snapshots=0)[1].drop_snapshot(3)


# -- loading weights -------------------------------------------------------------------------------


def test_loading_the_weights_that_are_there_changes_nothing(offload):
    """A bfloat16 run goes on with its exact masters after its own checkpoint is loaded into it, as
    a resumed Trainer does."""
    control, model = tiny(torch.bfloat16), tiny(torch.bfloat16)
    theirs = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(model)
    for step in range(6):
        if step == 3:
            opt.flush()
            store = opt._session.planes.store
            version = store.info()["committed"]
            model.load_state_dict(saved(model.state_dict()))
            assert store.info()["committed"] == version
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same(weights(model), weights(control))


def test_tied_weights_under_one_of_their_names(offload):
    """Those who save a state_dict keep one name of a tied weight; loading it must not be undone by
    the module that has the other."""
    model, opt = offload(tiny(tied=True))
    whole = model.state_dict()
    assert whole["head.weight"].data_ptr() == whole["embed.weight"].data_ptr()
    changed = {name: value + 1 for name, value in whole.items() if name != "head.weight"}
    model.load_state_dict(changed, strict=False)
    assert torch.equal(model.state_dict()["embed.weight"], changed["embed.weight"])
    assert torch.equal(model.state_dict()["head.weight"], changed["embed.weight"])


def test_only_tied_names_share_a_storage_in_a_state_dict(offload):
    """Whoever saves safetensors copies into memory what shares a storage, and takes the same
    storage for one weight with two names."""
    model, opt = offload(tiny(tied=True))
    for _ in range(2):  # the second does not share with the first
        state = model.state_dict()
        storages: dict[int, list[str]] = {}
        for name, value in state.items():
            storages.setdefault(value.untyped_storage().data_ptr(), []).append(name)
            assert (
                name == "seen"
                or value.untyped_storage().nbytes() == value.numel() * value.element_size()
            )
        assert [names for names in storages.values() if len(names) > 1] == [
            ["embed.weight", "head.weight"]
        ]
        held = state  # noqa: F841


def test_a_load_reads_only_what_it_brings(offload):
    """A few weights (an adapter's, say) come and go without the rest of the model."""
    model, opt = offload(tiny())
    loss = loss_of(model.eval(), batch(0)).item()
    part = {
        name: value for name, value in model.state_dict().items() if name == "layers.1.up.weight"
    }
    touched = []
    weight = type(opt._session.weights).current
    opt._session.weights.current = lambda param: (
        touched.append(param.name) or weight(opt._session.weights, param)
    )
    model.load_state_dict({name: value * 2 for name, value in part.items()}, strict=False)
    del opt._session.weights.current
    assert touched == ["layers.1.up.weight"]
    assert loss_of(model, batch(0)).item() != loss
