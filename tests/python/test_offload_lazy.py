"""Policy lazy: what a decided step owes is made up for before anybody could see that it was not
there yet."""

from __future__ import annotations

import copy
import itertools
import re
import time

import pytest
import torch

import reference
import stoker
from models import Tiny, batch, loss_of
from stoker import errors
from stoker.offload.steps.steps import Steps

TIGHT = "7MiB"


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny().to(torch.bfloat16)


@pytest.fixture
def pair(tmp_path):
    """(un-offloaded model, its reference optimizer, the same offloaded, its optimizer)"""
    control, model = tiny(), tiny()
    expected = reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3))
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        store=f"{tmp_path}/s",
        dram=TIGHT,
        policy="lazy",
    )
    yield control, expected, model, opt
    opt.close()


def train(model, opt, steps) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()


def both(pair, steps) -> None:
    control, expected, model, opt = pair
    train(control, expected, steps)
    train(model, opt, steps)


def owed(opt) -> bool:
    return bool(opt._session.steps.late)


def weights(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(pair) -> None:
    control, _, model, _ = pair
    ours, theirs = weights(model), weights(control)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_step_owes_and_the_next_forward_pays(pair):
    control, expected, model, opt = pair
    both(pair, range(3))
    assert owed(opt) and opt.step_count == 3 and opt.committed_step == 2
    loss_of(control, batch(3)).backward()
    loss_of(model, batch(3)).backward()
    assert not owed(opt)
    opt.flush()
    assert opt.committed_step == 3
    same(pair)


LOOKS = {
    "state_dict": lambda model, opt: weights(model),
    "optimizer state": lambda model, opt: opt.state_dict(full=True),
    "evaluation": lambda model, opt: _evaluate(model),
    "a copy": lambda model, opt: copy.deepcopy(model),
    "zeros in place": lambda model, opt: opt.zero_grad(set_to_none=False),
    "flush": lambda model, opt: opt.flush(),
}


def _evaluate(model) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(99))
    model.train()


@pytest.mark.parametrize("look", LOOKS)
def test_nobody_sees_weights_that_are_owed_an_update(pair, look):
    control, expected, model, opt = pair
    for step in range(4):
        both(pair, [step])
        LOOKS[look](model, opt)
        assert not owed(opt)
        same(pair)
    assert opt.ledger.last["policy"] == "lazy"


