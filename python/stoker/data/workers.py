"""Workers: processes that run a transform of Python on each sample of a batch.

They are spawned, so they share no locks and no random state with the process that trains. Samples
go there and come back through shared memory; a pipe carries only what describes them.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # its hook at the end must be older than ours: see below
import contextlib
import hashlib
import io
import os
import pickle
import queue
import random
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Several
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

from stoker.errors import InvalidArgument, StokerError

_ALIGN = 64
_LEAST = 1 << 20  # bytes of a piece of shared memory
Key = tuple[int, int, int, int]  # seed, epoch, source, sample


class TransformError(StokerError):
    """A transform of Python raised, or its worker ended."""


def _seed_all(key: Key) -> None:
    """Of random, numpy and torch, from now on: the same for the same sample of the same epoch."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest[:16], np.uint32))
    torch.manual_seed(int.from_bytes(digest[16:23], "little"))


# ---- what travels


class _Pickler(pickle.Pickler):
    """Tensors travel as arrays, and arrays outside of the stream."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        kind = str(thing.dtype).removeprefix("torch.")
        raw = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (raw.numpy(), kind, tuple(thing.shape))


def _tensor(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(getattr(torch, kind)).reshape(shape)


class _Outbox:
    """Shared memory that this side writes and the other side reads."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def pack(self, thing: Any) -> tuple[bytes, str, list[tuple[int, int]]]:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, 5, buffer_callback=buffers.append).dump(thing)
        places, at = [], 0
        for each in buffers:
            size = each.raw().nbytes
            places.append((at, size))
            at += -(-size // _ALIGN) * _ALIGN
        if self._memory is None or self._memory.size < at:
            self.close()
            self._memory = SharedMemory(create=True, size=max(_LEAST, 2 * at))
        for (offset, size), each in zip(places, buffers, strict=True):
            self._memory.buf[offset : offset + size] = each.raw()
        return stream.getvalue(), self._memory.name, places

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None


class _Inbox:
    """What the other side's outbox holds. The bytes are copied: it will be written again."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def unpack(self, packed: tuple[bytes, str, list[tuple[int, int]]]) -> Any:
        stream, name, places = packed
        if self._memory is None or self._memory.name != name:
            self.close()
            self._memory = SharedMemory(name)
        buffers = [bytearray(self._memory.buf[at : at + size]) for at, size in places]
        return pickle.loads(stream, buffers=buffers)

    def close(self, remove: bool = False) -> None:
        if self._memory is not None:
            self._memory.close()
            if remove:
                with contextlib.suppress(FileNotFoundError):
                    self._memory.unlink()
            self._memory = None


# ---- the worker


def _serve(pipe: Connection, transform: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that trains decides
    torch.set_num_threads(1)
    inbox, outbox = _Inbox(), _Outbox()
    try:
        pipe.send(None)  # ready
        while True:
            keys, packed = pipe.recv()
            at, made = 0, []
            try:
                for at, (key, sample) in enumerate(zip(keys, inbox.unpack(packed), strict=True)):
                    _seed_all(key)
                    made.append(transform(sample))
                answer = ("made", outbox.pack(made))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                answer = ("raised", (at, why, traceback.format_exc()))
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        pass  # the loader was closed, or its process is gone
    finally:
        outbox.close()
        inbox.close()


class _Worker:
    """One process and its pipe."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        context = get_context("spawn")
        self._pipe, its = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(its, transform), name="stoker-transform", daemon=True
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgument(
                f"the transform cannot be sent to another process ({error}): make it a function "
                f"of a"
                " module, or an object that can be pickled"
            ) from error
        its.close()
        self._begun = False
        self._outbox, self._inbox = _Outbox(), _Inbox()

    def run(self, samples: Several[Any], keys: Several[Key], names: Several[str]) -> list[Any]:
        try:
            if not self._begun:
                self._pipe.recv()
                self._begun = True
            self._pipe.send((keys, self._outbox.pack(samples)))
            what, told = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransformError(self._ended(names)) from error
        if what == "made":
            return self._inbox.unpack(told)
        at, why, trace = told
        seed, epoch, source, sample = keys[at]
        raise TransformError(
            f"the transform raised at sample {names[at]} (number {sample} of source {source}, epoch"
            f" {epoch}, seed {seed}): {why}\n{trace}"
        )

    def _ended(self, names: Several[str]) -> str:
        self._process.join(10)
        code = self._process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        return (
            f"a worker of the transform (pid {self._process.pid}) ended with {how}; it had the"
            f" {len(names)} samples from {names[0]} on; the loop may go on, and begins with that"
            " batch"
        )

    def kill(self) -> None:
        """Who waits for it in run() gets an error."""
        self._process.kill()

    def close(self) -> None:
        """After kill(), once nobody is in run()."""
        self._process.join()
        self._pipe.close()
        self._outbox.close()
        self._inbox.close(remove=True)  # its owner was killed


class Workers:
    """As many processes as wanted; made at the first batch. run() may be called by any thread."""

    def __init__(self, transform: Callable[[Any], Any], count: int) -> None:
        if count < 1:
            raise InvalidArgument(f"a transform needs at least one worker, not {count}")
        self._transform, self.count = transform, count
        self._all: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: killed

    def start(self) -> None:
        """Unless they are there."""
        _started.add(self)
        if not self._all:
            self._free = queue.SimpleQueue()
        while len(self._all) < self.count:
            worker = _Worker(self._transform)
            self._all.append(worker)
            self._free.put(worker)

    def run(self, samples: Several[Any], keys: Several[Key], names: Several[str]) -> list[Any]:
        """What the transform makes of each, on a worker that is free."""
        if not samples:
            return []
        free = self._free
        worker = free.get()
        try:
            if worker is None:
                raise TransformError(f"the loader was closed before {names[0]} was transformed")
            return worker.run(samples, keys, names)
        finally:
            free.put(worker)

    def forget(self) -> None:
        """In a forked process: they are the parent's."""
        self._all = []

    def kill(self) -> None:
        """Ends them, whatever they do. Who is in run() now or comes later gets an error."""
        for each in self._all:
            each.kill()
        self._free.put(None)

    def close(self) -> None:
        """After kill(), once nobody is in run(). start() makes others."""
        workers, self._all = self._all, []
        for each in workers:
            each.close()


_started: weakref.WeakSet[Workers] = weakref.WeakSet()  # by this process


def _kill() -> None:
    for each in list(_started):
        each.kill()


def _close() -> None:
    for each in list(_started):
        each.close()


# The end of the program waits for the threads that are in run(), and they for the workers. Hooks of
# atexit run only after those threads; of these hooks, the youngest runs first.
threading._register_atexit(_kill)
atexit.register(_close)
os.register_at_fork(after_in_child=_started.clear)
