"""The ranks that save and restore one sharded model together: messages, and tensors on their way.

Ranks meet at points of their program (offload/ranks/ranks.py): at each, every rank hears what every
other tells. There are two lines: `front` for the threads that train, `back` for those that save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.checkpoint import shards
from stoker.checkpoint.parts import Brought, Edited, Source, memory
from stoker.checkpoint.tensors import Spec
from stoker.errors import Mismatch, StokerError
from stoker.offload.ranks.ranks import Ranks

_RULE = "save() and restore() of stoker.Checkpoints must be called by every rank"
_ADVICE = (
    "start all processes again and call restore(): it finds the newest checkpoint that all ranks"
    " have finished"
)


class Together:
    """This process among the ranks of torch's default process group."""

    def __init__(self) -> None:
        distributed = torch.distributed
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        who = (distributed.group.WORLD, distributed.get_rank(), distributed.get_world_size())
        self.front = Ranks.among(*who, device, _RULE, _ADVICE)
        self.back = Ranks.among(*who, device, _RULE, _ADVICE)
        self.rank, self.world = who[1], who[2]

    @staticmethod
    def needed(model: nn.Module | None) -> bool:
        return isinstance(model, nn.Module) and any(map(shards.is_sharded, model.parameters()))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(
        self, step: int, due: bool, seconds: float | None, failed: bool, name: str
    ) -> tuple[bool, float | None, bool, str]:
        """Whether to save, the shortest time that a SIGTERM leaves, whether the last save failed
        anywhere, and the name of the attempt."""
        mine = {"step": step, "due": due, "left": seconds, "failed": failed, "name": name}
        told = self.front.exchange("save", facts=mine)
        if len({each["step"] for each in told}) > 1:
            steps = ", ".join(str(each["step"]) for each in told)
            raise Mismatch(f"the ranks save different steps ({steps}); give all of them the same")
        left = [each["left"] for each in told if each["left"] is not None]
        failed = any(each["failed"] for each in told)
        return told[0]["due"], min(left, default=None), failed, told[0]["name"]

    def bring(self, what: Any) -> list[Any]:
        """To rank 0: what each rank has (JSON), in their order. The others get nothing."""
        data = json.dumps(what, separators=(",", ":")).encode()
        sizes = self.back.exchange("written", facts=len(data))
        if not self.leads:
            self.back.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, 0)
            return []
        found = [json.loads(data)]
        for rank, size in list(enumerate(sizes))[1:]:
            into = torch.empty(size, dtype=torch.uint8)
            self.back.receive(into, rank, 0)
            found.append(json.loads(into.numpy().tobytes()))
        return found


@dataclass(frozen=True)
class Away:
    """What this rank holds of a tensor, in the store of an offloaded run. `spec`: of that part."""

    spec: Spec
    source: Source

    def bring(self) -> torch.Tensor:
        held = torch.empty(self.spec.shape, dtype=self.spec.dtype, device="cpu")
        if self.spec.bytes:
            self.source.read(0, self.spec.bytes, held.data_ptr())
        return held


@dataclass(frozen=True)
class Weight:
    """A tensor of the model, and the rank that writes it. `division`: None where each rank has all
    of it."""

    spec: Spec
    owner: int
    tensor: torch.Tensor | Away  # what this rank holds
    division: shards.Division | None