def test_updated_weights_stay_in_memory(tmp_path):
    """With room for all of the weights none is read again: what a late update computes is what
    forward uses."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        store=f"{tmp_path}/s",
        dram="64MiB",
        policy="lazy",
    )
    rows = []
    opt.ledger.on_step(rows.append)
    train(model, opt, range(6))
    opt.close()
    assert [row["read_bytes"]["weights"] for row in rows[3:]] == [0, 0, 0], [
        row["read_bytes"] for row in rows
    ]


def test_a_part_that_is_looked_at_is_made_up_for_alone(pair):
    control, _, model, opt = pair
    both(pair, range(3))
    with stoker.gather(model.layers[4].up.weight):
        assert torch.equal(model.layers[4].up.weight, control.layers[4].up.weight)
    assert owed(opt)
    # a look at one is enough
    assert torch.equal(model.layers[5].up.weight, control.layers[5].up.weight)
    both(pair, [3])
    same(pair)


def test_scaling_gradients_after_step_is_noticed(pair):
    _, _, model, opt = pair
    train(model, opt, range(3))
    loss_of(model, batch(3)).backward()
    opt.step()
    model.zero_grad(set_to_none=False)  # torch's own, of which the optimizer hears nothing
    with pytest.raises(
        errors.StokerError, match="were changed after opt.step\\(\\), but policy lazy"
    ):
        loss_of(model, batch(4))
    assert opt.step_count == 3 and not owed(opt)
    opt.zero_grad()
    train(model, opt, range(3, 6))
    control = tiny()
    train(
        control,
        reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3)),
        range(6),
    )
    assert all(
        torch.equal(weights(model)[name], value)
        for name, value in weights(control).items()
        if name != "seen"
    )


@pytest.mark.parametrize("zero", ["model", "by hand"])
def test_a_loop_that_zeroes_in_place_is_not_made_lazy_by_auto(tmp_path, zero):
    control, model = tiny(), tiny()
    expected = reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3))
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    policies = []
    for step in range(6):
        for each, by in ((control, expected), (model, opt)):
            loss_of(each, batch(step)).backward()
            next(each.parameters()).grad.mul_(0.5)  # so updates have to be done again
            by.step()
            if zero == "model":
                each.zero_grad(set_to_none=False)
            else:
                for param in each.parameters():
                    param.grad.detach_()
                    param.grad.zero_()
        policies.append(opt.ledger.last["policy"])
    assert set(policies[1:]) <= {"sync", "speculate"} and "sync" in policies
    assert all(torch.equal(weights(model)[name], value) for name, value in weights(control).items())
    opt.close()


def test_gradients_zeroed_while_an_update_reads_them_are_noticed(pair, monkeypatch):
    """The core hashes a gradient and then reads it again; what counts are the bytes behind the last
    read."""
    _, _, model, opt = pair
    train(model, opt, range(3))
    late = opt._session.steps.late
    finish = type(late).finish

    def zeroed(self, block):
        for update in self.updates:
            update.wait_computed()
            for segment in update.segments:
                segment.grad.zero_()
        finish(self, block)

    monkeypatch.setattr(type(late), "finish", zeroed)
    with pytest.raises(errors.StokerError, match="were changed after"):
        loss_of(model, batch(3))
    assert opt.step_count == 2


@pytest.mark.parametrize("where", ["start", "promote", "take", "close", "restart"])
def test_an_interrupt_leaves_this_step_or_the_one_before(pair, monkeypatch, where):
    control, expected, model, opt = pair
    both(pair, range(3))
    steps = opt._session.steps
    owner = {
        "start": steps,
        "promote": opt._session.pager,
        "take": steps.late,
        "close": steps,
        "restart": opt._session.pager,
    }[where]
    calls, whole = 0, getattr(owner, where)

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == (1 if where in ("close", "restart") else 4):
            raise KeyboardInterrupt
        return whole(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, opt, [3])
    opt.zero_grad()
    done = opt.step_count  # steps of which nothing is lost
    assert done in (2, 3)
    again = tiny()
    reference_again = reference.ReferenceOptimizer(torch.optim.AdamW(again.parameters(), lr=3e-3))
    train(again, reference_again, range(done))
    train(again, reference_again, [3, 4])
    train(model, opt, [3, 4])
    opt.flush()
    assert opt.committed_step == done + 2
    assert all(
        torch.equal(weights(model)[name], value)
        for name, value in weights(again).items()
        if name != "seen"
    )


def test_hyperparameters_are_those_of_step(pair):
    control, expected, model, opt = pair
    for step in range(4):
        both(pair, [step])
        for each in (expected, opt):
            for group in each.param_groups:
                group["lr"] *= 0.5
    same(pair)


def test_auto_is_lazy_while_updates_often_have_to_be_done_again(tmp_path):
    control, model = tiny(), tiny()
    expected = reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3))
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    policies = []
    for step in range(60):
        for each, by in ((control, expected), (model, opt)):
            loss_of(each, batch(step)).backward()
            if step in (4, 5, 12, 13, 33, 40, 46):
                next(each.parameters()).grad.mul_(0.5)
            by.step()
            by.zero_grad()
        policies.append(opt.ledger.last["policy"])
    assert policies == ["speculate"] * 13 + ["lazy"] * 20 + ["speculate"] * 14 + ["lazy"] * 13
    assert switches(opt) == [
        (14, "lazy", in_vain(opt, 13)),
        (34, "speculate", "20 steps have passed"),
        (48, "lazy", in_vain(opt, 14)),
    ]
    assert all(torch.equal(weights(model)[name], value) for name, value in weights(control).items())
    opt.close()


def switches(opt) -> list[tuple]:
    return [
        (event["step"], event["policy"], event["reason"])
        for event in opt.ledger.events
        if event["what"] == "policy"
    ]


def in_vain(opt, steps: int) -> str:
    """The reason of a pause, after so many steps of speculation of which three were scaled by
    `next(model.parameters()).grad`."""
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    return (
        f"3 of the last {steps} steps speculated in vain: 1 of {units} updates had to be done again"
    )


@pytest.mark.parametrize(("every", "pauses"), [(100, 0), (10, 0), (7, 2)])
def test_auto_goes_on_speculating_while_updates_seldom_have_to_be_done_again(
    tmp_path, every, pauses
):
    """In one step of ten, as of clips that fire now and then, it gains more than it loses."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    for step in range(60):
        loss_of(model, batch(step)).backward()
        if step % every == 0:
            next(model.parameters()).grad.mul_(0.5)
        opt.step()
        opt.zero_grad()
    assert [reason for _, policy, reason in switches(opt) if policy == "lazy"] == [
        in_vain(opt, 15)
    ] * pauses
    assert opt.ledger.summary()["redone"] == (3 * pauses or len(range(0, 60, every)))
    opt.close()


