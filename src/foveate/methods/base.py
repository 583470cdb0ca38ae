"""Interfaces of methods for denoisers, sparse attention and token merging, and their common options."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Int
from torch import Tensor

from foveate.ops.joint_attention import Pattern
from foveate.ops.merging import AnyMerge, Grid, Regions
from foveate.utils.choices import check_names, check_options

__all__ = [
    "AttentionPlan",
    "ComposedMethod",
    "DenseFallback",
    "DenseStep",
    "Grid",
    "Method",
    "Schedule",
    "SparseAttention",
    "TokenMerging",
    "default_skip",
    "layer_ranges",
    "sparse_and_merging",
]


class DenseFallback(ValueError):
    """A method cannot handle an input, for the stated reason.

    `foveate.apply` runs such an input densely and `summary()` shows the reason; direct callers get the error.
    """


class DenseStep(DenseFallback):
    """The options of a method leave a step dense, as the user wants it: no warning."""


Schedule = tuple[tuple[float, Any], ...]
"""Values of an option, each with the fraction of the denoising steps, from 0 on, from which it holds; or "dense"."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Options that all methods share.

    One option of a method, `scheduled`, may change during the run: `HilbertA(tiles=((0.0, "dense"), (0.2, 4),
    (0.5, 16)))` is dense in the first fifth of the steps, has 4 tiles up to the middle, and then 16.

    Attributes:
        dense_layers: Attention layers that stay dense, counted from 0 through the whole model: text such as
            "0-1, 56", or a list of numbers.
        start_percent: Fraction of the denoising steps, 0 to 1, before which steps stay dense.
        end_percent: Fraction of the denoising steps, 0 to 1, after which steps stay dense.
        min_tokens: Images with fewer tokens stay dense.
    """

    dense_layers: str | int | tuple[int, ...] = ""
    start_percent: float = 0.0
    end_percent: float = 1.0
    min_tokens: int = 0

    scheduled: ClassVar[str] = ""
    """Name of the option that takes a `Schedule`; empty if none does."""

    def __new__(cls, *args: object, **options: object):
        """Reject unknown options and suggest the most similar known one."""
        check_names(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        if not isinstance(layers := self.dense_layers, str):
            text = ", ".join(map(str, [layers] if isinstance(layers, int) else layers))
            object.__setattr__(self, "dense_layers", text)
        self.dense_layer_set()
        if not 0 <= self.start_percent <= self.end_percent <= 1:
            raise ValueError(
                "start_percent and end_percent are fractions of the run with 0 <= start <= end <= 1, "
                f"not {self.start_percent} and {self.end_percent}"
            )
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, not {self.min_tokens}")
        if self.scheduled and isinstance(value := getattr(self, self.scheduled), tuple | list):
            schedule = _checked(self.scheduled, value)
            plain = schedule[0][1]
            object.__setattr__(self, self.scheduled, schedule if len(schedule) > 1 else plain)
            for setting in self.settings:
                replace(self, **{self.scheduled: setting})

    @property
    def title(self) -> str:
        """Short name for pages and tables."""
        return type(self).__name__

    def non_defaults(self, names: Iterable[str]) -> str:
        """The named options that differ from their defaults, as a suffix for titles."""
        values = ((name, getattr(self, name), getattr(type(self), name)) for name in names)
        # by repr, since True == 1
        return ",".join(f" {name}={value}" for name, value, default in values if repr(value) != repr(default))

    @property
    def schedule(self) -> Schedule:
        """The scheduled option in all steps: a plain value holds from 0 on. Empty if no option takes a schedule."""
        value: Any = getattr(self, self.scheduled) if self.scheduled else ()
        return value if isinstance(value, tuple) else ((0.0, value),)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Values of the scheduled option, in the order of the steps, without "dense"."""
        return tuple(value for _, value in self.schedule if value != "dense")

    @property
    def plain(self) -> tuple[Any, ...]:
        """The method with each setting of its schedule, in the order of the steps; itself if it has no schedule."""
        if len(self.schedule) < 2:
            return (self,)
        return tuple(replace(self, **{self.scheduled: setting}) for setting in self.settings)

    @property
    def schedule_title(self) -> str:
        """The scheduled option in titles: "4", or "(dense, 4 from 0.2, 16 from 0.5)"."""
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for _, value in self.schedule]
        texts[1:] = [f"{text} from {start:g}" for text, (start, _) in zip(texts, self.schedule, strict=True)][1:]
        return f"({', '.join(texts)})" if texts[1:] else texts[0]

    @property
    def parts(self) -> tuple["Method", ...]:
        """The methods to apply: this one. `ComposedMethod` has several."""
        return (self,)

    @classmethod
    def showcase(cls) -> tuple["Method", ...]:
        """The settings that `foveate compare` shows; none for baselines."""
        return (cls(),)

    def dense_layer_set(self) -> frozenset[int]:
        """Layer numbers of `dense_layers`."""
        layers: set[int] = set()
        for part in filter(None, (part.strip() for part in str(self.dense_layers).split(","))):
            first, _, last = part.partition("-")
            try:
                layers.update(range(int(first), int(last or first) + 1))
            except ValueError:
                raise ValueError(
                    f'dense_layers takes layer numbers and ranges such as "0-1, 56", not {part!r}'
                ) from None
        return frozenset(layers)

    def check_tokens(self, tokens: int) -> None:
        """Check that an image has at least `min_tokens` tokens.

        Raises:
            DenseFallback: If it has fewer.
        """
        if tokens < self.min_tokens:
            raise DenseFallback(f"{tokens} image tokens are fewer than min_tokens={self.min_tokens}")

    @property
    def always(self) -> bool:
        """Whether the method is active in every step, whatever the step number."""
        return (self.start_percent, self.end_percent) == (0, 1) and len(self.schedule) < 2

    def at_progress(self, progress: float) -> Any:
        """The method with the plain options that it has at this fraction of the denoising steps, 0 to 1.

        Raises:
            DenseStep: If it leaves this step dense.
        """
        if not self.start_percent <= progress <= self.end_percent:
            raise DenseStep("this step lies outside start_percent to end_percent")
        if len(self.schedule) < 2:
            return self
        value = [value for start, value in self.schedule if start <= progress][-1]
        if value == "dense":
            raise DenseStep(f"the schedule of {self.scheduled} leaves this step dense")
        return replace(self, **{self.scheduled: value})

    def covers(self, progress: float) -> bool:
        """Whether the method is active at this fraction of the denoising steps, 0 to 1."""
        try:
            self.at_progress(progress)
        except DenseStep:
            return False
        return True

    def check_plain(self) -> None:
        """Check that no option is a schedule.

        Raises:
            ValueError: If one is.
        """
        if len(self.schedule) > 1:
            raise ValueError(
                f"{self.scheduled} is a schedule, and a plan holds for one of its settings: take that of a step, as "
                f"method.at_progress({self.schedule[-1][0]:g})"
            )


