# pyright: basic
"""Selection of passages for a question: by words, by embeddings, or by the retriever of another library."""

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any
from unicodedata import normalize
from zipfile import ZipFile

from xxhash import xxh3_128

from foveate.transformers.documents import SEPARATOR, Passage
from foveate.transformers.embeddings import sentence_embeddings
from foveate.transformers.fingerprint import digest
from foveate.transformers.folder import Folder
from foveate.transformers.index import WORDS, ChunkIndex

# bm25s would run JAX, if installed, and JAX takes most of a GPU's memory
lax = sys.modules.get("jax.lax")
sys.modules["jax.lax"] = None  # pyright: ignore[reportArgumentType]
try:
    import bm25s
finally:
    del sys.modules["jax.lax"]
    if lax is not None:
        sys.modules["jax.lax"] = lax

__all__ = ["bm25", "by_meaning", "choose", "passage_of", "words_of"]

EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces: each character is a word
WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W{EAST_ASIAN}]+")
NAME_KEYS = "file_name", "file_path", "source", "title", "name"
"""Entries of a document's metadata that name it."""

Ranking = Callable[[str], list[int]]
"""Indices of the texts to read for a question, best first."""


def choose(
    index: ChunkIndex, question: str, used: int, *, passages: Any = None, embed: str = "", top: int = 0
) -> list[int]:
    """Numbers of the passages to read for a question: as many as fit into the model's context after `used` tokens.

    See `foveate.transformers.rag.ask` for the other arguments and the errors.
    """
    if passages is not None:
        return _fit(index, _resolve(index, question, passages)[: top or None], used)
    return sorted(_fit(index, _rank(index, question, embed)[: top or None], used))


def _rank(index: ChunkIndex, question: str, embed: str) -> list[int]:
    """Numbers of the passages of the index, best first."""
    if not index.passages:
        raise ValueError("the index has no passages: add at least one")
    texts = tuple(passage.text for passage in index.passages)
    ranking = by_meaning(texts, embed) if embed else bm25(texts, str(index.place))
    return ranking(question) or list(range(len(texts)))


def _resolve(index: ChunkIndex, question: str, passages: Any) -> list[int]:
    """Numbers of the passages given by the caller or found by a retriever."""
    if isinstance(passages, str):
        raise ValueError(f"pass a list of passages, not one text: [{passages[:20]!r}]")
    if not isinstance(passages, Sequence):
        passages = _retrieve(passages, question)
    if not passages:
        raise ValueError("there are no passages to read: pass at least one")
    numbers = [p.__index__() if hasattr(p, "__index__") else index.number(passage_of(p)) for p in passages]
    if wrong := [number for number in numbers if not 0 <= number < len(index.passages)]:
        raise ValueError(f"there is no passage {wrong[0]}: the index has {len(index.passages)}, numbered from 0")
    return numbers


def _fit(index: ChunkIndex, passages: Sequence[int], used: int) -> list[int]:
    """The first passages, as many as fit into the model's context after `used` tokens."""
    limit = index.encoder.max_tokens
    if used >= limit:
        raise ValueError(
            f"question, prompt and answer take {used} tokens, but the model takes at most {limit} with a passage: ask "
            "a shorter question, or for fewer new tokens"
        )
    totals = [used + total for total in accumulate(len(index.ids[passage]) for passage in passages)]
    if totals[0] > limit:
        raise ValueError(
            f"{index.passages[passages[0]].name} with prompt and answer takes {totals[0]} tokens, but the model takes "
            f"at most {limit}: use smaller chunks, a shorter question, or fewer new tokens"
        )
    return list(passages[: bisect_right(totals, limit)])


@lru_cache(maxsize=4)
def bm25(texts: tuple[str, ...], place: str = "") -> Ranking:
    """Ranking by the words that a text shares with the question (BM25 as in Lucene, k1 = 1.5, b = 0.75).

    Texts without a word of the question are left out. Case and Unicode form of words are ignored. There is no stemming
    and no list of stop words.

    Args:
        texts: Texts to rank.
        place: Folder or URL of an index, which keeps the words of its texts. Empty keeps nothing.
    """
    file = f"words-{digest([WORD.pattern, bm25s.__version__, texts])}.zip"
    model = _kept_words(Folder(place), file) if place else None
    if model is None:
        if not any(bags := [words_of(text) for text in texts]):
            return lambda question: []
        model = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
        model.index(bags, show_progress=False)
        if place:
            _keep_words(Folder(place), file, model)

    def rank(question: str) -> list[int]:
        words = list(dict.fromkeys(words_of(question)))
        scores = model.get_scores(words).tolist() if words else []
        return sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])

    return rank


