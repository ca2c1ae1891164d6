"""How a session ends: its model, memory, threads and store are let go of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.offload.run import lifetime
from stoker.offload.run.left import refuse_state_dict

if TYPE_CHECKING:
    from stoker.offload.run.session import Session


def close(session: Session) -> None:
    """The newest step becomes durable, and the model gets its placeholders for good."""
    if lifetime.is_forked(session):
        return  # all of it is the parent's
    with session.lock:
        if session.closed:
            return
        try:
            session.installed.hooks.unwind()
            if session.steps.in_flight:
                session.steps.abandon()
            session.flush()
        finally:
            session.reads.end()
            for param in session.params:
                param.tensor.grad = None
                if not session.pager.resident:
                    session.pager.hide(param)
            give_up(session)


def give_up(session: Session) -> None:
    """Lets go of everything as it is."""
    session.ends()
    session.installed.remove()
    session.shown.clear()
    for param in session.params:
        for name in ("_stoker_session", "__deepcopy__"):
            vars(param.tensor).pop(name, None)
    try:
        session.gradients.remove()
        session.pager.clear()
        if session.activations is not None:
            session.activations.close()
        if session.link is not None:
            session.link.unpin()
    finally:  # also where the device does not answer any more
        session.steps.release()
        session.planes.close()
        if session.agreement is not None:
            session.agreement.ranks.leave("the optimizer was closed")
        if session.left_memory:
            refuse_state_dict(session.model, session.runtime.path, session.by_tensor)
