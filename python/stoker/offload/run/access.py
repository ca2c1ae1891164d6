"""Access to offloaded weights between steps: gather(), state_dict() and load_state_dict()."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Iterable, Iterator

import torch
from torch import nn

from stoker.errors import InvalidArgument, OutOfSpace
from stoker.offload.hooks.hooks import Hook
from stoker.offload.paging.offloaded import become
from stoker.offload.run.left import owners_of
from stoker.offload.run.loading import check_assign

if TYPE_CHECKING:
    from stoker.offload.model.blocks import Param
    from stoker.offload.run.session import Session


def _session_of(params: list[torch.Tensor]) -> Session:
    sessions = {getattr(param, "_stoker_session", None) for param in params}
    if None in sessions or len(sessions) != 1:
        raise InvalidArgument("gather() takes parameters of one offloaded model; these are not")
    return next(iter(sessions))


@contextlib.contextmanager
def gather(params: torch.Tensor | Iterable[torch.Tensor], write: bool = False) -> Iterator[None]:
    """Inside, the parameters hold their weights (in ordinary memory, outside the dram cap). With
    write=True what they hold at the end is written back as one durable commit (optimizer state
    stays; a bfloat16 weight becomes its own master).
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    if not listed:
        yield
        return
    session = _session_of(listed)
    session.check_open()
    if session.pager.resident:  # the weights are there: each rank's shards
        if write:
            session.replacing.writing_weights()
        yield
        return
    session.shown.settle()
    # a tied parameter may come twice
    named = list(dict.fromkeys(session.by_tensor[each] for each in listed))
    # an outer gather() keeps what it holds
    ours = [param for param in named if param not in session.pager.held]
    try:
        for param in ours:
            session.pager.hold(param, session.weights.current(param).to(session.pager.device))
        yield
        if write:
            session.replacing.write_weights({param: param.tensor.data for param in named})
    finally:
        session.weights.restore(ours)


def install_shards(model: nn.Module, session: Session) -> list:
    """The same of a sharded model, whose weights are in memory: its state_dict() is torch's own, of
    shards."""
    for param in session.params:
        param.tensor._stoker_session = session
    check = Hook(lambda module, state, prefix, metadata, *_others: check_assign(metadata))
    return [module.register_load_state_dict_pre_hook(check) for module in model.modules()]


def install_state_dict(model: nn.Module, session: Session) -> list:
    """state_dict() of the model, or of any module in it, gives the weights instead of placeholders;
    load_state_dict() writes them.

    Each tensor of a state_dict() is a mapping of a piece of an unlinked temporary file in the
    store's directory: together they may be larger than memory, they cost no budget, and changing
    them changes nothing else. As in any state_dict(), two names share a storage where they name one
    parameter and nowhere else: those who save it copy what shares. Returns the handles of the
    hooks.
    """
    for param in session.params:
        param.tensor._stoker_session = session
        param.tensor.__deepcopy__ = Hook(
            lambda memo, param=param: nn.Parameter(
                session.weights.current(param).to(session.pager.device), param.tensor.requires_grad
            )
        )

    # parameters that several modules have -> the tensor that stands for them in the newest
    # state_dict()
    given: dict = {}

    def fill(module: nn.Module, state: dict, prefix: str, _metadata: dict) -> None:
        ours = {
            prefix + name: session.by_tensor.get(param)
            for name, param in module._parameters.items()
            if param is not None
        }
        # with keep_vars=True it is the parameter itself, and stays that
        wanted = {
            key: param
            for key, param in ours.items()
            if param is not None and key in state and state[key] is not param.tensor
        }
        known = {
            param: tensor
            for param in wanted.values()
            if (tensor := given.get(param, lambda: None)()) is not None
        }
        shared = {
            param
            for param, tensor in known.items()
            if any(value is tensor for value in state.values())
        }
        tensors = {param: known[param] for param in shared}
        with session.ledger.waiting("checkpoint"):
            tensors |= _mapped(
                session.runtime.directory,
                [param for param in session.params if param in set(wanted.values()) - shared],
            )
            for param, tensor in tensors.items():
                if param not in shared:
                    tensor.copy_(session.weights.current(param))
                    session.shown.gave(param, tensor)
                if param.unit.block.pinned:
                    given[param] = weakref.ref(tensor)
        for key, param in wanted.items():
            state[key] = tensors[param]
        for param in _params(module, session):
            session.pager.cover(param)

    def begin(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        session.check_open()
        for param in _params(module, session):
            # torch takes what it shows into the state_dict(), and fill() puts its weights there
            become(param.tensor, None)

    owners = owners_of(model, session.by_tensor)
    handles = [module.register_state_dict_pre_hook(Hook(begin)) for module in owners]
    handles += [module.register_state_dict_post_hook(fill) for module in owners]
    for module in model.modules():
        handles.append(module.register_load_state_dict_pre_hook(Hook(session.loading.enter)))
        handles.append(module.register_load_state_dict_post_hook(Hook(session.loading.leave)))
    return handles


def _params(module: nn.Module, session: Session) -> list[Param]:
    """Of the module itself."""
    own = (
        session.by_tensor.get(tensor)
        for tensor in module._parameters.values()
        if tensor is not None
    )
    return [param for param in own if param is not None]


def _reserve(descriptor: int, size: int, directory: str | None) -> None:
    """Gives the file blocks of its own: a mapping that finds the disk full while it is written to
    ends the process (SIGBUS)."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        folder = directory or tempfile.gettempdir()
        raise OutOfSpace(
            f"state_dict() needs {size / 2**20:.0f} MiB for a file in {folder}, which has no room"
            f" for it ({error.strerror}). Free some space there, or read the weights a few at a"
            " time inside `with stoker.gather(parameters):`"
        ) from error


def _mapped(directory: str | None, params: list) -> dict[Param, torch.Tensor]:
    """For each parameter an empty tensor over a mapping of its own: the pieces of one unlinked
    file."""
    sizes = {param: param.numel * param.unit.dtype.itemsize for param in params}
    places, size = {}, 0
    for param in params:
        places[param] = size
        size += -(-sizes[param] // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    if not size:
        return {
            param: torch.empty_strided(
                param.size, param.stride, dtype=param.unit.dtype, device="cpu"
            )
            for param in params
        }
    descriptor, path = tempfile.mkstemp(prefix="stoker-state-", dir=directory)
    try:
        os.unlink(path)
        _reserve(descriptor, size, directory)
        return {param: _piece(descriptor, places[param], sizes[param], param) for param in params}
    finally:
        os.close(descriptor)


def _piece(descriptor: int, offset: int, size: int, param: Param) -> torch.Tensor:
    flat = (
        torch.frombuffer(mmap.mmap(descriptor, size, offset=offset), dtype=param.unit.dtype)
        if size
        else torch.empty(0, dtype=param.unit.dtype, device="cpu")
    )
    return torch.as_strided(flat, param.size, param.stride)
