"""Random texts of short facts about people, as tokens.

    Ada has id 17 .     17 plays the flute .     Bo keeps a goat .     The sky is clear .

A person has an id. Some facts name the person, others only the id, which an earlier fact defines. Answering "Question:
Ada plays the what? Answer:" therefore takes two sentences, which may be far apart.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foveate.apps.demo.lexicon import FILLERS, IDS, PERSON_NAMES, RELATIONS, TOKENS

__all__ = ["BLANK", "ID", "PHRASES", "SENTENCE", "VALUE", "Facts", "draw_facts", "word_ids"]

SENTENCE = 5  # tokens of a fact
PEOPLE = 8  # most people in a text
VALUE = 3  # index of the value in a sentence
BLANK = -1


def word_ids(*words: str) -> Int[Tensor, "words"]:
    """Token ids of words."""
    return torch.tensor([TOKENS[word] for word in words])


_VALUES = torch.stack([word_ids(*relation.values) for relation in RELATIONS])  # [relation, value]
ID = len(RELATIONS)  # the relation between a person and an id
PHRASES = torch.stack([*(word_ids(*relation.phrase) for relation in RELATIONS), word_ids("has", "id")])
"""Two words of each relation."""
_FILLERS = torch.stack([word_ids(*sentence) for sentence in FILLERS])


class Facts(NamedTuple):
    """A batch of texts with the same number of facts.

    Attributes:
        ids: Tokens of the texts.
        owner: Name of the person that each fact is about; BLANK for a filler sentence.
        subject: Name or id that the fact mentions.
        relation: Index of the relation; the last one is "has id".
        value: Value of the fact.
        defined: Index of the fact that defines the person's id.
    """

    ids: Int[Tensor, "batch tokens"]
    owner: Int[Tensor, "batch facts"]
    subject: Int[Tensor, "batch facts"]
    relation: Int[Tensor, "batch facts"]
    value: Int[Tensor, "batch facts"]
    defined: Int[Tensor, "batch facts"]

    @property
    def by_id(self) -> Bool[Tensor, "batch facts"]:
        """Whether each fact mentions the id instead of the name."""
        return self.subject != self.owner


def _distinct(batch: int, kinds: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, kinds, generator=generator).topk(count).indices


def draw_facts(
    batch: int,
    facts: int,
    generator: torch.Generator,
    *,
    people: tuple[int, int] = (2, PEOPLE),
    ids_first: float = 0.5,
    by_id: tuple[float, float] = (0.5, 1.0),
) -> Facts:
    """Random texts. Each has few relations, and states most of them for almost every person.

    Args:
        batch: Number of texts.
        facts: Sentences of each text.
        generator: Random generator on the CPU.
        people: Minimum and maximum number of people; at most a third of the sentences define ids.
        ids_first: Fraction of the texts that begin with all ids; in the others an id is defined before its use.
        by_id: Minimum and maximum fraction of a text's facts that mention the id after its definition.
    """
    most = max(2, min(people[1], facts // 3))

    def chance(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (batch, 1), generator=generator)

    names = _distinct(batch, len(PERSON_NAMES), most, generator) + TOKENS[PERSON_NAMES[0]]
    numbers = _distinct(batch, len(IDS), most, generator) + TOKENS[IDS[0]]
    several = whole(min(people[0], most), most)
    here = torch.arange(most) < several  # [batch, people]
    used = chance(len(RELATIONS)).argsort() < (facts - most + several - 1) // several + whole(0, 1)
    pairs = (chance(most, len(RELATIONS)) * here[..., None] * used[:, None]).flatten(1).topk(facts - most)

    # first the facts that define ids, one for each person, then the others
    person = torch.cat([torch.arange(most).expand(batch, -1), pairs.indices // len(RELATIONS)], 1)
    relation = torch.cat([torch.full((batch, most), ID), pairs.indices % len(RELATIONS)], 1)
    told = torch.cat([here, pairs.values > 0], 1)
    late = (torch.arange(facts) >= most) * (chance(1) < ids_first)
    order = (chance(facts) + late).argsort()
    place = order.argsort()[:, :most].gather(1, person.gather(1, order))  # fact that defines the id
    person, relation, told = (x.gather(1, order) for x in (person, relation, told))

    owner, number = names.gather(1, person), numbers.gather(1, person)
    low, high = by_id
    short = (chance(facts) < low + (high - low) * chance(1)) & (torch.arange(facts) > place) & (relation != ID)
    subject = torch.where(short, number, owner)
    drawn = torch.randint(_VALUES.shape[1], (batch, facts), generator=generator)
    value = torch.where(relation == ID, number, _VALUES[relation.clamp(max=ID - 1), drawn])
    full_stop = torch.full_like(value, TOKENS["."])
    text = torch.stack([subject, *PHRASES[relation].unbind(-1), value, full_stop], -1)
    idle = _FILLERS[torch.randint(len(_FILLERS), (batch, facts), generator=generator)]
    ids = torch.where(told[..., None], text, idle).flatten(1)
    owner, subject = (x.masked_fill(~told, BLANK) for x in (owner, subject))
    return Facts(ids, owner, subject, relation, value, place)
