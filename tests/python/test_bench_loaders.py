"""bench/loaders.py: what runs without its peers, and that docs/numbers.md has its table."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench/loaders.py"
RESULT = ROOT / "bench/results/loaders.json"

bench = load_script(PROGRAM)


def test_the_page_holds_the_table_of_the_result(capsys):
    page = (ROOT / "docs/numbers.md").read_text()
    print(bench.table(json.loads(RESULT.read_text())))
    assert capsys.readouterr().out in page, (
        "docs/numbers.md does not hold what `bench/loaders.py --markdown "
        "bench/results/loaders.json` prints"
    )


def test_the_result_has_every_case_once():
    rows = json.loads(RESULT.read_text())["results"]
    cases = {(row["system"], row["data"], row["store"], row["cold"]) for row in rows}
    assert len(cases) == len(rows)
    for kind in bench.systems.KINDS:
        for cold in (True, False):
            assert {(name, kind, "local", cold) for name in bench.systems.SYSTEMS} <= cases
        assert ("stoker", kind, "s3", True) in cases


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_the_same_samples_in_every_form_that_needs_no_peer(kind, tmp_path):
    count, seen = 96, {}
    for name in ("stoker", "DataLoader memmap", "DataLoader folder"):
        form = bench.systems.form_of(name, kind)
        folder = bench.systems.made(tmp_path, form, kind, count)
        if form == "tar":
            words = ["index", f"dir:{folder}", "--out", str(bench.systems.index_of(folder))]
            subprocess.run([sys.executable, "-m", "stoker.dataset", *words], check=True)
        batches = bench.systems.SYSTEMS[name][3](folder, kind, 0)
        got = [sample for _ in range(count // 32) for sample in next(batches)]
        batches.close()
        if kind == "images":
            flat = [each["bin"] if name == "stoker" else each for each in got]
            seen[name] = {bytes(each) for each in flat}
        else:
            seen[name] = {each.numpy().tobytes() for each in got}
        assert len(seen[name]) == count  # each once
    if kind == "tokens":  # ours are windows, which share one token with their neighbours
        flat = np.fromfile(tmp_path / "tokens.flat/flat.bin", np.uint16).astype(np.int64)
        assert seen.pop("stoker") == {flat[i * 1024 :][:1025].tobytes() for i in range(count)}
    assert len({frozenset(each) for each in seen.values()}) == 1


def test_those_that_read_from_s3_are_told_where():
    for name in bench.systems.FROM_S3:
        assert "where" in inspect.signature(bench.systems.SYSTEMS[name][3]).parameters
    where = "s3://bucket/tokens.mds?endpoint=http://127.0.0.1:80"
    assert bench.systems.at_s3(where) == ("s3://bucket/tokens.mds", "http://127.0.0.1:80")


def test_all_decode_the_same_images(tmp_path):
    count, seen = 32, {}
    for name in ("stoker", "DataLoader folder"):
        form = bench.systems.form_of(name, bench.systems.DECODED)
        folder = bench.systems.made(tmp_path, form, bench.systems.DECODED, count)
        if form == "tar":
            words = ["index", f"dir:{folder}", "--out", str(bench.systems.index_of(folder))]
            subprocess.run([sys.executable, "-m", "stoker.dataset", *words], check=True)
        batches = bench.systems.SYSTEMS[name][3](folder, bench.systems.DECODED, 0)
        batch = next(batches)
        batches.close()
        assert batch.shape == (count, 3, bench.systems.SIDE, bench.systems.SIDE)
        seen[name] = sorted(float(each.float().mean()) for each in batch)
    ours, theirs = (np.array(each) for each in seen.values())
    assert np.abs(ours - theirs).max() < 0.5 and len(set(theirs)) == count


def test_a_run_ends_by_itself_and_says_what_it_took(tmp_path):
    folder = bench.systems.made(tmp_path, "flat", "tokens", 2000)
    words = ["stoker", str(folder), "tokens", "1", "60", "640", ""]
    run = bench.run_apart(sys.executable, words, {}, 100)
    assert run.keys() == {
        "samples_per_second",
        "cpu_seconds_per_gb",
        "first_batch_seconds",
        "memory_bytes",
    }


@pytest.mark.parametrize("kind", bench.systems.DLIO)
def test_a_run_shaped_as_dlio_s_says_how_well_the_accelerator_is_used(kind, tmp_path):
    batch, pause = bench.systems.batch_of(kind), bench.systems.pause_of(kind)
    form = bench.systems.form_of("stoker", kind)
    folder = bench.systems.made(tmp_path, form, kind, 4 * batch)
    words = ["index", f"dir:{folder}", "--out", str(bench.systems.index_of(folder))]
    subprocess.run([sys.executable, "-m", "stoker.dataset", *words], check=True)
    words = ["stoker", str(folder), kind, "1", "60", str(3 * batch), ""]
    run = bench.run_apart(sys.executable, words, {}, 100)
    assert 0 < run["utilisation"] <= 1
    # 3 batches took their pauses and the waits between them
    assert run["samples_per_second"] == pytest.approx(batch * run["utilisation"] / pause, rel=1e-6)
    told = bench.table(
        {
            "results": [
                {"system": "stoker", "data": kind, "store": "local", "cold": True, **run}
                | {"samples_per_second": 1}
            ],
            "random_reads_per_second": 0,
        }
    )
    assert f"{kind}, accelerator utilisation: stoker {run['utilisation']:.1%}." in told