def test_the_ledger_says_why_a_pause_is_spent_in_sync_and_why_it_ends(tmp_path):
    """A loop that keeps its gradients for some steps in the middle of the pause, and from then on
    once more."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    for step in range(32):
        loss_of(model, batch(step)).backward()
        if step in (0, 1, 2, 28, 29, 30):
            next(model.parameters()).grad.mul_(0.5)
        opt.step()
        opt.zero_grad(set_to_none=not (10 <= step < 15 or step >= 18))
    kept, dropped = (
        "the loop keeps its gradients over step()",
        "the loop sets its gradients to None behind step()",
    )
    assert switches(opt) == [
        (4, "lazy", in_vain(opt, 3)),
        (12, "sync", kept),
        (17, "lazy", dropped),
        (20, "sync", kept),
        (24, "speculate", "20 steps have passed"),
        (32, "sync", in_vain(opt, 8)),
    ]
    opt.close()


def test_the_ledger_says_that_the_norm_passed_the_limit(tmp_path):
    """Before any update was made that would have to be done again."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    for step in range(5):
        opt._session.steps.clips(1e-9)  # as an integration that knows it tells
        loss_of(model, batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
        opt.step()
        opt.zero_grad()
    assert switches(opt) == [
        (
            4,
            "lazy",
            (
                "3 of the last 3 steps speculated in vain: the gradient norm passed the limit"
                " before the last update"
            ),
        )
    ]
    assert opt.ledger.summary()["redone"] == 0
    opt.close()


@pytest.mark.parametrize(
    ("limit", "clips", "why"),
    [
        (
            1e4,
            1,
            (
                "the gradient norm passed the limit during backward, where gradients were still"
                " scaled, as by a GradScaler, and not behind it"
            ),
        ),
        (1e-3, 1, "the gradient norm passed the limit before the last update"),
        (1e-3, 2, "the gradient norm passed the limit before the last update"),
    ],
)
def test_the_ledger_says_that_it_was_the_norm_of_scaled_gradients_that_passed_the_limit(
    tmp_path, limit, clips, why
):
    """Where that of the gradients themselves does not. Speculation was in vain either way: each
    step unscales them behind backward."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for step in range(5):
        scaler.scale(loss_of(model, batch(step))).backward()
        scaler.unscale_(opt)
        norms = [opt.clip_grad_norm_(limit).item() for _ in range(clips)]
        assert (norms[0] <= limit) == (limit > 1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert switches(opt) == [(4, "lazy", f"3 of the last 3 steps speculated in vain: {why}")]
    opt.close()


def clipped(pair, step: int, limit: float | None) -> None:
    """A step of both, clipped to the limit."""
    control, expected, model, opt = pair
    for each, by in ((control, expected), (model, opt)):
        loss_of(each, batch(step)).backward()
        if limit is not None:
            (
                opt.clip_grad_norm_(limit)
                if by is opt
                else reference.clip(list(each.parameters()), limit)
            )
        by.step()
        by.zero_grad()


def pair_of(tmp_path, policy: str, **options) -> tuple:
    control, model = tiny(), tiny()
    expected = reference.ReferenceOptimizer(torch.optim.AdamW(control.parameters(), lr=3e-3))
    return (
        control,
        expected,
        *stoker.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=3e-3),
            store=f"{tmp_path}/s",
            dram=TIGHT,
            policy=policy,
            **options,
        ),
    )


@pytest.mark.parametrize("policy", ["speculate", "lazy", "auto"])
def test_a_limit_ends_with_the_clips(tmp_path, policy):
    """Two steps are clipped. The third is expected to be, so its speculation stops; that it was not
    is held against nobody, and the fourth knows."""
    pair = pair_of(tmp_path, policy)
    opt, rows = pair[3], []
    opt.ledger.on_step(rows.append)
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    for step in range(8):
        clipped(pair, step, 1e-3 if step < 2 else None)
    if policy != "lazy":
        assert [(row["kept"], row["redone"]) for row in rows] == [
            (0, units),
            (0, 0),
            (0, 0),
            *[(units, 0)] * 5,
        ]
    assert {row["policy"] for row in rows} == {
        "lazy" if policy == "lazy" else "speculate"
    } and switches(opt) == []
    same(pair)
    opt.close()


def test_a_limit_ends_while_nobody_speculates(tmp_path):
    """Clips in the first half of a pause: behind it nothing stops, and there is no other pause."""
    pair = pair_of(tmp_path, "auto")
    opt, rows = pair[3], []
    opt.ledger.on_step(rows.append)
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    for step in range(30):
        clipped(pair, step, 1e-3 if step < 12 else None)
    passed = (
        "3 of the last 3 steps speculated in vain: the gradient norm passed the limit before the"
        " last update"
    )
    assert switches(opt) == [(4, "lazy", passed), (24, "speculate", "20 steps have passed")]
    assert all((row["kept"], row["redone"]) == (units, 0) for row in rows[23:])
    same(pair)
    opt.close()


def test_updates_that_are_abandoned_for_one_without_a_gradient_count_as_done_again(tmp_path):
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    for step in range(5):
        loss_of(model, batch(step)).backward()
        for param in model.layers[2].parameters():
            param.grad = None
        opt.step()
        opt.zero_grad()
    again = (
        f"3 of the last 3 steps speculated in vain: {units - 1} of {units - 1} updates had to be"
        " done again"
    )
    assert switches(opt) == [(4, "lazy", again)]
    assert opt.ledger.summary()["redone"] == 3 * (units - 1)
    opt.close()


CLEARED = ("at once", "before the next", "by the model", "never")


@pytest.mark.parametrize(
    ("policy", "cleared"),
    [*itertools.product(("speculate", "lazy"), CLEARED), ("auto", "at once"), ("sync", "never")],
)
def test_a_backward_without_step_changes_nothing(tmp_path, policy, cleared):
    """As of a loss that is no number: two of them one after the other, and one alone. What is never
    cleared is added to."""
    pair = pair_of(tmp_path, policy)
    control, expected, model, opt = pair
    units, skipped = sum(len(block.updated_units) for block in opt._session.blocks), (2, 5, 6)
    for step in range(9):
        for each, by in ((control, expected), (model, opt)):
            if cleared == "before the next":
                by.zero_grad()
            loss_of(each, batch(step)).backward()
            if step in skipped:
                if cleared in ("at once", "by the model"):
                    (by if cleared == "at once" else each).zero_grad()
                continue
            by.step()
            if cleared != "before the next":
                by.zero_grad()
    same(pair)
    summary = opt.ledger.summary()
    assert opt.step_count == 6 and switches(opt) == []
    assert (summary["wasted"], summary["redone"]) == (
        3 * units if policy in ("speculate", "auto") else 0,
        0,
    )
    opt.close()


def test_updates_of_steps_that_are_skipped_are_in_vain(tmp_path):
    """In every second step there is one backward too many, which no step before it could tell
    of."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), store=f"{tmp_path}/s", dram=TIGHT
    )
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    for step in range(8):
        for micro in range(1 + step % 2):
            opt.zero_grad()
            loss_of(model, batch(step, micro)).backward()
        opt.step()
        opt.zero_grad()
    assert switches(opt) == [
        (
            7,
            "lazy",
            (
                f"3 of the last 6 steps speculated in vain: {units} updates were made, and no"
                " step() followed"
            ),
        )
    ]
    assert opt.ledger.summary()["wasted"] == 3 * units
    opt.close()


