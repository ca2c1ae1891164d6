"""`stoker create`, `put`, `rm`, `repair` and `scrub` of a coded store as an operator runs them:
results, exit statuses, sentences."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from stoker import _core

from faults import COMMAND, find, refused, run

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )

BIG = 3_000_000


def coded(folder: Path, last: int = 5) -> str:
    return f"coded(4+2, {folder}/d{{0..{last}}})"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with six shards and two objects; copied by each test."""
    folder = tmp_path_factory.mktemp("made")
    done = run(
        "create",
        coded(folder),
        "--capacity",
        "8MiB",
        "--chunk",
        "64KiB",
        "--objects",
        "64",
        "--same-disk",
    )
    each = {(folder / f"d{disk}" / "stoker.shard").stat().st_size for disk in range(6)}
    assert "note" not in done.stderr
    assert (
        done.returncode == 0
        and f": {each.pop() / 2**20:.1f} MiB on each of 6 disks\n" in done.stderr
        and not each
    )
    (folder / "in").mkdir()
    (folder / "in" / "big").write_bytes(os.urandom(BIG))
    (folder / "in" / "sub").mkdir()
    (folder / "in" / "sub" / "small").write_bytes(b"small")
    (folder / "in" / "empty").write_bytes(b"")
    done = run("put", coded(folder), "x/", folder / "in")
    assert done.returncode == 0 and "3 objects" in done.stderr
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "s")
    return tmp_path / "s"


def exported(store: Path, out: Path) -> dict[str, bytes]:
    assert run("export", coded(store), "x/", out).returncode == 0
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def expected(store: Path) -> dict[str, bytes]:
    return {
        f"x/{path.relative_to(store / 'in')}": path.read_bytes()
        for path in sorted((store / "in").rglob("*"))
        if path.is_file()
    }


def test_put_and_export_give_the_same_bytes(store: Path, tmp_path: Path) -> None:
    assert exported(store, tmp_path / "out") == expected(store)


def test_put_replaces_and_changes_a_part_and_rm_removes(store: Path, tmp_path: Path) -> None:
    (store / "in" / "big").write_bytes(os.urandom(1_000_000))
    assert run("put", coded(store), "x/big", store / "in" / "big").returncode == 0
    (tmp_path / "patch").write_bytes(b"patch" * 1000)
    assert run("put", coded(store), "x/big", tmp_path / "patch", "--at", "500001").returncode == 0
    content = bytearray((store / "in" / "big").read_bytes())
    content[500_001:505_001] = b"patch" * 1000
    (store / "in" / "big").write_bytes(content)
    # beyond the end: it grows
    assert run("put", coded(store), "x/big", tmp_path / "patch", "--at", "1000000").returncode == 0
    (store / "in" / "big").write_bytes(content + b"patch" * 1000)
    assert run("rm", coded(store), "x/empty").returncode == 0
    (store / "in" / "empty").unlink()
    assert exported(store, tmp_path / "out") == expected(store)
    assert "nothing can be put at" in refused(
        1, "put", coded(store), "x/big", tmp_path / "patch", "--at", "9000000"
    )
    assert "there is no object" in refused(
        1, "put", coded(store), "x/none", tmp_path / "patch", "--at", "0"
    )
    assert "there is no object" in refused(1, "rm", coded(store), "x/none")
    assert "cannot read" in refused(1, "put", coded(store), "x/none", tmp_path / "nowhere")


def test_put_is_for_local_stores_too_and_takes_what_is_larger_than_a_commit(tmp_path: Path) -> None:
    large = os.urandom(1 << 20) * 130
    (tmp_path / "large").write_bytes(large)
    local = tmp_path / "local"
    assert run("create", local, "--capacity", "300MiB").returncode == 0
    assert run("put", local, "large", tmp_path / "large").returncode == 0
    assert json.loads(run("ls", local, "--json").stdout)["committed_version"] == 3
    assert run("export", local, "large", tmp_path / "back").returncode == 0
    assert (tmp_path / "back").read_bytes() == large
    assert "there is a store" in refused(1, "create", local, "--capacity", "1MiB")


