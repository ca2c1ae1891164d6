"""From a checkpoint of an offloaded run to the store of one: its planes and records, byte for
byte."""

from __future__ import annotations

import json
import logging
import math
from typing import Any, NamedTuple

import torch

from stoker import _core
from stoker.checkpoint.manifest import damaged, well_formed
from stoker.checkpoint.parts import memory
from stoker.checkpoint.reading import Reader, Wanted
from stoker.checkpoint.state import plain
from stoker.checkpoint.windows import Windows
from stoker.errors import Mismatch, NotFound
from stoker.offload.storage import record
from stoker.offload.storage.lineage import Lineage
from stoker.offload.model.blocks import Block, difference, signature
from stoker.offload.storage.planes import put
from stoker.offload.storage.record import META_MODEL, META_STATE

log = logging.getLogger("stoker")


def run_in(reader: Reader) -> dict[str, Any]:
    """What the manifest says of the one run that the checkpoint holds."""
    runs = reader.manifest.offloaded
    if len(runs) != 1:
        raise Mismatch(
            f"{reader.where} holds no run of stoker.offload(); call ckpt.restore(model=...,"
            " optimizer=...) first, and then stoker.offload() without restore="
            if not runs
            else f"{reader.where} holds {len(runs)} runs of stoker.offload(), but a store takes"
            " one; choose a checkpoint that holds one"
        )
    return next(iter(runs.values()))


def _place(store: Any) -> str:
    return f"the store {store.info()['composition']}"


class Told(NamedTuple):
    """What a restore has to know of the run in a checkpoint before it reads more of it."""

    step: int  # as the run counts: save() takes any number
    lineage: Lineage
    where: str


class Held(NamedTuple):
    """The run in a store."""

    step: int
    lineage: Lineage


def told_of(reader: Reader) -> Told:
    run = run_in(reader)
    with well_formed(reader.where, "a run"):
        share = run.get("ranks", [run])[0]
        lineage = Lineage.of(record.decode(share["model"]))
        return Told(int(share["state"]["step"]), lineage, reader.where)


def tell_replaced(held: Held | None, told: Told, store: Any) -> None:
    """Into the log, when the store has the step of the checkpoint."""
    if held is not None and held.step:
        log.warning(
            "restore= replaced step %d in %s by step %d, from %s",
            *(held.step, _place(store), told.step, told.where),
        )


def takes(held: Held | None, told: Told, named: bool, store: Any) -> bool:
    """Whether a store takes the checkpoint's step in the place of what it holds. `named`: the user
    gave the number of that step. Mismatch where neither can stand for the other."""
    if held is None:
        return True
    mine, theirs = held.lineage, told.lineage
    if None in (mine.run, theirs.run) or mine.run == theirs.run:
        return named or told.step > held.step
    if theirs.run in mine.left:  # the store went back since
        return named
    if mine.run in theirs.left:
        if named or held.step <= theirs.left[mine.run]:
            return True
        why = f"which went back to step {theirs.left[mine.run]} of it"
    elif told.step > held.step:
        return True
    else:
        why = "another run"
    raise Mismatch(
        f"{_place(store)} holds step {held.step} of run {mine.run}, and {told.where} is step"
        f" {told.step} of {theirs.run}, {why}. To go on with the store, leave out restore= and pass"
        " resume=True. To go on from the checkpoint, give an empty store"
    )


def is_abandoned(held: Held | None, told: Told) -> bool:
    """Whether the run in the store went back to a step before the checkpoint's."""
    if held is None or told.lineage.run not in held.lineage.left:
        return False
    return told.step > held.lineage.left[told.lineage.run]


def lineage_after(held: Held | None, told: Told, named: bool, fresh: str) -> Lineage:
    """Of a store that takes the step. `fresh`: a name that no run has. Another run begins where
    steps that were saved are abandoned, or may be."""
    mine = held.lineage if held is not None else Lineage()
    if named or told.lineage.run in mine.left:
        return mine.back_to(told.lineage, told.step, fresh)
    return told.lineage


def check_model(reader: Reader, blocks: list[Block]) -> None:
    with well_formed(reader.where, "a run"):
        problem = difference(record.decode(run_in(reader)["model"]), signature(blocks))
    if problem:
        raise Mismatch(
            f"{reader.where} holds another model: {problem}; give the model that was saved"
        )


def check_not_another(reader: Reader, store: Any, blocks: list[Block]) -> None:
    """Mismatch where the store holds a run of another model or optimizer, which a restore would
    remove."""
    try:
        there = record.load(store.read_bytes(META_MODEL))
    except NotFound:
        return
    named = lambda blocks: {p[0]: (p[1], b["dtype"]) for b in blocks for p in b["params"]}
    problem = None
    if named(there["blocks"]) != named(signature(blocks)["blocks"]):
        problem = f"another model: {difference(there, signature(blocks))}"
    run = run_in(reader)
    kind = lambda model: (model["algorithm"], model["momentum"], model.get("moments", "exact"))
    with well_formed(reader.where, "a run"):
        given = kind(record.decode(run.get("ranks", [run])[0]["model"]))
    if problem is None and kind(there) != given:
        describe = lambda k: f'{k[0]} {"with" if k[1] else "without"} momentum, moments="{k[2]}"'
        problem = f"another run: of {describe(kind(there))}, and {reader.where} is of"
        problem += f" {describe(given)}"
    if problem is not None:
        raise Mismatch(f"{_place(store)} holds {problem}; restore into an empty store")


