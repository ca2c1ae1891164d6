"""The manifest and the chunk table of a checkpoint, as docs/formats/checkpoint.md defines them.

Nothing here moves data. What is read from a store is checked before it is believed: parse() and
parse_table() raise Corruption for anything that a writer of this format cannot have written.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from stoker import _core
from stoker.checkpoint.rectangles import common
from stoker.errors import Corruption, InvalidArgument, Mismatch, StokerError

FORMAT = "stoker checkpoint"
VERSION = 1
VERSION_SHARDED = 2  # ranks wrote it together
VERSION_REDUCED = 3  # files are reduced
VERSION_RANKS = 4  # it holds an offloaded run of several ranks
MANIFEST, TABLE, REDUCED_TABLE = "MANIFEST.json", "chunks-00000.bin", "reduced-00000.bin"
REDUCED = ".reduced"  # what the name of a reduced file ends with
CHUNK = 4 << 20  # bytes
_FOLDER = re.compile(r"step-(\d{6,18})-(\d{6,18})-([0-9a-f]{8})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_HEADER = struct.Struct("<8sIIQQ32x")
_ENTRY = struct.Struct("<16sQII")
_MAGIC, _MAGIC_REDUCED = b"STKCHUNK", b"STKREDUC"
WIDTHS = (0, 1, 2, 4, 8)  # of an element; 0: the chunk lies there as it is


@dataclass(frozen=True)
class Name:
    """A folder's name. They sort by when they were saved: a run that went back saves lower steps
    later, and these count."""

    step: int
    attempt: int
    id: str

    def __lt__(self, other: Name) -> bool:
        return (self.attempt, self.step, self.id) < (other.attempt, other.step, other.id)

    def __str__(self) -> str:
        return f"step-{self.step:06}-{self.attempt:06}-{self.id}"

    @classmethod
    def of(cls, text: str) -> Name | None:
        found = _FOLDER.fullmatch(text)
        name = found and cls(int(found[1]), int(found[2]), found[3])
        return name if name and str(name) == text else None


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Table:
    name: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class Entry:
    """A chunk of a file."""

    hash: bytes
    offset: int
    bytes: int


@dataclass(frozen=True)
class Stored:
    """A chunk of a reduced file, as it lies there."""

    hash: bytes
    offset: int
    bytes: int
    width: int


@dataclass(frozen=True)
class Piece:
    """A tensor, or a plane, in a pack."""

    name: str
    dtype: str
    shape: list[int]
    file: str
    offset: int
    bytes: int


@dataclass
class Manifest:
    step: int
    attempt: int
    id: str
    created: float
    writer: dict[str, Any] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    state: list[Piece] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    offloaded: dict[str, Any] = field(default_factory=dict)
    # By the number of a piece: {"shape", "parts": [{"begin", "part"}]}, the tensor it is a part of.
    sharded: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    pinned: bool = False
    # Files that lie there reduced, by name: the bytes that are stored.
    reduced: dict[str, int] = field(default_factory=dict)

    @property
    def version(self) -> int:
        if any("ranks" in run for run in self.offloaded.values()):
            return VERSION_RANKS
        if self.reduced:
            return VERSION_REDUCED
        return VERSION_SHARDED if self.sharded else VERSION

    @property
    def name(self) -> Name:
        return Name(self.step, self.attempt, self.id)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files)

    @property
    def stored_bytes(self) -> int:
        return sum(self.reduced.get(each.name, each.bytes) for each in self.files)

    def object_of(self, file: str) -> tuple[str, int]:
        """Its name in the folder, and the bytes that it has there."""
        if file in self.reduced:
            return file + REDUCED, self.reduced[file]
        return file, self.file(file).bytes

    @property
    def objects_there(self) -> list[str]:
        """What lies in the folder beside the manifest."""
        names = [self.object_of(each.name)[0] for each in self.files]
        return [*(each.name for each in self.tables), *names]

    def file(self, name: str) -> File:
        return next(each for each in self.files if each.name == name)

    def dump(self) -> bytes:
        whole = {"format": FORMAT, "version": self.version, **asdict(self)}
        for later in ("sharded", "reduced"):
            if not whole[later]:
                del whole[later]
        text = json.dumps(whole, separators=(",", ":"), allow_nan=True, ensure_ascii=False)
        head = text[:-1].encode("utf-8", "surrogatepass")
        return head + b',"digest":"' + hash_of(head).hex().encode() + b'"}\n'

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Corruption, or Mismatch for a later version, in a sentence that begins with `where`."""
        found = re.fullmatch(rb'(.*),"digest":"([0-9a-f]{32})"\}\n', data, re.DOTALL)
        if not found or hash_of(found[1]).hex().encode() != found[2]:
            raise damaged(where, f"{MANIFEST} is damaged: its bytes do not match its digest")
        try:
            whole = json.loads(found[1] + b"}")
            if whole.pop("format") != FORMAT:
                raise Mismatch(
                    f"{where}: {MANIFEST} was not written by Stoker: its format is not {FORMAT!r};"
                    " name a store that holds checkpoints of Stoker"
                )
            version = whole.pop("version")
            if version not in (VERSION, VERSION_SHARDED, VERSION_REDUCED, VERSION_RANKS):
                raise Mismatch(
                    f"{where} has format {version}, and this Stoker reads formats up to"
                    f" {VERSION_RANKS}: use a newer Stoker"
                )
            made = cls(**whole)
            _rule(version == made.version, f"format {version} of what takes format {made.version}")
            made.files = [File(**each) for each in made.files]
            made.tables = [Table(**each) for each in made.tables]
            made.state = [Piece(**each) for each in made.state]
            made._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, Mismatch):
                raise
            raise damaged(
                where, f"{MANIFEST} breaks the format of a checkpoint ({error})"
            ) from None
        return made

    def _check(self) -> None:
        """ValueError if a rule of the format is broken."""
        sizes = {}
        for each in self.files:
            _rule(
                _FILE.fullmatch(each.name) and each.name != MANIFEST, f"the file name {each.name!r}"
            )
            _rule(each.name not in sizes, f"a second file called {each.name}")
            _rule(
                _number(each.bytes) and each.chunks == chunks_in(each.bytes),
                f"the size of {each.name}",
            )
            sizes[each.name] = each.bytes
        _rule(isinstance(self.reduced, dict), "the member reduced")
        tables = [TABLE, REDUCED_TABLE] if self.reduced else [TABLE]
        _rule([each.name for each in self.tables] == tables, "the member tables")
        for name in tables:
            _rule(name not in sizes, f"a file called {name}, as a table is,")
        counts = [
            sum(each.chunks for each in self.files),
            sum(each.chunks for each in self.files if each.name in self.reduced),
        ]
        for table, count in zip(self.tables, counts):
            _rule(table.bytes == _HEADER.size + count * _ENTRY.size, f"the size of {table.name}")
        for name, size in self.reduced.items():
            _rule(name in sizes and name + REDUCED not in sizes, f"the reduced file {name}")
            _rule(_number(size) and 0 < size < sizes[name], f"the reduced size of {name}")
        for each in self.state:
            _rule(_number(each.offset) and _number(each.bytes), f"the place of {each.name}")
            _rule(each.file in sizes, f"the file of {each.name}")
            _rule(each.offset + each.bytes <= sizes[each.file], f"the place of {each.name}")
            _rule(all(_number(size) for size in each.shape), f"the shape of {each.name}")
            dtype = getattr(torch, each.dtype, None)
            _rule(isinstance(dtype, torch.dtype), f"the dtype of {each.name}")
            _rule(math.prod(each.shape) * dtype.itemsize == each.bytes, f"the size of {each.name}")
        _rule(_number(self.step) and _number(self.attempt), "the members step and attempt")
        for each in (self.aliases, self.objects, self.offloaded, self.writer, self.sharded):
            _rule(isinstance(each, dict), "a member that is no JSON object")
        _rule(all(isinstance(name, str) for name in self.aliases.values()), "the member aliases")
        _rule(_real(self.created) and 0 <= self.created < 1 << 40, "the member created")
        _rule(self.metric is None or _real(self.metric), "the member metric")
        for number, cut in self.sharded.items():
            self._check_sharded(number, cut)

    def _check_sharded(self, number: str, cut: dict[str, Any]) -> None:
        """Its parts are the whole tensor, each element once."""
        shape, what = cut["shape"], f"the parts of tensor {number}"
        _rule(all(_number(size) for size in shape), what)
        _rule(int(number) in [each["part"] for each in cut["parts"]], what)
        seen: list[tuple[list[int], list[int]]] = []
        for each in cut["parts"]:
            _rule(_number(each["part"]) and each["part"] < len(self.state), what)
            piece, begin = self.state[each["part"]], each["begin"]
            _rule(len(begin) == len(piece.shape) == len(shape), what)
            _rule(all(_number(at) for at in begin), what)
            _rule(all(b + n <= all_ for b, n, all_ in zip(begin, piece.shape, shape)), what)
            _rule(piece.dtype == self.state[int(number)].dtype, what)
            _rule(not any(common(begin, piece.shape, *other) for other in seen), what)
            seen.append((begin, piece.shape))
        _rule(sum(math.prod(size) for _, size in seen) == math.prod(shape), what)


