"""The record that closes a step: everything of a run that is not a plane, as JSON (no pickle
anywhere).

Tensors (small: RNG states, buffers, scheduler tensors) become {"__tensor__": [dtype, shape,
base64]}; tuples, bytes and non-string dictionary keys are marked so that what is loaded equals what
was saved.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import torch

from stoker.errors import Corruption, InvalidArgument

# objects of a run's store: what the run is, and the record that closed its last step
META_MODEL, META_STATE = "meta/model", "meta/state"

try:
    import numpy
except ImportError:  # numpy is optional for torch, so for us
    numpy = None


def _inline(_where: str, _tensor: torch.Tensor) -> None:
    """No tensor goes elsewhere."""


def _no_part(number: int) -> Any:
    raise Corruption(
        f"this record refers to part {number}, which does not exist. The record is damaged or of "
        f"another kind: go back to a snapshot or a checkpoint"
    )


def encode(
    value: Any, where: str = "state", part: Callable[[str, torch.Tensor], int | None] = _inline
) -> Any:
    """A JSON-able form of `value`. InvalidArgument names the place of what cannot be recorded.
    `part`: takes a tensor (its place, itself) that goes elsewhere, and gives the number by which
    decode() asks for it; None if it is recorded here."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if (number := part(where, value)) is not None:
            return {"__part__": number}
        data = value.detach().cpu().contiguous()
        raw = data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return {
            "__tensor__": [
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                base64.b64encode(raw).decode(),
            ]
        }
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": base64.b64encode(bytes(value)).decode()}
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {
            "__ndarray__": encode(
                torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), where
            )
        }
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), where)
    if isinstance(value, tuple):
        return {"__tuple__": [encode(each, f"{where}[{i}]", part) for i, each in enumerate(value)]}
    if isinstance(value, list):
        return [encode(each, f"{where}[{i}]", part) for i, each in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(each, f"{where}.{key}", part) for key, each in value.items()}
        return {
            "__dict__": [
                [encode(key, where), encode(each, f"{where}.{key}", part)]
                for key, each in value.items()
            ]
        }
    raise InvalidArgument(
        f"{where} is a {type(value).__name__}, which a step's record cannot hold; attach objects"
        " whose state_dict() has numbers, strings and tensors"
    )


def decode(value: Any, part: Callable[[int], Any] = _no_part) -> Any:
    """What was encoded. `part` gives the tensors that went elsewhere, by their numbers."""
    if isinstance(value, list):
        return [decode(each, part) for each in value]
    if not isinstance(value, dict):
        return value
    if "__part__" in value:
        return part(value["__part__"])
    if "__tensor__" in value:
        dtype, shape, data = value["__tensor__"]
        raw = bytearray(base64.b64decode(data))
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, dtype))
            if raw
            else torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
        )
        return flat.reshape(shape).clone()
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__ndarray__" in value:
        return decode(value["__ndarray__"]).numpy()
    if "__tuple__" in value:
        return tuple(decode(each, part) for each in value["__tuple__"])
    if "__dict__" in value:
        return {decode(key): decode(each, part) for key, each in value["__dict__"]}
    return {key: decode(each, part) for key, each in value.items()}


def dump(value: Any) -> bytes:
    return json.dumps(encode(value), separators=(",", ":")).encode()


def load(data: bytes) -> Any:
    return decode(json.loads(data))


def rng_state() -> dict:
    """State of torch's (CPU and CUDA), Python's and numpy's global generators."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(state["numpy"])


def environment(device: torch.device) -> dict:
    """What bit-equality depends on besides the data; a resume under another one warns."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": where,
    }
