"""Stores by their composition string, for everything that is not training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stoker import _core


@contextlib.contextmanager
def open_store(
    composition: str,
    *,
    create: bool = False,
    read_only: bool = False,
    capacity: str | int = 0,
    dram: str | int = "1GiB",
    threads: int = 2,
) -> Iterator[_core.Store]:
    """Opens a store and closes it again:

        with stoker.open_store("s3://bucket/prefix") as store:
            store.list()

    `composition` is ``"local:/nvme0,/nvme1"`` (or the folders alone), ``"dir:/folder"``,
    ``"s3://bucket/prefix"``, ``"coded(6+3, /disk{0..8})"``, ``"unix:/run/stoker.sock"``
    (what `stoker serve` serves there), ``"memory:"`` or
    ``"cached(local:/nvme/cache, s3://bucket/prefix, disk=100GiB)"``. `create` makes a store
    where there is none; a local one needs its `capacity` ("20GiB"). `dram` caps the memory that the
    store takes, `threads` are those that compute checksums. What is not committed when the block
    ends is abandoned.
    """

    def whole(text: str | int) -> int:
        return _core.parse_bytes(text) if isinstance(text, str) else text

    runtime = _core.Runtime(threads=threads, budget_bytes=whole(dram))
    store = runtime.open_store(
        composition,
        create=create,
        read_only=read_only,
        capacity_bytes=whole(capacity),
        holder=f"stoker.open_store, pid {os.getpid()}",
    )
    try:
        yield store
    finally:
        store.close()
