"""SpilledGradient: the tensor that p.grad is where gradients are spilled. It has a shape and a
type, and its bytes only while somebody looks.

Every operation on it is run on the real bytes: they are brought into the window (window.py), it
runs there, and what it changed is written back when its place is needed. So any operation means
what it means on any tensor, bit for bit: torch accumulates into it, clips, scales and zeroes it.
Views of it are such tensors too; nobody else ever has a view of the window's memory, so none can
become stale: whoever keeps p.grad finds the right bytes in it, also when backward has made another
one since, until the optimizer is closed.

Operations over lists (`torch._foreach_*`, GradScaler's) are run tensor by tensor, which gives the
same bits on a processor. Any other that takes more units than the window has places for reads
copies of them into ordinary memory. torch's operations declare what they write to. Of any other
operation that declares nothing, every argument counts as written to. Collectives, which write after
they return, are refused.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Iterator, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from stoker.errors import StokerError, Unsupported
from stoker.offload.division.spill import PLACES

if TYPE_CHECKING:
    from stoker.offload.gradients.window import Home
    from stoker.offload.model.blocks import Param

# What asks for shape and type only.
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty"
    " new_zeros new_ones new_full new_empty_strided is_same_size".split()
)
# Collectives: they write to what they declare to read, some of them after they have returned.
_COLLECTIVES = frozenset(
    "c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor symm_mem".split()
)
_KNOWN = 8  # how many contents of a gradient are recognized
_numbers = itertools.count()


class Owner(Protocol):
    """Who has the bytes of spilled gradients (spilling.py)."""

    lock: AbstractContextManager
    closed: bool

    def bring(self, home: Home, keep: tuple[Home, ...] = ()) -> torch.Tensor:
        """The bytes of a unit's gradients, until the next call."""

    def changing(self, regions: set[Region]) -> AbstractContextManager[None]:
        """Around a change of their bytes, which are in memory."""


class Region:
    """A parameter's spilled gradient, from when it was laid into its home until the last tensor
    over it is gone."""

    __slots__ = ("owner", "home", "param", "number", "writes", "known", "_last", "__weakref__")

    def __init__(self, owner: Owner, home: Home, param: Param) -> None:
        self.owner, self.home, self.param = owner, home, param
        self.number, self.writes = next(_numbers), 0  # together they tell its bytes from any others
        # hash of its bytes -> `writes` then: a change that is undone is none
        self.known: dict[bytes, int] = {}
        self._last = 0

    def wrote(self) -> None:
        self._last += 1
        self.writes = self._last

    def recognize(self, before: bytes, writes: int, now: bytes) -> None:
        """The hashes of its bytes before and after a write, and `writes` before it."""
        self._remember(before, writes)
        self.writes = self.known.get(now, self.writes)
        self._remember(now, self.writes)

    def _remember(self, hashed: bytes, writes: int) -> None:
        self.known.pop(hashed, None)
        self.known[hashed] = writes
        if len(self.known) > _KNOWN:
            del self.known[next(iter(self.known))]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor over the unit's gradients lies within this one."""
        if tensor.numel() == 0:
            return True
        last = tensor.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride())
        )
        begin, size = self.param.offset, self.param.unit.dtype.itemsize
        return (
            begin * size <= tensor.storage_offset() * tensor.dtype.itemsize
            and (last + 1) * tensor.dtype.itemsize <= (begin + self.param.numel) * size
        )


