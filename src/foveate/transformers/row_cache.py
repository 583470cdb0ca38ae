# pyright: basic, reportPrivateImportUsage=false
"""Key/value cache whose rows are overwritten in any order, with forward passes replayed as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from foveate.methods.recompute_policy import Norm
from foveate.ops.rotary import copy_rows
from foveate.transformers.attention import CACHE, RowPass, StopForward
from foveate.transformers.rotations import position_axes
from foveate.transformers.tokens import Tokens
from foveate.utils.cuda_graph import record_graph

__all__ = ["SPARE_ROWS", "Filling", "RowCache"]

RECOMPUTE_ROWS = 8192
"""Rows of a forward pass: enough for full speed, few enough to bound memory."""
GRAPH_ROWS = 4096
"""Largest number of rows in a CUDA graph. Longer passes keep the GPU busy without graphs."""
SPARE_ROWS = 2
"""Extra rows at the end for the padding of a prompt and of a graph."""


class Filling(NamedTuple):
    """Content of a cache for one context.

    Attributes:
        keys: Keys.
        values: Values.
        rows: Their rows in the context.
        length: Number of rows of the context.
        position: Position of the first token after the context.
    """

    keys: Float[Tensor, "layers 1 groups rows dim"]
    values: Float[Tensor, "layers 1 groups rows dim"]
    rows: Int[Tensor, "rows"]
    length: int
    position: int


class RowCache(Cache):
    """Keys and values of a batch of contexts, with room for more rows. Only one thread may use it at a time.

    Contexts may differ in length. The padding of a shorter context writes to rows after its last, which none of its
    tokens attends to and the next token overwrites.

    Args:
        model: Model from `row_model`.
        shape: Numbers of layers, contexts, groups and rows, and the size of a key.
        graphs: Whether to replay passes as CUDA graphs. They need two more rows than tokens.

    Attributes:
        keys: Keys, all rows.
        values: Values, all rows.
        length: Number of rows in use, as `model.generate` counts them: tokens are padded at the left.
    """

    keys: Float[Tensor, "layers batch groups capacity dim"]
    values: Float[Tensor, "layers batch groups capacity dim"]

    def __init__(self, model: Any, shape: Sequence[int], graphs: bool = False) -> None:
        super().__init__(layers=[])
        self.model, self._graphs, self._decoder = model, graphs, model.get_decoder()
        self.keys, self.values = (torch.zeros(*shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self._stream = _stream(self.keys)
        self._replayed = _Replayed(self._forward) if graphs else None

    @property
    def batch(self) -> int:
        """Number of contexts."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Number of rows, used and free."""
        return self.keys.shape[3]

    def fill(self, contexts: Iterable[Filling]) -> "RowCache":
        """Copy keys and values of each context.

        The other rows become 0: masked keys count as 0, but only if they are finite.
        """
        self._contexts, self._shifts = list[int](), list[int]()
        for i, new in enumerate(contexts):
            self._contexts.append(new.length)
            self._shifts.append(new.position - new.length)
            for mine, states in ((self.keys[:, i], new.keys), (self.values[:, i], new.values)):
                copy_rows(mine[:, :, : len(new.rows)], states[:, 0])
                mine[:, :, len(new.rows) :] = 0
        return self

    def fits(self, batch: int, capacity: int) -> bool:
        """Whether this cache has this batch size and capacity, and is used on the current stream."""
        return (self.keys.shape[1], self.capacity, self._stream) == (batch, capacity, _stream(self.keys))

    def reserve(self, rows: int) -> None:
        """Make room for more rows after the longest prompt."""
        more = max(self._ends) + rows + SPARE_ROWS - self.capacity
        if more > 0:
            self.keys, self.values = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
            self._replayed = _Replayed(self._forward) if self._graphs else None

    def repeated(self, other: "RowCache", times: int) -> "RowCache":
        """Fill this cache with `times` adjacent copies of each context and prompt of another cache. Returns itself."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine.unflatten(1, (-1, times))[..., : other.capacity, :] = theirs[:, :, None]
        self._contexts, self._ends, self._shifts = (
            [n for n in ns for _ in range(times)] for ns in (other._contexts, other._ends, other._shifts)
        )
        self._prompted = other._prompted.repeat_interleave(times, 0)
        self.rewind()
        return self

    def joined(self, parts: Iterable[tuple["RowCache", Sequence[int]]]) -> "RowCache":
        """Fill this cache with some contexts of other caches, each after its prompt. Returns itself.

        Args:
            parts: Other caches, and the contexts to take of each.
        """
        start, self._ends, self._shifts, prompted = 0, list[int](), list[int](), list[Tensor]()
        for other, chosen in parts:
            rows = min(self.capacity, other.capacity)
            for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                mine = mine[:, start : start + len(chosen)]
                mine[..., :rows, :] = theirs[:, chosen, :, :rows]
                mine[..., rows:, :] = 0
            start += len(chosen)
            self._ends += [other._ends[i] for i in chosen]
            self._shifts += [other._shifts[i] for i in chosen]
            prompted.append(other._prompted[chosen, -1:])
        self._prompted = torch.cat(prompted)
        self._contexts = [end - 1 for end in self._ends]
        self.rewind()
        return self

    # --- passes ------------------------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[Tokens]) -> None:
        """Compute all rows. A single pass is causal attention, for which PyTorch has faster kernels."""
        self.overwrite_first(texts, causal=len(texts) * len(texts[0]) <= RECOMPUTE_ROWS)

    def overwrite_first(self, texts: Sequence[Tokens], **options: Any) -> None:
        """Overwrite the first rows by these texts, as by `overwrite`. Rows after the end of a shorter text change."""
        rows = self._from(0, max(map(len, texts)))
        batch = self._stacked(texts, [rows[: len(text)] for text in texts], list(map(len, texts)))
        if batch.images is None or batch.images.seen is None:
            batch = batch._replace(rows=rows[None])  # one for all is faster
        self.overwrite(batch, **options)

    @torch.no_grad()
    def overwrite(self, batch: "_Batch", **options: Any) -> Float[Tensor, "batch tokens width"]:
        """Final hidden states of tokens, each of which attends to the rows up to its own.

        Their keys and values overwrite their rows.

        Args:
            batch: Tokens and their rows.
            **options: Fields of `RowPass`: with `last`, the result is empty.
        """
        most = max(1, RECOMPUTE_ROWS // len(batch.ids))
        return torch.cat([self._run(part, **options) for part in batch.split(most)], 1)

    @torch.no_grad()
    def received(
        self, prompts: Sequence[Int[Tensor, "_"]], starts: Sequence[int], layers: tuple[int, ...], norm: Norm
    ) -> Float[Tensor, "batch capacity"]:
        """Attention that each row receives from the prompt after its context, averaged over these layers.

        Args:
            prompts: Token ids of a prompt for each context. They overwrite unused rows.
            starts: Position of the first token of each prompt.
            layers: Layers.
            norm: Norm over the tokens of the prompt.
        """
        rows, ends = self._after(prompts)
        texts = [Tokens.text(ids, self._axes, start) for ids, start in zip(prompts, starts, strict=True)]
        return self._run(self._stacked(texts, rows, ends), last=max(layers), scoring=layers, norm=norm)

    @torch.no_grad()
    def repair(
        self,
        contexts: Sequence[Tokens],
        rows: Sequence[Int[Tensor, "_"]],
        prompts: Sequence[Int[Tensor, "_"]],
    ) -> None:
        """Recompute some rows, and in the same pass the prompts after them, whose result `append` then returns.

        Args:
            contexts: Tokens of each context.
            rows: Rows of each context to recompute, ascending.
            prompts: Token ids of a prompt for each context.
        """
        after, self._ends = self._after(prompts)
        starts = [start + shift for start, shift in zip(self._contexts, self._shifts, strict=True)]
        asked = [Tokens.text(prompt, self._axes, start) for prompt, start in zip(prompts, starts, strict=True)]
        texts = [
            Tokens.joined([context.chosen(some), prompt])
            for context, some, prompt in zip(contexts, rows, asked, strict=True)
        ]
        places = [torch.cat(pair) for pair in zip(rows, after, strict=True)]
        batch = self._stacked(texts, places, self._ends, contexts)
        hidden, longest = self.overwrite(batch), max(map(len, prompts))
        ends = [(part[: len(text)][-len(prompt) :]) for part, text, prompt in zip(hidden, texts, prompts, strict=True)]
        self._prompted = torch.stack([pad(end, (0, 0, longest - len(end), 0)) for end in ends])
        self.rewind()

    def rewind(self) -> None:
        """Go back to before the prompts."""
        self._lengths: Tensor | None = None
        self.length = max(self._ends) - self._prompted.shape[1]

    def append(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens width"]:
        """Final hidden states of tokens that are appended as the next rows.

        The first tokens after `rewind` are the prompts, padded at the left.
        """
        self.length += ids.shape[1]
        if self._lengths is None:
            self._lengths = torch.cat([self._from(end, 1) for end in self._ends])[:, None]
            shifts = [self._from(shift, 1) for shift in self._shifts]
            self._shifted = torch.cat(shifts)[:, None] if any(self._shifts) else 0
            return self._prompted
        rows = self._lengths + self._from(0, ids.shape[1])
        self._lengths = self._lengths + ids.shape[1]
        return self.overwrite(_Batch(ids, rows, (rows + self._shifted).expand(self._axes, -1, -1)))

    def advance(self, ids: Int[Tensor, "batch 1"]) -> None:
        """Append a token to each context, as the end of its prompt."""
        self._prompted = self.append(ids.to(self.keys.device))
        more = self.length - max(self._ends)
        self._ends = [end + more for end in self._ends]
        self._contexts = [end - 1 for end in self._ends]
        self.rewind()

    def _from(self, row: int, count: int) -> Int[Tensor, "count"]:
        return torch.arange(row, row + count, device=self.keys.device)  # from numbers, without waiting for the device

    def _after(self, prompts: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Row of each prompt token after the contexts, and the row after each prompt."""
        pairs = list(zip(self._contexts, map(len, prompts), strict=True))
        return [self._from(*pair) for pair in pairs], [sum(pair) for pair in pairs]

    @property
    def _axes(self) -> int:
        return position_axes(self._decoder.config)

    def _stacked(
        self,
        texts: Sequence[Tokens],
        rows: Sequence[Tensor],
        ends: Sequence[int],
        wholes: Sequence[Tokens] | None = None,
    ) -> "_Batch":
        """Texts padded to one length. Padding is at the rows `ends`.

        Args:
            texts: Tokens.
            rows: Row of each token.
            ends: Row of the padding of each text.
            wholes: All tokens of each context, of which the texts are some. None: the texts themselves.
        """
        longest = max(map(len, texts))
        each = zip(rows, ends, strict=True)
        at = torch.stack([pad(places, (0, longest - len(places)), value=end) for places, end in each])
        counted = torch.stack([self._from(0, longest) < len(text) for text in texts])
        ids = pad_sequence([text.ids for text in texts], batch_first=True)
        positions = torch.stack([pad(text.positions, (0, longest - len(text))) for text in texts], 1)
        joined = Tokens.joined(texts)
        if joined.features is None:
            return _Batch(ids, at, positions, counted)
        image = [pad(each, (0, longest - len(each)), value=-1) for each in joined.image.split(list(map(len, texts)))]
        seen = None
        if self.model.config.model_type == "gemma3":  # tokens of an image attend to all of it
            seen = at.clone()
            for mine, whole, some in zip(seen, wholes or texts, rows, strict=True):
                of_whole = some < len(whole)  # the others are of the prompt
                mine[: len(some)][of_whole] = whole.image_ends()[some[of_whole]]
        return _Batch(ids, at, positions, counted, _Images(torch.stack(image), joined.features, seen))

    def _run(self, batch: "_Batch", **options: Any) -> Tensor:
        tokens = batch.ids.shape[1]
        if self._replayed is None or batch.images is not None or batch.ids.numel() > GRAPH_ROWS:
            return self._forward(*batch.padded(0), images=batch.images, **options)
        # the padding of a graph goes to the row after the last one, which no other token attends to
        ids, rows, positions, counted = batch.padded(-tokens % (1 if tokens == 1 else 16 if tokens <= 256 else 64))
        out = self._replayed(ids, rows, positions, counted, **options)
        return out if options.get("scoring") else out[:, :tokens]

    def _forward(
        self,
        ids: Int[Tensor, "batch tokens"],
        rows: Int[Tensor, "#batch tokens"],
        positions: Int[Tensor, "axes #batch tokens"],
        counted: Bool[Tensor, "#batch tokens"],
        images: "_Images | None" = None,
        **options: Any,
    ) -> Tensor:
        # a copy, because attention caches results by the tensor of rows, and graphs change their inputs
        self._row_pass = RowPass(rows.clone(), counted, seen=images and images.seen, **options)
        inputs = {"input_ids": ids} if images is None else images.inputs(ids, self._decoder.get_input_embeddings())
        at = positions[0] if len(positions) == 1 else positions
        with suppress(StopForward):
            return self._decoder(**inputs, position_ids=at, **{CACHE: self}, row_pass=self._row_pass).last_hidden_state
        received = self._row_pass.received
        return torch.stack(received).mean(0) if received else self.keys.new_empty(len(ids), ids.shape[1], 0)

    # --- the interface of `transformers` -----------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        """Keys and values of a layer, with new ones in the rows of the current pass."""
        rows = self._row_pass.rows
        for states, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if len(rows) == 1:
                states.index_copy_(2, rows[0], new)
            else:
                states.scatter_(2, rows[:, None, :, None].expand_as(new), new)
        return self.keys[layer_idx], self.values[layer_idx]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it keeps a state instead of rows: none does, or `generate` would pass all tokens."""
        return [False] * len(self.keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens passed by `model.generate`, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: Int[Tensor, "batch"]) -> None:
        """Reorder the beams of each prompt: the rows after the prompts."""
        added = self.length - max(self._ends)
        for states in (self.keys, self.values):
            rows = states[..., min(self._ends) : max(self._ends) + added, :]
            rows.copy_(rows[:, beam_idx])


class _Images(NamedTuple):
    """Image tokens of a batch.

    Attributes:
        image: Row of the features of each token; -1 for text.
        features: See `Tokens`.
        seen: Last row visible to each token, if tokens of an image attend to all of it, as in Gemma 3.
    """

    image: Int[Tensor, "batch tokens"]
    features: Float[Tensor, "levels rows width"]
    seen: Int[Tensor, "batch tokens"] | None = None

    def inputs(self, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Arguments of a decoder."""
        mask = self.image >= 0
        first, *later = self.features
        texts = embed(ids.masked_fill(mask, 0))  # the placeholder may be outside of the vocabulary
        embeddings = torch.where(mask[..., None], first[self.image.clamp(min=0)], texts)
        if not later:
            return {"inputs_embeds": embeddings}
        added = [level[self.image[mask]] for level in later]
        return {"inputs_embeds": embeddings, "visual_pos_masks": mask, "deepstack_visual_embeds": added}


