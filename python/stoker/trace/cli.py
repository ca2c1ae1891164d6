"""`stoker trace`: trains a model for a few steps out of a store that is thrown away, and writes a
Chrome trace of the last one.

A run of your own is traced from within: `opt.trace("step.json")` before a step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

import torch

import stoker

from ..bench.model import TOKENS, Model, step_loss
from ..bench.offload import add_model_options, weight_type
from ..command import Parser, fail, named, writable_folder
from ..errors import StokerError, naming
from ..offload.division.amounts import parse_bytes

STEPS_BEFORE = 3  # the order is recorded in the first; the moments are no sparse zeros any more


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("stoker trace", __doc__)
    parser.add_argument(
        "--out",
        type=named,
        default="trace.json",
        metavar="FILE",
        help="the trace (default: trace.json), for chrome://tracing or Perfetto",
    )
    parser.add_argument(
        "--dir", type=named, default=".", help="where the store is made (default: here)"
    )
    parser.add_argument(
        "--policy",
        choices=["auto", "sync", "speculate", "lazy"],
        default="speculate",
        help="when updates run (default: speculate)",
    )
    add_model_options(parser, dram="96MiB", layers=8, width=512)
    args = parser.parse_args(argv)
    try:
        args.dram = parse_bytes("dram", args.dram)
    except StokerError as error:
        parser.error(str(error).replace("dram:", "--dram:"))
    try:
        row = _trace(args)
    except (StokerError, OSError) as error:
        return fail("stoker trace", error)
    print(
        f"written      {args.out}: step {row['step']}, {row['seconds']:.3g} s, policy"
        f" {row['policy']}",
        file=sys.stderr,
    )
    return 0


def _trace(args: argparse.Namespace) -> dict:
    writable_folder(args.dir)  # before there is work that would be in vain
    there = os.path.exists(args.out)
    with naming(args.out), open(args.out, "ab"):
        pass
    if not there:  # what fails below leaves no empty file
        os.unlink(args.out)
    dtype = weight_type(args.precision, TOKENS, args.width)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="stoker-trace-") as store:
        model = stoker.build(
            lambda: Model(args.layers, args.width, args.vocabulary).to(dtype),
            seed=0,
            store=store,
            dram=args.dram,
        )
        model, opt = stoker.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            store=store,
            dram=args.dram,
            policy=args.policy,
        )
        try:
            for step in range(STEPS_BEFORE + 1):
                if step == STEPS_BEFORE:
                    opt.trace(args.out)
                step_loss(model, step, args.vocabulary).backward()
                opt.step()
                opt.zero_grad()
            return opt.ledger.last
        finally:
            opt.close()
