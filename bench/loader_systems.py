"""The loaders that bench/loaders.py compares: each makes its form of the same samples, then gives
batches of batch_of(kind) of them in random order.

A sample is 1,025 tokens of 16 bits, which a batch has as int64 (Stoker's windows share one token
with the next one), or an image of about 53 KB, whose
bytes a batch has as they are. What a peer needs is imported by the function of that peer only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 32
TOKENS = 1025  # of a sample: inputs and targets
IMAGE_BYTES = 53_000
SHARD_BYTES = 64 << 20
FOLDER_MOST = 1 << 18  # files that a folder gets at most
KINDS = ("tokens", "images")
# Images that are JPEGs of 500 x 375 pixels; a batch has them as uint8 [3, SIDE, SIDE]: all of the
# image, bilinear, antialiased.
DECODED, SIDE = "decoded", 224
# That read from a bucket by their own means. LitData's client refuses servers without TLS.
FROM_S3 = ("stoker", "WebDataset", "MDS")
DECODERS = ("stoker", "DataLoader memmap", "DataLoader folder", "SPDL")
PHOTOGRAPHS = 64  # different ones
# Runs as DLIO does them for MLPerf Storage: whole records, and a pause in place of the computing of
# each batch. Bytes of a record, samples of a batch, seconds of the pause, as for one A100: resnet50
# with a batch of 32 in place of 400, unet3d with records of 1/32 of their size; the pauses are
# shorter by as much.
DLIO: dict[str, tuple[int, int, float]] = {
    "resnet50": (114_660, 32, 0.435 * 32 / 400),
    "unet3d": (146_600_628 // 32, 7, 0.636 / 32),
}


def batch_of(kind: str) -> int:
    return DLIO[kind][1] if kind in DLIO else BATCH


def pause_of(kind: str) -> float:
    return DLIO[kind][2] if kind in DLIO else 0.0


def photograph(seed: int) -> bytes:
    """A JPEG of slow colours and some noise, filled up to IMAGE_BYTES behind its end."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    slow = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((500, 375))
    noise = rng.normal(0, 12, (375, 500, 1))
    pixels = np.clip(np.asarray(slow) + noise, 0, 255).astype(np.uint8)
    for quality in range(95, 20, -1):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=quality)
        if len(out.getvalue()) <= IMAGE_BYTES:
            return out.getvalue().ljust(IMAGE_BYTES, b"\0")
    raise ValueError(f"no quality makes photograph {seed} small enough")


def sample_bytes(kind: str) -> int:
    if kind in DLIO:
        return DLIO[kind][0]
    return TOKENS * 2 if kind == "tokens" else IMAGE_BYTES


def samples(kind: str, count: int) -> Iterator[bytes]:
    """The same ones for every system: any bytes, which nothing compresses, or photographs."""
    if kind == DECODED:
        different = [photograph(seed) for seed in range(min(count, PHOTOGRAPHS))]
        for i in range(count):
            yield different[i % len(different)]
        return
    size, at = sample_bytes(kind), 0
    while at < count:
        some = min(count - at, (32 << 20) // size)
        block = np.random.default_rng([at, size]).bytes(some * size)
        for i in range(some):
            yield block[i * size : (i + 1) * size]
        at += some


def tokens_of(data: bytes | memoryview) -> Any:
    import torch

    return torch.from_numpy(np.frombuffer(data, np.uint16).astype(np.int64))


def decoded_by_torchvision(data: bytes | np.ndarray) -> Any:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    file = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return resize(decode_jpeg(file, ImageReadMode.RGB), [SIDE, SIDE], antialias=True)


def decoded_by_pillow(data: bytes) -> Any:
    import torch
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIDE, SIDE), Image.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# ---- forms


def make_flat(folder: Path, kind: str, count: int) -> None:
    with (folder / "flat.bin").open("wb") as file:
        file.writelines(samples(kind, count))


def make_folder(folder: Path, kind: str, count: int) -> None:
    for i, data in enumerate(samples(kind, min(count, FOLDER_MOST))):
        part = folder / f"{i >> 10:06d}"
        if i & 1023 == 0:
            part.mkdir()
        (part / f"{i:09d}.bin").write_bytes(data)


