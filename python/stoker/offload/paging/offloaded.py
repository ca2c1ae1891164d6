"""Parameters of an offloaded model as torch meets them: an `Offloaded` hands what is called with it
to its session, an `InUse` tells the session of what gives a way to its memory.

A parameter shows the pager's memory only while a module of its block runs (and a pinned one,
always). In between it is an `Offloaded`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef

# Properties of a parameter that give its values, or set them; all others are known without them.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
# What asks or changes something other than the values.
_HARMLESS = frozenset(
    "__hash__ __len__ size dim ndimension numel nelement stride storage_offset element_size "
    "is_contiguous is_floating_point is_complex is_signed type requires_grad_ register_hook "
    "register_post_accumulate_grad_hook has_names get_device".split()
)


def harmless(func: Callable) -> bool:
    """Whether a torch function leaves the values of its operands alone."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _VALUES
    return name in _HARMLESS


def parameters_in(values: Any) -> Iterator[torch.Tensor]:
    """The parameters in nested arguments."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from parameters_in(value)
        elif isinstance(value, dict):
            yield from parameters_in(value.values())


class Offloaded:
    """Mixed into the class of a parameter whose weights are not for torch to see just now: torch
    hands us what is called with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A compiler asks for what it can know without values.
        if harmless(func) or TracingContext.try_get() is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        given = parameters_in((*args, *kwargs.values()))
        tensors = [each for each in given if isinstance(each, Offloaded)]
        return tensors[0]._stoker_session.shown.call(tensors, func, args, kwargs)

    @property
    # Past __torch_function__: it is asked for often, and by us for every update.
    def grad(self) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            return _grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _handed(name: str) -> Callable:
    """A method that torch does not hand to anybody."""
    torchs = getattr(torch.Tensor, name)
    hand = Offloaded.__torch_function__
    return lambda self, *args, **kwargs: hand(torchs, (), (self, *args), kwargs)


for _name in ("set_", "as_subclass"):
    setattr(Offloaded, _name, _handed(_name))


class InUse:
    """Mixed into the class of a parameter that shows the pager's memory: what gives a way to change
    that unseen by torch is noted."""


def _noting(name: str) -> Any:
    """A method or property of torch's that gives such a way."""
    torchs = getattr(torch.Tensor, name)

    def note(self) -> None:
        if (session := getattr(self, "_stoker_session", None)) is not None:
            session.shown.taken(session.by_tensor[self])

    if not callable(torchs):

        def get(self):
            note(self)
            return torchs.__get__(self)

        return property(get, torchs.__set__)

    def method(self, *args, **kwargs):
        note(self)
        return torchs(self, *args, **kwargs)

    return method


for _name in "data detach numpy untyped_storage storage data_ptr __array__ __dlpack__".split():
    setattr(InUse, _name, _noting(_name))

_grad = torch.Tensor.grad
_owns: dict[type, type] = {}  # a class made here -> the parameter's own
_made: dict[tuple[type, type], type] = {}


def become(tensor: torch.Tensor, kind: type | None) -> None:
    """The parameter is an Offloaded or an InUse from here on, or (None) one like any other
    again."""
    own = _owns.get(type(tensor), type(tensor))
    if kind is None:
        tensor.__class__ = own
        return
    made = _made.get((kind, own))
    if made is None:
        made = _made[kind, own] = type(own.__name__, (kind, own), {"__module__": own.__module__})
        _owns[made] = own
    tensor.__class__ = made


def uses(tensor: torch.Tensor) -> int:
    """How many refer to the tensor's storage: tensors, and who holds the storage itself."""
    storage = storage_of(tensor)
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


storage_of = torch._C.TensorBase.untyped_storage  # not an InUse's own
ALONE = uses(torch.empty(1))  # of a storage that one tensor has


@dataclass(frozen=True)
class Place:
    """Memory that somebody may refer to, without keeping it alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    shape: tuple  # size, stride, offset

    @staticmethod
    def of(tensor: torch.Tensor) -> Place:
        with torch._C.DisableTorchFunction():
            shape = tensor.storage_offset(), tensor.size(), tensor.stride()
            return Place(StorageWeakRef(storage_of(tensor)), tensor.dtype, shape)

    @torch.inference_mode(False)
    def memory(self) -> torch.Tensor | None:
        """None if nobody else refers to it any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        memory = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.shape)
        del storage
        return memory if uses(memory) > ALONE else None
