"""How a model is cut into blocks, and where each parameter lies.

A *block* is what is fetched and evicted together: one repeated layer, or one module outside the
repeated part. A *unit* is the part of a block that shares a dtype and a treatment (updated by the
optimizer, or frozen): it is stored as planes ``w/NAME`` (weights), ``r/NAME`` (low 16 bits of the
float32 master, bfloat16 only), ``m/NAME`` and ``v/NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterable, Iterator

import torch
from torch import nn

from stoker.errors import InvalidArgument
from stoker.offload.model.compiled import plain

# elements; SIMD kernels start each parameter on a cache line (and on a group that shares a scale)
PARAM_ALIGN = 64
PLANE_ALIGN = 4096  # bytes; planes go to the disk without a bounce


@dataclass(eq=False)
class Param:
    """One parameter of the model and its place in its unit. ``size``/``stride`` are those it had
    when it was offloaded."""

    name: str
    tensor: nn.Parameter
    unit: Unit
    offset: int  # elements from the start of the unit's planes
    numel: int
    size: torch.Size
    stride: tuple[int, ...]
    index: int  # over the whole model, in order of named_parameters()


@dataclass(eq=False)
class Unit:
    """Parameters of one block with one dtype, either all updated by the optimizer or all frozen."""

    name: str
    block: Block
    dtype: torch.dtype
    updated: bool
    params: list[Param] = field(default_factory=list)
    elements: int = 0  # padded so that every plane is a multiple of 4 KiB
    slot_offset: int = 0  # bytes from the start of the block's slot
    session_id: int = -1  # of the C++ session; -1 for frozen units

    @property
    def weight_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(eq=False)
class Block:
    """What is fetched and evicted together.

    ``pinned``: used from several places (tied weights), so it never leaves memory. What is reckoned
    from its units holds once it has all of them.
    """

    name: str
    index: int
    pinned: bool = False
    units: list[Unit] = field(default_factory=list)
    # where uses of its parameters begin and end
    modules: list[nn.Module] = field(default_factory=list)

    @cached_property
    def slot_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    @property
    def params(self) -> Iterator[Param]:
        return (param for unit in self.units for param in unit.params)

    @cached_property
    def updated_units(self) -> list[Unit]:
        return [unit for unit in self.units if unit.updated]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: its shard of a distributed one, else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(here: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`here` as what this process has of a tensor that is distributed as `param` is; itself where
    that is not distributed."""
    if not hasattr(param, "to_local"):
        return here
    return type(param.data).from_local(
        here,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the outermost module lists (and Sequentials) that own parameters: the repeated
    layers."""
    found: list[tuple[str, nn.Module]] = []

    def walk(prefix: str, module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            members = [
                (name, child)
                for name, child in module.named_children()
                if any(True for _ in child.parameters())
            ]
            if len(members) >= 2:
                found.extend((f"{prefix}{name}", child) for name, child in members)
                return
        for name, child in module.named_children():
            walk(f"{prefix}{name}.", child)

    walk("", model)
    return found


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    return [layer for _, layer in _repeated(model)]


def _users(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(module, name, user): `user` reads the parameters of `module`, which lies inside it, without
    calling that."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            yield from ((inner, name, module) for inner in module.modules())
        yield from (
            (child, name, module)
            for child in module.children()
            if isinstance(child, (nn.ParameterList, nn.ParameterDict))
        )


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Each parameter with every (qualified name, owning module) it is reachable by; tied parameters
    have several."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None:
                continue
            qualified = f"{prefix}.{name}" if prefix else name
            places = owners.setdefault(param, [])
            if all(known is not module or known_name != qualified for known_name, known in places):
                places.append((qualified, module))
    return owners


def _check_dtype(name: str, param: nn.Parameter, updated: bool) -> None:
    if updated and param.dtype not in (torch.bfloat16, torch.float32):
        raise InvalidArgument(
            f"parameter {name} is {param.dtype}: Stoker trains bfloat16 (with an exact float32"
            " master) and float32 weights; convert the model first"
        )
    if param.is_sparse or param.layout != torch.strided:
        raise InvalidArgument(
            f"parameter {name} has the layout {param.layout}, but only dense (strided) parameters"
            " can be offloaded; convert it with to_dense()"
        )


def _dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own stride where it fills its memory without gaps, else the contiguous
    one."""
    if (away := getattr(param, "_stoker_away", None)) is not None:
        return away.stride  # it shows a placeholder (absent.py)
    here = local(param)
    if fills(here):
        return tuple(here.stride())
    return tuple(torch.empty(here.shape, device="meta").stride())


def fills(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _extent(tensor: torch.Tensor) -> int:
    """Elements from its first to behind its last in memory."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.arange(_extent(tensor)).as_strided(tensor.shape, tensor.stride())
    return places.flatten() * tensor.element_size() + tensor.data_ptr()


def _check_memory(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """InvalidArgument where elements lie in the same memory: in a store each has a place of its
    own, and an update of one would no longer change the other."""
    there = []
    for name, param in named:
        here = local(param).detach()
        if here.is_meta or hasattr(param, "_stoker_away") or not here.numel():
            continue
        if _extent(here) < here.numel():
            raise InvalidArgument(
                f"elements of {name} share memory (it was expanded, perhaps), so they cannot "
                f"have separate values in a store; make it again with {name}.clone()"
            )
        begin = here.data_ptr()
        there.append(
            (str(here.device), begin, begin + _extent(here) * here.element_size(), name, here)
        )
    there.sort(key=lambda each: each[:3])
    last: dict[str, tuple] = {}  # by device, the one that reaches furthest
    for each in there:
        before = last.get(each[0])
        if before is not None and each[1] < before[2]:
            dense = fills(each[4]) and fills(before[4])
            if dense or torch.isin(_addresses(each[4]), _addresses(before[4])).any():
                raise InvalidArgument(
                    f"{before[3]} and {each[3]} are two parameters over the same memory; tie them"
                    " (give both modules one nn.Parameter), or clone one of them"
                )
        if before is None or each[2] > before[2]:
            last[each[0]] = each


def partition(model: nn.Module, optimized: Iterable[nn.Parameter], group: int = 0) -> list[Block]:
    """Cuts `model` into blocks in order of definition.

    `optimized`: the parameters the optimizer holds; those of them that require a gradient are
    updated, all others are frozen.
    `group`: elements that share a scale in their moments' planes, if they do; two parameters share
    none. Raises InvalidArgument for dtypes and layouts that cannot be offloaded, and for shared
    memory.
    """
    optimized_ids = {id(param) for param in optimized}
    align = max(PARAM_ALIGN, group)
    owners = _owners(model)
    _check_memory((plain(places[0][0]), param) for param, places in owners.items())
    repeated = _repeated(model)
    home: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, layer in repeated:
        for module in layer.modules():
            home.setdefault(module, (name, layer))
    for inner, name, user in _users(model):
        home.setdefault(inner, home.get(user, (name, user)))

    blocks: dict[str, Block] = {}
    for index, (param, places) in enumerate(owners.items()):
        name = plain(places[0][0])
        homes = dict.fromkeys(  # in this order: a set has another one in each process
            home.get(module, (qualified.rpartition(".")[0], module)) for qualified, module in places
        )
        shared = len({id(layer) for _, layer in homes}) > 1
        block_name, layer = ("shared", None) if shared else next(iter(homes))
        block_name = plain(block_name) or "root"
        block = blocks.setdefault(block_name, Block(block_name, len(blocks), pinned=shared))
        updated = id(param) in optimized_ids and param.requires_grad
        _check_dtype(name, param, updated)
        _append(block, name, param, updated, _dense_stride(param), index, align)
        if layer is not None:
            for module in [layer, *(module for _, module in places)]:
                if module not in block.modules:
                    block.modules.append(module)

    _pad(blocks.values())
    return list(blocks.values())


def blocks_of_shapes(shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> list[Block]:
    """Blocks as `partition` would cut a model with these parameters, as far as names tell: what
    stands under the first number of a name is a repeated layer, any other module a block of its
    own. For planning; there is no model, so nothing is tied.
    """
    blocks: dict[str, Block] = {}
    for index, (name, shape, dtype) in enumerate(shapes):
        words = name.split(".")
        layer = next((i for i, word in enumerate(words) if word.isdigit()), len(words) - 2)
        block_name = ".".join(words[: layer + 1]) or "root"
        block = blocks.setdefault(block_name, Block(block_name, len(blocks)))
        param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        _append(block, name, param, True, tuple(param.stride()), index)
    _pad(blocks.values())
    return list(blocks.values())


def _append(
    block: Block,
    name: str,
    param: nn.Parameter,
    updated: bool,
    stride: tuple[int, ...],
    index: int,
    align: int = PARAM_ALIGN,
) -> None:
    """Gives the parameter its place in the block."""
    kind = str(param.dtype).removeprefix("torch.") + ("" if updated else ".frozen")
    unit = next((u for u in block.units if u.name == f"{block.name}/{kind}"), None)
    if unit is None:
        unit = Unit(f"{block.name}/{kind}", block, param.dtype, updated)
        block.units.append(unit)
    here = local(param)
    unit.params.append(
        Param(name, param, unit, unit.elements, here.numel(), here.shape, stride, index)
    )
    unit.elements += -(-here.numel() // align) * align


def _pad(blocks: Iterable[Block]) -> None:
    """Units get whole pages, and their places in the slots of their blocks."""
    for block in blocks:
        offset = 0
        for unit in block.units:
            # 2048 elements are 4 KiB of a 2-byte plane; a frozen plane may have elements of one
            # byte
            step = PLANE_ALIGN // 2 if unit.updated else PLANE_ALIGN
            unit.elements = -(-max(unit.elements, 1) // step) * step
            unit.slot_offset = offset
            offset += unit.weight_bytes


def signature(blocks: list[Block]) -> dict:
    """What a store must have been made with to belong to this model: names, shapes, dtypes and
    places (JSON-able)."""
    return {
        "blocks": [
            {
                "name": unit.name,
                "elements": unit.elements,
                "dtype": str(unit.dtype).removeprefix("torch."),
                "updated": unit.updated,
                "params": [[p.name, list(p.size), list(p.stride), p.offset] for p in unit.params],
            }
            for block in blocks
            for unit in block.units
        ]
    }


def difference(stored: dict, current: dict) -> str | None:
    """The first difference between two signatures, as part of a sentence; None if they are
    equal."""
    theirs = {
        (p[0]): (tuple(p[1]), b["dtype"], b["updated"])
        for b in stored["blocks"]
        for p in b["params"]
    }
    ours = {
        (p[0]): (tuple(p[1]), b["dtype"], b["updated"])
        for b in current["blocks"]
        for p in b["params"]
    }
    for name in theirs.keys() - ours.keys():
        return f"the store has a parameter {name}, which the model lacks"
    for name, what in ours.items():
        if name not in theirs:
            return f"the model has a parameter {name}, which the store lacks"
        if theirs[name] != what:
            describe = lambda w: f"{list(w[0])} {w[1]}{'' if w[2] else ' frozen'}"
            return (
                f"parameter {name} is {describe(what)} in the model and {describe(theirs[name])} in"
                " the store"
            )
    return None if stored["blocks"] == current["blocks"] else "the blocks are cut differently"