def test_put_commits_as_seldom_as_there_is_room_for(tmp_path: Path) -> None:
    """A commit ends with the disks at rest. So each takes up to half of what is free."""
    (tmp_path / "large").write_bytes(os.urandom(1 << 20) * 100)
    for folder, capacity, commits in (("full", "140MiB", 2), ("roomy", "300MiB", 1)):
        store = f"coded(2+1, {tmp_path / folder}/d{{0..2}})"
        assert run("create", store, "--capacity", capacity, "--same-disk").returncode == 0
        assert run("put", store, "large", tmp_path / "large").returncode == 0
        opened = _core.Runtime().open_store(store, read_only=True)
        assert opened.info()["committed"] == commits, folder
        opened.close()


def test_create_refuses_what_cannot_be(tmp_path: Path) -> None:
    size = ("--capacity", "8MiB", "--chunk", "64KiB")
    assert "on the same disk" in refused(1, "create", coded(tmp_path), *size)
    assert not list(tmp_path.rglob("stoker.shard"))
    assert "needs at least 6 disks" in refused(
        1, "create", coded(tmp_path, last=4), *size, "--same-disk"
    )
    assert "at most 32 chunks" in refused(
        1, "create", f"coded(30+3, {tmp_path}/d{{0..40}})", *size, "--same-disk"
    )
    (tmp_path / "d0").mkdir(exist_ok=True)
    (tmp_path / "d0" / "stoker.shard").write_bytes(b"x" * 200_000)
    assert "holds something that is not a shard" in refused(
        1, "create", coded(tmp_path), *size, "--same-disk"
    )
    assert (tmp_path / "d0" / "stoker.shard").read_bytes() == b"x" * 200_000


@pytest.mark.parametrize(
    ("code", "disks", "write", "read"),
    [("2+2", 4, 1, 2), ("1+1", 2, 0, 1), ("2+3", 5, 2, 2), ("2+2", 5, 2, 2)],
)
def test_create_tells_what_a_code_with_much_parity_cannot_do(
    tmp_path: Path, code: str, disks: int, write: int, read: int
) -> None:
    store = f"coded({code}, {tmp_path}/d{{0..{disks - 1}}})"
    done = run(
        "create", store, "--capacity", "1MiB", "--chunk", "64KiB", "--objects", "64", "--same-disk"
    )
    assert done.returncode == 0
    less = (
        f"note: it can be written to and repaired with at most {write} of its {disks} disks lost,"
        f" and read with at most {read}," in done.stderr
    )
    assert less == ("note" in done.stderr) == (disks <= 2 * int(code[-1])), done.stderr
    for lost in range(1, read + 2):
        shutil.rmtree(tmp_path / f"d{lost - 1}")
        assert (run("ls", store).returncode == 0) == (lost <= read)
        if lost <= read:
            assert ("too many for writing" in run("repair", store).stdout) == (lost > write)


