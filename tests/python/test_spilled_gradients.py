"""Gradients that do not fit in memory: p.grad behaves as any tensor does, and costs the bytes that
it has to."""

from __future__ import annotations

import copy
import gc
import io
import random
import sys
import threading
import warnings

import pytest
import torch

import reference
import stoker
from fake_link import FakeLink
from models import Tiny, batch, loss_of
from stoker import errors
from stoker.offload.model.blocks import partition
from stoker.offload.storage.scratch import Scratch
from stoker.offload.gradients.spilled import SpilledGradient
from stoker.offload.division.spill import PLACES, choose, least, memory

SPILLING = "5MiB"  # the gradients of a Tiny do not fit into this


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny().to(torch.bfloat16)


@pytest.fixture
def pair(tmp_path, request):
    """(un-offloaded model, its reference optimizer, the same with spilled gradients, its
    optimizer)"""
    policy = getattr(request, "param", "speculate")
    control, model = tiny(), tiny()
    expected = reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3))
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        store=f"{tmp_path}/s",
        dram=SPILLING,
        policy=policy,
    )
    yield control, expected, model, opt
    opt.close()


def backward(pair, step: int = 0, accumulate: int = 1) -> None:
    for model in (pair[0], pair[2]):
        for micro in range(accumulate):
            loss_of(model, batch(step, micro)).backward()


def same_gradients(pair) -> None:
    for (name, theirs), ours in zip(pair[0].named_parameters(), pair[2].parameters()):
        assert torch.equal(theirs.grad, ours.grad.clone()), name
        assert (theirs.grad.isnan() == ours.grad.isnan()).all()


def same_weights(pair) -> None:
    ours, theirs = pair[2].state_dict(), pair[0].state_dict()
    assert all(
        torch.allclose(ours[name], value, rtol=0, atol=0, equal_nan=True)
        for name, value in theirs.items()
        if name != "seen"
    )


def step(pair) -> None:
    for optimizer in (pair[1], pair[3]):
        optimizer.step()
        optimizer.zero_grad()


def gradients(model) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters()]


def spilled_bytes(opt) -> int:
    return opt._session.planes.layout.spilled_bytes


# -- any operation means what it means on any tensor


def _noise(model):
    torch.manual_seed(3)
    for grad in gradients(model):
        grad.add_(torch.randn_like(grad), alpha=0.1)


