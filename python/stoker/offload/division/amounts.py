"""Amounts that users give: bytes and whole numbers."""

from __future__ import annotations

import operator
import os
from typing import Any

from stoker import _core
from stoker.errors import InvalidArgument


def parse_bytes(name: str, amount: int | str) -> int:
    """20 << 30, or "20GiB". InvalidArgument names the argument."""
    try:
        size = _core.parse_bytes(amount) if isinstance(amount, str) else amount
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return whole(
        name,
        size,
        "is not an amount of memory; give a whole number of bytes above 0, such as int(20e9), or"
        ' "20GiB"',
    )


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def whole(name: str, value: Any, otherwise: str, least: int = 1) -> int:
    """The whole number from `least` on that `value` is; else InvalidArgument, which says so of the
    argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 1 << 63:
        raise InvalidArgument(f"{name}: {value!r} {otherwise}")
    return number
