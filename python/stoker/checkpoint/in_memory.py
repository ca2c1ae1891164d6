"""A run of stoker.offload() in a checkpoint, for a model and an optimizer in memory: exact masters
where the model is float32, and moments as float32. Of a sharded model each rank takes its part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker import _core
from stoker.checkpoint import planes, shards
from stoker.checkpoint.manifest import well_formed
from stoker.checkpoint.reading import Reader, Wanted, room, wanted_of
from stoker.checkpoint.rectangles import common
from stoker.checkpoint.state import plain
from stoker.errors import Mismatch
from stoker.offload.model.moments import moments_of
from stoker.offload.storage import record


@dataclass(frozen=True)
class _Held:
    """What a rank that saved had of a parameter. `offset`: in its unit's planes, in elements."""

    name: str
    share: dict[str, Any]
    unit: dict[str, Any]
    begin: list[int]
    size: list[int]
    stride: list[int]
    offset: int


class InMemory:
    """The one run of a checkpoint. Mismatch where it cannot go into these; then nothing was
    changed."""

    def __init__(self, reader: Reader, model: nn.Module | None, optimizer: Any) -> None:
        self._reader, self._optimizer = reader, optimizer
        if model is None:
            raise Mismatch(
                f"{reader.where} names the state of a run of stoker.offload() by its parameters;"
                " give restore() the model too"
            )
        run = planes.run_in(reader)
        with well_formed(reader.where, "a run"):
            self._shares = run.get("ranks", [run])
            self._models = [record.decode(each["model"]) for each in self._shares]
            self._state = record.decode(self._shares[0]["state"])
            self._groups = list(self._state["groups"])
            # the states of what opt.attach() was given, by name
            self.attached: dict[str, Any] = dict(self._state.get("attached", {}))
            self._algorithm = self._models[0]["algorithm"]
            self._moments = moments_of(self._models[0].get("moments", "exact"))
        self._params: dict[str, nn.Parameter] = {}
        self._names: dict[nn.Parameter, str] = {}  # of tied ones the first
        for name, param in model.named_parameters(remove_duplicate=False):
            self._params[plain(name)] = param
            self._names.setdefault(param, plain(name))
        self._check()

    def _check(self) -> None:
        where, optimizer = self._reader.where, self._optimizer
        given = type(optimizer).__name__.lower()
        if not isinstance(optimizer, torch.optim.Optimizer) or given != self._algorithm:
            raise Mismatch(
                f"{where} holds a run of {self._algorithm}, and the optimizer is"
                f" {type(optimizer).__name__}; give one of the same kind"
            )
        if any(param not in self._names for param in self._all_params()):
            raise Mismatch(
                "the optimizer holds parameters that the model lacks; give the model that it"
                " updates"
            )
        groups = self._models[0].get("groups")
        ours = [
            [self._names[p] for p in group["params"] if p.requires_grad]
            for group in optimizer.param_groups
            if group["params"]  # a run records no empty ones
        ]
        same = groups is None or ours == [list(map(plain, each)) for each in groups]
        if not same or len(self._groups) != len(ours):
            raise Mismatch(
                f"{where}: the run has other parameter groups than the optimizer; make it with the"
                " same groups in the same order"
            )

    def _all_params(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def masters(self, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the model's tensors that are float32 where the checkpoint has bfloat16. fill()
        gives them the exact masters; what was not trained is widened, which is exact too."""
        specs = {name: placed.spec for name, (_, placed) in self._reader.tensors().items()}
        return {
            name: tensor
            for name, tensor in targets.items()
            if tensor.dtype == torch.float32
            and name in specs
            and specs[name].dtype == torch.bfloat16
            and specs[name].shape == tuple(tensor.shape)
        }

    def _held(self) -> Iterator[_Held]:
        """Rank by rank."""
        for share, model in zip(self._shares, self._models):
            for unit in model["blocks"]:
                for name, size, stride, offset in unit["params"]:
                    places = share.get("places")
                    begin = places[name][1] if places else [0] * len(size)
                    yield _Held(plain(name), share, unit, begin, size, stride, offset)

    def fill(self, masters: dict[str, torch.Tensor]) -> None:
        """The masters, and the optimizer's state."""
        with well_formed(self._reader.where, "a run"):
            state = self._state_dict()
            self._fill_masters(masters)
        self._optimizer.load_state_dict(state)

    @torch.no_grad()
    def _fill_masters(self, into: dict[str, torch.Tensor]) -> None:
        pieces: dict[str, list[_Held]] = {}
        for held in self._held():
            if held.unit["updated"]:
                pieces.setdefault(held.name, []).append(held)
        for name, tensor in into.items():
            file, placed = self._reader.tensors()[name]
            part, ours = shards.part_of(name, tensor), shards.local(tensor)
            shape, raw = placed.spec.shape, room(part.size, torch.bfloat16)
            wanted = wanted_of(placed.offset, shape, [0] * len(shape), part, raw)
            self._reader.copy(file, list(wanted))
            ours.copy_(raw)
            for held in pieces.get(name, []):
                for first, size, rest in self._shared(held, "r", part):
                    weight, rest = _cut(raw, part, first, size).contiguous(), rest.contiguous()
                    out = room(size, torch.float32)
                    _core.optim_join(
                        weight.data_ptr(), rest.data_ptr(), out.data_ptr(), out.numel()
                    )
                    _cut(ours, part, first, size).copy_(out)

    def _state_dict(self) -> dict[str, Any]:
        """As torch's optimizer takes it."""
        sgd = self._algorithm == "sgd"
        kinds = {"momentum_buffer": "m"} if sgd else {"exp_avg": "m", "exp_avg_sq": "v"}
        if sgd and not self._models[0]["momentum"]:
            kinds = {}
        updates = {plain(name): count for name, count in self._state["updates"].items()}
        of_param: dict[str, dict[str, Any]] = {}
        for held in self._held():
            if not updates.get(held.name) or not held.unit["updated"]:
                continue
            param = self._params[held.name]
            part = shards.part_of(held.name, param)
            entry = of_param.setdefault(
                held.name, {} if sgd else {"step": _zeros(()) + updates[held.name]}
            )
            for key, plane in kinds.items():
                if key not in entry:
                    entry[key] = _zeros(part.size)
                for first, size, values in self._shared(held, plane, part):
                    _cut(entry[key], part, first, size).copy_(values)
        numbers = {param: i for i, param in enumerate(self._all_params())}
        state = {
            numbers[param]: {
                key: shards.distributed(value, param)
                if key in kinds and shards.is_sharded(param)
                else value
                for key, value in of_param[name].items()
            }
            for param, name in self._names.items()
            if name in of_param and param in numbers
        }
        said, groups = iter(self._groups), []
        for group in self._optimizer.param_groups:
            settings = next(said) if group["params"] else group
            groups.append({**settings, "params": [numbers[param] for param in group["params"]]})
        return {"state": state, "param_groups": groups}

    def _shared(
        self, held: _Held, plane: str, part: shards.Rectangle
    ) -> Iterator[tuple[list[int], list[int], torch.Tensor]]:
        """Begin, size and values of what a plane has of the part; nothing where it has nothing."""
        shared = common(held.begin, held.size, part.begin, part.size)
        if shared is None:
            return
        first, size = shared
        at = sum((f - b) * s for f, b, s in zip(first, held.begin, held.stride))
        end = at + sum((n - 1) * s for n, s in zip(size, held.stride)) + 1
        if plane == "r":
            flat = self._read(held, plane, 2 * (held.offset + at), 2 * (end - at))
            yield first, size, torch.as_strided(flat.view(torch.int16), size, held.stride)
        else:
            begin = at // (self._moments.group or 1) * (self._moments.group or 1)
            flat = self._moment(held, plane, held.offset + begin, end - begin)
            yield first, size, torch.as_strided(flat, size, held.stride, at - begin)

    def _read(self, held: _Held, plane: str, at: int, size: int) -> torch.Tensor:
        number = held.share["objects"][f"{plane}/{held.unit['name']}"]["part"]
        piece = self._reader.manifest.state[number]
        found = room((size,), torch.uint8)
        self._reader.copy(piece.file, [Wanted(piece.offset + at, size, found.data_ptr())])
        return found

    def _moment(self, held: _Held, plane: str, offset: int, count: int) -> torch.Tensor:
        flat, at = torch.empty(count, dtype=torch.float32, device="cpu"), 0
        for run in self._moments.runs(held.unit["elements"], offset, count):
            read = lambda at, size: bytearray(self._read(held, plane, at, size).numpy().tobytes())
            data, scales = read(run.data_at, run.data_bytes), read(run.scales_at, run.scales_bytes)
            flat[at : at + run.count] = self._moments.decode(plane, run.count, data, scales)
            at += run.count
        return flat


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Whatever torch's defaults are."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _cut(
    ours: torch.Tensor, part: shards.Rectangle, first: list[int], size: list[int]
) -> torch.Tensor:
    """The rectangle from `first` on of a tensor whose `part` is `ours`."""
    return ours[tuple(slice(f - b, f - b + n) for f, b, n in zip(first, part.begin, size))]