def _scaler(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.unscale_(optimizer)
    return list(scaler._found_inf_per_device(optimizer).values())


def _scaler_finds_an_inf(model):
    gradients(model)[5].view(-1)[3] = float("inf")
    return _scaler(model)


def _through_views(model):
    for grad in gradients(model):
        grad.detach().mul_(2)
        grad.data.view(-1)[0] = 5.0
        grad.t().mul_(0.5) if grad.dim() == 2 else grad[1:].neg_()
        for part in grad.flatten().chunk(3):
            part.add_(part.clone())
        grad.unsqueeze(0).transpose(0, -1).clamp_(-1, 1)
        grad.view(torch.int16)[..., 0] = 7


def _out(model):
    grads = gradients(model)
    torch.mul(grads[2].clone(), 3.0, out=grads[2])
    torch.add(grads[3].clone(), 1.0, out=grads[3].view(-1)[: grads[3].numel()].view_as(grads[3]))
    return [torch.sub(grads[2], 1.0)]


def _assigned(model):
    for param in model.parameters():
        param.grad *= 3
        param.grad = param.grad / 7
        param.grad.data = torch.full_like(param.grad, 0.25) - param.grad


def _data(model):
    for i, param in enumerate(model.parameters()):
        param.grad.data /= 3
        if i % 2:
            param.grad.data = torch.full_like(param.grad, 0.25) - param.grad


def _each_other(model):
    grads = gradients(model)
    same = [
        (i, j) for i in range(len(grads)) for j in range(i) if grads[i].shape == grads[j].shape
    ][::5]
    for i, j in same:
        grads[i].add_(grads[j])
        grads[i].lerp_(grads[j], 0.25).addcmul_(grads[i], grads[j])
    torch._foreach_add_([grads[i] for i, _ in same], [grads[j] for _, j in same], alpha=0.5)
    torch._foreach_mul_(grads, [1 + i / 8 for i in range(len(grads))])
    torch._foreach_clamp_max_(grads, 0.5)
    return [*torch._foreach_norm(grads, 1), *torch._foreach_add(grads, 1.0)]


def _indexed(model):
    for grad in gradients(model):
        flat = grad.view(-1)
        flat[torch.arange(0, flat.numel(), 3)] = 0.25
        flat.index_add_(0, torch.tensor([1, 1]), torch.ones(2, dtype=flat.dtype))
        grad.masked_fill_(grad > 0.1, -1.0)
        grad[grad < -0.5] = 0.125


READS = {
    "norm": lambda grads: [grad.norm() for grad in grads],
    "inf norm": lambda grads: [grad.norm(float("inf")) for grad in grads],
    "finite": lambda grads: [torch.isfinite(grad).all() for grad in grads],
    "float": lambda grads: [grad.float() for grad in grads],
    "to": lambda grads: [grad.to(torch.float64) for grad in grads],
    "cpu": lambda grads: [grad.cpu() for grad in grads],
    "numpy": lambda grads: [torch.tensor(grad.float().numpy()) for grad in grads],
    "tolist": lambda grads: [torch.tensor(grad.tolist()) for grad in grads],
    "item": lambda grads: (
        [torch.tensor(grad.sum().item()) for grad in grads]
        + [torch.tensor(grads[3].view(-1)[2].item())]
    ),
    "cat": lambda grads: [torch.cat([grad.flatten() for grad in grads])],
    "stack": lambda grads: [torch.stack([grad.norm() for grad in grads])],
    "vector": lambda grads: [torch.nn.utils.parameters_to_vector(grads)],
    "matmul": lambda grads: [grad @ grad.t() for grad in grads if grad.dim() == 2],
    "deepcopy": lambda grads: copy.deepcopy(grads),
    "contiguous": lambda grads: [grad.contiguous() for grad in grads],
    "iterate": lambda grads: [row + 1 for row in grads[2]],
    "like": lambda grads: [torch.zeros_like(grad) for grad in grads] + [grads[0].new_ones(3)],
    "compare": lambda grads: [
        torch.tensor([torch.equal(grad, grad.clone()), bool((grad == grad).all())])
        for grad in grads
    ],
    "histogram": lambda grads: [torch.histc(grad.float(), 8) for grad in grads],
    "inference": lambda grads: _in_inference(grads),
    "total norm": lambda grads: [
        torch.nn.utils.get_total_norm(grads, norm, foreach=each)
        for norm in (2.0, 1.0, float("inf"), 0.5)
        for each in (None, False, True)
    ],
}


def _in_inference(grads):
    with torch.inference_mode():
        return [each.clone() for each in (grad.reshape(-1) * 2 for grad in grads)] + [
            grad.contiguous().sum() for grad in grads
        ]


CHANGES = {
    **{
        f"clip {norm} {foreach}": lambda model, norm=norm, foreach=foreach: [
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm, foreach=foreach)
        ]
        for norm in (2.0, float("inf"), 1.0)
        for foreach in (None, False, True)
    },
    "clip that does not fire": lambda model: [
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    ],
    "clip value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "clip value, foreach": lambda model: torch.nn.utils.clip_grad_value_(
        model.parameters(), 0.01, foreach=True
    ),
    "clip with a norm": lambda model: torch.nn.utils.clip_grads_with_norm_(
        model.parameters(), 0.5, torch.tensor(3.0)
    ),
    "zero": lambda model: model.zero_grad(set_to_none=False),
    "arithmetic": lambda model: [
        grad.mul_(3).add_(1).div_(7).nan_to_num_().sub_(grad.mean()) for grad in gradients(model)
    ],
    "copy": lambda model: [grad.copy_(torch.full_like(grad, 0.5)) for grad in gradients(model)],
    "noise": _noise,
    "scaler": _scaler,
    "scaler that finds an inf": _scaler_finds_an_inf,
    "views": _through_views,
    "out": _out,
    "assigned": _assigned,
    "data": _data,
    "each other": _each_other,
    "indexed": _indexed,
}


