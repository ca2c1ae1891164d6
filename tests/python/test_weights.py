"""What a loop does to its weights between steps counts as in memory, or is an error: whatever the
policy, the cap and the disk."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
import stoker
from faults import ONE_THREAD, fsck
from models import Tiny, batch, loss_of
from stoker import errors
from stoker.offload.paging.shown import Shown
from test_offload_features import TIGHT, adamw, assert_same, both, weights
from test_offload_features import offload  # noqa: F401 (a fixture)

POLICIES = ("auto", "sync", "speculate", "lazy")
STEPS = 4


def make(dtype=torch.float32, layers=3) -> Tiny:
    torch.manual_seed(0)
    return Tiny(layers, tied=True).to(dtype)


# -- edits that torch sees, or that are made through what was taken since the last use -------------


@torch.no_grad()
def clamp(param, step):
    param.clamp_(-0.1, 0.1)


def data_clamp(param, step):
    param.data.clamp_(-0.1, 0.1)


def assign(param, step):
    param.data = param.data * 0.5


@torch.no_grad()
def copy(param, step):
    param.copy_(param * 0.9)


def through_numpy(param, step):
    if param.dtype == torch.bfloat16:
        param.detach().view(torch.int16).numpy()[...] &= ~1
    else:
        param.detach().numpy()[...] *= 0.5


def through_storage(param, step):
    storage = param.untyped_storage()
    count = storage.nbytes() // param.element_size()
    whole = torch.empty(0, dtype=param.dtype).set_(storage, 0, (count,), (1,))
    whole.mul_(0.5)


def mask(param, step):
    param.data *= (torch.arange(param.numel()).view(param.shape) + step) % 3 != 0


EDITS = [clamp, data_clamp, assign, copy, through_numpy, through_storage, mask]


def train(model, opt, edit, where="behind step", steps=range(STEPS)):
    seen = []
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()
        if where == "before step":
            edit(model, step)
        opt.step()
        if where == "behind step":
            edit(model, step)
        opt.zero_grad()
        if where == "before forward":
            edit(model, step)
        seen.append(loss.item())
    return seen


def each(edit):
    def edits(model, step):
        for param in model.parameters():
            edit(param, step)

    return edits


class Control(reference.ReferenceOptimizer):
    """In memory. An element of a bfloat16 weight that the loop changed is its own master from then
    on (docs/semantics.md, 8)."""

    def __init__(self, original):
        super().__init__(original)
        self.then: dict[nn.Parameter, torch.Tensor] = {}

    def _update(self, param, group):
        words = lambda: param.detach().view(torch.int16).flatten()
        if param.dtype == torch.bfloat16 and param in self.then:
            self.state[param]["remainder"][words() != self.then[param]] = 0
        super()._update(param, group)
        if param.dtype == torch.bfloat16:
            self.then[param] = words().clone()


def equal(offload, edit, where="behind step", dtype=torch.float32, steps=STEPS, **options):
    """Losses and weights are those in memory, the store is whole, and a run that is resumed has the
    same weights."""
    control = make(dtype)
    expected = train(control, Control(adamw(control)), edit, where, range(steps))
    model, opt = offload(make(dtype), **options)
    assert train(model, opt, edit, where, range(steps)) == expected
    assert_same(weights(model), weights(control))
    opt.close()
    gc.collect()
    status, report = fsck(opt._session.runtime.path)
    assert status == 0, report
    model, opt = offload(make(dtype), **options, resume=True)
    assert_same(weights(model), weights(control))
    opt.close()


@pytest.mark.parametrize("dram", [TIGHT, "64MiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_edit_counts_as_in_memory(offload, policy, dtype, dram):
    def edits(model, step):
        for at, param in enumerate(model.parameters()):
            EDITS[(at + step) % len(EDITS)](param, step)

    equal(offload, edits, dtype=dtype, policy=policy, dram=dram, steps=len(EDITS))


@pytest.mark.parametrize("where", ["before step", "before forward"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_edit_counts_wherever_it_is_made(offload, policy, where):
    equal(offload, each(data_clamp), where, policy=policy)


def test_an_edit_while_the_step_is_written_is_no_damage(tmp_path):
    """The disk holds each write back for 20 ms."""
    here = Path(__file__).parent
    try:
        source, made = here / "faulty_disk.c", tmp_path / "faulty_disk.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    command = [sys.executable, here / "slow_writes_run.py", tmp_path]
    environment = {**ONE_THREAD, "LD_PRELOAD": str(made)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(POLICIES)
    for row in rows:
        assert row["met"] > 0 and row["losses"] and not row["differ"], row
        status, report = fsck(tmp_path / f"{row['policy']}-{row['dtype']}")
        assert status == 0, report


# -- what cannot count is an error -----------------------------------------------------------------


def numpy_of(param):
    dtype = torch.int16 if param.dtype == torch.bfloat16 else param.dtype
    return param.detach().view(dtype).numpy()


OLD = {
    "data": lambda param: param.data,
    "numpy": numpy_of,
    "detach": lambda param: param.detach(),
    "storage": lambda param: param.untyped_storage(),
}


@pytest.mark.parametrize("dram", [TIGHT, "64MiB"])
@pytest.mark.parametrize("kind", OLD)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_alias_from_before_the_last_use_is_an_error(offload, policy, kind, dram):
    model, opt = offload(make(), policy=policy, dram=dram)
    train(model, opt, lambda *_: None, steps=range(2))
    for name in ("layers.1.up.weight", "embed.weight", "norm.bias"):
        param = model.get_parameter(name)
        old = OLD[kind](param)
        train(model, opt, lambda *_: None, steps=[2])
        before = weights(model)
        if kind == "storage":
            old.fill_(1)
        else:
            old *= 0
        with pytest.raises(errors.InvalidArgument, match=f"{name} was changed in place.*gather"):
            loss_of(model, batch(3))
        assert_same(weights(model), before)
        del old
        opt.zero_grad()
    train(model, opt, lambda *_: None, steps=[3])


@pytest.mark.parametrize("policy", ["speculate", "lazy"])
def test_an_edit_in_the_middle_of_a_step_is_an_error(offload, policy):
    """Backward, or another block, has used the weights already, or will use others than forward
    did."""
    model, opt = offload(make(), policy=policy)
    weight = model.layers[1].up.weight
    with torch.no_grad():
        edits = []
        handle = model.layers[1].register_forward_hook(
            lambda module, _args, _out: edits.append(module.up.weight.clamp_(0, 0))
        )
        loss_of(model, batch(0))
        handle.remove()
    with pytest.raises(errors.InvalidArgument, match="layers.1.up.weight was changed in place"):
        opt.step()
    loss = loss_of(model, batch(0))
    weight.data.mul_(0.5)
    with pytest.raises(errors.InvalidArgument, match="layers.1.up.weight was changed in place"):
        loss.backward()
    opt.zero_grad()
    kept = []
    handle = model.layers[1].register_forward_pre_hook(
        lambda module, _args: kept.append(module.up.weight.data)
    )
    loss_of(model, batch(0)).backward()
    handle.remove()
    kept[0].zero_()
    with pytest.raises(errors.InvalidArgument, match="layers.1.up.weight was changed in place"):
        opt.step()
    control = make()
    opt.zero_grad()
    ours, theirs = weights(model), dict(control.state_dict())
    ours.pop("seen"), theirs.pop("seen")
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["layers.1.up", "embed"])
@pytest.mark.parametrize("way", [lambda p: p.data.mul_(0.5), lambda p: numpy_of(p).fill(0)])
def test_an_edit_while_a_module_runs_is_an_error(offload, way, name):
    """Torch counts neither. A pinned block (embed, which is tied) has no end of its own."""
    model, opt = offload(make())
    edited = model.get_submodule(name)

    def hook(*_):
        way(edited.weight)

    handle = (model.layers[0] if name == "embed" else edited).register_forward_pre_hook(hook)
    loss_of(model, batch(0)).backward()
    handle.remove()
    with pytest.raises(errors.InvalidArgument, match=f"{name}.weight was changed in place.*gather"):
        opt.step()
    opt.zero_grad()
    control = make()
    assert torch.equal(model.state_dict()[f"{name}.weight"], control.state_dict()[f"{name}.weight"])


def test_an_edit_of_a_tied_weight_before_backward_is_an_error(offload):
    """The graph has the weight itself, as a pinned block's never leaves memory."""
    model, opt = offload(make())
    loss = loss_of(model, batch(0))
    model.embed.weight.data.mul_(0.5)
    loss.backward()
    with pytest.raises(errors.InvalidArgument, match="embed.weight was changed in place.*gather"):
        opt.step()


