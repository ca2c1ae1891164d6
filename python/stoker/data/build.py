"""`stoker data build`, and what `stoker train` reads: texts to shards of tokens, in any store.

A shard is one token file, made of slices of the inputs by one process. It depends on its slices and
on the rule only, so shards can be made in any order. A build that was killed goes on with those
that are not there. docs/formats/tokens.md has the objects of a build.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import connection, get_context
from typing import Any

from tokenizers import Tokenizer

import stoker
from stoker import _core

from ..errors import AlreadyExists, Mismatch, NotFound, StokerError
from .corpus import CorpusError
from .texts import PARQUET, Input, Reader, Slice, head, read_slice, slices
from .token_file import TokenPacker
from .tokenise import Engine, Tokeniser, choose
from .unfinished import BEGUN, PLAN, check_finished, facts_of, forget, is_there
from .unfinished import bar as _bar
from .unfinished import json_of as _json_of
from .unfinished import put as _put
from .unfinished import put_json as _put_json
from .unfinished import remove as _remove
from .vocabulary import end_of_text, train_tokenizer

INDEX, TOKENIZER = "index.json", "tokenizer.json"
_VERSION = 1
_BATCH = 1 << 20  # characters that are tokenised by one call
_SAMPLED = 64  # inputs from which the sample is taken
_SAMPLED_BYTES = 16 << 10  # of each
# Stores that several processes may have open.
_SHARED = ("dir:", "s3:", "unix:")


@dataclass(frozen=True)
class Rule:
    """How texts become tokens. column: of JSONL and Parquet. heldout_below: documents whose BLAKE2b
    digest (16 bytes, hex) is below it are held out. shard_bytes: of the inputs, for each shard. A
    text longer than piece_bytes is cut at line ends. learn: tokens of the vocabulary that was
    learned; 0: it was given."""

    column: str = "text"
    heldout_below: str = ""
    shard_bytes: int = 64 << 20
    piece_bytes: int = 64 << 20
    learn: int = 0

    @property
    def cut(self) -> int:
        """Bytes of the longest slice of a file of lines."""
        return min(self.piece_bytes, self.shard_bytes)

    def holds_out(self, text: str) -> bool:
        return bool(self.heldout_below) and digest_of(text) < self.heldout_below


@dataclass(frozen=True)
class Built:
    """index: what INDEX holds. built: False if it was there already."""

    index: dict[str, Any]
    built: bool


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def share_below(share: float) -> str:
    """Rule.heldout_below for a share of the documents from 0 to 1."""
    return f"{int(share * (1 << 128)):032x}" if share else ""


def shards(store: _core.Store) -> list[str]:
    """The token files of a finished build, for `Tokens`. Raises NotFound."""
    return [each["key"] for each in index_of(store)["shards"]]


def index_of(store: _core.Store) -> dict[str, Any]:
    """What a finished build says of itself. Raises NotFound."""
    found = _json_of(store, INDEX)
    if found is None:
        begun = store.exists(PLAN)
        raise NotFound(
            "the build of tokens in this store is not finished: run `stoker data build` again"
            if begun
            else f"this store has no {INDEX}: `stoker data build` makes one"
        )
    if found["version"] != _VERSION:
        raise Mismatch(f"{INDEX} is of version {found['version']}: use a newer Stoker")
    return found


def documents(files: Sequence[Input], rule: Rule, reader: Reader, what: str) -> Iterator[str]:
    """Every document of all inputs, with progress."""
    parts = slices(files, reader, rule.cut)
    with _bar(what, sum(part.size for part in parts)) as bar:
        for part in parts:
            yield from read_slice(part, files, reader, rule.column, rule.cut).texts
            bar.update(part.size)


def learn(files: Sequence[Input], rule: Rule) -> str:
    """The text of a tokenizer.json, learned from what is not held out."""
    with Reader() as reader:
        texts = documents(files, rule, reader, "learning the vocabulary")
        kept = (text for text in texts if not rule.holds_out(text))
        return train_tokenizer(kept, rule.learn).to_str(pretty=True)


def learned_before(out: _core.Store, rule: Rule) -> str | None:
    """The tokenizer.json that a build by this rule, finished or not, has learned already."""
    found = _json_of(out, INDEX) or _json_of(out, PLAN)
    if found is None or found["options"] != asdict(rule) or not out.exists(TOKENIZER):
        return None
    return out.read_bytes(TOKENIZER).decode()


def build(
    files: Sequence[Input],
    description: str,
    out: _core.Store,
    rule: Rule,
    processes: int,
    say: Callable[[str], None],
    restart: bool = False,
) -> Built:
    """Makes the shards that `out` lacks, then its index. description: the text of a tokenizer.json.
    say: told which package tokenises, and what is found again.

    Raises CorpusError for the user's faults, AlreadyExists and Mismatch if `out` has something
    else; restart removes that first.
    """
    if restart:
        _clear(out)
    with Reader() as reader:
        parts = slices(files, reader, rule.cut)
        tasks = _tasks(parts, rule.shard_bytes)
        key = _key(files, description, rule)
        if (found := _finished(out, key)) is not None:
            return Built(found, False)
        engine = choose(description, _sample(files, reader, rule.column))
        say(str(engine))
        plan = _plan(files, key, rule, engine, len(tasks))
        facts = _begun(out, plan, description)
        if facts:
            say(f"going on: {len(facts)} of {len(tasks)} shards are there")
        job = _Job(files, tasks, description, engine.package, rule, key)
        todo = [number for number in range(len(tasks)) if number not in facts]
        processes = min(processes, len(todo))
        if processes > 1 and not all(
            not file.store or file.store.startswith(_SHARED) for file in files
        ):
            say("one process reads: such a store is open in one process at a time")
            processes = 1
        total = sum(part.size for part in parts)
        left = sum(part.size for number in todo for part in tasks[number])
        with _bar("tokenising", total, total - left) as bar:
            made = (
                _by_workers(job, todo, processes, bar.update)
                if processes > 1
                else _by_us(job, todo, reader, bar.update)
            )
            for number, about, data in made:
                if data:
                    _put(out, about["key"], data)
                _put_json(out, f"{BEGUN}{number:08d}.json", about)
                facts[number] = about
    index = _index(plan, files, description, [facts[number] for number in range(len(tasks))])
    _put_json(out, INDEX, index)
    forget(out)
    return Built(index, True)


# ---- the plan


def _tasks(parts: Sequence[Slice], shard_bytes: int) -> list[list[Slice]]:
    """The slices of each shard: as many as do not make it larger, at least one."""
    tasks: list[list[Slice]] = []
    held = 0
    for part in parts:
        if not tasks or held + part.size > shard_bytes:
            tasks.append([])
            held = 0
        tasks[-1].append(part)
        held += part.size
    return tasks


def _key(files: Sequence[Input], description: str, rule: Rule) -> str:
    """Of all that decides which tokens there are (64 hex digits)."""
    inputs = [[file.name, file.size, file.tag] for file in files]
    how = asdict(replace(rule, learn=0))
    text = json.dumps([_VERSION, inputs, json.loads(description), how], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(
    files: Sequence[Input], key: str, rule: Rule, engine: Engine, shards: int
) -> dict[str, Any]:
    versions = {"stoker": stoker.__version__, "tokenizers": version("tokenizers")}
    versions[engine.package] = engine.version
    if any(file.kind == PARQUET for file in files):
        versions["pyarrow"] = version("pyarrow")
    return {
        "version": _VERSION,
        "key": key,
        "options": asdict(rule),
        "tokenised_by": engine.package,
        "versions": versions,
        "shards": shards,
    }


def _sample(files: Sequence[Input], reader: Reader, column: str) -> list[str]:
    """The beginnings of some documents, from inputs all over the corpus."""
    count = min(_SAMPLED, len(files))
    out = []
    for number in range(count):
        left = _SAMPLED_BYTES
        file = files[number * len(files) // count]
        for text in head(file, reader, column, _SAMPLED_BYTES):
            out.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
    return out


# ---- what is there already


def _finished(out: _core.Store, key: str) -> dict[str, Any] | None:
    if not out.exists(INDEX):
        return None
    index = index_of(out)
    if index["key"] != key:
        raise AlreadyExists(
            "OUT was built with a different input, tokenizer or option; choose another OUT, or "
            "start again with --restart"
        )
    check_finished(out, index["shards"])
    return index


def _begun(out: _core.Store, plan: dict[str, Any], description: str) -> dict[int, dict[str, Any]]:
    """What is known of the shards that are done; begins the build where there is none."""
    before = _json_of(out, PLAN)
    if before is None:
        if any(each["key"].endswith(".tokens") for each in out.list()):
            raise AlreadyExists(
                "OUT has token files of something else: choose another OUT, or start again with "
                "--restart"
            )
        _put(out, TOKENIZER, description.encode())
        _put_json(out, PLAN, plan)
        return {}
    if before != plan:
        names = {"key": "inputs, tokenizer or settings", "versions": "versions of packages"}
        what = [names.get(each, each) for each in plan if before.get(each) != plan[each]]
        raise Mismatch(
            f"OUT has an unfinished build with other {', or other '.join(what)}. Finish that build "
            f"as it was begun, choose another OUT, or start again with --restart"
        )
    return {
        about["number"]: about
        for about in facts_of(out)
        if not about["bytes"] or is_there(out, about)  # one without documents has no object
    }


def _clear(out: _core.Store) -> None:
    keys = [each["key"] for each in out.list()]
    ours = [key for key in keys if key.endswith(".tokens") or key.startswith(BEGUN)]
    for key in [*(key for key in (INDEX, TOKENIZER) if key in keys), *ours]:
        _remove(out, key)


def _index(
    plan: dict[str, Any],
    files: Sequence[Input],
    description: str,
    facts: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    tokenizer = Tokenizer.from_str(description)
    sums: list[list[dict[str, Any]]] = [[] for _ in files]
    for about in facts:
        for each in about["inputs"]:
            sums[each["input"]].append(
                {"begin": each["begin"], "end": each["end"], "sha256": each["sha256"]}
            )
    inputs = []
    for file, found in zip(files, sums, strict=True):
        about = {"name": file.name, "bytes": file.size, "kind": file.kind}
        whole = len(found) == 1 or file.kind == PARQUET
        inputs.append(about | ({"sha256": found[0]["sha256"]} if whole else {"slices": found}))
    kept = [
        {key: value for key, value in about.items() if key not in ("inputs", "number")}
        for about in facts
        if about["bytes"]
    ]
    total = lambda name: sum(each[name] for each in kept)  # noqa: E731
    return {
        **{key: value for key, value in plan.items() if key != "shards"},
        "tokenizer": {
            "file": TOKENIZER,
            "sha256": hashlib.sha256(description.encode()).hexdigest(),
            "vocabulary": tokenizer.get_vocab_size(),
            "end_of_text": end_of_text(tokenizer),
        },
        **{
            name: total(name)
            for name in (
                "train_tokens",
                "heldout_tokens",
                "train_documents",
                "heldout_documents",
                "text_bytes",
            )
        },
        "shards": kept,
        "inputs": inputs,
    }


# ---- making shards


@dataclass(frozen=True)
class _Job:
    """All that a process needs to make any shard."""

    files: Sequence[Input]
    tasks: Sequence[Sequence[Slice]]
    description: str
    package: str
    rule: Rule
    key: str


Made = Iterator[tuple[int, dict[str, Any], bytes]]  # number, facts, token file ("": no document)


class _Maker:
    """Makes shards in this process. threads: the package that tokenises may use all cores."""

    def __init__(self, job: _Job, reader: Reader, threads: bool) -> None:
        self._job, self._reader = job, reader
        tokenizer = Tokenizer.from_str(job.description)
        self._vocabulary, self._end = tokenizer.get_vocab_size(), end_of_text(tokenizer)
        self._tokeniser = Tokeniser(job.description, job.package, threads)

    def make(self, number: int, told: Callable[[int], object]) -> tuple[dict[str, Any], bytes]:
        """told: bytes of the inputs that are done since it was told last."""
        job, packer = (
            self._job,
            TokenPacker(self._vocabulary, self._end, bytes.fromhex(self._job.key)),
        )
        text_bytes, sums = 0, []
        for part in job.tasks[number]:
            found = read_slice(part, job.files, self._reader, job.rule.column, job.rule.cut)
            if found.sha256 is not None:
                about = {"input": part.input, "begin": part.begin, "end": part.end}
                sums.append(about | {"sha256": found.sha256})
            left = part.size
            for batch, size in _batches(found.texts):
                for text, ids in zip(batch, self._tokeniser.encode(batch), strict=True):
                    packer.add(ids, job.rule.holds_out(text))
                text_bytes += size
                told(min(size, left))
                left -= min(size, left)
            told(left)
        (train, heldout), (train_documents, heldout_documents) = packer.counts, packer.documents
        data = packer.file() if train or heldout else b""
        about = {
            "number": number,
            "key": f"{number:05d}.tokens",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "train_tokens": train,
            "heldout_tokens": heldout,
            "train_documents": train_documents,
            "heldout_documents": heldout_documents,
            "text_bytes": text_bytes,
            "inputs": sums,
        }
        return about, data


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Texts of about _BATCH characters together, and the bytes that they have in UTF-8."""
    batch, held, size = [], 0, 0
    for text in texts:
        batch.append(text)
        held += len(text)
        size += len(text.encode())
        if held >= _BATCH:
            yield batch, size
            batch, held, size = [], 0, 0
    if batch:
        yield batch, size


