"""Rehearsal: a few steps of training with the real Pager and the real Steps over memory, a disk and
kernels that are only counted.

So the plan knows what would be fetched again, what stays in memory and who waits for whom from the
very code that decides it. A step of the rehearsal moves no byte and takes about a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Callable, Iterable

import torch

from stoker import _core
from stoker.errors import OverBudget
from stoker.offload.division.layout import Layout
from stoker.offload.division.machine import (
    DEMAND,
    STATE,
    WEIGHTS,
    WRITES,
    Clock,
    Machine,
    Task,
)
from stoker.offload.division.spill import PLACES, place_bytes
from stoker.offload.gradients.finiteness import Finiteness
from stoker.offload.gradients.segment import Segment
from stoker.offload.gradients.window import Home, Place, Window
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, Unit
from stoker.offload.observe.context import Context
from stoker.offload.observe.ledger import Waits
from stoker.offload.paging.order import Order
from stoker.offload.paging.pager import Pager
from stoker.offload.steps.steps import Steps

PAGE = 4096
CLASSES = ("weights", "remainder", "m", "v")
TILES_A_STEP = 600  # tiles of larger models are reckoned in groups, of which two are there
TILES_MOST = 1500  # in a step, whatever is there: a rehearsal is to take a tenth of a second
_NOTHING = torch.empty(0)
_UNUSED = _core.Hyper(algorithm="sgd", lr=0.0, step=1)  # nothing is computed
_CALL = ("", True, True)


@dataclass(frozen=True)
class Course:
    """What a step does: blocks in the order of their uses (forward, then backward), and units as
    their gradients become final."""

    uses: list[int]
    finals: list[Unit]
    # block -> seconds of forward and of backward, alone
    compute: dict[int, tuple[float, float]] = field(default_factory=dict)
    # block -> bytes of activations that go to the disk in forward, and come back
    saved: dict[int, int] = field(default_factory=dict)
    activation_memory: int = 0  # bytes of them that stay in memory too, the newest

    def events(self) -> Iterable[tuple[str, Any, float]]:
        """("use", block index, seconds after it), ("save" and "restore", block index, 0.0) and
        ("final", unit, 0.0) in order."""
        order = Order.of(self.uses)
        due: dict[int, list[Unit]] = {}
        at = 0
        for unit in self.finals:
            at = max(at, order.places.get(unit.block.index, [0])[-1])
            due.setdefault(at, []).append(unit)
        for place, block in enumerate(self.uses):
            places = order.places[block]
            forward, backward = self.compute.get(block, (0.0, 0.0))
            if block in self.saved and place == places[-1] != places[0]:
                yield "restore", block, 0.0
            yield (
                "use",
                block,
                (forward if place == places[0] else 0.0)
                + (backward if place == places[-1] else 0.0),
            )
            if block in self.saved and place == places[0]:
                yield "save", block, 0.0
            for unit in due.get(place, ()):
                yield "final", unit, 0.0


@dataclass(frozen=True)
class Step:
    """One predicted step: the items of a ledger row."""

    seconds: float
    read: dict[str, int]
    written: dict[str, int]
    stalls: dict[str, float]
    busy: dict[str, float]


class CountedArena:
    """Gives out places as the Arena does (first fit, 4 KiB), without memory behind them."""

    def __init__(self, size: int) -> None:
        self.size, self.used, self.peak = size, 0, 0
        # (address, bytes), by address, no two touching; 0 is no address
        self._free = [(PAGE, size)]

    def take(self, size: int) -> Piece:
        size = -(-size // PAGE) * PAGE
        for index, (address, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = (
                    [(address + size, free - size)] if free > size else []
                )
                self.used += size
                self.peak = max(self.peak, self.used)
                return Piece(self, address, size)
        raise OverBudget(f"the rehearsal of a step has no {size} free bytes; give a larger dram")

    @property
    def largest_free(self) -> int:
        return max((free for _, free in self._free), default=0)

    def give_back(self, address: int, size: int) -> None:
        self.used -= size
        at = bisect_left(self._free, (address, 0))
        if at < len(self._free) and self._free[at][0] == address + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == address:
            address, size = self._free[at - 1][0], self._free[at - 1][1] + size
            self._free.pop(at - 1)
        insort(self._free, (address, size))


class Piece:
    """A place in a CountedArena; it goes back with the last reference, as a Buffer does."""

    def __init__(self, arena: CountedArena, address: int, size: int) -> None:
        self._arena, self._address, self.size = arena, address, size

    def data_ptr(self) -> int:
        return self._address

    def __del__(self) -> None:
        self._arena.give_back(self._address, self.size)


@dataclass(eq=False)
class _Fetch:
    clock: Clock
    tasks: list[Task]
    cause: str = "weights"

    def wait(self) -> None:
        self.clock.wait(lambda: all(task.done for task in self.tasks), self.cause)


@dataclass(eq=False)
class _Tile:
    unit: Unit
    index: int
    lent: bool
    job: _Job | None = None
    reading: bool = False
    has_state: bool = False
    dropped: bool = False


@dataclass(eq=False)
class _Job:
    clock: Clock
    unit: Unit
    tiles: int
    reads_weights: bool
    next: int = 0
    computing: int = 0
    writing: int = 0

    def wait(self) -> None:
        self.clock.wait(self.computed, "state")

    def wait_written(self) -> None:
        self.clock.wait(self.written, "writing")

    def computed(self) -> bool:
        return self.computing == self.tiles

    def written(self) -> bool:
        return self.writing == self.tiles

    def hashes(self) -> list:
        return []

    def finite(self) -> bool:
        return True


class CountedSession:
    """Stands for the C++ Session: tiles from disk through the kernel to disk, as Updater orders
    them, on the Clock."""

    def __init__(
        self,
        units: list[Unit],
        algorithm: Algorithm,
        arena: CountedArena,
        clock: Clock,
        layout: Layout,
    ) -> None:
        self.units, self.algorithm, self.arena, self.clock = units, algorithm, arena, clock
        self.read, self.written = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0)
        self.retained: dict[Unit, Piece] = {}
        elements = sum(unit.elements for unit in units if unit.updated)
        tiles = elements // layout.tile_elements
        group = max(1, min(layout.tiles // 2, tiles // TILES_A_STEP), tiles // TILES_MOST)
        self._tile_bytes = layout.tile * group
        self._tile_elements = layout.tile_elements * group
        self._memory = [
            arena.take(size) for size in (*[layout.tile] * layout.tiles, layout.idle) if size
        ]
        self._free, self._lent = max(2, layout.tiles // group), 0
        self._at_work = 0  # tiles of jobs
        self._valid: set[tuple[Unit, int]] = set()  # tiles of retained state that were read once
        self._waiting: deque[_Job] = deque()
        self._wanted: dict[Unit, int] = {}  # to be read ahead -> the next tile
        self._ahead: dict[tuple[Unit, int], _Tile] = {}  # read ahead, oldest first

    # -- what Steps calls

    def update(
        self,
        unit_id: int,
        segments: list,
        weight_in: int,
        weight_out: int,
        txn: _Transaction,
        source: Any = None,
        hashes: bool = False,
    ) -> _Job:
        unit = self.units[unit_id]
        job = _Job(self.clock, unit, self._tiles(unit), reads_weights=weight_in == 0)
        txn.jobs.append(job)
        self._wanted.pop(unit, None)
        self._waiting.append(job)
        self._pump()
        return job

    def prefetch_state(self, unit_id: int, source: Any) -> None:
        unit = self.units[unit_id]
        if (
            unit not in self.retained
            and unit not in self._wanted
            and not any(job.unit is unit for job in self._waiting)
        ):
            self._wanted[unit] = 0
            self._pump()

    def retain(self, unit_id: int) -> None:
        unit = self.units[unit_id]
        self.retained[unit] = self.arena.take(sum(self.algorithm.state_bytes(unit).values()))

    def hash_many(self, spans: list) -> list:
        return []

    def invalidate(self, unit_id: int) -> None:
        raise NotImplementedError("a rehearsal never redoes an update")

    # -- memory of tiles

    def lend(self, size: int) -> int:
        places = size // self._tile_bytes
        self._lent += places
        self._pump()
        return places

    def recall(self) -> None:
        self._lent = 0

    def _tiles(self, unit: Unit) -> int:
        return -(-unit.elements // self._tile_elements)

    def _take(self, unit: Unit, index: int) -> _Tile | None:
        if self._lent:
            self._lent -= 1
            return _Tile(unit, index, True)
        if not self._free:
            return None
        self._free -= 1
        return _Tile(unit, index, False)

    def _steal(self) -> bool:
        """As Updater::steal(): only tiles that were read ahead hold memory, and the job in front
        needs some."""
        victims = [key for key, tile in self._ahead.items() if not tile.lent]
        if self._at_work or not victims:
            return False
        tile = self._ahead.pop(victims[-1])
        self._wanted.pop(tile.unit, None)
        if tile.reading:
            tile.dropped = True  # its memory is free once it was read
            return False
        self._free += 1
        return True

    # -- the way of a tile

    def _pump(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if job.next == job.tiles:
                self._waiting.popleft()
                continue
            tile = self._ahead.pop((job.unit, job.next), None) or self._take(job.unit, job.next)
            if tile is None:
                if self._steal():
                    continue
                return
            job.next += 1
            tile.job = job
            self._at_work += 1
            if not tile.reading:
                self._advance(tile)
        while self._wanted and (self._free or self._lent):
            unit, index = next(iter(self._wanted.items()))
            if index == self._tiles(unit):
                del self._wanted[unit]
                continue
            self._wanted[unit] = index + 1
            if (unit, index) not in self._ahead:
                self._ahead[unit, index] = tile = self._take(unit, index)
                self._advance(tile)

    def _advance(self, tile: _Tile) -> None:
        unit, job = tile.unit, tile.job
        size = 0
        if not tile.has_state:
            tile.has_state = True
            key = (unit, tile.index)
            if unit not in self.retained or key not in self._valid:
                self._valid.add(key)
                size += self._count(self.read, tile, self.algorithm.state_bytes(unit))
        if job is not None and job.reads_weights:
            size += self._count(self.read, tile, {"weights": unit.weight_bytes})
        if not size:
            if job is not None:
                self._compute(tile)
            return
        tile.reading = True
        self.clock.transfer(STATE, size, lambda: self._read_done(tile, size))

    def _read_done(self, tile: _Tile, size: int) -> None:
        tile.reading = False
        self.clock.work(size * self.clock.machine.byte_seconds)
        if tile.job is not None:
            self._compute(tile)
        elif tile.dropped:
            self._free += 1
            self._pump()

    def _compute(self, tile: _Tile) -> None:
        machine = self.clock.machine
        elements = self._elements(tile)
        size = self._count(
            self.written,
            tile,
            {"weights": tile.unit.weight_bytes, **self.algorithm.state_bytes(tile.unit)},
        )
        seconds = (
            elements * (machine.update_seconds + tile.unit.dtype.itemsize * machine.byte_seconds)
            + size * machine.byte_seconds
        )
        self.clock.work(seconds, lambda: self._computed(tile, size))

    def _computed(self, tile: _Tile, size: int) -> None:
        tile.job.computing += 1
        self.clock.transfer(WRITES, size, lambda: self._written(tile))

    def _written(self, tile: _Tile) -> None:
        tile.job.writing += 1
        self._at_work -= 1
        if not tile.lent:
            self._free += 1
        self._pump()

    def _elements(self, tile: _Tile) -> int:
        return min(self._tile_elements, tile.unit.elements - tile.index * self._tile_elements)

    def _count(self, into: dict[str, int], tile: _Tile, planes: dict[str, int]) -> int:
        """Books this tile's share of the planes (bytes of the whole unit); their sum."""
        elements, total = self._elements(tile), 0
        for name, size in planes.items():
            share = size * elements // tile.unit.elements
            into[name] += share
            total += share
        return total