class Passing:
    """Brings the parts of each sharded tensor to its owner, one tensor after the other, in an order
    that all ranks know. Its thread works beside the one that writes."""

    def __init__(self, together: Together, weights: list[Weight]) -> None:
        """`weights`: in that order."""
        self._together = together
        self._weights = [each for each in weights if each.division and each.spec.bytes]
        self._versions = [_version(each) for each in self._weights]
        self._arrived: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)
        self._unwanted = threading.Event()
        self._error: BaseException | None = None
        self._left_out: set[str] = set()
        self._thread: threading.Thread | None = None

    @property
    def plan(self) -> str:
        """Which tensors come from where, in which order: a digest."""
        said = [
            (each.spec.name, each.owner, each.spec.trained, str(each.division))
            for each in self._weights
        ]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def start(self, names: set[str] | None = None) -> None:
        """Passes those of these names; None: all that are not left out. Once finish() has returned
        it may be called again."""
        chosen = [
            (tag, weight, version)
            for tag, (weight, version) in enumerate(zip(self._weights, self._versions), 1)
            if weight.spec.name not in self._left_out
            and (names is None or weight.spec.name in names)
        ]
        self._thread = threading.Thread(
            target=self._run, args=(chosen,), name="stoker gather", daemon=True
        )
        self._thread.start()

    def leave_out(self, names: set[str]) -> None:
        """Nobody needs these any more. Said by all ranks alike."""
        self._left_out |= names

    def next(self) -> torch.Tensor:
        """The next tensor of this owner, whole, in host memory."""
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=0.2)
            if not self._thread.is_alive() and self._arrived.empty():
                raise self._error or StokerError(
                    "the thread that gathers tensors from the ranks ended before all arrived;"
                    " save again"
                )

    def give_up(self) -> None:
        """Nobody writes here any more. The others still get what they need of this rank."""
        self._unwanted.set()

    def finish(self) -> None:
        """Until all ranks have what they need of this one. Raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, chosen: list[tuple[int, Weight, int]]) -> None:
        edited: BaseException | None = None
        try:
            for tag, weight, version in chosen:
                self._pass(tag, weight)
                if _version(weight) != version and edited is None:
                    edited = Edited(
                        f"{weight.spec.name} was changed while it was being saved; change tensors"
                        ' between handle.wait("copied") and the next save, or pass staging="full"'
                    )
            self._error = self._error or edited
        except BaseException as error:
            self._error = error
            # else the others would wait for what this rank does not send, or does not take
            self._together.back.leave(f"rank {self._together.rank} cannot pass tensors: {error}")

    def _mine(self, weight: Weight) -> torch.Tensor:
        """What this rank has of it. Zeros where that cannot be read: the others wait for it, and
        hear of the error once all has passed."""
        if not isinstance(weight.tensor, Away):
            return weight.tensor
        try:
            return weight.tensor.bring()
        except StokerError as error:
            self._error = self._error or error
            spec = weight.tensor.spec
            return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu")

    def _pass(self, tag: int, weight: Weight) -> None:
        rank, line = self._together.rank, self._together.back
        parts = {r: part for r, part in weight.division.parts.items() if not part.empty}
        mine = self._mine(weight) if rank in parts else None
        if weight.owner != rank:
            if mine is not None:
                line.send(_bytes(mine.cpu().contiguous()), weight.owner, tag)
            return
        whole = torch.empty(weight.spec.shape, dtype=weight.spec.dtype, device="cpu")
        for source, part in sorted(parts.items()):
            place = whole[tuple(slice(b, b + n) for b, n in zip(part.begin, part.size))]
            if source == rank:
                place.copy_(mine)
            elif place.is_contiguous():
                line.receive(_bytes(place), source, tag)
            else:
                held = torch.empty(part.size, dtype=whole.dtype, device="cpu")
                line.receive(_bytes(held), source, tag)
                place.copy_(held)
        while not self._unwanted.is_set():
            with contextlib.suppress(queue.Full):
                self._arrived.put(whole, timeout=0.2)
                return


class Arriving(Brought):
    """The bytes of a tensor that is gathered when they are wanted. They are read in order."""

    def __init__(self, passing: Passing, size: int) -> None:
        self._passing, self._size = passing, size
        self._whole: torch.Tensor | None = None

    def read(self, at: int, size: int, address: int) -> None:
        if self._whole is None:
            self._whole = _bytes(self._passing.next())
        memory(address, size).copy_(self._whole[at : at + size])
        if at + size == self._size:
            self._whole = None


def _version(weight: Weight) -> int:
    """torch's count of writes to it. What is in a store at a snapshot does not change."""
    return 0 if isinstance(weight.tensor, Away) else weight.tensor._version


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
