# pyright: basic, reportPrivateImportUsage=false
"""Key/value cache whose rows are overwritten in any order, with forward passes replayed as CUDA graphs."""

from collections.abc import Callable, Iterable, Sequence
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
from foveate.utils.cuda_graph import record_graph

__all__ = ["SPARE_ROWS", "RowCache"]

RECOMPUTE_ROWS = 8192
"""Rows of a forward pass: enough for full speed, few enough to bound memory."""
GRAPH_ROWS = 4096
"""Largest number of rows in a CUDA graph. Longer passes keep the GPU busy without graphs."""
SPARE_ROWS = 2
"""Extra rows at the end for the padding of a prompt and of a graph."""


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
        self.model, self._graphs = model, graphs
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

    def fill(self, contexts: Iterable[tuple[Tensor, Tensor]]) -> "RowCache":
        """Copy keys and values [layers, 1, groups, rows, dim] of each context.

        The other rows become 0: masked keys count as 0, but only if they are finite.
        """
        lengths: list[int] = []
        for i, context in enumerate(contexts):
            lengths.append(context[0].shape[3])
            for mine, new in zip((self.keys[:, i], self.values[:, i]), context, strict=True):
                copy_rows(mine[:, :, : lengths[-1]], new[:, 0])
                mine[:, :, lengths[-1] :] = 0
        self._contexts = lengths
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
        self._contexts, self._ends = ([n for n in ns for _ in range(times)] for ns in (other._contexts, other._ends))
        self._prompted = other._prompted.repeat_interleave(times, 0)
        self.rewind()
        return self

    def joined(self, parts: Iterable[tuple["RowCache", Sequence[int]]]) -> "RowCache":
        """Fill this cache with some contexts of other caches, each after its prompt. Returns itself.

        Args:
            parts: Other caches, and the contexts to take of each.
        """
        start, self._ends, prompted = 0, list[int](), list[Tensor]()
        for other, chosen in parts:
            rows = min(self.capacity, other.capacity)
            for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                mine = mine[:, start : start + len(chosen)]
                mine[..., :rows, :] = theirs[:, chosen, :, :rows]
                mine[..., rows:, :] = 0
            start += len(chosen)
            self._ends += [other._ends[i] for i in chosen]
            prompted.append(other._prompted[chosen, -1:])
        self._prompted = torch.cat(prompted)
        self._contexts = [end - 1 for end in self._ends]
        self.rewind()
        return self

    # --- passes ------------------------------------------------------------------------------------------------------

    def encode(self, ids: Int[Tensor, "batch capacity"]) -> None:
        """Compute all rows. A single pass is causal attention, for which PyTorch has faster kernels."""
        self.overwrite(ids, self._from(0, ids.shape[1])[None], causal=ids.numel() <= RECOMPUTE_ROWS)

    @torch.no_grad()
    def overwrite(
        self, ids: Int[Tensor, "batch tokens"], rows: Int[Tensor, "#batch tokens"], **options: Any
    ) -> Float[Tensor, "batch tokens width"]:
        """Final hidden states of tokens, each of which attends to the rows up to its own.

        Their keys and values overwrite these rows.

        Args:
            ids: Token ids.
            rows: Row of each token, ascending; also its position.
            **options: Fields of `RowPass`: with `last`, the result is empty.
        """
        most = max(1, RECOMPUTE_ROWS // len(ids))
        parts = zip(ids.split(most, 1), rows.split(most, 1), strict=True)
        return torch.cat([self._run(*part, part[1], **options) for part in parts], 1)

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
        positions = [at + start - rows for at, start, rows in zip(rows, starts, self._contexts, strict=True)]
        ids, at, counted = _padded(prompts, rows, ends)
        shifted = _padded(prompts, positions, ends)[1]
        return self._run(ids, at, shifted, counted, last=max(layers), scoring=layers, norm=norm)

    @torch.no_grad()
    def repair(
        self,
        ids: Sequence[Int[Tensor, "_"]],
        rows: Sequence[Int[Tensor, "_"]],
        prompts: Sequence[Int[Tensor, "_"]],
    ) -> None:
        """Recompute some rows, and in the same pass the prompts after them, whose result `append` then returns.

        Args:
            ids: Token ids of each context.
            rows: Rows of each context to recompute, ascending.
            prompts: Token ids of a prompt for each context.
        """
        after, self._ends = self._after(prompts)
        texts = [torch.cat([context[some], prompt]) for context, some, prompt in zip(ids, rows, prompts, strict=True)]
        places = [torch.cat(pair) for pair in zip(rows, after, strict=True)]
        padded, at, _ = _padded(texts, places, self._ends)
        hidden, longest = self.overwrite(padded, at), max(map(len, prompts))
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
            return self._prompted
        rows = self._lengths + self._from(0, ids.shape[1])
        self._lengths = self._lengths + ids.shape[1]
        return self.overwrite(ids, rows)

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

    def _run(
        self, ids: Tensor, rows: Tensor, positions: Tensor, counted: Tensor | None = None, **options: Any
    ) -> Tensor:
        tokens = ids.shape[1]
        counted = torch.ones_like(rows, dtype=torch.bool) if counted is None else counted
        if self._replayed is None or ids.numel() > GRAPH_ROWS:
            return self._forward(ids, rows, positions, counted, **options)
        # the padding of a graph goes to the row after the last one, which no other token attends to
        more = -tokens % (1 if tokens == 1 else 16 if tokens <= 256 else 64)
        rows, positions = (torch.cat([x, (x[:, -1:] + 1).expand(-1, more)], 1) for x in (rows, positions))
        out = self._replayed(pad(ids, (0, more)), rows, positions, pad(counted, (0, more)), **options)
        return out if options.get("scoring") else out[:, :tokens]

    def _forward(
        self,
        ids: Int[Tensor, "batch tokens"],
        rows: Int[Tensor, "#batch tokens"],
        positions: Int[Tensor, "#batch tokens"],
        counted: Bool[Tensor, "#batch tokens"],
        **options: Any,
    ) -> Tensor:
        # a copy, because attention caches results by the tensor of rows, and graphs change their inputs
        self._row_pass = RowPass(rows.clone(), counted, **options)
        with suppress(StopForward):
            return self.model.model(
                input_ids=ids, position_ids=positions, **{CACHE: self}, row_pass=self._row_pass
            ).last_hidden_state
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


def _padded(
    texts: Sequence[Tensor], rows: Sequence[Tensor], ends: Sequence[int]
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Texts padded to one length, rows of their tokens (padding is at `ends`), and the mask of real tokens."""
    longest = max(map(len, texts))
    padded = [pad(at, (0, longest - len(at)), value=end) for at, end in zip(rows, ends, strict=True)]
    every = torch.arange(longest, device=rows[0].device)
    counted = torch.stack([every < len(text) for text in texts])
    return pad_sequence(list(texts), batch_first=True), torch.stack(padded), counted


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
