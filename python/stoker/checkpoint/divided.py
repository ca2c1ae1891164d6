"""An offloaded run from a checkpoint into the stores of other ranks than those that saved it.

Each rank's store holds the planes of its own parts of the parameters. What a rank wants of a
plane are rectangles; it takes of each what the ranks that saved had of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from stoker import _core
from stoker.checkpoint import planes, scaled, shards
from stoker.checkpoint.manifest import Piece, damaged, well_formed
from stoker.checkpoint.reading import Reader, Wanted, wanted_of
from stoker.checkpoint.rectangles import Match, common
from stoker.checkpoint.state import plain, row_major
from stoker.checkpoint.windows import Windows
from stoker.errors import Mismatch
from stoker.offload.model.blocks import Block, Param, Unit, signature
from stoker.offload.model.moments import moments_of
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.storage import record
from stoker.offload.storage.lineage import Lineage
from stoker.offload.storage.planes import put
from stoker.offload.storage.record import META_MODEL, META_STATE

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def places_in(blocks: list[Block]) -> dict[str, Any]:
    """Of each parameter, by its name: the shape of the whole, and where this rank's part of it
    begins."""
    found = {}
    for param in (param for block in blocks for param in block.params):
        part = _part_of(param)
        found[param.name] = [list(param.tensor.shape), list(part.begin)]
    return found


def _part_of(param: Param) -> shards.Rectangle:
    if shards.is_sharded(param.tensor):  # else its values may be in the store
        return shards.mine(param.name, param.tensor)
    return shards.Rectangle((0,) * len(param.size), tuple(param.size))


def check_one_step(of_ranks: list[dict[str, Any]], where: str) -> None:
    """Mismatch unless all ranks gave the same step of the same run."""
    said = [
        [each["state"]["step"], each["state"].get("timeline"), each["model"].get("run")]
        for each in of_ranks
    ]
    if any(each != said[0] for each in said):
        raise Mismatch(
            f"{where}: the ranks are at different steps or in different runs; end all processes "
            "and start them again with resume=True"
        )


def is_divided(reader: Reader) -> bool:
    return "ranks" in planes.run_in(reader)


@dataclass(frozen=True)
class _Held:
    """What one rank that saved had of a parameter. `offset`: in its unit's planes, in elements."""

    share: dict[str, Any]
    unit: str
    elements: int  # of the unit's planes
    dtype: str
    updated: bool
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Divided:
    """The run in a checkpoint, for the store of one rank. `agreement`: None if one process has the
    whole model."""

    def __init__(self, reader: Reader, blocks: list[Block], agreement: Agreement | None) -> None:
        """Mismatch where it is of another model. Then nothing was changed."""
        self._reader, self._blocks, self._agreement = reader, blocks, agreement
        run = planes.run_in(reader)
        with well_formed(reader.where, "a run"):
            self._shares: list[dict[str, Any]] = run["ranks"] if "ranks" in run else [run]
            self._held = self._all_held()
            rank = agreement.ranks.rank if agreement else 0
            world = agreement.ranks.world if agreement else 1
            same = len(self._shares) == world
            self._base = self._shares[rank if same else 0]
            model = record.decode(self._base["model"])
            self._alike = (
                same
                and model["blocks"] == signature(blocks)["blocks"]
                and self._base.get("places", places_in(blocks)) == places_in(blocks)
            )
            self._moments = moments_of(model.get("moments", "exact"))
        self._check()

    def _all_held(self) -> dict[str, list[_Held]]:
        found: dict[str, list[_Held]] = {}
        for share in self._shares:
            places = share.get("places")
            for unit in record.decode(share["model"])["blocks"]:
                for name, size, stride, offset in unit["params"]:
                    shape, begin = places[name] if places else (size, [0] * len(size))
                    held = _Held(
                        share,
                        unit["name"],
                        unit["elements"],
                        unit["dtype"],
                        unit["updated"],
                        *map(tuple, (shape, begin, size, stride)),
                        offset,
                    )
                    found.setdefault(name, []).append(held)
        return found

    def _check(self) -> None:
        where = self._reader.where
        ours = {param.name: param for block in self._blocks for param in block.params}
        for name in self._held.keys() ^ ours.keys():
            has, lacks = ("checkpoint", "model") if name in self._held else ("model", "checkpoint")
            raise Mismatch(
                f"{where} holds another model: parameter {name} is in the {has} only, and not in"
                f" the {lacks}; give the model that was saved"
            )
        for name, param in ours.items():
            dtype = str(param.unit.dtype).removeprefix("torch.")
            mine = tuple(param.tensor.shape), dtype, param.unit.updated
            for each in self._held[name]:
                if (theirs := (each.shape, each.dtype, each.updated)) != mine:
                    describe = lambda w: f"{list(w[0])} {w[1]}{'' if w[2] else ' frozen'}"
                    raise Mismatch(
                        f"{where} holds another model: parameter {name} is {describe(mine)} in "
                        f"the model and {describe(theirs)} in the checkpoint; give the model that "
                        "was saved"
                    )
        if self._moments.group and not self._alike:
            for param in (each for each in ours.values() if each.unit.updated):
                self._check_groups(param)

    def _check_groups(self, param: Param) -> None:
        """Mismatch where elements that share a scale would come apart."""
        try:
            list(self._groups(param))
        except scaled.Cut:
            raise Mismatch(
                f'{self._reader.where} holds moments="{self._moments.name}": each'
                f" {self._moments.group} elements share a scale, and such a group of parameter"
                f" {param.name} would lie on two of these ranks. Restore it with"
                f" {len(self._shares)} ranks, as it was saved, or into memory by"
                " ckpt.restore(model=, optimizer=), where moments become float32"
            ) from None

    def _groups(self, param: Param) -> Iterator[tuple[_Held, Match]]:
        part = _part_of(param)
        for each in self._held[param.name]:
            theirs = each.begin, each.size, each.stride
            ours = part.begin, param.size, param.stride
            for match in scaled.whole_groups(self._moments, theirs, ours):
                yield each, match

    # -- into a store ------------------------------------------------------------------------------

    def stage(self, store: Any, runtime: _core.Runtime, lineage: Lineage) -> Any:
        """A transaction that makes the store what the run was at that step."""
        txn = store.begin()
        try:
            with (
                well_formed(self._reader.where, "a run"),
                Windows(self._reader, store, txn, runtime) as windows,
            ):
                self._stage(store, txn, windows, lineage)
        except BaseException:
            txn.abandon()
            raise
        return txn

    def _stage(self, store: Any, txn: Any, windows: Windows, lineage: Lineage) -> None:
        wanted = self._sizes()
        for each in store.list():
            if each["key"] not in wanted:
                txn.remove(each["key"])
        for key, said in wanted.items():
            chunk = planes.chunk_bytes(store, key, said, self._reader)
            txn.resize(key, said["bytes"], *chunk)
            if "part" in said:
                planes.write_part(windows, self._reader, key, said)
        for unit in (unit for block in self._blocks for unit in block.units):
            for plane in "wrmv":
                said = wanted.get(f"{plane}/{unit.name}")
                if said is not None and "part" not in said:
                    held = self._assembled(plane, unit, said)
                    key, size, chunk = f"{plane}/{unit.name}", said["bytes"], said["chunk_bytes"]
                    windows.put(key, held, size, chunk, frozen=not unit.updated)
        model, state = dict(self._base["model"]), dict(self._base["state"])
        model.pop("ranks", None)
        for of_ranks in ("timeline", "restored"):
            state.pop(of_ranks, None)
        model |= record.encode(signature(self._blocks)) | lineage.members()
        if self._agreement is not None:
            model |= {"ranks": self._agreement.signature()}
            model["run"] = lineage.run or self._agreement.run
            state |= {"timeline": self._agreement.timeline, "restored": True}
        for key, said in ((META_MODEL, model), (META_STATE, state)):
            put(txn, key, json.dumps(said, separators=(",", ":")).encode())

    def _sizes(self) -> dict[str, dict[str, Any]]:
        """The objects that the store gets: bytes and chunks; the part of the pack, where it is the
        same there."""
        if self._alike:
            return self._base["objects"]
        theirs = self._base["objects"]
        found = {
            key: said for key, said in theirs.items() if key[:2] not in ("w/", "r/", "m/", "v/")
        }
        for unit in (unit for block in self._blocks for unit in block.units):
            for plane in "wrmv":
                key = f"{plane}/{unit.name}"
                if key in theirs:
                    size = self._moments.plane_bytes(unit.elements)
                    if plane in "wr":
                        size = unit.elements * self._width(plane, unit)
                    found[key] = {"bytes": size, "chunk_bytes": theirs[key]["chunk_bytes"]}
        return found

    def _width(self, plane: str, unit: Unit) -> int:
        """Bytes of an element."""
        if plane == "w":
            return unit.dtype.itemsize
        return 2 if plane == "r" else self._moments.element_bytes

    def _assembled(self, plane: str, unit: Unit, said: dict[str, Any]) -> torch.Tensor:
        """A plane of a unit, of what the ranks that saved had of it."""
        held = torch.zeros(said["bytes"], dtype=torch.uint8, device="cpu")
        by_file: dict[str, list[Wanted]] = {}
        if plane in "mv" and self._moments.group:
            for param in unit.params:
                self._want_groups(plane, param, held, by_file)
            for file, wanted in by_file.items():
                self._reader.copy(file, wanted)
            return held
        width = self._width(plane, unit)
        turned, taken = [], []
        for param in unit.params:
            if not param.numel:
                continue
            flat = held[param.offset * width : (param.offset + param.numel) * width]
            into = flat.view(_WORDS[width])
            if row_major(list(param.size), list(param.stride)):
                into = into.view(param.size)
            else:
                place = torch.as_strided(into, param.size, param.stride)
                into = torch.empty(param.size, dtype=into.dtype, device="cpu")
                turned.append((place, into))
            if plane == "w":
                self._want_weight(param, into, by_file)
            else:
                taken += self._want(plane, param, into, by_file)
        for file, wanted in by_file.items():
            self._reader.copy(file, wanted)
        for place, source in taken:
            place.copy_(source)
        for place, into in turned:
            place.copy_(into)
        return held

    def _want_weight(self, param: Param, into: torch.Tensor, by_file: dict) -> None:
        """Weights are whole in safetensors files."""
        there = self._tensors
        file, placed = there[
            self._reader.manifest.aliases.get(plain(param.name), plain(param.name))
        ]
        if (placed.spec.dtype, placed.spec.shape) != (param.unit.dtype, tuple(param.tensor.shape)):
            raise damaged(
                self._reader.where, f"{file} has {param.name} in another type or shape than the run"
            )
        zeros = (0,) * len(param.size)
        by_file.setdefault(file, []).extend(
            wanted_of(placed.offset, placed.spec.shape, zeros, _part_of(param), into)
        )

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return self._reader.tensors()

    def _want_groups(self, plane: str, param: Param, held: torch.Tensor, by_file: dict) -> None:
        """Codes and scales, where elements share scales."""
        count = 0
        for each, match in self._groups(param):
            count += match.count
            piece = self._piece(plane, each)
            theirs, ours = (each.elements, each.offset), (param.unit.elements, param.offset)
            for source, target in scaled.moves(self._moments, match, theirs, ours):
                by_file.setdefault(piece.file, []).extend(
                    Wanted(piece.offset + at, size, held.data_ptr() + to)
                    for at, size, to in (
                        (source.data_at, source.data_bytes, target.data_at),
                        (source.scales_at, source.scales_bytes, target.scales_at),
                    )
                )
        self._check_all_of(param, count)

    def _piece(self, plane: str, held: _Held) -> Piece:
        part = held.share["objects"][f"{plane}/{held.unit}"]["part"]
        return self._reader.manifest.state[part]

    def _check_all_of(self, param: Param, count: int) -> None:
        if count != param.numel:
            raise damaged(
                self._reader.where,
                f"the parts of its ranks hold {count} of the {param.numel} elements of parameter"
                f" {param.name}",
            )

    def _want(self, plane: str, param: Param, into: torch.Tensor, by_file: dict) -> list:
        """What is to be copied once the files were read: (place, source)."""
        part, later, count = _part_of(param), [], 0
        for each in self._held[param.name]:
            shared = common(each.begin, each.size, part.begin, part.size)
            if shared is None:
                continue
            first, size = shared
            count += math.prod(size)
            piece = self._piece(plane, each)
            at = piece.offset + each.offset * into.element_size()
            if row_major(list(each.size), list(each.stride)):
                wanted = wanted_of(at, each.size, each.begin, part, into)
            else:
                bytes_ = math.prod(each.size) * into.element_size()
                flat = torch.empty(math.prod(each.size), dtype=into.dtype, device="cpu")
                wanted = [Wanted(at, bytes_, flat.data_ptr())]
                source = torch.as_strided(flat, each.size, each.stride)
                cut = lambda t, begin: t[
                    tuple(slice(f - b, f - b + n) for f, b, n in zip(first, begin, size))
                ]
                later.append((cut(into, part.begin), cut(source, each.begin)))
            by_file.setdefault(piece.file, []).extend(wanted)
        self._check_all_of(param, count)
        return later
