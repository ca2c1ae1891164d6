"""From files of text to a token file, built once and found again by a key.

Also a program: `python -m stoker.data --folder OUT PATH...` does the same in a process of its own.
The trainer runs it that way, so that the memory which learning a vocabulary takes is not the
training process's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ..errors import Corruption, StokerError
from .corpus import CorpusError, TextFile, find_text_files, fingerprint, read_text
from .token_file import TokenFile, TokenFileWriter
from .vocabulary import end_of_text, load_tokenizer, train_tokenizer

PIECES = 50  # a file larger than 1/50 of the corpus is cut into documents of at most that size
HELDOUT_SHARE = 0.01
HELDOUT_LEAST_BYTES = 64 << 10  # but never more than a tenth of the corpus


@dataclass(frozen=True)
class Prepared:
    """What prepare() made or found again."""

    tokens: str
    tokenizer: str
    built: bool
    files: int
    text_bytes: int


@dataclass(frozen=True)
class _Document:
    file: TextFile
    text: str
    size: int
    digest: bytes


def prepare(
    paths: Sequence[str | os.PathLike],
    folder: Path,
    vocabulary: int = 4096,
    tokenizer: Path | None = None,
    skip: Sequence[str] = (),
    rebuild: bool = False,
) -> Prepared:
    """Make sure that `folder` holds the token file of these texts, and say where it is.

    vocabulary: tokens to learn; ignored when `tokenizer` names one to load. rebuild: make it anew
    even if it is there. Raises CorpusError for the user's faults, OSError where `folder` cannot be
    written.
    """
    files = find_text_files(paths, skip)
    text_bytes = sum(file.size_bytes for file in files)
    key = _key(files, vocabulary, tokenizer)
    tokens_path = folder / f"{key.hex()[:16]}.tokens"
    tokenizer_path = folder / f"{key.hex()[:16]}.tokenizer.json"
    done = Prepared(str(tokens_path), str(tokenizer_path), True, len(files), text_bytes)
    if not rebuild and tokenizer_path.exists() and tokens_path.exists():
        # a damaged one is an error with a sentence, not a silent rebuild
        with TokenFile(tokens_path) as found:
            if found.header.key != key:
                raise Corruption(
                    f"the token file {tokens_path} was made from another corpus; "
                    "rebuild it with --rebuild-tokens"
                )
        return Prepared(**{**asdict(done), "built": False})
    folder.mkdir(parents=True, exist_ok=True)
    _build(files, text_bytes, vocabulary, tokenizer, tokens_path, tokenizer_path, key)
    return done


def prepare_apart(
    paths: Sequence[str | os.PathLike],
    folder: Path,
    vocabulary: int = 4096,
    tokenizer: Path | None = None,
    skip: Sequence[str] = (),
    rebuild: bool = False,
) -> Prepared:
    """prepare() in a child process, whose progress goes to our stderr. Raises CorpusError with its
    sentence.

    The child is in a process group of its own: Ctrl-C comes to us alone, and what it raises here
    ends the child.
    """
    command = [
        sys.executable,
        "-m",
        __package__,
        "--folder",
        str(folder),
        "--vocabulary",
        str(vocabulary),
    ]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    command += ["--rebuild"] if rebuild else []
    for name in skip:
        command += ["--skip", name]
    child = subprocess.run(
        [*command, "--", *map(str, paths)],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
        process_group=0,
    )
    try:
        answer = json.loads(child.stdout)
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"preparing the corpus ended unexpectedly (exit status {child.returncode}); "
            "what it printed above says why"
        ) from error
    if "error" in answer:
        raise CorpusError(answer["error"])
    return Prepared(**answer)


def _key(files: Sequence[TextFile], vocabulary: int, tokenizer: Path | None) -> bytes:
    digest = hashlib.sha256(fingerprint(files).encode())
    if tokenizer is None:
        digest.update(f"learn {vocabulary}".encode())
    else:
        digest.update(load_tokenizer(tokenizer).to_str().encode())
    digest.update(f"split {PIECES} {HELDOUT_SHARE} {HELDOUT_LEAST_BYTES}".encode())
    return digest.digest()


def _documents(files: Sequence[TextFile], piece_bytes: int, what: str) -> Iterator[_Document]:
    """Every document of the corpus, with progress in bytes of files read."""
    total = sum(file.size_bytes for file in files)
    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=None,
    ) as progress:
        for file in files:
            for text in _pieces(read_text(file), piece_bytes):
                raw = text.encode()
                yield _Document(file, text, len(raw), hashlib.blake2b(raw, digest_size=16).digest())
            progress.update(file.size_bytes)


def _pieces(text: str, limit: int) -> Iterator[str]:
    """`text` cut behind line ends into pieces of at most `limit` characters (one longer line stays
    whole)."""
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start, start + limit) + 1
        if cut <= start:
            cut = text.find("\n", start + limit) + 1 or len(text)
        yield text[start:cut]
        start = cut
    if text[start:].strip():
        yield text[start:]


def _choose_heldout(sizes: dict[bytes, int]) -> set[bytes]:
    """The digests of the held-out documents: chosen by content, so that copies of a text are on one
    side."""
    total = sum(sizes.values())
    wanted = max(HELDOUT_SHARE * total, min(HELDOUT_LEAST_BYTES, total / 10))
    chosen: set[bytes] = set()
    held = 0
    for digest in sorted(sizes):
        if held >= wanted:
            break
        chosen.add(digest)
        held += sizes[digest]
    return chosen


def _build(
    files: Sequence[TextFile],
    text_bytes: int,
    vocabulary: int,
    tokenizer_from: Path | None,
    tokens_path: Path,
    tokenizer_path: Path,
    key: bytes,
) -> None:
    piece_bytes = max(4096, text_bytes // PIECES)
    sizes: dict[bytes, int] = {}
    for document in _documents(files, piece_bytes, "reading the corpus"):
        sizes[document.digest] = sizes.get(document.digest, 0) + document.size
    if len(sizes) < 2:
        raise CorpusError(
            f"the corpus has {sum(sizes.values())} bytes of text, too few to train on and to hold "
            "some out: give more text with --data"
        )
    heldout = _choose_heldout(sizes)
    if tokenizer_from is None:
        tokenizer = train_tokenizer(
            (
                d.text
                for d in _documents(files, piece_bytes, "learning the vocabulary")
                if d.digest not in heldout
            ),
            vocabulary,
        )
    else:
        tokenizer = load_tokenizer(tokenizer_from)
    _write_atomically(tokenizer_path, tokenizer.to_str(pretty=True))
    with TokenFileWriter(
        tokens_path, tokenizer.get_vocab_size(), end_of_text(tokenizer), key
    ) as writer:
        for part, what in ((False, "tokenizing"), (True, "tokenizing the held-out part")):
            documents = (
                d for d in _documents(files, piece_bytes, what) if (d.digest in heldout) == part
            )
            for batch in _batches(documents, 1 << 20):
                for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                    writer.add(encoding.ids, heldout=part)
        writer.close()


def _batches(documents: Iterator[_Document], size: int) -> Iterator[list[str]]:
    """Texts of about `size` bytes together: enough to keep the tokenizer's threads busy."""
    batch, held = [], 0
    for document in documents:
        batch.append(document.text)
        held += document.size
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _end_with_the_parent() -> None:
    """A killed `stoker train` leaves nobody who wants the answer: a child that tried to give it
    would end in a traceback."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object: a Prepared, or {"error": sentence}. Exit status as of `stoker
    train`."""
    parser = argparse.ArgumentParser(
        prog="python -m stoker.data", description="Turn text files or folders into a token file."
    )
    parser.add_argument("paths", nargs="+", help="text files or folders of text")
    parser.add_argument("--folder", type=Path, required=True, help="where the token file is kept")
    parser.add_argument(
        "--vocabulary", type=int, default=4096, help="tokens to learn (default 4096)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json to use instead of learning one"
    )
    parser.add_argument(
        "--skip", action="append", default=[], help="a folder name to leave out; may be repeated"
    )
    parser.add_argument("--rebuild", action="store_true", help="build anew even if it is there")
    args = parser.parse_args(argv)
    _end_with_the_parent()
    try:
        prepared = prepare(
            args.paths, args.folder, args.vocabulary, args.tokenizer, args.skip, args.rebuild
        )
    except (StokerError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    except OSError as error:
        print(
            json.dumps(
                {
                    "error": (
                        f"the token file cannot be written to {args.folder} ({error.strerror}): "
                        "make room or choose another --out"
                    )
                }
            )
        )
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(prepared)))
    return 0
