"""Weights and state of a run as they lie in its store: read, and replaced in one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stoker import _core
from stoker.errors import Unsupported
from stoker.offload.model.blocks import Param, like, local
from stoker.offload.storage.planes import put

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


class StoredState:
    """That of one session. Called under its lock by the thread that runs the loop."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def plane_slice(self, plane: str, param: Param, dtype: torch.dtype) -> torch.Tensor:
        self._session.steps.late.catch_up(param.unit.block)
        # a decided step is read before it is committed
        where = self._session.steps.read_point or self._session.planes.store
        raw = self._session.planes.read(
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
        self._session.steps.late.catch_up(param.unit.block)
        where, key, moments = (
            self._session.steps.read_point or self._session.planes.store,
            f"{plane}/{param.unit.name}",
            self._session.algorithm.moments,
        )
        flat = torch.empty(param.numel, dtype=torch.float32, device="cpu")
        at = 0
        for run in moments.runs(param.unit.elements, param.offset, param.numel):
            data = self._session.planes.read(where, key, run.data_at, run.data_bytes)
            scales = self._session.planes.read(where, key, run.scales_at, run.scales_bytes)
            flat[at : at + run.count] = moments.decode(plane, run.count, data, scales)
            at += run.count
        return torch.as_strided(flat, param.size, param.stride)

    def full_state(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's state as the original optimizer keeps it (float32; sharded as the
        parameter is), plus `master` for bfloat16 weights."""
        param = self._session.by_tensor[tensor]
        count = self._session.record.updates.get(param, 0)
        moment = lambda plane: like(self._moment(plane, param), tensor)
        if self._session.algorithm.name == "sgd":
            return (
                {"momentum_buffer": moment("m")}
                if self._session.algorithm.momentum
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
        param = self._session.by_tensor[tensor]
        weight = self.plane_slice("w", param, torch.bfloat16)
        rest = self.plane_slice("r", param, torch.int16)
        out = torch.empty_strided(param.size, param.stride, dtype=torch.float32, device="cpu")
        _core.optim_join(weight.data_ptr(), rest.data_ptr(), out.data_ptr(), param.numel)
        return out

    def load_full_state(self, entries: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Writes an ordinary optimizer's state into the planes, as one durable commit. An empty
        entry is that of a parameter before its first update; one that has no entry keeps what it
        has."""
        if self._session.agreement is not None and not self._session.agreement.opening:
            raise Unsupported(
                "a sharded run cannot load other optimizer state once it has begun. Call the"
                " optimizer's load_state_dict() before stoker.offload(); it rounds the state to"
                " the weights' type. Or resume the run from its store, which is exact"
            )
        self._session.steps.abandon()  # what was speculated consumed the old state
        self._session.flush()
        txn = self._session.planes.store.begin()
        kinds = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
        for tensor, entry in entries.items():
            param = self._session.by_tensor.get(tensor)
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
                self.put_slice(txn, "w", param, weight)
                self.put_slice(txn, "r", param, rest)
            if "step" in entry:
                self._session.record.updates[param] = int(entry["step"])
            elif self._session.algorithm.name == "sgd":
                self._session.record.updates[param] = max(
                    1, self._session.record.updates.get(param, 0)
                )
            self._session.planes.session.invalidate(param.unit.session_id)
        for key, data in self._session.record.objects().items():
            put(txn, key, data)
        self._session.buffers.stage(txn)
        try:
            txn.commit("durable").wait()
        except BaseException:
            self._session.buffers.forget()
            raise
        self._session.weights.refresh(
            {
                self._session.by_tensor[tensor].unit.block
                for tensor, entry in entries.items()
                if entry and tensor in self._session.by_tensor
            }
        )

    def _forget_updates(self, txn, param: Param) -> None:
        """The parameter's state is as before its first update; its weight, master included,
        stays."""
        if not self._session.record.updates.pop(param, 0):
            return  # its moments are zeros already
        for plane in self._session.algorithm.planes:
            self._put_moment(txn, plane, param, torch.zeros((), device="cpu"))
        self._session.planes.session.invalidate(param.unit.session_id)

    def _put_moment(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        key, moments = f"{plane}/{param.unit.name}", self._session.algorithm.moments
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
            self._session.planes.write(txn, key, run.data_at, data)
            self._session.planes.write(txn, key, run.scales_at, scales)
            at += run.count

    def put_slice(self, txn, plane: str, param: Param, value: torch.Tensor) -> None:
        self._session.planes.write(
            txn,
            f"{plane}/{param.unit.name}",
            param.offset * value.dtype.itemsize,
            laid_out(param, value),
        )

    def writing_weights(self) -> WeightWriting:
        """Begins to replace weights, as one durable commit."""
        if self._session.agreement is not None:
            raise Unsupported(
                "a sharded run cannot load other weights once it has begun; load them into the "
                "model before stoker.offload()"
            )
        self._session.steps.abandon()  # what was speculated consumed the old weights
        self._session.flush()
        return WeightWriting(self._session)

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

    def __init__(self, session: Session, txn: Any = None) -> None:
        self._session = session
        self._txn = txn or session.planes.store.begin()
        self._params: set[Param] = set()

    def stage(self, values: dict[Param, torch.Tensor]) -> None:
        """The float32 master of an element of a bfloat16 weight becomes the element itself. Those
        that have the bits that are there already are not
        written: a checkpoint that is loaded into the run that it was made of changes nothing, and
        leaves the masters as exact as they were.
        """
        session = self._session
        session.shown.wrote(values)
        read = session.planes.read
        for param, value in values.items():
            value = value.detach().to(param.unit.dtype)
            raw = laid_out(param, value)
            old = read(
                self._txn, f"w/{param.unit.name}", param.offset * value.dtype.itemsize, len(raw)
            )
            if raw == old:
                continue
            session.stored.put_slice(self._txn, "w", param, value)
            if param.unit.updated and param.unit.dtype == torch.bfloat16:
                rest = read(self._txn, f"r/{param.unit.name}", param.offset * 2, len(raw))
                words = lambda data: torch.frombuffer(bytearray(data), dtype=torch.int16)
                kept = words(rest)
                kept[words(raw) != words(old)] = 0
                session.planes.write(
                    self._txn, f"r/{param.unit.name}", param.offset * 2, kept.numpy().tobytes()
                )
            self._params.add(param)

    def commit(self) -> None:
        if not self._params:
            self._txn.abandon()
            return
        self._txn.commit("durable").wait()
        self.forget_state()
        self._session.weights.refresh({param.unit.block for param in self._params})

    def forget_state(self) -> None:
        """Of bfloat16 weights the rest of the masters changed as well, which may have been read
        ahead."""
        for unit in {param.unit for param in self._params}:
            if unit.updated:
                self._session.planes.session.invalidate(unit.session_id)
