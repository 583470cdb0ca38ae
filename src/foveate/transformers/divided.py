# pyright: basic, reportPrivateImportUsage=false
"""A long context divided over processes: each keeps the keys and values of some chunks, which never travel.

In each layer the processes exchange the queries of the tokens that are computed, with their new keys and values. Each
attends to the rows that it keeps, and the outputs are merged by their log-sum-exp. Results are those of one process.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops.attention_received import attention_received
from foveate.ops.row_attention import row_attention_lse
from foveate.transformers.attention import CACHE, RowPass, StopForward
from foveate.transformers.row_cache import SPARE_ROWS, Filling, RowCache

__all__ = ["DividedRowCache", "Division"]


class Division:
    """Processes that share a context: each keeps some chunks, and computes a part of the tokens of each forward pass.

    Attributes:
        group: Process group.
        size: Number of processes.
        rank: Number of this process in the group.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def holder(self, chunk: int) -> int:
        """Rank of the process that keeps a chunk: 0, 1, 2, 2, 1, 0, 0, ... of three.

        Early chunks are attended to by more tokens than late ones; in this order each process has both.
        """
        turn, place = divmod(chunk, self.size)
        return self.size - 1 - place if turn % 2 else place

    def same(self, value: Any) -> Any:
        """The value of the first process."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def share(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of a tensor that all have."""
        return x.unflatten(dim, (self.size, -1)).select(dim % x.ndim, self.rank)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all processes, side by side: the opposite of `share`."""
        first = x.movedim(dim, 0).contiguous()
        out = first.new_empty(self.size * len(first), *first.shape[1:])
        dist.all_gather([*out.chunk(self.size)], first, self.group)
        return out.movedim(0, dim)

    def whole(self, x: Tensor, rows: Int[Tensor, "held"], length: int, dim: int = -1) -> Tensor:
        """A tensor over all rows, collected from the rows that each process keeps."""
        shape = list(x.shape)
        shape[dim] = length
        out = x.new_zeros(shape).index_copy_(dim, rows.to(x.device), x)
        dist.all_reduce(out, group=self.group)  # the others' rows are 0
        return out

    def merged(
        self, out: Float[Tensor, "1 heads tokens dim"], weights: Float[Tensor, "1 heads tokens"]
    ) -> Float[Tensor, "1 heads share dim"]:
        """Attention of this process's share of the tokens, from the outputs over each process's rows.

        Args:
            out: Attention of all tokens over this process's rows.
            weights: Share of these rows in the attention of each token to all rows.
        """
        parts = (out * weights[..., None]).to(out.dtype).unflatten(2, (self.size, -1)).movedim(2, 0).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received.to(weights.dtype).sum(0).to(out.dtype)


@dataclass
class _DividedPass(RowPass):
    """A `RowPass` of one context whose rows are divided.

    `rows` is the last row kept here that each token sees; -1 if it sees none.
    """

    division: Division = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at = self.shared.clamp(min=0)  # a token that sees none attends to one, with a weight of 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, *_: Any) -> Tensor:
        """Attention of this process's tokens in a layer."""
        query = self.division.gathered(query, 2)
        out, lse = row_attention_lse(query, key, value, self._at, scale)
        lse = lse.masked_fill(self.shared < 0, -torch.inf)
        total = self.division.gathered(lse, 0).logsumexp(0, keepdim=True)
        if layer in self.scoring:
            inputs = query[0], key[0], self.shared, scale, self.norm, self.counted[0]
            self.received.append(attention_received(*inputs, lse=total[0])[None])
        if layer == self.last:
            raise StopForward
        return self.division.merged(out, (lse - total).exp())


class DividedRowCache(RowCache):
    """Row cache of one context over several processes. Rows are numbered as in the whole context.

    Each process keeps the rows of its chunks, and the last one also the rows after the context. The tokens of a pass
    are divided evenly.

    Args:
        model: Model from `row_model`.
        shape: Numbers of layers, contexts (1), groups and rows of the whole, and the size of a key.
        division: Processes.
    """

    def __init__(self, model: Any, shape: tuple[int, int, int, int, int], division: Division) -> None:
        layers, _, groups, rows, dim = shape
        super().__init__(model, (layers, 1, groups, 0, dim))
        self._division, self._capacity = division, rows + division.size

    @property
    def capacity(self) -> int:
        """Number of rows of the whole, used and free."""
        return self._capacity

    def fill(self, contexts: Iterable[Filling]) -> "DividedRowCache":
        """Copy keys and values of the rows that this process keeps; see `RowCache.fill`."""
        (one,) = contexts
        self._held, self._context = one.rows.to(self.keys.device), one.length
        self._number()
        super().fill([one])
        return self

    def reserve(self, rows: int) -> None:
        """Make room for more rows after the prompt."""
        self._capacity = max(self._capacity, self._ends[0] + rows + SPARE_ROWS + self._division.size)
        self._number()

    def _number(self) -> None:
        """Number the rows that this process keeps.

        New keys and values in rows of other processes go to one extra row, to which nothing attends.
        """
        kept = torch.zeros(self._capacity, dtype=torch.bool, device=self.keys.device)
        kept[self._held] = True
        kept[self._context :] = self._division.rank == self._division.size - 1
        self._seen = kept.cumsum(0) - 1
        here = int(self._seen[-1]) + 1
        self._places = self._seen.where(kept, here)
        more = here + 1 - self.keys.shape[3]
        self.keys, self.values = (pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))

    def _run(self, batch: Any, **options: Any) -> Tensor:
        division, tokens = self._division, batch.ids.shape[1]
        ids, rows, positions, counted = batch.padded(-tokens % division.size)
        self._written = self._places[rows[0]]
        self._row_pass = _DividedPass(self._seen[rows], counted, **options, division=division)
        at = division.share(positions[0] if len(positions) == 1 else positions, -1)
        inputs = {"input_ids": division.share(ids, 1), "position_ids": at, CACHE: self}
        with suppress(StopForward):
            hidden = self._decoder(**inputs, row_pass=self._row_pass).last_hidden_state
            return division.gathered(hidden, 1)[:, :tokens]
        if not self._row_pass.received:
            return self.keys.new_empty(1, tokens, 0)
        received = torch.stack(self._row_pass.received).mean(0)[:, : len(self._held)]
        return division.whole(received, self._held, self._capacity)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        """Keys and values that this process keeps in a layer, with new ones of all processes."""
        new = self._division.gathered(torch.stack([key_states, value_states]), 3)
        for states, some in zip((self.keys[layer_idx], self.values[layer_idx]), new, strict=True):
            states.index_copy_(2, self._written, some)
        return self.keys[layer_idx], self.values[layer_idx]
