"""The corpus of `stoker train`: tokens that are built once and found again by a key.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

from ..errors import Corruption, StokerError
from ..stores import open_store
from .build import INDEX, TOKENIZER, Rule, build, digest_of, documents, index_of, learn
from .corpus import CorpusError, TextFile, find_text_files, fingerprint
from .texts import Reader, of_files
from .token_file import TokenFile
from .vocabulary import load_tokenizer

PIECES = 50  # a file larger than 1/50 of the corpus is cut into documents of at most that size
HELDOUT_SHARE = 0.01
HELDOUT_LEAST_BYTES = 64 << 10  # but never more than a tenth of the corpus


@dataclass(frozen=True)
class Prepared:
    """What prepare() made or found again."""

    tokens: list[str]  # the token files, in order
    tokenizer: str
    built: bool
    files: int
    text_bytes: int


def prepare(
    paths: Sequence[str | os.PathLike],
    folder: Path,
    vocabulary: int = 4096,
    tokenizer: Path | None = None,
    skip: Sequence[str] = (),
    rebuild: bool = False,
) -> Prepared:
    """Make sure that `folder` holds the tokens of these texts, and say where it is.

    vocabulary: tokens to learn; ignored when `tokenizer` names one to load. rebuild: make it anew
    even if it is there. Raises CorpusError for the user's faults, OSError where `folder` cannot be
    written.
    """
    files = find_text_files(paths, skip)
    text_bytes = sum(file.size_bytes for file in files)
    home = folder / _key(files, vocabulary, tokenizer)[:16]
    made = rebuild or not (home / INDEX).exists()
    if made:
        home.mkdir(parents=True, exist_ok=True)
        _build(files, text_bytes, vocabulary, tokenizer, home)
    with open_store(f"dir:{home.resolve()}", read_only=True) as store:
        index = index_of(store)
    tokens = [str(home / each["key"]) for each in index["shards"]]
    for path in tokens:  # a damaged one is an error with a sentence, not a silent rebuild
        with TokenFile(path) as found:
            if found.header.key.hex() != index["key"]:
                raise Corruption(
                    f"the token file {path} was made from another corpus; "
                    "rebuild it with --rebuild-tokens"
                )
    return Prepared(tokens, str(home / TOKENIZER), made, len(files), text_bytes)


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


def _key(files: Sequence[TextFile], vocabulary: int, tokenizer: Path | None) -> str:
    digest = hashlib.sha256(fingerprint(files).encode())
    if tokenizer is None:
        digest.update(f"learn {vocabulary}".encode())
    else:
        digest.update(load_tokenizer(tokenizer).to_str().encode())
    digest.update(f"split {PIECES} {HELDOUT_SHARE} {HELDOUT_LEAST_BYTES}".encode())
    return digest.hexdigest()


def _heldout_below(sizes: dict[str, int]) -> str:
    """Documents with a lower digest are held out: chosen by content, so that copies of a text are
    on one side. sizes: bytes by digest, of all copies; at least two."""
    total = sum(sizes.values())
    wanted = max(HELDOUT_SHARE * total, min(HELDOUT_LEAST_BYTES, total / 10))
    held = 0
    for digest in sorted(sizes):
        if held >= wanted:
            return digest
        held += sizes[digest]
    return max(sizes)


def _build(
    files: Sequence[TextFile],
    text_bytes: int,
    vocabulary: int,
    tokenizer_from: Path | None,
    home: Path,
) -> None:
    inputs = of_files(files)
    rule = Rule(
        piece_bytes=max(4096, text_bytes // PIECES), learn=0 if tokenizer_from else vocabulary
    )
    sizes: dict[str, int] = {}
    with Reader() as reader:
        for text in documents(inputs, rule, reader, "reading the corpus"):
            digest = digest_of(text)
            sizes[digest] = sizes.get(digest, 0) + len(text.encode())
    if len(sizes) < 2:
        raise CorpusError(
            f"the corpus has {sum(sizes.values())} bytes of text, too few to train on and to hold "
            "some out: give more text with --data"
        )
    rule = replace(rule, heldout_below=_heldout_below(sizes))
    if tokenizer_from is None:
        description = learn(inputs, rule)
    else:
        description = load_tokenizer(tokenizer_from).to_str(pretty=True)
    with open_store(f"dir:{home.resolve()}", create=True) as out:
        build(inputs, description, out, rule, 1, _say, restart=True)


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # stdout has the answer


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
    parser.add_argument("--rebuild", action="store_true", help="build again even if it is there")
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