def damaged(where: str, what: str) -> Corruption:
    """The error for a checkpoint of which something is damaged or missing."""
    return Corruption(f"{where}: {what}; copy it again from another store, or restore another step")


@contextlib.contextmanager
def well_formed(where: str, what: str, *more: type[Exception]) -> Iterator[None]:
    """Around what reads `what` in the manifest of the checkpoint: what is not as the format says is
    damage. Errors of Stoker stay what they are. `more`: RuntimeError, where torch is asked for no
    memory, for it is what torch raises where memory lacks."""
    try:
        yield
    except StokerError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, *more) as error:
        raise damaged(where, f"the manifest breaks the format of {what} ({error!r})") from error


def _rule(holds: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} is not as the format says")


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _real(value: Any) -> bool:
    """Whether it is a number that a float holds."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1023
    return isinstance(value, float)


def check_name(name: str, taken: set[str]) -> None:
    """InvalidArgument unless a file of a checkpoint may be called so."""
    own = {MANIFEST, TABLE, REDUCED_TABLE}
    if not _FILE.fullmatch(name) or name in own | taken or name.endswith(REDUCED):
        raise InvalidArgument(
            f"files= cannot hold {name!r}: use letters, digits, dots, - and _, and no name that the"
            " checkpoint uses itself"
        )


def chunks_in(size: int) -> int:
    return -(-size // CHUNK)


def hash_of(data: bytes) -> bytes:
    """XXH3-128, canonical."""
    held = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    return _core.xxh3_128(held.data_ptr(), len(data))


def dump_table(hashes: Iterable[tuple[File, list[bytes]]]) -> bytes:
    """The table of files whose chunks have these hashes."""
    entries = []
    for file, of_file in hashes:
        for i, each in enumerate(of_file):
            size = min(CHUNK, file.bytes - i * CHUNK)
            entries.append(_ENTRY.pack(each, i * CHUNK, size, 0))
    return _HEADER.pack(_MAGIC, 1, _ENTRY.size, len(entries), CHUNK) + b"".join(entries)


def parse_table(data: bytes, manifest: Manifest, where: str) -> dict[str, list[Entry]]:
    """The chunks of each file by its name. Corruption unless they are those of the manifest."""
    table = manifest.tables[0]
    _check_table(data, table, _MAGIC, where)
    found, at = {}, _HEADER.size
    for file in manifest.files:
        entries = []
        for i in range(file.chunks):
            digest, offset, length, codec = _ENTRY.unpack_from(data, at)
            if codec:
                raise Mismatch(
                    f"{where}: {file.name} is written in codec {codec}, which this Stoker does not"
                    " know: use a newer Stoker"
                )
            size = min(CHUNK, file.bytes - i * CHUNK)
            if (offset, length) != (i * CHUNK, size):
                raise damaged(
                    where,
                    f"{table.name} says that chunk {i} of {file.name} has {length} bytes from byte"
                    f" {offset}, but by the manifest it has {size} from byte {i * CHUNK}",
                )
            entries.append(Entry(digest, offset, length))
            at += _ENTRY.size
        found[file.name] = entries
    return found


def dump_reduced(chunks: Iterable[list[Stored]]) -> bytes:
    """The table of reduced files, in the manifest's order."""
    entries = [
        _ENTRY.pack(each.hash, each.offset, each.bytes, each.width)
        for of_file in chunks
        for each in of_file
    ]
    header = _HEADER.pack(_MAGIC_REDUCED, 1, _ENTRY.size, len(entries), CHUNK)
    return header + b"".join(entries)


