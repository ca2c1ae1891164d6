"""What makes a folder a checkpoint, copies it to another tier, and finds what may go."""

from __future__ import annotations

import os
import time
from typing import Any

from stoker.checkpoint.manifest import (
    MANIFEST,
    TABLE,
    File,
    Manifest,
    Name,
    Table,
    dump_table,
    hash_of,
)
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.state import Contents
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Ring, Tier
from stoker.errors import Corruption, Mismatch, NotFound


def composition_of(store: str | os.PathLike) -> str:
    """A composition string; a plain path is a folder of plain files."""
    text = os.fspath(store)
    known = ("dir:", "s3:", "local:", "coded(", "memory:")
    return text if text.startswith(known) else f"dir:{os.path.abspath(os.path.expanduser(text))}"


def commit(
    tier: Tier,
    name: Name,
    files: list[File],
    hashes: list,
    contents: Contents,
    said: dict[str, Any],
) -> Manifest:
    """Writes table and manifest. From here on it is a checkpoint."""
    table = dump_table(zip(files, hashes))
    manifest = Manifest(
        name.step,
        name.attempt,
        name.id,
        created=time.time(),
        files=files,
        tables=[Table(TABLE, len(table), hash_of(table).hex())],
        aliases=contents.aliases,
        state=contents.state,
        objects=contents.objects,
        offloaded=contents.offloaded,
        sharded=contents.sharded,
        **said,
    )
    tier.put(name, TABLE, table)
    tier.put_manifest(name, manifest.dump(), [TABLE, *(each.name for each in files)])
    return manifest


def copy_checkpoint(
    source: Tier,
    to: Tier,
    name: Name,
    ring: Ring,
    progress: Any = lambda _: None,
    anew: bool = False,
) -> None:
    """Copies a checkpoint to another tier, verified on the way. Its manifest is the last object.
    `anew`: no file is taken over from the checkpoint before."""
    if name in to.names():
        return
    reader = Reader(source, name, ring, [])
    try:
        before = None if anew else Before(to)
        for file in reader.manifest.files:
            if before and before.take(name, file.name, file.bytes, reader.hashes(file)):
                progress(file.bytes)
            else:
                to.write_stream(name, file, reader.stream(file), ring, progress)
        to.put(name, TABLE, source.store.read_bytes(f"{name}/{TABLE}"))
        files = [TABLE, *(each.name for each in reader.manifest.files)]
        to.put_manifest(name, source.store.read_bytes(f"{name}/{MANIFEST}"), files)
    except BaseException:
        to.remove_quietly(name)
        raise


def sound(tier: Tier) -> list[Manifest]:
    """The manifests of a tier that match their digest."""
    found = []
    for name in tier.names():
        try:
            found.append(tier.manifest(name))
        except (Corruption, NotFound, Mismatch):
            continue
    return found


def removable(tier: Tier, keep: Keep, just: Name | None = None) -> list[Name]:
    """What `keep` lets go: checkpoints that no rule holds, and what attempts left that came to
    nothing. One whose manifest does not verify stays: somebody may want to look at it. `just`: what
    was saved just now. It stays, also where the store holds newer steps: of a run that went back,
    or of another run."""
    manifests = sound(tier)
    if not manifests:
        return []
    stays = keep.reasons(manifests)
    gone = [each.name for each in manifests if str(each.name) not in stays and each.name != just]
    newest = max(each.name for each in manifests)
    given_up = set(tier.folders()) - set(tier.names())
    return gone + sorted(name for name in given_up if name.attempt < newest.attempt)


def check_newest(tier: Tier, gone: list[Name], ring: Ring, just: Name | None = None) -> None:
    """Reads the newest that stays, before others go: `just`, if it is there, as a store may hold
    newer steps of another run. Corruption if it is damaged."""
    kept = [each.name for each in sound(tier) if each.name not in gone]
    if not kept:
        return
    try:
        Reader(tier, just if just in kept else max(kept), ring, []).verify()
    except (Corruption, NotFound) as error:
        raise Corruption(
            f"nothing is removed, as the newest checkpoint is damaged: {error}; remove its folder,"
            " or copy it anew from another store"
        ) from error
