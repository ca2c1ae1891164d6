"""Batches in a known order, assembled ahead of time by one thread."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import InvalidArgument
from .order import InOrder, Mixed, Order, Picks, Shuffled


class Source(Protocol):
    """Samples by number. `stoker.data.Tokens`, `Rows`, `Files` and `Tar` are such."""

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> torch.Tensor | list[Any]:
        """The samples of these numbers (uint64 [n]), in this order: [n, ...], or a list of n."""

    @property
    def fingerprint(self) -> str:
        """Changes when the samples or their numbers do. A resume compares it."""


class Loader:
    """Takes the place of a DataLoader: ``for batch in loader``, once an epoch.

        with stoker.open_store("s3://bucket/tokens") as store:
            source = stoker.data.Tokens(store, "train.bin", 1024)
            loader = stoker.data.Loader(source, batch=8, seed=1)
            for epoch in range(3):
                loader.set_epoch(epoch)
                for windows in loader:  # int64 [8, 1025]
                    ...

    source: a Source, or several of them with `weights` (a mixture: endless, without epochs).
    batch: samples a rank and batch. seed: of the order. shuffle=False: in the order of the source.
    rank, ranks: which part of each global batch this process gets; those of torch.distributed where
    it is in use. drop_last: leave out what does not fill a global batch at the end of an epoch;
    else the rest is shared out among the ranks, whose last batch is smaller (and may be empty).
    endless: epochs follow without a gap, and a batch may reach into the next one. ahead: batches
    that are read ahead at most. collate: from what `Source.batch` gives to the batch; it runs on
    the reading thread.

    The order is a pure function of (samples, seed, position). It depends neither on ranks nor on
    threads, so a resume may have other ranks, as long as batch x ranks is the same. `state_dict()`
    counts a batch as soon as it was given out: a state saved in the body of the loop, after the
    step, goes on with the next batch. A loop that was left early goes on where it stopped;
    `set_epoch()` of another epoch begins that one.

    All methods belong to one thread. One thread of the loader's own reads ahead; its errors are
    raised by the loop.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
        batch: int,
        seed: int = 0,
        *,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
        drop_last: bool = False,
        endless: bool = False,
        ahead: int = 4,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        sources: list[Source] = list(source) if isinstance(source, list | tuple) else [source]
        _check(sources, batch, weights, shuffle, ahead)
        self.batch, self.seed, self.shuffle = batch, seed, shuffle
        self.rank, self.ranks = _place(rank, ranks)
        if weights is not None:
            order: Order = Mixed([len(each) for each in sources], weights, seed)
        else:
            order = (Shuffled if shuffle else InOrder)(len(sources[0]), seed)
        self._batches = _Batches(
            sources,
            order,
            self.global_batch,
            self.rank,
            self.ranks,
            endless or order.count is None,
            drop_last,
            collate,
        )
        self._of = _identity(sources, weights, shuffle)
        self._depth = ahead
        self.waited_seconds = 0.0  # time the loop spent waiting for the reading thread
        self._position = 0  # the first sample that was not given out, of all ranks and epochs
        self._ahead: _Ahead | None = None

    # ---- the loop

    @property
    def global_batch(self) -> int:
        """Samples of one batch of all ranks."""
        return self.batch * self.ranks

    def __len__(self) -> int:
        """Batches an epoch."""
        if self._batches.endless:
            raise TypeError("an endless loader has no length: stop by steps")
        whole, rest = divmod(self._batches.order.count, self.global_batch)
        return whole + (rest > 0 and not self._batches.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The batches to come of this epoch; of an endless loader, all."""
        epoch = self.epoch
        while self._batches.endless or self.epoch == epoch:
            span = self._batches.span(self._position)
            if span is None:  # what is left does not fill a batch
                self._go_to((epoch + 1) * self._batches.order.count)
                return
            batch = self._next()
            self._position = span[1]
            yield batch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; 0 of a mixture."""
        count = self._batches.order.count
        return self._position // count if count else 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless the position is in it already (a resume)."""
        if not self._batches.order.count:
            raise ValueError("a mixture has no epochs")
        if epoch < 0:
            raise ValueError(f"there is no epoch {epoch}")
        if epoch != self.epoch:
            self._go_to(epoch * self._batches.order.count)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position of. The same on all ranks."""
        return {
            "position": self._position,
            "batch": self.global_batch,
            "seed": self.seed,
            "of": self._of,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. InvalidArgument if it is of other data or of another order."""
        mine = self.state_dict()
        what = {"batch": "a global batch of", "seed": "seed"}
        for key, name in what.items():
            if state[key] != mine[key]:
                raise InvalidArgument(
                    f"the saved data position is of {name} {state[key]}, "
                    f"this loader has {name} {mine[key]}: "
                    f"give it the {key} of the run that saved it"
                )
        if "windows" in state:  # saved before loaders had a fingerprint
            same = self._batches.order.count == state["windows"] and self.shuffle
        else:
            same = state.get("of") == mine["of"]
        if not same:
            raise InvalidArgument(
                "the saved data position is of other samples, or of another order of them: "
                "give this loader the data, the weights and `shuffle` of the run that saved it, "
                "or begin the data anew without this state"
            )
        self._go_to(state["position"])

    # ---- reading ahead

    def close(self) -> None:
        """Stop the reading thread. The loader can be used again; it then starts anew."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _go_to(self, position: int) -> None:
        self.close()
        self._position = position

    def _next(self) -> Any:
        if self._ahead is None or not self._ahead.gives(self._position):
            self.close()
            self._ahead = _Ahead(self._batches, self._position, self._depth)
            weakref.finalize(
                self, self._ahead.stop
            )  # a loader that nobody has any more reads nothing
        began = time.perf_counter()
        item = self._ahead.get()
        self.waited_seconds += time.perf_counter() - began
        if isinstance(item, _Failed):
            self.close()
            raise item.error
        return item


@dataclass(frozen=True)
class _Batches:
    """Which samples each batch has, and how it is read: a function of its first position."""

    sources: list[Source]
    order: Order
    size: int  # of a global batch
    rank: int
    ranks: int
    endless: bool
    drop_last: bool
    collate: Callable[[Any], Any] | None

    def span(self, first: int) -> tuple[int, int] | None:
        """Positions [first, last) of the global batch at `first`; None if it is left out."""
        last = first + self.size
        if self.endless:
            return first, last
        end = (first // self.order.count + 1) * self.order.count
        if last > end and self.drop_last:
            return None
        return first, min(last, end)

    def ends(self, position: int) -> bool:
        """Whether an epoch ends here: nothing is read beyond it."""
        return not self.endless and position % self.order.count == 0

    def read(self, first: int, last: int) -> Any:
        """This rank's part of the global batch: whole batches are cut alike, a rest evenly."""
        many = last - first
        begin, end = (first + rank * many // self.ranks for rank in (self.rank, self.rank + 1))
        batch = self._gather(self.order.picks(begin, end))
        return self.collate(batch) if self.collate is not None else batch

    def _gather(self, picks: Picks) -> torch.Tensor | list[Any]:
        if len(self.sources) == 1:
            return self.sources[0].batch(picks.samples)
        rows: list[Any] = [None] * len(picks.samples)
        tensors = True
        for index in np.unique(picks.sources):
            mine = np.flatnonzero(picks.sources == index)
            part = self.sources[index].batch(picks.samples[mine])
            tensors = tensors and isinstance(part, torch.Tensor)
            for at, row in zip(mine, part, strict=True):
                rows[at] = row
        return torch.stack(rows) if tensors and rows else rows


class _Ahead:
    """One thread that reads batches from a position to the end of its epoch, a few ahead."""

    def __init__(self, batches: _Batches, position: int, depth: int) -> None:
        self._position = position  # of the batch that get() gives next
        self._over = False  # no batch is left
        self._batches, self._process = batches, os.getpid()
        self._queue: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self.stop = self._stop.set
        self._thread = threading.Thread(
            target=self._read, args=(position,), name="stoker-loader", daemon=True
        )
        self._thread.start()

    def gives(self, position: int) -> bool:
        """Whether get() gives the batch of this position, now or soon."""
        return not self._over and self._position == position and not self._forked()

    def get(self) -> Any:
        """The next batch, or a _Failed."""
        item = self._queue.get()
        self._position = self._batches.span(self._position)[1]
        self._over = self._batches.ends(self._position)
        return item

    def _forked(self) -> bool:
        """Whether this is a child of the process that the thread is of: it has no such thread."""
        return self._process != os.getpid()

    def close(self) -> None:
        self._stop.set()
        if not self._forked():
            self._thread.join()

    def _read(self, position: int) -> None:
        try:
            while (span := self._batches.span(position)) is not None and not self._stop.is_set():
                self._put(self._batches.read(*span))
                position = span[1]
                if self._batches.ends(position):
                    return
        except BaseException as error:  # handed to the thread that asks for batches
            self._put(_Failed(error))

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue


class _Failed:
    """An error of the reading thread, in the queue of batches."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _check(
    sources: Sequence[Source],
    batch: int,
    weights: Sequence[float] | None,
    shuffle: bool,
    ahead: int,
) -> None:
    if batch < 1 or ahead < 1:
        raise ValueError(f"a loader needs batch and ahead of at least 1, not {batch} and {ahead}")
    if weights is None and len(sources) != 1:
        raise ValueError(f"{len(sources)} sources need `weights`: the share of each")
    if weights is not None and not shuffle:
        raise ValueError(
            "a mixture is drawn at random: leave out shuffle=False, or give one source"
        )
    for index, each in enumerate(sources):
        if len(each) < 1:
            raise ValueError(f"a loader needs at least one sample, but source {index} has none")


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Which rank of how many this process is."""
    if (rank is None) != (ranks is None):
        raise ValueError("give both rank= and ranks=, or none of them")
    if rank is None:
        ours = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (
            (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ours else (0, 1)
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}")
    return rank, ranks


def _identity(sources: Sequence[Source], weights: Sequence[float] | None, shuffle: bool) -> str:
    """What a position is a position of, in 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for each in sources:
        digest.update(f"{len(each)} {each.fingerprint}\n".encode())
    digest.update(
        repr(([float(each) for each in weights] if weights is not None else None, shuffle)).encode()
    )
    return digest.hexdigest()[:32]
