"""Tests run on one torch thread: the models are tiny, and a second thread would only wait for the
first."""

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
# Programs that tests start would ignore Ctrl-C, as this one does where a shell put it behind.
signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def s3_server(*arguments):
    """The port of an s3_server.py."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "s3_server.py", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield int(server.stdout.readline())
    server.stdin.close()
    server.wait()


@pytest.fixture
def s3_credentials(monkeypatch):
    """Of s3_server.py."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret/of+the=test")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)


@pytest.fixture
def s3(s3_credentials):
    """The composition of a store in a bucket of s3_server.py."""
    with s3_server() as port:
        yield f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}&patience=20"


def asked(where: str) -> list[tuple[str, str]]:
    """(method, path) of all that the server answered."""
    log = urllib.request.urlopen(where.partition("endpoint=")[2].partition("&")[0] + "/_log")
    return [(method, path) for method, path, *_ in json.loads(log.read())]


@pytest.fixture(scope="session")
def faulty_disk(tmp_path_factory) -> str:
    """faulty_disk.c, to be preloaded."""
    library = tmp_path_factory.mktemp("library") / "faulty_disk.so"
    source = Path(__file__).parent / "faulty_disk.c"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    return str(library)
