"""Moments whose elements share scales (`8bit`), from the ranks that saved to others: groups move as
they are, codes and scales. Nothing is decoded, so it is exact; a group that would be cut cannot
move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stoker.checkpoint.rectangles import Match, matches
from stoker.checkpoint.state import row_major
from stoker.offload.model.moments import Moments, Run


class Cut(Exception):
    """A group would lie on two ranks, or begin anew."""


def whole_groups(
    moments: Moments,
    theirs: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ours: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> list[Match]:
    """What two parts of a parameter share, each (begin, size, stride). Cut where that is not whole
    groups on both sides. The last group of a part may have less elements than others."""
    (begin_a, size_a, stride_a), (begin_b, size_b, stride_b) = theirs, ours
    if [list(each) for each in theirs] == [list(each) for each in ours]:
        return [Match(0, 0, count)] if (count := math.prod(size_a)) else []
    found = list(matches(begin_a, size_a, begin_b, size_b))
    if found and not (
        row_major(list(size_a), list(stride_a)) and row_major(list(size_b), list(stride_b))
    ):
        raise Cut
    for each in found:
        ends = each.theirs + each.count == math.prod(size_a)
        ends = ends and each.ours + each.count == math.prod(size_b)
        if each.theirs % moments.group or each.ours % moments.group:
            raise Cut
        if each.count % moments.group and not ends:
            raise Cut
    return found


def moves(
    moments: Moments, match: Match, theirs: tuple[int, int], ours: tuple[int, int]
) -> Iterator[tuple[Run, Run]]:
    """Where the codes and scales lie there, and where they come to. `theirs`, `ours`: elements of
    the plane, and where the parameter begins in it."""
    (there, from_), (here, to), done = theirs, ours, 0
    from_, to = from_ + match.theirs, to + match.ours
    while done < match.count:
        left = [moments.cell - (at + done) % moments.cell for at in (from_, to)]
        count = min(*left, match.count - done)
        (source,) = moments.runs(there, from_ + done, count)
        (target,) = moments.runs(here, to + done, count)
        yield source, target
        done += count
