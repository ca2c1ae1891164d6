"""SpilledGradient: the tensor that p.grad is where gradients are spilled. It has a shape and a type, and its bytes only while somebody looks.

Every operation on it is run on the real bytes: they are brought into the window (window.py), it runs there, and what it changed is written back
when its place is needed. So any operation means what it means on any tensor, bit for bit: torch accumulates into it, clips, scales and
zeroes it. Views of it are such tensors too; nobody else ever has a view of the window's memory, so none can become stale: whoever keeps
p.grad finds the right bytes in it, also when backward has made another one since, until the optimizer is closed.

Operations over lists (`torch._foreach_*`, GradScaler's) are run tensor by tensor, which gives the same bits on a processor. Any other that takes
more units than the window has places for reads copies of them into ordinary memory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from stoker.errors import StokerError, Unsupported
from stoker.offload.window import PLACES

if TYPE_CHECKING:
    from stoker.offload.blocks import Param
    from stoker.offload.spilling import SpillingGradients
    from stoker.offload.window import Home

# What asks for shape and type only.
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full new_empty_strided is_same_size".split()
)
_numbers = itertools.count()


class Region:
    """A parameter's spilled gradient, from when it was laid into its home until the last tensor over it is gone."""

    __slots__ = ("owner", "home", "param", "number", "writes", "__weakref__")

    def __init__(self, owner: SpillingGradients, home: Home, param: Param) -> None:
        self.owner, self.home, self.param = owner, home, param
        self.number, self.writes = next(_numbers), 0  # together they tell its bytes from any others


class SpilledGradient(torch.Tensor):
    """A gradient, or a view of one. `region` says whose."""

    region: Region
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, region: Region, dtype: torch.dtype, size, stride, offset: int) -> SpilledGradient:
        """offset: in elements of dtype from the start of the unit."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, storage_offset=offset, dtype=dtype, device="cpu")
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
        with given[0].region.owner.lock:
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
        """`p.grad.data /= n` ends here with what it began with. Anything else is copied: the memory that an ordinary tensor would share is not the disk's."""
        if isinstance(value, SpilledGradient) and value.region is self.region and self.geometry() == value.geometry():
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Unsupported(f"the spilled gradient of {self.region.param.name} keeps its shape and type; assign a new tensor to .grad, or give a larger dram")
        with torch.no_grad():
            self.copy_(value)

    def data_ptr(self) -> int:
        raise self._no_address()

    def __dlpack__(self, *_: Any, **__: Any):
        raise self._no_address()

    def share_memory_(self):
        raise self._no_address()

    def _no_address(self) -> Unsupported:
        return Unsupported(f"the gradient of {self.region.param.name} is spilled to the disk and has no address; take a copy (.clone()), or give a larger dram")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpilledGradient({self.clone()!r})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: int):
        return self.clone().__reduce_ex__(protocol)

    # -- geometry

    def geometry(self) -> tuple:
        return self.dtype, self.size(), self.stride(), self.storage_offset()

    def over(self, storage: torch.UntypedStorage, device: str = "cpu") -> torch.Tensor:
        """The ordinary tensor that this one would be over that storage."""
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, self.storage_offset(), self.size(), self.stride())

    def like(self, tensor: torch.Tensor) -> SpilledGradient:
        """The same region through the geometry of `tensor`."""
        return SpilledGradient(self.region, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _run(func: Any, args: tuple, kwargs: dict, given: list[SpilledGradient]) -> Any:
    name = func._schema.name.partition("::")[2]
    owner = given[0].region.owner
    if owner.closed:
        raise StokerError(f"the gradient of {given[0].region.param.name} is not there any more: its optimizer was closed; copy what you want to keep before that")
    if name in _LIKE:
        shell = lambda each: torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="cpu")
        return func(*tree_map_only(SpilledGradient, shell, args), **tree_map_only(SpilledGradient, shell, kwargs))
    if name == "detach_":  # it has no history
        return args[0]
    if func.is_view:
        made = _view(func, args, kwargs, given[0])
        if made is not None:
            return made
    count = _listed(name, args)
    return _each(func, args, kwargs, count) if count > 1 else _whole(func, args, kwargs, given)


