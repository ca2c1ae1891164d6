"""Jpeg: the decode stage of a loader. C++ decodes, crops, resizes and normalises into the batch."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import torch

from stoker import _core
from stoker.errors import Corruption, InvalidArgument

from .account import Stages
from .stored import Reading

if TYPE_CHECKING:
    from .slots import Slots

Colours = tuple[float, float, float]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation
_LISTED = 1000  # names of samples that were left out


class Jpeg:
    """What images become: ``Loader(Tar(store, keys), 32, decode=Jpeg(resize=224, crop="random"))``.

    resize: (height, width) of every image, or one number for both. crop: "random" is 8 to 100 % of
    the area, 3:4 to 4:3 wide, keyed by (seed, epoch, sample). "centre" is the largest part in the
    middle of that shape; None takes the whole image, whatever its shape. flip: mirror half of the
    images. normalise: (mean, deviation) of red, green and blue from 0 to 1, as `IMAGENET`, gives
    float32; else uint8. threads: that decode to begin with; the loader adds some up to its cpus=
    while the loop waits for them. on_corrupt: "raise" names the sample; "skip" leaves it out: the
    batch is smaller then, and `skipped` counts, `skipped_samples` lists it.

    The JPEG of a sample is the first of its parts that begins as one does. A batch is a dict:
    "image" [n, 3, height, width] (channels last in memory), "__key__" the names, and of tar files
    each further extension as a list of uint8 tensors (None where a sample has none).
    """

    def __init__(
        self,
        resize: int | tuple[int, int],
        *,
        crop: str | None = None,
        flip: bool = False,
        normalise: tuple[Colours, Colours] | None = None,
        threads: int = 1,
        on_corrupt: str = "raise",
    ) -> None:
        if on_corrupt not in ("raise", "skip"):
            raise InvalidArgument(f'on_corrupt is "raise" or "skip", not {on_corrupt!r}')
        self.height, self.width = (resize, resize) if isinstance(resize, int) else resize
        self.crop, self.flip, self.normalise = crop, flip, normalise
        self.threads, self.on_corrupt = threads, on_corrupt
        self.skipped = 0  # samples that were left out
        self.skipped_samples: list[tuple[str, str]] = []  # name and reason of the first 1000
        self._check()

    def _check(self) -> None:
        if min(self.height, self.width, self.threads) < 1:
            raise InvalidArgument(
                f"resize= and threads= are at least 1, not {self.height} x {self.width} and"
                f" {self.threads}"
            )
        self.decoder(0, 1, _core.PipelineThreads(1, 1))  # raises what else makes no sense

    def decoder(
        self,
        seed: int,
        ahead: int,
        threads: _core.PipelineThreads,
        arena: _core.Arena | None = None,
    ) -> _core.ImageDecoder:
        return _core.ImageDecoder(
            self.height,
            self.width,
            self.crop or "whole",
            self.flip,
            self.normalise,
            seed,
            threads,
            ahead + 1,  # and the one that the loop has
            arena,
        )

    def leave_out(self, name: str, why: str) -> None:
        self.skipped += 1
        if len(self.skipped_samples) < _LISTED:
            self.skipped_samples.append((name, why))


class Decoded(dict[str, Any]):
    """A batch of images, by column. kept: which samples of the batch it has."""

    kept: Several[int] = ()

    def rows(self) -> list[dict[str, Any]]:
        names = list(self)
        return [dict(zip(names, row, strict=True)) for row in zip(*self.values(), strict=True)]


class Decoding:
    """A batch whose images are on their way."""

    def __init__(
        self, jpeg: Jpeg, reading: Reading, images: _core.Images, slots: Slots | None
    ) -> None:
        """slots: where images lie, as far as there is room."""
        self._jpeg, self._reading, self._images, self._slots = jpeg, reading, images, slots
        self.samples = reading.samples

    def ready(self) -> bool:
        return self._images.ready()

    def stages(self) -> Stages:
        return [*self._reading.stages(), self._images.stage]

    def objects(self) -> list[tuple[int, str, int]]:
        return self._reading.objects()

    def result(self) -> Decoded:
        self._images.wait()
        jpeg, images = self._jpeg, self._images
        for at, why in images.damaged:
            name = name_of(self._reading.each([at])[0], at)
            if jpeg.on_corrupt == "raise":
                raise Corruption(
                    f"the image of sample {name} cannot be used: {why}; replace it, or leave such"
                    ' samples out with Jpeg(on_corrupt="skip")'
                )
            jpeg.leave_out(name, why)
        kind = torch.uint8 if jpeg.normalise is None else torch.float32
        memory = images.memory if self._slots is None else self._slots.lend(images.memory)
        pixels = torch.from_numpy(memory).view(kind)
        shape = (len(images.kept), jpeg.height, jpeg.width, 3)
        batch = Decoded(image=pixels.view(shape).permute(0, 3, 1, 2))
        batch.kept = images.kept
        samples = self._reading.each(images.kept)
        batch.update(_columns(samples, self._reading.part_names(images.kept, images.parts)))
        return batch


def batch_bytes(sources: Several[Any], batch: int, decode: Jpeg | None) -> int:
    """Of a batch in memory, as far as that is known before."""
    if decode is not None:
        depth = 1 if decode.normalise is None else 4
        return batch * decode.height * decode.width * 3 * depth
    return int(batch * max(each.slot_bytes for each in sources))


def name_of(sample: Any, number: int) -> str:
    """Of a sample of a tar file or a folder; of others their number."""
    if isinstance(sample, dict):
        return sample.get("__key__", str(number))
    return sample[0] if isinstance(sample, tuple) and sample else str(number)


def _columns(samples: Several[Any], images: Several[str]) -> dict[str, list[Any]]:
    """Lists of what the samples have beside their images, which have these names."""
    columns: dict[str, list[Any]] = {"__key__": [name_of(each, 0) for each in samples]}
    for row, (sample, image) in enumerate(zip(samples, images, strict=True)):
        if not isinstance(sample, dict):
            continue
        for extension, content in sample.items():
            if extension not in ("__key__", image):
                columns.setdefault(extension, [None] * len(samples))[row] = content
    return columns