def test_an_alias_from_before_offload_is_an_error(offload):
    model = make()
    flat = torch.cat([param.data.flatten() for param in model.parameters()])
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    model, opt = offload(model)
    train(model, opt, lambda *_: None, steps=[0])
    flat[-1] += 1
    with pytest.raises(errors.InvalidArgument, match="was changed in place.*gather"):
        loss_of(model, batch(1))
    loss_of(model, batch(1))


def test_memory_that_is_given_back_changed_is_an_error(offload):
    """In memory the average below would follow every update of the weight."""
    model, opt = offload(make())
    weight = model.layers[1].up.weight
    average = weight.data.clone()
    weight.data = average
    train(model, opt, lambda *_: None, steps=[0])
    average.mul_(0.5)
    with pytest.raises(errors.InvalidArgument, match="layers.1.up.weight was changed.*gather"):
        weight.data = average
    weight.data = average.clone()
    assert torch.equal(model.state_dict()["layers.1.up.weight"], average)


@pytest.mark.parametrize("kept", [True, False])
def test_a_state_dict_that_is_changed_has_to_be_loaded(offload, kept):
    model, opt = offload(make())
    before, state = weights(model), model.state_dict()
    state["norm.bias"].add_(1)
    model.load_state_dict(state)
    loss_of(model, batch(0))
    assert torch.equal(model.state_dict()["norm.bias"], before["norm.bias"] + 1)
    state = model.state_dict()
    state["norm.bias"].sub_(1)
    if not kept:
        del state
    with pytest.raises(errors.InvalidArgument, match="norm.bias was .* state_dict.*gather"):
        loss_of(model, batch(0))
    loss_of(model, batch(0))