class SpilledGradient(torch.Tensor):
    """A gradient, or a view of one. `region` says whose."""

    region: Region
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, region: Region, dtype: torch.dtype, size, stride, offset: int
    ) -> SpilledGradient:
        """offset: in elements of dtype from the start of the unit."""
        with torch.inference_mode(False):  # else torch could make no view of it there
            tensor = torch.Tensor._make_wrapper_subclass(
                cls, size, strides=stride, storage_offset=offset, dtype=dtype, device="cpu"
            )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.region = region
        return tensor

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SpilledGradient)]
        if func.namespace in _COLLECTIVES:
            raise Unsupported(
                f"{func} cannot take the gradient of {given[0].region.param.name}: it is on "
                f"disk, and in memory only while Stoker reads it. Reduce a copy: g = "
                f"p.grad.clone();"
                " torch.distributed.all_reduce(g); p.grad.copy_(g). Or give a larger dram"
            )
        count = _listed(func._schema.name.partition("::")[2], args)
        if count > 1:
            return _each(func, args, kwargs, count)
        changed = list(_changed(func, args, kwargs))
        owner = (changed or given)[0].region.owner
        if any(each.region.owner is not owner for each in changed):
            raise Unsupported(
                f"{func} changes spilled gradients of two optimizers at once; do it one after the"
                " other, or give a larger dram"
            )
        # copied before the lock is taken: another thread may do it the other way round
        if any(each.region.owner is not owner for each in given):
            mine = lambda each: each if each.region.owner is owner else each.clone()
            args, kwargs = (
                tree_map_only(SpilledGradient, mine, args),
                tree_map_only(SpilledGradient, mine, kwargs),
            )
            given = [each for each in given if each.region.owner is owner]
        with owner.lock:
            return _run(func, args, kwargs, given)

    # -- what does not go through the dispatcher

    def numpy(self, *, force: bool = False):
        """A copy, which cannot be written to: it would not be the gradient that changes."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.clone().tolist()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.grad.data /= n` ends here with what it began with. Anything else is copied: the memory
        that an ordinary tensor would share is not the disk's."""
        if (
            isinstance(value, SpilledGradient)
            and value.region is self.region
            and self.geometry() == value.geometry()
        ):
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Unsupported(
                f"the spilled gradient of {self.region.param.name} keeps its shape and type; assign"
                " a new tensor to .grad, or give a larger dram"
            )
        with torch.no_grad():
            self.copy_(value)

    def data_ptr(self) -> int:
        raise self._no_address()

    def __dlpack__(self, *_: Any, **__: Any):
        raise self._no_address()

    def share_memory_(self):
        raise self._no_address()

    def _no_address(self) -> Unsupported:
        return Unsupported(
            f"the gradient of {self.region.param.name} is spilled to the disk and has no address;"
            " take a copy (.clone()), or give a larger dram"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpilledGradient({self.clone()!r})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int):
        return self.clone().__reduce_ex__(protocol)

    # -- geometry

    def geometry(self) -> tuple:
        return self.dtype, self.size(), self.stride(), self.storage_offset()

    def over(self, storage: torch.UntypedStorage, device: str = "cpu") -> torch.Tensor:
        """The ordinary tensor that this one would be over that storage."""
        return torch.empty(0, dtype=self.dtype, device=device).set_(
            storage, self.storage_offset(), self.size(), self.stride()
        )

    def like(self, tensor: torch.Tensor) -> SpilledGradient:
        """The same region through the geometry of `tensor`."""
        return SpilledGradient(
            self.region, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )


def _run(func: Any, args: tuple, kwargs: dict, given: list[SpilledGradient]) -> Any:
    name = func._schema.name.partition("::")[2]
    owner = given[0].region.owner
    if owner.closed:
        raise StokerError(
            f"the gradient of {given[0].region.param.name} no longer exists, because its "
            f"optimizer was closed; copy what you want to keep before close()"
        )
    if name in _LIKE:
        shell = lambda each: torch.empty_strided(
            each.size(), each.stride(), dtype=each.dtype, device="cpu"
        )
        return func(
            *tree_map_only(SpilledGradient, shell, args),
            **tree_map_only(SpilledGradient, shell, kwargs),
        )
    if name == "detach_":  # it has no history
        return args[0]
    if func.is_view and isinstance(args[0], SpilledGradient):
        made = _view(func, args, kwargs, given)
        if made is not None:
            return made
    return _whole(func, args, kwargs, given)


def _view(func: Any, args: tuple, kwargs: dict, given: list[SpilledGradient]) -> Any:
    """What `func` makes of its first argument without looking at bytes; None where that is no
    view."""
    one, unit = args[0], args[0].region.home.unit
    blank = torch.empty(unit.elements, dtype=unit.dtype, device="meta").untyped_storage()
    shapes = {
        id(each): torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        for each in given
    }
    shape = shapes[id(one)] = one.over(blank, "meta")
    shown = lambda values: tree_map_only(SpilledGradient, lambda each: shapes[id(each)], values)
    try:
        out = func(*shown(args), **shown(kwargs))
    except (RuntimeError, NotImplementedError):
        # it wants bytes, or is wrong: the real ones show which
        return None
    tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    if any(each.untyped_storage()._cdata != blank._cdata for each in tensors):
        return None
    if not all(one.region.holds(each) for each in tensors):
        raise Unsupported(
            f"{func} would reach memory outside the spilled gradient of"
            f" {one.region.param.name}; take a copy (.clone()), or give a larger dram"
        )
    return tree_map_only(torch.Tensor, lambda each: one if each is shape else one.like(each), out)


