"""Which text files make the corpus, and what they hold."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StokerError

# What counts as text in a folder. A file named by the user is read whatever its name.
SUFFIXES = (
    ".txt",
    ".rst",
    ".md",
    ".text",
    ".tex",
    ".adoc",
    ".org",
    ".html",
    ".htm",
    ".xml",
    ".json",
    ".csv",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".sh",
    ".jsonl",
    ".ndjson",
    ".parquet",
)
# Debian's linux-doc, without the translations (a small model has no room for a second language).
DEFAULT_PATTERN = "linux-doc*/html/_sources"
DEFAULT_ROOT = Path("/usr/share/doc")


class CorpusError(StokerError, ValueError):
    """The corpus is missing, unreadable or too small. The message says what to do."""


@dataclass(frozen=True)
class TextFile:
    """One file of the corpus. `name` is its path below the folder the user gave (or its own
    name)."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int


def default_corpus() -> Path:
    """The kernel documentation that the set-up installed. Raises CorpusError where it is not
    there."""
    found = sorted(p for p in DEFAULT_ROOT.glob(DEFAULT_PATTERN) if p.is_dir())
    if not found:
        raise CorpusError(
            "the default corpus is Debian's package linux-doc and it is not installed: run "
            "`apt-get install linux-doc`, or give a folder of text with --data FOLDER"
        )
    return found[-1].resolve()


def quick_corpus() -> list[Path]:
    """Packages of Python's own library, about 1.6 MB of source: text that is always there. Raises
    CorpusError where this Python has no sources."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = ("asyncio", "email", "http", "json", "logging", "multiprocessing")
    found = [library / name for name in packages if (library / name / "__init__.py").exists()]
    if not found:
        raise CorpusError(
            f"the Python at {library} has no source files, which a quick run trains on; give a"
            " folder of text with --data FOLDER"
        )
    return found


def is_text_name(name: str) -> bool:
    """Whether a file of this name in a folder is taken; `.gz` behind a text suffix is taken too."""
    return name.lower().removesuffix(".gz").endswith(SUFFIXES)


def find_text_files(paths: Sequence[str | os.PathLike], skip: Sequence[str] = ()) -> list[TextFile]:
    """All text files in `paths` (files or folders), in a stable order.

    Folders are walked, links to files are followed, hidden entries and folders named in `skip` are
    left out. Raises CorpusError for a path that does not exist or cannot be read, and when nothing
    is found.
    """
    files: dict[Path, TextFile] = {}
    for given in paths:
        root = Path(given)
        try:
            root.stat()
        except FileNotFoundError:
            raise CorpusError(
                f"the corpus {root} does not exist: give a text file or a folder of text with"
                " --data"
            ) from None
        except (OSError, ValueError) as error:
            # no rights, too long a name; ValueError: a zero byte
            why = getattr(error, "strerror", None) or error
            raise CorpusError(
                f"the corpus {root} cannot be read ({why}): make it readable or leave it out"
            ) from error
        for path in _walk(root, skip):
            try:
                status = path.stat()
            except OSError as error:
                raise CorpusError(
                    f"the corpus file {path} cannot be read ({error.strerror}): "
                    "make it readable or leave it out"
                ) from error
            name = path.name if root.is_file() else path.relative_to(root).as_posix()
            files.setdefault(
                path.resolve(), TextFile(path, name, status.st_size, status.st_mtime_ns)
            )
    if not files:
        listed = ", ".join(str(p) for p in paths)
        raise CorpusError(
            f"no text files found in {listed}: a folder must hold files such as *.txt, *.rst, *.md "
            "(or the same with .gz)"
        )
    return sorted(files.values(), key=lambda file: (file.name, str(file.path)))


def _walk(root: Path, skip: Sequence[str]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return

    def refuse(error: OSError) -> None:
        raise CorpusError(
            f"the corpus folder {error.filename} cannot be read ({error.strerror}): "
            "make it readable or leave it out"
        )

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s not in skip)
        for name in sorted(names):
            path = Path(folder, name)
            # A broken link is not an error of the user's corpus (Debian ships some); it holds no
            # text.
            if not name.startswith(".") and is_text_name(name) and path.is_file():
                yield path


def fingerprint(files: Sequence[TextFile]) -> str:
    """A SHA-256 over names, sizes and modification times: changes when the corpus does, without
    reading it."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            f"{file.path.resolve()}\0{file.name}\0{file.size_bytes}\0{file.mtime_ns}\n".encode()
        )
    return digest.hexdigest()
