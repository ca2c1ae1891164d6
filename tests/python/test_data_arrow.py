"""Arrow's streams and files, made by pyarrow and by HF `datasets`: the same rows, or an error."""

from __future__ import annotations

import datetime
import io
import json
import runpy
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import stoker
from stoker.data import Arrow, Indexed, Jpeg, Loader
from stoker.data.index import ARROW, read
from stoker.dataset.cli import main
from stoker.errors import Corruption, InvalidArgument, NotFound, StokerError

SEED = 20261124


def stream(table: pa.Table, rows: int = 1000, file: bool = False, **options) -> bytes:
    out = io.BytesIO()
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with make(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def everything(source) -> list:
    return source.batch(np.arange(len(source), dtype=np.uint64))


def plain(value):
    if isinstance(value, torch.Tensor):
        return bytes(value.numpy()) if value.dtype == torch.uint8 else value.tolist()
    return value


def rows_of(source) -> list[dict]:
    return [{name: plain(value) for name, value in each.items()} for each in everything(source)]


@pytest.fixture
def opened(tmp_path):
    """Opens one object of these bytes, in a store of its own."""

    def open_it(data: bytes):
        (tmp_path / "one.arrow").write_bytes(data)
        with stoker.open_store(f"dir:{tmp_path}") as store:
            source = Arrow(store, "one.arrow")
            return source, rows_of(source)

    return open_it


COLUMNS = {
    "i8": pa.array([1, None, -3, 4, 5], pa.int8()),
    "i64": pa.array([2**62, 0, -(2**63), 1, 2]),
    "u16": pa.array([0, 65535, 1, None, 3], pa.uint16()),
    "f16": pa.array(np.array([1.5, 2, -3, 0, 9], np.float16)),
    "f32": pa.array([0.5, None, 2, 3, 4], pa.float32()),
    "f64": pa.array([0.1, 2, 3, 4, None]),
    "yes": pa.array([True, None, False, True, True]),
    "text": pa.array(["é", "", None, "four", "5" * 300]),
    "large": pa.array(["a", None, "bc", "", "d"], pa.large_string()),
    "bin": pa.array([b"\x00", b"", None, b"\xff" * 9, b"x"]),
    "fixed": pa.array([b"abc", b"def", None, b"ghi", b"jkl"], pa.binary(3)),
    "list": pa.array([[1, 2], [], None, [3], [4, 5, 6]], pa.list_(pa.int32())),
    "wide": pa.array([[1.5], [2, 3], [], None, [4]], pa.large_list(pa.float32())),
    "pair": pa.array([[1, 2], [3, 4], None, [5, 6], [7, 8]], pa.list_(pa.int16(), 2)),
    "day": pa.array([datetime.date(1970, 1, 3)] * 5),
    "none": pa.nulls(5),
}


def wanted(names) -> list[dict]:
    rows = pa.table({name: COLUMNS[name] for name in names}).to_pylist()
    for row in rows:
        if "day" in row:
            row["day"] = 2
    return rows


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_type_of_column_with_nulls(opened, file, rows):
    _, got = opened(stream(pa.table(COLUMNS), rows, file))
    assert got == wanted(COLUMNS)


def test_types_of_values(opened, tmp_path):
    names = ["i64", "yes", "f16", "pair", "bin"]
    opened(stream(pa.table({name: COLUMNS[name] for name in names})))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        first = everything(Arrow(store, "one.arrow"))[0]
    assert [type(first[name]) for name in names[:3]] == [int, bool, float]
    assert first["pair"].dtype == torch.int16 and first["bin"].dtype == torch.uint8


def test_slices_and_arrays_of_several_sides(opened):
    table = pa.table(COLUMNS).slice(1, 3)
    assert opened(stream(table))[1] == wanted(COLUMNS)[1:4]
    grid = pa.array([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.int64(), 2), 2))
    rag = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int64(), 2)))
    table = pa.table({"grid": grid, "rag": rag})
    assert opened(stream(table))[1] == table.to_pylist()


