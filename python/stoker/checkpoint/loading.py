"""Brings a checkpoint into a model and objects in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.checkpoint.in_memory import InMemory
from stoker.checkpoint.in_place import state_in_memory
from stoker.checkpoint.manifest import Manifest
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.sharded import distribute, places_of
from stoker.checkpoint.shards import local
from stoker.checkpoint.targets import check_groups, targets_of
from stoker.errors import InvalidArgument, Mismatch
from stoker.offload.ranks.ranks import sharded_modules
from stoker.offload.run.optimizer import OffloadedOptimizer
from stoker.offload.storage import record


@dataclass(frozen=True)
class Restored:
    """What restore() found. `extra`: the plain values of `extra` that were saved. Where a run of
    stoker.offload() went into memory, also the states of what was attached to it, by name."""

    step: int
    folder: str
    tier: str
    extra: dict[str, Any]
    manifest: Manifest


def load(
    reader: Reader,
    model: nn.Module | None,
    optimizers: dict[str, Any],
    loader: Any,
    extra: dict[str, Any],
) -> Restored:
    manifest = reader.manifest
    away = [key for key, each in optimizers.items() if isinstance(each, OffloadedOptimizer)]
    if away:
        raise Mismatch(
            f"{reader.where}: {away[0]} belongs to a run of stoker.offload(), whose state does"
            " not pass through memory; give the checkpoints to it: stoker.offload(...,"
            " restore=ckpt)"
        )
    for module in sharded_modules(model) if model is not None else ():
        module.reshard()
    runs = {
        key: InMemory(reader, model, each)
        for key, each in optimizers.items()
        if key in manifest.offloaded
    }
    optimizers = {key: each for key, each in optimizers.items() if key not in runs}
    things = {**optimizers, **({"loader": loader} if loader is not None else {}), **extra}
    for key in things:
        if key not in manifest.objects:
            raise Mismatch(
                f"{reader.where} holds no {key}; it has {', '.join(sorted(manifest.objects))}"
            )
        if not hasattr(things[key], "load_state_dict"):
            raise InvalidArgument(
                f"do not pass {key} to restore(): it has no load_state_dict(). Its value is"
                " in the result's `extra`"
            )
    targets = targets_of(model, reader) if model is not None else {}
    values = {key for key in manifest.objects if key.startswith("extra.") and key not in things}
    masters = {n: t for run in runs.values() for n, t in run.masters(targets).items()}
    targets = {name: each for name, each in targets.items() if name not in masters}
    reader.check_tensors(targets)
    like: dict[int, torch.Tensor] = {}
    for key, thing in optimizers.items():
        check_groups(reader, key, thing)
        like |= places_of(reader, key, thing)
    rng = f"rng.{_rank()}"  # also where this rank asks for a loader's state alone
    rng = rng if rng in manifest.objects else "rng"
    into = state_in_memory(reader, optimizers, [local(each) for each in targets.values()])
    loaded = reader.objects([*things, *values, rng], like=like, into=into)
    for key, thing in optimizers.items():
        distribute(loaded[key], thing)
    reader.load_tensors(targets)
    for run in runs.values():
        run.fill(masters)
    for key, thing in things.items():
        thing.load_state_dict(loaded[key])
    record.set_rng_state(loaded[rng])
    plain = {
        key.removeprefix("extra."): (
            loaded[key]["value"] if list(loaded[key]) == ["value"] else loaded[key]
        )
        for key in values
    }
    for run in runs.values():
        plain = run.attached | plain
    return Restored(manifest.step, str(manifest.name), reader.tier.composition, plain, manifest)


def _rank() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0