def make_tar(folder: Path, kind: str, count: int) -> None:
    a_shard = SHARD_BYTES // sample_bytes(kind)
    tar: tarfile.TarFile | None = None
    for i, data in enumerate(samples(kind, count)):
        if i % a_shard == 0:
            if tar is not None:
                tar.close()
            tar = tarfile.open(folder / f"{i // a_shard:06d}.tar", "w")
        member = tarfile.TarInfo(f"{i:09d}.bin")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    tar.close()


def make_mds(folder: Path, kind: str, count: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder), columns={"data": "bytes"}, size_limit=SHARD_BYTES, exist_ok=True
    ) as out:
        for data in samples(kind, count):
            out.write({"data": data})


def make_litdata(folder: Path, kind: str, count: int) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    for i, data in enumerate(samples(kind, count)):
        writer[i] = data
    writer.done()
    writer.merge()


# ---- loaders: (folder of the form, kind, workers) -> batches for ever. Those that read from S3
# take where the form lies as well: s3://bucket/prefix?endpoint=URL, with the credentials in the
# environment. What they keep of it goes with `cache`.


def at_s3(where: str) -> tuple[str, str]:
    """The prefix, s3://bucket/..., and the endpoint."""
    prefix, _, endpoint = where.partition("?endpoint=")
    return prefix, endpoint


@contextlib.contextmanager
def cache() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="loaders-", ignore_cleanup_errors=True) as folder:
        yield folder


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _torch_loader(dataset: Any, workers: int, kind: str) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    collate = list if kind == "images" or kind in DLIO else None
    return _epochs(
        DataLoader(
            dataset,
            batch_size=batch_of(kind),
            shuffle=True,
            num_workers=workers,
            collate_fn=collate,
        )
    )


def run_memmap(folder: Path, kind: str, workers: int) -> Iterator[Any]:
    size = sample_bytes(kind)
    flat = np.memmap(folder / "flat.bin", np.uint8, "r")

    class Flat:
        def __len__(self) -> int:
            return len(flat) // size

        def __getitem__(self, i: int) -> Any:
            data = flat[i * size : (i + 1) * size]
            if kind == DECODED:
                return decoded_by_torchvision(data)
            return tokens_of(data) if kind == "tokens" else data.tobytes()

    return _torch_loader(Flat(), workers, kind)


def run_folder(folder: Path, kind: str, workers: int) -> Iterator[Any]:
    paths = sorted(str(path) for path in folder.glob("*/*.bin"))

    class Folder:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, i: int) -> Any:
            with open(paths[i], "rb") as file:
                data = file.read()
            if kind == DECODED:
                return decoded_by_pillow(data)
            return tokens_of(data) if kind == "tokens" else data

    return _torch_loader(Folder(), workers, kind)


