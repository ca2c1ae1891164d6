"""Steps of offloaded runs that have a name in the store while a save reads them."""

from __future__ import annotations

import logging

from stoker.checkpoint.state import Run
from stoker.checkpoint.together import Together
from stoker.errors import Mismatch, StokerError, Unsupported
from stoker.offload.run.snapshots import check_room_to_copy

log = logging.getLogger("stoker")
SNAPSHOT = "checkpoint-"


def name_newest(run: Run) -> None:
    """Names the run's newest step, and makes it durable."""
    _make_room(run)
    run.session.name_step(run.snapshot)
    run.session.reads.until(run.read, run.hurry)


def name_together(ranks: Together, run: Run) -> None:
    """The same on all ranks, each in its own store; and all named the same step. Where one cannot,
    all raise."""
    session = run.session
    if session.agreement is None:
        raise Unsupported(
            "the model is sharded, but the optimizer that stoker.offload() made updates another"
            " model; give each model its own stoker.Checkpoints"
        )
    if session.agreement.ranks.world != ranks.world:
        raise Unsupported(
            f"{session.agreement.ranks.world} of {ranks.world} ranks share the offloaded model;"
            " shard it over all ranks to save it"
        )
    ranks.front.guard("room", lambda: _make_room(run))
    ranks.front.exchange("room")
    ranks.front.guard("named", lambda: session.name_step(run.snapshot))
    session.reads.until(run.read, run.hurry)
    agreement = session.agreement
    mine = [session.step_count, agreement.run, agreement.timeline]
    if any(each != mine for each in ranks.front.exchange("named", facts=mine)):
        raise Mismatch(
            "the stores of the ranks are at different steps, or belong to different runs; end all"
            " processes and start them again with resume=True"
        )


def _make_room(run: Run) -> None:
    """For one more step in the store. An error where there is none."""
    session, store = run.session, run.store
    session.check_open()
    session.reads.wait()  # other Checkpoints may copy a step: its name must stay
    left = [each for each in store.info()["snapshots"] if each.startswith(SNAPSHOT)]
    for each in left:  # of a process that was killed
        store.drop(each).wait()
    kept = len(store.info()["snapshots"]) if session.agreement is None else 1
    what = session.blocks, session.algorithm
    check_room_to_copy(session.runtime, *what, kept, session.buffers.bytes)


def drop(runs: list[Run]) -> None:
    for run in runs:
        try:
            if run.snapshot in run.store.info()["snapshots"]:
                run.store.drop(run.snapshot, "deferred").wait()
        except StokerError as error:  # the checkpoint is as good without it
            log.warning(
                "snapshot %s cannot be removed from the store; the next save tries again: %s",
                run.snapshot,
                error,
            )
        finally:
            run.read.set()
