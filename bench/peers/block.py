"""One block of one system, in a process of its own: `python block.py SPEC RESULT`, two JSON files.
Needs torch and that system.

A block is `warmup` steps, `steps` timed ones, and `clipped` ones with clipping. A step is timed
from its forward to the loss as a number; what a step leaves to be done behind falls into the next
one, as the last of the warm-up's does into the first timed one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from systems import CLIP

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = {"stoker": "StokerSystem", "deepspeed": "DeepSpeedSystem", "torch": "TorchSystem"}


def shared(name: str) -> ModuleType:
    """A module of stoker.bench without what else Stoker is: a peer's process holds nothing of
    ours."""
    spec = importlib.util.spec_from_file_location(
        f"bench_{name}", ROOT / "python" / "stoker" / "bench" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(spec["threads"])
    models, process = shared("model"), shared("process")
    make = lambda: models.Model(spec["layers"], spec["width"], spec["vocabulary"]).to(
        torch.bfloat16
    )
    began = time.perf_counter()
    system = getattr(importlib.import_module(f"{spec['kind']}_system"), SYSTEMS[spec["kind"]])(
        make, spec["settings"], spec["directory"]
    )
    result: dict[str, Any] = {
        "setup_seconds": time.perf_counter() - began,
        "torch": torch.__version__,
    }

    def step(number: int) -> tuple[float, dict[str, float]]:
        marks = [time.perf_counter()]
        loss = models.step_loss(system.model, number, spec["vocabulary"], spec["tokens"])
        marks.append(time.perf_counter())
        system.backward(loss)
        marks.append(time.perf_counter())
        system.step()
        value = loss.item()
        marks.append(time.perf_counter())
        forward, backward, update = (after - before for before, after in zip(marks, marks[1:]))
        return value, {
            "seconds": marks[-1] - marks[0],
            "forward": forward,
            "backward": backward,
            "step": update,
        }

    losses = [step(number)[0] for number in range(spec["warmup"])]
    give_back_memory()  # what building the model left in the heap is nobody's need
    memory, before, began = process.PeakMemory(), process.process_io(), time.process_time()
    timed = []
    for number in range(spec["warmup"], spec["warmup"] + spec["steps"]):
        loss, seconds = step(number)
        losses.append(loss)
        timed.append(seconds)
    after, core_seconds = process.process_io(), (time.process_time() - began) / spec["steps"]
    result.update(
        peak_bytes=memory.stop(),
        rss_bytes=memory.resident_peak,
        read_bytes=after[0] - before[0],
        written_bytes=after[1] - before[1],
        core_seconds=core_seconds,
    )
    system.clip(CLIP)
    first = spec["warmup"] + spec["steps"]
    clipped = [step(number)[0] for number in range(first, first + spec["clipped"])]
    return {
        **result,
        **system.finish(),
        "steps": timed,
        "losses": losses,
        "clipped_losses": clipped,
    }


def give_back_memory() -> None:
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
    os._exit(0)  # all is told; some systems take long to take themselves apart