def test_a_step_that_is_skipped_does_not_keep_the_next_one_from_speculating(tmp_path):
    """Nothing was updated before the norm passed the limit, and then there was no step()."""
    model, opt = tiny(), None
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        store=f"{tmp_path}/s",
        dram=TIGHT,
        policy="speculate",
    )
    for step, limit in enumerate((1e-9, 1e9, 1e9)):
        loss_of(model, batch(step)).backward()
        opt.clip_grad_norm_(limit)  # that of the next backward
        if step != 1:
            opt.step()
        opt.zero_grad()
    assert opt.ledger.last["kept"] == sum(len(block.updated_units) for block in opt._session.blocks)
    opt.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("accumulate", "micros"), [(2, 2), (None, 2), (None, 1)])
def test_micro_batches_of_a_step_that_is_skipped_count_for_no_other(
    tmp_path, accumulate, micros, late
):
    """late: zero_grad() comes between the first forward of a step and its backward."""
    pair = pair_of(tmp_path, "speculate", accumulate=accumulate)
    control, expected, model, opt = pair
    units = sum(len(block.updated_units) for block in opt._session.blocks)
    for step in range(5):
        for each, by in ((control, expected), (model, opt)):
            for micro in range(micros):
                loss = loss_of(each, batch(step, micro))
                if late and micro == 0:
                    by.zero_grad()
                loss.backward()
            if step != 2:
                by.step()
            if not late:
                by.zero_grad()
    same(pair)
    # in its first step, that a second call follows
    summary, learns = opt.ledger.summary(), accumulate is None and micros == 2
    assert (summary["kept"], summary["wasted"], summary["redone"]) == (
        4 * units,
        (2 if learns else 1) * units,
        0,
    )
    assert opt.ledger.last["kept"] == units
    opt.close()


