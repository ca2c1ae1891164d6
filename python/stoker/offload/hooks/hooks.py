"""Hooks: the places where torch tells us that a block's weights are used.

Forward uses hang on module pre-hooks, at the block and at each module inside it that owns
parameters (recomputation inside a checkpointed segment enters there). Backward uses hang on the
unpacking of saved tensors: module backward hooks do not always fire. While a block's modules run,
saved views of its weights are replaced by (block, dtype, size, stride, offset) and made again at
unpack. Tensors that are not weights go on to the hooks that were active outside (activation
checkpointing, say).

A weight may be used outside of its modules (``F.linear(x, other.weight)``). The first root call of
each kind is watched for
that: such a block is fetched at once and pinned from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from stoker.errors import StokerError
from stoker.offload.activations.activations import Activations, Saved
from stoker.offload.gradients.spilled import SpilledGradient
from stoker.offload.hooks.around import Around
from stoker.offload.model.blocks import Block, Param, repeated_layers
from stoker.offload.model.compiled import CUT, compiled, in_place, refuse_cuda_graphs_of_callers
from stoker.offload.model.transforms import refuse, transforming, unwrapped
from stoker.offload.observe.context import Gate
from stoker.offload.paging.offloaded import harmless
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.saved import Kept

_VIEWS = (
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ToCopyBackward0",
)
_autograd = torch._C._autograd


@dataclass(frozen=True)
class SavedWeight:
    """A saved view of a block's weights, without the weights. `cast_of`: the parameter of which it
    viewed an autocast copy."""

    block: Block
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    cast_of: Param | None = None


@dataclass(frozen=True)
class SavedElsewhere:
    """A tensor that an outer pack hook took; its unpack hook gives it back."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class Hooks:
    """Installs the hooks on a model and removes them again (`remove()`)."""

    def __init__(
        self,
        model: nn.Module,
        pager: Pager,
        on_call: Callable[[tuple], None],
        on_outside: Callable[[Param], None],
        gate: Gate,
        activations: Activations | None = None,
    ) -> None:
        self.model = model
        self.pager = pager
        self.activations = activations  # None: what is no weight stays
        self._layers = set(repeated_layers(model))
        self._inputs: set[int] = set()  # storages that the caller of the root call holds
        self.on_call = on_call  # a root call begins
        # a parameter is used outside of its modules, and its block is pinned now
        self.on_outside = on_outside
        self._gate = gate
        self._watched: set[tuple] = set()  # kinds of calls that were watched from beginning to end
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[_Entry] = []
        self._by_tensor = {param.tensor: param for block in pager.blocks for param in block.params}
        self._handles = []
        self._removed = False
        self.enter, self.exit, self.outside = (
            torch.compiler.disable(each, reason=CUT)
            for each in (self._enter, self._exit, self._outside)
        )
        used = {module for block in pager.blocks for module in block.modules}
        self._graphs = {
            module
            for module in used
            if compiled(module) and len(_blocks_in(module, pager.blocks)) == 1
        }
        inside = {
            inner for module in self._graphs for inner in module.modules() if inner is not module
        }
        known = used | inside
        for module in model.modules():
            # a container may be called on its own; one call of it is one root call, not one for
            # each block inside
            holds_one = module not in known and not used.isdisjoint(module.modules())
            if module is model or holds_one:
                self._hook(module, None)
        for block in pager.blocks:
            for module in block.modules:
                if module not in inside:
                    self._hook(module, block)

    @property
    def lock(self) -> Any:
        return self._gate.lock

    def _hook(self, module: nn.Module, block: Block | None) -> None:
        if module in self._graphs and in_place(module):
            self._handles.append(Around(module, block, self.enter, self.exit))
            return
        # prepend: before the user's own pre-hooks, which may read weights; after all of them on the
        # way out
        self._handles.append(
            module.register_forward_pre_hook(
                Hook(lambda m, args, named: self.enter(m, block, (args, named))),
                prepend=True,
                with_kwargs=True,
            )
        )
        self._handles.append(
            module.register_forward_hook(
                Hook(lambda m, args, out: self.exit(m, out)), always_call=True
            )
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._removed = True

    # -- forward -----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, block: Block | None, inputs: Any = ()) -> None:
        if transforming():
            used = (self._by_tensor.get(unwrapped(param)) for param in module.parameters())
            refuse(param for param in used if block and param and param not in self.pager.held)
            return
        with self.lock:
            if module is self.model and any(entry.module is module for entry in self._stack):
                self.unwind()
            entry = _Entry(module, block)
            if not self._stack and torch._C._current_graph_task_id() == -1:
                entry.call = (self._names.get(module, ""), module.training, torch.is_grad_enabled())
                if entry.call not in self._watched:
                    refuse_cuda_graphs_of_callers()
                self.on_call(entry.call)
                self._inputs = set(_storages(inputs)) if self.activations is not None else set()
            if block is not None:
                self.pager.entered[block.index] += 1
                try:
                    self.pager.use(block)
                except BaseException:
                    self._left(block)
                    raise
                if torch.is_grad_enabled() and self._top_is_foreign():
                    outer = _autograd._top_saved_tensors_default_hooks(False)
                    _autograd._push_saved_tensors_default_hooks(_Pack(self, outer), self._unpack)
                    # Where activations leave memory, those between and behind the layers do too:
                    # the hooks stay until the root call ends.
                    whole = (
                        self.activations is not None
                        and outer is None
                        and module in self._layers
                        and self._stack
                        and self._stack[0].call is not None
                    )
                    (self._stack[0] if whole else entry).packs = True
                if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                    # autocast would cache a cast copy of every weight until the context ends
                    entry.cache = torch.is_autocast_cache_enabled()
                    torch.set_autocast_cache_enabled(False)
            if not self._stack:
                self.pager.call_begins()
            if entry.call is not None and entry.call not in self._watched:
                entry.watch = _Watch(self)
                entry.watch.__enter__()
            elif module in self._graphs and isinstance(_get_current_function_mode(), _Watch):
                entry.pause = _get_current_function_mode()
                entry.pause.__exit__(None, None, None)
            self._stack.append(entry)

    def _exit(self, module: nn.Module, out: Any) -> None:
        if transforming() or not any(entry.module is module for entry in self._stack):
            return  # its entry failed, or was unwound with an outer module
        with self.lock:
            while True:
                entry = self._leave()
                if entry.module is module:
                    break
            # None: it raised, so the rest of it was not seen
            if entry.watch is not None and out is not None:
                self._watched.add(entry.call)

    def param_of(self, tensor: torch.Tensor) -> Param | None:
        return self._by_tensor.get(tensor)

    def _leave(self) -> _Entry:
        entry = self._stack.pop()
        if entry.watch is not None:
            entry.watch.__exit__(None, None, None)
        if entry.pause is not None:
            entry.pause.__enter__()
        if entry.packs:
            _autograd._pop_saved_tensors_default_hooks()
        if entry.cache is not None:
            torch.set_autocast_cache_enabled(entry.cache)
        if entry.block is not None:
            self._left(entry.block)
        if not self._stack:
            self.pager.call_ends()
        return entry

    def _left(self, block: Block) -> None:
        self.pager.entered[block.index] -= 1
        if not self.pager.entered[block.index]:
            self.pager.leave(block)

    def unwind(self) -> None:
        """Leaves every module that is still entered. torch runs no exit hooks after a
        KeyboardInterrupt; without this the next forward would pass for a part of the interrupted
        one. Called where no forward can be under way.
        """
        with self.lock:
            while self._stack:
                self._leave()

    def _outside(self, param: Param) -> None:
        """From a watched call: `param` is an operand. Where its block is not in use, nothing else
        would bring it into memory."""
        block = param.unit.block
        with self.lock:
            if block.pinned or self.pager.entered[block.index]:
                return
            self.pager.pin(block)
            self.on_outside(param)

    def _top_is_foreign(self) -> bool:
        top = _autograd._top_saved_tensors_default_hooks(False)
        return top is None or not isinstance(top[0], _Pack) or top[0].hooks is not self

    def saves_here(self) -> bool:
        """Whether what autograd saves now comes to us, and to nobody outside."""
        top = _autograd._top_saved_tensors_default_hooks(False)
        return (
            top is not None
            and isinstance(top[0], _Pack)
            and top[0].hooks is self
            and top[0].outer is None
        )

    # -- saved tensors -----------------------------------------------------------------------------

    def _saved_weight(self, tensor: torch.Tensor) -> SavedWeight | None:
        if (
            tensor.layout != torch.strided
            or tensor.numel() == 0
            or isinstance(tensor, SpilledGradient)
        ):
            return None
        # not by an InUse's own
        known = self.pager.by_address.get(torch._C.TensorBase.untyped_storage(tensor).data_ptr())
        if known is not None:
            return SavedWeight(
                *known, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
            )
        param = self._cast_source(tensor)
        if param is None:
            return None
        block = param.unit.block
        return SavedWeight(
            block,
            self.pager.versions[block.index],
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            param,
        )

    def _cast_source(self, tensor: torch.Tensor) -> Param | None:
        """The parameter of which `tensor` views an autocast copy, if it is one."""
        if tensor.grad_fn is not None:
            node, cast = tensor.grad_fn, False
            for _ in range(4):
                if node is None:
                    return None
                if node.name() == "struct torch::autograd::AccumulateGrad":
                    return self._by_tensor.get(node.variable) if cast else None
                if node.name() not in _VIEWS:
                    return None
                cast = cast or node.name() == "ToCopyBackward0"
                node = node.next_functions[0][0] if node.next_functions else None
            return None
        if (
            not self._stack
            or not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
            or tensor.requires_grad
        ):
            return None
        # A copy of a frozen weight has no history: equal bytes are the proof.
        block = self.pager.current
        count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        for param in block.params if block is not None else ():
            if param.unit.updated or param.numel != count or param.tensor.dtype == tensor.dtype:
                continue
            cast = param.tensor.to(tensor.dtype).detach()
            flat = torch.as_strided(tensor, (count,), (1,), 0)
            if torch.equal(torch.as_strided(cast, (count,), (1,), 0), flat):
                return param
        return None

    def _saved_activation(self, tensor: torch.Tensor) -> Saved | Kept:
        saved = None
        if self.activations is not None and not (
            tensor.grad_fn is None
            and self._inputs
            and tensor.untyped_storage()._cdata in self._inputs
        ):
            with self.lock:
                block = next(
                    (
                        entry.block.name
                        for entry in reversed(self._stack)
                        if entry.block is not None
                    ),
                    "",
                )
                saved = self.activations.save(tensor, block)
        return saved if saved is not None else Kept(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.get()
        if isinstance(packed, SavedElsewhere):
            return packed.unpack(packed.packed)
        if self._removed:
            raise StokerError(
                "this backward belongs to an optimizer that was closed, so its weights have left "
                "memory; run backward before opt.close()"
            )
        if isinstance(packed, Saved):
            with self.lock:
                return self.activations.restore(packed)
        with self.lock:
            block = packed.block
            slot = self.pager.use(block)
            if slot.version != packed.version:
                raise StokerError(
                    f"the weights of block {block.name} were updated between this forward and its"
                    " backward; run backward before opt.step()"
                )
            if packed.cast_of is None:
                return slot.typed(packed.dtype, packed.size, packed.stride, packed.offset)
            cast = slot.view(packed.cast_of).to(packed.dtype)
            return torch.as_strided(cast, packed.size, packed.stride, packed.offset)


def _storages(values: Any) -> Iterator[int]:
    """Of the tensors in nested arguments."""
    if type(values) is torch.Tensor and values.layout is torch.strided:
        yield values.untyped_storage()._cdata
    elif isinstance(values, dict):
        yield from _storages(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _storages(value)


def _blocks_in(module: nn.Module, blocks: list[Block]) -> list[Block]:
    inside = set(module.modules())
    return [block for block in blocks if not inside.isdisjoint(block.modules)]


@dataclass(eq=False)
class _Entry:
    """A module that is being run."""

    module: nn.Module
    block: Block | None
    call: tuple | None = None  # the kind of root call, where it is one
    packs: bool = False  # it pushed saved-tensor hooks
    cache: bool | None = None  # whether the autocast cache was on before
    watch: _Watch | None = None
    pause: _Watch | None = None  # an outer call's, which a graph cannot be watched by


class Hook:
    """A module hook that belongs to this model only: a deep copy of the model gets hooks that do
    nothing."""

    def __init__(self, call: Callable | None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if self.call is not None else None

    def __deepcopy__(self, memo: dict) -> Hook:
        return Hook(None)

    def __reduce__(self):
        raise StokerError(
            "an offloaded model cannot be pickled: its weights are in the store; save"
            " model.state_dict() instead"
        )


class _Watch(TorchFunctionMode):
    """Tells the hooks of every parameter that a torch function is given."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not harmless(func):
            self._look((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _look(self, values: Any) -> None:  # torch.compile traces this: no generator
        for value in values:
            if isinstance(value, nn.Parameter):
                param = self._hooks.param_of(value)
                if param is not None:
                    self._hooks.outside(param)
            elif isinstance(value, (list, tuple)):
                self._look(value)


class _Pack:
    """The pack hook of one push: weights become SavedWeight; everything else goes to the hooks
    outside, or stays."""

    def __init__(self, hooks: Hooks, outer: tuple | None) -> None:
        self.hooks = hooks
        self.outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        saved = self.hooks._saved_weight(tensor)
        if saved is not None:
            return saved
        if self.outer is None:
            return self.hooks._saved_activation(tensor)
        pack, unpack = self.outer
        return SavedElsewhere(pack(tensor), unpack)
