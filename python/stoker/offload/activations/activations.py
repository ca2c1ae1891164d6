"""Activations: what autograd saves in forward leaves memory, and comes back before its backward.

Rules, in the order in which a saved tensor meets them. docs/semantics.md promises what follows from
them.

1. A saved tensor is described (`Saved`: dtype, size, stride, offset, version); The bytes of its
   storage are kept once, as an `Entry`, however many views of it are saved while its version
   counter stands still. Autograd alone holds `Saved`s: the last one that goes ends the entry. That
   may be on any thread, from within any line of this file (the garbage collector), so it only
   leaves a note (`_gone`).
2. The bytes are copied at once into an arena of their own, drawn on the budget. So nobody can
   change them under a write, and the
   storage is torch's to free. Weights never wait for memory of activations, nor the other way
   round.
3. From there they go to scratch space (scratch.py): at once ("disk"), or when memory is short, what
   is used last first ("dram").
   The copy stays as long as nothing needs its memory: what was saved last is used first, and is
   often never read.
4. A copy's memory comes free when nobody aliases it and no transfer reads or writes it: an entry
   that ends under a transfer waits
   for that in `_leaving`. Its scratch space is reused after that, not before.
5. Backward uses entries in the reverse order of saving. A use starts reading those that come next,
   into memory that is free or that
   holds copies used later; it never waits for that. Departing from the order costs a read on
   demand, and nothing else.
6. Where the storage itself is still alive, it is used, and nothing is read. One that came back is
   shared by all views that were saved of it, and let go once each was used. A second backward
   through the same graph reads again.
7. What is saved while backward runs (a segment that is recomputed, a gradient of a gradient) is
   used at once, and stays as it is.
8. Failures. No space on the disk, or a failed write: the bytes stay in memory, with one warning. No
   memory in the arena: they are written from where they are while forward waits (another device's
   stay there). They are read into ordinary memory, which they would have taken without all this. A
   failed read raises in backward: that backward cannot be finished, and nothing of it was or will
   be committed.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stoker.errors import OverBudget, StokerError
from stoker.offload.activations.forms import Decode, encode
from stoker.offload.activations.traffic import ActivationTraffic
from stoker.offload.division.layout import MIB
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.observe.context import Context
from stoker.offload.paging.saved import Version
from stoker.offload.storage.open_store import OpenStore
from stoker.offload.storage.planes import Planes
from stoker.offload.storage.scratch import Piece, Scratch, clean

if TYPE_CHECKING:
    from stoker.offload.model.blocks import Block
    from stoker.offload.paging.link import Link

MODES = ("keep", "disk", "dram", "recompute", "auto")
# Smaller storages stay. Whatever its size one costs about 60 us of processor time, there and back
# (measured); from here on that is less than a tenth of what its bytes take a disk of 3 GB/s.
LEAST_BYTES = MIB
WHOLE = 8  # a storage larger than its view by more than this is somebody's pool, and stays
AHEAD_BYTES = 64 * MIB  # how far reading ahead goes, at least
TRIAL_BYTES = 64 * MIB
SMALL_TRIAL_BYTES = 8 * MIB  # where the arena has no room for a trial


class Entry:
    """The bytes of one storage. `host` is their copy in memory, or the memory that they are being
    read into, in whole pages."""

    def __init__(self, storage: torch.UntypedStorage, version: int, block: str) -> None:
        self.size, self.version, self.block = storage.nbytes(), version, block
        self.stored = self.size  # bytes in `host` and on the disk
        # what makes them the storage's, if they are in another form
        self.decode: Decode | None = None
        self.key = storage._cdata
        self.origin = StorageWeakRef(storage)  # while this is held no other storage has that key
        # the storage that uses find without a read, as long as somebody holds it
        self.alive = self.origin
        self.host: torch.Tensor | None = None
        self.piece: Piece | None = None
        self.landing: Any = None  # the event of the copy from another device to `host`
        self.reading: Any = None  # the future of the read into `host`
        # the event from which on the device has the bytes that came back to it
        self.ready: Any = None
        # the storage itself, where its bytes could not be kept elsewhere
        self.kept: torch.UntypedStorage | None = None
        # `Saved`s, and those of them that were not used in this round
        self.holders = self.unused = 0
        self.place = 0  # in the order of saving
        self.round = 0  # how often the bytes came back from the disk
        self.before: Entry | None = None  # in that order
        self.after: Entry | None = None

    @property
    def written(self) -> bool:
        return (
            self.piece is not None
            and self.piece.written.ready()
            and self.piece.written.error() is None
        )

    @property
    def busy(self) -> bool:
        """Whether a transfer needs the memory of `host`."""
        return (self.piece is not None and not self.piece.written.ready()) or (
            self.reading is not None and not self.reading.ready()
        )


class Saved:
    """What autograd holds instead of a tensor."""

    __slots__ = ("entry", "dtype", "size", "stride", "offset", "version", "used_in", "_gone")

    def __init__(self, entry: Entry, tensor: torch.Tensor, gone: deque) -> None:
        self.entry, self.dtype, self.size, self.stride, self.offset = (
            entry,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )
        # used_in: the last round
        self.version, self.used_in, self._gone = Version.without_bytes(tensor), -1, gone
        entry.holders += 1
        entry.unused += 1

    def __del__(self) -> None:
        self._gone.append((self.entry, self.used_in))


def arena_bytes(
    mode: str, runtime: OpenStore, blocks: list[Block], algorithm: Algorithm, spills: bool
) -> int:
    """The arena's part of the budget: half of it for "dram", else an eighth, as much as weights,
    gradients and state can spare."""
    dram = runtime.dram_bytes
    whole, layout = runtime.divided(blocks, algorithm, spills)
    # where all gradients fit, they still do; where some are spilled, more may be
    spare = whole - (layout.smallest if layout.spilled else layout.needed)
    return (
        max(0, min(dram // (2 if mode == "dram" else 8), spare - 2 * MIB)) // (2 * MIB) * (2 * MIB)
    )


def _is_in_a_buffer(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether the model holds this tensor's storage anyhow."""
    key = tensor.untyped_storage()._cdata
    return tensor.grad_fn is None and any(
        buffer.untyped_storage()._cdata == key for buffer in model.buffers()
    )


