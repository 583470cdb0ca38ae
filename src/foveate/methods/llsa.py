"""LLSA: trainable log-linear sparse attention (Zhou et al., arXiv 2512.16615).

1. Image tokens are put along a curve: an aligned run of them is a compact patch of the image.
2. Queries and keys are mean-pooled into a hierarchy of nodes. From the top down, each node selects the top-k nodes of
   its level by mean query times mean key, among the children of the nodes that its parent selected.
3. One softmax covers the tokens of the selected blocks and the pooled keys of the coarser levels, each weighted by its
   number of tokens. Text attends to everything and everything attends to text.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import torch

from foveate.methods.base import AttentionPlan, DenseFallback, Grid, Schedule, SparseAttention
from foveate.ops.curves import CURVES, grid_order
from foveate.ops.hierarchical_pooling import MAX_LEVELS, check_head_dim, check_options
from foveate.ops.joint_attention import LogLinear
from foveate.ops.log_linear_attention import enriched_levels
from foveate.utils.cache import persistent

__all__ = ["LLSA", "OPTIONS"]

# options of `foveate.ops.log_linear_attention`
OPTIONS = "top_k", "block_size", "levels", "enrich", "reweight"


@dataclass(frozen=True, kw_only=True)
class LLSA(SparseAttention):
    """Log-linear sparse attention. `enrich=False` with a `top_k` of all blocks is exactly the dense model.

    Attributes:
        top_k: Number of nodes that each node selects, and so of blocks read token by token; or a schedule of such
            numbers.
        block_size: Number of tokens in a block, and of children of a node: 16, 32 or 64.
        levels: Number of pooled levels, 1 to 4. None decides by the number of tokens.
        curve: Token order, one of `foveate.ops.curves.CURVES`.
        enrich: Attend to pooled keys too. A number limits the levels, counted from the finest.
        reweight: Weight a pooled key by its number of tokens.
        min_tokens: Images with fewer tokens stay dense. On CPUs, dense attention is faster below 1,024 to 2,048
            tokens.

    Examples:
        >>> plan = LLSA().plan(grids=((64, 64),), text=512)
        >>> plan.tables[0].keys(), f"{plan.tables[0].sparsity():.3f}"
        (384, '0.716')

    Raises:
        ValueError: If an option is out of its range.

    Source: arXiv 2512.16615.
    """

    top_k: int | Schedule = 8
    block_size: int = 16
    levels: int | None = None
    curve: str = "morton"
    enrich: bool | int = True
    reweight: bool = True
    min_tokens: int = 1024

    scheduled: ClassVar[str] = "top_k"

    def __post_init__(self) -> None:
        super().__post_init__()
        for top_k in self.settings:
            check_options(top_k, self.block_size, self.levels)
        enriched_levels(self.levels or MAX_LEVELS, self.enrich)
        if self.curve not in CURVES:
            raise ValueError(f"unknown curve {self.curve!r}: choose one of {', '.join(CURVES)}")

    @property
    def title(self) -> str:
        """Name, `top_k`, and the options that differ from their defaults."""
        others = (*OPTIONS[1:], "curve", "dense_layers", "start_percent", "end_percent")
        return f"LLSA K={self.schedule_title}{self.non_defaults(others)}"

    def check_head_dim(self, head_dim: int) -> None:
        """Check that heads have 32 to 256 channels.

        Raises:
            DenseFallback: If they do not.
        """
        try:
            check_head_dim(head_dim)
        except ValueError as reason:
            raise DenseFallback(f"log-linear attention does not support these heads: {reason}") from None

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """Token order and attention pattern. Cached by all arguments.

        Args:
            grids: (rows, columns) of the generated image, then of each reference image, in tokens, or (frames, rows,
                columns) of a video. Each has its own curve.
            text: Number of text tokens, which come before the image.
            device: Device of the order.

        Raises:
            ValueError: If `levels` or `enrich` is too large for this number of tokens.
        """
        self.check_plain()
        return _plan(self, self.enrich is True, grids, text, device)


@lru_cache(maxsize=64)
@persistent
def _plan(method: LLSA, every_level: bool, grids: tuple[Grid, ...], text: int, device: str) -> AttentionPlan:
    """Plan of LLSA; `every_level` separates enrich=True from enrich=1 in the cache, since True == 1."""
    cells = [prod(grid) for grid in grids]
    orders = [grid_order(method.curve, *grid) + sum(cells[:i]) for i, grid in enumerate(grids)]
    order = torch.cat(orders).to(device)
    options: dict[str, Any] = {name: getattr(method, name) for name in OPTIONS}
    pattern = LogLinear(order.new_empty(text), order, options)
    blocks = -(-len(order) // method.block_size)
    every = f" (all {blocks} blocks)" if options["top_k"] >= blocks else ""
    return AttentionPlan(
        orders=(order,),
        segments=tuple(enumerate(cells)),
        tables=(pattern,),
        title=f"{method.title}{every}",
        nominal_sparsity=1 - pattern.keys() / len(order),
    )
