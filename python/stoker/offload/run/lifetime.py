"""What becomes of sessions when their process forks, and when it ends while a thread still trains.

A forked process has the session's objects and none of its threads, and none of the memory that
weights lie in. What would wait there for ever, or touch that memory, raises instead; close() does
nothing. The parent notices nothing of it.
At the end of the interpreter a thread that trains is stopped where it next enters the session or
leaves the core: Python ends such a thread by unwinding its stack, and where frames of C++ are on
it that ends the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Any, Protocol

import torch

from stoker import _core
from stoker.errors import Unsupported
from stoker.offload.model.blocks import Param
from stoker.offload.paging.pager import Pager
from stoker.offload.storage.open_store import OpenStore


class Watched(Protocol):
    """A session, as it is met here."""

    runtime: OpenStore
    pager: Pager
    params: list[Param]
    closed: bool
    trained_by: int | None  # the thread that called the model last

    def replace_locks(self, lock: Any) -> None:
        """Whoever enters from now on meets this lock."""


_sessions: weakref.WeakSet[Watched] = weakref.WeakSet()
_forked: weakref.WeakSet[Watched] = weakref.WeakSet()  # those of a process that forked this one
_types: dict[type, type] = {}
# What of a parameter can be asked without its values.
_KNOWN = frozenset(
    "size dim ndimension numel nelement stride element_size is_floating_point is_complex "
    "get_device __hash__ __len__".split()
)
_VALUES = frozenset(("data", "grad", "T", "mT", "H", "mH", "real", "imag"))
SECONDS_TO_STOP = 5.0  # how long the end of the interpreter waits for threads that train
IDLE_LOOKS = 50  # a thread that is elsewhere at so many looks, 10 ms apart, does not train


def watch(session: Watched) -> None:
    _sessions.add(session)


def is_forked(session: Watched) -> bool:
    return session in _forked


def check_process(session: Watched) -> None:
    if is_forked(session):
        raise Unsupported(_sentence(session))


def _sentence(session: Watched) -> str:
    return (
        f"this model's weights are in the store at {session.runtime.path}, which belongs to the "
        "process that forked this one; they are out of reach here: in a DataLoader's worker leave "
        "the model alone, or hand it copies made in `with stoker.gather(...)`"
    )


# -- forks -----------------------------------------------------------------------------------------


class _OutOfReach:
    """In place of a session's lock: whoever enters gets the error."""

    def __init__(self, session: Watched) -> None:
        self._session = session

    def __enter__(self) -> None:
        check_process(self._session)

    def __exit__(self, *_exception: Any) -> None:
        pass


def _type_out_of_reach(kind: type) -> type:
    """The same type of parameter, of which only what needs no values can be asked."""

    def refuse(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _KNOWN or (name == "__get__" and attribute not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(each, cls):
                raise Unsupported(vars(each)["_stoker_out_of_reach"])
        raise Unsupported(
            "a weight of an offloaded model cannot be used in a forked process; give that process a"
            " copy, such as state_dict(), before it is forked"
        )

    def gradient(self, *_value) -> None:
        raise Unsupported(vars(self)["_stoker_out_of_reach"])

    if kind not in _types:
        members = {"__torch_function__": classmethod(refuse), "__module__": kind.__module__}
        members["grad"] = property(gradient, gradient, gradient)  # an Offloaded's asks nobody
        _types[kind] = type(kind.__name__, (kind,), members)
    return _types[kind]


def _after_fork() -> None:
    for session in list(_sessions):
        _forked.add(session)
        session.replace_locks(_OutOfReach(session))
        if session.pager.resident:
            continue  # shards have memory of their own
        sentence = _sentence(session)
        for param in session.params:
            param.tensor._stoker_out_of_reach = sentence
            param.tensor.__class__ = _type_out_of_reach(type(param.tensor))
    _sessions.clear()


os.register_at_fork(after_in_child=_after_fork)


# -- the end of the interpreter --------------------------------------------------------------------


class _Stop:
    """In place of a session's lock: whoever enters stays."""

    def __init__(self) -> None:
        self.stopped: set[int] = set()
        self._never = threading.Lock()
        self._never.acquire()

    def __enter__(self) -> None:
        self.stopped.add(threading.get_ident())
        self._never.acquire()

    def __exit__(self, *_exception: Any) -> None:
        pass


def _works(frame: Any) -> bool:
    """Whether a thread is somewhere in torch or Stoker."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "stoker"):
            return True
        frame = frame.f_back
    return False


def _at_exit() -> None:
    open_ones = [session for session in list(_sessions) if not session.closed]
    trainers = {session.trained_by for session in open_ones} - {None, threading.get_ident()}
    if not trainers:
        return
    stop = _Stop()
    for session in open_ones:
        session.replace_locks(stop)
    _core.leave()
    idle = dict.fromkeys(trainers, 0)
    end = time.monotonic() + SECONDS_TO_STOP
    while idle and time.monotonic() < end:
        frames = sys._current_frames()
        gone = stop.stopped | set(_core.parked_threads())
        here = (each for each in idle if each in frames and each not in gone)
        left = [each for each in here if idle[each] < IDLE_LOOKS]
        idle = {each: 0 if _works(frames[each]) else idle[each] + 1 for each in left}
        time.sleep(0.01)


atexit.register(_at_exit)
