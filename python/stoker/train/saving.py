"""Checkpoints of a run: saved beside its steps, and once more when a signal ends it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints
from ..checkpoint.commits import composition_of
from ..errors import AlreadyExists, StokerError
from .progress import say
from .settings import Settings, human_bytes

CHECKPOINTS_FOLDER = "checkpoints"
KEEP = 2
STAGING = 16 << 20  # bytes on their way; the state itself does not pass through memory
GRACE = 25.0  # seconds for a save when a signal ends the run; schedulers give 30 and more


class Saving:
    """The checkpoints of a run, or none where the settings or the store say so. `checkpoints`: for
    stoker.offload()."""

    def __init__(self, settings: Settings, out: Path, resume: bool) -> None:
        self.checkpoints: Checkpoints | None = None
        self._every = settings.checkpoint_every
        self._own = out / CHECKPOINTS_FOLDER
        if self._every == "off":
            return
        if "coded(" in settings.store:
            say(f"checkpoints  off: {settings.store} cannot keep a step while it is copied")
            return
        store = settings.checkpoints or composition_of(self._own.resolve())
        every = "auto" if self._every == "auto" else int(self._every)
        self._made = not self._own.exists()
        self.checkpoints = Checkpoints(store, every=every, keep=KEEP, staging=STAGING)
        self.where = store
        if not resume and next(self.checkpoints.readers(), None) is not None:
            self.close()
            raise AlreadyExists(
                f"{store} holds checkpoints of another run: continue that run with --resume and "
                f"its own --out, or give another --checkpoints"
            )

    def describe(self, state_bytes: int) -> str:
        often = "as often as pays" if self._every == "auto" else f"every {self._every} steps"
        if self.checkpoints is None:
            return "checkpoints  off"
        size = human_bytes(state_bytes)
        return (
            f"checkpoints  {often} to {self.where}, the newest {KEEP}: {size} each, as much again"
            f" in the store while one is copied, and {human_bytes(self.checkpoints.memory_bytes)}"
            " of memory beside the cap"
        )

    def stepped(self, opt: Any) -> list[str]:
        """Saves if one is due; what went wrong with it or the one before. Training goes on."""
        if self.checkpoints is None:
            return []
        try:
            self.checkpoints.save(opt.step_count, optimizer=opt)
        except StokerError as error:
            return [f"no checkpoint: {error}"]
        return []

    def ends(self, opt: Any) -> None:
        """A signal ends the run: saves the last step if that takes no longer than GRACE."""
        if self.checkpoints is None or not opt.step_count:
            return
        try:
            self.checkpoints.save_within(GRACE, opt.step_count, optimizer=opt)
        except (StokerError, TimeoutError) as error:
            say(f"no checkpoint of step {opt.step_count}: {error}")
        else:
            say(f"checkpoint   of step {opt.step_count} in {self.where}")

    def for_ledger(self) -> dict[str, Any]:
        """What a step's row says of the checkpoints so far."""
        return {"checkpoints": dict(self.costs())} if self.checkpoints is not None else {}

    def costs(self) -> dict[str, Any]:
        """For summary.json."""
        return vars(self.checkpoints.costs) if self.checkpoints is not None else {}

    def close(self) -> None:
        """Waits for the save under way. What goes wrong with it was logged."""
        if self.checkpoints is not None:
            with contextlib.suppress(StokerError):
                self.checkpoints.close()

    def forget(self) -> None:
        """Leaves nothing of a run that came to nothing."""
        if self.checkpoints is not None and self._made:
            shutil.rmtree(self._own, ignore_errors=True)
