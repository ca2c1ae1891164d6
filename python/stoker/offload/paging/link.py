"""Link: copies between host memory and the device that the model computes on, beside its work.

The library itself links nothing of CUDA; all that is needed of it is in torch. A copy gives an
event. Host memory that a copy reads or writes may be used again only after `wait(event)`, or once
`done(event)`. Device memory that a copy wrote may be read by what the calling thread computes from
`join()` on.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stoker.errors import InvalidArgument, StokerError

if TYPE_CHECKING:
    from stoker._core import Arena


class Link(Protocol):
    """Used by one thread at a time, under the session's lock."""

    device: torch.device

    def pin(self, arena: Arena) -> None: ...  # host memory that copies use, until unpin()
    def unpin(self) -> None: ...

    # uint8 on the device; its first content comes by upload()
    def empty(self, size: int) -> torch.Tensor: ...

    # starts image.copy_(host); the event
    def upload(self, host: torch.Tensor, image: torch.Tensor) -> Any: ...

    # starts host.copy_(source), once source is computed; the event
    def download(self, source: torch.Tensor, host: torch.Tensor) -> Any: ...

    # what is computed from now on may read `image`
    def join(self, image: torch.Tensor, uploaded: Any) -> None: ...
    def mark(self) -> Any: ...  # an event: the device has done what was asked of it until now
    def done(self, event: Any) -> bool: ...
    def wait(self, event: Any) -> None: ...


def open_link(device: torch.device) -> Link | None:
    """The way to `device`; None for the CPU, which computes in host memory. InvalidArgument for one
    that torch cannot use."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise InvalidArgument(f"device {device} is not supported: a model computes on cpu or cuda")
    if not torch.cuda.is_available():
        raise InvalidArgument(
            f"torch sees no GPU here, so device={str(device)!r} cannot be used; leave it out to"
            " compute on the CPU"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise InvalidArgument(
            f"torch sees {torch.cuda.device_count()} GPUs, so there is no {device}"
        )
    return CudaLink(device)


class HostLink:
    """Both sides are host memory (the shards of a model on the CPU): a copy is done when it was
    asked for."""

    device = torch.device("cpu")

    def pin(self, arena: Arena) -> None: ...

    def unpin(self) -> None: ...

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, image: torch.Tensor) -> None:
        image.copy_(host)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(source)

    def join(self, image: torch.Tensor, uploaded: Any) -> None: ...

    def mark(self) -> None: ...

    def done(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None: ...


class CudaLink:
    """One stream up and one down, so that neither waits for the other nor for the computing
    stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._up = torch.cuda.Stream(self.device)
        self._down = torch.cuda.Stream(self.device)
        self._pinned: list[Arena] = []  # they must not be unmapped before they are unpinned

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.unpin()

    def pin(self, arena: Arena) -> None:
        """Only pinned memory lets copies run beside the computation, at the full rate."""
        with torch.cuda.device(self.device):
            status = int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.size, 0))
        if status:
            # torch would find the error once more, at whatever it does next
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise StokerError(
                f"{arena.size >> 20} MiB of host memory could not be pinned for {self.device} "
                f"(CUDA error {status}). Give a smaller dram, or raise the limit that `ulimit "
                f"-l` shows"
            )
        self._pinned.append(arena)

    def unpin(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self.device)
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().address)

    def empty(self, size: int) -> torch.Tensor:
        # memory of this stream: the upload need not wait for the computing one
        with torch.cuda.stream(self._up):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def upload(self, host: torch.Tensor, image: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._up):
            image.copy_(host, non_blocking=True)
            return self._event(self._up)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            host.copy_(source, non_blocking=True)
            source.record_stream(self._down)
            return self._event(self._down)

    def join(self, image: torch.Tensor, uploaded: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(uploaded)
        # its memory is not given to another upload before the work queued until its release is done
        image.record_stream(stream)

    def mark(self) -> torch.cuda.Event:
        return self._event(torch.cuda.current_stream(self.device))

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event(torch.cuda.Event(blocking=True))  # who waits for it sleeps

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()
