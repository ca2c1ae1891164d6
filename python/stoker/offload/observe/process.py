"""The threads of torch beside those of a run."""

from __future__ import annotations

import threading

import torch


def sleep_between_operators() -> None:
    """Lets torch's OpenMP threads sleep when they have nothing to do: kernels, checksums and the
    disk's thread need the cores.

    GNU OpenMP spins for milliseconds after each operator for as long as it counts no more threads
    than cores, and hardly at all beyond that. A thread with a parallel region of its own raises the
    count for as long as it lives. Ours lives as long as the process and only waits.
    """
    global _sleeper
    if _sleeper is None and torch.get_num_threads() > 1:
        _sleeper = threading.Thread(target=_have_a_region, name="stoker-openmp", daemon=True)
        _sleeper.start()


def _have_a_region() -> None:
    torch.ones(1 << 18, device="cpu").add_(1.0)
    threading.Event().wait()


_sleeper: threading.Thread | None = None
