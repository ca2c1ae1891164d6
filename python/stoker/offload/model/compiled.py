"""torch.compile and the hooks: a compiled module is entered and left outside of what was compiled.

A compiled block is one graph. Its weights come before it runs and may go after it, so hooks stand
around it and none inside. Compiled layers of one kind then share one graph. Anything else that is
compiled (a whole model, or a block after stoker.offload()) is cut into graphs at each hook: right,
but slow. CUDA graphs read weights where they were when they were recorded, and are refused.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from stoker.errors import InvalidArgument

CUT = (
    "stoker.offload() moves weights before and after each block; compile the blocks one by one"
    " (`layer.compile()`) before stoker.offload()"
)


def in_place(module: nn.Module) -> bool:
    """Whether module.compile() was called."""
    return module._compiled_call_impl is not None


def wrapped(module: nn.Module) -> bool:
    """Whether it is what torch.compile(module) returned."""
    return "dynamo_ctx" in vars(module)


def compiled(module: nn.Module) -> bool:
    return in_place(module) or wrapped(module)


def plain(name: str) -> str:
    """A name as it is without torch.compile(module), so that a run may be taken up with or without
    it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def refuse_cuda_graphs(model: nn.Module) -> None:
    """InvalidArgument for a model that is, or has modules that are, compiled so."""
    for name, module in model.named_modules():
        if in_place(module):
            _refuse(_context_of(module._compiled_call_impl), name)
        elif wrapped(module):
            _refuse(module.dynamo_ctx, name)


def refuse_cuda_graphs_of_callers() -> None:
    """The same from within a call, for what was compiled after stoker.offload()."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            _refuse(frame.f_locals.get("self"), "")
        frame = frame.f_back


def _context_of(function: Any) -> Any:
    """What torch.compile() compiles the function in: its closure's `self`."""
    closure = (
        dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        if hasattr(function, "__code__")
        else {}
    )
    return closure["self"].cell_contents if "self" in closure else None


def _refuse(context: Any, name: str) -> None:
    config = getattr(context, "compiler_config", None) or {}
    backend = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    if config.get("triton.cudagraphs") or getattr(backend, "compiler_name", "") == "cudagraphs":
        what = f"module {name}" if name else "this model"
        raise InvalidArgument(
            f"{what} is compiled with CUDA graphs, which need weights at fixed addresses. "
            f"Offloaded weights move. Compile its blocks one by one before stoker.offload(),"
            ' without mode="reduce-overhead" or "max-autotune"'
        )
