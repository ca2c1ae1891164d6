"""What the tutorials show runs as it stands there, in one shell, and prints what they say it
does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rgw

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.md"))
COMMAND = Path(sys.executable).parent / "stoker"
if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Each shell block with the lines of the text blocks that follow it; `...` in such a line
    stands for anything."""
    found: list[tuple[str, list[str]]] = []
    for kind, body in re.findall(r"```(\w+)\n(.*?)```", text, re.S):
        if kind == "sh":
            found.append((body, []))
        elif kind == "text":
            found[-1][1].extend(body.splitlines())
    return found


def shown(line: str, output: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in line.split("..."))
    return any(re.fullmatch(pattern, said) for said in output.splitlines())


@pytest.fixture
def bucket(tutorial: Path) -> Iterator[dict[str, str]]:
    """A bucket of Ceph's RGW for the tutorials that use one, in the words of the environment."""
    if "$BUCKET" not in tutorial.read_text() or rgw.missing():
        yield {}
        return
    with rgw.gateway(1 << 30) as served:
        yield {**served.environment(), "BUCKET": served.store("run")}


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial: Path, tmp_path: Path, bucket: dict[str, str]) -> None:
    steps = blocks(tutorial.read_text())
    assert len(steps) > 3
    mark = "==== step "
    script = "set -euo pipefail\n" + "".join(
        f"echo '{mark}{i}'\n{code}" for i, (code, _) in enumerate(steps)
    )
    environment = os.environ | {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}"} | bucket
    environment.pop("PYTHONUNBUFFERED", None)  # lines of two processes would mix
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    outputs = re.split(rf"^{mark}\d+\n", done.stdout, flags=re.M)[1:]
    assert len(outputs) == len(steps)
    for output, (code, lines) in zip(outputs, steps, strict=True):
        for line in lines:
            assert shown(line, output), f"{line!r} is not what this prints:\n{code}\n{output}"


def test_a_line_that_is_not_printed_is_found() -> None:
    assert shown("a ... c", "x\na b c")
    assert not shown("a ... c", "a b d")
