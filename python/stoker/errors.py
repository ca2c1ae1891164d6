"""What can go wrong, as exception classes. The compiled core raises these; each message is a
sentence that says what to do.

Classes also derive from the built-in exception a caller would expect, so ``except OSError`` and
friends work.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator


class StokerError(Exception):
    """Base of every error Stoker raises. ``errno`` is that of the failing system call, or None."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if not hasattr(self, "errno"):
            self.errno: int | None = None

    def __str__(self) -> str:
        # OSError and KeyError have a form of their own for the message; users get the plain
        # sentence.
        return " ".join(str(arg) for arg in self.args)


class InvalidArgument(StokerError, ValueError):
    """The caller asked for something that cannot be."""


class NotFound(StokerError, FileNotFoundError):
    """A store, object or snapshot that is not there."""


class AlreadyExists(StokerError, FileExistsError):
    """A name that is taken."""


class OutOfSpace(StokerError, OSError):
    """A disk or a store is full. The last committed version is intact."""


class OverBudget(StokerError, MemoryError):
    """The memory cap would be exceeded."""


class Corruption(StokerError, OSError):
    """Bytes differ from their checksum, or an on-disk rule is broken; the message names object and
    chunk."""


class Busy(StokerError, OSError):
    """Somebody else holds it: another process the store, another transaction the object."""


class ReadOnly(StokerError, PermissionError):
    """The store refuses writes; the message says why."""


class NoPermission(StokerError, PermissionError):
    """The user may not read or write a file or folder; the message names it."""


class IoError(StokerError, OSError):
    """The device or the kernel failed a request."""


class Unsupported(StokerError, RuntimeError):
    """This machine, engine or store cannot do it."""


class Cancelled(StokerError, RuntimeError):
    """Abandoned before it was done."""


class Mismatch(StokerError, ValueError):
    """A store, file or record of another identity or version than the one expected."""


class NotFinite(StokerError, ArithmeticError):
    """The gradients of a step hold NaN or infinity, so it was refused. The step before stands."""


class Conflict(StokerError, RuntimeError):
    """A condition of a commit did not hold: somebody else was first. Nothing was changed."""


class InDoubt(StokerError, ConnectionError):
    """The answer to a commit was lost: it may have happened or not. Look before you commit
    again."""


class Unavailable(StokerError, ConnectionError):
    """The process that serves a store cannot be reached now. Nothing was changed; try again
    later."""


class RankLost(StokerError, ConnectionError):
    """Another process of a sharded run ended, or its program went another way. Steps that all ranks
    committed are kept: start all processes again, and resume."""


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """An OSError from inside that names no file is about `path`: open() names its file, write() and
    fsync() do not."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StokerError) or error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


_OF_SYSTEM: dict[int, type[StokerError]] = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), NoPermission),
    errno.EROFS: ReadOnly,
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
        InvalidArgument,
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), OutOfSpace),
    errno.ENOENT: NotFound,
}


@contextlib.contextmanager
def saying(what: str) -> Iterator[None]:
    """An OSError of Python from inside becomes the StokerError of its kind, which says `what`
    cannot be done."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StokerError):
            raise
        told = _OF_SYSTEM.get(error.errno or 0, IoError)(
            f"cannot {what} ({error.strerror or error})"
        )
        told.errno = error.errno
        raise told from error


# By the core's name of a code (stoker::name(Code)); the binding looks classes up here, so this is
# the one table.
BY_CODE: dict[str, type[StokerError]] = {
    "invalid argument": InvalidArgument,
    "not found": NotFound,
    "already exists": AlreadyExists,
    "out of space": OutOfSpace,
    "over budget": OverBudget,
    "corruption": Corruption,
    "busy": Busy,
    "read only": ReadOnly,
    "no permission": NoPermission,
    "i/o error": IoError,
    "unsupported": Unsupported,
    "cancelled": Cancelled,
    "mismatch": Mismatch,
    "conflict": Conflict,
    "in doubt": InDoubt,
    "unavailable": Unavailable,
}
