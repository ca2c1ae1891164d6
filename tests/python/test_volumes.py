"""Several volumes under one model. How shares follow the speeds is held over simulated disks, in
volumes_test.cc; here a real one is throttled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slow_volume_run
import stoker
from faults import ONE_THREAD, small_disk, throttle
from models import Tiny, batch, loss_of
from stoker import _core
from stoker.errors import InvalidArgument, OutOfSpace, StokerError
from stoker.offload.storage import probe
from stoker.offload.storage import volume_rooms as rooms
from stoker.offload.division.layout import store_capacity
from stoker.offload.storage.volumes import Shares


def train(
    store: str, steps: int = 4, resume: bool = False
) -> tuple[list[float], stoker.OffloadedOptimizer]:
    torch.manual_seed(0)
    model = Tiny()
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        store=store,
        dram="16MiB",
        resume=resume,
    )
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.flush()
    return losses, opt


def test_the_ledger_says_what_each_volume_took_and_the_bits_are_the_same(tmp_path):
    losses, opt = train(f"{tmp_path}/one")
    assert opt.ledger.last["volume_bytes"] == {} and not [
        event for event in opt.ledger.events if event["what"] == "volumes"
    ]
    opt.close()

    rows = []
    folders = [f"{tmp_path}/a", f"{tmp_path}/b"]
    both, opt = train(",".join(folders))
    opt.ledger.on_step(rows.append)
    assert both == losses
    event = next(event for event in opt.ledger.events if event["what"] == "volumes")
    assert set(event["volumes"]) == set(folders) and abs(sum(event["volumes"].values()) - 1) < 1e-9
    assert (
        all(f"{folder} moves " in event["reason"] for folder in folders)
        and "GB/s" in event["reason"]
    )
    taken = opt.ledger.last["volume_bytes"]
    assert set(taken) == set(folders)  # so little may go to one of them alone
    # what a step stages is what its volumes take, but for the chunks that are still on their way
    # when the row is closed
    written = sum(opt.ledger.summary()["written_bytes"].values())
    assert 0 < sum(taken.values()) <= written
    opt.close()


def test_room_is_shared_out_by_rates_and_half_as_much_again_equally():
    plenty = 1 << 40
    # 1000 and 200 by rates; none has more than all of it
    assert rooms.share_out(1200, [5e9, 1e9], [plenty, plenty]) == [1200, 600]
    # each may take three quarters of what a step writes
    assert rooms.share_out(1200, [1e9, 1e9], [plenty, plenty]) == [900, 900]
    assert rooms.share_out(1200, [1e9, 1e9, 1e9], [plenty, plenty, plenty]) == [600, 600, 600]
    # held to what is free: the others take what one has no room for, a quarter of all stays free,
    # and less is to spare
    assert rooms.share_out(1200, [5e9, 1e9], [700, plenty]) == [700, 1100]
    assert rooms.share_out(1200, [5e9, 1e9], [1000, 700]) == [1000, 400]
    assert rooms.share_out(1200, [5e9, 1e9], [600, 600]) == [600, 600]
    assert rooms.share_out(1200, [5e9, 1e9], [0, 1200]) == [1, 1200]
    # whoever makes one on the same disks at the same time finds what it needs
    assert sum(rooms.share_out(1200, [1e9, 1e9], [1700, 1700], sharers=2)) == 1400
    assert sum(rooms.share_out(1200, [1e9, 1e9], [1200, 1200], sharers=2)) == 1200


@pytest.fixture
def two_disks(tmp_path, monkeypatch) -> dict[str, float]:
    """The folders a and b are taken for disks of these rates; a rate that is taken away is not to
    be asked for."""
    rates = {f"{tmp_path}/a": 5e9, f"{tmp_path}/b": 1e9}
    monkeypatch.setattr(probe, "file_system", lambda folder: folder)
    monkeypatch.setattr(rooms, "measured", lambda folder: rates[folder])
    return rates


def test_a_store_is_laid_out_by_what_the_disks_can_do(two_disks, caplog):
    caplog.set_level("INFO")
    a, b = two_disks
    _, opt = train(f"{a},{b}")
    needed = store_capacity(opt._session.blocks, opt._session.planes.algorithm)
    room = {
        path: volume["capacity_bytes"]
        for path, volume in opt._session.planes.store.info()["volumes"].items()
    }
    assert room[a] == pytest.approx(needed, abs=8192) and room[b] == pytest.approx(
        needed / 2, abs=8192
    )
    told = [event for event in opt.ledger.events if event["what"] == "volumes"][0]
    assert told["step"] == 0 and told["volumes"][a] == pytest.approx(2 / 3, abs=1e-3)
    assert f"{a} has room for " in told["reason"] and "67% of the store" in told["reason"]
    assert f"{a} moves 5 GB/s and gets " in caplog.text
    opt.close()
    two_disks.clear()  # what it was made with counts
    _, opt = train(f"{a},{b}", resume=True)
    assert opt._session.planes.store.info()["volumes"][a]["capacity_bytes"] == room[a]
    assert not [
        event for event in opt.ledger.events if event["what"] == "volumes" and event["step"] == 0
    ]
    opt.close()


def test_between_equal_disks_a_quarter_of_what_a_step_writes_can_move(two_disks):
    a, b = two_disks
    two_disks[b] = 5e9
    _, opt = train(f"{a},{b}")
    needed = store_capacity(opt._session.blocks, opt._session.planes.algorithm)
    for volume in opt._session.planes.store.info()["volumes"].values():
        # two versions of three quarters, where half is its part
        assert volume["capacity_bytes"] == pytest.approx(0.75 * needed, abs=8192)
    opt.close()


def test_what_was_cut_off_is_made_again_with_other_rooms(two_disks):
    a, b = two_disks
    for folder in two_disks:
        Path(folder).mkdir()
    (Path(a) / "stoker.volume").touch()
    runtime = _core.Runtime(threads=1, budget_bytes=64 << 20)
    runtime.open_store(b, create=True, capacity_bytes=1 << 20).close()
    volume = Path(b) / "stoker.volume"
    volume.write_bytes(bytes(volume.stat().st_size))  # it has its size and no header yet
    _, opt = train(f"{a},{b}")
    assert opt._session.planes.store.info()["volumes"][a]["capacity_bytes"] > 90 << 20
    opt.close()


def test_disks_that_cannot_be_measured_get_equal_parts(two_disks, monkeypatch, caplog):
    def fail(folder: str) -> float:
        raise StokerError("the disk cannot be measured: it is shy")

    monkeypatch.setattr(rooms, "measured", fail)
    _, opt = train(",".join(two_disks))
    assert (
        len(
            {
                volume["capacity_bytes"]
                for volume in opt._session.planes.store.info()["volumes"].values()
            }
        )
        == 1
    )
    assert "get equal parts of the store: the disk cannot be measured" in caplog.text
    opt.close()


def test_folders_on_one_disk_share_what_it_has_free(tmp_path, two_disks, monkeypatch):
    a, b = two_disks
    for folder in (*two_disks, tmp_path / "c"):
        Path(folder).mkdir()
    monkeypatch.setattr(probe, "file_system", lambda folder: folder == b)
    mib = 1 << 20
    monkeypatch.setattr(rooms, "_free", lambda folders: 1000 * mib)
    shares = rooms.rooms([a, b, f"{tmp_path}/c"], 600 * mib)
    assert shares[0] == shares[2] == 300 * mib and shares[1] == 300 * mib
    assert rooms.rooms([a, f"{tmp_path}/c"], 600 * mib) == []
    with pytest.raises(
        OutOfSpace,
        match=(
            r"needs 2.93 GiB for data, but after the journal its disks have too little free space: "
            rf".*{tmp_path}/c has .*Free some"
        ),
    ):
        rooms.rooms([a, b, f"{tmp_path}/c"], 3000 * mib)


class Fake:
    """A store whose volumes wrote what it is told."""

    def __init__(self) -> None:
        empty = {
            "written_bytes": 0,
            "bytes_per_second": 1e9,
            "capacity_bytes": 128 << 20,
            "free_bytes": 100 << 20,
            "refused_bytes": 0,
        }
        self.volumes = {"/a": dict(empty), "/b": dict(empty)}

    def info(self) -> dict:
        return {"volumes": {path: dict(volume) for path, volume in self.volumes.items()}}

    def write(self, a: int, b: int) -> Fake:
        self.volumes["/a"]["written_bytes"] += a
        self.volumes["/b"]["written_bytes"] += b
        return self


def test_only_a_share_that_changes_is_told():
    store = Fake()
    shares = Shares(store)
    assert shares.step() == ({"/a": 0, "/b": 0}, None)
    store.write(50, 50)
    taken, told = shares.step()
    assert taken == {"/a": 50, "/b": 50} and told["volumes"] == {"/a": 0.5, "/b": 0.5}
    assert told["reason"] == "/a moves 1 GB/s and takes 50%; /b moves 1 GB/s and takes 50%"
    store.write(55, 45)
    assert shares.step() == ({"/a": 55, "/b": 45}, None)
    store.volumes["/b"]["bytes_per_second"] = 2e8
    store.write(80, 20)
    taken, told = shares.step()
    assert told["volumes"] == {"/a": 0.8, "/b": 0.2}
    assert (
        told["reason"]
        == "/a moves 1 GB/s and takes 80% instead of 50%; /b became slower, 0.2 GB/s instead of 1,"
        " and takes 20% instead of 50%"
    )
    store.volumes["/b"]["bytes_per_second"] = 9e8
    store.write(55, 45)
    _, told = shares.step()
    assert (
        told["reason"]
        == "/a moves 1 GB/s and takes 55% instead of 80%; /b became quicker, 0.9 GB/s instead of"
        " 0.2, and takes 45% instead of 20%"
    )


def test_a_volume_that_becomes_full_is_told_once():
    store = Fake()
    shares = Shares(store)
    store.write(45, 55)
    assert "full" not in shares.step()[1]["reason"]
    for step in range(3):
        store.volumes["/b"]["refused_bytes"] += 4
        store.volumes["/b"]["free_bytes"] = 3 << 19
        assert shares.step()[1] is None  # nothing is written yet of what went elsewhere
        store.write(48, 52)
        _, told = shares.step()
        assert (told is None) == (step > 0)
        if told is not None:
            assert (
                told["reason"]
                == "/a moves 1 GB/s and takes 48% instead of 45%; /b is full, with 1.50 MiB of 128"
                " MiB left, moves 1 GB/s and takes 52% instead of 55%"
            )
    store.write(48, 52)  # it found room again, which is not worth telling on its own
    assert shares.step()[1] is None
    store.write(30, 70)
    assert (
        shares.step()[1]["reason"]
        == "/a moves 1 GB/s and takes 30% instead of 48%; /b moves 1 GB/s and takes 70% instead"
        " of 52%"
    )
    store.volumes["/b"]["refused_bytes"] += 4
    store.write(30, 70)
    assert "/b is full" in shares.step()[1]["reason"]


def test_a_coded_store_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="local store"):
        train("coded(2+1, a, b, c)")
    assert not list(tmp_path.iterdir())


def test_a_store_tells_of_its_volumes(tmp_path):
    runtime = _core.Runtime(threads=1, budget_bytes=64 << 20)
    store = runtime.open_store(f"{tmp_path}/a,{tmp_path}/b", create=True, capacity_bytes=32 << 20)
    txn = store.begin()
    txn.resize("x", 8 << 20)
    txn.write_bytes("x", 0, bytes(8 << 20))
    txn.commit("durable").wait()
    store.read_bytes("x")
    volumes = store.info()["volumes"]
    assert set(volumes) == {f"{tmp_path}/a", f"{tmp_path}/b"}
    assert sum(volume["written_bytes"] for volume in volumes.values()) == 8 << 20
    assert sum(volume["read_bytes"] for volume in volumes.values()) == 8 << 20
    assert any(volume["bytes_per_second"] > 0 for volume in volumes.values())
    assert all(
        volume["refused_bytes"] == 0
        and volume["free_bytes"] == volume["capacity_bytes"] - volume["written_bytes"]
        for volume in volumes.values()
    )

    before = Shares(store)
    chunk = 1 << 20  # what is left of both is filled, so that one of them is full before the other
    txn = store.begin()
    count = sum(volume["free_bytes"] // chunk for volume in volumes.values())
    txn.resize("y", count * chunk)
    for index in range(count):
        txn.write_bytes("y", index * chunk, bytes(chunk))
    txn.commit("durable").wait()
    full = [path for path, volume in store.info()["volumes"].items() if volume["refused_bytes"]]
    assert full and all(store.info()["volumes"][path]["free_bytes"] < chunk for path in full)
    reason = before.step()[1]["reason"]
    assert all(f"{path} is full, with " in reason for path in full), reason
    store.close()


def throttled_run(*words: object) -> dict:
    done = subprocess.run(
        [sys.executable, slow_volume_run.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_disk_that_is_throttled_gets_less_and_the_ledger_says_so(tmp_path):
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    with (
        small_disk(folders[0], 300) as quick,
        small_disk(folders[1], 300) as slow,
        throttle() as group,
    ):
        both = throttled_run(f"{quick}/store,{slow}/store", group.folder, quick, slow)
    alone = throttled_run(tmp_path / "store")
    assert both["digest"] == alone["digest"]

    def share_of_the_slow(first: int, last: int) -> float:
        steps = both["written"][first:last]
        return sum(step[f"{slow}/store"] for step in steps) / sum(
            sum(step.values()) for step in steps
        )

    # what each can do is known by then
    before = share_of_the_slow(slow_volume_run.SLOW - 4, slow_volume_run.SLOW)
    after = share_of_the_slow(slow_volume_run.SLOW + 1, slow_volume_run.STEPS)
    assert after < 0.15 and after < before / 2, both["written"]
    told = [event for event in both["events"] if event["step"] > slow_volume_run.SLOW]
    assert told and told[-1]["volumes"][f"{slow}/store"] < 0.15
    assert any(f"{slow}/store became slower, " in event["reason"] for event in told), told
