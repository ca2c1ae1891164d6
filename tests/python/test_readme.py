"""What the README shows runs as it stands there, and goes on where it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 1
    return blocks[0]


def run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_trains_and_resumes(tmp_path: Path) -> None:
    tail = "print(opt.committed_step, opt.step_count)"
    code = example().replace("opt.close()", "opt.flush(); " + tail + "; opt.close()")
    assert tail in code
    assert run(code.replace("20)", "3)"), tmp_path).split() == ["3", "3"]
    assert run(code.replace("20)", "5)"), tmp_path).split() == ["5", "5"]
