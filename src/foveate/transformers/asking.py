"""Questions to a causal language model that has read blocks of examples, as text."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from foveate.transformers.in_context import Context, concatenate, ensemble, parallel_windows

__all__ = ["Asked", "read_examples"]

Weights = Float[Tensor, "blocks"] | None
Mix = Literal["moe", "poe", "max"]


class Asked(NamedTuple):
    """What has read the examples, and how it is asked.

    Attributes:
        tokenizer: Of the model.
        contexts: One for each block in an ensemble, else one.
    """

    tokenizer: Any
    contexts: list[Context]

    def choose(
        self, question: str, answers: Sequence[str], weights: Weights = None, mix: Mix = "moe"
    ) -> Float[Tensor, "answers"]:
        """Probabilities of the answers, in all 1. Weights and mix are those of `ensemble`; with one context idle."""
        asked = _ids(self.tokenizer, question)
        told = [_ids(self.tokenizer, question + answer) for answer in answers]
        ends = [  # where a tokenizer joins the question's end with the answer's beginning, each is read by itself
            both[len(asked) :] if both[: len(asked)] == asked else _ids(self.tokenizer, answer)
            for both, answer in zip(told, answers, strict=True)
        ]
        return ensemble([context.score(asked, ends) for context in self.contexts], self._weights(weights), mix)

    def write(self, question: str, most: int, weights: Weights = None, mix: Mix = "moe") -> str:
        """The answer, token by token the most probable one: so many tokens, or as far as the end of the line."""
        asked, said = _ids(self.tokenizer, question), list[int]()
        theirs: Any = getattr(self.contexts[0].model.generation_config, "eos_token_id", None)
        ends = {self.tokenizer.eos_token_id, *(theirs if isinstance(theirs, list) else [theirs])}
        while len(said) < most:
            text = torch.tensor([[*asked, *said]])
            scores = [context.logits(text)[0, -1].float().log_softmax(-1) for context in self.contexts]
            token = int(ensemble(scores, self._weights(weights), mix).argmax())
            if token in ends:
                break
            said.append(token)
            if "\n" in self.tokenizer.decode(said).lstrip("\n"):
                break
        return self.tokenizer.decode(said, skip_special_tokens=True).strip()

    def _weights(self, weights: Weights) -> Weights:
        return weights if len(self.contexts) > 1 else None


def read_examples(model: PreTrainedModel, tokenizer: Any, blocks: Sequence[Sequence[str]], host: str) -> Asked:
    """The model after reading blocks of texts by a host: all as one text, each alone, or side by side.

    Raises:
        ValueError: If the host is unknown, or the model cannot read them.
    """
    tokens = [[_ids(tokenizer, text) for text in block] for block in blocks]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if host == "concatenate":
        return Asked(tokenizer, [concatenate(model, tokens, start)])
    if host == "parallel_windows":
        return Asked(tokenizer, [parallel_windows(model, tokens, start)])
    if host == "ensemble":
        return Asked(tokenizer, [concatenate(model, [block], start) for block in tokens])
    raise ValueError(f"unknown host {host!r}: choose one of concatenate, ensemble, parallel_windows")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
