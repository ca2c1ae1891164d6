"""Paths that cannot be used and options that are wrong: every command says so in one sentence,
before it works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stoker
from stoker import command, errors
from stoker.bench import offload as bench_offload, plan as bench_plan
from stoker.ckpt import cli as ckpt_cli
from stoker.data.prepare import main as prepare_main
from stoker.plan import cli as plan_cli
from stoker.trace import cli as trace_cli
from stoker.train import cli as train_cli

from faults import COMMAND, make_small_store, run

if not COMMAND.exists():
    pytest.skip(
        "the stoker command is not installed beside this Python: run `make build`",
        allow_module_level=True,
    )

LONG = "n" * 300
PYTHON = {
    "train": train_cli.main,
    "plan": plan_cli.main,
    "trace": trace_cli.main,
    "bench offload": bench_offload.main,
    "bench plan": bench_plan.main,
}
# What takes the right of root to read and write everything.
MEEK = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]


def meekly(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, as a user whom permission bits bind."""
    return (
        run(*words[1:], command=words[0])
        if os.geteuid()
        else run(*MEEK[1:], *words, command=MEEK[0])
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return make_small_store(tmp_path_factory.mktemp("sentences") / "s")


def test_permission_denied_is_not_no_store(small, tmp_path):
    """A folder, the folder above it, or the file: whatever is shut, it is never said that there is
    no store."""
    for shut in ("folder", "above", "file"):
        store = tmp_path / shut / "s"
        shutil.copytree(small, store)
        closed = {"folder": store, "above": store.parent, "file": store / "stoker.volume"}[shut]
        closed.chmod(0)
        for words in (
            ("ls", store),
            ("fsck", store),
            ("rm", store, "w/1"),
            ("put", store, "k", __file__),
            ("export", store, "w/1", tmp_path / "x"),
            ("create", store, "--capacity", "1MiB"),
        ):
            done = meekly(COMMAND, *words)
            assert done.returncode == 1 and done.stderr.startswith("stoker: no permission: "), (
                shut,
                words,
                done.stderr,
            )
            assert (
                "(Permission denied)" in done.stderr
                and str(store) in done.stderr
                and "there is no" not in done.stderr
            )
        closed.chmod(0o755)
    coded = f"coded(1+1, {tmp_path}/d{{0..1}})"
    for disk in range(2):
        (tmp_path / f"d{disk}").mkdir(mode=0)
    for words in (
        ("ls", coded),
        ("fsck", coded),
        ("create", coded, "--capacity", "1MiB", "--same-disk"),
    ):
        done = meekly(COMMAND, *words)
        assert (
            done.returncode == 1
            and "no permission" in done.stderr
            and "there is no" not in done.stderr
        ), done.stderr


_OFFLOAD = """
import sys, torch, stoker
model = torch.nn.Linear(8, 8)
for folder in sys.argv[1:]:
    try:
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        stoker.offload(model, sgd, store=folder, dram="4MiB", resume="auto")
    except PermissionError as error:
        print(type(error).__name__, error)
"""


def test_offload_tells_of_missing_rights(small, tmp_path):
    stores = [tmp_path / name for name in ("shut", "of")]
    for store in stores:
        shutil.copytree(small, store)
    stores[0].chmod(0)
    (stores[1] / "stoker.volume").chmod(0o444)
    done = meekly(sys.executable, "-c", _OFFLOAD, *stores, f"{tmp_path}/shut,{tmp_path}/of")
    stores[0].chmod(0o755)
    told = done.stdout.splitlines()
    assert len(told) == 3, done.stderr
    assert all(line.startswith("NoPermission") and "Permission denied" in line for line in told), (
        told
    )


@pytest.mark.parametrize(
    "path, why",
    [
        ("file/s", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("loop/s", "Too many levels of symbolic links"),
        (LONG, "File name too long"),
        ("folder", "it is a folder"),
    ],
)
def test_a_path_that_cannot_be_says_why(path, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    Path("folder/stoker.volume").mkdir(parents=True)
    for words in (("ls", path), ("fsck", path), ("create", path, "--capacity", "1MiB")):
        done = run(*words)
        assert done.returncode == 1 and why in done.stderr and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
        assert done.stderr.startswith("stoker: invalid argument: ")
    with pytest.raises(errors.InvalidArgument, match=why):
        model = torch.nn.Linear(4, 4)
        stoker.offload(model, torch.optim.SGD(model.parameters(), lr=1.0), store=path, dram="4MiB")


# With a file "file", a link "loop" to itself and a text "text.txt" in the working directory.
MODEL = (
    "--layers 1 --hidden 64 --heads 2 --feed-forward 128 --vocabulary 300 --window 16 --batch 2"
    " --steps 1"
)
USES = {
    "train": (f"--data text.txt {MODEL} --out @", "--resume --out @"),
    "plan": ("@ --dram 1GiB --disk read=1GB/s,write=1GB/s", "7M --dram 1GiB --store @"),
    "trace": ("--dir @", "--out @"),
    "bench offload": ("--dir @",),
    "bench plan": ("--dir @", "--markdown @"),
}


@pytest.mark.parametrize(
    "name, words", [(name, words) for name, all_ in USES.items() for words in all_]
)
def test_a_python_command_tells_of_a_bad_path_before_it_works(
    name, words, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    Path("text.txt").write_text("some words of a corpus\n" * 50)
    for module, measuring in (  # nothing is measured for nothing
        ("stoker.plan.measure", "core_seconds"),
        ("stoker.plan.measure", "disk_rates"),
        ("stoker.offload.planning.products", "product_rates"),
    ):
        monkeypatch.setattr(
            sys.modules[module], measuring, lambda *_, **__: pytest.fail("something was measured")
        )
    for path, why in (
        ("file/s", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        (LONG, "File name too long"),
    ):
        assert PYTHON[name](words.replace("@", path).split()) == 1
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith(f"stoker {name}: ") and why in last and "[Errno" not in last, last


@pytest.mark.parametrize(
    "words, why",
    [
        ("text.txt --folder file/s", "Not a directory"),
        (f"--folder o {LONG}", "File name too long"),
        ("text.txt --folder o --tokenizer loop", "Too many levels of symbolic links"),
    ],
)
def test_the_corpus_is_told_with_the_file_that_cannot_be_used(
    words, why, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    Path("text.txt").write_text("some words of a corpus\n" * 50)
    assert prepare_main(words.split()) == 1
    told = json.loads(capsys.readouterr().out)["error"]
    assert why in told and words.split()[-1] in told, told


WRONG = {
    "": ("", "--nothing", "nothing"),
    "ls": ("", "--nothing s", "s --snapshot"),
    "fsck": ("", "--nothing s", "s t"),
    "rm": ("", "s"),
    "export": ("s", "s k", "s k t --snapshot"),
    "create": (
        "",
        "s",
        "s --capacity",
        "s --capacity 1MiB --objects x",
        "s --capacity 1MiB --objects -1",
    ),
    "put": ("", "s k", "s k f --at x", "s k f --at -1", "s k f --class odd"),
    "probe": ("", "d --seconds x", "d --seconds -1", "d --seconds 1e9", "d --seconds nan"),
    "repair": ("", "s --rate", "s --replace"),
    "scrub": ("", "s --nothing"),
    "bench": ("", "nothing"),
    "bench io": ("--depth x", "--depth -1", "--depth 0", "--seconds nan", "--repetitions 0"),
    "bench codec": ("--repetitions -1", "--code", "--chunk"),
    "bench repair": ("", "d --seconds -1"),
    "bench coded": ("", "d --rounds 0", "d --seconds -1", "d --writers 0", "d --requests 0"),
    "train": (
        "--nothing",
        "--store=",
        "--data=",
        "--layers 10001",
        "--steps x",
        "--steps -1",
        "--steps 1.5",
        "--layers -3",
        "--layers 99999999999",
        "--seed 99999999999999999999",
        "--seed -99999999999999999999",
        "--learning-rate nan",
        "--learning-rate x",
        "--clip inf",
        "--weight-decay nan",
        "--dram -5",
        "--dram 0",
        "--dram x",
        "--dram 1e999",
        "--dram=",
        "--precision odd",
        "--out=",
        "--resume --overwrite",
        "--device odd",
        "--hidden 33",
        "--vocabulary 99999999999999999999",
        "--window 999999999999999999",
        "--batch 9999999999999999999",
        "--stall-seconds -1",
    ),
    "plan": (
        "",
        "7B",
        "7B --dram 1GiB",
        "7B --dram x --store .",
        "7B --dram -1 --store .",
        "7B --dram 1GiB --store .  --tokens 0",
        "7B --dram 1GiB --store . --tokens x",
        "7B --dram 1GiB --store . --seconds nan",
        "7B --dram 1GiB --disk read=1",
        "7B --dram 1GiB --disk x",
        "0B --dram 1GiB --disk read=1,write=1",
        "a=1,b --dram 1GiB --disk read=1,write=1",
        "7B --dram 1GiB --store . --cores -1",
        "7B --dram 1GiB --store . --snapshots -1",
        "7B --dram 1GiB --store . --link 0",
    ),
    "trace": (
        "--nothing",
        "--layers 0",
        "--layers x",
        "--width 65",
        "--width -64",
        "--dram x",
        "--dram -1",
        "--policy odd",
        "--out=",
    ),
    "bench offload": (
        "--nothing",
        "--steps 0",
        "--steps -1",
        "--warmup -1",
        "--width 63",
        "--dram 0",
        "--policy odd",
        "--vocabulary 0",
    ),
    "bench plan": ("--nothing", "--rows 0", "--steps x", "--seconds nan", "--repeat -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_one_sentence(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for words in WRONG[name]:
        if name in PYTHON:
            with pytest.raises(SystemExit) as ended:
                raise SystemExit(PYTHON[name](words.split()))
            status, said = ended.value.code, capfd.readouterr().err
        else:
            done = run(*name.split(), *words.split())
            status, said = done.returncode, done.stderr
        assert status == 2, (words, said)
        assert len(said.splitlines()) == 1 and said.startswith("stoker") and "--help" in said, (
            words,
            said,
        )
    assert not list(tmp_path.iterdir())


def test_what_is_printed_has_no_control_characters(capsys):
    assert command.printable("a\x1b[2J\n\u009b\udc80é") == "a\\x1b[2J\\x0a\\xc2\\x9b\\x80é"
    assert command.fail("stoker plan", FileNotFoundError(2, "No such file", "a\x07b")) == 1
    assert capsys.readouterr().err == (
        "stoker plan: a\\x07b cannot be used (No such file); check the path\n"
    )


def test_ls_of_a_run_begins_with_a_summary(small, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2, bias=False))
    model[1].weight.requires_grad_(False)
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model[0].parameters()), store=tmp_path / "run", dram="8MiB"
    )
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    first, step, size, *rest = run("ls", tmp_path / "run").stdout.splitlines()
    assert first.startswith("model ") and "in 3 parameters, float32" in first and "adamw" in first
    assert re.fullmatch(
        r"step +3; last written \d{4}-\d\d-\d\d \d\d:\d\d", step
    ) and size.startswith("size ")
    shown = "\n".join(rest)
    assert re.search(r" 32 +float32 +4 x 8 +0\.weight$", shown, re.M) and re.search(
        r" 8 +float32 +2 x 4 +1\.weight \(frozen\)$", shown, re.M
    )
    assert "meta/state" in shown  # the objects follow
    told = json.loads(run("ls", tmp_path / "run", "--json").stdout)
    assert told["run"]["step"] == 3 and [each["name"] for each in told["run"]["parameters"]] == [
        "0.weight",
        "0.bias",
        "1.weight",
    ]
    for words in ((small,), (tmp_path / "run", "w/")):  # no run; a part of one
        assert run("ls", *words).stdout.split()[0] == "bytes" and "run" not in json.loads(
            run("ls", *words, "--json").stdout
        )


def test_the_names_in_a_checkpoint_are_printed_as_text(tmp_path, capsys):
    """Somebody may have sent it."""
    with stoker.Checkpoints(f"dir:{tmp_path}/c") as ckpt:
        ckpt.save(1, extra={"a\x1b[2Jb": torch.ones(3)}).wait()
    assert ckpt_cli.main(["show", f"dir:{tmp_path}/c"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2Jb" in said
    with pytest.raises(SystemExit) as ended:
        ckpt_cli.main(["ls", ""])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_nobody_reads_on(tmp_path):
    """A reader that was killed, or `head`: no traceback."""
    (tmp_path / "text.txt").write_text("some words of a corpus\n" * 50)
    command = str(COMMAND)
    for words in (
        [sys.executable, "-m", "stoker.data", "--folder", tmp_path / "o", tmp_path / "text.txt"],
        [
            command,
            "plan",
            "7B",
            "--dram",
            "16GiB",
            "--disk",
            "read=7GB/s,write=5GB/s",
            "--flops",
            "1T",
        ],
        [command, "ls", make_small_store(tmp_path / "s")],
    ):
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            child.stdout.close()
            said = child.stderr.read()
        assert child.returncode in (-13, 141) and "Traceback" not in said and "Errno" not in said, (
            said
        )


def test_export_replaces_nothing_but_files(small, tmp_path):
    target, pipe, folder = tmp_path / "target", tmp_path / "pipe", tmp_path / "folder"
    target.write_text("old")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "lost").symlink_to(tmp_path / "gone")
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, tmp_path / "lost", "/dev/null"):
        done = run("export", small, "w/1", path)
        assert done.returncode == 1 and str(path) in done.stderr and "\n" == done.stderr[-1], done
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    done = meekly(COMMAND, "export", small, "w/1", shut / "file")
    assert done.returncode == 1 and "(Permission denied)" in done.stderr, done.stderr
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    assert run("export", small, "w/1", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink() and target.read_bytes() != b"old"


def test_odd_words_of_store_commands(small, tmp_path):
    store = tmp_path / "s"
    shutil.copytree(small, store)
    assert run("rm", store, "w/1", "w/1").returncode == 0, "a key may be named twice"
    assert "the same store" in run("cp", store, store).stderr
    for capacity in ("nan", "inf", "0", "-1"):
        done = run("create", tmp_path / "new", f"--capacity={capacity}")
        assert done.returncode == 1 and not (tmp_path / "new").exists(), done
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("x")
    os.mkfifo(source / "pipe")
    assert "left out 1 entries that are not files" in run("put", store, "new/", source).stderr