def _listed(name: str, args: tuple) -> int:
    """How many tensors an operation over lists has; 0 for any other."""
    over_lists = (
        name.startswith("_foreach_") or name == "_amp_foreach_non_finite_check_and_unscale_"
    )
    if not over_lists or any(isinstance(each, torch.Tensor) and each.numel() != 1 for each in args):
        return 0
    return next((len(each) for each in args if isinstance(each, (list, tuple))), 0)


def _each(func: Any, args: tuple, kwargs: dict, count: int) -> Any:
    """An operation over lists, one tensor after the other."""
    results = []
    for i in range(count):
        own = lambda value: (
            [value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value
        )
        results.append(func(*map(own, args), **{key: own(value) for key, value in kwargs.items()}))
    return None if results[0] is None else [each for result in results for each in result]


def _changed(func: Any, args: tuple, kwargs: dict) -> Iterator[SpilledGradient]:
    """The arguments that `func` writes to, or may write to."""
    if func.namespace != "aten" and not func._schema.is_mutable:
        yield from (
            each for each in tree_leaves((args, kwargs)) if isinstance(each, SpilledGradient)
        )
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            yield from (each for each in tree_leaves(value) if isinstance(each, SpilledGradient))


def _whole(func: Any, args: tuple, kwargs: dict, given: list[SpilledGradient]) -> Any:
    changed = list(_changed(func, args, kwargs))
    owner = (changed or given)[0].region.owner
    homes = dict.fromkeys(
        each.region.home for each in (*changed, *given) if each.region.owner is owner
    )
    inside = tuple(homes)[:PLACES]
    outside = [each for each in given if each.region.home not in inside]
    if any(each.region.home not in inside for each in changed):
        raise Unsupported(
            f"{func} changes spilled gradients of {len(homes)} groups of parameters at once, but "
            f"there is room for {PLACES} only. Change them tensor by tensor, or give a larger dram"
        )
    real = {id(each): each.clone() for each in outside}  # first: each may push out what was brought
    copies = {each.untyped_storage()._cdata for each in real.values()}
    storages = {home: owner.bring(home, inside).untyped_storage() for home in inside}
    real |= {
        id(each): each.over(storages[each.region.home])
        for each in given
        if each.region.home in inside
    }
    targets = {id(each): real[id(each)] for each in _outputs(func, kwargs)}
    # torch makes room for a larger result, and that is the neighbours'
    for key, target in targets.items():
        real[key] = torch.empty_strided(
            target.size(), target.stride(), dtype=target.dtype, device="cpu"
        )
    use = lambda values: tree_map_only(SpilledGradient, lambda each: real[id(each)], values)
    with owner.changing({each.region for each in changed}):
        out = func(*use(args), **use(kwargs))
        for each in changed:
            _refuse_another_shape(
                func,
                each,
                real[id(each)],
                storages[each.region.home] if id(each) not in targets else None,
            )
        for key, target in targets.items():
            target.copy_(real[key])
    return tree_map(lambda value: _outward(value, given, real, storages, copies), out)


def _outputs(func: Any, kwargs: dict) -> Iterator[SpilledGradient]:
    """The arguments that only take results."""
    for argument in func._schema.arguments:
        if argument.is_out:
            yield from (
                each
                for each in tree_leaves(kwargs.get(argument.name))
                if isinstance(each, SpilledGradient)
            )


def _refuse_another_shape(
    func: Any, each: SpilledGradient, now: torch.Tensor, storage: torch.UntypedStorage | None
) -> None:
    """`storage`: None for what only took a result."""
    kept = (now.dtype, now.size(), now.stride()) == each.geometry()[:3]
    if kept and storage is not None:
        kept = (
            now.storage_offset() == each.storage_offset()
            and now.untyped_storage()._cdata == storage._cdata
        )
    if not kept:
        raise Unsupported(
            f"{func} would give the spilled gradient of {each.region.param.name} another shape or"
            " storage; assign a new tensor to .grad, or give a larger dram"
        )


def _outward(
    value: Any,
    given: list[SpilledGradient],
    real: dict[int, torch.Tensor],
    storages: dict[Home, torch.UntypedStorage],
    copies: set[int],
) -> Any:
    """What the caller gets for a result: never a view of the window's memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    same = next((each for each in given if real[id(each)] is value), None)
    if same is not None:
        return same
    storage = value.untyped_storage()._cdata
    bases = [
        each
        for each in given
        if each.region.home in storages and storages[each.region.home]._cdata == storage
    ]
    if not bases and storage not in copies:
        return value
    base = next((each for each in bases if each.region.holds(value)), None)
    if base is None:
        raise Unsupported(
            "views of several spilled gradients at once are not supported; take copies "
            "(.clone()), or"
            " give a larger dram"
        )
    return base.like(value)