def test_looks_take_a_bounded_part_of_memory(offload):
    model, opt = offload(make())
    for param in model.parameters():
        param.data.norm()
    assert len(opt._session.shown._copies) <= 1


def test_two_weights_in_one_memory_are_refused(offload):
    model, _ = offload(make())
    first, second = model.layers[0].up.weight, model.layers[1].up.weight
    first.data = second.data
    with pytest.raises(errors.InvalidArgument, match="now share memory.*Parameter"):
        loss_of(model, batch(0))
    first.data = torch.zeros(3)
    with pytest.raises(errors.InvalidArgument, match=r"layers.0.up.weight .* shape \[3\]"):
        loss_of(model, batch(0))
    loss_of(model, batch(0))


def test_a_placeholder_that_was_written_to_is_noticed(offload):
    model, opt = offload(make())
    with torch._C.DisableTorchFunction():
        model.layers[0].up.weight.data.fill_(0)
    with pytest.raises(errors.InvalidArgument, match="layers.0.up.weight was changed in place"):
        opt.step()
    with torch._C.DisableTorchFunction():
        model.layers[0].up.weight.data = torch.zeros(model.layers[0].up.weight.shape)
    with pytest.raises(errors.InvalidArgument, match="layers.0.up.weight was changed in place"):
        opt.step()
    loss_of(model, batch(0)).backward()


# -- loops that look at weights --------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_torch_functions_over_all_weights(offload, policy):
    """Averages, a swap for an evaluation, masks, vectors, decay by hand, a penalty in the loss:
    nothing of Stoker's in it."""

    def loop(model, opt):
        params, seen = list(model.parameters()), []
        average = {name: param.data.clone() for name, param in model.named_parameters()}
        for step in range(4):
            penalty = sum(param.square().sum() for param in params)
            loss = loss_of(model, batch(step)) + 1e-3 * penalty
            loss.backward()
            with torch.no_grad():
                torch._foreach_mul_(params, 0.99)
            opt.step()
            opt.zero_grad()
            vector = nn.utils.parameters_to_vector(params)
            nn.utils.vector_to_parameters(vector * 0.999, params)
            for name, param in model.named_parameters():
                average[name].lerp_(param.data, 0.5)
            if step == 2:
                kept = {name: param.data.clone() for name, param in model.named_parameters()}
                for name, param in model.named_parameters():
                    param.data = average[name]
                with torch.no_grad():
                    seen.append(loss_of(model.eval(), batch(9)).item())
                model.train()
                for name, param in model.named_parameters():
                    param.data = kept[name]
            nn.init.zeros_(model.norm.bias)
            seen += [loss.item(), sum(param.norm().item() for param in params)]
        return seen

    both(offload, make, loop, policy=policy)


