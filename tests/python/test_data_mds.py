"""MDS shards: what the format says, and nothing else, comes out of them."""

from __future__ import annotations

import io
import json
import runpy
import struct
import tempfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import stoker
from stoker.data import Indexed, Jpeg, Loader, Mds
from stoker.data.index import MDS, read
from stoker.data.mds import decoder
from stoker.dataset.cli import main
from stoker.errors import Corruption, InvalidArgument, NotFound, StokerError

SEED = 20261124
SIZES = {"int": 8, "uint32": 4, "float16": 2, "ndarray:float32:2,3": 24}


def record(columns: dict[str, str], values: dict[str, bytes]) -> bytes:
    """As the format has it. columns: encoding by name."""
    names = sorted(columns)
    free = [len(values[name]) for name in names if columns[name] not in SIZES]
    return struct.pack(f"<{len(free)}I", *free) + b"".join(values[name] for name in names)


def shard(columns: dict[str, str], records: list[bytes]) -> bytes:
    names = sorted(columns)
    about = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [SIZES.get(columns[name]) for name in names],
    }
    config = json.dumps(about, sort_keys=True).encode()
    first = 4 + 4 * (len(records) + 1) + len(config)
    offsets = [first]
    for each in records:
        offsets.append(offsets[-1] + len(each))
    head = struct.pack(f"<{len(offsets) + 1}I", len(records), *offsets)
    return head + config + b"".join(records)