def _view(func: Any, args: tuple, kwargs: dict, one: SpilledGradient) -> Any:
    """What `func` makes of the tensor without looking at its bytes; None where that is no view."""
    blank = torch.empty(one.region.home.unit.elements, dtype=one.region.home.unit.dtype, device="meta").untyped_storage()
    shape = one.over(blank, "meta")
    out = func(*tree_map_only(SpilledGradient, lambda _: shape, args), **tree_map_only(SpilledGradient, lambda _: shape, kwargs))
    tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    if any(each.untyped_storage()._cdata != blank._cdata for each in tensors):
        return None
    return tree_map_only(torch.Tensor, lambda each: one if each is shape else one.like(each), out)


def _listed(name: str, args: tuple) -> int:
    """How many tensors an operation over lists has; 0 for any other."""
    over_lists = name.startswith("_foreach_") or name == "_amp_foreach_non_finite_check_and_unscale_"
    return len(args[0]) if over_lists and all(not isinstance(each, torch.Tensor) or each.dim() == 0 or each.numel() == 1 for each in args[1:]) else 0


def _each(func: Any, args: tuple, kwargs: dict, count: int) -> Any:
    """An operation over lists, one tensor after the other."""
    results = []
    for i in range(count):
        own = lambda value: [value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value
        results.append(func(*map(own, args), **{key: own(value) for key, value in kwargs.items()}))
    return None if results[0] is None else [each for result in results for each in result]


def _changed(func: Any, args: tuple, kwargs: dict) -> Iterator[SpilledGradient]:
    """The arguments that `func` writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            yield from (each for each in tree_leaves(value) if isinstance(each, SpilledGradient))


def _whole(func: Any, args: tuple, kwargs: dict, given: list[SpilledGradient]) -> Any:
    changed = list(_changed(func, args, kwargs))
    owner = (changed or given)[0].region.owner
    homes = dict.fromkeys(each.region.home for each in (*changed, *given) if each.region.owner is owner)
    inside = tuple(homes)[:PLACES]
    outside = [each for each in given if each.region.home not in inside]
    if any(each.region.home not in inside for each in changed):
        raise Unsupported(f"{func} changes spilled gradients of {len(homes)} groups of parameters at once, and there is room for {PLACES}; do it tensor by tensor, or give a larger dram")
    real = {id(each): each.clone() for each in outside}  # first: each may push out what was brought
    storages = {home: owner.bring(home, inside).untyped_storage() for home in inside}
    real |= {id(each): each.over(storages[each.region.home]) for each in given if each.region.home in inside}
    use = lambda values: tree_map_only(SpilledGradient, lambda each: real[id(each)], values)
    with owner.changing({each.region for each in changed}):
        out = func(*use(args), **use(kwargs))
    for each in changed:
        now = real[id(each)]
        if (now.dtype, now.size(), now.stride(), now.storage_offset()) != each.geometry() or now.untyped_storage()._cdata != storages[each.region.home]._cdata:
            raise Unsupported(f"{func} would give the spilled gradient of {each.region.param.name} another shape or storage; assign a new tensor to .grad, or give a larger dram")
    return tree_map(lambda value: _outward(value, given, real, storages), out)


def _outward(value: Any, given: list[SpilledGradient], real: dict[int, torch.Tensor], storages: dict[Home, torch.UntypedStorage]) -> Any:
    """What the caller gets for a result: never a view of the window's memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    same = next((each for each in given if real[id(each)] is value), None)
    if same is not None:
        return same
    storage = value.untyped_storage()._cdata
    base = next((each for each in given if each.region.home in storages and storages[each.region.home]._cdata == storage), None)
    return base.like(value) if base is not None else value
