"""How a session begins: a run is made in the store, or taken up at its last committed step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stoker.offload.model.absent import away_of
from stoker.offload.model.blocks import Param, local
from stoker.offload.paging.offloaded import Place
from stoker.offload.storage.lineage import Lineage, fresh_name
from stoker.offload.storage.planes import put
from stoker.offload.storage.record import META_MODEL, META_STATE, dump, environment, load
from stoker.offload.storage.volumes import room_of

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


def create(
    session: Session, value_of: Callable[[Param], torch.Tensor], obsolete: list[str]
) -> None:
    """Writes the model into the store that holds no run yet: the weights; m, v and remainder
    are sparse zeros.

    value_of gives each parameter's initial weights; `obsolete` objects (of stoker.build) go in
    the same commit.
    """
    store = session.planes.store
    txn = store.begin()
    for block in session.blocks:
        slot = session.pager.take(block, 0)
        slot.bytes.zero_()
        for param in block.params:
            slot.view(param).copy_(local(value_of(param)))
            session.gradients.trimmer.freed(param.numel * param.unit.dtype.itemsize)
        futures = []
        for unit in block.units:
            core = session.planes.session
            core.create_block(unit.session_id, txn)
            futures.append(
                core.store_weights(unit.session_id, slot.address + unit.slot_offset, txn)
            )
        for future in futures:
            future.wait()
        del slot
    if (told := room_of(store)) is not None:
        session.ledger.event("volumes", step=0, **told)
    run = session.agreement.run if session.agreement else fresh_name()
    session.record.belongs_to(Lineage(run))
    put(txn, META_MODEL, dump(session.record.model()))
    for key, data in session.record.objects().items():
        put(txn, key, data)
    session.buffers.stage(txn)
    for key in obsolete:
        txn.remove(key)
    txn.commit("durable").wait()
    _leave_memory(session)


def adopt(session: Session) -> None:
    """The store already holds this model's weights, those of a run that is resumed."""
    session.record.belongs_to(Lineage.of(load(session.planes.store.read_bytes(META_MODEL))))
    _leave_memory(session)
    if session.pager.resident:
        session.weights.refresh(set(session.blocks))


def _leave_memory(session: Session) -> None:
    """From here on the weights are in the store only. Shards stay."""
    if session.pager.resident:
        return
    session.leaves_memory()
    places = {
        param: Place.of(param.tensor) for param in session.params if away_of(param.tensor) is None
    }
    for param in session.params:
        grad, param.tensor.grad = param.tensor.grad, None
        session.pager.hide(param)
        param.tensor._stoker_session = session
        param.tensor.grad = grad.to(session.pager.device) if grad is not None else None
    for param, place in places.items():
        session.shown.watch(param, place)


def resume(session: Session) -> None:
    """Takes the run up at the last committed step: counters, hyperparameters, buffers, RNG;
    attached objects on attach()."""
    state = load(session.planes.store.read_bytes(META_STATE))
    session.record.resume(state, session.runtime)
    session.record.returns_to(state["step"])
    here = environment(session.pager.device)
    changed = [
        f"{key} {state['environment'].get(key)} -> {here[key]}"
        for key in here
        if state["environment"].get(key, here[key]) != here[key]
    ]
    if changed:
        warnings.warn(
            f"this run was made under another environment ({', '.join(changed)}): it continues, "
            f"but not bit for bit",
            stacklevel=4,
        )


def move(session: Session) -> None:
    """What is not paged goes to the device that computes, and host memory is made ready for
    copies. Before anything is stored."""
    if session.link is not None:
        session.link.pin(session.planes.arena)
        if session.activations is not None and session.activations.arena is not None:
            session.link.pin(session.activations.arena)
    if session.pager.resident:
        return
    for module in session.model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(session.pager.device) if buffer is not None else None
