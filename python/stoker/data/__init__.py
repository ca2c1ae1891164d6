"""From text and samples to batches: sources, order, loader; corpus, vocabulary, token file."""

from .build import shards
from .corpus import CorpusError, default_corpus
from .images import IMAGENET, Jpeg
from .loader import Loader, Source
from .order import Mixture, Permutation, sample_at
from .prepare import Prepared, prepare, prepare_apart
from .sources import Arrow, Files, Indexed, Mds, Rows, Safetensors, Tar, Tokens
from .token_file import TokenFile, Windows
from .torch_dataloader import as_dataloader
from .vocabulary import load_tokenizer
from .workers import TransformError

__all__ = [
    "IMAGENET",
    "Arrow",
    "CorpusError",
    "Files",
    "Indexed",
    "Jpeg",
    "Loader",
    "Mds",
    "Mixture",
    "Permutation",
    "Prepared",
    "Rows",
    "Safetensors",
    "Source",
    "Tar",
    "TokenFile",
    "Tokens",
    "TransformError",
    "Windows",
    "as_dataloader",
    "default_corpus",
    "load_tokenizer",
    "prepare",
    "prepare_apart",
    "sample_at",
    "shards",
]
