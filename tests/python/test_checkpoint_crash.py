"""Every moment at which a run may die while it saves, by replay; and that planted bugs are found.

Recorder writes down what a save asks of its store: each commit, when it began and when it was
durable. A crash may fall between any two of these. What was durable is there then; what was not may
be there or not, each by itself. In each such state every checkpoint must verify, and the newest
must be no older than what handle.wait() has promised, with exactly its values.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.checkpoint import candidates, checkpoints, parts, workspace
from stoker.checkpoint.manifest import MANIFEST, TABLE
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.workspace import Tier
from stoker.errors import OutOfSpace, StokerError

SAVES = 3


class Wrong(Exception):
    """A state after a crash breaks what was promised."""


class Commit:
    """What one transaction makes of its objects."""

    def __init__(self) -> None:
        self.changes: dict[str, bytearray | None] = {}


class Recorder:
    """A store that passes everything on, and keeps `events`: ("begins" or "durable", Commit), and
    ("promised", step)."""

    def __init__(self, store: Any, events: list[tuple[str, Any]]) -> None:
        self._store, self._events = store, events

    def begin(self) -> RecordedTransaction:
        return RecordedTransaction(self._store.begin(), self._events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class RecordedTransaction:
    def __init__(self, inner: Any, events: list[tuple[str, Any]]) -> None:
        self._inner, self._events, self._commit = inner, events, Commit()

    def resize(self, key: str, size: int, *more: Any) -> None:
        self._commit.changes[key] = bytearray(size)
        self._inner.resize(key, size, *more)

    def remove(self, key: str) -> None:
        self._inner.remove(key)
        self._commit.changes[key] = None

    def write(self, key: str, at: int, address: int, size: int, *more: Any) -> Any:
        self._commit.changes[key][at : at + size] = ctypes.string_at(address, size)
        return self._inner.write(key, at, address, size, *more)

    def write_bytes(self, key: str, at: int, data: bytes) -> None:
        self._commit.changes[key][at : at + len(data)] = data
        self._inner.write_bytes(key, at, data)

    def commit(self, durability: str) -> RecordedTransaction:
        self._durability = durability
        self._events.append(("begins", self._commit))
        self._future = self._inner.commit(durability)
        return self

    def wait(self) -> None:
        self._future.wait()
        if self._durability == "durable":
            self._events.append(("durable", self._commit))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(150, 150)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def recorded(folder: Path) -> tuple[list[tuple[str, Any]], dict[int, dict[str, torch.Tensor]]]:
    """The events of a run that saves each step, and the weights at each."""
    events: list[tuple[str, Any]] = []
    expected = {}
    model, opt = made()
    with stoker.Checkpoints(folder, keep=1, staging="16MiB") as ckpt:
        tier = ckpt._tiers[0]
        tier.store = Recorder(tier.store, events)
        handle = None
        for step in range(1, SAVES + 1):
            model(torch.ones(2, 150)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if handle is not None:
                promise(handle, events)
                ckpt.wait()
            expected[step] = copied(model)
            handle = ckpt.save(step, model=model, optimizer=opt)
        with torch.no_grad():
            ckpt.wait_copied()
            model.weight += 1
        promise(handle, events)
        ckpt.wait()
    return events, expected


def promise(handle: Any, events: list[tuple[str, Any]]) -> None:
    handle.wait("durable", 30)
    events.append(("promised", handle.step))


def subsets(doubtful: list[Commit]) -> Iterator[tuple[Commit, ...]]:
    if len(doubtful) <= 3:
        for count in range(len(doubtful) + 1):
            yield from itertools.combinations(doubtful, count)
        return
    yield from ((), tuple(doubtful))
    for each in doubtful:
        yield (each,)
        yield tuple(other for other in doubtful if other is not each)


def states(events: list[tuple[str, Any]]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """What was promised, and the objects, for each crash; each state once."""
    begun: list[Commit] = []
    durable: set[int] = set()
    promised, seen = 0, set()
    for end in range(len(events) + 1):
        if end:
            what, value = events[end - 1]
            if what == "begins":
                begun.append(value)
            elif what == "durable":
                durable.add(id(value))
            else:
                promised = value
        doubtful = [each for each in begun if id(each) not in durable]
        for there in subsets(doubtful):
            kept = [each for each in begun if id(each) in durable or each in there]
            key = (promised, tuple(map(id, kept)))
            if key in seen:
                continue
            seen.add(key)
            objects: dict[str, bytes] = {}
            for each in kept:
                for name, data in each.changes.items():
                    objects.pop(name, None)
                    if data is not None:
                        objects[name] = bytes(data)
            yield promised, objects


def check(folder: Path, promised: int, objects: dict[str, bytes], expected: dict) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    model, opt = made()
    try:
        with stoker.Checkpoints(folder, staging="16MiB") as ckpt, warnings.catch_warnings():
            warnings.simplefilter("error")  # a crash must leave nothing to be passed over
            for name in ckpt._tiers[0].names():
                Reader(ckpt._tiers[0], name, ckpt._ring, []).verify()
            found = ckpt.restore(model=model, optimizer=opt)
    except (StokerError, UserWarning) as error:
        raise Wrong(f"{sorted(objects)}: {error}") from None
    step = found.step if found else 0
    if step < promised:
        raise Wrong(f"step {step} was restored, {promised} was promised")
    if found and not all(
        torch.equal(value, expected[step][name]) for name, value in model.state_dict().items()
    ):
        raise Wrong(f"step {step} has other values")


def replay(tmp_path: Path) -> int:
    try:
        events, expected = recorded(tmp_path / "run")
    except (StokerError, TimeoutError) as error:
        raise Wrong(f"a save failed: {error}") from None
    count = 0
    for promised, objects in states(events):
        check(tmp_path / "replayed", promised, objects, expected)
        count += 1
    return count


def test_a_crash_at_any_moment_loses_nothing_that_was_promised(tmp_path):
    assert replay(tmp_path) > 7 * SAVES


def deferred(monkeypatch: pytest.MonkeyPatch, belongs: Any) -> None:
    """Commits of some objects are not flushed."""
    commit = RecordedTransaction.commit

    def unflushed(self: RecordedTransaction, durability: str) -> RecordedTransaction:
        ours = any(belongs(key.partition("/")[2]) for key in self._commit.changes)
        return commit(self, "deferred" if ours else durability)

    monkeypatch.setattr(RecordedTransaction, "commit", unflushed)


def files_are_not_flushed(monkeypatch):
    deferred(monkeypatch, lambda file: file.endswith((".safetensors", ".pack")))


def files_are_not_waited_for(monkeypatch):
    left = []
    monkeypatch.setattr(workspace.Commits, "__exit__", lambda self, *_: left.append(self))


def the_table_is_not_flushed(monkeypatch):
    deferred(monkeypatch, lambda file: file == TABLE)


def the_manifest_is_not_flushed(monkeypatch):
    deferred(monkeypatch, lambda file: file == MANIFEST)


def durable_is_said_too_early(monkeypatch):
    """With the files, before table and manifest."""
    write, put = checkpoints.Checkpoints._write, Tier.put
    under_way = []

    def told(self, tier, name, contents, said, handle, rests):
        under_way[:] = [handle]
        return write(self, tier, name, contents, said, handle, rests)

    def early(self, name, file, data, new=False):
        if file == TABLE:
            under_way[0].reached("durable")
            threading.Event().wait(0.2)  # as long as the loop may take to be told
        put(self, name, file, data, new)

    monkeypatch.setattr(checkpoints.Checkpoints, "_write", told)
    monkeypatch.setattr(Tier, "put", early)


def older_ones_go_before_the_new_one_is_there(monkeypatch):
    write = checkpoints.Checkpoints._write

    def room_first(self, tier, *more):
        for name in tier.names():
            tier.remove(name)
        return write(self, tier, *more)

    monkeypatch.setattr(checkpoints.Checkpoints, "_write", room_first)


def a_folder_loses_its_files_before_its_manifest(monkeypatch):
    def remove(self, name):
        for file in sorted(self.folders().get(name, []), key=lambda file: file == MANIFEST):
            self._remove(name, file)

    monkeypatch.setattr(Tier, "remove", remove)


def the_manifest_comes_before_the_table(monkeypatch):
    put, kept = Tier.put, {}

    def swapped(self, name, file, data, new=False):
        if file == TABLE:
            kept[name] = data
            return
        put(self, name, file, data, new)
        if file == MANIFEST:
            put(self, name, TABLE, kept[name])

    monkeypatch.setattr(Tier, "put", swapped)


def chunks_are_hashed_before_they_are_filled(monkeypatch):
    fill = workspace.fill

    def late(address, size, within):
        fill(address, size, within)
        late.held = ctypes.string_at(address, size)
        ctypes.memset(address, 0, size)

    xxh3 = workspace._core.xxh3_128

    class Core:
        def __getattr__(self, name):
            return getattr(stoker._core, name)

        def xxh3_128(self, address, size):
            digest = xxh3(address, size)
            ctypes.memmove(address, late.held, size)
            return digest

    for kind in (parts.Tensor, parts.Bytes):
        monkeypatch.setattr(kind, "place", lambda *_: None)
    monkeypatch.setattr(workspace, "fill", late)
    monkeypatch.setattr(workspace, "_core", Core())


def every_attempt_has_the_same_folder(monkeypatch):
    class Same:
        of = checkpoints.Name.of

        def __call__(self, *_):
            return self.of("step-000001-000001-00000000")

    monkeypatch.setattr(checkpoints, "Name", Same())


def no_step_waits_for_the_copy(monkeypatch):
    """Nor does torch's count of edits tell."""
    stepped = threading.Event()
    save = checkpoints.Checkpoints.save
    step = torch.optim.AdamW.step

    def saves(self, *args, **options):
        stepped.clear()
        return save(self, *args, **options)

    def steps(self, *args, **options):
        result = step(self, *args, **options)
        stepped.set()
        return result

    def read(self, at, size, address):
        stepped.wait(0.3)
        ctypes.memmove(address, self._flat.data_ptr() + at, size)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", saves)
    monkeypatch.setattr(checkpoints.Checkpoints, "wait_copied", lambda self: None)
    monkeypatch.setattr(torch.optim.AdamW, "step", steps)
    monkeypatch.setattr(parts.Tensor, "place", lambda *_: None)
    monkeypatch.setattr(parts.Tensor, "read", read)