def same_results(ours, theirs) -> None:
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or [], theirs or [], strict=True):
        torch.testing.assert_close(a.clone(), b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("what", READS)
def test_reading(pair, what):
    backward(pair)
    assert any(isinstance(grad, SpilledGradient) for grad in gradients(pair[2]))
    theirs, ours = (READS[what](gradients(model)) for model in (pair[0], pair[2]))
    same_results(ours, theirs)
    same_gradients(pair)


@pytest.mark.parametrize("pair", ["speculate", "lazy"], indirect=True)
@pytest.mark.parametrize("what", CHANGES)
def test_changing(pair, what):
    for number in range(2):
        backward(pair, number, accumulate=1 + number)
        theirs, ours = (CHANGES[what](model) for model in (pair[0], pair[2]))
        same_results(ours, theirs)
        if what != "scaler that finds an inf":
            same_gradients(pair)
        step(pair)
    same_weights(pair)


def test_own_clip_is_that_of_gradients_in_memory(pair):
    for number, limit in enumerate((1e6, 0.05, 0.5)):
        backward(pair, number)
        assert reference.clip(list(pair[0].parameters()), limit) == float(
            pair[3].clip_grad_norm_(limit)
        )
        same_gradients(pair)
        step(pair)
    same_weights(pair)


# -- who keeps a gradient


@pytest.mark.parametrize("pair", ["speculate", "sync", "lazy"], indirect=True)
def test_a_kept_gradient_keeps_its_bytes(pair):
    backward(pair)
    kept = [
        (param.grad, param.grad.detach(), param.grad.view(-1)[1:]) for param in pair[2].parameters()
    ]
    before = [grad.clone() for grad in gradients(pair[2])]
    step(pair)
    for number in (1, 2):
        backward(pair, number)
        same_gradients(pair)
        step(pair)
        for (whole, alias, part), value in zip(kept, before):
            assert (
                torch.equal(whole.clone(), value)
                and torch.equal(alias.clone(), value)
                and torch.equal(part.clone(), value.view(-1)[1:])
            )
    del kept, whole, alias, part
    backward(pair, 3)
    spilled = [param for unit in pair[3]._session.planes.layout.spilled for param in unit.params]
    # their places are free again
    assert spilled and all(isinstance(param.tensor.grad, SpilledGradient) for param in spilled)
    step(pair)
    same_weights(pair)


def test_gradients_that_are_not_cleared_go_on_accumulating(pair):
    for number in range(3):
        backward(pair, number)
        same_gradients(pair)
        for optimizer in (pair[1], pair[3]):
            optimizer.step()
    same_weights(pair)


def test_some_cleared_some_not(pair):
    for number in range(4):
        backward(pair, number)
        for optimizer in (pair[1], pair[3]):
            optimizer.step()
        for model in (pair[0], pair[2]):
            for i, param in enumerate(model.parameters()):
                if (i + number) % 3 == 0:
                    param.grad = None
                elif (i + number) % 3 == 1:
                    param.grad.zero_()
        grads = [
            (a.grad, b.grad)
            for a, b in zip(pair[0].parameters(), pair[2].parameters(), strict=True)
        ]
        assert [b is None for _, b in grads] == [a is None for a, _ in grads]
        assert all(torch.equal(a, b.clone()) for a, b in grads if a is not None)
    same_weights(pair)


@pytest.mark.parametrize("pair", ["speculate", "sync", "lazy"], indirect=True)
def test_a_gradient_of_another_parameter(pair):
    """Assigned p.grad = q.grad: the update reads whatever p.grad is."""
    for number in range(3):
        backward(pair, number)
        for model in (pair[0], pair[2]):
            for i in range(5):
                model.layers[i].up.weight.grad = model.layers[i + 1].up.weight.grad
        step(pair)
    same_weights(pair)


def test_what_cannot_be_is_a_sentence(pair):
    backward(pair)
    grad = next(
        grad for grad in gradients(pair[2]) if isinstance(grad, SpilledGradient) and grad.dim() == 2
    )
    for wrong in (grad.data_ptr, grad.share_memory_, lambda: torch.from_dlpack(grad)):
        with pytest.raises(errors.Unsupported, match="is spilled to the disk and has no address"):
            wrong()
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(grad)
    for wrong in (
        grad.t_,
        lambda: grad.resize_(3),
        lambda: grad.set_(torch.zeros(3, dtype=grad.dtype)),
    ):
        with pytest.raises((errors.Unsupported, RuntimeError)):
            wrong()
    with pytest.raises(errors.Unsupported, match="keeps its shape"):
        grad.data = torch.zeros(3, dtype=grad.dtype)
    array = grad.view(torch.int16).numpy()
    with pytest.raises(ValueError):
        array[0, 0] = 1
    assert "SpilledGradient(tensor(" in repr(grad)
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    assert (
        torch.equal(torch.load(file), grad.clone())
        and type(torch.load(io.BytesIO(file.getvalue()))) is torch.Tensor
    )
    same_gradients(pair)


def test_after_close_a_kept_gradient_says_so(tmp_path):
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/s", dram=SPILLING
    )
    loss_of(model, batch(0)).backward()
    kept = next(grad for grad in gradients(model) if isinstance(grad, SpilledGradient))
    opt.close()
    with pytest.raises(errors.StokerError, match="its optimizer was closed"):
        kept.norm()


