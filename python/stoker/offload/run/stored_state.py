"""Weights and state of a run as they lie in its store."""

from __future__ import annotations

import torch

from stoker import _core
from stoker.offload.model.blocks import Param, like
from stoker.offload.run.step_record import StepRecord
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.planes import Planes


class StoredState:
    """That of one session. Called under its lock by the thread that runs the loop."""

    def __init__(
        self,
        planes: Planes,
        steps: Steps,
        record: StepRecord,
        by_tensor: dict[torch.Tensor, Param],
    ) -> None:
        self._planes, self._steps = planes, steps
        self._record, self._by_tensor = record, by_tensor

    def plane_slice(self, plane: str, param: Param, dtype: torch.dtype) -> torch.Tensor:
        self._steps.late.catch_up(param.unit.block)
        # a decided step is read before it is committed
        where = self._steps.read_point or self._planes.store
        raw = self._planes.read(
            where,
            f"{plane}/{param.unit.name}",
            param.offset * dtype.itemsize,
            param.numel * dtype.itemsize,
        )
        flat = (
            torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        )
        return torch.as_strided(flat, param.size, param.stride)

    def _moment(self, plane: str, param: Param) -> torch.Tensor:
        """m or v of a parameter, as float32."""
        self._steps.late.catch_up(param.unit.block)
        where, key, moments = (
            self._steps.read_point or self._planes.store,
            f"{plane}/{param.unit.name}",
            self._planes.algorithm.moments,
        )
        flat = torch.empty(param.numel, dtype=torch.float32, device="cpu")
        at = 0
        for run in moments.runs(param.unit.elements, param.offset, param.numel):
            data = self._planes.read(where, key, run.data_at, run.data_bytes)
            scales = self._planes.read(where, key, run.scales_at, run.scales_bytes)
            flat[at : at + run.count] = moments.decode(plane, run.count, data, scales)
            at += run.count
        return torch.as_strided(flat, param.size, param.stride)

    def full_state(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's state as the original optimizer keeps it (float32; sharded as the
        parameter is), plus `master` for bfloat16 weights."""
        param = self._by_tensor[tensor]
        count = self._record.updates.get(param, 0)
        moment = lambda plane: like(self._moment(plane, param), tensor)
        if self._planes.algorithm.name == "sgd":
            return (
                {"momentum_buffer": moment("m")}
                if self._planes.algorithm.momentum
                else {"momentum_buffer": None}
            )
        state = {
            "step": torch.tensor(float(count), device="cpu"),
            "exp_avg": moment("m"),
            "exp_avg_sq": moment("v"),
        }
        if param.unit.dtype == torch.bfloat16:
            state["master"] = like(self.master(tensor), tensor)
        return state

    def master(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact float32 value of a bfloat16 parameter, from its weight and remainder planes."""
        param = self._by_tensor[tensor]
        weight = self.plane_slice("w", param, torch.bfloat16)
        rest = self.plane_slice("r", param, torch.int16)
        out = torch.empty_strided(param.size, param.stride, dtype=torch.float32, device="cpu")
        _core.optim_join(weight.data_ptr(), rest.data_ptr(), out.data_ptr(), param.numel)
        return out
