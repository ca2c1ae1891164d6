"""What makes a folder a checkpoint, copies it to another tier, and finds what may go."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any

from stoker.checkpoint.manifest import (
    MANIFEST,
    REDUCED,
    REDUCED_TABLE,
    TABLE,
    File,
    Manifest,
    Name,
    Stored,
    Table,
    dump_reduced,
    dump_table,
    hash_of,
)
from stoker.checkpoint.reading import Reader
from stoker.checkpoint.reduction import Reduction
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.state import Contents
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Commits, Ring, Tier
from stoker.errors import Conflict, Corruption, Mismatch, NotFound, StokerError

log = logging.getLogger("stoker")


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
    reduction: Reduction | None = None,
) -> None:
    """Copies a checkpoint to another tier, verified on the way. Its manifest is the last object.
    `anew`: no file is taken over from the checkpoint before. `reduction`: which files get smaller
    there; None: none."""
    if name in to.names():
        tidy(to, name)
        return
    reader = Reader(source, name, ring, [])
    reduction = reduction or Reduction("off")
    try:
        before = None if anew else Before(to)
        reduced: dict[str, list[Stored]] = {}
        plain, seconds = 0, 0.0
        for file in reader.manifest.files:
            wanted = reduction.wants(reader, to, file, ring)
            given = name, file.name, file.bytes, reader.hashes(file)
            if before and (taken := before.take(*given, reduced=wanted)):
                if taken.stored is not None:
                    reduced[file.name] = taken.stored
                progress(file.bytes)
                continue
            stored = None
            if wanted and (sizes := reduction.sizes(reader, file, ring)):
                stored = reduction.write(to, name, reader, file, sizes, ring, progress)
                reduced[file.name] = stored
            else:
                begin = time.monotonic()
                with Commits(ring) as commits:
                    to.write_stream(name, file, reader.stream(file), ring, commits, progress)
                plain, seconds = plain + file.bytes, seconds + time.monotonic() - begin
            reduction.wrote(name, to, file, stored)
        reduction.took(to, plain, seconds)
        to.put(name, TABLE, reader.small(TABLE))
        made, text = reader.manifest, reader.small(MANIFEST)
        if made.reduced or reduced:
            made = as_stored(made, reduced)
            if reduced:
                to.put(name, REDUCED_TABLE, dump_reduced(_in_order(made, reduced)))
            text = made.dump()
        to.put_manifest(name, text, made.objects_there)
        tidy(to, name)
    except BaseException as error:
        to.remove_quietly(name)
        if isinstance(error, Conflict):  # another program has copied it, perhaps in other forms
            tidy(to, name)
        raise


def tidy(tier: Tier, name: Name) -> None:
    """Removes what another copy of this checkpoint left, which was killed or came second: files in
    the form, plain or reduced, that the manifest does not name. Garbage where that fails."""
    try:
        manifest = tier.manifest(name)
        forms = {form for each in manifest.files for form in (each.name, each.name + REDUCED)}
        tier.remove_files(name, {*forms, REDUCED_TABLE} - set(manifest.objects_there))
    except StokerError as error:
        log.info("what other copies left in %s stays: %s", tier.where(name), error)


def as_stored(manifest: Manifest, reduced: dict[str, list[Stored]]) -> Manifest:
    """The manifest where these files lie reduced, and no others."""
    sizes = {name: sum(each.bytes for each in chunks) for name, chunks in reduced.items()}
    tables = manifest.tables[:1]
    if reduced:
        table = dump_reduced(_in_order(manifest, reduced))
        tables = [*tables, Table(REDUCED_TABLE, len(table), hash_of(table).hex())]
    return replace(manifest, tables=tables, reduced=sizes)


def _in_order(manifest: Manifest, reduced: dict[str, list[Stored]]) -> list[list[Stored]]:
    return [reduced[file.name] for file in manifest.files if file.name in reduced]


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
            "no old checkpoint is removed, because the newest one is damaged. Remove the newest"
            f" with `stoker ckpt rm`, or copy it again from another store: {error}"
        ) from error
