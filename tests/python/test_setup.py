"""What a fresh machine sets up, by the dry run of make: no goal installs or builds what it does not
need."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def planned(goal: str) -> str:
    """What `make GOAL` would run where nothing was set up."""
    fresh = ["STAMPS=build/no-stamps", "RELEASE=build/no-release"]
    command = ["make", "--dry-run", *fresh, goal]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("goal", "system", "python", "tests"),
    [
        ("train", {"run"}, {"run"}, False),
        ("build", {"run"}, {"run"}, False),
        ("setup", {"run", "test"}, {"run", "test"}, False),
        ("test", {"run", "test"}, {"run", "test"}, True),
        ("sanitize-tsan", {"run", "test"}, {"run", "test"}, False),
        ("fuzz", {"run", "check"}, {"run"}, False),
        ("tidy", {"run", "test", "check"}, {"run", "test"}, True),
        ("bench", {"run", "test", "bench"}, {"run", "test"}, True),
    ],
)
def test_a_goal_sets_up_what_it_needs_only(
    goal: str, system: set[str], python: set[str], tests: bool
) -> None:
    plan = planned(goal)
    assert set(re.findall(r"setup_system\.sh tools/packages/(\w+)\.txt", plan)) == system
    assert set(re.findall(r"setup_python\.sh (\w+)", plan)) == python
    assert ("-DSTOKER_TESTS=ON" in plan) == tests


def names(path: str) -> list[str]:
    lines = (ROOT / path).read_text().splitlines()
    return [re.split(r"\s|==", line)[0] for line in lines if line and not line.startswith("#")]


def test_every_package_is_in_one_list() -> None:
    system = [name for path in (ROOT / "tools/packages").iterdir() for name in names(str(path))]
    python = [name for path in ROOT.glob("requirements*.txt") for name in names(path.name)]
    for every in (system, python):
        assert len(every) > 10
        assert len(every) == len(set(every))


def test_what_trains_needs_no_test_library() -> None:
    wanted = {*names("tools/packages/run.txt"), *names("requirements.txt")}
    heavy = {"clang-14", "clang-tidy-14", "fio", "libgtest-dev", "libbenchmark-dev", "transformers"}
    assert not wanted & (heavy | {"pytest", "scikit-learn"})