def test_nothing_is_left(tmp_path):
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/s", dram=SPILLING
    )
    for number in range(3):
        loss_of(model, batch(number)).backward()
        opt.step()
        opt.zero_grad()
    session = opt._session
    assert session.gradients.window.scratch.used_bytes <= spilled_bytes(opt)
    arena = session.planes.arena
    opt.close()
    del opt, session
    gc.collect()
    assert arena.used == 0
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["stoker.volume"]


# -- what must not come between an update and the bytes it consumes


class Halves(torch.nn.Module):
    """Layers of which a call may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: torch.nn.Sequential(
            torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)
        )
        self.layers = torch.nn.ModuleList(layer() for _ in range(20))

    def forward(self, x, which):
        for i in which:
            x = x + self.layers[i](x)
        return x


def halves(tmp_path, policy, dram):
    """(weights after some steps, of which the last leave layers out, and how many updates were owed
    when a backward began to speculate)"""
    torch.manual_seed(0)
    model = Halves()
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        store=f"{tmp_path}/{policy}",
        dram=dram,
        policy=policy,
    )
    steps, owed = opt._session.steps, [0]
    transaction = steps._transaction

    def counting():
        if torch._C._current_graph_task_id() != -1:
            owed.append(len(steps.late.owed))
        return transaction()

    steps._transaction = counting
    opt._session.pager.lookahead_bytes = 1 << 20
    everything, half = range(20), range(10)
    for number, which in enumerate([everything] * 4 + [half] * 2):
        if policy == "auto" and number == 3:
            # its lazy pause is over with this step
            steps.paused_for, steps.drops_gradients = 1, True
        torch.manual_seed(number)
        model(torch.randn(4, 128), which).square().mean().backward()
        opt.step()
        opt.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    opt.close()
    return weights, max(owed)


def test_what_is_owed_comes_before_a_speculated_update_looks_at_its_gradients(tmp_path):
    """Owed updates bring gradients of their own, which took the place of those that the update was
    about to read."""
    expected, _ = halves(tmp_path, "sync", "8MiB")
    weights, owed = halves(tmp_path, "auto", "8MiB")
    assert owed > PLACES
    assert all(torch.equal(expected[name], value) for name, value in weights.items())


def test_an_update_does_not_begin_on_bytes_that_are_another_unit_s(pair):
    backward(pair)
    steps, spilled = pair[3]._session.steps, pair[3]._session.planes.layout.spilled
    segments = steps._segments(spilled[0])
    for unit in spilled[1 : 1 + PLACES]:
        unit.params[0].tensor.grad.clone()
    with pytest.raises(errors.StokerError, match="left memory before its update began"):
        steps._launch(spilled[0], segments)


def _from_two_others(pair):
    """Unit 2 of the spilled ones gets gradients of units 0 and 1 for its second and third
    parameter, in both models."""
    theirs = dict(pair[0].named_parameters())
    mine, *others = (pair[3]._session.planes.layout.spilled[i] for i in (2, 0, 1))
    for i, other in enumerate(others):
        mine.params[1 + i].tensor.grad = other.params[1 + i].tensor.grad
        theirs[mine.params[1 + i].name].grad = theirs[other.params[1 + i].name].grad
    return mine


@pytest.mark.parametrize("pair", ["speculate", "sync", "lazy"], indirect=True)
def test_gradients_of_two_other_blocks(pair):
    """They are copied, and bringing them may push out the unit's own."""
    for number in range(2):
        backward(pair, number)
        mine = _from_two_others(pair)
        want = [param.tensor.grad.clone() for param in mine.params]
        assert all(
            torch.equal(segment.grad, value)
            for segment, value in zip(pair[3]._session.steps._segments(mine), want, strict=True)
        )
        assert reference.clip(list(pair[0].parameters()), 0.5) == float(
            pair[3].clip_grad_norm_(0.5)
        )
        step(pair)
    same_weights(pair)


