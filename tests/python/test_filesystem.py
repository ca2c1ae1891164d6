"""A store as an fsspec filesystem: fsspec's own suite, and the libraries that read through one."""

from __future__ import annotations

import os

import fsspec
import fsspec.tests.abstract as abstract
import pytest
from conftest import asked

import stoker
from stoker.errors import Conflict
from stoker.filesystem import StokerFileSystem

KINDS = ["memory", "dir", "local"]


def composition(kind: str, folder) -> tuple[str, dict]:
    if kind == "memory":
        return "memory:", {}
    if kind == "dir":
        return f"dir:{folder}/objects", {"create": True}
    return f"local:{folder}/store", {"create": True, "capacity": "64MiB"}


class StokerFixtures(abstract.AbstractFixtures):
    @pytest.fixture(scope="class", params=KINDS)
    def fs(self, request, tmp_path_factory):
        where, options = composition(request.param, tmp_path_factory.mktemp("fs"))
        filesystem = StokerFileSystem(where, **options)
        yield filesystem
        filesystem.close()

    @pytest.fixture
    def fs_path(self):
        return "folder"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self):
        return False


class TestCopy(StokerFixtures, abstract.AbstractCopyTests):
    pass


class TestGet(StokerFixtures, abstract.AbstractGetTests):
    pass


class TestPut(StokerFixtures, abstract.AbstractPutTests):
    pass


class TestPipe(StokerFixtures, abstract.AbstractPipeTests):
    pass


class TestOpen(StokerFixtures, abstract.AbstractOpenTests):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_objects(kind, tmp_path):
    where, options = composition(kind, tmp_path)
    with stoker.open_store(where, **options) as store:
        fs = StokerFileSystem(store)
        with fs.open("a/b/c", "wb") as file:
            file.write(b"hello")
            assert not store.exists("a/b/c"), "it is there when it is closed"
        assert store.read_bytes("a/b/c") == b"hello"
        with pytest.raises(RuntimeError), fs.open("a/lost", "wb") as file:
            file.write(b"half")
            raise RuntimeError
        assert not fs.exists("a/lost"), "a block that failed commits nothing"
        with fs.open("a/b/c", "ab") as file:
            file.write(b" world")
        with fs.open("a/b/c", "rb") as file:
            file.seek(6)
            assert file.read() == b"world"
        with pytest.raises(FileExistsError):
            fs.open("a/b/c", "xb")
        assert fs.ls("a", detail=False) == ["a/b"]
        assert fs.find("") == ["a/b/c"]
        with pytest.raises(FileNotFoundError):
            fs.ls("none")
        with fs.open("raced", "xb") as file:
            fs.pipe("raced", b"first")
            with pytest.raises(Conflict):
                file.close()
        assert fs.cat("raced") == b"first"


def test_ranges_of_an_open_file_are_of_one_content(tmp_path):
    with stoker.open_store(f"dir:{tmp_path}", create=True) as store:
        fs = StokerFileSystem(store)
        fs.pipe("object", b"a" * 100)
        with fs.open("object", "rb", block_size=10, cache_type="none") as file:
            assert file.read(10) == b"a" * 10
            fs.pipe("object", b"b" * 100)
            with pytest.raises(Conflict, match="was replaced while it was read"):
                file.read(10)


def test_a_folder_is_listed_without_what_lies_below(s3):
    with stoker.open_store(s3) as store:
        fs = StokerFileSystem(store)
        for key in ("a/b/c", "a/b/d", "a/e", "f"):
            fs.pipe(key, b"x")
        before = len(asked(s3))
        assert fs.ls("", detail=False) == ["a", "f"]
        assert fs.ls("a", detail=False) == ["a/b", "a/e"]
        assert fs.isdir("a/b")
        listings = [path for _, path in asked(s3)[before:] if "list-type" in path]
        assert len(listings) == 3 and all("delimiter=%2F" in path for path in listings)


def test_a_name_that_is_no_text_is_listed_and_read(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).write_bytes(b"latin")
    with stoker.open_store(f"dir:{tmp_path}") as store:
        assert [each["key"] for each in store.list()] == [name]
        assert store.read_bytes(name) == b"latin"


def test_a_url_opens_its_store(tmp_path):
    os.makedirs(tmp_path / "objects")
    (tmp_path / "objects" / "text").write_text("plain")
    with fsspec.open("stoker://text", "rb", store=f"dir:{tmp_path}/objects") as file:
        assert file.read() == b"plain"
