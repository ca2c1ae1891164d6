"""stoker.build(): the values that the factory gives in memory, bit for bit, and never other ones
without a word."""

from __future__ import annotations

import copy
import gc
import os
import random
import sys
import threading

import numpy
import pytest
import torch
from torch import nn

import reference
import stoker
from fake_link import FakeLink
from models import Tiny
from stoker import errors
from stoker.offload.model.absent import away_of
from stoker.offload.model.blocks import partition, signature
from stoker.offload.run.build import Construction
from stoker.offload.run import opening
from stoker.offload.run.session import Session
from test_offload_features import adamw, train_step, weights
from test_offload_features import offload as offload_within  # noqa: F401 (a fixture)

# half of it for parameters while the model is made: less than each of the models here has
DRAM = "4MiB"
ROOM = "32MiB"  # for training any of them
SIDE = 600  # a square of float32 takes 1.4 MB: one has room, two have not


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


def assert_same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert bits(ours[name]) == bits(value), name


# -- the same bits ---------------------------------------------------------------------------------


def tiny(**options) -> Tiny:
    return Tiny(**{"layers": 4, "width": 128, **options})


def applied() -> nn.Module:
    """As transformers do: all is made, then initialised anew, then tied."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.25)

    model = tiny().apply(init)
    model.head.weight = model.embed.weight
    return model


def scaled_by_depth() -> nn.Module:
    """Single weights again, out of order, by a rule over all; and a buffer computed from them."""
    model = tiny()
    with torch.no_grad():
        for index, layer in reversed(list(enumerate(model.layers))):
            layer.down.weight.mul_(1 / (index + 1))
            nn.init.orthogonal_(layer.up.weight)
            nn.init.kaiming_uniform_(layer.qkv.weight[:128])
        model.register_buffer(
            "norm_of_all", torch.stack([param.norm() for param in model.parameters()])
        )
    return model


def copies() -> nn.Module:
    """Operations over two weights that have no room together."""
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(5)))
    with torch.no_grad():
        model[4].weight.copy_(model[0].weight)
        model[1].weight.mul_(model[3].weight)
        model[2].weight.add_(torch.cat([model[0].weight, model[1].weight])[SIDE:])
    return model


def cloned() -> nn.Module:
    """nn.TransformerEncoder copies a layer."""
    layer = nn.TransformerEncoderLayer(96, 4, 384, batch_first=True)
    return nn.Sequential(
        nn.Linear(SIDE, SIDE),
        nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
        nn.Linear(SIDE, SIDE),
    )


class Odd(nn.Module):
    """Parameters that are not what nn.Linear makes."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(SIDE, SIDE).t())
        self.sliced = nn.Parameter(torch.randn(SIDE, 2 * SIDE)[:, ::2])
        self.one, self.none, self.scalar = (
            nn.Parameter(torch.randn(1)),
            nn.Parameter(torch.empty(0, 3)),
            nn.Parameter(torch.randn(())),
        )
        both = torch.randn(2 * SIDE, SIDE)
        self.upper, self.lower = nn.Parameter(both[:SIDE]), nn.Parameter(both[SIDE:])
        self.frozen = nn.Parameter(
            torch.randint(-100, 100, (SIDE, SIDE), dtype=torch.int8), requires_grad=False
        )
        self.mask = nn.Parameter(torch.rand(SIDE, SIDE) < 0.5, requires_grad=False)
        self.halves = nn.Parameter(
            torch.randn(SIDE, SIDE, dtype=torch.float16), requires_grad=False
        )
        self.last = nn.Linear(SIDE, SIDE)
        self.last.weight = nn.Parameter(torch.zeros(SIDE, SIDE))  # the one it had is dropped
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(SIDE, SIDE))
        with torch.no_grad():
            both.mul_(2)  # of which two are views


def drawn_elsewhere() -> nn.Module:
    """Draws from Python's and numpy's generators."""
    model = tiny()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(random.random()).add_(numpy.random.rand())
    return model


