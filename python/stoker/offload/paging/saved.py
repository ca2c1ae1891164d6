"""Saved tensors under our hooks. torch checks neither versions nor histories of what hooks pack:
here is what it would do without them."""

from __future__ import annotations

import re

import torch


class Version:
    """Tells whether a saved tensor was changed in place since."""

    __slots__ = ("_counter", "_number", "_dtype", "_size", "_made_by")

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor) -> None:
        """`counter`: a tensor that shares the version counter."""
        self._counter, self._number = counter, tensor._version
        plain = type(tensor) is torch.Tensor and not tensor.is_nested
        self._dtype, self._size = (
            (tensor.type(), list(tensor.shape)) if plain else (type(tensor).__name__, "")
        )
        self._made_by = (
            (tensor.grad_fn.name(), tensor.output_nr) if tensor.grad_fn is not None else None
        )

    @staticmethod
    def without_bytes(tensor: torch.Tensor) -> Version:
        """One that does not hold the tensor's memory."""
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return Version(tensor, counter)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, sharing the version counter: a backward that changes what it saved is found out
        by the others that saved it."""
        shared = self._counter.detach()
        shared.data = tensor
        return shared

    def check(self) -> None:
        """RuntimeError, in torch's words, if it was."""
        now = self._counter._version
        if now == self._number:
            return
        made_by = (
            ", which is output {} of {},".format(
                self._made_by[1], re.sub(r"Backward[0-9]*$", "", self._made_by[0])
            )
            if self._made_by
            else ""
        )
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: [{self._dtype} {self._size}]{made_by} is at version {now}; expected"
            f" version {self._number} instead. Hint: enable anomaly detection to find the operation"
            " that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True,"
            " check_nan=False)."
        )


class Kept:
    """A saved tensor that stays in memory, without its history: that would hold the graph that
    holds this, for ever."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = Version(tensor, self._tensor)

    def get(self) -> torch.Tensor:
        self._version.check()
        return self._tensor
