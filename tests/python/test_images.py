"""JPEGs to batches: beside Pillow, in a known order, damaged."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import stoker
from stoker.data import IMAGENET, Files, Jpeg, Loader, Tar
from stoker.errors import Corruption, InvalidArgument

from test_loader import Numbers, put


@pytest.fixture
def store(tmp_path):
    with stoker.open_store(f"dir:{tmp_path / 'data'}", create=True) as opened:
        yield opened


def smooth(width: int, height: int, seed: int) -> Image.Image:
    """Colours that change slowly, as photographs' mostly do."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.BICUBIC)


def jpeg(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **{"quality": 92, **options})
    return out.getvalue()


def as_pillow(data: bytes, height: int, width: int, box=None) -> torch.Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop(box) if box else image
    pixels = np.asarray(image.resize((width, height), Image.BILINEAR))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def alike(ours: torch.Tensor, theirs: torch.Tensor, reduced: bool) -> None:
    """reduced: the decoder gave a smaller image already."""
    apart = (ours.float() - theirs.float()).abs()
    mean, most = (3, 16) if reduced else (1, 4)
    assert apart.mean() < mean and apart.max() <= most, (apart.mean(), apart.max())


SHAPES = [(64, 48), (640, 480), (97, 201), (1, 1), (333, 40), (17, 500)]
KINDS = [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2, "quality": 80}]


@pytest.mark.parametrize("crop", [None, "centre"])
def test_images_are_those_of_pillow(store, crop):
    files = {
        f"{i:02}.jpg": jpeg(smooth(*shape, i), **KINDS[i % len(KINDS)])
        for i, shape in enumerate(SHAPES)
    }
    files["98.jpg"] = jpeg(smooth(50, 60, 8).convert("L"))
    for name, data in files.items():
        put(store, name, data)
    for height, width in ((32, 32), (100, 140), (7, 3)):
        loader = Loader(
            Files(store), batch=len(files), shuffle=False, decode=Jpeg((height, width), crop=crop)
        )
        (batch,) = loader
        assert batch["__key__"] == sorted(files)
        assert batch["image"].shape == (len(files), 3, height, width)
        assert batch["image"].dtype == torch.uint8
        for ours, data in zip(batch["image"], files.values(), strict=True):
            w, h = Image.open(io.BytesIO(data)).size
            box = None
            if crop:
                cut_w = min(w, max(1, round(h * width / height)))
                cut_h = min(h, max(1, round(w * height / width)))
                x, y = (w - cut_w) // 2, (h - cut_h) // 2
                box = (x, y, x + cut_w, y + cut_h)
                w, h = cut_w, cut_h
            reduced = w >= 4 * width and h >= 4 * height
            alike(ours, as_pillow(data, height, width, box), reduced)
        loader.close()


