"""`stoker data build --unpack` and `--resize`: a data set that is quicker to read, made of another.

An object of the result depends on its inputs and on the options only. So any number of threads
makes the same bytes. A build that was killed goes on with the objects that are not there.
`build.json` says what they were made of.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

import stoker
from stoker import _core

from ..errors import AlreadyExists, Corruption, InvalidArgument, Mismatch, NotFound, StokerError
from . import mds
from .images import name_of
from .index import TAR, WHOLE, Index
from .indexing import of_objects
from .sources import Indexed
from .tar_members import _Reading
from .unfinished import (
    BEGUN,
    PLAN,
    bar,
    check_finished,
    facts_of,
    forget,
    is_there,
    json_of,
    put_json,
    remove,
)

ABOUT = "build.json"
_VERSION = 1
_AT_ONCE = 8 << 20  # bytes of an object that are read or written at once
_SAMPLES = 64  # that are read at once
_PACKED_TAR = re.compile(r"\.(tar\.(gz|zst|xz|bz2)|tgz)$")
_IMAGES = (".jpg", ".jpeg", ".JPG", ".JPEG")
Told = Callable[[int], object]  # bytes of the inputs that are done since it was told last


class _Stopped(Exception):
    """Nobody wants the object any more."""


@dataclass(frozen=True)
class Task:
    """An object of the result. size: bytes of the inputs that it stands for. make: writes it into
    an empty file, and gives what build.json says of it."""

    key: str
    size: int
    make: Callable[[IO[bytes], Told], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """All tasks; what they depend on: options and inputs (key, bytes, tag)."""

    options: dict[str, Any]
    inputs: list[dict[str, Any]]
    tasks: list[Task]


def rebuild(
    job: Job, out: _core.Store, threads: int, say: Callable[[str], None], restart: bool = False
) -> tuple[dict[str, Any], bool]:
    """Makes what `out` lacks. build.json, and whether anything was made. Raises AlreadyExists and
    Mismatch if `out` has something else; restart removes that first."""
    keys = [task.key for task in job.tasks]
    if restart:
        _clear(out)
    identity = json.dumps([_VERSION, job.options, job.inputs], sort_keys=True)
    plan = {
        "version": _VERSION,
        "key": hashlib.sha256(identity.encode()).hexdigest(),
        "options": job.options,
        "stoker": stoker.__version__,
        "objects": len(keys),
    }
    if (found := json_of(out, ABOUT)) is not None:
        return _finished(out, found, plan["key"]), False
    facts = _begun(out, plan, keys, restart)
    if facts:
        say(f"going on: {len(facts)} of {len(keys)} objects are there")
    todo = [number for number in range(len(keys)) if number not in facts]
    total = sum(task.size for task in job.tasks)
    left = sum(job.tasks[number].size for number in todo)
    with bar("building", total, total - left) as progress:
        for number, about in _made(job, todo, threads, out, progress.update):
            put_json(out, f"{BEGUN}{number:08d}.json", about)
            facts[number] = about
    about = {
        **plan,
        "inputs": job.inputs,
        "objects": [facts[number] for number in range(len(keys))],
    }
    put_json(out, ABOUT, about)
    forget(out)
    return about, True


def _made(
    job: Job, todo: Sequence[int], threads: int, out: _core.Store, told: Told
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object once it is in `out`. As many are under way as there are threads."""

    def make(number: int) -> tuple[IO[bytes], dict[str, Any]]:
        file = tempfile.TemporaryFile()
        try:
            return file, job.tasks[number].make(file, counted)
        except BaseException:
            file.close()
            raise

    lock, stop = threading.Lock(), threading.Event()

    def counted(size: int) -> None:
        if stop.is_set():
            raise _Stopped
        with lock:
            told(size)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="stoker-build")
    under_way: list[Any] = []
    left = list(reversed(todo))
    try:
        while left or under_way:
            while left and len(under_way) < threads:
                number = left.pop()
                under_way.append((number, pool.submit(make, number)))
            number, future = under_way.pop(0)
            file, about = future.result()
            with file:
                about = {"number": number, "key": job.tasks[number].key, **about}
                about |= _put_file(out, job.tasks[number].key, file)
            yield number, about
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        wait([future for _, future in under_way])
        for _, future in under_way:
            if not future.cancelled() and future.exception() is None:
                future.result()[0].close()


