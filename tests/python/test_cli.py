"""`stoker ls`, `fsck`, `export` and `probe` as a user runs them: results, exit statuses, sentences;
all without Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stoker import _core

from faults import COMMAND, make_small_store, mounted, refused, run

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return make_small_store(tmp_path_factory.mktemp("cli") / "s")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The command by itself: no python beside it."""
    return Path(shutil.copy(COMMAND, tmp_path_factory.mktemp("alone") / "stoker"))


def test_ls_tells_objects_snapshots_and_space(store):
    shown = run("ls", store).stdout
    assert (
        "200000" in shown
        and "w/2" in shown
        and "snapshot 'good' of version 2" in shown
        and "2 objects; version 3" in shown
    )
    answer = json.loads(run("ls", store, "w/1", "--json").stdout)
    assert [(o["key"], o["bytes"], o["version"]) for o in answer["objects"]] == [
        ("w/1", 200_000, 3)
    ]
    assert answer["snapshots"] == [{"name": "good", "version": 2}]
    before = json.loads(run("ls", store, "w/1", "--snapshot", "good", "--json").stdout)
    assert before["objects"][0]["version"] == 1


def test_export_gives_the_bytes_of_now_and_of_a_snapshot(store, tmp_path):
    assert run("export", store, "w/1", tmp_path / "now").returncode == 0
    assert run("export", store, "w/1", tmp_path / "then", "--snapshot", "good").returncode == 0
    assert (tmp_path / "now").read_bytes() == b"C" * 200_000 and (
        tmp_path / "then"
    ).read_bytes() == b"A" * 200_000
    done = run("export", store, "w/", tmp_path / "folder")
    assert done.returncode == 0 and "2 objects" in done.stderr
    assert (tmp_path / "folder" / "w" / "2").read_bytes() == b"B" * 70_000
    assert not list(tmp_path.rglob("*.partial"))


def test_keys_that_are_no_file_names_or_hold_control_characters(tmp_path):
    held = _core.Runtime(engine="posix").open_store(
        str(tmp_path / "s"), create=True, capacity_bytes=1 << 20
    )
    txn = held.begin()
    for key in ("p/a", "p/a\0b", "p//a", "p/\x1b[2Jc\u009b"):
        txn.resize(key, 5)
        txn.write_bytes(key, 0, b"first" if key == "p/a" else b"other")
    txn.commit().wait()
    held.snapshot("\x07").wait()
    held.close()
    done = run("export", tmp_path / "s", "p/", tmp_path / "out")
    assert done.returncode == 1 and "2 of 4 objects could not be exported" in done.stderr
    assert "p/a\\x00b" in done.stderr and "is the file of another object" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out" / "p").iterdir()) == [
        "\x1b[2Jc\u009b",
        "a",
    ]
    shown = run("ls", tmp_path / "s").stdout
    assert "p/\\x1b[2Jc\\xc2\\x9b" in shown and "snapshot '\\x07'" in shown and "p/a\\x00b" in shown
    assert not [
        each
        for each in shown + done.stderr
        if (each < " " and each != "\n") or "\x7f" <= each < "\xa0"
    ]


def test_fsck_of_a_whole_store_is_clean(store):
    done = run("fsck", store)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "clean, committed version 3"


def test_none_of_it_needs_python(alone, store, tmp_path):
    bare = {"command": alone, "env": {"PATH": "/nowhere"}}
    assert run("ls", store, **bare).returncode == run("fsck", store, **bare).returncode == 0
    assert run("export", store, "w/2", tmp_path / "x", **bare).returncode == 0
    probe = run("probe", tmp_path, "--seconds", "1", "--json", **bare)
    assert probe.returncode == 0 and json.loads(probe.stdout)


