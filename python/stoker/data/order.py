"""The order of samples as an invertible permutation that needs no array.

`Permutation(count, seed, epoch)` maps position -> sample and back in O(1) time and memory, for any `count`.
It is a balanced Feistel network over the smallest even number of bits that holds `count`; values that fall
outside [0, count) are walked along their cycle until they come back inside (at most 4 tries on average).
A resume therefore needs one integer, the position, and any rank can compute any part of any epoch.
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_ROUNDS = 6  # four make a pseudo-random permutation of large halves; two more for counts of a few bits


def _mix(value: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class Permutation:
    """A permutation of [0, count) keyed by (seed, epoch)."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        if count < 1:
            raise ValueError(f"a permutation needs at least one sample, not {count}")
        self.count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        # Seed and epoch are mixed one after the other so that (1, 2) and (2, 1) are unrelated.
        key = _mix(_mix(seed & _MASK64) ^ (epoch & _MASK64))
        self._keys = []
        for _ in range(_ROUNDS):
            key = _mix(key)
            self._keys.append(key)

    def __len__(self) -> int:
        return self.count

    def sample(self, position: int) -> int:
        """The sample at `position`. Raises IndexError outside [0, count)."""
        return self._walk(position, self._forward)

    def position(self, sample: int) -> int:
        """The position of `sample`: the inverse of sample(). Raises IndexError outside [0, count)."""
        return self._walk(sample, self._backward)

    def _walk(self, value: int, step) -> int:
        if not 0 <= value < self.count:
            raise IndexError(f"{value} is outside the {self.count} samples of this order")
        # A cycle that starts inside the range returns to it, so this ends.
        value = step(value)
        while value >= self.count:
            value = step(value)
        return value

    def _forward(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right

    def _backward(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left ^ key) & self._half_mask), left
        return left << self._half_bits | right


def sample_at(position: int, count: int, seed: int) -> int:
    """The sample at a position of the endless sequence of epochs, each `count` samples in its own order."""
    epoch, within = divmod(position, count)
    return Permutation(count, seed, epoch).sample(within)
