"""What a session tells of itself: what the planner plans for, and the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker.errors import Unsupported
from stoker.offload.activations.traffic import ActivationTraffic
from stoker.offload.division.machine import Machine
from stoker.offload.observe.heap import resident_bytes
from stoker.offload.planning import planner
from stoker.offload.planning.planner import Setting

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


def setting(session: Session) -> Setting:
    """What the planner plans for."""
    return Setting(
        session.blocks, session.algorithm, session.planes.layout, session.planes.arena.size
    )


def plan(
    session: Session, machine: Machine | None = None, compute_seconds: float = 0.0
) -> dict[str, Any]:
    """planner.plan() of a session, by the recorded order once there is one. `policy`,
    `step`: the one in use now, and its row."""
    if session.agreement is not None:
        raise Unsupported("a sharded run has no plan; opt.ledger shows what the run does")
    planes, recorder = session.planes, session.pager.recorder
    recorded = max(
        (order.uses for key, order in recorder.orders.items() if key[1] and key[2]),
        key=len,
        default=None,
    )
    away = (
        session.activations.away({block.name: block.index for block in session.blocks})
        if session.activations is not None
        else ActivationTraffic({}, 0)
    )
    away = replace(
        away, again=frozenset(layer.block.index for layer in session.installed.layers if layer.on)
    )
    made = planner.plan(
        setting(session), machine, compute_seconds, recorded, session.steps.sequence, away
    )
    made |= _policy_now(session, made)
    made["step"] = made["steps"][made["policy"]]
    made["buffers"] = session.buffers.bytes
    made["dram"] |= {
        "cap": planes.dram_bytes,
        "pages": planes.arena.pages,
        "process": resident_bytes(),
    }
    if session.how.activations != "keep":
        made["activations"] = (
            session.activations.told()
            if session.activations is not None
            else {"mode": session.how.activations, "bytes": {}, "choices": {}}
        )
        made["activations"]["again"] = len(away.again)
    if session.activations is not None:
        made["dram"]["activations"] = session.activations.arena_bytes
    return made


def _policy_now(session: Session, made: dict[str, Any]) -> dict[str, str]:
    """The policy that the next step has, whatever would be the fastest, and why."""
    steps = session.steps
    now, fastest, of_fastest = steps.active_policy, made["policy"], made["reason"]
    if steps.policy != "auto":
        return {"policy": now, "reason": "as you asked"}
    why = steps.reason or "what auto begins with"
    if "seconds" not in made["steps"][now]:
        return {"policy": now, "reason": why}
    would = f"{fastest} would be the fastest" + (
        " if its updates held" if fastest == "speculate" else ""
    )
    return {
        "policy": now,
        "reason": f"{why}; {of_fastest}" if now == fastest else f"{why}; {would}: {of_fastest}",
    }
