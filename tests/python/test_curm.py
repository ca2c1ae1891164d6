"""`stoker curm`: traces made and read, schemes compared, the class tree trained; as a user runs
it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from faults import COMMAND, refused, run

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )

SCHEMES = ["fo", "fl", "pl", "plr", "parix", "vdl", "curm", "curm-reserve"]
# What issue and documentation promise of each result, in this order.
FIELDS = [
    "trace",
    "scheme",
    "form",
    "code",
    "mode",
    "updates",
    "foreground_reads_per_update",
    "foreground_random_writes_per_update",
    "foreground_sequential_writes_per_update",
    "foreground_bytes_per_byte",
    "background_bytes_per_byte",
    "messages_per_update",
    "round_trips_per_update",
    "flushes_per_update",
    "updates_per_second",
    "p50_us",
    "p99_us",
    "recovery_seconds",
    "space_peak_bytes",
]


def generated(folder: Path, profile: str, seed: int = 1, requests: int | None = None) -> Path:
    path = folder / f"{profile}_{seed}.csv"
    words = ["--requests", str(requests)] if requests else []
    done = run("curm", "generate", profile, "--seed", str(seed), *words)
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    return [generated(folder, "wdev"), generated(folder, "hm", requests=3000)]


def test_replay_compares_all_schemes_in_both_forms(traces, tmp_path):
    plot = tmp_path / "plot.svg"
    done = run(
        "curm", "replay", *traces, "--code", "6+3,10+4", "--nodes", "25", "--json", "--plot", plot
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [list(row) for row in answer["results"]] == [FIELDS] * (2 * 2 * len(SCHEMES) * 2)
    assert {(row["trace"], row["code"]) for row in answer["results"]} == {
        (path.name, code) for path in traces for code in ("6+3", "10+4")
    }
    assert len(answer["more"]) == len(answer["results"]) and len(answer["classes"]) == 4
    assert answer["settings"]["nodes"] == 25 and answer["settings"]["device"]["name"] == "ssd"
    for row in answer["results"]:
        m = int(row["code"].split("+")[1])
        assert (
            row["mode"] == "modelled"
            and row["updates_per_second"] > 0
            and 0 < row["p50_us"] <= row["p99_us"]
            and row["space_peak_bytes"] > 0
        )
        assert row["flushes_per_update"] == (0 if row["form"] == "published" else 1 + m)
        if row["scheme"] == "vdl":
            assert (
                row["foreground_reads_per_update"],
                row["round_trips_per_update"],
                row["foreground_bytes_per_byte"],
            ) == (0, 1, 1 + m)
    assert list(dict.fromkeys(row["scheme"] for row in answer["results"])) == SCHEMES
    root = xml.parse(plot).getroot()
    assert root.tag.endswith("svg") and len(
        list(root.iter("{http://www.w3.org/2000/svg}rect"))
    ) > 5 * 4 * len(SCHEMES)


def on_files(folder: Path) -> list:
    """Options of a replay on nine small nodes in files."""
    sizes = {"--chunk": "64KiB", "--log": "1MiB", "--reserve": "16KiB", "--nodes": "9"}
    return ["--mode", "files", "--dir", folder, *(each for pair in sizes.items() for each in pair)]


def test_replay_on_files(tmp_path):
    trace = generated(tmp_path, "hm", requests=60)
    where = on_files(tmp_path / "disk")
    done = run(
        "curm",
        "replay",
        trace,
        *where,
        "--scheme",
        "all",
        "--clients",
        "8",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [list(row) for row in answer["results"]] == [FIELDS] * len(SCHEMES)
    assert [row["scheme"] for row in answer["results"]] == SCHEMES
    for row, more in zip(answer["results"], answer["more"], strict=True):
        assert (
            row["mode"] == "files"
            and row["form"] == "safe"
            and row["updates"] == answer["results"][0]["updates"]
        )
        assert (
            row["updates_per_second"] > 0
            and 0 < row["p50_us"] <= row["p99_us"]
            and row["recovery_seconds"] > 0
        )
        assert row["space_peak_bytes"] >= more["space_base_bytes"] == more["verified_bytes"] > 0
        assert more["disk_bytes_written_per_byte"] > 1 and more["disk_flushes_per_update"] > 0
    assert "vdl: rebuilding a node" in done.stderr
    assert (
        answer["settings"]["device"]["direct"] in (True, False)
        and answer["settings"]["machine"]["cores"] > 0
    )
    assert list((tmp_path / "disk").iterdir()) == []
    kept = run(
        "curm",
        "replay",
        trace,
        *where,
        "--scheme",
        "pl",
        "--code",
        "6+3,4+2",
        "--keep",
    )
    assert (
        kept.returncode == 0
        and len(kept.stdout.splitlines()) == 4
        and kept.stdout.startswith("real files: 9 nodes that share this machine's disk")
    )
    assert (tmp_path / "disk" / "stoker-curm-replay" / "node0" / "head").exists()
    assert "is there already" in refused(1, "curm", "replay", trace, *where)


def test_reserves_are_for_hot_stripes_and_their_room_is_told(tmp_path):
    """Window, rate and room of a reserve go by --reserve: with one of 16 KiB so short a trace has
    hot stripes."""
    done = run(
        "curm",
        "replay",
        generated(tmp_path, "hm", requests=2000),
        "--log",
        "4MiB",
        "--reserve",
        "16KiB",
        "--form",
        "safe",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    rows = {
        row["scheme"]: {**row, **more}
        for row, more in zip(answer["results"], answer["more"], strict=True)
    }
    stripes = rows["plr"]["space_base_bytes"] // (9 << 20)
    assert rows["plr"]["reserved_peak_bytes"] == stripes * 3 * (16 << 10)
    assert 0 < rows["curm-reserve"]["reserved_peak_bytes"] < stripes * (1 + 3) * (16 << 10)
    assert rows["curm-reserve"]["reserved_peak_bytes"] % (1 + 3) == 0
    assert all(
        rows[scheme]["reserved_peak_bytes"] == 0
        for scheme in SCHEMES
        if scheme not in ("plr", "curm-reserve")
    )
    same = [
        field
        for field in FIELDS
        if field.startswith(("foreground", "messages", "round_trips", "flushes"))
    ]
    assert rows["curm"]["updates"] == rows["curm-reserve"]["updates"] > 2000
    # What is sent and written for an update is curm's: only a row written through depends on
    # whether its stripe was folded before.
    assert all(
        abs(rows["curm"][field] - rows["curm-reserve"][field]) <= 0.01 * rows["curm"][field]
        for field in same
    )
    assert (
        rows["curm"]["background_bytes_per_byte"]
        != rows["curm-reserve"]["background_bytes_per_byte"]
    )


def test_replay_is_the_same_every_time(traces):
    words = ("curm", "replay", traces[0], "--json", "--device", "hdd")
    assert run(*words).stdout == run(*words).stdout


def test_replay_prints_a_table(traces):
    done = run("curm", "replay", traces[0], "--scheme", "parix", "--form", "safe")
    assert done.returncode == 0
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:]][1] == [
        traces[0].name,
        "6+3",
        "parix",
        "safe",
    ]


def test_schemes_are_changed_in_use_on_files(tmp_path):
    trace = generated(tmp_path, "hm", requests=200)
    where = on_files(tmp_path / "disk")
    done = run("curm", "replay", trace, *where, "--scheme", "switch", "--clients", "8", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    [row] = answer["switched"]
    assert answer["results"] == answer["more"] == []  # what is compared is each scheme by itself
    assert list(row)[: len(FIELDS)] == FIELDS and (row["scheme"], row["form"], row["mode"]) == (
        "switch",
        "safe",
        "files",
    )
    assert row["verified_bytes"] == row["space_base_bytes"] > 0 and row["recovery_seconds"] > 0
    assert (
        row["changes"] >= len(SCHEMES)
        and set(row["writes_by_scheme"]) >= set(SCHEMES)
        and all(row["writes_by_scheme"].values())
    )
    table = run(
        "curm",
        "replay",
        generated(tmp_path, "hm", seed=2, requests=20),
        *where,
        "--scheme",
        "switch",
    )
    assert (
        table.returncode == 0
        and [line.split()[2] for line in table.stdout.splitlines()[2:3]] == ["switch"]
        and "times in use" in table.stdout
    )
    assert "take --mode files" in refused(1, "curm", "replay", trace, "--scheme", "switch")
    assert "a plot compares schemes" in refused(
        1, "curm", "replay", trace, *where, "--scheme", "switch", "--plot", tmp_path / "x.svg"
    )


def test_bad_input_is_a_sentence(traces, tmp_path):
    assert "published forms are modelled only" in refused(
        1, "curm", "replay", traces[0], "--mode", "files", "--form", "published", "--dir", tmp_path
    )
    assert "needs --dir" in refused(1, "curm", "replay", traces[0], "--mode", "files")
    assert "has no files" in refused(1, "curm", "replay", traces[0], "--keep")
    assert "free some space" in refused(
        1,
        "curm",
        "replay",
        traces[0],
        "--mode",
        "files",
        "--dir",
        tmp_path / "x",
        "--log",
        "100000000GiB",
    )
    assert not (tmp_path / "x").exists()
    assert "cannot be opened" in refused(1, "curm", "replay", tmp_path / "none.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text(traces[0].read_text() + "what is this\n")
    assert "bad.csv: 1 malformed lines" in refused(1, "curm", "replay", bad)
    done = run("curm", "replay", bad, "--lenient", "--scheme", "vdl", "--json")
    assert done.returncode == 0 and "skipped 1 malformed lines" in done.stderr
    assert "needs at least as many nodes as chunks" in refused(
        1, "curm", "replay", traces[0], "--nodes", "8"
    )
    assert "is not a code" in refused(1, "curm", "replay", traces[0], "--code", "six")
    assert "--scheme" in refused(2, "curm", "replay", traces[0], "--scheme", "raid")
    assert "there is no profile `x`" in refused(1, "curm", "generate", "x")
    (tmp_path / "tree.json").write_text(
        '{"nodes": [{"feature": "read_share", "threshold": 0, "left": 0, "right": 0}]}'
    )
    assert "this is not a class tree" in refused(
        1, "curm", "replay", traces[0], "--tree", tmp_path / "tree.json"
    )
    assert "cannot be written" in refused(
        1, "curm", "replay", traces[0], "--scheme", "vdl", "--plot", tmp_path / "gone" / "x.svg"
    )


def train(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[2] / "classes" / "training" / "train.py"
    return run(script, *words, command=sys.executable, **options)


def test_train_refuses_what_it_cannot_take(tmp_path):
    for words in ((), ("--depth", "0", "t"), ("--depth", "x", "t"), ("t", "--out=")):
        done = train(*words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("train.py: ") and "--help" in done.stderr
    (tmp_path / "file").write_text("")
    done = train("t", "--out", tmp_path / "file" / "x")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


def test_train_writes_a_tree_that_replay_takes(tmp_path):
    learnt = [generated(tmp_path, "hm", seed) for seed in (1, 2)] + [
        generated(tmp_path, "vm", 1, 20_000)
    ]
    out = tmp_path / "tree.json"
    done = train(*learnt, "--out", out, "--test", generated(tmp_path, "rsrch"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "counters",
        "hm_1.csv",
        "hm_2.csv",
        "vm_1.csv",
        "all together",
        "rsrch_1.csv",
        f"written to {out}",
    ]
    assert "not learnt from, right" in lines[5] and "majority class" in lines[5]
    tree = json.loads(out.read_text())
    assert 1 < len(tree["nodes"]) < 128 and tree["trained_on"] == [
        "hm_1.csv",
        "hm_2.csv",
        "vm_1.csv",
    ]
    replayed = run("curm", "replay", learnt[0], "--scheme", "curm", "--tree", out, "--json")
    assert replayed.returncode == 0, replayed.stderr
    [classes] = json.loads(replayed.stdout)["classes"]
    assert classes["judged"] > 0 and {"tree", "no_classes", "contrary"} < set(classes)


def test_train_learns_what_is_said_when_a_file_is_made(tmp_path):
    out = tmp_path / "tree.json"
    out.write_text(json.dumps({"nodes": [{"class": "read_write"}]}))
    learnt = [generated(tmp_path, "files", seed) for seed in (1, 2)]
    done = train(
        "--only",
        "made",
        *learnt,
        "--out",
        out,
        "--test",
        generated(tmp_path, "files", 3),
    )
    assert done.returncode == 0, done.stderr
    tree = json.loads(out.read_text())
    assert tree["nodes"] == [{"class": "read_write"}] and tree["created_trained_on"] == [
        "files_1.csv",
        "files_2.csv",
    ]
    assert {node["class"] for node in tree["created"] if "class" in node} == {
        "read_only",
        "write_only",
        "read_write",
    }
    [said] = [
        line for line in done.stdout.splitlines() if line.startswith("files_3.csv: not learnt from")
    ]
    right, majority = (
        float(word.strip("%")) for word in said.replace(";", "").split() if word.endswith("%")
    )
    assert right > majority + 20
    replayed = run("curm", "replay", learnt[0], "--scheme", "curm", "--tree", out, "--json")
    assert replayed.returncode == 0, replayed.stderr
    [classes] = json.loads(replayed.stdout)["classes"]
    assert (
        classes["made"]["judged"] > 100
        and classes["made"]["accuracy"] > classes["made"]["majority_accuracy"] + 0.2
    )
    block = generated(tmp_path, "wdev")
    short = train("--only", "made", block, "--out", out)
    assert short.returncode == 1 and "no file is made in them" in short.stderr
    assert (
        "there is no profile `x`; there are rsrch, hm, wdev, mds, vm, postmark, oltp, files"
        in refused(1, "curm", "generate", "x")
    )


def test_train_without_samples_says_so(tmp_path):
    short = generated(tmp_path, "wdev", requests=10)
    done = train(short, cwd=tmp_path)
    assert (
        done.returncode == 1
        and "too short" in done.stderr
        and not (tmp_path / "class_tree.json").exists()
    )
