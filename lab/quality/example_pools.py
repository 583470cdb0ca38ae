"""Pools of examples with questions, for lab/quality/examples.py: embeddings and labels.

    skewed     synthetic: six classes of very different sizes, three clusters each; a quarter are near copies of others
    balanced   synthetic: the same clusters, classes of equal size, no copies. Random choices should be as good here
    docstrings first paragraphs of the standard library's docstrings, with the package as label. Embeddings as in
               `foveate icl` without a model (hashed words and trigrams), reduced to DIM dimensions by an SVD

Synthetic questions are never copies of examples. Repeated docstrings are used once.
"""

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from foveate.transformers.embeddings import hashed_ngrams

DIM = 32
QUESTIONS = 480
SHARES = {"skewed": (0.34, 0.24, 0.16, 0.12, 0.08, 0.06), "balanced": (1 / 6,) * 6}
CLUSTERS = 3  # per class
SPREAD = 1.1  # distance of a synthetic example from its cluster centre, which has length 1
COPIES, COPY_SPREAD = 0.25, 0.05  # fraction of near copies in the skewed pool, and their distance from the original
PACKAGES = "asyncio", "decimal", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"
KINDS = (*SHARES, "docstrings")


class Task(NamedTuple):
    """A pool of examples and questions about it. All embeddings have length 1."""

    embeddings: Float[Tensor, "examples dim"]
    labels: Int[Tensor, "examples"]
    queries: Float[Tensor, "questions dim"]
    answers: Int[Tensor, "questions"]
    classes: int


def draw(kind: str, examples: int, seed: int) -> Task:
    """A random pool of this kind and size, and its questions.

    Raises:
        ValueError: If the kind is unknown, or there are too few docstrings.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind in SHARES:
        return mixture(generator, examples, SHARES[kind], COPIES if kind == "skewed" else 0.0)
    if kind != "docstrings":
        raise ValueError(f"unknown data {kind!r}: choose one of {', '.join(KINDS)}")
    embeddings, labels = docstrings()
    if examples + QUESTIONS > len(labels):
        raise ValueError(f"there are {len(labels)} docstrings: use at most {len(labels) - QUESTIONS} examples")
    drawn = torch.randperm(len(labels), generator=generator)[: examples + QUESTIONS]
    return _split(embeddings[drawn], labels[drawn], examples, len(PACKAGES))


def mixture(generator: torch.Generator, examples: int, shares: tuple[float, ...], copies: float) -> Task:
    """Clusters around random directions, `CLUSTERS` per class, with these class shares."""
    count = examples + QUESTIONS
    centres = normalize(torch.randn(len(shares) * CLUSTERS, DIM, generator=generator), dim=1)
    labels = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=generator)
    cluster = labels * CLUSTERS + torch.randint(CLUSTERS, (count,), generator=generator)
    rows = centres[cluster] + SPREAD * torch.randn(count, DIM, generator=generator) / DIM**0.5
    shuffled = torch.randperm(examples, generator=generator)
    originals, copies_ = shuffled.split([examples - round(copies * examples), round(copies * examples)])
    source = originals[torch.randint(len(originals), (len(copies_),), generator=generator)]
    rows[copies_] = rows[source] + COPY_SPREAD * torch.randn(len(copies_), DIM, generator=generator) / DIM**0.5
    labels[copies_] = labels[source]
    return _split(rows, labels, examples, len(shares))


@cache
def docstrings() -> tuple[Float[Tensor, "texts dim"], Int[Tensor, "texts"]]:
    """Embeddings and package numbers of all docstrings in `PACKAGES`."""
    found = [(text, label) for label, package in enumerate(PACKAGES) for text in _first_paragraphs(package)]
    labels = dict(reversed(found))
    rows = normalize(hashed_ngrams(list(labels)), dim=1).double()
    rows -= rows.mean(0)
    values, directions = torch.linalg.eigh(rows.T @ rows)
    reduced = rows @ directions[:, values.argsort(descending=True)[:DIM]]
    return reduced.float(), torch.tensor(list(labels.values()))


def _first_paragraphs(package: str) -> Iterator[str]:
    """First paragraphs of six or more words, from the docstrings of all functions and classes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((root / package).rglob("*.py")) or [root / f"_py{package}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if len(text.split()) >= 6:
                    yield text


def _split(rows: Tensor, labels: Tensor, examples: int, classes: int) -> Task:
    rows = normalize(rows, dim=1)
    return Task(rows[:examples], labels[:examples], rows[examples:], labels[examples:], classes)
