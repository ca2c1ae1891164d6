"""Storing and loading tensors by one system, in a process of its own: `python tensors.py SPEC
RESULT`, two JSON files.

A case is a list of tensors, each in memory of the system's own kind, all handed over at once and
then waited for: what a careful user of either interface does. Each case is stored once before it
counts, so that no file is written for the first time, and checked at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from systems import MIB


class Stoker:
    """Our store through stoker._core: verified reads, atomic commits."""

    def __init__(
        self, directory: str, settings: dict[str, Any], cases: dict[str, list[int]]
    ) -> None:
        from stoker import _core

        largest, total = max(map(sum, cases.values())), sum(map(sum, cases.values()))
        room = largest + 16 * MIB
        self.runtime = _core.Runtime(threads=os.cpu_count() or 1, budget_bytes=room + 256 * MIB)
        self.arena = self.runtime.arena(room)
        # A commit frees what it replaces once it is durable.
        self.store_ = self.runtime.open_store(
            f"local:{directory}",
            create=True,
            capacity_bytes=total + 3 * largest,
            holder="bench tensors",
        )

    def tensors(self, sizes: list[int]) -> list[torch.Tensor]:
        made = [torch.from_dlpack(self.arena.take(size))[:size] for size in sizes]
        txn = self.store_.begin()
        for key, tensor in named(made):
            txn.resize(key, tensor.numel())
        txn.commit().wait()
        return made

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        tensors.clear()

    def store(self, tensors: list[torch.Tensor], durable: bool = False) -> None:
        txn = self.store_.begin()
        under_way = [
            txn.write(key, 0, tensor.data_ptr(), tensor.numel()) for key, tensor in named(tensors)
        ]
        for future in under_way:
            future.wait()
        txn.commit("durable" if durable else "deferred").wait()

    def load(self, tensors: list[torch.Tensor]) -> None:
        under_way = [
            self.store_.read(key, 0, tensor.data_ptr(), tensor.numel(), priority="demand")
            for key, tensor in named(tensors)
        ]
        for future in under_way:
            future.wait()

    def settle(self) -> None:
        """What replaced extents need to become free."""
        self.store_.begin().commit().wait()

    def close(self) -> None:
        self.store_.close()


def named(tensors: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{len(tensors)}-{tensor.numel()}-{name}", tensor) for name, tensor in enumerate(tensors)
    ]


class DeepNVMe:
    """The peer's aio handle over its own page-locked tensors, a file a tensor."""

    def __init__(
        self, directory: str, settings: dict[str, Any], cases: dict[str, list[int]]
    ) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.handle = AsyncIOBuilder().load(verbose=False).aio_handle(**settings)
        self.directory = directory

    def tensors(self, sizes: list[int]) -> list[torch.Tensor]:
        return [
            self.handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            for size in sizes
        ]

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.handle.free_cpu_locked_tensor(tensor)

    def store(self, tensors: list[torch.Tensor]) -> None:
        for name, tensor in named(tensors):
            self._check(self.handle.async_pwrite(tensor, os.path.join(self.directory, name)))
        self._all(tensors)

    def load(self, tensors: list[torch.Tensor]) -> None:
        for name, tensor in named(tensors):
            self._check(self.handle.async_pread(tensor, os.path.join(self.directory, name)))
        self._all(tensors)

    def _check(self, status: int) -> None:
        if status != 0:
            raise OSError(f"DeepNVMe refused an operation with status {status}")

    def _all(self, tensors: list[torch.Tensor]) -> None:
        done = self.handle.wait()
        if done != len(tensors):
            raise OSError(f"DeepNVMe completed {done} of {len(tensors)} operations")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure(mover: Stoker | DeepNVMe, sizes: list[int], passes: int) -> dict[str, list[float]]:
    tensors = mover.tensors(sizes)
    for number, tensor in enumerate(tensors):
        fill(tensor, number)
    mover.store(tensors)
    mover.settle()
    operations = {"store": lambda: mover.store(tensors), "load": lambda: mover.load(tensors)}
    if isinstance(mover, Stoker):
        operations["store durable"] = lambda: mover.store(tensors, durable=True)
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(passes + 1):
        for name, operation in operations.items():
            if name == "load" and number == passes:
                for tensor in tensors:
                    tensor.zero_()
            began = time.perf_counter()
            operation()
            if number:  # the first warms up
                taken[name].append(time.perf_counter() - began)
            if (
                name == "load"
                and number == passes
                and not all(holds(tensor, which) for which, tensor in enumerate(tensors))
            ):
                raise RuntimeError(f"{type(mover).__name__} loaded other bytes than it had stored")
            mover.settle()
    mover.give_back(tensors)
    return taken


def fill(tensor: torch.Tensor, number: int) -> None:
    words = tensor.view(torch.int32)
    torch.arange(number, number + words.numel(), dtype=torch.int32, out=words)


def holds(tensor: torch.Tensor, number: int) -> bool:
    """Whether it is as fill() left it; in pieces, as a second tensor of this size may not fit."""
    words, piece = tensor.view(torch.int32), 1 << 24
    return all(
        torch.equal(
            words[at : at + piece],
            torch.arange(number + at, number + min(at + piece, words.numel()), dtype=torch.int32),
        )
        for at in range(0, words.numel(), piece)
    )


def run(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(spec["threads"])
    mover = (Stoker if spec["kind"] == "stoker" else DeepNVMe)(
        spec["directory"], spec["settings"], spec["cases"]
    )
    # Small cases are over in a moment: more passes of them.
    results = {
        name: measure(mover, sizes, spec["passes"] * (4 if sum(sizes) < 64 * MIB else 1))
        for name, sizes in spec["cases"].items()
    }
    mover.close()
    return {"cases": results, "torch": torch.__version__}


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