def test_clipping_while_another_thread_looks(pair):
    """Between finding a unit's gradients in memory and summing them, nobody may take their
    place."""
    backward(pair)
    session = pair[3]._session
    core, seen = session.planes.session, []

    class Slow:
        def __getattr__(self, name):
            return getattr(core, name)

        def sum_of_squares(self, grads):
            thread = threading.Thread(
                target=lambda: seen.extend(grad.norm() for grad in gradients(pair[2]))
            )
            thread.start()
            thread.join(0.2)
            threads.append(thread)
            return core.sum_of_squares(grads)

    threads: list[threading.Thread] = []
    session.planes.session = Slow()
    try:
        norm = float(pair[3].clip_grad_norm_(1e6))
    finally:
        session.planes.session = core
    for thread in threads:
        thread.join()
    assert seen and reference.clip(list(pair[0].parameters()), 1e6) == norm


# -- writes that no operation declares


@pytest.fixture
def alone():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed
    torch.distributed.destroy_process_group()


def test_collectives_are_refused_as_they_write_unseen(pair, alone):
    backward(pair)
    grad = pair[2].layers[0].up.weight.grad
    assert isinstance(grad, SpilledGradient)
    plain = grad.clone()
    for wrong in (
        lambda: alone.all_reduce(grad),
        lambda: alone.broadcast(grad, 0),
        lambda: alone.all_reduce_coalesced([plain, grad]),
        lambda: alone.all_gather([plain], grad),
        lambda: alone._functional_collectives.all_reduce(grad, "sum", alone.group.WORLD),
    ):
        with pytest.raises(errors.Unsupported, match=r"Reduce a copy: g = p.grad.clone\(\)"):
            wrong()
    # a list in a list is not looked into; each is copied to, which is any operation
    alone.all_gather([grad], plain * 2)
    pair[0].layers[0].up.weight.grad.mul_(2)
    same_gradients(pair)
    for param in pair[2].parameters():
        reduced = param.grad.clone()
        alone.all_reduce(reduced)
        param.grad.copy_(reduced)
    step(pair)
    same_weights(pair)


def test_an_operation_of_somebody_else_s_may_write(pair):
    with torch.library._scoped_library("stoker_test", "FRAGMENT") as library:
        library.define("secretly_doubled(Tensor x) -> Tensor")
        library.impl("secretly_doubled", lambda x: x.mul_(2).sum(), "CPU")
        for number in range(2):
            backward(pair, number)
            for model in (pair[0], pair[2]):
                for grad in gradients(model):
                    torch.ops.stoker_test.secretly_doubled(grad)
            same_gradients(pair)
            step(pair)
    same_weights(pair)


# -- shapes


def test_views_in_inference_mode(pair):
    backward(pair)
    results = []
    for model in (pair[0], pair[2]):
        block = model.layers[0]
        vector, matrix = block.norm1.weight.grad, block.qkv.weight.grad
        with torch.inference_mode():
            views = [
                vector.expand_as(matrix),
                matrix.view_as(matrix),
                matrix[3:5],
                matrix[0],
                matrix.t()[1:],
                vector.to(torch.float64),
                vector.to("cpu"),
            ]
            views += [
                *torch.broadcast_tensors(vector, matrix),
                *torch.broadcast_tensors(block.norm2.bias.grad, vector),
                *matrix.chunk(3),
                *matrix.unbind()[:2],
            ]
            views.append(matrix.reshape(-1)[5:9].view(2, 2))
            matrix[1:3].mul_(2)
            views[2].add_(1)
            results.append([view.clone() for view in views])
    same_results(*reversed(results))
    same_gradients(pair)
    step(pair)
    same_weights(pair)


def test_nothing_is_written_beyond_a_gradient(pair):
    """Those of a unit are neighbours in memory."""
    backward(pair)
    small = pair[2].layers[0].norm1.weight.grad
    assert isinstance(small, SpilledGradient)
    for wrong in (
        lambda: small.as_strided((128,), (1,), small.storage_offset()),
        lambda: small.as_strided((64,), (2,), small.storage_offset()).zero_(),
        lambda: small.as_strided((64,), (1,), small.storage_offset() + 1),
        lambda: torch.mul(torch.ones(128, dtype=small.dtype), 7.0, out=small),
        lambda: torch.add(torch.ones(2, 64, dtype=small.dtype), 1, out=small),
        lambda: small.resize_(128).zero_(),
    ):
        with pytest.raises(errors.Unsupported), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong()
        same_gradients(pair)
    assert torch.equal(
        small.as_strided((16,), (4,), small.storage_offset()).clone(), small.clone()[::4]
    )
    step(pair)
    same_weights(pair)


