"""build(): constructs a model that does not fit in memory, bit-equal to ordinary construction.

The real constructor runs. Parameters are counted as modules register them; when they exceed the budget, those that nothing
aliases are written to the store and replaced by placeholders. A torch function that touches a placeholder (an initialiser in
a later `apply`, say) finds the real bytes paged in again.
"""

from __future__ import annotations

import ctypes
import glob
import os
import threading
from collections import OrderedDict
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from stoker.errors import InvalidArgument
from stoker.offload.blocks import Block, Param, partition
from stoker.offload.budget import naming_the_smallest, open_runtime
from stoker.offload.planes import Algorithm, Runtime, parse_bytes, put, read_range, store_capacity

_BUILT: dict[int, Built] = {}


def build(factory: Callable[[], nn.Module], *, seed: int | None = None, store: str | os.PathLike, dram: int | str, snapshots: int = 0) -> nn.Module:
    """Runs `factory` with at most `dram` bytes of parameters in memory; the rest lies in `store`. Hand the model and an
    optimizer over its parameters to stoker.offload(..., store=the same store) next.

    factory: makes the model on the CPU; it is run twice, first on the meta device for sizes. seed: torch.manual_seed before the
    real run. snapshots: as for stoker.offload(). The weights are those that factory() gives in ordinary memory, bit for bit. Where the
    store already holds a run (to be resumed) nothing is written.
    """
    dram_bytes = parse_bytes("dram", dram)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        sizes = partition(factory(), [])
    for block in sizes:
        for unit in block.units:
            unit.updated = unit.dtype in (torch.bfloat16, torch.float32)
    largest = Algorithm("adamw", True, True)  # the optimizer is not known yet
    capacity = store_capacity(sizes, largest, snapshots) + sum(block.slot_bytes for block in sizes)
    runtime = open_runtime(os.fspath(store), dram_bytes, capacity, sizes, largest)
    if seed is not None:
        torch.manual_seed(seed)
    try:
        built = Built(runtime, keep=not runtime.holds("meta/model"))
        with built:
            model = factory()
    except BaseException as error:
        runtime.store.close()  # a second try must find the store free
        with naming_the_smallest(runtime.path, dram_bytes, sizes, largest):
            raise error
    _BUILT[id(model)] = built
    return model


