"""Gradients: real tensors in one arena region a unit, and the knowledge of when each is final.

After a parameter's gradient was accumulated it is moved into the arena (None means replace) or
already lies there (torch accumulates into it in place). A gradient is final when it was accumulated
as often as in the call before, in the last backward before step(). That is only a forecast: step()
compares hashes, so a wrong one costs time, never exactness.

During forward no gradient exists yet: their memory is lent to optimizer state that is read ahead,
and comes back before the first gradient is laid there.

On another device (device_gradients.py) p.grad stays where torch put it, and the same memory takes
the copies that updates consume. Where memory cannot hold the gradients of all units, some of them
are spilled to the disk (spilling.py).
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterator, Protocol

import torch

from stoker.offload.model.blocks import Block, Param, Unit, local
from stoker.offload.observe.context import Context

if TYPE_CHECKING:
    from stoker.offload.gradients.segment import Segment
    from stoker.offload.storage.planes import Planes


class Reader(Protocol):
    """Who reads what `land` brought, until it has computed: an update."""

    def wait_computed(self) -> None: ...


class Gradients:
    """Owns the gradient memory. `on_final(unit)` is called from within backward when a unit's
    gradients are forecast final."""

    def __init__(
        self,
        blocks: list[Block],
        planes: Planes,
        on_final: Callable[[Unit], None],
        context: Context,
        accumulate: int | None = None,
    ) -> None:
        """`accumulate`: declared number of backwards a step."""
        self.on_final = on_final
        self._gate, self.waiting, self.event = context.gate, context.waiting, context.event
        self.trimmer = context.trimmer
        self._session = planes.session
        self.accumulate = accumulate
        self._more_follows = False  # inside accumulating()
        # whoever drives the loop says whether the backward under way is the step's last
        self.sync: Callable[[], bool] | None = None
        self._learned_calls = 1
        self._calls = 0
        self._fired: dict[Param, int] = {}
        self._expected: dict[Param, int] = {}
        self._waiting: dict[Unit, int] = {}
        self._views: dict[Param, torch.Tensor] = {}
        self._alone: dict[Unit, int] = {}
        self._memory: dict[Unit, tuple[int, int]] = {}  # address and bytes
        self._lent: set[Unit] = set()
        self.bytes = 0
        self._handles = []
        for block in blocks:
            for unit in block.updated_units:
                self._watch(unit)
                self._reserve(unit, planes.arena)

    @property
    def lock(self) -> Any:
        return self._gate.lock

    def _watch(self, unit: Unit) -> None:
        for param in unit.params:
            self._expected[param] = 1
            hook = lambda tensor, param=param: self._accumulated(param)
            self._handles.append(param.tensor.register_post_accumulate_grad_hook(hook))

    def _reserve(self, unit: Unit, arena) -> None:
        buffer = arena.take(unit.weight_bytes)
        self.bytes += buffer.size
        whole = torch.from_dlpack(buffer)
        self._memory[unit] = (whole.data_ptr(), buffer.size)
        for param in unit.params:
            view = torch.empty(0, dtype=unit.dtype, device="cpu").set_(
                whole.untyped_storage(), param.offset, param.size, param.stride
            )
            self._views[param] = view
        del whole, view
        self._alone[unit] = self._storage_uses(unit)

    def _storage_uses(self, unit: Unit) -> int:
        return torch._C._storage_Use_Count(self._views[unit.params[0]].untyped_storage()._cdata)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.recall()
        self._views.clear()

    # -- calls and finality ------------------------------------------------------------------------

    def call(self) -> None:
        """A forward that records gradients begins: another micro-batch of the step."""
        self._calls += 1
        self._fired.clear()
        self._waiting = {}

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside are not the last before step()."""
        before, self._more_follows = self._more_follows, True
        try:
            yield
        finally:
            self._more_follows = before

    def cleared(self) -> None:
        """zero_grad(): calls whose backward has run are of no step any more; one whose backward is
        still to come is."""
        self._calls = 0 if self._fired else min(self._calls, 1)

    def decided(self) -> None:
        """The step was decided: how many calls it had, and what fired in its last backward, is what
        the next one is expected to do."""
        if self._calls:
            self._learned_calls = self._calls
        if self._fired:
            self._expected = {param: self._fired.get(param, 0) for param in self._expected}
        self._calls = 0
        self._fired = {}
        self.recall()

    @property
    def last_call(self) -> bool:
        if self.sync is not None and not self._more_follows:
            return self.sync()
        return not self._more_follows and self._calls >= (self.accumulate or self._learned_calls)

    def _accumulated(self, param: Param) -> None:
        self._adopt(param)
        # torch's own, when this hook returns
        self.trimmer.freed(param.numel * param.unit.dtype.itemsize)
        fired = self._fired[param] = self._fired.get(param, 0) + 1
        if fired != self._expected[param]:
            return
        unit = param.unit
        left = self._waiting.get(unit)
        if left is None:
            left = sum(1 for each in unit.params if self._expected[each] > 0)
        self._waiting[unit] = left - 1
        if left == 1:
            if self.last_call:
                self.on_final(unit)
            self._backward_done(unit)

    def _backward_done(self, unit: Unit) -> None:
        """Nothing more is expected for the unit in this backward."""

    # -- memory ------------------------------------------------------------------------------------

    def _adopt(self, param: Param) -> None:
        """Moves a gradient that torch allocated into the arena, unless the user still holds the
        arena's last one."""
        view = self._views[param]
        grad = param.tensor.grad
        if grad is view or grad is None or not movable(grad):
            return
        # 3 references are the dictionary, `view` and getrefcount's own; more, or a view of the
        # storage, is the user's
        if sys.getrefcount(view) > 3 or self._user_holds(param.unit):
            return
        if param.unit in self._lent:
            self._recall(param.unit)
        with torch.no_grad():
            view.copy_(grad)
        param.tensor.grad = view

    def _user_holds(self, unit: Unit) -> bool:
        return self._storage_uses(unit) > self._alone[unit]

    def lend(self, order: list[Unit]) -> None:
        """Lends the memory of gradients that do not exist now. `order`: units as they become final.
        What becomes final first keeps its memory: it is wanted before the state in it could be
        consumed, of which there is five times as much.
        """
        left = self.bytes * 2 // 3
        for unit in reversed([unit for unit in order if unit in self._memory]):
            address, size = self._memory[unit]
            left -= size
            if left < 0:
                return
            if unit not in self._lent and self._idle(unit):
                self._lent.add(unit)  # first: an interrupt may come before lend() returns
                if not self._session.lend(address, size):
                    self._lent.remove(unit)

    def _idle(self, unit: Unit) -> bool:
        # 2 references are the dictionary and getrefcount's own
        return all(
            p.tensor.grad is None and sys.getrefcount(self._views[p]) == 2 for p in unit.params
        ) and not self._user_holds(unit)

    def recall(self) -> None:
        for unit in list(self._lent):
            self._recall(unit)

    def _recall(self, unit: Unit) -> None:
        with self.waiting("gradients"):
            self._session.recall(*self._memory[unit])
        self._lent.remove(unit)

    # -- what updates consume ----------------------------------------------------------------------

    # units whose gradients may be on their way (`land`) while those before them are consumed
    in_flight = 0

    def land(self, unit: Unit, reader: Reader | None = None) -> None:
        """Starts to bring the unit's gradients, as they are now, to where updates read them.
        `reader`: an update that may still be reading what an earlier call brought. In host memory
        they are there already."""

    def laid_out(self, param: Param) -> torch.Tensor | None:
        """The parameter's gradient, landed, in the plane's memory order and dtype; a copy only
        where torch's differs."""
        grad = param.tensor.grad
        return None if grad is None else in_plane_order(grad, param)

    def consumed(self, unit: Unit) -> list[tuple[Param, torch.Tensor]]:
        """The unit's parameters that have gradients, with what an update that begins now
        consumes."""
        return [
            (param, grad) for param in unit.params if (grad := self.laid_out(param)) is not None
        ]

    # -- spilling.py: gradients that are in memory only while they are consumed

    def spills(self, unit: Unit) -> bool:
        return False

    def kept(self, param: Param) -> torch.Tensor | None:
        """For an update that comes later: what keeps the gradient's bytes until then, wherever they
        are."""
        return self.laid_out(param)

    def landed(self, unit: Unit, segments: list[Segment]) -> list[Segment]:
        """Segments with what kept() gave, as an update consumes them now."""
        return segments

    def check(self, unit: Unit, segments: list[Segment]) -> None:
        """Raises if what an update is about to consume is not there any more."""

    def mark(self, grad: torch.Tensor) -> tuple | None:
        """Tells the gradient's bytes from any that it had or will have; None where only the bytes
        can tell."""
        return None

    def read_by(self, unit: Unit, job: Any) -> None:
        """An update that has begun reads the unit's gradients until it is computed."""

    def moved(self) -> tuple[int, int]:
        """Bytes of gradients read from the disk, and written to it."""
        return 0, 0


def movable(grad: torch.Tensor) -> bool:
    """Whether another tensor with the same bytes may take the gradient's place. One of
    backward(create_graph=True) is a part of a graph, which goes through that very tensor."""
    return not grad.is_sparse and not grad.requires_grad


def in_plane_order(grad: torch.Tensor, param: Param) -> torch.Tensor:
    """`grad` with the strides and the dtype of the parameter's plane, on the device it is on;
    itself if it has them."""
    grad = local(grad.detach() if grad.requires_grad else grad)
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.dtype == param.unit.dtype and tuple(grad.stride()) == param.stride:
        return grad
    return torch.empty_strided(
        param.size, param.stride, dtype=param.unit.dtype, device=grad.device
    ).copy_(grad)
