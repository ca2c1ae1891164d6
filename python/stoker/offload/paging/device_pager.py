"""The model computes on another device than the CPU: weights are copied there before their use,
gradients back for their update.

Host memory is used as without it: slots take what comes from the disk, and what updates write for
the next forward. An *image* is a slot's copy on the device; parameters show images only. Images are
kept by the same rule as slots, under a cap of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stoker.errors import OverBudget, StokerError
from stoker.offload.model.blocks import Block, Param
from stoker.offload.paging.link import Link
from stoker.offload.paging.order import Ahead, LastUsed
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.slot import Slot

if TYPE_CHECKING:
    from stoker.offload.observe.context import Context
    from stoker.offload.paging.shown import Shown
    from stoker.offload.storage.planes import Planes


@dataclass(eq=False)
class Image(Slot):
    """A block's weights on the device."""

    uploaded: Any = None  # event


@dataclass(frozen=True)
class Upload:
    """Host memory that a copy may still be reading."""

    event: Any
    source: Slot


class DevicePager(Pager):
    hops = 2  # from the disk to the slot, from there to the image

    def __init__(
        self,
        blocks: list[Block],
        planes: Planes,
        context: Context,
        shown: Shown,
        link: Link,
        capacity: int | None,
    ) -> None:
        """capacity: bytes of images on the device; None for those that one use needs and as many
        fetched ahead."""
        self.device = link.device
        super().__init__(blocks, planes, context, shown)
        self.link = link
        smallest = planes.layout.device_least
        if capacity is not None and capacity < smallest:
            raise OverBudget(
                f'{link.device} needs at least device_memory="{-(-smallest >> 20)}MiB" for the'
                f" weights of the blocks in use at one time, not {capacity} bytes"
            )
        self._fixed = capacity is not None
        self.capacity = capacity or planes.layout.device_weights
        self.images: dict[Block, Image] = {}
        self._held = 0  # bytes of them
        self._images_ahead = Ahead(self.recorder, self._sizes)
        self._image_last_used = LastUsed(self.recorder, self._image_goes_at, lambda: self.images)
        self._uploads: list[Upload] = []  # oldest first
        self._leaving_bytes = 0
        # (event, bytes) of images that the device may still be reading, oldest first
        self._leaving: deque[tuple[Any, int]] = deque()

    # -- use ---------------------------------------------------------------------------------------

    def use(self, block: Block) -> Image:
        if block not in self.images:
            self._upload(super().use(block))
        elif self._arrive(block):
            self.prefetch()
        self._upload_ahead()
        return self._show(block)

    def fetch(self, block: Block) -> None:
        if block not in self.images:
            super().fetch(block)
            self._upload(self.slots[block])
        self._show(block)

    def copy_of(self, block: Block) -> Slot | None:
        return self.images.get(block) or super().copy_of(block)

    def expose(self, slot: Slot) -> None:
        """A slot has its bytes. Parameters show images instead."""

    def rewrite(self, param: Param, value: torch.Tensor) -> None:
        self.versions[param.unit.block.index] += 1
        self.discard(param.unit.block)  # copies to the device may be reading it

    def _show(self, block: Block) -> Image:
        image = self.images[block]
        self.link.join(image.bytes, image.uploaded)  # each time: another stream may be computing
        super().expose(image)
        return image

    @torch.inference_mode(False)  # an image outlives the mode that its first use happens to be in
    def _upload(self, slot: Slot, distance: int = -1) -> bool:
        block = slot.block
        if not self._make_room(block, distance):
            return False
        image = Image(block, self.link.empty(block.slot_bytes), slot.version)
        image.uploaded = self.link.upload(slot.bytes, image.bytes)
        self._uploads.append(Upload(image.uploaded, slot))
        self.by_address[image.address] = (block, image.version)
        self.images[block] = image
        self._held += block.slot_bytes
        self._image_last_used.put(block)
        return True

    def _passed(self, position: int) -> None:
        super()._passed(position)
        self._image_last_used.put(self.blocks[self.recorder.order.uses[position]])

    def _upload_ahead(self) -> None:
        """Copies what the recorded order names next, as far as it has come from the disk and there
        is room."""
        self._forget_uploads()
        ahead = self._images_ahead
        while (index := ahead.next()) is not None:
            block = self.blocks[index]
            if block in self.images:
                ahead.advance(under_way=False)
                continue
            slot = self.slots.get(block)
            if (
                slot is None
                or self.updates.late.owes(block)
                or not all(future.ready() for future in slot.loading)
            ):
                return
            try:
                self._finish(slot)
            except StokerError:  # the use itself reads again, and raises
                return
            try:
                if not self._upload(slot, self.spared(ahead.end)):
                    return
            except torch.OutOfMemoryError:  # it may fit later; a use that needs it now raises
                return

    # -- memory of the device ----------------------------------------------------------------------

    def _make_room(self, wanted: Block, distance: int) -> bool:
        """Drops images that are used later than `distance` (-1: whatever may go). False if that is
        not enough."""
        while self._held + wanted.slot_bytes > self.capacity:
            block = self._used_last(distance, wanted)
            if block is not None:
                self._drop(block)
            elif distance >= 0:
                return False
            elif self._fixed:
                raise OverBudget(
                    f"block {wanted.name} does not fit on {self.device} together with the other "
                    f"blocks in use. The smallest device_memory that gets past this point is"
                    f' "{-(-(self._held + wanted.slot_bytes) >> 20)}MiB"'
                )
            else:
                break
        needed = self._held + wanted.slot_bytes
        while self._leaving and needed + self._leaving_bytes > self.capacity:
            event, size = self._leaving[0]
            if distance >= 0 and not self.link.done(event):
                return False
            # else this thread would run ahead of the device, and fill its memory
            self.link.wait(event)
            self._leaving.popleft()
            self._leaving_bytes -= size
        return True

    def _used_last(self, distance: int, wanted: Block) -> Block | None:
        least = self.recorder.position + distance if distance >= 0 else -1
        in_use = lambda block: self.entered[block.index] or block is self.current or block is wanted
        return self._image_last_used.pick(least, lambda block: not in_use(block))

    def _image_goes_at(self, block: Block) -> int | None:
        if block.pinned or block not in self.images:
            return None
        return self.recorder.next_at(block.index)

    def _drop(self, block: Block) -> None:
        image = self.images.get(block)
        if image is None:
            return
        # torch gives this address to other tensors once nothing aliases the image: it must not pass
        # for weights then
        self.by_address.pop(image.address, None)
        del self.images[block]
        size = image.bytes.numel()
        self._held -= size
        self._image_last_used.drop(block)
        self._images_ahead.left(block.index)
        self._lost(block)
        self._hide(block)
        del image
        self._leaving_bytes += size
        # behind the release: the allocator's own mark has passed when this one has
        self._leaving.append((self.link.mark(), size))

    # -- host memory that copies read --------------------------------------------------------------

    def _forget_uploads(self) -> None:
        while self._uploads and self.link.done(self._uploads[0].event):
            self._uploads.pop(0)

    def _evict_one(self, distance: int, wanted: Block) -> bool:
        self._forget_uploads()
        gone = [
            upload
            for upload in self._uploads
            if self.slots.get(upload.source.block) is not upload.source
        ]
        if gone:  # its memory comes free as soon as it is copied
            self.link.wait(gone[0].event)
            self._uploads.remove(gone[0])
            return True
        return super()._evict_one(distance, wanted)

    # -- steps -------------------------------------------------------------------------------------

    def decide(self, changed: list[Block]) -> None:
        for block in changed:
            self._drop(block)
        super().decide(changed)

    def outdate(self, block: Block) -> None:
        self._drop(block)

    def discard(self, block: Block) -> None:
        self._drop(block)
        super().discard(block)

    def clear(self) -> None:
        for upload in self._uploads:
            self.link.wait(upload.event)
        self._uploads.clear()
        self._leaving.clear()
        self.images.clear()
        self._held = self._leaving_bytes = 0
        super().clear()