def _by_us(job: _Job, todo: Sequence[int], reader: Reader, told: Callable[[int], object]) -> Made:
    maker = _Maker(job, reader, True)
    for number in todo:
        yield number, *maker.make(number, told)


def _by_workers(job: _Job, todo: Sequence[int], count: int, told: Callable[[int], object]) -> Made:
    """By processes, which are ended whatever happens here. They end by themselves if we are killed:
    nobody has the other end of their pipes then."""
    left = deque(todo)
    context = get_context("spawn")
    pipes: dict[connection.Connection, Any] = {}

    def give(pipe: connection.Connection) -> None:
        try:
            pipe.send(left.popleft())
        except OSError:
            raise _ended(pipes[pipe]) from None

    try:
        for _ in range(count):
            pipe, its = context.Pipe()
            process = context.Process(target=_work, args=(its, job), daemon=True)
            process.start()
            its.close()
            pipes[pipe] = process
            give(pipe)
        busy = set(pipes)
        while busy:
            for pipe in connection.wait(list(busy)):
                try:
                    kind, number, what = pipe.recv()
                    data = pipe.recv_bytes() if kind == "made" else b""
                except (EOFError, OSError):
                    raise _ended(pipes[pipe]) from None
                if kind == "told":
                    told(what)
                    continue
                if kind == "failed":
                    raise CorpusError(what)
                if left:
                    give(pipe)
                else:
                    busy.discard(pipe)
                yield number, what, data
    finally:
        for pipe, process in pipes.items():
            pipe.close()
            process.kill()
            process.join()


def _ended(process: Any) -> StokerError:
    process.join(10)
    return StokerError(
        f"a tokenizer process ended unexpectedly (exit status {process.exitcode}; -9 usually means "
        "that memory ran out). Run the same command again, with fewer --processes or a smaller "
        "--shard"
    )


def _work(pipe: connection.Connection, job: _Job) -> None:
    """A worker: a number comes, and the shard goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us decides
    with contextlib.suppress(EOFError, ConnectionError), Reader() as reader:
        maker = None
        while True:
            number = pipe.recv()
            try:
                maker = maker or _Maker(job, reader, False)
                about, data = maker.make(number, lambda size: pipe.send(("told", 0, size)))
            except (StokerError, OSError, ValueError, MemoryError) as error:
                pipe.send(("failed", number, str(error) or type(error).__name__))
                return
            pipe.send(("made", number, about))
            pipe.send_bytes(data)
