"""`stoker data build`: texts of every kind to tokens, killed and gone on with, in any store."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.data import Loader, TokenFile, Tokens, load_tokenizer, shards, tokenise
from stoker.data.build import Rule, build, index_of, share_below
from stoker.data.corpus import CorpusError, find_text_files
from stoker.data.texts import Reader, of_files, of_store, read_slice, slices
from stoker.data.vocabulary import train_tokenizer
from stoker.dataset.cli import main
from stoker.errors import AlreadyExists, Corruption, InvalidArgument, Mismatch, NotFound

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
WORDS = ["the", "data", "path", "of", "coal", "żółw", "内核", "🐧", "e\u0301", "to\tbe", " "]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(["the data path of coal " * 20, " ".join(WORDS)], 300).to_str())
    return path


def sentences(count: int, seed: int, words: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [f"{i} " + " ".join(draw.choices(WORDS, k=words)) for i in range(count)]


def jsonl(texts: list[str], field: str = "text") -> str:
    return "".join(
        json.dumps({"id": i, field: text}, ensure_ascii=bool(i % 2)) + "\n"
        for i, text in enumerate(texts)
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two files of lines, a text of several slices, packed ones."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text(jsonl(sentences(600, 1)))
    (folder / "b.txt").write_text("\n".join(sentences(600, 2)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(sentences(50, 3)).encode()))
    (folder / "d.txt.gz").write_bytes(gzip.compress("\n".join(sentences(300, 4)).encode()))
    return folder


def texts_of(out: Path, split: str = "train") -> list[str]:
    """What the tokens of a build say, document by document."""
    tokenizer = load_tokenizer(out)
    found = []
    for path in sorted(out.glob("*.tokens")):
        with TokenFile(path) as file:
            list(file.verify())
            header = file.header
            first, last = (
                (0, header.train_tokens)
                if split == "train"
                else (header.train_tokens, header.train_tokens + header.heldout_tokens)
            )
            starts = [int(each) for each in file.documents if first <= each < last]
            for start, end in zip(starts, [*starts[1:], last]):
                assert file.tokens(end - 1, 1)[0] == header.end_of_text
                ids = file.tokens(start, end - 1 - start).tolist()
                found.append(tokenizer.decode(ids, skip_special_tokens=False))
    return found


def contents(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


def run(*words: object) -> int:
    """By this process, unless --processes says how many."""
    return main(["build", "--processes", "1", *map(str, words)])


def test_the_page_says_what_its_example_prints(tmp_path):
    found = re.search(r"```python build\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.S)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", found[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PATH": path},
    )
    assert (done.stdout, done.returncode) == (found[2], 0), done.stderr


def test_all_kinds_become_the_tokens_of_their_texts(corpus, tokenizer, tmp_path, capsys):
    assert run(corpus, tmp_path / "o", "--tokenizer", tokenizer, "--shard", "8KiB", "--json") == 0
    index = json.loads(capsys.readouterr().out)["index"]
    found = texts_of(tmp_path / "o")
    text = "\n".join(sentences(600, 2)), "\n".join(sentences(300, 4))
    lines = sentences(600, 1) + sentences(50, 3)
    assert "".join(found) == "".join([*lines[:600], text[0], *lines[600:], text[1]])
    assert set(lines) <= set(found)
    assert index["train_documents"] == len(found) and index["text_bytes"] == sum(
        len(each.encode()) for each in found
    )
    # what it was made of, and what it is
    for each in index["inputs"]:
        raw = (corpus / each["name"]).read_bytes()
        assert each["bytes"] == len(raw)
        parts = each.get("slices") or [{"begin": 0, "end": len(raw), "sha256": each["sha256"]}]
        assert [part["end"] for part in parts][-1] == len(raw)
        for part in parts:
            assert sha256(raw[part["begin"] : part["end"]]).hexdigest() == part["sha256"]
    for each in index["shards"]:
        raw = (tmp_path / "o" / each["key"]).read_bytes()
        assert (len(raw), sha256(raw).hexdigest()) == (each["bytes"], each["sha256"])
    raw = (tmp_path / "o" / "tokenizer.json").read_bytes()
    assert sha256(raw).hexdigest() == index["tokenizer"]["sha256"]
    assert index["versions"]["stoker"] == stoker.__version__ and not list(tmp_path.glob("o/bu*/*"))


def test_processes_and_engines_change_no_byte(corpus, tokenizer, tmp_path, monkeypatch):
    words = (corpus, "--tokenizer", tokenizer, "--shard", "16KiB", "--heldout", "0.1")
    assert run(*words[:1], tmp_path / "one", *words[1:]) == 0
    assert run(*words[:1], tmp_path / "two", *words[1:], "--processes", 2) == 0
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    monkeypatch.setattr(tokenise.importlib.util, "find_spec", lambda name: None)
    assert run(*words[:1], tmp_path / "plain", *words[1:]) == 0
    plain = contents(tmp_path / "plain")
    assert json.loads(plain["index.json"])["tokenised_by"] == "tokenizers"

    def tokens(of: dict[str, bytes]) -> dict[str, bytes]:
        return {name: data for name, data in of.items() if name.endswith(".tokens")}

    assert len(tokens(one)) > 3 and tokens(one) == tokens(plain)


def test_the_engine_is_the_quicker_one_only_where_its_ids_are_equal(tokenizer, monkeypatch):
    pytest.importorskip("gigatoken")
    description = tokenizer.read_text()
    assert tokenise.choose(description, ["some text"]).package == "gigatoken"
    assert "in 10 sampled texts" in str(tokenise.choose(description, ["some text"]))

    class Wrong:
        @staticmethod
        def from_json(_):
            return Wrong()

        def encode(self, text):
            return np.array([1] * (len(text) == 9), np.uint32)

    monkeypatch.setattr("gigatoken.Tokenizer", Wrong)
    engine = tokenise.choose(description, ["some text"])
    assert engine.package == "tokenizers" and "other ids for" in engine.why
    monkeypatch.setattr(Wrong, "from_json", staticmethod(lambda _: 1 / 0))
    assert "does not take this tokenizer" in tokenise.choose(description, []).why


def test_held_out_documents_are_a_split_of_their_own(tokenizer, tmp_path):
    lines = sentences(400, 5)
    (tmp_path / "a.jsonl").write_text(jsonl(lines + lines))
    out = tmp_path / "out"
    words = ("--tokenizer", tokenizer, "--heldout", "0.2", "--shard", "8KiB")
    assert run(tmp_path / "a.jsonl", out, *words) == 0
    train, heldout = texts_of(out), texts_of(out, "heldout")
    assert sorted(train + heldout) == sorted(lines + lines)
    assert not set(train) & set(heldout), "copies of a text are on one side"
    assert 40 < len(set(heldout)) < 130
    with stoker.open_store(f"dir:{out}") as store:
        index = index_of(store)
        for split in ("train", "heldout"):
            source = Tokens(store, shards(store), 16, split=split)
            got = source.batch(np.arange(len(source), dtype=np.uint64)).numpy()
            expected = []
            for path in sorted(out.glob("*.tokens")):
                with TokenFile(path) as file:
                    start = 0 if split == "train" else file.header.train_tokens
                    count = getattr(file.header, f"{split}_tokens")
                    ids = file.tokens(start, count)
                    expected += [ids[i : i + 17] for i in range(0, count - 16, 16)]
            assert np.array_equal(got, np.stack(expected))
            assert len(got) * 16 <= index[f"{split}_tokens"]
        prints = [
            Tokens(store, shards(store), 16, split=each).fingerprint
            for each in ("train", "heldout")
        ]
        assert prints[0] != prints[1]
        with pytest.raises(InvalidArgument, match="no split 'heldout'"):
            Tokens(store, "tokenizer.json", 16, dtype="uint16", split="heldout")


# In a process of its own: kills itself, as kill -9 does, when so many shards are there.
_KILLED = """
import os, signal, sys
from stoker.data import build as module
from stoker.dataset.cli import main

