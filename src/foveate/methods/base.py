"""What all methods share: in which layers, and in which part of the denoising run, they work at all."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from foveate.ops.joint_attention import Pattern
from foveate.ops.merging import Grid, Grouped, Regions

__all__ = ["AttentionPlan", "ComposedMethod", "DenseFallback", "Grid", "Method", "SparseAttention", "TokenMerging"]


class DenseFallback(ValueError):
    """Why a method leaves an input dense. Integrations note the reason and go on; a direct caller gets an error."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Options that every method takes.

    Attributes:
        dense_layers: Attention layers that stay dense, counted from 0 through the whole model: "0-1, 56".
        start_percent: Steps before this fraction of the run (0 to 1) stay dense.
        end_percent: Steps after this fraction of the run stay dense.
        min_tokens: Images with fewer tokens stay dense.
    """

    dense_layers: str = ""
    start_percent: float = 0.0
    end_percent: float = 1.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        self.dense_layer_set()
        if not 0 <= self.start_percent <= self.end_percent <= 1:
            raise ValueError(
                "start_percent and end_percent are fractions of the run with 0 <= start <= end <= 1, "
                f"not {self.start_percent} and {self.end_percent}"
            )
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, not {self.min_tokens}")

    @property
    def title(self) -> str:
        """A short name for pages and tables."""
        return type(self).__name__

    def unusual(self, names: Iterable[str]) -> str:
        """Those of the options that differ from their defaults, to go into a title."""
        values = ((name, getattr(self, name), getattr(type(self), name)) for name in names)
        return ",".join(f" {name}={value}" for name, value, usual in values if repr(value) != repr(usual))  # True == 1

    @property
    def parts(self) -> tuple["Method", ...]:
        """Itself: `ComposedMethod` has several."""
        return (self,)

    @classmethod
    def showcase(cls) -> tuple["Method", ...]:
        """The settings that `foveate compare` shows."""
        return (cls(),)

    def dense_layer_set(self) -> frozenset[int]:
        """The layers named by `dense_layers`."""
        layers: set[int] = set()
        for part in filter(None, (part.strip() for part in self.dense_layers.split(","))):
            first, _, last = part.partition("-")
            try:
                layers.update(range(int(first), int(last or first) + 1))
            except ValueError:
                raise ValueError(
                    f'dense_layers takes layer numbers and ranges such as "0-1, 56", not {part!r}'
                ) from None
        return frozenset(layers)

    @property
    def always(self) -> bool:
        """Whether the method works in every step, so that nobody needs to know which one it is."""
        return (self.start_percent, self.end_percent) == (0, 1)

    def covers(self, progress: float) -> bool:
        """Whether the method works at this fraction of the denoising run."""
        return self.start_percent <= progress <= self.end_percent


class ComposedMethod(NamedTuple):
    """Several methods at once.

    Attributes:
        parts: What is applied.
    """

    parts: tuple[Method, ...]

    @property
    def title(self) -> str:
        """All of theirs."""
        return " + ".join(method.title for method in self.parts)


@runtime_checkable
class AttentionPlan(Protocol):
    """What a `SparseAttention` decided for one size."""

    @property
    def order(self) -> Tensor:
        """Raster index of the image token at each place behind the text."""
        ...

    @property
    def inverse(self) -> Tensor:
        """Place of each raster token."""
        ...

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(image, tokens) of the parts of `order` in turn: the picture is image 0; nothing may merge across parts."""
        ...

    @property
    def tables(self) -> tuple[Pattern, ...]:
        """Who attends to whom, text in front: layer l of a model takes ``tables[l % period]``. All have one shape."""
        ...

    @property
    def title(self) -> str:
        """What `summary` and pages call it."""
        ...

    @property
    def nominal_sparsity(self) -> float:
        """Part of image-to-image attention that is left out, as papers count it."""
        ...

    @property
    def tile_maps(self) -> Tensor | Sequence[Tensor | None]:
        """For each table the tile of every image token, to draw; None where there are no tiles."""
        ...


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Method):
    """A method that puts image tokens in an order and restricts attention to block tables, or to what queries pick.

    Any model family that reorders its tokens can run any of them.
    """

    period: int = 1
    """Layers after which the tables come round again."""

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse heads of so many channels where the method has no attention for them.

        Raises:
            DenseFallback: If it has none.
        """

    @abstractmethod
    def plan(self, grids: tuple[tuple[int, int], ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """Order and tables for images of these (rows, columns) of tokens behind so many text tokens.

        Raises:
            DenseFallback: If the method leaves such an input dense.
        """


@dataclass(frozen=True, kw_only=True)
class TokenMerging(Method):
    """A method that runs layers on fewer image tokens.

    Any model family whose blocks can be merged around can run any of them.

    Attributes:
        keep: Fraction of the image tokens that is kept, above 0 and up to 1. Papers' ratios say what is removed.
        granularity: Merge around each "module" of a block, or around whole "block"s: tokens stay merged from block to
            block, and what all of them added is spread over every token behind the last.
        skip: So many blocks at the beginning of each kind stay dense. None takes the first five double blocks of
            FLUX; of all other transformers' blocks a third, five at most; and none in UNets.
        merge_attn: Merge for self-attention (and for what runs beside it in single-stream blocks). This and the next
            two choose among modules.
        merge_cross: Merge the queries of cross-attention.
        merge_mlp: Merge for the feed-forward of blocks that have one of their own. None: everywhere but in FLUX.
        size_bias: Let a merged token count for as many as it stands for: adds log(size) to its attention logits.
        dst_every: Steps for which destinations are kept.
        weights_every: Steps for which weights are kept; a divisor of `dst_every`.
        merge_every: One step in so many merges, the others are dense.
    """

    keep: float = 0.5
    granularity: Literal["module", "block"] = "module"
    skip: int | None = None
    merge_attn: bool = True
    merge_cross: bool = True
    merge_mlp: bool | None = None
    size_bias: bool = False
    dst_every: int = 1
    weights_every: int = 1
    merge_every: int = 1

    per_block: ClassVar[bool] = False
    """Whether every block has a plan of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 1:
            raise ValueError(
                f"keep is the fraction of tokens kept, above 0 and up to 1, not {self.keep}; papers give the ratio "
                "that is removed: 0.75 there is keep=0.25"
            )
        for name in ("dst_every", "weights_every", "merge_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts steps, 1 or more, not {getattr(self, name)}")
        if self.dst_every % self.weights_every:
            raise ValueError(
                f"weights_every must divide dst_every, since new destinations need new weights: {self.weights_every} "
                f"does not divide {self.dst_every}"
            )
        if self.granularity not in ("module", "block"):
            raise ValueError(f"granularity must be module or block, not {self.granularity!r}")
        if self.granularity == "block" and not (
            self.merge_attn and self.merge_cross and self.merge_mlp in (None, True)
        ):
            raise ValueError(
                'granularity="block" merges all of a block: leave merge_attn, merge_cross and merge_mlp out, or use '
                'granularity="module"'
            )
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"skip counts blocks, 0 or more, not {self.skip}")

    @property
    def title(self) -> str:
        """The method, the fraction it keeps, and what else is not as usual."""
        others = (field.name for field in fields(self) if field.name != "keep")
        return f"{type(self).__name__} keep={self.keep:g}{self.unusual(others)}"

    def at(self, depth: float) -> "TokenMerging":
        """The method for a block that so much of the model, a fraction, comes before."""
        return self

    @abstractmethod
    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """The order of the tokens and the regions within which they merge.

        Args:
            grids: (rows, columns) of the image, then of each reference image, in tokens.
            device: Where the order lives.

        Raises:
            DenseFallback: If the method leaves such an image dense.
        """

    def regions_along(self, plan: AttentionPlan, grid: Grid) -> Regions:
        """Regions along the order of sparse attention, none of which crosses a border of its tiles.

        Raises:
            ValueError: If the method knows no such regions.
        """
        raise ValueError(f"{type(self).__name__} does not go together with sparse attention: use ToMA")

    @abstractmethod
    def plan(self, features: Tensor, regions: Regions, destinations: tuple[Tensor, ...] | None = None) -> Grouped:
        """How the tokens of each region become fewer, and many again.

        Args:
            features: What similarity is measured by [batch, image, dim], in the order of the regions.
            regions: Of this image.
            destinations: Of an earlier plan, to make new weights for. None picks new ones.
        """
