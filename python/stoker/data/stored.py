"""Sources whose samples lie in a store: C++ reads them, and these make tensors of the bytes."""

from __future__ import annotations

from collections.abc import Sequence as Several
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stoker import _core

if TYPE_CHECKING:
    from .slots import Slots

UNPACKED_BYTES = 256 << 20  # memory of a source for compressed objects
Places = list[tuple[int, int]]  # offset and bytes of each part of a sample, in a batch's memory


class Stored:
    """A source with a table of where its samples lie. Subclasses say what the bytes mean."""

    # What equal samples are, for a mixture: those of one kind are rows of one tensor.
    kind: Any = None
    # The type of the integers that samples are, which come as int64.
    integers: str | None = None

    def __init__(
        self,
        store: _core.Store,
        table: _core.SampleTable,
        fingerprint: str,
        all_bytes: int,
        tags: Several[str] | None = None,
    ) -> None:
        """all_bytes: of all samples, or of the objects they lie in. tags: of each of these, in the
        order of the table's keys."""
        self.store, self.table, self.fingerprint, self.tags = store, table, fingerprint, tags
        self._all_bytes = all_bytes

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sample_bytes(self) -> float:
        """Of a sample in its store, on average."""
        return self._all_bytes / max(1, len(self))

    @property
    def slot_bytes(self) -> float:
        """Of a sample in the memory of a batch; with some room where samples differ."""
        return self.sample_bytes if self.kind is not None else 1.25 * self.sample_bytes + 64

    def batch(self, samples: np.ndarray) -> torch.Tensor | list[Any]:
        """The samples of these numbers, in this order, read now."""
        return self._alone.read_samples(np.asarray(samples, np.uint64)).result()

    @property
    def shard_samples(self) -> int:
        """Where objects are compressed, and so come whole: samples of one. Else 0."""
        return 0

    def rows(self, memory: np.ndarray, count: int) -> torch.Tensor:
        """`count` samples that follow one another. memory: uint8. Only where `kind` is given."""
        raise NotImplementedError

    def sample(self, number: int, memory: np.ndarray, places: Places) -> Any:
        """One sample of whatever parts."""
        return self.rows(memory[places[0][0] : sum(places[0])], 1)[0]

    def part_name(self, number: int, part: int) -> str:
        """Under which name a sample that is a dict has this part of it."""
        return ""

    @cached_property
    def _alone(self) -> StoredSources:
        return StoredSources([self], 2)


def all_stored(sources: Several[Any]) -> bool:
    return all(isinstance(each, Stored) for each in sources)


def _compared(source: Stored) -> list[str]:
    """The tags that the store compares at each read: of a bucket, cached or not. Others would not
    look at them."""
    return list(source.tags or ()) if "s3:" in source.store.info()["composition"] else []


class StoredSources:
    """Reads batches of several sources by one `BatchReader`."""

    def __init__(
        self,
        sources: Several[Stored],
        ahead: int,
        unpacked_bytes: int = UNPACKED_BYTES,
        threads: _core.PipelineThreads | None = None,
        slots: Slots | None = None,
    ) -> None:
        """threads: None is one of their own. slots: where batches lie, as far as there is room."""
        self.sources = sources
        self._reader = _core.BatchReader(
            [(each.store, each.table, each.integers, _compared(each)) for each in sources],
            ahead + 1,  # and the one that the loop has
            unpacked_bytes,
            threads or _core.PipelineThreads(1, 1),
            slots.arena if slots is not None else None,
        )
        self._slots = slots
        kinds = {each.kind for each in sources}
        self.alike = len(kinds) == 1 and None not in kinds
        # What the stores were asked for, by batches that are there.
        self.read_bytes = self.read_ranges = 0

    def read(self, order: _core.Sequence, first: int, last: int) -> Reading:
        """The samples at positions [first, last)."""
        return Reading(self, self._reader.read(order, first, last), last - first)

    def memory(self, batch: _core.Batch) -> np.ndarray:
        """Of a batch that is there."""
        return batch.memory if self._slots is None else self._slots.lend(batch.memory)

    def read_samples(self, samples: np.ndarray) -> Reading:
        """Samples of the only source."""
        return Reading(self, self._reader.read_samples(0, samples), len(samples))


class Reading:
    """A batch on its way."""

    def __init__(self, of: StoredSources, batch: _core.Batch, samples: int) -> None:
        self._of, self._batch, self.samples = of, batch, samples

    def ready(self) -> bool:
        return self._batch.ready()

    def stages(self) -> list[tuple[str, int, int]]:
        """Name, begin and end of each, once it is there."""
        return self._batch.stages

    def objects(self) -> list[tuple[int, str, int]]:
        """Source, key and bytes of each object that it was read from, once it is there."""
        sources = self._of.sources
        return [
            (source, sources[source].table.key(object_), bytes_)
            for source, object_, bytes_ in self._batch.objects
        ]

    def raw(self) -> tuple[np.ndarray, list[Places]]:
        """Waits for it: its memory, and where the parts of each sample lie there."""
        self._batch.wait()
        return self._of.memory(self._batch), self._batch.places

    def each(self, which: Several[int]) -> list[Any]:
        """Some samples of it, once it is there; the tensors keep its memory."""
        memory, places, (sources, samples) = (
            self._of.memory(self._batch),
            self._batch.places,
            self._batch.picks,
        )
        return [
            self._of.sources[int(sources[at])].sample(int(samples[at]), memory, places[at])
            for at in which
        ]

    def part_names(self, which: Several[int], parts: Several[int]) -> list[str]:
        """Of some samples of it, once it is there, the name of one part each."""
        sources, samples = self._batch.picks
        return [
            self._of.sources[int(sources[at])].part_name(int(samples[at]), part)
            for at, part in zip(which, parts, strict=True)
        ]

    def decoded_by(self, decoder: _core.ImageDecoder, first: int, epoch: int) -> _core.Images:
        """Its images; it begins at position `first` of epochs of so many samples (0: none)."""
        return decoder.decode(self._batch, first, epoch)

    def result(self) -> torch.Tensor | list[Any]:
        """Waits for it, once. Its tensors keep its memory."""
        self._batch.wait()
        bytes_, ranges = self._batch.asked
        self._of.read_bytes += bytes_
        self._of.read_ranges += ranges
        memory = self._of.memory(self._batch)
        if self._of.alike:
            return self._of.sources[0].rows(memory, len(self._batch))
        sources, samples = self._batch.picks
        return [
            self._of.sources[source].sample(sample, memory, places)
            for source, sample, places in zip(
                sources.tolist(), samples.tolist(), self._batch.places, strict=True
            )
        ]
