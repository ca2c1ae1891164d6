"""A Loader as a torch.utils.data.DataLoader, for tools that take nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .loader import Loader


def as_dataloader(loader: Loader) -> torch.utils.data.DataLoader:
    """The batches of `loader`, which has epochs, as a DataLoader that reads no batch it skips.

        trainer.get_train_dataloader = lambda: as_dataloader(loader)  # transformers.Trainer

    Its `batch_sampler` numbers the batches of an epoch, so a tool that skips batches after a resume
    skips numbers. `batch_sampler.set_epoch()` begins that epoch; else each pass is the next one. It
    has this rank's part of each batch: `accelerator.prepare` must not get it, and takes `loader`
    itself as it is.
    """
    return torch.utils.data.DataLoader(
        _Batches(loader), batch_sampler=_Numbers(loader), collate_fn=_only
    )


def _only(batches: list[Any]) -> Any:
    return batches[0]


class _Batches(torch.utils.data.Dataset):
    """The batches by epoch and number."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Samples an epoch, of all ranks."""
        return self._loader.samples

    def __getitem__(self, which: tuple[int, int]) -> Any:
        self._loader.go_to(*which)
        return next(iter(self._loader))


class _Numbers:
    """Epoch and number of each batch of one epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._epoch = loader, None
        # The Trainer looks here for what has set_epoch(), as if a shard stood before it.
        self.batch_sampler = self
        self.batch_size, self.drop_last = loader.batch, False

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._loader.epoch if self._epoch is None else self._epoch
        self._epoch = None
        for number in range(len(self)):
            yield [(epoch, number)]
        self._loader.set_epoch(epoch + 1)
