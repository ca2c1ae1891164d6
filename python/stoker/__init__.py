"""Stoker: storage for AI training. `offload` trains models larger than memory; see the README for the whole of it."""

from stoker.offload import OffloadedOptimizer, build, gather, offload

__all__ = ["OffloadedOptimizer", "build", "gather", "offload"]
__version__ = "0.1.0"