class Built(TorchFunctionMode):
    """The parameters of a model under construction: which are in memory, which in the store."""

    def __init__(self, runtime: Runtime, keep: bool) -> None:
        super().__init__()
        self.runtime = runtime
        self.keep = keep
        self.limit = runtime.dram_bytes // 2
        self.resident: OrderedDict[int, nn.Parameter] = OrderedDict()  # oldest use first
        self.paged: dict[int, tuple[nn.Parameter, str, tuple]] = {}  # id -> (parameter, key, (size, stride))
        self.written: set[str] = set()
        self._busy = False
        self._freed = 0  # bytes since the last trim

    @staticmethod
    def of(model: nn.Module) -> Built | None:
        return _BUILT.pop(id(model), None)

    def __enter__(self) -> Built:
        self._hook = register_module_parameter_registration_hook(self._registered)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hook.remove()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._busy and self.paged:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if id(each) in self.paged:
                        self._page_in(each)
        return func(*args, **kwargs)

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or id(param) in self.resident or id(param) in self.paged or param.is_meta:
            return
        self.resident[id(param)] = param
        self._shrink(keep=param)

    def _shrink(self, keep: nn.Parameter | None) -> None:
        size = lambda param: param.numel() * param.dtype.itemsize
        held = sum(map(size, self.resident.values()))  # anew each time: factories cast and resize what they made
        for param in list(self.resident.values()):
            if held <= self.limit:
                break
            # one use is the parameter's own; more means that somebody still holds a view and may write through it
            if param is not keep and torch._C._storage_Use_Count(param.untyped_storage()._cdata) <= 2:
                held -= size(param)
                self._page_out(param)
                self._freed += size(param)
        if self._freed > self.limit // 4:
            trim()
            self._freed = 0

    def _page_out(self, param: nn.Parameter) -> None:
        self._busy = True
        try:
            key = f"build/{id(param)}"
            size = param.numel() * param.dtype.itemsize
            place = (param.size(), param.stride())
            if self.keep and size:
                txn = self.runtime.store.begin()
                put(txn, key, torch.as_strided(param.detach(), (param.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
                txn.commit("deferred").wait()
                self.written.add(key)
            param.data = torch.empty((), dtype=param.dtype).expand(param.size())
            self.paged[id(param)] = (param, key, place)
            del self.resident[id(param)]
        finally:
            self._busy = False

    def _page_in(self, param: nn.Parameter) -> None:
        self._busy = True
        try:
            _, key, _ = self.paged[id(param)]
            param.data = self._load(param)
            del self.paged[id(param)]
            self.resident[id(param)] = param
        finally:
            self._busy = False
        self._shrink(keep=param)

    def _load(self, param: nn.Parameter) -> torch.Tensor:
        _, key, (size, stride) = self.paged[id(param)]
        out = torch.empty_strided(size, stride, dtype=param.dtype, device="cpu")
        if key in self.written and param.numel():
            flat = torch.frombuffer(read_range(self.runtime.store, key, 0, param.numel() * param.dtype.itemsize), dtype=param.dtype)
            torch.as_strided(out, (param.numel(),), (1,)).copy_(flat)
        return out

    # -- for offload() -------------------------------------------------------------------------------------------------

    def page_all(self) -> None:
        """Everything to the store: the arena is about to take the budget."""
        self.limit = 0
        self._shrink(keep=None)

    def value_of(self, param: Param) -> torch.Tensor:
        tensor = param.tensor
        return self._load(tensor) if id(tensor) in self.paged else tensor.detach()

    def keys(self) -> list[str]:
        return sorted(self.written)


def keep_heap() -> None:
    """Lets glibc reuse what gradients free within a step instead of mapping fresh pages for each: first touch costs more than the
    arithmetic (0.4 GB/s on a virtual machine). The heap still never grows beyond what is in use at one moment."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 32 << 20)  # the largest glibc takes
        libc.mallopt(m_trim_threshold, 512 << 20)


def sleep_between_operators() -> None:
    """Lets torch's OpenMP threads sleep when they have nothing to do: kernels, checksums and the disk's thread need the cores.

    GNU OpenMP spins for milliseconds after each operator for as long as it counts no more threads than cores, and hardly at all beyond that.
    A thread with a parallel region of its own raises the count for as long as it lives; ours lives as long as the process and only waits.
    """
    global _sleeper
    if _sleeper is None and torch.get_num_threads() > 1:
        _sleeper = threading.Thread(target=_have_a_region, name="stoker-openmp", daemon=True)
        _sleeper.start()


def _have_a_region() -> None:
    torch.ones(1 << 18, device="cpu").add_(1.0)
    threading.Event().wait()


_sleeper: threading.Thread | None = None


def trim() -> None:
    """Hands freed heap memory back to the kernel: glibc keeps what small tensors freed, and the cap counts it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class Trimmer:
    """Calls trim() now and then: once so many bytes were freed that the heap, being fragmented, may not use again by itself."""

    BYTES = 64 << 20

    def __init__(self) -> None:
        self._freed = 0

    def freed(self, size: int) -> None:
        self._freed += size
        if self._freed >= self.BYTES:
            self._freed = 0
            trim()


def leave_meta(blocks: list[Block]) -> None:
    """Parameters on the meta device become ones of the CPU that hold nothing yet; who has them keeps them."""
    for param in (param for block in blocks for param in block.params):
        if param.tensor.is_meta:
            nothing = torch.empty((), dtype=param.tensor.dtype).expand(param.size)
            torch.utils.swap_tensors(param.tensor, nn.Parameter(nothing, param.tensor.requires_grad))
            param.tensor._stoker_empty = param.stride  # until its weights are in a store


def leave_meta_buffers(model: nn.Module, folder: str | os.PathLike | None, recorded: bool) -> None:
    """Buffers on the meta device are read from the folder, or (`recorded`) will be from the run in the store."""
    where, path = stored_tensors(folder) if folder is not None else ({}, "a folder of weights")
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is None or not buffer.is_meta:
                continue
            if recorded:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            elif full in where:
                module._buffers[name] = where[full].get_tensor(full).to(buffer.dtype)
            else:
                raise InvalidArgument(
                    f"buffer {full} is on the meta device and its values are not in {path}; make the model with its buffers, as "
                    "accelerate.init_empty_weights(include_buffers=False) does"
                )


def stored_tensors(folder: str | os.PathLike) -> tuple[dict[str, Any], str]:
    """The safetensors file of each name in a folder (or file), and the path of that."""
    from safetensors import safe_open

    path = os.fspath(folder)
    files = sorted(glob.glob(os.path.join(path, "*.safetensors"))) if os.path.isdir(path) else [path]
    opened = [safe_open(file, framework="pt") for file in files]
    where = {name: each for each in opened for name in each.keys()}
    if not where:
        raise InvalidArgument(f"{path} holds no safetensors files")
    return where, path


def stored_weights(folder: str | os.PathLike) -> Callable[[Param], torch.Tensor]:
    """Reads parameters by name out of a folder of safetensors files."""
    where, path = stored_tensors(folder)

    def value_of(param: Param) -> torch.Tensor:
        if param.name not in where:
            raise InvalidArgument(f"{path} has no tensor {param.name}, which the model needs; where it should be tied to another weight, tie it first (model.tie_weights())")
        value = where[param.name].get_tensor(param.name)
        if value.shape != param.size:
            raise InvalidArgument(f"tensor {param.name} in {path} has shape {list(value.shape)}; the model needs {list(param.size)}")
        return value

    return value_of
