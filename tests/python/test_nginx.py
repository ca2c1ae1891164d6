"""An s3: store reads what an ordinary web server has: nginx, started here (nginx.py)."""

from __future__ import annotations

import hashlib
import random

import nginx
import pytest
import stoker
from stoker.errors import NotFound

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    nginx.program() is None,
    reason="nginx is not installed (nginx-light of tools/packages/test.txt)",
)


def test_files_of_a_web_server_are_objects(tmp_path):
    data = random.Random(1).randbytes(20 * MIB + 5)
    files = tmp_path / "files"
    files.mkdir()
    (files / "large").write_bytes(data)
    with nginx.serve(files, tmp_path) as endpoint:
        with stoker.open_store(f"s3://bucket?endpoint={endpoint}&anon=1", read_only=True) as store:
            assert store.stat("large")["bytes"] == len(data)
            read = store.read_bytes("large")
            assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()
            assert store.read_bytes("large", 8 * MIB - 3, 9) == data[8 * MIB - 3 : 8 * MIB + 6]
            with pytest.raises(NotFound):
                store.read_bytes("none")
            with pytest.raises(ValueError, match="beyond the end"):
                store.read_bytes("large", len(data) - 1, 2)
    asked = (tmp_path / "access.log").read_text()
    # Three ranges of the whole and two of the piece; some may have been hedged.
    assert 5 <= asked.count('" 206 ') <= 7
