"""What products of matrices cost on this processor, by type: which type is the quickest."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Iterable, Iterator

import torch
from torch import nn

BOUND = 0.3  # seconds for each measurement of a kernel, beyond its first runs
# in which a model may be trained; of equals, the first
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def repeated(run: Callable[[], float], times: int, bound: float) -> list[float]:
    """What `times` calls of run() returned, of fewer where they take more than `bound` seconds, but
    of one at least. A call before them does not count: it is the first to touch the memory."""
    begun, taken = time.perf_counter(), []
    run()
    while not taken or (len(taken) < times and time.perf_counter() - begun < bound):
        taken.append(run())
    return taken


def core_seconds(run: Callable[[], object], times: int = 5) -> float:
    """The median processor time of run()."""

    def timed() -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    return statistics.median(repeated(timed, times, BOUND))


def _product(tokens: int, width: int, dtype: torch.dtype) -> Callable[[], object]:
    """Forward and backward through a linear layer. It draws no random numbers, which are the
    caller's."""
    weight = torch.ones(width, width, dtype=dtype, device="cpu", requires_grad=True)
    x = torch.ones(tokens, width, dtype=dtype, device="cpu", requires_grad=True)
    return lambda: nn.functional.linear(x, weight).backward(x)


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Products on one thread, so that its processor time is theirs, whatever else the machine does;
    how many threads there were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _thread_seconds(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def product_rates(
    tokens: int, width: int, dtypes: Iterable[torch.dtype], seconds: float
) -> list[float]:
    """Operations a second of forward and backward through one linear layer on all threads, by type,
    in about `seconds`: where products are slow, fewer tokens and a narrower layer must tell. Types
    are compared at the same size."""
    width, some, spent = min(width, 1024), min(tokens, 16), 0.0
    with _one_thread() as threads:
        while True:
            times = []
            for dtype in dtypes:
                run = _product(some, width, dtype)
                spent += _thread_seconds(run)  # it prepares, too
                taken = [_thread_seconds(run) for _ in range(2)]
                spent += sum(taken)
                times.append(max(min(taken), 1e-9))
            more = min(tokens, 4 * some)
            if more == some or spent + 3 * sum(times) * more / some > seconds:
                return [6.0 * some * width * width * threads / each for each in times]
            some = more


def product_flops(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of forward and backward in this type."""
    return product_rates(tokens, width, [dtype], 0.5)[0]


@dataclass(frozen=True)
class Quickest:
    """Which type of weights the processor multiplies quickest."""

    name: str
    flops: dict[str, float]  # by name

    def __str__(self) -> str:
        own = self.flops[self.name] / 1e9
        others = ", ".join(
            f"{rate / 1e9:.3g} in {name}" for name, rate in self.flops.items() if name != self.name
        )
        return (
            f"{self.name}: this processor makes {own:.3g} GFLOP/s of products in it, and {others}"
        )


def quickest_type(tokens: int, width: int, seconds: float = 1.0) -> Quickest:
    """Measured with products of this size, forward and backward, in `seconds` at most."""
    flops = dict(zip(TYPES, product_rates(tokens, width, TYPES.values(), seconds)))
    return Quickest(max(flops, key=lambda name: flops[name]), flops)


@lru_cache(1)
def quick_look() -> Quickest:
    """The same in about 50 ms, once in a process."""
    return quickest_type(16, 512, 0.05)
