"""The trained weights as a folder that transformers loads: Llama's names, config and tokenizer
files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from tokenizers import Tokenizer

from ..data.vocabulary import end_of_text
from ..errors import naming
from .model import Model
from .settings import write_json

_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def export_model(
    model: Model,
    tokenizer: Tokenizer,
    folder: Path,
    gather: Callable[[list[nn.Parameter]], AbstractContextManager],
) -> None:
    """Write model.safetensors, configs and tokenizer files.

    `gather(params)` is a context in which the values of these parameters may be read
    (stoker.gather). One parameter is gathered at a time, so the export needs no more memory than
    the largest of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", dict(model.named_parameters()), gather)
    config = model.config
    end = end_of_text(tokenizer)
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": dtype,
            "dtype": dtype,
            "vocab_size": config.vocabulary,
            "hidden_size": config.hidden,
            "intermediate_size": config.feed_forward,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.window,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "initializer_range": config.initial_std,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": end,
            "eos_token_id": end,
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 40,
        },
    )
    end_name = tokenizer.id_to_token(end)
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.window,
            "bos_token": end_name,
            "eos_token": end_name,
            "pad_token": end_name,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_safetensors(
    path: Path,
    tensors: dict[str, nn.Parameter],
    gather: Callable[[list[nn.Parameter]], AbstractContextManager],
) -> None:
    """One safetensors file, written a tensor at a time and named when it is whole and durable.

    The layout (8 bytes of length, a JSON header padded to 8, the tensors without gaps) is
    safetensors' own. Its library wants all tensors in memory at once. An offloaded model cannot
    give that.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.partial")
    with naming(partial), open(partial, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            with gather([tensor]):
                out.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)
