# pyright: basic, reportPrivateImportUsage=false
"""A key/value cache whose rows are overwritten in any order, with forward passes that are replayed as CUDA graphs."""

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from foveate.methods.recompute_policy import Norm
from foveate.ops.rotary import copy_rows
from foveate.transformers.attention import RowPass, StopForward

__all__ = ["RowCache"]

RECOMPUTE_ROWS = 8192
"""Rows of a forward pass: enough for full speed, few enough to bound memory."""
GRAPH_ROWS = 4096
"""Most rows of a CUDA graph. Passes over more rows keep the GPU busy anyway."""
_CAPTURING = Lock()


class RowCache(Cache):
    """Keys and values of a batch of contexts, with room for more rows. Only one thread may use it at a time.

    Args:
        model: Model from `row_model`.
        keys: Keys of the contexts. They are copied.
        values: Values of the contexts. They are copied.
        capacity: Number of rows to make room for.
        graphs: Whether to replay passes as CUDA graphs. They need one row more than there are tokens.

    Attributes:
        keys: Keys, all rows.
        values: Values, all rows.
        length: Number of rows in use. `append` and `model.generate` go on after them.
    """

    keys: Float[Tensor, "layers batch groups capacity dim"]
    values: Float[Tensor, "layers batch groups capacity dim"]
    _held: dict[int, Float[Tensor, "batch prompt width"]]  # results of `repair` by the first row of the prompt

    def __init__(self, model: Any, keys: Tensor, values: Tensor, capacity: int, graphs: bool = False) -> None:
        super().__init__(layers=[])
        self.model, self._graphs, self._stream = model, graphs, _stream(keys)
        self._allocate(keys, values, capacity)
        self.fill(keys, values)

    @property
    def capacity(self) -> int:
        """Number of rows that there is room for."""
        return self.keys.shape[3]

    def fill(
        self,
        keys: Float[Tensor, "layers batch groups rows dim"],
        values: Float[Tensor, "layers batch groups rows dim"],
    ) -> "RowCache":
        """Copy these rows, and clear the others: masked keys count as 0, but only if they are finite."""
        self.length, self._held = keys.shape[3], {}
        for mine, new in ((self.keys, keys), (self.values, values)):
            for i in range(new.shape[1]):
                copy_rows(mine[:, i, :, : self.length], new[:, i])
            mine[..., self.length :, :] = 0
        return self

    def fits(self, keys: Float[Tensor, "layers batch groups rows dim"], capacity: int) -> bool:
        """Whether this is a cache for such keys, with this capacity, whose earlier work is done before new work."""
        return (self.keys.shape[1], self.capacity, self._stream) == (keys.shape[1], capacity, _stream(keys))

    def reserve(self, capacity: int) -> None:
        """Make room for more rows."""
        if capacity > self.capacity:
            self._allocate(self.keys, self.values, capacity)

    def _allocate(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        more = 0, 0, 0, capacity - keys.shape[3]
        self.keys, self.values = pad(keys, more), pad(values, more)
        self._replayed = _Replayed(self._forward) if self._graphs else None

    # --- passes ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def overwrite(
        self, ids: Int[Tensor, "batch tokens"], rows: Int[Tensor, "#batch tokens"], last: int | None = None
    ) -> Float[Tensor, "batch tokens width"]:
        """The final hidden states of tokens that run through the model, each over the rows up to its own.

        Their keys and values overwrite these rows.

        Args:
            ids: Token ids.
            rows: Row of each token, ascending, which is also its position.
            last: Last layer whose rows are overwritten; the result is then empty. None runs all layers.
        """
        parts = zip(ids.split(RECOMPUTE_ROWS, 1), rows.split(RECOMPUTE_ROWS, 1), strict=True)
        return torch.cat([self._run(*part, part[1], last=last) for part in parts], 1)

    @torch.no_grad()
    def received(
        self,
        prompts: Int[Tensor, "batch prompt"],
        start: int,
        layers: tuple[int, ...],
        norm: Norm,
    ) -> Float[Tensor, "batch rows"]:
        """The attention that each row receives from prompts after them, averaged over these layers.

        Args:
            prompts: Token ids of a prompt for each context. They overwrite rows that are not in use.
            start: Position of the first token of a prompt.
            layers: Layers.
            norm: Norm over the tokens of the prompt.
        """
        rows = self._next(prompts.shape[1])
        scores = self._run(prompts, rows, rows - self.length + start, last=max(layers), scoring=layers, norm=norm)
        return scores[:, : self.length]

    def repair(self, ids: Int[Tensor, "batch rows"], rows: Int[Tensor, "batch chosen"], prompts: Tensor) -> None:
        """Recompute some rows, and in the same pass the prompts after them, for which `append` then has the result.

        Args:
            ids: Token ids of all rows in use.
            rows: Rows to recompute, ascending.
            prompts: Token ids of a prompt for each context.
        """
        after = self._next(prompts.shape[1])
        if rows.shape[1]:
            prompts = torch.cat([ids.gather(1, rows), prompts], 1)
            after = torch.cat([rows, after.expand(len(rows), -1)], 1)
        self._held[self.length] = self.overwrite(prompts, after)[:, rows.shape[1] :]

    def append(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens width"]:
        """The final hidden states of tokens that run through the model as the next rows."""
        hidden = self._held.get(self.length)
        if hidden is None or hidden.shape[:2] != ids.shape:
            hidden = self.overwrite(ids, self._next(ids.shape[1]))
        self.length += ids.shape[1]
        return hidden

    def _next(self, tokens: int) -> Int[Tensor, "1 tokens"]:
        return torch.arange(self.length, self.length + tokens, device=self.keys.device)[None]

    def _run(self, ids: Tensor, rows: Tensor, positions: Tensor, **options: Any) -> Tensor:
        tokens = ids.shape[1]
        counted = torch.ones(tokens, dtype=torch.bool, device=ids.device)
        if self._replayed is None or tokens > GRAPH_ROWS:
            return self._forward(ids, rows, positions, counted, **options)
        # tokens that fill up a graph go to the row after the last one, which no other token sees
        more = -tokens % (1 if tokens == 1 else 16 if tokens <= 256 else 64)
        rows, positions = (torch.cat([x, (x[:, -1:] + 1).expand(-1, more)], 1) for x in (rows, positions))
        out = self._replayed(pad(ids, (0, more)), rows, positions, pad(counted, (0, more)), **options)
        return out if options.get("scoring") else out[:, :tokens]

    def _forward(
        self,
        ids: Int[Tensor, "batch tokens"],
        rows: Int[Tensor, "#batch tokens"],
        positions: Int[Tensor, "#batch tokens"],
        counted: Bool[Tensor, "tokens"],
        **options: Any,
    ) -> Tensor:
        # a copy, because attention keeps what it computes for a tensor of rows, and graphs change their inputs
        self._row_pass = RowPass(rows.clone(), counted=counted, **options)
        with suppress(StopForward):
            return self.model.model(
                input_ids=ids, position_ids=positions, past_key_values=self, row_pass=self._row_pass
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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of rows in use."""
        return self.length


def _stream(tensor: Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class _Replay(NamedTuple):
    graph: Any
    inputs: tuple[Tensor, ...]
    output: Tensor


class _Replayed:
    """A function that becomes a CUDA graph at its second call with tensors of the same shapes."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self._pool = function, torch.cuda.graph_pool_handle()
        self._known: dict[Any, _Replay | None] = {}

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        key = *(tensor.shape for tensor in tensors), *options.items()
        if key not in self._known:
            self._known[key] = None
            return self.function(*tensors, **options)  # compiles kernels
        replay = self._known[key]
        if replay is None:
            replay = self._known[key] = self._captured(tensors, options)
        for fixed, tensor in zip(replay.inputs, tensors, strict=True):
            fixed.copy_(tensor)
        replay.graph.replay()
        return replay.output.clone()  # the next replay overwrites it

    def _captured(self, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> _Replay:
        inputs, graph = tuple(tensor.clone() for tensor in tensors), torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self.function(*inputs, **options)
        return _Replay(graph, inputs, output)