if __name__ == "__main__":
    put, left = module._put_json, [int(sys.argv[1])]

    def put_and_die(store, key, value):
        put(store, key, value)
        left[0] -= key != module.PLAN
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    module._put_json = put_and_die
    sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_build_goes_on_and_ends_with_equal_bytes(
    corpus, tokenizer, tmp_path, processes, capfd
):
    words = ["--tokenizer", tokenizer, "--shard", "8KiB", "--heldout", "0.1"]
    assert run(corpus, tmp_path / "whole", *words) == 0
    total = len(list((tmp_path / "whole").glob("*.tokens")))
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(_KILLED)
    command = [script, 4, "build", corpus, out, *words, "--processes", processes]
    done = subprocess.run([sys.executable, *map(str, command)], timeout=200)
    assert done.returncode == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    assert len(kept) >= 4 and total > 8 and not (out / "index.json").exists()
    (out / sorted(kept)[0]).write_bytes(b"cut")  # one is damaged besides
    capfd.readouterr()
    assert run(corpus, out, *words, "--processes", processes) == 0
    assert f"going on: 3 of {total} shards are there" in capfd.readouterr().err
    assert contents(out) == contents(tmp_path / "whole")
    same = [name for name, when in kept.items() if (out / name).stat().st_mtime_ns == when]
    assert len(same) >= 3, "what was there was not made again"
    workers = lambda: [  # noqa: E731
        each for each in Path("/proc").glob("[0-9]*/environ") if _has(each, str(script))
    ]
    limit = time.monotonic() + 60
    while workers() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not workers(), "they end with the process that began them"