def test_members_of_structs_are_columns(opened):
    image = pa.array(
        [{"bytes": b"abc", "path": None}, None, {"bytes": None, "path": "p"}],
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    _, got = opened(stream(pa.table({"image": image, "label": [1, 2, 3]})))
    assert got == [
        {"image.bytes": b"abc", "image.path": None, "label": 1},
        {"image.bytes": None, "image.path": None, "label": 2},
        {"image.bytes": None, "image.path": "p", "label": 3},
    ]


def test_data_sets_of_hf_datasets(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    pictures = []
    for i in range(12):
        picture = io.BytesIO()
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(picture, "JPEG")
        pictures.append({"bytes": picture.getvalue(), "path": None})
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "text": datasets.Value("string"),
            "ids": datasets.Sequence(datasets.Value("int32")),
        }
    )
    columns = {
        "image": pictures,
        "label": [i % 2 for i in range(12)],
        "text": [f"t{i}" for i in range(12)],
        "ids": [list(range(i)) for i in range(12)],
    }
    whole = datasets.Dataset.from_dict(columns, features=features)
    both = datasets.DatasetDict({"train": whole.shuffle(seed=1), "test": whole.select([3, 1])})
    both.save_to_disk(tmp_path / "set", num_shards={"train": 3, "test": 1})
    with stoker.open_store(f"dir:{tmp_path}/set") as store:
        train, test = Arrow(store, "train"), Arrow(store, "test")
        assert [each["text"] for each in everything(train)] == both["train"]["text"]
        assert [each["ids"].tolist() for each in everything(train)] == list(both["train"]["ids"])
        assert [each["text"] for each in everything(test)] == ["t3", "t1"]
        with pytest.raises(InvalidArgument, match="several data sets .test, train."):
            Arrow(store)
        with pytest.raises(NotFound, match="no .arrow object below 'trai'"):
            Arrow(store, "trai")
        loader = Loader(train, batch=12, shuffle=False, decode=Jpeg(8))
        (batch,) = list(loader)
        loader.close()
    assert batch["text"] == both["train"]["text"] and batch["label"] == both["train"]["label"]
    assert "image.bytes" not in batch and batch["image"].shape == (12, 3, 8, 8)
    out = tmp_path / "i"
    arguments = ["index", f"dir:{tmp_path}/set", "train/", "--out", str(out), "--crc"]
    assert main(arguments) == 0 and "12 samples" in capsys.readouterr().out
    assert read(out).kind == ARROW and read(out).crc is not None
    with stoker.open_store(f"dir:{tmp_path}/set") as store:
        indexed = Indexed(store, out)
        assert rows_of(indexed) == rows_of(Arrow(store, "train"))
        assert indexed.fingerprint == Arrow(store, "train").fingerprint


def test_indices_are_refused(tmp_path):
    (tmp_path / "a.arrow").write_bytes(stream(pa.table({"x": [1]})))
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(InvalidArgument, match="flatten_indices"):
            Arrow(store)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"_data_files": [1]}', '{"_data_files": 1}', "[" * 100_000]
)
def test_a_state_that_is_none(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(Corruption, match=r"state\.json is not a state"):
            Arrow(store)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([["a"]]), "'x' is of the type list of other things"),
        (pa.array([[[1]]]), "'x' is of the type list of other things"),
        (pa.array(["a"]).dictionary_encode(), "'x' is of the type dictionary-encoded"),
        (pa.array([None, 1], pa.decimal128(5)), "'x' is of the type decimal"),
        (pa.array(["a"], pa.string_view()), "'x' is of the type string view"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "'x' is of the type map"),
        (pa.array([[1, None]]), "'x' has None inside its lists"),
        (pa.array([[1, None]], pa.list_(pa.int64(), 2)), "'x' has None inside its lists"),
        (pa.nulls(3), "no columns that hold anything"),
    ],
)
def test_types_that_are_not_read_are_refused_by_name(opened, column, words):
    with pytest.raises(InvalidArgument, match=words):
        opened(stream(pa.table({"x": column})))


