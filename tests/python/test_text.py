"""Text in: order, corpus, token file, windows, loader."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import signal
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data import (
    CorpusError,
    Loader,
    Permutation,
    TokenFile,
    Windows,
    load_tokenizer,
    prepare,
    prepare_apart,
    sample_at,
)
from stoker.data.corpus import TextFile, find_text_files
from stoker.data.prepare import _end_with_the_parent, _heldout_below
from stoker.data.texts import Reader, of_files, read_slice, slices
from stoker.data.token_file import TokenPacker
from stoker.errors import Corruption

FORMAT_PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats" / "tokens.md"


def write_corpus(folder: Path, files: int = 40, seed: int = 1) -> Path:
    """A folder of made-up prose: a few hundred distinct words, so that a small BPE has something to
    learn."""
    rng = np.random.default_rng(seed)
    words = [
        "".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 9))) for _ in range(300)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        lines = [" ".join(words[w] for w in rng.zipf(1.4, 12) % 300) for _ in range(60)]
        (folder / f"page{index:03}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def texts_of(files: list[TextFile], piece: int = 1 << 20) -> list[str]:
    """All documents, in order."""
    inputs = of_files(files)
    with Reader() as reader:
        parts = slices(inputs, reader, piece)
        return [
            text for part in parts for text in read_slice(part, inputs, reader, "text", piece).texts
        ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return prepare([write_corpus(root / "corpus")], root / "cache", vocabulary=400)


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection_and_inverts(count):
    order = Permutation(count, seed=3, epoch=1)
    samples = [order.sample(i) for i in range(count)]
    assert sorted(samples) == list(range(count))
    assert [order.position(s) for s in samples] == list(range(count))


@given(
    count=st.integers(1, 1 << 48),
    seed=st.integers(0, 1 << 64),
    epoch=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_permutation_inverts_anywhere(count, seed, epoch, data):
    position = data.draw(st.integers(0, count - 1))
    order = Permutation(count, seed, epoch)
    sample = order.sample(position)
    assert 0 <= sample < count and order.position(sample) == position


def test_orders_differ_by_seed_and_epoch_and_are_mixed():
    def first(seed, epoch):
        return [Permutation(1000, seed, epoch).sample(i) for i in range(1000)]

    base = first(1, 2)
    for other in (first(2, 2), first(1, 3), first(2, 1)):
        # a random permutation agrees at about one place
        assert sum(a == b for a, b in zip(base, other)) < 20
    assert abs(np.corrcoef(base, range(1000))[0, 1]) < 0.12
    assert [sample_at(1000 + i, 1000, 1) for i in range(1000)] == first(1, 1)


def test_permutation_refuses_what_is_outside():
    with pytest.raises(IndexError):
        Permutation(5, 0, 0).sample(5)
    with pytest.raises(ValueError):
        Permutation(0, 0, 0)


# -- corpus ----------------------------------------------------------------------------------------


def test_missing_empty_and_unreadable_corpora_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(CorpusError, match=r"gone does not exist: give a text file or a folder"):
        find_text_files([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(CorpusError, match="no text files found in .*empty"):
        find_text_files([tmp_path / "empty"])
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"hello " * 1000)[:-9])
    (file,) = find_text_files([tmp_path / "cut.txt.gz"])
    with pytest.raises(CorpusError, match=r"cut\.txt\.gz cannot be read"):
        texts_of([file])
    (tmp_path / "closed.txt").write_text("x")
    (file,) = find_text_files([tmp_path / "closed.txt"])

    def refuse(*_, **__):  # root may read everything, so the refusal is made up
        raise PermissionError(13, "Permission denied", "closed.txt")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CorpusError, match=r"closed\.txt cannot be read \(Permission denied\)"):
        texts_of([file])


def test_files_are_found_in_a_stable_order_without_hidden_skipped_or_doubled_ones(tmp_path):
    for name in (
        "b.txt",
        "a.rst",
        "sub/c.md.gz",
        "sub/.hidden.txt",
        "translations/d.txt",
        ".git/e.txt",
        "f.bin",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"packed") if name.endswith(".gz") else name.encode())
    (tmp_path / "again.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    found = find_text_files([tmp_path], skip=["translations"])
    assert [f.name for f in found] == ["a.rst", "again.txt", "sub/c.md.gz"]
    assert texts_of(found[2:]) == ["packed"]
    assert len(find_text_files([tmp_path, tmp_path / "b.txt"], skip=["translations"])) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_pieces_rebuild_the_text_and_respect_the_limit(tmp_path, packed):
    text = "".join(f"line {i} {'ž' * (i % 25)}\n" for i in range(300)) + "y" * 500 + "\nend"
    path = tmp_path / ("text.txt.gz" if packed else "text.txt")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    pieces = texts_of(find_text_files([path]), 200)
    assert "".join(pieces) == text
    longest = max(len(line.encode()) for line in text.splitlines(True) if "y" not in line)
    assert all(len(each.encode()) < 200 + longest or "y" * 500 in each for each in pieces)


def test_copies_of_a_document_are_on_one_side():
    sizes = {f"{i:032x}": 100 for i in range(50)}
    # a tenth of a tiny corpus, in order of digests
    assert [each for each in sizes if each < _heldout_below(sizes)] == list(sizes)[:5]
    # one is left to train on, and one is held out
    assert _heldout_below({"a" * 32: 1, "b" * 32: 1}) == "b" * 32


# -- token file ------------------------------------------------------------------------------------


def make_file(path: Path, vocabulary: int = 300) -> tuple[TokenFile, np.ndarray]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, vocabulary, n) for n in (10, 50_000, 1, 40_000, 7)]
    packer = TokenPacker(vocabulary, 0, b"k" * 32)
    for index, tokens in enumerate(documents):
        packer.add(tokens, heldout=index >= 3)
    path.write_bytes(packer.file())
    return TokenFile(path), np.concatenate([np.append(d, 0) for d in documents])


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_tokens_come_back(tmp_path, vocabulary):
    file, expected = make_file(tmp_path / "t.tokens", vocabulary)
    assert file.header.token_bytes == (2 if vocabulary == 300 else 4)
    assert np.array_equal(file.tokens(0, len(expected)), expected)
    for start, count in (
        (0, 0),
        (0, 1),
        (32_767, 2),
        (32_768, 1),
        (len(expected) - 3, 3),
        (20_000, 50_000),
    ):
        assert np.array_equal(file.tokens(start, count), expected[start : start + count])
    assert list(file.documents) == [0, 11, 50_012, 50_014, 90_015]
    assert (file.header.train_tokens, file.header.heldout_tokens, file.header.train_documents) == (
        50_014,
        40_009,
        3,
    )
    assert list(file.verify()) == list(range(-(-len(expected) * file.header.token_bytes // 65536)))
    with pytest.raises(IndexError):
        file.tokens(len(expected), 1)


def test_windows_of_the_splits_never_meet(tmp_path):
    file, expected = make_file(tmp_path / "t.tokens")
    train, heldout = Windows(file, "train", 64), Windows(file, "heldout", 64)
    assert len(train) == 50_013 // 64 and len(heldout) == 40_008 // 64
    assert np.array_equal(train[0], expected[:65])
    assert np.array_equal(
        train[len(train) - 1], expected[(len(train) - 1) * 64 : len(train) * 64 + 1]
    )
    assert len(train) * 64 + 1 <= 50_014
    assert np.array_equal(heldout[0], expected[50_014 : 50_014 + 65])
    # the target behind a window is the first input of the next
    assert np.array_equal(train[3][-1:], train[4][:1])


def test_every_flipped_byte_is_noticed_with_the_file_and_block(tmp_path):
    path = tmp_path / "t.tokens"
    make_file(path)[0].close()
    good = path.read_bytes()
    header = TokenFile(path).header
    rng = np.random.default_rng(5)
    for at in [
        0,
        9,
        100,
        4094,
        *rng.integers(0, len(good), 60),
        header.documents_offset,
        header.checksums_offset,
        len(good) - 1,
    ]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        with pytest.raises(Corruption, match=re.escape(str(path))) as caught:
            list(TokenFile(path).verify())
        assert "--rebuild-tokens" in str(caught.value)
        if 4096 <= at < header.documents_offset:
            assert f"block {(at - 4096) // 65536} " in str(caught.value)


@pytest.mark.parametrize("kept", [0, 100, 4096, 70_000, -1])
def test_a_truncated_file_is_noticed(tmp_path, kept):
    path = tmp_path / "t.tokens"
    make_file(path)[0].close()
    os.truncate(path, path.stat().st_size + kept if kept < 0 else kept)
    with pytest.raises(Corruption, match=r"t\.tokens is damaged: .*(truncated|is cut)"):
        TokenFile(path)


def test_a_file_cut_after_it_was_opened_is_noticed(tmp_path):
    file, _ = make_file(tmp_path / "t.tokens")
    os.truncate(tmp_path / "t.tokens", 5000)
    with pytest.raises(Corruption, match="block 1 "):
        file.tokens(40_000, 10)


def test_windows_are_counted_through_files_and_cross_none(tmp_path):
    file, expected = make_file(tmp_path / "t.tokens")
    packer = TokenPacker(300, 0, b"k" * 32)
    packer.add([9] * 200, heldout=True)
    packer.add([7] * 100, heldout=False)  # in any order
    (tmp_path / "u.tokens").write_bytes(packer.file())
    both = [file, TokenFile(tmp_path / "u.tokens")]
    train, heldout = Windows(both, "train", 64), Windows(both, "heldout", 64)
    assert len(train) == 50_013 // 64 + 1 and len(heldout) == 40_008 // 64 + 3
    assert train[len(train) - 1].tolist() == [7] * 65
    assert np.array_equal(train[len(train) - 2], Windows(file, "train", 64)[len(train) - 2])
    assert heldout[len(heldout) - 3].tolist() == [9] * 65


def test_the_worked_example_of_the_format_page_decodes(tmp_path):
    lines = re.findall(
        r"^([0-9a-f]{5})  ((?:[0-9a-f]{2} ?)+)", FORMAT_PAGE.read_text(encoding="utf-8"), re.M
    )
    raw = bytearray(4096 + 30)
    for offset, digits in lines:
        data = bytes.fromhex(digits)
        raw[int(offset, 16) : int(offset, 16) + len(data)] = data
    path = tmp_path / "example.tokens"
    path.write_bytes(raw)
    with TokenFile(path) as file:
        assert file.tokens(0, 5).tolist() == [5, 6, 0, 7, 0]
        assert (file.header.train_tokens, file.header.heldout_tokens) == (3, 2)
        assert file.header.key == bytes(range(32)) and file.header.vocabulary == 300
    assert struct.unpack("<I", raw[4092:4096])[0] == zlib.crc32(raw[:4092])


# -- from text to tokens ---------------------------------------------------------------------------


def test_prepared_tokens_are_the_text(prepared):
    tokenizer = load_tokenizer(Path(prepared.tokenizer))
    (tokens,) = prepared.tokens
    with TokenFile(tokens) as file:
        header = file.header
        total = header.train_tokens + header.heldout_tokens
        ends = [*file.documents[1:], total]
        texts = {
            tokenizer.decode(file.tokens(int(s), int(e - s) - 1).tolist())
            for s, e in zip(file.documents, ends)
        }
    corpus = {p.read_text() for p in (Path(tokens).parents[2] / "corpus").iterdir()}
    assert sorted("".join(texts)) == sorted("".join(corpus))  # nothing lost, nothing added
    assert 0 < header.heldout_tokens < 0.2 * total


def test_any_text_survives_the_tokenizer(prepared):
    tokenizer = load_tokenizer(Path(prepared.tokenizer))
    for text in ("plain", "  tabs\tand\n\nlines ", "žluťoučký 内核 🐧", "\x00\x01", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_a_second_call_finds_the_file_and_a_change_makes_another(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", files=12)
    first = prepare([corpus], tmp_path / "cache", vocabulary=300)
    again = prepare([corpus], tmp_path / "cache", vocabulary=300)
    assert first.built and not again.built and again.tokens == first.tokens
    assert prepare([corpus], tmp_path / "cache", vocabulary=320).tokens != first.tokens
    before = Path(first.tokens[0]).read_bytes()
    assert prepare([corpus], tmp_path / "cache", vocabulary=300, rebuild=True).built
    assert Path(first.tokens[0]).read_bytes() == before  # the build is a function of the corpus
    (corpus / "page000.txt").write_text("something else\n" * 50)
    assert prepare([corpus], tmp_path / "cache", vocabulary=300).tokens != first.tokens
    loaded = prepare([corpus], tmp_path / "cache", tokenizer=Path(first.tokenizer))
    assert Path(loaded.tokenizer).read_text() == Path(first.tokenizer).read_text()


def test_a_damaged_cached_file_is_a_sentence_and_can_be_rebuilt(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", files=12)
    made = Path(prepare([corpus], tmp_path / "cache", vocabulary=300).tokens[0])
    os.truncate(made, made.stat().st_size // 2)
    with pytest.raises(CorpusError, match="is damaged.*--rebuild-tokens"):
        prepare_apart([corpus], tmp_path / "cache", vocabulary=300)
    assert prepare_apart([corpus], tmp_path / "cache", vocabulary=300, rebuild=True).built
    assert not prepare_apart([corpus], tmp_path / "cache", vocabulary=300).built


def test_too_little_text_and_bad_tokenizers_are_sentences(tmp_path):
    (tmp_path / "tiny.txt").write_text("just this\n")
    with pytest.raises(CorpusError, match="too few to train on"):
        prepare([tmp_path / "tiny.txt"], tmp_path / "cache")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(CorpusError, match="is not a tokenizer.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(CorpusError, match="cannot be read"):
        load_tokenizer(tmp_path / "absent.json")


# -- loader ----------------------------------------------------------------------------------------


def test_batches_follow_the_order_and_a_resume_needs_one_integer(prepared):
    with TokenFile(prepared.tokens[0]) as file:
        windows = Windows(file, "train", 32)
        loader = Loader(windows, batch=4, seed=9, endless=True)
        seen = list(itertools.islice(loader, 10))
        for index, batch in enumerate(seen):
            expected = [windows[sample_at(index * 4 + i, len(windows), 9)] for i in range(4)]
            assert np.array_equal(batch, np.stack(expected))
        for done in (0, 3, 7):
            resumed = Loader(windows, batch=4, seed=9, endless=True)
            # as a run of before loaders had fingerprints saved it
            resumed.load_state_dict(
                {"position": done * 4, "batch": 4, "seed": 9, "windows": len(windows)}
            )
            assert np.array_equal(next(iter(resumed)), seen[done])
            resumed.close()
        loader.close()
        expected = np.stack([windows[sample_at(40 + i, len(windows), 9)] for i in range(4)])
        assert np.array_equal(next(iter(loader)), expected)
        loader.close()


def test_an_error_of_the_reading_thread_reaches_the_training_thread(tmp_path):
    file, _ = make_file(tmp_path / "t.tokens")
    raw = bytearray((tmp_path / "t.tokens").read_bytes())
    raw[4096 + 70_000] ^= 1
    (tmp_path / "t.tokens").write_bytes(raw)
    loader = Loader(Windows(file, "train", 64), batch=8, seed=0)
    with pytest.raises(Corruption, match="block 1 "):
        list(loader)
    assert not any(t.name == "stoker-loader" for t in threading.enumerate())


def test_the_reading_thread_reads_ahead_and_no_further(prepared):
    reads = []

    class Counting:
        fingerprint = "counted"

        def __len__(self):
            return 1000

        def batch(self, samples):
            reads.extend(samples)
            return torch.zeros(len(samples), 3)

    loader = Loader(Counting(), batch=2, seed=0, ahead=3)
    next(iter(loader))
    for _ in range(50):
        if len(reads) >= 2 * 5:
            break
        threading.Event().wait(0.02)
    threading.Event().wait(0.1)
    assert len(reads) == 2 * 4  # one given out, three ahead
    loader.close()


def test_a_child_whose_parent_was_killed_ends_without_a_word(tmp_path):
    """The child that prepares the text: its answer would find nobody."""
    parent = os.fork()
    if parent == 0:
        (child := os.fork()) or _end_with_the_parent()
        (tmp_path / ("pid" if child else "ready")).write_text(str(child))
        time.sleep(60)
        os._exit(0)
    limit = time.monotonic() + 20
    while (
        not (
            (tmp_path / "ready").exists()
            and (tmp_path / "pid").exists()
            and (tmp_path / "pid").read_text()
        )
        and time.monotonic() < limit
    ):
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while (
        status.exists()
        and status.read_text().rpartition(")")[2].split()[0] != "Z"
        and time.monotonic() < limit
    ):
        time.sleep(0.01)
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