def test_values_outlive_the_look(offload):
    """What a graph saved of a weight stays as it was; the weight itself is not kept in memory for
    who only looks."""
    model, opt = offload(make())
    weight = model.layers[1].up.weight
    squared = weight.square().sum()
    expected = 2 * model.state_dict()["layers.1.up.weight"]
    train(model, opt, lambda *_: None, steps=[0])
    opt.zero_grad()
    squared.backward()
    assert torch.equal(weight.grad, expected)
    assert not weight.isnan().any() and not opt._session.shown._copies


def test_nothing_is_hashed_or_copied_for_a_loop_that_leaves_weights_alone(offload, monkeypatch):
    model, opt = offload(make())
    calls = []
    monkeypatch.setattr(Shown, "digest", lambda self, tensor: calls.append(tensor))
    monkeypatch.setattr(Shown, "call", lambda self, tensors, func, args, kwargs: calls.append(func))
    for step in range(3):
        loss_of(model, batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        model.zero_grad()
    assert not calls


def _four() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_two_parameters_over_one_memory_are_refused_by_name(tmp_path):
    """A store would train two copies, without a word."""
    memory = torch.randn(40, 16)

    def over(*views: torch.Tensor) -> nn.Sequential:
        model = _four()
        for layer, view in zip(model, views):
            layer.weight = nn.Parameter(view)
        return model

    def attempt(model: nn.Module) -> stoker.OffloadedOptimizer:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        store = tmp_path / str(len(list(tmp_path.iterdir())))
        return stoker.offload(model, opt, store=store, dram="8MiB")[1]

    wide = torch.randn(16, 32)
    for views in (
        (memory[:16], memory[:16]),
        (memory[:16], memory[8:24]),
        (wide[:, ::2], wide[:, 1:17]),
    ):
        with pytest.raises(errors.InvalidArgument, match=r"0\.weight and 1\.weight are two param"):
            attempt(over(*views))
    model = _four()
    model[2].bias = nn.Parameter(torch.zeros(1).expand(16))
    with pytest.raises(errors.InvalidArgument, match=r"elements of 2\.bias share memory"):
        attempt(model)
    attempt(over(memory[:16], memory[16:32])).close()  # side by side
    attempt(over(wide[:, ::2], wide[:, 1::2])).close()
    tied = _four()
    tied[3].weight = tied[0].weight
    attempt(tied).close()


@pytest.mark.parametrize("policy", ["sync", "lazy"])
def test_a_state_dict_that_keeps_variables_gives_the_parameters(tmp_path, policy):
    def run(offloaded: bool) -> list[torch.Tensor]:
        model = _four()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if offloaded:
            model, opt = stoker.offload(
                model, opt, store=tmp_path / policy, dram="8MiB", policy=policy
            )
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 16)).square().mean().backward()
            kept = model.state_dict(keep_vars=True)
            assert kept["1.weight"] is model[1].weight and kept["1.weight"].requires_grad
            if policy == "sync":  # lazy takes gradients as they are
                for param in kept.values():
                    param.grad.mul_(0.5)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model.state_dict(keep_vars=True)["1.weight"].mul_(1.5)
        weights = [value.clone() for value in model.state_dict().values()]
        if offloaded:
            opt.close()
        return weights

    assert all(map(torch.equal, run(True), run(False)))


# -- transforms of torch.func ----------------------------------------------------------------------


def _wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def per_sample(model, weights, x):
    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)


def test_transforms_work_over_copies_and_are_sentences_over_weights(offload):
    plain, x = _wide(), torch.randn(3, 8)
    expected = per_sample(plain, dict(plain.named_parameters()), x)
    model = _wide()
    model, opt = offload(model, adamw(model), dram="16MiB")
    copies = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_same(per_sample(model, copies, x), expected)
    with stoker.gather(model.parameters()):
        assert_same(per_sample(model, dict(model.named_parameters()), x), expected)
    uses = [
        lambda: per_sample(model, dict(model.named_parameters()), x),
        lambda: per_sample(model, {"1.weight": copies["1.weight"]}, x),
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.grad(lambda x: (model[0].weight @ x).sum())(x[0]),
    ]
    for use in uses:
        with pytest.raises(errors.Unsupported, match=r"0\.(weight|bias) .*gather"):
            use()
    model(x).sum().backward()
    opt.step()
    opt.close()
