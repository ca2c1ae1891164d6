"""Recompute: a layer keeps its inputs, and what else it would save is computed again in backward,
by torch's own checkpoint().

A layer is one that repeats (blocks.py). The second time it runs under our hooks like the first,
with the random state and the autocast of then. The buffers that it changed (running means) are as
they were before it. With "recompute" every layer does so; with "auto" those for which the plan says
that the disk would take longer than they do.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from stoker._core import human_bytes
from stoker.errors import StokerError
from stoker.offload.model.blocks import repeated_layers
from stoker.offload.model.compiled import in_place
from stoker.offload.observe.heap import trim
from stoker.offload.observe.ledger import Waits

if TYPE_CHECKING:
    from stoker.offload.activations.activations import Activations
    from stoker.offload.hooks.hooks import Hooks
    from stoker.offload.model.blocks import Block


class Recomputed:
    """Stands in for a layer's forward (or for what module.compile() made of it)."""

    def __init__(
        self, module: nn.Module, block: Block, waiting: Waits, on: bool, hooks: Callable[[], Hooks]
    ) -> None:
        """`hooks`: the model's, which go around this and so are made after it."""
        self.block, self.on = block, on
        self._hooks = hooks
        self.seconds = float("inf")  # the shortest forward, without what it waited for
        self.input_bytes = 0
        self._module, self._waiting = module, waiting
        self._own = "forward" in vars(module)  # not its class's
        if in_place(module):
            self._forward, module._compiled_call_impl = module._compiled_call_impl, self
        else:
            self._forward, vars(module)["forward"] = module.forward, self

    def remove(self) -> None:
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own:
                vars(self._module)["forward"] = self._forward
        elif self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._forward

    def __deepcopy__(self, memo: dict) -> Callable:
        return copy.deepcopy(self._forward, memo)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if (
            not torch.is_grad_enabled()
            or not self._hooks().saves_here()
            or torch._C._current_graph_task_id() != -1
        ):
            return self._forward(*args, **named)  # nothing is saved, or somebody else sees to it
        if _fills_a_cache(args, named):
            if self.on and self._module.training:
                warnings.warn(
                    f"layer {self.block.name} is not recomputed, because it fills a cache of "
                    f"keys and values; switch the cache off for training (use_cache=False)",
                    stacklevel=2,
                )
            return self._forward(*args, **named)
        # Tensors are checkpoint()'s own arguments, by whatever name they come. Lists and dicts are
        # not taken apart: the layer may add to them.
        flat, spec = tree_flatten(
            (args, named), is_leaf=lambda value: value is not named and not isinstance(value, tuple)
        )
        if self.on:
            trim()  # what the layer before it computed and freed
            before = Buffers(self._module)
            return checkpoint(
                lambda *inputs: self._run(before, *tree_unflatten(inputs, spec)),
                *flat,
                use_reentrant=False,
            )
        self.input_bytes = _bytes_of(flat)
        started, waited = time.perf_counter(), sum(self._waiting.seconds.values())
        out = self._forward(*args, **named)
        self.seconds = min(
            self.seconds,
            time.perf_counter() - started - (sum(self._waiting.seconds.values()) - waited),
        )
        return out

    def _run(self, before: Buffers, args: tuple, named: dict) -> Any:
        again = torch._C._current_graph_task_id() != -1
        if again:
            trim()
        with before.installed() if again else before.noted():
            self._hooks().enter(self._module, self.block)
            out = None
            try:
                out = self._forward(*args, **named)
                return out
            finally:
                self._hooks().exit(self._module, out)


class Buffers:
    """Buffers that a layer's first run changes (running means, a counter), as they were before it:
    what it computed may depend on them."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._before: dict[tuple[nn.Module, str], torch.Tensor | None] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """The first run."""
        clones = _clones(
            {
                (each, name): buffer
                for each in self._modules
                for name, buffer in each._buffers.items()
            }
        )
        yield
        self._before = {
            (each, name): was
            for (each, name), was in clones.items()
            if not _same(was, each._buffers.get(name))
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A later run. It is given copies: what it saves of them must outlive it, and what is the
        model's stays as it is."""
        present = [(each, dict(each._buffers)) for each in self._modules]
        for (each, name), was in _clones(self._before).items():
            each._buffers[name] = was
        try:
            yield
        finally:
            for each, buffers in present:
                each._buffers.clear()
                each._buffers.update(buffers)


def _clones(buffers: dict[Any, torch.Tensor | None]) -> dict[Any, torch.Tensor | None]:
    """One of each, as two modules may share one."""
    made = {
        id(each): each.detach().clone().requires_grad_(each.requires_grad)
        for each in buffers.values()
        if each is not None
    }
    return {place: made.get(id(each)) for place, each in buffers.items()}