class CountedActivations:
    """Stands for Activations: each block's are written as it is left, and read ahead of its
    backward in the reverse order."""

    def __init__(self, course: Course, session: CountedSession) -> None:
        self._saved, self._memory, self._session = course.saved, course.activation_memory, session
        self._order: list[int] = []  # saved and not restored
        self._reads: dict[int, Task] = {}
        self._backward = False
        if self._saved:
            session.read["activations"] = session.written["activations"] = 0

    def save(self, block: int) -> None:
        if self._backward:
            self._order, self._reads, self._backward = [], {}, False
        size, clock = self._saved[block], self._session.clock
        self._order.append(block)
        clock.compute(size * clock.machine.copy_seconds)
        self._session.written["activations"] += size
        clock.transfer(WRITES, size)

    def restore(self, block: int) -> None:
        clock = self._session.clock
        first, self._backward = not self._backward, True
        room = self._memory
        for ahead in reversed(self._order[: self._order.index(block) + 1]):
            size = self._saved[ahead]
            room -= size
            if room < 0 and ahead != block:
                break
            if ahead not in self._reads:
                held = first and room >= 0
                self._session.read["activations"] += 0 if held else size
                self._reads[ahead] = clock.transfer(WEIGHTS, 0 if held else size)
        clock.wait(lambda: self._reads[block].done, "activations")
        self._order.remove(block)


