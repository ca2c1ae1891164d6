"""The one `stoker` command: what is C++ runs without Python, what is Python is found, and both stand in one --help."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stoker

COMMAND = Path(sys.executable).parent / "stoker"
if not COMMAND.exists():
    pytest.skip("the stoker command is not installed beside this Python: run `make build`", allow_module_level=True)


def run(*words: str | Path, command: Path = COMMAND, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *words], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_help_lists_cpp_and_python_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in ("probe", "bench", "create", "put", "rm", "ls", "fsck", "repair", "scrub", "export", "train", "plan", "trace", "curm"):
        assert f"\n  {name} " in done.stdout
    bench = run("bench", "--help").stdout
    assert "\n  io " in bench and "\n  codec " in bench and "\n  repair " in bench and "\n  offload " in bench and "\n  plan " in bench


def test_version_is_the_packages() -> None:
    assert run("--version").stdout.split() == ["stoker", stoker.__version__]
    assert stoker._core.__version__ == stoker.__version__


@pytest.mark.parametrize("words", [("train",), ("plan",), ("trace",), ("bench", "offload"), ("bench", "plan"), ("curm", "train")])
def test_python_command_shows_its_own_help(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: stoker {' '.join(words)}" in done.stdout


def test_a_folder_named_stoker_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "__init__.py").write_text("raise SystemExit('wrong package')")
    assert run("train", "--help", cwd=tmp_path).returncode == 0


def test_cpp_commands_need_no_python(tmp_path: Path) -> None:
    alone = Path(shutil.copy(COMMAND, tmp_path / "stoker"))
    assert run("--help", command=alone).returncode == 0
    assert run("fsck", "--help", command=alone).returncode == 0
    train = run("train", command=alone)
    assert train.returncode == 1
    assert "there is no python beside this program" in train.stderr


def test_python_without_torch_is_a_sentence(tmp_path: Path) -> None:
    alone = Path(shutil.copy(COMMAND, tmp_path / "stoker"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = run("train", command=alone)
    if done.returncode == 0 or "Python package" not in done.stderr:
        pytest.skip("the system's Python has stoker and torch")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "there is no command `nothing`"),
        ((), "--help"),
        (("fsck",), "STORE is required"),
        (("fsck", "--bogus", "x"), "--bogus"),
    ],
)
def test_a_wrong_command_line_exits_with_2(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_missing_store_is_a_sentence(tmp_path: Path) -> None:
    done = run("ls", tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.startswith("stoker: ") and str(tmp_path / "none") in done.stderr
