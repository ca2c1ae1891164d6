"""Training of a sharded model by several processes, for test_fsdp.py: each function here runs in
one of them.

The processes are forked from a server that has torch loaded, so that a run of four takes no longer
to start than it must.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reference
import stoker
from kill_run import Position
from models import Tiny, batch, loss_of
from stoker import _core
from stoker.offload.ranks.agreement import Agreement
from stoker.offload.model.blocks import local
from stoker.offload.ranks.ranks import Ranks
from stoker.offload.ranks.shared_steps import SharedSteps

LIMIT = 120  # seconds
_servers = multiprocessing.get_context("forkserver")
# it does not see this folder
_servers.set_forkserver_preload(["torch", "torch.distributed.fsdp", "stoker"])


class Group:
    """Processes that train together: start(), then finish(), or kill() in between. Each tells lines
    (JSON) in a file of its own."""

    def __init__(self, folder: Path, world: int, work, limit: float = 60, **options) -> None:
        """limit: of the process group, seconds."""
        self.folder = Path(tempfile.mkdtemp(dir=folder, prefix="group-"))
        self.processes = [
            _servers.Process(
                target=_in_process, args=(self.folder, rank, world, work, limit, options)
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def told(self, rank: int) -> list[dict]:
        with suppress(FileNotFoundError):
            return [
                json.loads(line)
                for line in (self.folder / f"rank-{rank}").read_text().splitlines()
                if line.endswith("}")
            ]
        return []

    def wait_for(self, step: int) -> None:
        """Until rank 0 has told of the step."""
        end = time.monotonic() + LIMIT
        while (
            not any(line.get("step", -1) >= step for line in self.told(0))
            and self.processes[0].is_alive()
        ):
            assert time.monotonic() < end
            time.sleep(0.002)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def finish(self) -> list[list[dict]]:
        """Waits for all; what each has told. As torchrun does, ends those that outlive a dead
        one."""
        end = time.monotonic() + LIMIT
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                raise AssertionError(
                    f"a rank hangs: {[self.told(rank)[-2:] for rank in range(len(self.processes))]}"
                )
        return [self.told(rank) for rank in range(len(self.processes))]

    def codes(self) -> list[int]:
        return [process.exitcode for process in self.processes]


class Tell:
    """Writes what a rank tells."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._told = open(file, "w", buffering=1)

    def __call__(self, **what) -> None:
        self._told.write(json.dumps(what) + "\n")


def _in_process(folder: Path, rank: int, world: int, work, limit: float, options: dict) -> None:
    faulthandler.enable()  # a rank that is ended by a signal says where each thread was
    torch.set_num_threads(1)
    tell = Tell(folder / f"rank-{rank}")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=limit),
        )
        work(tell, rank, world, **options)
    except BaseException as error:
        tell(error=type(error).__name__, text=str(error))
        if not isinstance(error, (stoker.errors.StokerError, RuntimeError, KeyboardInterrupt)):
            tell(trace=traceback.format_exc())
        os._exit(1)
    os._exit(0)