class ComposedMethod(NamedTuple):
    """Several methods applied together.

    Attributes:
        parts: The methods.
    """

    parts: tuple[Method, ...]

    @property
    def title(self) -> str:
        """The titles of the methods."""
        return " + ".join(method.title for method in self.parts)


def _checked(name: str, schedule: Sequence[Any]) -> Schedule:
    """The schedule of an option as tuples; raises a ValueError if it is none."""
    try:
        pairs = [(start + 0.0, value) for start, value in schedule]
        starts = [start for start, _ in pairs]
    except (TypeError, ValueError):
        pairs, starts = [], list[float]()
    if not pairs or any(isinstance(value, tuple | list) for _, value in pairs):
        raise ValueError(
            f'a schedule of {name} has pairs of a fraction of the run and a value, ((0.0, "dense"), (0.2, value)), '
            f"not {schedule!r}"
        )
    if starts[0] != 0:
        raise ValueError(f'the schedule of {name} begins at {starts[0]}: put (0.0, "dense") first')
    if any(not before < after < 1 for before, after in pairwise(starts)):
        raise ValueError(f"the fractions in the schedule of {name} must grow and stay below 1, not {starts}")
    if all(value == "dense" for _, value in pairs):
        raise ValueError(f"the schedule of {name} is dense in every step: leave the method out")
    return tuple(pairs)


