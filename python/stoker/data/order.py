"""Which sample stands at which position: pure functions of a few integers, in C++ (`Sequence`).

Positions count through all epochs: position p of n samples is position p % n of epoch p // n. So a
resume needs one integer, and any rank can compute any part of any epoch.
"""

from __future__ import annotations

from stoker._core import Mixture, Permutation, Sequence

__all__ = ["Mixture", "Permutation", "Sequence", "sample_at"]


def sample_at(position: int, count: int, seed: int) -> int:
    """The sample at a position of all epochs, each `count` samples in an order of its own."""
    epoch, within = divmod(position, count)
    return Permutation(count, seed, epoch).sample(within)
