"""Late updates (policy ``lazy``): those of a decided step, each made just before the next use of
its block.

step() takes what they consume: gradients, where they lie, and hyperparameters. The next forward
then starts as soon as its first block is updated. The others follow in the order of their use, a
little ahead of it. The step's transaction stays open until the last one is computed; the record
that closes the step waits here for that. What must see all weights at once completes them first.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Callable, Container, Protocol

from stoker.errors import StokerError
from stoker.offload.model.blocks import Block, Unit

if TYPE_CHECKING:
    from stoker.offload.gradients.finiteness import Finiteness
    from stoker.offload.gradients.segment import Segment
    from stoker.offload.paging.pager import Pager
    from stoker.offload.steps.update import Update

# updates that may be under way before their block is used; more would only want more memory
AHEAD = 2


class Owing(Protocol):
    """Who decides steps, and owes what is late of them (steps.py)."""

    lock: AbstractContextManager
    pager: Pager
    finiteness: Finiteness
    decided: Any  # transaction of a decided step that is not closed yet; None: there is none

    def bytes_of(self, segments: list[Segment]) -> tuple:
        """What tells the gradients' bytes, as they are now, from any others."""

    def marks_of(self, segments: list[Segment]) -> list[tuple | None]:
        """The first of it, which costs no look at the bytes."""

    def saw_gradients(self, dropped: bool) -> None:
        """What the loop was seen to do to its gradients behind step()."""

    def start(
        self, unit: Unit, segments: list[Segment], along: list[Unit], distance: int
    ) -> Update:
        """An update that the decided step owes. `along`: units of its block that are owed theirs
        now, too."""

    def computed(self, update: Update) -> None:
        """A late update is done."""

    def timed(self, cause: str, wait: Callable[[], Any]) -> None: ...

    def close(self, records: Callable[[], dict[str, bytes]]) -> None:
        """Starts the durable commit of the step, of which nothing is owed any more."""

    def lose(self) -> None:
        """The decided step cannot be committed: goes back to the one before."""


class Late:
    """The updates that a decided step still owes. Used by the thread that runs the model, under the
    session's lock."""

    def __init__(self, steps: Owing) -> None:
        self._steps = steps
        # in the order of use; what tells the gradients' bytes at step()
        self._owed: dict[Unit, tuple[list[Segment], tuple]] = {}
        self._under_way: dict[Unit, tuple[Update, list[Segment], tuple]] = {}
        self._uncomputed: deque[Update] = deque()  # of those; the first may be computed by now
        # of the closed step: it commits when nothing is owed any more
        self.records: dict[str, bytes] | None = None

    def __bool__(self) -> bool:
        return bool(self._owed or self._under_way)

    @property
    def owed(self) -> list[Unit]:
        """Units whose update has not begun, in the order of use."""
        return list(self._owed)

    @property
    def begun(self) -> Container[Unit]:
        """Units whose update is under way."""
        return self._under_way

    def begun_of(self, unit: Unit) -> Update | None:
        known = self._under_way.get(unit)
        return known[0] if known is not None else None

    def has(self, unit: Unit) -> bool:
        return unit in self._owed or unit in self._under_way

    @property
    def units(self) -> set[Unit]:
        return {*self._owed, *self._under_way}

    @property
    def updates(self) -> list[Update]:
        return [update for update, *_ in self._under_way.values()]

    def take(self, unit: Unit, segments: list[Segment]) -> None:
        """The unit's update is owed from here on. Its gradients must keep their bytes until then,
        which is checked."""
        self._owed[unit] = segments, self._steps.bytes_of(segments)

    def owes(self, block: Block) -> bool:
        return bool(self) and any(map(self.has, block.updated_units))

    def begin(self, block: Block, distance: int = 0) -> bool:
        """Starts what is owed to the block, which is used in `distance` uses. False if nothing is
        owed to it."""
        if self._owed and self._steps.decided is None:
            self._give_up()
        owed = [unit for unit in block.updated_units if unit in self._owed]
        try:
            for unit in owed:
                segments, known = self._owed[unit]
                # also of a change that will be undone
                if self._steps.marks_of(segments) != known[0]:
                    self._steps.saw_gradients(dropped=False)
                    raise self._changed(block)
                update = self._steps.start(unit, segments, owed, distance)
                self._under_way[unit] = update, segments, known
                self._uncomputed.append(update)
                del self._owed[unit]
        except BaseException:  # Ctrl-C as well: whether the update was started is not known then
            self._steps.lose()
            raise
        return self.owes(block)

    def ahead(self, block: Block, distance: int) -> bool:
        """begin(), if not enough are under way already."""
        if not any(unit in self._owed for unit in block.updated_units):
            return True
        while self._uncomputed and self._uncomputed[0].job.computed():
            self._uncomputed.popleft()
        if sum(not update.job.computed() for update in self._uncomputed) >= AHEAD:
            return False
        return self.begin(block, distance)

    def finish(self, block: Block) -> None:
        """Waits for the block's updates, and makes its new weights current."""
        units = [unit for unit in block.updated_units if unit in self._under_way]
        try:
            for unit in units:
                update, segments, known = self._under_way[unit]
                self._steps.timed("state", update.wait_computed)
                # now, behind the last read: then they were right throughout
                if self._steps.bytes_of(segments) != known:
                    raise self._changed(block)
        except StokerError:
            self._steps.saw_gradients(dropped=False)
            self._steps.lose()
            raise
        try:
            bad = [unit for unit in units if not self._under_way[unit][0].job.finite()]
            if bad:
                self._steps.finiteness.missed(bad, late=True)
            for unit in units:
                self._steps.computed(self._under_way[unit][0])  # first: lose() must know of it
                del self._under_way[unit]
            self._steps.pager.promote(block)
        except BaseException:  # Ctrl-C: the block is neither old nor new
            self._steps.lose()
            raise
        if not self and (records := self.records) is not None:
            self._steps.close(lambda: records)

    @staticmethod
    def _changed(block: Block) -> StokerError:
        return StokerError(
            f"gradients of {block.name} were changed after opt.step(), but policy lazy still "
            f"needed them for its update in the next forward. That step is lost; the step before "
            f"it is intact. Clear gradients with opt.zero_grad(), or use another policy"
        )

    def catch_up(self, block: Block) -> None:
        """The block is as the decided step leaves it when this returns."""
        # not every caller has it, and another thread that looks at gradients may take these ones'
        # place
        with self._steps.lock:
            if self.begin(block):
                self.finish(block)

    def complete(self) -> None:
        """Every block is."""
        for block in dict.fromkeys(unit.block for unit in (*self._under_way, *self._owed)):
            self.catch_up(block)

    def _give_up(self) -> None:
        """step() was interrupted between taking and deciding: it may be called again."""
        blocks = {unit.block for unit in self._owed}
        self.clear()
        for block in blocks:
            self._steps.pager.discard(block)

    def commit_with(self, records: dict[str, bytes]) -> None:
        """The step is closed, and these are its records."""
        self.records = records

    def committed(self) -> None:
        """The step went to the disk with its records."""
        self.records = None

    def clear(self) -> None:
        """Forgets what is owed: the step is lost, or everything ends."""
        self._owed, self._under_way, self.records = {}, {}, None
        self._uncomputed.clear()
