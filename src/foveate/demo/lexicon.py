# pyright: basic, reportPrivateImportUsage=false
"""The words that the built-in reader knows, and its tokenizer: every word is a token."""

from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from foveate.demo import DATA

__all__ = ["FILLERS", "IDS", "LABELS", "LETTERS", "NAMES", "RELATIONS", "WORDS", "Relation", "reader_tokenizer"]


class Relation(NamedTuple):
    """What can be said of a person.

    Attributes:
        noun: What a question may call it.
        phrase: The two words that a fact says it with.
        values: What it may be.
    """

    noun: str
    phrase: list[str]
    values: list[str]


def _read() -> tuple[list[str], list[Relation]]:
    """The people, and what can be said of them: "noun, two words: values"."""
    people, *others = (line.split(": ") for line in (DATA / "words.txt").read_text("utf-8").splitlines())
    said = [(about.split(", "), values.split()) for about, values in others]
    return people[1].split(), [Relation(noun, phrase.split(), values) for (noun, phrase), values in said]


NAMES, RELATIONS = _read()
IDS = [str(number) for number in range(10, 100)]
LETTERS = ["p", "q", "r", "s", "t", "u", "v", "w"]
LABELS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "sigma"]
FILLERS = [
    ["The", "sky", "is", "clear", "."],
    ["It", "rains", "all", "day", "."],
    ["The", "road", "is", "long", "."],
    ["Nobody", "knows", "the", "way", "."],
    ["The", "shop", "is", "closed", "."],
    ["Snow", "fell", "last", "night", "."],
    ["The", "river", "runs", "slowly", "."],
    ["Everybody", "went", "to", "sleep", "."],
]
"""Sentences that nobody asks about, as long as a fact."""

SPECIAL = ["<s>", "</s>", "<unk>"]
ASKING = ["has", "id", "Let", "be", "Question", ":", "what", "is", "the", "of", "?", "Answer", "->", "."]
_ALL = [SPECIAL, ASKING, NAMES, IDS, LABELS, LETTERS, *FILLERS]
_ALL += [[relation.noun, *relation.phrase, *relation.values] for relation in RELATIONS]
WORDS = list(dict.fromkeys(word for words in _ALL for word in words))
"""All of them; a word's place is its token."""


def reader_tokenizer() -> PreTrainedTokenizerFast:
    """Words and marks, one token each; words that are not known are all the same. Texts begin with `<s>`."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
