"""MODEL of `stoker plan`: what it may be, and the blocks it comes to. Nothing here needs a
weight."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import Corruption, InvalidArgument, NotFound, Unsupported, naming
from ..offload.model.blocks import Block, blocks_of_shapes, partition
from ..offload.planning.planner import of_expert

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbBtT]?)")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_PART = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<count>[^*]+?)(?:\*(?P<times>\d+))?")
_NEEDED = (
    "a folder with a config.json or safetensors files, a config file, or counts of parameters such"
    ' as 7B or "embed=131M,layer=202M*32,head=131M"'
)


@dataclass(frozen=True)
class Described:
    """A model that is planned: its blocks, and how it was understood."""

    blocks: list[Block]
    origin: str
    experts: float = 1.0  # the part of a mixture's experts that a token goes through


def describe(model: str, precision: str) -> Described:
    """InvalidArgument where `model` is written wrong; NotFound, Corruption or Unsupported where it
    is the files. Each a sentence."""
    dtype, path = DTYPES[precision], Path(model)
    if os.path.isdir(model):
        if (path / "config.json").is_file():
            return _from_config(path / "config.json", dtype, precision)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise NotFound(
                f"{path} holds neither a config.json nor safetensors files; MODEL is {_NEEDED}"
            )
        return _from_safetensors(files, f"{len(files)} safetensors files in {path}")
    if os.path.isfile(model):
        if path.suffix == ".safetensors":
            return _from_safetensors([path], str(path))
        return _from_config(path, dtype, precision)
    if "=" in model:
        return Described(_from_parts(model, dtype), f"the counts given, weights as {precision}")
    if _COUNT.fullmatch(model.strip()):
        return _from_total(_count(model), dtype, precision)
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # tells why it cannot be used, as one without rights
    raise NotFound(f"there is no folder or file {model}; MODEL is {_NEEDED}")


def _count(text: str) -> int:
    found = _COUNT.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise InvalidArgument(
            f"{text!r} is not a count of parameters: write it as 7B, 125M or 6738415616"
        )
    return int(float(found[1]) * _SCALE[found[2].lower()])


def _mixed(blocks: list[Block], origin: str, used: int = 0, there: int = 0) -> Described:
    """A model that may be a mixture, of whose experts a token goes through `used` of `there`; 0:
    nothing tells."""
    if not any(of_expert(param) for block in blocks for param in block.params):
        return Described(blocks, origin)
    if 0 < used <= there:
        return Described(blocks, f"{origin}, {used} of {there} experts a token", used / there)
    return Described(
        blocks,
        f"{origin}, reckoned as if each token went through all experts (num_experts_per_tok in a"
        " config.json would tell of fewer)",
    )


def _from_config(path: Path, dtype: torch.dtype, precision: str) -> Described:
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise NotFound(
            "a transformers config needs the package transformers, which this Python lacks; install"
            " it, or give counts of parameters"
        ) from error
    try:
        config = AutoConfig.from_pretrained(
            path.parent if path.name == "config.json" else path, local_files_only=True
        )
        with torch.device("meta"):
            try:
                made = AutoModelForCausalLM.from_config(config, dtype=dtype)
            except ValueError:  # no language model with a head: an encoder, say
                made = AutoModel.from_config(config, dtype=dtype)
    except Exception as error:
        # whatever transformers, or the model's own code, makes of a config with wrong numbers in it
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise Corruption(
            f"{path} is not a config that transformers can make a model of: {why}"
        ) from error
    text = config.get_text_config()
    told = lambda *names: next(
        (
            count
            for count in (getattr(text, name, None) for name in names)
            if isinstance(count, int)
        ),
        0,
    )
    used, there = (
        told("num_experts_per_tok"),
        told("num_local_experts", "num_experts", "n_routed_experts"),
    )
    return _mixed(
        partition(made, made.parameters()), f"{path}, weights as {precision}", used, there
    )


def _from_safetensors(files: list[Path], origin: str) -> Described:
    shapes = [
        (name, shape, _stored(kind, file, name))
        for file in files
        for name, shape, kind in _header(file)
        if kind not in _COUNTS
    ]
    if not shapes:
        raise Corruption(f"{files[0]} holds no weights, only integers; give the files of the model")
    return _mixed(blocks_of_shapes(sorted(shapes, key=lambda each: _natural(each[0]))), origin)


# types of buffers: positions, masks
_COUNTS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}


def _natural(name: str) -> tuple:
    """layers.2 before layers.10; embeddings before layers, the final norm and head behind them, as
    models define them."""
    first = (
        0
        if "embed" in name or name.split(".")[-2:-1] in (["wte"], ["wpe"])
        else 1
        if re.search(r"\.\d+\.", name)
        else 3
        if "head" in name
        else 2
    )
    return (
        first,
        *((1, int(word), "") if word.isdigit() else (0, 0, word) for word in name.split(".")),
    )


def _header(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of the tensors of a safetensors file: 8 bytes of length, then JSON."""
    with naming(file), open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        raw = opened.read(length) if length <= 100 << 20 else b""
    try:
        header = json.loads(raw)
        tensors = [
            (name, tuple(info["shape"]), info["dtype"])
            for name, info in header.items()
            if name != "__metadata__"
        ]
        if not all(
            isinstance(size, int) and size >= 0 for _, shape, _ in tensors for size in shape
        ):
            raise ValueError("a size is not a number")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Corruption(
            f"{file} is not a safetensors file: its header cannot be read; fetch it again"
        ) from error
    if not tensors:
        raise Corruption(f"{file} holds no tensors; fetch it again")
    return tensors


