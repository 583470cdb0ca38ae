# pyright: basic, reportPrivateImportUsage=false
"""Causal language models: loaded, checked for what cached chunks need, and asked to generate."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from foveate.transformers.attention import row_model
from foveate.transformers.fingerprint import fingerprint
from foveate.transformers.row_cache import RowCache
from foveate.utils.device import choose_device, choose_dtype

__all__ = ["LanguageModel", "Text", "chat_frame", "check_config", "check_model", "load", "unknown_words"]

Text = str | Sequence[int]
"""Text, or token ids."""

CLASSES = {
    LlamaConfig: LlamaForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    MistralConfig: MistralForCausalLM,
    Phi3Config: Phi3ForCausalLM,
    MixtralConfig: MixtralForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
}
ROPE_TYPES = "default", "linear", "llama3", "yarn"
ATTENTION = "sdpa", "eager"
USER_TEXT = "<<what the user says>>"
CAPACITY_STEP = 256
"""Capacities are multiples of this, so that contexts of similar lengths use the same memory and graphs."""
SPARE = 2
"""Unused caches that are kept."""
# options of `model.generate` that must keep these values when one text is generated from one cached context
SINGLE_SEQUENCE = {"num_beams": 1, "num_return_sequences": 1, "prompt_lookup_num_tokens": None,
                   "assistant_model": None, "cache_implementation": None}  # fmt: skip


def load(
    model: str | Path, device: str = "auto", dtype: str = "auto", check: Callable[[Any], None] = lambda config: None
) -> tuple[PreTrainedModel, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        model: Folder or hub id.
        device: Device name, see `foveate.utils.device.choose_device`.
        dtype: Dtype name, or "auto": the checkpoint's dtype on a GPU, float32 on a CPU.
        check: Called with the model's config before weights are loaded, such as `check_config`.

    Raises:
        ValueError: If the model cannot be loaded or does not pass the check, or device or dtype are unknown.
    """
    where = choose_device(device)
    precision = "auto" if dtype == "auto" and where.type != "cpu" else choose_dtype(dtype, where)
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(model, error) from error
    check(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=precision)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _unloadable(model, error) from error
    return loaded.to(where).eval(), tokenizer


def _unloadable(model: str | Path, error: Exception) -> ValueError:
    return ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}")


