"""Several volumes: which of them takes how much of what is written, step by step. The store decides; this says so."""

from __future__ import annotations

from typing import Any

from stoker import _core

WORTH_TELLING = 0.1  # a share that changed by this much since it was last told


class Shares:
    """The shares of a store's volumes in what a step wrote. Nothing where there is one volume."""

    def __init__(self, store: _core.Store) -> None:
        self._store = store
        self._before = _written(store.info()["volumes"])
        self._told: dict[str, float] = {}

    def step(self) -> tuple[dict[str, int], dict[str, Any] | None]:
        """Bytes written since the last call {volume: bytes}, and what is worth telling of it: volumes {path: share}, and a reason."""
        if len(self._before) < 2:
            return {}, None
        volumes = self._store.info()["volumes"]
        now = _written(volumes)
        written = {path: total - self._before[path] for path, total in now.items()}
        self._before = now
        total = sum(written.values())
        if total == 0:
            return written, None
        shares = {path: part / total for path, part in written.items()}
        if self._told and all(abs(share - self._told[path]) < WORTH_TELLING for path, share in shares.items()):
            return written, None
        self._told = shares
        rates = ", ".join(f"{path} moves {volumes[path]['bytes_per_second'] / 1e9:.2f} GB/s and takes {share:.0%}" for path, share in shares.items())
        return written, {"volumes": shares, "reason": rates}


def _written(volumes: dict[str, dict]) -> dict[str, int]:
    return {path: volume["written_bytes"] for path, volume in volumes.items()}
