"""What a save takes: the model's tensors, the states of objects, the planes of an offloaded run.

collect() makes a Contents of it on the thread that trains. Small tensors and buffers are copied
then; large ones are referred to until their bytes have left.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from stoker.checkpoint import tensors
from stoker.checkpoint.manifest import Piece, check_name
from stoker.checkpoint.parts import (
    Bytes,
    Part,
    Plane,
    Slice,
    Source,
    Strided,
    Tensor,
    Whole,
    packed,
)
from stoker.checkpoint.tensors import Spec
from stoker.errors import InvalidArgument, Unsupported
from stoker.offload.storage import record
from stoker.offload.run.optimizer import OffloadedOptimizer
from stoker.offload.storage.record import META_MODEL, META_STATE

COPIED = 64 << 10  # bytes; smaller tensors are copied in save()
INLINE = 1 << 10  # bytes; smaller ones are in the manifest
PACK = "state-00000.pack"
_WRAPPERS = ("_orig_mod.", "module.")


@dataclass
class Contents:
    """The files of a checkpoint, and what the manifest says beside them."""

    files: list[Whole] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    state: list[Piece] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    offloaded: dict[str, Any] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    in_memory: bool = False  # whether the loop must leave tensors alone until they are copied


@dataclass(frozen=True)
class Elsewhere:
    """Weights that are not in memory, in place of a model: what each is, and who has its bytes."""

    tensors: dict[str, tuple[Spec, Source]]


@dataclass
class Run:
    """An offloaded optimizer's run: a snapshot of its store, with what its records say."""

    name: str
    session: Any
    snapshot: str
    read: threading.Event = field(default_factory=threading.Event)  # all that is needed of it
    hurry: threading.Event = field(default_factory=threading.Event)  # somebody waits for that

    @property
    def store(self) -> Any:
        return self.session.planes.store


def plain(name: str) -> str:
    """A tensor's name without what wrappers put before and into it."""
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
    return name.replace("._orig_mod.", ".")


