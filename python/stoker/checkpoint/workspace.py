"""The memory and the stores of checkpoints: a ring of buffers, and tiers that hold folders."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from stoker import _core
from stoker.checkpoint.manifest import CHUNK, MANIFEST, File, Manifest, Name, damaged
from stoker.checkpoint.parts import Whole, memory
from stoker.errors import (
    Conflict,
    Corruption,
    InDoubt,
    InvalidArgument,
    IoError,
    NotFound,
    StokerError,
)

log = logging.getLogger("stoker")
# Fills a chunk's memory, at the address; or begins to, and gives what has wait().
Fill = Callable[[int], Any]
FILLING = 4  # chunks that are filled at a time, at most
GIVEN_UP = b"given up\n"  # in place of a manifest: who finds the folder removes it
PLANE_BYTES = 8 << 20  # the largest chunk of a plane


@dataclass
class Buffer:
    address: int
    size: int
    holds: Any = None  # what is in it, where that is of use

    def view(self, size: int) -> memoryview:
        return memoryview((ctypes.c_char * size).from_address(self.address))


class Ring:
    """Buffers of one chunk each. Who takes one waits for the oldest transfer where none is free."""

    def __init__(self, runtime: _core.Runtime, size: int) -> None:
        count = max(4, size // CHUNK)
        self.half = count // 2  # what a reader may hold, so that a writer beside it has some
        self.bytes = count * CHUNK + PLANE_BYTES
        self._memory = runtime.arena(self.bytes).take(self.bytes)
        start = self._memory.address
        self._free = [Buffer(start + i * CHUNK, CHUNK) for i in range(count)]
        self.plane = Buffer(start + count * CHUNK, PLANE_BYTES)
        self.runtime, self._passing = runtime, None
        self._moving: deque[tuple[_core.Future, Buffer]] = deque()

    def passing(self) -> Buffer:
        """One more for planes: of the thread that passes weights to other ranks."""
        if self._passing is None:
            memory = self.runtime.arena(PLANE_BYTES).take(PLANE_BYTES)
            self._passing = memory, Buffer(memory.address, PLANE_BYTES)
            self.bytes += PLANE_BYTES
        return self._passing[1]

    def take(self) -> Buffer:
        if not self._free:
            self._settle()
        return self._free.pop()

    def give(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def moves(self, future: _core.Future, buffer: Buffer) -> None:
        """The buffer is free when the transfer is done."""
        self._moving.append((future, buffer))

    def drain(self) -> None:
        """Waits for all transfers; raises the first error."""
        first: BaseException | None = None
        while self._moving:
            try:
                self._settle()
            except StokerError as error:
                first = first or error
        if first is not None:
            raise first

    def _settle(self) -> None:
        future, buffer = self._moving.popleft()
        self._free.append(buffer)
        future.wait()


class Commits:
    """Commits of files, each of which is flushed while the next is written. At the end of `with`
    all are durable, and the ring is at rest; it raises the first error. Where the body raises, they
    have ended too."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: list[tuple[_core.Future, Any]] = []  # with the transaction, which it needs

    def begin(self, txn: Any) -> None:
        self._under_way.append((txn.commit("durable"), txn))

    def __enter__(self) -> Commits:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        first: BaseException | None = None
        while self._under_way:
            try:
                self._under_way[0][0].wait()
            except StokerError as caught:
                first = first or caught
            del self._under_way[0]
        try:
            self._ring.drain()
        except StokerError as caught:
            first = first or caught
        if error is None and first is not None:
            raise first