def test_a_list_that_comes_second_and_a_memo(pair):
    backward(pair)
    same_results(*([*torch._foreach_pow(2.0, gradients(model))] for model in (pair[2], pair[0])))
    grad = pair[2].layers[0].up.weight.grad
    memo: dict = {}
    assert grad.__deepcopy__(memo) is grad.__deepcopy__(memo)
    twice = copy.deepcopy([grad, grad])
    assert twice[0] is twice[1] and type(twice[0]) is torch.Tensor


def test_gradients_of_two_optimizers(tmp_path):
    """The one's are copied before the other's lock is taken: two threads that do it crosswise do
    not wait for each other."""
    made = []
    for name in "ab":
        model = tiny()
        model, opt = stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/{name}", dram=SPILLING
        )
        loss_of(model, batch(0)).backward()
        made.append((model.layers[0].up.weight.grad, opt, model))
    (one, *_), (other, *_) = made
    assert isinstance(one, SpilledGradient) and isinstance(other, SpilledGradient)
    held, clone = [], SpilledGradient.clone

    def watched(self, *args, **kwargs):
        held.append(one.region.owner.lock._is_owned() and other.region.owner is self.region.owner)
        return clone(self, *args, **kwargs)

    SpilledGradient.clone = watched
    try:
        want = clone(one) + clone(other)
        assert torch.equal(one.add(other), want)
        one.add_(other)
    finally:
        del SpilledGradient.clone
    assert held == [False, False] and torch.equal(one.clone(), want)
    expected = [one.clone() * 3, other.clone() * 3]
    torch._foreach_mul_([one, other], 3.0)
    assert torch.equal(one.clone(), expected[0]) and torch.equal(other.clone(), expected[1])
    for _, opt, _ in made:
        opt.close()


# -- what is told, and what is not an error


def test_a_gradient_that_finds_its_place_taken_is_told_once(pair):
    backward(pair)
    step(pair)
    backward(pair, 1)
    kept = gradients(pair[2])
    step(pair)
    with pytest.warns(
        UserWarning, match=r"stays in ordinary memory \(\d+ bytes\), outside the cap"
    ) as told:
        backward(pair, 2)
    step(pair)
    backward(pair, 3)
    step(pair)
    assert len([each for each in told if "ordinary memory" in str(each.message)]) == 1
    events = [event for event in pair[3].ledger.events if event["what"] == "gradient outside dram"]
    assert (
        len(events) == 1
        and events[0]["bytes"] > 0
        and events[0]["parameter"] in dict(pair[2].named_parameters())
    )
    del kept
    same_weights(pair)


@pytest.mark.parametrize("pair", ["lazy", "speculate"], indirect=True)
def test_a_change_that_is_undone_is_none(pair):
    for number in range(3):
        backward(pair, number)
        kept = [grad for grad in gradients(pair[2]) if isinstance(grad, SpilledGradient)]
        step(pair)
        for grad in kept:
            grad.mul_(2)
            grad.mul_(1).mul_(0.5)
        del kept, grad
    assert loss_of(pair[2], batch(9)).isfinite()
    assert pair[3].ledger.summary()["redone"] == 0
    same_weights(pair)


@pytest.mark.parametrize("pair", ["lazy"], indirect=True)
def test_a_change_that_is_undone_too_late_loses_the_step(pair, monkeypatch):
    """The update would consume what is there meanwhile."""
    backward(pair)
    step(pair)
    backward(pair, 1)
    session = pair[3]._session
    kept = [grad for grad in gradients(pair[2]) if isinstance(grad, SpilledGradient)]
    monkeypatch.setattr(session.steps.late, "ahead", lambda block, distance: False)
    pair[3].step()
    pair[3].zero_grad()
    block = session.planes.layout.spilled[0].block
    for grad in kept:
        grad.mul_(2)
    with pytest.raises(errors.StokerError, match="were changed after"):
        session.steps.late.begin(block)
        for grad in kept:
            grad.mul_(0.5)
        session.steps.late.finish(block)
    assert pair[3].step_count == 1
    same_weights(pair)


# -- bytes