def _put_file(out: _core.Store, key: str, file: IO[bytes]) -> dict[str, Any]:
    """A whole file as an object, by one commit."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    digest, at = hashlib.sha256(), 0
    change = out.begin()
    change.resize(key, size)
    while data := file.read(_AT_ONCE):
        digest.update(data)
        change.write_bytes(key, at, data)
        at += len(data)
    change.commit().wait()
    return {"bytes": size, "sha256": digest.hexdigest()}


# ---- what is there already


def _finished(out: _core.Store, found: dict[str, Any], key: str) -> dict[str, Any]:
    if found.get("version") != _VERSION:
        raise Mismatch(f"{ABOUT} is of version {found.get('version')}: use a newer Stoker")
    if found["key"] != key:
        raise AlreadyExists(
            "OUT was built from other inputs or with other options; choose another OUT, or start "
            "again with --restart"
        )
    check_finished(out, found["objects"])
    return found


def _begun(
    out: _core.Store, plan: dict[str, Any], keys: Sequence[str], restart: bool
) -> dict[int, dict[str, Any]]:
    """What is known of the objects that are done; begins the build where there is none. keys: of
    all objects that it makes."""
    plan = {**plan, "keys": list(keys)}
    before = json_of(out, PLAN)
    if before is None:
        found = {each["key"] for each in out.list()}
        if (found and not restart) or not found.isdisjoint(keys):
            raise AlreadyExists(
                "OUT has objects of something else: choose an OUT that is empty, or new"
            )
        put_json(out, PLAN, plan)
        return {}
    if before != plan:
        raise Mismatch(
            "OUT holds an unfinished build with other inputs, other options or another version "
            "of Stoker. Finish that build with its own command, choose another OUT, or start "
            "again with --restart"
        )
    return {about["number"]: about for about in facts_of(out) if is_there(out, about)}


def _clear(out: _core.Store) -> None:
    """What a build of this kind left, and nothing else."""
    keys = [each["key"] for each in (json_of(out, ABOUT) or {}).get("objects", [])]
    keys += (json_of(out, PLAN) or {}).get("keys", [])  # one may be there without its facts
    for key in dict.fromkeys(keys):
        if out.exists(key):
            remove(out, key)
    if out.exists(ABOUT):
        remove(out, ABOUT)
    forget(out)


def _inputs(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: each[name] for name in ("key", "bytes", "tag")} for each in objects]


# ---- compressed shards


def unpacking(store: _core.Store) -> Job:
    """Every tar file and MDS shard of the store, unpacked, and each index.json of shards."""
    found = store.list()
    objects = {each["key"]: each for each in found}
    tasks, inputs = [], []
    names = list(objects)
    if any(name.endswith((".mds", ".mds.zstd")) or ".mds." in name for name in names):
        for key in mds.topmost(names):
            inputs.append(objects[key])
            tasks.append(Task(key, objects[key]["bytes"], _copying(store, objects[key], "")))
            for raw, packed, kind in mds.packed_shards(store, key, objects):
                inputs.append(packed)
                make = _copying(store, packed, kind, raw)
                tasks.append(Task(raw["key"], packed["bytes"], make))
    for name in names:
        packed = _PACKED_TAR.search(name)
        if not packed and not name.endswith(".tar"):
            continue
        key = name[: packed.start()] + ".tar" if packed else name
        if packed and key in objects:
            raise InvalidArgument(f"there are both '{name}' and '{key}': remove one of them")
        kind = {None: "", "tgz": "gz"}.get(packed and packed[1], packed and packed[2])
        inputs.append(objects[name])
        tasks.append(Task(key, objects[name]["bytes"], _copying(store, objects[name], kind)))
    if not tasks:
        raise NotFound(
            "IN holds nothing to unpack: no *.tar, *.tar.gz, *.tar.zst, *.tar.xz, *.tar.bz2, and "
            "no index.json of MDS shards; check the path"
        )
    twice = [task.key for task in tasks]
    if len(set(twice)) < len(twice):
        key = next(each for each in twice if twice.count(each) > 1)
        raise InvalidArgument(f"several objects unpack to '{key}': remove all but one of them")
    return Job({"unpack": True}, _inputs(inputs), tasks)


def _copying(
    store: _core.Store, found: dict[str, Any], kind: str, raw: dict[str, Any] | None = None
) -> Callable[[IO[bytes], Told], dict[str, Any]]:
    """kind: of the compression; "": there is none. raw: what an index.json says of the result."""

    def make(file: IO[bytes], told: Told) -> dict[str, Any]:
        key, size = found["key"], found["bytes"]
        reading = _Reading(store, key, size)
        digest = {name: hashlib.new(name) for name in (raw or {}).get("hashes", {})}
        before = 0
        if kind and not size:
            raise _damaged(key, "it has no bytes")
        with closing(_unpacked(reading, key, kind)) as opened:
            while data := _more(opened, key):
                file.write(data)
                for each in digest.values():
                    each.update(data)
                told(reading.tell() - before)
                before = reading.tell()
        told(size - before)
        if raw is not None and file.tell() != raw["bytes"]:
            raise Corruption(
                f"{key} unpacks to {file.tell()} bytes, but its index.json names {raw['bytes']}: "
                "fetch or write it again"
            )
        for name, each in digest.items():
            if each.hexdigest() != raw["hashes"][name]:
                raise Corruption(
                    f"{key} unpacks to other bytes than its index.json names ({name}): fetch or "
                    "write it again"
                )
        return {"of": key}

    return make


def _more(opened: Any, key: str) -> bytes:
    try:
        return opened.read(_AT_ONCE)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, StokerError):
            raise
        raise _damaged(key, error) from error


def _damaged(key: str, why: object) -> Corruption:
    return Corruption(f"{key} is damaged or cut, so it cannot be unpacked ({why}): fetch it again")


def _unpacked(reading: _Reading, key: str, kind: str) -> Any:
    file = io.BufferedReader(reading, 1 << 20)
    if not kind:
        return file
    if kind in ("gz", "bz2", "xz"):
        opened = {"gz": gzip.GzipFile, "bz2": bz2.BZ2File, "xz": lzma.LZMAFile}[kind]
        return opened(file, "rb") if kind != "gz" else opened(fileobj=file, mode="rb")
    try:
        import pyarrow
    except ImportError:
        raise InvalidArgument(
            f"{key} is compressed with {kind}. To unpack it, install the Python package pyarrow: "
            "`pip install pyarrow`"
        ) from None
    return pyarrow.CompressedInputStream(
        pyarrow.PythonFile(file, mode="r"), {"zst": "zstd", "br": "brotli"}.get(kind, kind)
    )


# ---- images


def resizing(store: _core.Store, side: int, quality: int, shard_bytes: int, on_corrupt: str) -> Job:
    """Writes the samples of the tar files of the store, or of its image files, into tar files. The
    shorter side of their JPEGs has `side` pixels at the most."""
    found = store.list()
    tars = [
        each for each in found if each["key"].endswith(".tar") or _PACKED_TAR.search(each["key"])
    ]
    chosen = tars or [each for each in found if each["key"].endswith(_IMAGES)]
    if not chosen:
        raise NotFound("IN holds no images to resize: no *.tar, *.jpg or *.jpeg; check the path")
    index = of_objects(store, chosen, TAR if tars else WHOLE)
    source = Indexed(store, index)
    _check_names(index)
    if not len(source):
        raise NotFound(f"there is no sample in {chosen[0]['key']}; check what IN holds")
    sizes = np.add.reduceat(index.bytes.astype(np.int64), index.starts[:-1].astype(np.int64))
    source.batch(np.zeros(0, np.uint64))  # made now: several threads use it
    tasks: list[Task] = []
    first, held = 0, 0
    for number, size in enumerate([*sizes.tolist(), shard_bytes]):
        if number == len(source) or (held and held + size > shard_bytes):
            make = _shrinking(source, first, number, sizes, (side, quality, on_corrupt))
            tasks.append(Task(f"images-{len(tasks):05d}.tar", held, make))
            first, held = number, 0
        held += size
    options = {"resize": side, "quality": quality, "shard": shard_bytes, "on_corrupt": on_corrupt}
    return Job(options, _inputs(chosen), tasks)


def _name(sample: Any, number: int) -> str:
    """In a tar file. There the name of a sample ends at its first dot."""
    if not isinstance(sample, tuple):
        return name_of(sample, number)
    folder, cut, base = sample[0].rpartition("/")
    return folder + cut + base.rpartition(".")[0].replace(".", "_")


def _check_names(index: Index) -> None:
    """No two samples may get one name."""
    if index.kind != WHOLE:
        return
    known: dict[str, str] = {}
    for number in range(len(index)):
        key = index.name(number)
        other = known.setdefault(_name((key, None), number), key)
        if other != key:
            raise InvalidArgument(
                f"'{other}' and '{key}' would get one name in a tar file: rename one of them"
            )


def _shrinking(
    source: Indexed, first: int, last: int, sizes: np.ndarray, how: tuple[int, int, str]
) -> Callable[[IO[bytes], Told], dict[str, Any]]:
    side, quality, on_corrupt = how

    def make(file: IO[bytes], told: Told) -> dict[str, Any]:
        kept = smaller = 0
        skipped: list[list[str]] = []
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for at in range(first, last, _SAMPLES):
                numbers = np.arange(at, min(last, at + _SAMPLES), dtype=np.uint64)
                for number, sample in zip(numbers.tolist(), source.batch(numbers), strict=True):
                    name = _name(sample, number)
                    try:
                        parts, less = _shrunk(sample, side, quality)
                    except StokerError as error:
                        if on_corrupt == "raise":
                            raise Corruption(
                                f"the image of sample {name} cannot be used: {error}; replace it, "
                                "or leave such samples out with --on-corrupt skip"
                            ) from error
                        skipped.append([name, str(error)])
                        continue
                    for ending, data in parts.items():
                        member = tarfile.TarInfo(f"{name}.{ending}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
                    kept, smaller = kept + 1, smaller + less
                told(int(sizes[at : at + len(numbers)].sum()))
        return {"samples": kept, "smaller": smaller, "skipped": skipped}

    return make


def _shrunk(sample: Any, side: int, quality: int) -> tuple[dict[str, bytes], bool]:
    """The parts of a sample by extension, with its JPEG made smaller; whether it was larger."""
    if isinstance(sample, tuple):
        parts = {"jpg": sample[1].numpy().tobytes()}
    else:
        parts = {
            ending: part.numpy().tobytes() for ending, part in sample.items() if ending != "__key__"
        }
    for ending, data in parts.items():
        if data[:3] == b"\xff\xd8\xff":
            less = _core.shrink_jpeg(data, side, quality)
            return parts | ({ending: less} if less is not None else {}), less is not None
    raise Corruption("none of its parts begins as a JPEG does")
