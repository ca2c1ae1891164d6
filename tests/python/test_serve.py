"""`stoker serve` and unix: stores as users reach them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import serve_run

import stoker
from stoker.errors import NoPermission, ReadOnly, Unavailable

STOKER = str(Path(sys.executable).parent / "stoker")


@pytest.fixture
def socket(tmp_path) -> Iterator[str]:
    with stoker.open_store(f"dir:{tmp_path}/data", create=True) as store:
        for key in ("in/a", "out"):
            serve_run.put(store, key, bytes(range(256)) * 1000)
    yield str(tmp_path / "socket")


def serve(tmp_path, socket: str, *more: str) -> subprocess.Popen:
    server = subprocess.Popen(
        [STOKER, "serve", f"dir:{tmp_path}/data", "--listen", f"unix:{socket}", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout.readline().startswith("serving")
    return server


def end(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0, server.stderr.read()
    server.stdout.close()
    server.stderr.close()


def test_views_commands_and_a_forked_child(tmp_path, socket):
    server = serve(tmp_path, socket, "--memory", "8MiB", "--mode", "0640")
    assert stat.S_IMODE(os.stat(socket).st_mode) == 0o640
    with stoker.open_store(f"unix:{socket}") as store:
        whole = bytes(range(256)) * 1000
        view = store.view("in/a", 256, 1000)
        assert bytes(view) == whole[256:1256]
        assert np.shares_memory(view, view[:10])
        child = os.fork()
        if child == 0:
            good = store.read_bytes("in/a") == whole
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.read_bytes("out") == whole
    listed = subprocess.run([STOKER, "ls", f"unix:{socket}"], capture_output=True, text=True)
    assert listed.returncode == 0 and "in/a" in listed.stdout, listed.stderr
    end(server)
    assert not os.path.exists(socket)
    with pytest.raises(Unavailable), stoker.open_store(f"unix:{socket}"):
        pass


def test_reads_that_are_waited_for_polled_left_or_shared_by_threads(tmp_path, socket):
    server = serve(tmp_path, socket, "--memory", "8MiB")
    whole = np.frombuffer(bytes(range(256)) * 1000, np.uint8)

    def read(store, into, offset: int):
        return store.read("in/a", offset, into.ctypes.data, into.nbytes, "demand")

    def some(store, first: int) -> None:
        into = np.zeros(5000, np.uint8)
        for offset in range(first, first + 200):
            read(store, into, offset).wait()
            assert (into == whole[offset : offset + 5000]).all()
            assert store.stat("out")["bytes"] == whole.size

    with stoker.open_store(f"unix:{socket}") as store:
        with ThreadPoolExecutor(6) as pool:
            for each in [pool.submit(some, store, 1000 * i) for i in range(6)]:
                each.result()
        some(store, 0)
        polled = np.zeros(100, np.uint8)
        future = read(store, polled, 7)
        while not future.ready():
            pass
        assert (polled == whole[7:107]).all()
        left = np.zeros(100, np.uint8)
        read(store, left, 9)  # closing waits for it
    assert (left == whole[9:109]).all()
    end(server)


def test_rights(tmp_path, socket):
    server = serve(tmp_path, socket, "--memory", "8MiB", "--prefix", "in/", "--read-only")
    with stoker.open_store(f"unix:{socket}") as store:
        assert [each["key"] for each in store.list()] == ["in/a"]
        with pytest.raises(NoPermission):
            store.read_bytes("out")
        with pytest.raises(ReadOnly):
            store.begin()
    end(server)


@pytest.mark.parametrize(
    "wrong",
    [["--listen", "tcp:a"], ["--listen", "unix:s", "--mode", "9"], ["--listen", "unix:"]],
)
def test_what_cannot_be_served_is_a_sentence(tmp_path, socket, wrong):
    done = subprocess.run(
        [STOKER, "serve", f"dir:{tmp_path}/data", *wrong],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.startswith("stoker: invalid argument"), done.stderr


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_at_any_moment_nobody_sees_a_wrong_byte(tmp_path, kills):
    killed = subprocess.run(
        [
            sys.executable,
            serve_run.__file__,
            STOKER,
            f"local:{tmp_path}/store",
            f"{tmp_path}/socket",
            str(kills),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert killed.stdout == "done\n" and killed.returncode == 0, killed.stdout + killed.stderr