def rows_of(tmp_path, policy, steps=5, clip=None, accumulate=1):
    model = tiny()
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        store=f"{tmp_path}/s",
        dram=SPILLING,
        policy=policy,
        accumulate=accumulate,
    )
    rows = []
    opt.ledger.on_step(rows.append)
    for number in range(steps):
        for micro in range(accumulate):
            loss_of(model, batch(number, micro)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    loss_of(model, batch(99))  # what lazy owes
    planned, spilled, moved = opt.plan(), spilled_bytes(opt), opt._session.gradients.moved()
    opt.close()
    assert spilled > 0 and len(rows) == steps
    return rows[2:], spilled, planned, [bytes / steps for bytes in moved]


def moved(rows, spilled):
    """Spilled bytes read and written a step, as multiples of what is spilled."""
    return {
        (
            round(row["read_bytes"]["gradients"] / spilled, 3),
            round(row["written_bytes"]["gradients"] / spilled, 3),
        )
        for row in rows
    }


def test_speculation_writes_them_once_and_reads_nothing(tmp_path):
    rows, spilled, *_ = rows_of(tmp_path, "speculate")
    assert moved(rows, spilled) == {(0.0, 1.0)}
    assert all(row["redone"] == 0 for row in rows)


def test_a_clip_that_does_not_fire_writes_nothing_and_redoes_nothing(tmp_path):
    rows, spilled, *_ = rows_of(tmp_path, "speculate", clip=1e6)
    assert all(row["written_bytes"]["gradients"] == spilled and row["redone"] == 0 for row in rows)
    # the norm, and the product with one
    assert all(row["read_bytes"]["gradients"] <= 2 * spilled for row in rows)


def test_a_clip_that_fires_writes_them_once_more(tmp_path):
    rows, spilled, *_ = rows_of(tmp_path, "sync", clip=1e-3)
    assert all(spilled < row["written_bytes"]["gradients"] <= 2 * spilled for row in rows)
    assert all(row["read_bytes"]["gradients"] <= 3 * spilled for row in rows)


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_each_further_micro_batch_reads_and_writes_them_once_more(tmp_path, policy):
    """+4 bytes a bf16 parameter."""
    counts = {}
    for accumulate in (1, 2, 3):
        *_, spilled, _, counts[accumulate] = rows_of(
            tmp_path / str(accumulate), policy, accumulate=accumulate
        )
    for accumulate in (2, 3):
        more = [now - before for now, before in zip(counts[accumulate], counts[accumulate - 1])]
        assert more == pytest.approx([spilled, spilled], abs=1), (policy, accumulate, counts)


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy"])
def test_the_plan_knows_them(tmp_path, policy):
    _, spilled, planned, measured = rows_of(tmp_path, policy)
    assert [
        planned["step"][way]["gradients"] for way in ("read_bytes", "written_bytes")
    ] == measured
    told = planned["spilled_gradients"]
    assert told["bytes"] == spilled and "find no room" in told["reason"]
    assert planned["classes"]["gradients"] > planned["dram"]["gradients"]


def test_more_memory_spills_less():
    rng = random.Random(seed := random.randrange(1 << 30))
    print("seed", seed)
    for _ in range(200):
        layers = torch.nn.ModuleList(
            torch.nn.Linear(rng.choice([8, 64, 200]), rng.choice([16, 300]), device="meta")
            for _ in range(rng.randrange(1, 12))
        )
        blocks = partition(layers, layers.parameters())
        for block in blocks:
            block.pinned = rng.random() < 0.1
        units = [unit for block in blocks for unit in block.updated_units]
        total = before = sum(unit.weight_bytes for unit in units)
        assert choose(blocks, total) == [] and least(blocks) <= total
        for room in range(least(blocks), total, 4096):
            spilled = choose(blocks, room)
            assert len(spilled) > PLACES and memory(units, spilled) <= room
            assert sum(unit.weight_bytes for unit in spilled) <= before
            before = sum(unit.weight_bytes for unit in spilled)
            assert memory(units, choose(blocks, 0)) == least(blocks)


def test_gradients_that_fit_are_not_spilled(tmp_path):
    model = tiny()
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/s", dram="7MiB"
    )
    loss_of(model, batch(0)).backward()
    assert not any(isinstance(grad, SpilledGradient) for grad in gradients(model))
    assert "spilled_gradients" not in opt.plan()
    opt.step()
    opt.zero_grad()
    assert opt.ledger.last["written_bytes"]["gradients"] == 0
    opt.close()


# -- failures


