"""Ranks: the processes that train one sharded model together, and how they hear of each other.

Every rank holds shards of the parameters (torch's fully_shard) and keeps their state in a store of
its own. What they must agree on goes through exchange(): one small message from each to each, at
points of the program that all of them pass in the same order. The messages have a process group of
their own, over gloo, which serves hosts whatever computes the gradients.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import secrets
import sys
import threading
from typing import Any, Callable, TypeVar

import torch
from torch import nn

from stoker import errors
from stoker.errors import InvalidArgument, Mismatch, RankLost, StokerError

log = logging.getLogger("stoker")
MESSAGE_BYTES = 4096
PATIENCE = 60.0  # seconds that a rank waits before it says so
EVERY_RANK = (
    "stoker.offload(), step(), flush(), state_dict(), close() and clip_grad_norm_() must be called"
    " by every rank, with the same arguments"
)
GO_ON = (
    "end all processes and start them again with resume=True: the run goes on behind the last step"
    " that all of them have committed"
)
T = TypeVar("T")


class Ranks:
    """This process among those that share the model. Used by the thread that trains."""

    def __init__(
        self, group: Any, rank: int, world: int, rule: str = EVERY_RANK, advice: str = GO_ON
    ) -> None:
        """`rule`: what every rank must call. `advice`: what to do when one is lost."""
        self._group, self._rule, self._advice = group, rule, advice
        self.rank, self.world = rank, world
        self._told: BaseException | None = None  # the error that all ranks know of
        self._passed: str | None = None  # the last point, if this rank heard all there and no error
        self._lost: str | None = None

    @staticmethod
    def of(model: nn.Module) -> Ranks | None:
        """Those that fully_shard() gave the model to; None for a model that one process has
        whole."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        sharded = sharded_modules(model)
        if fsdp and any(
            isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
        ):
            raise InvalidArgument(
                "FullyShardedDataParallel keeps its parameters in flat buffers; shard the model"
                " with torch.distributed.fsdp.fully_shard() instead"
            )
        for module in sharded:
            module.reshard()
        params = dict(model.named_parameters())
        whole = next(
            (name for name, param in params.items() if not hasattr(param, "device_mesh")), None
        )
        if len(params) and whole is None and not sharded:
            raise InvalidArgument(
                "the parameters are distributed tensors that fully_shard() did not make; apply"
                " torch.distributed.fsdp.fully_shard() before stoker.offload()"
            )
        if not sharded:
            return None
        if whole is not None:
            raise InvalidArgument(
                f"parameter {whole} is not sharded while others are; apply fully_shard() to the"
                " whole model, without ignored_params"
            )
        for name, param in params.items():
            mesh, placements = param.device_mesh, param.placements
            if (
                mesh.ndim != 1
                or not placements[0].is_shard()
                or mesh != next(iter(params.values())).device_mesh
            ):
                raise InvalidArgument(
                    f"parameter {name} is placed as {placements} over a mesh of {mesh.ndim} "
                    f"dimensions. Stoker offloads parameters that one mesh of one dimension "
                    f"shards (no HSDP, no tensor parallelism)"
                )
            if param.is_meta:
                raise InvalidArgument(
                    f"parameter {name} is on the meta device and has no values; give the sharded"
                    " model its weights before stoker.offload()"
                )
        return Ranks.among(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh.device_type)

    @staticmethod
    def among(
        theirs: Any,
        rank: int,
        world: int,
        device_type: str,
        rule: str = EVERY_RANK,
        advice: str = GO_ON,
    ) -> Ranks:
        """A group over the ranks of the process group `theirs`. Not by new_group(): its names are
        those of the attempt before where torchrun has started the processes again, whose addresses
        the store still knows."""
        distributed = torch.distributed
        name = torch.tensor(secrets.randbits(62), device=device_type)
        try:
            with _Waiting(rank, "meet", rule):
                distributed.broadcast(name, group=theirs, group_src=0)
                store = distributed.PrefixStore(
                    f"stoker/{name.item():x}", distributed.distributed_c10d._get_default_store()
                )
                limit = _timeout(theirs, device_type)
                group = distributed.ProcessGroupGloo(store, rank, world, limit)
            ranks = Ranks(group, rank, world, rule, advice)
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank} cannot reach all other ranks ({str(error).splitlines()[0]}); {rule};"
                " start all processes again"
            ) from error
        # one that raises and lets go before all are connected would be lost to those that still
        # connect
        ranks.exchange("meet")
        return ranks

    def place(self, store: str) -> str:
        """Where this rank keeps its part: a folder of its own in each of the store's folders."""
        if store.startswith("memory:") or "(" in store:
            raise InvalidArgument(
                f"a sharded model is kept in folders, one a rank, so store={store!r} cannot be"
                " used; give a folder, or several separated by commas"
            )
        scheme, folders = (
            "local:" if store.startswith("local:") else "",
            store.removeprefix("local:").split(","),
        )
        for folder in folders:
            if os.path.exists(os.path.join(folder, "stoker.volume")):
                raise Mismatch(
                    f"the store in {folder} was made by one process with the whole model; give a"
                    " sharded model another store"
                )
        return scheme + ",".join(os.path.join(folder, f"rank-{self.rank}") for folder in folders)

    # -- messages ----------------------------------------------------------------------------------

    def exchange(
        self, point: str, error: BaseException | None = None, facts: Any = None
    ) -> list[Any]:
        """What each rank tells at this point, in their order. Returns when all have told; raises on
        all of them if one tells an error: where it happened that error, elsewhere one of the same
        class that names the rank."""
        self._passed = None
        message = self._message(point, error, facts)
        try:
            return self._hear(point, error, message)
        except BaseException as raised:
            # Ctrl-C: the others may have heard this rank, which has not heard them
            if raised is not self._told and not isinstance(raised, RankLost):
                self.leave(f"rank {self.rank} was interrupted at {point!r}")
            raise

    def _hear(self, point: str, error: BaseException | None, message: bytes) -> list[Any]:
        told = [self._parse(each) for each in self._gather(point, message)]
        if any(each["point"] != point for each in told):
            self._lost = (
                "the ranks are at different points: "
                + ", ".join(f"rank {rank} at {_place(each)}" for rank, each in enumerate(told))
                + f"; {self._rule}"
            )
            raise self._gone()
        failed = [(rank, *each["error"]) for rank, each in enumerate(told) if each["error"]]
        if failed:
            self._told = error if error is not None else _of_rank(*failed[0])
            raise self._told
        self._passed = point
        return [each["facts"] for each in told]

    def tell(self, point: str, error: BaseException) -> None:
        """The others wait, or will, at `point` for what cannot come; unless it was they who told
        the error, or have gone on from there."""
        if self._passed == point:
            self.leave(f"rank {self.rank} was interrupted behind {point!r}")
        elif error is not self._told and not isinstance(error, RankLost):
            with contextlib.suppress(StokerError, type(error)):
                self.exchange(point, error)

    def guard(self, point: str, make: Callable[[], T]) -> T:
        """make(), of whose error the others hear."""
        try:
            return make()
        except BaseException as error:
            self.tell(point, error)
            raise

    def leave(self, why: str) -> None:
        """This rank does not know its place among the others any more, or is done: it meets them at
        no point from here on. They hear of it at their next: its connections are closed."""
        if self._lost is None:
            self._lost = why
        self._group = None

    def check(self) -> None:
        """RankLost if this rank meets the others no more."""
        if self._lost is not None:
            raise self._gone()

    def numbers(self, point: str, number: float) -> list[float]:
        """One number of each rank."""
        return [float.fromhex(each) for each in self.exchange(point, facts=number.hex())]

    @staticmethod
    def _message(point: str, error: BaseException | None, facts: Any) -> bytes:
        text = (str(error) or type(error).__name__) if error is not None else ""
        while True:
            message = json.dumps(
                {
                    "point": point,
                    "error": [type(error).__name__, text] if error is not None else None,
                    "facts": facts,
                }
            ).encode()
            if len(message) <= MESSAGE_BYTES:
                return message.ljust(MESSAGE_BYTES)
            if not text:
                raise StokerError(
                    f"what a rank has to tell the others at {point!r} takes {len(message)} bytes,"
                    f" but a message has {MESSAGE_BYTES}; report this"
                )
            text = text[: len(text) // 2]

    @staticmethod
    def _parse(message: torch.Tensor) -> dict[str, Any]:
        return json.loads(message.numpy().tobytes())

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """A contiguous tensor in host memory goes to rank `to`, which receives it with this tag."""
        self._move(lambda: self._group.send([tensor], to, tag))

    def receive(self, into: torch.Tensor, source: int, tag: int) -> None:
        self._move(lambda: self._group.recv([into], source, tag))

    def _move(self, begin: Callable[[], Any]) -> None:
        self.check()
        try:
            begin().wait()
        except RuntimeError as error:
            self.leave(
                f"rank {self.rank} does not hear from all other ranks any more"
                f" ({str(error).splitlines()[0]}); {self._rule}"
            )
            raise self._gone() from error

    def _gather(self, point: str, message: bytes) -> list[torch.Tensor]:
        self.check()
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            with _Waiting(self.rank, point, self._rule):
                self._group.allgather([all_of_them], [mine]).wait()
        except RuntimeError as error:  # gloo: a connection was closed, or nothing came in time
            self.leave(
                f"rank {self.rank} does not hear from all other ranks any more"
                f" ({str(error).splitlines()[0]}), while it waited at {point!r}; {self._rule}"
            )
            raise self._gone() from error
        return all_of_them

    def _gone(self) -> RankLost:
        return RankLost(f"{self._lost}; {self._advice}")


class _Waiting(threading.Timer):
    """Says in the log where this rank waits, if it waits long. One that calls what others do not
    would hang without a word until the limit of the process group."""

    def __init__(self, rank: int, point: str, rule: str) -> None:
        said = f"rank {rank} has waited {PATIENCE:g} s for the other ranks at {point!r}; {rule}"
        super().__init__(PATIENCE, log.warning, (said,))
        self.daemon = True

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.cancel()


def sharded_modules(model: nn.Module) -> list:
    """Those that fully_shard() was called with."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (
        [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
        if fsdp
        else []
    )


def telling(error: Exception) -> StokerError:
    """What ranks can tell each other."""
    if isinstance(error, StokerError):
        return error
    told = StokerError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _place(told: dict[str, Any]) -> str:
    """The point of a rank, and why it is there if it failed."""
    if told["error"] is None:
        return repr(told["point"])
    name, text = told["error"]
    return f"{told['point']!r}, where it raised {name} ({text})"


def _of_rank(rank: int, name: str, text: str) -> StokerError:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, StokerError)):
        kind, text = StokerError, f"{name}: {text}"
    return kind(f"rank {rank}: {text}")


def _timeout(group: Any, device_type: str) -> datetime.timedelta:
    """That of the group which the gradients go through, where it tells."""
    with contextlib.suppress(Exception):
        return group._get_backend(torch.device(device_type)).options._timeout
    return torch.distributed.distributed_c10d.default_pg_timeout
