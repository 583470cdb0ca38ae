"""How a causal language model uses blocks of examples: as one text, as an ensemble, or in parallel windows.

A block is a list of examples, an example a list of token ids. The examples are read once into a `Context`; questions
are asked of it as often as one likes.

    one text          concatenate(model, blocks)
    ensemble          ensemble([concatenate(model, [block]).score(...) for block in blocks], weights)
    parallel windows  parallel_windows(model, blocks)

The ensemble is that of DENSE (arXiv 2308.08780), the windows are those of PCW (arXiv 2212.10947); both are written
from descriptions.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import chain
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

__all__ = ["Context", "concatenate", "ensemble", "parallel_windows"]

Block = Sequence[Sequence[int]]


class Context(NamedTuple):
    """What a model has read.

    Attributes:
        model: That has read it.
        layers: Keys and values of each layer, [1, heads, tokens, head_dim].
        position: Of the token that comes next.
    """

    model: PreTrainedModel
    layers: list[tuple[Tensor, Tensor]]
    position: int

    @torch.no_grad()
    def logits(self, text: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocabulary"]:
        """Logits of the token behind each token of a text that goes on after the context, which stays as it is.

        Raises:
            ValueError: If that is more than the model's context holds.
        """
        batch, tokens = text.shape
        _check_length(self.model, self.position + tokens)
        cache = DynamicCache([tuple(x.expand(batch, -1, -1, -1) for x in layer) for layer in self.layers])
        seen = self.layers[0][0].shape[2] if self.layers else 0
        return self.model(
            text.to(self.model.device),
            attention_mask=torch.ones(batch, seen + tokens, dtype=torch.long, device=self.model.device),
            position_ids=torch.arange(self.position, self.position + tokens, device=self.model.device)[None],
            past_key_values=cache,
        ).logits

    def score(self, question: Sequence[int], answers: Sequence[Sequence[int]]) -> Float[Tensor, "answers"]:
        """Log-probabilities of answers to a question, as if there were no others: their exponentials sum to 1.

        Args:
            question: Token ids.
            answers: Token ids of each; of several tokens the probabilities are multiplied.

        Raises:
            ValueError: If the question or an answer has no tokens.
        """
        if not question or not answers or not all(answers):
            raise ValueError("a question and each of its answers need one token at least: give their token ids")
        longest = max(map(len, answers))
        padded = [[*question, *answer] + [0] * (longest - len(answer)) for answer in answers]
        logits = self.logits(torch.tensor(padded))
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision cannot tell answers apart
        said = logits.to(wide).log_softmax(-1)
        scores = [
            said[index, range(len(question) - 1, len(question) - 1 + len(answer)), list(answer)].sum()
            for index, answer in enumerate(answers)
        ]
        return torch.stack(scores).log_softmax(0)


def concatenate(model: PreTrainedModel, blocks: Sequence[Block], start: Sequence[int] = ()) -> Context:
    """The examples of all blocks read as one text.

    Args:
        model: Any causal language model whose layers attend to all that comes before.
        blocks: In the order in which they are read.
        start: What comes first, usually the token that begins a text.

    Raises:
        ValueError: If a block or an example is empty, the model cannot be used so, or its context is too short.
    """
    return _read(model, [*start, *chain.from_iterable(_tokens(block, i) for i, block in enumerate(blocks))])


def parallel_windows(model: PreTrainedModel, blocks: Sequence[Block], start: Sequence[int] = ()) -> Context:
    """Every block read apart, all at the same positions; what follows sees all and comes after the longest.

    With one block this is `concatenate`. Arguments and errors are those of `concatenate`; the start is kept once.
    """
    windows = [_read(model, [*start, *_tokens(block, i)]) for i, block in enumerate(blocks)]
    if not windows:
        raise ValueError("there is nothing to read: give one block at least")
    starts = [0] + [len(start)] * (len(windows) - 1)  # the first brings it

    def joined(layer: int, part: int) -> Tensor:
        return torch.cat([w.layers[layer][part][:, :, s:] for w, s in zip(windows, starts, strict=True)], 2)

    layers = [(joined(layer, 0), joined(layer, 1)) for layer in range(len(windows[0].layers))]
    return Context(model, layers, max(window.position for window in windows))


def ensemble(
    scores: Sequence[Float[Tensor, "*questions answers"]],
    weights: Float[Tensor, "blocks *#questions"] | Sequence[float] | None = None,
    mix: Literal["moe", "poe", "max"] = "moe",
) -> Float[Tensor, "*questions answers"]:
    """Probabilities of the answers when each block is asked by itself; in all 1.

    Args:
        scores: Log-probabilities that each block gives to the answers: `Context.score`, or many of them stacked.
        weights: What each block counts for, 0 or more; they are divided by their sum. None: all the same. Blocks of
            local strategies need weights that follow the question: `Blocks.weights`.
        mix: "moe": the weighted mean of probabilities. "poe": their product, weights as exponents. "max": the largest
            weighted one. The last two are divided by their sum.

    Raises:
        ValueError: If there are no blocks, the weights do not fit them, or the mix is unknown.
    """
    if not len(scores):
        raise ValueError("an ensemble needs the scores of one block at least")
    said = torch.stack(list(scores))
    w = torch.as_tensor([1.0] * len(said) if weights is None else weights).to(said)
    fits = w.shape in ((len(said),), said.shape[:-1])
    if not fits or not w.isfinite().all() or (w < 0).any() or (w.sum(0) == 0).any():
        raise ValueError(f"{len(said)} blocks need as many weights of 0 or more, one above 0: not {w.tolist()}")
    w = (w / w.sum(0)).reshape(*w.shape, *(1,) * (said.ndim - w.ndim))
    if mix == "moe":
        return (w * said.exp()).sum(0)
    if mix == "poe":
        return (w * said).sum(0).softmax(-1)
    if mix == "max":
        most = (w * said.exp()).amax(0)
        return most / most.sum(-1, keepdim=True)
    raise ValueError(f"mix must be one of moe, poe, max, not {mix!r}")


def _tokens(block: Block, index: int) -> list[int]:
    if not block or not all(block):
        raise ValueError(f"block {index} is empty or has an example without tokens: leave it out")
    return list(chain.from_iterable(block))


@torch.no_grad()
def _read(model: PreTrainedModel, tokens: list[int]) -> Context:
    config = model.config.get_text_config()
    named = "layer_types", "attention_layers"  # the second of GPT-Neo
    kinds = {kind for name in named for kind in getattr(config, name, None) or ()} - {"full_attention", "global"}
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        kinds.add("longrope")  # angles that change with the total length
    if getattr(config, "alibi", False):
        kinds.add("alibi")  # counts positions itself
    if kinds or getattr(config, "sliding_window", None) or "position_ids" not in signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} does not take blocks: use a model whose layers all attend to everything before "
            f"and that takes position_ids{' (it has ' + ', '.join(sorted(kinds)) + ')' if kinds else ''}"
        )
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes what it says: call model.eval()")
    if not tokens:
        raise ValueError("there is nothing to read: give a block of one example, or a start")
    _check_length(model, len(tokens))
    text = torch.tensor([tokens], device=model.device)
    cache = model(text, past_key_values=DynamicCache(), use_cache=True).past_key_values
    return Context(model, [(layer.keys, layer.values) for layer in cache.layers], len(tokens))


def _check_length(model: PreTrainedModel, tokens: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most and tokens > most:
        raise ValueError(
            f"{tokens} tokens are more than the {most} that the model's context holds: use fewer or smaller blocks, "
            "or a host that reads each by itself"
        )