class Packing:
    """Collects the parts of the pack."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Source]] = []
        self._said: list[tuple[str, str, list[int]]] = []

    def add(self, name: str, dtype: str, shape: list[int], size: int, source: Source) -> int:
        self._parts.append((size, source))
        self._said.append((name, dtype, shape))
        return len(self._said) - 1

    def done(self) -> tuple[list[Whole], list[Piece]]:
        if not self._parts:
            return [], []
        whole, places = packed(PACK, self._parts, tensors.ALIGN)
        pieces = [
            Piece(name, dtype, shape, PACK, at, size)
            for (name, dtype, shape), at, (size, _) in zip(self._said, places, self._parts)
        ]
        return [whole], pieces


def parts_in(value: Any) -> set[int]:
    """The numbers of the parts that a record refers to."""
    found: set[int] = set()
    record.decode(value, found.add)
    return found


def collect(
    model: nn.Module | Elsewhere | None,
    objects: dict[str, Any],
    runs: list[Run],
    full: bool,
    files: dict[str, bytes],
    plane_buffer: Any,
) -> Contents:
    """`objects`: whatever has a state_dict(), by name. `full`: every tensor is copied now."""
    contents, packing = Contents(), Packing()

    def hold(name: str, tensor: torch.Tensor) -> Source:
        if full or tensor.numel() * tensor.element_size() < COPIED:
            return Tensor(name, tensor.detach().clone())
        contents.in_memory = True
        return Tensor(name, tensor)

    def part(where: str, tensor: torch.Tensor) -> int | None:
        """Large tensors go to the pack."""
        if tensor.is_quantized or tensor.layout != torch.strided:
            raise InvalidArgument(
                f"{where} is a {tensor.layout} tensor, which a checkpoint cannot hold; give a"
                " dense one"
            )
        size = tensor.numel() * tensor.element_size()
        if size < INLINE:
            return None
        return packing.add(
            where, tensors.dtype_name(tensor.dtype), list(tensor.shape), size, hold(where, tensor)
        )

    by_name = {}
    for run in runs:
        given = run, packing, plane_buffer, plane_buffer
        contents.offloaded[run.name], weights = planes_of(*given)
        by_name.update(weights)
    if model is None and runs:
        model = runs[0].session.model  # a run's weights are a part of it
    if isinstance(model, Elsewhere):
        contents.files = _laid_out(*_renamed(model))
    elif model is not None:
        contents.files, contents.aliases = _model_files(model, hold, by_name)
        files = {**configs_of(model), **files}
    taken = {PACK, *(each.name for each in contents.files)}
    for name, data in files.items():
        check_name(name, taken)
        contents.files.append(of_bytes(name, data))
    for name, thing in objects.items():
        state = thing if isinstance(thing, dict) else thing.state_dict()
        contents.objects[name] = record.encode(state, name, part)
    whole, contents.state = packing.done()
    contents.files += whole
    return contents


def of_bytes(name: str, data: bytes) -> Whole:
    return Whole(name, len(data), [Part(0, len(data), Bytes(data))])


def _model_files(
    model: nn.Module, hold: Callable, away: dict[str, tuple[Spec, Source]]
) -> tuple[list[Whole], dict[str, str]]:
    """The safetensors files of a model. `away`: tensors that are in a store, by name."""
    specs: dict[str, Spec] = {}
    sources: dict[str, Source] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    buffers = {plain(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    for full_name, tensor in named_tensors(model, bool(away)).items():
        name = plain(full_name)
        if name in specs or name in aliases:
            raise InvalidArgument(
                f"two tensors of the model would be called {name}; unwrap the model before it is"
                " saved"
            )
        if hasattr(tensor, "placements"):
            raise Unsupported(
                f"{name} is sharded, but no parameter of the model is: give save() the model that"
                " fully_shard() made"
            )
        same = id(tensor) if away else place_of(tensor)
        if same in first:
            aliases[name] = first[same]
            continue
        first[same] = name
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad or name in buffers
        if name in away:
            specs[name], sources[name] = away[name]
        elif hasattr(tensor, "_stoker_session"):
            raise InvalidArgument(
                f"the values of {name} are in the store of stoker.offload(); give save() the"
                " optimizer that it made, too"
            )
        else:
            specs[name] = Spec(name, tensor.dtype, tuple(tensor.shape), trained)
            sources[name] = hold(name, tensor.clone() if name in buffers else tensor)
    return _laid_out(specs, sources), aliases


def _renamed(weights: Elsewhere) -> tuple[dict[str, Spec], dict[str, Source]]:
    specs: dict[str, Spec] = {}
    sources: dict[str, Source] = {}
    for full_name, (spec, source) in weights.tensors.items():
        if (name := plain(full_name)) in specs:
            raise InvalidArgument(f"two tensors would be called {name}; give them other names")
        specs[name], sources[name] = replace(spec, name=name), source
    return specs, sources


def _laid_out(specs: dict[str, Spec], sources: dict[str, Source]) -> list[Whole]:
    """The safetensors files of tensors, and their index."""
    layouts, index = tensors.lay_out(
        [[each for each in specs.values() if each.trained == trained] for trained in (True, False)]
    )
    files = [
        Whole(
            layout.name,
            layout.bytes,
            [
                Part(0, len(layout.header), Bytes(layout.header)),
                *(
                    Part(each.offset, each.spec.bytes, sources[each.spec.name])
                    for each in layout.tensors
                ),
            ],
            layout.frozen,
        )
        for layout in layouts
    ]
    if index is not None:
        files.append(of_bytes(tensors.INDEX, index))
    return files


def named_tensors(model: nn.Module, away: bool) -> dict[str, torch.Tensor]:
    """What the model's state_dict() holds, each the very tensor. Of a model whose weights are in a
    store, whose state_dict() would bring them all: its parameters and persistent buffers."""
    if not away:
        state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise InvalidArgument(
                    f"state_dict() of the model holds {name}, a {type(value).__name__}, but a"
                    " checkpoint takes only tensors from a model; keep it out of the model, and"
                    " pass it to save() in extra="
                )
        return dict(state)
    found = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def place_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory; one without memory is only itself."""
    if tensor.numel() == 0:
        return id(tensor)
    return (
        str(tensor.device),
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


def configs_of(model: nn.Module) -> dict[str, bytes]:
    """What transformers puts beside a model's weights."""
    model = getattr(model, "_orig_mod", model)
    found = {}
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        found["config.json"] = config.to_json_string().encode()
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        found["generation_config.json"] = generation.to_json_string().encode()
    return found


def run_of(name: str, optimizer: Any, snapshot: str) -> Run | None:
    if not isinstance(optimizer, OffloadedOptimizer):
        return None
    return Run(name, optimizer._session, snapshot)


class Takes(Protocol):
    """What collects the parts of a pack."""

    def add(self, name: str, dtype: str, shape: list[int], size: int, source: Source) -> int: ...


def planes_of(
    run: Run, packing: Takes, buffer: Any, weights_buffer: Any
) -> tuple[dict[str, Any], dict[str, tuple[Spec, Source]]]:
    """What the manifest says of a run, and where each of its weights is. `buffer`: what planes are
    read into; `weights_buffer`: weights, which another thread may read."""
    store, objects = run.store, {}
    model = record.load(store.read_bytes(META_MODEL, snapshot=run.snapshot))
    for each in store.list(snapshot=run.snapshot):
        key, size = each["key"], each["bytes"]
        if key in (META_MODEL, META_STATE):
            continue
        plane = Plane(store, key, run.snapshot, buffer)
        said = {"bytes": size, "chunk_bytes": each["chunk_bytes"]}
        if not key.startswith("w/"):
            said["part"] = packing.add(f"{run.name}:{key}", "uint8", [size], size, plane)
        objects[key] = said
    weights = {}
    for unit in model["blocks"]:
        dtype = getattr(torch, unit["dtype"])
        plane = Plane(store, f"w/{unit['name']}", run.snapshot, weights_buffer)
        for name, size, stride, offset in unit["params"]:
            source: Source = Slice(plane, offset * dtype.itemsize)
            if not row_major(size, stride):
                source = Strided(source, size, stride, dtype)
            spec = Spec(plain(name), dtype, tuple(size), unit["updated"])
            weights[spec.name] = (spec, source)
    state = store.read_bytes(META_STATE, snapshot=run.snapshot)
    said = {
        "model": record.encode(model),
        "state": record.encode(record.load(state)),
        "objects": objects,
    }
    return said, weights


def row_major(size: list[int], stride: list[int]) -> bool:
    expected = math.prod(size)
    for length, step in zip(size, stride):
        expected = expected // length if length else 0
        if length > 1 and step != expected:
            return False
    return True
