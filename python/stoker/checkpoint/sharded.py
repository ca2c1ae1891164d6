"""A checkpoint that several ranks write together, each its own files (docs/formats/checkpoint.md).

Weights: each tensor has an owner, by balanced bytes; the owner gathers it and writes it whole, so
the safetensors files are those of one process. Frozen ones lie in files of their own, which the
store takes over where the checkpoint before has them. All other sharded tensors stay where they
are: each rank's pack holds its rectangles. Everything else is as rank 0 has it, but for the random
states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from stoker.checkpoint import shards, tensors
from stoker.checkpoint.divided import check_one_step, places_in
from stoker.checkpoint.manifest import File, Name, Piece, check_name, chunks_in
from stoker.checkpoint.parts import Part, Source, Tensor, Whole, packed
from stoker.checkpoint.parts import Bytes as PartBytes
from stoker.checkpoint.reading import Number, Reader
from stoker.checkpoint.state import (
    COPIED,
    INLINE,
    Contents,
    Run,
    configs_of,
    named_tensors,
    of_bytes,
    place_of,
    plain,
    planes_of,
)
from stoker.checkpoint.tensors import Layout, Spec
from stoker.checkpoint.together import Arriving, Away, Passing, Together, Weight
from stoker.checkpoint.unchanged import Before
from stoker.checkpoint.workspace import Commits, Ring, Tier
from stoker.errors import InvalidArgument, NotFound
from stoker.offload.ranks.ranks import sharded_modules
from stoker.offload.storage import record


class Share:
    """What one rank writes of a checkpoint; on rank 0 also what the manifest says."""

    def __init__(
        self,
        together: Together,
        model: nn.Module,
        objects: dict[str, Any],
        files: dict[str, bytes],
        full: bool,
        runs: list[Run],
        ring: Ring,
    ) -> None:
        """On the thread that trains. Small tensors are copied; with `full` all are. `runs`: those
        of stoker.offload(), each with a snapshot that all ranks have."""
        self.in_memory = False  # whether the loop must leave tensors alone until they are copied
        self._together, self._full = together, full
        self._contents = Contents()
        self._parts: list[tuple[int, Any]] = []
        self._pieces: list[Piece] = []  # of this rank's pack; their places come later
        self._cuts: dict[int, tuple[list[int], list[int]]] = {}  # whole shape, begin; by piece
        self._frozen: list[Layout] = []  # of all ranks
        self.taken_bytes = 0  # of this rank's files that the store took over
        for module in sharded_modules(model):
            module.reshard()
        away: dict[str, tuple[Spec, Source]] = {}
        for run in runs:
            given = run, self, ring.plane, ring.passing()
            self._contents.offloaded[run.name], found = planes_of(*given)
            self._contents.offloaded[run.name]["places"] = places_in(run.session.blocks)
            away |= found
        weights, self._contents.aliases = self._weights(model, away)
        self._lay_out(weights, model, files)
        rng = objects.pop("rng")
        if together.leads:
            self._contents.objects["rng"] = record.encode(rng, "rng", self._part)
        else:
            self._contents.objects[f"rng.{together.rank}"] = record.encode(rng)
        for name, thing in objects.items():
            state = thing if isinstance(thing, dict) else thing.state_dict()
            said = record.encode(state, name, self._part)
            if together.leads:
                self._contents.objects[name] = said

    @property
    def plan(self) -> str:
        """Equal on ranks that will pass the same tensors in the same order."""
        return self._passing.plan

    # -- what is saved -----------------------------------------------------------------------------

    def _held(self, tensor: torch.Tensor, copied: bool = False) -> torch.Tensor:
        ours = shards.local(tensor)
        small = ours.numel() * ours.element_size() < COPIED
        if small or copied or self._full:
            return ours.clone()
        self.in_memory = True
        return ours

    def _weights(
        self, model: nn.Module, away: dict[str, tuple[Spec, Source]]
    ) -> tuple[list[Weight], dict[str, str]]:
        """Each tensor of the model once, with its owner, and the aliases. `away`: the parts of this
        rank that are in a store."""
        found: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[Any, str] = {}
        for full_name, tensor in named_tensors(model, bool(away)).items():
            name = plain(full_name)
            if name in found or name in aliases:
                raise InvalidArgument(
                    f"two tensors of the model would be called {name}; unwrap the model before it"
                    " is saved"
                )
            # Not by its memory: a rank that has nothing of it must judge as the others do.
            same = id(tensor) if shards.is_sharded(tensor) else place_of(tensor)
            if same in first:
                aliases[name] = first[same]
            else:
                first[same] = name
                found[name] = tensor
        buffers = {plain(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        # Apart, as frozen ones are seldom written.
        loads = {trained: [0] * self._together.world for trained in (True, False)}
        weights = []
        order = sorted(found.items(), key=lambda each: (-each[1].numel(), each[0]))
        for name, tensor in order:
            if name in away:
                trained = away[name][0].trained
            else:
                trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            spec = Spec(name, tensor.dtype, tuple(tensor.shape), trained or name in buffers)
            cut, load = shards.is_sharded(tensor), loads[spec.trained]
            owner = load.index(min(load)) if cut else 0  # rank 0's buffers count
            load[owner] += spec.bytes
            if cut:
                shards.mine(name, tensor)
            divided = shards.division(name, tensor) if cut else None
            if name in away:
                held: torch.Tensor | Away = Away(*away[name])
            elif hasattr(tensor, "_stoker_session"):
                raise InvalidArgument(
                    f"the values of {name} are those of a run of stoker.offload(); give save() the"
                    " optimizer that it made, too"
                )
            else:
                held = self._held(tensor, name in buffers)
            weights.append(Weight(spec, owner, held, divided))
        return weights, aliases

    def _lay_out(self, weights: list[Weight], model: nn.Module, files: dict[str, bytes]) -> None:
        world = self._together.world
        apart = [
            [each.spec for each in weights if each.owner == rank and each.spec.trained == trained]
            for rank in range(world)
            for trained in (True, False)
        ]
        layouts, index = tensors.lay_out(apart)
        self._frozen = [layout for layout in layouts if layout.frozen]
        by_name = {each.spec.name: each for each in weights}
        of_rank: list[list[Weight]] = [[] for _ in range(world)]
        for layout in layouts:
            for placed in layout.tensors:
                weight = by_name[placed.spec.name]
                of_rank[weight.owner].append(weight)
        # By turns, so that all ranks write at the same time.
        order = [
            each[i]
            for i in range(max(map(len, of_rank), default=0))
            for each in of_rank
            if i < len(each)
        ]
        self._passing = Passing(self._together, order)
        own = {each.spec.name for each in of_rank[self._together.rank]}
        self._contents.files = [
            self._file(layout, by_name)
            for layout in layouts
            if layout.tensors and layout.tensors[0].spec.name in own
        ]
        if not self._together.leads:
            return
        if index is not None:
            self._contents.files.append(of_bytes(tensors.INDEX, index))
        taken = {each.name for each in layouts}
        for name, data in {**configs_of(model), **files}.items():
            check_name(name, taken)
            self._contents.files.append(of_bytes(name, data))

    def _file(self, layout: Layout, by_name: dict[str, Weight]) -> Whole:
        places = [Part(0, len(layout.header), PartBytes(layout.header))]
        for placed in layout.tensors:
            weight, size = by_name[placed.spec.name], placed.spec.bytes
            source = (
                Arriving(self._passing, size)
                if weight.division is not None
                else Tensor(placed.spec.name, weight.tensor)
            )
            places.append(Part(placed.offset, size, source))
        return Whole(layout.name, layout.bytes, places, layout.frozen)

    def _part(self, where: str, tensor: torch.Tensor) -> int | None:
        """A tensor of a state: the number of its piece; None if it is small and not sharded."""
        if tensor.is_quantized or tensor.layout != torch.strided:
            raise InvalidArgument(
                f"{where} is a {tensor.layout} tensor, which a checkpoint cannot hold; give a"
                " dense one"
            )
        number = len(self._pieces)
        if not shards.is_sharded(tensor):
            if tensor.numel() * tensor.element_size() < INLINE:
                return None
            if not self._together.leads:
                return 0  # rank 0's counts, and so does its record
            self._add(where, self._held(tensor))
            return number
        part = shards.mine(where, tensor)
        if self._together.rank in shards.division(where, tensor).parts:
            self._cuts[number] = list(tensor.shape), list(part.begin)
            self._add(where, self._held(tensor))
        return number

    def _add(self, where: str, ours: torch.Tensor) -> None:
        size = ours.numel() * ours.element_size()
        dtype, shape = tensors.dtype_name(ours.dtype), list(ours.shape)
        self.add(where, dtype, shape, size, Tensor(where, ours))

    def add(self, name: str, dtype: str, shape: list[int], size: int, source: Source) -> int:
        """A part of this rank's pack; its number there."""
        self._pieces.append(Piece(name, dtype, shape, "", 0, size))
        self._parts.append((size, source))
        return len(self._pieces) - 1

    # -- writing -----------------------------------------------------------------------------------

    def write(
        self,
        tier: Tier,
        name: Name,
        ring: Ring,
        copied: Callable[[], None],
        commit: Callable[[list[File], list[list[bytes]], Contents], Any],
        anew: bool = False,
    ) -> int:
        """On the thread that saves. All ranks return when the checkpoint is durable, or raise. The
        bytes of this rank's files. `anew`, of rank 0: no file is taken over from the checkpoint
        before."""
        back = self._together.back
        taken = self._take_over(tier, name, ring, anew) if self._frozen else {}
        try:
            files, hashes = self._write_own(tier, name, ring, copied, taken)
        except BaseException as error:
            back.tell("written", error)
            raise
        said = {
            "files": [asdict(each) for each in files],
            "hashes": [[each.hex() for each in of_file] for of_file in hashes],
            "pieces": [asdict(each) for each in self._pieces],
            "cuts": [[at, *cut] for at, cut in self._cuts.items()],
            "objects": self._contents.objects if not self._together.leads else {},
            "offloaded": self._contents.offloaded,
        }
        of_ranks = self._together.bring(said)
        if self._together.leads:
            back.guard("committed", lambda: self._commit(tier, name, of_ranks, commit))
        back.exchange("committed")
        return sum(each.bytes for each in files)

    def _take_over(self, tier: Tier, name: Name, ring: Ring, anew: bool) -> dict[str, list[bytes]]:
        """Brings frozen files to their owners, which compare them with those of the checkpoint
        before. What is the same the store takes over; the rest is brought once more to be written.
        The hashes of this rank's files that were taken over."""
        back = self._together.back
        numbers = {layout.name: i for i, layout in enumerate(self._frozen)}

        def candidates() -> tuple[Before, list[Whole]]:
            own = [each for each in self._contents.files if each.frozen]
            before = Before(tier) if own else None
            return before, [each for each in own if before.has_as_long(each.bytes)]

        before, own = back.guard("frozen", candidates)
        mine = {"files": [numbers[each.name] for each in own], "anew": anew}
        told = back.exchange("frozen", facts=mine)
        tried = {number for each in told for number in each["files"]}
        if told[0]["anew"] or not tried:
            return {}
        hashes = back.guard("taken over", lambda: self._compare(before, name, own, tried, ring))
        found = back.exchange("taken over", facts=[numbers[each] for each in hashes])
        self._passing.leave_out(self._names({number for each in found for number in each}))
        return hashes

    def _compare(
        self, before: Before, name: Name, own: list[Whole], tried: set[int], ring: Ring
    ) -> dict[str, list[bytes]]:
        """The hashes of those of `own` that the store took over. `tried`: files of all ranks."""
        taken = {}
        self._passing.start(self._names(tried))
        try:
            for whole in own:
                of_file = before.hashes_of(whole, ring, to_the_end=True)
                if of_file and before.take(name, whole.name, whole.bytes, of_file):
                    taken[whole.name] = of_file
                    self.taken_bytes += whole.bytes
        except BaseException:
            self._passing.give_up()
            raise
        finally:
            self._passing.finish()
        return taken

    def _names(self, numbers: set[int]) -> set[str]:
        """Of the tensors in these frozen files."""
        return {each.spec.name for number in numbers for each in self._frozen[number].tensors}

    def _write_own(
        self,
        tier: Tier,
        name: Name,
        ring: Ring,
        copied: Callable[[], None],
        taken: dict[str, list[bytes]],
    ) -> tuple[list[File], list[list[bytes]]]:
        if self._parts:
            pack = f"state-{self._together.rank:05}.pack"
            whole, places = packed(pack, self._parts, tensors.ALIGN)
            self._contents.files.append(whole)
            self._pieces = [
                Piece(each.name, each.dtype, each.shape, pack, at, each.bytes)
                for each, at in zip(self._pieces, places)
            ]
        self._passing.start()
        files, hashes = [], []
        try:
            with Commits(ring) as commits:
                for whole in self._contents.files:
                    of_file = taken.get(whole.name)
                    hashes.append(of_file or tier.write(name, whole, ring, commits))
                    files.append(File(whole.name, whole.bytes, chunks_in(whole.bytes)))
        except BaseException:
            self._passing.give_up()
            raise
        finally:
            try:
                self._passing.finish()
            finally:
                copied()
        return files, hashes

    def _commit(self, tier: Tier, name: Name, of_ranks: list[Any], commit: Callable) -> None:
        """On rank 0."""
        contents, files, hashes = self._contents, [], []
        contents.offloaded = {name: {"ranks": []} for name in contents.offloaded}
        first: dict[str, int] = {}  # the number of a sharded tensor, by its name
        for rank, said in enumerate(of_ranks):
            files += [File(**each) for each in said["files"]]
            hashes += [[bytes.fromhex(each) for each in of_file] for of_file in said["hashes"]]
            contents.objects.update(said["objects"])
            base = len(contents.state)
            contents.state += [Piece(**each) for each in said["pieces"]]
            for at, shape, begin in said["cuts"]:
                where = contents.state[base + at].name
                number = first.setdefault(where, base + at)
                cut = contents.sharded.setdefault(str(number), {"shape": shape, "parts": []})
                cut["parts"].append({"begin": begin, "part": base + at})
            for run, of_rank in said["offloaded"].items():
                for each in of_rank["objects"].values():
                    if "part" in each:
                        each["part"] += base
                contents.offloaded[run]["ranks"].append(of_rank)
        for run in contents.offloaded.values():
            check_one_step(run["ranks"], tier.where(name))
        for each in files:
            try:
                there = tier.store.stat(f"{name}/{each.name}")["bytes"]
            except NotFound:
                there = None
            if there != each.bytes:
                raise NotFound(
                    f"rank 0 cannot see {each.name} in {tier.where(name)}, although another rank"
                    " wrote it: give all ranks one folder or bucket that they share"
                )
        commit(files, hashes, contents)


