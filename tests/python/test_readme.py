"""What the README shows runs as it stands there, and goes on where it ended; what the pages count
and link is in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 1
    return blocks[0]


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_trains_and_resumes(tmp_path: Path) -> None:
    tail = "print('now at', opt.committed_step, opt.step_count)"
    steps = lambda shown: re.findall(r"^step (\d+): loss \d+\.\d+$", shown, re.M)
    code = example().replace("opt.close()", "opt.flush(); " + tail + "; opt.close()")
    assert tail in code
    begun = run(code.replace("20)", "3)"), tmp_path)
    assert steps(begun) == ["1", "2", "3"] and begun.endswith("now at 3 3\n")
    resumed = run(code.replace("20)", "5)"), tmp_path)
    assert steps(resumed) == ["4", "5"] and resumed.endswith("now at 5 5\n")


@pytest.mark.skipif(
    not (ROOT / ".venv" / "bin" / "stoker").exists(),
    reason="there is no .venv with the command here: run `make build`",
)
def test_commands_work_as_printed_once_the_environment_is_active() -> None:
    (activate,) = re.findall(r"`(\. \.venv/bin/activate)`", README.read_text())
    script = (
        f"{activate}; command -v stoker; command -v python; stoker --version; python -c 'import"
        " stoker; print(stoker.__version__)'"
    )
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=ROOT,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    command, python, named, version = done.stdout.splitlines()
    assert Path(command).parent == Path(python).parent and named == f"stoker {version}"


def test_a_page_is_linked_once() -> None:
    links = re.findall(r"\]\((docs/tutorials/[^)]+)\)", README.read_text())
    assert links and len(links) == len(set(links))


def test_promises_are_counted_through() -> None:
    numbers = [
        int(number)
        for number in re.findall(r"^(\d+)\. ", (ROOT / "docs" / "semantics.md").read_text(), re.M)
    ]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 20


def test_the_picture_is_of_the_results() -> None:
    sys.path.insert(0, str(ROOT / "bench" / "peers"))
    import picture

    results = json.loads((ROOT / "bench" / "results" / "peers.json").read_text())
    assert (ROOT / "docs" / "step_time.svg").read_text() == picture.picture(results)
