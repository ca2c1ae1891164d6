"""pandas, pyarrow.dataset and datasets read and write what is in a store, by stoker:// URLs."""

from __future__ import annotations

import pytest
import stoker
from stoker.filesystem import StokerFileSystem

WITHOUT = "it is not installed (requirements-test.txt has it)"
pandas = pytest.importorskip("pandas", reason=WITHOUT)
pyarrow = pytest.importorskip("pyarrow", reason=WITHOUT)

ROWS = 5_000


@pytest.fixture(params=["dir", "s3"])
def where(request, tmp_path, s3):
    (tmp_path / "objects").mkdir()
    return s3 if request.param == "s3" else f"dir:{tmp_path}/objects"


def frame():
    return pandas.DataFrame(
        {
            "number": range(ROWS),
            "half": [i / 2 for i in range(ROWS)],
            "text": [f"row {i} ä" for i in range(ROWS)],
            "part": [f"p{i % 3}" for i in range(ROWS)],
        }
    )


def test_pandas_writes_and_reads_tables(where):
    options = {"store": where}
    frame().to_parquet("stoker://tables/a.parquet", storage_options=options, row_group_size=500)
    frame().to_csv("stoker://tables/a.csv", index=False, storage_options=options)
    read = pandas.read_parquet("stoker://tables/a.parquet", storage_options=options)
    pandas.testing.assert_frame_equal(read, frame())
    columns = pandas.read_parquet(
        "stoker://tables/a.parquet",
        columns=["text"],
        filters=[("number", ">=", ROWS - 10)],
        storage_options=options,
    )
    assert list(columns["text"]) == [f"row {i} ä" for i in range(ROWS - 10, ROWS)]
    read = pandas.read_csv("stoker://tables/a.csv", storage_options=options)
    pandas.testing.assert_frame_equal(read, frame())


def test_pyarrow_writes_and_reads_a_dataset_in_parts(where):
    import pyarrow.dataset

    with stoker.open_store(where) as store:
        files = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(StokerFileSystem(store)))
        whole = pyarrow.Table.from_pandas(frame())
        pyarrow.dataset.write_dataset(
            whole, "set", filesystem=files, format="parquet", partitioning=["part"]
        )
        assert [each["key"] for each in store.list()] == [
            f"set/p{i}/part-0.parquet" for i in range(3)
        ]
        found = pyarrow.dataset.dataset("set", filesystem=files, partitioning=["part"])
        assert found.count_rows() == ROWS
        some = found.to_table(
            columns=["number"], filter=pyarrow.dataset.field("part") == "p1"
        ).to_pydict()
        assert sorted(some["number"]) == list(range(1, ROWS, 3))


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_files_of_a_store(where, streaming, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # it asks nobody else
    datasets = pytest.importorskip("datasets", reason=WITHOUT)
    datasets.disable_progress_bars()
    for i in range(2):
        part = frame().iloc[i * 100 : (i + 1) * 100]
        part.to_json(
            f"stoker://json/{i}.jsonl",
            orient="records",
            lines=True,
            storage_options={"store": where},
        )
    loaded = datasets.load_dataset(
        "json",
        data_files="stoker://json/*.jsonl",
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path / "cache"),
        storage_options={"store": where},
    )
    rows = list(loaded)
    assert [row["number"] for row in rows] == list(range(200))
    assert rows[7] == {"number": 7, "half": 3.5, "text": "row 7 ä", "part": "p1"}
