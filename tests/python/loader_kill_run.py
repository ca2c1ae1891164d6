"""Loaders of several ranks, a process each, killed with SIGKILL at random moments and begun again
by other ranks.

    python loader_kill_run.py FOLDER PAIRS SEED

Each pair is a kill and the number of ranks that go on. A rank notes what it was given, and its
state_dict() behind it, by one write a step. What counts is what all ranks have noted: they go on
from that state. In the end each global batch must be the one of a single loader that was never
killed. Prints how many steps that were.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import stoker
from stoker.data import Loader, Tokens

GLOBAL, LENGTH, SAMPLES, SEED = 12, 4, 103, 5
RANKS = (1, 2, 3, 4, 6, 12)
LIMIT = 60.0  # seconds that a life may take to give out its batches


def loader_of(store, rank: int, ranks: int, shuffle) -> Loader:
    return Loader(
        Tokens(store, "t.npy", LENGTH),
        batch=GLOBAL // ranks,
        seed=SEED,
        shuffle=shuffle,
        window_bytes=1 << 16,
        rank=rank,
        ranks=ranks,
        ahead=3,
    )


def numbers(batch) -> list[int]:
    return (batch[:, 0] // LENGTH).tolist()


def live(folder: Path, rank: int, ranks: int, state: dict | None, shuffle, note: int) -> None:
    """A rank: until it is killed."""
    with stoker.open_store(f"dir:{folder / 'data'}", threads=1) as store:
        loader = loader_of(store, rank, ranks, shuffle)
        if state is not None:
            loader.load_state_dict(state)
        while True:
            for batch in loader:
                record = {"got": numbers(batch), "state": loader.state_dict()}
                os.write(note, (json.dumps(record) + "\n").encode())
                time.sleep(0.001)  # the step


def records(path: Path) -> list[dict]:
    """What was noted in whole."""
    raw = path.read_text()
    return [json.loads(line) for line in raw[: raw.rfind("\n") + 1].splitlines()]


def one_life(folder: Path, ranks: int, state: dict | None, shuffle, enough: int) -> list[dict]:
    """Global batches that all ranks noted, and the state behind each."""
    notes = [folder / f"rank-{rank}" for rank in range(ranks)]
    pids = []
    for rank, path in enumerate(notes):
        note = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            try:
                live(folder, rank, ranks, state, shuffle, note)
            finally:
                os._exit(1)
        os.close(note)
        pids.append(pid)
    limit = time.monotonic() + LIMIT
    try:
        while any(path.read_bytes().count(b"\n") < enough for path in notes):
            if time.monotonic() > limit:
                raise SystemExit(f"no rank's {enough} batches within {LIMIT:.0f} s")
            time.sleep(0.002)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if set(ended) != {-signal.SIGKILL}:
        raise SystemExit(f"ranks ended by themselves: {ended}")
    noted = [records(path) for path in notes]
    out = []
    for parts in zip(*noted):  # as far as all are
        states = [part["state"] for part in parts]
        if any(each != states[0] for each in states):
            raise SystemExit(f"ranks have other states behind one step: {states}")
        out.append({"got": sum((part["got"] for part in parts), []), "state": states[0]})
    return out


def main(folder: Path, pairs: int, seed: int) -> None:
    draw = random.Random(seed)
    (folder / "data").mkdir(parents=True)
    np.save(folder / "data" / "t.npy", np.arange(SAMPLES * LENGTH + 1, dtype=np.uint16))
    total = done = 0
    while done < pairs:
        # A run of several lives; its order is one of three.
        shuffle = draw.choice([True, "window", False])
        state, given = None, []
        for _ in range(min(pairs - done, draw.randint(2, 6)) + 1):
            ranks = draw.choice(RANKS)
            lived = one_life(folder, ranks, state, shuffle, draw.randint(0, 14))
            given += [each["got"] for each in lived]
            state = lived[-1]["state"] if lived else state
            done += 1
        done -= 1  # the first life goes on from nothing
        with stoker.open_store(f"dir:{folder / 'data'}", threads=1) as store:
            loader, expected = loader_of(store, 0, 1, shuffle), []
            while len(expected) < len(given):
                expected += [numbers(batch) for batch in loader]
            loader.close()
        if given != expected[: len(given)]:
            at = next(i for i, each in enumerate(given) if each != expected[i])
            raise SystemExit(f"global batch {at} is {given[at]}, not {expected[at]}")
        epochs = [sum(expected[i : i + 9], []) for i in range(0, len(expected), 9)]
        if any(sorted(epoch) != list(range(SAMPLES)) for epoch in epochs):
            raise SystemExit("an epoch has not each sample once")
        total += len(given)
    print(f"{done} pairs, {total} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
