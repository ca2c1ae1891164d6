"""Forms in which the bytes of activations leave memory. "exact" is the bytes themselves.

"sparse" has the same bits in less: a mask of bools goes as bits. Any other storage that is mostly
zero bits (behind a ReLU or a dropout) goes as a bitmap and what is not zero. "bf16" is lossy:
float32 is rounded to bfloat16, to the nearest; anything else goes as with "sparse".
"""

from __future__ import annotations

from typing import Callable

import torch

FORMS = ("exact", "sparse", "bf16")
WORTH = 0.75  # of the bytes; a form that takes more is not worth its computation
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)

Decode = Callable[[torch.Tensor], torch.Tensor]  # of uint8, to uint8


def encode(form: str, dtype: torch.dtype, flat: torch.Tensor) -> tuple[torch.Tensor, Decode] | None:
    """The bytes (uint8) in another form, and the way back; None where it is not worth it. `dtype`:
    what they are."""
    if form == "exact" or flat.numel() % dtype.itemsize or dtype.itemsize not in _INTEGERS:
        return None
    if form == "bf16" and dtype == torch.float32:
        return flat.view(dtype).to(torch.bfloat16).view(
            torch.uint8
        ), lambda data: data.view(torch.bfloat16).to(dtype).view(torch.uint8)
    if dtype == torch.bool:
        count = flat.numel()
        return _bits(flat != 0), lambda data: _mask(data, count).view(torch.uint8)
    values = flat.view(_INTEGERS[dtype.itemsize])
    count, kind = values.numel(), values.dtype
    left = int(torch.count_nonzero(values)) * dtype.itemsize
    if left + count // 8 > WORTH * flat.numel():
        return None
    mask = values != 0
    return torch.cat((values[mask].view(torch.uint8), _bits(mask))), lambda data: _spread(
        data[:left].view(kind), _mask(data[left:], count)
    )


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(mask.numel(), dtype=values.dtype, device=values.device)
    out[mask] = values
    return out.view(torch.uint8)


def _bits(mask: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (padded.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def _mask(bits: torch.Tensor, count: int) -> torch.Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(1) & weights).ne(0).view(-1)[:count]
