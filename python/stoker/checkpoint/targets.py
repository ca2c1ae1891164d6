"""The tensors of a model that a checkpoint fills."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.checkpoint import state as states
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.shards import is_sharded, local
from stoker.errors import Mismatch


def targets_of(model: nn.Module, reader: Reader) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that the checkpoint has. Mismatch if they are not the
    same."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in states.named_tensors(model, away=False).items():
        if hasattr(tensor, "_stoker_session"):
            raise Mismatch(
                f"the values of {name} are in the store of stoker.offload(); restore by"
                " stoker.offload(..., restore=ckpt), or before the model is given to it"
            )
        if local(tensor).is_meta:
            raise Mismatch(
                f"{name} of the model is on the meta device and has no memory; call"
                ' model.to_empty(device="cpu") first'
            )
        found[states.plain(name)] = tensor
    names, every = set(found), found
    there = {*reader.tensors(), *reader.manifest.aliases}
    found = _tied_once(found, there, reader)
    if missing := sorted(found.keys() - there):
        raise Mismatch(
            f"{reader.where} belongs to another model: it lacks {_some(missing)}; give the model"
            " that was saved"
        )
    if left := sorted(there - names):
        raise Mismatch(
            f"{reader.where} belongs to another model: it holds {_some(left)}, which this model"
            " lacks; give the model that was saved"
        )
    for alias, name in reader.manifest.aliases.items():
        if local(every[alias]).data_ptr() != local(every[name]).data_ptr():
            raise Mismatch(
                f"{reader.where} has {alias} tied to {name}, but the model has two tensors; tie"
                " them first, for example with model.tie_weights()"
            )
    return {
        name: tensor.detach()
        for name, tensor in found.items()
        if name not in reader.manifest.aliases
    }


def _tied_once(
    found: dict[str, torch.Tensor], there: set[str], reader: Reader
) -> dict[str, torch.Tensor]:
    """Of names that are the same memory in the model, those that are to be read: the checkpoint may
    have the weight once, under one of the names. Mismatch if it has different values for them."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in found.items():
        same = id(tensor) if is_sharded(tensor) else states.place_of(tensor)
        groups.setdefault(same, []).append(name)
    kept = dict(found)
    aliases, places = reader.manifest.aliases, reader.tensors()
    for names in groups.values():
        known = [name for name in names if name in there]
        if not known:
            continue
        for name in set(names) - there:
            del kept[name]
        first, *others = dict.fromkeys(aliases.get(name, name) for name in known)
        for other in others:
            (one, left), (two, right) = (reader.tensor(*places[n]) for n in (first, other))
            if (one.dtype, one.shape, left) != (two.dtype, two.shape, right):
                raise Mismatch(
                    f"{reader.where} has different values for {first} and {other}, but the model"
                    " ties them; make the model without the tie"
                )
    return kept


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_groups(reader: Reader, key: str, optimizer: Any) -> None:
    """Mismatch where torch's optimizer would refuse the state, which it does after others were
    loaded."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    sizes = lambda groups: [len(group["params"]) for group in groups]
    ours, theirs = sizes(optimizer.param_groups), sizes(reader.outline(key)["param_groups"])
    if ours != theirs:
        raise Mismatch(
            f"{reader.where}: {key} has groups of {theirs} parameters, but the given optimizer has"
            f" {ours}; make it with the same groups in the same order"
        )
