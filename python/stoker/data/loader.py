"""Batches in a known order, several of them read ahead."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import torch

from stoker import _core

from ..errors import InvalidArgument
from . import windows
from .account import HAND_OVER, Account, Stages
from .empty import NONE, Shape
from .following import Following
from .images import Decoded, Decoding, Jpeg, batch_bytes, name_of
from .order import Sequence
from .planning import choose
from .slots import Slots
from .stored import UNPACKED_BYTES, Reading, StoredSources, all_stored
from .threads import Scaling, default_cpus
from .watch import Watch
from .workers import Workers


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

    source: a Source, or several of them with `weights` (a mixture: endless, without epochs). batch:
    samples a rank and batch. seed: of the order. shuffle=False: in the order of the source;
    "window": in windows of `window_bytes` (of all ranks), so that samples that follow one another
    come by one read; "auto": exact, or by windows where that is much cheaper (planning.py), so a
    resume needs the same store and cache. `order` says how samples are read, and why. rank, ranks:
    which part of each global batch this process gets; those of torch.distributed where it is in
    use. drop_last: leave out what does not fill a global batch at the end of an epoch. Else the
    ranks share it out, and their last batch is smaller (and may be empty). endless: epochs follow
    without a gap, and a batch may reach into the next one. ahead: batches that are under way at
    once. decode: what the JPEGs of samples become (`Jpeg`). transform: a function of one sample,
    run in `workers` processes that are spawned. So it must be possible to pickle it, and a script
    needs `if __name__ == "__main__":`. random, numpy and torch are seeded before each sample.
    collate: makes the batch of what `Source.batch` or `decode` gives, or of the list of what the
    transform made (default_collate then). It runs on a thread of the loader's own. unpacked_bytes:
    memory of a source for compressed shards, which come whole: those on their way, and those that
    are kept for their other samples. cpus: C++ threads that verify, unpack and decode, at most;
    half of the cores that the process may use by default. There is one to begin with. Another one
    comes while the loop waits and those that are there are busy, and goes again when they were idle
    for a while (threads.py). Give it where several ranks share a machine. pin: batches lie in
    memory that CUDA knows. It is used again when nobody has the batch any more, and what the
    current stream was given until then is over (docs/data.md).

    The order is a pure function of (samples, seed, position). It depends neither on ranks nor on
    threads, so a resume may have other ranks, as long as batch x ranks is the same. `state_dict()`
    counts a batch as soon as it was given out: a state saved in the body of the loop, after the
    step, goes on with the next batch. A loop that was left early goes on where it stopped;
    `set_epoch()` of another epoch begins that one.

    All methods belong to one thread. Errors of what is read ahead are raised by the loop, at the
    batch they belong to. Tensors share memory with the loader: it is used again only when nobody
    has them any more.

    `account` says what the loop waited for, by stage and tier: attach the loader to the optimizer,
    and each row of its ledger has that.
    """

    def __init__(
        self,
        source: Source | Several[Source],
        batch: int,
        seed: int = 0,
        *,
        weights: Several[float] | None = None,
        shuffle: bool | Literal["window", "auto"] = True,
        window_bytes: int = windows.WINDOW_BYTES,
        rank: int | None = None,
        ranks: int | None = None,
        drop_last: bool = False,
        endless: bool = False,
        ahead: int = 4,
        decode: Jpeg | None = None,
        transform: Callable[[Any], Any] | None = None,
        workers: int = 1,
        collate: Callable[[Any], Any] | None = None,
        unpacked_bytes: int = UNPACKED_BYTES,
        cpus: int | None = None,
        pin: bool = False,
    ) -> None:
        sources: list[Source] = list(source) if isinstance(source, list | tuple) else [source]
        _check(sources, batch, weights, shuffle, ahead)
        threads = _threads(cpus, decode) if all_stored(sources) else None
        self.batch, self.seed = batch, seed
        self.rank, self.ranks = _place(rank, ranks)
        chosen = None
        if shuffle == "auto":
            chosen = choose(sources[0], self.global_batch, window_bytes, unpacked_bytes)
            shuffle = chosen.shuffle
        self.shuffle = shuffle
        counts = [len(each) for each in sources]
        shape = (
            windows.shape(
                counts[0],
                windows.sample_bytes(sources[0]),
                self.global_batch,
                window_bytes,
                sources[0].shard_samples,
            )
            if shuffle == "window"
            else None
        )
        self.order = "\n".join(
            dict.fromkeys(windows.explain(each, shuffle, shape) for each in sources)
        )
        if chosen is not None:
            self.order += f"\nchosen: {chosen.why}"
        if weights is not None:
            order = Sequence.mixed(counts, [float(each) for each in weights], seed)
        elif shape:
            order = Sequence.windowed(shape, seed)
        elif shuffle:
            order = Sequence.shuffled(counts[0], seed)
        else:
            order = Sequence.in_order(counts[0])
        slots = None
        if pin:
            if threads is None:
                raise InvalidArgument(
                    "pin=True needs sources whose samples lie in stores (Tar, Files): leave it out"
                )
            each = batch_bytes(sources, batch, decode)
            # and one with the loop, and one that is copied
            slots = Slots(self, sources[0].store, each, ahead + 3)
        self._batches = _Batches(
            sources,
            order,
            self.global_batch,
            self.rank,
            self.ranks,
            endless or order.count is None,
            drop_last,
            decode,
            seed,
            Workers(transform, workers) if transform is not None else None,
            collate,
            ahead,
            unpacked_bytes,
            threads,
            slots,
        )
        self._scaling = Scaling(threads) if threads is not None else None
        self.account = Account(ahead, self._scaling)  # what waits cost, and what gave the bytes
        if threads is not None:
            self.account.of_stores([each.store for each in sources])
        self._watch = Watch.of(sources)
        self._following = Following(sources, seed, weights)
        if self._following.note:
            self.order += f"\n{self._following.note}"
        self._of = _identity(sources, weights, shape or shuffle)
        self._depth = ahead
        self._position = 0  # the first sample that was not given out, of all ranks and epochs
        # positions, what is on its way, and what the caches had fetched when it began
        self._window: deque[tuple[int, int, _Begun, dict[str, int]]] = deque()
        self._process = os.getpid()
        self._shape = Shape()

    # ---- the loop

    @property
    def read_bytes(self) -> int:
        """That stores were asked for, by batches that are there; 0 of sources in no store."""
        return self._batches.read[0]

    @property
    def read_ranges(self) -> int:
        """Ranges that `read_bytes` came by: requests, where the store is an object store."""
        return self._batches.read[1]

    @property
    def global_batch(self) -> int:
        """Samples of one batch of all ranks."""
        return self.batch * self.ranks

    def __len__(self) -> int:
        """Batches an epoch."""
        if self._batches.endless:
            raise TypeError("an endless loader has no length: stop after a number of steps")
        whole, rest = divmod(self._batches.order.count, self.global_batch)
        return whole + (rest > 0 and not self._batches.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The batches to come of this epoch; of an endless loader, all."""
        epoch = self.epoch
        while self._batches.endless or self.epoch == epoch:
            span = self._batches.span(self._position)
            if span is None:  # what is left does not fill a batch
                if self._watch is not None:
                    self._watch.gave((), True)
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
            raise ValueError("a mixture has no epochs; leave set_epoch() out")
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is negative; epochs count from 0")
        if epoch != self.epoch:
            self._go_to(epoch * self._batches.order.count)

    @property
    def samples(self) -> int:
        """Samples an epoch, of all ranks."""
        if not self._batches.order.count:
            raise TypeError("a mixture has no epochs; count its steps")
        return self._batches.order.count

    def go_to(self, epoch: int, batch: int) -> None:
        """The next batch is this one of this epoch, both from 0. What was read ahead is kept if it
        is the next one anyway."""
        if not 0 <= batch < len(self):
            raise IndexError(
                f"there is no batch {batch}: an epoch has {len(self)} batches, counted from 0"
            )
        position = epoch * self.samples + batch * self.global_batch
        if position != self._position:
            self._go_to(position)

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
                "the saved data position belongs to other samples, or to another order of them. "
                "Give this loader the data, the weights and `shuffle` of the run that saved it, "
                "or start the data again without this state"
            )
        self._go_to(state["position"])

    # ---- reading ahead

    def close(self) -> None:
        """Forget what was read ahead, and let caches forget what would have been read. The loader
        can be used again; it then reads anew."""
        self._stop()
        self._following.end()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.forget()
        if self._scaling is not None:
            self._scaling.rest()
        self._window.clear()
        self._batches.close()

    def _go_to(self, position: int) -> None:
        self._stop()
        self._following.jumped()
        self._position = position

    def _next(self) -> Any:
        if self._process != os.getpid():  # what is under way is the parent's
            self._process = os.getpid()
            self._window.clear()
            self._batches.forget()
        if self._window and self._window[0][0] != self._position:
            self._stop()
        if not self._window:
            self._read_ahead(self._position)
        ready, began = self._window[0][2].ready(), time.perf_counter_ns()
        _, last, begun, caches = self._window.popleft()
        try:
            batch = begun.result()
            if self._watch is not None:
                self._watch.gave(begun.objects(), self._batches.ends(last))
        except BaseException:
            self._stop()
            raise
        if self._batches.stacks:
            batch = self._shape.of(batch)
        ended = time.perf_counter_ns()
        self._book(begun, caches, None if ready else (began, ended))
        if self._scaling is not None:
            self._scaling.gave(ended, 0 if ready else ended - began)
        if self._batches.ends(last):
            if self._scaling is not None:
                self._scaling.rest()
            self._window.clear()
            self._batches.rest()
        else:
            self._read_ahead(last)
        return batch

    def _book(self, begun: _Begun, caches: dict[str, int], waited: tuple[int, int] | None) -> None:
        """Into the account: a batch that was given out."""
        account, objects = self.account, begun.objects()
        stages = begun.stages()
        account.gave(begun.samples, stages, objects)
        if waited is not None:
            fetched = account.fetched_since(caches)
            account.waited(*waited, stages, objects, fetched)

    def _read_ahead(self, given: int) -> None:
        """Up to `ahead` batches behind what was given out."""
        self._following.begin(given)
        at = self._window[-1][1] if self._window else given
        while len(self._window) < self._depth:
            if self._window and self._batches.ends(at):
                return
            span = self._batches.span(at)
            if span is None:
                return
            caches = self.account.began()
            self._window.append((*span, self._batches.begin(*span), caches))
            at = span[1]


class _Begun(Protocol):
    """A batch on its way."""

    samples: int

    def ready(self) -> bool: ...

    def result(self) -> Any: ...

    # Once the result is there: the stages it went through, and source, object and bytes of what
    # it was read from.
    def stages(self) -> Stages: ...

    def objects(self) -> list[tuple[int, str, int]]: ...


class _Made:
    """A batch that the loader's thread of Python makes, of a reading or of Python's sources."""

    def __init__(
        self,
        worker: ThreadPoolExecutor,
        read: Reading | Decoding | None,
        samples: int,
        make: Callable,
    ) -> None:
        self.samples, self._read = samples, read
        self._stages: list[tuple[str, int, int]] = []
        asked = time.perf_counter_ns()
        self._made = worker.submit(self._run, asked, make)

    def _run(self, asked: int, make: Callable[[Reading | None, Callable], Any]) -> Any:
        at = [asked]

        def stage(name: str) -> None:
            """It is over now, and began where the one before ended."""
            now = time.perf_counter_ns()
            self._stages.append((name, at[0], now))
            at[0] = now

        stage(HAND_OVER)
        return make(self._read, stage)

    def ready(self) -> bool:
        return self._made.done()

    def result(self) -> Any:
        return self._made.result()

    def stages(self) -> Stages:
        return [*(self._read.stages() if self._read else ()), *self._stages]

    def objects(self) -> list[tuple[int, str, int]]:
        return self._read.objects() if self._read else []


class _Batches:
    """Which samples each batch has, and how it is read: a function of its first position.

    Sources in stores are read by C++, several batches at once. Sources of other classes are asked
    by one thread of Python's, batch by batch, which also runs `collate`.
    """

    def __init__(
        self,
        sources: list[Source],
        order: Sequence,
        size: int,  # of a global batch
        rank: int,
        ranks: int,
        endless: bool,
        drop_last: bool,
        decode: Jpeg | None,
        seed: int,
        workers: Workers | None,
        collate: Callable[[Any], Any] | None,
        ahead: int,
        unpacked_bytes: int,
        threads: _core.PipelineThreads | None,  # where sources lie in stores
        slots: Slots | None,
    ) -> None:
        self.order, self.size, self.endless = order, size, endless
        self._sources, self._rank, self._ranks = sources, rank, ranks
        self.drop_last, self._collate = drop_last, collate
        if decode is not None and threads is None:
            raise InvalidArgument(
                "decode= needs sources whose samples lie in stores (Tar, Files): leave it out"
            )
        self._stored = self._decoder = None
        if threads is not None:
            of_samples = slots if decode is None else None  # else they are for the images
            self._stored = StoredSources(sources, ahead, unpacked_bytes, threads, of_samples)
        self._jpeg, self._slots = decode, slots
        if decode is not None:
            arena = slots.arena if slots is not None else None
            self._decoder = decode.decoder(seed, ahead, threads, arena)
        self._seed, self._workers = seed, workers
        if workers is not None and collate is None:
            self._collate = torch.utils.data.default_collate
        self.stacks = self._collate is torch.utils.data.default_collate
        self._worker: ThreadPoolExecutor | None = None  # a thread for each worker, else one
        self._asking = threading.Lock()  # sources in Python are asked by one thread at a time

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

    def begin(self, first: int, last: int) -> _Begun:
        """This rank's part of the global batch: whole batches are cut alike, a rest evenly."""
        many = last - first
        begin, end = (first + rank * many // self._ranks for rank in (self._rank, self._rank + 1))
        read = self._stored.read(self.order, begin, end) if self._stored else None
        if self._decoder is not None:
            images = read.decoded_by(self._decoder, begin, self.order.count or 0)
            read = Decoding(self._jpeg, read, images, self._slots)
        if read is not None and self._collate is None:
            return read
        if self._workers is not None:
            self._workers.start()
        if self._worker is None:
            threads = self._workers.count if self._workers is not None else 1
            self._worker = ThreadPoolExecutor(threads, thread_name_prefix="stoker-loader")
        make = lambda read, stage: self._make(read, begin, end, stage)
        return _Made(self._worker, read, end - begin, make)

    @property
    def read(self) -> tuple[int, int]:
        """Bytes and ranges that the stores were asked for."""
        return (self._stored.read_bytes, self._stored.read_ranges) if self._stored else (0, 0)

    def forget(self) -> None:
        """In a forked process: the thread is not there, and workers are the parent's."""
        self._worker = None
        if self._workers is not None:
            self._workers.forget()

    def rest(self) -> None:
        """Nothing is under way: workers wait for the next epoch, as they are slow to come."""
        if self._workers is None:
            self.close()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.kill()  # first: a thread may wait for one
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None
        if self._workers is not None:
            self._workers.close()

    def _make(
        self, read: Reading | Decoding | None, begin: int, end: int, stage: Callable[[str], None]
    ) -> Any:
        batch = read.result() if read is not None else self._gather(begin, end)
        stage("source" if read is None else HAND_OVER)
        if self._workers is not None:
            batch = self._transformed(batch, begin, end)
            stage("transform")
        if self._collate is None:
            return batch
        if self.stacks and not len(batch):
            return NONE
        batch = self._collate(batch)
        stage("collate")
        return batch

    def _transformed(self, batch: Any, begin: int, end: int) -> list[Any]:
        """Sample by sample; random numbers are keyed by (seed, epoch, source, sample)."""
        sources, numbers = (each.tolist() for each in self.order.picks(begin, end))
        epochs = [at // self.order.count if self.order.count else at for at in range(begin, end)]
        keys = list(zip([self._seed] * len(epochs), epochs, sources, numbers, strict=True))
        samples = list(batch)
        if isinstance(batch, Decoded):
            samples, keys = batch.rows(), [keys[at] for at in batch.kept]
        names = [name_of(each, key[3]) for each, key in zip(samples, keys, strict=True)]
        return self._workers.run(samples, keys, names)

    def _gather(self, begin: int, end: int) -> torch.Tensor | list[Any]:
        with self._asking:
            return self._asked(begin, end)

    def _asked(self, begin: int, end: int) -> torch.Tensor | list[Any]:
        sources, samples = self.order.picks(begin, end)
        if len(self._sources) == 1:
            return self._sources[0].batch(samples)
        rows: list[Any] = [None] * len(samples)
        tensors = True
        for index in np.unique(sources):
            mine = np.flatnonzero(sources == index)
            part = self._sources[index].batch(samples[mine])
            tensors = tensors and isinstance(part, torch.Tensor)
            for at, row in zip(mine, part, strict=True):
                rows[at] = row
        return torch.stack(rows) if tensors and rows else rows


def _check(
    sources: Several[Source],
    batch: int,
    weights: Several[float] | None,
    shuffle: bool | str,
    ahead: int,
) -> None:
    if shuffle not in (True, False, "window", "auto"):
        raise ValueError(f"shuffle is True, False, 'window' or 'auto', not {shuffle!r}")
    if batch < 1 or ahead < 1:
        raise ValueError(f"a loader needs batch and ahead of at least 1, not {batch} and {ahead}")
    if weights is None and len(sources) != 1:
        raise ValueError(f"{len(sources)} sources need weights: give weights=, the share of each")
    if weights is not None and shuffle is not True:
        raise ValueError(
            "a mixture draws its samples at random from all of its sources, so "
            f"shuffle={shuffle!r} cannot be kept: leave it out, or give one source"
        )
    for index, each in enumerate(sources):
        if len(each) < 1:
            raise ValueError(
                f"a loader needs at least one sample, but source {index} has none: leave it out"
            )


def _threads(cpus: int | None, decode: Jpeg | None) -> _core.PipelineThreads:
    first = decode.threads if decode is not None else 1
    if cpus is None:
        cpus = max(first, default_cpus())
    if cpus < first:
        raise ValueError(
            f"cpus={cpus} is less than "
            + ("the 1 thread that a loader needs" if cpus < 1 else f"Jpeg(threads={first})")
            + f": give at least cpus={first}"
        )
    return _core.PipelineThreads(first, cpus)


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
        raise ValueError(f"there is no rank {rank} of {ranks}: ranks count from 0 to {ranks - 1}")
    return rank, ranks


def _identity(sources: Several[Source], weights: Several[float] | None, shuffle: Any) -> str:
    """What a position is a position of, in 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for each in sources:
        digest.update(f"{len(each)} {each.fingerprint}\n".encode())
    digest.update(
        repr(([float(each) for each in weights] if weights is not None else None, shuffle)).encode()
    )
    return digest.hexdigest()[:32]