def test_lost_disks_are_rebuilt_where_that_is_asked_for(store: Path, tmp_path: Path) -> None:
    for lost in ("d0", "d3"):
        shutil.rmtree(store / lost)
    done = run("repair", coded(store))
    assert done.returncode == 1
    assert "'" + str(store / "d0") + "' is not there: left as it is" in done.stderr
    assert "2 problems left" in done.stdout and "--replace" in done.stdout
    assert not (store / "d0").exists()
    assert "on the same disk" in refused(1, "repair", coded(store), "--replace", store / "d0")
    assert not (store / "d0" / "stoker.shard").exists()
    done = run(
        "repair", coded(store), "--same-disk", "--json", "--replace", store / "d0", store / "d3"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is rebuilt from the others") == 2
    answer = json.loads(done.stdout)
    assert answer["clean"] and answer["rebuilt_bytes"] > BIG // 4
    assert run("fsck", coded(store)).returncode == 0
    again = run("repair", coded(store), "--same-disk", "--replace", store / "d0", store / "d3")
    assert again.returncode == 0 and "rebuilt 0" in again.stdout
    shutil.rmtree(store / "d5")
    shutil.rmtree(store / "d4")
    written = run(
        "repair",
        "coded(4+2, d{0..3}, d4/, ./d5)",
        "--same-disk",
        "--replace",
        "./d4",
        f"{store}/d5/",
        cwd=store,
    )
    assert written.returncode == 0 and written.stderr.count("is rebuilt from the others") == 2, (
        "a place is a place, however it is written"
    )
    for lost in ("d1", "d2"):
        shutil.rmtree(store / lost)
    assert exported(store, tmp_path / "out") == expected(store)


def test_a_disk_whose_beginning_was_written_over_counts_as_lost_and_is_left_alone(
    store: Path, tmp_path: Path
) -> None:
    shard = store / "d3" / "stoker.shard"
    with open(shard, "r+b") as file:
        file.write(b"x" * 65536)
    spoilt = shard.read_bytes()
    assert exported(store, tmp_path / "out") == expected(store)
    assert run("put", coded(store), "x/new", store / "in" / "big").returncode == 0
    assert (
        f"'{store / 'd3'}' holds something that is not a shard"
        in run("fsck", "--quick", coded(store)).stdout
    )
    assert "left as it is" in run("repair", coded(store)).stderr
    assert "move it away" in refused(
        1, "repair", coded(store), "--same-disk", "--replace", store / "d3"
    )
    assert shard.read_bytes() == spoilt
    shard.unlink()
    assert run("repair", coded(store), "--same-disk", "--replace", store / "d3").returncode == 0
    assert run("fsck", coded(store)).returncode == 0


def test_a_new_disk_may_stand_elsewhere(store: Path, tmp_path: Path) -> None:
    shutil.rmtree(store / "d2")
    moved = f"coded(4+2, {store}/d{{0..1}}, {store}/new, {store}/d{{3..5}})"
    assert "not a shard of this store" in refused(
        1, "repair", coded(store), "--same-disk", "--replace", store / "new"
    )
    assert (
        run("repair", moved, "--same-disk", "--replace", store / "new", "--rate", "1GiB").returncode
        == 0
    )
    assert run("fsck", moved).returncode == 0
    assert run("fsck", coded(store)).returncode == 1


def test_more_lost_than_the_code_bears_names_the_objects(store: Path) -> None:
    for lost in ("d0", "d1", "d2"):
        shutil.rmtree(store / lost)
    done = run("repair", coded(store))
    assert done.returncode == 1
    assert (
        "too many for writing" in done.stdout
        and "cannot be read in full without the missing shards" in done.stdout
        and "'x/big'" in done.stdout
    )
    assert "'x/big'" in run("fsck", "--quick", coded(store)).stdout


def test_a_program_is_told_which_disks_count(store: Path) -> None:
    for lost in ("d0", "d1"):
        shutil.rmtree(store / lost)
    reader = _core.Runtime(threads=1, budget_bytes=64 << 20).open_store(
        f"coded(4+2, {store}/d{{3..5}}, {store}/d{{0..2}})", read_only=True
    )
    assert set(reader.health()["live"]) == {f"{store}/d{disk}" for disk in range(2, 6)}, (
        "whatever the order in which they are named"
    )
    reader.close()


def test_a_program_is_told_which_objects_cannot_be_read(store: Path) -> None:
    runtime = _core.Runtime(threads=1, budget_bytes=64 << 20)
    for missing, lost in enumerate(("d0", "d1", "d2"), 1):
        shutil.rmtree(store / lost)
        reader = runtime.open_store(coded(store))
        affected = reader.health()["affected"]
        assert affected == [] if missing <= 2 else "x/big" in affected and "x/empty" not in affected
        reader.close()


def test_export_goes_on_past_what_is_lost(store: Path, tmp_path: Path) -> None:
    # the first by name: it cannot be a file name
    assert run("put", coded(store), "x/..", store / "in" / "empty").returncode == 0
    home = next(
        disk
        for disk in sorted(store.glob("d*"))
        if find(disk / "stoker.shard", b"small" + bytes(4091))
    )
    for lost in [disk for disk in sorted(store.glob("d*")) if disk != home][:3]:
        shutil.rmtree(lost)
    done = run("export", coded(store), "x/", tmp_path / "out")
    assert done.returncode == 1
    assert (
        "'x/..': " in done.stderr
        and "cannot be a file name" in done.stderr
        and "'x/big': " in done.stderr
    )
    assert done.stderr.splitlines()[-1].endswith(
        f"2 of 4 objects could not be exported, the others are in '{tmp_path / 'out'}'; see the "
        "error of each above"
    )
    exported_files = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert exported_files == {
        "x/empty": b"",
        "x/sub/small": b"small",
    }, "behind the lost one, and no beginning of that"


def test_scrub_finds_and_mends_damage_and_fsck_is_clean_then(store: Path, tmp_path: Path) -> None:
    assert json.loads(run("fsck", "--quick", coded(store), "--json").stdout)["scrubbed_at"] is None
    clean = json.loads(run("scrub", coded(store), "--json").stdout)
    assert clean["clean"] and not any(clean["scrub"]["mended"].values())
    first = json.loads(run("fsck", "--quick", coded(store), "--json").stdout)
    assert 0 <= time.time() - first["scrubbed_at"] < 600
    assert any(
        "the last scrub ended" in note and "damages found: 0, not mended: 0" in note
        for note in first["notes"]
    )
    shard = store / "d4" / "stoker.shard"
    content = bytearray(shard.read_bytes())
    block = next(
        at
        for at in range(9 << 20, len(content), 4096)
        if content[at : at + 4] != b"SKH1" and any(content[at : at + 4096])
    )
    content[block + 100] ^= 4
    shard.write_bytes(content)
    assert run("fsck", coded(store)).returncode == 1
    done = run("scrub", coded(store), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["scrub"]["mended"]["blocks"] == 1
    clean = run("fsck", coded(store))
    assert clean.returncode == 0 and "UTC; damages found: 1, not mended: 0\n" in clean.stdout
    shutil.rmtree(store / "d0")
    assert "damages found: 1" in run("fsck", "--quick", coded(store)).stdout, (
        "any of the disks knows"
    )
    assert exported(store, tmp_path / "out") == expected(store)


def test_a_class_is_stated_told_and_kept(store: Path, tmp_path: Path) -> None:
    def classes() -> dict[str, str | None]:
        return {
            row["key"]: row.get("class")
            for row in json.loads(run("ls", coded(store), "--json").stdout)["objects"]
        }

    assert set(classes().values()) == {None}
    assert run("put", coded(store), "y/", store / "in", "--class", "read_only").returncode == 0
    assert classes()["y/big"] == "read_only" and classes()["x/big"] is None
    opened = _core.Runtime(threads=1, budget_bytes=256 << 20).open_store(coded(store))
    change = opened.begin()
    change.expect("x/big", "write_only")
    with pytest.raises(ValueError, match="is not one of read_only"):
        change.expect("x/big", "hot")
    change.commit().wait()
    assert opened.stat("x/big")["class"] == "write_only"
    opened.close()
    assert classes()["x/big"] == "write_only"
    assert "--class" in refused(2, "put", coded(store), "y/", store / "in", "--class", "hot")
    local = tmp_path / "local"
    assert run("create", local, "--capacity", "64MiB").returncode == 0
    assert run("put", local, "y/", store / "in", "--class", "read_only").returncode == 0, (
        "a store to which all are alike ignores it"
    )


def test_a_class_that_put_told_by_name_and_size_is_kept(store: Path, tmp_path: Path) -> None:
    """A name that says data tells a data set where there is much of it, and nothing is ever done
    with the store but this."""
    (tmp_path / "much").write_bytes(os.urandom(1_200_000))
    (tmp_path / "little").write_bytes(os.urandom(20_000))
    for key, source in (
        ("new/train.parquet", "much"),
        ("few/train.parquet", "little"),
        ("saved/step.ckpt", "much"),
        ("other/7", "much"),
        ("new/7", "much"),
    ):
        assert run("put", coded(store), key, tmp_path / source).returncode == 0
    told = {
        row["key"]: row.get("class")
        for row in json.loads(run("ls", coded(store), "--json").stdout)["objects"]
        if row["key"][0] != "x"
    }
    assert told.pop("new/7") == "read_only", "by its folder's history, which the table keeps"
    assert told == {
        "new/train.parquet": "read_only",
        "few/train.parquet": "write_only",
        "saved/step.ckpt": "write_only",
        "other/7": None,
    }


def test_fsck_looks_at_every_copy(store: Path) -> None:
    shard = store / "d2" / "stoker.shard"
    content = bytearray(shard.read_bytes())
    content[32_768 + 40] ^= 1  # the second copy of the superblock
    shard.write_bytes(content)
    done = run("fsck", "--quick", coded(store))
    assert (
        done.returncode == 1
        and "one copy of the superblock" in done.stdout
        and "stoker scrub" in done.stdout
    )
    assert run("scrub", coded(store)).returncode == 0
    assert run("fsck", coded(store)).returncode == 0


def test_rates_are_part_of_the_composition(store: Path) -> None:
    quiet = coded(store).replace("4+2", "4+2 scrub=0 repair=16MiB fold=16MiB")
    assert run("put", quiet, "z", store / "in" / "big").returncode == 0
    assert json.loads(run("ls", quiet, "--json").stdout)["store"].startswith(
        "coded(4+2 scrub=0 repair=16777216 fold=16777216, "
    )
    assert "is not an option" in refused(1, "ls", coded(store).replace("4+2", "4+2 fast"))


def test_who_has_the_store_open_is_told_what_the_scrub_found(store: Path) -> None:
    shard = store / "d4" / "stoker.shard"
    content = bytearray(shard.read_bytes())
    block = next(
        at
        for at in range(9 << 20, len(content), 4096)
        if content[at : at + 4] != b"SKH1" and any(content[at : at + 4096])
    )
    content[block + 100] ^= 4
    shard.write_bytes(content)
    begun = int(time.time())
    opened = _core.Runtime(threads=1, budget_bytes=256 << 20).open_store(
        coded(store).replace("4+2", "4+2 scrub=1GiB"), holder="a test"
    )
    health = opened.health()
    assert (
        health["live"] == [f"{store}/d{disk}" for disk in range(6)]
        and not health["troubles"]
        and not health["affected"]
        and health["lost_why"] == ""
        and health["scrubbed"] is None
    )
    deadline = time.monotonic() + 60
    while health["scrub"]["passes"] == 0 and time.monotonic() < deadline:
        assert health["scrub"]["last"] is None
        time.sleep(0.05)
        health = opened.health()
    assert "in use by a test" in refused(1, "ls", coded(store)), (
        "nobody else can look while it is open"
    )
    opened.close()
    assert health["disks"] == [
        {
            "path": f"{store}/d{disk}",
            "failed_reads": 0,
            "failed_writes": 0,
            "wrong_blocks": 0,
            "last": "",
        }
        for disk in range(6)
    ], "what a scrub compares is not a read"
    scrub = health["scrub"]
    assert (
        scrub["passes"] >= 1
        and scrub["stopped"] == ""
        and begun <= health["scrubbed"]["ended_at"] <= time.time()
    )
    assert scrub["found"] == 1 and scrub["last"]["chunks"] > 0 and not scrub["last"]["lost"]
    if scrub["passes"] == 1:
        assert health["scrubbed"]["found"] == 1 and health["scrubbed"]["lost"] == 0
        assert scrub["last"]["mended"] == {
            "blocks": 1,
            "header_pages": 0,
            "log_records": 0,
            "tables": 0,
            "superblocks": 0,
        }
    with pytest.raises(ValueError, match="this store was closed"):
        opened.health()
    assert (
        _core.Runtime(threads=1, budget_bytes=64 << 20).open_store("memory:", create=True).health()
        is None
    )


def test_bench_repair_tells_the_cap_and_what_users_wait(tmp_path: Path) -> None:
    done = run(
        "bench",
        "repair",
        tmp_path,
        "--size",
        "8MiB",
        "--rate",
        "4MiB",
        "--seconds",
        "0.5",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (
        answer["machine"]["stoker"]
        and answer["code"] == "6+3"
        and answer["bytes"] == 8 << 20
        and answer["seconds_per_rate"] == 0.5
    )
    alone, beside = answer["results"]
    assert not alone["repair"] and beside["repair"] and beside["rate_bytes_per_second"] == 4 << 20
    assert 0 < beside["p50_us"] <= beside["p99_us"] and beside["updates"] > 0
    assert not list(tmp_path.iterdir())


def test_bench_coded_stands_beside_plain_files_and_plays_traces(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "".join(
            f"{128166372003061629 + 10000 * i},web,0,Write,{offset},{bytes_},100\n"
            for i, (offset, bytes_) in enumerate(
                [(4096, 4096), (6 * 2**20 - 512, 1024), (4096, 4096), (2**30, 8192)] * 5
            )
        )
    )
    folder = tmp_path / "disk"
    folder.mkdir()
    size = ("--size", "64MiB", "--rounds", "1", "--seconds", "0.1", "--writers", "2")
    done = run("bench", "coded", folder, *size, "--json", "--trace", trace, "--requests", "18")
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    answer = json.loads(done.stdout)
    machine = answer["machine"]
    assert machine["stoker"] and machine["features"] and answer["bytes"] == 64 << 20
    names = ["put", "read", "read_without_m", "read_1mib", "scrub", "rebuild"]
    assert [row["measure"] for row in answer["results"]] == names
    for row in answer["results"]:
        assert row["coded_bytes_per_second"] > 0 and row["plain_bytes_per_second"] > 0
        assert row["share"] > 0 and row["goal"] > 0 and len(row["coded_all"]) == 1
    kinds = [(row["writers"], row["aligned"]) for row in answer["updates"]]
    assert kinds == [(1, True), (1, False), (2, True), (2, False)]
    for row in answer["updates"]:
        for side in row["coded"] + row["plain"]:
            assert side["updates"] > 0 and 0 < side["p50_us"] <= side["p99_us"] <= side["max_us"]
    (played,) = answer["traces"]
    # 6 MiB - 512 begins in one object and ends in the next; 1 GiB lies in a third.
    assert played["objects"] == 3 and played["coded"]["updates"] == 18
    assert played["coded"]["disk_bytes_an_update"] > 4 * played["bytes_an_update"]
    assert played["coded"]["flushes_an_update"] > 0 and played["plain"]["updates"] == 18


def test_only_coded_stores_have_copies_to_repair_from(tmp_path: Path) -> None:
    assert "is not a coded store" in refused(1, "repair", tmp_path)
    assert "is not a coded store" in refused(1, "scrub", tmp_path)


def test_a_store_opened_with_replace_rebuilds_beside_its_work(store: Path, tmp_path: Path) -> None:
    shutil.rmtree(store / "d1")
    opened = _core.Runtime(threads=1, budget_bytes=256 << 20).open_store(
        coded(store), same_disk=True, replace=[str(store / "d1")], holder="a test"
    )
    change = opened.begin()
    change.write_bytes("x/big", 4096, b"n" * 5000)
    change.commit().wait()
    content = (store / "in" / "big").read_bytes()
    (store / "in" / "big").write_bytes(content[:4096] + b"n" * 5000 + content[9096:])
    confirmed = 0
    deadline = time.monotonic() + 60
    while confirmed == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        confirmed = int.from_bytes((store / "d1" / "stoker.shard").read_bytes()[40:48], "little")
    opened.close()
    assert confirmed > 0, "it counts once it has everything"
    assert run("fsck", coded(store)).returncode == 0
    for lost in ("d0", "d4"):
        shutil.rmtree(store / lost)
    assert exported(store, tmp_path / "out") == expected(store)