def _has(environ: Path, text: str) -> bool:
    try:
        return text in (environ.parent / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False


@pytest.mark.parametrize("at_once", [False, True])  # True: before it is given anything
def test_a_worker_that_is_killed_is_told(corpus, tokenizer, tmp_path, monkeypatch, capfd, at_once):
    from stoker.data import build as module

    processes = []
    real = module.get_context("spawn")

    class Context:
        Pipe = staticmethod(real.Pipe)

        @staticmethod
        def Process(**words):
            processes.append(Ended(real.Process(**words)) if at_once else real.Process(**words))
            return processes[-1]

    class Ended:
        """A process that is killed as soon as it runs."""

        def __init__(self, process):
            self._process = process

        def start(self):
            self._process.start()
            self._process.kill()
            self._process.join()

        def __getattr__(self, name):
            return getattr(self._process, name)

    def put_and_kill(store, key, value):
        module._put(store, key, json.dumps(value).encode())
        if key.endswith("0.json"):
            os.kill(processes[0].pid, signal.SIGKILL)

    monkeypatch.setattr(module, "get_context", lambda _: Context)
    monkeypatch.setattr(module, "_put_json", put_and_kill)
    words = (corpus, tmp_path / "o", "--tokenizer", tokenizer, "--shard", "4KiB")
    assert run(*words, "--processes", 2) == 1
    assert "a tokenizer process ended unexpectedly" in capfd.readouterr().err
    assert all(each.exitcode is not None for each in processes)


def test_a_finished_build_is_found_again_and_another_is_refused(
    corpus, tokenizer, tmp_path, capsys
):
    words = (corpus, tmp_path / "o", "--tokenizer", tokenizer)
    assert run(*words) == 0
    before = contents(tmp_path / "o")
    assert run(*words) == 0 and "were there already" in capsys.readouterr().out
    assert run(*words, "--column", "other") == 1
    assert "choose another OUT, or start again with --restart" in capsys.readouterr().err
    assert contents(tmp_path / "o") == before
    assert run(*words, "--heldout", "0.5", "--restart") == 0
    assert contents(tmp_path / "o") != before
    shard = next((tmp_path / "o").glob("*.tokens"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run(*words, "--heldout", "0.5") == 1
    assert f"{shard.name} was removed or cut" in capsys.readouterr().err
    assert run(corpus, tmp_path / "p", "--tokenizer", tokenizer, "--shard", "1KiB") == 1
    assert run(corpus, corpus / "out", "--tokenizer", tokenizer) == 1
    assert "lies in IN" in capsys.readouterr().err


def test_a_begun_build_of_other_inputs_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl(sentences(400, 6)) + "{]\n")
    files = of_files(find_text_files([tmp_path / "a.jsonl"]))
    rule, description = Rule(shard_bytes=16384), tokenizer.read_text()
    with stoker.open_store(f"dir:{tmp_path / 'o'}", create=True) as out:
        with pytest.raises(NotFound, match="stoker data build"):
            shards(out)
        with pytest.raises(CorpusError, match="line 401"):
            build(files, description, out, rule, 1, print)
        with pytest.raises(NotFound, match="not finished"):
            shards(out)
        other = Rule(shard_bytes=16384, heldout_below=share_below(0.5))
        with pytest.raises(Mismatch, match="with other inputs, tokenizer or settings"):
            build(files, description, out, other, 1, print)
        (tmp_path / "a.jsonl").write_text(jsonl(sentences(400, 6)))  # mended: another input
        files = of_files(find_text_files([tmp_path / "a.jsonl"]))
        with pytest.raises(Mismatch, match="--restart"):
            build(files, description, out, rule, 1, print)
        assert build(files, description, out, rule, 1, print, restart=True).built
        (tmp_path / "o" / "index.json").unlink()
        with pytest.raises(AlreadyExists, match="token files of something else"):
            build(files, description, out, rule, 1, print)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "cut', "is not JSON"),
        (b'{"text": "\xff\xfe"}', "is not JSON"),
        (b"[1, 2]", "has no field 'text': it is not an object"),
        (b'{"body": "x", "id": 1}', "has no field 'text' but 'body', 'id'"),
        (b'{"text": 7}', "'text' is not text but int"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_damaged_line_is_named_with_its_file_and_number(
    line, why, packed, tokenizer, tmp_path, capsys
):
    lines = jsonl(sentences(300, 7)).encode().splitlines(True)
    raw = b"".join([*lines[:200], b"\n", line + b"\n", *lines[200:]])
    path = tmp_path / ("bad.jsonl.gz" if packed else "bad.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    words = ("--tokenizer", tokenizer, "--shard", "4KiB")
    assert run(path, tmp_path / "o", *words) == 1
    told = capsys.readouterr().err
    assert f"{path}, line 202" in told and why in told, told


def test_a_worker_tells_of_a_damaged_line_too(tokenizer, tmp_path, capsys):
    raw = jsonl(sentences(300, 7)).splitlines(True)
    (tmp_path / "bad.jsonl").write_text("".join([*raw[:250], "nothing\n", *raw[250:]]))
    words = ("--tokenizer", tokenizer, "--shard", "4KiB", "--processes", 2)
    assert run(tmp_path / "bad.jsonl", tmp_path / "o", *words) == 1
    assert f"{tmp_path}/bad.jsonl, line 251, is not JSON" in capsys.readouterr().err


def test_empty_inputs(tokenizer, tmp_path, capsys):
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "d.jsonl").write_text('\n\n{"text": ""}\n{"text": null}\n{"text": "  "}')
    (tmp_path / "nothing").mkdir()
    words = ("--tokenizer", tokenizer)
    assert run(*sorted(tmp_path.glob("?.*")), tmp_path / "o", *words, "--json") == 0
    index = json.loads(capsys.readouterr().out)["index"]
    assert index["shards"] == [] and len(index["inputs"]) == 4
    with stoker.open_store(f"dir:{tmp_path / 'o'}") as store:
        assert shards(store) == []
    assert run(tmp_path / "nothing", tmp_path / "p", *words) == 1
    assert "no text files found" in capsys.readouterr().err


def test_documents_longer_than_a_shard_are_whole_lines(tokenizer, tmp_path):
    """A line of JSON or of a text is never cut; a text is, at line ends."""
    lines = [" ".join(sentences(1, i, 40 * (1 + 40 * (i % 3 == 0)))) for i in range(9)]
    (tmp_path / "a.jsonl").write_text(jsonl(lines))
    (tmp_path / "b.txt").write_text("\n".join(lines))
    (tmp_path / "c.txt").write_text(lines[0] * 4)  # no line end at all
    out = tmp_path / "o"
    inputs = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")]
    assert run(*inputs, out, "--tokenizer", tokenizer, "--shard", "4KiB") == 0
    found = texts_of(out)
    assert found[:9] == lines and "".join(found[9:-1]) == "\n".join(lines)
    assert len(found) > 12 and found[-1] == lines[0] * 4


def test_odd_unicode_comes_back(tokenizer, tmp_path):
    texts = [
        "a\u0000b",
        "\ud83d\udc27 pair",
        "half \ud83d!",
        "\u2028\u2029\x85 no line ends",
        "\ufeffmark",
        "é e\u0301",
        "x" * 3000 + "🐧" * 1500,
    ]
    raw = "".join(json.dumps({"text": text}) + "\r\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("\ufeff" + raw)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe latin \xe9\r\n" + "ž\u2028ž".encode())
    out = tmp_path / "o"
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    assert run(*inputs, out, "--tokenizer", tokenizer, "--shard", "4KiB") == 0
    expected = [
        each.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for each in texts
    ]
    assert texts_of(out) == [*expected, "\ufffd\ufffd latin \ufffd\r\nž\u2028ž"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_slices_hold_each_line_once_wherever_they_are_cut(tmp_path, ending):
    lines = ["x" * n + "ž" * (n % 3) for n in (0, 1, 5, 0, 17, 3, 64, 2, 2, 0)]
    path = tmp_path / "a.txt"
    path.write_bytes(ending.join(lines).encode())
    files = of_files(find_text_files([path]))
    with Reader() as reader:
        for piece in range(1, 140):
            parts = slices(files, reader, piece)
            texts = [t for part in parts for t in read_slice(part, files, reader, "", piece).texts]
            joined = "".join(texts)
            assert joined.split() == ending.join(lines).split(), piece
            assert all(text.endswith("\n") for text in texts[:-1])


def test_parquet_by_row_groups_and_columns(tokenizer, tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [*sentences(500, 8), None, "", "last"]
    path = tmp_path / "a.parquet"
    numbers = list(range(len(texts)))
    for kind in (pa.string(), pa.large_string(), pa.binary()):
        values = [t.encode() if t is not None and kind == pa.binary() else t for t in texts]
        table = pa.table({"id": numbers, "body": pa.array(values, kind)})
        parquet.write_table(table, path, row_group_size=64, compression="zstd")
        out = tmp_path / str(kind)
        words = ("--tokenizer", tokenizer, "--shard", "4KiB", "--column", "body", "--json")
        capsys.readouterr()
        assert run(path, out, *words) == 0
        index = json.loads(capsys.readouterr().out)["index"]
        assert texts_of(out) == [each for each in texts if each]
        assert len(index["shards"]) > 2
        assert index["inputs"][0]["sha256"] == sha256(path.read_bytes()).hexdigest()
    assert run(path, tmp_path / "o", "--tokenizer", tokenizer) == 1
    assert "has no column 'text', only 'id', 'body'" in capsys.readouterr().err
    assert run(path, tmp_path / "o", "--tokenizer", tokenizer, "--column", "id") == 1
    assert "the column 'id' is not text but int" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-9])
    assert run(path, tmp_path / "q", "--tokenizer", tokenizer) == 1
    assert f"{path} cannot be read" in capsys.readouterr().err


def test_without_pyarrow_a_sentence_says_so(tokenizer, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(tmp_path / "a.parquet", tmp_path / "o", "--tokenizer", tokenizer) == 1
    told = capsys.readouterr().err
    assert "a.parquet is a Parquet file" in told and "pip install pyarrow" in told


def test_from_a_store_to_a_store(corpus, tokenizer, tmp_path, s3):
    """Other names and tags, the same tokens; a local store is open in one process at a time."""
    assert run(corpus, tmp_path / "files", "--tokenizer", tokenizer, "--shard", "32KiB") == 0
    with stoker.open_store(s3, create=True) as bucket:
        for path in sorted(corpus.iterdir()):
            change = bucket.begin()
            change.resize(f"texts/{path.name}", path.stat().st_size)
            change.write_bytes(f"texts/{path.name}", 0, path.read_bytes())
            change.commit().wait()
    into = tmp_path / "local"
    with stoker.open_store(str(into), create=True, capacity="64MiB"):
        pass
    words = ("--tokenizer", tokenizer, "--shard", "32KiB", "--processes", 2)
    assert run(s3, f"local:{into}", *words) == 0
    with stoker.open_store(f"local:{into}") as store:
        source = Tokens(store, shards(store), 32)
        with stoker.open_store(f"dir:{tmp_path / 'files'}") as files:
            expected = Tokens(files, shards(files), 32)
            mine = Loader(source, batch=8, shuffle=False)
            theirs = Loader(expected, batch=8, shuffle=False)
            assert len(mine) == len(theirs) > 10
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    with stoker.open_store(f"dir:{tmp_path / 'none'}", create=True):
        pass
    with pytest.raises(CorpusError, match="no object of"):
        of_store(f"dir:{tmp_path / 'none'}")


def test_a_cut_shard_is_told_when_it_is_opened(corpus, tokenizer, tmp_path):
    assert run(corpus, tmp_path / "o", "--tokenizer", tokenizer) == 0
    with stoker.open_store(f"dir:{tmp_path / 'o'}") as store:
        for cut in (-1, 5000, 100, 0):
            path = tmp_path / "o" / shards(store)[0]
            os.truncate(path, path.stat().st_size + cut if cut < 0 else cut)
            with pytest.raises(Corruption, match=r"00000\.tokens is damaged"):
                Tokens(store, shards(store), 16)


def test_a_learned_tokenizer_is_learned_once(corpus, tmp_path, monkeypatch, capsys):
    words = (corpus, tmp_path / "o", "--learn", 300)
    assert run(*words) == 0
    found = load_tokenizer(tmp_path / "o")
    assert found.get_vocab_size() == 300
    monkeypatch.setattr("stoker.dataset.cli.learn", lambda *_: pytest.fail("it was learned again"))
    assert run(*words) == 0 and "were there already" in capsys.readouterr().out
