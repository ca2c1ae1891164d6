"""`stoker data build --unpack` and `--resize`: another form of a data set, and nothing lost."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image

import stoker
from stoker.data import Files, Jpeg, Loader, Mds, Tar
from stoker.dataset.cli import main
from tars import tar_of
from test_data_mds import COLUMNS, edited, numbered, put

SEED = 20261124


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


def photograph(number: int, width: int, height: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (5, 7, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.BILINEAR).save(out, "JPEG", quality=95)
    return out.getvalue()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- unpacking


def test_compressed_tar_files_become_plain_ones(tmp_path, capsys):
    """Before, they were refused and nothing here could unpack them."""
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    plain = {}
    for number, (ending, pack) in enumerate(PACKERS.items()):
        data = tar_of({f"{number}-{i}": {"txt": b"%d" % i * 999} for i in range(20)})
        (folder / f"deep/{number}.tar.{ending}").write_bytes(pack(data))
        plain[f"deep/{number}.tar"] = data
    (folder / "z.tgz").write_bytes(gzip.compress(tar_of({"z": {"txt": b"z"}})))
    (folder / "y.tar").write_bytes(tar_of({"y": {"txt": b"y"}}))
    (folder / "notes.txt").write_text("stays behind")
    assert main(["build", str(folder), str(out), "--unpack"]) == 0
    assert "6 objects" in capsys.readouterr().out
    made = bytes_of(out)
    about = json.loads(made.pop("build.json"))
    assert made.keys() == {*plain, "y.tar", "z.tar"}
    assert all(made[key] == data for key, data in plain.items())
    assert {each["key"] for each in about["objects"]} == made.keys()
    for each in about["objects"]:
        assert each["sha256"] == hashlib.sha256(made[each["key"]]).hexdigest()
    with stoker.open_store(f"dir:{out}") as store:
        assert len(Tar(store, sorted(made))) == 82
    assert main(["build", str(folder), str(out), "--unpack"]) == 0
    assert "there already" in capsys.readouterr().out


def packed_mds(folder: Path, kind: str, pack) -> None:
    """Shards of MDSWriter(compression=kind)."""
    put(folder, COLUMNS, [numbered(0, 20), numbered(20, 13)])
    about = json.loads((folder / "index.json").read_text())
    for each in about["shards"]:
        raw = folder / each["raw_data"]["basename"]
        data = raw.read_bytes()
        packed = pack(data)
        ending = kind.partition(":")[0]
        (folder / f"{raw.name}.{ending}").write_bytes(packed)
        raw.unlink()
        each["compression"] = kind
        each["raw_data"]["hashes"] = {"sha1": hashlib.sha1(data).hexdigest(), "xxh64": "00"}
        each["zip_data"] = {"basename": f"{raw.name}.{ending}", "bytes": len(packed), "hashes": {}}
    (folder / "index.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("kind", "pack"), [("zstd:3", zstd), ("gz:6", gzip.compress), ("bz2", bz2.compress)]
)
def test_compressed_mds_shards_become_plain_ones(tmp_path, kind, pack):
    packed_mds(tmp_path / "in/train", kind, pack)
    put(tmp_path / "plain", COLUMNS, [numbered(0, 20), numbered(20, 13)])
    assert main(["build", str(tmp_path / "in"), str(tmp_path / "out"), "--unpack"]) == 0
    with stoker.open_store(f"dir:{tmp_path}/out") as store:
        got = Mds(store, "train").batch(np.arange(33, dtype=np.uint64))
    with stoker.open_store(f"dir:{tmp_path}/plain") as store:
        assert got == Mds(store).batch(np.arange(33, dtype=np.uint64))


@pytest.mark.parametrize("ending", PACKERS)
def test_what_is_cut_or_damaged_is_named_and_not_built(tmp_path, ending, capsys):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    noise = np.random.default_rng(SEED).bytes(70_000)
    whole = PACKERS[ending](tar_of({"a": {"bin": noise}}))
    path = folder / f"a.tar.{ending}"
    flipped = whole[:100] + b"?" * 99 + whole[199:]
    # zstd writes no checksum unless it is asked to
    cases = [whole[: len(whole) // 2], whole[:-1], b"", *([flipped] if ending != "zst" else [])]
    for damaged in cases:
        path.write_bytes(damaged)
        assert main(["build", str(folder), str(out), "--unpack", "--restart"]) == 1
        assert f"a.tar.{ending} is damaged or cut" in capsys.readouterr().err
        assert not (out / "a.tar").exists()
    path.write_bytes(whole)
    assert main(["build", str(folder), str(out), "--unpack", "--restart"]) == 0


def test_a_shard_that_unpacks_to_other_bytes_is_refused(tmp_path, capsys):
    packed_mds(tmp_path / "in", "gz", gzip.compress)
    path = tmp_path / "in/shard.00001.mds.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.write_bytes(gzip.compress(raw))
    assert main(["build", str(tmp_path / "in"), str(tmp_path / "out"), "--unpack"]) == 1
    assert "unpacks to other bytes than its index.json names (sha1)" in capsys.readouterr().err
    path.write_bytes(gzip.compress(raw[:-1]))
    assert main(["build", str(tmp_path / "in"), str(tmp_path / "less"), "--unpack"]) == 1
    assert "bytes, but its index.json names" in capsys.readouterr().err
    edited(tmp_path / "in", lambda shard: shard.update(compression="snappy"))
    assert main(["build", str(tmp_path / "in"), str(tmp_path / "new"), "--unpack"]) == 1
    assert "compressed with 'snappy', which Stoker cannot unpack" in capsys.readouterr().err


# ---- smaller images


@pytest.fixture
def photos(tmp_path):
    """Two tar files; in the second one a sample of fewer pixels, and other parts."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for shard in range(2):
        samples = {}
        for number in range(shard * 6, shard * 6 + 6):
            wide, high = (40, 30) if number == 8 else (160 + 10 * number, 240)
            label = b"%d" % (number % 3)
            samples[f"{number:03}"] = {"cls": label, "jpg": photograph(number, wide, high)}
        (folder / f"{shard}.tar").write_bytes(tar_of(samples))
    return folder


