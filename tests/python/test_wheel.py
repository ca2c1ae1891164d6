"""`pip install .`: what an environment that knows nothing of this clone gets.

The wheel is compiled with the flags of `make build`: ccache serves it where that ran before.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import stoker

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import pathlib, sys, torch, stoker
from stoker import _core
print(pathlib.Path(stoker.__file__).is_relative_to(sys.prefix))
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
opt = torch.optim.AdamW(model.parameters())
model, opt = stoker.offload(model, opt, store="run", dram="64MiB")
model(torch.ones(2, 64)).sum().backward()
opt.step()
print(opt.step_count)
opt.close()
"""


def run(*command: str | Path, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def built(folder: Path) -> Path:
    """The wheel of this tree."""
    # As `make` sets them: a build folder elsewhere finds what build/release left.
    cache = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", "CC": "cc", "CXX": "c++"}
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("--no-index", "-w", folder, ROOT),
        cwd=folder,
        env={**os.environ, **cache},
    )
    return next(folder.glob("*.whl"))


def installed(wheel: Path, folder: Path) -> Path:
    """The wheel in an environment of its own, beside the torch of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A path named in a .pth file is searched, and its own .pth files (this clone) are not.
    Path(site, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--no-deps", "--no-index", "--quiet", "--ignore-installed")
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", *options, wheel, cwd=folder.parent)
    return folder / "bin"


def holds_types_one_version_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        about = next(name for name in held if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
        ast.parse(archive.read("stoker/_core.pyi"))
    assert "stoker/py.typed" in held
    assert not [name for name in held if "/bindings/" in name or name.endswith((".cc", ".h"))]
    assert metadata["Version"] == stoker.__version__
    needs = {
        line.split(">")[0] for line in metadata.get_all("Requires-Dist") if "extra" not in line
    }
    assert needs == {"torch", "numpy", "safetensors", "tokenizers", "tqdm"}


def is_stripped(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    binaries = [*folder.glob("stoker/_core*.so"), *folder.glob("*.data/scripts/stoker")]
    assert len(binaries) == 2
    for binary in binaries:
        assert b".debug_line" not in binary.read_bytes()


def command_works(command: Path, folder: Path) -> None:
    assert run(command, "--version", cwd=folder).stdout == f"stoker {stoker.__version__}\n"
    assert "weights" in run(command, "plan", "--help", cwd=folder).stdout
    lab = subprocess.run([command, "curm", "replay", "x.csv"], capture_output=True, text=True)
    assert lab.returncode == 1
    assert "no lab" in lab.stderr


# One test: the steps are in order, and the wheel is built once.
def test_a_wheel_works_where_nothing_else_of_this_clone_is(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    holds_types_one_version_and_what_it_needs(wheel)
    is_stripped(wheel, tmp_path / "unpacked")
    programs = installed(wheel, tmp_path / "environment")
    command_works(programs / "stoker", tmp_path)
    trained = run(programs / "python", "-c", SCRIPT, cwd=tmp_path).stdout
    assert trained.split() == ["True", "1"]
