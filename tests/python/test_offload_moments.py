"""Lossy moments: every policy gives the bits of the un-offloaded run with the same kernels; what
moves; what is kept and given back."""

from __future__ import annotations

import pytest
import torch

import stoker
from models import Tiny, batch, loss_of
from stoker.errors import InvalidArgument, Mismatch
from stoker.offload.model.moments import MODES
from test_offload_equality import (
    CLIP,
    control,
    no_clip,
    offloaded,
    own_clip,
    poison,
    same,
    torch_clip,
)  # noqa: F401 (poison: a fixture)

LOSSY = ["bf16", "8bit"]
STEPS = 12
WIDTH = 112  # a layer's matrices have 150,528 elements: more than a cell of 8-bit moments
DRAM = "9MiB"
# a parameter at most, gradients in memory
BYTES_A_STEP = {"exact": 26.1, "bf16": 18.1, "8bit": 14.2}

CASES = {
    "own_clip": dict(dtype=torch.bfloat16, clip=own_clip),
    "f32": dict(dtype=torch.float32, clip=torch_clip),
    "accumulate_infs": dict(dtype=torch.bfloat16, clip=torch_clip, accumulate=2, inf_at=(3, 7)),
    "frozen": dict(dtype=torch.bfloat16, clip=torch_clip, frozen=True),
    "tied_groups": dict(dtype=torch.bfloat16, clip=own_clip, tied=True, groups=True),
    "adam": dict(dtype=torch.float32, clip=torch_clip, optimizer=torch.optim.Adam),
    "sgd": dict(dtype=torch.bfloat16, clip=torch_clip, optimizer=torch.optim.SGD),
}


@pytest.mark.parametrize("moments", LOSSY)
@pytest.mark.parametrize("case", CASES)
def test_bit_equal(tmp_path, case, moments):
    settings = dict(CASES[case], moments=moments, width=WIDTH)
    seen, state, _ = control(steps=STEPS, **settings)
    fired = sum(
        not norm <= CLIP
        for norm in seen[settings.get("accumulate", 1) :: settings.get("accumulate", 1) + 1]
    )
    assert fired > 0
    for policy in ("sync", "speculate"):
        ours, model, opt = offloaded(
            f"{tmp_path}/{policy}",
            policy,
            steps=STEPS,
            dram=DRAM if settings["dtype"] == torch.bfloat16 else "16MiB",
            **settings,
        )
        assert ours == seen, policy
        same(model, opt, state, "sgd" if case == "sgd" else "adamw")
        opt.close()


def test_modes_differ(tmp_path):
    """They are three roundings, not one: a test that compares a mode with itself would not see a
    mode that is ignored."""
    ends = {
        moments: control(torch.bfloat16, no_clip, 10, moments=moments)[0][-2] for moments in MODES
    }
    assert len(set(ends.values())) == 3
    assert max(ends.values()) - min(ends.values()) < 0.05


def test_the_seed_is_that_of_torch_and_is_stored(tmp_path):
    def run(name, seed, resume_seed):
        torch.manual_seed(0)
        model = Tiny().to(torch.bfloat16)
        original = torch.optim.AdamW(model.parameters(), lr=3e-3)
        torch.manual_seed(seed)
        for steps, resume in ((range(3), False), (range(3, 6), True)):
            model, opt = stoker.offload(
                model,
                original,
                store=f"{tmp_path}/{name}",
                dram="7MiB",
                moments="bf16",
                resume=resume,
            )
            for step in steps:
                loss = loss_of(model, batch(step))
                loss.backward()
                opt.step()
                opt.zero_grad()
            full = opt.state_dict(full=True)["state"][3]["exp_avg"]
            opt.close()
            torch.manual_seed(resume_seed)
        return full

    one, same_seed, other = run("one", 5, 5), run("same", 5, 6), run("other", 6, 5)
    assert torch.equal(one, same_seed)
    assert not torch.equal(one, other)


