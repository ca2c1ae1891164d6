"""The order of two levels: its reads and requests, over ranks, resumes and mixtures."""

from __future__ import annotations

import io
import itertools
import tarfile

import numpy as np
import pytest
import torch

import stoker
from stoker.data import Files, Loader, Rows, Tar, Tokens, following, windows
from stoker.errors import InvalidArgument


@pytest.fixture
def store(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as opened:
        yield opened


def put(store, key: str, data: bytes) -> None:
    change = store.begin()
    change.resize(key, len(data))
    change.write_bytes(key, 0, data)
    change.commit().wait()


def put_array(store, key: str, array: np.ndarray) -> None:
    out = io.BytesIO()
    np.save(out, array)
    put(store, key, out.getvalue())


def numbered(store, count: int, width: int = 256) -> Rows:
    """Row i begins with the number i; `width` int32 a row."""
    rows = np.zeros((count, width), np.int32)
    rows[:, 0] = np.arange(count)
    put_array(store, "rows.npy", rows)
    return Rows(store, "rows.npy")


def firsts(batches) -> list[int]:
    return [row for batch in batches for row in batch[:, 0].tolist()]


def test_a_window_reads_runs_and_gives_each_sample_once(store):
    source = numbered(store, 5_000)  # 1 KiB each: a run is 256 of them
    loader = Loader(source, batch=32, seed=1, shuffle="window", window_bytes=1 << 20)
    first, second = firsts(loader), firsts(loader)
    assert sorted(first) == sorted(second) == list(range(5_000)) and first != second
    # 20 runs, cut at most once by each border of the windows and lanes; twice, for two epochs
    assert loader.read_bytes == 2 * 5_000 * 1024
    assert loader.read_ranges <= 2 * (20 + 5 + 1 + 4)
    assert "come by one read" in loader.order
    exact = Loader(source, batch=32, seed=1)
    assert sorted(firsts(exact)) == list(range(5_000)) and exact.read_ranges == 5_000
    assert "shuffle='window'" in exact.order


def test_what_is_near_in_the_source_is_far_in_a_window(store):
    batches = list(Loader(numbered(store, 5_000), batch=64, seed=1, shuffle="window"))
    spread = [np.ptp(batch[:, 0].numpy()) for batch in batches[:-1]]
    assert min(spread) > 2_500


def test_each_rank_reads_its_own_runs_only(store):
    source = numbered(store, 4_096)
    whole = list(Loader(source, batch=32, seed=2, shuffle="window", window_bytes=1 << 21))
    for ranks in (2, 4):
        loaders = [
            Loader(
                source,
                batch=32 // ranks,
                seed=2,
                shuffle="window",
                window_bytes=1 << 21,
                rank=rank,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]
        parts = [list(loader) for loader in loaders]
        for step, batch in enumerate(whole):
            assert torch.equal(torch.cat([part[step] for part in parts]), batch)
        for loader in loaders if ranks == 2 else ():  # a window of 2 MiB has two lanes
            assert loader.read_bytes == 4_096 * 1024 // ranks


def test_a_resume_within_a_window_loses_and_repeats_nothing(store):
    source = numbered(store, 1_000, 64)
    rng = np.random.default_rng(5)
    for _ in range(20):
        kind = {"seed": 3, "shuffle": "window", "window_bytes": int(rng.integers(1, 1 << 18))}
        batch, stop = int(rng.integers(1, 40)) * 2, int(rng.integers(1, 12))
        whole = Loader(source, batch=batch, **kind)
        expected = firsts(whole)
        taken = []
        for step, rows in enumerate(whole, 1):
            taken.append(rows)
            if step == stop:
                break
        state = whole.state_dict()
        rest = [Loader(source, batch=batch // 2, rank=r, ranks=2, **kind) for r in range(2)]
        for loader in rest:
            loader.load_state_dict(state)
        halves = [list(loader) for loader in rest]
        after = [torch.cat(both) for both in zip(*halves, strict=True)]
        assert sorted(firsts([*taken, *after])) == sorted(expected)
        whole.close()
    with pytest.raises(InvalidArgument, match="another order"):
        Loader(source, batch=batch, seed=3).load_state_dict(state)


def test_overlapping_windows_of_tokens_are_right_in_every_order(store):
    tokens = np.arange(20_001, dtype=np.uint16)
    put_array(store, "t.npy", tokens)
    source = Tokens(store, "t.npy", 100)
    for shuffle in (True, False, "window"):
        loader = Loader(source, batch=7, seed=1, shuffle=shuffle)
        rows = torch.cat(list(loader))
        assert sorted(rows[:, 0].tolist()) == list(range(0, 20_000, 100))
        assert torch.equal(rows, rows[:, :1] + torch.arange(101))
        assert loader.read_ranges == {True: 200, False: 29}.get(shuffle, loader.read_ranges)
        assert shuffle != "window" or loader.read_ranges < 20


def test_tar_and_files_by_windows(store):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(300):
            for extension, size in (("bin", 100 + number), ("cls", 2)):
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = size
                tar.addfile(member, io.BytesIO(bytes([number % 251]) * size))
    put(store, "a.tar", out.getvalue())
    loader = Loader(Tar(store, "a.tar"), batch=8, seed=1, shuffle="window")
    seen = [sample for batch in loader for sample in batch]
    assert sorted(each["__key__"] for each in seen) == [f"{i:04d}" for i in range(300)]
    for each in seen:
        number = int(each["__key__"])
        assert each["bin"].tolist() == [number % 251] * (100 + number) and len(each["cls"]) == 2
    assert loader.read_ranges <= 12  # 8 lanes and borders
    for number in range(20):
        put(store, f"f/{number}", bytes([number]) * 10)
    files = Loader(Files(store, "f/"), batch=8, seed=1, shuffle="window")
    assert sorted(key for batch in files for key, _ in batch) == sorted(
        f"f/{number}" for number in range(20)
    )
    assert "an object" in files.order


# -- caches


def test_a_cache_follows_the_loader_and_fetches_the_least(tmp_path):
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=2MiB, block=64KiB)"
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as slow:
        numbered(slow, 64, 1 << 14)  # 64 rows of 64 KiB: four MiB, half of which fit
    for shuffle in (True, "window"):
        with stoker.open_store(where) as store:
            source = Rows(store, "rows.npy")
            loader = Loader(source, batch=4, seed=1, shuffle=shuffle, ahead=1)
            ratios = []
            for _ in range(4):
                assert sorted(firsts(loader)) == list(range(64))
                cache = store.info()["cache"]
                assert cache["plans"] == 1
                ratios.append(cache["fetched_bytes"])
            kept = cache["usable_bytes"]
            # Each epoch but the first: what is not kept, and no more.
            for before, after in itertools.pairwise(ratios):
                assert after - before <= 1.02 * ((64 + 1) * (1 << 16) - kept)
            loader.close()
            assert store.info()["cache"]["plans"] == 0
            again = Loader(source, batch=4)
            next(iter(again))
            assert store.info()["cache"]["plans"] == 1
            del again
            assert store.info()["cache"]["plans"] == 0, "who is gone reads no more"


def test_a_cache_that_is_told_nothing_is_said(tmp_path, monkeypatch):
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=2MiB, block=64KiB)"
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as slow:
        numbered(slow, 64, 1 << 10)
    with stoker.open_store(where) as store:
        assert "cache" not in Loader(Rows(store, "rows.npy"), batch=4).order
        monkeypatch.setattr(following, "MOST_SAMPLES", 63)
        loader = Loader(Rows(store, "rows.npy"), batch=4)
        assert "the cache is not told what comes, as there are more than 63" in loader.order
        assert sorted(firsts(loader)) == list(range(64))
        assert store.info()["cache"]["plans"] == 0
    with stoker.open_store(f"dir:{tmp_path}/slow") as slow:
        assert "cache" not in Loader(Rows(slow, "rows.npy"), batch=4).order


def test_a_mixture_in_a_cache_goes_by_its_draws(tmp_path):
    where = f"cached(local:{tmp_path}/fast, dir:{tmp_path}/slow, disk=2MiB, block=64KiB)"
    with stoker.open_store(f"dir:{tmp_path}/slow", create=True) as slow:
        numbered(slow, 64, 1 << 12)
    with stoker.open_store(where) as store:
        rows = Rows(store, "rows.npy")
        loader = Loader([rows, rows], batch=4, weights=[1, 3])
        next(iter(loader))
        assert store.info()["cache"]["plans"] == 1
        loader.close()


def test_sizes_of_windows():
    assert windows.shape(10**6, 1024, 256, 64 << 20) == (10**6, 256, 1024, 64, 256)
    assert windows.shape(10**6, 1024, 24, 64 << 20) == (10**6, 256, 8192, 8, 24)
    # less than four runs a lane: fewer lanes
    assert windows.shape(10**6, 1024, 256, 2 << 20) == (10**6, 256, 1024, 2, 256)
    # of samples larger than a run, each is one
    assert windows.shape(100, 1 << 20, 6, 64 << 20) == (100, 1, 32, 2, 6)


def test_wrong_settings_are_told(store):
    class Own:
        fingerprint = "own"

        def __len__(self):
            return 3

        def batch(self, samples):
            return torch.from_numpy(samples.astype(np.int64))

    with pytest.raises(ValueError, match="does not say where"):
        Loader(Own(), batch=1, shuffle="window")
    with pytest.raises(ValueError, match="'window'"):
        Loader(Own(), batch=1, shuffle="windows")
    with pytest.raises(ValueError, match="draws its samples at random"):
        Loader([Own(), Own()], batch=1, weights=[1, 1], shuffle="window")
    assert "by itself" in Loader(Own(), batch=1).order
