"""Counters: what a session has moved, waited for and tried since it began."""

from __future__ import annotations

from typing import Any

from stoker.offload.activations.activations import Activations
from stoker.offload.gradients.gradients import Gradients
from stoker.offload.observe.ledger import Waits
from stoker.offload.steps.steps import Steps
from stoker.offload.storage.planes import Planes


class Counters:
    """Called, they give the sums of now: the ledger takes differences of them."""

    def __init__(
        self,
        planes: Planes,
        gradients: Gradients,
        steps: Steps,
        activations: Activations | None,
        waiting: Waits,
    ) -> None:
        self._planes, self._gradients, self._steps = planes, gradients, steps
        self._activations, self._waiting = activations, waiting

    def __call__(self) -> dict[str, Any]:
        core = self._planes.session.counters()
        activations = self._activations
        moved = (
            (activations.read_bytes, activations.written_bytes)
            if activations is not None
            else (0, 0)
        )
        spilled = self._gradients.moved()
        return {
            "read_bytes": {**core["read_bytes"], "gradients": spilled[0], "activations": moved[0]},
            "written_bytes": {
                **core["written_bytes"],
                "gradients": spilled[1],
                "activations": moved[1],
            },
            "stall_seconds": dict(self._waiting.seconds),
            "kept": self._steps.kept,
            "redone": self._steps.redone,
            "wasted": self._steps.wasted,
            "dram_bytes_peak": self._planes.runtime.core.budget_peak,
        }
