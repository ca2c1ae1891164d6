"""Checkpoints: folders of plain files with a manifest, saved beside training."""

from stoker.checkpoint.checkpoints import Checkpoints, Restored
from stoker.checkpoint.handle import Handle
from stoker.checkpoint.parts import Edited
from stoker.checkpoint.retention import Keep

__all__ = ["Checkpoints", "Edited", "Handle", "Keep", "Restored"]
