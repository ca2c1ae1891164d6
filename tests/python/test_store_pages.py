"""Each store has a page, and what its examples say is what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs/stores"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.S)


def test_every_store_has_a_page():
    pages = {path.stem for path in PAGES.glob("*.md")}
    assert {"memory", "local", "coded", "dir", "s3", "cached", "serve"} <= pages
    for path in PAGES.glob("*.md"):
        text = path.read_text()
        assert text.count("```python") == len(EXAMPLE.findall(text)) > 0, path


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_the_examples_print_what_the_page_says(page, s3, tmp_path):
    endpoint = s3.partition("endpoint=")[2].partition("&")[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HOME": str(tmp_path / "hf")}
    if page == "filesystem":
        for name in ("pandas", "pyarrow", "datasets"):
            pytest.importorskip(name, reason="requirements-test.txt has it")
    for code, said in EXAMPLE.findall((PAGES / f"{page}.md").read_text()):
        code = code.replace("http://localhost:7480", endpoint)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.returncode) == (said, 0), done.stderr