FACTORIES = {
    "float32": tiny,
    "bfloat16": lambda: tiny().to(torch.bfloat16),
    "bfloat16 at once": lambda: made_as(torch.bfloat16, lambda: tiny(layers=7)),
    "mixed": lambda: mixed(),
    "tied": lambda: tiny(tied=True),
    "tied bfloat16": lambda: tiny(tied=True).to(torch.bfloat16),
    "applied": applied,
    "scaled by depth": scaled_by_depth,
    "copies": copies,
    "cloned": cloned,
    "odd": Odd,
    "drawn elsewhere": drawn_elsewhere,
}


def made_as(dtype: torch.dtype, factory) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return factory()
    finally:
        torch.set_default_dtype(before)


def mixed() -> nn.Module:
    model = tiny().to(torch.bfloat16)
    for layer in model.layers:
        layer.norm1.float()
        layer.up.float()
    return model


@pytest.fixture
def offload(offload_within):  # noqa: F811
    return lambda model, opt=None, **options: offload_within(
        model, opt, **{"dram": ROOM, **options}
    )


@pytest.fixture
def build(tmp_path, monkeypatch):
    """stoker.build() into the store that the fixture `offload` takes; it has to page while the
    model is made."""
    counts = {"out": 0, "early": 0}
    page_out, leave = Construction._page_out, Construction.leave

    def counted_out(self, param):
        counts["out"] += 1
        page_out(self, param)

    def counted_leave(self, model):
        counts["early"] = counts["out"]
        leave(self, model)

    monkeypatch.setattr(Construction, "_page_out", counted_out)
    monkeypatch.setattr(Construction, "leave", counted_leave)

    def make(factory=tiny, path="store", **options):
        model = stoker.build(
            factory, **{"seed": 0, "store": f"{tmp_path}/{path}", "dram": DRAM, **options}
        )
        assert counts["early"]
        return model

    return make


@pytest.mark.parametrize("name", FACTORIES)
def test_a_built_model_has_the_bits_of_its_factory(build, offload, name):
    factory = FACTORIES[name]
    seeded()
    control = factory()
    drawn = torch.get_rng_state(), random.getstate(), numpy.random.rand()
    seeded()
    model = build(factory)
    assert (
        torch.equal(torch.get_rng_state(), drawn[0])
        and random.getstate() == drawn[1]
        and numpy.random.rand() == drawn[2]
    )
    away = [param for param in model.parameters() if away_of(param) is not None]
    assert len(away) >= len(list(model.parameters())) - 5
    # loud until they are taken up
    assert all(param.isnan().all() for param in away if param.is_floating_point())
    model, opt = offload(model)
    theirs = partition(control, [param for param in control.parameters() if param.requires_grad])
    assert signature(opt._session.blocks) == signature(theirs)
    assert_same_bits(model.state_dict(), control.state_dict())
    assert not opt._session.runtime.store.list("build/")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_built_model_trains_as_any_other(build, offload, dtype):
    make = lambda: tiny(tied=True).to(dtype)
    torch.manual_seed(0)
    control = make()
    theirs = reference.ReferenceOptimizer(adamw(control))
    model, opt = offload(build(make))
    for step in range(3):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same_bits(weights(model), control.state_dict())
    opt.close()
    # of a store with a run nothing is wanted but that
    model, opt = offload(build(make, seed=1), resume=True)
    for step in range(3, 5):
        assert train_step(model, opt, step) == train_step(control, theirs, step)
    assert_same_bits(weights(model), control.state_dict())


# -- what becomes of a built model before it is offloaded ------------------------------------------


def control_of(factory=tiny) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return factory().state_dict()


@pytest.mark.parametrize(
    "wrong, error, sentence",
    [
        ({"resume": True}, errors.NotFound, "pass resume=False"),
        ({"snapshots": 3}, errors.InvalidArgument, "pass snapshots=0"),
        ({"policy": "fast"}, errors.InvalidArgument, "'fast' is not one of"),
        ({"activations": "away"}, errors.InvalidArgument, "'away' is not one of"),
        ({"dram": "2MiB"}, errors.OverBudget, "the smallest budget that works"),
        ({"weights": "nowhere.safetensors"}, FileNotFoundError, "nowhere"),
    ],
)
def test_a_failed_offload_leaves_a_built_model_as_it_is(build, offload, wrong, error, sentence):
    model = build()
    opt = adamw(model)
    for _ in range(2):
        # whose traceback holds what was made by then
        with pytest.raises(error, match=sentence) as kept:
            offload(model, opt, **wrong)
    model, opt = offload(model, opt)
    assert_same_bits(model.state_dict(), control_of())
    assert kept


