"""Reading a checkpoint: every byte is verified as it is copied."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoker import _core
from stoker.checkpoint import shards, tensors
from stoker.checkpoint.manifest import (
    CHUNK,
    Entry,
    File,
    Manifest,
    Name,
    Piece,
    Stored,
    Table,
    damaged,
    parse_reduced,
    parse_table,
    well_formed,
)
from stoker.checkpoint.parts import room
from stoker.checkpoint.rectangles import matches, runs
from stoker.checkpoint.state import parts_in
from stoker.checkpoint.workspace import Buffer, Ring, Tier
from stoker.errors import Corruption, InvalidArgument, IoError, Mismatch, NotFound, StokerError
from stoker.offload.storage import record

log = logging.getLogger("stoker")
AHEAD = 8  # chunks on their way, at most
SPREADING = 4  # chunks that are copied and hashed, at most
_UNREAD = (Corruption, NotFound, IoError, InvalidArgument)


@dataclass(frozen=True)
class Number:
    """Of a tensor of a record that was not read yet."""

    number: int


class Ended:
    """A read that could not begin, or ended as it says."""

    def __init__(self, error: StokerError | None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class Wanted:
    """Bytes of a file that go to memory."""

    offset: int
    bytes: int
    address: int


class Reader:
    """One checkpoint in one tier. Corruption, NotFound or Mismatch if it does not open."""

    def __init__(self, tier: Tier, name: Name, ring: Ring, others: list[Tier]) -> None:
        """`others`: tiers that have it too. What is damaged here is taken from there."""
        self.tier, self._name, self._ring, self._others = tier, name, ring, others
        self.where = tier.where(name)
        self.manifest: Manifest = tier.manifest(name)
        table, *of_reduced = self.manifest.tables
        made = self.manifest, self.where
        self._entries: dict[str, list[Entry]] = parse_table(self._table(table), *made)
        self._reduced: dict[str, list[Stored]] = {}
        for each in of_reduced:
            self._reduced = parse_reduced(self._table(each), *made)
        self._twins: dict[str, Reader | None] = {}  # the same checkpoint in others, by tier
        self._tensors: dict[str, tuple[str, tensors.Placed]] | None = None

    def _table(self, table: Table) -> bytes:
        try:
            return self.tier.store.read_bytes(f"{self._name}/{table.name}")
        except NotFound:
            raise damaged(
                self.where, f"{table.name}, which its manifest lists, is missing"
            ) from None
        except IoError as error:
            raise damaged(self.where, f"{table.name} cannot be read ({error})") from error

    def hashes(self, file: File) -> list[bytes]:
        return [entry.hash for entry in self._entries[file.name]]

    def verify(self, progress: Any = lambda _: None) -> None:
        """Reads and checks all. Corruption names the first bytes that differ."""
        for file in self.manifest.files:
            self._check_size(file)
            for _, _, size in self.stream(file):
                progress(size)
        self.tensors()

    def _check_size(self, file: File) -> None:
        name, size = self.manifest.object_of(file.name)
        try:
            found = self.tier.store.stat(f"{self._name}/{name}")["bytes"]
        except NotFound:
            raise damaged(self.where, f"{name}, which its manifest lists, is missing") from None
        if found != size:
            raise damaged(self.where, f"{name} has {found} bytes, but its manifest says {size}")

    def stream(
        self, file: File, wanted: Any = None
    ) -> Generator[tuple[int, Buffer, int], None, None]:
        """(offset, memory, bytes) of the chunks of a file in order, each verified. The memory is
        the caller's until it asks for the next. `wanted`: which chunks, by number; None: all."""
        ahead, entries = deque(), self._entries[file.name]
        most = min(AHEAD, self._ring.half)
        numbers = iter(range(file.chunks) if wanted is None else sorted(wanted))
        spare = None  # what a reduced chunk becomes
        if file.name in self._reduced:
            most, spare = max(1, most - 1), self._ring.take()
        try:
            while True:
                while len(ahead) < most and (i := next(numbers, None)) is not None:
                    buffer = self._ring.take()
                    try:
                        future = self._begin(file, i, buffer)
                    except StokerError as error:
                        future = Ended(error)
                    ahead.append((future, i, buffer))
                if not ahead:
                    return
                future, i, buffer = ahead.popleft()
                try:
                    if self._verified(future, file, i, buffer, spare) is spare:
                        buffer, spare = spare, buffer
                    yield entries[i].offset, buffer, entries[i].bytes
                finally:
                    self._ring.give(buffer)
        finally:
            for future, _, buffer in ahead:
                with contextlib.suppress(StokerError):
                    future.wait()
                self._ring.give(buffer)
            if spare is not None:
                self._ring.give(spare)

    def _begin(self, file: File, i: int, buffer: Buffer) -> Any:
        """Begins to read a chunk, as it lies there."""
        reduced = self._reduced.get(file.name)
        at = self._entries[file.name][i] if reduced is None else reduced[i]
        key = f"{self._name}/{self.manifest.object_of(file.name)[0]}"
        return self.tier.store.read(key, at.offset, buffer.address, at.bytes, "checkpoint")

    def _plain(self, file: File, i: int, buffer: Buffer, spare: Buffer | None) -> Buffer | None:
        """Which of the two holds the chunk, once what lies there was read. None: it is damaged."""
        entry = self._entries[file.name][i]
        if file.name in self._reduced:
            stored = self._reduced[file.name][i]
            if _core.xxh3_128(buffer.address, stored.bytes) != stored.hash:
                return None
            if stored.width:
                given = buffer.address, stored.bytes, stored.width
                _core.expand(*given, spare.address, entry.bytes)
                buffer = spare
        return buffer if _core.xxh3_128(buffer.address, entry.bytes) == entry.hash else None

    def _verified(
        self, future: Any, file: File, i: int, buffer: Buffer, spare: Buffer | None
    ) -> Buffer:
        """Waits for a chunk: which of the two holds it. One that is damaged, or not there, comes
        from another tier."""
        entry = self._entries[file.name][i]
        place = f"{file.name} between byte {entry.offset} and {entry.offset + entry.bytes}"
        try:
            future.wait()
            if (held := self._plain(file, i, buffer, spare)) is not None:
                return held
            what = f"{place} is damaged: the bytes do not match their hash"
        except _UNREAD as caught:
            what = f"{place} cannot be read ({caught})"
        for other in self._others:
            with contextlib.suppress(StokerError):
                if self._from(other, file, i, buffer):
                    log.warning(
                        "%s: %s; these bytes were read from %s instead",
                        self.where,
                        what,
                        other.where(self._name),
                    )
                    return buffer
        raise damaged(self.where, what)

    def _from(self, other: Tier, file: File, i: int, buffer: Buffer) -> bool:
        """Whether another tier has the chunk. Its manifest and tables may be damaged: then a file
        that lies there as it is still has it."""
        entry = self._entries[file.name][i]
        twin = self._twin(other)
        if twin is not None and file in twin.manifest.files and file.name in twin._reduced:
            theirs = self._ring.take()
            try:
                twin._begin(file, i, theirs).wait()
                held = twin._plain(file, i, theirs, buffer)
                if held is theirs:
                    ctypes.memmove(buffer.address, theirs.address, entry.bytes)
            finally:
                self._ring.give(theirs)
        else:
            key = f"{self._name}/{file.name}"
            other.store.read(key, entry.offset, buffer.address, entry.bytes, "checkpoint").wait()
        return _core.xxh3_128(buffer.address, entry.bytes) == entry.hash

    def _twin(self, other: Tier) -> Reader | None:
        if other.composition not in self._twins:
            self._twins[other.composition] = None
            with contextlib.suppress(StokerError):
                self._twins[other.composition] = Reader(other, self._name, self._ring, [])
        return self._twins[other.composition]

    def copy(self, name: str, wanted: list[Wanted], progress: Any = lambda _: None) -> None:
        """Copies ranges of a file to memory; each chunk is read once."""
        file = self.manifest.file(name)
        wanted = sorted((each for each in wanted if each.bytes), key=lambda each: each.offset)
        numbers = {
            i
            for each in wanted
            for i in range(each.offset // CHUNK, (each.offset + each.bytes - 1) // CHUNK + 1)
        }
        first = 0

        def parts_in(at: int, size: int) -> list[tuple[int, int, int]]:
            nonlocal first
            while first < len(wanted) and wanted[first].offset + wanted[first].bytes <= at:
                first += 1
            found = []
            for each in wanted[first:]:
                if each.offset >= at + size:
                    break
                begin, end = max(at, each.offset), min(at + size, each.offset + each.bytes)
                if begin < end:
                    found.append((begin - at, each.address + begin - each.offset, end - begin))
            return found

        if file.name in self._reduced:
            for at, buffer, size in self.stream(file, numbers):
                _move(buffer, parts_in(at, size))
                progress(size)
        else:
            self._spread(file, sorted(numbers), parts_in, progress)

    def _spread(
        self, file: File, numbers: list[int], parts_in: Callable, progress: Callable[[int], Any]
    ) -> None:
        """Copies parts of chunks to where parts_in() says. The pool copies and hashes them, while
        others are read."""
        entries, ring = self._entries[file.name], self._ring
        left = deque(numbers)
        reads: deque[tuple[Any, int, Buffer]] = deque()
        copies: deque[tuple[Any, int, Buffer, list]] = deque()
        at_once = min(SPREADING, max(1, ring.half // 2))

        def settle() -> None:
            hashing, i, buffer, parts = copies[0]
            digest = hashing.wait()  # Ctrl-C: below it is waited for once more
            copies.popleft()
            try:
                if digest != entries[i].hash:
                    self._verified(Ended(None), file, i, buffer, None)  # from another tier
                    _move(buffer, parts)
            finally:
                ring.give(buffer)
            progress(entries[i].bytes)

        try:
            while left or reads:
                while left and len(reads) < min(AHEAD, ring.half):
                    i, buffer = left.popleft(), ring.take()
                    try:
                        future = self._begin(file, i, buffer)
                    except StokerError as error:
                        future = Ended(error)
                    reads.append((future, i, buffer))
                while len(copies) >= at_once:
                    settle()
                future, i, buffer = reads.popleft()
                at, size = entries[i].offset, entries[i].bytes
                try:
                    try:
                        future.wait()
                    except _UNREAD as error:
                        self._verified(Ended(error), file, i, buffer, None)
                    parts = parts_in(at, size)
                    hashing = ring.runtime.scatter(buffer.address, size, parts)
                except BaseException:
                    ring.give(buffer)
                    raise
                copies.append((hashing, i, buffer, parts))
            while copies:
                settle()
        finally:
            for going_on, _, buffer, *_ in (*reads, *copies):
                with contextlib.suppress(StokerError):
                    going_on.wait()
                ring.give(buffer)

    def tensors(self) -> dict[str, tuple[str, tensors.Placed]]:
        """The model's tensors: file and place by name, without aliases."""
        if self._tensors is None:
            self._tensors = self._read_tensors()
        return self._tensors

    def _read_tensors(self) -> dict[str, tuple[str, tensors.Placed]]:
        found = {}
        for file in self.manifest.files:
            if not file.name.endswith(".safetensors"):
                continue
            data = self._bytes_of(file, range(1))
            if (length := min(tensors.header_bytes(data), file.bytes)) > len(data):
                data += self._bytes_of(file, range(1, -(-length // CHUNK)))
            for placed in tensors.read_header(data, file.bytes, f"{self.where}: {file.name}"):
                if placed.spec.name in found:
                    raise damaged(
                        self.where,
                        f"two files hold the tensor {placed.spec.name}:"
                        f" {found[placed.spec.name][0]} and {file.name}",
                    )
                found[placed.spec.name] = (file.name, placed)
        for alias, name in self.manifest.aliases.items():
            if alias in found or name not in found:
                raise damaged(
                    self.where,
                    f"the manifest says that {alias} is tied to {name}, but "
                    + (
                        f"no file holds {name}"
                        if name not in found
                        else f"a file holds {alias} itself"
                    ),
                )
        return found

    def check_tensors(self, into: dict[str, torch.Tensor]) -> None:
        """Mismatch unless the checkpoint has each, with its type and shape."""
        there = self.tensors()
        for name, tensor in into.items():
            spec = there[self.manifest.aliases.get(name, name)][1].spec
            if spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
                raise Mismatch(
                    f"{self.where} has {name} as {tensors.dtype_name(spec.dtype)}"
                    f" {list(spec.shape)}, and the model has {tensors.dtype_name(tensor.dtype)}"
                    f" {list(tensor.shape)}: restore into the model that was saved"
                )

    def load_tensors(self, into: dict[str, torch.Tensor], progress: Any = lambda _: None) -> None:
        """Fills tensors by their names; of distributed ones this rank's part. Mismatch unless the
        checkpoint has each, with its type and shape. Then nothing was changed; a Corruption that is
        found later leaves some filled."""
        self.check_tensors(into)
        there = self.tensors()
        by_file: dict[str, list[Wanted]] = {}
        later = []
        for name, tensor in into.items():
            file, placed = there[self.manifest.aliases.get(name, name)]
            spec = placed.spec
            part, ours = shards.part_of(name, tensor), shards.local(tensor)
            direct = ours.device.type == "cpu" and ours.is_contiguous()
            if not direct:
                held = room(ours.shape, spec.dtype)
                later.append((ours, held))
            target = ours if direct else held
            by_file.setdefault(file, []).extend(
                Wanted(
                    placed.offset + run.at * spec.dtype.itemsize,
                    run.count * spec.dtype.itemsize,
                    target.data_ptr() + run.within * spec.dtype.itemsize,
                )
                for run in runs(spec.shape, part.begin, part.size)
            )
        for file, wanted in by_file.items():
            self.copy(file, wanted, progress)
        with torch.no_grad():
            for tensor, held in later:
                tensor.copy_(held)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name, in memory; tied ones are one tensor."""
        found = {
            name: room(placed.spec.shape, placed.spec.dtype)
            for name, (_, placed) in self.tensors().items()
        }
        self.load_tensors(found)
        for alias, name in self.manifest.aliases.items():
            found[alias] = found[name]
        return found

    def objects(
        self,
        names: list[str],
        progress: Any = lambda _: None,
        like: dict[int, torch.Tensor] | None = None,
        into: dict[int, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """What state_dict() of these objects was. `like`: distributed tensors, by the number of
        the part that becomes one of the same placement; of it only this rank's part is read.
        `into`: tensors that parts are read into, by their numbers, where they fit."""
        records = {name: self.manifest.objects[name] for name in names}
        with self._well_formed():
            numbers = {number for each in records.values() for number in parts_in(each)}
        # memory may lack: that is no damage
        parts = self._parts(numbers, progress, like or {}, into or {})
        with self._well_formed():
            return {name: record.decode(each, parts.__getitem__) for name, each in records.items()}

    def outline(self, name: str) -> Any:
        """What state_dict() of an object was, with a Number in place of each tensor that is not in
        the manifest itself."""
        with self._well_formed():
            return record.decode(self.manifest.objects[name], Number)

    def _well_formed(self) -> contextlib.AbstractContextManager[None]:
        return well_formed(self.where, "a checkpoint", RuntimeError)

    def _parts(
        self,
        numbers: set[int],
        progress: Any,
        like: dict[int, torch.Tensor],
        into: dict[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        by_file: dict[str, list[Wanted]] = {}
        held, found = [], {}  # `held`: memory that is read into
        for number in sorted(numbers):
            if not 0 <= number < len(self.manifest.state):
                raise damaged(
                    self.where,
                    f"an object in the manifest refers to tensor {number}, but the manifest lists"
                    f" only {len(self.manifest.state)}",
                )
            shape, pieces = self._pieces(number)
            param = like.get(number)
            part = (
                shards.mine(pieces[0][1].name, param)
                if param is not None
                else shards.Rectangle((0,) * len(shape), shape)
            )
            dtype = getattr(torch, pieces[0][1].dtype)
            with self._well_formed():  # sizes that torch cannot count
                torch.empty(part.size, dtype=dtype, device="meta")
            tensor = into.get(number)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(part.size)):
                tensor = room(part.size, dtype)
            for begin, piece in pieces:
                by_file.setdefault(piece.file, []).extend(_wanted(piece, begin, part, tensor))
            held.append(tensor)
            found[number] = tensor if param is None else shards.distributed(tensor, param)
        for file, wanted in by_file.items():
            self.copy(file, wanted, progress)
        return found

    def _pieces(self, number: int) -> tuple[tuple[int, ...], list[tuple[Sequence[int], Piece]]]:
        """The shape of a part, and the pieces that it is made of, with where they begin."""
        state, cut = self.manifest.state, self.manifest.sharded.get(str(number))
        if cut is None:
            shape = tuple(state[number].shape)
            return shape, [((0,) * len(shape), state[number])]
        return tuple(cut["shape"]), [(each["begin"], state[each["part"]]) for each in cut["parts"]]

    def small(self, name: str) -> bytes:
        """The manifest or the table, as it lies there."""
        return self.tier.store.read_bytes(f"{self._name}/{name}")

    def bytes_of(self, name: str) -> bytes:
        """All of a small file."""
        return self._bytes_of(self.manifest.file(name), None)

    def _bytes_of(self, file: File, numbers: range | None) -> bytes:
        chunks = self.stream(file, numbers)
        return b"".join(ctypes.string_at(buffer.address, size) for _, buffer, size in chunks)

    def tensor(self, file: str, placed: tensors.Placed) -> tuple[tensors.Spec, bytes]:
        """One tensor's bytes."""
        held = torch.empty(max(1, placed.spec.bytes), dtype=torch.uint8, device="cpu")
        self.copy(file, [Wanted(placed.offset, placed.spec.bytes, held.data_ptr())])
        return placed.spec, ctypes.string_at(held.data_ptr(), placed.spec.bytes)

    def part(self, number: int) -> torch.Tensor:
        """One tensor that a record refers to, whole."""
        return self._parts({number}, lambda _: None, {}, {})[number]


def _move(buffer: Buffer, parts: list[tuple[int, int, int]]) -> None:
    for begin, address, size in parts:
        ctypes.memmove(address, buffer.address + begin, size)


def _wanted(
    piece: Piece, begin: Sequence[int], part: shards.Rectangle, into: torch.Tensor
) -> Iterator[Wanted]:
    """What a piece has of a rectangle of the same tensor."""
    return wanted_of(piece.offset, piece.shape, begin, part, into)


def wanted_of(
    offset: int,
    shape: Sequence[int],
    begin: Sequence[int],
    part: shards.Rectangle,
    into: torch.Tensor,
) -> Iterator[Wanted]:
    """What a rectangle of a tensor has of another one, `part`, by runs that are together in both.
    The rectangle lies in a file, from `offset` on, in row-major order."""
    width = into.element_size()
    for each in matches(begin, shape, part.begin, part.size):
        at, size = into.data_ptr() + each.ours * width, each.count * width
        yield Wanted(offset + each.theirs * width, size, at)
