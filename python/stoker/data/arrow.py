"""Arrow's IPC streams and files, as HF `datasets` saves them: where each cell of each row lies.

A row's cells lie far apart: each column of a record batch is an array of its own. So a sample has a
part for each column, in the order of the schema; columns of structs are columns of their members,
"image.bytes". Reads schema, the head of each record batch, and of the arrays only those of offsets
and of validity. Everything is checked against the size of the object before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker import _core

from ..errors import Corruption, InvalidArgument, NotFound
from .flat import Table
from .index import ARROW, Index

STATE, SPLITS = "state.json", "dataset_dict.json"
# How a part is read: as it is; None; of a byte of eight truth values, one.
FORMS = ["value", "null", *(f"bit {bit}" for bit in range(8))]
_NULL, _BIT = 1, 2
_BLOCK = 128 << 10  # bytes that are read at once, so that small things come together
_HEAD_MOST = 256 << 20  # bytes of a message's head
_TEXT_MOST = 16 << 20  # bytes of a state.json
_DEPTH_MOST = 32  # of structs in structs
_FIELDS_MOST = 1 << 14
_BEGINS = b"ARROW1"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
# Types, by their numbers in the format's schema.
_NOTHING, _INT, _FLOAT, _BINARY, _TEXT, _BOOL, _DATE, _TIME, _TIMESTAMP = 1, 2, 3, 4, 5, 6, 8, 9, 10
_LIST, _STRUCT, _FIXED_BINARY, _FIXED_LIST = 12, 13, 15, 16
_DURATION, _LARGE_BINARY, _LARGE_TEXT, _LARGE_LIST = 18, 19, 20, 21
_NAMES = {
    7: "decimal",
    11: "interval",
    14: "union",
    17: "map",
    22: "run-end encoded",
    23: "binary view",
    24: "string view",
    25: "list view",
    26: "large list view",
}


@dataclass(frozen=True)
class Field:
    """A node of the schema.

    kind: "struct", "null", "bool", "fixed" (cells of equal bytes), "offsets" (cells of any).
    width: bytes of an offset. form: what its column is; None where it is no column.
    """

    name: str
    kind: str
    form: dict[str, Any] | None = None
    width: int = 0
    children: tuple[Field, ...] = ()
    # Of a list: how many arrays of validity and of values its items have behind its own.
    items: int = 0


# ---- which objects there are


def objects(
    store: _core.Store, name: str, listed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The Arrow objects of a folder that `save_to_disk` wrote, by its state.json, or of any folder,
    by their names; or the object of this name. listed: the objects of the store, as far as they may
    be of it."""
    found = {each["key"]: each for each in listed}
    folder = name.rstrip("/") + "/" if name else ""
    if name in found:
        return [found[name]]
    if folder + STATE in found:
        return [_of_state(found, folder, each) for each in _files(store, found[folder + STATE])]
    if folder + SPLITS in found:
        splits = sorted({key.split("/")[0] for key in _below(found, folder) if "/" in key})
        raise InvalidArgument(
            f"'{name}' has several data sets ({', '.join(splits)}): name one of these folders"
        )
    chosen = [folder + key for key in sorted(_below(found, folder)) if key.endswith(".arrow")]
    if not chosen:
        raise NotFound(f"there is no .arrow object below '{name}': name the folder of a data set")
    return [found[key] for key in chosen]