def test_a_failed_offload_to_a_device(build, offload, monkeypatch):
    """The cap on the device's memory is looked at late, when much is open already."""
    monkeypatch.setattr(
        sys.modules["stoker.offload.open"], "open_link", lambda device: FakeLink(lazy=True)
    )
    model = build()
    with pytest.raises(errors.OverBudget, match="device_memory=") as kept:
        offload(model, device_memory="64KiB")
    model, opt = offload(model)
    assert_same_bits(model.state_dict(), control_of())
    assert kept


@pytest.mark.parametrize("where", ["create", "run"])
def test_an_offload_that_was_interrupted(build, offload, monkeypatch, where):
    """Before the commit of the run: as if it had not been. Behind it: the run is there, at step
    0."""
    model = build()

    def interrupted(session, *args):
        if where == "create":
            args[0](session.params[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(opening if where == "create" else Session, where, interrupted)
        offload(model)
    if where == "run":
        with pytest.raises(errors.InvalidArgument, match="pass resume=True with that store"):
            offload(model)
    model, opt = offload(model, resume=where == "run")
    assert opt.step_count == 0
    assert_same_bits(model.state_dict(), control_of())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: setattr(model.layers[1].up.weight, "data", torch.zeros(512, 128)),
        lambda model: nn.init.zeros_(model.layers[1].up.weight),
        lambda model: nn.init.constant_(model.layers[1].up.bias, 2.0),
    ],
)
def test_a_change_that_the_store_did_not_see_is_refused(build, offload, change):
    model = build()
    change(model)
    for options in ({}, {"resume": "auto"}):
        with pytest.raises(
            errors.InvalidArgument,
            match=(
                r"(embed|layers.1.up).(weight|bias) was converted or written to after"
                r" stoker.build.*inside the factory"
            ),
        ):
            offload(model, **options)


def test_what_may_be_done_to_a_built_model(build, offload):
    """Nothing of this changes a value."""
    model = build(lambda: tiny(tied=True)).to(torch.float32).train().requires_grad_(True).to("cpu")
    model.layers[0].requires_grad_(False)
    model.head.weight = model.embed.weight
    model.to(memory_format=torch.channels_last)
    model, opt = offload(model)
    assert_same_bits(model.state_dict(), control_of(lambda: tiny(tied=True)))


def test_its_dram_is_that_of_offload(build, offload):
    model, opt = offload(build(), dram="24MiB")
    assert opt._session.runtime.core.budget_bytes == 24 << 20
    opt.close()
    model, opt = offload(build(path="other", dram="32MiB"), path="other", dram="12MiB")
    assert opt._session.runtime.core.budget_bytes == 12 << 20


def test_another_store_is_refused(build, offload, tmp_path):
    model = build()
    for resume in (False, "auto"):
        with pytest.raises(
            errors.InvalidArgument,
            match=(
                r"left the values of parameter embed.weight in the store at .*/store, .*pass"
                r" store='.*/store', or build the model again"
            ),
        ):
            offload(model, path=f"other-{resume}", resume=resume)
    assert not (tmp_path / "other-False").exists()  # nothing was made there
    os.symlink(tmp_path / "store", tmp_path / "link")
    model, opt = offload(model, path="link")  # the same by another name
    assert_same_bits(model.state_dict(), control_of())


