"""A store goes back to one of its snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.offload.storage.planes import pieces, put


def bring_back(store, name: str, instead: Mapping[str, bytes] = {}) -> None:
    """Makes every object what it was at the snapshot, as one durable commit. `instead`: objects
    that become something else."""
    now = {each["key"]: each for each in store.list()}
    txn = store.begin()
    for then in store.list(snapshot=name):
        if then["key"] in instead:
            put(txn, then["key"], instead[then["key"]])
        elif then["key"] not in now or now[then["key"]]["version"] != then["version"]:
            _restore(store, txn, then, name)
    txn.commit("durable").wait()


def _restore(store, txn, then: dict, name: str) -> None:
    key, size = then["key"], then["bytes"]
    txn.resize(key, size)
    for start, part in pieces(0, size, then["chunk_bytes"]):
        txn.write_bytes(key, start, store.read_bytes(key, start, part, snapshot=name))
