"""Samples of any store in a known order: sources, mixtures, ranks, resume, damage."""

from __future__ import annotations

import io
import itertools
import os
import re
import struct
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import accelerate
import numpy as np
import pytest
import torch

import stoker
from stoker.data import (
    Files,
    Loader,
    Mixture,
    Permutation,
    Rows,
    Tar,
    Tokens,
    as_dataloader,
    sources,
    watch,
)
from stoker.data.order import Sequence
from stoker.errors import Corruption, InvalidArgument, Mismatch, NotFound

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.fixture
def store(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as opened:
        yield opened


def put(store, key: str, data: bytes) -> None:
    change = store.begin()
    change.resize(key, len(data))
    if data:
        change.write_bytes(key, 0, data)
    change.commit().wait()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


class Numbers:
    """Sample i is the number i."""

    def __init__(self, count: int, name: str = "numbers") -> None:
        self._count, self.fingerprint = count, name

    def __len__(self) -> int:
        return self._count

    def batch(self, samples):
        return torch.from_numpy(samples.astype(np.int64))


def test_the_page_says_what_its_example_prints(tmp_path):
    code, said = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.S
    ).groups()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


def test_accelerate_leaves_the_loader_as_it_is():
    from accelerate import Accelerator

    loader = Loader(Numbers(10), batch=4, seed=1)
    prepared = Accelerator(cpu=True).prepare(loader)
    assert prepared is loader, "it takes its part of each batch by itself"
    assert sorted(torch.cat(list(prepared)).tolist()) == list(range(10))


def test_a_dataloader_of_a_loader_skips_without_reading():
    reads = []

    class Told(Numbers):
        def batch(self, samples):
            reads.append(len(samples))
            return super().batch(samples)

    whole = [list(Loader(Numbers(22), batch=4, seed=1))]
    for drop_last in (False, True):
        loader = Loader(Told(22), batch=4, seed=1, drop_last=drop_last, ahead=1)
        batches = as_dataloader(loader)
        assert len(batches) == len(loader) == 6 - drop_last and len(batches.dataset) == 22
        first, second = list(batches), list(batches)
        assert all(torch.equal(a, b) for a, b in zip(first, whole[0]))
        assert sorted(torch.cat(second).tolist()) != sorted(torch.cat(first).tolist()) or (
            torch.cat(second).tolist() != torch.cat(first).tolist()
        ), "each pass is the next epoch"
        again = as_dataloader(Loader(Told(22), batch=4, seed=1, drop_last=drop_last, ahead=1))
        again.batch_sampler.set_epoch(1)
        reads.clear()
        skipped = accelerate.skip_first_batches(again, 4)
        got = list(skipped)
        assert all(torch.equal(a, b) for a, b in zip(got, second[4:], strict=True))
        assert len(reads) == len(got), "what is skipped is not read"


def test_the_trainer_goes_on_without_replaying_a_batch_and_evaluates_each_sample_once(tmp_path):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen = {True: [], False: []}

        def forward(self, x, labels=None):
            self.seen[self.training] += x.tolist()
            return {"loss": (self.weight - 1) ** 2, "logits": x * self.weight}

    class Stop(TrainerCallback):
        def __init__(self, at):
            self.at = at

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == self.at
            control.should_save = control.should_training_stop

    def make(stop=None):
        rows = lambda x: {"x": x, "labels": x}  # noqa: E731
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            num_train_epochs=3,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(Model(), arguments, callbacks=[Stop(stop)] if stop else None)
        train = Loader(Numbers(22), batch=4, seed=1, collate=rows)
        evaluation = Loader(Numbers(13, "others"), batch=4, shuffle=False, collate=rows)
        trainer.get_train_dataloader = lambda: as_dataloader(train)
        trainer.get_eval_dataloader = lambda *_: as_dataloader(evaluation)
        return trainer

    whole = make()
    whole.train()
    seen = whole.model.seen[True]
    assert [sorted(seen[i : i + 22]) for i in (0, 22, 44)] == [list(range(22))] * 3
    assert len(seen) == 66
    for stop in (1, 3, 4, 8):  # inside of an epoch, and at its end
        first = make(stop)
        first.train()
        second = make()
        second.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{stop}"))
        assert first.model.seen[True] + second.model.seen[True] == seen, stop
    for _ in range(2):
        whole.model.seen[False].clear()
        whole.evaluate()
        assert whole.model.seen[False] == list(range(13))