def samples_of(folder: Path, keys: list[str]) -> list[dict]:
    with stoker.open_store(f"dir:{folder}") as store:
        source = Tar(store, keys)
        return [
            {
                name: part if name == "__key__" else bytes(part.numpy())
                for name, part in each.items()
            }
            for each in source.batch(np.arange(len(source), dtype=np.uint64))
        ]


def test_images_become_smaller_and_all_else_stays(photos, tmp_path, capsys):
    out = tmp_path / "small"
    build = ["build", f"dir:{photos}", str(out), "--resize", "60", "--shard", "32KiB", "--json"]
    assert main(build) == 0
    about = json.loads(capsys.readouterr().out)["index"]
    keys = [each["key"] for each in about["objects"]]
    assert len(keys) > 2
    assert sum(each["smaller"] for each in about["objects"]) == 11
    before, after = samples_of(photos, ["0.tar", "1.tar"]), samples_of(out, keys)
    assert [(a["__key__"], a["cls"]) for a in before] == [(b["__key__"], b["cls"]) for b in after]
    for old, new in zip(before, after, strict=True):
        was, now = (Image.open(io.BytesIO(each["jpg"])) for each in (old, new))
        if min(was.size) <= 60:
            assert old["jpg"] == new["jpg"]
            continue
        assert min(now.size) == 60
        assert abs(now.size[0] / now.size[1] - was.size[0] / was.size[1]) < 0.03
        want = np.asarray(was.resize(now.size, Image.BILINEAR), np.float32)
        assert np.abs(np.asarray(now, np.float32) - want).mean() < 3
    # The same by more threads, and what a loader makes of it is about the same.
    assert main([*build[:2], str(tmp_path / "again"), *build[3:], "--processes", "3"]) == 0
    assert bytes_of(out) == bytes_of(tmp_path / "again")
    images = []
    for folder, names in ((photos, ["0.tar", "1.tar"]), (out, keys)):
        with stoker.open_store(f"dir:{folder}") as store:
            loader = Loader(Tar(store, names), 12, decode=Jpeg(24, crop="centre"), shuffle=False)
            images.append(next(iter(loader))["image"].float())
            loader.close()
    assert (images[0] - images[1]).abs().mean() < 4


