"""Kills a server and its clients: `python serve_run.py STOKER STORE SOCKET KILLS`. Each client
writes an object of its own, and reads those of all. Says "done" if nobody saw a wrong byte, and
nothing that was acknowledged is lost."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time

import stoker
from stoker.errors import Busy, InDoubt, Unavailable

CLIENTS, BYTES = 3, 300_000


def content(key: int, round_: int) -> bytes:
    return struct.pack("<Q", round_) + random.Random(key * 1_000_003 + round_).randbytes(BYTES)


def round_of(key: int, data: bytes) -> int:
    round_ = struct.unpack_from("<Q", data)[0]
    if data != content(key, round_):
        raise AssertionError(f"wrong bytes of {key}")
    return round_


def put(store, key: int, data: bytes) -> None:
    change = store.begin()
    change.resize(str(key), len(data))
    change.write_bytes(str(key), 0, data)
    change.commit().wait()


def work(key: int, socket: str, acked: mmap.mmap, seed: int) -> None:
    chosen = random.Random(seed)
    while True:
        with contextlib.suppress(Unavailable), stoker.open_store(f"unix:{socket}") as store:
            while True:
                try:
                    if chosen.random() < 0.4:
                        there = round_of(key, store.read_bytes(str(key)))
                        put(store, key, content(key, there + 1))
                        struct.pack_into("<Q", acked, 8 * key, there + 1)
                    else:
                        other = chosen.randrange(CLIENTS)
                        round_of(other, bytes(store.view(str(other), 0, BYTES + 8)))
                except (InDoubt, Busy):  # Busy: of the one that was killed, until that is seen
                    pass
                except Unavailable:
                    time.sleep(0.005)
        time.sleep(0.005)


def fork(key: int, socket: str, acked: mmap.mmap, seed: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(key, socket, acked, seed)
        except BaseException as error:
            os.write(2, f"client {key}: {error!r}\n".encode())
        finally:
            os._exit(1)
    return child


def serve(command: str, where: str, socket: str) -> subprocess.Popen:
    server = subprocess.Popen(
        [command, "serve", where, "--listen", f"unix:{socket}", "--memory", "8MiB"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if not server.stdout.readline().startswith("serving"):
        sys.exit("the server did not start")
    return server


def main(command: str, where: str, socket: str, kills: int) -> None:
    with stoker.open_store(where, create=True, capacity="64MiB") as store:
        for key in range(CLIENTS):
            put(store, key, content(key, 0))
    acked = mmap.mmap(-1, 8 * CLIENTS)
    chosen = random.Random(kills)
    server = serve(command, where, socket)
    clients = [fork(key, socket, acked, key) for key in range(CLIENTS)]
    for kill in range(kills):
        time.sleep(chosen.uniform(0.05, 0.3))
        if kill % 2 == 0:
            server.kill()
            server.wait()
            server = serve(command, where, socket)
        else:
            key = chosen.randrange(CLIENTS)
            os.kill(clients[key], signal.SIGKILL)
            how = os.waitstatus_to_exitcode(os.waitpid(clients[key], 0)[1])
            if how != -signal.SIGKILL:
                sys.exit(f"client {key} ended by itself")
            clients[key] = fork(key, socket, acked, kill + 100)
    time.sleep(0.3)
    for client in clients:
        os.kill(client, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(client, 0)[1]) != -signal.SIGKILL:
            sys.exit("a client ended by itself")
    server.terminate()
    server.wait()
    done = 0
    with stoker.open_store(where) as store:
        for key in range(CLIENTS):
            there = round_of(key, store.read_bytes(str(key)))
            known = struct.unpack_from("<Q", acked, 8 * key)[0]
            if there < known:
                sys.exit(f"{key} is of round {there}, but round {known} was acknowledged")
            done += there
    print("done" if done > 0 else "nothing was written")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