class Activations:
    """Called under the session's lock by whoever runs forward or backward."""

    @staticmethod
    def of(
        mode: str,
        form: str,
        runtime: OpenStore,
        blocks: list[Block],
        algorithm: Algorithm,
        link: Link | None,
        context: Context,
        model: nn.Module,
    ) -> Activations | None:
        """None where nothing leaves memory."""
        if mode in ("keep", "recompute"):
            return None
        size = arena_bytes(mode, runtime, blocks, algorithm, link is None)
        clean(runtime.directories)
        device = torch.device("cpu") if link is None else link.device
        return Activations(
            mode,
            form,
            runtime.core.arena(size) if size else None,
            Scratch(runtime.core, runtime.directories),
            device,
            link,
            context,
            lambda tensor: _is_in_a_buffer(model, tensor),
        )

    def __init__(
        self,
        mode: str,
        form: str,
        arena: Any,
        scratch: Scratch,
        device: torch.device,
        link: Link | None,
        context: Context,
        stays: Callable[[torch.Tensor], bool],
    ) -> None:
        """arena: None where there is no memory for it. stays: whether a tensor lives on anyhow."""
        self.mode, self.form, self.arena, self.scratch, self.device, self.link = (
            mode,
            form,
            arena,
            scratch,
            device,
            link,
        )
        self.arena_bytes = arena.size if arena is not None else 0
        self.waiting, self.event, self.trimmer = context.waiting, context.event, context.trimmer
        self.stays = stays
        self.read_bytes = self.written_bytes = 0
        # by block, in the forward under way or the last one
        self.saved_bytes: Counter[str] = Counter()
        self.choices: dict[str, str] = {}  # of "auto", by block
        self._last: Entry | None = None  # the newest
        self._known: dict[int, Entry] = {}  # by storage, the newest version
        self._resident: dict[Entry, None] = {}  # with a copy in memory
        self._unwritten: deque[Entry] = deque()  # with a copy, to be written
        self._leaving: list[Entry] = []
        # copies to the device that may still read this memory
        self._uploads: list[tuple[Any, torch.Tensor]] = []
        self._gone: deque[tuple[Entry, int]] = deque()
        self._warned = self._closed = False

    # -- forward -----------------------------------------------------------------------------------

    def call(self) -> None:
        """A forward that records gradients begins."""
        self.sweep()
        self.saved_bytes.clear()
        entry = self._last
        while entry is not None:
            before = entry.before
            if entry.holders == 0:  # a Ctrl-C, or an error, came before its first `Saved` was made
                self._end(entry)
            entry = before

    @torch.inference_mode(False)
    @torch.no_grad()
    def save(self, tensor: torch.Tensor, block: str) -> Saved | None:
        """None if it stays as it is."""
        if not self._takes(tensor):
            return None
        self.sweep()
        storage = tensor.untyped_storage()
        entry = self._known.get(storage._cdata)
        if (
            entry is None
            or entry.version != tensor._version
            or self._rewritten(entry, storage, tensor)
        ):
            if self.stays(tensor):
                return None
            entry = self._keep(storage, tensor, block)
        return Saved(entry, tensor, self._gone)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.device != self.device
            or self._closed
        ):
            return False
        if (
            tensor.is_complex()
            or tensor.is_quantized
            or tensor.is_neg()
            or tensor.is_nested
            or (tensor.is_leaf and tensor.requires_grad)
        ):
            return False
        size = tensor.untyped_storage().nbytes()
        if size < LEAST_BYTES or size > WHOLE * tensor.numel() * tensor.dtype.itemsize:
            return False
        return torch._C._current_graph_task_id() == -1

    def _keep(self, storage: torch.UntypedStorage, tensor: torch.Tensor, block: str) -> Entry:
        entry = Entry(storage, tensor._version, block)
        if self.link is None:
            self.trimmer.freed(entry.size)
        flat = _bytes_of(storage)
        formed = encode(self.form, tensor.dtype, flat)
        if formed is not None:
            flat, entry.decode = formed
            entry.stored = flat.numel()
        self.saved_bytes[block] += entry.stored
        host = self._room(entry.stored)
        # first: from here on its memory is not forgotten, whatever interrupts us
        self._append(entry, host)
        if host is None:
            self._keep_without_memory(entry, storage, flat)
        elif self.link is not None:
            entry.landing = self.link.download(flat, host[: entry.stored])
        else:
            host[: entry.stored].copy_(flat)
        self._known[entry.key] = entry
        if host is not None and self.mode != "dram":
            self._unwritten.append(entry)
            self._write_landed()
        return entry

    def _rewritten(self, entry: Entry, storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
        """Whether the storage changed and its version did not (`.data`, NumPy). Not seen where the
        copy is not in memory, nor on another device."""
        if self.link is not None or entry.host is None or entry.reading is not None:
            return False
        flat = _bytes_of(storage)
        formed = encode(self.form, tensor.dtype, flat)
        return not torch.equal(
            formed[0] if formed is not None else flat, entry.host[: entry.stored]
        )

    def _append(self, entry: Entry, host: torch.Tensor | None) -> None:
        before, self._last = self._last, entry
        entry.before = before
        if before is not None:
            entry.place = before.place + 1
            before.after = entry
        if host is not None:
            entry.host = host
            self._resident[entry] = None

    def _keep_without_memory(
        self, entry: Entry, storage: torch.UntypedStorage, flat: torch.Tensor
    ) -> None:
        """Writes from the storage itself, and waits: nobody may change it meanwhile. Where that
        cannot be, it stays."""
        if self.link is None and self._write(entry, flat, "demand"):
            with self.waiting("activations"):
                _ended(entry.piece.written)
            if entry.written:
                return
            self._failed(entry)
        entry.kept = storage

    def _write_landed(self) -> None:
        """Starts writing what has come from the device."""
        while self._unwritten:
            entry = self._unwritten[0]
            if entry.host is not None and entry.piece is None:  # else it ended
                if entry.landing is not None and not self.link.done(entry.landing):
                    return
                self._write(entry, entry.host)
            self._unwritten.popleft()

    def _write(self, entry: Entry, flat: torch.Tensor, priority: str = "write_back") -> bool:
        try:
            entry.piece = self.scratch.write(flat.data_ptr(), flat.numel(), priority)
        except (StokerError, OSError) as error:
            self._warn(error)
            return False
        self.written_bytes += entry.stored
        return True

    def _failed(self, entry: Entry) -> None:
        """Its write failed: what is in memory is all there is."""
        self._warn(entry.piece.written.error())
        self.scratch.free(entry.piece)
        entry.piece = None

    def _warn(self, why: Any) -> None:
        self.event("activations", problem=str(why))
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"activations cannot be written to the disk, so they stay in memory ({why}); "
                f"training goes on, but needs the memory that offloading would have saved",
                stacklevel=2,
            )

    # -- backward ----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, saved: Saved) -> torch.Tensor:
        saved.version.check()
        self.sweep()
        entry = saved.entry
        storage = entry.kept or _living(entry)
        brought = storage is None
        if brought:
            storage = self._bring(entry)
        if self.link is None:
            self.trimmer.freed(entry.size)
        tensor = torch.empty(0, dtype=saved.dtype, device=self.device).set_(
            storage, saved.offset, saved.size, saved.stride
        )
        # this use may be on another stream than that which brought it
        if not brought and entry.ready is not None:
            self.link.join(tensor, entry.ready)
        if saved.used_in != entry.round:
            saved.used_in = entry.round
            entry.unused -= 1
        if entry.unused <= 0:
            self._let_go(entry)
        return saved.version.of(tensor)

    def _bring(self, entry: Entry) -> torch.UntypedStorage:
        """The bytes, in memory again; waits for them if need be."""
        if entry.host is None:
            host = self._room(entry.stored, before=entry)
            self._read(entry, host if host is not None else self._room(entry.stored), "demand")
        self._read_ahead(entry)
        if entry.reading is not None:
            self._finish(entry)
        flat = entry.host if self.link is None else self._to_device(entry)
        if entry.decode is not None:
            flat = entry.decode(flat[: entry.stored])
            if self.link is not None:
                entry.ready = self.link.mark()
        entry.alive = StorageWeakRef(flat.untyped_storage())
        return flat.untyped_storage()

    def _read(self, entry: Entry, host: torch.Tensor | None, priority: str) -> None:
        if host is None:
            host = torch.empty(entry.piece.size, dtype=torch.uint8, device="cpu")
        # before it has memory: a Ctrl-C must not make it look read, nor free it
        entry.reading = _BEGINNING
        entry.host = host
        try:
            entry.reading = self.scratch.read(entry.piece, host.data_ptr(), priority)
        except Exception:  # nothing was started
            entry.host = entry.reading = None
            raise
        self.read_bytes += entry.stored
        self._resident[entry] = None
        entry.round += 1
        entry.unused = entry.holders

    def _read_ahead(self, entry: Entry) -> None:
        if self.arena is None:
            return
        budget = min(self.arena.size, max(AHEAD_BYTES, 4 * entry.stored))
        ahead = entry.before
        while ahead is not None and budget > 0:
            if (
                ahead.host is None
                and ahead.written
                and ahead.kept is None
                and _living(ahead) is None
            ):
                host = self._room(ahead.stored, before=ahead, wait=False)
                if host is None:
                    return
                self._read(ahead, host, "prefetch")
            budget -= ahead.stored
            ahead = ahead.before

    def _finish(self, entry: Entry) -> None:
        try:
            with self.waiting("activations"):
                entry.reading.wait()
        except StokerError as error:
            if entry.reading is not _BEGINNING:
                self._drop(entry)
            raise type(error)(
                f"{entry.stored} bytes of activations of {entry.block or 'the model'} cannot be"
                f" read back: {error}. This backward cannot finish. The last committed step is "
                f"intact: drop the gradients with opt.zero_grad() and repeat the step"
            ) from error
        entry.reading = None

    def _to_device(self, entry: Entry) -> torch.Tensor:
        if entry.landing is not None:
            self.link.wait(entry.landing)
            entry.landing = None
        image = self.link.empty(entry.stored)
        uploaded = self.link.upload(entry.host[: entry.stored], image)
        self._uploads.append((uploaded, entry.host))
        self.link.join(image, uploaded)
        entry.ready = uploaded
        return image

    def _let_go(self, entry: Entry) -> None:
        """Every view was used: autograd holds what it needs of it."""
        if entry.written and not entry.busy and entry.host is not None:
            self._drop(entry)

    # -- memory ------------------------------------------------------------------------------------

    def _room(
        self, size: int, before: Entry | None = None, wait: bool = True
    ) -> torch.Tensor | None:
        """Memory of the arena; None if there is none. What gives way was saved earlier than
        `before`, if that is given, as it is used later."""
        if self.arena is None or size > self.arena.size:
            return None
        while True:
            try:
                return Planes.storage(self.arena.take(size))
            except OverBudget:
                if self._give_way(before) or (self._forget_uploads() if wait else False):
                    continue
                if not wait or not self._await_one(size, before):
                    return None

    def _give_way(self, before: Entry | None) -> bool:
        """Drops the copy that is used last, of those that are on the disk as well."""
        for entry in self._candidates(before):
            if entry.written and not entry.busy:
                self._drop(entry)
                return True
        return False

    def _candidates(self, before: Entry | None) -> Iterator[Entry]:
        """Those used later than `before`; in the order in which they came into memory, which is
        nearly that of saving."""
        return (entry for entry in self._resident if before is None or entry.place < before.place)

    def _await_one(self, size: int, before: Entry | None) -> bool:
        """Waits until one of the copies that may give way is written; starts that for enough of
        them, where nobody has."""
        mine = list(self._candidates(before))
        if self.mode == "dram":
            for entry in mine:
                if size <= 0:
                    break
                if entry.piece is None and entry.reading is None and entry.kept is None:
                    if entry.landing is not None:
                        self.link.wait(entry.landing)
                    if not self._write(entry, entry.host):
                        return False
                size -= entry.stored
        elif self.link is not None and self._unwritten and self._unwritten[0].landing is not None:
            self.link.wait(self._unwritten[0].landing)
            self._write_landed()
        for entry in mine:
            if entry.piece is None or entry.reading is not None:
                continue
            with self.waiting("activations"):
                _ended(entry.piece.written)
            if entry.piece.written.error() is None:
                return True
            self._failed(entry)
        return self._sweep_leaving(wait=True)

    def _drop(self, entry: Entry) -> None:
        self._resident.pop(entry, None)
        entry.host = entry.reading = entry.landing = None

    def _forget_uploads(self) -> bool:
        """Waits for the oldest copy to the device that still reads its memory."""
        if not self._uploads:
            return False
        self.link.wait(self._uploads.pop(0)[0])
        return True

    # -- ends --------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Ends the entries that nobody holds any more, and gives back what no transfer needs any
        more."""
        while self._gone:
            entry, used_in = self._gone.popleft()
            entry.holders -= 1
            entry.unused -= used_in != entry.round
            if entry.holders == 0:
                self._end(entry)
        self._sweep_leaving(wait=False)
        while self._uploads and self.link.done(self._uploads[0][0]):
            self._uploads.pop(0)
        if self.mode != "dram":
            self._write_landed()

    def _end(self, entry: Entry) -> None:
        if self._known.get(entry.key) is entry:
            del self._known[entry.key]
        before, after = entry.before, entry.after
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        else:
            self._last = before
        entry.before = entry.after = entry.kept = None
        self._resident.pop(entry, None)
        self._leaving.append(entry)

    def _sweep_leaving(self, wait: bool) -> bool:
        """Frees what ended. `wait`: for the first transfer, if none is done. Whether anything was
        freed."""
        freed, left = False, []
        for entry in self._leaving:
            if wait and not freed and entry.busy:
                with self.waiting("activations"):
                    for future in (entry.piece and entry.piece.written, entry.reading):
                        _ended(future)
            landing = entry.landing is not None and not self.link.done(entry.landing)
            if entry.busy or landing:
                left.append(entry)
                continue
            freed = True
            if entry.piece is not None:
                self.scratch.free(entry.piece)
                entry.piece = None
            entry.host = entry.reading = None
        self._leaving = left
        return freed

    def told(self) -> dict[str, Any]:
        """For the plan: bytes by block, as the last forward saved them."""
        return {
            "mode": self.mode,
            "form": self.form,
            "bytes": dict(self.saved_bytes),
            "choices": dict(self.choices),
        }

    def away(self, index: dict[str, int]) -> ActivationTraffic:
        """What the last forward moved, for the planner. What is saved outside of blocks is left
        out. `index`: of blocks by name."""
        saved = {index[block]: size for block, size in self.saved_bytes.items() if block in index}
        outside = sum(self.saved_bytes.values()) - sum(saved.values())
        # what was saved last is never written
        left = max(0, self.arena_bytes - outside) if self.mode == "dram" else 0
        for block in reversed(saved):
            held = min(left, saved[block])
            saved[block], left = saved[block] - held, left - held
        return ActivationTraffic(
            {block: size for block, size in saved.items() if size},
            self.arena_bytes if self.mode != "dram" else 0,
        )

    def rates(self) -> tuple[float, float]:
        """Bytes a second of reading and of writing, by a short trial on the very files. StokerError
        or OSError where they fail."""
        memory = (
            self._room(min(TRIAL_BYTES, self.arena.size // 2)) if self.arena is not None else None
        )
        if memory is None:
            memory = torch.zeros(SMALL_TRIAL_BYTES, dtype=torch.uint8, device="cpu")
        started = time.perf_counter()
        piece, reading = self.scratch.write(memory.data_ptr(), memory.nbytes, "demand"), None
        try:
            piece.written.wait()
            written = time.perf_counter()
            reading = self.scratch.read(piece, memory.data_ptr(), "demand")
            reading.wait()
            read = time.perf_counter()
        finally:
            # a Ctrl-C must not free memory that a transfer uses
            for future in (piece.written, reading):
                _ended(future)
            self.scratch.free(piece)
        return memory.nbytes / (read - written), memory.nbytes / (written - started)

    def close(self) -> None:
        """Nobody can use what was saved any more."""
        self._closed = True
        self.sweep()
        entry, entries = self._last, list(self._leaving)
        while entry is not None:
            entries.append(entry)
            entry = entry.before
        for entry in entries:
            for future in (entry.piece and entry.piece.written, entry.reading):
                _ended(future)
            if entry.landing is not None:
                self.link.wait(entry.landing)
            entry.host = entry.reading = entry.piece = entry.landing = None
        for uploaded, _ in self._uploads:
            self.link.wait(uploaded)
        self._uploads.clear()
        self._leaving.clear()
        self._resident.clear()
        self._known.clear()
        self._unwritten.clear()
        self.scratch.close()
        self.arena = None


class _Beginning:
    """Stands for the future of a read that is being started; for ever, where a Ctrl-C kept it from
    us."""

    @staticmethod
    def ready() -> bool:
        return False

    @staticmethod
    def wait() -> None:
        raise StokerError("reading them was interrupted")


_BEGINNING = _Beginning()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _living(entry: Entry) -> torch.UntypedStorage | None:
    """The storage that holds the entry's bytes, if somebody holds that."""
    storage = torch.UntypedStorage._new_with_weak_ptr(entry.alive.cdata)
    return storage if storage is not None and storage.nbytes() >= entry.size else None


def _ended(future: Any) -> None:
    """Waits until a transfer is done with its memory, however it ends."""
    if future is not None:
        try:
            future.wait()
        except StokerError:
            pass