def layer_ranges(layers: Iterable[int]) -> str:
    """Layer numbers as `dense_layers` takes them, such as "0-1, 56"."""
    runs: list[list[int]] = []
    for number in sorted(layers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class AttentionPlan(NamedTuple):
    """Token orders and attention patterns for one image size: the result of `SparseAttention.plan`.

    Attributes:
        orders: Raster index of the image token at each position after the text; layers take turns.
        segments: (image, tokens) of the consecutive parts of the orders. Image 0 is generated, others are references.
            Token merging never crosses the border of a part.
        tables: Attention patterns over [text | image in this order], of one shape; layers take turns.
        title: Name in `summary()` and on pages.
        nominal_sparsity: Skipped fraction of image-to-image attention, as papers count it.
        tile_maps: Tile of every token of the generated image for each table, -1 in the centre, for plots; None without
            tiles.
    """

    orders: tuple[Int[Tensor, "image"], ...]
    segments: tuple[tuple[int, int], ...]
    tables: tuple[Pattern, ...]
    title: str
    nominal_sparsity: float
    tile_maps: Tensor | tuple[None, ...] = (None,)


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Method):
    """A method that reorders image tokens and restricts attention, by block tables or by selections of the queries."""

    def check_head_dim(self, head_dim: int) -> None:
        """Check that the method supports heads of `head_dim` channels.

        Raises:
            DenseFallback: If it does not.
        """

    def for_use_with_merging(self) -> "SparseAttention":
        """Variant for use with token merging, which needs one token order for all layers.

        Raises:
            ValueError: If it orders tokens differently from layer to layer.
        """
        return self

    @abstractmethod
    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """The token order and the attention patterns for one image size.

        Args:
            grids: (rows, columns) of the generated image, then of each reference image, in tokens; a video has
                (frames, rows, columns).
            text: Number of text tokens, which come before the image.
            device: Device of the returned order.

        Raises:
            DenseFallback: If the method leaves this input dense.
        """


def stacked(grid: Grid) -> tuple[int, int]:
    """(rows, columns) of an image, or of a video's frames one below the other."""
    return prod(grid[:-1]), grid[-1]


def whole_sides(name: str, value: Sequence[float], *counts: int) -> tuple[int, ...]:
    """Sides of a window from an option, as a tuple.

    Args:
        name: Name of the option.
        value: Its value.
        counts: Allowed numbers of sides.

    Raises:
        ValueError: If the value is not an allowed number of positive whole numbers.
    """
    if len(value) not in counts or any(int(side) != side or side < 1 for side in value):
        number = " or ".join({2: "two", 3: "three"}[count] for count in counts)
        raise ValueError(f"{name} must be {number} positive whole numbers such as (4, 4), not {value!r}")
    return tuple(map(int, value))


