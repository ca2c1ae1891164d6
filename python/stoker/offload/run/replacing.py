"""Weights and state that the loop gives, on their way into the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker import _core
from stoker.errors import Unsupported
from stoker.offload.model.blocks import Param, local
from stoker.offload.paging.shown import Shown
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.run.step_record import StepRecord
from stoker.offload.run.weights import Weights
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.planes import Planes, put


class Replacing:
    """Of one session: each call is one durable commit. Called under its lock by the thread that
    runs the loop."""

    def __init__(
        self,
        planes: Planes,
        shown: Shown,
        weights: Weights,
        steps: Steps,
        record: StepRecord,
        by_tensor: dict[torch.Tensor, Param],
        agreement: Agreement | None,
        flush: Callable[[], None],
    ) -> None:
        """`flush` makes the newest step durable."""
        self._planes, self._shown, self._weights, self._steps = planes, shown, weights, steps
        self._record, self._by_tensor, self._agreement = record, by_tensor, agreement
        self._flush = flush

    def load_full_state(self, entries: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Writes an ordinary optimizer's state into the planes, as one durable commit. An empty
        entry is that of a parameter before its first update; one that has no entry keeps what it
        has."""
        if self._agreement is not None and not self._agreement.opening:
            raise Unsupported(
                "a sharded run cannot load other optimizer state once it has begun. Call the"
                " optimizer's load_state_dict() before stoker.offload(); it rounds the state to"
                " the weights' type. Or resume the run from its store, which is exact"
            )
        self._steps.abandon()  # what was speculated consumed the old state
        self._flush()
        txn = self._planes.store.begin()
        kinds = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
        for tensor, entry in entries.items():
            param = self._by_tensor.get(tensor)
            if param is None or not param.unit.updated:
                continue
            if not entry:
                self._forget_updates(txn, param)
                continue
            for key, plane in kinds.items():
                if entry.get(key) is not None:
                    self._put_moment(txn, plane, param, local(entry[key]))
            if entry.get("master") is not None and param.unit.dtype == torch.bfloat16:
                master = local(entry["master"]).detach().to(torch.float32)
                master = torch.empty_strided(
                    param.size, param.stride, dtype=torch.float32, device="cpu"
                ).copy_(master)
                weight = torch.empty_strided(
                    param.size, param.stride, dtype=torch.bfloat16, device="cpu"
                )
                rest = torch.empty_strided(
                    param.size, param.stride, dtype=torch.int16, device="cpu"
                )
                _core.optim_split(
                    master.data_ptr(), weight.data_ptr(), rest.data_ptr(), param.numel
                )
                self._put_slice(txn, "w", param, weight)
                self._put_slice(txn, "r", param, rest)
            if "step" in entry:
                self._record.updates[param] = int(entry["step"])
            elif self._planes.algorithm.name == "sgd":
                self._record.updates[param] = max(1, self._record.updates.get(param, 0))
            self._planes.session.invalidate(param.unit.session_id)
        for key, data in self._record.objects().items():
            put(txn, key, data)
        self._record.buffers.stage(txn)
        try:
            txn.commit("durable").wait()
        except BaseException:
            self._record.buffers.forget()
            raise
        self._weights.refresh(
            {
                self._by_tensor[tensor].unit.block
                for tensor, entry in entries.items()
                if entry and tensor in self._by_tensor
            }
        )

    def _put_slice(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        self._planes.write(
            txn,
            f"{plane}/{param.unit.name}",
            param.offset * value.dtype.itemsize,
            laid_out(param, value),
        )

    def _forget_updates(self, txn, param: Param) -> None:
        """The parameter's state is as before its first update; its weight, master included,
        stays."""
        if not self._record.updates.pop(param, 0):
            return  # its moments are zeros already
        for plane in self._planes.algorithm.planes:
            self._put_moment(txn, plane, param, torch.zeros((), device="cpu"))
        self._planes.session.invalidate(param.unit.session_id)

    def _put_moment(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        key, moments = f"{plane}/{param.unit.name}", self._planes.algorithm.moments
        flat = torch.as_strided(
            torch.empty_strided(param.size, param.stride, dtype=torch.float32, device="cpu").copy_(
                value.detach()
            ),
            (param.numel,),
            (1,),
        )
        at = 0
        for run in moments.runs(param.unit.elements, param.offset, param.numel):
            data, scales = moments.encode(plane, flat[at : at + run.count])
            self._planes.write(txn, key, run.data_at, data)
            self._planes.write(txn, key, run.scales_at, scales)
            at += run.count

    def writing_weights(self) -> WeightWriting:
        """Begins to replace weights, as one durable commit."""
        if self._agreement is not None:
            raise Unsupported(
                "a sharded run cannot load other weights once it has begun; load them into the "
                "model before stoker.offload()"
            )
        self._steps.abandon()  # what was speculated consumed the old weights
        self._flush()
        return self.writing()

    def writing(self, txn: Any = None) -> WeightWriting:
        """Begins to replace weights beside what trains. `txn`: of the step that they belong to."""
        return WeightWriting(self._planes, self._shown, self._weights, txn)

    def write_weights(self, values: dict[Param, torch.Tensor]) -> None:
        writing = self.writing_weights()
        writing.stage(values)
        writing.commit()


def laid_out(param: Param, value: torch.Tensor) -> bytes:
    """The bytes of `value` in the order that the parameter's planes have."""
    data = torch.empty_strided(param.size, param.stride, dtype=value.dtype, device="cpu").copy_(
        value
    )
    return torch.as_strided(data, (param.numel,), (1,)).view(torch.uint8).numpy().tobytes()


class WeightWriting:
    """New weights on their way into the store: all of them or, if it is dropped before commit(),
    none. `txn`: of the step that they belong to."""

    def __init__(self, planes: Planes, shown: Shown, weights: Weights, txn: Any = None) -> None:
        self._planes, self._shown, self._weights = planes, shown, weights
        self._txn = txn or planes.store.begin()
        self._params: set[Param] = set()

    def stage(self, values: dict[Param, torch.Tensor]) -> None:
        """The float32 master of an element of a bfloat16 weight becomes the element itself. Those
        that have the bits that are there already are not written: a checkpoint that is loaded into
        the run that it was made of changes nothing, and leaves the masters as exact as they were.
        """
        self._shown.wrote(values)
        read, write = self._planes.read, self._planes.write
        for param, value in values.items():
            raw = laid_out(param, value.detach().to(param.unit.dtype))
            key, at = f"w/{param.unit.name}", param.offset * param.unit.dtype.itemsize
            old = read(self._txn, key, at, len(raw))
            if raw == old:
                continue
            write(self._txn, key, at, raw)
            if param.unit.updated and param.unit.dtype == torch.bfloat16:
                rest = read(self._txn, f"r/{param.unit.name}", param.offset * 2, len(raw))
                words = lambda data: torch.frombuffer(bytearray(data), dtype=torch.int16)
                kept = words(rest)
                kept[words(raw) != words(old)] = 0
                write(self._txn, f"r/{param.unit.name}", param.offset * 2, kept.numpy().tobytes())
            self._params.add(param)

    def commit(self) -> None:
        if not self._params:
            self._txn.abandon()
            return
        self._txn.commit("durable").wait()
        self.forget_state()
        self._weights.refresh({param.unit.block for param in self._params})

    def forget_state(self) -> None:
        """Of bfloat16 weights the rest of the masters changed as well, which may have been read
        ahead."""
        for unit in {param.unit for param in self._params}:
            if unit.updated:
                self._planes.session.invalidate(unit.session_id)
