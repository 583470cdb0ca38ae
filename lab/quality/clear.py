"""The attention pattern of CLEAR (Liu et al., arXiv 2412.16112), for comparison.

An image token attends to text and to the image tokens less than `radius` away; text attends to everything. The
down-sampled level of the paper is left out. The blocks of the table are single tokens, for which the usual kernels are
very slow, so `register()` has FlexAttention compute it.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foveate.methods import METHODS
from foveate.methods.base import AttentionPlan, DenseFallback, Grid, SparseAttention, stacked
from foveate.ops import dispatch
from foveate.ops.block_table import BlockTable, block_starts
from foveate.ops.curves import raster_order
from foveate.utils.cache import WeakTensorCache
from lab.bench.peers import Attention, flex

__all__ = ["Clear", "radius_for", "register"]


@dataclass(frozen=True, kw_only=True)
class Clear(SparseAttention):
    """Attention within a disc. With a `radius` beyond the diagonal it is exactly the dense model.

    Attributes:
        radius: Radius of the disc in tokens, exclusive.
    """

    radius: float = 8.0

    @property
    def title(self) -> str:
        """Name with the radius."""
        return f"CLEAR r={self.radius:g}"

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """Discs of one image, in raster order.

        Raises:
            DenseFallback: If there are reference images.
        """
        grid, *references = grids
        if references or len(grid) > 2:
            raise DenseFallback("CLEAR takes no reference images and no videos")
        return _plan(self, stacked(grid), text, device)


class Discs(BlockTable):
    """Block table of CLEAR, recognised by `_flex_attention` by its type."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _plan(method: Clear, grid: tuple[int, int], text: int, device: str) -> AttentionPlan:
    """Text blocks, then a block for each image token."""
    texts, cells = block_starts(text)[:-1], grid[0] * grid[1]
    rows, columns = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).unbind(1)
    near = (rows[:, None] - rows).square() + (columns[:, None] - columns).square() < method.radius**2
    visible = torch.ones(len(texts) + cells, len(texts) + cells, dtype=torch.bool)
    visible[len(texts) :, len(texts) :] = near
    starts = torch.cat([texts, text + torch.arange(cells + 1)]).int()
    offsets = torch.nn.functional.pad(visible.sum(1).cumsum(0), (1, 0)).int()
    table = Discs(starts, starts, offsets, visible.nonzero()[:, 1].int())
    order = raster_order(*grid, device=device)
    segments = cells * ((0, 1),)  # one for each token, so that no tokens merge
    return AttentionPlan((order,), segments, (table,), method.title, 1 - near.double().mean().item())


def radius_for(sparsity: float, grid: tuple[int, int], text: int) -> float:
    """Radius of the table with a sparsity as close as possible to the given one.

    Args:
        sparsity: Skipped fraction of all pairs of tokens.
        grid: (rows, columns) of image tokens.
        text: Number of text tokens.
    """
    tokens = text + grid[0] * grid[1]
    wanted = (1 - sparsity) * tokens**2 - text * (2 * tokens - text)  # pairs of image tokens
    down, right = (torch.arange(1 - side, side) for side in grid)
    squares = (down.square()[:, None] + right.square()).flatten()
    pairs = ((grid[0] - down.abs())[:, None] * (grid[1] - right.abs())).flatten()
    squares, order = squares.sort(stable=True)
    within = pairs[order].cumsum(0)
    last = torch.cat(
        [squares[1:] != squares[:-1], torch.tensor([True])]
    )  # a disc contains all tokens of the same distance
    best = (within[last] - wanted).abs().argmin()
    return (squares[last][best].item() + 0.5) ** 0.5


def register() -> None:
    """Register CLEAR as a method, and FlexAttention as the backend of its attention, in this process."""
    METHODS["clear"] = Clear
    dispatch.register("block_attention", "flex")(_flex_attention)


_ATTENTION: WeakTensorCache[Attention] = WeakTensorCache()


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, scale: float, with_lse: bool, scatter: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`block_attention` of discs with the usual scale, without the LSE; other tables go to the usual backend."""
    if not isinstance(table, Discs):
        known = dispatch.backends("block_attention", q.device, q.dtype, q.shape[3])
        return [one.run for one in known if one.run is not _flex_attention][-1](
            q, k, v, table, scale, with_lse, scatter
        )
    out = _ATTENTION.get(table, q.device, lambda: flex(table, q.device))(q, k, v)
    return out if scatter is None else torch.empty_like(out).index_copy(2, scatter, out), None
