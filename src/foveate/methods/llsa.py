"""LLSA: trainable log-linear sparse attention (Zhou et al., arXiv 2512.16615).

1. Image tokens are put along a curve, once per forward: an aligned run of them is a compact patch of the image.
2. Queries and keys are averaged over nodes of ever more tokens. From the top down, each node picks the nodes below
   whose mean keys fit its mean query best, among the children of what its parent picked.
3. A query reads the tokens of the blocks that its block picked, and means for all the rest, each as often as it has
   tokens, in one softmax. The text is read by, and reads, everything.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.methods.base import DenseFallback, Grid, SparseAttention
from foveate.ops.curves import CURVES, grid_order, inverse_order
from foveate.ops.hierarchical_pooling import MAX_LEVELS, check_head_dim, check_options
from foveate.ops.joint_attention import LogLinear
from foveate.ops.log_linear_attention import enriched_levels
from foveate.utils.cache import persistent

__all__ = ["LLSA", "OPTIONS", "LLSAPlan"]

OPTIONS = "top_k", "block_size", "levels", "enrich", "reweight", "exclude_selected", "log_mass"  # of the op


@dataclass(frozen=True, kw_only=True)
class LLSA(SparseAttention):
    """Log-linear sparse attention. `enrich=False` with a `top_k` of all blocks is exactly the dense model.

    Attributes:
        top_k: Nodes that each node picks; of blocks, so many are read token by token. All where there are fewer.
        block_size: Tokens of a block, and children of a node: 16, 32 or 64.
        levels: Pooled levels, 1 to 4; None decides by the number of tokens.
        curve: Name of the order, one of `foveate.ops.curves.CURVES`.
        enrich: Read the means of nodes too; a number reads those of so many levels.
        reweight: Let a mean count as often as it has tokens.
        exclude_selected: Leave out the means of what is read in finer form. Beyond the paper.
        log_mass: Raise means by what their tokens differ. Beyond the paper.
        min_tokens: Images with fewer tokens stay dense. Both take equally long on a CPU between 1,024 and 2,048.

    Examples:
        >>> plan = LLSA().plan(grids=((64, 64),), text=512)
        >>> plan.tables[0].keys(), f"{plan.tables[0].sparsity():.3f}"
        (384, '0.716')

    Raises:
        ValueError: If an option is out of its range, or `log_mass` is to raise means that `enrich` leaves out.

    Source: arXiv 2512.16615.
    """

    top_k: int = 8
    block_size: int = 16
    levels: int | None = None
    curve: str = "morton"
    enrich: bool | int = True
    reweight: bool = True
    exclude_selected: bool = False
    log_mass: bool = False
    min_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.top_k, self.block_size, self.levels)
        enriched_levels(self.levels or MAX_LEVELS, self.enrich, self.log_mass)
        if self.curve not in CURVES:
            raise ValueError(f"unknown curve {self.curve!r}: choose one of {', '.join(CURVES)}")

    @property
    def title(self) -> str:
        """LLSA, how many blocks it picks, and what else is not as usual."""
        return f"LLSA K={self.top_k}{self.unusual((*OPTIONS[1:], 'curve'))}"

    def check_head_dim(self, head_dim: int) -> None:
        """Stay dense where heads have too few or too many channels."""
        try:
            check_head_dim(head_dim)
        except ValueError as reason:
            raise DenseFallback(f"log-linear attention takes no such heads: {reason}") from None

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> "LLSAPlan":
        """The order of the tokens, and how they attend. Cached by all arguments.

        Args:
            grids: (rows, columns) of the image, then of each reference image, in tokens: each along its own curve.
            text: Number of text tokens; they stay in front.
            device: Where `order` and `inverse` live.

        Raises:
            ValueError: If `levels` or `enrich` are more than so many tokens have use for.
        """
        return _plan(self, self.enrich is True, grids, text, device)


class LLSAPlan(NamedTuple):
    """What LLSA decided for one size; see `foveate.methods.base.AttentionPlan`."""

    order: Int[Tensor, "image"]
    inverse: Int[Tensor, "image"]
    segments: tuple[tuple[int, int], ...]
    tables: tuple[LogLinear, ...]
    title: str
    nominal_sparsity: float
    tile_maps: tuple[None, ...] = (None,)


@lru_cache(maxsize=64)
@persistent
def _plan(method: LLSA, every_level: bool, grids: tuple[Grid, ...], text: int, device: str) -> LLSAPlan:
    """For the cache enrich=True and enrich=1 are one method: `every_level` tells them apart."""
    cells = [rows * columns for rows, columns in grids]
    orders = [grid_order(method.curve, *grid) + sum(cells[:i]) for i, grid in enumerate(grids)]
    order = torch.cat(orders).to(device)
    options: dict[str, Any] = {name: getattr(method, name) for name in OPTIONS}
    pattern = LogLinear(order.new_empty(text), order, options)
    blocks = -(-len(order) // method.block_size)
    every = f" (all {blocks} blocks)" if method.top_k >= blocks else ""
    return LLSAPlan(
        order=order,
        inverse=inverse_order(order),
        segments=tuple(enumerate(cells)),
        tables=(pattern,),
        title=f"{method.title}{every}",
        nominal_sparsity=1 - pattern.keys() / len(order),
    )
