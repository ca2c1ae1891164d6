"""The order in which blocks are used: recorded once per kind of call, then the future that prefetch and retention go by."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Callable


@dataclass
class Order:
    """The recorded uses of one root call (forward, and the backward that follows it): block indices, repeats folded."""

    uses: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(uses: list[int]) -> Order:
        places: dict[int, list[int]] = {}
        for position, block in enumerate(uses):
            places.setdefault(block, []).append(position)
        return Order(list(uses), places)

    def next_use(self, block: int, position: int) -> int:
        """Uses from `position` until `block` is used again (>= 0); past the end the order is expected to repeat."""
        places = self.places.get(block)
        if not places:
            return 2 * len(self.uses) + 1
        at = bisect_left(places, position)
        if at < len(places):
            return places[at] - position
        return len(self.uses) - position + places[0]

    def again(self, position: int) -> int:
        """The position of the next use of the block that is used at this one, counted on past the end."""
        return position + 1 + self.next_use(self.uses[position], position + 1)


class Recorder:
    """Follows the calls of a model. One order is kept per (root module, training, gradient mode)."""

    def __init__(self) -> None:
        self.orders: dict[tuple, Order] = {}
        self.departures = 0  # calls that left their recorded order
        self.key: tuple | None = None  # the kind of the call under way
        self.on_use: Callable[[int], None] | None = None  # told of each use while a step is traced
        self._actual: list[int] = []
        self._order = Order()
        self._departed = False
        self.position = 0  # the index in the order of the next expected use

    @property
    def order(self) -> Order:
        return self._order

    def begin(self, key: tuple) -> None:
        """A root call starts: what was seen since the last one becomes (or corrects) the order of that kind of call."""
        self._remember()
        self.key, self._actual, self._departed, self.position = key, [], False, 0
        self._order = self.orders.get(key, Order())

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
        if self.on_use is not None:
            self.on_use(block)
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

    def next_use(self, block: int) -> int:
        return self._order.next_use(block, self.position)