def test_a_folder_of_images_becomes_tar_files(tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "cats").mkdir(parents=True)
    for number in range(3):
        (folder / f"cats/a.{number}.jpg").write_bytes(photograph(number, 90, 70))
    (folder / "note.txt").write_text("is not an image")
    assert main(["build", str(folder), str(tmp_path / "out"), "--resize", "32"]) == 0
    got = samples_of(tmp_path / "out", ["images-00000.tar"])
    assert [each["__key__"] for each in got] == ["cats/a_0", "cats/a_1", "cats/a_2"]
    (folder / "cats/a_1.jpg").write_bytes(photograph(9, 90, 70))
    assert main(["build", str(folder), str(tmp_path / "new"), "--resize", "32"]) == 1
    assert "would get one name in a tar file" in capsys.readouterr().err
    with stoker.open_store(f"dir:{folder}") as store:
        assert len(Files(store, suffixes=[".jpg"])) == 4


def test_a_damaged_image_ends_the_build_or_is_listed(photos, tmp_path, capsys):
    cut = photograph(50, 200, 200)[:900]
    (photos / "2.tar").write_bytes(tar_of({"050": {"jpg": cut}, "051": {"txt": b"none"}}))
    build = ["build", str(photos), str(tmp_path / "out"), "--resize", "60"]
    assert main(build) == 1
    assert "the image of sample 050 cannot be used" in capsys.readouterr().err
    assert main([*build, "--restart", "--on-corrupt", "skip"]) == 0
    assert "12 samples, 11 made smaller, 2 left out" in capsys.readouterr().out
    about = json.loads((tmp_path / "out/build.json").read_text())
    assert [name for name, _ in about["objects"][0]["skipped"]] == ["050", "051"]


def test_a_killed_build_goes_on_and_ends_with_equal_bytes(photos, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--resize", "60", "--shard", "16KiB"]
    assert main(["build", str(photos), str(whole), *options]) == 0
    command = [os.path.join(os.path.dirname(sys.executable), "stoker"), "data", "build"]
    process = subprocess.Popen([*command, str(photos), str(cut), *options, "--processes", "1"])
    while not list(cut.glob("building/0*.json")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lost = sorted(cut.glob("building/0*.json"))[-1]
    lost.unlink()  # as if it had been killed between the object and its facts
    orphan = cut / json.loads((whole / "build.json").read_text())["objects"][int(lost.stem)]["key"]
    assert orphan.exists()
    again = tmp_path / "again"
    shutil.copytree(cut, again)
    assert main(["build", str(photos), str(cut), *options]) == 0
    assert bytes_of(whole) == bytes_of(cut)
    assert main(["build", str(photos), str(again), *options, "--restart"]) == 0
    assert bytes_of(whole) == bytes_of(again)


def test_what_is_there_is_not_overwritten(photos, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    build = ["build", str(photos), str(out), "--resize"]
    assert main([*build, "60"]) == 1
    assert "OUT has objects of something else" in capsys.readouterr().err
    (out / "mine").unlink()
    assert main([*build, "60"]) == 0
    assert main([*build, "50"]) == 1
    assert "built from other inputs or with other options" in capsys.readouterr().err
    (out / "mine").write_text("mine")
    assert main([*build, "50", "--restart"]) == 0
    assert (out / "mine").read_text() == "mine"
    (out / "images-00000.tar").write_bytes(b"cut")
    assert main([*build, "50"]) == 1
    assert "images-00000.tar was removed or cut" in capsys.readouterr().err
    assert main(["build", str(photos), str(photos / "in"), "--resize", "9"]) == 1
    assert "lies in IN" in capsys.readouterr().err
    assert main(["build", str(tmp_path / "nowhere"), str(out), "--unpack"]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["build", str(photos), str(photos), str(out), "--unpack"]) == 1
    assert "take one IN" in capsys.readouterr().err