class _Slow:
    def __init__(self, job) -> None:
        self._job, self._waited = job, False

    def __getattr__(self, name):
        return getattr(self._job, name)

    def written(self) -> bool:
        return self._waited

    def wait_written(self) -> None:
        self._job.wait_written()
        self._waited = True


@pytest.mark.parametrize("policy", ["sync", "speculate", "lazy", "auto"])
@pytest.mark.parametrize("above", [0, 1, 2, 3, 5])
def test_the_smallest_budgets_do(tmp_path, monkeypatch, policy, above):
    """Memory that new weights are written from comes free for what is needed now, also while their
    block's turn is yet to come, on a disk that is never done before somebody waits for it."""
    start = Steps._start

    def slowly(self, *args, **named):
        update = start(self, *args, **named)
        update.job = _Slow(update.job)
        return update

    monkeypatch.setattr(Steps, "_start", slowly)
    torch.manual_seed(0)
    model = Tiny(width=256).to(torch.bfloat16)
    with pytest.raises(errors.OverBudget, match="the smallest budget that works") as refused:
        stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store=f"{tmp_path}/small", dram="2MiB"
        )
    dram = int(re.search(r'dram="(\d+)MiB"', str(refused.value)).group(1)) + above
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        store=f"{tmp_path}/s",
        dram=f"{dram}MiB",
        policy=policy,
    )
    for layer in model.layers:
        # updates that were begun ahead are done long before their turn
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    for step in range(4):
        loss_of(model, batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # it fires
        opt.step()
        opt.zero_grad()
    opt.close()
