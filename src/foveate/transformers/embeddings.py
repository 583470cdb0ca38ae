"""Embeddings of texts: from a file, by hashed words and trigrams, or by a model of sentence-transformers."""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foveate.utils.progress import Track, silent

__all__ = ["hashed_ngrams", "read_embeddings", "sentence_embeddings"]

DIM = 512
ENCODED_AT_ONCE = 256
HASHED_AT_ONCE = 4096


def read_embeddings(path: Path) -> Tensor:
    """Array of a .npy file, or the single tensor of a .safetensors file, [examples, dim].

    Raises:
        ValueError: If the file is of another kind or damaged, or holds several tensors or the wrong shape.
    """
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"cannot read {path}: pass a .npy or a .safetensors file")
    try:
        with path.open("rb") as file:  # numpy does not close a broken archive
            tensors = load_file(path) if path.suffix == ".safetensors" else {"": torch.from_numpy(np.load(file))}
    except (SafetensorError, ValueError, TypeError, EOFError, BadZipFile):
        raise ValueError(f"{path} holds no embeddings that can be read: write an array of numbers") from None
    if len(tensors) != 1:
        raise ValueError(f"{path} holds {len(tensors)} tensors ({', '.join(tensors)}): pass a file with one")
    (embeddings,) = tensors.values()
    if embeddings.ndim != 2:
        raise ValueError(f"{path} holds an array of shape {list(embeddings.shape)}: it needs one row for each example")
    return embeddings


def hashed_ngrams(texts: Sequence[str], track: Track = silent) -> Float[Tensor, "texts dim"]:
    """Embeddings without a model: words and letter trigrams, each hashed to a dimension and a sign.

    A word or trigram that occurs n times counts 1 + log n. Texts are similar if they share words and spelling,
    whatever they mean.

    Raises:
        ValueError: If a text has neither letters nor digits.
    """
    embeddings, advance = torch.zeros(len(texts), DIM), track("embeddings", len(texts))
    for start in range(0, len(texts), HASHED_AT_ONCE):
        codes_of = dict[str, list[int]]()  # of each word and its trigrams
        codes = list[int]()
        ends = list[int]()  # of the codes of each text
        for index, text in enumerate(texts[start : start + HASHED_AT_ONCE], start):
            words = re.findall(r"\w+", text.lower())
            if not words:
                raise ValueError(f"example {index} has no words: {text!r}; leave it out")
            for word in words:
                if word not in codes_of:
                    grams = [word, *(f"<{word}>"[i : i + 3] for i in range(len(word)))]
                    codes_of[word] = [crc32(gram.encode()) for gram in grams]
                codes += codes_of[word]
            ends.append(len(codes))
            advance()
        row = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        grams, counts = np.unique(row << 32 | np.array(codes), return_counts=True)
        places, signs = (grams >> 32) * DIM + grams % (1 << 32) % DIM, np.where(grams >> 31 & 1, 1, -1)
        sums = np.bincount(places, signs * (1 + np.log(counts)), minlength=len(ends) * DIM)
        embeddings[start : start + len(ends)] = torch.from_numpy(sums).view(-1, DIM)
    return embeddings


def sentence_embeddings(texts: Sequence[str], model: str, track: Track = silent) -> Float[Tensor, "texts dim"]:
    """Embeddings by a model of sentence-transformers, downloaded if necessary.

    Raises:
        ImportError: If sentence-transformers is not installed.
    """
    encoder = _sentence_transformer(model)
    parts = [texts[i : i + ENCODED_AT_ONCE] for i in range(0, len(texts), ENCODED_AT_ONCE)]
    advance, embeddings = track("embeddings", len(parts)), list[Tensor]()
    for part in parts:
        embeddings.append(encoder.encode(list(part), convert_to_tensor=True, show_progress_bar=False).cpu())
        advance()
    return torch.cat(embeddings)


@lru_cache(maxsize=1)
def _sentence_transformer(model: str) -> Any:
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    return SentenceTransformer(model)
