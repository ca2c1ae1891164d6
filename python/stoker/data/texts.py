"""Documents of text files, JSONL and Parquet, from plain files and from stores, slice by slice.

A slice is what can be read by itself: a run of bytes of a file of lines, a run of row groups of a
Parquet file, or a whole file that is compressed. A line belongs to the slice in which it begins. So
slices can be read in any order, by any process, and hold each line once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stoker import _core

from ..stores import open_store
from .corpus import CorpusError, TextFile, is_text_name

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
_SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_LOOK_AHEAD = 64 << 10  # bytes read behind a slice for the end of its last line, doubled each time
_AT_ONCE = 8 << 20  # bytes of a file that are hashed at once
Read = Callable[[int, int], bytes]  # bytes [begin, end) of one input


@dataclass(frozen=True)
class Input:
    """A file, or an object of a store. name: as it is told, and kept in the index. where: the path,
    or the key in the store of this composition ("": a plain file). tag: tells contents apart."""

    name: str
    where: str
    store: str
    size: int
    tag: str

    @property
    def packed(self) -> bool:
        return self.where.lower().endswith(".gz")

    @property
    def kind(self) -> str:
        plain = self.where.lower().removesuffix(".gz")
        return next((kind for end, kind in _SUFFIXES.items() if plain.endswith(end)), TEXT)


@dataclass(frozen=True)
class Slice:
    """A part of an input (its number): bytes [begin, end), of Parquet row groups. size: bytes of
    the input that it stands for."""

    input: int
    begin: int
    end: int
    size: int


def of_files(files: Sequence[TextFile]) -> list[Input]:
    return [
        Input(file.name, str(file.path), "", file.size_bytes, str(file.mtime_ns)) for file in files
    ]


def of_store(composition: str) -> list[Input]:
    """The objects of a store that have names of text, JSONL or Parquet, in the order of names."""
    with open_store(composition, read_only=True) as store:
        found = [each for each in store.list() if is_text_name(each["key"])]
    if not found:
        raise CorpusError(
            f"no object of {composition} has the name of a text file: *.txt, *.md, *.jsonl, "
            f"*.parquet, ... "
            "(or the same with .gz); give files of these kinds"
        )
    return [
        Input(each["key"], each["key"], composition, each["bytes"], each["tag"]) for each in found
    ]


class Reader:
    """Bytes of inputs. Opens each store once; close() closes them. One thread."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._stores: dict[str, _core.Store] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        self._open.close()

    def read(self, file: Input, begin: int, end: int) -> bytes:
        """Bytes [begin, end). Raises CorpusError where they are not there."""
        if file.store:
            if begin == end:
                return b""
            if file.store not in self._stores:
                opened = open_store(file.store, read_only=True)
                self._stores[file.store] = self._open.enter_context(opened)
            return self._stores[file.store].read_bytes(file.where, begin, end - begin)
        try:
            with open(file.where, "rb", buffering=0) as opened:
                opened.seek(begin)
                out = bytearray()
                while len(out) < end - begin and (more := opened.read(end - begin - len(out))):
                    out += more
                grown = not file.size and opened.read(1)  # what cannot be read is told even so
        except OSError as error:
            raise _unreadable(file, error.strerror or error) from error
        if grown:
            raise _unreadable(file, "its size was listed as 0, but it has bytes")
        if len(out) < end - begin:
            raise _unreadable(file, f"it has {begin + len(out)} bytes now, and had {file.size}")
        return bytes(out)

    def of(self, file: Input) -> Read:
        return lambda begin, end: self.read(file, begin, end)


def _unreadable(file: Input, why: object) -> CorpusError:
    return CorpusError(
        f"the corpus file {file.where} cannot be read ({why}): write it again or leave it out"
    )


# ---- slices


def slices(files: Sequence[Input], reader: Reader, piece: int) -> list[Slice]:
    """All slices of these inputs, each of about `piece` bytes or less, in order."""
    out = []
    for number, file in enumerate(files):
        if file.kind == PARQUET:
            out += _row_groups(number, file, reader, piece)
        elif file.packed:
            out.append(Slice(number, 0, file.size, file.size))
        else:
            for begin in range(0, max(1, file.size), piece):
                end = min(begin + piece, file.size)
                out.append(Slice(number, begin, end, end - begin))
    return out


