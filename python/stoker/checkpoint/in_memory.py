"""A run of stoker.offload() in a checkpoint, for a model and an optimizer in memory: exact masters
where the model is float32, and moments as float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stoker import _core
from stoker.checkpoint import planes, shards
from stoker.checkpoint.reading import Reader, Wanted
from stoker.checkpoint.state import plain
from stoker.errors import Corruption, Mismatch, StokerError, Unsupported
from stoker.offload.model.moments import moments_of
from stoker.offload.storage import record

_BROKEN = (TypeError, ValueError, AttributeError, LookupError)


class InMemory:
    """The one run of a checkpoint. Mismatch or Unsupported where it cannot go into these; then
    nothing was changed."""

    def __init__(self, reader: Reader, model: nn.Module | None, optimizer: Any) -> None:
        self._reader, self._optimizer = reader, optimizer
        if model is None:
            raise Mismatch(
                f"{reader.where} names the state of a run of stoker.offload() by its parameters;"
                " give restore() the model too"
            )
        run = planes.run_in(reader)
        try:
            self._shares = run.get("ranks", [run])
            self._models = [record.decode(each["model"]) for each in self._shares]
            self._state = record.decode(self._shares[0]["state"])
            self._groups = list(self._state["groups"])
            # the states of what opt.attach() was given, by name
            self.attached: dict[str, Any] = dict(self._state.get("attached", {}))
            self._algorithm = self._models[0]["algorithm"]
            self._moments = moments_of(self._models[0].get("moments", "exact"))
        except _BROKEN as error:
            raise self._breaks(error) from error
        self._params: dict[str, nn.Parameter] = {}
        self._names: dict[nn.Parameter, str] = {}  # of tied ones the first
        for name, param in model.named_parameters(remove_duplicate=False):
            self._params[plain(name)] = param
            self._names.setdefault(param, plain(name))
        self._check()

    def _breaks(self, error: Exception) -> StokerError:
        if isinstance(error, StokerError):
            return error
        return Corruption(f"{self._reader.where}: the manifest breaks the format ({error!r})")

    def _check(self) -> None:
        where, optimizer = self._reader.where, self._optimizer
        if any(map(shards.is_sharded, self._names)):
            raise Unsupported(
                f"{where} holds a run of stoker.offload(); a sharded model takes its state back by"
                " stoker.offload(..., restore=ckpt) only"
            )
        given = type(optimizer).__name__.lower()
        if not isinstance(optimizer, torch.optim.Optimizer) or given != self._algorithm:
            raise Mismatch(
                f"{where} holds a run of {self._algorithm}, and the optimizer is"
                f" {type(optimizer).__name__}; give one of the same kind"
            )
        if any(param not in self._names for param in self._all_params()):
            raise Mismatch(
                "the optimizer holds parameters that the model lacks; give its own model"
            )
        groups = self._models[0].get("groups")
        ours = [
            [self._names[p] for p in group["params"] if p.requires_grad]
            for group in optimizer.param_groups
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

    def _held(self) -> Iterator[tuple[str, dict, dict, list, list]]:
        """(name, share, unit, the parameter's entry, where its part begins), rank by rank."""
        for share, model in zip(self._shares, self._models):
            for unit in model["blocks"]:
                for entry in unit["params"]:
                    places = share.get("places")
                    begin = places[entry[0]][1] if places else [0] * len(entry[1])
                    yield plain(entry[0]), share, unit, entry, begin

    def _plane(self, share: dict, key: str, at: int, size: int) -> torch.Tensor:
        piece = self._reader.manifest.state[share["objects"][key]["part"]]
        held = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu")
        self._reader.copy(piece.file, [Wanted(piece.offset + at, size, held.data_ptr())])
        return held[:size]

    def fill(self, masters: dict[str, torch.Tensor]) -> None:
        """The masters, and the optimizer's state."""
        try:
            state = self._state_dict()
            self._fill_masters(masters)
        except _BROKEN as error:
            raise self._breaks(error) from error
        self._optimizer.load_state_dict(state)

    @torch.no_grad()
    def _fill_masters(self, into: dict[str, torch.Tensor]) -> None:
        parts: dict[str, list[tuple]] = {}
        for name, *held in self._held():
            if held[1]["updated"]:
                parts.setdefault(name, []).append(held)
        for name, tensor in into.items():
            file, placed = self._reader.tensors()[name]
            raw = torch.empty(placed.spec.shape, dtype=torch.bfloat16, device="cpu")
            self._reader.copy(file, [Wanted(placed.offset, placed.spec.bytes, raw.data_ptr())])
            tensor.copy_(raw)
            for share, unit, (_, size, stride, offset), begin in parts.get(name, []):
                if not (count := math.prod(size)):
                    continue
                made = lambda dtype: torch.empty_strided(size, stride, dtype=dtype, device="cpu")
                weight, out = (
                    made(torch.bfloat16).copy_(_cut(raw, begin, size)),
                    made(torch.float32),
                )
                rest = self._plane(share, f"r/{unit['name']}", 2 * offset, 2 * count)
                _core.optim_join(weight.data_ptr(), rest.data_ptr(), out.data_ptr(), count)
                _cut(tensor, begin, size).copy_(out)

    def _state_dict(self) -> dict[str, Any]:
        """As torch's optimizer takes it."""
        sgd = self._algorithm == "sgd"
        kinds = {"momentum_buffer": "m"} if sgd else {"exp_avg": "m", "exp_avg_sq": "v"}
        if sgd and not self._models[0]["momentum"]:
            kinds = {}
        updates = {plain(name): count for name, count in self._state["updates"].items()}
        of_param: dict[str, dict[str, Any]] = {}
        for name, share, unit, (_, size, stride, offset), begin in self._held():
            if not updates.get(name) or not unit["updated"]:
                continue
            param = self._params[name]
            entry = of_param.setdefault(name, {} if sgd else {"step": _zeros(()) + updates[name]})
            for key, plane in kinds.items():
                whole = entry[key] = entry[key] if key in entry else _zeros(param.shape)
                flat = self._moment(share, unit, plane, offset, math.prod(size))
                _cut(whole, begin, size).copy_(torch.as_strided(flat, size, stride))
        numbers = {param: i for i, param in enumerate(self._all_params())}
        state = {
            numbers[param]: of_param[name]
            for param, name in self._names.items()
            if name in of_param and param in numbers
        }
        groups = [
            {**said, "params": [numbers[param] for param in group["params"]]}
            for said, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _moment(self, share: dict, unit: dict, plane: str, offset: int, count: int) -> torch.Tensor:
        flat, at = torch.empty(count, dtype=torch.float32, device="cpu"), 0
        key = f"{plane}/{unit['name']}"
        for run in self._moments.runs(unit["elements"], offset, count):
            read = lambda at, size: bytearray(self._plane(share, key, at, size).numpy().tobytes())
            data, scales = read(run.data_at, run.data_bytes), read(run.scales_at, run.scales_bytes)
            flat[at : at + run.count] = self._moments.decode(plane, run.count, data, scales)
            at += run.count
        return flat


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Whatever torch's defaults are."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _cut(whole: torch.Tensor, begin: list[int], size: list[int]) -> torch.Tensor:
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, size))]
