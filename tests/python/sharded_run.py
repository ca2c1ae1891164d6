"""What a rank does in test_sharded_checkpoints.py: trains, saves and restores a sharded model."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoker
from fsdp_run import Odd
from models import batch, loss_of
from stoker.checkpoint.divided import Divided
from stoker.checkpoint.parts import Plane
from stoker.checkpoint.state import Run
from stoker.offload.ranks import ranks


class Uneven(Odd):
    """With a tied weight, a buffer, and shapes that ranks share unevenly or have nothing of."""

    def __init__(self, **options) -> None:
        super().__init__(layers=2, width=32, **options)
        self.one = torch.nn.Linear(32, 1)  # of which rank 0 has all
        self.also, self.again = self.odd, self.one  # the same modules under two names
        self.register_buffer("seen", torch.arange(40_000.0))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(tensor: torch.Tensor) -> str:
    data = whole(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def digests(model: torch.nn.Module, opt: torch.optim.Optimizer) -> dict[str, str]:
    """Of every weight and every state, whole."""
    found = {}
    for name, param in model.named_parameters():
        states = {"": param, **opt.state.get(param, {})}
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                found[f"{name} {key}"] = digest(value)
    found["seen"] = digest(model.seen)
    return found


def made(world: int, dtype: str, seed: int, mesh: tuple[int, ...] | None):
    torch.manual_seed(seed)
    model = Uneven().to(getattr(torch, dtype))
    if world > 0:
        options = {}
        if mesh is not None:
            names = ("replicate", "shard")[-len(mesh) :]
            options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, opt, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def save(tell, rank, world, store, dtype="float32", mesh=None, steps=3, extra=None) -> None:
    model, opt = made(world, dtype, 0, mesh)
    with stoker.Checkpoints(store, keep=2) as ckpt:
        trained(model, opt, range(steps))
        was = digests(model, opt)
        ckpt.save(steps, model=model, optimizer=opt, extra={"note": [rank, world]})
        losses = trained(model, opt, range(steps, steps + 2))  # step() waits for the save
        ckpt.wait()
        tell(digests=was, losses=losses, rng=torch.rand(2).tolist() if extra else None)


def load(tell, rank, world, store, dtype="float32", mesh=None, steps=3) -> None:
    model, opt = made(world, dtype, 1, mesh)
    trained(model, opt, range(1))  # the state is there, with other values
    with stoker.Checkpoints(store) as ckpt:
        found = ckpt.restore(model=model, optimizer=opt)
    now = digests(model, opt)
    losses = trained(model, opt, range(steps, steps + 2))
    tell(digests=now, losses=losses, step=found.step, extra=found.extra, folder=found.folder)


def killed(tell, rank, world, store, victim, after) -> None:
    """Saves twice; in the second save rank `victim` is killed as it writes its file `after`."""
    model, opt = made(world, "float32", 0, None)
    ckpt = stoker.Checkpoints(store, keep=5)
    trained(model, opt, range(1))
    ckpt.save(1, model=model, optimizer=opt).wait()
    tell(digests=digests(model, opt))
    trained(model, opt, range(1, 2))
    if rank == victim:
        tier, written = ckpt._tiers[0], []
        really, put = tier.write, tier.put_manifest

        def write(*given):
            if len(written) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            written.append(given)
            return really(*given)

        def put_manifest(*given):
            if after == "manifest":
                os.kill(os.getpid(), signal.SIGKILL)
            return put(*given)

        tier.write, tier.put_manifest = write, put_manifest
    handle = ckpt.save(2, model=model, optimizer=opt)
    handle.wait(timeout=60)
    tell(saved=2)


def copied(tell, rank, world, store, also) -> None:
    """Saves with a second store that is too slow for the second copy, and one that fails."""
    model, opt = made(world, "float32", 0, None)
    stores = [str(also), str(also) + "-broken"]
    ckpt = stoker.Checkpoints(store, every="auto", also=stores)
    ckpt.save(1, model=model, optimizer=opt).wait(stores[0])
    ckpt.wait()
    if rank == 0:  # the one that copies
        ckpt._copying[f"dir:{stores[0]}"].persist = 3600.0
        ckpt._copying[f"dir:{stores[1]}"]._last = None
        put = ckpt._tiers[2].put_manifest

        def fails(*given):
            raise stoker.errors.IoError("the link is down")

        ckpt._tiers[2].put_manifest = fails
    handle = ckpt.save(2, model=model, optimizer=opt, force=True)
    told = []
    for each in ("durable", *stores):
        try:
            handle.wait(each, timeout=60)
            told.append(None)
        except stoker.errors.StokerError as error:
            told.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        ckpt._tiers[2].put_manifest = put
    ckpt._finish()
    ckpt._failed = None  # it was heard
    ckpt.close()
    tell(told=told)


def goes_on(tell, rank, world, store, steps, straggler=None) -> None:
    """Saves each step, from the newest that is there to `steps`, unless it is killed before."""
    model, opt = made(world, "float32", 0, None)
    with stoker.Checkpoints(store, keep=2) as ckpt:
        if rank == straggler:
            tier = ckpt._tiers[0]
            really = tier.write

            def late(*given):
                time.sleep(0.1)
                return really(*given)

            tier.write = late
        found = ckpt.restore(model=model, optimizer=opt)
        step = found.step if found else 0
        while step < steps:
            trained(model, opt, range(step, step + 1))
            step += 1
            ckpt.save(step, model=model, optimizer=opt).wait(timeout=60)
            tell(step=step)


def full_disk(tell, rank, world, store, victim) -> None:
    """A save that fails on one rank fails on all; the next one works."""
    model, opt = made(world, "float32", 0, None)
    ckpt = stoker.Checkpoints(store, keep=5)
    trained(model, opt, range(1))
    if rank == victim:
        tier = ckpt._tiers[0]
        really = tier.write

        def write(*given):
            tier.write = really
            raise stoker.errors.OutOfSpace("the disk is full")

        tier.write = write
    handle = ckpt.save(1, model=model, optimizer=opt)
    try:
        handle.wait(timeout=60)
    except stoker.errors.StokerError as error:
        tell(failed=type(error).__name__, text=str(error))
    if rank == victim:
        with contextlib.suppress(stoker.errors.OutOfSpace):
            ckpt.wait()  # it was told once more; the other rank was not
    try:
        ckpt.save(1, model=model, optimizer=opt)
    except stoker.errors.StokerError as error:
        tell(raised=type(error).__name__)
    ckpt.save(2, model=model, optimizer=opt).wait(timeout=60)
    tell(names=[str(name) for name in ckpt._tiers[0].folders()], threads=threading.active_count())
    ckpt.close()


def freezes(tell, rank, world, store) -> None:
    """Saves often, most weights frozen: what each save wrote of safetensors files, and took."""
    model, _ = made(world, "float32", 0, None)
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("layers.1."))
    left = [param for param in model.parameters() if param.requires_grad]
    opt = torch.optim.AdamW(left, lr=1e-2)
    ckpt = stoker.Checkpoints(store, keep=10)
    tier, wrote = ckpt._tiers[0], []
    really = tier.write

    def write(name, whole, *given):
        if whole.name.endswith(".safetensors"):
            wrote.append(whole.bytes)
        return really(name, whole, *given)

    tier.write = write
    for step in range(1, 6):
        trained(model, opt, range(step, step + 1))
        if step == 3:  # the loop edits a frozen weight, of which each rank has a part
            with torch.no_grad():
                next(model.layers[0].parameters()).add_(1.0)
        if step == 4 and rank == 0:
            ckpt._anew.add(tier.composition)  # as after damage of the newest
        taken = ckpt.costs.taken_bytes
        ckpt.save(step, model=model, optimizer=opt).wait(timeout=60)
        tell(wrote=sum(wrote), taken=ckpt.costs.taken_bytes - taken, digests=digests(model, opt))
        wrote.clear()
    ckpt.close()


def ends(tell, rank, world, store, victim) -> None:
    """One rank gets SIGTERM: all save and end."""
    model, opt = made(world, "float32", 0, None)
    ckpt = stoker.Checkpoints(store, every=100, grace=60)
    for step in range(1, 6):
        trained(model, opt, range(step, step + 1))
        if rank == victim and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            ckpt.save(step, model=model, optimizer=opt)
        except SystemExit as ended:
            tell(code=ended.code, at=step)
            dist.barrier()
            return


# -- stoker.offload() of a sharded model -----------------------------------------------------------


def offloaded(world, run, checkpoints=None, restore=None, seed=0, dtype="bfloat16", **options):
    model, opt = made(world, dtype, seed, None)
    model.odd.weight.requires_grad_(False)
    given = {"checkpoints": checkpoints, "restore": restore, "dram": "16MiB", **options}
    return stoker.offload(model, opt, store=str(run), **given)


def all_of(model, opt) -> dict[str, str]:
    """Digests of weights, buffers and state of an offloaded model, whole: masters too."""
    found = {name: digest(value) for name, value in model.state_dict().items()}
    for number, entry in opt.state_dict(full=True)["state"].items():
        found |= {
            f"{number} {key}": digest(value)
            for key, value in entry.items()
            if isinstance(value, torch.Tensor)
        }
    return found


def offload_save(tell, rank, world, store, run, steps=3, **options) -> None:
    with stoker.Checkpoints(store, keep=2) as ckpt:
        model, opt = offloaded(world, run, checkpoints=ckpt, **options)
        trained(model, opt, range(steps))
        was = all_of(model, opt)
        commits = opt._session.planes.store.info().get("commits")
        ckpt.save(steps, model=model, optimizer=opt)
        losses = trained(model, opt, range(steps, steps + 2))  # while it is copied
        ckpt.wait()
        left = [name for name in opt._session.planes.store.info()["snapshots"] if "check" in name]
        tell(digests=was, losses=losses, left=left, commits=commits)
        opt.close()


def offload_load(tell, rank, world, store, run, steps=3, **options) -> None:
    with stoker.Checkpoints(store) as ckpt:
        model, opt = offloaded(world, run, restore=ckpt, seed=1, **options)
        now, step = all_of(model, opt), opt.step_count
        losses = trained(model, opt, range(steps, steps + 2))
        tell(digests=now, losses=losses, step=step)
        opt.close()


class Wide(torch.nn.Module):
    """Its parameters are whole groups of 256 elements on 2 ranks. `odd`: but for one."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(2))
        self.last = torch.nn.Linear(512, 300 if odd else 512)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values).relu()
        return self.last(values)


