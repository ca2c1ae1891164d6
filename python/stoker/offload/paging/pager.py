"""Pager: which blocks' weights are in memory. Fetches by the recorded order, evicts what is used
last (Belady's rule).

A fetch ahead of its use evicts sooner than one that waits. So far ahead it may only evict what
would go anyway. Where waiting saves a copy that is used sooner, it waits until one block before its
use (`Pager.spared`). So of blocks that are used round and round, as in generate(), a fixed part
stays in memory. Training turns back instead: what it used last goes anyway, and it fetches far
ahead.

Memory rules. Each resident copy of a block is one arena Buffer seen through one torch storage.
Evicting drops the pager's references. The memory returns to the arena only when the last tensor
that aliases the storage is gone. So a view that autograd, a recomputed checkpoint segment or the
user still holds can never see another block's bytes.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Iterator, Protocol

import torch

from stoker.errors import OverBudget
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.paging.offloaded import ALONE, InUse, Offloaded, Place, become, uses
from stoker.offload.paging.order import OUTDATED, Ahead, LastUsed, Outlook, Recorder
from stoker.offload.paging.slot import Slot, drain, placeholders

if TYPE_CHECKING:
    from stoker.offload.observe.context import Context
    from stoker.offload.paging.pending import Pending
    from stoker.offload.storage.planes import Planes

CURRENT, STAGED = "current", "staged"  # the two pools of copies
# about what a disk moves while it answers one request: so much is to be under way at least
LATENCY_BYTES = 1 << 20


class Looks(Protocol):
    """Those who look at parameters that are not in use, as the pager meets them (shown.py)."""

    def during(self, block: Block) -> None:
        """The block's weights are used. InvalidArgument if what the loop did to them since the
        forward began would come too late for that."""

    def exposed(self, block: Block) -> None:
        """The block's parameters show the pager's memory from here on."""

    def has(self, param: Param) -> bool:
        """Whether the parameter shows a copy that they have."""

    def watch(self, param: Param, place: Place) -> None:
        """The parameter has left this memory. A change there is an error for as long as somebody
        refers to it."""

    def watches(self, param: Param) -> bool: ...

    def was_taken(self, param: Param) -> bool:
        """Whether somebody got a way to change the weight in use that torch does not see."""

    def written(self, param: Param) -> bool:
        """Whether the weight was changed since it was taken. Asked at the end of its use."""


class Pager:
    """Not thread-safe: called by the thread that runs forward or backward, under the session's
    lock.

    Parameters show the slots themselves. Where the model computes on another device than the CPU,
    DevicePager (device_pager.py) copies.
    """

    device = torch.device("cpu")
    hops = 1  # copies of a block on its way from the disk to what its parameters show
    # whether weights have a place of their own in memory, so that copies hold what updates made and
    # nothing else
    resident = False

    def __init__(
        self, blocks: list[Block], planes: Planes, context: Context, shown: Looks | None
    ) -> None:
        """`shown`: what parameters show that are not in use; None where nobody looks at them."""
        self.blocks = blocks
        self.planes = planes
        self.updates: Pending | None = None  # once there are any
        self.shown = shown
        self.recorder = Recorder()
        self.slots: dict[Block, Slot] = {}  # current weights
        # weights of the step that is being made, not visible before it is decided
        self.staged: dict[Block, Slot] = {}
        self.versions = [0] * len(blocks)
        self.entered = [0] * len(blocks)  # forwards under way inside each block
        self.held: set[Param] = set()  # of gather(): they hold the user's copies, which stay theirs
        self.current: Block | None = None
        # Start of a slot's storage -> (block, version). Holds no memory; an entry ends when another
        # slot starts there.
        self.by_address: dict[int, tuple[Block, int]] = {}
        self.lookahead_bytes = planes.layout.lookahead
        self.waiting = context.waiting
        # what parameters show: of blocks whose modules run, and pinned ones
        self.exposed: dict[Block, Slot] = {}
        # torch's count of in-place writes when a parameter got its bytes
        self._counts: dict[Param, int] = {}
        self.calls = False  # modules run
        self._touched: list[Param] = []  # that were written to in place while they were in use
        self._scalars, self.placeholders = placeholders(
            [param for block in blocks for param in block.params], self.device
        )
        self._addresses = {param: shown.data_ptr() for param, shown in self.placeholders.items()}
        self._sizes = [block.slot_bytes for block in blocks]
        self._outlook: Outlook | None = None  # of the newest order
        self._ahead = Ahead(self.recorder, self._sizes)
        self._updating: dict[Block, None] = {}  # blocks with an update that may not be written yet
        self._last_used = LastUsed(self.recorder, self._goes_at, self._copies)

    def register(self, updates: Pending) -> None:
        """Whoever updates weights says so, before the first use."""
        self.updates = updates

    # -- use ---------------------------------------------------------------------------------------

    def use(self, block: Block) -> Slot:
        """Makes the block's weights readable through its parameters, and fetches ahead what comes
        next."""
        arrived = self._arrive(block)
        late = self.updates.late.begin(block)
        slot = None if late else self.slots.get(block) or self._load(block, "demand")
        if arrived:
            self.prefetch()
        if late:
            self.updates.late.finish(block)
            slot = self.slots.get(block) or self._load(block, "demand")
        if slot.loading:
            self._finish(slot)
        self.expose(slot)
        return slot

    def _arrive(self, block: Block) -> bool:
        """Notes a use; False if the last one was of the same block."""
        if block is self.current:
            return False
        before = self.recorder.position
        self.recorder.use(block.index)
        for position in range(before, self.recorder.position):
            self._passed(position)
        self.current = block
        return True

    def _passed(self, position: int) -> None:
        """The use at this position of the order was made, or is not expected any more."""
        self._ahead.passed(position)
        block = self.blocks[self.recorder.order.uses[position]]
        self._last_used.put((CURRENT, block))
        self._last_used.put((STAGED, block))

    def old_weights(self, unit: Unit, staged: Slot | None) -> tuple[Slot | None, int]:
        """Where an update finds the unit's weights in memory, and who keeps them there; (None, 0)
        if it has to read them.
        `staged`: where it leaves the new ones."""
        slot = self.slots.get(unit.block)
        return (
            (slot, slot.address + unit.slot_offset)
            if slot is not None and not slot.loading
            else (None, 0)
        )

    def copy_of(self, block: Block) -> Slot | None:
        """What the block's next use finds in memory, or on its way there."""
        return self.slots.get(block)

    def prefetch(self) -> None:
        """Starts fetching the blocks that the recorded order names next, while memory is free or
        holds what may go for them."""
        ahead, late = self._ahead, self.updates.late
        while (index := ahead.next()) is not None and ahead.bytes < self.lookahead_bytes:
            block, slot = self.blocks[index], self.copy_of(self.blocks[index])
            if late.owes(block):
                if not late.ahead(block, ahead.end - self.recorder.position):
                    return
            elif slot is None:
                if not self._can_fetch(block):
                    return
                if self._load(block, "prefetch", self.spared(ahead.end, self.hops)) is None:
                    return
            elif not slot.loading:
                ahead.advance(under_way=False)
                continue
            ahead.advance(under_way=True)

    def spared(self, position: int, hops: int = 1) -> int:
        """Fetching for the use at this position of the recorded order must spare copies that are
        used within so many uses from now.

        It is due where no more than the block's own size is used before it, for each hop: then it
        spares what is used before it. Earlier it also spares what is used sooner than that which is
        used up until then, and can go instead if it waits.
        """
        now, order = self.recorder.position, self.recorder.order
        outlook = self._outlook
        if outlook is None or outlook.order is not order:
            pinned = frozenset(block.index for block in self.blocks if block.pinned)
            outlook = self._outlook = Outlook(order, self._sizes, pinned)
        size = self._sizes[order.uses[position]]
        if outlook.bytes(now, position) < hops * max(size, LATENCY_BYTES):
            return position - now
        return max(position, outlook.latest(max(0, now - 1), position - 1)) - now

    def _can_fetch(self, block: Block) -> bool:
        # A block whose update is staged has its next weights there already; fetching the old ones
        # again would be waste.
        return block not in self.staged

    def _load(self, block: Block, priority: str, distance: int = -1) -> Slot | None:
        slot = self.take(block, self.versions[block.index], distance)
        if slot is None:
            return None
        slot.loading = self.planes.fetch(block, slot.address, priority, self.updates.read_point)
        self.slots[block] = slot
        self._last_used.put((CURRENT, block))
        return slot

    def _finish(self, slot: Slot) -> None:
        """Waits for the fetch."""
        futures, slot.loading = slot.loading, []
        try:
            with self.waiting("weights"):
                for future in futures:
                    future.wait()
        except BaseException:
            drain(futures)
            del futures, future  # a traceback would keep them, and with them the store, open
            self.slots.pop(slot.block, None)
            self._lost(slot.block)
            raise
        self._ahead.arrived(slot.block.index)

    def expose(self, slot: Slot) -> None:
        """Points the block's parameters at this copy, if they may show it: a module of the block
        runs, or it is pinned."""
        block = slot.block
        if self.shown is None:
            return  # nobody looks
        self.shown.during(block)
        if not (block.pinned or self.entered[block.index]) or self.exposed.get(block) is slot:
            return
        self.shown.exposed(block)
        if block in self.exposed:
            self._hide(block)
        self.exposed[block] = slot
        for param in (param for param in block.params if param not in self.held):
            self.point(param, slot.view(param))
            self.cover(param)

    def leave(self, block: Block) -> None:
        """No module of the block runs any more."""
        if block.pinned or (slot := self.exposed.get(block)) is None:
            return
        leaked = self.leaks(slot)
        self._hide(block)
        for param in block.params if leaked else ():
            self.shown.watch(param, Place.of(slot.view(param)))

    def leaks(self, slot: Slot) -> bool:
        """Whether somebody refers to this memory beside the parameters. For a pinned block that may
        be a graph."""
        here = self.exposed.get(slot.block) is slot
        return uses(slot.bytes) > ALONE + (
            sum(param not in self.held and not self.shown.has(param) for param in slot.block.params)
            if here
            else 0
        )

    def call_begins(self) -> None:
        """Modules run: pinned weights may be read anywhere."""
        self.calls = True
        for slot in self._pinned():
            for param in slot.block.params:
                self.cover(param)

    def call_ends(self) -> None:
        self.calls = False
        for slot in self._pinned():
            for param in (param for param in slot.block.params if param not in self.held):
                taken = self.shown.was_taken(param)
                self._note_use(param)
                self.cover(param)
                if taken:
                    self.shown.watch(param, Place.of(slot.view(param)))

    def _pinned(self) -> list[Slot]:
        return [slot for block, slot in self.exposed.items() if block.pinned]

    def point(self, param: Param, tensor: torch.Tensor) -> None:
        """Gives the parameter other bytes. What changes it in place from here on is counted by
        torch (`changed`)."""
        with torch._C.DisableTorchFunction():
            param.tensor.data = tensor
            self._counts[param] = param.tensor._version

    def note(self, param: Param) -> None:
        """What was written to the parameter in place until now is known of."""
        with torch._C.DisableTorchFunction():
            self._counts[param] = param.tensor._version

    def hide(self, param: Param) -> None:
        """The parameter shows nothing; torch tells us of whoever looks."""
        self.point(param, self.placeholders[param])
        become(param.tensor, Offloaded)

    def hold(self, param: Param, tensor: torch.Tensor) -> None:
        """The parameter shows the user's own copy until show()."""
        self.held.add(param)
        self.point(param, tensor)
        become(param.tensor, None)

    def _note_use(self, param: Param) -> None:
        """Before the parameter shows something else, or the call ends: whether it was written to in
        place."""
        with torch._C.DisableTorchFunction():
            if param.tensor._version != self._counts[param] or self.shown.written(param):
                self._touched.append(param)
                self.note(param)

    def changed(self) -> Param | None:
        """A parameter that was written to behind our back since it got its bytes; its block leaves
        memory, and the change with it."""
        with torch._C.DisableTorchFunction():
            for param in self._counts:
                if not (param in self.held or self.shown.has(param)) and self.astray(param):
                    self._touched.append(param)
            self._touched += self._written_placeholders()
        touched, self._touched = self._touched, []
        for param in touched:
            self.drop_change(param)
        return touched[0] if touched else None

    def astray(self, param: Param) -> bool:
        """Whether the parameter was written to since it was noted, or shows what we did not give
        it."""
        tensor = param.tensor
        if tensor._version != self._counts[param]:
            return True
        return param.unit.block not in self.exposed and tensor.data_ptr() != self._addresses[param]

    def drop_change(self, param: Param) -> None:
        """The parameter's block leaves memory: the next use reads the store."""
        self.note(param)
        self.discard(param.unit.block)
        self.show(param)

    def _written_placeholders(self) -> list[Param]:
        found = []
        for scalars, as_made in self._scalars:
            if torch.equal(scalars, as_made):
                continue
            places = {
                scalars[at].data_ptr()
                for at in (scalars != as_made).any(1).nonzero().flatten().tolist()
            }
            found += [param for param, address in self._addresses.items() if address in places]
            scalars.copy_(as_made)
        return found

    def root_call(self, key: tuple) -> None:
        """A root call of this kind begins."""
        self.recorder.begin(key)
        self.current = None

    def discard(self, block: Block) -> None:
        """Forgets the copy in memory: the next use reads the store."""
        self.evict(block)
        if block.pinned:
            self.pin(block)
        self.current = None

    def fetch(self, block: Block) -> None:
        """Makes the block's weights readable, apart from the order of uses."""
        self.updates.late.catch_up(block)
        slot = self.slots.get(block) or self._load(block, "demand")
        if slot.loading:
            self._finish(slot)
        self.expose(slot)

    def pin(self, block: Block) -> None:
        """Fetches the block now and keeps it in memory from here on."""
        self.fetch(block)
        block.pinned = True
        self._outlook = None
        self.fetch(block)

    # -- memory ------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def take(self, block: Block, version: int, distance: int = -1) -> Slot | None:
        """Memory for a copy of the block. `distance`: only copies that are used later than so many
        uses from now give way to it. distance -1: it is needed now; anything that may go goes, and
        OverBudget if that is not enough. Else None.
        """
        while True:
            try:
                buffer = self.planes.arena.take(block.slot_bytes)
                break
            except OverBudget:
                if self.updates.release_written() or self._evict_one(distance, block):
                    continue
                if distance >= 0:
                    return None
                if self.updates.reclaim() or self.updates.release_written(wait=True):
                    continue
                if gc.collect() and self._retry(block):
                    continue
                raise self._too_small(block) from None
        slot = Slot(block, self.planes.storage(buffer), version)
        self.by_address[slot.address] = (block, version)
        return slot

    def _retry(self, block: Block) -> bool:
        return self.planes.arena.largest_free >= block.slot_bytes

    def _too_small(self, block: Block) -> OverBudget:
        arena = self.planes.arena
        missing = block.slot_bytes - arena.largest_free
        needed = self.planes.dram_bytes + -(-missing // (1 << 20)) * (1 << 20)
        return OverBudget(
            f"the memory budget of {self.planes.dram_bytes >> 20} MiB is too small: block"
            f" {block.name} needs {block.slot_bytes} bytes more while all other "
            "blocks in memory are in use at the same time; the smallest budget that gets past this"
            f' point is dram="{needed >> 20}MiB"'
        )

    def _evict_one(self, distance: int, wanted: Block) -> bool:
        """Drops the copy that is used last, if it is used later than `distance`. False when there
        is none."""
        for updated in [*self._updating]:
            self._last_used.put((CURRENT, updated))
            self._last_used.put((STAGED, updated))
            if self.updates.written(updated):
                del self._updating[updated]
        least = self.recorder.position + distance if distance >= 0 else -1
        copy = self._last_used.pick(least, lambda copy: self._may_go(*copy, wanted, least))
        if copy is None:
            return False
        pool, block = copy
        if pool is CURRENT:
            self.evict(block)
        else:
            self._last_used.drop(copy)
            del self.staged[block]
        return True

    def _may_go(self, pool: str, block: Block, wanted: Block, least: int) -> bool:
        if self.entered[block.index]:
            return False
        if pool is STAGED:  # those that are owed to the block in use are what it waits for
            return not (block is self.current and self.updates.late.owes(block))
        if block is self.current or block is wanted:
            return False
        return least < 0 or not self.slots[block].loading  # it gives way to what is needed now

    def _copies(self) -> Iterator[tuple[str, Block]]:
        yield from ((CURRENT, block) for block in self.slots)
        yield from ((STAGED, block) for block in self.staged)

    def _goes_at(self, copy: tuple[str, Block]) -> int | None:
        """The position of the copy's next use; None if it has to stay for now, or is gone."""
        pool, block = copy
        if block.pinned or block not in (self.slots if pool is CURRENT else self.staged):
            return None
        recorder = self.recorder
        if pool is CURRENT:
            if block in self.staged or self.updates.superseded(block):
                return OUTDATED
            return recorder.next_at(block.index)
        if not self.updates.written(block):
            return None
        if self.updates.late.owes(block):
            return recorder.next_at(block.index)
        # in the next forward: after the rest of this order
        return min(OUTDATED, len(recorder.order.uses) + recorder.order.first(block.index))

    def updating(self, block: Block) -> None:
        """An update of it began. Computed it frees the current copy; written, the staged one."""
        self._updating[block] = None

    def evict(self, block: Block) -> None:
        """Takes the block's weights out of its parameters. The memory is free once nothing aliases
        it any more."""
        if block in self.slots:
            self._let_go(block)
            self._lost(block)

    def _let_go(self, block: Block) -> None:
        slot = self.slots.pop(block)
        drain(slot.loading)
        self._last_used.drop((CURRENT, block))
        if self.exposed.get(block) is slot:
            self._hide(block)

    def _lost(self, block: Block) -> None:
        """A copy of the block is gone."""
        if self.copy_of(block) is None:
            self._ahead.left(block.index)

    def show(self, param: Param) -> None:
        """Points one parameter at what its block shows."""
        slot = self.exposed.get(param.unit.block)
        if slot is None:
            self.hide(param)
            return
        self.point(param, slot.view(param))
        self.cover(param)

    def cover(self, param: Param) -> None:
        """Torch tells us of whoever looks at the parameter, unless it is in use or the user's."""
        if param not in self.held:
            block = param.unit.block
            become(
                param.tensor,
                InUse if block in self.exposed and (self.calls or not block.pinned) else Offloaded,
            )

    def _hide(self, block: Block) -> None:
        """The block's parameters show nothing."""
        if self.exposed.pop(block, None) is None:
            return
        for param in block.params:
            if param not in self.held:
                self._note_use(param)
                self.hide(param)

    def rewrite(self, param: Param, value: torch.Tensor) -> None:
        """The parameter's weights are these now, in the store."""
        block = param.unit.block
        self.versions[block.index] += 1
        slot = self.slots.get(block)
        if slot is None:
            return
        if slot.loading or self.leaks(slot) or self.shown.watches(param):
            self.discard(block)
            return
        slot.view(param).copy_(value)
        slot.version = self.versions[block.index]
        self.by_address[slot.address] = (block, slot.version)

    # -- steps -------------------------------------------------------------------------------------

    def decide(self, changed: list[Block]) -> None:
        """The step is decided: the changed blocks' staged weights become current; blocks without a
        staged copy leave memory."""
        for block in changed:
            self.promote(block)
        for block in self.blocks:
            if block.pinned:
                self.fetch(block)
        self.current = None

    def promote(self, block: Block) -> None:
        """The block's staged weights are the current ones; where there is no staged copy, those on
        the disk are."""
        self.versions[block.index] += 1
        slot = self.staged.pop(block, None)
        self._last_used.drop((STAGED, block))
        if block in self.slots:
            self._let_go(block)
        if slot is not None:
            slot.version = self.versions[block.index]
            self.slots[block] = slot
            self._ahead.arrived(block.index)
            self._last_used.put((CURRENT, block))
            self.expose(slot)
        else:
            self._lost(block)

    def outdate(self, block: Block) -> None:
        """A decided step owes the block an update: nobody may read its weights, but the update
        may."""
        self._hide(block)

    def abandon(self) -> None:
        self.staged.clear()

    def clear(self) -> None:
        """Lets go of all memory."""
        self.exposed.clear()
        self.slots.clear()
        self.staged.clear()

    def restart(self) -> None:
        """After a step the recorded order begins again: fetch for the start of the next forward."""
        recorder = self.recorder
        if recorder.order.uses:
            recorder.again()
            self.prefetch()