def put(folder: Path, columns: dict[str, str], shards: list[list[bytes]], **more) -> None:
    """A folder as MDSWriter makes one."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    said = []
    for number, records in enumerate(shards):
        data = shard(columns, records)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        said.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": [SIZES.get(columns[name]) for name in names],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(records),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
                **more,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": said}))


def numbered(first: int, count: int) -> list[bytes]:
    values = (
        {"id": struct.pack("<q", i), "text": ("é" * (i % 4) + str(i)).encode()}
        for i in range(first, first + count)
    )
    return [record(COLUMNS, each) for each in values]


COLUMNS = {"id": "int", "text": "str"}


@pytest.fixture
def folder(tmp_path):
    """Three shards of 20, 0 and 13 samples, numbered through."""
    put(tmp_path / "mds", COLUMNS, [numbered(0, 20), [], numbered(20, 13)])
    return tmp_path / "mds"


def everything(source) -> list:
    return source.batch(np.arange(len(source), dtype=np.uint64))


def test_samples_of_all_shards_in_any_order(folder):
    with stoker.open_store(f"dir:{folder.parent}") as store:
        source = Mds(store, "mds")
        assert len(source) == 33
        numbers = np.random.default_rng(SEED).permutation(33)
        got = source.batch(numbers.astype(np.uint64))
        assert [each["id"] for each in got] == numbers.tolist()
        assert [each["text"] for each in got] == ["é" * (i % 4) + str(i) for i in numbers]
        for shuffle in (True, False, "window"):
            loader = Loader(source, batch=7, seed=1, shuffle=shuffle)
            assert sorted(each["id"] for batch in loader for each in batch) == list(range(33))
            loader.close()


@pytest.mark.parametrize("where", ["memory:", "local:{}/other"])
def test_shards_are_read_from_any_store(folder, tmp_path, where):
    with stoker.open_store(f"dir:{folder}") as store:
        want = everything(Mds(store))
    where = where.format(tmp_path)
    with stoker.open_store(where, create=True, capacity="64MiB") as store:
        change = store.begin()
        for path in folder.iterdir():
            data = path.read_bytes()
            change.resize(f"set/{path.name}", len(data))
            change.write_bytes(f"set/{path.name}", 0, data)
        change.commit().wait()
        assert everything(Mds(store, "set")) == want


def test_every_type_of_column(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(picture, "JPEG")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    values = {
        "a": ("ndarray", bytes([65, 1 << 2, 3]) + np.array([1, -2, 3], "<i8").tobytes()),
        "a2": ("ndarray:int16", bytes([2 << 2 | 1]) + struct.pack("<2H4h", 2, 2, 1, 2, 3, -4)),
        "a3": ("ndarray:float32:2,3", array.tobytes()),
        "b": ("bytes", b"\x00\xff"),
        "f": ("float16", np.float16(1.5).tobytes()),
        "i": ("int", struct.pack("<q", -(2**62))),
        "j": ("json", b'{"k": [1, null]}'),
        "jpg": ("jpeg", picture.getvalue()),
        "none": ("bytes", b""),
        "s": ("str", "wörd".encode()),
        "sd": ("str_decimal", b"1.10"),
        "sf": ("str_float", b"0.25"),
        "si": ("str_int", str(10**30).encode()),
        "u": ("uint32", struct.pack("<I", 2**32 - 1)),
    }
    columns = {name: kind for name, (kind, _) in values.items()}
    put(tmp_path, columns, [[record(columns, {name: raw for name, (_, raw) in values.items()})]])
    with stoker.open_store(f"dir:{tmp_path}") as store:
        (got,) = everything(Mds(store))
    tensors = {
        "a": torch.tensor([1, -2, 3]),
        "a2": torch.tensor([[1, 2], [3, -4]], dtype=torch.int16),
        "a3": torch.from_numpy(array),
        "b": torch.tensor([0, 255], dtype=torch.uint8),
        "jpg": torch.frombuffer(bytearray(picture.getvalue()), dtype=torch.uint8),
        "none": torch.zeros(0, dtype=torch.uint8),
    }
    for name, wanted in tensors.items():
        found = got.pop(name)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), name
    assert got == {
        "f": 1.5,
        "i": -(2**62),
        "j": {"k": [1, None]},
        "s": "wörd",
        "sd": Decimal("1.10"),
        "sf": 0.25,
        "si": 10**30,
        "u": 2**32 - 1,
    }
    assert [type(got[name]) for name in ("f", "i", "u")] == [float, int, int]


def test_images_are_decoded_with_their_labels(tmp_path):
    columns = {"__key__": "str", "image": "jpeg", "label": "int"}
    records = []
    for i in range(4):
        picture = io.BytesIO()
        Image.new("RGB", (16, 16), (60 * i, 0, 0)).save(picture, "JPEG")
        label = struct.pack("<q", i)
        values = {"__key__": b"k%d" % i, "image": picture.getvalue(), "label": label}
        records.append(record(columns, values))
    put(tmp_path, columns, [records])
    with stoker.open_store(f"dir:{tmp_path}") as store:
        loader = Loader(Mds(store), batch=4, shuffle=False, decode=Jpeg(8))
        (batch,) = list(loader)
        loader.close()
    assert batch["label"] == [0, 1, 2, 3] and batch["__key__"] == ["k0", "k1", "k2", "k3"]
    assert set(batch) == {"image", "label", "__key__"}
    reds = batch["image"][:, 0].float().mean((1, 2)).tolist()
    assert all(abs(red - 60 * i) < 4 for i, red in enumerate(reds)), reds


@pytest.mark.parametrize("crc", [[], ["--crc"]])
def test_an_indexed_data_set_is_the_one_of_its_shards(folder, tmp_path, crc, capsys):
    # What merges the indexes of several folders names their shards too: they count once.
    merged = json.loads((folder / "index.json").read_text())
    for each in merged["shards"]:
        each["raw_data"]["basename"] = f"mds/{each['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps(merged))
    out = tmp_path / "shards.index"
    assert main(["index", f"dir:{tmp_path}", "--out", str(out), *crc]) == 0
    assert "33 samples" in capsys.readouterr().out
    index = read(out)
    assert index.kind == MDS and (index.crc is not None) == bool(crc)
    with stoker.open_store(f"dir:{tmp_path}") as store:
        indexed, direct = Indexed(store, out), Mds(store)
        assert everything(indexed) == everything(direct)
        assert indexed.fingerprint == direct.fingerprint
    assert main(["show", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "mds" and [each["name"] for each in facts["columns"]] == ["id", "text"]


def test_a_build_that_was_ended_goes_on_unless_the_index_changed(folder, tmp_path, monkeypatch):
    from stoker.data import indexing

    out, made = tmp_path / "i", []
    real = indexing.shard_index

    def counted(store, each):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(each["key"])
        return real(store, each)

    monkeypatch.setattr(indexing, "shard_index", counted)
    with pytest.raises(KeyboardInterrupt):
        main(["index", f"dir:{folder}", "--out", str(out)])
    assert len(made) == 2 and not out.exists()
    made.clear()
    assert main(["index", f"dir:{folder}", "--out", str(out)]) == 0
    assert made == ["shard.00002.mds"] and len(read(out)) == 33


def test_flipped_bits_are_found_with_checksums_and_never_shift_columns(folder, tmp_path):
    """Without checksums a flipped bit is an error or stays within its column's bytes."""
    out = tmp_path / "i"
    assert main(["index", f"dir:{folder}", "--out", str(out), "--crc"]) == 0
    path = folder / "shard.00000.mds"
    whole = path.read_bytes()
    with stoker.open_store(f"dir:{folder}") as store:
        want = everything(Mds(store))
    random = np.random.default_rng(SEED)
    refused = 0
    for _ in range(60):
        broken = bytearray(whole)
        broken[int(random.integers(len(whole)))] ^= 1 << int(random.integers(8))
        path.write_bytes(broken)
        with stoker.open_store(f"dir:{folder}") as store:
            try:
                got = everything(Mds(store))
            except Corruption:
                refused += 1
                continue
        differ = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        assert len(differ) <= 1
    assert refused > 10


