"""Questions about the reader's texts, as tokens.

A question may refer to a person by a chain of letters ("Let p be Ada. Let q be p."), and may use different words from
the fact ("what is the instrument of Ada").
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.apps.demo.facts import BLANK, PHRASES, Facts, word_ids
from foveate.apps.demo.lexicon import LETTERS, RELATIONS, TOKENS

__all__ = ["QuestionTokens", "ask"]

NOUNS = word_ids(*(relation.noun for relation in RELATIONS), "id")


class QuestionTokens(NamedTuple):
    """Questions, each followed by its answer, the end-of-text token, and BLANK as padding.

    Attributes:
        ids: Tokens of question and answer.
        length: Number of tokens of the question.
        about: Name of the person in question, or BLANK.
    """

    ids: Int[Tensor, "*batch tokens"]
    length: Int[Tensor, "*batch"]
    about: Int[Tensor, "*batch"]

    @property
    def answers(self) -> Int[Tensor, "*batch tokens"]:
        """Next token at the last token of the question and at the answer, BLANK elsewhere."""
        place = torch.arange(self.ids.shape[-1]) - self.length[..., None]
        return self.ids.roll(-1, -1).masked_fill((place != -1) & (place != 0), BLANK)

    @property
    def owners(self) -> Int[Tensor, "*batch tokens"]:
        """Name of the person at the last token of the question, BLANK elsewhere."""
        last = torch.arange(self.ids.shape[-1]) == self.length[..., None] - 1
        return torch.where(last, self.about[..., None], BLANK)


def ask(
    facts: Facts,
    places: Int[Tensor, "batch questions"],
    generator: torch.Generator,
    *,
    letters: tuple[int, int] = (0, 0),
    nouns: float = 0.0,
    numbers: float = 0.0,
    begun: float = 0.0,
) -> QuestionTokens:
    """Questions about facts.

    Args:
        facts: The texts.
        places: Indices of the facts to ask about, in each text.
        generator: Random generator on the CPU.
        letters: Minimum and maximum length of the chain of letters between the question and the name.
        nouns: Fraction of the questions that use different words from the fact.
        numbers: Fraction of the questions that mention the id, if the fact does.
        begun: Fraction of the questions replaced by the beginning of a sentence.
    """
    shape = places.shape
    owner, subject, relation, value = (x.gather(1, places) for x in facts[1:5])
    who = torch.where(torch.rand(shape, generator=generator) < numbers, subject, owner)
    spare = torch.rand(*shape, len(LETTERS), generator=generator).argsort(-1)[..., : letters[1]] + TOKENS[LETTERS[0]]
    chain = torch.cat([who[..., None], spare], -1)  # each refers to the previous one
    links = torch.randint(letters[0], letters[1] + 1, shape, generator=generator)
    parts = []
    for link in range(letters[1]):
        define = [TOKENS["Let"], chain[..., link + 1], TOKENS["be"], chain[..., link], TOKENS["."]]
        parts += [torch.where(links > link, torch.as_tensor(token), BLANK) for token in define]
    who = chain.gather(-1, links[..., None])[..., 0]
    verb, link = PHRASES[relation].unbind(-1)
    verbs = ["Question", ":", who, verb, link, "what", "?", "Answer", ":"]
    other = ["Question", ":", "what", "is", "the", NOUNS[relation], "of", who, "?", "Answer", ":"]
    begins, others = (torch.rand(shape, generator=generator) < part for part in (begun, nouns))
    for form, chosen in ((verbs, ~begins & ~others), (other, ~begins & others), ([who, verb, link], begins)):
        if chosen.any():
            tokens = (TOKENS[token] if isinstance(token, str) else token for token in form)
            parts += [torch.where(chosen, torch.as_tensor(token), BLANK) for token in tokens]
    parts += [value, torch.full(shape, TOKENS["</s>"])]
    ids = torch.stack(parts, -1)
    length = (ids != BLANK).sum(-1) - 2
    ids = ids.gather(-1, (ids == BLANK).long().argsort(dim=-1, stable=True))
    return QuestionTokens(ids[..., : int(length.max()) + 2], length, owner)
