"""What a loop sees of its weights, and may do to them, while no module of theirs runs.

A parameter shows the pager's memory only while a module of its block runs (and a pinned one,
always). In between it is an `Offloaded`: torch hands it every function that is called with it. One
that asks for values gets them in a copy in ordinary memory, outside the dram cap. The copy goes at
once, unless the function changed it or something else refers to its memory (`p.data`, a view, a
numpy array). Then it stays until the weights are needed next: what has changed by then is written
to the store, as a part of the decided step if there is one.

Memory that a parameter has left and somebody still refers to is watched by its hash. A change there
reaches no weight, and is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Protocol

import torch

from stoker.errors import InvalidArgument
from stoker.offload.model.blocks import Block, Param, fills
from stoker.offload.model.transforms import refuse, transforming
from stoker.offload.paging.offloaded import ALONE, Place, become, storage_of, uses
from stoker.offload.paging.saved import Kept

if TYPE_CHECKING:
    from stoker.offload.paging.pager import Pager
    from stoker.offload.storage.planes import Planes

_autograd = torch._C._autograd
PENDING_BYTES = 32 << 20  # of changed copies that nobody refers to: more are written at once

# What gives the place of the values, by which they may be changed unseen.
_PLACES = frozenset(("data_ptr", "untyped_storage", "storage"))


@dataclass(eq=False)
class Copy:
    """What a parameter shows to those who look while no module of its block runs."""

    storage: int
    version: int  # torch's count of writes in place
    digest: bytes | None = None  # of the weights, where somebody else may write to them
    changed: bool = False
    # When it was hashed, a graph whose backward was still to run had the weights.
    hashed_early: bool = False
    early: bool = False  # when it was changed


class Owner(Protocol):
    """The session whose parameters are shown."""

    lock: contextlib.AbstractContextManager
    pager: Pager
    planes: Planes
    params: list[Param]
    by_tensor: dict[torch.Tensor, Param]

    weights: Current
    changes: Edits

    def check_open(self) -> None: ...


class Current(Protocol):
    def current(self, param: Param) -> torch.Tensor:
        """The weight as the newest step leaves it, in memory of its own."""


class Edits(Protocol):
    def edit(self, values: dict[Param, torch.Tensor]) -> None:
        """The loop gave these weights."""

    def dropped(self, param: Param) -> None:
        """The parameter was changed where the change reaches no weight: InvalidArgument."""


class Shown:
    """The copies of one session. Called under its lock by the thread that runs the loop."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        self._copies: dict[Param, Copy] = {}
        self._looked: list[Param] = []  # by the function before
        self._pending = 0  # bytes of copies that were changed
        # Memory that a parameter showed and somebody still refers to, and its hash.
        self._left: list[tuple[Param, Place, bytes]] = []
        # Tensors of state_dict()s, with torch's counts of writes in place.
        self._given: list[tuple[weakref.ref, torch.Tensor, int, Param]] = []
        self._wrote: set[Param] = set()  # since these were looked at
        # Hashes of weights in use to which somebody was given a way that torch does not see.
        self._taken: dict[Param, bytes] = {}

    def call(self, tensors: list[torch.Tensor], func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a torch function that looks at these parameters' values."""
        session = self._session
        with session.lock, torch._C.DisableTorchFunction():
            session.check_open()
            if transforming():
                refuse(session.by_tensor[tensor] for tensor in tensors)
            params = [session.by_tensor[tensor] for tensor in dict.fromkeys(tensors)]
            for param in params:
                self._bring(param)
        hooked = _autograd._top_saved_tensors_default_hooks(False) is not None
        keeps = torch.is_grad_enabled() and not hooked
        # A graph would save the parameter itself, which shows something else by the time of
        # backward.
        if keeps:
            _autograd._push_saved_tensors_default_hooks(Kept, Kept.get)
        try:
            return func(*args, **kwargs)
        finally:
            if keeps:
                _autograd._pop_saved_tensors_default_hooks()
            with session.lock, torch._C.DisableTorchFunction():
                for param in params:
                    self._look(param, always=getattr(func, "__name__", "") in _PLACES)
                self._bound(params)

    @torch.inference_mode(False)  # it outlives the mode that it happens to be made in
    def _bring(self, param: Param) -> None:
        pager, tensor = self._session.pager, param.tensor
        if param not in self._copies:
            if pager.astray(param):
                self._session.changes.dropped(param)
            pager.point(param, self._session.weights.current(param).to(pager.device))
            self._copies[param] = Copy(tensor.untyped_storage()._cdata, tensor._version)
        become(tensor, None)

    def _look(self, param: Param, always: bool) -> None:
        """Behind a function: whether the parameter was changed, or may yet be."""
        tensor, copy = param.tensor, self._copies.get(param)
        if copy is None:
            return  # another thread has begun to use it
        try:
            if tensor.untyped_storage()._cdata != copy.storage:  # p.data = ...
                self._returns(param)
                copy.storage, copy.digest, copy.version = tensor.untyped_storage()._cdata, None, -1
            if tensor._version != copy.version:
                self._note(param, copy, self._in_graph(param))
            elif copy.digest is None and not copy.changed and (always or uses(tensor) > ALONE):
                copy.digest, copy.hashed_early = self.digest(tensor), self._in_graph(param)
            elif copy.digest is None and not copy.changed:
                del self._copies[param]
                self._session.pager.show(param)
        finally:
            self._session.pager.cover(param)

    def digest(self, tensor: torch.Tensor) -> bytes:
        with torch._C.DisableTorchFunction():
            here = torch._C.TensorBase.detach(tensor).cpu()
            here = here if fills(here) else here.contiguous()
            core = self._session.planes.session
            return core.hash(here.data_ptr(), here.nbytes) if here.nbytes else b""

    def _note(self, param: Param, copy: Copy, early: bool) -> None:
        """The copy was changed."""
        if not copy.changed:
            self._pending += param.numel * param.unit.dtype.itemsize
        copy.changed, copy.version, copy.early = True, param.tensor._version, copy.early or early

    def _in_graph(self, param: Param) -> bool:
        """Whether a graph refers to the weights themselves: only to those of a pinned block, others
        it asks for (`during`)."""
        slot = self._session.pager.exposed.get(param.unit.block)
        return slot is not None and self._session.pager.leaks(slot)

    def _bound(self, params: list[Param]) -> None:
        """Looking at all weights, or changing them, takes a bounded part of memory. Behind a look
        at these."""
        before, self._looked = self._looked, params
        for param in before:  # what was looked at through something else that is gone by now
            copy = self._copies.get(param)
            if copy is None or copy.changed or param in params or self._shared(param):
                continue
            if self.digest(param.tensor) != copy.digest:
                self._note(param, copy, copy.hashed_early)
            else:
                del self._copies[param]
                self._session.pager.show(param)
        if self._pending > PENDING_BYTES:
            self._pending = 0
            changed = [param for param, copy in self._copies.items() if copy.changed]
            self._write([param for param in changed if not self._shared(param)])

    def _shared(self, param: Param) -> bool:
        with torch._C.DisableTorchFunction():
            return uses(param.tensor) > ALONE

    # -- before weights are needed -----------------------------------------------------------------

    def settle(self) -> None:
        """Writes what the loop has changed, and takes the copies away. InvalidArgument for a change
        that reaches no weight."""
        if self._left:
            self._check_left()
        if self._copies:
            self._pending = 0
            self._write(list(self._copies))

    def _write(self, params: list[Param]) -> None:
        """Of these parameters what was changed; and they show nothing any more."""
        session, values = self._session, {}
        # First: what writes them looks for such.
        copies = {param: self._copies.pop(param) for param in params}
        with torch._C.DisableTorchFunction():
            try:
                for param, copy in list(copies.items()):
                    tensor = param.tensor
                    session.pager.note(param)
                    # A conversion: the next forward refuses it.
                    if tensor.dtype != param.unit.dtype:
                        self._copies[param] = copies.pop(param)
                        continue
                    if tensor.shape != param.size:
                        raise InvalidArgument(
                            f"{param.name} was given the shape {list(tensor.shape)}, but the "
                            f"store holds {list(param.size)}, so the change was dropped; change "
                            f"the shape before stoker.offload()"
                        )
                    if not copy.changed and copy.digest not in (None, self.digest(tensor)):
                        self._note(param, copy, copy.hashed_early)
                    if copy.early:
                        session.changes.dropped(param)
                    if copy.changed:
                        values[param] = tensor.detach()
                self._refuse_shared([*copies, *self._copies], values)
                if values:
                    session.changes.edit(values)
            finally:
                values.clear()
                for param in copies:
                    self._leave(param)

    def _leave(self, param: Param) -> None:
        place = Place.of(param.tensor)
        self._session.pager.show(param)
        self.watch(param, place)

    def watch(self, param: Param, place: Place) -> None:
        """The parameter has left this memory. A change there is an error for as long as somebody
        refers to it."""
        if (memory := place.memory()) is not None:
            self._left.append((param, place, self.digest(memory)))

    def _check_left(self) -> None:
        before, self._left = self._left, []
        for at, (param, place, digest) in enumerate(before):
            if (memory := place.memory()) is None:
                continue
            if self.digest(memory) != digest:
                self._left += before[at + 1 :]
                self._session.changes.dropped(param)
            self._left.append(before[at])

    def _returns(self, param: Param) -> None:
        """The parameter was given other memory. As without us, that has no effect on what it showed
        before, unless it is that which it was given."""
        mine = [left for left in self._left if left[0] is param]
        self._left = [left for left in self._left if left[0] is not param]
        here = storage_of(param.tensor)._cdata
        for _, place, digest in mine:
            memory = place.memory()
            if memory is None or storage_of(memory)._cdata != here:
                continue
            if self.digest(memory) != digest:
                del self._copies[param]
                self._session.changes.dropped(param)

    def gave(self, param: Param, tensor: torch.Tensor) -> None:
        """A state_dict() has this tensor, which in memory would be the weight itself."""
        counter = tensor.detach()
        # It still shares torch's count of writes in place.
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._given.append((weakref.ref(tensor), counter, counter._version, param))

    def wrote(self, params: Iterable[Param]) -> None:
        """These weights were given anew, perhaps those that were changed in a state_dict()."""
        self._wrote.update(params if self._given else ())

    def check_given(self) -> None:
        """InvalidArgument for a tensor of a state_dict() that was changed in place and never
        loaded."""
        before, self._given = self._given, []
        wrote, self._wrote = self._wrote, set()
        wrong = None
        for given, counter, version, param in before:
            if (tensor := given()) is not None:
                self._given.append((given, counter, counter._version, param))
            if counter._version == version:
                continue
            loaded = param in wrote
            if tensor is not None:
                weight = self._session.weights.current(param)
                loaded = self.digest(tensor) == self.digest(weight)
            if not loaded:
                wrong = wrong or param
        if wrong is not None:
            raise InvalidArgument(
                f"{wrong.name} was changed in place in a state_dict() of the model. That is a copy:"
                " the change reaches no weight. Give the changed state_dict to load_state_dict(),"
                " or change the weight inside `with stoker.gather(parameter, write=True):`"
            )

    def taken(self, param: Param) -> None:
        """Somebody is about to be given a way to change a weight in use that torch does not see."""
        with self._session.lock:
            if param not in self._taken and param not in self._session.pager.held:
                self._taken[param] = self.digest(param.tensor)

    def was_taken(self, param: Param) -> bool:
        return param in self._taken

    def watches(self, param: Param) -> bool:
        return any(left[0] is param for left in self._left)

    def written(self, param: Param) -> bool:
        """Whether the weight was changed since it was taken. Asked at the end of its use."""
        digest = self._taken.pop(param, None)
        return digest is not None and digest != self.digest(param.tensor)

    @staticmethod
    def _refuse_shared(params: list[Param], values: dict[Param, torch.Tensor]) -> None:
        """Parameters in the same memory change together in memory, and do not here."""
        if not values:
            return
        tensors = ((param, param.tensor) for param in params if param.numel)
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes, param) for param, t in tensors if fills(t)]
        spans.sort(key=lambda span: span[:2])
        for (_, end, one), (begin, _, other) in zip(spans, spans[1:]):
            if begin < end and (one in values or other in values):
                raise InvalidArgument(
                    f"{one.name} and {other.name} now share memory, but each has its own place "
                    f"in the store, so the change was dropped. Make them one Parameter before"
                    " stoker.offload(), or give each a copy (.clone())"
                )

    def during(self, block: Block) -> None:
        """The block's weights are used. InvalidArgument if what the loop did to them since the
        forward began would come too late for that."""
        if not self._copies:
            return
        for param in block.params:
            copy = self._copies.get(param)
            if copy is None:
                continue
            with torch._C.DisableTorchFunction():
                if copy.changed or copy.digest not in (None, self.digest(param.tensor)):
                    del self._copies[param]
                    self._session.changes.dropped(param)

    def exposed(self, block: Block) -> None:
        """The block's parameters show the pager's memory from here on."""
        for param in block.params if self._copies else ():
            if self._copies.pop(param, None) is not None:
                self._leave(param)

    def has(self, param: Param) -> bool:
        return param in self._copies

    def clear(self) -> None:
        self._copies.clear(), self._left.clear(), self._taken.clear(), self._given.clear()
        for param in self._session.params:
            become(param.tensor, None)
