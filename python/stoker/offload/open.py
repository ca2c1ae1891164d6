"""offload(): checks what a user gave, opens the store, and makes the session over it."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Literal, Protocol

import torch
from torch import nn

from stoker import _core
from stoker.errors import AlreadyExists, InvalidArgument, NotFound, StokerError
from stoker.offload.division.amounts import parse_bytes, whole
from stoker.offload.division.layout import store_capacity
from stoker.offload.model.absent import (
    check_reachable,
    check_values,
    forget,
    leave_meta,
    leave_meta_buffers,
    stored_weights,
    values_in,
)
from stoker.offload.model.algorithm import algorithm_of
from stoker.offload.model.blocks import Block, partition
from stoker.offload.model.compiled import refuse_cuda_graphs
from stoker.offload.observe.heap import keep_heap
from stoker.offload.observe.process import sleep_between_operators
from stoker.offload.paging.link import HostLink, open_link
from stoker.offload.planning.products import quick_look
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.ranks.ranks import Ranks
from stoker.offload.run import closing, opening
from stoker.offload.run.access import install_shards, install_state_dict
from stoker.offload.run.build import left_behind
from stoker.offload.run.choices import Choices
from stoker.offload.run.optimizer import OffloadedOptimizer
from stoker.offload.run.session import Session
from stoker.offload.run.snapshots import ONE_RANK, check_room, check_room_to_copy
from stoker.offload.run.step_record import check_stored
from stoker.offload.storage.buffers import stored_bytes
from stoker.offload.storage.open_store import open_runtime
from stoker.offload.storage.record import META_MODEL


class Restorable(Protocol):
    """stoker.Checkpoints, or one of them."""

    def fill(
        self, store: _core.Store, blocks: list[Block], agreement: Agreement | None = None
    ) -> bool:
        """Brings a run into the store, or leaves it; whether it did."""


LARGE = 1 << 20  # parameters; for fewer nobody waits for a product


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    store: str | os.PathLike,
    dram: int | str,
    policy: Literal["auto", "sync", "speculate", "lazy"] = "auto",
    accumulate: int | None = None,
    weights: str | os.PathLike | None = None,
    resume: bool | Literal["auto"] = False,
    snapshots: int = 0,
    device: str | torch.device | None = None,
    device_memory: int | str | None = None,
    moments: Literal["exact", "bf16", "8bit"] = "exact",
    activations: Literal["keep", "disk", "dram", "recompute", "auto"] = "keep",
    activations_form: Literal["exact", "sparse", "bf16"] = "exact",
    stall_seconds: int = 300,
    on_nan: Literal["warn", "raise"] = "warn",
    restore: Restorable | None = None,
    checkpoints: object | None = None,
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Moves the model's weights and the optimizer's state into `store`; training goes on with the
    returned pair as before.

    Example:

        model, opt = stoker.offload(
            model, torch.optim.AdamW(model.parameters()), store="run", dram="2GiB", resume="auto"
        )
        for step in range(opt.step_count, steps):
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
        opt.close()

    model: any nn.Module whose trained weights are bfloat16 (an exact float32 master is kept) or
    float32.

    optimizer: torch.optim.AdamW, Adam or SGD over parameters of `model`. Schedulers made from it,
    or from the returned one, both work.

    store: a directory (or several, comma-separated: one a disk; they share it by how fast they
    are); made if missing. Of a model that stoker.build() made: the one it was given.

    dram: hard cap in bytes, or "20GiB", on weights, gradients, optimizer state, staging and the
    store's map in memory. Gradients that find no room in it go to scratch files in `store`, and
    p.grad is a tensor that fetches them (docs/gradients.md).

    policy: when updates run; all give the same bits. "sync": in step(). "speculate": during
    backward, and those again in step() whose gradients or hyperparameters were changed in between,
    as by clipping. "lazy": in the next forward, each before its block is used; gradients must be
    left alone until then. "auto": speculates. When that was wasted in 3 of 20 steps, it is lazy for
    the next 20. It is sync instead in a loop that keeps its gradients, and under fully_shard(),
    which gathers weights ahead of their use.

    accumulate: backwards a step, if known (else learned).

    weights: a folder of safetensors files, or one file, with the initial weights. They are for a
    model on the meta device, or take the place of those that the model has.

    resume: True continues the run in the store; "auto" does so if there is one. False on a store
    that holds a run is an error.

    device: where the model computes ("cpu", "cuda", "cuda:1"); default: where its parameters are.
    Weights are copied there for their use. Gradients stay there until step(), and are not counted
    in dram. Updates run on the CPU. Buffers are moved, inputs are yours to move.

    device_memory: cap in bytes, or "8GiB", on weights on that device; default: what one use needs
    and as much fetched ahead.

    moments: how the optimizer's running means are kept: "exact" is float32; "bf16" and "8bit" are
    lossy and move 8 and 12 bytes a parameter less in a step with AdamW. They are rounded
    stochastically, the same way whatever the policy.

    activations: where goes what autograd saves in forward for backward. "keep": it stays in memory.
    "disk": to scratch files in `store`, by way of a part of dram. "dram": to a part of dram (from a
    GPU, to host memory), and beyond that to scratch files. "recompute": nowhere; repeated layers
    keep their inputs and run again in backward. "auto": the disk or again, by layer, as measured.
    All give the same bits (docs/activations.md).

    activations_form: how they go. "sparse": masks as bits, and without zeros what is mostly zeros;
    the same bits. "bf16" is lossy: float32 ones are rounded to bfloat16, and gradients are no
    longer those of a run in memory.

    stall_seconds: how long a disk may be silent, with something asked of it, before it is given up:
    an IoError that ends the run. The log names it after 30 s, or half of a shorter time
    (docs/io.md).

    on_nan: what becomes of a step whose gradients hold NaN or infinity, and weights become NaN.
    "warn" makes it, and says so once. "raise" refuses it with NotFinite before it is committed: the
    run stays at the step before. Recommended: on_nan="raise" with snapshots=1, so that a run that
    went wrong before its gradients did can go back too.

    restore: a stoker.Checkpoints that saved such a run, or its `at(step)`. A store without a run,
    or with an older step of one, becomes what the newest sound checkpoint holds, masters and
    moments included. The run goes on from there. A newer step in the store wins, unless at(step) is
    given. Where there is no checkpoint yet, it changes nothing. Any number of ranks may have saved
    it; the stores of a run keep its number, so give other ranks new ones.

    checkpoints: the stoker.Checkpoints that will save this run. The store gets room for the step
    that a save copies, as much of the disk as one more of `snapshots`.

    A model that torch's fully_shard() gave to several processes: call it on each of them. Optimizer
    state is offloaded shard by shard, in the folder rank-N of `store`; weights stay in memory;
    steps are committed by all ranks or none.

    snapshots: how many earlier steps opt.snapshot() can keep; each takes as much of the disk as all
    that a step changes.

    Raises OverBudget (naming the smallest budget that works), Mismatch (the store belongs to
    another model), Busy (in use), AlreadyExists, NotFound, OutOfSpace, InvalidArgument.
    """
    if resume is not True and resume is not False and resume != "auto":
        raise InvalidArgument(f'resume: {resume!r} is none of True, False and "auto"')
    snapshots = whole(
        "snapshots", snapshots, "is not a number of snapshots; give 0 or more", least=0
    )
    if accumulate is not None:
        told = "is not a number of backwards a step; give 1 or more, or None to have it learned"
        accumulate = whole("accumulate", accumulate, told)
    algorithm = algorithm_of(optimizer, moments)
    ranks = Ranks.of(model)
    agreement = Agreement(ranks) if ranks is not None else None
    own = set(model.parameters())
    optimized = [param for group in optimizer.param_groups for param in group["params"]]
    if strangers := [param for param in optimized if param not in own]:
        raise InvalidArgument(
            f"the optimizer holds {len(strangers)} parameters that are not the model's; offload()"
            " takes one model with its optimizer"
        )
    if any(hasattr(param, "_stoker_session") for param in own):
        raise InvalidArgument("this model is offloaded already; close() its optimizer first")
    check_reachable(model, os.fspath(store), elsewhere=bool(resume) or weights is not None)
    if not any(param.requires_grad for param in optimized):
        raise InvalidArgument(
            "no parameter of the optimizer requires a gradient: there is nothing to train"
        )
    refuse_cuda_graphs(model)
    link = open_link(torch.device(device) if device is not None else _device_of(own))
    if link is None:
        _warn_of_a_slow_type(own)
    blocks = partition(model, optimized, algorithm.moments.group)
    buffers = stored_bytes(dict(model.named_buffers()))
    if agreement is not None:
        _check_shared(policy, snapshots, device, device_memory, weights, activations)
        link = link or HostLink()
        # for the step that all ranks have
        place, kept = agreement.ranks.place, 1 + (checkpoints is not None)
        room = store_capacity(blocks, algorithm, kept, buffers)
        runtime = agreement.ranks.guard(
            "open",
            lambda: open_runtime(
                place(os.fspath(store)),
                parse_bytes("dram", dram),
                room,
                stall_seconds,
                blocks,
                algorithm,
                spills=False,
                sharers=agreement.ranks.world,
            ),
        )
    else:
        room = store_capacity(blocks, algorithm, snapshots + (checkpoints is not None), buffers)
        runtime = open_runtime(
            os.fspath(store),
            parse_bytes("dram", dram),
            room,
            stall_seconds,
            blocks,
            algorithm,
            spills=link is None,
        )
    session: Session | None = None
    try:
        leave_meta(blocks)
        if agreement is not None:
            holds_run = agreement.meet(runtime, restores=restore is not None)
        else:
            holds_run = runtime.holds(META_MODEL)
        if restore is not None:
            holds_run = restore.fill(runtime.store, blocks, agreement) or holds_run
            resume = resume or ("auto" if holds_run else False)
        if holds_run and not resume:
            raise AlreadyExists(
                f"{runtime.path} already holds a run; pass resume=True to continue it, or give"
                " another directory"
            )
        if resume is True and not holds_run:
            raise NotFound(f"{runtime.path} holds no run to resume; pass resume=False to start one")
        if holds_run:
            algorithm = check_stored(runtime, blocks, algorithm)
        check_room(runtime, blocks, algorithm, snapshots, buffers)
        if checkpoints is not None:
            kept = snapshots if agreement is None else 1  # the step that all ranks have
            check_room_to_copy(runtime, blocks, algorithm, kept, buffers)
        if not holds_run and weights is None:
            check_values(blocks, runtime.store)
        leave_meta_buffers(model, weights, recorded=holds_run)
        cap = parse_bytes("device_memory", device_memory) if device_memory is not None else None
        forms = (activations, activations_form)
        how = Choices(policy, accumulate, snapshots, link, cap, *forms, agreement, on_nan)
        session = Session(model, optimizer, runtime, blocks, algorithm, how)
        opening.move(session)
        if holds_run:
            opening.adopt(session)
            opening.resume(session)
        else:
            opening.create(
                session,
                stored_weights(weights) if weights is not None else values_in(runtime.store),
                left_behind(runtime.store),
            )
        keep_heap()
        sleep_between_operators()
        had_state = {param: dict(entry) for param, entry in optimizer.state.items() if entry}
        session.run()
        offloaded = OffloadedOptimizer(session, optimizer)
        if had_state and not holds_run:
            session.replacing.load_full_state(had_state)
        forget(own)
        if agreement is not None:
            session.installed.keep(install_shards(model, session))
            agreement.ready()
        else:
            session.installed.keep(install_state_dict(model, session))
    except BaseException as error:
        if agreement is not None:
            agreement.withdraw(error)
        # a second try, with what the message asked for, must find the store free
        with contextlib.suppress(StokerError, RuntimeError):
            if session is not None:
                closing.give_up(session)
        with contextlib.suppress(StokerError, RuntimeError):
            runtime.close()
        raise
    return model, offloaded


