"""Text in: corpus, vocabulary, token file, order, batches."""

from .corpus import CorpusError, default_corpus
from .loader import Loader
from .order import Permutation, sample_at
from .prepare import Prepared, prepare, prepare_apart
from .token_file import TokenFile, TokenFileWriter, Windows
from .vocabulary import load_tokenizer

__all__ = ["CorpusError", "Loader", "Permutation", "Prepared", "TokenFile", "TokenFileWriter", "Windows",
           "default_corpus", "load_tokenizer", "prepare", "prepare_apart", "sample_at"]
