"""The one `stoker` command: what is C++ runs without Python, what is Python is found, and both
stand in one --help."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stoker

COMMAND = Path(sys.executable).parent / "stoker"
if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )


def run(
    *words: str | Path, command: Path = COMMAND, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *words], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_help_lists_cpp_and_python_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in (
        "probe",
        "bench",
        "create",
        "put",
        "rm",
        "ls",
        "fsck",
        "repair",
        "scrub",
        "export",
        "train",
        "plan",
        "trace",
        "report",
        "top",
        "curm",
    ):
        assert f"\n  {name} " in done.stdout
    bench = run("bench", "--help").stdout
    assert (
        "\n  io " in bench
        and "\n  codec " in bench
        and "\n  repair " in bench
        and "\n  offload " in bench
        and "\n  plan " in bench
    )


def test_version_is_the_packages() -> None:
    assert run("--version").stdout.split() == ["stoker", stoker.__version__]
    assert stoker._core.__version__ == stoker.__version__


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("plan",),
        ("trace",),
        ("report",),
        ("top",),
        ("bench", "offload"),
        ("bench", "plan"),
    ],
)
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
    # without any installed package
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = run("train", command=alone)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "needs the Python package stoker" in done.stderr


# Interrupts the process where what a handler raises is printed instead: in a finaliser beside the
# import of a module, as the import system has some of its own, and at the interpreter's end.
_INTERRUPTS = """
import atexit, os, signal, sys, weakref

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT"]:
            gone = Finder()
            reference = weakref.ref(gone, interrupt)
            del gone

sys.meta_path.insert(0, Finder())
if os.environ["INTERRUPT"] == "end":
    atexit.register(interrupt)
"""

# In the process that prepares the corpus: interrupts the group that it was started from, as a
# terminal does, and notes what of that it gets itself.
_INTERRUPTS_GROUP = """
import os, signal, sys, time

if "stoker.data" in sys.orig_argv:
    signal.set_wakeup_fd(os.open(os.environ["HEARD"], os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK))
    os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
    time.sleep(100)
"""


@pytest.mark.parametrize("where", ["stoker.train.trainer", "end"])
def test_an_interrupt_beside_main_ends_the_process_without_a_word(
    tmp_path: Path, where: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPT": where}
    done = subprocess.run(
        [COMMAND, "train", "--help"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == -signal.SIGINT and "Traceback" not in done.stderr, done.stderr
    assert ("usage: stoker train" in done.stdout) == (where == "end")


def test_ctrl_c_while_the_corpus_is_prepared_comes_to_the_command_alone(tmp_path: Path) -> None:
    """Which ends the process that does it; that one could be anywhere in its imports, and print
    where."""
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS_GROUP)
    (tmp_path / "text.txt").write_text("some words of a corpus\n" * 200)
    heard = tmp_path / "heard"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HEARD": str(heard)}
    words = ("train", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    done = subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        start_new_session=True,
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert heard.read_bytes() == b""


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
