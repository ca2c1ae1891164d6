"""What the commands in Python share: a wrong option is one sentence, and so is what went wrong."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from .errors import StokerError

FAILED, WRONG = 1, 2  # exit statuses, as of all commands
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """As it is fit for a terminal: control characters become \\xNN, as the commands in C++ print
    them."""
    escaped = lambda found: "".join(
        f"\\x{byte:02x}" for byte in found[0].encode(errors="surrogateescape")
    )
    return _CONTROLS.sub(escaped, text)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the list of all options in front of it."""

    def __init__(
        self, prog: str, description: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {printable(message)}; see `{self.prog} --help`\n")


def whole(least: int = 1, most: int = 1 << 40) -> Callable[[str], int]:
    """A whole number from `least` to `most`, as the type of an option."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`, as the type of an option."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most and math.isfinite(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")

    return parse


def named(text: str) -> str:
    """A path that is not empty, as the type of an option."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: give a path")
    return text


def sentence(error: BaseException) -> str:
    """What went wrong, with the file that it is about."""
    if isinstance(error, StokerError) or not isinstance(error, OSError):
        return str(error)
    if not error.filename:
        return f"a file cannot be used ({error.strerror or error})"
    return f"{os.fsdecode(error.filename)} cannot be used ({error.strerror})"


_CURES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "name a folder",
    errno.EISDIR: "name a file",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path that can be written to",
    errno.ENOSPC: "free some space, or give another path",
    errno.EDQUOT: "free some space, or give another path",
}


def _with_cure(error: BaseException) -> str:
    """The sentence of an error, and what to do, where it is an error of Python that says nothing
    of it."""
    text = sentence(error)
    if isinstance(error, StokerError) or not isinstance(error, OSError):
        return text
    cure = _CURES.get(error.errno)
    return f"{text}; {cure}" if cure else text


def say(text: str) -> None:
    """Prints a line of the result."""
    print(printable(text))


def fail(prog: str, error: BaseException | str) -> int:
    """Says it on stderr; returns the exit status."""
    print(
        f"{prog}: {printable(error if isinstance(error, str) else _with_cure(error))}",
        file=sys.stderr,
    )
    return FAILED


def writable_folder(folder: str) -> None:
    """An OSError if no file can be made there; told before there is work that would be in vain."""
    if not os.path.isdir(folder):
        os.stat(folder)  # says why
        raise NotADirectoryError(20, "Not a directory", folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", folder)