def run_webdataset(folder: Path, kind: str, workers: int, where: str = "") -> Iterator[Any]:
    """From S3 by what its documentation has: a pipe from the AWS command."""
    import torch
    import webdataset

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    if where:
        prefix, endpoint = at_s3(where)
        aws = (
            f"pipe:{Path(sys.executable).with_name('aws')} --endpoint-url {endpoint} s3 cp --quiet"
        )
        shards = [f"{aws} {prefix}/{Path(shard).name} -" for shard in shards]
    of = tokens_of if kind == "tokens" else bytes
    dataset = (
        webdataset.WebDataset(
            shards,
            shardshuffle=100,
            nodesplitter=webdataset.split_by_node,
            workersplitter=webdataset.split_by_worker,
        )
        .shuffle(min(1000, max(batch_of(kind), SHARD_BYTES // sample_bytes(kind))))
        .map(lambda sample: of(sample["bin"]))
        .batched(batch_of(kind), collation_fn=torch.stack if kind == "tokens" else list)
    )
    return _epochs(webdataset.WebLoader(dataset, batch_size=None, num_workers=workers))


def run_mds(folder: Path, kind: str, workers: int, where: str = "") -> Iterator[Any]:
    if not where:
        return _mds(kind, workers, local=str(folder))
    prefix, os.environ["S3_ENDPOINT_URL"] = at_s3(where)
    return _cached(lambda local: _mds(kind, workers, remote=prefix, local=local))


def _cached(run: Callable[[str], Iterator[Any]]) -> Iterator[Any]:
    with cache() as folder:
        yield from run(folder)


def _mds(kind: str, workers: int, **where: str) -> Iterator[Any]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Dataset(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            data = super().__getitem__(at)["data"]
            return tokens_of(data) if kind == "tokens" else data

    dataset = Dataset(**where, shuffle=True, batch_size=batch_of(kind))
    collate = None if kind == "tokens" else list
    return _epochs(
        DataLoader(dataset, batch_size=batch_of(kind), num_workers=workers, collate_fn=collate)
    )


def run_litdata(folder: Path, kind: str, workers: int) -> Iterator[Any]:
    import litdata

    class Dataset(litdata.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            data = super().__getitem__(at)
            return tokens_of(data) if kind == "tokens" else bytes(data)

    dataset = Dataset(str(folder), shuffle=True)
    collate = None if kind == "tokens" else list
    return _epochs(
        litdata.StreamingDataLoader(
            dataset, batch_size=batch_of(kind), num_workers=workers, collate_fn=collate
        )
    )


def run_spdl(folder: Path, kind: str, workers: int) -> Iterator[Any]:
    import torch
    from spdl.pipeline import PipelineBuilder

    size = sample_bytes(kind)
    flat = np.memmap(folder / "flat.bin", np.uint8, "r")
    count = len(flat) // size

    def batches_of_numbers() -> Iterator[np.ndarray]:
        while True:
            order = np.random.default_rng().permutation(count)
            size = batch_of(kind)
            for at in range(0, count - size + 1, size):
                yield order[at : at + size]

    def read(numbers: np.ndarray) -> Any:
        parts = [flat[i * size : (i + 1) * size] for i in numbers]
        if kind == "tokens":
            return torch.stack([tokens_of(part) for part in parts])
        if kind == DECODED:
            from spdl import io as spdl_io

            files = [part.tobytes() for part in parts]
            images = spdl_io.load_image_batch(files, width=SIDE, height=SIDE, pix_fmt="rgb24")
            return spdl_io.to_torch(images).permute(0, 3, 1, 2)
        return [part.tobytes() for part in parts]

    pipeline = (
        PipelineBuilder()
        .add_source(batches_of_numbers())
        .pipe(read, concurrency=workers)
        .add_sink(4)
        .build(num_threads=workers)
    )

    def run() -> Iterator[Any]:
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return run()


def index_of(folder: Path) -> Path:
    """What `stoker data index` made of the tar files."""
    return folder.with_name(folder.name + ".index")


def run_stoker(folder: Path, kind: str, workers: int, where: str = "") -> Iterator[Any]:
    import stoker
    from stoker.data import Indexed, Jpeg, Loader, Tokens

    def run() -> Iterator[Any]:
        with stoker.open_store(where or f"dir:{folder}") as store:
            if kind == "tokens":
                source = Tokens(store, "flat.bin", TOKENS - 1, dtype="uint16")
            else:
                source = Indexed(store, index_of(folder))
            cpus = max(1, workers)
            decode = Jpeg(SIDE, threads=cpus) if kind == DECODED else None
            loader = Loader(
                source,
                batch=batch_of(kind),
                seed=1,
                shuffle="auto" if where else True,  # peers have no exact order there
                endless=True,
                decode=decode,
                cpus=cpus,
            )
            try:
                yield from (batch["image"] for batch in loader) if decode else loader
            finally:
                loader.close()

    return run()


Run = Callable[..., Iterator[Any]]
# name: its form of tokens, of images; the module that it is; how it reads
SYSTEMS: dict[str, tuple[str, str, str, Run]] = {
    "stoker": ("flat", "tar", "stoker.data", run_stoker),
    "DataLoader memmap": ("flat", "flat", "torch.utils.data", run_memmap),
    "DataLoader folder": ("folder", "folder", "torch.utils.data", run_folder),
    "WebDataset": ("tar", "tar", "webdataset", run_webdataset),
    "MDS": ("mds", "mds", "streaming", run_mds),
    "LitData": ("litdata", "litdata", "litdata", run_litdata),
    "SPDL": ("flat", "flat", "spdl.pipeline", run_spdl),
}
MAKERS = {
    "flat": make_flat,
    "folder": make_folder,
    "tar": make_tar,
    "mds": make_mds,
    "litdata": make_litdata,
}


def form_of(system: str, kind: str) -> str:
    return SYSTEMS[system][0 if kind == "tokens" else 1]


def made(root: Path, form: str, kind: str, count: int) -> Path:
    """The folder of a form, made unless it is there."""
    folder, done = root / f"{kind}.{form}", root / f"{kind}.{form}.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        MAKERS[form](folder, kind, count)
        os.sync()
        done.write_text(json.dumps({"samples": count}))
    return folder