def wide(world: int, odd: bool):
    model = Wide(odd)
    for layer in (*model.layers, model) if world else ():
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def shares_scales(tell, rank, world, store, run, steps=0, odd=False) -> None:
    """Opens a run with 8-bit moments at the checkpoint, trains it and saves it; or without steps
    takes it into memory too."""
    torch.manual_seed(world)
    with stoker.Checkpoints(store) as ckpt:
        model, opt = wide(world, odd)
        given = {"dram": "24MiB", "moments": "8bit", "checkpoints": ckpt, "restore": ckpt}
        model, opt = stoker.offload(model, opt, store=str(run), **given)
        for step in range(steps):
            torch.manual_seed(step)
            model(torch.randn(4, 512)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        tell(digests=all_of(model, opt), step=opt.step_count)
        if steps:
            ckpt.save(opt.step_count, model=model, optimizer=opt).wait()
        opt.close()
        if not steps:
            model, opt = wide(world, odd)
            ckpt.restore(model=model, optimizer=opt)
            found = {name: digest(value) for name, value in model.state_dict().items()}
            for number, param in enumerate(opt.param_groups[0]["params"]):
                for key in ("exp_avg", "exp_avg_sq"):
                    found[f"{number} {key}"] = digest(opt.state[param][key])
            tell(memory=found)


def in_memory_load(tell, rank, world, store, mesh=None) -> None:
    """Takes an offloaded run into models without a store: weights as bfloat16, all as float32."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        model, opt = made(world, dtype, 1, mesh)
        model.odd.weight.requires_grad_(False)
        with stoker.Checkpoints(store) as ckpt:
            step = ckpt.restore(model=model, optimizer=opt).step
        if dtype == "bfloat16":
            found |= {name: digest(value) for name, value in model.state_dict().items()}
        else:
            for number, param in enumerate(opt.param_groups[0]["params"]):
                if entry := opt.state[param]:
                    values = entry | {"master": param}
                    found |= {f"{number} {key}": digest(value) for key, value in values.items()}
        losses = trained(model, opt, range(3, 4))
    tell(digests=found, step=step, losses=losses)


def goes_back(tell, rank, world, store, run, to=None, victim=None, saves=1) -> None:
    """Opens at the checkpoint of step `to` (None: as restore= decides), goes on for `saves` steps,
    and saves each. With a `victim` that rank is killed when the others may commit the restore."""
    if rank == victim:
        dies_in_restore(tell, rank, world, store, run, victim, to)
    with stoker.Checkpoints(store, keep=9) as ckpt:
        which = ckpt if to is None else ckpt.at(to)
        model, opt = offloaded(world, run, checkpoints=ckpt, restore=which, seed=1)
        at, lineage = opt.step_count, opt._session.record.lineage
        for step in range(at, at + saves):
            trained(model, opt, range(step, step + 1))
            ckpt.save(step + 1, model=model, optimizer=opt).wait()
        tell(at=at, run=lineage.run, left=lineage.left)
        opt.close()


def blind(tell, rank, world, store, run) -> None:
    """Goes on from stores with newer steps; rank 1 can read no checkpoint."""
    with stoker.Checkpoints(store) as ckpt:
        if rank == 1:
            ckpt._reader_of = lambda *given: 1 / 0
        model, opt = offloaded(world, run, restore=ckpt)
        tell(step=opt.step_count)
        opt.close()


def lost_store(tell, rank, world, store, run) -> None:
    """Opens stores of which one is empty: without restore=, and with it."""
    try:
        offloaded(world, run, resume=True)
    except stoker.errors.Mismatch as error:
        tell(text=str(error))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())
    logging.getLogger("stoker").addHandler(handler)
    with stoker.Checkpoints(store) as ckpt:
        model, opt = offloaded(world, run, restore=ckpt, seed=1)
        logging.getLogger("stoker").removeHandler(handler)
        now, step, name = all_of(model, opt), opt.step_count, opt._session.record.lineage.run
        losses = trained(model, opt, range(3, 5))
        said = [each for each in said if "finds no run" in each]
        tell(digests=now, losses=losses, step=step, run=name, said=said)
        opt.close()


def dies_in_save(tell, rank, world, store, run, victim) -> None:
    """Saves twice; in the second save rank `victim` is killed as it writes its first file. Other
    ranks end as they hear of it."""
    ckpt = stoker.Checkpoints(store, keep=5)
    model, opt = offloaded(world, run, checkpoints=ckpt)
    trained(model, opt, range(1))
    ckpt.save(1, model=model, optimizer=opt).wait()
    tell(digests=all_of(model, opt))
    trained(model, opt, range(1, 2))
    tell(second=all_of(model, opt))
    if rank == victim:
        ckpt._tiers[0].write = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    ckpt.save(2, optimizer=opt).wait(timeout=60)


def goes_on_and_saves(tell, rank, world, store, run) -> None:
    """Takes the run up from its stores, and saves it."""
    with stoker.Checkpoints(store, keep=5) as ckpt:
        model, opt = offloaded(world, run, checkpoints=ckpt, resume=True)
        tell(step=opt.step_count, digests=all_of(model, opt))
        ckpt.save(opt.step_count, optimizer=opt).wait(timeout=60)
        left = [name for name in opt._session.planes.store.info()["snapshots"] if "check" in name]
        tell(left=left)
        opt.close()


def names_in(opt) -> list[str]:
    return sorted(opt._session.planes.store.info()["snapshots"])


def counts_otherwise(tell, rank, world, store, run, steps, label) -> None:
    """Goes on from the newest, and saves under a number that is no count of steps."""
    with stoker.Checkpoints(store, keep=5) as ckpt:
        model, opt = offloaded(world, run, checkpoints=ckpt, restore=ckpt)
        tell(step=opt.step_count, digests=all_of(model, opt), names=names_in(opt))
        trained(model, opt, range(opt.step_count, opt.step_count + steps))
        was = all_of(model, opt)
        ckpt.save(label, optimizer=opt).wait(timeout=60)
        tell(digests=was)
        opt.close()


def dies_behind_restore(tell, rank, world, store, run, victim) -> None:
    """Restores; the first commit behind that comes on all ranks but `victim`, which is killed."""
    with stoker.Checkpoints(store) as ckpt:
        model, opt = offloaded(world, run, restore=ckpt, resume="auto")
        trained(model, opt, range(opt.step_count, opt.step_count + 1))
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.flush()


def cannot_read_its_store(tell, rank, world, store, run, victim) -> None:
    """A save in which rank `victim` cannot read its weights, and the next one."""
    ckpt = stoker.Checkpoints(store, keep=5)
    model, opt = offloaded(world, run, checkpoints=ckpt)
    trained(model, opt, range(1))
    fetch = Plane._fetch

    def damaged(self, chunk):
        if self._key.startswith("w/"):
            raise stoker.errors.Corruption("a bit is flipped")
        fetch(self, chunk)

    if rank == victim:
        Plane._fetch = damaged
    try:
        ckpt.save(1, optimizer=opt).wait(timeout=50)
    except stoker.errors.StokerError as error:
        tell(failed=type(error).__name__, text=str(error))
    Plane._fetch = fetch
    with contextlib.suppress(stoker.errors.StokerError):
        ckpt.save(1, optimizer=opt)  # it raises what failed
    ckpt.save(1, optimizer=opt).wait(timeout=50)
    tell(names=[str(name) for name in ckpt._tiers[0].folders()])
    ckpt.close()
    opt.close()


class Journal:
    """A store that drops no snapshot."""

    def __init__(self, store) -> None:
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def drop(self, *given):
        raise stoker.errors.IoError("the journal takes nothing")


def drops_no_name(tell, rank, world, store, run, victim) -> None:
    """A save behind which rank `victim` cannot drop the name of the step that was copied."""
    ckpt = stoker.Checkpoints(store, keep=5)
    model, opt = offloaded(world, run, checkpoints=ckpt)
    trained(model, opt, range(1))
    if rank == victim:
        Run.store = property(lambda run: Journal(run.session.planes.store))
    ckpt.save(1, optimizer=opt).wait(timeout=50)
    ckpt.wait()
    tell(names=[str(name) for name in ckpt._tiers[0].folders()])
    ckpt.close()
    opt.close()


def restores_of(tell, rank, world, stores, steps=None, run=None) -> None:
    """Each rank restores from a store of its own, or a step of its own."""
    step = steps and steps[rank]
    try:
        with stoker.Checkpoints(stores[rank]) as ckpt:
            if run is not None:
                model, opt = offloaded(world, run, restore=ckpt.at(step) if step else ckpt)
                tell(step=opt.step_count)
            else:
                model, opt = made(world, "float32", 0, None)
                tell(step=ckpt.restore(model=model, optimizer=opt, step=step).step)
    except stoker.errors.StokerError as error:
        tell(failed=type(error).__name__, text=str(error))


def asks_for_a_part(tell, rank, world, store, run) -> None:
    """Saves; restores the rest of what was saved by itself: each rank gets its own random state."""
    with stoker.Checkpoints(store) as ckpt:
        model, opt = offloaded(world, run, checkpoints=ckpt)
        torch.manual_seed(7 + rank)
        ckpt.save(1, optimizer=opt, extra={"note": 5}).wait(timeout=60)
        then = torch.rand(2).tolist()
        opt.close()
    with stoker.Checkpoints(store) as ckpt:
        extra = ckpt.restore().extra
    tell(then=then, now=torch.rand(2).tolist(), extra=extra)


def saves_alone(tell, rank, world, store, again) -> None:
    """Rank 0 saves, and rank 1 does not: at the first save, or at a later one."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())
    logging.getLogger("stoker").addHandler(handler)
    ranks.PATIENCE = 0.5
    model, opt = made(world, "float32", 0, None)
    ckpt = stoker.Checkpoints(store)
    if again:
        ckpt.save(1, model=model, optimizer=opt).wait()
    if rank == 1:
        while not os.path.exists(f"{store}-heard"):  # it trains
            time.sleep(0.05)
        return
    try:
        ckpt.save(2, model=model, optimizer=opt)
    except stoker.errors.RankLost as error:
        tell(said=said, text=str(error))
    open(f"{store}-heard", "w").close()


def dies_in_restore(tell, rank, world, store, run, victim, to=None) -> None:
    """All ranks but `victim`, which is killed, fill their stores from the checkpoint."""
    if rank == victim:
        stage = Divided.stage

        def staged(self, *given):
            stage(self, *given)
            self._agreement.ranks.exchange("restored", facts=None)
            os.kill(os.getpid(), signal.SIGKILL)

        Divided.stage = staged
    with stoker.Checkpoints(store) as ckpt:
        offloaded(world, run, restore=ckpt if to is None else ckpt.at(to), seed=1)