def _stored(kind: str, file: Path, name: str) -> torch.dtype:
    """Trained as float32 where stored so, else as bfloat16 with an exact float32 master."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.bfloat16}
    if kind not in kinds:
        raise Unsupported(
            f"{name} in {file} is of type {kind}, but Stoker trains bfloat16 and float32 weights:"
            " convert it first"
        )
    return kinds[kind]


def _from_parts(text: str, dtype: torch.dtype) -> list[Block]:
    """ "embed=131M,layer=202M*32": blocks in order, of a square matrix each as far as its count
    goes."""
    shapes = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise InvalidArgument(
                f"{part.strip()!r} does not describe layers: write NAME=PARAMETERS or"
                " NAME=PARAMETERS*LAYERS, as in embed=131M,layer=202M*32"
            )
        count, times = _count(found["count"]), found["times"]
        width = max(1, int(count**0.5))
        for i in range(int(times or 1)):
            shapes.append(
                (
                    f"{found['name']}.{i}.weight" if times else f"{found['name']}.weight",
                    (-(-count // width), width),
                    dtype,
                )
            )
    return blocks_of_shapes(shapes)


def _from_total(total: int, dtype: torch.dtype, precision: str) -> Described:
    """A Llama-shaped model of about that many parameters: width 128 times its depth, 32,000
    tokens."""
    layers = max(1, round((total / (12 * 128**2)) ** (1 / 3)))
    width = next(
        h
        for h in range(64 * layers, 1 << 20, 64)
        if _llama(layers, h)[0] >= total or h >= 512 * layers
    )
    counted, shapes = _llama(layers, width)
    blocks = blocks_of_shapes((name, shape, dtype) for name, shape in shapes)
    return Described(
        blocks,
        f"a Llama-shaped model of {counted / 1e9:.2f} B parameters: {layers} layers of width"
        f" {width}, weights as {precision}",
    )


def _llama(layers: int, width: int) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    inner, vocabulary = -(-8 * width // 3 // 256) * 256, 32000
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, width))]
    for i in range(layers):
        name = f"model.layers.{i}"
        shapes += [(f"{name}.self_attn.{each}_proj.weight", (width, width)) for each in "qkvo"]
        shapes += [(f"{name}.mlp.{each}_proj.weight", (inner, width)) for each in ("gate", "up")]
        shapes += [
            (f"{name}.mlp.down_proj.weight", (width, inner)),
            (f"{name}.norms.weight", (2 * width,)),
        ]
    shapes += [("model.norm.weight", (width,)), ("lm_head.weight", (vocabulary, width))]
    return sum(rows * (cols[0] if cols else 1) for _, (rows, *cols) in shapes), shapes