def test_every_cut_is_an_error(folder):
    path = folder / "shard.00002.mds"
    whole = path.read_bytes()
    index = json.loads((folder / "index.json").read_text())
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with stoker.open_store(f"dir:{folder}") as store:
            with pytest.raises(Corruption, match=r"shard\.00002\.mds has .* was cut or replaced"):
                Mds(store)
        # An index.json that was made to fit does not help.
        index["shards"][2]["raw_data"]["bytes"] = size
        (folder / "fit").mkdir(exist_ok=True)
        (folder / "fit/index.json").write_text(json.dumps(index))
        for each in folder.glob("*.mds"):
            (folder / "fit" / each.name).write_bytes(each.read_bytes())
        with stoker.open_store(f"dir:{folder}/fit") as store:
            with pytest.raises(Corruption, match=r"shard\.00002\.mds is damaged or cut"):
                Mds(store)


def edited(folder: Path, change) -> None:
    path = folder / "index.json"
    about = json.loads(path.read_text())
    change(about["shards"][0])
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"samples": 19}, Corruption, "says it has 20 samples"),
        ({"samples": 10**15}, Corruption, "no room for the offsets"),
        ({"samples": 2**70}, Corruption, "has impossible values"),
        ({"samples": -1}, Corruption, "has impossible values"),
        ({"samples": True}, Corruption, "has impossible values"),
        ({"column_sizes": [4, None]}, Corruption, "column 'id' has 4 bytes"),
        ({"column_sizes": [None, None]}, Corruption, "column 'id' has None bytes"),
        ({"column_sizes": [8, 10**9]}, Corruption, "column 'text' has 1000000000 bytes"),
        ({"column_names": ["id", "id"]}, Corruption, "columns are impossible"),
        ({"column_names": ["id", "words"]}, InvalidArgument, "different columns"),
        ({"column_names": []}, Corruption, "columns are impossible"),
        ({"column_encodings": ["int", "pkl"]}, InvalidArgument, "'text' is pickled.*run code"),
        (
            {"column_encodings": ["int", "pil"]},
            InvalidArgument,
            "'pil', which the loader",
        ),
        ({"column_encodings": ["int", "ndarray:what"]}, InvalidArgument, "which does not exist"),
        ({"column_encodings": ["int", "ndarray:int8:0"]}, InvalidArgument, "which does not exist"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 5}}, Corruption, "cut or replaced"),
        ({"raw_data": {"basename": "../x", "bytes": 5}}, Corruption, "has impossible values"),
        ({"raw_data": {"basename": "gone.mds", "bytes": 5}}, NotFound, "gone.mds"),
        ({"raw_data": None}, Corruption, "does not say what shard 0 is"),
        ({"format": "csv"}, InvalidArgument, "'csv'"),
    ],
)
def test_what_an_index_json_may_not_say(folder, change, error, words):
    edited(folder, lambda shard: shard.update(change))
    with stoker.open_store(f"dir:{folder}") as store:
        with pytest.raises(error, match=words):
            Mds(store)


