"""Kills readers of a cache: `python cached_run.py STORE KILLS`. Each is a fork, which costs less
than a new Python. Says "done" if no reader saw a wrong byte or ended by itself."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import stoker

OBJECTS, BYTES = 6, 700_000


def content(key: int) -> bytes:
    return random.Random(key).randbytes(BYTES)


def read_for_ever(where: str, seed: int, wanted: list[bytes], says: int) -> None:
    chosen = random.Random(seed)
    with stoker.open_store(where) as store:
        os.write(says, b"open")
        while True:
            key = chosen.randrange(OBJECTS)
            offset = chosen.randrange(BYTES)
            size = min(chosen.randrange(1, 200_000), BYTES - offset)
            if store.read_bytes(str(key), offset, size) != wanted[key][offset : offset + size]:
                os.write(says, b"wrong bytes of %d from %d" % (key, offset))
                return


def main(where: str, kills: int) -> None:
    wanted = [content(key) for key in range(OBJECTS)]
    chosen = random.Random(1)
    for kill in range(kills):
        heard, says = os.pipe()
        reader = os.fork()
        if reader == 0:
            try:
                os.close(heard)
                read_for_ever(where, kill, wanted, says)
            finally:
                os._exit(1)
        os.close(says)
        said = os.read(heard, 4)
        time.sleep(chosen.uniform(0, 0.1))
        os.kill(reader, signal.SIGKILL)
        how = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
        said += os.read(heard, 100)
        os.close(heard)
        if (said, how) != (b"open", -signal.SIGKILL):
            sys.exit(f"kill {kill}: the reader said {said!r} and ended with {how}")
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
