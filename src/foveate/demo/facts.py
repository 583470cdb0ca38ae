"""Random texts of short facts about people, and questions about them, as tokens.

    Ada has id 17 .     17 plays the flute .     Bo keeps a goat .     The sky is clear .

A person has an id. Some facts name the person, others only the id, which an earlier fact defines. Answering "Question:
Ada plays the what? Answer:" therefore takes two sentences, which may be far apart. A question may refer to a person by
a chain of letters ("Let p be Ada. Let q be p."), and may use other words than the fact ("what is the instrument of
Ada").
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foveate.demo.lexicon import FILLERS, IDS, LETTERS, NAMES, RELATIONS, WORDS

__all__ = ["BLANK", "SENTENCE", "Facts", "Questions", "ask", "draw_facts"]

SENTENCE = 5  # tokens of a fact
PEOPLE = 8  # most people in a text
VALUE = 3  # index of the value in a sentence
BLANK = -1

_TOKENS = {word: i for i, word in enumerate(WORDS)}


def _tokens(*words: str) -> Tensor:
    return torch.tensor([_TOKENS[word] for word in words])


_VALUES = torch.stack([_tokens(*relation.values) for relation in RELATIONS])  # [relation, value]
ID = len(RELATIONS)  # the relation between a person and an id
_PHRASES = torch.stack([*(_tokens(*relation.phrase) for relation in RELATIONS), _tokens("has", "id")])
_NOUNS = _tokens(*(relation.noun for relation in RELATIONS), "id")
_FILLERS = torch.stack([_tokens(*sentence) for sentence in FILLERS])


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
        """Which facts mention the id instead of the name."""
        return self.subject != self.owner

    @property
    def owners(self) -> Int[Tensor, "batch tokens"]:
        """The person's name at the subject and at the value of each fact, BLANK elsewhere."""
        spread = torch.full((*self.owner.shape, SENTENCE), BLANK)
        spread[..., [0, VALUE]] = self.owner[..., None]
        return spread.flatten(1)


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
    """Random texts. Each uses few relations, so that a text states most of them for almost every person.

    Args:
        batch: Number of texts.
        facts: Sentences of each text.
        generator: Random generator on the CPU.
        people: Minimum and maximum number of people; at most a third of the sentences define ids.
        ids_first: Fraction of the texts that begin with all ids; in the others an id is defined before its use.
        by_id: Minimum and maximum fraction of the facts of a text that mention the id, once it is defined.
    """
    most = max(2, min(people[1], facts // 3))

    def chance(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (batch, 1), generator=generator)

    names = _distinct(batch, len(NAMES), most, generator) + _TOKENS[NAMES[0]]
    numbers = _distinct(batch, len(IDS), most, generator) + _TOKENS[IDS[0]]
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
    full_stop = torch.full_like(value, _TOKENS["."])
    text = torch.stack([subject, *_PHRASES[relation].unbind(-1), value, full_stop], -1)
    idle = _FILLERS[torch.randint(len(_FILLERS), (batch, facts), generator=generator)]
    ids = torch.where(told[..., None], text, idle).flatten(1)
    owner, subject = (x.masked_fill(~told, BLANK) for x in (owner, subject))
    return Facts(ids, owner, subject, relation, value, place)


class Questions(NamedTuple):
    """Questions, each followed by its answer, the end-of-text token, and BLANK as padding.

    Attributes:
        ids: Tokens of question and answer.
        length: Number of tokens of the question.
        about: Name of the person in question, BLANK if there is none.
    """

    ids: Int[Tensor, "*batch tokens"]
    length: Int[Tensor, "*batch"]
    about: Int[Tensor, "*batch"]

    @property
    def answers(self) -> Int[Tensor, "*batch tokens"]:
        """The next token at the last token of the question and at the answer, BLANK elsewhere."""
        place = torch.arange(self.ids.shape[-1]) - self.length[..., None]
        return self.ids.roll(-1, -1).masked_fill((place != -1) & (place != 0), BLANK)

    @property
    def owners(self) -> Int[Tensor, "*batch tokens"]:
        """The person's name at the last token of the question, BLANK elsewhere."""
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
) -> Questions:
    """Questions about facts.

    Args:
        facts: The texts.
        places: Indices of the facts to ask about, in each text.
        generator: Random generator on the CPU.
        letters: Minimum and maximum length of the chain of letters between the question and the name.
        nouns: Fraction of the questions that use other words than the fact.
        numbers: Fraction of the questions that mention the id, if the fact does.
        begun: Fraction of the questions that are instead the beginning of a sentence.
    """
    shape = places.shape
    owner, subject, relation, value = (x.gather(1, places) for x in facts[1:5])
    who = torch.where(torch.rand(shape, generator=generator) < numbers, subject, owner)
    spare = torch.rand(*shape, len(LETTERS), generator=generator).argsort(-1)[..., : letters[1]] + _TOKENS[LETTERS[0]]
    chain = torch.cat([who[..., None], spare], -1)  # each stands for the one before it
    links = torch.randint(letters[0], letters[1] + 1, shape, generator=generator)
    parts = []
    for link in range(letters[1]):
        define = [_TOKENS["Let"], chain[..., link + 1], _TOKENS["be"], chain[..., link], _TOKENS["."]]
        parts += [torch.where(links > link, torch.as_tensor(token), BLANK) for token in define]
    who = chain.gather(-1, links[..., None])[..., 0]
    verb, link = _PHRASES[relation].unbind(-1)
    verbs = ["Question", ":", who, verb, link, "what", "?", "Answer", ":"]
    other = ["Question", ":", "what", "is", "the", _NOUNS[relation], "of", who, "?", "Answer", ":"]
    begins, others = (torch.rand(shape, generator=generator) < part for part in (begun, nouns))
    for form, chosen in ((verbs, ~begins & ~others), (other, ~begins & others), ([who, verb, link], begins)):
        if chosen.any():
            tokens = (_TOKENS[token] if isinstance(token, str) else token for token in form)
            parts += [torch.where(chosen, torch.as_tensor(token), BLANK) for token in tokens]
    parts += [value, torch.full(shape, _TOKENS["</s>"])]
    ids = torch.stack(parts, -1)
    length = (ids != BLANK).sum(-1) - 2
    ids = ids.gather(-1, (ids == BLANK).long().argsort(dim=-1, stable=True))
    return Questions(ids[..., : int(length.max()) + 2], length, owner)