class _Failing:
    """A future that ends with an error."""

    def __init__(self, future) -> None:
        self._future = future

    def wait(self):
        self._future.wait()
        raise errors.IoError("the disk failed")

    def ready(self):
        return self._future.ready()


def breaks(monkeypatch, where):
    """From now on one write, the end of one write, or one read fails."""
    write, read = Scratch.write, Scratch.read
    left = [1]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    def broken_write(self, *args, **kwargs):
        if where == "full" and now():
            raise errors.OutOfSpace("the disk is full")
        piece = write(self, *args, **kwargs)
        if where == "write" and now():
            piece.written = _Failing(piece.written)
        return piece

    def broken_read(self, *args, **kwargs):
        future = read(self, *args, **kwargs)
        return _Failing(future) if where == "read" and now() else future

    monkeypatch.setattr(Scratch, "write", broken_write)
    monkeypatch.setattr(Scratch, "read", broken_read)


@pytest.mark.parametrize("pair", ["speculate", "sync", "lazy"], indirect=True)
@pytest.mark.parametrize("where", ["full", "write", "read"])
def test_a_fault_while_clipping_loses_no_step(pair, monkeypatch, where):
    for number in range(2):
        backward(pair, number)
        step(pair)
    backward(pair, 2)
    with monkeypatch.context() as patch:
        breaks(patch, where)
        with pytest.raises((errors.IoError, errors.OutOfSpace), match="spilled gradients of block"):
            for _ in range(3):
                torch.nn.utils.clip_grad_norm_(pair[2].parameters(), 1e-3)
    for each in (pair[1], pair[3]):
        each.zero_grad()
    for number in range(2, 4):
        backward(pair, number)
        same_gradients(pair)
        step(pair)
    assert pair[3].step_count == 4
    same_weights(pair)


@pytest.mark.parametrize("where", ["full", "write"])
def test_a_fault_in_backward_is_named_and_the_loop_goes_on(pair, monkeypatch, where):
    backward(pair, 0)
    step(pair)
    forever = (
        (errors.OutOfSpace, "the disk is full")
        if where == "full"
        else (errors.IoError, "the disk failed")
    )
    write = Scratch.write

    def broken(self, *args, **kwargs):
        if where == "full":
            raise errors.OutOfSpace("the disk is full")
        piece = write(self, *args, **kwargs)
        piece.written = _Failing(piece.written)
        return piece

    with monkeypatch.context() as patch:
        patch.setattr(Scratch, "write", broken)
        with pytest.raises(
            forever[0], match=f"spilled gradients of block .* could not be written: {forever[1]}"
        ):
            loss_of(pair[2], batch(1)).backward()
    assert pair[3].step_count == 1
    pair[3].zero_grad()
    backward(pair, 1)
    same_gradients(pair)
    step(pair)
    same_weights(pair)


@pytest.mark.parametrize("pair", ["sync", "lazy"], indirect=True)
def test_a_read_that_fails_in_step_may_be_tried_again(pair, monkeypatch):
    backward(pair, 0)
    step(pair)
    backward(pair, 1)
    same_gradients(pair)
    lazy = pair[3]._session.steps.policy == "lazy"
    with monkeypatch.context() as patch:
        breaks(patch, "read")
        with pytest.raises(errors.IoError, match="could not be read back"):
            pair[3].step()
            loss_of(pair[2], batch(2))  # lazy reads here, and loses the step
    done = pair[3].step_count
    assert done == 1
    if lazy:
        pair[3].zero_grad()
        loss_of(pair[2], batch(1)).backward()
    same_gradients(pair)
    step(pair)
    same_weights(pair)


def test_a_disk_without_room_shows_at_once(tmp_path, monkeypatch):
    def full(self, capacity):
        raise errors.OutOfSpace("the disk is full")

    monkeypatch.setattr(Scratch, "_make", full)
    model = tiny()
    with pytest.raises(errors.OutOfSpace):
        stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/s", dram=SPILLING
        )


def test_it_is_not_had_on_another_device(tmp_path, monkeypatch):
    """There gradients stay on the device; the memory for their copies must hold all of them, and
    the sentence says so."""
    monkeypatch.setattr(
        sys.modules["stoker.offload.open"], "open_link", lambda device: FakeLink(lazy=False)
    )
    with pytest.raises(
        errors.OverBudget,
        match="are not spilled to the disk where the model computes on another device",
    ):
        model = tiny()
        stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/s", dram=SPILLING
        )
