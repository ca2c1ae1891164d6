"""Which sample stands at which position: pure functions of a few integers.

The functions are those of src/stoker/base/order.h.

Positions count through all epochs: position p of n samples is position p % n of epoch p // n. So a
resume needs one integer, and any rank can compute any part of any epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stoker._core import Mixture, Permutation


class Order(Protocol):
    count: int | None  # samples of an epoch; None where there are no epochs

    def picks(self, first: int, last: int) -> Picks:
        """Of positions [first, last)."""


@dataclass(frozen=True)
class Picks:
    """The samples at a range of positions: `sources` and `samples`, uint64 [positions] each."""

    sources: np.ndarray
    samples: np.ndarray


class Shuffled:
    """All samples of one source, once an epoch, each epoch in an order of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self._seed = count, seed

    def picks(self, first: int, last: int) -> Picks:
        """Of positions [first, last)."""
        return Picks(
            np.zeros(last - first, np.uint64), self.samples(np.arange(first, last, dtype=np.uint64))
        )

    def samples(self, positions: np.ndarray) -> np.ndarray:
        """Of any positions, uint64 [n]."""
        epochs, within = np.divmod(positions, np.uint64(self.count))
        out = np.empty(len(positions), np.uint64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            out[mine] = Permutation(self.count, self._seed, int(epoch)).samples(within[mine])
        return out


class InOrder:
    """All samples of one source, from the first to the last, every epoch. It needs no seed."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count

    def picks(self, first: int, last: int) -> Picks:
        """Of positions [first, last)."""
        samples = np.arange(first, last, dtype=np.uint64) % np.uint64(self.count)
        return Picks(np.zeros(len(samples), np.uint64), samples)


class Mixed:
    """Endless draws from several sources by exact shares; each source is shuffled, epoch by epoch.

    An epoch of a source ends when all of its samples were drawn: small sources repeat sooner.
    """

    count = None  # it has no epochs

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if len(counts) != len(weights):
            raise ValueError(
                f"a mixture of {len(counts)} sources needs as many weights, not {len(weights)}"
            )
        self._mixture = Mixture(list(weights), seed)
        # Sources of one length must not be drawn in one order: each has a seed of its own.
        self._parts = [Shuffled(count, seed + 1 + index) for index, count in enumerate(counts)]

    def picks(self, first: int, last: int) -> Picks:
        """Of positions [first, last)."""
        draws = self._mixture.draws(first, last)
        sources, samples = draws[:, 0].copy(), np.empty(len(draws), np.uint64)
        for index in np.unique(sources):
            mine = sources == index
            samples[mine] = self._parts[index].samples(draws[mine, 1])
        return Picks(sources, samples)


def sample_at(position: int, count: int, seed: int) -> int:
    """The sample at a position of all epochs, each `count` samples in an order of its own."""
    epoch, within = divmod(position, count)
    return Permutation(count, seed, epoch).sample(within)