def _same(was: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Whether the bytes are; False where that cannot be told. (Versions do not tell: batch_norm
    does not count what it changes.)"""
    if was is None or now is None:
        return was is now
    if any(
        type(each) is not torch.Tensor
        or each.layout is not torch.strided
        or each.is_quantized
        or each.is_meta
        for each in (was, now)
    ):
        return False
    if (was.shape, was.dtype, was.device) != (now.shape, now.dtype, now.device):
        return False
    return torch.equal(_bits(was), _bits(now))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
    )


def layers_of(
    model: nn.Module, blocks: list[Block], waiting: Waits, on: bool, hooks: Callable[[], Hooks]
) -> list[Recomputed]:
    """Every repeated layer that is a block."""
    homes = {module: block for block in blocks for module in block.modules}
    return [
        Recomputed(layer, homes[layer], waiting, on, hooks)
        for layer in repeated_layers(model)
        if layer in homes
    ]


def _bytes_of(values: list) -> int:
    """Of the storages of the tensors among them."""
    storages = [
        value.untyped_storage()
        for value in values
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _fills_a_cache(args: tuple, named: dict) -> bool:
    """Whether the layer is given keys and values to add to: twice would be once too often."""
    return any(type(value).__name__.endswith("Cache") for value in (*args, *named.values()))


class Auto:
    """Chooses between the disk and computing again, layer by layer, after two steps in which
    everything went to the disk."""

    MEASURED = 2

    def __init__(
        self, layers: list[Recomputed], activations: Activations, event: Callable[..., None]
    ) -> None:
        self._layers, self._activations, self._event = layers, activations, event
        self._last: dict[str, Any] | None = None
        self._steps = self._calls = 0  # steps closed, and forwards since the last of them

    def call(self, last: dict[str, Any] | None) -> None:
        """A training forward begins. `last`: the ledger's newest row."""
        if last is not None and last is not self._last:
            self._last, self._steps, calls, self._calls = last, self._steps + 1, self._calls, 0
            if self._steps == self.MEASURED + 1:  # the first is no measure
                self._try(last, calls)
        self._calls += 1

    def _try(self, last: dict[str, Any], calls: int) -> None:
        try:
            rates = self._activations.rates()
        except (StokerError, OSError) as error:
            self._event("activations", problem=str(error))
            warnings.warn(
                f"the disk's speed could not be measured ({error}), so"
                ' activations="auto" recomputes nothing; training goes on',
                stacklevel=2,
            )
            return
        self._choose(*rates, last, calls)

    def _choose(self, read: float, write: float, last: dict[str, Any], calls: int) -> None:
        """`calls`: the forwards of a step."""
        saved = self._activations.saved_bytes
        disk = sum(last["read_bytes"].values()) / read + sum(last["written_bytes"].values()) / write
        costs = []
        for layer in self._layers:
            if layer.seconds == float("inf"):
                # it never ran so that it could be computed again: it fills a cache, or the model
                # checkpoints it
                continue
            spared = calls * max(0, saved.get(layer.block.name, 0) - layer.input_bytes)
            costs.append(
                Cost(
                    layer.block.name, spared, spared / read + spared / write, calls * layer.seconds
                )
            )
        chosen = choose(costs, disk, last["compute_seconds"])
        layers = {layer.block.name: layer for layer in self._layers}
        for cost in costs:
            layer = layers[cost.name]
            layer.on = cost.name in chosen
            why = chosen.get(cost.name) or (
                f"{human_bytes(cost.bytes)} take the disk {cost.transfer_seconds:.3g} s, computing"
                f" them again {cost.compute_seconds:.3g} s, and a step {disk:.3g} s of the disk"
                f" beside {last['compute_seconds']:.3g} s of computing"
            )
            self._activations.choices[cost.name] = "recompute" if layer.on else "disk"
            self._event(
                "activations",
                block=cost.name,
                choice="recompute" if layer.on else "disk",
                reason=why,
            )


@dataclass(frozen=True)
class Cost:
    """What a layer's activations cost in a step: on the disk, and computed again."""

    name: str
    bytes: int
    transfer_seconds: float
    compute_seconds: float


def choose(layers: Iterable[Cost], disk: float, compute: float) -> dict[str, str]:
    """The layers to be computed again, each with the reason. `disk`, `compute`: seconds of a step
    if all go to the disk. The disk works beside the computation, so a step takes as long as the
    longer of the two: layers that save the disk most for their computation come first, as long as
    that becomes shorter."""
    chosen: dict[str, str] = {}
    for layer in sorted(
        layers,
        key=lambda layer: layer.transfer_seconds / max(layer.compute_seconds, 1e-9),
        reverse=True,
    ):
        after = max(disk - layer.transfer_seconds, compute + layer.compute_seconds)
        if layer.transfer_seconds <= 0 or after >= max(disk, compute):
            continue
        chosen[layer.name] = (
            f"{layer.compute_seconds:.3g} s of computing spare the disk {human_bytes(layer.bytes)}"
            f" or {layer.transfer_seconds:.3g} s, while a step takes it {disk:.3g} s beside"
            f" {compute:.3g} s of computing"
        )
        disk, compute = disk - layer.transfer_seconds, compute + layer.compute_seconds
    return chosen
