"""Archives of samples."""

from __future__ import annotations

import io
import tarfile


def tar_of(samples: dict[str, dict[str, bytes]]) -> bytes:
    """{name: {ending: bytes}} as a tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, parts in samples.items():
            for ending, data in parts.items():
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()
