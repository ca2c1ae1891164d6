"""torch.compile: block by block it is one graph for all of them, bit-equal; CUDA graphs are
refused.

With the backend aot_eager: dynamo, AOTAutograd and its saved tensors as ever, without a minute of
C++ compilation. The soak runs inductor.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reference
import stoker
from models import Tiny, batch, loss_of
from stoker import errors
from test_offload_features import (
    TIGHT,
    adamw,
    assert_same,
    offload,
    weights,
)  # noqa: F401 (offload is a fixture)

counters = torch._dynamo.utils.counters
ROOM = "32MiB"  # for all weights


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(**options) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**{"layers": 3, "width": 128, **options})


def compile_blocks(model: Tiny, how: str, **options) -> Tiny:
    for index, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(**options)
        elif how == "wrapped":
            model.layers[index] = torch.compile(layer, **options)
    return model


def run(model, opt, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model.train(), batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(model.eval(), batch(9)).item())
    return losses


def by_plain_name(state: dict) -> dict:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def compare(offload, how: str, backend: str, **options) -> None:
    compiling = {"backend": backend, "fullgraph": True}
    control = compile_blocks(make(**options), how, **compiling)
    expected = run(control, reference.ReferenceOptimizer(adamw(control)))
    torch._dynamo.reset()
    counters.clear()
    model, opt = offload(compile_blocks(make(**options), how, **compiling), dram=TIGHT)
    assert run(model, opt) == expected
    assert_same(weights(model), weights(control))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation, for all blocks
    ledger = opt.ledger.summary()
    assert ledger["redone"] == 0 and ledger["read_bytes"]["weights"] > sum(
        block.slot_bytes for block in opt._session.blocks
    )


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_each_block_is_a_graph(offload, how):
    compare(offload, how, "aot_eager")


def test_checkpointed_segments_of_graphs(offload):
    compare(offload, "in place", "aot_eager", segments=2)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_each_block_is_a_graph_of_inductor(offload, how):
    compare(offload, how, "inductor")


class Root(nn.Module):
    """Has a parameter of its own beside its layers: the block of the whole model encloses the
    others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 1.5))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale))
        return x


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_whole_model_is_cut_and_right(offload, when):
    def train(model, opt):
        losses = []
        for step in range(2):
            loss = (
                model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step)))
                .square()
                .mean()
            )
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    control = Root()
    expected = train(control, reference.ReferenceOptimizer(adamw(control)))
    torch.manual_seed(0)
    model = Root()
    if when == "before":
        model.compile(backend="eager")
    model, opt = offload(model)
    assert (
        train(torch.compile(model, backend="eager") if when == "after" else model, opt) == expected
    )
    assert_same(weights(model), weights(control))


def test_a_run_goes_on_compiled_or_not(offload):
    control = make()
    theirs = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(compile_blocks(make(), "wrapped", backend="aot_eager"), dram=ROOM)
    first = run(control, theirs)
    assert run(model, opt) == pytest.approx(first, abs=1e-5)
    saved = by_plain_name(weights(model))
    opt.close()
    model, opt = offload(make(), resume=True, dram=ROOM)
    assert_same(weights(model), saved)
    assert opt.step_count == 3
    opt.close()
    model, opt = offload(
        compile_blocks(make(), "in place", backend="aot_eager"), resume=True, dram=ROOM
    )
    assert_same(weights(model), saved)
    run(model, opt)


def test_deep_copy_of_a_compiled_block_is_an_ordinary_block(offload):
    import copy

    model, opt = offload(compile_blocks(make(), "in place", backend="aot_eager"), dram=ROOM)
    twin = copy.deepcopy(model)
    tokens = batch(0)
    assert loss_of(twin.eval(), tokens).item() == pytest.approx(
        loss_of(model.eval(), tokens).item(), abs=1e-5
    )
    assert all(layer._compiled_call_impl is None for layer in twin.layers)
    opt.close()
    # left as it was
    assert type(model.layers[0]._compiled_call_impl).__module__ != "stoker.offload.model.compiled"


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"backend": "cudagraphs"},
        {"options": {"triton.cudagraphs": True}},
    ],
    ids=str,
)
def test_cuda_graphs_are_refused(offload, how):
    for compiled in (
        compile_blocks(make(), "in place", **how),
        compile_blocks(make(), "wrapped", **how),
        torch.compile(make(), **how),
    ):
        with pytest.raises(
            errors.InvalidArgument, match="compiled with CUDA graphs.*Compile its blocks one by one"
        ):
            offload(compiled, dram=ROOM)
    model, opt = offload(make(), dram=ROOM)  # what was refused took nothing
    with pytest.raises(
        errors.InvalidArgument, match="compiled with CUDA graphs.*Compile its blocks one by one"
    ):
        loss_of(torch.compile(model, **how), batch(0))
    assert len(run(model, opt)) == 4


def test_modes_without_cuda_graphs_are_not_refused(tmp_path):
    model = compile_blocks(make(), "in place", mode="max-autotune-no-cudagraphs")
    model, opt = stoker.offload(model, adamw(model), store=tmp_path / "store", dram=ROOM)
    opt.close()