def whole_shape(manifest: Any, number: int) -> tuple[int, ...]:
    """Of the tensor that a record calls part `number`."""
    cut = manifest.sharded.get(str(number))
    return tuple(cut["shape"] if cut else manifest.state[number].shape)


def distribute(state: dict[str, Any], optimizer: Any) -> None:
    """What of a loaded state lies as its parameter does, and was small enough to come whole, is
    distributed like it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for at, of_param in state["state"].items():
        param = params[int(at)]
        if not shards.is_sharded(param) or not isinstance(of_param, dict):
            continue
        for key, value in of_param.items():
            if not isinstance(value, torch.Tensor) or shards.is_sharded(value):
                continue
            if value.shape == param.shape:
                part = shards.mine(f"{key} of parameter {at}", param)
                ours = value[tuple(slice(b, b + n) for b, n in zip(part.begin, part.size))]
                of_param[key] = shards.distributed(ours.clone(), param)


def places_of(reader: Reader, key: str, optimizer: Any) -> dict[int, torch.Tensor]:
    """Which tensors of an optimizer's state lie as one of its parameters does: the parameter by
    the number of the part. Of parameters that are not sharded, none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(shards.is_sharded, params)):
        return {}
    found: dict[int, torch.Tensor] = {}
    state = reader.outline(key)["state"]
    for at, of_param in state.items():
        param = params[int(at)]
        for value in of_param.values() if isinstance(of_param, dict) else ():
            if not isinstance(value, Number) or not shards.is_sharded(param):
                continue
            if whole_shape(reader.manifest, value.number) == tuple(param.shape):
                found[value.number] = param
    return found