class Odd(Tiny):
    """Has parameters that three and four ranks share unevenly, or have nothing of."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.odd = torch.nn.Linear(32, 3)

    def forward(self, tokens):
        return super().forward(tokens) + self.odd(self.embed(tokens)).sum(-1, keepdim=True)


def make(
    world: int,
    dtype: torch.dtype = torch.bfloat16,
    kind=Tiny,
    frozen: tuple = (),
    layers: int = 2,
    width: int = 32,
    reshard: bool | None = None,
):
    torch.manual_seed(0)
    model = kind(layers=layers, width=width).to(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def adamw(model) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    small, large = (
        [param for param in trained if (param.ndim < 2) is each] for each in (True, False)
    )
    return torch.optim.AdamW(
        [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}],
        lr=3e-3,
        fused=True,
    )


class Reference(reference.ReferenceOptimizer):
    """The same kernels over shards in ordinary memory."""

    def _update(self, param, group) -> None:
        here = self.__dict__.setdefault("shards", {}).setdefault(
            param, torch.nn.Parameter(param._local_tensor.detach())
        )
        assert here.data_ptr() == param._local_tensor.data_ptr()
        here.grad = param.grad._local_tensor
        if here.numel():
            super()._update(here, group)

    def clip(self, params, max_norm: float, ranks: Ranks) -> float:
        """What opt.clip_grad_norm_ does."""
        params = [param for param in params if param.grad is not None]
        squares = [
            _core.optim_sums_of_squares(
                p.grad._local_tensor.data_ptr(),
                reference._NAMES[p.grad.dtype],
                p.grad._local_tensor.numel(),
            )
            for p in params
            if p.grad._local_tensor.numel()
        ]
        norm = math.sqrt(
            math.fsum(
                ranks.numbers("reference", math.fsum(each for some in squares for each in some))
            )
        )
        if not (coefficient := max_norm / (norm + 1e-6)) >= 1.0:
            for param in params:
                param.grad.mul_(coefficient)
        return norm


def digest(model, extra=()) -> str:
    """Of this rank's shards, and of `extra`."""
    sha = hashlib.sha256()
    for name, param in sorted(model.named_parameters()):
        sha.update(
            name.encode()
            + param._local_tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    for value in extra:
        sha.update(
            local(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(value, torch.Tensor)
            else repr(value).encode()
        )
    return sha.hexdigest()


def state_of(opt) -> list:
    full = opt.state_dict(full=True)["state"]
    return [value for index in sorted(full) for _, value in sorted(full[index].items())]


def forward_backward(model, number: int, rank: int, world: int, accumulate: int = 1) -> float:
    total = 0.0
    for micro in range(accumulate):
        loss = loss_of(model, batch(number * world + rank, micro)) / accumulate
        loss.backward()
        total += loss.item()
    return total


def step_of(
    model, opt, number: int, rank: int, world: int, accumulate: int = 1, clip=None
) -> float:
    """One step, each rank with batches of its own."""
    total = forward_backward(model, number, rank, world, accumulate)
    if clip is not None:
        clip(model)
    opt.step()
    opt.zero_grad()
    return total


class Growing:
    """Something attached that for once is larger than the store has room for, or cannot be had at
    all."""

    def __init__(self, at: int, broken: bool = False) -> None:
        self.at, self.asked, self.broken = at, 0, broken

    def state_dict(self) -> dict:
        self.asked += 1
        if self.asked == self.at and self.broken:
            raise ValueError("there is none, says the test")
        return {"text": "x" * (200 << 20 if self.asked == self.at else 1)}

    def load_state_dict(self, state: dict) -> None: ...


def train(
    tell,
    rank: int,
    world: int,
    store: str = "",
    steps: int = 6,
    faults=(),
    full=None,
    resume="auto",
    policy: str = "sync",
    look=None,
    **options,
) -> None:
    """A run that may be killed and goes on where it was. faults: see break_at; full: (rank, at) of
    a store that is full at a commit;
    look: a step behind which weights stay gathered, by a forward without a backward, while it is
    committed; `full` is an object that cannot be saved then.
    """
    dying = [
        each for _, where, _ in faults for each in (where if isinstance(where, tuple) else (where,))
    ]
    for fault in faults:
        break_at(*fault, rank, dying, os.path.join(os.path.dirname(tell.file), "faults"))
    model = make(world, reshard=None if look is None else False)
    opt = adamw(model)
    model, opt = stoker.offload(
        model, opt, store=store, dram="8MiB", resume=resume, policy=policy, **options
    )
    scheduler, position = (
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0 / (1 + 0.05 * s)),
        Position(),
    )
    opt.attach(scheduler=scheduler, position=position)
    if full is not None:
        opt.attach(growing=Growing(full[1] if full[0] == rank else -1, broken=look is not None))
    tell(at=opt.step_count, digest=digest(model))
    while position.next < steps:
        number = next(position)
        noise = int(torch.randint(0, 7, ()).item())  # the generator is part of the run
        before = opt.step_count
        loss = forward_backward(model, number + 100 * noise, rank, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        try:
            opt.step()
        except stoker.errors.RankLost:
            raise
        except stoker.errors.StokerError as error:
            tell(
                caught=type(error).__name__,
                text=str(error),
                at=opt.step_count,
                committed=opt.committed_step,
            )
            if opt.step_count < before:  # taken back: position, schedule and generators as well
                opt.zero_grad()
                continue
            opt.step()
        opt.zero_grad()
        scheduler.step()
        tell(step=opt.step_count, loss=loss, committed=opt.committed_step)
        if opt.step_count == look:
            look = None
            with torch.no_grad():
                loss_of(model, batch(number))
            try:
                opt.flush()
            except stoker.errors.StokerError as error:
                tell(caught=type(error).__name__, text=str(error), at=opt.step_count)
    opt.flush()
    assert opt.committed_step == opt.step_count == steps
    tell(
        end=digest(model, [*state_of(opt), opt.param_groups[0]["lr"], position.next, torch.rand(3)])
    )
    opt.close()


# -- faults ----------------------------------------------------------------------------------------


def _die(rank: int, dying: list[int], folder: str) -> None:
    """When all that are to die are where they shall: an earlier death might keep a later one from
    its place."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, str(rank)).touch()
    end = time.monotonic() + LIMIT
    while not all(os.path.exists(f"{folder}/{each}") for each in dying) and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.05)  # the others see it too
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt(*_) -> None:
    raise KeyboardInterrupt("as Ctrl-C does")


def _hang(*_) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def smallest(model, store: str) -> str:
    """The smallest budget, as the error names it."""
    try:
        stoker.offload(model, adamw(model), store=f"{store}-tried", dram="3MiB")
    except stoker.errors.OverBudget as error:
        return re.search(r'dram="(\d+MiB)"', str(error)).group(1)
    raise AssertionError("3 MiB are enough")


def compare(tell, rank: int, world: int, store: str, cases: list) -> None:
    """Each case: a run out of the store against the same one in memory, bit for bit."""
    for index, (dtype, kind, frozen, policy, accumulate, clip, theirs, size) in enumerate(cases):
        control, model = (make(world, dtype, kind, frozen, **size) for _ in range(2))
        torch_adamw, original = adamw(control), adamw(model)
        for warm in range(2 if theirs == "torch" else 0):  # the state that there is comes along
            assert step_of(model, original, 50 + warm, rank, world) == step_of(
                control, torch_adamw, 50 + warm, rank, world
            )
        theirs = torch_adamw if theirs == "torch" else Reference(torch_adamw)
        dram = "8MiB" if size == {} else smallest(model, f"{store}/{index}")
        model, opt = stoker.offload(
            model, original, store=f"{store}/{index}", dram=dram, policy=policy
        )
        ranks = opt._session.agreement.ranks
        weights_read = lambda: opt._session.planes.session.counters()["read_bytes"]["weights"]
        moved = weights_read()  # state that comes along has them read back
        norms: dict = {}
        clips = {
            None: (None, None),
            "torch": [lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 2.0)] * 2,
            "own": (
                lambda m: norms.update(ours=opt.clip_grad_norm_(2.0).item()),
                lambda m: norms.update(theirs=theirs.clip(list(m.parameters()), 2.0, ranks)),
            ),
        }[clip]
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda s: 1.0 / (1 + 0.3 * s))
            for each in (opt, theirs)
        ]
        for step in range(5):
            ours = step_of(model, opt, step, rank, world, accumulate, clips[0])
            assert ours == step_of(control, theirs, step, rank, world, accumulate, clips[1]), (
                f"case {index} step {step}"
            )
            assert norms.get("ours") == norms.get("theirs")
            assert digest(model) == digest(control), f"case {index} step {step}"
            for schedule in schedules:
                schedule.step()
        if isinstance(theirs, Reference):
            full = opt.state_dict(full=True)["state"]
            for place, param in enumerate(
                param for group in opt.param_groups for param in group["params"]
            ):
                other = list(param for group in theirs.param_groups for param in group["params"])[
                    place
                ]
                here = theirs.__dict__["shards"][other]
                for name, plane in (("exp_avg", "m"), ("exp_avg_sq", "v")):
                    value = full[place][name]
                    assert value.shape == param.shape and value.device_mesh == param.device_mesh
                    if here.numel():
                        assert torch.equal(value.to_local().flatten(), theirs.moment(here, plane))
        tell(
            case=index,
            weights_read=weights_read() - moved,
            kept=opt._session.steps.kept,
            redone=opt._session.steps.redone,
        )
        opt.close()
    tell(end="")


def refuse(tell, rank: int, world: int, store: str = "") -> None:
    """What a sharded model cannot have; each is told."""

    def told(what: str, act) -> None:
        try:
            act()
            tell(what=what, refused=None)
        except stoker.errors.StokerError as error:
            tell(what=what, refused=type(error).__name__, text=str(error))

    def offload(model, **options):
        return stoker.offload(model, adamw(model), **{"store": store, "dram": "8MiB", **options})

    told("lazy", lambda: offload(make(world), policy="lazy"))
    told("activations", lambda: offload(make(world), activations="disk"))
    told("snapshots", lambda: offload(make(world), snapshots=1))
    told("device", lambda: offload(make(world), device="cpu"))
    told("memory", lambda: offload(make(world), store="memory:"))
    torch.manual_seed(0)
    part = Tiny(layers=2, width=32)
    fully_shard(part.layers[0], mesh=init_device_mesh("cpu", (world,)))
    told("part", lambda: offload(part))
    mixed = Tiny(layers=2, width=32)
    fully_shard(
        mixed, mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    )
    told("hybrid", lambda: offload(mixed))
    model = make(world)
    original = adamw(model)
    step_of(model, original, 0, rank, world)
    for param, entry in original.state.items():  # what state_dict(full=True) gave, say
        entry["master"] = param.detach().float() * (1 + 2**-12)
    masters = [
        original.state[param]["master"].to_local()
        for group in original.param_groups
        for param in group["params"]
    ]
    model, opt = stoker.offload(model, original, store=store, dram="8MiB")
    full = opt.state_dict(full=True)["state"]
    assert all(
        torch.equal(full[place]["master"].to_local(), master)
        for place, master in enumerate(masters)
    )
    before = digest(model)
    with stoker.gather(model.parameters()):
        assert digest(model) == before

    def write() -> None:
        with stoker.gather(model.parameters(), write=True):
            raise AssertionError("it let me in")

    told("gather", write)
    earlier = opt.state_dict()
    step_of(model, opt, 0, rank, world)
    opt.flush()
    before = digest(model)
    told("plan", opt.plan)
    told("reference", lambda: opt.load_state_dict(earlier))
    told("snapshot", opt.snapshot)
    told("state", lambda: opt.load_state_dict({**opt.state_dict(full=True)}))
    with torch.no_grad():
        next(model.parameters())._local_tensor.add_(1)
    told("in place", lambda: loss_of(model, batch(0)))
    assert digest(model) == before
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    told("load", lambda: loss_of(model, batch(0)))
    told("assign", lambda: model.load_state_dict(model.state_dict(), assign=True))
    told("again", lambda: offload(model, store=f"{store}2"))
    opt.close()
    told("there", lambda: offload(make(world)))
    os.makedirs(f"{store}4", exist_ok=True)
    Path(f"{store}4", "stoker.volume").touch()
    told("parent", lambda: offload(make(world), store=f"{store}4", resume="auto"))
    told("nothing", lambda: offload(make(world), store=f"{store}3", resume=True))
    tell(end=digest(model), before=before)


def break_at(
    point: str, where: int | tuple, at: int, rank: int, dying: list[int], folder: str
) -> None:
    """Ends the process (or lets something fail) on the ranks `where` at a point, the at-th time it
    is passed."""
    if rank not in (where if isinstance(where, (tuple, list)) else (where,)):
        return
    kind, name, when, act = {
        "before commit": (SharedSteps, "close", "before", _die),
        "behind commit": (SharedSteps, "close", "committed", _die),
        "before agreeing": (Agreement, "committed", "before", _die),
        "hangs": (Agreement, "committed", "before", _hang),
        "behind agreeing": (Agreement, "keep", "before", _die),
        "behind keeping": (Agreement, "kept", "behind", _die),
        "before deciding": (SharedSteps, "_computed", "before", _die),
        "behind deciding": (SharedSteps, "_computed", "behind", _die),
        "interrupted at a point": (Ranks, "_gather", "behind", _interrupt),
        "interrupted behind deciding": (SharedSteps, "_computed", "behind", _interrupt),
        "interrupted committing": (Agreement, "kept", "behind", _interrupt),
        "going back fails": (Agreement, "go_back", "before", None),
        "update fails": (SharedSteps, "_computed", "before", None),
        "weights fail": (SharedSteps, "_make_current", "before", None),
        "opening": (Agreement, "meet", "before", _die),
        "made": (Agreement, "ready", "before", _die),
        "met": (Agreement, "meet", "behind", _die),
        "ready": (Agreement, "ready", "behind", _die),
    }[point]
    original, passed = getattr(kind, name), [0]

    def broken(self, *args, **kwargs):
        passed[0] += 1
        if passed[0] != at:
            return original(self, *args, **kwargs)
        if act is None:
            if name == "_make_current":
                update = next(iter(self.in_flight.values()))
                self.pager.staged.pop(update.unit.block)
                self.pager._read = _fail_once(self.pager)
                return original(self, *args, **kwargs)
            raise stoker.errors.IoError("the disk is broken, says the test")
        if when == "before":
            act(rank, dying, folder)
        result = original(self, *args, **kwargs)
        if when == "committed":
            self.closing[1].wait()
        act(rank, dying, folder)
        return result

    setattr(kind, name, broken)


def _fail_once(pager):
    def fail(units):
        del pager._read
        raise RuntimeError("the device is broken, says the test")

    return fail
