"""SpillingGradients: gradients of which memory cannot hold all. Some units' have a place of their own; the others' pass through the window.

When torch has made the first gradient of a spilled parameter it is laid into its unit's home, and p.grad becomes a SpilledGradient, into which torch
then accumulates. When backward is done with a unit for this time, writing it begins; it is read again when somebody wants it: the next
micro-batch, clipping, the update. A gradient that an update consumed and that nobody wrote to since needs no reading at step(): every
write to it comes through SpilledGradient, which counts them, so its bytes are known to be the same.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from stoker.errors import StokerError
from stoker.offload.blocks import Block, Param, Unit
from stoker.offload.gradients import Gradients, in_plane_order
from stoker.offload.scratch import Scratch, clean
from stoker.offload.spilled import Region, SpilledGradient
from stoker.offload.window import PLACES, Home, Place, Window, place_bytes

if TYPE_CHECKING:
    from stoker.offload.planes import Planes
    from stoker.offload.steps import Segment


class SpillingGradients(Gradients):
    def __init__(self, blocks: list[Block], planes: Planes, on_final: Callable[[Unit], None]) -> None:
        spilled = planes.layout.spilled
        size = place_bytes(spilled)
        self.closed = False
        self._regions: dict[Param, weakref.ref[Region]] = {}
        self._homes = {unit: Home(unit, lambda unit=unit: any(self._region(param) is not None for param in unit.params)) for unit in spilled}
        places = []
        for _ in range(PLACES):
            memory = torch.from_dlpack(planes.arena.take(size))
            places.append(Place(memory.data_ptr(), memory))
        runtime = planes.runtime
        clean(runtime.directories)
        self.window = Window(places, Scratch(runtime.core, runtime.directories, sum(unit.weight_bytes for unit in spilled)))
        super().__init__(blocks, planes, on_final)

    def _reserve(self, unit: Unit, arena) -> None:
        if unit not in self._homes:
            super()._reserve(unit, arena)

    def _region(self, param: Param) -> Region | None:
        """The parameter's newest gradient that was spilled, if anybody has it."""
        known = self._regions.get(param)
        return known() if known is not None else None

    # -- in memory for a moment

    def bring(self, home: Home, keep: tuple[Home, ...] = ()) -> torch.Tensor:
        """The bytes of a unit's gradients, until the next call. Inference mode or not, as whoever looks at them."""
        self.window.waiting = self.waiting
        return self.window.bring(home, keep).owner

    def _over(self, grad: SpilledGradient) -> torch.Tensor:
        return grad.over(self.bring(grad.region.home).untyped_storage())

    @contextlib.contextmanager
    def changing(self, regions: set[Region]) -> Iterator[None]:
        """Around a change of their bytes, which are in memory. One that changes none, as clipping often does, counts as none."""
        for region in regions:
            self.window.still(region.home)
        backward = torch._C._current_graph_task_id() != -1  # accumulating changes them
        before = {} if backward else {region: self._hash(region) for region in regions}
        homes = {region.home: region.home.dirty for region in regions}
        for region in regions:
            region.writes += 1
            region.home.dirty = True
        yield
        same = {region for region in before if self._hash(region) == before[region]}
        for region in same:
            region.writes -= 1
        for home, dirty in homes.items():
            if all(region in same for region in regions if region.home is home):
                home.dirty = dirty

    def _hash(self, region: Region) -> bytes:
        param = region.param
        size = param.unit.dtype.itemsize
        return self._session.hash(region.home.place.address + param.offset * size, param.numel * size)

    # -- from backward

    def _adopt(self, param: Param) -> None:
        home = self._homes.get(param.unit)
        if home is None:
            super()._adopt(param)
            return
        grad = param.tensor.grad
        if grad is None or isinstance(grad, SpilledGradient) or grad.is_sparse or not param.numel:
            return
        with self.lock:
            if self._region(param) is not None:
                return  # somebody has an earlier gradient of it, whose bytes stay: this one stays where torch put it
            memory = self.bring(home)
            self.window.still(home)
            home.dirty = True
            region = Region(self, home, param)
            spilled = SpilledGradient(region, param.unit.dtype, param.size, param.stride, param.offset)
            with torch.no_grad():
                spilled.over(memory.untyped_storage()).copy_(grad)
            self._regions[param] = weakref.ref(region)
            param.tensor.grad = spilled

    def _backward_done(self, unit: Unit) -> None:
        home = self._homes.get(unit)
        if home is not None:
            with self.lock, contextlib.suppress(StokerError):  # it is met again where the place is needed
                self.window.waiting = self.waiting
                self.window.write(home)

    # -- what updates consume

    def spills(self, unit: Unit) -> bool:
        return unit in self._homes

    def laid_out(self, param: Param) -> torch.Tensor | None:
        return self._real(param.tensor.grad, param)

    def kept(self, param: Param) -> torch.Tensor | None:
        grad = param.tensor.grad
        return grad if isinstance(grad, SpilledGradient) else self.laid_out(param)

    def landed(self, unit: Unit, segments: list[Segment]) -> list[Segment]:
        return [replace(segment, grad=self._real(segment.grad, segment.param)) for segment in segments]

    def _real(self, grad: torch.Tensor | None, param: Param) -> torch.Tensor | None:
        if not isinstance(grad, SpilledGradient):
            return None if grad is None else in_plane_order(grad, param)
        if grad.region.home.unit is not param.unit:
            return in_plane_order(grad.clone(), param)  # it was assigned from another parameter's, and would push out this unit's
        return in_plane_order(self._over(grad), param)

    def mark(self, grad: torch.Tensor) -> tuple | None:
        if not isinstance(grad, SpilledGradient):
            return None
        return grad.region.number, grad.region.writes, *grad.geometry()

    def read_by(self, unit: Unit, job: Any) -> None:
        home = self._homes.get(unit)
        if home is not None and home.place is not None:
            home.place.readers = [each for each in home.place.readers if not each.computed()] + [job]

    # -- the ledger, the end

    def moved(self) -> tuple[int, int]:
        return self.window.read_bytes, self.window.written_bytes

    def remove(self) -> None:
        self.closed = True
        super().remove()
        self.window.close()