def test_weights_of_a_folder_take_the_place_of_built_ones(build, offload, tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(7)
    source = tiny().state_dict()
    save_file(
        {name: value for name, value in source.items() if name != "seen"},
        tmp_path / "weights.safetensors",
    )
    model, opt = offload(build(), weights=tmp_path / "weights.safetensors")
    assert_same_bits(model.state_dict(), source)
    assert not opt._session.runtime.store.list("build/")


def test_a_store_that_was_used_since(build, offload):
    """Nobody holds the store between build() and offload(); what it is used for then counts, and
    the first model knows."""
    first, second = build(), build(seed=1)
    with pytest.raises(errors.InvalidArgument, match="another model was made in it since"):
        offload(first)
    del first, second
    gc.collect()
    third, fourth = build(), tiny()
    values = {name: value.clone() for name, value in fourth.state_dict().items()}
    model, opt = offload(fourth)
    assert_same_bits(model.state_dict(), values)
    assert not opt._session.runtime.store.list("build/")
    opt.close()
    with pytest.raises(errors.AlreadyExists):
        offload(third)
    del third
    fifth = build()
    with pytest.raises(errors.AlreadyExists):
        offload(fifth)
    with pytest.raises(
        errors.InvalidArgument, match="found a run in the store at .* with resume=True"
    ):
        offload(fifth, path="other")
    assert all(param.isnan().all() for param in fifth.parameters())
    model, opt = offload(fifth, resume=True)
    assert_same_bits(model.state_dict(), values)


class Adapted(nn.Module):
    """A frozen base, and a new layer beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.extra = nn.Linear(96, 96)

    def forward(self, tokens):
        return self.extra(self.base(tokens))


@pytest.mark.parametrize(
    "wrap",
    [Adapted, torch.compile, lambda model: nn.Sequential(model)],
    ids=["adapted", "compiled", "sequential"],
)
def test_a_built_model_may_be_wrapped(build, offload, wrap):
    torch.manual_seed(0)
    control = tiny()
    torch.manual_seed(1)
    control = wrap(control)
    model = build()
    torch.manual_seed(1)
    model, opt = offload(wrap(model))
    assert_same_bits(model.state_dict(), control.state_dict())


def test_lora_over_a_built_base(build, offload):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up", "qkv"])
    torch.manual_seed(0)
    control = tiny()
    torch.manual_seed(1)
    control = peft.get_peft_model(control, config)
    model = build()
    torch.manual_seed(1)
    model, opt = offload(peft.get_peft_model(model, config))
    assert_same_bits(model.state_dict(), control.state_dict())


def test_a_part_of_a_built_model(build, offload):
    """The rest is gone then, and says so."""
    model = build()
    part, opt = offload(model.layers)
    assert_same_bits(
        part.state_dict(),
        {
            name.removeprefix("layers."): value
            for name, value in control_of().items()
            if name.startswith("layers.")
        },
    )
    opt.close()
    with pytest.raises(errors.InvalidArgument, match="values of parameter weight in the store at"):
        offload(model.embed, path="other")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: swapped(model)], ids=["deepcopy", "swapped"]
)
def test_copies_of_placeholders_are_no_weights(build, offload, copied):
    model = copied(build())
    assert not any(away_of(param) for param in model.parameters())
    with pytest.raises(
        errors.InvalidArgument,
        match="every value of parameter embed.weight is NaN.*inside the factory",
    ):
        offload(model)


def swapped(model: nn.Module) -> nn.Module:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_weights_left_in_another_store_are_no_placeholders_for_a_new_run(offload, resume):
    model, opt = offload(tiny())
    opt.close()
    with pytest.raises(
        errors.InvalidArgument, match="left in the store at .*resume=True with that store"
    ):
        offload(model, path="new", resume=resume)


def test_a_resume_that_failed_does_not_keep_the_weights_for_ever(offload):
    model, opt = offload(tiny())
    expected = weights(model)
    opt.close()
    halves = [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}]
    with pytest.raises(errors.Mismatch, match="parameter groups"):
        offload(model, torch.optim.AdamW(halves), resume=True)
    model, opt = offload(model, resume=True)
    assert_same_bits(weights(model), expected)


# -- the factory -----------------------------------------------------------------------------------


def test_a_factory_that_fails_leaves_the_store_free(build, offload):
    def fails():
        tiny()
        raise RuntimeError("no model today")

    with pytest.raises(RuntimeError, match="no model today"):
        build(fails)
    model, opt = offload(build())
    assert_same_bits(model.state_dict(), control_of())


def test_models_of_other_threads_are_not_touched(build, offload):
    others = []

    def factory():
        model = tiny()
        thread = threading.Thread(
            target=lambda: others.append(nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(4))))
        )
        thread.start()
        thread.join()
        return model

    build(factory)
    assert others and not any(
        away_of(param) or param.isnan().any()
        for model in others
        for param in model.parameters()
        if not param.is_meta
    )


def test_a_store_in_memory_cannot_keep_it():
    with pytest.raises(errors.InvalidArgument, match="'memory:' cannot do; give a directory"):
        stoker.build(tiny, store="memory:", dram=DRAM)
