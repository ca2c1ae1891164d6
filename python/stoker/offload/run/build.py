"""build(): constructs a model that does not fit in memory, bit-equal to ordinary construction.

The real constructor runs. Parameters are counted as modules register them; when they exceed the
budget, those that nothing aliases are written to the store and replaced by placeholders. A torch
function that touches a placeholder (an initialiser in a later `apply`, say) finds the real bytes
paged in again. At the end all go to the store, as objects `build/BUILD/PARAMETER`; it is closed,
and each parameter knows its object (Paged). stoker.offload() removes them in the commit that makes
the run. Nobody holds anything in between: dropping the model is enough, and what nobody took up is
removed by whoever makes a run, or builds, in that store next.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stoker.errors import InvalidArgument
from stoker.offload.division.amounts import parse_bytes, whole
from stoker.offload.division.layout import store_capacity
from stoker.offload.model.absent import Absent, away_of, loud, only_loud
from stoker.offload.model.algorithm import Algorithm
from stoker.offload.model.blocks import Block, fills, partition
from stoker.offload.observe.heap import trim
from stoker.offload.storage import record
from stoker.offload.storage.buffers import stored_bytes
from stoker.offload.storage.open_store import (
    OpenStore,
    folders_of,
    naming_the_smallest,
    open_runtime,
)
from stoker.offload.storage.planes import put, read_into

_PREFIX = "build/"


def build(
    factory: Callable[[], nn.Module],
    *,
    seed: int | None = None,
    store: str | os.PathLike,
    dram: int | str,
    snapshots: int = 0,
    stall_seconds: int = 300,
) -> nn.Module:
    """Runs `factory` with at most `dram` bytes of parameters in memory; the rest lies in `store`.
    Hand the model and an optimizer over its parameters to stoker.offload(..., store=the same store)
    next.

    factory: makes the model on the CPU; it is run twice, first on the meta device for sizes. seed:
    torch.manual_seed before the real run. snapshots, stall_seconds: as for stoker.offload(). The
    weights are those that factory() gives in ordinary memory, bit for bit. Where the store already
    holds a run (to be resumed) nothing is written.

    Until stoker.offload() the weights are in the store and read as NaN, so convert, initialise and
    load inside `factory`. Wrap the model, freeze parameters and add new ones afterwards. The store
    is free in between: building or making another model in it removes the weights.
    """
    snapshots = whole(
        "snapshots", snapshots, "is not a number of snapshots; give 0 or more", least=0
    )
    path, dram_bytes = os.fspath(store), parse_bytes("dram", dram)
    if not folders_of(path):
        raise InvalidArgument(
            "stoker.build() keeps weights in the store until stoker.offload() uses them, which "
            f"{path!r} cannot do; give a directory"
        )
    sizes, buffers = _sizes_of(factory)
    largest = Algorithm("adamw", True, True)  # the optimizer is not known yet
    capacity = store_capacity(sizes, largest, snapshots, buffers) + sum(
        block.slot_bytes for block in sizes
    )
    runtime = open_runtime(path, dram_bytes, capacity, stall_seconds, sizes, largest)
    try:
        construction = Construction(runtime, keep=not runtime.holds("meta/model"))
        if seed is not None:
            torch.manual_seed(seed)
        with construction:
            model = factory()
        construction.leave(model)
    except BaseException as error:
        runtime.close()  # a second try must find the store free
        with naming_the_smallest(path, dram_bytes, sizes, largest):
            raise error
    runtime.close()
    return model


def left_behind(store: Any) -> list[str]:
    """The objects of builds in this store, taken up or not."""
    return [each["key"] for each in store.list(_PREFIX)]


def _sizes_of(factory: Callable[[], nn.Module]) -> tuple[list[Block], int]:
    """The blocks that the model will have, and the bytes of its buffers. Random numbers are drawn
    for nothing, so they are put back."""
    before = record.rng_state()
    try:
        with torch.device("meta"):
            model = factory()
        sizes, buffers = partition(model, []), stored_bytes(dict(model.named_buffers()))
    finally:
        record.set_rng_state(before)
    for block in sizes:
        for unit in block.units:
            unit.updated = unit.dtype in (torch.bfloat16, torch.float32)
    return sizes, buffers


@dataclass(frozen=True)
class Paged(Absent):
    """Its values are the object `key` of the store at `path`; or nowhere, since that store
    `has_run`."""

    path: str
    key: str
    dtype: torch.dtype
    size: torch.Size
    has_run: bool

    def why(self, name: str) -> str:
        if self.has_run:
            return (
                f"stoker.build() found a run in the store at {self.path}, so it kept no initial"
                f" values of parameter {name}; pass store={self.path!r} with resume=True to go on"
                " with that run, or build the model again with another store"
            )
        return (
            f"stoker.build() left the values of parameter {name} in the store at {self.path}, and"
            " the store given to stoker.offload() has them not (it is another one, or another"
            f" model was made in it since); pass store={self.path!r}, or build the model again"
        )

    def changed(self, param: torch.Tensor) -> bool:
        return param.dtype != self.dtype or param.size() != self.size or not only_loud(param)

    def near(self, store: str) -> bool:
        places = lambda name: [os.path.realpath(folder) for folder in folders_of(name)]
        return places(store) == places(self.path)

    def within(self, store: Any) -> bool:
        return not self.has_run and store.exists(self.key)

    def read(self, store: Any) -> torch.Tensor:
        out = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")
        if self.has_run:
            return out.zero_()  # whatever the factory makes of them, that run takes their place
        read_into(store, self.key, 0, _bytes_of(out))
        return out


class Construction(TorchFunctionMode):
    """A model in the making: which of its parameters are in memory, which in the store. Of the
    thread that makes it."""

    def __init__(self, runtime: OpenStore, keep: bool) -> None:
        """`keep`: whether values are wanted; else a run has them already."""
        super().__init__()
        self._runtime, self._keep = runtime, keep
        self._limit = runtime.dram_bytes // 2
        self._prefix = f"{_PREFIX}{secrets.token_hex(8)}/"
        self._resident: OrderedDict[int, nn.Parameter] = OrderedDict()  # oldest use first
        self._thread = threading.get_ident()
        self._busy = False
        self._freed = 0  # bytes since the last trim
        if keep and (stale := left_behind(runtime.store)):
            txn = runtime.store.begin()
            for key in stale:
                txn.remove(key)
            txn.commit("durable").wait()  # only then is their space free

    def __enter__(self) -> Construction:
        self._hook = register_module_parameter_registration_hook(self._registered)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hook.remove()

    def leave(self, model: nn.Module) -> None:
        """The factory is done: everything to the store, where it stays when that is closed. What is
        aliased stays in memory."""
        for param in model.parameters():
            if self._may_go(param):
                self._page_out(param)
        self._resident.clear()
        trim()
        if self._keep:
            self._runtime.store.begin().commit("durable").wait()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._busy:
            used = list(_leaves((*args, *kwargs.values())))
            if paged := [each for each in used if self._has(each)]:
                self._page_in(paged, {id(each) for each in used})
        return func(*args, **kwargs)

    def _has(self, thing: Any) -> bool:
        """Whether it is a parameter whose values this construction has paged out."""
        away = away_of(thing)
        return isinstance(away, Paged) and away.key.startswith(self._prefix)

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if (
            param is None
            or threading.get_ident() != self._thread
            or away_of(param) is not None
            or id(param) in self._resident
        ):
            return
        self._resident[id(param)] = param
        self._shrink(keep={id(param)})

    def _shrink(self, keep: set[int]) -> None:
        """Pages out until no more than the limit is in memory: the oldest first, none of those in
        use."""
        # anew each time: factories cast and resize what they made
        held = sum(param.nbytes for param in self._resident.values() if not param.is_meta)
        for param in list(self._resident.values()):
            if held <= self._limit:
                break
            if id(param) not in keep and self._may_go(param):
                held -= param.nbytes
                self._freed += param.nbytes
                self._page_out(param)
        if self._freed > self._limit // 4:
            trim()
            self._freed = 0

    def _may_go(self, param: nn.Parameter) -> bool:
        """Whether it is all of its memory, and nobody else sees that."""
        if (
            away_of(param) is not None
            or param.device.type != "cpu"
            or is_traceable_wrapper_subclass(param)
            or not param.numel()
            or not fills(param)
        ):
            return False
        # one use is the parameter's own, one that of asking; more means that somebody still holds a
        # view and may write through it
        return torch._C._storage_Use_Count(param.untyped_storage()._cdata) <= 2

    def _page_out(self, param: nn.Parameter) -> None:
        self._busy = True
        try:
            away = Paged(
                param.stride(),
                self._runtime.path,
                f"{self._prefix}{id(param)}",
                param.dtype,
                param.size(),
                not self._keep,
            )
            if self._keep:
                txn = self._runtime.store.begin()
                put(txn, away.key, _bytes_of(param.detach()))
                txn.commit("deferred").wait()
            param.data = loud(param.dtype, param.size(), "cpu")
            param._stoker_away = away
            self._resident.pop(id(param), None)
        finally:
            self._busy = False

    def _page_in(self, params: Iterable[nn.Parameter], keep: set[int]) -> None:
        """All of them before anything goes for them: `keep` is what one operation reads and
        writes."""
        self._busy = True
        try:
            for param in params:
                if (away := away_of(param)) is not None:  # it may come twice
                    param.data = away.read(self._runtime.store)
                    del param._stoker_away
                    self._resident[id(param)] = param
        finally:
            self._busy = False
        self._shrink(keep)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that fills it."""
    return memoryview(torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What is in these arguments of an operation, which may be lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value
