# pyright: basic, reportPrivateImportUsage=false
"""From documents to cached chunks, and from chunks to a context."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from foveate.ops.rotary import rotate
from foveate.transformers.chunk import ChunkCache, differ
from foveate.transformers.context import Context
from foveate.transformers.families import check_model
from foveate.transformers.fingerprint import fingerprint
from foveate.transformers.layers import unrotated

__all__ = ["ChunkEncoder"]

Text = str | Sequence[int]
ONE_ANSWER = {"num_beams": 1, "num_return_sequences": 1, "prompt_lookup_num_tokens": None, "assistant_model": None,
              "cache_implementation": None}  # fmt: skip
AT_ONCE = 2048  # rows that are turned at once


class ChunkEncoder:
    """Computes the cache of documents, each alone, and composes contexts of them.

    The model is borrowed: nothing of it is changed. Make a new encoder when its weights or adapters have changed.

    Examples:
        >>> encoder = ChunkEncoder(model, tokenizer)
        >>> chunks = encoder.encode(documents)
        >>> context = encoder.compose([chunks[2], chunks[0]])
        >>> with context.patch(foveate.InfoFlowKV(), "Question: who was it? Answer:") as patched:
        ...     print(patched.generate())

    Args:
        model: A causal language model of the families Llama, Qwen2, Qwen3 and Mistral, in evaluation mode.
        tokenizer: Its tokenizer.
        prefix: What stands once in front of every context, and in front of each document while it is computed: text,
            or token ids. None is the tokenizer's start-of-text token, or nothing where it has none.

    Raises:
        ValueError: If the model cannot be served; the message says why.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, prefix: Text | None = None) -> None:
        check_model(model)
        self.model: Any = model
        self.tokenizer = tokenizer
        if prefix is None:
            prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.prefix = self.tokens(prefix)
        self.fingerprint = fingerprint(model, tokenizer, tuple(self.prefix.tolist()))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model and its caches."""
        return self.model.dtype

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """The shape of the keys, and of the values, of a chunk of so many tokens: layers, groups, rows, dim."""
        config = self.model.config
        dim = self.model.model.layers[0].self_attn.head_dim
        return config.num_hidden_layers, config.num_key_value_heads, len(self.prefix) + tokens, dim

    def tokens(self, text: Text) -> Int[Tensor, "tokens"]:
        """The token ids of a text, without special tokens; ids stay as they are.

        Raises:
            ValueError: If it is neither a text nor ids of the model's vocabulary.
        """
        if isinstance(text, int):
            raise ValueError(f"give a text, or a list of token ids, not the number {text}: [{text}]")
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else list(text)
        tokens, size = torch.tensor(ids, dtype=torch.long), self.model.config.vocab_size
        if len(wrong := tokens[(tokens < 0) | (tokens >= size)]):
            raise ValueError(f"token {wrong[0]} is none of the model's, 0 to {size - 1}: use its own tokenizer")
        return tokens.to(self.device)

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Refuse what is longer than the model's context.

        Raises:
            ValueError: With both lengths and the remedy.
        """
        if tokens > (most := self.model.config.max_position_embeddings):
            raise ValueError(f"{what}: {tokens} tokens, where the model takes {most}; {remedy}{self._stretch(most)}")

    def _stretch(self, most: int) -> str:
        """What to say of a model whose positions reach further than it takes."""
        rope = self.model.config.rope_parameters
        if (far := int(rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or 0))) > most:
            return f", or load the model with max_position_embeddings={far}, as far as its {rope['rope_type']} goes"
        return ""

    def encode(self, texts: Sequence[Text]) -> list[ChunkCache]:
        """The cache of each document. All are checked before the first is computed.

        Args:
            texts: Documents, as text or as token ids.

        Raises:
            ValueError: If a document is empty, longer than the model's context, or too much for the model's float16.
        """
        if isinstance(texts, str):
            raise ValueError(f"give a list of documents, not one text: [{texts[:20]!r}]")
        documents = [self.tokens(text) for text in texts]
        for i, ids in enumerate(documents):
            if not len(ids):
                raise ValueError(f"document {i} is empty: leave it out")
            self.check_length(len(self.prefix) + len(ids), f"document {i} with its prefix", "cut it into several")
        chunks: list[ChunkCache] = []
        for i, ids in enumerate(documents):
            chunks.append(chunk := self._encode(ids))
            if not (chunk.keys.isfinite() & chunk.values.isfinite()).all():
                name = str(self.dtype).removeprefix("torch.")
                raise ValueError(f"document {i} overflows {name}: load the model in bfloat16 or float32")
        return chunks

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "tokens"],
        cache: DynamicCache | None = None,
        *,
        max_new_tokens: int = 32,
        do_sample: bool = False,
        **options: Any,
    ) -> str:
        """What the model says next, by `model.generate`: greedy unless asked otherwise.

        Args:
            ids: All tokens before it.
            cache: Of the first of them. Without one the model reads them all: the full prefill.
            max_new_tokens: Most tokens of the answer.
            do_sample: Draw tokens at random.
            **options: Whatever else `model.generate` takes, by name. With a cache there are neither beams nor guesses.

        Raises:
            ValueError: If tokens and answer may become too long for the model, or an option asks for more than one
                text, or for what a cache of one context cannot do.
        """
        self.check_length(len(ids) + max_new_tokens, "context, prompt and answer", "compose fewer chunks")
        options = self._options(options, cached=cache is not None)
        output = self.model.generate(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            **options,
        )
        return self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)

    def _options(self, options: dict[str, Any], cached: bool) -> dict[str, Any]:
        """What `model.generate` is told, those of the model itself considered; without a cache it may use beams."""
        if options.get("generation_config") is not None or options.get("return_dict_in_generate"):
            raise ValueError(
                "what comes out is one text: leave out generation_config and return_dict_in_generate, and give "
                "options by name, such as max_new_tokens=3"
            )
        usual = self.model.generation_config
        for name in ONE_ANSWER if cached else ("num_return_sequences",):
            value, only = options.get(name, getattr(usual, name, None)), ONE_ANSWER[name]
            if value not in (None, only):
                raise ValueError(f"one answer is written, behind one context: give {name}={only}, not {value!r:.40}")
        fixed = {"return_dict_in_generate": False}
        # without use_cache the model would read all tokens again, behind the cache
        return options | fixed | ({"use_cache": True} if cached else {})

    @torch.no_grad()
    def _encode(self, ids: Int[Tensor, "tokens"]) -> ChunkCache:
        cache: Any = DynamicCache(config=self.model.config)
        layers = range(self.model.config.num_hidden_layers)
        with unrotated(self.model, "k", layers) as keys:
            self.model.model(input_ids=torch.cat([self.prefix, ids])[None], past_key_values=cache)
        values = torch.stack([layer.values[0] for layer in cache.layers])
        return ChunkCache(ids, torch.stack([keys[layer] for layer in layers]), values, dict(self.fingerprint))

    def compose(self, chunks: Sequence[ChunkCache]) -> Context:
        """The chunks side by side behind one prefix, in this order; the same chunk may come twice.

        Raises:
            ValueError: If there are none, one is of another model, or together they exceed the model's context.
        """
        if not chunks:
            raise ValueError("a context needs one chunk or more")
        for i, chunk in enumerate(chunks):
            differ(f"chunk {i}", chunk.fingerprint, self.fingerprint)
        rows = len(self.prefix) + sum(len(chunk.ids) for chunk in chunks)
        self.check_length(rows, f"{len(chunks)} chunks with their prefix", "compose fewer")
        return Context(self, tuple(chunks))

    @torch.no_grad()
    def keys_at(
        self, chunks: Sequence[ChunkCache], positions: Int[Tensor, "rows"]
    ) -> list[Float[Tensor, "1 groups rows dim"]]:
        """For each layer the keys of the chunks, turned to these positions. Rotated in float32 at least.

        Args:
            chunks: The first one counts with its prefix.
            positions: Of the prefix, then of each chunk's tokens.
        """
        wide = torch.promote_types(self.dtype, torch.float32)
        tables = self.model.model.rotary_emb(torch.empty(0, dtype=wide, device=self.device), positions[None])

        def turned(keys: Tensor, start: int) -> Tensor:
            return rotate(keys, *(table[0, start : start + keys.shape[2]] for table in tables))

        return self._side_by_side([chunk.keys for chunk in chunks], turned)

    def values_of(self, chunks: Sequence[ChunkCache]) -> list[Float[Tensor, "1 groups rows dim"]]:
        """For each layer the values of the chunks, the prefix of the first one in front."""
        return self._side_by_side([chunk.values for chunk in chunks], lambda values, start: values)

    def _side_by_side(
        self, parts: Sequence[Tensor], change: Callable[[Tensor, int], Tensor]
    ) -> list[Float[Tensor, "1 groups rows dim"]]:
        """For each layer what becomes of the parts [layers, groups, rows, dim], of which one alone has a prefix."""
        first, *others = parts
        parts = [first, *(other[:, :, len(self.prefix) :] for other in others)]
        layers, groups, _, dim = first.shape
        whole = first.new_empty(layers, groups, sum(part.shape[2] for part in parts), dim)
        start = 0
        for piece in (piece for part in parts for piece in part.split(AT_ONCE, dim=2)):
            whole[:, :, start : start + piece.shape[2]] = change(piece, start)
            start += piece.shape[2]
        return list(whole[:, None])