def chat_frame(tokenizer: Any, chat: bool | None = None) -> tuple[str, str]:
    """The texts before and after a user's message, so that the model answers next.

    Args:
        tokenizer: Tokenizer, whose chat template is used.
        chat: Whether to use the chat template. None uses it if there is one. Without it the text before is the
            start-of-text token, and the text after is empty.

    Raises:
        ValueError: If there is no chat template, or it refuses or changes the user's message.
    """
    if chat is False or (chat is None and not tokenizer.chat_template):
        return tokenizer.bos_token or "", ""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: leave --chat out, or name a chat model")
    message = {"role": "user", "content": USER_TEXT}
    try:
        text = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(
            f"the chat template refuses a user's message ({error}): use --no-chat, and write the chat's opening into "
            "--prefix"
        ) from error
    if text.count(USER_TEXT) != 1:
        raise ValueError(
            "the chat template changes the user's message: use --no-chat, and write the chat's opening into --prefix"
        )
    before, after = text.split(USER_TEXT)
    return before, after


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """The distinct words that a fast tokenizer maps to its unknown token, in order."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return []
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(tokens.input_ids, tokens.offset_mapping, strict=True)
    return list(dict.fromkeys(text[start:stop] for token, (start, stop) in pairs if token == tokenizer.unk_token_id))


def check_config(config: Any) -> None:
    """Raise an error if cached chunks of models with this config could not be composed.

    Chunks move to new positions by a rotation of their keys. This needs rotary positions that do not depend on the
    total length, and full causal attention.

    Raises:
        ValueError: With the reason, and a remedy where there is one.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if type(config) not in CLASSES:
        reason = "other models are not tested" if rope else "it has no rotary positions to move keys by"
        *names, last = (kind.__name__.removesuffix("Config") for kind in CLASSES)
        raise ValueError(
            f"cached chunks work with {', '.join(names)} and {last}, not {type(config).__name__}: {reason}"
        )
    if rope["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope['rope_type']!r} rotates keys by angles that change with the total length: use one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not tested: it must be 1")
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention" if window else ""]):
        raise ValueError(
            f"a sliding window of {window} tokens hides most of a long context: for contexts that fit into the window "
            "load the model with sliding_window=None (Qwen: use_sliding_window=False), which changes nothing there"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "the weights are quantised, and how exact recomputed rows are then has not been measured: load the model "
            "in bfloat16, float16 or float32"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raise an error if cached chunks of this model could not be composed.

    Raises:
        ValueError: With the reason, and a remedy where there is one.
    """
    config: Any = model.config
    check_config(config)
    if not isinstance(model, CLASSES[type(config)]):
        raise ValueError(
            f"pass the {CLASSES[type(config)].__name__} itself, not {type(model).__name__}; for a PeftModel that is "
            "get_base_model(), which includes the adapters"
        )
    if config._attn_implementation not in ATTENTION:
        raise ValueError(
            f"{config._attn_implementation!r} attention cannot attend by rows: load the model with "
            'attn_implementation="sdpa"'
        )
    if len(devices := {weight.device for weight in model.parameters()}) > 1 or "meta" in {d.type for d in devices}:
        raise ValueError(f"the model must be on one device, not on {', '.join(sorted(map(str, devices)))}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes cached chunks: call model.eval()")


class LanguageModel:
    """A causal language model, its tokenizer, and the prefix of every context: the base of `ChunkEncoder`.

    Attributes:
        model: Causal language model of `transformers`. It is never changed.
        row_model: A copy of it that shares its weights and attends by rows.
        tokenizer: Tokenizer of the model.
        prefix: Token ids before every context.
        fingerprint: Hashes of everything that cached chunks depend on besides their text, by name.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, prefix: Text | None = None) -> None:
        check_model(model)
        self.model: Any = model
        self.row_model = row_model(model)
        self._spare: list[RowCache] = []
        self.tokenizer = tokenizer
        if prefix is None:
            prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prefix = self.tokens(prefix)
        self.fingerprint = fingerprint(model, tokenizer, tuple(self.prefix.tolist()))

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model and of its caches."""
        return self.model.dtype

    @property
    def head_dim(self) -> int:
        """Size of a key or value of one head."""
        return self.model.model.layers[0].self_attn.head_dim

    def tokens(self, text: Text) -> Int[Tensor, "tokens"]:
        """Token ids of a text, without special tokens. Token ids are returned as they are.

        Raises:
            ValueError: If `text` is neither a text nor ids from the model's vocabulary.
        """
        if isinstance(text, int):
            raise ValueError(f"pass a text or a list of token ids, not the number {text}: [{text}]")
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else list(text)
        tokens, size = torch.tensor(ids, dtype=torch.long), self.model.config.vocab_size
        if len(wrong := tokens[(tokens < 0) | (tokens >= size)]):
            raise ValueError(
                f"token id {wrong[0]} is outside the model's vocabulary, 0 to {size - 1}: use its own tokenizer"
            )
        return tokens.to(self.device)

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Raise an error if `what` has more tokens than the model's context.

        Raises:
            ValueError: With both lengths and the remedy.
        """
        if tokens <= (limit := self.model.config.max_position_embeddings):
            return
        rope = self.model.config.rope_parameters
        reach = int(rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or 0))
        if reach > limit:
            remedy += f", or load the model with max_position_embeddings={reach}, the reach of {rope['rope_type']}"
        raise ValueError(f"{what}: {tokens} tokens, but the model takes at most {limit}; {remedy}")

    def row_cache(self, keys: Tensor, values: Tensor, room: int) -> RowCache:
        """A cache with copies of these keys and values and room for more rows, to be given back after use.

        Args:
            keys: Keys [layers, batch, groups, rows, dim].
            values: Values, likewise.
            room: Number of rows to make room for.
        """
        capacity = keys.shape[3] + room + 1  # one for tokens that fill up a graph
        capacity += -capacity % CAPACITY_STEP
        for cache in self._spare.copy():
            if cache.fits(keys, capacity):
                with suppress(ValueError):  # another thread has taken it
                    self._spare.remove(cache)
                    return cache.fill(keys, values)
        experts = any(getattr(self.model.config, name, 0) for name in ("num_experts", "num_local_experts"))
        graphs = keys.is_cuda and not experts  # experts wait for the number of their tokens
        return RowCache(self.row_model, keys, values, capacity, graphs)

    def give_back(self, cache: RowCache) -> None:
        """Keep a cache, which has memory and graphs, for the next call of `row_cache`."""
        self._spare.append(cache)
        del self._spare[:-SPARE]

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "tokens"],
        cache: RowCache | None = None,
        *,
        max_new_tokens: int = 32,
        do_sample: bool = False,
        **options: Any,
    ) -> str:
        """The text that `model.generate` continues with, greedy by default.

        Args:
            ids: Token ids of the whole text so far.
            cache: Cache of the first of these tokens, to which the others are appended. None computes all of them,
                which is the full prefill.
            max_new_tokens: Largest number of tokens to generate.
            do_sample: Whether to sample tokens.
            **options: Other options of `model.generate`, by name. A cache allows neither beams nor guessed tokens.

        Raises:
            ValueError: If the text may become too long for the model, or an option asks for more than one text, or
                for something that a cached context does not support.
        """
        self.check_length(len(ids) + max_new_tokens, "context, prompt and answer", "compose fewer chunks")
        if cache is not None:
            cache.reserve(len(ids) + max_new_tokens + 1)
        output = (self.model if cache is None else self.row_model).generate(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            **self._checked(options, cached=cache is not None),
        )
        return self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)

    def _checked(self, options: dict[str, Any], cached: bool) -> dict[str, Any]:
        """Options for `model.generate`, checked together with the model's own generation config."""
        if options.get("generation_config") is not None or options.get("return_dict_in_generate"):
            raise ValueError(
                "the result is one text: leave out generation_config and return_dict_in_generate, and pass options by "
                "name, such as max_new_tokens=3"
            )
        for name in SINGLE_SEQUENCE if cached else ("num_return_sequences",):
            value, only = options.get(name, getattr(self.model.generation_config, name, None)), SINGLE_SEQUENCE[name]
            if value not in (None, only):
                raise ValueError(f"one text is generated from one context: pass {name}={only}, not {value!r:.40}")
        # without use_cache the model would compute all tokens again, after those in the cache
        return options | {"return_dict_in_generate": False} | ({"use_cache": True} if cached else {})
