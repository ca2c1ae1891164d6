"""Where the elements of a distributed tensor are: a rectangle of it on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import Unsupported


@dataclass(frozen=True)
class Rectangle:
    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return math.prod(self.size) == 0


@dataclass(frozen=True)
class Division:
    """How a tensor of `shape` lies on ranks. `parts`: the ranks that hold a part of it which no
    lower rank holds as well, with their parts; together they are the whole tensor."""

    shape: tuple[int, ...]
    parts: dict[int, Rectangle]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a distributed tensor of torch (DTensor)."""
    return hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: the very memory."""
    return tensor._local_tensor.detach() if is_sharded(tensor) else tensor.detach()


def division(name: str, tensor: torch.Tensor) -> Division:
    """Unsupported for placements other than Shard and Replicate on meshes of one or two
    dimensions."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    for each in placements:
        if type(each).__name__ not in ("Shard", "Replicate"):
            raise Unsupported(
                f"{name} is placed as {tuple(placements)}; a checkpoint holds tensors that are"
                " sharded (Shard) or replicated (Replicate)"
            )
    if mesh.ndim > 2:
        raise Unsupported(
            f"{name} lies on a mesh of {mesh.ndim} dimensions; use a mesh of one or two to save it"
        )
    parts = {}
    for coordinate in _coordinates(mesh.mesh.shape):
        if any(at and not placement.is_shard() for at, placement in zip(coordinate, placements)):
            continue  # a copy
        parts[int(mesh.mesh[coordinate])] = _rectangle(
            shape, placements, mesh.mesh.shape, coordinate
        )
    return Division(shape, parts)


def mine(name: str, tensor: torch.Tensor) -> Rectangle:
    """This rank's part, also where a lower rank holds the same."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise Unsupported(
            f"{name} lies on a mesh that this rank is not part of; use a mesh of all ranks to save"
            " it"
        )
    found = _rectangle(tuple(tensor.shape), tensor.placements, mesh.mesh.shape, coordinate)
    if tuple(tensor._local_tensor.shape) != found.size:
        raise Unsupported(
            f"{name} is divided in a way that checkpoints do not support: of"
            f" {list(tensor.shape)} this rank holds {list(tensor._local_tensor.shape)}, not"
            f" {list(found.size)}; shard it with fully_shard() or distribute_tensor()"
        )
    return found


def part_of(name: str, tensor: torch.Tensor) -> Rectangle:
    """What this rank has of a tensor; all of one that is not sharded."""
    if is_sharded(tensor):
        return mine(name, tensor)
    return Rectangle((0,) * tensor.dim(), tuple(tensor.shape))


def distributed(ours: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A distributed tensor that lies as `like` does; `ours` is this rank's part of it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        ours.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*each, at) for each in found for at in range(size)]
    return found


def _rectangle(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], at: Sequence[int]
) -> Rectangle:
    """As torch.chunk() divides, mesh dimension by mesh dimension."""
    begin, size = [0] * len(shape), list(shape)
    for placement, ranks, coordinate in zip(placements, sizes, at):
        if not placement.is_shard():
            continue
        whole = size[placement.dim]
        step = -(-whole // ranks)
        first = min(coordinate * step, whole)
        begin[placement.dim] += first
        size[placement.dim] = min(first + step, whole) - first
    return Rectangle(tuple(begin), tuple(size))
