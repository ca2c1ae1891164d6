"""Byte-level BPE: any text becomes tokens and comes back unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import CorpusError

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens learned from `texts`; END_OF_TEXT is token 0."""
    if size < 257:
        raise ValueError(f"a byte-level vocabulary needs at least 257 tokens, not {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json made by the tokenizers package, by us or by others. Raises CorpusError."""
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorpusError(
            f"the tokenizer {path} cannot be read ({error.strerror}): check its path and"
            " permissions"
        ) from error
    except Exception as error:  # tokenizers raises bare Exception for bad content
        raise CorpusError(
            f"{path} is not a tokenizer.json of the tokenizers package ({error}): give another"
            " tokenizer"
        ) from error
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token between documents."""
    for name in (END_OF_TEXT, "</s>", "<|end_of_text|>", "[SEP]"):
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise CorpusError(f"the tokenizer has no end-of-text token: add {END_OF_TEXT} to it")
