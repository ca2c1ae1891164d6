"""References: what the state_dict() of an offloaded optimizer holds instead of state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.errors import Mismatch

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


def reference(session: Session) -> dict[str, Any]:
    """Names the store, the run and the step."""
    return {
        "store": session.runtime.path,
        "run": session.record.lineage.run,
        "step": session.step_count,
        "version": session.planes.store.info()["committed"],
    }


def refer(session: Session, to: dict[str, Any]) -> None:
    """Goes to the step that a reference names. Nothing moves where nothing was committed since."""
    session.flush()
    now = reference(session)
    same = to.get("run") == now["run"]
    if not same and to.get("run") not in session.record.lineage.left:
        raise Mismatch(
            f"this state_dict refers to a run in {to.get('store')}, which is not the run in"
            f" {now['store']}; offload with the store that it refers to"
        )
    if to["version"] == now["version"]:
        return
    if to["step"] in session.snapshots.steps():
        session.snapshots.go_back(to["step"])
    elif to["step"] != now["step"] or not same:
        advice = (
            ""
            if session.agreement
            else (
                ", and keep the steps that you want to return to with"
                " stoker.offload(snapshots=) and opt.snapshot()"
            )
        )
        raise Mismatch(
            f"this state_dict refers to step {to['step']}, but the run in {now['store']} is at"
            f" step {now['step']} and keeps no snapshot of that step. Continue from step "
            f"{now['step']}{advice}"
        )
