"""What a training process takes beside its cap: peaks by model, and the table of docs/numbers.md.

    .venv/bin/python bench/memory.py                   all cases, into bench/results/memory.json
    .venv/bin/python bench/memory.py --only linear96   those named so; the others keep their rows
    .venv/bin/python bench/memory.py --markdown bench/results/memory.json

Each case is a process of its own. Memory is RssAnon + RssShmem + HugetlbPages, sampled every 5 ms.
`base` is the process after its imports and a step of a very small model in memory. Allowed are
base + dram + the bytes that autograd saves for the same model + 32 MiB; while stoker.offload()
takes over a model in memory also that model.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
SLACK = 32 * MIB
POLICIES = ("auto", "sync", "speculate", "lazy")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
TYPES = ("float32", "bfloat16")
# MiB; each fits the largest layer.
DRAM = {"linear": 60, "small": 32, "large": 352, "embedding": 640, "gpt": 224}


# Cases in which the allowed is passed, by up to 4 MiB: docs/numbers.md says why.
OVER = {"gpt14 bfloat16 sync plain", "gpt14 bfloat16 auto build"}


@dataclass(frozen=True)
class Case:
    """`model`: a name and how many layers, as linear96. `way`: plain construction, or build()."""

    model: str
    type: str
    policy: str
    way: str = "plain"
    steps: int = 3

    @property
    def name(self) -> str:
        return f"{self.model} {self.type} {self.policy} {self.way}"

    @property
    def dram(self) -> int:
        return DRAM[self.model.rstrip("0123456789")] * MIB


def name_of(row: dict[str, Any]) -> str:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__}).name


def cases() -> list[Case]:
    models = ("linear24", "linear96", "linear192", "large4", "embedding4", "gpt14")
    wide = [Case(model, kind, policy) for model in models for kind in TYPES for policy in POLICIES]
    return wide + [Case(model, kind, "auto", "build") for model in models for kind in TYPES]


# -- one case, in a process of its own -------------------------------------------------------------


def make(case: Case) -> Any:
    import torch
    from torch import nn

    # A model that is converted later was in memory twice.
    torch.set_default_dtype(getattr(torch, case.type))
    kind, layers = case.model.rstrip("0123456789"), int("".join(filter(str.isdigit, case.model)))
    half = case.type == "bfloat16"

    def transformer(width: int, _out: int) -> nn.Module:
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        return nn.TransformerEncoderLayer(width, 6, 4 * width, **how)

    class Embedded(nn.Module):
        def __init__(self, words: int, width: int, tied: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            layer = transformer if tied else nn.Linear
            self.layers = nn.ModuleList(layer(width, width) for _ in range(layers))
            self.head = nn.Linear(width, words if tied else 64, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    if kind in ("linear", "small"):
        width = 1024 if kind == "linear" else 768
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    elif kind == "large":  # of 64 MiB, beside small ones
        wide = 32768 if half else 16384
        rest = (nn.Linear(1024, 1024) for _ in range(layers))
        ends = (nn.Linear(1024, wide), nn.Linear(wide, 64), nn.Linear(64, 1024))
        model = nn.Sequential(*ends, *rest)
    else:
        model = Embedded(*((65536, 512, False) if kind == "embedding" else (16384, 384, True)))
    return model


def inputs(case: Case, model: Any, device: str = "cpu") -> Any:
    import torch

    if case.model.startswith(("embedding", "gpt")):
        return torch.randint(0, 16384, (2, 32), device=device)
    return torch.randn(8, model[0].in_features, device=device)


def saved_bytes(case: Case) -> int:
    """What autograd saves for backward, without the weights; of a model that has shapes only."""
    import torch

    seen: dict[int, torch.UntypedStorage] = {}
    with torch.device("meta"):
        model = make(case)
    own = {param.untyped_storage()._cdata for param in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs(case, model, "meta")).float().square().mean()
    total = sum(storage.nbytes() for storage in seen.values())
    del loss
    return total


class Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._on = 0, True
        self._lock = threading.Lock()  # else a look from before restart() outlives it
        self.start()

    def run(self) -> None:
        from stoker.offload.observe.heap import resident_bytes

        while self._on:
            with self._lock:
                self.peak = max(self.peak, resident_bytes())
            time.sleep(0.005)

    def restart(self) -> int:
        """The peak since the last call."""
        from stoker.offload.observe.heap import resident_bytes

        with self._lock:
            peak, self.peak = max(self.peak, resident_bytes()), 0
        return peak


def measure(case: Case, store: str) -> dict[str, Any]:
    import torch

    import stoker
    from stoker.offload.observe.heap import resident_bytes

    tiny = torch.nn.Linear(8, 8)  # torch loads libraries, and its optimizers' modules, at first use
    optimizer = torch.optim.AdamW(tiny.parameters())
    tiny(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    saved, base = saved_bytes(case), resident_bytes()
    sampler = Sampler()
    building = lambda: stoker.build(lambda: make(case), seed=0, store=store, dram=case.dram)
    model = building() if case.way == "build" else make(case)
    parameters = sum(param.numel() for param in model.parameters())
    weights = sum(param.nbytes for param in model.parameters()) if case.way == "plain" else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"store": store, "dram": case.dram, "policy": case.policy}
    model, optimizer = stoker.offload(model, optimizer, **options)
    start = sampler.restart()
    for _ in range(case.steps):
        model(inputs(case, model)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    peak = sampler.restart()
    row = optimizer.ledger.last
    allowed = base + case.dram + saved + SLACK
    optimizer.close()
    return {
        **asdict(case),
        "parameters": parameters,
        "base": base,
        "dram": case.dram,
        "saved": saved,
        "start": start,
        "start_allowed": allowed + weights,
        "peak": peak,
        "allowed": allowed,
        "pools": row["dram_bytes_peak"],
        "seen": row["process_bytes_peak"],
    }


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked = ["--case", json.dumps(asdict(case)), "--store", f"{folder}/store"]
        done = subprocess.run([sys.executable, __file__, *asked], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


# -- all of them -----------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = lambda name: (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    there = next(named("flags"), "").split()
    return {
        "cpu": next(named("model name"), ""),
        "features": [flag for flag in FLAGS if flag in there],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": platform.libc_ver()[1],
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| case | dram | saved | offload / allowed | training / allowed | pools |"]
    lines.append("|---|---|---|---|---|---|")
    for row in result["cases"]:
        mib = lambda name, less=0: f"{(row[name] - less) / MIB:.0f}"
        base = row["base"]
        name = " ".join(row[part] for part in ("model", "type", "policy", "way"))
        start = f"{mib('start', base)} / {mib('start_allowed', base)}"
        peak = f"{mib('peak', base)} / {mib('allowed', base)}"
        told = (name, mib("dram"), mib("saved"), start, peak, mib("pools"))
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench/memory.py", description=__doc__, formatter_class=raw)
    results = ROOT / "bench/results/memory.json"
    parser.add_argument("--only", default="", help="run the cases whose name has this in it")
    parser.add_argument("--json", type=Path, default=results, help="where the results go")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of FILE")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)), args.store)))
        return 0
    if args.markdown:
        print(table(json.loads(args.markdown.read_text())))
        return 0
    kept = json.loads(args.json.read_text())["cases"] if args.only and args.json.exists() else []
    rows = {name_of(row): row for row in kept}
    for case in cases():
        if args.only in case.name:
            rows[case.name] = run(case)
            ordered = [rows[each.name] for each in cases() if each.name in rows]
            result = {"machine": machine(), "cases": ordered}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
            print(table({"cases": [rows[case.name]]}).splitlines()[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
