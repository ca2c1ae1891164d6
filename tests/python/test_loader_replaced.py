"""An object of a bucket that is replaced while a loader reads it: an error, never both of them."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

import stoker
from stoker.data import Loader, Rows, Tar, Tokens
from stoker.errors import Mismatch
from test_data_packed import tar_of, texts


def put(store, key: str, data: bytes) -> None:
    change = store.begin()
    change.resize(key, len(data))
    change.write_bytes(key, 0, data)
    change.commit().wait()


def tokens(value: int) -> bytes:
    return np.full(1001, value, np.uint16).tobytes()


def rest_of(loader) -> tuple[list[torch.Tensor], str]:
    """The batches until an error, and the error's sentence."""
    batches = []
    with pytest.raises(Mismatch) as error:
        batches.extend(loader)
    return batches, str(error.value)


def source_of(store) -> Tokens:
    return Tokens(store, ["a.bin", "b.bin"], 10, dtype="uint16")


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_replaced_object_is_named_and_no_batch_has_both(s3, shuffle):
    with stoker.open_store(s3, create=True) as store:
        put(store, "a.bin", tokens(1))
        put(store, "b.bin", tokens(1))
        loader = Loader(source_of(store), batch=4, seed=1, shuffle=shuffle, ahead=1)
        batches = iter(loader)
        assert (next(batches) == 1).all()
        put(store, "b.bin", tokens(2))  # of the same size
        rest, why = rest_of(batches)
        assert "b.bin" in why and "open the data again" in why
        assert all((batch == 1).all() for batch in rest)
        loader.close()
        again = Loader(source_of(store), batch=200, shuffle=False)
        assert set(torch.cat(list(again))[:, 0].tolist()) == {1, 2}
        again.close()


def test_a_cache_gives_the_old_object_or_the_error(s3, tmp_path):
    where = f"cached(local:{tmp_path}/cache, {s3}, disk=64MiB)"
    with (
        stoker.open_store(s3, create=True) as bucket,
        stoker.open_store(where, create=True) as store,
    ):
        put(bucket, "a.bin", tokens(1))
        put(bucket, "b.bin", tokens(1))
        loader = Loader(source_of(store), batch=4, shuffle=False, ahead=1)
        batches = iter(loader)
        assert (next(batches) == 1).all()
        put(bucket, "b.bin", tokens(2))
        rest, why = rest_of(batches)  # b.bin was not in the cache yet
        assert "b.bin" in why and all((batch == 1).all() for batch in rest)
        loader.close()


def test_a_replaced_compressed_shard_is_named(s3):
    with stoker.open_store(s3, create=True) as store:
        for shard in range(2):
            put(store, f"{shard}.tar.gz", gzip.compress(tar_of(shard)))
        loader = Loader(Tar(store, ["0.tar.gz", "1.tar.gz"]), batch=4, shuffle=False, ahead=1)
        batches = iter(loader)
        assert texts([next(batches)])[0] == "sample 0"
        put(store, "1.tar.gz", gzip.compress(tar_of(3)))
        got = []
        with pytest.raises(Mismatch, match=r"1\.tar\.gz"):
            for batch in batches:
                got += texts([batch])
        assert all(int(each.split()[1]) < 20 for each in got)
        loader.close()


def test_objects_that_stay_are_read_as_before(s3):
    with stoker.open_store(s3, create=True) as store:
        put(store, "a.npy", _npy(np.arange(100, dtype=np.int64)))
        loader = Loader(Rows(store, "a.npy"), batch=10, shuffle=False)
        for _ in range(2):
            assert torch.equal(torch.cat(list(loader)).flatten(), torch.arange(100))
        loader.close()


def _npy(array: np.ndarray) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
