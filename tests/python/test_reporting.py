"""report_to(): the ledger's rows as scalars."""

from __future__ import annotations

import pytest

import stoker
from checkpoint_run import made, train
from stoker import errors
from stoker.integrations.reporting import report_to


class Board:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.told: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.setdefault(step, {})[name] = value


class Run:
    """As a run of wandb."""

    def __init__(self) -> None:
        self.axes: list[tuple[str, str]] = []
        self.told: list[dict[str, float]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.told.append(values)


def test_each_row_becomes_scalars(tmp_path):
    model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB")
    board, run = Board(), Run()
    report_to(opt.ledger, board)
    report_to(opt.ledger, run)
    for step in range(2):
        train(model, opt, step)
    row = opt.ledger.last
    opt.close()
    assert list(board.told) == [1, 2]
    last = board.told[2]
    for kind in ("read_bytes", "written_bytes", "stall_seconds"):
        for name, value in row[kind].items():
            assert last[f"stoker/{kind}/{name}"] == value
    assert last["stoker/seconds"] == row["seconds"] and "stoker/policy" not in last
    assert run.axes == [("stoker/*", "stoker/step")]
    assert run.told[1] == {**last, "stoker/step": 2}
    with pytest.raises(errors.InvalidArgument, match="knows no list"):
        report_to(opt.ledger, [])


def test_tensorboard_has_them(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, opt = stoker.offload(*made(), store=tmp_path / "run", dram="64MiB")
    with SummaryWriter(tmp_path / "board") as writer:
        report_to(opt.ledger, writer)
        train(model, opt, 0)
        opt.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (scalar,) = events.Scalars("stoker/seconds")
    assert scalar.step == 1 and scalar.value > 0
