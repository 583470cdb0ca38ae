# pyright: basic, reportPrivateImportUsage=false
"""Key/value caches: of one document, in memory and on disk, and of contexts that are composed of documents."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.attention_received import attention_received
from foveate.ops.rotary import rotate
from foveate.transformers.attention import (
    OverwriteLayer,
    ReadOnlyLayer,
    StopForward,
    attend_by_rows,
    capture_unrotated,
    fill,
    row_index,
)
from foveate.transformers.fingerprint import digest
from foveate.transformers.model import LanguageModel
from foveate.utils.files import write_whole

__all__ = ["CacheBatch", "Choice", "ChunkCache", "PromptedBatch", "check_fingerprint", "open_chunk"]

RECOMPUTE_ROWS = 8192
"""Rows of a forward pass: enough for full speed, few enough to bound memory."""
ROTATE_ROWS = 2048


@dataclass(frozen=True, eq=False)
class ChunkCache:
    """Keys and values of one document that was encoded alone, after the prefix.

    Attributes:
        ids: Token ids of the document, without the prefix.
        keys: Keys before rotation, prefix first, in the model's dtype and on its device.
        values: Values, prefix first.
        fingerprint: Hashes of model, tokenizer, dtype, prefix and file format, by name.
    """

    ids: Int[Tensor, "tokens"]
    keys: Float[Tensor, "layers groups rows dim"]
    values: Float[Tensor, "layers groups rows dim"]
    fingerprint: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, which appears only when it is complete."""
        tensors = {name: getattr(self, name).contiguous() for name in ("ids", "keys", "values")}
        write_whole(Path(path), save(tensors, {**self.fingerprint, "text": digest(self.ids.tolist())}))

    @classmethod
    def load(cls, path: str | Path, encoder: LanguageModel, text: str | None = None) -> "ChunkCache":
        """Read a file that `save` has written, onto the encoder's device.

        Args:
            path: File to read.
            encoder: Encoder with the model, tokenizer and prefix that the chunk was computed with.
            text: Expected document. None accepts any.

        Raises:
            ValueError: If the file is damaged or no chunk, or if model, tokenizer, dtype, prefix or text differ.
            OSError: If the file cannot be read.
        """
        with open_chunk(path, encoder) as file:
            text_digest = file.metadata().get("text")
            # copies: memory-mapped pages would crash the process if the file were truncated later
            ids, keys, values = (file.get_tensor(name).clone() for name in ("ids", "keys", "values"))
        config, rows = encoder.model.config, len(encoder.prefix) + ids.numel()
        head_dim = encoder.model.model.layers[0].self_attn.head_dim
        shape = config.num_hidden_layers, config.num_key_value_heads, rows, head_dim
        fits = ids.ndim == 1 and all(part.shape == shape and part.dtype == encoder.dtype for part in (keys, values))
        if not fits or digest(ids.tolist()) != text_digest or not (keys.isfinite() & values.isfinite()).all():
            raise ValueError(f"{path} holds other tensors than its header says: encode the document again")
        if text is not None and encoder.tokens(text).tolist() != ids.tolist():
            raise ValueError(f"{path} was made from another text: encode the document again")
        return cls(ids, keys, values, dict(encoder.fingerprint))


@contextmanager
def open_chunk(path: str | Path, encoder: LanguageModel) -> Generator[Any]:
    """Open the file of a cached chunk and check its fingerprint, before any tensor is read.

    Raises:
        ValueError: If the file is truncated or no chunk, or if model, tokenizer, dtype or prefix differ.
    """
    try:
        with safe_open(path, "pt", device=str(encoder.device)) as file:
            check_fingerprint(f"{path}", file.metadata() or {}, encoder.fingerprint)
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete chunk file ({error}): encode the document again") from None