@dataclass(frozen=True, kw_only=True)
class TokenMerging(Method):
    """A method that runs layers on fewer image tokens.

    Attributes:
        keep: Fraction of image tokens to keep, above 0 and up to 1, or a schedule of such fractions. Papers give the
            fraction removed.
        granularity: "module" merges and unmerges around each module of a block. "block" merges before the first of
            several blocks and unmerges their change after the last.
        skip: Number of leading blocks of each kind that stay dense. None: the first five double blocks of FLUX; a
            third of the blocks of other kinds, at most five; no block in UNets.
        merge_attn: With granularity="module", merge for self-attention (in single-stream blocks also for the
            feed-forward that runs in parallel).
        merge_cross: With granularity="module", merge the queries of cross-attention.
        merge_mlp: With granularity="module", merge for the feed-forward. None: everywhere except in FLUX.
        dst_every: Number of steps that share destinations.
        weights_every: Number of steps that share weights; a divisor of `dst_every`.
        merge_every: Merge in every n-th step only; the others are dense.
    """

    keep: float | Schedule = 0.5
    granularity: Literal["module", "block"] = "module"
    skip: int | None = None
    merge_attn: bool = True
    merge_cross: bool = True
    merge_mlp: bool | None = None
    dst_every: int = 1
    weights_every: int = 1
    merge_every: int = 1

    scheduled: ClassVar[str] = "keep"

    per_block: ClassVar[bool] = False
    """Whether every block makes its own plan. Otherwise blocks of a kind share one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for keep in self.settings:
            if not 0 < keep <= 1:
                raise ValueError(
                    f"keep is the fraction of tokens kept, above 0 and up to 1, not {keep}; papers give the fraction "
                    "removed: 0.75 there is keep=0.25"
                )
        for name in ("dst_every", "weights_every", "merge_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a number of steps, 1 or more, not {getattr(self, name)}")
        if self.dst_every % self.weights_every:
            raise ValueError(
                f"weights_every must divide dst_every, since new destinations need new weights: {self.weights_every} "
                f"does not divide {self.dst_every}"
            )
        if self.granularity == "block" and not (
            self.merge_attn and self.merge_cross and self.merge_mlp in (None, True)
        ):
            raise ValueError(
                'granularity="block" merges whole blocks: leave out merge_attn, merge_cross and merge_mlp, or use '
                'granularity="module"'
            )
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"skip is a number of blocks, 0 or more, not {self.skip}")

    @property
    def title(self) -> str:
        """Name, `keep`, and the options that differ from their defaults."""
        others = (field.name for field in fields(self) if field.name != "keep")
        return f"{type(self).__name__} keep={self.schedule_title}{self.non_defaults(others)}"

    def merging_blocks(self, count: int, skip: int, first: int = 0) -> list[bool]:
        """Merge flags of the blocks of one kind.

        Args:
            count: Number of blocks.
            skip: Number of leading blocks that stay dense unless `self.skip` says otherwise; see `default_skip`.
            first: Attention layer number of the first block, for `dense_layers`.
        """
        skip, dense = skip if self.skip is None else self.skip, self.dense_layer_set()
        return [i >= skip and first + i not in dense for i in range(count)]

    def periods(self, step: int) -> tuple[int, int]:
        """Period numbers of the destinations and the weights of a step; steps of the same period share them."""
        return step // self.dst_every, step // self.weights_every

    def at(self, depth: float) -> "TokenMerging":
        """The method for the block at this relative depth of the model, 0 to 1."""
        return self

    @abstractmethod
    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """Order of the image tokens and the regions within which they merge.

        Args:
            grids: (rows, columns) of the generated image, then of each reference image, in tokens; a video has
                (frames, rows, columns).
            device: Device of the returned order.

        Raises:
            DenseFallback: If the method leaves this image dense.
        """

    def regions_along(self, plan: AttentionPlan, grid: Grid) -> Regions:
        """Merge regions in the order of a sparse attention plan, within the borders of its tiles.

        Args:
            plan: Plan of the sparse attention applied together with this method.
            grid: (rows, columns) of the generated image, in tokens.

        Raises:
            ValueError: If the method cannot be combined with sparse attention.
        """
        raise ValueError(f"{type(self).__name__} cannot be combined with sparse attention: use ToMA")

    @abstractmethod
    def plan(self, features: Tensor, regions: Regions, destinations: tuple[Tensor, ...] | None = None) -> AnyMerge:
        """Merge and unmerge weights of the tokens of each region.

        Args:
            features: Token features to compare [batch, image, dim], in the order of the regions.
            regions: Merge regions of this image.
            destinations: Destinations of an earlier plan (`Merge.chosen`), which get new weights. None picks new ones.
        """


def default_skip(blocks: int, *, double: bool = False) -> int:
    """Number of leading blocks of a kind that stay dense in a transformer with `skip=None`.

    Args:
        blocks: Number of blocks of the kind.
        double: Whether these are the double blocks of a model that also has single blocks, such as FLUX.
    """
    return min(5, blocks if double else blocks // 3)


def sparse_and_merging(methods: Sequence[Method]) -> tuple[SparseAttention | None, TokenMerging | None]:
    """Sparse attention and token merging among the methods to apply, adapted to run together.

    Raises:
        ValueError: If the methods cannot be combined.
    """
    sparse = next((method for method in methods if isinstance(method, SparseAttention)), None)
    merging = next((method for method in methods if isinstance(method, TokenMerging)), None)
    if len(methods) != (sparse is not None) + (merging is not None):
        given = " + ".join(type(method).__name__ for method in methods)
        raise ValueError(f"choose one method of sparse attention, one of token merging, or both, not {given}")
    return (sparse.for_use_with_merging() if sparse and merging else sparse), merging
