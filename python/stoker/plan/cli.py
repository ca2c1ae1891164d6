"""`stoker plan`: its command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..command import Parser, fail, named, number, whole
from ..errors import InvalidArgument, StokerError
from ..offload.division.machine import LINK, Machine
from ..offload.storage.probe import by_disk
from .measure import kernel_seconds, measure_machine
from ..offload.planning.products import product_flops, quickest_type
from ..offload.model.moments import MODES
from ..offload.storage.open_store import folders_of, is_namespace
from ..offload.division.amounts import memory_bytes
from ..train.settings import human_bytes
from .outlook import Wish, advice, held_text, outlook, snapshots_text
from .shapes import DTYPES, Described, describe
from .text import classes_text, plan_text, rates_text, seconds_text

_DESCRIPTION = """\
Tell what training MODEL will take before there is a weight of it: bytes by class, seconds by
resource and by cause of waiting, the bottleneck, the tokens a step from which the storage is
hidden, peaks of memory, space and wear of the disk, which policy and byte mode to choose; and
where it does not fit, what would.

MODEL is a folder with a config.json of transformers, such a file, a folder of safetensors files,
or counts of parameters: 7B (a Llama-shaped model of about that many) or
"embed=131M,layer=202M*32,head=131M" (blocks in order)."""

_EPILOG = """\
The disk is measured unless --disk gives its rates, the cores are those of this machine unless
--cores says otherwise. Exit status: 0 there is a plan, also where the answer is that it does not
fit, and a sentence says what would (1 with --check); 1 it failed; 2 the command line is wrong."""

# assumed where --gpu comes without --flops, as LINK without --link; the text says so
GPU_FLOPS = 70e12


class Amount(float):
    """A number, and how it was written."""

    text: str


def quantity(text: str) -> Amount:
    """ "7GB/s", "70T", "1.2P", "20GiB" -> a number."""
    found = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)(?:B|FLOPS?|flops?)?(?:/s)?\s*", text
    )
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an amount: write, for example, 7GB/s, 20GiB or 70T"
        )
    amount = Amount(
        float(found[1])
        * (1024 if found[3] else 1000) ** " kMGTP".index(found[2].replace("K", "k") or " ")
    )
    amount.text = text.strip()
    return amount


def disk(text: str) -> dict[str, float]:
    rates = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if name not in ("read", "write", "mixed") or not sign:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is not read=, write= or mixed= with a rate, as in"
                " read=7GB/s,write=5GB/s"
            )
        rates[name] = quantity(value)
    if not {"read", "write"} <= rates.keys():
        raise argparse.ArgumentTypeError("a disk has both rates: read=7GB/s,write=5GB/s")
    return rates


def parser() -> Parser:
    top = Parser("stoker plan", _DESCRIPTION, _EPILOG)
    add = top.add_argument
    add("model", metavar="MODEL", type=named, help="what to plan for")
    add(
        "--dram",
        type=quantity,
        required=True,
        metavar="BYTES",
        help="cap on the memory for weights, gradients, state and staging, as 20GiB",
    )
    add(
        "--store",
        metavar="DIR",
        type=named,
        help=(
            "where the store would be (several: comma-separated): its disk is measured, its free"
            " space looked at"
        ),
    )
    add(
        "--disk",
        type=disk,
        metavar="RATES",
        help="the disk's rates instead of measuring it: read=7GB/s,write=5GB/s (and mixed=)",
    )
    add(
        "--seconds",
        type=number(1, 60),
        default=1.0,
        help="about how long the disk is measured (default: 1)",
    )
    add("--tokens", type=whole(), default=8192, help="tokens a step (default: 8192)")
    add(
        "--gpu",
        type=quantity,
        metavar="BYTES",
        help="memory of the accelerator that computes; left out: the cores compute",
    )
    add(
        "--flops",
        type=quantity,
        metavar="RATE",
        help=(
            "operations a second that the products run at (measured on the cores; with --gpu"
            f" {GPU_FLOPS / 1e12:.0f}T is assumed)"
        ),
    )
    add(
        "--link",
        type=quantity,
        metavar="RATE",
        help=f"bytes a second to the accelerator and back (default: {LINK / 1e9:.0f}GB/s)",
    )
    add("--cores", type=whole(1, 1 << 16), help="cores of the machine (default: those of this one)")
    add(
        "--precision",
        choices=("auto", *DTYPES),
        default="auto",
        help=(
            "type of the weights (default: auto, which is bfloat16, with exact float32 masters,"
            " unless these cores compute and multiply float32 quicker)"
        ),
    )
    add(
        "--moments",
        choices=tuple(MODES),
        default="exact",
        help="how the optimizer's moments are kept (default: exact)",
    )
    add(
        "--snapshots",
        type=whole(0, 1 << 16),
        default=0,
        metavar="N",
        help=(
            "steps kept on the disk beside the current one (default: 0;"
            " stoker.integrations.huggingface keeps 2)"
        ),
    )
    add(
        "--endurance",
        type=quantity,
        default=0.0,
        metavar="BYTES",
        help="what the drive may be written in its life, as 1200TB",
    )
    add(
        "--total",
        type=quantity,
        metavar="TOKENS",
        help="tokens of the whole training, as 2G: tells how long that takes",
    )
    add("--check", action="store_true", help="end with 1 where it does not fit")
    add("--json", action="store_true", help="print the plan as one JSON object on standard output")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    top = parser()
    args = top.parse_args(argv)
    if not args.store and not args.disk:
        top.error("give --store to measure its disk, or --disk with its rates")
    try:
        described = describe(args.model, args.precision.replace("auto", "bfloat16"))
        args.folders = _folders(args.store)
        args.disks = [
            those[0] for those in by_disk([str(_existing(folder)) for folder in args.folders])
        ]
        args.precision = _precision(args)
        if args.precision != "bfloat16":
            described = describe(args.model, args.precision)
        wish = _wish(args, described)
        result = {
            "model": described.origin,
            "precision": args.precision,
            "machine": asdict(wish.machine),
            **outlook(wish),
        }
        if args.total and "step" in result:
            result |= {
                "total_tokens": args.total,
                "total_seconds": args.total / args.tokens * result["step"]["seconds"],
            }
    except InvalidArgument as error:
        top.error(str(error))
    except (StokerError, OSError) as error:
        return fail("stoker plan", error)
    print(json.dumps(result) if args.json else _text(result, args, wish.machine))
    for problem in result["problems"]:
        fail("stoker plan", f"it does not fit: {problem}")
    return 1 if args.check and not result["fits"] else 0


def _precision(args: argparse.Namespace) -> str:
    """As `stoker train` will choose it."""
    if args.precision != "auto" or args.gpu or args.flops:
        return args.precision.replace("auto", "bfloat16")
    args.quickest = quickest_type(min(args.tokens, 1024), 1024)
    return args.quickest.name


def _wish(args: argparse.Namespace, described: Described) -> Wish:
    folders, disks = args.folders, args.disks
    if not args.disk:
        print(
            f"measuring    {', '.join(disks)}, for about {args.seconds + 1:.0f} seconds",
            file=sys.stderr,
        )
    machine = measure_machine([] if args.disk else disks, args.seconds, moments=args.moments)
    if args.disk:
        machine = replace(
            machine,
            read=args.disk["read"],
            write=args.disk["write"],
            mixed=args.disk.get("mixed", 0.0),
            share=1.0,
        )
    width = min(
        4096,
        max(
            (min(p.size) for block in described.blocks for p in block.params if len(p.size) == 2),
            default=1024,
        ),
    )
    flops = args.flops or (
        GPU_FLOPS
        if args.gpu
        else product_flops(min(args.tokens, 1024), width, DTYPES[args.precision])
    )
    machine = replace(
        machine,
        flops=flops,
        cores=args.cores or os.cpu_count() or 1,
        link=(args.link or LINK) if args.gpu else 0.0,
    )
    held = sum(
        file.stat().st_blocks * 512
        for file in (folder / "stoker.volume" for folder in folders)
        if file.is_file()
    )
    space = sum(shutil.disk_usage(disk).free for disk in disks) + held if disks else None
    others = {mode: kernel_seconds(moments=mode) for mode in MODES if mode != args.moments}
    return Wish(
        described.blocks,
        int(args.dram),
        machine,
        args.tokens,
        args.moments,
        int(args.gpu or 0),
        space,
        held,
        args.endurance,
        args.snapshots,
        described.experts,
        memory_bytes(),
        others,
        args.dram.text,
    )


def _folders(store: str | None) -> list[Path]:
    """Of a store as stoker.offload() takes it. InvalidArgument for one that no disk is under."""
    if store is None:
        return []
    folders = folders_of(store)
    if not folders:
        raise InvalidArgument(
            f"{store} is a store in memory, so there is no disk to plan for; give the folder "
            f"that training will use"
        )
    if any(is_namespace(folder) for folder in folders):
        raise InvalidArgument(
            f"{store} names an NVMe namespace, which plan cannot measure through a file. Give "
            f"the rates that `stoker probe` prints as --disk, without --store"
        )
    return [Path(folder).expanduser() for folder in folders]


def _existing(folder: Path) -> Path:
    """The nearest folder that is there: the store's is made by training. OSError where it cannot
    be."""
    try:
        for found in folder.iterdir():
            break
    except FileNotFoundError:
        return _existing(folder.absolute().parent)
    return folder


def _text(result: dict[str, Any], args: argparse.Namespace, machine: Machine) -> str:
    lines = [
        f"planned      {result['model']}, AdamW, {result['tokens']} tokens a step",
        f"machine      {rates_text(machine)}",
    ]
    if "step" in result:
        if "quickest" in args:
            lines.append(f"precision    {args.quickest}")
        lines += [plan_text(result, args.dram.text, args.store or ""), *_time_lines(result)]
    if result.get("dram", {}).get("activations"):
        lines.append(
            f"activations  about {human_bytes(result['dram']['activations'])} beside the cap, of"
            f" {result['tokens']} tokens at once (--activations of `stoker train` has them on the"
            " disk)"
        )
    if result.get("memory_is_enough"):
        lines.append(
            f"without      all of it takes about {human_bytes(result['whole_in_memory'])}, and this"
            f" machine has {human_bytes(memory_bytes())}: train without Stoker, or with a --dram"
            " that holds it"
        )
    if result["gpu"]:
        gpu = result["gpu"]
        how = "recomputing activations" if gpu["recompute"] else "keeping activations"
        lines.append(
            f"accelerator  about {human_bytes(gpu['peak_bytes'])} of {human_bytes(gpu['cap'])} at"
            f" the peak, {how}: {classes_text(gpu['classes'])}"
        )
        if not args.flops:
            lines.append(
                f"             assumed to sustain {GPU_FLOPS / 1e12:.0f} T operations a second"
                f" (--flops) over a link of {(args.link or LINK) / 1e9:.0f} GB/s (--link)"
            )
    space = result["disk_space"]
    lines.append(
        f"disk space   {human_bytes(space['needed'])}: two versions of"
        f" {human_bytes(space['one_version'])}{snapshots_text(space)} and room"
        + (
            f"; {human_bytes(space['free'])} are free{held_text(space)}"
            if space["free"] is not None
            else ""
        )
    )
    if args.store and "," in args.store:
        lines.append(
            "             several disks give half as much again, where they have it, so that their"
            " shares of the writes can change"
        )
    if "wear" in result:
        wear = result["wear"]
        worn = (
            f", {wear['share_per_1000_steps']:.2%} of the {human_bytes(wear['endurance_bytes'])} it"
            f" may take; {wear['steps_to_endurance']} steps wear it out"
            if wear["endurance_bytes"]
            else ""
        )
        lines.append(
            f"wear         {human_bytes(wear['bytes_per_1000_steps'])} written in 1,000 steps{worn}"
        )
    return "\n".join(lines)


def _time_lines(result: dict[str, Any]) -> list[str]:
    resources = ", ".join(
        f"{name} {seconds:.3g} s" for name, seconds in result["resource_seconds"].items() if seconds
    )
    others = [f"  {name:11}{seconds_text(row)}" for name, row in result["steps"].items()]
    hidden = result["tokens_hidden"]
    reached = f"from {hidden} tokens a step on, storage takes less than a twentieth of it"
    never = "at no number of tokens: the cores that compute are those that update"
    return [
        *others,
        f"at least     {resources}: the bottleneck is the {result['bottleneck']}",
        f"hidden       {reached if hidden else never}",
        f"byte mode    {advice(result)}",
        *(
            [
                f"in all       {duration(result['total_seconds'])} for {result['total_tokens']:.3g}"
                " tokens"
            ]
            if "total_seconds" in result
            else []
        ),
    ]


def duration(seconds: float) -> str:
    """ "3 d 4:25", or "4:25" (hours:minutes)."""
    days, minutes = divmod(-int(-seconds // 60), 24 * 60)
    return f"{days} d " * bool(days) + f"{minutes // 60}:{minutes % 60:02} (hours:minutes)"