class _Transaction:
    """Stands for a step's transaction, and for the future of its commit."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.jobs = clock, []
        self._barrier: Task | None = None

    def commit(self, durability: str) -> _Transaction:
        return self

    def abandon(self) -> None:
        raise NotImplementedError("a rehearsal abandons no step")

    def ready(self) -> bool:
        if not all(job.written() for job in self.jobs):
            return False
        if self._barrier is None:
            machine = self.clock.machine
            self._barrier = self.clock.transfer(WRITES, machine.commit_seconds * machine.write)
        return self._barrier.done

    def wait(self) -> None:
        self.clock.wait(self.ready, "commit")


class _CountedPlanes:
    """Stands for Planes."""

    def __init__(
        self,
        blocks: list[Block],
        layout: Layout,
        arena: CountedArena,
        session: CountedSession,
        clock: Clock,
    ) -> None:
        self.blocks, self.layout, self.arena, self.session, self.clock = (
            blocks,
            layout,
            arena,
            session,
            clock,
        )
        self.dram_bytes = arena.size
        self.store = SimpleNamespace(begin=lambda: _Transaction(clock))

    def fetch(self, block: Block, address: int, priority: str, txn: Any) -> list:
        size = block.slot_bytes
        self.session.read["weights"] += size
        tasks = [self.clock.transfer(DEMAND if priority == "demand" else WEIGHTS, size)]
        tasks.append(self.clock.work(size * self.clock.machine.byte_seconds))
        return [_Fetch(self.clock, tasks)]

    @staticmethod
    def storage(buffer: Piece) -> Piece:
        return buffer


class _CountedScratch:
    """Stands for Scratch, of spilled gradients."""

    def __init__(self, session: CountedSession) -> None:
        self._session = session
        session.read["gradients"] = session.written["gradients"] = 0

    def write(self, address: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(size=size, written=self._moved(self._session.written, WRITES, size))

    def read(self, piece: SimpleNamespace, address: int, priority: str) -> _Fetch:
        return self._moved(self._session.read, DEMAND, piece.size)

    def free(self, piece: SimpleNamespace) -> None: ...

    def _moved(self, count: dict[str, int], queue: int, size: int) -> _Fetch:
        clock = self._session.clock
        count["gradients"] += size
        return _Fetch(
            clock,
            [clock.transfer(queue, size), clock.work(size * clock.machine.byte_seconds)],
            "gradients",
        )


class _CountedGradients:
    """Stands for Gradients: their memory, lending it, and the real Window of those that are
    spilled."""

    in_flight = 0

    def __init__(self, units: list[Unit], planes: _CountedPlanes, waiting: Waits) -> None:
        spilled = planes.layout.spilled
        self.last_call = True
        self._session = planes.session
        self._alive: set[Unit] = set()
        self._homes = {unit: Home(unit, lambda unit=unit: unit in self._alive) for unit in spilled}
        memory = [planes.arena.take(place_bytes(spilled)) for _ in range(PLACES if spilled else 0)]
        self._window = (
            Window(
                [Place(each.data_ptr(), each) for each in memory],
                _CountedScratch(planes.session),
                waiting,
            )
            if spilled
            else None
        )
        self._memory = {
            unit: planes.arena.take(unit.weight_bytes) for unit in units if unit not in self._homes
        }

    def made(self, unit: Unit) -> None:
        """Backward has laid the unit's gradients there; those of the step before are gone."""
        if unit in self._homes:
            self._alive.discard(unit)
            self._bring(unit)
            self._homes[unit].dirty = True
            self._alive.add(unit)

    def backward_done(self, unit: Unit) -> None:
        if unit in self._homes:
            self._window.write(self._homes[unit])

    def _bring(self, unit: Unit) -> None:
        if unit in self._homes:
            self._window.bring(self._homes[unit])

    def spills(self, unit: Unit) -> bool:
        return unit in self._homes

    def landed(self, unit: Unit, segments: list[Segment]) -> list[Segment]:
        self._bring(unit)
        return segments

    def check(self, unit: Unit, segments: list[Segment]) -> None:
        self._bring(unit)  # as _segments does, which has none to look at here

    def mark(self, grad: Any) -> None:
        return None

    def read_by(self, unit: Unit, job: _Job) -> None:
        if unit in self._homes:
            self._homes[unit].place.readers.append(job)

    def lend(self, order: list[Unit]) -> None:
        left = sum(piece.size for piece in self._memory.values()) * 2 // 3
        for unit in reversed([unit for unit in order if unit in self._memory]):
            left -= self._memory[unit].size
            if left < 0:
                return
            self._session.lend(self._memory[unit].size)

    def land(self, unit: Unit, reader: Any = None) -> None:
        self._bring(unit)

    def decided(self) -> None:
        self._session.recall()


