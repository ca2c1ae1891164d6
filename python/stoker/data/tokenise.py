"""Text to token ids, by the quickest package that gives the same ids as Hugging Face's."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from tokenizers import Tokenizer

# Texts that every sample has: what tokenizers tend to differ at.
_ODD = (
    "",
    " ",
    "\n\n \t \n",
    "  two  spaces\tand a tab\r\n",
    "\x00\x01\x7f",
    "it's we'll I'VE 1234567 3.14 0x1F",
    "žluťoučký kůň, 内核, नमस्ते, مرحبا, 🐧👩‍👩‍👧, e\u0301, \u200b\ufeff\ufffd",
    "a" * 300,
    "<|endoftext|> <s></s> [SEP]",
)


@dataclass(frozen=True)
class Engine:
    """The package that makes ids, and why it was chosen."""

    package: str  # "gigatoken" or "tokenizers"
    version: str
    why: str

    def __str__(self) -> str:
        return f"tokenising with {self.package} {self.version}: {self.why}"


class Tokeniser:
    """Text to ids, by an engine. One thread calls; `threads`: the package may use all cores."""

    def __init__(self, description: str, package: str, threads: bool) -> None:
        """description: the text of a tokenizer.json."""
        self._quick = None
        if package == "gigatoken":
            import gigatoken

            self._quick = gigatoken.Tokenizer.from_json(description)
        self._plain = Tokenizer.from_str(description)
        self._threads = threads

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without special tokens around them."""
        if self._quick is not None:
            return [self._quick.encode(text) for text in texts]
        if not self._threads:  # one text at a time leaves the package's threads asleep
            texts = [[text] for text in texts]
            found = (self._plain.encode_batch_fast(one, add_special_tokens=False) for one in texts)
            return [np.array(one[0].ids, np.uint32) for one in found]
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in found]


def choose(description: str, sample: Sequence[str]) -> Engine:
    """gigatoken where it is installed and gives the ids of tokenizers for all of `sample`."""
    plain = lambda why: Engine("tokenizers", version("tokenizers"), why)  # noqa: E731
    if importlib.util.find_spec("gigatoken") is None:
        return plain("the quicker gigatoken is not installed (`pip install gigatoken`)")
    texts = [*_ODD, *sample]
    try:
        quick = Tokeniser(description, "gigatoken", False).encode(texts)
    except Exception as error:  # of whatever kind: it is not used then
        return plain(f"gigatoken does not take this tokenizer ({error})")
    same = [
        np.array_equal(mine, theirs)
        for mine, theirs in zip(
            quick, Tokeniser(description, "tokenizers", True).encode(texts), strict=True
        )
    ]
    if not all(same):
        unequal = len(same) - sum(same)
        return plain(f"gigatoken gives other ids for {unequal} of {len(same)} sampled texts")
    return Engine(
        "gigatoken",
        version("gigatoken"),
        f"its ids equal those of tokenizers {version('tokenizers')} in {len(same)} sampled texts",
    )