class Wide(torch.nn.Module):
    """Large layers and short inputs: what a step moves is weights and state, little else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def process_bytes() -> tuple[int, int]:
    """Bytes that this process caused on devices: read, written."""
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


@pytest.mark.parametrize("moments", MODES)
@pytest.mark.parametrize(("policy", "dram"), [("speculate", "28MiB"), ("sync", "36MiB")])
def test_bytes_of_a_step(tmp_path, moments, policy, dram):
    """Under the least memory it takes. (There sync reads weights a third time, for the update, and
    so gets some more.)"""
    torch.manual_seed(0)
    model = Wide().to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        store=f"{tmp_path}/s",
        dram=dram,
        policy=policy,
        moments=moments,
    )
    assert not opt._session.planes.layout.retained, (
        "state that stays in memory would hide what is read"
    )

    def step() -> None:
        model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):  # first steps read zeros that were never written, and learn the order
        step()
    opt.flush()
    opt.restart_ledger()
    before, steps = process_bytes(), 6
    counted = opt._session.counters()
    for _ in range(steps):
        step()
    opt.flush()
    after = process_bytes()
    now = opt._session.counters()
    moved = {
        way: {name: (now[way][name] - counted[way][name]) / parameters / steps for name in now[way]}
        for way in ("read_bytes", "written_bytes")
    }
    element = {"exact": 4, "bf16": 2, "8bit": 132 / 128}[moments]
    for way in moved.values():
        assert way["m"] == way["v"] == element and way["remainder"] == 2
    assert moved["written_bytes"]["weights"] == 2
    total = sum(sum(way.values()) for way in moved.values())
    assert total <= BYTES_A_STEP[moments], moved
    # the kernel's count has the journal and all else in it
    device = (sum(after) - sum(before)) / parameters / steps
    assert device <= BYTES_A_STEP[moments]
    if after[1] > before[1]:  # else the file system has no device below it
        assert device == pytest.approx(total, rel=0.01)
    planned = opt.plan()["step"]
    for way, each in moved.items():
        for plane in ("m", "v", "remainder"):
            assert planned[way][plane] == pytest.approx(each[plane] * parameters, rel=0.01)
    opt.close()


@pytest.mark.parametrize("moments", MODES)
def test_plan_counts_the_planes_as_they_are(tmp_path, moments):
    model = Tiny(width=WIDTH).to(torch.bfloat16)
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        store=f"{tmp_path}/s",
        dram="16MiB",
        moments=moments,
    )
    session, algorithm = opt._session.planes.session, opt._session.algorithm
    for block in opt._session.blocks:
        for unit in block.updated_units:
            planes = session.planes(unit.session_id)
            assert {
                "m": planes["m"]["bytes"],
                "v": planes["v"]["bytes"],
                "remainder": planes["r"]["bytes"],
            } == algorithm.state_bytes(unit)
            session.check_block(unit.session_id)
    assert opt._session.planes.layout.tile == algorithm.tile_bytes(
        opt._session.planes.layout.tile_elements
    )
    opt.close()


def test_a_resume_with_another_mode_is_refused(tmp_path):
    def offload(moments, resume):
        torch.manual_seed(0)
        model = Tiny().to(torch.bfloat16)
        return stoker.offload(
            model,
            torch.optim.AdamW(model.parameters()),
            store=f"{tmp_path}/s",
            dram="8MiB",
            moments=moments,
            resume=resume,
        )

    with pytest.raises(InvalidArgument, match="moments 'fp8' is not one of exact, bf16, 8bit"):
        offload("fp8", False)
    offload("8bit", False)[1].close()
    for other in ("exact", "bf16"):
        with pytest.raises(
            Mismatch,
            match=f'keeps its moments as "8bit", not "{other}"; resume it with moments="8bit"',
        ):
            offload(other, True)
    offload("8bit", True)[1].close()


@pytest.mark.parametrize("moments", LOSSY)
def test_a_resume_under_another_cap_goes_on_with_the_same_bits(tmp_path, moments):
    """A larger cap has larger tiles, and a run keeps those that it began with. What lies where in a
    plane does not depend on them."""

    def run(name, caps):
        torch.manual_seed(0)
        model = Tiny(width=160).to(torch.bfloat16)
        original = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step, tiles = 0, []
        for dram in caps:
            model, opt = stoker.offload(
                model,
                original,
                store=f"{tmp_path}/{name}",
                dram=dram,
                moments=moments,
                resume="auto",
            )
            tiles.append(opt._session.planes.layout.tile_elements)
            for _ in range(4):
                loss_of(model, batch(step)).backward()
                opt.step()
                opt.zero_grad()
                step += 1
            full = opt.state_dict(full=True)["state"]
            opt.close()
        return full, tiles

    expected, small = run("one", ["14MiB"] * 3)
    ours, large = run("other", ["96MiB", "48MiB", "96MiB"])
    assert set(large) == {large[0]} and large[0] > small[0]
    for index, entry in expected.items():
        for name, value in entry.items():
            assert torch.equal(value, ours[index][name]), name


@pytest.mark.parametrize("moments", LOSSY)
def test_full_state_is_float32_and_comes_back_unchanged(tmp_path, moments):
    def offload(name, options):
        torch.manual_seed(0)
        model = Tiny(width=WIDTH).to(torch.bfloat16)
        return stoker.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3),
            store=f"{tmp_path}/{name}",
            dram=DRAM,
            **options,
        )

    def go_on(model, opt, steps):
        for step in steps:
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
        return opt.state_dict(full=True)

    model, opt = offload("a", {"moments": moments})
    full = go_on(model, opt, range(5))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = go_on(model, opt, range(5, 8))
    opt.close()
    assert all(
        entry[name].dtype == torch.float32
        for entry in full["state"].values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    other, other_opt = offload("b", {"moments": moments})
    other.load_state_dict(weights)
    other_opt.load_state_dict(full)
    assert_same_state(other_opt.state_dict(full=True), full)
    # keyed by seed, step, parameter and element: what follows is the same as well
    assert_same_state(go_on(other, other_opt, range(5, 8)), expected)
    other_opt.close()


def assert_same_state(ours, theirs):
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        for name, value in entry.items():
            assert torch.equal(ours["state"][index][name], value), (index, name)


@pytest.mark.parametrize("moments", LOSSY)
def test_an_ordinary_optimizer_state_is_taken_over(tmp_path, moments):
    torch.manual_seed(0)
    model = Tiny()
    original = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(4):
        loss_of(model, batch(step)).backward()
        original.step()
        original.zero_grad()
    theirs = {
        name: {key: original.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")}
        for name, p in model.named_parameters()
    }
    model, opt = stoker.offload(
        model, original, store=f"{tmp_path}/s", dram="16MiB", moments=moments
    )
    names = {id(p): name for name, p in model.named_parameters()}
    full = opt.state_dict(full=True)["state"]
    for index, param in enumerate(p for group in opt.param_groups for p in group["params"]):
        assert full[index]["step"] == 4
        for key, value in theirs[names[id(param)]].items():
            assert close(moments, key, full[index][key], value), (names[id(param)], key)
    loss_of(model, batch(4)).backward()
    opt.step()
    opt.close()


def levels(bits: int) -> torch.Tensor:
    """docs/formats/planes.md: the levels that `bits` bits count, in float64."""
    steps = [(10.0 ** (p + 1 - bits), 1 << p) for p in range(bits)]
    return torch.tensor(
        [0.0]
        + [
            end * (0.1 + 0.9 * i / count if count > 1 else 1.0)
            for end, count in steps
            for i in range(1, count + 1)
        ],
        dtype=torch.float64,
    )


def close(moments, key, ours, value) -> bool:
    """Whether what is kept is the nearest there is (of two about equally near ones either)."""
    if moments == "bf16":
        return torch.allclose(ours, value, rtol=2**-8, atol=1e-38)
    ours, value, table = ours.double().flatten(), value.double().flatten(), levels(7)
    if key == "exp_avg_sq":
        ours, value, table = ours.sqrt(), value.sqrt(), levels(8)
    groups = torch.nn.functional.pad(value.abs(), (0, -value.numel() % 256)).view(-1, 256)
    scale = groups.amax(1).repeat_interleave(256)[: value.numel()]
    nearest = (value.abs().unsqueeze(1) - scale.unsqueeze(1) * table).abs().amin(1)
    # never 0
    nearest = torch.where(
        (key == "exp_avg_sq") & (value > 0),
        torch.maximum(nearest, scale * table[1] - value),
        nearest,
    )
    return bool(((ours - value).abs() <= nearest + 1e-7 * scale + 1e-4 * value.abs()).all())
