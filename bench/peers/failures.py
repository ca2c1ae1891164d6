"""Three faults in which a peer's NVMe offload goes wrong without a word, on Stoker, with the same
kind of script.

    python bench/peers/failures.py [--dir DIR] [--layers 6] [--hidden 512] [--steps 12] [--kills 10]
    [--json FILE]

small disk  The folder of the states is on a disk that is slightly too small. The peer ends with
status 0, no message, and a loss that went
            from 9.19 to 38.57, as short writes pass unnoticed. Right: an error that says what is
            missing, before the first step. And a disk that others fill while it trains: it goes on,
            and the losses are those of an empty disk.
kill        kill -9 while the optimizer steps. The peer leaves files of two steps, one torn, and
silently starts from scratch.
            Right: the last committed step, whole, and from there the losses of a run that nothing
            happened to.
resume      An orderly end and a new start. The peer's losses differ from the second step on. Right:
equal, bit for bit, with clipping.

The model is a bf16 decoder with random weights, batch 1 x 64 tokens. A small file system is mounted
for the first case, which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch
from torch.nn import functional as F

import stoker
from stoker.train.model import Model, ModelConfig, initialise

VOCABULARY, TOKENS = 1024, 64


# -- the script that meets the faults --------------------------------------------------------------


def make(layers: int, hidden: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(ModelConfig(VOCABULARY, layers=layers, hidden=hidden, heads=4))
    initialise(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def loop(model, opt, first: int, last: int, say=lambda text: None) -> list[float]:
    """Steps first..last; each has its own data."""
    losses = []
    for step in range(first, last + 1):
        tokens = torch.randint(
            0, VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(step)
        )
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        say(f"stepping {step} {getattr(opt, 'committed_step', 0)}")
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        say(f"step {step} {loss.item()!r}")
    return losses


def train(store: str, steps: int, layers: int, hidden: int, dram: str) -> None:
    model, opt = make(layers, hidden)
    model, opt = stoker.offload(model, opt, store=store, dram=dram, resume="auto")
    print(f"at {opt.step_count}", flush=True)
    loop(model, opt, opt.step_count + 1, steps, say=lambda text: print(text, flush=True))
    opt.close()


# -- the faults ------------------------------------------------------------------------------------


class Script:
    """Starts train() in a process of its own."""

    def __init__(self, layers: int, hidden: int, steps: int, dram: str) -> None:
        self.steps = steps
        self._words = [layers, hidden, dram]

    def start(self, store: Path, steps: int | None = None) -> subprocess.Popen:
        words = [sys.executable, __file__, "--train", store, steps or self.steps, *self._words]
        return subprocess.Popen(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, store: Path, steps: int | None = None) -> tuple[int, int, dict[int, str], str]:
        """Exit status, the step it began after, the losses, what it said on stderr."""
        process = self.start(store, steps)
        out, err = process.communicate(timeout=600)
        return process.returncode, began_after(out), losses_in(out), err


def losses_in(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)$", text, re.M)}


def began_after(text: str) -> int:
    """The step that a start found in the store; -1 if it found nothing that it could begin with."""
    at = re.search(r"^at (\d+)$", text, re.M)
    return int(at.group(1)) if at else -1


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def too_small_a_disk(script: Script, disk: Path) -> dict:
    """`disk`: a folder on a file system with slightly too little room."""
    status, _, losses, said = script.run(disk / "run")
    sentence = said.strip().splitlines()[-1].replace(f"{disk}/", "") if said.strip() else ""
    check(
        status != 0 and not losses,
        f"on too small a disk it ended with status {status} after {len(losses)} steps",
    )
    check("OutOfSpace" in sentence, f"it did not say that the disk is too small: {sentence}")
    return {"status": status, "steps": len(losses), "says": sentence}


def disk_that_fills(script: Script, disk: Path, right: dict[int, str]) -> dict:
    """`disk`: a folder on a file system that has room. Somebody takes all that is left once
    training is under way."""
    process = script.start(disk / "run")
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("step 2 "):
            take_the_rest(disk)
    process.wait(timeout=600)
    losses = losses_in(text)
    check(
        process.returncode == 0,
        f"on a disk that filled it ended with status {process.returncode}:"
        f" {process.stderr.read()[-300:]}",
    )
    check(losses == right, f"on a disk that filled the losses became {losses}")
    return {"status": 0, "steps": len(losses), "losses": "equal"}


def take_the_rest(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as file:
        size = 1 << 20
        while size >= 4096:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def killed_in_the_step(
    script: Script, folder: Path, right: dict[int, str], kills: int, seed: int
) -> dict:
    rng, seen, told = random.Random(seed), {}, []
    for kill in range(kills + 1):
        # the kills are spread over the run; the last start runs to its end
        target = 2 + (kill * (script.steps - 2)) // kills
        process = script.start(folder)
        text = line = ""
        for line in process.stdout:
            text += line
            if kill < kills and line.startswith("stepping") and int(line.split()[1]) >= target:
                time.sleep(rng.random() * 0.02)
                process.kill()
                break
        rest, said = process.communicate()
        seen |= losses_in(text + rest)
        at = began_after(text)
        if kill > 0:
            stepping, committed = told[-1]
            check(
                committed <= at <= stepping,
                f"killed in step {stepping} with step {committed} committed, it went on from step"
                f" {at}: {said[-300:]}",
            )
            told[-1].append(at)
        if kill < kills:
            check(
                line.startswith("stepping"),
                f"it did not get as far as step {target}: {said[-300:]}",
            )
            told.append([int(word) for word in line.split()[1:]])
            fsck = subprocess.run(
                [Path(sys.executable).parent / "stoker", "fsck", folder],
                capture_output=True,
                text=True,
            )
            check(
                fsck.returncode == 0,
                f"fsck after a kill in step {target}: {fsck.stdout}{fsck.stderr}",
            )
    check(
        seen == right, f"seed {seed}: after kills the losses are not those of a run without: {seen}"
    )
    return {"seed": seed, "kills [step, committed then, resumed after]": told, "losses": "equal"}


def stopped_and_resumed(script: Script, folder: Path, right: dict[int, str]) -> dict:
    half = script.steps // 2
    _, _, first, _ = script.run(folder, half)
    status, at, rest, said = script.run(folder)
    check(status == 0 and at == half, f"it went on from step {at}, not {half}: {said[-300:]}")
    check(first | rest == right, f"resumed, the losses became {rest}")
    return {"resumed_after": at, "losses": "equal"}


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    image, where = folder / f"{mebibytes}.img", folder / f"disk-{mebibytes}"
    with open(image, "wb") as file:
        file.truncate(mebibytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    where.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--dir", type=Path, default=None)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--dram", default="96MiB")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    script, seed = (
        Script(given.layers, given.hidden, given.steps, given.dram),
        random.randrange(1 << 30),
    )
    with tempfile.TemporaryDirectory(prefix="stoker-failures-", dir=given.dir) as made:
        folder = Path(made)
        _, _, right, said = script.run(folder / "right")
        check(len(right) == given.steps, said)
        needs = sum(file.stat().st_blocks * 512 for file in (folder / "right").iterdir()) >> 20
        rows = {}
        with small_disk(folder, needs) as disk:  # the file system takes some of that for itself
            rows["too small a disk"] = too_small_a_disk(script, disk)
        with small_disk(folder, needs + needs // 8 + 16) as disk:
            rows["a disk that fills"] = disk_that_fills(script, disk, right)
        rows["kill"] = killed_in_the_step(script, folder / "killed", right, given.kills, seed)
        rows["resume"] = stopped_and_resumed(script, folder / "resumed", right)
    print(json.dumps(rows, indent=1))
    if given.json:
        given.json.write_text(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "stoker": stoker.__version__,
                    "cpus": os.cpu_count(),
                    **rows,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
