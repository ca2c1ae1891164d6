"""Gradients that hold NaN or infinity: a step that consumes one leaves NaN in the weights."""

from __future__ import annotations

import warnings
from typing import Callable

from stoker.errors import NotFinite
from stoker.offload.model.blocks import Unit

MODES = ("warn", "raise")


class Finiteness:
    """`on_nan`: "warn" says so once, "raise" refuses such steps. `step`: the last decided one."""

    def __init__(
        self,
        on_nan: str = "warn",
        step: Callable[[], int] = lambda: 0,
        event: Callable[..., None] = lambda what, **details: None,
    ) -> None:
        self.refuses = on_nan == "raise"
        self._step, self._event = step, event
        self._told = False

    def missed(self, units: list[Unit], late: bool = False) -> None:
        """These units' gradients are not finite. `late`: their step is decided, not committed."""
        step = self._step() + (not late)
        if self._told and not self.refuses:
            return
        self._event("not finite", step=step, block=units[0].block.name, units=len(units))
        found = f"step {step} has gradients with NaN or infinity in block {units[0].block.name}"
        if len(units) > 1:
            found += f" and {len(units) - 1} more groups of parameters"
        if self.refuses:
            raise NotFinite(
                f"{found}, and on_nan='raise' refuses such a step: nothing was committed. The "
                f"run is at step {step - 1}. Clear the gradients and go on with another batch"
            )
        self._told = True
        warnings.warn(
            f"{found}, which turns weights into NaN (this warning comes once). Stop the run and "
            f"go back to a snapshot. stoker.offload(on_nan='raise') refuses such a step before "
            f"it is committed",
            stacklevel=2,
        )
