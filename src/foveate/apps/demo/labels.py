"""Random texts of labelled examples, and inputs with a label to predict, as tokens.

    goat tiger hen -> sigma .     flute harp lute -> beta .     horse cow crow -> sigma .

The words of an example are of one kind; every text assigns labels to kinds anew.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.apps.demo.facts import BLANK, word_ids
from foveate.apps.demo.lexicon import LABELS, RELATIONS, TOKENS

__all__ = ["EXAMPLE", "INPUT", "Labelled", "draw_labelled"]

INPUT = 3  # words of an example
EXAMPLE = INPUT + 3  # tokens of an example: words, arrow, label, full stop

_KINDS = torch.stack([word_ids(*relation.values) for relation in RELATIONS])


class Labelled(NamedTuple):
    """A batch of texts with the same number of examples, and questions about them.

    Attributes:
        ids: Tokens of the texts.
        labels: The label at the arrow of every example of an earlier kind, BLANK elsewhere.
        questions: Inputs of kinds that occur in the text, each with the arrow, its label and the end-of-text token.
    """

    ids: Int[Tensor, "batch tokens"]
    labels: Int[Tensor, "batch tokens"]
    questions: Int[Tensor, "batch questions tokens"]


def draw_labelled(
    batch: int, examples: int, questions: int, generator: torch.Generator, kinds: tuple[int, int] = (2, 6)
) -> Labelled:
    """Random texts of labelled examples.

    Args:
        batch: Number of texts.
        examples: Examples of each text.
        questions: Questions about each text.
        generator: Random generator on the CPU.
        kinds: Minimum and maximum number of kinds, each with one label.
    """

    def distinct(number: int) -> Tensor:
        return torch.rand(batch, number, generator=generator).argsort()

    sort = distinct(len(RELATIONS))
    label = distinct(len(LABELS)) + TOKENS[LABELS[0]]
    several = torch.randint(kinds[0], kinds[1] + 1, (batch, 1), generator=generator)
    kind = (torch.rand(batch, examples, generator=generator) * several).long()
    wanted = kind.gather(1, torch.randint(examples, (batch, questions), generator=generator))
    every = torch.cat([kind, wanted], 1)
    words = torch.rand(*every.shape, _KINDS.shape[1], generator=generator).topk(INPUT).indices
    words = _KINDS[sort.gather(1, every)[..., None], words]
    name = label.gather(1, every)

    def text(*last: str) -> Tensor:
        ends = [torch.full_like(name, TOKENS[word]) for word in last]
        return torch.cat([words, torch.stack([ends[0], name, *ends[1:]], -1)], -1)

    known = (kind[:, :, None] == kind[:, None]).tril(-1).any(-1)
    labels = torch.full((batch, examples, EXAMPLE), BLANK)
    labels[..., INPUT] = name[:, :examples].masked_fill(~known, BLANK)
    told, asked = text("->", ".")[:, :examples], text("->", "</s>")[:, examples:]
    return Labelled(told.flatten(1), labels.flatten(1), asked)
