"""The order in which blocks are used: recorded once per kind of call, then the future that prefetch
and retention go by."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, Callable, Iterable

NEVER = (1 << 30) - 1  # behind every position: that of the next use of a block that is in no order
OUTDATED = 1 << 30  # behind that: a copy that nobody needs any more


@dataclass
class Order:
    """The recorded uses of one root call (forward, and the backward that follows it): block
    indices, repeats folded."""

    uses: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(uses: list[int]) -> Order:
        places: dict[int, list[int]] = {}
        for position, block in enumerate(uses):
            places.setdefault(block, []).append(position)
        return Order(list(uses), places)

    def next_use(self, block: int, position: int) -> int:
        """Uses from `position` until `block` is used again (>= 0); past the end the order is
        expected to repeat."""
        places = self.places.get(block)
        if not places:
            return 2 * len(self.uses) + 1
        at = bisect_left(places, position)
        if at < len(places):
            return places[at] - position
        return len(self.uses) - position + places[0]

    def next_at(self, block: int, position: int) -> int:
        """The position of that use, counted on past the end; NEVER for a block of no order."""
        return position + self.next_use(block, position) if block in self.places else NEVER

    def first(self, block: int) -> int:
        """The position of the block's first use; behind all others if there is none."""
        places = self.places.get(block)
        return places[0] if places else OUTDATED


class Outlook:
    """What lies between two positions of an order, without a walk from one to the other.

    `sizes`: bytes by block. `pinned`: blocks that stay anyhow."""

    def __init__(self, order: Order, sizes: list[int], pinned: frozenset[int]) -> None:
        self.order = order
        self._before = list(accumulate((sizes[block] for block in order.uses), initial=0))
        uses = enumerate(order.uses, start=1)
        latest = [0 if block in pinned else order.next_at(block, behind) for behind, block in uses]
        self._latest = [latest]  # [k][at]: over the 2^k positions from `at` on
        while len(latest) > 1 << len(self._latest) - 1:
            half = 1 << len(self._latest) - 1
            latest = list(map(max, latest, latest[half:]))
            self._latest.append(latest)

    def bytes(self, start: int, end: int) -> int:
        """Of the blocks used from `start` up to `end`, each as often as it is used."""
        return self._before[end] - self._before[start]

    def latest(self, start: int, end: int) -> int:
        """When the last of the unpinned blocks there is used again, counted on past the end."""
        if start >= end:
            return 0
        row = self._latest[k := (end - start).bit_length() - 1]
        return max(row[start], row[end - (1 << k)])


class Recorder:
    """Follows the calls of a model. One order is kept per (root module, training, gradient
    mode)."""

    def __init__(self) -> None:
        self.orders: dict[tuple, Order] = {}
        self.departures = 0  # calls that left their recorded order
        self.key: tuple | None = None  # the kind of the call under way
        self._on_use: Callable[[int], None] | None = None
        self._actual: list[int] = []
        self._order = Order()
        self._departed = False
        self.position = 0  # the index in the order of the next expected use
        self.turn = 0  # how often the order began, or began again

    @property
    def order(self) -> Order:
        return self._order

    def tell(self, on_use: Callable[[int], None] | None) -> None:
        """Somebody who traces a step is told of each use, until None is given."""
        self._on_use = on_use

    def begin(self, key: tuple) -> None:
        """A root call starts: what was seen since the last one becomes (or corrects) the order of
        that kind of call."""
        self._remember()
        self.key, self._actual, self._departed = key, [], False
        self._order = self.orders.get(key, Order())
        self.again()

    def again(self) -> None:
        """The next use that is expected is the first one."""
        self.position = 0
        self.turn += 1

    def _remember(self) -> None:
        if self.key is None or not self._actual:
            return
        known = self.orders.get(self.key)
        if known is None or self._departed or len(self._actual) != len(known.uses):
            self.orders[self.key] = Order.of(self._actual)

    def use(self, block: int) -> None:
        if self._actual and self._actual[-1] == block:
            return
        self._actual.append(block)
        if self._on_use is not None:
            self._on_use(block)
        uses = self._order.uses
        if self.position < len(uses) and uses[self.position] == block:
            self.position += 1
            return
        if not uses:
            return
        ahead = self._order.places.get(block, [])
        at = bisect_left(ahead, self.position)
        if not self._departed:
            self._departed = True
            self.departures += 1
        if at < len(ahead):
            self.position = ahead[at] + 1

    def next_at(self, block: int) -> int:
        return self._order.next_at(block, self.position)


