"""What a pager asks of the updates that are still to be made, or still use blocks' memory."""

from __future__ import annotations

from typing import Any, Protocol

from stoker.offload.model.blocks import Block, Unit


class Owed(Protocol):
    """The updates that a decided step still owes."""

    def begin(self, block: Block, distance: int = 0) -> bool:
        """Starts what is owed to the block, used in `distance` uses. False if nothing is."""

    def ahead(self, block: Block, distance: int) -> bool:
        """begin(), if not enough are under way already."""

    def finish(self, block: Block) -> None:
        """Waits for the block's updates, and makes its new weights current."""

    def catch_up(self, block: Block) -> None:
        """The block is as the decided step leaves it when this returns."""

    def owes(self, block: Block) -> bool: ...


class Pending(Protocol):
    """Registers with the pager (`Pager.register`) when it is made."""

    late: Owed
    read_point: Any  # the decided transaction that weights are read from; None: the store

    @property
    def decided_units(self) -> set[Unit]:
        """Those that the decided step has changed by now."""

    def written(self, block: Block) -> bool:
        """Whether the block's staged weights are on the disk, so that the copy may go."""

    def superseded(self, block: Block) -> bool:
        """Whether nothing needs the block's current weights any more."""

    def release_written(self, wait: bool = False) -> bool:
        """Lets go of memory that is on the disk, or (`wait`) will be; False if there is none."""

    def reclaim(self, keep: int = 0) -> bool:
        """Waits for the oldest update to be done with its memory; False if `keep` are under way."""