class _RehearsedSteps(Steps):
    """Steps over units without parameters: each has a gradient, and nothing changes it between
    backward and step()."""

    def __init__(self, sequence: list[Unit], *parts: Any) -> None:
        super().__init__(*parts)
        self.sequence = sequence  # as if a step had gone before

    def _segments(self, unit: Unit, later: bool = False) -> list[Segment]:
        return [Segment(SimpleNamespace(index=0, offset=0, numel=unit.elements), _NOTHING, _UNUSED)]

    def _untouched(self, update: Any) -> bool:
        return self.gradients.spills(update.unit)

    def _consumed(self, update: Any, segments: list[Segment]) -> bool:
        self.timed("state", update.wait_computed)
        machine = self.planes.clock.machine
        # their hash, once more
        self.planes.clock.compute(update.unit.weight_bytes * machine.byte_seconds / machine.cores)
        return True

    @staticmethod
    def _has_gradients(unit: Unit) -> bool:
        return True

    @staticmethod
    def _carry_over(unit: Unit, current: Any, staged: Any) -> None:
        pass

    @staticmethod
    def _when_backward_ends(callback: Callable[[], None]) -> None:
        pass  # Rehearsal.step() does it


class Rehearsal:
    """Training of `blocks` in `arena_bytes`, divided by `layout`, as `course` goes, on a machine
    that is only thought of."""

    def __init__(
        self,
        blocks: list[Block],
        algorithm: Algorithm,
        layout: Layout,
        arena_bytes: int,
        course: Course,
        policy: str,
        machine: Machine,
    ) -> None:
        self.clock = Clock(machine)
        shadows = _shadows(blocks)
        self.blocks = list(dict.fromkeys(unit.block for unit in shadows.values()))
        for index, unit in enumerate(shadows.values()):
            unit.session_id = index
        updated = [unit for unit in shadows.values() if unit.updated]
        layout = replace(
            layout,
            retained=[shadows[unit] for unit in layout.retained],
            spilled=[shadows[unit] for unit in layout.spilled],
        )
        self._events = list(
            replace(course, finals=[shadows[unit] for unit in course.finals]).events()
        )
        self.arena = CountedArena(arena_bytes)
        self.session = CountedSession(
            list(shadows.values()), algorithm, self.arena, self.clock, layout
        )
        self.activations = CountedActivations(course, self.session)
        planes = _CountedPlanes(self.blocks, layout, self.arena, self.session, self.clock)
        context = Context()
        self.pager = Pager(self.blocks, planes, context, shown=None)
        self.gradients = _CountedGradients(updated, planes, context.waiting)
        making = (
            planes,
            self.pager,
            self.gradients,
            lambda param: _UNUSED,
            policy,
            lambda units: None,
        )
        finals = [shadows[unit] for unit in course.finals]
        self.steps = _RehearsedSteps(finals, *making, Finiteness(), context)
        self.pager.recorder.orders[_CALL] = Order.of(course.uses)
        for block in self.blocks:
            if block.pinned:
                self.pager.fetch(block)

    def step(self) -> Step:
        """What Session does in a step, in its order."""
        clock, steps, pager, session = self.clock, self.steps, self.pager, self.session
        started, waited, busy = clock.now, dict(clock.waited), dict(clock.busy)
        read, written = dict(session.read), dict(session.written)
        if steps.decided is not None:
            steps.close(dict)
        steps.poll()
        pager.root_call(_CALL)
        steps.call_begins()
        pager.prefetch()
        for what, whom, seconds in self._events:
            if what == "use":
                pager.use(self.blocks[whom])
                clock.compute(seconds)
            elif what == "save":
                self.activations.save(whom)
            elif what == "restore":
                self.activations.restore(whom)
            else:
                clock.compute(whom.weight_bytes * clock.machine.copy_seconds)
                self.gradients.made(whom)
                steps.on_final(whom)
                self.gradients.backward_done(whom)
        steps.backward_ends()
        steps.decide()
        since = lambda now, before: {name: now[name] - before[name] for name in now}
        return Step(
            clock.now - started,
            since(session.read, read),
            since(session.written, written),
            since(clock.waited, waited),
            since(clock.busy, busy),
        )

    def steady(self, most: int = 8) -> Step:
        """A step once they repeat: the mean of the last ones if they never do. The first two fill
        the memory; under lazy the first updates nothing."""
        self.step(), self.step()
        rows = [self.step(), self.step()]
        while len(rows) < most and rows[-1].read != rows[-2].read:
            rows.append(self.step())
        rows = rows[-2:] if rows[-1].read == rows[-2].read else rows[-4:]
        mean = lambda pick: {
            name: sum(pick(row)[name] for row in rows) / len(rows) for name in pick(rows[0])
        }
        whole = lambda pick: {name: round(value) for name, value in mean(pick).items()}
        return Step(
            sum(row.seconds for row in rows) / len(rows),
            whole(lambda r: r.read),
            whole(lambda r: r.written),
            mean(lambda r: r.stalls),
            mean(lambda r: r.busy),
        )


def _shadows(blocks: list[Block]) -> dict[Unit, Unit]:
    """Copies of the units, in copies of their blocks, that have sizes but no parameters."""
    copies = {}
    for block in blocks:
        shadow = Block(block.name, block.index, block.pinned)
        for unit in block.units:
            copy = Unit(
                unit.name,
                shadow,
                unit.dtype,
                unit.updated,
                elements=unit.elements,
                slot_offset=unit.slot_offset,
            )
            shadow.units.append(copy)
            copies[unit] = copy
    return copies
