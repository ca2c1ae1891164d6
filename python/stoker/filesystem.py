"""A store as an fsspec filesystem, for pandas, pyarrow.dataset, datasets and all that take one.

    with stoker.open_store("s3://bucket/prefix") as store:
        fs = StokerFileSystem(store)
        pandas.read_parquet("part.parquet", filesystem=fs)

``fsspec.open("stoker://key", store="dir:/data")`` opens the store by itself, and keeps it open as
long as fsspec keeps the filesystem. Keys are paths. Folders are what keys have in common: none is
made, and an empty one is none. A file is one object, written whole when it is closed.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from stoker import _core
from stoker.errors import Conflict, NotFound
from stoker.stores import open_store


class StokerFileSystem(AbstractFileSystem):
    """`store` is an open store (`stoker.open_store`), or the composition of one that is opened
    here; `options` go to `open_store` then."""

    protocol = "stoker"
    root_marker = ""
    cachable = False  # each instance holds a store

    def __init__(self, store: _core.Store | str, **options: Any) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        self.store = (
            self._closing.enter_context(open_store(store, **options))
            if isinstance(store, str)
            else store
        )

    def close(self) -> None:
        """Closes the store, if it was opened here."""
        self._closing.close()

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return str(path).removeprefix("stoker://").strip("/")

    # ---- looking

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        prefix = path + "/" if path else ""
        objects, folders = self.store.list_level(prefix)
        entries = [self._file(each) for each in objects]
        entries += [self._folder(each.removesuffix("/")) for each in folders]
        entries = entries or [self._file(self._stat(path))]
        entries.sort(key=lambda entry: entry["name"])
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if not path:
            return self._folder(path)
        with contextlib.suppress(NotFound):
            return self._file(self.store.stat(path))
        if any(self.store.list_level(path + "/")):
            return self._folder(path)
        raise FileNotFoundError(path)

    def created(self, path: str) -> Any:
        raise NotImplementedError(
            f"a store does not keep the time when {path} was written; use checksum() to see changes"
        )

    modified = created

    def checksum(self, path: str) -> int:
        return hash(self._stat(self._strip_protocol(path))["tag"])

    def _stat(self, path: str) -> dict[str, Any]:
        try:
            return self.store.stat(path)
        except (NotFound, ValueError) as error:
            raise FileNotFoundError(path) from error

    @staticmethod
    def _file(stat: dict[str, Any]) -> dict[str, Any]:
        return {"name": stat["key"], "size": stat["bytes"], "type": "file", "ETag": stat["tag"]}

    @staticmethod
    def _folder(path: str) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}

    # ---- reading and writing

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        size = self._stat(path)["bytes"]
        first, last, _step = slice(start, end).indices(size)
        return self.store.read_bytes(path, first, max(0, last - first))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        absent = mode == "create"
        if absent and self.store.exists(path):
            raise FileExistsError(path)
        write_object(self.store, path, bytes(value), absent)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **options: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return StokerFile(
                self,
                path,
                mode,
                block_size or "default",
                autocommit,
                cache_options=cache_options,
                **options,
            )
        if mode not in {"wb", "xb", "ab"}:
            raise ValueError(f"mode {mode} is not one of rb, wb, xb, ab")
        if mode == "xb" and self.store.exists(path):
            raise FileExistsError(path)
        before = self.cat_file(path) if mode == "ab" and self.store.exists(path) else b""
        return _Writer(self.store, path, before, absent=mode == "xb")

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        change = self.store.begin()
        try:
            change.remove(path)
            change.commit().wait()
        except NotFound as error:
            raise FileNotFoundError(path) from error
        finally:
            change.abandon()

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        for each in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.isfile(each):
                self._rm(each)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(path1):
            return
        try:
            self.store.copy(path1, path2)
        except NotFound as error:
            raise FileNotFoundError(path1) from error

    # A folder is what keys have in common.
    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        pass


class StokerFile(AbstractBufferedFile):
    """An object, read by ranges that are all of one content."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = self.fs.store.read_bytes(self.path, start, max(0, min(end, self.size) - start))
        # One range of all of it is of one content by itself.
        whole = start == 0 and end >= self.size
        if not whole and self.fs.store.stat(self.path)["tag"] != self.details["ETag"]:
            raise Conflict(f"'{self.path}' was replaced while it was read: open it again")
        return data


class _Writer(io.BytesIO):
    """A new object: kept in memory, and committed when the file is closed. A `with` block that an
    exception leaves commits nothing."""

    def __init__(self, store: _core.Store, path: str, before: bytes, absent: bool) -> None:
        super().__init__()
        self.write(before)
        self._store, self._path, self._absent, self._failed = store, path, absent, False

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._failed = self._failed or kind is not None
        super().__exit__(kind, *rest)

    def discard(self) -> None:
        self._failed = True

    def close(self) -> None:
        try:
            if not self.closed and not self._failed:
                self._failed = True  # whatever happens now, a second close() does not commit
                write_object(self._store, self._path, self.getvalue(), self._absent)
        finally:
            super().close()


def write_object(store: _core.Store, key: str, data: bytes, absent: bool = False) -> None:
    """Makes the object `key` what `data` is. `absent`: Conflict if it is there, where the store
    has conditions."""
    change = store.begin()
    try:
        change.resize(key, len(data))
        change.write_bytes(key, 0, data)
        if absent and store.features()["conditional"]:
            change.require(key, None)
        change.commit().wait()
    finally:
        change.abandon()  # a traceback would keep it, and with it the object, from others
