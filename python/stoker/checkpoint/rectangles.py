"""Parts of tensors: where the bytes of a rectangle lie in a tensor that holds it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Elements that lie one behind the other in a tensor and in a rectangle of it."""

    at: int  # in the tensor, both in row-major order
    within: int  # in the rectangle
    count: int


def runs(shape: Sequence[int], begin: Sequence[int], size: Sequence[int]) -> Iterator[Run]:
    """The rectangle of `size` from `begin` on of a tensor of `shape`, in rising order."""
    if math.prod(size) == 0:
        return
    inner = len(shape)  # all dimensions from here on are taken whole
    while inner > 0 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    cut = max(inner - 1, 0)
    whole = math.prod(shape[cut + 1 :])
    count = math.prod(size[cut:])
    strides = [math.prod(shape[i + 1 :]) for i in range(cut)]
    start = begin[cut] * whole if shape else 0
    for number, index in enumerate(itertools.product(*(range(each) for each in size[:cut]))):
        outer = sum((b + i) * stride for b, i, stride in zip(begin, index, strides))
        yield Run(outer + start, number * count, count)


def common(
    begin_a: Sequence[int], size_a: Sequence[int], begin_b: Sequence[int], size_b: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Begin and size of what two rectangles of one tensor share; None if that is nothing."""
    begin = [max(a, b) for a, b in zip(begin_a, begin_b)]
    end = [min(a + s, b + t) for a, s, b, t in zip(begin_a, size_a, begin_b, size_b)]
    size = [e - b for b, e in zip(begin, end)]
    return None if any(each <= 0 for each in size) else (begin, size)


@dataclass(frozen=True)
class Match:
    """Elements that two rectangles of one tensor share, one behind the other in both."""

    theirs: int  # in the first, both in row-major order
    ours: int  # in the second
    count: int


def matches(
    begin_a: Sequence[int], size_a: Sequence[int], begin_b: Sequence[int], size_b: Sequence[int]
) -> Iterator[Match]:
    """All that they share, in rising order."""
    shared = common(begin_a, size_a, begin_b, size_b)
    if shared is None:
        return
    first, size = shared
    # Both lists of runs cover the shared rectangle in row-major order; cut where either ends.
    ours = runs(size_b, [at - b for at, b in zip(first, begin_b)], size)
    mine = next(ours, None)
    for theirs in runs(size_a, [at - b for at, b in zip(first, begin_a)], size):
        done = 0
        while done < theirs.count:
            skipped = theirs.within + done - mine.within
            count = min(theirs.count - done, mine.count - skipped)
            yield Match(theirs.at + done, mine.at + skipped, count)
            done += count
            if skipped + count == mine.count:
                mine = next(ours, None)
