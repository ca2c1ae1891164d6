"""The one gate of a process: step() of torch's optimizers waits until saves have read the state."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook


class Copying(Protocol):
    def wait_copied(self) -> None:
        """Until no save needs the state in memory any more."""


# Those in this process. Every optimizer of torch waits for them before it changes anything, also
# one that no save was given: it may change the same model.
_all: weakref.WeakSet[Copying] = weakref.WeakSet()


def add(copying: Copying) -> None:
    _all.add(copying)


def _before_a_step(*_: object) -> None:
    for each in list(_all):
        each.wait_copied()


register_optimizer_step_pre_hook(_before_a_step)
