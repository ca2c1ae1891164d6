"""Tells the caches that sources are read through what a loader will read."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence as Several
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import StokerError
from .stored import Stored

# A cache keeps some tens of bytes for each sample that it follows.
MOST_SAMPLES = 1 << 22
_numbers = itertools.count()


class Following:
    """The plan of one loader, with each store that has a cache.

    All samples are used once an epoch, whatever their order: no position is worth another, and
    what is cached stays. A mixture uses some sources more often, so its cache goes by positions,
    if all of its sources are in one store.
    """

    def __init__(self, sources: Several[Any], seed: int, weights: Several[float] | None) -> None:
        self._name = f"loader {os.getpid()}.{next(_numbers)}"
        self._seed = seed % (1 << 64)
        self._weights = weights
        self._stores: list[tuple[Any, list[Stored]]] = []
        self._begun = False
        self.note = ""  # why a cache is told nothing
        cached = [
            each
            for each in sources
            if isinstance(each, Stored) and each.store.info()["cache"] is not None
        ]
        if cached and sum(len(each) for each in sources) > MOST_SAMPLES:
            self.note = (
                f"the cache is not told what comes, as there are more than {MOST_SAMPLES:,} "
                "samples: it goes by what was read before"
            )
            return
        for each in cached:
            for store, of in self._stores:
                if store is each.store:
                    of.append(each)
                    break
            else:
                self._stores.append((each.store, [each]))
        whole = len(self._stores) == 1 and len(self._stores[0][1]) == len(sources)
        if not whole:
            self._weights = None
        if self._stores:
            stores = [store for store, _ in self._stores]
            weakref.finalize(self, _end, stores, self._name, os.getpid())

    def begin(self, position: int) -> None:
        """The sample at this position is read next."""
        if self._begun:
            return
        self._begun = True
        for store, sources in self._stores:
            keys: list[str] = []
            runs, counts = [], []
            for source in sources:
                plan = source.table.plan()
                plan[:, 0] += np.uint64(len(keys))
                keys += source.table.keys
                runs.append(plan)
                counts.append(int(plan[:, 3].sum()))
            mixed = self._weights is not None and counts == [len(each) for each in sources]
            store.follow(
                np.concatenate(runs),
                keys=keys,
                seed=self._seed,
                counts=counts if mixed else [],
                weights=[float(each) for each in self._weights] if mixed else [],
                position=position,
                name=self._name,
            )

    def jumped(self) -> None:
        """What is read next is not what would have followed."""
        self._begun = False

    def end(self) -> None:
        if self._begun:
            _end([store for store, _ in self._stores], self._name, os.getpid())
            self._begun = False


def _end(stores: Several[Any], name: str, process: int) -> None:
    if process != os.getpid():
        return
    for store in stores:
        with suppress(StokerError, ValueError):  # it was closed
            store.follow([], name=name)