def test_bench_codec_tells_ours_beside_isal_and_a_copy(alone):
    done = run(
        "bench",
        "codec",
        "--memory",
        "8MiB",
        "--chunk",
        "64KiB",
        "--code",
        "4+2",
        "--repetitions",
        "3",
        "--json",
        command=alone,
        env={"PATH": "/nowhere"},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [(row["op"], row["code"], row["chunk_bytes"]) for row in answer["results"]] == [
        (op, "4+2", 65536) for op in ("encode", "delta", "decode")
    ]
    for row in answer["results"]:
        for key in (
            "ours_gbps",
            "ours_with_crc_gbps",
            "isal_gbps",
            "isal_then_crc_gbps",
            "copy_gbps",
        ):
            assert len(row[key + "_all"]) == 3 and min(row[key + "_all"]) <= row[key] <= max(
                row[key + "_all"]
            )
    near = answer["near_cache"]
    assert (
        0
        < near["one_after_the_other_gbps"]
        < min(near["isal_encode_gbps"], near["crc_of_all_chunks_gbps"])
    )
    assert answer["target"] in {"AVX-512", "AVX2", "AVX", "SSE4.1", "scalar", "unknown"}
    assert answer["isal"] and answer["pages"] and answer["memory_bytes"] == 8 << 20
    shown = run(
        "bench", "codec", "--memory", "8MiB", "--chunk", "64KiB", "--repetitions", "1"
    ).stdout.splitlines()
    assert [line.split()[:2] for line in shown[3:]] == [
        [op, "6+3"] for op in ("encode", "delta", "decode")
    ]


def test_bench_codec_refuses_what_cannot_be():
    assert "a code of 30+3 chunks cannot be" in refused(1, "bench", "codec", "--code", "30+3")
    for code in ("6", "6+3x", "six"):
        assert f"`{code}` is not a code" in refused(1, "bench", "codec", "--code", code)
    assert "more than half of this machine's memory" in refused(
        1, "bench", "codec", "--memory", "1000TiB"
    )
    assert "there must be room for two stripes" in refused(1, "bench", "codec", "--memory", "4MiB")


def test_what_is_not_there_is_named(store, tmp_path):
    assert "there is no snapshot 'nix'" in refused(1, "ls", store, "--snapshot", "nix")
    assert "there is no object 'nix'" in refused(1, "export", store, "nix", tmp_path / "x")
    for words in (("ls",), ("fsck",)):
        assert "there is no store at" in refused(1, *words, tmp_path)
    assert "this works on a local store" in refused(1, "fsck", "memory:")
    (tmp_path / "text").write_text("no store" * 20_000)
    assert "is not a Stoker store" in refused(1, "ls", tmp_path / "text")
    target = tmp_path / "gone" / "x"
    assert str(target) in refused(1, "export", store, "w/1", target)


def test_probe_of_a_bad_folder_says_why(tmp_path):
    assert "No such file" in refused(1, "probe", tmp_path / "gone")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(1, "probe", tmp_path / "file")
    assert "--engine: tape not in {auto,uring,posix}" in refused(
        2, "probe", tmp_path, "--engine", "tape"
    )
    for wrong in ("0", "nan", "inf", "601", "1x"):  # nan once ran for ever
        for words in (("probe", tmp_path), ("bench", "io")):
            assert f"--seconds: `{wrong}` is not a number from" in refused(
                2, *words, "--seconds", wrong
            )


def test_probe_of_a_read_only_or_small_folder_says_why(tmp_path):
    with mounted(["-t", "tmpfs", "-o", "ro", "tmpfs"], tmp_path / "ro") as folder:
        assert "Read-only file system" in refused(1, "probe", folder)
    with mounted(["-t", "tmpfs", "-o", "size=8m", "tmpfs"], tmp_path / "small") as folder:
        assert "128 MiB are needed" in refused(1, "probe", folder)
        assert not any(folder.iterdir())


# Libraries of a GPU made of software, by which the command finds one.
FAKE_GPU = Path(__file__).resolve().parents[2] / "build/release/src/stoker/io/fake_gpu"


def test_probe_measures_transfers_to_gpu_memory(tmp_path):
    fake = {"PATH": "/nowhere", "LD_LIBRARY_PATH": str(FAKE_GPU)}
    words = ("probe", tmp_path, "--gpu", "0", "--seconds", "1")
    both = json.loads(run(*words, "--json", env=fake).stdout)
    assert both["device"] == "a GPU made of software" and both["why_no_cufile"] == ""
    assert [point["way"] for point in both["points"]] == ["cufile"] * 6 + ["host"] * 6
    assert both["bounced_bytes"] == 0
    one = run(*words, env={**fake, "STOKER_FAKE_CUFILE": "5001"})
    assert "without cuFile: the kernel module nvidia-fs is not loaded" in one.stdout
    assert "cufile" not in one.stdout and one.stdout.count("host") == 6
    assert not any(tmp_path.iterdir())
    assert "there is no GPU 7" in refused(1, "probe", tmp_path, "--gpu", "7", env=fake)
    assert "leave --engine out" in refused(1, *words, "--engine", "posix", env=fake)


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "nothing"),
        ("bench",),
        ("ls", "--bogus", "x"),
        ("export", "x"),
        ("probe", ".", "--engine", "tape"),
        ("train", "--bogus"),
        ("train", "--steps", "some"),
        ("train", "--dram", "lots"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_2(words):
    shown = refused(2, *words)
    assert shown.startswith("stoker") and "--help" in shown
