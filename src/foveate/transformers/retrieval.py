# pyright: basic
"""Which passages to read for a question: by its words, by its meaning, or as another library's retriever says."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from textwrap import shorten
from typing import Any
from unicodedata import normalize

import bm25s

from foveate.transformers.documents import SEPARATOR, Passage
from foveate.transformers.examples import sentence_embeddings

__all__ = ["bm25", "by_meaning", "passage_of", "retrieve", "words_of"]

EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces: each character is a word
WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W{EAST_ASIAN}]+")
NAMES = "file_name", "file_path", "source", "title", "name"
"""Entries of a document's metadata that name it."""

Ranking = Callable[[str], list[int]]
"""Indices of the texts to read for a question, best first."""


@lru_cache(maxsize=4)
def bm25(texts: tuple[str, ...]) -> Ranking:
    """Ranking by the words that a text shares with the question (BM25 as in Lucene, k1 = 1.5, b = 0.75).

    Texts without a word of the question are left out. Words are compared by their spelling, whatever their case and
    Unicode form, and none is too short or too common to count.
    """
    bags = [words_of(text) for text in texts]
    if not any(bags):
        return lambda question: []
    model = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    model.index(bags, show_progress=False)

    def rank(question: str) -> list[int]:
        words = list(dict.fromkeys(words_of(question)))
        scores = model.get_scores(words).tolist() if words else []
        return sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])

    return rank


def words_of(text: str) -> list[str]:
    """The words of a text, without case and in one Unicode form."""
    return WORD.findall(normalize("NFKC", text).casefold())


@lru_cache(maxsize=4)
def by_meaning(texts: tuple[str, ...], model: str) -> Ranking:
    """Ranking by the cosine similarity of embeddings by a model of sentence-transformers.

    Raises:
        ImportError: If sentence-transformers is not installed.
    """
    embeddings = sentence_embeddings(texts, model)

    def rank(question: str) -> list[int]:
        (asked,) = sentence_embeddings([question], model)
        return (embeddings @ asked / embeddings.norm(dim=1)).argsort(descending=True, stable=True).tolist()

    return rank


def retrieve(retriever: Any, question: str) -> Sequence[Any]:
    """What a retriever of LangChain, LlamaIndex or Haystack, or a function of the question, finds for a question.

    Raises:
        ValueError: If it is none of these, or finds nothing.
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
        raise ValueError(f"the retriever found no passages for {question!r}: ask otherwise, or pass passages")
    return found


def passage_of(document: Any) -> Passage:
    """The passage of a text, or of a document of LangChain, LlamaIndex or Haystack, as an index would hold it.

    Its name is that of the document's file or source; without one, its first words.

    Raises:
        ValueError: If it is none of these, or has no text.
    """
    about = getattr(document, "metadata", None) or getattr(document, "meta", None) or {}
    if isinstance(document, str):
        text = document
    elif hasattr(document, "page_content"):  # LangChain
        text = document.page_content
    elif hasattr(document, "get_content"):  # LlamaIndex: a node, with its score or without
        text = document.get_content()
    elif hasattr(document, "content"):  # Haystack
        text = document.content
    else:
        raise ValueError(
            f"a passage must be a number, a text, or a document of LangChain, LlamaIndex or Haystack, not {document!r}"
        )
    if not (text := (text or "").strip()):
        raise ValueError(f"a passage has no text: leave out {document!r}")
    names = (str(about[key]) for key in NAMES if about.get(key))
    return Passage(next(names, shorten(text, 40, placeholder=" ...")), text + SEPARATOR)
