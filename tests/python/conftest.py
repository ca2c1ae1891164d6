"""Tests run on one torch thread: the models are tiny, and a second thread would only wait for the first."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def s3(monkeypatch):
    """The composition of a store in a bucket of s3_server.py."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret/of+the=test")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "s3_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None and server.stdin is not None
    port = int(server.stdout.readline())
    yield f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}&patience=20"
    server.stdin.close()
    server.wait()
