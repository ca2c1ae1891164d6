"""Stoker: storage for AI training. `offload` trains models larger than memory; see the README for
the whole of it."""

import fsspec

from stoker.checkpoint import Checkpoints, Keep
from stoker.offload import OffloadedOptimizer, build, gather, offload
from stoker.stores import open_store

__all__ = ["Checkpoints", "Keep", "OffloadedOptimizer", "build", "gather", "offload", "open_store"]
__version__ = "0.1.0"

fsspec.register_implementation("stoker", "stoker.filesystem.StokerFileSystem", clobber=True)