def _kept_words(folder: Folder, file: str) -> bm25s.BM25 | None:
    """Words of texts that a folder keeps; None if it does not, or the file is damaged."""
    with suppress(OSError), TemporaryDirectory() as place:
        content = folder.read(file)
        if content[:16] == xxh3_128(content[16:]).digest():
            ZipFile(BytesIO(content[16:])).extractall(place)
            return bm25s.BM25.load(place, show_progress=False)
    return None


def _keep_words(folder: Folder, file: str, model: bm25s.BM25) -> None:
    """Write the words of texts into a folder in place of others, if the disk has room."""
    content = BytesIO()
    with suppress(OSError), TemporaryDirectory() as place:
        model.save(place, show_progress=False)
        with ZipFile(content, "w") as archive:
            for path in sorted(Path(place).iterdir()):
                archive.write(path, path.name)
        for other in filter(WORDS.fullmatch, folder.files()):
            folder.remove(other)
        folder.write(file, xxh3_128(content.getvalue()).digest() + content.getvalue())


def words_of(text: str) -> list[str]:
    """Words of a text, case-folded and in one Unicode form."""
    return WORD.findall(normalize("NFKC", text).casefold())


@lru_cache(maxsize=4)
def by_meaning(texts: tuple[str, ...], model: str) -> Ranking:
    """Ranking by the cosine similarity of embeddings by a model of sentence-transformers.

    Raises:
        ImportError: If sentence-transformers is not installed.
    """
    embeddings = sentence_embeddings(texts, model)

    def rank(question: str) -> list[int]:
        (query,) = sentence_embeddings([question], model)
        return (embeddings @ query / embeddings.norm(dim=1)).argsort(descending=True, stable=True).tolist()

    return rank


def _retrieve(retriever: Any, question: str) -> Sequence[Any]:
    """Results for a question by a retriever of LangChain, LlamaIndex or Haystack, or by a function.

    Raises:
        ValueError: If the retriever is none of these, or finds nothing.
    """
    found: Any
    if hasattr(retriever, "invoke"):  # LangChain
        found = retriever.invoke(question)
    elif hasattr(retriever, "retrieve"):  # LlamaIndex
        found = retriever.retrieve(question)
    elif hasattr(retriever, "run"):  # Haystack
        found = retriever.run(query=question)["documents"]
    elif callable(retriever):
        found = retriever(question)
    else:
        raise ValueError(f"{type(retriever).__name__} is no retriever: pass one, a function, or a list of passages")
    if not found:
        raise ValueError(f"the retriever found no passages for {question!r}: rephrase it, or pass passages")
    return found


def passage_of(document: Any) -> Passage:
    """Passage of a text, or of a document of LangChain, LlamaIndex or Haystack, as an index stores it.

    Its name is the document's file or source; without one, its first words.

    Raises:
        ValueError: If the document is none of these, or has no text.
    """
    about = getattr(document, "metadata", None) or getattr(document, "meta", None) or {}
    if isinstance(document, str):
        text = document
    elif hasattr(document, "page_content"):  # LangChain
        text = document.page_content
    elif hasattr(document, "get_content"):  # LlamaIndex: a node, with or without a score
        text = document.get_content()
    elif hasattr(document, "content"):  # Haystack
        text = document.content
    else:
        raise ValueError(
            f"a passage must be a number, a text, or a document of LangChain, LlamaIndex or Haystack, not {document!r}"
        )
    if not (text := (text or "").strip()):
        raise ValueError(f"a passage has no text: leave out {document!r}")
    names = (str(about[key]) for key in NAME_KEYS if about.get(key))
    return Passage(next(names, shorten(text, 40, placeholder=" ...")), text + SEPARATOR)
