# pyright: basic, reportPrivateImportUsage=false
"""The vocabulary of the built-in reader, and its tokenizer, in which every word is a token."""

from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from foveate.apps.demo import find

__all__ = [
    "FILLERS",
    "IDS",
    "LABELS",
    "LETTERS",
    "PERSON_NAMES",
    "RELATIONS",
    "TOKENS",
    "WORDS",
    "Relation",
    "reader_tokenizer",
]


class Relation(NamedTuple):
    """A relation between a person and a value.

    Attributes:
        noun: Noun for the relation in a question.
        phrase: Two words for the relation in a fact.
        values: Possible values.
    """

    noun: str
    phrase: list[str]
    values: list[str]


def _read() -> tuple[list[str], list[Relation]]:
    """Person names and relations from words.txt, with lines "noun, two words: values"."""
    people, *others = (line.split(": ") for line in find("words.txt").read_text("utf-8").splitlines())
    said = [(about.split(", "), values.split()) for about, values in others]
    return people[1].split(), [Relation(noun, phrase.split(), values) for (noun, phrase), values in said]


PERSON_NAMES, RELATIONS = _read()
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
"""Filler sentences, as long as a fact."""

SPECIAL = ["<s>", "</s>", "<unk>"]
ASKING = ["has", "id", "Let", "be", "Question", ":", "what", "is", "the", "of", "?", "Answer", "->", "."]
_ALL = [SPECIAL, ASKING, PERSON_NAMES, IDS, LABELS, LETTERS, *FILLERS]
_ALL += [[relation.noun, *relation.phrase, *relation.values] for relation in RELATIONS]
WORDS = list(dict.fromkeys(word for words in _ALL for word in words))
"""The whole vocabulary; the index of a word is its token id."""
TOKENS = {word: i for i, word in enumerate(WORDS)}
"""Token id of each word."""


def reader_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: a token for each word or punctuation mark, `<unk>` for unknown words, `<s>` at the beginning."""
    words = Tokenizer(models.WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
