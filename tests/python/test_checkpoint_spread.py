"""A copy of an offloaded run is spread in time, until somebody waits for it."""

import threading

from stoker.checkpoint.handle import Handle
from stoker.checkpoint.spread import BEFORE, WORKS, Spread
from stoker.offload.run.reads import Reads


class Wanted:
    """An event whose wait() passes the time of a clock that stands still otherwise."""

    def __init__(self, clock):
        self.pauses, self.hurried, self._clock = [], False, clock

    def is_set(self):
        return self.hurried

    def wait(self, seconds):
        self.pauses.append(seconds)
        self._clock[0] += seconds


def spread(total, interval, work=1.0):
    clock, settled = [0.0], []
    wanted = Wanted(clock)

    def settle():
        settled.append(clock[0])
        clock[0] += work

    made = Spread(total, interval, wanted, settle, lambda: clock[0])
    return made, wanted, settled, clock


def test_a_copy_without_a_known_interval_works_a_small_share_of_the_time():
    made, wanted, settled, _ = spread(4, None)
    for _ in range(4):
        made.turn(1)
    assert len(settled) == 4
    assert wanted.pauses == [1 / WORKS - 1] * 3  # none behind the last byte


def test_a_copy_ends_before_the_next_save_is_due():
    made, wanted, _, clock = spread(10, 40.0)
    for _ in range(10):
        made.turn(1)
    assert clock[0] <= BEFORE * 40 + 1
    assert len(wanted.pauses) == 9 and min(wanted.pauses) > 0


def test_a_copy_that_is_wanted_neither_pauses_nor_settles():
    made, wanted, settled, _ = spread(10, None)
    made.turn(1)
    wanted.hurried = True
    for _ in range(9):
        made.turn(1)
    assert len(wanted.pauses) == 1 and len(settled) == 1


def test_who_waits_for_a_save_hurries_it():
    handle = Handle(1, "folder", ["dir:/a"])
    handle.reached("copied")
    handle.wait("copied")
    handle.event("durable")
    assert not handle.wanted.is_set()
    try:
        handle.wait("durable", 0.0)
    except TimeoutError:
        pass
    assert handle.wanted.is_set()


def test_who_waits_for_the_reads_of_a_store_hurries_them():
    reads, done, wanted = Reads(None), threading.Event(), threading.Event()
    reads.until(done, wanted)
    wanted_first = []
    threading.Thread(target=lambda: (wanted_first.append(wanted.wait(60)), done.set())).start()
    reads.wait()
    assert wanted_first == [True]
