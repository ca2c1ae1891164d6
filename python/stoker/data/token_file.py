"""The indexed token file: all tokens of a corpus, training part first, held-out part behind it.

docs/formats/tokens.md is the grammar; this is its only writer. A file is made in memory, and stored
as one object. Every read of TokenFile is checked against the CRC of the blocks that it touches.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import Corruption

MAGIC = b"STKTOKEN"
VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 64 << 10
# magic, version, header bytes, token bytes, vocabulary, block bytes, end-of-text id | train tokens,
# held-out tokens, documents, train documents, tokens offset, documents offset, checksums offset,
# file bytes | key | CRCs of the tables
_HEADER = struct.Struct("<8s6I8Q32s2I")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    """The fields of the header, in the order in which they lie in the file."""

    token_bytes: int
    vocabulary: int
    block_bytes: int
    end_of_text: int
    train_tokens: int
    heldout_tokens: int
    documents: int
    train_documents: int
    tokens_offset: int
    documents_offset: int
    checksums_offset: int
    file_bytes: int
    key: bytes
    documents_crc: int
    checksums_crc: int

    def pack(self) -> bytes:
        """The 4096 bytes of the header, closed by the CRC of all that stands before it."""
        body = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *vars(self).values()).ljust(
            HEADER_BYTES - 4, b"\0"
        )
        return body + struct.pack("<I", zlib.crc32(body))


class TokenPacker:
    """Makes one token file in memory: add() documents, then file(). One thread."""

    def __init__(self, vocabulary: int, end_of_text: int, key: bytes) -> None:
        """key: 32 bytes that tell this corpus from others."""
        self._vocabulary, self._end_of_text, self._key = vocabulary, end_of_text, key
        self._dtype = _DTYPES[2 if vocabulary <= 1 << 16 else 4]
        # Of the training part, and of the held-out part: tokens, and the first of each document.
        self._tokens = (bytearray(), bytearray())
        self._starts: tuple[list[int], list[int]] = ([], [])

    def add(self, tokens: list[int] | np.ndarray, heldout: bool) -> None:
        """One document; the end-of-text token is put behind it. Each part keeps its order."""
        part = self._tokens[heldout]
        self._starts[heldout].append(len(part) // self._dtype.itemsize)
        part += np.asarray(tokens, self._dtype).data.cast("B")
        part += self._dtype.type(self._end_of_text).tobytes()

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the training part, and of the held-out part."""
        train, heldout = (len(part) // self._dtype.itemsize for part in self._tokens)
        return train, heldout

    @property
    def documents(self) -> tuple[int, int]:
        return len(self._starts[0]), len(self._starts[1])

    def file(self) -> bytes:
        """The whole file."""
        counts = self.counts
        tokens = b"".join(self._tokens)
        documents = np.array(
            [*self._starts[0], *(counts[0] + start for start in self._starts[1])], "<u8"
        ).tobytes()
        checksums = np.array(
            [
                zlib.crc32(tokens[at : at + BLOCK_BYTES])
                for at in range(0, len(tokens), BLOCK_BYTES)
            ],
            "<u4",
        ).tobytes()
        documents_offset = HEADER_BYTES + len(tokens)
        checksums_offset = documents_offset + len(documents)
        header = Header(
            self._dtype.itemsize,
            self._vocabulary,
            BLOCK_BYTES,
            self._end_of_text,
            *counts,
            sum(self.documents),
            self.documents[0],
            HEADER_BYTES,
            documents_offset,
            checksums_offset,
            checksums_offset + len(checksums),
            self._key,
            zlib.crc32(documents),
            zlib.crc32(checksums),
        )
        return b"".join((header.pack(), tokens, documents, checksums))


def header_of(raw: bytes, name: str) -> Header:
    """The header in the first bytes of a token file. Raises Corruption."""
    if len(raw) < HEADER_BYTES:
        raise damaged(name, f"the header is truncated at {len(raw)} of {HEADER_BYTES} bytes")
    magic, version, header_bytes, *fields = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise damaged(name, "it does not begin as a token file does")
    if struct.unpack("<I", raw[HEADER_BYTES - 4 : HEADER_BYTES])[0] != zlib.crc32(
        raw[: HEADER_BYTES - 4]
    ):
        raise damaged(name, "the header's checksum does not match")
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise damaged(
            name, f"it has format version {version}, but this Stoker reads version {VERSION}"
        )
    return Header(*fields)


def check_size(header: Header, size: int, name: str) -> None:
    """Corruption if the file has another size than its header says."""
    if size != header.file_bytes:
        block = max(0, size - header.tokens_offset) // header.block_bytes
        raise damaged(
            name,
            f"it has {size} of {header.file_bytes} bytes; it is cut from block {block} on",
        )


def damaged(name: str, what: str) -> Corruption:
    return Corruption(
        f"the token file {name} is damaged: {what}; make it again from the corpus "
        "(stoker train --rebuild-tokens, stoker data build --restart)"
    )


class TokenFile:
    """Reads a token file. Any thread may read; reads share no position (pread)."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Open and check header and tables. Raises Corruption (naming file and part) or OSError."""
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            self.header = self._read_header()
            header = self.header
            self._dtype = _DTYPES[header.token_bytes]
            self.documents = self._read_table(
                "document index",
                header.documents_offset,
                header.checksums_offset,
                header.documents_crc,
                "<u8",
            )
            self._checksums = self._read_table(
                "checksum table",
                header.checksums_offset,
                header.file_bytes,
                header.checksums_crc,
                "<u4",
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _damage(self, what: str) -> Corruption:
        return damaged(str(self.path), what)

    def _read_header(self) -> Header:
        header = header_of(os.pread(self._fd, HEADER_BYTES, 0), str(self.path))
        check_size(header, os.fstat(self._fd).st_size, str(self.path))
        return header

    def _read_table(self, name: str, start: int, end: int, crc: int, dtype: str) -> np.ndarray:
        raw = os.pread(self._fd, end - start, start)
        if len(raw) != end - start or zlib.crc32(raw) != crc:
            raise self._damage(f"the checksum of the {name} does not match")
        return np.frombuffer(raw, dtype)

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the whole file, checked. Raises Corruption naming the
        block."""
        total = self.header.train_tokens + self.header.heldout_tokens
        if start < 0 or count < 0 or start + count > total:
            raise IndexError(
                f"{self.path} has {total} tokens, so there are no tokens {start} to {start + count}"
            )
        width, block_bytes = self.header.token_bytes, self.header.block_bytes
        first = start * width // block_bytes
        last = max(first + 1, -(-(start + count) * width // block_bytes))
        blocks = (
            b"".join(self._block(index, total * width) for index in range(first, last))
            if count
            else b""
        )
        return np.frombuffer(
            blocks, self._dtype, count, start * width - first * block_bytes if count else 0
        )

    def _block(self, index: int, tokens_bytes: int) -> bytes:
        begin = index * self.header.block_bytes
        size = min(self.header.block_bytes, tokens_bytes - begin)
        raw = os.pread(self._fd, size, self.header.tokens_offset + begin)
        if len(raw) != size or zlib.crc32(raw) != self._checksums[index]:
            raise self._damage(
                f"the checksum of block {index} (bytes {self.header.tokens_offset + begin} to "
                f"{self.header.tokens_offset + begin + size}) does not match"
            )
        return raw

    def verify(self) -> Iterator[int]:
        """Check every block, yielding its index after it passed."""
        total = (self.header.train_tokens + self.header.heldout_tokens) * self.header.token_bytes
        for index in range(len(self._checksums)):
            self._block(index, total)
            yield index


class Windows:
    """One split of token files as windows of `length` inputs and the one token behind them.

    Window i of a file holds tokens [i * length, i * length + length] of its split: targets are
    inputs moved by one, so neighbours share one token. No window reaches into the other split, or
    into another file; windows are counted through the files.
    """

    def __init__(self, files: TokenFile | Sequence[TokenFile], split: str, length: int) -> None:
        self.files = [files] if isinstance(files, TokenFile) else list(files)
        self.length, self.split = length, split
        # The first token of the split in each file, and the windows before each file's.
        self._starts = [
            {"train": 0, "heldout": file.header.train_tokens}[split] for file in self.files
        ]
        self._before = [0]
        for file in self.files:
            tokens = getattr(file.header, f"{split}_tokens")
            self._before.append(self._before[-1] + max(0, (tokens - 1) // length))

    def __len__(self) -> int:
        return self._before[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        """The length + 1 tokens of a window, as int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no window {index}: there are {len(self)}, counted from 0")
        at = bisect_right(self._before, index) - 1
        start = self._starts[at] + (index - self._before[at]) * self.length
        return self.files[at].tokens(start, self.length + 1).astype(np.int64)

    def batch(self, samples: np.ndarray) -> torch.Tensor:
        """Several windows, int64 [samples, length + 1]."""
        out = np.empty((len(samples), self.length + 1), np.int64)
        for row, index in zip(out, samples, strict=True):
            row[:] = self[int(index)]
        return torch.from_numpy(out)

    @property
    def fingerprint(self) -> str:
        keys = "".join(file.header.key.hex() for file in self.files)
        return f"tokens {keys}, {self.split}, windows of {self.length}"
