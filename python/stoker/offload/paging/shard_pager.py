"""Weights of a sharded model: they stay in memory, as the local shards that fully_shard() made and
gathers from.

A shard is only ever written in place: torch ignores it where the data of one is replaced. An update
reads the old weights from a copy in the arena and leaves the new ones there. Where the arena has no
room for it, the new ones are on the disk alone. They go to the shards when the step is decided.
"""

from __future__ import annotations

import torch

from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.observe.context import Context
from stoker.offload.paging.link import Link
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.slot import Slot, drain
from stoker.offload.storage.planes import Planes


class ShardPager(Pager):
    """Nothing is fetched and nothing evicted. `staged` alone is used as in Pager."""

    resident = True

    def __init__(
        self, blocks: list[Block], planes: Planes, context: Context, link: Link, modules: list
    ) -> None:
        self.device = link.device
        self._modules = modules  # that gather weights from the shards
        super().__init__(blocks, planes, context, None)
        self._link = link
        # torch's counts of in-place writes that are known of
        self._seen: dict[Param, tuple[int, int]] = {}
        self._note([param for block in blocks for param in block.params])

    @staticmethod
    def _shard(param: Param) -> torch.Tensor:
        return param.tensor._local_tensor.detach()  # to_local() takes torch a hundred times as long

    # -- what updates read and write ---------------------------------------------------------------

    def old_weights(self, unit: Unit, staged: Slot | None) -> tuple[Slot | None, int]:
        if staged is None:
            return None, 0
        for event in [
            self._link.download(self._shard(param), staged.view(param))
            for param in unit.params
            if param.numel
        ]:
            self._link.wait(event)
        return staged, staged.address + unit.slot_offset

    def decide(self, changed: list[Block]) -> None:
        self._link.wait(self._link.mark())  # the device may still be gathering the old ones
        for unit in self.updates.decided_units:
            slot = self.staged.get(unit.block) or self._read([unit])
            self._upload([unit], slot)
        for block in changed:
            self.versions[block.index] += 1
            self.staged.pop(block, None)

    def _upload(self, units: list[Unit], slot: Slot) -> None:
        params = [param for unit in units for param in unit.params if param.numel]
        for event in [self._link.upload(slot.view(param), self._shard(param)) for param in params]:
            self._link.wait(event)
        self._note(params)

    def _read(self, units: list[Unit]) -> Slot:
        """What the store, or the decided step, holds of units of one block."""
        block = units[0].block
        slot = self.take(block, self.versions[block.index])
        futures = self.planes.fetch(block, slot.address, "demand", self.updates.read_point, units)
        try:
            with self.waiting("weights"):
                for future in futures:
                    future.wait()
        except BaseException:
            drain(futures)
            del futures, future  # a traceback would keep them, and with them the store, open
            raise
        return slot

    # -- what a Pager does for weights that come and go --------------------------------------------

    def forget_gathered(self) -> None:
        """The shards are about to change behind fully_shard()'s back. What a forward has left
        gathered (always the root's weights, where no backward followed) would be taken for theirs
        by the next. On all ranks, or some gather while others do not.
        """
        self._link.wait(self._link.mark())
        for module in self._modules:
            module.reshard()

    def discard(self, block: Block) -> None:
        """What the shards hold of the block is not wanted: it is read anew."""
        self.staged.pop(block, None)
        self._upload(block.units, self._read(block.units))

    def changed(self) -> Param | None:
        params = [param for param, count in self._seen.items() if self._writes(param) != count]
        if not params:
            return None
        self.forget_gathered()
        for block in dict.fromkeys(param.unit.block for param in params):
            self.discard(block)
        self._note(params)  # also where they are empty
        return params[0]

    def _note(self, params: list[Param]) -> None:
        self._seen |= {param: self._writes(param) for param in params}

    def _writes(self, param: Param) -> tuple[int, int]:
        return param.tensor._version, self._shard(param)._version

    def fetch(self, block: Block) -> None: ...

    def prefetch(self) -> None: ...

    def restart(self) -> None: ...

    def show(self, param: Param) -> None: ...
