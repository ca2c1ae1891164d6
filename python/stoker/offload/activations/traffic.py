"""What a step moves of its activations, as the planner counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ActivationTraffic:
    """Activations that do not stay: bytes by block that go to the disk, the memory that holds the
    newest of them, and the blocks that are computed again."""

    saved: dict[int, int]
    memory: int
    again: frozenset[int] = frozenset()
