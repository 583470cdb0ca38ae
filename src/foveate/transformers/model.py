# pyright: basic, reportPrivateImportUsage=false
"""Causal language models: loading, checks that cached chunks are supported, and generation."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Parameter
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Cohere2Config,
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaOnevisionConfig,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MistralConfig,
    MixtralConfig,
    NoRepeatNGramLogitsProcessor,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLTextConfig,
    SmolLM3Config,
    SmolVLMConfig,
)
from transformers.utils.versions import require_version

from foveate.transformers.attention import CACHE, row_model
from foveate.transformers.control_tokens import SafeTokenizer
from foveate.transformers.divided import DividedRowCache, Division
from foveate.transformers.fingerprint import fingerprint
from foveate.transformers.images import ImageReader, PreparedImage, image_token
from foveate.transformers.rotations import Rotations, position_axes
from foveate.transformers.row_cache import SPARE_ROWS, RowCache
from foveate.transformers.tokens import Tokens
from foveate.utils.device import choose_device, choose_dtype

__all__ = [
    "Document", "LanguageModel", "ReadDocument", "Text", "chat_frame", "check_config", "check_model", "load_model",
    "load_processor", "reads_images", "unknown_words",
]  # fmt: skip

Text = str | Sequence[int]
"""Text, or token ids."""
Document = Text | Sequence[Any]
"""Text, token ids, or a list of texts and images (PIL)."""

FAMILIES = (
    LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Phi3Config, MixtralConfig, Qwen3MoeConfig, Gemma3TextConfig,
    GptOssConfig, Olmo2Config, Olmo3Config, SmolLM3Config, GraniteConfig, GlmConfig, Glm4Config, CohereConfig,
    Cohere2Config,
)  # fmt: skip
VISION_LANGUAGE = Qwen2_5_VLConfig, Qwen3VLConfig, Gemma3Config, SmolVLMConfig, Idefics3Config, LlavaOnevisionConfig
"""Families whose chunks may hold images. Their text models are of `FAMILIES`, or these:"""
SEEING_TEXT = Qwen2_5_VLTextConfig, Qwen3VLTextConfig
PARTIAL = Phi3Config, GlmConfig, Glm4Config
"""Families that may rotate only some channels of a key."""
ROPE_TYPES = "default", "linear", "llama3", "yarn", "dynamic", "longrope"
ATTENTION = "sdpa", "eager"
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNMEASURED = (
    "the accuracy of recomputed rows has not been measured for them; load the model in bfloat16, float16, float32, "
    "as int8 or float8 weights only by torchao, or with dequantize=True in its quantization config"
)
IMAGES_NEED = "pass the model's processor in place of its tokenizer (pip install 'foveate[vision]')"
USER_TEXT = "<<what the user says>>"
CAPACITY_STEP = 256
"""Capacities are multiples of this, so that contexts of similar lengths use the same memory and graphs."""
SPARE = 2
"""Largest number of unused caches to keep."""
# options of `model.generate` for the text and its cache, which `generate` sets itself
GIVEN = "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", CACHE
# options that a cached context does not support
UNSUPPORTED = "prompt_lookup_num_tokens", "assistant_model", "cache_implementation", "prefill_chunk_size"


def load_model(
    model: str | Path, device: str = "auto", dtype: str = "auto", check: Callable[[Any], None] = lambda config: None
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model, in evaluation mode, and its tokenizer.

    Args:
        model: Folder or hub id, or a .gguf file in one, whose weights are dequantised.
        device: Device name, see `foveate.utils.device.choose_device`.
        dtype: Dtype name, or "auto": the checkpoint's dtype on a GPU, float32 on a CPU.
        check: Called with the model's config before weights are loaded, such as `check_config`.

    Raises:
        ValueError: If the model cannot be loaded or fails the check, or device or dtype are unknown.
        ImportError: If the model is a .gguf file, and the package gguf is not installed or transformers is older than
            5.18.
    """
    where = choose_device(device)
    precision = "auto" if dtype == "auto" and where.type != "cpu" else choose_dtype(dtype, where)
    source, options = _source(model)
    if options:
        import_module("gguf")  # transformers needs it, and names no way to install it
        require_version("transformers>=5.18", "Older versions may split the texts of .gguf models into characters.")
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(model, error) from error
    check(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        if options:
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        kind = AutoModelForImageTextToText if type(config) in VISION_LANGUAGE else AutoModelForCausalLM
        loaded: Any = kind.from_pretrained(source, dtype=precision, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _unloadable(model, error) from error
    return loaded.to(where).eval(), tokenizer


def _source(model: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """Folder or hub id of a model, and the options of `from_pretrained` that name its .gguf file."""
    folder, _, file = Path(model).as_posix().rpartition("/")
    return (folder or ".", {"gguf_file": file}) if file.lower().endswith(".gguf") else (model, {})


def _unloadable(model: str | Path, error: Exception) -> ValueError:
    return ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}")


def reads_images(model: str | Path) -> bool:
    """Whether a model reads images, and the extra `vision` is installed. Reads no more than the model's config.

    Raises:
        ValueError: If the config cannot be loaded.
    """
    source, options = _source(model)
    if options or not (find_spec("torchvision") and find_spec("PIL")):
        return False
    try:
        return type(AutoConfig.from_pretrained(source)) in VISION_LANGUAGE
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(model, error) from error


def load_processor(model: str | Path) -> Any:
    """Load the processor (tokenizer and image processor) of a vision-language model.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        return AutoProcessor.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unloadable(model, error) from error


def chat_frame(tokenizer: Any, chat: bool | None = None, date: str = "") -> tuple[str, str]:
    """Texts before and after a user's message, up to the model's answer.

    Args:
        tokenizer: Tokenizer, with its chat template.
        chat: Whether to use the chat template. None uses it if there is one. Without it the text before is the
            start-of-text token, and the text after is empty.
        date: ISO date that a chat template tells the model; empty is today's. Cached chunks need the same every day.

    Raises:
        ValueError: If there is no chat template, or it rejects or changes the user's message.
    """
    if chat is False or (chat is None and not tokenizer.chat_template):
        return tokenizer.bos_token or "", ""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: leave chat out, or name a chat model")
    message = {"role": "user", "content": USER_TEXT}
    template = tokenizer.get_chat_template()
    if date:
        template = _dated(template, datetime.fromisoformat(date))
    try:
        text = tokenizer.apply_chat_template(
            [message], chat_template=template, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(
            f"the chat template refuses a user's message ({error}): turn chat off, and write its opening into "
            "the prefix"
        ) from error
    if text.count(USER_TEXT) != 1:
        raise ValueError(
            "the chat template changes the user's message: turn chat off, and write its opening into the prefix"
        )
    before, after = text.split(USER_TEXT)
    return before, after


def _dated(template: str, day: datetime) -> str:
    """The chat template with a macro in place of the function `strftime_now`, which tells today's date."""
    codes = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdeHIjmMpSuUwWxXyYZ"))
    replaced = "".join(f"|replace({code!r}, {day.strftime(code)!r})" for code in codes)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}{template}"


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """Distinct words that a fast tokenizer maps to its unknown token, in order."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return []
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(tokens.input_ids, tokens.offset_mapping, strict=True)
    return list(dict.fromkeys(text[start:stop] for token, (start, stop) in pairs if token == tokenizer.unk_token_id))


def check_config(config: Any) -> None:
    """Check that cached chunks of models with this config can be composed.

    Chunks move to new positions by a rotation of their keys. This needs rotary positions that do not depend on the
    total length, and causal attention, full or in a sliding window.

    Raises:
        ValueError: If not, with the reason and, if known, the remedy.
    """
    _check_family(config)
    quantised = getattr(config, "quantization_config", None)
    if quantised and not _get(quantised, "dequantize") and _get(quantised, "quant_method") != "torchao":
        raise ValueError(f"the weights are quantised: {UNMEASURED}")


def _get(options: Any, name: str) -> Any:
    return options.get(name) if isinstance(options, dict) else getattr(options, name, None)


def _rope(text: Any) -> dict[str, Any]:
    return getattr(text, "rope_parameters", None) or {}


def _check_family(config: Any) -> None:
    text = config.get_text_config()
    if type(config) not in (*FAMILIES, *VISION_LANGUAGE) or type(text) not in (*FAMILIES, *SEEING_TEXT):
        *names, last = (kind.__name__.removesuffix("Config") for kind in (*FAMILIES, *VISION_LANGUAGE))
        reason = "other models are not tested" if _rope(text) else "it has no rotary positions to move keys by"
        raise ValueError(
            f"cached chunks work with {', '.join(names)} and {last}, not {type(config).__name__}: {reason}"
        )
    rope = _rope(text)
    for one in [rope] if "rope_type" in rope else rope.values():  # Gemma 3 has one for each type of layers
        if one["rope_type"] not in ROPE_TYPES:
            raise ValueError(f"rope_type {one['rope_type']!r} is not tested: use one of {', '.join(ROPE_TYPES)}")
        if one.get("partial_rotary_factor", 1.0) != 1.0 and type(text) not in PARTIAL:
            raise ValueError(f"partial_rotary_factor={one['partial_rotary_factor']} is not tested: it must be 1")
    if getattr(text, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention lets tokens see later ones: cached chunks need causal attention")


def check_model(model: PreTrainedModel) -> None:
    """Check that cached chunks of this model can be composed.

    Raises:
        ValueError: If not, with the reason and, if known, the remedy.
    """
    config: Any = model.config
    _check_family(config)
    seeing = type(config) in VISION_LANGUAGE
    expected: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if seeing else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled, and its layers cannot attend by rows: pass it without torch.compile")
    if not isinstance(model, expected):
        raise ValueError(
            f"pass the {expected.__name__} itself, not {type(model).__name__}; for a PeftModel that is "
            "get_base_model(), which includes the adapters"
        )
    for name, weight in model.state_dict().items():
        if not (_is_plain(weight) or _is_weight_only(weight)):
            raise ValueError(f"the weights are quantised, such as {name}: {UNMEASURED}")
    if (attention := model.get_decoder().config._attn_implementation) not in ATTENTION:
        raise ValueError(
            f'{attention!r} attention cannot attend by rows: load the model with attn_implementation="sdpa"'
        )
    if len(devices := {weight.device for weight in model.parameters()}) > 1 or "meta" in {d.type for d in devices}:
        raise ValueError(f"the model must be on one device, not on {', '.join(sorted(map(str, devices)))}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes cached chunks: call model.eval()")


def _is_plain(weight: Any) -> bool:
    return type(weight) in (Tensor, Parameter) and weight.dtype in DTYPES


def _is_weight_only(weight: Any) -> bool:
    """Whether torchao keeps a weight as int8 or float8, and activations as they are."""
    kind = type(weight)
    known = kind.__module__.startswith("torchao.") and kind.__name__ in ("Int8Tensor", "Float8Tensor")
    return known and getattr(weight, "act_quant_kwargs", None) is None


class ReadDocument(NamedTuple):
    """A document, tokenized, with its images prepared.

    Attributes:
        parts: Texts and images, in order.
    """

    parts: list[Tokens | PreparedImage]

    @property
    def ids(self) -> Int[Tensor, "tokens"]:
        """Token ids, with placeholders for images."""
        return torch.cat([part.tokens.ids if isinstance(part, PreparedImage) else part.ids for part in self.parts])

    @property
    def images(self) -> tuple[str, ...]:
        """Hash of each image."""
        return tuple(part.checksum for part in self.parts if isinstance(part, PreparedImage))


class LanguageModel:
    """A causal language model, its tokenizer, and the prefix of every context: the base of `ChunkEncoder`.

    Attributes:
        model: Causal language model of `transformers`. It is never changed.
        config: Config of the model's text part.
        row_model: Copy of the model that shares its weights and attends by rows.
        axes: Number of axes of positions: 3 in Qwen-VL, else 1.
        tokenizer: Copy of the model's tokenizer that reads the names of control tokens as text.
        prefix: Token ids before every context.
        division: Processes that divide a context; None if one process does all.
        fingerprint: Hashes of everything besides their text that cached chunks depend on, by name.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prefix: Text | None = None, process_group: Any = None
    ) -> None:
        check_model(model)
        self.model: Any = model
        self.config: Any = model.config.get_text_config()
        self.row_model, self.axes = row_model(model), position_axes(self.config)
        self._rotations = Rotations(model.get_decoder())
        self._spare: list[RowCache] = []
        processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
        self._safe = SafeTokenizer(tokenizer)
        self.tokenizer = self._safe.for_texts
        if prefix is None:
            prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prefix = self.tokens(self.fill(prefix) if isinstance(prefix, str) else prefix)
        self.fingerprint = fingerprint(model, tokenizer, tuple(self.prefix.tolist()))
        self._images = ImageReader(processor, self.row_model) if hasattr(processor, "image_processor") else None
        if self._images:
            self.fingerprint["processor"] = self._images.fingerprint
        self.division = None if process_group is None else Division(process_group)
        if self.division is not None:
            self._check_division(self.division)

    @property
    def name(self) -> str:
        """Folder or hub id of the model, or its class if it was not loaded."""
        return self.model.name_or_path or type(self.model).__name__

    @property
    def decoder(self) -> Any:
        """Tokenizer that decodes answers: the model's own, which leaves out fewer tokens than the copy for texts."""
        return self._safe.for_templates

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
        return self.model.get_decoder().layers[0].self_attn.head_dim

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of the model's context.

        With "longrope", the length that the model was first trained for: keys of longer texts turn by other angles.
        """
        rope = self.config.rope_parameters
        if rope.get("rope_type") == "longrope":
            return min(self.config.max_position_embeddings, rope["original_max_position_embeddings"])
        return self.config.max_position_embeddings

    @property
    def passage_tokens(self) -> int:
        """Default largest number of tokens in a passage: 512, or a quarter of the model's context if smaller."""
        return min(512, self.max_tokens // 4)

    @property
    def takes_images(self) -> bool:
        """Whether documents may hold images: it is a vision-language model and came with its processor."""
        return self._images is not None

    def fill(self, template: str, texts: Mapping[str, str] | None = None) -> list[int]:
        """Token ids of a template with texts in its places. Control tokens come from the template, never from a text.

        Examples:
            >>> before, after = chat_frame(tokenizer)
            >>> prompt = encoder.fill("Question: {question}" + after, {"{question}": "Who was it?"})
            >>> context.patch(foveate.InfoFlowKV(), prompt)

        Args:
            template: Text whose control tokens take effect, such as that of a chat template.
            texts: Text of each place, by what marks the place in the template.
        """
        return self._safe.fill(template, texts or {})

    def spans(self, text: str) -> list[tuple[int, int]]:
        """First character of each token of a text, and the character after its last, to split the text at.

        A tokenizer that is not fast gives no characters: then those of words, cut into pieces of 8, for all tokens.
        """
        if self.tokenizer.is_fast:
            return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        words = re.finditer(r"\s*\S{1,8}|\s+", text)
        return [word.span() for word in words for _ in self.tokenizer(word[0], add_special_tokens=False).input_ids]

    def tokens(self, text: Text) -> Int[Tensor, "tokens"]:
        """Token ids of a text, without control tokens: their names stay text. Token ids are returned unchanged.

        Raises:
            ValueError: If `text` is neither a text nor ids from the model's vocabulary.
        """
        if isinstance(text, int):
            raise ValueError(f"pass a text or a list of token ids, not the number {text}: [{text}]")
        ids = self._safe.text(text) if isinstance(text, str) else list(text)
        tokens, size = torch.tensor(ids, dtype=torch.long), self.config.vocab_size
        if len(wrong := tokens[(tokens < 0) | (tokens >= size)]):
            raise ValueError(
                f"token id {wrong[0]} is outside the model's vocabulary, 0 to {size - 1}: use its own tokenizer"
            )
        if image_token(self.model.config) in ids:
            raise ValueError("the token ids hold the placeholder of an image: pass a list of texts and images instead")
        return tokens.to(self.device)

    def read(self, document: Document) -> "ReadDocument":
        """Tokens of a document, and its images as the model's processor prepares them.

        Raises:
            ValueError: If `document` is no text, no token ids and no list of texts and images, or the model cannot
                read images.
        """
        is_text = isinstance(document, str | int) or all(isinstance(part, int) for part in document)
        parts: Sequence[Any] = [document] if is_text else document
        read: list[Tokens | PreparedImage] = []
        for part in parts:
            if isinstance(part, str) or is_text:
                read.append(Tokens.text(self.tokens(part)))
            elif hasattr(part, "convert"):
                read.append(self._prepared(part))
            else:
                raise ValueError(f"a document holds texts and images (PIL), not {part!r:.40}")
        return ReadDocument(read)

    def _prepared(self, image: Any) -> PreparedImage:
        if self._images is not None:
            return self._images.prepare(image)
        if type(self.model.config) in VISION_LANGUAGE:
            raise ValueError(f"the model was given without what prepares images: {IMAGES_NEED}")
        raise ValueError(f"{self.name} reads no images: leave them out, or load a vision-language model")

    def with_features(self, document: "ReadDocument") -> Tokens:
        """Tokens with the features of the document's images, which this computes, at positions from 0."""
        parts = [self._images.features(p) if isinstance(p, PreparedImage) else p for p in document.parts]  # type: ignore
        return Tokens.side_by_side([part.on_axes(self.axes) for part in parts])

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Check that `what` has no more tokens than the model's context.

        Raises:
            ValueError: If it has more, with both lengths and the remedy.
        """
        if tokens <= (limit := self.max_tokens):
            return
        rope = self.config.rope_parameters
        rope = rope.get("full_attention", rope)
        if rope["rope_type"] == "longrope":
            remedy += "; longer texts turn all keys by other angles (longrope), which chunks cannot follow"
            raise ValueError(f"{what}: {tokens} tokens, but the model takes at most {limit}; {remedy}")
        reach = int(rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or 0))
        if reach > limit:
            remedy += f", or load the model with max_position_embeddings={reach}, the reach of {rope['rope_type']}"
        raise ValueError(f"{what}: {tokens} tokens, but the model takes at most {limit}; {remedy}")

    def rotations(self, positions: Int[Tensor, "*axes tokens"]) -> list[tuple[Any, ...]]:
        """Rotations of keys to these positions, in float32 or wider; see `Rotations`."""
        at, wide = positions.to(self.device).expand(self.axes, -1), torch.promote_types(self.dtype, torch.float32)
        return self._rotations(at, wide)

    @property
    def pair_order(self) -> Int[Tensor, "dim"] | None:
        """Order of channels in which `rotations` rotate; see `Rotations`."""
        return self._rotations.order

    def cache_shape(self, batch: int, rows: int) -> tuple[int, int, int, int, int]:
        """Shape of the keys or the values of all layers: [layers, batch, groups, rows, dim]."""
        config = self.config
        return config.num_hidden_layers, batch, config.num_key_value_heads, rows, self.head_dim

    def _check_division(self, division: Division) -> None:
        """Check that several processes can divide a context."""
        kinds = getattr(self.config, "layer_types", None) or []
        if "sliding_attention" in kinds or getattr(self.config, "sliding_window", None):
            raise ValueError("several processes cannot divide a sliding window of attention: leave out process_group")
        if self.takes_images:
            raise ValueError("several processes read no images: pass the tokenizer, or leave out process_group")
        if self.fingerprint != division.same(self.fingerprint):
            raise ValueError(f"process {division.rank} has another model or tokenizer than process 0: load the same")

    def row_cache(self, batch: int, rows: int) -> RowCache:
        """A cache for this many contexts and rows. Fill it before use, and return it with `give_back` after use."""
        if self.division is not None:
            if batch > 1:
                raise ValueError(f"several processes take one context and one answer at a time, not {batch}")
            return DividedRowCache(self.row_model, self.cache_shape(1, rows + SPARE_ROWS), self.division)
        capacity = rows + SPARE_ROWS
        capacity += -capacity % CAPACITY_STEP
        for cache in self._spare.copy():
            if cache.fits(batch, capacity):
                with suppress(ValueError):  # another thread has taken it
                    self._spare.remove(cache)
                    return cache
        experts = any(getattr(self.config, name, 0) for name in ("num_experts", "num_local_experts"))
        graphs = self.device.type == "cuda" and not experts  # experts synchronise to count their tokens
        shape = self.cache_shape(batch, capacity)
        try:
            return RowCache(self.row_model, shape, graphs)
        except torch.OutOfMemoryError:
            self.free()
            return RowCache(self.row_model, shape, graphs)

    def give_back(self, cache: RowCache) -> None:
        """Keep a cache, with its memory and graphs, for the next call of `row_cache`."""
        if self.division is None:
            self._spare.append(cache)
            del self._spare[:-SPARE]

    def free(self) -> None:
        """Free the memory of the kept caches."""
        self._spare.clear()

    @torch.no_grad()
    def generate(
        self,
        texts: Sequence[Int[Tensor, "_"]],
        kept: RowCache | None = None,
        /,
        *,
        max_new_tokens: int = 32,
        do_sample: bool = False,
        num_return_sequences: int = 1,
        **options: Any,
    ) -> list[str]:
        """Continuations of texts by `model.generate`, generated as one batch, greedy by default.

        Args:
            texts: Token ids of each text.
            kept: Cache that holds these texts, contexts and prompts. None computes all of them: the full prefill.
            max_new_tokens: Largest number of tokens to generate.
            do_sample: Whether to sample tokens.
            num_return_sequences: Number of continuations of each text, adjacent in the result.
            **options: Other options of `model.generate`, by name. A cache does not allow speculative decoding.

        Raises:
            ValueError: If a text may become too long for the model, or an option is not supported.
        """
        longest = max(map(len, texts))
        if kept is None and self.takes_images and any((ids == image_token(self.model.config)).any() for ids in texts):
            raise ValueError("texts with images need their cache: patch a context with FullPrefill")
        self.check_length(longest + max_new_tokens, "context, prompt and answer", "compose fewer chunks")
        self._check(options, cached=kept is not None, several=len(texts) > 1)
        # padded by a token of the text, so that repetition penalties count no other token
        padded = torch.stack([torch.cat([ids[:1].expand(longest - len(ids)), ids]) for ids in texts])
        mask = torch.stack([torch.arange(-longest, 0, device=ids.device) >= -len(ids) for ids in texts])
        options = self._without_padding(options, [longest - len(ids) for ids in texts])
        model, beams = self.model, max(self._option(options, "num_beams") or 1, num_return_sequences)
        if kept is not None:
            kept.rewind()
            kept.reserve(max_new_tokens)
            # without use_cache the model would append all tokens to the cache again
            model, options = self.row_model, options | {"use_cache": True}
        if kept is not None and beams > 1:
            kept = self.row_cache(beams * len(texts), kept.capacity - SPARE_ROWS).repeated(kept, beams)
        if do_sample and self.division is not None:  # all processes draw the same tokens
            torch.manual_seed(self.division.same(int(torch.randint(2**62, ()))))
        output = model.generate(
            input_ids=padded,
            attention_mask=mask.long(),
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            num_return_sequences=num_return_sequences,
            **options | {CACHE: kept, "return_dict_in_generate": False},
        )
        if kept is not None and beams > 1:
            self.give_back(kept)
        return [self._text(ids, options) for ids in output[:, longest:].tolist()]

    def _without_padding(self, options: dict[str, Any], padding: Sequence[int]) -> dict[str, Any]:
        """Options whose `min_length` and `no_repeat_ngram_size` see texts without this many tokens of padding each."""
        if not any(padding):
            return options
        found: list[LogitsProcessor] = []
        ends = self._option(options, "eos_token_id")
        if (least := self._option(options, "min_length")) and ends is not None:
            found.append(MinLengthLogitsProcessor(least, ends, str(self.device)))
        if size := self._option(options, "no_repeat_ngram_size"):
            found.append(NoRepeatNGramLogitsProcessor(size))
        found = [_WithoutPadding(processor, padding) for processor in found]
        found += options.get("logits_processor") or []
        return options | {"min_length": 0, "no_repeat_ngram_size": 0, "logits_processor": found}

    def _text(self, ids: list[int], options: dict[str, Any]) -> str:
        """Text of generated tokens, without the padding of a text that ends before others."""
        ends = self._option(options, "eos_token_id")
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        stop = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
        while stop is None and ids and ids[-1] == self._option(options, "pad_token_id"):
            ids = ids[:-1]
        return self.decoder.decode(ids[:stop], skip_special_tokens=True)

    def _option(self, options: dict[str, Any], name: str) -> Any:
        return options.get(name, getattr(self.model.generation_config, name, None))

    def _check(self, options: dict[str, Any], cached: bool, several: bool) -> None:
        """Reject options of `model.generate` that are not supported, given by name or by its config."""
        if options.get("generation_config") is not None or options.get("return_dict_in_generate"):
            raise ValueError(
                "the result is text: leave out generation_config and return_dict_in_generate, and pass options by "
                "name, such as max_new_tokens=3"
            )
        if given := [name for name in GIVEN if options.get(name) is not None]:
            raise ValueError(f"leave out {', '.join(given)}: context and prompt set the text, the cache and the mask")
        for name in UNSUPPORTED if cached else ():
            if (value := self._option(options, name)) is not None:
                raise ValueError(f"a cached context does not support {name}: pass {name}=None, not {value!r:.40}")
        stops = options.get("stop_strings") or options.get("stopping_criteria")
        if several and stops and self._option(options, "eos_token_id") is None:
            raise ValueError(
                "several texts that end at stop_strings or stopping_criteria need eos_token_id, which pads the texts "
                "that end first: pass it, or ask one question at a time"
            )


class _WithoutPadding(LogitsProcessor):
    """A processor of logits that sees each text without its padding.

    Args:
        processor: Processor of the logits after texts.
        padding: Number of tokens before each text; adjacent rows may continue one text.
    """

    def __init__(self, processor: Any, padding: Sequence[int]) -> None:
        self._processor, self._padding = processor, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        each = len(input_ids) // len(self._padding)
        texts = [ids[None, self._padding[row // each] :] for row, ids in enumerate(input_ids)]
        return torch.cat([self._processor(text, row) for text, row in zip(texts, scores[:, None], strict=True)])
