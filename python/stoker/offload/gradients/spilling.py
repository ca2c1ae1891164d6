"""SpillingGradients: gradients of which memory cannot hold all. Some units' have a place of their
own; the others' pass through the window.

When torch has made the first gradient of a spilled parameter, it is laid into its unit's home.
p.grad becomes a SpilledGradient, into which torch then accumulates. When backward is done with a
unit for this time, writing it begins; it is read again when somebody wants it: the next
micro-batch, clipping, the update. A gradient that an update consumed and that nobody wrote to since
needs no reading at step(): every write to it comes through SpilledGradient, which counts them, so
its bytes are known to be the same.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from stoker.errors import StokerError
from stoker.offload.division.spill import PLACES, place_bytes
from stoker.offload.gradients.gradients import Gradients, in_plane_order, movable
from stoker.offload.gradients.spilled import Region, SpilledGradient
from stoker.offload.gradients.window import Home, Place, Window
from stoker.offload.model.blocks import Block, Param, Unit
from stoker.offload.observe.context import Context
from stoker.offload.storage.scratch import Scratch, clean

if TYPE_CHECKING:
    from stoker.offload.gradients.segment import Segment
    from stoker.offload.storage.planes import Planes


class SpillingGradients(Gradients):
    def __init__(
        self,
        blocks: list[Block],
        planes: Planes,
        on_final: Callable[[Unit], None],
        context: Context,
        accumulate: int | None = None,
    ) -> None:
        spilled = planes.layout.spilled
        size = place_bytes(spilled)
        self.closed = False
        self._told = False  # of a gradient that stays outside
        self._regions: dict[Param, weakref.ref[Region]] = {}
        self._homes = {
            unit: Home(
                unit,
                lambda unit=unit: any(self._region(param) is not None for param in unit.params),
            )
            for unit in spilled
        }
        places = []
        for _ in range(PLACES):
            memory = torch.from_dlpack(planes.arena.take(size))
            places.append(Place(memory.data_ptr(), memory))
        runtime = planes.runtime
        clean(runtime.directories)
        self.window = Window(
            places,
            Scratch(runtime.core, runtime.directories, sum(unit.weight_bytes for unit in spilled)),
            context.waiting,
        )
        super().__init__(blocks, planes, on_final, context, accumulate)

    def _reserve(self, unit: Unit, arena) -> None:
        if unit not in self._homes:
            super()._reserve(unit, arena)

    def _region(self, param: Param) -> Region | None:
        """The parameter's newest gradient that was spilled, if anybody has it."""
        known = self._regions.get(param)
        return known() if known is not None else None

    # -- in memory for a moment

    def bring(self, home: Home, keep: tuple[Home, ...] = ()) -> torch.Tensor:
        """The bytes of a unit's gradients, until the next call. Inference mode or not, as whoever
        looks at them."""
        return self.window.bring(home, keep).owner

    def _over(self, grad: SpilledGradient) -> torch.Tensor:
        return grad.over(self.bring(grad.region.home).untyped_storage())

    @contextlib.contextmanager
    def changing(self, regions: set[Region]) -> Iterator[None]:
        """Around a change of their bytes, which are in memory. One that changes none, as clipping
        often does, counts as none."""
        for region in regions:
            self.window.still(region.home)
            # else an update could consume a change that is undone before anybody looks
            self.window.unread(region.home)
        backward = torch._C._current_graph_task_id() != -1  # accumulating changes them
        before = {} if backward else {region: self._hash(region) for region in regions}
        homes = {region.home: region.home.dirty for region in regions}
        were = {region: region.writes for region in regions}
        for region in regions:
            region.wrote()
            region.home.dirty = True
        yield
        same = set()
        for region, hashed in before.items():
            now = self._hash(region)
            region.recognize(hashed, were[region], now)
            if now == hashed:
                same.add(region)
        for home, dirty in homes.items():
            if all(region in same for region in regions if region.home is home):
                home.dirty = dirty

    def _hash(self, region: Region) -> bytes:
        param = region.param
        size = param.unit.dtype.itemsize
        return self._session.hash(
            region.home.place.address + param.offset * size, param.numel * size
        )

    # -- from backward

    def _adopt(self, param: Param) -> None:
        home = self._homes.get(param.unit)
        if home is None:
            super()._adopt(param)
            return
        grad = param.tensor.grad
        if (
            grad is None
            or isinstance(grad, SpilledGradient)
            or not movable(grad)
            or not param.numel
        ):
            return
        with self.lock:
            if self._region(param) is not None:
                # somebody has an earlier gradient of it, whose bytes stay: this one stays where
                # torch put it
                self._tell(param)
                return
            memory = self.bring(home)
            self.window.still(home)
            home.dirty = True
            region = Region(self, home, param)
            spilled = SpilledGradient(
                region, param.unit.dtype, param.size, param.stride, param.offset
            )
            with torch.no_grad():
                spilled.over(memory.untyped_storage()).copy_(grad)
            self._regions[param] = weakref.ref(region)
            param.tensor.grad = spilled

    def _tell(self, param: Param) -> None:
        """Once a run: gradients stay where no cap counts them."""
        if self._told:
            return
        self._told = True
        size = param.numel * param.unit.dtype.itemsize
        self.event("gradient outside dram", parameter=param.name, bytes=size)
        warnings.warn(
            f"the gradient of {param.name} stays in ordinary memory ({size} bytes), outside the "
            f"cap, because an earlier gradient is kept alive. The same holds for other such "
            f"parameters. Release earlier gradients before the next backward, or keep copies "
            f"(p.grad.clone())",
            stacklevel=2,
        )

    def _backward_done(self, unit: Unit) -> None:
        home = self._homes.get(unit)
        if home is not None:
            # it is met again where the place is needed
            with self.lock, contextlib.suppress(StokerError):
                self.window.write(home)

    # -- what updates consume

    def spills(self, unit: Unit) -> bool:
        return unit in self._homes

    def laid_out(self, param: Param) -> torch.Tensor | None:
        return self._real(param.tensor.grad, param)

    def kept(self, param: Param) -> torch.Tensor | None:
        grad = param.tensor.grad
        return grad if isinstance(grad, SpilledGradient) else self.laid_out(param)

    def consumed(self, unit: Unit) -> list[tuple[Param, torch.Tensor]]:
        return self._all(
            [(param, param.tensor.grad) for param in unit.params if param.tensor.grad is not None]
        )

    def landed(self, unit: Unit, segments: list[Segment]) -> list[Segment]:
        grads = self._all([(segment.param, segment.grad) for segment in segments])
        return [
            replace(segment, grad=grad) for segment, (_, grad) in zip(segments, grads, strict=True)
        ]

    def _all(self, pairs: list[tuple[Param, torch.Tensor]]) -> list[tuple[Param, torch.Tensor]]:
        """A unit's gradients in memory. Those assigned from another unit's are copied first: they
        push out what is there."""
        copies = {
            param: self._real(grad, param) for param, grad in pairs if self._is_foreign(grad, param)
        }
        return [
            (param, copies[param] if param in copies else self._real(grad, param))
            for param, grad in pairs
        ]

    @staticmethod
    def _is_foreign(grad: torch.Tensor, param: Param) -> bool:
        return isinstance(grad, SpilledGradient) and grad.region.home.unit is not param.unit

    def _real(self, grad: torch.Tensor | None, param: Param) -> torch.Tensor | None:
        if not isinstance(grad, SpilledGradient):
            return None if grad is None else in_plane_order(grad, param)
        return in_plane_order(
            grad.clone() if self._is_foreign(grad, param) else self._over(grad), param
        )

    def check(self, unit: Unit, segments: list[Segment]) -> None:
        home = self._homes.get(unit)
        own = home.place.address if home is not None and home.place is not None else None
        for segment in segments:
            address = segment.grad.untyped_storage().data_ptr()
            if address != own and address in self.window.addresses:
                raise StokerError(
                    f"the gradient of {segment.param.name} left memory before its update began;"
                    " this is a bug in Stoker: please report it"
                )

    def mark(self, grad: torch.Tensor) -> tuple | None:
        if not isinstance(grad, SpilledGradient):
            return None
        return grad.region.number, grad.region.writes, *grad.geometry()

    def read_by(self, unit: Unit, job: Any) -> None:
        home = self._homes.get(unit)
        if home is not None and home.place is not None:
            home.place.readers = [each for each in home.place.readers if not each.computed()] + [
                job
            ]

    # -- the ledger, the end

    def moved(self) -> tuple[int, int]:
        return self.window.read_bytes, self.window.written_bytes

    def remove(self) -> None:
        self.closed = True
        super().remove()
        self.window.close()
