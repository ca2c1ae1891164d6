"""Offloaded training: `offload` takes over a model and its optimizer, `gather` gives access to
weights in between."""

from stoker.offload.open import offload
from stoker.offload.run.access import gather
from stoker.offload.run.build import build
from stoker.offload.run.optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer", "build", "gather", "offload"]