def _row_groups(number: int, file: Input, reader: Reader, piece: int) -> list[Slice]:
    groups = _parquet(file, reader).num_row_groups
    step = max(1, groups * piece // max(1, file.size))  # row groups of about `piece` bytes
    share = lambda group: file.size * group // max(1, groups)  # noqa: E731
    return [
        Slice(number, begin, end := min(begin + step, groups), share(end) - share(begin))
        for begin in range(0, groups, step)
    ]


@dataclass(frozen=True)
class Documents:
    """What a slice holds. sha256: of its bytes; of Parquet, the first slice has that of the whole
    file and the others none."""

    sha256: str | None
    texts: Iterator[str]


def read_slice(
    part: Slice, files: Sequence[Input], reader: Reader, column: str, piece: int
) -> Documents:
    """The documents of a slice that have more than white space. Raises CorpusError naming the file,
    and the line or the column."""
    file = files[part.input]
    read = reader.of(file)
    if file.kind == PARQUET:
        sha256 = None if part.begin else _sha256_of(read, file.size)
        texts = _of_parquet(file, reader, range(part.begin, part.end), column)
    elif file.packed:
        raw = read(part.begin, part.end)
        sha256 = hashlib.sha256(raw).hexdigest()
        texts = _of_lines(file, _unpacked(file, raw), column, piece)
    else:
        raw = read(part.begin, part.end)
        sha256 = hashlib.sha256(raw).hexdigest()
        lines, start = _lines_from(raw, read, part.begin, file.size)
        before = lambda: _count_lines(read, start)  # noqa: E731
        texts = (
            iter([_text(lines)]) if file.kind == TEXT else _of_jsonl(file, lines, column, before)
        )
    return Documents(sha256, (text for text in texts if text.strip()))


def head(file: Input, reader: Reader, column: str, most: int) -> Iterator[str]:
    """Documents from the first `most` bytes of an input or a little more; less where it is cut."""
    read = reader.of(file)
    if file.kind == PARQUET:
        yield from _of_parquet(file, reader, range(0, 1), column, rows=16)
        return
    raw = read(0, min(most, file.size))
    if file.packed:
        with contextlib.suppress(zlib.error):
            raw = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(raw, 4 * most)
        raw = raw[: raw.rfind(b"\n") + 1]
    else:
        raw, _ = _lines_from(raw, read, 0, file.size)
    yield from [_text(raw)] if file.kind == TEXT else _of_jsonl(file, raw, column, lambda: 0)


def _lines_from(raw: bytes, read: Read, begin: int, size: int) -> tuple[bytes, int]:
    """The lines that begin in `raw`, which lies at `begin`, and where the first of them begins."""
    first = 0
    if begin and read(begin - 1, begin) != b"\n":
        first = raw.find(b"\n") + 1 or len(raw)
    if first == len(raw):
        return b"", begin + first
    tail = bytearray()
    at, step = begin + len(raw), _LOOK_AHEAD
    while at < size and (tail or raw)[-1:] != b"\n":
        more = read(at, min(size, at + step))
        tail += more[: more.find(b"\n") + 1 or len(more)]
        at, step = at + len(more), 2 * step
    return raw[first:] + tail, begin + first


def _count_lines(read: Read, end: int) -> int:
    return sum(read(at, min(end, at + _AT_ONCE)).count(b"\n") for at in range(0, end, _AT_ONCE))


def _sha256_of(read: Read, size: int) -> str:
    digest = hashlib.sha256()
    for at in range(0, size, _AT_ONCE):
        digest.update(read(at, min(size, at + _AT_ONCE)))
    return digest.hexdigest()


# ---- kinds


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _unpacked(file: Input, raw: bytes) -> bytes:
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise _unreadable(file, error) from error


def _of_lines(file: Input, whole: bytes, column: str, piece: int) -> Iterator[str]:
    """Of an input that was unpacked: a text is cut as one that is not compressed would be."""
    if file.kind == JSONL:
        yield from _of_jsonl(file, whole, column, lambda: 0)
        return
    read = lambda begin, end: whole[begin:end]  # noqa: E731
    for begin in range(0, len(whole), piece):
        yield _text(_lines_from(whole[begin : begin + piece], read, begin, len(whole))[0])


def _of_jsonl(file: Input, lines: bytes, column: str, before: Callable[[], int]) -> Iterator[str]:
    """before: counts the lines of the file that stand before these."""
    for number, line in enumerate(lines.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{file.where}, line {before() + number}, is not JSON ({error}): correct or "
                f"remove it"
            ) from error
        if not isinstance(row, dict) or column not in row:
            fields = ", ".join(map(repr, list(row)[:8])) if isinstance(row, dict) else ""
            raise CorpusError(
                f"{file.where}, line {before() + number}, has no field {column!r}"
                + (
                    f" but {fields}: name the column that holds the text"
                    if fields
                    else ": it is not an object"
                )
            )
        try:
            yield as_text(row[column])
        except TypeError as error:
            raise CorpusError(
                f"{file.where}, line {before() + number}: {column!r} {error}: correct or remove it"
            ) from None


def as_text(value: Any) -> str:
    """A value of a column of text. Half of a surrogate pair becomes U+FFFD, and so do bytes that
    are not UTF-8; None is an empty text. Raises TypeError for what is no text."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return _text(value)
    if not isinstance(value, str):
        raise TypeError(f"is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _parquet(file: Input, reader: Reader) -> Any:
    """A pyarrow.parquet.ParquetFile."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise CorpusError(
            f"{file.where} is a Parquet file, and to read it the Python package pyarrow is needed: "
            "install it with `pip install pyarrow`, or give text or JSONL"
        ) from None
    try:
        return parquet.ParquetFile(_File(file, reader))
    except (ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _of_parquet(
    file: Input, reader: Reader, groups: range, column: str, rows: int = 0
) -> Iterator[str]:
    """rows: of the first batch only; 0: all."""
    from pyarrow import ArrowException

    opened = _parquet(file, reader)
    names = opened.schema_arrow.names
    if column not in names:
        raise CorpusError(
            f"{file.where} has no column {column!r}, only {', '.join(map(repr, names[:8]))}: "
            f"name the column that holds the text"
        )
    groups = [each for each in groups if each < opened.num_row_groups]
    try:
        for batch in opened.iter_batches(rows or 1024, row_groups=groups, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield as_text(value)
            if rows:
                return
    except TypeError as error:
        raise CorpusError(
            f"{file.where}: the column {column!r} {error}: name the column that holds the text"
        ) from None
    except (ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


class _File(io.RawIOBase):
    """An input as a file that can be read, for pyarrow."""

    def __init__(self, file: Input, reader: Reader) -> None:
        self._file, self._reader, self._at = file, reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        end = min(self._at + len(into), self._file.size)
        if end <= self._at:
            return 0
        data = self._reader.read(self._file, self._at, end)
        into[: len(data)] = data
        self._at = end
        return len(data)