class Ahead:
    """How far the fetching ahead is: up to the position `end` each block is there, or under way.

    `bytes`: of those under way, as often as they are used up to `end`."""

    def __init__(self, recorder: Recorder, sizes: list[int]) -> None:
        self._recorder, self._sizes = recorder, sizes
        self.end = self.bytes = 0
        self._under_way: dict[int, int] = {}  # block -> bytes, as often as it is used
        self._turn = -1

    def next(self) -> int | None:
        """The block to look at now: that of the position `end`."""
        recorder = self._recorder
        if self._turn != recorder.turn:
            self._turn, self.end, self.bytes, self._under_way = recorder.turn, 0, 0, {}
        self.end = max(self.end, recorder.position)
        return recorder.order.uses[self.end] if self.end < len(recorder.order.uses) else None

    def advance(self, under_way: bool) -> None:
        """The block at `end` is there, or under way."""
        block = self._recorder.order.uses[self.end]
        self.end += 1
        if under_way:
            self._count(block, self._sizes[block])

    def _count(self, block: int, size: int) -> None:
        self._under_way[block] = self._under_way.get(block, 0) + size
        self.bytes += size

    def passed(self, position: int) -> None:
        """The recorder is behind this position now."""
        block = self._recorder.order.uses[position]
        if position < self.end and self._under_way.get(block):
            self._count(block, -self._sizes[block])

    def arrived(self, block: int) -> None:
        """It is not under way any more."""
        self.bytes -= self._under_way.pop(block, 0)

    def left(self, block: int) -> None:
        """It is neither there nor under way any more."""
        self.arrived(block)
        again = self._recorder.next_at(block) if self._turn == self._recorder.turn else self.end
        while self.end > again:
            self.end -= 1
            if self._under_way.get(other := self._recorder.order.uses[self.end]):
                self._count(other, -self._sizes[other])


class LastUsed:
    """Copies of blocks by the position of their next use; finds the one that is used last (Belady's
    rule) without a look at all.

    A copy is named by what does not keep its memory. `key(copy)`: that position; None: it may not
    go now, or is gone. `copies()`: all there are, the oldest first. put() tells of a copy that is
    new or whose position may have grown; that it shrank is seen here.
    """

    def __init__(
        self,
        recorder: Recorder,
        key: Callable[[Any], int | None],
        copies: Callable[[], Iterable[Any]],
    ) -> None:
        self._recorder, self._key, self._copies = recorder, key, copies
        # entries (-key, number, copy): of equals the oldest goes first
        self._heap: list[tuple[int, int, Any]] = []
        self._known: dict[Any, tuple[int, int, Any]] = {}  # those that hold; any other is void
        self._count = 0
        self._turn = -1  # of the recorder, to which the keys belong

    def put(self, copy: Any) -> None:
        if self._turn == self._recorder.turn:
            self._put(copy)

    def _put(self, copy: Any) -> None:
        key, known = self._key(copy), self._known.get(copy)
        if key is None or (known is not None and -known[0] == key):
            return
        self._count += 1
        self._known[copy] = entry = (-key, known[1] if known is not None else self._count, copy)
        heappush(self._heap, entry)

    def drop(self, copy: Any) -> None:
        """It is gone. If it comes again it is a new one."""
        self._known.pop(copy, None)

    def pick(self, least: int, may_go: Callable[[Any], bool]) -> Any | None:
        """The copy that is used last of those that may go, if used behind the position `least`."""
        if self._turn != self._recorder.turn:
            self._turn, self._heap, self._known = self._recorder.turn, [], {}
            for copy in self._copies():
                self._put(copy)
        heap, stay, found = self._heap, [], None
        while heap and found is None:
            entry = heap[0]
            copy = entry[2]
            known = self._known.get(copy) is entry
            if known and (key := self._key(copy)) == -entry[0]:
                if key <= least:
                    break
                if may_go(copy):
                    found = copy
                else:
                    stay.append(heappop(heap))
                continue
            heappop(heap)
            if known:
                self.drop(copy)
                self._put(copy)
        for entry in stay:
            heappush(heap, entry)
        return found
