"""Which run a step belongs to: a run that goes back is another one from there on
(docs/semantics.md, "Lineage")."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 16  # runs that were left: messages between ranks are short


def fresh_name() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Lineage:
    """The identity of a run, and of those that it left by going back: up to which step it shares
    theirs. None: the run was made before this was noted."""

    run: str | None = None
    left: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: dict[str, Any]) -> Lineage:
        """As `meta/model` has it."""
        return cls(
            model.get("run"), {run: int(step) for run, step in model.get("left", {}).items()}
        )

    def members(self) -> dict[str, Any]:
        """Of `meta/model`."""
        return {"run": self.run, **({"left": self.left} if self.left else {})}

    def back_to(self, there: Lineage, step: int, name: str) -> Lineage:
        """The lineage called `name` of a store that goes from this one to a step of `there`."""
        left = dict.fromkeys((*self.left, self.run), 0)
        for run, shared in there.left.items():
            left.pop(run, None)
            left[run] = min(shared, step)
        left.pop(there.run, None)
        left[there.run] = step
        left.pop(None, None)
        return Lineage(name, dict([*left.items()][-REMEMBERED:]))
