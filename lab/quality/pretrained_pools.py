"""Pools of labelled texts with questions, for lab/quality/pretrained_examples.py.

news        headline and first words of BBC News articles, in five classes
questions   made of templates: what kind of answer a question asks for, six classes, as in TREC
reviews     made of templates: positive or negative, half of them with a word of the other kind, as in SST
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lab.quality.pretrained_models import bbc_articles, minilm

__all__ = ["DATA", "Pool", "draw_pool", "embedded", "labelled"]

DATA = "news", "questions", "reviews"
WORDS = 30  # of an article

THINGS = (
    "telescope", "violin", "bridge", "vaccine", "engine", "novel", "painting", "satellite", "compiler", "kite",
    "tunnel", "microscope", "piano", "ferry", "dictionary", "statue", "battery", "loom", "lighthouse", "calendar",
)  # fmt: skip
PLACES = "Norway", "Lisbon", "the Alps", "Kenya", "Osaka", "the Baltic coast", "Peru", "Vienna", "Cairo", "Wales"
PEOPLE = "Ada Brown", "Ivan Petrov", "Maria Silva", "Tom Becker", "Lena Fischer", "Omar Haddad", "Julia Moreau"
QUESTIONS = {
    "person": ("Who invented the {thing}?", "Who made the first {thing} of {place}?", "Which poet moved to {place}?"),
    "location": (
        "Where was {person} born?",
        "What city has the {thing} of {person}?",
        "Which country is near {place}?",
    ),
    "number": (
        "How many people live in {place}?",
        "What did the {thing} of {person} cost?",
        "How old is the {thing}?",
    ),
    "date": ("When did {person} visit {place}?", "What year was the {thing} built?", "On which day did {person} go?"),
    "description": ("What is a {thing}?", "Why did {person} leave {place}?", "How does a {thing} work?"),
    "abbreviation": ("What does the short form of {thing} stand for?", "What is the acronym of {place}?"),
}
GOOD = "moving", "clever", "funny", "gripping", "graceful", "fresh", "wonderful", "sharp", "warm"
BAD = "dull", "clumsy", "tired", "shallow", "noisy", "bland", "tedious", "weak", "cold"
PARTS = "plot", "acting", "music", "script", "ending", "dialogue", "camera work", "first half"
REVIEWS = (
    "The {part} is {word}.",
    "A {word} film with a {word2} {part}.",
    "I found the {part} {word} and the rest {word2}.",
)
OTHERS = " Only the {part2} felt {other}.", " Some will call the {part2} {other}.", ""


class Pool(NamedTuple):
    """Labelled texts to choose examples from, and labelled texts to ask about. All embeddings have length 1."""

    texts: list[str]
    labels: list[str]
    embeddings: Float[Tensor, "examples dim"]
    questions: list[str]
    answers: list[str]
    queries: Float[Tensor, "questions dim"]


def labelled(data: str) -> dict[str, str]:
    """Label of each text; a text that would occur twice does so once.

    Raises:
        ValueError: If the data set is unknown.
    """
    draw = random.Random(0)
    if data == "news":
        articles = bbc_articles().items()
        return {" ".join(text.split()[:WORDS]): label for label, texts in articles for text in texts}
    if data == "questions":
        fill = {"thing": THINGS, "place": PLACES, "person": PEOPLE}
        kinds = draw.choices(list(QUESTIONS), weights=(30, 25, 20, 12, 9, 4), k=4000)
        return {_filled(draw, draw.choice(QUESTIONS[kind]), fill): kind for kind in kinds}
    if data == "reviews":
        made: dict[str, str] = {}
        for label in draw.choices(("positive", "negative"), weights=(2, 1), k=3000):
            own, others = (GOOD, BAD) if label == "positive" else (BAD, GOOD)
            fill = {"word": own, "word2": own, "other": others, "part": PARTS, "part2": PARTS}
            made[_filled(draw, draw.choice(REVIEWS) + draw.choice(OTHERS), fill)] = label
        return made
    raise ValueError(f"unknown data {data!r}: choose from {', '.join(DATA)}")


def _filled(draw: random.Random, template: str, fill: Mapping[str, tuple[str, ...]]) -> str:
    return template.format(**{name: draw.choice(words) for name, words in fill.items()})


def draw_pool(
    texts: dict[str, str], embeddings: Float[Tensor, "texts dim"], examples: int, questions: int, seed: int
) -> Pool:
    """A random pool, and questions that are not in it.

    Raises:
        ValueError: If there are too few texts.
    """
    if examples + questions > len(texts):
        raise ValueError(f"there are {len(texts)} texts, fewer than {examples} examples and {questions} questions")
    drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    every = list(texts)
    ours, asked = drawn[:examples], drawn[examples : examples + questions]
    chosen, others = ([every[i] for i in some] for some in (ours, asked))
    answers = [texts[text] for text in others]
    return Pool(chosen, [texts[text] for text in chosen], embeddings[ours], others, answers, embeddings[asked])


def embedded(data: str) -> Float[Tensor, "texts dim"]:
    """Embeddings of all texts of a data set."""
    return minilm(list(labelled(data)))