def _device_of(params: set[nn.Parameter]) -> torch.device:
    devices = {param.device for param in params if not param.is_meta}
    if len(devices) > 1:
        raise InvalidArgument(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}: name the one "
            f"that computes with device="
        )
    return next(iter(devices), torch.device("cpu"))


_told: list[bool] = []  # whether the processor's slowness was told of in this process


def _warn_of_a_slow_type(params: set[nn.Parameter]) -> None:
    """Once in a process, where this processor takes twice as long for bfloat16 as for float32, and
    the model is large enough for that to matter."""
    if _told or sum(param.numel() for param in params if param.dtype == torch.bfloat16) < LARGE:
        return
    rates = quick_look().flops
    if rates["float32"] < 2 * rates["bfloat16"]:
        return
    _told.append(True)
    warnings.warn(
        "this processor is slow in bfloat16. It multiplies matrices at"
        f" {rates['bfloat16'] / 1e9:.2g} GFLOP/s in bfloat16 and at {rates['float32'] / 1e9:.2g} in"
        " float32; make the model with dtype=torch.float32, or give device= an accelerator",
        stacklevel=3,
    )


def _check_shared(
    policy: str,
    snapshots: int,
    device: object,
    device_memory: object,
    weights: object,
    activations: str,
) -> None:
    """InvalidArgument for what a model of several processes cannot have."""
    if policy == "lazy":
        raise InvalidArgument(
            'policy "lazy" updates a block just before its use, but fully_shard gathers weights'
            ' earlier; use "auto", "speculate" or "sync"'
        )
    if activations != "keep":
        raise InvalidArgument(
            'the activations of a sharded model stay in memory; leave activations="keep", and use'
            " torch.utils.checkpoint to have fewer"
        )
    if snapshots:
        raise InvalidArgument(ONE_RANK)
    if device is not None or device_memory is not None:
        raise InvalidArgument(
            "the mesh of fully_shard() decides where a sharded model computes; leave out device= "
            "and device_memory="
        )
    if weights is not None:
        raise InvalidArgument(
            "weights= reads whole parameters, but this model has shards; load the weights before"
            " stoker.offload()"
        )