def retention_takes_the_newest(monkeypatch):
    monkeypatch.setattr(checkpoints, "removable", lambda tier, *_: tier.names()[:1])


def the_oldest_is_restored(monkeypatch):
    names = Tier.names
    monkeypatch.setattr(Tier, "names", lambda self: names(self)[::-1])
    oldest = lambda of, *more, **how: min(of) if isinstance(of, dict) else max(of, *more, **how)
    monkeypatch.setattr(candidates, "max", oldest, raising=False)


BUGS = (
    files_are_not_flushed,
    files_are_not_waited_for,
    the_table_is_not_flushed,
    the_manifest_is_not_flushed,
    durable_is_said_too_early,
    older_ones_go_before_the_new_one_is_there,
    a_folder_loses_its_files_before_its_manifest,
    the_manifest_comes_before_the_table,
    chunks_are_hashed_before_they_are_filled,
    every_attempt_has_the_same_folder,
    no_step_waits_for_the_copy,
    retention_takes_the_newest,
    the_oldest_is_restored,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(tmp_path, monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises(Wrong):
        replay(tmp_path)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, opt = made()
    model(torch.ones(2, 150)).square().mean().backward()
    opt.step()
    return model, opt


def test_a_file_is_flushed_while_the_next_is_written(tmp_path):
    model, opt = trained()
    events: list[tuple[str, Any]] = []
    with stoker.Checkpoints(tmp_path / "run", staging="16MiB") as ckpt:
        tier = ckpt._tiers[0]
        tier.store = Recorder(tier.store, events)
        ckpt.save(1, model=model, optimizer=opt).wait()
    told = [
        (what, key.partition("/")[2]) for what, commit in events for key in sorted(commit.changes)
    ]
    weights, state = "model.safetensors", "state-00000.pack"
    assert told == [
        ("begins", weights),
        ("begins", state),
        ("durable", weights),
        ("durable", state),
        *(("begins", TABLE), ("durable", TABLE)),
        *(("begins", MANIFEST), ("durable", MANIFEST)),
    ]


def test_a_file_that_is_not_durable_fails_the_save_and_no_later_one(tmp_path):
    model, opt = trained()
    with stoker.Checkpoints(tmp_path / "run", staging="16MiB") as ckpt:
        tier, store = ckpt._tiers[0], ckpt._tiers[0].store
        free = len(ckpt._ring._free)

        class Refuses(RecordedTransaction):
            def wait(self) -> None:
                super().wait()
                raise OutOfSpace("the disk is full")

        class Store(Recorder):
            def begin(self) -> RecordedTransaction:
                return Refuses(self._store.begin(), self._events)

        tier.store = Store(store, [])
        with pytest.raises(OutOfSpace, match="the disk is full"):
            ckpt.save(1, model=model, optimizer=opt).wait()
        tier.store = store
        with pytest.raises(OutOfSpace, match="the disk is full"):
            ckpt.wait()
        assert not tier.names()
        assert len(ckpt._ring._free) == free, "buffers of the failed save are on their way"
        ckpt.save(2, model=model, optimizer=opt).wait()
        assert [name.step for name in tier.names()] == [2]
