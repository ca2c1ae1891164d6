"""Objects that are compressed as a whole: which kinds are unpacked, and reading one at once."""

from __future__ import annotations

import re
from typing import Any

from stoker import _core

from ..errors import Corruption, InvalidArgument

# What an index and C++ call a kind of compression, by how names of tar files end, and by what an
# index.json of MDS shards calls it.
OF_NAMES = {"gz": "gz", "tgz": "gz", "zst": "zstd"}
OF_MDS = {"gz": "gz", "zstd": "zstd"}
_TAR = re.compile(r"\.(tar\.(?:gz|zst|xz|bz2)|tgz|gz|zst|xz|bz2)$")
_MOST = 1 << 36  # bytes that an object unpacks to, where nobody says how many


def kind_of_tar(key: str) -> str:
    """ "": it is plain. InvalidArgument: a kind that is not unpacked here."""
    found = _TAR.search(key)
    if found is None:
        return ""
    ending = found[1].rpartition(".")[2]
    if ending not in OF_NAMES:
        raise InvalidArgument(
            f"{key} is compressed with {ending}, which only `stoker data build STORE OUT "
            f"--unpack` can unpack: unpack it, or write it with gzip or zstd"
        )
    return OF_NAMES[ending]


class Unpacked:
    """An object of a store, unpacked in memory. It has what reads of headers need of a store."""

    def __init__(self, store: _core.Store, found: dict[str, Any], kind: str) -> None:
        """found: "key" and "bytes", and "unpacked" where that is known. Corruption: it is cut,
        damaged, or of another size."""
        key, known = found["key"], found.get("unpacked")
        packed = bytes(store.read_bytes(key, 0, found["bytes"])) if found["bytes"] else b""
        try:
            self._data = _core.unpack(packed, kind, _MOST if known is None else known)
        except Corruption as error:
            raise Corruption(
                f"'{key}' cannot be unpacked ({error}); fetch that object again"
            ) from error
        if known is not None and len(self._data) != known:
            raise Corruption(
                f"'{key}' unpacks to {len(self._data)} bytes, and should have {known}; fetch that "
                "object again"
            )
        self.bytes = len(self._data)

    def read_bytes(self, _key: str, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


def opened(store: _core.Store, found: dict[str, Any]) -> Any:
    """What to read the headers of an object from: the store, or the object unpacked."""
    return Unpacked(store, found, found["packed"]) if found.get("packed") else store


def about(found: dict[str, Any]) -> dict[str, Any]:
    """What an index says of an object."""
    names = ("key", "bytes", "tag", *(("packed", "unpacked") if found.get("packed") else ()))
    return {name: found[name] for name in names}
