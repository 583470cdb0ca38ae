"""Pools of examples with questions to them, for lab/quality/examples.py: embeddings of DIM numbers, and labels.

    skewed     drawn: six classes of very different size, each of three clusters; a quarter are near copies of others
    balanced   drawn: the same clusters, classes of equal size and no copies. Random choices should do as well here
    docstrings the first paragraphs of the standard library's docstrings; the label is the package. The embedding is
               that of foveate icl without a model, hashed words and letters, reduced to DIM numbers by an SVD

Drawn questions are drawn anew: none is a copy of an example. Docstrings that repeat are taken once.
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

from foveate.transformers.examples import hashed_ngrams

DIM = 32
QUESTIONS = 480
SHARES = {"skewed": (0.34, 0.24, 0.16, 0.12, 0.08, 0.06), "balanced": (1 / 6,) * 6}
CLUSTERS = 3  # of a class
SPREAD = 1.1  # length of what a drawn example differs by from the middle of its cluster, which has length 1
COPIES, COPIED = 0.25, 0.05  # how many of the skewed examples are near copies, and by what length they differ
PACKAGES = "asyncio", "decimal", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"
KINDS = (*SHARES, "docstrings")


class Task(NamedTuple):
    """A pool and questions to it. All embeddings have length 1."""

    embeddings: Float[Tensor, "examples dim"]
    labels: Int[Tensor, "examples"]
    queries: Float[Tensor, "questions dim"]
    answers: Int[Tensor, "questions"]
    classes: int


def draw(kind: str, examples: int, seed: int) -> Task:
    """The pool of so many examples that the seed draws, and its questions.

    Raises:
        ValueError: If there is no such kind, or there are too few docstrings.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind in SHARES:
        return mixture(generator, examples, SHARES[kind], COPIES if kind == "skewed" else 0.0)
    if kind != "docstrings":
        raise ValueError(f"unknown data {kind!r}: choose from {', '.join(KINDS)}")
    embeddings, labels = docstrings()
    if examples + QUESTIONS > len(labels):
        raise ValueError(f"there are {len(labels)} docstrings: draw {len(labels) - QUESTIONS} examples at most")
    drawn = torch.randperm(len(labels), generator=generator)[: examples + QUESTIONS]
    return _split(embeddings[drawn], labels[drawn], examples, len(PACKAGES))


def mixture(generator: torch.Generator, examples: int, shares: tuple[float, ...], copies: float) -> Task:
    """Clusters around random directions, `CLUSTERS` of each class; classes have these shares."""
    count = examples + QUESTIONS
    centres = normalize(torch.randn(len(shares) * CLUSTERS, DIM, generator=generator), dim=1)
    labels = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=generator)
    cluster = labels * CLUSTERS + torch.randint(CLUSTERS, (count,), generator=generator)
    rows = centres[cluster] + SPREAD * torch.randn(count, DIM, generator=generator) / DIM**0.5
    shuffled = torch.randperm(examples, generator=generator)
    copied, again = shuffled.split([examples - round(copies * examples), round(copies * examples)])
    source = copied[torch.randint(len(copied), (len(again),), generator=generator)]
    rows[again] = rows[source] + COPIED * torch.randn(len(again), DIM, generator=generator) / DIM**0.5
    labels[again] = labels[source]
    return _split(rows, labels, examples, len(shares))


@cache
def docstrings() -> tuple[Float[Tensor, "texts dim"], Int[Tensor, "texts"]]:
    """Embeddings and packages of all docstrings of `PACKAGES`."""
    found = [(text, label) for label, package in enumerate(PACKAGES) for text in _first_paragraphs(package)]
    labels = dict(reversed(found))
    rows = normalize(hashed_ngrams(list(labels)), dim=1).double()
    rows -= rows.mean(0)
    values, directions = torch.linalg.eigh(rows.T @ rows)
    reduced = rows @ directions[:, values.argsort(descending=True)[:DIM]]
    return reduced.float(), torch.tensor(list(labels.values()))


def _first_paragraphs(package: str) -> Iterator[str]:
    """Of the docstrings of all functions and classes, where they have six words at least."""
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