def test_compressed_and_unequal_objects_are_refused(tmp_path):
    table = pa.table({"x": list(range(1000))})
    (tmp_path / "a.arrow").write_bytes(stream(table, compression="zstd"))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(InvalidArgument, match=r"a\.arrow has compressed record batches"):
            Arrow(store)
    (tmp_path / "a.arrow").write_bytes(stream(table))
    (tmp_path / "b.arrow").write_bytes(stream(pa.table({"y": [1]})))
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(InvalidArgument, match=r"'b\.arrow' has other columns than 'a\.arrow'"):
            Arrow(store)


@pytest.mark.parametrize("file", [False, True])
def test_every_cut_is_an_error(opened, file):
    """Also between two record batches, where pyarrow takes a stream for whole."""
    whole = stream(pa.table({"x": list(range(30)), "t": ["ab"] * 30}), 10, file)
    opened(whole)
    for size in range(0, len(whole), 4):  # messages begin at multiples of 8
        with pytest.raises(Corruption, match=r"one\.arrow is not a whole Arrow stream or file"):
            opened(whole[:size])
    with pytest.raises(Corruption):
        opened(whole + b"\0")


def test_huge_counts_take_no_memory(opened):
    whole = stream(pa.table({"x": list(range(7)), "n": pa.nulls(7)}))
    seen = 0
    for at in range(0, len(whole) - 8, 8):
        if struct.unpack_from("<q", whole, at)[0] != 7:
            continue
        for huge in (2**62, -1, 10**9):
            broken = bytearray(whole)
            struct.pack_into("<q", broken, at, huge)
            try:
                _, got = opened(bytes(broken))
            except (Corruption, InvalidArgument):
                seen += 1
            else:
                assert len(got) == 7
    assert seen >= 6


# ---- properties


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.text(max_size=5),
            st.none() | st.lists(st.floats(width=32, allow_nan=False), max_size=3),
            st.none() | st.booleans(),
        ),
        max_size=20,
    ),
    st.integers(1, 7),
    st.booleans(),
)
def test_what_pyarrow_writes_is_read(tmp_path_factory, rows, many, file):
    kinds = {"i": pa.int64(), "t": pa.string(), "l": pa.list_(pa.float32()), "b": pa.bool_()}
    columns = list(zip(*rows, strict=True)) or [[]] * 4
    table = pa.table(
        {name: pa.array(c, kind) for (name, kind), c in zip(kinds.items(), columns, strict=True)}
    )
    folder = tmp_path_factory.mktemp("arrow")
    (folder / "a.arrow").write_bytes(stream(table, many, file))
    with stoker.open_store(f"dir:{folder}") as store:
        source = Arrow(store)
        assert len(source) == len(rows)
        assert (rows_of(source) if rows else []) == table.to_pylist()


_WHOLE = stream(pa.table({name: COLUMNS[name] for name in COLUMNS if name != "none"}), 2)


@settings(max_examples=250, deadline=None)
@given(st.integers(0, len(_WHOLE) - 1), st.binary(min_size=1, max_size=8))
def test_any_edit_is_an_error_or_no_more_than_other_values(tmp_path_factory, at, new):
    folder = tmp_path_factory.mktemp("edit", numbered=True)
    broken = bytearray(_WHOLE)
    broken[at : at + len(new)] = new
    (folder / "a.arrow").write_bytes(broken[: len(_WHOLE)])
    with stoker.open_store(f"dir:{folder}") as store:
        try:
            got = everything(Arrow(store))
        except StokerError:
            return
    names = set(got[0]) if got else set()
    assert len(got) <= 5 and all(set(each) == names for each in got)


def test_the_example_reads_an_epoch(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.arrow").write_bytes(stream(pa.table(COLUMNS), 2))
    script = Path(__file__).resolve().parents[2] / "examples/read_samples.py"
    monkeypatch.setattr("sys.argv", [str(script), "arrow", f"dir:{tmp_path}"])
    runpy.run_path(str(script), run_name="__main__")
    assert "5 samples" in capsys.readouterr().out