def all_objects(store: _core.Store, listed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all data sets among these objects: what their state.json name, and .arrow objects of
    folders that have none."""
    folders: dict[str, list[dict[str, Any]]] = {}
    for each in listed:
        folders.setdefault(each["key"].rpartition("/")[0], []).append(each)
    chosen = []
    for folder, inside in sorted(folders.items()):
        if any(each["key"].rpartition("/")[2] == STATE for each in inside):
            chosen += objects(store, folder, inside)
        else:
            chosen += [each for each in inside if each["key"].endswith(".arrow")]
    return chosen


def _below(keys: Sequence[str] | dict[str, Any], folder: str) -> list[str]:
    return [key.removeprefix(folder) for key in keys if key.startswith(folder)]


def _of_state(found: dict[str, Any], folder: str, name: Any) -> dict[str, Any]:
    if not isinstance(name, str) or folder + name not in found:
        raise NotFound(f"{folder}{STATE} names '{name}', which is not beside it: fetch that object")
    return found[folder + name]


def _files(store: _core.Store, state: dict[str, Any]) -> list[Any]:
    key, size = state["key"], state["bytes"]
    try:
        if size > _TEXT_MOST:
            raise ValueError(f"{size} bytes")
        about = json.loads(bytes(store.read_bytes(key, 0, size)))
        files = [each["filename"] for each in about["_data_files"]]
        chosen = about.get("_indices_data_files") or about.get("_indices_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corruption(
            f"{key} is not a state of a data set ({error}): save the data set again"
        ) from error
    if chosen:
        raise InvalidArgument(
            f"{key} chooses rows by an array of indices: call flatten_indices(), then save the "
            f"data set again"
        )
    if not files:
        raise NotFound(f"{key} names no data file: there is nothing to read")
    return files


# ---- where the cells lie


def arrow_index(store: _core.Store, found: dict[str, Any]) -> Index:
    """Of an object as store.list() describes it. Corruption: it is cut, or says what cannot be.
    InvalidArgument: it has columns or compression that are not read."""
    key = found["key"]
    reading = _Bytes(store, key, found["bytes"])
    try:
        messages = _messages(reading)
        kind, schema, _ = next(messages, (0, None, 0))
        if kind != _SCHEMA or schema is None:
            raise ValueError("it does not begin with a schema")
        fields = _fields(schema, key)
        columns = [each for field in fields for each in _columns(field)]
        parts = []
        for kind, head, body in messages:
            if kind != _BATCH or head is None:
                raise ValueError(f"a message of kind {kind} where record batches belong")
            if head.table(3) is not None:
                raise InvalidArgument(
                    f"{key} has compressed record batches, so single rows cannot be read: write "
                    f"it without compression"
                )
            parts.append(_batch(reading, fields, head, body))
    except InvalidArgument:
        raise
    except ValueError as error:
        raise Corruption(
            f"{key} is not a whole Arrow stream or file ({error}): fetch or write it again"
        ) from error
    about = {name: found[name] for name in ("key", "bytes", "tag")}
    rows = sum(part.rows for part in parts)
    width = len(columns)
    cells = rows * width

    def column(name: str, kind: str) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, kind)

    return Index(
        ARROW,
        [about],
        list(FORMS),
        np.arange(0, cells + 1, width, dtype="<u8"),
        np.zeros(cells, "<u4"),
        column("form", "<u2"),
        column("offset", "<u8"),
        column("bytes", "<u8"),
        None,
        np.zeros(0, "<u8"),
        np.zeros(0, np.uint8),
        columns,
    )


class _Bytes:
    """Ranges of an object. What is near comes by one read."""

    def __init__(self, store: _core.Store, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size
        self._block, self._first = b"", 0

    def read(self, at: int, count: int) -> bytes:
        """ValueError: beyond the end."""
        if at < 0 or count < 0 or count > self.size - at:
            raise ValueError(f"it ends at byte {self.size}, before byte {at + count}")
        begin = at - self._first
        if begin < 0 or begin + count > len(self._block):
            most = min(max(count, _BLOCK), self.size - at)
            self._block = bytes(self._store.read_bytes(self._key, at, most)) if most else b""
            self._first, begin = at, 0
        return self._block[begin : begin + count]


def _messages(reading: _Bytes) -> Iterator[tuple[int, Table | None, tuple[int, int]]]:
    """Kind, head, and the body's offset and bytes. ValueError unless the stream ends as it must."""
    at = 0
    framed = reading.size >= 8 and reading.read(0, 8) == _BEGINS + b"\0\0"  # a file, not a stream
    if framed:
        at = 8
    while True:
        head = reading.read(at, 8)
        if head[:4] != b"\xff\xff\xff\xff":
            raise ValueError(f"there is no message at byte {at}")
        size = int.from_bytes(head[4:], "little")
        at += 8
        if size == 0:
            break
        if size > _HEAD_MOST:
            raise ValueError(f"a head of {size} bytes")
        message = Table.root(reading.read(at, size))
        at += size
        body = message.number(3, "<q")
        if body < 0 or body > reading.size - at:
            raise ValueError(f"it ends at byte {reading.size}, before byte {at + body}")
        yield message.number(1, "<B"), message.table(2), (at, body)
        at += body
    if not framed:
        if at != reading.size:
            raise ValueError(f"there are {reading.size - at} bytes behind its end")
        return
    tail = reading.size - at - 10  # the footer, its size, the magic again
    if tail < 0 or reading.read(reading.size - 6, 6) != _BEGINS:
        raise ValueError("its footer is not there")
    if int.from_bytes(reading.read(reading.size - 10, 4), "little") != tail:
        raise ValueError("its footer has another size")


# ---- the schema


def _fields(schema: Table, key: str) -> list[Field]:
    if schema.number(0, "<h") != 0:
        raise InvalidArgument(f"{key} is big-endian: write it on a little-endian machine")
    made: list[str] = []
    fields = [_field(each, "", 0, made) for each in schema.tables(1)]
    columns = [each["name"] for field in fields for each in _columns(field)]
    if len(set(columns)) != len(columns):
        raise InvalidArgument(f"{key} has two columns of one name: rename one")
    if not columns or not any(_bounded(field) for field in fields):
        raise InvalidArgument(f"{key} has no columns that hold anything; leave it out")
    return fields


def _bounded(field: Field) -> bool:
    """Whether each row of it takes room, so that rows cannot be more than bytes allow."""
    return field.kind in ("bool", "fixed", "offsets") or any(map(_bounded, field.children))


def _columns(field: Field) -> list[dict[str, Any]]:
    if field.kind == "struct":
        return [each for child in field.children for each in _columns(child)]
    return [field.form] if field.form is not None else []


def _field(table: Table, above: str, depth: int, made: list[str]) -> Field:
    name = above + table.text(0)
    made.append(name)
    if depth > _DEPTH_MOST or len(made) > _FIELDS_MOST:  # a schema may be made to be endless
        raise InvalidArgument(
            f"column '{name}' is nested deeper than {_DEPTH_MOST} levels, or there are more than"
            f" {_FIELDS_MOST} columns: remove it (remove_columns)"
        )
    kind, about, children = table.number(2, "<B"), table.table(3), table.tables(5)
    if table.table(4) is not None:
        raise refused(name, "dictionary-encoded")
    if about is None:
        raise ValueError(f"column '{name}' has no type")
    if kind == _STRUCT:
        inside = tuple(_field(child, name + ".", depth + 1, made) for child in children)
        return Field(name, "struct", children=inside)

    def column(encoding: str, size: int = 0, shape: Sequence[int] = ()) -> dict[str, Any]:
        return {"name": name, "encoding": encoding, "bytes": size, "shape": list(shape)}

    if kind == _NOTHING:
        return Field(name, "null", column("null"))
    if kind == _BOOL:
        return Field(name, "bool", column("bool", 1))
    number = _number(kind, about)
    if number is not None:
        return Field(name, "fixed", column(number, np.dtype(number).itemsize))
    if kind in (_TEXT, _LARGE_TEXT):
        return Field(name, "offsets", column("text"), 8 if kind == _LARGE_TEXT else 4)
    if kind in (_BINARY, _LARGE_BINARY):
        return Field(name, "offsets", column("binary"), 8 if kind == _LARGE_BINARY else 4)
    if kind == _FIXED_BINARY:
        size = about.number(0, "<i")
        if size < 1:
            raise refused(name, f"binary of {size} bytes")
        return Field(name, "fixed", column("binary", size))
    if kind in (_LIST, _LARGE_LIST, _FIXED_LIST):
        if len(children) != 1:
            raise ValueError(f"the list '{name}' has {len(children)} kinds of items")
        return _list(name, kind, about, children[0], column)
    raise refused(name, _NAMES.get(kind, f"type {kind}"))


def refused(name: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"column '{name}' is of the type {what}, which the loader does not support. Cast it to "
        f"numbers, text, binary or lists of numbers, or remove it (remove_columns)"
    )


def _number(kind: int, about: Table) -> str | None:
    """The numpy type of a number, or of what is kept as one: dates and times."""
    if kind == _INT:
        bits = about.number(0, "<i")
        if bits not in (8, 16, 32, 64):
            raise ValueError(f"integers of {bits} bits")
        return f"{'int' if about.number(1, '<B') else 'uint'}{bits}"
    if kind == _FLOAT:
        precision = about.number(0, "<h")
        if precision not in (0, 1, 2):
            raise ValueError(f"numbers of precision {precision}")
        return ("float16", "float32", "float64")[precision]
    if kind == _DATE:
        return "int64" if about.number(0, "<h", 1) else "int32"
    if kind == _TIME:
        return "int64" if about.number(1, "<i", 32) == 64 else "int32"
    return "int64" if kind in (_TIMESTAMP, _DURATION) else None


def _list(name: str, kind: int, about: Table, child: Table, column: Any) -> Field:
    """Lists of numbers: their values follow one another."""
    shape: list[int] = []
    items = 1
    sides = [about.number(0, "<i")] if kind == _FIXED_LIST else []
    while child.number(2, "<B") == _FIXED_LIST and len(child.tables(5)) == 1:  # sides of arrays
        below = child.table(3)
        sides.append(below.number(0, "<i") if below else 0)
        child = child.tables(5)[0]
        items += 1
        if len(sides) > _DEPTH_MOST:
            raise refused(name, "list of many levels")
    shape += sides
    inner = child.table(3)
    number = _number(child.number(2, "<B"), inner) if inner is not None else None
    if number is None or child.table(4) is not None:
        raise refused(name, "list of other things than numbers")
    size = np.dtype(number).itemsize
    for side in sides:
        if side < 1:
            raise refused(name, f"list of {side} items")
        size *= side
    if size >= 1 << 31:
        raise refused(name, f"list of {size} bytes")
    if kind == _FIXED_LIST:
        return Field(name, "fixed", column(number, size, shape), items=items)
    form = column(number, size, [-1, *shape])
    return Field(name, "offsets", form, 8 if kind == _LARGE_LIST else 4, items=items)


# ---- record batches


class _Cells(NamedTuple):
    """Of a batch, row by row and column by column: uint16, uint64, uint64 [rows * columns]."""

    rows: int
    form: np.ndarray
    offset: np.ndarray
    bytes: np.ndarray


class _Walk:
    """The arrays of a batch, in the order of the schema."""

    def __init__(self, reading: _Bytes, head: Table, body: tuple[int, int]) -> None:
        self._reading = reading
        self.rows = head.number(0, "<q")
        self._nodes = iter(head.structs(1, "<qq"))
        self._buffers = iter(head.structs(2, "<qq"))
        self._body = body

    @property
    def begin(self) -> int:
        """Where the batch's arrays begin in the object."""
        return self._body[0]

    def node(self, rows: int | None) -> tuple[int, int]:
        """Length and nulls of the next array, of so many items. ValueError: it has others."""
        length, nulls = next(self._nodes, (-1, 0))
        if length < 0 or (rows is not None and length != rows) or not 0 <= nulls <= length:
            raise ValueError(f"an array of {length} items with {nulls} nulls, of {rows} rows")
        return length, nulls

    def buffer(self, least: int) -> tuple[int, int]:
        """Where the next one lies in the object, and its bytes. ValueError: out of the body, or
        with fewer."""
        offset, size = next(self._buffers, (-1, -1))
        begin, all_ = self._body
        if offset < 0 or size < 0 or offset > all_ or size > all_ - offset or size < least:
            raise ValueError(
                f"a buffer of {size} bytes at {offset} of {all_}, where {least} belong"
            )
        return begin + offset, size

    def validity(self, rows: int, nulls: int) -> np.ndarray | None:
        """bool [rows], false: it is null; None: no item is."""
        at, _ = self.buffer(-(-rows // 8) if nulls else 0)
        if not nulls:
            return None
        raw = np.frombuffer(self._reading.read(at, -(-rows // 8)), np.uint8)
        valid = np.unpackbits(raw, count=rows, bitorder="little").astype(bool)
        if rows - int(valid.sum()) != nulls:
            raise ValueError(f"{nulls} nulls, but {rows - int(valid.sum())} are marked")
        return valid

    def offsets(self, rows: int, width: int) -> np.ndarray:
        """int64 [rows + 1], from 0 on and not falling."""
        at, size = self.buffer(0)
        if rows == 0 and size < width:
            return np.zeros(1, np.int64)
        if size < (rows + 1) * width:
            raise ValueError(f"{size} bytes of offsets for {rows} rows")
        raw = self._reading.read(at, (rows + 1) * width)
        found = np.frombuffer(raw, f"<i{width}").astype(np.int64)
        if found[0] < 0 or (np.diff(found) < 0).any():
            raise ValueError("offsets that fall")
        return found

    def end(self) -> None:
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise ValueError("arrays that no column has")


def _batch(reading: _Bytes, fields: Sequence[Field], head: Table, body: tuple[int, int]) -> _Cells:
    walk = _Walk(reading, head, body)
    rows = walk.rows
    # Of each column: form, offset and bytes, arrays of rows or one for all of them.
    columns: list[tuple[Any, Any, Any]] = []
    for field in fields:
        _place(walk, field, rows, None, columns)
    walk.end()

    def table(which: int, kind: type) -> np.ndarray:
        cells = np.empty((rows, len(columns)), kind)
        for number, column in enumerate(columns):
            cells[:, number] = column[which]
        return cells.reshape(-1)

    return _Cells(rows, table(0, np.uint16), table(1, np.uint64), table(2, np.uint64))


def _place(
    walk: _Walk,
    field: Field,
    rows: int,
    there: np.ndarray | None,
    columns: list[tuple[Any, Any, Any]],
) -> None:
    """Appends the columns of a field. there: false where a struct around it is null."""
    _, nulls = walk.node(rows)
    if field.kind == "null":
        columns.append((_NULL, walk.begin, 0))
        return
    valid = walk.validity(rows, nulls)
    if there is not None:
        valid = there if valid is None else there & valid
    if field.kind == "struct":
        for child in field.children:
            _place(walk, child, rows, valid, columns)
        return
    size = field.form["bytes"]
    form: Any = 0
    if field.kind == "bool":
        at, _ = walk.buffer(-(-rows // 8))
        number = np.arange(rows)
        form, offset, bytes_ = _BIT + number % 8, at + number // 8, np.ones(rows, np.int64)
    elif field.kind == "fixed":
        at = _values(walk, field, rows, rows * size, valid)
        offset, bytes_ = at + np.arange(rows) * size, np.full(rows, size)
    else:
        ends = walk.offsets(rows, field.width)
        # A list's offsets count items, those of text and binary bytes.
        at = _values(walk, field, int(ends[-1]), int(ends[-1]) * (size or 1), None)
        offset, bytes_ = at + ends[:-1] * (size or 1), np.diff(ends) * (size or 1)
    if valid is not None:
        form, bytes_ = np.where(valid, form, _NULL), np.where(valid, bytes_, 0)
    columns.append((form, offset, bytes_))


def _values(walk: _Walk, field: Field, count: int, least: int, valid: np.ndarray | None) -> int:
    """Where the values of a column begin, behind the arrays of lists around them. count: its cells.
    least: bytes of its values. valid: which cells are no null, of lists of a fixed length."""
    for _ in range(field.items):
        length, nulls = walk.node(None)
        items = walk.validity(length, nulls)
        if items is None:
            continue
        if valid is not None and count and length % count == 0:  # of a cell that is null, all are
            items = items.reshape(count, -1).all(1) | ~valid
        if not items.all():
            raise InvalidArgument(
                f"column '{field.name}' has None inside its lists, which a tensor cannot hold: "
                f"fill or drop these"
            )
    return walk.buffer(least)[0]


# ---- what the bytes of a cell mean


class Cells:
    """Samples of Arrow objects as dicts. columns: as an index has them."""

    def __init__(self, columns: Sequence[dict[str, Any]]) -> None:
        self.names = [column["name"] for column in columns]
        self._columns = columns

    def sample(
        self, number: int, parts: Sequence[np.ndarray], forms: Sequence[str]
    ) -> dict[str, Any]:
        """parts: the bytes of each column. Corruption: what a column cannot hold."""
        sample = {}
        for column, part, form in zip(self._columns, parts, forms, strict=True):
            try:
                sample[column["name"]] = None if form == "null" else _value(column, part, form)
            except ValueError as error:
                raise Corruption(
                    f"sample {number} is damaged: its column '{column['name']}' cannot be read "
                    f"({error}); fetch that object again"
                ) from error
        return sample


def _value(column: dict[str, Any], raw: np.ndarray, form: str) -> Any:
    kind, shape = column["encoding"], column["shape"]
    if kind == "text":
        return raw.tobytes().decode()
    if kind == "binary":
        return torch.from_numpy(raw)
    if kind == "bool":
        return bool(int(raw[0]) >> int(form.removeprefix("bit ")) & 1)
    dtype = np.dtype(kind).newbyteorder("<")
    if not shape:
        return raw.view(dtype)[0].item()
    # Unaligned ones are moved: not every use of a tensor bears that.
    values = raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()
    return torch.from_numpy(values.view(dtype).reshape(shape))