def test_columns_that_differ_from_the_shards_own_are_refused(folder):
    """Both are of eight bytes: no size tells."""
    about = json.loads((folder / "index.json").read_text())
    for each in about["shards"]:
        each["column_encodings"] = ["int", "bytes"]
    (folder / "index.json").write_text(json.dumps(about))
    with stoker.open_store(f"dir:{folder}") as store:
        with pytest.raises(Corruption, match=r"columns are not those of its index\.json"):
            Mds(store)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1, "shards": []}', '{"version": 2}', "[" * 100_000, "\xff"]
)
def test_other_files_are_no_index(tmp_path, text):
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with stoker.open_store(f"dir:{tmp_path}") as store:
        with pytest.raises(Corruption, match=r"index\.json is not an index of MDS shards"):
            Mds(store)
        with pytest.raises(NotFound, match=r"elsewhere/index\.json"):
            Mds(store, "elsewhere")


def test_other_compressed_shards_say_what_to_do_and_their_raw_form_is_read(folder):
    raw = folder / "shard.00000.mds"
    zipped = {"basename": "shard.00000.mds.br", "bytes": 9, "hashes": {}}
    edited(folder, lambda shard: shard.update(compression="br:3", zip_data=zipped))
    data = raw.read_bytes()
    raw.rename(folder / "shard.00000.mds.br")
    with stoker.open_store(f"dir:{folder}") as store:
        with pytest.raises(InvalidArgument, match=r"mds\.br is compressed.*unpack it to 'shard"):
            Mds(store)
    raw.write_bytes(data)  # beside it
    with stoker.open_store(f"dir:{folder}") as store:
        assert len(Mds(store)) == 33


def test_text_that_is_none_names_its_sample(tmp_path):
    put(tmp_path, {"s": "str"}, [[record({"s": "str"}, {"s": b"ok"}), b"\x01\0\0\0\xff"]])
    with stoker.open_store(f"dir:{tmp_path}") as store:
        source = Mds(store)
        assert source.batch(np.zeros(1, np.uint64)) == [{"s": "ok"}]
        with pytest.raises(Corruption, match="sample 1 is damaged: its column 's'"):
            everything(source)


# ---- properties

values = st.fixed_dictionaries(
    {
        "b": st.binary(max_size=20),
        "i": st.integers(-(2**63), 2**63 - 1).map(lambda i: struct.pack("<q", i)),
        "t": st.text(max_size=9).map(str.encode),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(values, max_size=5), min_size=1, max_size=4).filter(any))
def test_what_was_written_is_read(shards):
    columns = {"b": "bytes", "i": "int", "t": "str"}
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), columns, [[record(columns, each) for each in all_] for all_ in shards])
        with stoker.open_store(f"dir:{folder}") as store:
            got = everything(Mds(store))
    wanted = [each for all_ in shards for each in all_]
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert bytes(one["b"].numpy()) == other["b"]
        assert struct.pack("<q", one["i"]) == other["i"] and one["t"].encode() == other["t"]


encodings = st.sampled_from(
    ["ndarray", "ndarray:int16", "ndarray:float64", "str", "json", "str_int", "str_float"]
    + ["str_decimal", "bytes"]
)


@settings(max_examples=300, deadline=None)
@given(encodings, st.binary(max_size=40))
def test_any_bytes_of_a_column_are_a_value_or_a_value_error(encoding, raw):
    decode, _ = decoder("x", encoding)
    try:
        value = decode(np.frombuffer(bytearray(raw), np.uint8))
    except (ValueError, RecursionError):
        return
    if encoding.startswith("ndarray"):
        assert value.numel() * value.element_size() <= len(raw)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_edit_of_a_shard_is_an_error_or_no_more_than_other_values(data):
    """Samples have their columns whatever the bytes are; nothing but an error of Stoker comes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(folder, COLUMNS, [numbered(0, 5)])
        path = folder / data.draw(st.sampled_from(["index.json", "shard.00000.mds"]))
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(st.binary(max_size=6))
        if path.suffix == ".mds":
            new = (new + bytes(6))[: min(6, len(whole) - at)]  # of the same size
        whole[at : at + len(new)] = new
        path.write_bytes(whole)
        with stoker.open_store(f"dir:{folder}") as store:
            try:
                got = everything(Mds(store))
            except StokerError:
                return
        assert len(got) == 5 and all({"id", "text"} >= set(each) for each in got)


def test_the_example_reads_an_epoch(folder, monkeypatch, capsys):
    script = Path(__file__).resolve().parents[2] / "examples/read_samples.py"
    monkeypatch.setattr("sys.argv", [str(script), "mds", f"dir:{folder.parent}", "mds"])
    runpy.run_path(str(script), run_name="__main__")
    assert "33 samples" in capsys.readouterr().out