class Tier:
    """A store that holds checkpoints. `runtime`: whose threads and memory it uses."""

    def __init__(self, composition: str, runtime: _core.Runtime, read_only: bool = False) -> None:
        self.composition = composition
        holder = f"checkpoints, pid {os.getpid()}"
        try:
            self.store = runtime.open_store(
                composition, create=not read_only, read_only=read_only, holder=holder
            )
        except InvalidArgument as error:
            try:
                runtime.open_store(composition, read_only=read_only, holder=holder)
            except NotFound:  # so it cannot be made without a capacity
                how = f"make it first: stoker create {composition} --capacity 100GiB"
                raise InvalidArgument(f"{error}; {how}") from error
            except StokerError:
                pass
            raise

    def names(self) -> list[Name]:
        """Folders that have a manifest, the newest first. It may be damaged."""
        there = (each["key"] for each in self.store.list("step-") if each["bytes"] != len(GIVEN_UP))
        found = (
            Name.of(key.removesuffix("/" + MANIFEST))
            for key in there
            if key.endswith("/" + MANIFEST)
        )
        return sorted((name for name in found if name), reverse=True)

    def folders(self) -> dict[Name, list[str]]:
        """All folders and their objects, those without a manifest too."""
        found: dict[Name, list[str]] = {}
        for each in self.store.list("step-"):
            folder, _, file = each["key"].partition("/")
            if (name := Name.of(folder)) and file:
                found.setdefault(name, []).append(file)
        return found

    def where(self, name: Name) -> str:
        return f"{self.composition}/{name}"

    def manifest(self, name: Name) -> Manifest:
        try:
            data = self.store.read_bytes(f"{name}/{MANIFEST}")
        except NotFound:
            raise NotFound(
                f"{self.where(name)} is not a checkpoint: it has no {MANIFEST}; `stoker ckpt ls`"
                " lists the checkpoints"
            ) from None
        except IoError as error:  # as damage: others may be sound
            raise damaged(self.where(name), f"{MANIFEST} cannot be read ({error})") from error
        made = Manifest.parse(data, self.where(name))
        if made.name != name:
            raise Corruption(
                f"{self.where(name)} holds the manifest of {made.name}; rename it to that name"
            )
        return made

    def write(
        self,
        name: Name,
        whole: Whole,
        ring: Ring,
        commits: Commits,
        copied: Callable[[], None] = lambda: None,
        after: Callable[[int], None] = lambda size: None,
    ) -> list[bytes]:
        """Writes a file, and begins its commit; returns the hash of each chunk. `copied` is called
        when nothing is needed of the sources any more, `after` after each chunk, with its size."""
        hashes: list[bytes] = []

        def chunks() -> Generator[tuple[int, int, Fill], None, None]:
            for i, within in enumerate(whole.chunks()):
                size = min(CHUNK, whole.bytes - i * CHUNK)
                yield (
                    i * CHUNK,
                    size,
                    partial(begin_to_fill, ring, size, within, hashes),
                )
                after(size)

        self.write_chunks(f"{name}/{whole.name}", whole.bytes, chunks(), ring, commits, copied)
        return hashes

    def write_stream(
        self,
        name: Name,
        file: File,
        chunks: Generator,
        ring: Ring,
        commits: Commits,
        progress: Callable[[int], Any],
    ) -> None:
        """Writes a file of chunks as Reader.stream() gives them, and begins its commit."""

        def each() -> Generator[tuple[int, int, Fill], None, None]:
            with contextlib.closing(chunks):
                for at, theirs, size in chunks:
                    yield at, size, lambda address: ctypes.memmove(address, theirs.address, size)
                    progress(size)

        self.write_chunks(f"{name}/{file.name}", file.bytes, each(), ring, commits)

    def write_chunks(
        self,
        key: str,
        size: int,
        chunks: Generator[tuple[int, int, Fill], None, None],
        ring: Ring,
        commits: Commits,
        filled: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes an object of chunks: (offset, bytes, what fills memory with them), and begins its
        commit, which waits for the writes. The chunks are closed where it fails: an error that
        somebody keeps would keep their buffers too. `filled` is called when all of them are."""
        txn = self.store.begin()
        filling: deque[tuple[int, int, Buffer, Any]] = deque()

        def write_first() -> None:
            at, length, buffer, going_on = filling[0]
            if going_on is not None:
                going_on.wait()
            filling.popleft()
            try:
                future = txn.write(key, at, buffer.address, length, "checkpoint")
            except BaseException:
                ring.give(buffer)
                raise
            ring.moves(future, buffer)

        try:
            txn.resize(key, size)
            for at, length, fill_chunk in chunks:
                buffer = ring.take()
                try:
                    going_on = fill_chunk(buffer.address)
                except BaseException:
                    ring.give(buffer)
                    raise
                going_on = going_on if hasattr(going_on, "wait") else None
                filling.append((at, length, buffer, going_on))
                while filling and (going_on is None or len(filling) >= min(FILLING, ring.half)):
                    write_first()
            while filling:
                write_first()
            filled()
            commits.begin(txn)
        except BaseException:
            chunks.close()
            for _, _, buffer, going_on in filling:
                if going_on is not None:
                    with contextlib.suppress(StokerError):
                        going_on.wait()
                ring.give(buffer)
            with contextlib.suppress(StokerError):
                ring.drain()
            txn.abandon()
            raise

    def put(self, name: Name, file: str, data: bytes, new: bool = False) -> None:
        """A small file, durable when it returns. `new`: Conflict if it is there."""
        key = f"{name}/{file}"
        doubted = False
        for last in (False, False, True):
            txn = self.store.begin()
            if new:
                txn.require(key, None)
            txn.resize(key, len(data))
            for at in range(0, len(data), CHUNK):
                txn.write_bytes(key, at, data[at : at + CHUNK])
            try:
                txn.commit("durable").wait()
                return
            except (InDoubt, Conflict) as error:
                # The answer of a bucket was lost: it may be there, with these bytes. Then the next
                # try meets its own write.
                conflict = isinstance(error, Conflict)
                if conflict and not doubted:
                    raise
                doubted = True
                with contextlib.suppress(StokerError):
                    if self.store.read_bytes(key) == data:
                        return
                if last or conflict:
                    raise

    def put_manifest(self, name: Name, data: bytes, files: list[str]) -> None:
        """Makes it a checkpoint of these files; Conflict where another writer has removed it."""
        self.put(name, MANIFEST, data, new=self.store.features()["conditional"])
        if not {*files, MANIFEST} <= set(self.folders().get(name, [])):
            self.remove(name)
            raise Conflict(
                f"another writer removed {self.where(name)} while it was saved; let only one"
                " program save into this store at a time"
            )

    def remove(self, name: Name, finished: bool = True) -> None:
        """The manifest goes first: a folder half removed is no checkpoint. Where there is none, one
        that says so takes its place until the end, so that a slow writer cannot commit what is
        half removed. `finished`: a checkpoint goes too, not only what never became one."""
        files = self.folders().get(name, [])
        if MANIFEST in files and not finished and name in self.names():
            return
        if MANIFEST not in files and self.store.features()["conditional"]:
            try:
                self.put(name, MANIFEST, GIVEN_UP, new=True)
            except Conflict:
                return  # it was committed meanwhile
        elif name in self.names():
            self._remove(name, MANIFEST)
        for file in files:
            if file != MANIFEST:
                self._remove(name, file)
        with contextlib.suppress(NotFound):
            self._remove(name, MANIFEST)

    def remove_files(self, name: Name, files: set[str]) -> None:
        """Those of them that are there."""
        for each in self.store.list(f"{name}/"):
            if (file := each["key"].partition("/")[2]) in files:
                self._remove(name, file)

    def remove_quietly(self, name: Name) -> None:
        """What is left of an attempt that came to nothing; garbage where that fails. Where another
        writer has made it a checkpoint meanwhile, it stays."""
        try:
            self.remove(name, finished=False)
        except StokerError as error:
            log.info("%s is left behind: %s", self.where(name), error)

    def _remove(self, name: Name, file: str) -> None:
        txn = self.store.begin()
        txn.remove(f"{name}/{file}")
        txn.commit("durable").wait()

    def close(self) -> None:
        self.store.close()


class Filling:
    """A chunk that is copied from memory, and hashed. wait() appends its hash to `hashes`."""

    def __init__(self, ring: Ring, address: int, size: int, within: list, hashes: list) -> None:
        parts = [(where, part.source.place(at), n) for part, at, where, n in within]
        self._hashing = ring.runtime.gather(address, size, parts)
        self._within, self._hashes = within, hashes

    def wait(self) -> None:
        digest = self._hashing.wait()
        for part, *_ in self._within:
            part.source.check()
        self._hashes.append(digest)


def begin_to_fill(
    ring: Ring, size: int, within: list, hashes: list[bytes], address: int
) -> Filling | None:
    """Fills a chunk, and appends its hash to `hashes`: now, or when its wait() is called."""
    if all(part.source.place(at) is not None for part, at, *_ in within):
        return Filling(ring, address, size, within, hashes)
    fill(address, size, within)
    hashes.append(_core.xxh3_128(address, size))
    return None


def fill(address: int, size: int, within: list) -> None:
    """Fills a chunk from its parts, and zeros where there are none."""
    at = 0
    for part, begin, where, length in within:
        if where > at:
            memory(address + at, where - at).zero_()
        part.source.read(begin, length, address + where)
        at = where + length
    if at < size:
        memory(address + at, size - at).zero_()
