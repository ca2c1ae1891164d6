"""Heap: what the process takes in all, and a bound on what malloc keeps of freed memory.

Page faults cost more than the arithmetic of a small layer, so freed memory is kept for the next
tensor. But glibc cuts each tensor to an alignment, so a hole rarely fits a tensor of the size that
left it. Without a bound the heap grows by one hole a gradient until it has the size of the model.
"""

from __future__ import annotations

import ctypes

MIB = 1 << 20
_LIBC = ctypes.CDLL(None)
_FIELDS = (b"RssAnon:", b"RssShmem:", b"HugetlbPages:")


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_mallinfo = getattr(_LIBC, "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def resident_bytes() -> int:
    """RssAnon + RssShmem + HugetlbPages of the process. VmRSS misses huge pages, counts files."""
    total = 0
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(_FIELDS):
                total += int(line.split()[1]) << 10
    return total


def keep_heap() -> None:
    """Lets glibc keep what is freed instead of mapping fresh pages. Trimmer bounds it."""
    if hasattr(_LIBC, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        _LIBC.mallopt(m_mmap_threshold, 32 * MIB)  # the largest glibc takes
        _LIBC.mallopt(m_trim_threshold, 512 * MIB)


def trim() -> None:
    """Hands freed heap memory back to the kernel."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


class Trimmer:
    """Calls trim() when the process has KEEPS more than tensors took at once in two steps."""

    KEEPS = 12 * MIB  # of the 32 MiB that a process may take beside cap and saved tensors
    LOOKS = 4 * MIB  # freed bytes between two looks

    def __init__(self) -> None:
        self.trims = 0
        self._freed = 0
        self._apart = 0  # what the process has that malloc did not give: pools, stacks, Python
        self._live = self._live_before = 0  # the most given out by malloc, this step and the last
        self._peak = 0  # the most that the process had in this step, as far as somebody looked

    def begin(self) -> None:
        """What was freed until now is gone, and what was in use does not count."""
        self._live = self._live_before = 0
        self._trim()

    def freed(self, size: int) -> None:
        """So many bytes were freed, or soon are."""
        self._freed += size
        if self._freed >= self.LOOKS:
            self.look()

    def look(self) -> None:
        self._freed = 0
        resident = resident_bytes()
        self._peak = max(self._peak, resident)
        in_use = self._in_use()
        self._live = max(self._live, in_use)
        self._apart = min(self._apart, resident - in_use)
        if resident > self._apart + max(self._live, self._live_before) + self.KEEPS:
            self._trim()

    def end_step(self) -> int:
        """The most that the process was seen to have since the last call."""
        self.look()
        peak, self._peak = self._peak, 0
        self._live, self._live_before = 0, self._live
        return peak

    def _trim(self) -> None:
        trim()
        self.trims += 1
        self._apart = resident_bytes() - self._in_use()

    @staticmethod
    def _in_use() -> int:
        """Bytes that malloc has given out; 0 where nobody can tell, and then all counts as kept."""
        if _mallinfo is None:
            return 0
        info = _mallinfo()
        return info.uordblks + info.hblkhd
