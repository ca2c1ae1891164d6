"""What a batch without samples is: where the rest of an epoch is shared out, a rank may have none.

Every rank gets the same number of batches, so that what ranks do together stays in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

NONE = object()  # in place of a batch that nothing can be collated of


class Shape:
    """Of the batches of one loader, as `default_collate` makes them."""

    def __init__(self) -> None:
        self._like: Any = NONE

    def of(self, batch: Any) -> Any:
        """The batch; for NONE one without samples, shaped as those before it ([] where there were
        none)."""
        if batch is not NONE:
            if self._like is NONE:
                self._like = without_samples(batch)
            return batch
        return [] if self._like is NONE else without_samples(self._like)


def without_samples(batch: Any) -> Any:
    """Tensors have a first dimension of 0, lists of text are empty. It keeps no memory of it."""
    if isinstance(batch, torch.Tensor):
        return batch.new_empty((0, *batch.shape[1:]))
    if isinstance(batch, Mapping):
        return {key: without_samples(each) for key, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(without_samples, batch))
    if isinstance(batch, list | tuple):
        if all(isinstance(each, str | bytes) for each in batch):
            return type(batch)()
        return type(batch)(without_samples(each) for each in batch)
    return batch