def write_run(reader: Reader, store: Any, runtime: _core.Runtime, lineage: Lineage) -> None:
    """Makes the store what the run was at that step, as one durable commit."""
    run = run_in(reader)
    txn = store.begin()
    try:
        with well_formed(reader.where, "a run"):
            wanted = run["objects"]
            for each in store.list():
                if each["key"] not in wanted:
                    txn.remove(each["key"])
            with Windows(reader, store, txn, runtime) as windows:
                for key, said in wanted.items():
                    txn.resize(key, said["bytes"], *chunk_bytes(store, key, said, reader))
                    if not key.startswith("w/"):
                        write_part(windows, reader, key, said)
                for unit in run["model"]["blocks"]:
                    _write_weights(windows, reader, unit, wanted[f"w/{unit['name']}"])
            model = {**run["model"], **lineage.members()}
            put(txn, META_MODEL, json.dumps(model, separators=(",", ":")).encode())
            put(txn, META_STATE, json.dumps(run["state"], separators=(",", ":")).encode())
        txn.commit("durable").wait()
    except BaseException:
        txn.abandon()
        raise


def held_in(store: Any) -> Held | None:
    try:
        step = json.loads(store.read_bytes(META_STATE))["step"]
        return Held(step, Lineage.of(record.load(store.read_bytes(META_MODEL))))
    except NotFound:
        return None


def chunk_bytes(store: Any, key: str, said: dict, reader: Reader) -> list[int]:
    """The size of a new object's chunks; that of one that is there cannot change."""
    try:
        there = store.stat(key)["chunk_bytes"]
    except NotFound:
        return [said["chunk_bytes"]]
    if there != said["chunk_bytes"]:
        raise Mismatch(
            f"{reader.where} has {key} in chunks of {said['chunk_bytes']} bytes, and the store in"
            f" chunks of {there}; restore into a new store"
        )
    return []


def write_part(windows: Windows, reader: Reader, key: str, said: dict) -> None:
    number = said["part"]
    if not isinstance(number, int) or not 0 <= number < len(reader.manifest.state):
        raise damaged(
            reader.where,
            f"the manifest says that {key} is tensor {number!r}, but it lists only"
            f" {len(reader.manifest.state)}",
        )
    piece = reader.manifest.state[number]
    if piece.bytes != said["bytes"]:
        raise damaged(
            reader.where,
            f"the manifest says that {key} has {said['bytes']} bytes, but its tensor {number} has"
            f" {piece.bytes}",
        )
    steps = windows.steps(piece.bytes, said["chunk_bytes"])
    for at in steps:
        size = min(steps.step, piece.bytes - at)
        address = windows.room(key, at, size, said["chunk_bytes"])
        windows.want(piece.file, Wanted(piece.offset + at, size, address))


def _write_weights(windows: Windows, reader: Reader, unit: dict, said: dict) -> None:
    """The plane of a unit, of its parameters in safetensors files."""
    there = reader.tensors()
    width = getattr(torch, unit["dtype"]).itemsize
    placed, turned = [], False
    for name, shape, stride, offset in unit["params"]:
        file, tensor = there[plain(name)]
        if tensor.spec.bytes != math.prod(shape) * width:
            raise damaged(
                reader.where,
                f"{file} has {tensor.spec.bytes} bytes of {name}, but the manifest says"
                f" {math.prod(shape) * width}",
            )
        placed.append((file, tensor, shape, stride, offset))
        turned |= not torch.empty_strided(shape, stride, device="meta").is_contiguous()
    key, size, chunk = f"w/{unit['name']}", said["bytes"], said["chunk_bytes"]
    if size != unit["elements"] * width:
        raise damaged(
            reader.where,
            f"the manifest says that {key} has {size} bytes, but {unit['elements']} elements of"
            f" {unit['dtype']} have {unit['elements'] * width}",
        )
    frozen = not unit["updated"]
    if turned:
        held = _assembled(reader, placed, unit["elements"], unit["dtype"])
        windows.put(key, held, size, chunk, frozen)
        return
    steps = windows.steps(size, chunk)
    for at in steps:
        end = min(at + steps.step, size)
        address = windows.room(key, at, end - at, chunk, frozen)
        left = end - at
        for file, tensor, _, _, offset in placed:
            begin = offset * width
            low, high = max(at, begin), min(end, begin + tensor.spec.bytes)
            if low < high:
                wanted = Wanted(tensor.offset + low - begin, high - low, address + low - at)
                windows.want(file, wanted)
                left -= high - low
        if left:  # there are bytes between parameters
            memory(address, end - at).zero_()


def _assembled(reader: Reader, placed: list[tuple], elements: int, dtype: str) -> torch.Tensor:
    """A plane in memory, for parameters that do not lie there in row-major order."""
    held = torch.zeros(elements, dtype=getattr(torch, dtype), device="cpu")
    by_file: dict[str, list[Wanted]] = {}
    wholes = []
    for file, tensor, shape, stride, offset in placed:
        whole = torch.empty(shape, dtype=tensor.spec.dtype, device="cpu")
        by_file.setdefault(file, []).append(
            Wanted(tensor.offset, tensor.spec.bytes, whole.data_ptr())
        )
        wholes.append((whole, shape, stride, offset))
    for file, wanted in by_file.items():
        reader.copy(file, wanted)
    for whole, shape, stride, offset in wholes:
        torch.as_strided(held[offset:], shape, stride).copy_(whole)
    return held
