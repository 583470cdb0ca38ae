"""Questions about long texts, for lab/quality/pretrained.py: generated facts in documentation, and news articles.

    single fact     one fact, whole in one chunk
    cut fact        a fact that ends in the chunk after the one in which it begins
    two hops        a fact whose subject is named only by another fact, in an earlier chunk
    many needles    one of eight facts of the same form, as in RULER's multi-key retrieval
    news            a name or number of the first sentence of one of several articles

The first four are about one text: paragraphs of the Python and Debian documentation on this machine, with the facts
between them. Prompts end where the answer begins. Everything but these texts is the same on every machine.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import ceil
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from foveate.utils.files import write_whole
from lab.quality.pretrained_models import bbc_articles

__all__ = ["KINDS", "Question", "Text", "digest", "documentation", "draw_news", "draw_text"]

KINDS = "single fact", "cut fact", "two hops", "many needles", "news"
NEEDLES = 8
CLASSES = 5  # of articles
TOKENS_OF_FIVE = 8192  # longest text of five articles
PLACES = "harbour", "quarry", "library", "orchard", "bakery", "foundry", "theatre", "observatory"
THINGS = "ledger", "compass", "telescope", "violin", "lantern", "crown", "anchor", "clock"
NAMES = "Anna Weber", "Boris Klein", "Clara Novak", "David Moreau", "Elena Rossi", "Felix Brandt", "Greta Olsen"
WORDS = "apple", "river", "candle", "window", "garden", "mirror", "ticket", "blanket", "hammer", "feather", "kettle"
WORDS_OF_A_PARAGRAPH = 25, 120

Length = Callable[[str], int]


class Question(NamedTuple):
    """A question about a text.

    Attributes:
        kind: One of `KINDS`.
        prompt: Text after the context, up to the answer.
        answer: The right continuation, with the space before it.
    """

    kind: str
    prompt: str
    answer: str


class Text(NamedTuple):
    """A text in chunks, and questions about it."""

    chunks: list[str]
    questions: list[Question]


def documentation(folder: Path) -> list[str]:
    """Paragraphs of prose in the topics of Python's help and in Debian's README files and licences.

    They are kept in a file in the folder, so that a run that continues elsewhere has the same texts.
    """
    kept = folder / "documentation.json"
    if kept.exists():
        return json.loads(kept.read_text())
    files = sorted(file for file in Path("/usr/share/doc").glob("*/README*") if file.suffix in ("", ".Debian", ".md"))
    files += sorted(Path("/usr/share/common-licenses").glob("*"))
    texts = [*topics.values(), *(file.read_text(errors="replace") for file in files if file.is_file())]
    paragraphs = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    found = [part for part in dict.fromkeys(paragraphs) if _is_prose(part)]
    write_whole(kept, json.dumps(found).encode())
    return found


def digest(paragraphs: list[str]) -> str:
    """Hash of all paragraphs and articles that questions may be made of."""
    parts = [*paragraphs, *(article for articles in bbc_articles().values() for article in articles)]
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def draw_text(number: int, paragraphs: list[str], tokens: int, chunk: int, length: Length) -> Text:
    """Chunks of documentation with facts in them, and one question of each of the first four kinds.

    Args:
        number: Seed of the draw.
        paragraphs: Running text into which the facts are put.
        tokens: Length of the text, in tokens.
        chunk: Length of a chunk, in tokens; the last sentence may exceed it.
        length: Number of tokens of a text.
    """
    draw = random.Random(number)
    mixed = iter(draw.sample(paragraphs, len(paragraphs)))
    chunks = [_filled(mixed, chunk, length) for _ in range(tokens // chunk)]
    place, thing, words = draw.choice(PLACES), draw.choice(THINGS), draw.sample(WORDS, NEEDLES)
    keeper, other = draw.sample(NAMES, 2)
    old = f"the old {place}"
    numbers = [str(number) for number in draw.sample(range(1000, 10000), NEEDLES + 3)]
    code, locker, phone, *magic = numbers
    # the first chunk is exact without recomputation: no answer is in it
    early, late = sorted(draw.sample(range(1, len(chunks)), 2))
    facts: list[tuple[int, str]] = [
        (draw.randrange(1, len(chunks)), f"The access code of {old} is {code}."),
        (early, f"The {thing} was lent to {keeper}."),
        (late, f"The telephone number of {keeper} is {phone}."),
        (draw.randrange(1, len(chunks)), f"The telephone number of {other} is {draw.randrange(1000, 10000)}."),
    ]
    facts += [
        (draw.randrange(1, len(chunks)), f"The magic number of the {word} is {value}.")
        for word, value in zip(words, magic, strict=True)
    ]
    for where, fact in facts:
        sentences = chunks[where]
        sentences.insert(draw.randrange(1, len(sentences)), fact)
    cut = draw.randrange(1, len(chunks) - 1)
    chunks[cut].append("The number of the green locker is")
    chunks[cut + 1].insert(0, f"{locker}.")
    texts = [f"{' '.join(sentences)} " for sentences in chunks]
    texts[cut] = texts[cut].removesuffix(" ")
    texts[cut + 1] = " " + texts[cut + 1]
    which = draw.randrange(NEEDLES)
    asked = [
        (
            "single fact",
            f"What is the access code of the old {place}?",
            f"The access code of the old {place} is",
            code,
        ),
        ("cut fact", "What is the number of the green locker?", "The number of the green locker is", locker),
        (
            "two hops",
            f"What is the telephone number of the person to whom the {thing} was lent?",
            f"The telephone number of the person to whom the {thing} was lent is",
            phone,
        ),
        (
            "many needles",
            f"What is the magic number of the {words[which]}?",
            f"The magic number of the {words[which]} is",
            magic[which],
        ),
    ]
    return Text(texts, [Question(kind, _prompt(text, begin), f" {answer}") for kind, text, begin, answer in asked])


def draw_news(number: int, tokens: int, length: Length) -> Text:
    """News articles of all five classes, each in its own chunk, and four questions about how some of them begin.

    No question is about the first article. A text of up to 8,192 tokens has one article of each class, a longer one
    has one more of each for every further 8,192 tokens. Articles are cut after a sentence, so that together they have
    about `tokens` tokens.
    """
    draw = random.Random(number)
    chunks: list[str] = []
    questions: list[Question] = []
    each = ceil(tokens / TOKENS_OF_FIVE)
    limit = tokens // (each * CLASSES)
    for articles in draw.sample(list(bbc_articles().values()), CLASSES) * each:
        for article in draw.sample(articles, len(articles)):
            headline, _, body = article.partition("\n")
            sentences = _sentences(" ".join(body.split()))
            found = _names_and_numbers(sentences[0])
            new = not any(chunk.startswith(f"{headline}\n") for chunk in chunks)
            if new and found and length(" ".join(sentences)) > limit // 2:
                break
        else:
            raise ValueError(f"no article of a class has {limit // 2} tokens: use shorter texts")
        text = f"{headline}\n"
        for sentence in sentences:
            if length(text + sentence) > limit:
                break
            text += sentence + " "
        chunks.append(text + "\n\n")
        start, stop = draw.choice(found)
        prompt = _prompt(f"How does the article '{headline}' begin?", sentences[0][:start].rstrip())
        questions.append(Question("news", prompt, f" {sentences[0][start:stop]}"))
    return Text(chunks, questions[each::each])


def _prompt(question: str, begin: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer: {begin}"


def _filled(paragraphs: Iterator[str], tokens: int, length: Length) -> list[str]:
    """Sentences of about so many tokens, at least two."""
    sentences: list[str] = []
    for paragraph in paragraphs:
        for sentence in _sentences(paragraph):
            if len(sentences) >= 2 and length(" ".join([*sentences, sentence])) > tokens:
                return sentences
            sentences.append(sentence)
    raise ValueError(f"there is too little documentation on this machine for chunks of {tokens} tokens")


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) (?=[A-Z\"])", text)


def _names_and_numbers(sentence: str) -> list[tuple[int, int]]:
    """Places of numbers and of names of two words, after at least eight other words."""
    found = re.finditer(r"\b[A-Z][a-z]+ [A-Z][a-z]+\b|\b\d[\d,.]*\d\b", sentence)
    return [place.span() for place in found if len(sentence[: place.start()].split()) >= 8]


def _is_prose(text: str) -> bool:
    low, high = WORDS_OF_A_PARAGRAPH
    letters = sum(char.isalpha() or char in " ,." for char in text)
    return low <= len(text.split()) <= high and letters > 0.93 * len(text) and text[0].isupper() and text[-1] == "."
