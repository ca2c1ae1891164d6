"""The ledger's rows as scalars, for TensorBoard and Weights & Biases.

report_to(opt.ledger, SummaryWriter("runs/1"))
report_to(opt.ledger, wandb.init(project="mine"))
"""

from __future__ import annotations

from typing import Any

from stoker.errors import InvalidArgument
from stoker.offload.observe.ledger import Ledger

PREFIX = "stoker"


def report_to(ledger: Ledger, sink: Any) -> None:
    """Gives every row from here on to `sink`: a SummaryWriter of TensorBoard, or a run of wandb.
    A scalar is called after its place in the row: stoker/stall_seconds/weights."""
    if hasattr(sink, "add_scalar"):

        def tell(row: dict[str, Any]) -> None:
            for name, value in scalars(row).items():
                sink.add_scalar(name, value, row["step"])

    elif hasattr(sink, "define_metric") and hasattr(sink, "log"):
        # rows have an axis of their own: the run's other charts may count otherwise
        sink.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

        def tell(row: dict[str, Any]) -> None:
            sink.log({**scalars(row), f"{PREFIX}/step": row["step"]})

    else:
        raise InvalidArgument(
            f"report_to() knows no {type(sink).__name__}; give a SummaryWriter of TensorBoard or a"
            " run of wandb"
        )
    ledger.on_step(tell)


def scalars(row: dict[str, Any], where: str = PREFIX) -> dict[str, float]:
    """The numbers in a row by their places."""
    found: dict[str, float] = {}
    for key, value in row.items():
        name = f"{where}/{key}"
        if isinstance(value, dict):
            found.update(scalars(value, name))
        elif isinstance(value, (int, float)) and name != f"{PREFIX}/step":
            found[name] = float(value)
    return found


__all__ = ["report_to", "scalars"]