def check_fingerprint(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
    """Raise an error if a chunk was computed with something else.

    Raises:
        ValueError: With the names of the entries that differ.
    """
    if names := [name for name in expected if found.get(name) != expected[name]]:
        raise ValueError(f"{what} was made with another {', '.join(names)}: encode the document again")


class CacheBatch:
    """Caches of a batch of contexts, each composed of chunks whose keys are rotated to their new positions.

    Chunk j has the same length in all contexts of the batch.

    Args:
        model: Causal language model of `transformers`.
        prefix: Token ids before each context.
        chunks: Chunks of each context, in order.

    Attributes:
        ids: Token ids of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        keys: Keys of each layer, [batch, groups, rows, dim].
        values: Values of each layer, [batch, groups, rows, dim].
    """

    def __init__(self, model: Any, prefix: Int[Tensor, "prefix"], chunks: Sequence[Sequence[ChunkCache]]) -> None:
        self.model, self.prefix, self.chunks = model, prefix, [tuple(context) for context in chunks]
        lengths, *others = ([len(chunk.ids) for chunk in context] for context in self.chunks)
        if any(other != lengths for other in others):
            raise ValueError(
                "contexts of a batch need chunks of the same lengths in the same order: compose each alone"
            )
        self.ids = torch.stack([torch.cat([prefix, *(chunk.ids for chunk in context)]) for context in self.chunks])
        self.spans: Spans = tuple(pairwise(accumulate(lengths, initial=len(prefix))))
        self.keys = self.keys_at(torch.arange(self.ids.shape[1]))
        self.values = self._concatenated("values", None)
        self._overwritten: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, index, values before

    @property
    def changed(self) -> bool:
        """Whether rows have been overwritten since the last `restore`."""
        return bool(self._overwritten)

    def dynamic_cache(self) -> DynamicCache:
        """All rows as a `DynamicCache`. It grows by copies, so that a forward pass leaves the rows unchanged."""
        return fill(DynamicCache(config=self.model.config), self.keys, self.values)

    @torch.no_grad()
    def keys_at(self, positions: Int[Tensor, "rows"]) -> list[Float[Tensor, "batch groups rows dim"]]:
        """Keys of each layer, rotated to these positions in float32 or wider."""
        wide = torch.promote_types(self.model.dtype, torch.float32)
        empty = torch.empty(0, dtype=wide, device=self.ids.device)
        cos, sin = self.model.model.rotary_emb(empty, positions[None].to(self.ids.device))
        return self._concatenated("keys", (cos[0], sin[0]))

    def _concatenated(
        self, name: str, rotation: tuple[Tensor, Tensor] | None
    ) -> list[Float[Tensor, "batch groups rows dim"]]:
        """Keys or values of the chunks side by side after one prefix, for each layer."""
        first = getattr(self.chunks[0][0], name)
        layers, groups, _, dim = first.shape
        whole = first.new_empty(layers, len(self.chunks), groups, self.ids.shape[1], dim)
        for i, context in enumerate(self.chunks):
            start = 0
            for chunk in context:
                states = getattr(chunk, name)[:, :, len(self.prefix) if start else 0 :]
                for part in states.split(ROTATE_ROWS, dim=2):
                    stop = start + part.shape[2]
                    if rotation is not None:
                        part = rotate(part, *(table[start:stop] for table in rotation))
                    whole[:, i, :, start:stop] = part
                    start = stop
        return list(whole)

    @torch.no_grad()
    def score(
        self, prompts: Int[Tensor, "batch prompt"], layers: Sequence[int], norm: Norm, geometry: Geometry
    ) -> Float[Tensor, "batch rows"]:
        """Attention that each row receives from the prompt after its context, averaged over these layers.

        Args:
            prompts: Token ids of one prompt for each context.
            layers: Layer numbers.
            norm: Norm over the tokens of the prompt.
            geometry: Positions of chunks and prompt while they are scored; see `InfoFlowKV`.
        """
        model = self.model.model
        positions, start = places(geometry, self.spans)
        prompt_positions = torch.arange(start, start + prompts.shape[1], device=prompts.device)[None]
        keys = self.keys if geometry == "global" else self.keys_at(positions)
        reading = [ReadOnlyLayer(last=layer == max(layers)) for layer in range(len(keys))]
        cache = fill(Cache(layers=[*reading]), keys, self.values)
        with attend_by_rows(self.model), capture_unrotated(self.model, "q", layers) as queries, suppress(StopForward):
            model(input_ids=prompts, position_ids=prompt_positions, past_key_values=cache)
        cos, sin = (table[0] for table in model.rotary_emb(queries[layers[0]], prompt_positions))

        def received(layer: int, context: int) -> Float[Tensor, "rows"]:
            return attention_received(
                rotate(queries[layer][context], cos, sin),
                torch.cat([keys[layer][context], reading[layer].new[context]], dim=1),
                model.layers[layer].self_attn.scaling,
                norm,
            )

        contexts = range(len(prompts))
        return torch.stack([torch.stack([received(layer, i) for layer in layers]).mean(0) for i in contexts])

    @torch.no_grad()
    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
        """Mean square change of each row's values or keys in layer 1 when layers 0 and 1 are recomputed.

        All rows of these two layers stay overwritten until `restore`.

        Raises:
            ValueError: If the model has only one layer.
        """
        if len(self.keys) < 2:
            raise ValueError("CacheBlend ranks rows by layer 1, but the model has only layer 0: use InfoFlowKV")
        layer = {"v": self.values, "k": self.keys}[rank][1]
        stale = layer.clone()
        self.recompute(torch.arange(self.ids.shape[1]).expand(len(self.ids), -1), layers=2)
        return (layer - stale).float().square().mean((1, 3))

    @torch.no_grad()
    def recompute(self, rows: Int[Tensor, "batch chosen"], layers: int | None = None) -> None:
        """Run these rows through the model, each over all rows before it, and overwrite them until `restore`.

        Args:
            rows: Row numbers, ascending.
            layers: Number of layers to recompute. None recomputes all.
        """
        if not rows.shape[1]:
            return
        rows, layers = rows.to(self.ids.device), layers or len(self.keys)
        for states in self.keys[:layers] + self.values[:layers]:
            index = row_index(rows, states)
            self._overwritten.append((states, index, states.gather(2, index)))
        for part in rows.split(RECOMPUTE_ROWS, dim=1):
            overwriting = [OverwriteLayer(part, last=layer == layers - 1) for layer in range(len(self.keys))]
            cache = fill(Cache(layers=[*overwriting]), self.keys, self.values)
            with attend_by_rows(self.model), suppress(StopForward):
                self.model.model(
                    input_ids=self.ids.gather(1, part), position_ids=part, past_key_values=cache, rows=part
                )

    def restore(self) -> None:
        """Undo every `recompute` and `kv_deviation`, bit for bit."""
        while self._overwritten:
            states, index, before = self._overwritten.pop()
            states.scatter_(2, index, before)

    @torch.no_grad()
    def logits(self, prompts: Int[Tensor, "batch prompt"], last: int = 0) -> Float[Tensor, "batch last vocabulary"]:
        """Next-token logits after each of the last tokens of the prompts, or after all of them if `last` is 0."""
        with attend_by_rows(self.model):
            cache = self.dynamic_cache()
            return self.model(input_ids=prompts, past_key_values=cache, logits_to_keep=last).logits

    def reordered(self, orders: Sequence[Sequence[int]]) -> "CacheBatch":
        """The same contexts with their chunks in these orders."""
        chunks = [[context[i] for i in order] for context, order in zip(self.chunks, orders, strict=True)]
        return CacheBatch(self.model, self.prefix, chunks)


class Choice(NamedTuple):
    """The rows that recompute policies have chosen.

    Attributes:
        batch: Caches, with their chunks reordered where a policy asked for that.
        orders: Chunk at each place, for each context.
        rows: Rows to recompute, ascending.
    """

    batch: CacheBatch
    orders: list[tuple[int, ...]]
    rows: Int[Tensor, "batch chosen"]


class PromptedBatch:
    """A batch of composed caches with a prompt after each, of which policies choose the rows to recompute.

    Args:
        batch: Caches without recomputed rows.
        prompts: Token ids of one prompt for each context.
    """

    def __init__(self, batch: CacheBatch, prompts: Int[Tensor, "batch prompt"]) -> None:
        self.batch, self.prompts = batch, prompts
        self._scores: dict[Any, Tensor] = {}
        self._deviation: dict[str, Tensor] = {}

    def choose(self, policies: Sequence[RecomputePolicy]) -> Choice:
        """What each policy chooses for its context. All of them must choose the same number of rows."""
        self._deviation.clear()
        contexts = range(len(self.batch.ids))
        orders = [policies[i].arrange(_Prompted(self, i)) for i in contexts]
        prompted = self
        if any(order != tuple(range(len(order))) for order in orders):
            prompted = PromptedBatch(self.batch.reordered(orders), self.prompts)
        rows = torch.stack([policies[i].rows(_Prompted(prompted, i)).cpu() for i in contexts])
        return Choice(prompted.batch, orders, rows)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "batch rows"]:
        """`CacheBatch.score` of the prompts, computed once for all contexts and choices."""
        key = layers, norm, geometry
        if key not in self._scores:
            self._scores[key] = self.batch.score(self.prompts, layers, norm, geometry)
        return self._scores[key]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
        """`CacheBatch.kv_deviation`, computed once for all contexts of a choice."""
        if rank not in self._deviation:
            self._deviation[rank] = self.batch.kv_deviation(rank)
        return self._deviation[rank]


class _Prompted(NamedTuple):
    """One context of a batch, as a policy sees it: a `foveate.methods.recompute_policy.ComposedCache`."""

    prompted: PromptedBatch
    context: int

    @property
    def spans(self) -> Spans:
        return self.prompted.batch.spans

    @property
    def layers(self) -> int:
        return len(self.prompted.batch.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        return self.prompted.received(layers, norm, geometry)[self.context]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        return self.prompted.kv_deviation(rank)[self.context]