def parse_reduced(data: bytes, manifest: Manifest, where: str) -> dict[str, list[Stored]]:
    """Where the chunks of each reduced file are. Corruption unless they are all of it."""
    table = manifest.tables[1]
    _check_table(data, table, _MAGIC_REDUCED, where)
    found, at = {}, _HEADER.size
    for file in manifest.files:
        if file.name not in manifest.reduced:
            continue
        chunks, end = [], 0
        for i in range(file.chunks):
            made = Stored(*_ENTRY.unpack_from(data, at))
            if made.width not in WIDTHS:
                raise Mismatch(
                    f"{where}: {file.name} is reduced by elements of {made.width} bytes, which this"
                    " Stoker does not know: use a newer Stoker"
                )
            most = min(CHUNK, file.bytes - i * CHUNK)
            fits = made.bytes == most if made.width == 0 else 0 < made.bytes < most
            if made.offset != end or not fits:
                raise damaged(
                    where,
                    f"{table.name} says that chunk {i} of {file.name} has {made.bytes} bytes from"
                    f" byte {made.offset}, but it begins at byte {end} and has at most {most}",
                )
            chunks.append(made)
            end, at = end + made.bytes, at + _ENTRY.size
        if end != manifest.reduced[file.name]:
            raise damaged(
                where,
                f"the chunks of {file.name} in {table.name} have {end} bytes, but the manifest"
                f" says {manifest.reduced[file.name]}",
            )
        found[file.name] = chunks
    return found


def _check_table(data: bytes, table: Table, magic: bytes, where: str) -> None:
    if len(data) != table.bytes or hash_of(data).hex() != table.hash:
        raise damaged(where, f"{table.name} is damaged: its bytes do not match their hash")
    found, version, size, count, chunk = _HEADER.unpack_from(data)
    if version != 1:
        raise Mismatch(
            f"{where}: {table.name} has version {version}, and this Stoker reads version 1: use a"
            " newer Stoker"
        )
    if (found, size, chunk) != (magic, _ENTRY.size, CHUNK) or count * size != len(data) - 64:
        raise damaged(
            where,
            f"{table.name} breaks the format: its header does not fit its {len(data)} bytes",
        )
