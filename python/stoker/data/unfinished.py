"""A build that may be killed at any moment: what it keeps in its store until it is done.

`building/plan.json` says what is built; `building/NUMBER.json` says of an object that it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from stoker import _core

from ..errors import Mismatch

BEGUN = "building/"
PLAN = BEGUN + "plan.json"


def bar(what: str, total: int, initial: int = 0) -> tqdm:
    return tqdm(
        desc=what,
        total=total,
        initial=initial,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=None,
    )


def facts_of(out: _core.Store) -> Iterator[dict[str, Any]]:
    """What is known of each object that was said to be done."""
    for each in out.list(BEGUN):
        about = json_of(out, each["key"]) if each["key"] != PLAN else None
        if about is not None:
            yield about


def is_there(out: _core.Store, about: dict[str, Any]) -> bool:
    """With all of its bytes."""
    return out.exists(about["key"]) and out.stat(about["key"])["bytes"] == about["bytes"]


def check_finished(out: _core.Store, objects: Sequence[dict[str, Any]]) -> None:
    """Mismatch: one of them is not there any more."""
    for each in objects:
        if not is_there(out, each):
            raise Mismatch(f"{each['key']} was removed or cut: start again with --restart")
    forget(out)  # it was killed at the very end


def forget(out: _core.Store) -> None:
    for each in out.list(BEGUN):
        remove(out, each["key"])


# ---- objects


def put(store: _core.Store, key: str, data: bytes) -> None:
    change = store.begin()
    change.resize(key, len(data))
    change.write_bytes(key, 0, data)
    change.commit().wait()


def put_json(store: _core.Store, key: str, value: Any) -> None:
    put(store, key, (json.dumps(value, indent=1) + "\n").encode())


def json_of(store: _core.Store, key: str) -> Any:
    """None if it is not there."""
    return json.loads(store.read_bytes(key)) if store.exists(key) else None


def remove(store: _core.Store, key: str) -> None:
    change = store.begin()
    change.remove(key)
    change.commit().wait()
