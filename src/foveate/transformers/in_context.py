"""Hosts for blocks of examples: ways for a causal language model to read them and answer questions.

A block is a list of examples, and an example a list of token ids. The model reads the examples once, and then answers
any number of questions.

    concatenate       concatenate(model, blocks): all blocks as one text
    ensemble          ensemble([concatenate(model, [block]).score(...) for block in blocks], weights)
    parallel windows  parallel_windows(model, blocks)

The ensemble follows DENSE (arXiv 2308.08780), parallel windows follow PCW (arXiv 2212.10947); both are written from
descriptions. `prompt_with` does the same with texts and a tokenizer.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedModel

from foveate.transformers.attention import CACHE
from foveate.utils.choices import check_choice

__all__ = [
    "Host",
    "PrefilledContext",
    "PromptedModel",
    "check_reads_blocks",
    "concatenate",
    "ensemble",
    "parallel_windows",
    "prompt_with",
]

Block = Sequence[Sequence[int]]
Mix = Literal["moe", "poe", "max"]
Host = Literal["concatenate", "ensemble", "parallel_windows"]


class PrefilledContext(NamedTuple):
    """Examples encoded in a model's KV cache.

    Attributes:
        model: Causal language model.
        layers: Keys and values of each layer, [1, heads, tokens, head_dim].
        positions: Position of each token.
    """

    model: PreTrainedModel
    layers: list[tuple[Tensor, Tensor]]
    positions: Int[Tensor, "tokens"]

    @property
    def position(self) -> int:
        """Position of the next token."""
        return int(self.positions.max()) + 1

    @torch.no_grad()
    def logits(
        self, text: Int[Tensor, "batch tokens"], keep: int | Int[Tensor, "kept"] = 0
    ) -> Float[Tensor, "batch kept vocabulary"]:
        """Next-token logits after tokens of a text that follows the context. The context stays unchanged.

        Args:
            text: Token ids.
            keep: Number of last tokens to return logits for, or the indices of tokens; 0 is all. The logits of a token
                take as much memory as the vocabulary is large.

        Raises:
            ValueError: If context and text exceed the model's context length.
        """
        batch, tokens = text.shape
        _check_length(self.model, self.position + tokens)
        cache = DynamicCache([tuple(x.expand(batch, -1, -1, -1) for x in layer) for layer in self.layers])
        at = torch.arange(self.position, self.position + tokens)
        mask = _window_masks(self.model, torch.cat([self.positions, at]), at)
        if mask is None:
            mask = torch.ones(batch, len(self.positions) + tokens, dtype=torch.long, device=self.model.device)
        return self.model(
            text.to(self.model.device),
            attention_mask=mask,
            position_ids=at[None].to(self.model.device),
            logits_to_keep=keep,
            **{CACHE: cache},
        ).logits

    def score(self, question: Sequence[int], answers: Sequence[Sequence[int]]) -> Float[Tensor, "answers"]:
        """Log-probabilities of the answers to a question, normalised over these answers.

        Args:
            question: Token ids.
            answers: Token ids of each answer. The probabilities of an answer's tokens are multiplied.

        Raises:
            ValueError: If the question or an answer has no tokens.
        """
        if not question or not answers or not all(answers):
            raise ValueError("the question and each answer need at least one token: pass their token ids")
        longest = max(map(len, answers))
        padded = [[*question, *answer] + [0] * (longest - len(answer)) for answer in answers]
        logits = self.logits(torch.tensor(padded), keep=longest + 1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision cannot distinguish close answers
        log_probabilities = logits.to(wide).log_softmax(-1)
        scores = [
            log_probabilities[index, range(len(answer)), list(answer)].sum() for index, answer in enumerate(answers)
        ]
        return torch.stack(scores).log_softmax(0)


def concatenate(model: PreTrainedModel, blocks: Sequence[Block], start: Sequence[int] = ()) -> PrefilledContext:
    """Context of all blocks, read as one text.

    Args:
        model: Causal language model, see `check_reads_blocks`.
        blocks: Blocks, in reading order.
        start: Token ids before the first block, usually the start-of-text token.

    Raises:
        ValueError: If a block or an example is empty, the model is not supported, or its context is too short.
    """
    return _prefill(model, [*start, *chain.from_iterable(_tokens(block, i) for i, block in enumerate(blocks))])


def parallel_windows(model: PreTrainedModel, blocks: Sequence[Block], start: Sequence[int] = ()) -> PrefilledContext:
    """Context of blocks that are read separately, all at the same positions, after one common start.

    The question attends to all blocks, and its positions follow the longest block. With one block this equals
    `concatenate`, which documents the arguments and errors.
    """
    windows = [_prefill(model, [*start, *_tokens(block, i)]) for i, block in enumerate(blocks)]
    if not windows:
        raise ValueError("there is nothing to read: pass at least one block")
    skipped = [0] + [len(start)] * (len(windows) - 1)  # the first window keeps the start

    def joined(layer: int, part: int) -> Tensor:
        return torch.cat([w.layers[layer][part][:, :, s:] for w, s in zip(windows, skipped, strict=True)], 2)

    layers = [(joined(layer, 0), joined(layer, 1)) for layer in range(len(windows[0].layers))]
    positions = torch.cat([window.positions[s:] for window, s in zip(windows, skipped, strict=True)])
    return PrefilledContext(model, layers, positions)


def ensemble(
    scores: Sequence[Float[Tensor, "*questions answers"]],
    weights: Float[Tensor, "blocks *#questions"] | Sequence[float] | None = None,
    mix: Mix = "moe",
) -> Float[Tensor, "*questions answers"]:
    """Probabilities of the answers, mixed from separately prompted blocks.

    Args:
        scores: Log-probabilities of the answers for each block: `PrefilledContext.score`, or a stack of them.
        weights: Weight of each block, 0 or more, normalised to sum 1. None weighs all blocks equally. Blocks of local
            strategies need weights that depend on the question: `Blocks.weights`.
        mix: "moe": weighted mean of probabilities. "poe": product of probabilities with weights as exponents. "max":
            largest weighted probability. The last two are normalised.

    Raises:
        ValueError: If there are no blocks, the weights do not fit them, or the mix is unknown.
    """
    check_choice("mix", mix, Mix)
    if not len(scores):
        raise ValueError("an ensemble needs the scores of at least one block")
    p = torch.stack(list(scores))
    w = torch.as_tensor([1.0] * len(p) if weights is None else weights).to(p)
    fits = w.shape in ((len(p),), p.shape[:-1])
    if not fits or not w.isfinite().all() or (w < 0).any() or (w.sum(0) == 0).any():
        raise ValueError(f"{len(p)} blocks need {len(p)} weights of 0 or more, not all 0: not {w.tolist()}")
    w = (w / w.sum(0)).reshape(*w.shape, *(1,) * (p.ndim - w.ndim))
    if mix == "moe":
        return (w * p.exp()).sum(0)
    if mix == "poe":
        return (w * p).sum(0).softmax(-1)
    largest = (w * p.exp()).amax(0)
    return largest / largest.sum(-1, keepdim=True)


class PromptedModel(NamedTuple):
    """A model with blocks of examples in its context, prompted with text. Created by `prompt_with`.

    Attributes:
        tokenizer: Tokenizer of the model.
        contexts: Context of each block for an ensemble, otherwise a single context.
    """

    tokenizer: Any
    contexts: list[PrefilledContext]

    def probabilities(
        self, question: str, answers: Sequence[str], weights: Float[Tensor, "blocks"] | None = None, mix: Mix = "moe"
    ) -> Float[Tensor, "answers"]:
        """Probabilities of the answers, with sum 1. Weights and mix apply to an ensemble, see `ensemble`."""
        prompt = _ids(self.tokenizer, question)
        endings: list[list[int]] = []
        for answer in answers:
            both = _ids(self.tokenizer, question + answer)
            # a tokenizer may merge the question's end with the answer's beginning: then tokenize the answer alone
            joined = both[: len(prompt)] == prompt
            endings.append(both[len(prompt) :] if joined else _ids(self.tokenizer, answer))
        return ensemble([context.score(prompt, endings) for context in self.contexts], self._weights(weights), mix)

    def generate(
        self, question: str, max_new_tokens: int, weights: Float[Tensor, "blocks"] | None = None, mix: Mix = "moe"
    ) -> str:
        """Greedy answer, up to the end of its line. Weights and mix apply to each token, see `ensemble`."""
        prompt, generated = _ids(self.tokenizer, question), list[int]()
        eos: Any = getattr(self.contexts[0].model.generation_config, "eos_token_id", None)
        ends = {self.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        while len(generated) < max_new_tokens:
            text = torch.tensor([[*prompt, *generated]])
            scores = [context.logits(text, keep=1)[0, 0].float().log_softmax(-1) for context in self.contexts]
            token = int(ensemble(scores, self._weights(weights), mix).argmax())
            if token in ends:
                break
            generated.append(token)
            if "\n" in self.tokenizer.decode(generated).lstrip("\n"):
                break
        return self.tokenizer.decode(generated, skip_special_tokens=True).strip()

    def _weights(self, weights: Float[Tensor, "blocks"] | None) -> Float[Tensor, "blocks"] | None:
        return weights if len(self.contexts) > 1 else None


def prompt_with(model: PreTrainedModel, tokenizer: Any, blocks: Sequence[Sequence[str]], host: Host) -> PromptedModel:
    """A model prompted with blocks of texts, each after the tokenizer's start-of-text token.

    Args:
        model: Causal language model, see `check_reads_blocks`.
        tokenizer: Tokenizer of the model.
        blocks: Texts of the examples of each block.
        host: How the model reads the blocks; an ensemble reads each separately.

    Raises:
        ValueError: If the host is unknown, or the model cannot read the blocks.
    """
    check_choice("host", host, Host)
    tokens = [[_ids(tokenizer, text) for text in block] for block in blocks]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if host == "concatenate":
        return PromptedModel(tokenizer, [concatenate(model, tokens, start)])
    if host == "parallel_windows":
        return PromptedModel(tokenizer, [parallel_windows(model, tokens, start)])
    return PromptedModel(tokenizer, [concatenate(model, [block], start) for block in tokens])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _tokens(block: Block, index: int) -> list[int]:
    if not block or not all(block):
        raise ValueError(f"block {index} is empty or has an example without tokens: leave it out")
    return list(chain.from_iterable(block))


def check_reads_blocks(config: Any, kind: Any = None) -> None:
    """Check that models with this config can read blocks.

    Their layers must attend to all previous tokens, or, as in Gemma 3, some of them to a sliding window.

    Args:
        config: Config of the model.
        kind: Class of the model. None is the usual one for the config.

    Raises:
        ValueError: If they cannot, with the reason.
    """
    kind = kind or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    config = config.get_text_config()
    named = "layer_types", "attention_layers"  # the second is for GPT-Neo
    kinds = {kind for name in named for kind in getattr(config, name, None) or ()} - {"full_attention", "global"}
    if hasattr(config, "layer_types"):
        kinds -= {"sliding_attention"}
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        kinds.add("longrope")  # its angles depend on the total length
    if getattr(config, "alibi", False):
        kinds.add("alibi")  # it ignores position_ids
    windowed = getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")
    if kinds or windowed or not {"position_ids", "logits_to_keep"} <= set(signature(kind.forward).parameters):
        raise ValueError(
            f"{kind.__name__} does not take blocks: use a model whose layers attend to all previous tokens, some of "
            f"them perhaps in a sliding window, and that takes position_ids and logits_to_keep"
            f"{' (it has ' + ', '.join(sorted(kinds)) + ')' if kinds else ''}"
        )


@torch.no_grad()
def _prefill(model: PreTrainedModel, tokens: list[int]) -> PrefilledContext:
    check_reads_blocks(model.config, type(model))
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes its answers: call model.eval()")
    if not tokens:
        raise ValueError("there is nothing to read: pass a block with one example, or a start")
    _check_length(model, len(tokens))
    text = torch.tensor([tokens], device=model.device)
    cache: Any = DynamicCache()
    model(text, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return PrefilledContext(model, [(layer.keys, layer.values) for layer in cache.layers], torch.arange(len(tokens)))


def _window_masks(
    model: PreTrainedModel, positions: Int[Tensor, "rows"], at: Int[Tensor, "tokens"]
) -> dict[str, Tensor] | None:
    """Mask for each type of layers, from positions: rows of parallel windows are nearer than their number tells.

    None if no layer has a sliding window.
    """
    config = model.config.get_text_config()
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    back = at[:, None] - positions  # [tokens, rows]
    seen = torch.ones_like(back, dtype=torch.bool)
    seen[:, -len(at) :].tril_()
    masks = {"full_attention": seen, "sliding_attention": seen & (back < config.sliding_window)}
    if model.config._attn_implementation == "eager":  # which adds the mask
        zeros, lowest = torch.zeros(seen.shape, dtype=model.dtype), torch.finfo(model.dtype).min
        masks = {kind: zeros.masked_fill(~mask, lowest) for kind, mask in masks.items()}
    return {kind: mask[None, None].to(model.device) for kind, mask in masks.items()}


def _check_length(model: PreTrainedModel, tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and tokens > limit:
        raise ValueError(
            f"{tokens} tokens are more than the {limit} that the model's context holds: use fewer or smaller blocks, "
            "or a host that reads each block separately"
        )