# -- order


def test_an_epoch_has_each_sample_once_and_the_next_another_order():
    loader = Loader(Numbers(103), batch=10, seed=5)
    first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert len(loader) == 11 and loader.epoch == 2
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(103))
    assert first.tolist() != second.tolist()
    loader.set_epoch(0)
    assert torch.equal(torch.cat(list(loader)), first)


def test_in_order_and_without_the_rest():
    loader = Loader(Numbers(10), batch=4, shuffle=False, drop_last=True)
    assert [each.tolist() for each in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(loader) == 2
    assert loader.epoch == 1 and [each.tolist() for each in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("samples", [1, 7, 96, 103])
def test_an_evaluation_over_ranks_sees_each_sample_once(samples):
    loaders = [Loader(Numbers(samples), batch=4, seed=1, rank=rank, ranks=3) for rank in range(3)]
    parts = [list(loader) for loader in loaders]
    assert {len(each) for each in parts} == {
        len(loaders[0])
    }  # the same number of batches everywhere
    assert sorted(torch.cat(list(itertools.chain(*parts))).tolist()) == list(range(samples))


def test_a_resume_with_other_ranks_loses_and_repeats_nothing():
    rng = np.random.default_rng(17)
    for _ in range(200):
        samples, before, after = int(rng.integers(1, 60)), *rng.choice([1, 2, 3, 4, 6], 2)
        endless = bool(rng.integers(2))
        make = lambda rank, ranks: Loader(  # noqa: E731
            Numbers(samples),
            batch=12 // ranks,
            seed=3,
            rank=rank,
            ranks=ranks,
            endless=endless,
            ahead=1,
        )
        stop, total = int(rng.integers(0, 5)), 6
        whole = steps(make(0, 1), total)
        loaders = [make(rank, int(before)) for rank in range(before)]
        seen = [steps(loader, stop) for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        others = [make(rank, int(after)) for rank in range(after)]
        for loader in others:
            loader.load_state_dict(states[0])
        seen_after = [steps(loader, total - stop) for loader in others]
        for step in range(total):
            parts = (
                [each[step] for each in seen]
                if step < stop
                else [each[step - stop] for each in seen_after]
            )
            assert sum(parts, []) == whole[step]
        for loader in (*loaders, *others):
            loader.close()


@pytest.mark.parametrize(
    ("pairs", "seed"), [(12, 1), pytest.param(200, 17, marks=pytest.mark.soak)]
)
def test_ranks_that_are_killed_go_on_with_each_sample_once_and_in_order(tmp_path, pairs, seed):
    script = Path(__file__).parent / "loader_kill_run.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run", str(pairs), str(seed)],
        capture_output=True,
        text=True,
        timeout=120 + 10 * pairs,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{pairs} pairs, ")


def steps(loader: Loader, count: int) -> list[list[int]]:
    """The next `count` batches, through the epochs."""
    out: list[list[int]] = []
    while len(out) < count:
        for batch in loader:
            out.append(batch.tolist())
            if len(out) == count:
                break
    loader.close()
    return out


def test_a_state_of_other_data_is_refused():
    state = Loader(Numbers(100), batch=4, seed=1).state_dict()
    assert len(repr(state)) < 200
    for other in (
        Loader(Numbers(100, "others"), batch=4, seed=1),
        Loader(Numbers(101), batch=4, seed=1),
        Loader(Numbers(100), batch=4, seed=1, shuffle=False),
    ):
        with pytest.raises(InvalidArgument, match="other samples"):
            other.load_state_dict(state)
    with pytest.raises(InvalidArgument, match="global batch of 4"):
        Loader(Numbers(100), batch=4, seed=1, rank=0, ranks=2).load_state_dict(state)
    with pytest.raises(InvalidArgument, match="seed 1"):
        Loader(Numbers(100), batch=4, seed=2).load_state_dict(state)


def test_a_mixture_has_its_shares_and_goes_on_after_a_resume():
    class Named(Numbers):
        def batch(self, samples):
            return (
                torch.stack([torch.tensor([self._count, int(each)]) for each in samples])
                if len(samples)
                else torch.zeros(0, 2)
            )

    def make():
        return Loader([Named(100), Named(1000)], batch=64, seed=2, weights=[1, 3])

    with_all = list(itertools.islice(make(), 40))
    drawn = torch.cat(with_all)
    assert 0.2 < (drawn[:, 0] == 100).double().mean() < 0.3
    small = drawn[drawn[:, 0] == 100][:, 1]
    assert (
        small.bincount(minlength=100).max() - small.bincount(minlength=100).min() <= small.numel()
    )  # all are of the source
    half = make()
    next(iter(half))
    rest = make()
    rest.load_state_dict(half.state_dict())
    assert torch.equal(next(iter(rest)), with_all[1])
    with pytest.raises(TypeError, match="no length"):
        len(half)
    counts = Mixture([1, 3], 2).counts
    assert counts == [16384, 49152]
    # 16,384 draws of a source of 100: each sample 163 or 164 times in a cycle
    seen = np.zeros(100, int)
    drawn, samples = Sequence.mixed([100, 1000], [1, 3], 2).picks(0, 65536)
    np.add.at(seen, samples[drawn == 0].astype(int), 1)
    assert seen.min() == 163 and seen.max() == 164
    half.close(), rest.close()


def test_arrays_of_the_order_are_those_of_single_positions():
    order, mixture = Permutation(1000, -7, 3), Mixture([0.2, 0.5, 0.3], 11)
    assert order.samples(np.arange(1000, dtype=np.uint64)).tolist() == [
        order.sample(i) for i in range(1000)
    ]
    assert mixture.draws(65_500, 65_600).tolist() == [
        list(mixture.draw(i)) for i in range(65_500, 65_600)
    ]
    assert all(mixture.position(*mixture.draw(i)) == i for i in range(65_500, 65_600))
    with pytest.raises(IndexError, match="outside"):
        order.samples(np.array([1000], np.uint64))
    with pytest.raises(InvalidArgument, match="source 1"):
        Mixture([1, 0], 0)


def test_a_forked_child_reads_on_by_itself():
    loader = Loader(Numbers(1000), batch=4, seed=1)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(next(batches)) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    loader.close()


def test_no_thread_outlives_the_epoch_or_the_loader():
    before = set(threading.enumerate())  # other tests' loaders may still be there

    def threads():
        now = set(threading.enumerate()) - before
        return [each for each in now if each.name.startswith("stoker-loader")]

    loader = Loader(Numbers(50), batch=4, seed=1)
    list(loader)
    for thread in threads():
        thread.join(10)  # it ends by itself
    next(iter(loader))
    assert len(threads()) == 1
    left = threads()
    del loader
    left[0].join(10)
    assert not threads()


# -- sources


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_tokens_of_npy_and_of_raw_files(store, dtype):
    tokens = [np.arange(1000, dtype=dtype), (np.arange(77) * 3).astype(dtype)]
    put(store, "a.npy", npy(tokens[0]))
    put(store, "b.npy", npy(tokens[1]))
    put(store, "c.bin", tokens[0].tobytes())
    source = Tokens(store, ["a.npy", "b.npy"], 10)
    windows = [each[i * 10 : i * 10 + 11] for each in tokens for i in range((len(each) - 1) // 10)]
    assert len(source) == len(windows) == 99 + 7
    got = source.batch(np.arange(len(source), dtype=np.uint64)[::-1])
    assert got.dtype == torch.int64 and np.array_equal(
        got.numpy(), np.stack(windows[::-1]).astype(np.int64)
    )
    raw = Tokens(store, "c.bin", 10, dtype=dtype)
    assert np.array_equal(
        raw.batch(np.arange(99, dtype=np.uint64)), np.stack(windows[:99]).astype(np.int64)
    )


def megatron(tokens: np.ndarray, sizes: list[int], code: int) -> bytes:
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * tokens.itemsize
    return (
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(sizes) + 1)
        + np.asarray(sizes, "<i4").tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )


def test_tokens_of_megatron(store):
    tokens = np.random.default_rng(0).integers(0, 60_000, 500).astype("<u2")
    put(store, "train.bin", tokens.tobytes())
    with pytest.raises(InvalidArgument, match="train.idx"):
        Tokens(store, "train.bin", 16)
    put(store, "train.idx", megatron(tokens, [200, 300], 8))
    source = Tokens(store, "train.bin", 16)
    assert np.array_equal(
        source.batch(np.array([30], np.uint64))[0], tokens[480:497].astype(np.int64)
    )
    put(store, "train.idx", megatron(tokens, [200, 301], 8))
    with pytest.raises(Corruption, match="cut or replaced"):
        Tokens(store, "train.bin", 16)
    put(store, "train.idx", b"MMID")
    with pytest.raises(Corruption, match="cut after 4 bytes"):
        Tokens(store, "train.bin", 16)


def test_rows_keep_their_type_and_shape(store):
    rows = np.random.default_rng(0).standard_normal((20, 3, 4)).astype(np.float32)
    put(store, "x/0.npy", npy(rows[:12]))
    put(store, "x/1.npy", npy(rows[12:]))
    source = Rows(store, ["x/0.npy", "x/1.npy"])
    got = torch.cat(list(Loader(source, batch=6, shuffle=False)))
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), rows)


def test_cut_or_wrong_arrays_are_told(store):
    whole = npy(np.arange(100, dtype=np.int32))
    for name, data, error in (
        ("cut", whole[:-4], Corruption),
        ("head", whole[:20], Corruption),
        ("empty", b"", Corruption),
        ("float", npy(np.zeros(100)), InvalidArgument),
        ("big", npy(np.zeros(9, ">i4")), InvalidArgument),
        ("object", b"\x93NUMPY\x01\x00" + whole[8:].replace(b"'<i4'", b"'|O' "), InvalidArgument),
    ):
        put(store, f"{name}.npy", data)
        with pytest.raises(error, match=f"{name}.npy"):
            Tokens(store, f"{name}.npy", 4)
    with pytest.raises(NotFound, match="gone"):
        Tokens(store, "gone.npy", 4)
    put(store, "odd.bin", b"123")
    with pytest.raises(Corruption, match="odd.bin has 3 bytes"):
        Tokens(store, "odd.bin", 4, dtype="uint16")


def test_files_of_any_size(store):
    content = {f"p/{i:03}.jpg": os.urandom(i * 37) for i in range(30)}
    for key, data in {**content, "p/readme.txt": b"no image"}.items():
        put(store, key, data)
    seen = {}
    for batch in Loader(Files(store, "p/", (".jpg",)), batch=7, seed=1):
        seen |= {key: data.numpy().tobytes() for key, data in batch}
    assert seen == content
    with pytest.raises(NotFound, match="q/"):
        Files(store, "q/")


def shard(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_samples_of_tar_files(store):
    long = "d/" + "n" * 150
    members = {
        f"{long if i == 3 else 'd'}/{i:04}.{kind}": os.urandom(i * 11 + 1)
        for i in range(40)
        for kind in ("cls", "seg.png")
    }
    half = dict(itertools.islice(members.items(), 40))
    put(store, "a.tar", shard(half))
    put(
        store,
        "b.tar",
        shard(
            {
                **{k: v for k, v in members.items() if k not in half},
                "d/.hidden": b"x",
                "README": b"y",
            }
        ),
    )
    source = Tar(store, ["a.tar", "b.tar"])
    assert len(source) == 40
    seen = {}
    for batch in Loader(source, batch=6, seed=1):
        for sample in batch:
            seen |= {
                f"{sample['__key__']}.{kind}": sample[kind].numpy().tobytes()
                for kind in ("cls", "seg.png")
            }
    assert seen == members


def test_a_cut_or_damaged_tar_is_told(store):
    whole = shard({f"{i}.bin": bytes([i]) * 600 for i in range(5)})
    for cut in range(0, 5 * 1536 + 1, 256):  # anywhere before the blocks of zeros at the end
        put(store, "cut.tar", whole[:cut])
        with pytest.raises(Corruption, match="cut.tar"):
            Tar(store, "cut.tar")
    for header in range(5):  # a flipped bit in any header
        damaged = bytearray(whole)
        damaged[header * 1536 + 130] ^= 4
        put(store, "flip.tar", bytes(damaged))
        with pytest.raises(Corruption, match="flip.tar"):
            Tar(store, "flip.tar")
    put(store, "packed.tar.gz", b"")
    with pytest.raises(Corruption, match="packed.tar.gz. cannot be unpacked"):
        Tar(store, "packed.tar.gz")
    put(store, "apart.tar", shard({"1.a": b"", "2.a": b"", "1.b": b""}))
    with pytest.raises(InvalidArgument, match="are not next to each other"):
        Tar(store, "apart.tar")


def test_changed_data_is_other_data(store):
    put(store, "t.npy", npy(np.arange(100)))
    state = Loader(Tokens(store, "t.npy", 4), batch=2).state_dict()
    Loader(Tokens(store, "t.npy", 4), batch=2).load_state_dict(state)
    put(store, "t.npy", npy(np.arange(1, 101)))
    with pytest.raises(InvalidArgument, match="other samples"):
        Loader(Tokens(store, "t.npy", 4), batch=2).load_state_dict(state)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_object_that_is_replaced_while_it_is_read_is_told(tmp_path, monkeypatch, drop_last):
    """Before, the rest of the epoch came from another file without a word."""

    def replace(value: int) -> None:
        np.save(tmp_path / "new.npy", np.full((46, 512), value, np.int32))
        os.replace(tmp_path / "new.npy", tmp_path / "rows.npy")

    with stoker.open_store(f"dir:{tmp_path}") as store:
        for every in (0.0, 3600.0):  # at the next batch, or at the end of the epoch
            monkeypatch.setattr(watch, "_EVERY", every)
            replace(0)
            loader = Loader(Rows(store, "rows.npy"), batch=4, ahead=1, drop_last=drop_last)
            batches = iter(loader)
            assert next(batches).eq(0).all()
            replace(1)
            given = 0
            with pytest.raises(Mismatch, match=r"'rows\.npy' was changed while it was read"):
                for _ in batches:
                    given += 1
            assert given == (0 if every == 0 else 10)
            loader.close()
            loader = Loader(Rows(store, "rows.npy"), batch=4, drop_last=drop_last)
            assert len(list(loader)) == len(loader)  # opened anew
            (tmp_path / "rows.npy").unlink()
            with pytest.raises(NotFound):
                list(loader)
            loader.close()


def test_an_object_that_vanishes_is_an_error_of_the_loop(store):
    put(store, "t.npy", npy(np.arange(10_000)))
    loader = Loader(Tokens(store, "t.npy", 4), batch=2, ahead=1)
    batches = iter(loader)
    next(batches)
    change = store.begin()
    change.remove("t.npy")
    change.commit().wait()
    with pytest.raises(NotFound, match="t.npy"):
        list(batches)


@pytest.mark.parametrize("composition", ["memory:", "local:{}"])
def test_the_same_batches_from_every_store(tmp_path, store, composition):
    tokens = np.random.default_rng(1).integers(0, 1 << 16, 50_000).astype(np.uint16)
    put(store, "t.npy", npy(tokens))
    expected = list(Loader(Tokens(store, "t.npy", 128), batch=16, seed=4))
    with stoker.open_store(
        composition.format(tmp_path / "other"), create=True, capacity="64MiB"
    ) as other:
        put(other, "t.npy", npy(tokens))
        got = list(Loader(Tokens(other, "t.npy", 128), batch=16, seed=4))
    assert len(got) == len(expected) and all(
        torch.equal(a, b) for a, b in zip(got, expected, strict=True)
    )