def ramp(width: int = 256, height: int = 256) -> bytes:
    """Red tells the column, green the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return jpeg(Image.fromarray(pixels), quality=98, subsampling=0)


def test_random_crops_are_parts_of_the_image_and_follow_their_key(store):
    for i in range(12):
        put(store, f"{i:02}.jpg", ramp())

    def images(ranks: int = 1, seed: int = 5, epoch: int = 0, threads: int = 1) -> dict:
        found = {}
        for rank in range(ranks):
            loader = Loader(
                Files(store),
                batch=12 // ranks,
                seed=seed,
                rank=rank,
                ranks=ranks,
                decode=Jpeg(24, crop="random", flip=True, threads=threads),
            )
            loader.set_epoch(epoch)
            (batch,) = loader
            found.update(zip(batch["__key__"], batch["image"].clone(), strict=True))
            loader.close()
        return found

    first = images()
    again = images(ranks=3, threads=3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    others = images(epoch=1), images(seed=6)
    assert all(any(not torch.equal(first[n], other[n]) for n in first) for other in others)
    corners, mirrored = set(), 0
    for image in first.values():
        red, green = image[0].float(), image[1].float()
        left, right = red[:, 0].mean().item(), red[:, -1].mean().item()
        top, bottom = green[0].mean().item(), green[-1].mean().item()
        assert top < bottom and left != right
        mirrored += left > right
        corners.add((round(min(left, right)), round(top)))
        # as Pillow makes it of the part that the corners tell, half a pixel of the result inside
        half_x, half_y = abs(right - left) / 23 / 2, (bottom - top) / 23 / 2
        box = [min(left, right) - half_x, top - half_y, max(left, right) + half_x, bottom + half_y]
        whole = Image.open(io.BytesIO(ramp()))
        part = whole.resize((24, 24), Image.BILINEAR, box=[min(255, max(0, b)) for b in box])
        theirs = torch.from_numpy(np.asarray(part).copy()).permute(2, 0, 1)
        theirs = theirs.flip(2) if left > right else theirs
        assert (image.float() - theirs.float()).abs().max() <= 6
    assert len(corners) > 8 and 0 < mirrored < 12


def test_normalised_images_are_float32(store):
    put(store, "a.jpg", data := jpeg(smooth(80, 60, 1)))
    loader = Loader(Files(store), batch=1, decode=Jpeg((30, 40), normalise=IMAGENET))
    (batch,) = loader
    mean, deviation = (torch.tensor(each)[:, None, None] for each in IMAGENET)
    theirs = (as_pillow(data, 30, 40) / 255 - mean) / deviation
    assert batch["image"].dtype == torch.float32
    assert (batch["image"][0] - theirs).abs().max() < 12 / 255 / min(IMAGENET[1])
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    waits = loader.account.take()
    assert waits["bytes"] == {"dir": len(data)} and set(waits["wait_seconds"]) <= {
        "read dir",
        "queue",
        "verify",
        "assemble",
        "decode",
        "hand over",
    }
    loader.close()


def test_what_a_sample_has_beside_its_image_comes_along(store):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in (
            ("0.cls", b"7"),
            ("0.jpg", jpeg(smooth(40, 40, 1))),
            ("1.jpg", jpeg(smooth(40, 40, 2))),
            ("1.cls", b"12"),
            ("2.jpg", jpeg(smooth(40, 40, 3))),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    put(store, "a.tar", out.getvalue())
    loader = Loader(
        Tar(store, "a.tar"),
        batch=3,
        shuffle=False,
        decode=Jpeg(8),
        collate=lambda batch: {
            **batch,
            "label": [
                int(bytes(each.numpy())) if each is not None else None for each in batch["cls"]
            ],
        },
    )
    (batch,) = loader
    assert batch["__key__"] == ["0", "1", "2"] and batch["label"] == [7, 12, None]
    assert "jpg" not in batch and batch["image"].shape == (3, 3, 8, 8)
    loader.close()


def test_a_damaged_image_is_named_or_left_out(store):
    good = jpeg(smooth(120, 90, 4))
    flipped = bytearray(good)
    flipped[len(good) // 2 : len(good) // 2 + 40] = b"\xff\xd9" * 20
    for name, data in {
        "0.jpg": good,
        "1.jpg": good[: len(good) // 2],
        "2.jpg": b"no image",
        "3.jpg": bytes(flipped),
        "4.jpg": good,
        "5.jpg": jpeg(smooth(20, 20, 1).convert("CMYK")),
    }.items():
        put(store, name, data)
    for name, why in {"1": "damaged", "2": "begins", "3": "damaged", "5": "CMYK"}.items():
        with pytest.raises(Corruption, match=f"sample {name}.jpg .*{why}.*on_corrupt"):
            list(Loader(Files(store, name), batch=1, decode=Jpeg(8)))
    skipping = Jpeg(8, on_corrupt="skip", threads=2)
    loader = Loader(Files(store), batch=6, shuffle=False, decode=skipping)
    (batch,) = loader
    assert batch["__key__"] == ["0.jpg", "4.jpg"] and batch["image"].shape == (2, 3, 8, 8)
    assert torch.equal(batch["image"][0], batch["image"][1])  # moved up, whole
    assert skipping.skipped == 4
    assert [name for name, _ in skipping.skipped_samples] == ["1.jpg", "2.jpg", "3.jpg", "5.jpg"]
    loader.close()


def test_any_damage_is_an_image_or_a_reason(store):
    """Flipped, cut and overwritten files: none ends the process, and each is accounted for."""
    rng = np.random.default_rng(11)
    sound = [jpeg(smooth(60, 45, 1)), jpeg(smooth(33, 70, 2), subsampling=0), ramp(40, 40)]
    count = 300
    for i in range(count):
        data = np.frombuffer(sound[i % 3], np.uint8).copy()
        for _ in range(rng.integers(1, 5)):
            at = rng.integers(0, len(data) if i % 2 else 700)
            data[at : at + rng.integers(1, 4)] = rng.integers(0, 256)
        put(store, f"{i:03}.jpg", bytes(data[: rng.integers(1, len(data)) if i % 5 == 0 else None]))
    stage = Jpeg((20, 30), crop="random", flip=True, on_corrupt="skip", threads=2)
    loader = Loader(Files(store), batch=50, decode=stage)
    shown = sum(len(batch["image"]) for batch in loader)
    loader.close()
    assert shown + stage.skipped == count == shown + len(stage.skipped_samples)
    assert shown > 20 and stage.skipped > 100


@pytest.mark.parametrize(
    "options, why",
    [
        ({"resize": 0}, "at least 1"),
        ({"resize": (20000, 8)}, "cannot be made"),
        ({"resize": 8, "crop": "left"}, "unknown crop"),
        ({"resize": 8, "threads": 0}, "at least 1"),
        ({"resize": 8, "on_corrupt": "hide"}, "on_corrupt is"),
        ({"resize": 8, "normalise": ((0, 0, 0), (1, 0, 1))}, "positive deviation"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, why):
    with pytest.raises(InvalidArgument, match=why):
        Jpeg(**options)


def test_only_stored_samples_are_decoded():
    with pytest.raises(InvalidArgument, match="lie in stores"):
        Loader(Numbers(4), batch=2, decode=Jpeg(8))
