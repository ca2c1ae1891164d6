"""The indexed token file: all tokens of a corpus, training part first, held-out part behind it.

docs/formats/tokens.md is the grammar; this is its only writer and reader. A file is made beside its
final name and renamed when it is whole and durable, so a file under its final name was complete
once. Every read is checked against the CRC of the blocks that it touches.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
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


class TokenFileWriter:
    """Writes one token file: train documents, then held-out documents, then close(). One thread.

    Used as a context manager; leaving it by an exception removes the unfinished file.
    """

    def __init__(self, path: Path, vocabulary: int, end_of_text: int, key: bytes) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._vocabulary, self._end_of_text, self._key = vocabulary, end_of_text, key
        self._dtype = _DTYPES[2 if vocabulary <= 1 << 16 else 4]
        self._counts = [0, 0]  # tokens of the training part, tokens of the held-out part
        self._starts: list[int] = []  # first token of each document
        self._train_documents = 0
        self._pending = bytearray()  # less than one block, not yet written
        self._checksums: list[int] = []
        self._file = open(self._partial, "wb")
        self._file.write(bytes(HEADER_BYTES))

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is not None:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()

    def add(self, tokens: list[int] | np.ndarray, heldout: bool) -> None:
        """Append one document; the end-of-text token is put behind it. Held-out ones come last."""
        if not heldout and self._counts[1]:
            raise ValueError("a training document behind a held-out one would break the split")
        self._starts.append(sum(self._counts))
        self._train_documents += not heldout
        self._counts[heldout] += len(tokens) + 1
        self._pending += (
            np.asarray(tokens, self._dtype).tobytes()
            + self._dtype.type(self._end_of_text).tobytes()
        )
        while len(self._pending) >= BLOCK_BYTES:
            self._write_block(BLOCK_BYTES)

    def _write_block(self, size: int) -> None:
        block = bytes(self._pending[:size])
        del self._pending[:size]
        self._checksums.append(zlib.crc32(block))
        self._file.write(block)

    def close(self) -> None:
        """Write tables and header, make them durable, give the file its name, make the name
        durable."""
        if self._pending:
            self._write_block(len(self._pending))
        documents = np.asarray(self._starts, "<u8").tobytes()
        checksums = np.asarray(self._checksums, "<u4").tobytes()
        documents_offset = self._file.tell()
        self._file.write(documents + checksums)
        header = Header(
            self._dtype.itemsize,
            self._vocabulary,
            BLOCK_BYTES,
            self._end_of_text,
            *self._counts,
            len(self._starts),
            self._train_documents,
            HEADER_BYTES,
            documents_offset,
            documents_offset + len(documents),
            self._file.tell(),
            self._key,
            zlib.crc32(documents),
            zlib.crc32(checksums),
        )
        self._file.seek(0)
        self._file.write(header.pack())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
        return Corruption(
            f"the token file {self.path} is damaged: {what}; "
            "rebuild it from the corpus with --rebuild-tokens"
        )

    def _read_header(self) -> Header:
        raw = os.pread(self._fd, HEADER_BYTES, 0)
        if len(raw) < HEADER_BYTES:
            raise self._damage(f"the header is truncated at {len(raw)} of {HEADER_BYTES} bytes")
        magic, version, header_bytes, *fields = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise self._damage("it does not begin as a token file does")
        if struct.unpack("<I", raw[-4:])[0] != zlib.crc32(raw[:-4]):
            raise self._damage("the header's checksum does not match")
        if version != VERSION or header_bytes != HEADER_BYTES:
            raise self._damage(
                f"it has format version {version}, this program reads version {VERSION}"
            )
        header = Header(*fields)
        size = os.fstat(self._fd).st_size
        if size != header.file_bytes:
            block = max(0, size - header.tokens_offset) // header.block_bytes
            raise self._damage(
                f"it has {size} of {header.file_bytes} bytes, block {block} and what follows is cut"
            )
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
            raise IndexError(f"tokens {start} to {start + count} of {total} in {self.path}")
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
    """One split of a token file as windows of `length` inputs and the one token behind them.

    Window i holds tokens [i * length, i * length + length] of the split: targets are inputs moved
    by one, so neighbours share one token, and no window reaches into the other split.
    """

    def __init__(self, file: TokenFile, split: str, length: int) -> None:
        train = file.header.train_tokens
        self.file, self.length = file, length
        self._start, tokens = {"train": (0, train), "heldout": (train, file.header.heldout_tokens)}[
            split
        ]
        self.count = max(0, (tokens - 1) // length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        """The length + 1 tokens of a window, as int64."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        return self.file.tokens(self._start + index * self.length, self.length + 1).astype(np.int64)

    def batch(self, samples: np.ndarray) -> torch.Tensor:
        """Several windows, int64 [samples, length + 1]."""
        out = np.empty((len(samples), self.length + 1), np.int64)
        for row, index in zip(out, samples, strict=True):
            row[:] = self[int(index)]
        return torch.from_numpy(out)

    @property
    def fingerprint(self) -> str:
        return f"tokens {self.file.header.key.hex()} from {self._start}, windows of {self.length}"
