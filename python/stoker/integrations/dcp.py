"""torch.distributed.checkpoint: a StorageWriter and a StorageReader whose checkpoints are Stoker's.

    dcp.save(state, checkpoint_id="/nvme0/run/step-120", storage_writer=Writer())
    dcp.load(state, checkpoint_id="/nvme0/run", storage_reader=Reader())  # the newest sound one

A checkpoint is a folder with a pack a rank, and a manifest with a hash of every byte, written last
(docs/formats/checkpoint.md). What DCP gives as bytes stays bytes: nothing here reads it.

checkpoint_id is a folder or a composition ("s3://bucket/run"), and behind it "/step-120", or the
name of one checkpoint.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stoker import _core
from stoker.checkpoint import gate, parts, rectangles, tensors
from stoker.checkpoint.commits import commit, composition_of, sound
from stoker.checkpoint.manifest import File, Manifest, Name, Piece, damaged
from stoker.checkpoint.reading import Reader as Checkpoint
from stoker.checkpoint.reading import Wanted
from stoker.checkpoint.state import COPIED, Contents
from stoker.checkpoint.workspace import Commits, Ring, Tier
from stoker.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from stoker.offload.division.amounts import parse_bytes
from stoker.offload.storage import record

OBJECT = "dcp"  # of the manifest
TAKEN_WITHIN = 20.0  # seconds, until a thread saves what async_save() has staged
_STEP = re.compile(r"(.+)/step-(\d{1,18})")


@dataclass(frozen=True)
class Place:
    """What a checkpoint_id means."""

    composition: str
    step: int | None
    name: Name | None

    @classmethod
    def of(cls, checkpoint_id: str | os.PathLike | None) -> Place:
        if checkpoint_id is None:
            raise InvalidArgument(
                'there is no checkpoint_id; give one, for example "/nvme0/run/step-120"'
            )
        text = os.fspath(checkpoint_id).rstrip("/")
        store, _, last = text.rpartition("/")
        if store and (name := Name.of(last)):
            return cls(composition_of(store), name.step, name)
        if found := _STEP.fullmatch(text):
            return cls(composition_of(found[1]), int(found[2]), None)
        return cls(composition_of(text), None, None)


@dataclass(frozen=True)
class Written:
    """Where an item is: what a rank tells the coordinator."""

    file: File
    offset: int
    bytes: int
    hashes: tuple[bytes, ...] | None  # of the chunks of the file, at one of its items


class _Opened:
    """Memory, and the store of the checkpoint_id that was used last."""

    def __init__(self, staging: int | str, read_only: bool) -> None:
        size = parse_bytes("staging", staging)
        self._runtime = _core.Runtime(threads=2, budget_bytes=4 * size + (1 << 30))
        self._read_only, self._tier = read_only, None
        self.ring = Ring(self._runtime, size)

    def tier(self, composition: str) -> Tier:
        if self._tier is None or self._tier.composition != composition:
            self.close()
            self._tier = Tier(composition, self._runtime, self._read_only)
        return self._tier

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._tier = None


class Writer(StorageWriter, AsyncStager):
    """For dcp.save(storage_writer=) and dcp.async_save(storage_writer=).

    async_save() copies no large tensor: they leave through `staging` bytes of memory, and until the
    last one has left, step() of every torch optimizer waits. A tensor that is edited before that
    makes the save fail. AsyncCheckpointerType.PROCESS would need a copy, and is refused.

    No checkpoint is ever overwritten: each save is one more attempt. `stoker ckpt gc` removes.
    """

    _synchronize_after_execute = False

    def __init__(
        self, checkpoint_id: str | os.PathLike | None = None, *, staging: int | str = "256MiB"
    ) -> None:
        self._id = checkpoint_id
        self._opened = _Opened(staging, read_only=False)
        self._begun: Name | None = None  # a save of this coordinator that is not committed
        self._written: set[str] = set()
        self._staged: _Staged | None = None
        gate.add(self)

    # -- what DCP calls, in this order ---------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same tensors; small ones are copied."""
        self.wait_copied()
        self._staged = _Staged()
        return self._staged.of(state_dict)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if self._staged is not None:
            self._staged.thread = threading.current_thread()
        self._id = checkpoint_id or self._id
        self._place = Place.of(self._id)
        if self._place.step is None or self._place.name is not None:
            raise InvalidArgument(
                f"checkpoint_id={os.fspath(self._id)!r} names no step to save; end it with the"
                ' step, for example "/step-120"'
            )

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "a Stoker checkpoint has one manifest for all ranks; leave use_collectives=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        tier = self._tier()
        if self._begun is not None:
            tier.remove_quietly(self._begun)
        attempt = max((name.attempt for name in tier.folders()), default=0) + 1
        self._begun = Name(self._place.step, attempt, secrets.token_hex(4))
        self._ranks = len(plans)
        return [
            replace(plan, storage_data=(str(self._begun), rank)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank = plan.storage_data
        if folder in self._written:
            raise Unsupported(
                "the planner gave the plan of an earlier save again; make it with"
                " enable_plan_caching=False"
            )
        self._written.add(folder)
        staged, self._staged = self._staged, None
        try:
            return _done(self._write(Name.of(folder), rank, plan.items, planner, staged))
        finally:
            if staged is not None:
                staged.copied.set()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tier, name = self._tier(), self._begun
        files: dict[str, tuple[File, tuple[bytes, ...]]] = {}
        for written in (each.storage_data for rank in results for each in rank):
            if written.hashes is not None:
                files[written.file.name] = written.file, written.hashes
        of_item = {each.index: each.storage_data for rank in results for each in rank}
        contents = Contents()
        contents.objects[OBJECT] = _record(metadata, of_item, contents.state)
        said = {
            "writer": {
                "stoker": _core.__version__,
                "host": socket.gethostname(),
                "ranks": self._ranks,
            },
        }
        in_order = [files[each] for each in sorted(files)]
        try:
            commit(
                tier,
                name,
                [file for file, _ in in_order],
                [list(hashes) for _, hashes in in_order],
                contents,
                said,
            )
        except BaseException:
            tier.remove_quietly(name)
            raise
        finally:
            self._begun = None

    @property
    def checkpoint_id(self) -> str | os.PathLike | None:
        return self._id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    # -- what the gate and async_save() ask ----------------------------------------------------

    def wait_copied(self) -> None:
        staged = self._staged
        if staged is not None:
            staged.wait()

    def synchronize_staging(self) -> None:
        """Tensors may be edited when it returns."""
        self.wait_copied()

    def close(self) -> None:
        """Lets go of the store."""
        self.wait_copied()
        self._opened.close()

    def __getstate__(self) -> Any:
        raise Unsupported(
            "another process cannot read these tensors; call async_save() with"
            " async_checkpointer_type=AsyncCheckpointerType.THREAD"
        )

    def _tier(self) -> Tier:
        return self._opened.tier(self._place.composition)

    def _write(
        self,
        name: Name,
        rank: int,
        items: list[WriteItem],
        planner: SavePlanner,
        staged: _Staged | None,
    ) -> list[WriteResult]:
        if not items:
            return []
        sources = [(_bytes_of(item, planner), item) for item in items]
        pack = f"state-{rank:05}.pack"
        whole, places = parts.packed(
            pack, [(size, source) for (size, source), _ in sources], tensors.ALIGN
        )
        ring = self._opened.ring
        with Commits(ring) as commits:
            hashes = self._tier().write(name, whole, ring, commits)
        if staged is not None:
            staged.check()
        file = File(pack, whole.bytes, len(hashes))
        return [
            WriteResult(item.index, size, Written(file, at, size, None if i else tuple(hashes)))
            for i, (((size, _), item), at) in enumerate(zip(sources, places))
        ]


class _Staged:
    """A state whose bytes have not left memory yet."""

    def __init__(self) -> None:
        self.copied = threading.Event()
        self.thread: threading.Thread | None = None  # that saves it
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def of(self, value: Any, where: str = "") -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() < COPIED:
                return value.detach().clone()
            local = value.to_local() if hasattr(value, "to_local") else value
            self._versions.append((where, local.detach(), local._version))
            return value
        if isinstance(value, dict):
            return {key: self.of(each, f"{where}.{key}") for key, each in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self.of(each, f"{where}[{i}]") for i, each in enumerate(value))
        return value

    def check(self) -> None:
        for where, tensor, version in self._versions:
            if tensor._version != version:
                raise parts.Edited(
                    f"{where.lstrip('.')} was changed while it was being saved; change tensors "
                    f"only in step() of a torch optimizer, which waits for the save"
                )

    def wait(self) -> None:
        """Returns also where nobody will copy it any more: the save has failed, or never began. If
        somebody does after all, check() finds what was changed since."""
        until = time.monotonic() + TAKEN_WITHIN
        while not self.copied.wait(0.05):
            if self.thread is None and time.monotonic() > until:
                return
            if self.thread is not None and not self.thread.is_alive():
                return


class _Lazy(parts.Brought):
    """A tensor that the planner gives when its bytes are wanted."""

    def __init__(self, item: WriteItem, size: int, planner: SavePlanner) -> None:
        self._item, self._size, self._planner = item, size, planner
        self._tensor: parts.Tensor | None = None

    def read(self, at: int, size: int, address: int) -> None:
        if self._tensor is None:
            tensor = self._planner.resolve_data(self._item)
            if tensor.numel() * tensor.element_size() != self._size:
                raise InvalidArgument(
                    f"{self._item.index.fqn} changed its size after the save was planned; keep "
                    "its size until the save ends"
                )
            self._tensor = parts.Tensor(self._item.index.fqn, tensor)
        self._tensor.read(at, size, address)
        if at + size == self._size:
            self._tensor = None


def _bytes_of(item: WriteItem, planner: SavePlanner) -> tuple[int, parts.Source]:
    if item.type == WriteItemType.BYTE_IO:
        data = bytes(planner.resolve_data(item).getbuffer())
        return len(data), parts.Bytes(data)
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    size = tensors.Spec(item.index.fqn, dtype, tuple(chunk.sizes)).bytes
    return size, _Lazy(item, size, planner)


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


# -- the record of the manifest -------------------------------------------------------------------


def _record(
    metadata: Metadata, of_item: dict[MetadataIndex, Written], pieces: list[Piece]
) -> dict[str, Any]:
    """What the manifest says beside the pieces, which are added to `pieces`."""

    def piece(index: MetadataIndex, dtype: str, shape: list[int]) -> int:
        written = of_item[index]
        size = shape if dtype else [written.bytes]
        pieces.append(
            Piece(
                index.fqn, dtype or "uint8", size, written.file.name, written.offset, written.bytes
            )
        )
        return len(pieces) - 1

    entries: dict[str, Any] = {}
    for fqn, each in metadata.state_dict_metadata.items():
        if isinstance(each, BytesStorageMetadata):
            entries[fqn] = {"blob": piece(MetadataIndex(fqn), "", [])}
            continue
        dtype = tensors.dtype_name(each.properties.dtype)
        entries[fqn] = {
            "dtype": dtype,
            "shape": list(each.size),
            "chunks": [
                {
                    "begin": list(chunk.offsets),
                    "part": piece(MetadataIndex(fqn, chunk.offsets), dtype, list(chunk.sizes)),
                }
                for chunk in each.chunks
            ],
        }
    return {"entries": entries, "planner": record.encode(metadata.planner_data, "planner_data")}


def _metadata(manifest: Manifest, where: str) -> Metadata:
    """What DCP wants to know, as it was given to finish()."""
    said = manifest.objects.get(OBJECT)
    if said is None:
        raise Mismatch(
            f"{where} was not saved by torch.distributed.checkpoint; load it by"
            " stoker.Checkpoints.restore()"
        )
    found: dict[str, Any] = {}
    where_is: dict[MetadataIndex, Piece] = {}

    def piece(number: int) -> Piece:
        if not isinstance(number, int) or not 0 <= number < len(manifest.state):
            raise ValueError(f"it refers to part {number} of {len(manifest.state)}")
        return manifest.state[number]

    try:
        for fqn, entry in said["entries"].items():
            if "blob" in entry:
                where_is[MetadataIndex(fqn)] = piece(entry["blob"])
                found[fqn] = BytesStorageMetadata()
                continue
            dtype, chunks = getattr(torch, entry["dtype"]), []
            for each in entry["chunks"]:
                of_chunk = piece(each["part"])
                begin, size = torch.Size(each["begin"]), torch.Size(of_chunk.shape)
                if tensors.Spec(fqn, dtype, tuple(size)).bytes != of_chunk.bytes:
                    raise ValueError(f"{of_chunk.bytes} bytes for {fqn} of the shape {list(size)}")
                where_is[MetadataIndex(fqn, begin)] = of_chunk
                chunks.append(ChunkStorageMetadata(begin, size))
            found[fqn] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks
            )
        planner = record.decode(said["planner"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(where, f"the manifest breaks the format ({error})") from None
    return Metadata(found, planner_data=planner, storage_data=where_is)


# -- loading ---------------------------------------------------------------------------------------


class Reader(StorageReader):
    """For dcp.load(storage_reader=). It reads what it needs, and verifies it as it copies."""

    def __init__(
        self, checkpoint_id: str | os.PathLike | None = None, *, staging: int | str = "64MiB"
    ) -> None:
        self._id = checkpoint_id
        self._opened = _Opened(staging, read_only=True)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self._id = checkpoint_id or self._id

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        place = Place.of(self._id)
        tier = self._opened.tier(place.composition)
        self._from = Checkpoint(tier, place.name or _newest(tier, place), self._opened.ring, [])
        return _metadata(self._from.manifest, self._from.where)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        self._pieces: dict[MetadataIndex, Piece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=str(self._from.manifest.name))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise Mismatch("a save ended while the ranks began to load; load once more")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[_Read]] = {}
        for item in plan.items:
            piece = self._pieces[item.storage_index]
            by_file.setdefault(piece.file, []).append(_Read(item, piece, planner))
        for file, reads in by_file.items():
            self._from.copy(file, [wanted for each in reads for wanted in each.wanted()])
            for each in reads:
                each.done()
        return _done(None)

    @property
    def checkpoint_id(self) -> str | os.PathLike | None:
        return self._id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def close(self) -> None:
        self._opened.close()


class _Read:
    """An item that is loaded."""

    def __init__(self, item: ReadItem, piece: Piece, planner: LoadPlanner) -> None:
        self._item, self._piece, self._planner = item, piece, planner
        if item.type == LoadItemType.BYTE_IO:
            self._held = torch.empty(max(1, piece.bytes), dtype=torch.uint8, device="cpu")
            return
        self._target = planner.resolve_tensor(item).detach()
        dtype = getattr(torch, piece.dtype)
        direct = (
            self._target.device.type == "cpu"
            and self._target.is_contiguous()
            and self._target.dtype == dtype
        )
        self._held = (
            self._target if direct else torch.empty(tuple(item.lengths), dtype=dtype, device="cpu")
        )
        if tuple(self._held.shape) != tuple(item.lengths):
            raise Mismatch(
                f"{item.storage_index.fqn} has the shape {list(self._held.shape)} here, but its"
                f" part in the load plan has {list(item.lengths)}; load with the default planner"
            )

    def wanted(self) -> Iterator[Wanted]:
        piece, address = self._piece, self._held.data_ptr()
        if self._item.type == LoadItemType.BYTE_IO:
            yield Wanted(piece.offset, piece.bytes, address)
            return
        size = self._held.element_size()
        for run in rectangles.runs(piece.shape, self._item.storage_offsets, self._item.lengths):
            yield Wanted(
                piece.offset + run.at * size, run.count * size, address + run.within * size
            )

    def done(self) -> None:
        if self._item.type == LoadItemType.BYTE_IO:
            data = self._held[: self._piece.bytes].numpy().tobytes()
            self._planner.load_bytes(self._item, io.BytesIO(data))
            return
        if self._held is not self._target:
            self._target.copy_(self._held)
        self._planner.commit_tensor(self._item, self._target)


def _newest(tier: Tier, place: Place) -> Name:
    """Of those whose manifest verifies."""
    wanted = [each.name for each in sound(tier) if place.step in (None, each.step)]
    if not wanted:
        which = "" if place.step is None else f" of step {place.step}"
        raise NotFound(
            f"{tier.composition} has no intact checkpoint{which}; `stoker ckpt ls` shows what there"
            " is"
        )
    return max(wanted)


__all__ = ["Reader", "Writer"]