class _Batch(NamedTuple):
    """Tokens of a forward pass.

    Attributes:
        ids: Token ids.
        rows: Row of each token, ascending.
        positions: Position of each token.
        counted: Mask of the tokens that are not padding. None: there is no padding.
        images: Images. None: all are tokens of text.
    """

    ids: Int[Tensor, "batch tokens"]
    rows: Int[Tensor, "#batch tokens"]
    positions: Int[Tensor, "axes #batch tokens"]
    counted: Bool[Tensor, "batch tokens"] | None = None
    images: _Images | None = None

    def split(self, most: int) -> Iterator["_Batch"]:
        """Parts of at most `most` tokens for each context; images that are seen as a whole are not divided."""
        tokens = self.ids.shape[1]
        most = tokens if self.images and self.images.seen is not None else most
        for start in range(0, tokens, most):
            some = slice(start, start + most)
            images = self.images and self.images._replace(image=self.images.image[:, some])
            yield _Batch(self.ids[:, some], self.rows[:, some], self.positions[..., some], None, images)

    def padded(self, more: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, rows, positions and `counted` with `more` tokens of padding, in the rows after the last."""
        after = torch.arange(1, more + 1, device=self.ids.device)
        rows, positions = (
            torch.cat([x, x[..., -1:] + after.expand(*x.shape[:-1], -1)], -1) for x in (self.rows, self.positions)
        )
        counted = torch.ones_like(self.rows, dtype=torch.bool) if self.counted is None else self.counted
        return pad(self.ids, (0, more)), rows, positions, pad(counted, (0, more))


def _stream(tensor: Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class _Replay(NamedTuple):
    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    output: Tensor


class _Replayed:
    """A function that becomes a CUDA graph at its second call with tensors of the same shapes."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self._pool = function, torch.cuda.graph_pool_handle()
        self._replays: dict[Any, _Replay | None] = {}

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        key = *(tensor.shape for tensor in tensors), *options.items()
        if key not in self._replays:
            self._replays[key] = None
            return self.function(*tensors, **options)  # compiles kernels
        replay = self._replays[key]
        if replay is None:
            inputs = tuple(tensor.clone() for tensor in tensors)
            recorded, output = record_graph(lambda: self.function(*inputs, **options), self._pool)
            replay = self._replays[key] = _Replay(recorded, inputs, output)
        for fixed, tensor in zip(replay.inputs, tensors, strict=True):
            fixed.copy_(tensor)
        replay.replay()
        return replay.output.clone()  # the next replay overwrites it
