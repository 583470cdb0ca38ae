"""Texts of short facts about people, and questions about them, as tokens and without end.

    Ada has id 17 .     17 plays the flute .     Bo keeps a goat .     The sky is clear .

A person has an id; some facts name the person, others only the id, which was told before. So it takes two sentences
to answer "Question: Ada plays the what? Answer:", which may stand far apart. A question may speak of a person by a
letter that stands for another letter and so on ("Let p be Ada. Let q be p."), and may use other words than the fact
("what is the instrument of Ada").
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foveate.demo.lexicon import FILLERS, IDS, LETTERS, NAMES, RELATIONS, WORDS

__all__ = ["BLANK", "SENTENCE", "Facts", "Questions", "ask", "draw_facts"]

SENTENCE = 5  # tokens of a fact
PEOPLE = 8  # of a text at most
VALUE = 3  # place of a fact's value in its sentence
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
    """Texts of as many facts each.

    Attributes:
        ids: Their tokens.
        owner: Name of the person that each fact is about; BLANK for a sentence that is about nobody.
        subject: Name or id that the fact says it of.
        relation: Which one, the last is that to the id.
        value: What it says.
        defined: The place of the fact that tells the person's id.
    """

    ids: Int[Tensor, "batch tokens"]
    owner: Int[Tensor, "batch facts"]
    subject: Int[Tensor, "batch facts"]
    relation: Int[Tensor, "batch facts"]
    value: Int[Tensor, "batch facts"]
    defined: Int[Tensor, "batch facts"]

    @property
    def by_id(self) -> Bool[Tensor, "batch facts"]:
        """Which facts do not name their person."""
        return self.subject != self.owner

    @property
    def owners(self) -> Int[Tensor, "batch tokens"]:
        """At the subject and the value of each fact its person's name, BLANK elsewhere."""
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
    """Texts, drawn at random; of few relations, so that of most of them something is told of almost everybody.

    Args:
        batch: How many.
        facts: Sentences of each.
        generator: Of all draws, on the CPU.
        people: Fewest and most of a text; a third of its sentences at most tells ids.
        ids_first: Part of the texts in which all ids are told before all else; elsewhere before they are used.
        by_id: Least and largest part of a text's facts that name an id, where it has been told.
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

    # first those that tell ids, one a person, then the others
    person = torch.cat([torch.arange(most).expand(batch, -1), pairs.indices // len(RELATIONS)], 1)
    relation = torch.cat([torch.full((batch, most), ID), pairs.indices % len(RELATIONS)], 1)
    told = torch.cat([here, pairs.values > 0], 1)
    late = (torch.arange(facts) >= most) * (chance(1) < ids_first)
    order = (chance(facts) + late).argsort()
    place = order.argsort()[:, :most].gather(1, person.gather(1, order))  # where the person's id is told
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
    """Questions with their answers and the end of the text behind them, then BLANK.

    Attributes:
        ids: Tokens.
        length: Tokens of the question alone.
        about: Name of the person that is asked about, BLANK if there is none.
    """

    ids: Int[Tensor, "*batch tokens"]
    length: Int[Tensor, "*batch"]
    about: Int[Tensor, "*batch"]

    @property
    def answers(self) -> Int[Tensor, "*batch tokens"]:
        """At the question's last token and at the answer what comes next, BLANK elsewhere."""
        place = torch.arange(self.ids.shape[-1]) - self.length[..., None]
        return self.ids.roll(-1, -1).masked_fill((place != -1) & (place != 0), BLANK)

    @property
    def owners(self) -> Int[Tensor, "*batch tokens"]:
        """At the question's last token whom it is about, BLANK elsewhere."""
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
    """Questions about some of the facts.

    Args:
        facts: The texts.
        places: Of the facts, in each text.
        generator: Of all draws, on the CPU.
        letters: Fewest and most letters that stand between the question and the name.
        nouns: Part of the questions with other words than the fact's.
        numbers: Part of the questions that name the person by id, where the fact does.
        begun: Part of the questions that are no questions but a sentence to be completed.
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
