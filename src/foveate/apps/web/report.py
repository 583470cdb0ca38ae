"""The HTML page of a comparison: its data, verdicts and plots."""

import base64
import io
from collections.abc import Sequence
from math import inf
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from jaxtyping import Int
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from foveate.ops.block_table import BlockTable
from foveate.plots.figures import BLUE, INK, draw_table, draw_tiles, figure_png, strip

__all__ = [
    "Comparison",
    "Intro",
    "Measured",
    "Objects",
    "Speed",
    "Variant",
    "comparison_page",
    "draw_times",
    "duration",
    "render",
    "step_speed",
    "verdict",
]


class Objects(NamedTuple):
    """Counts of the objects in an image, by a recogniser.

    Attributes:
        found: Number of requested objects in the image.
        requested: Number of requested objects.
        extra: Number of unrequested or repeated objects.
    """

    found: int
    requested: int
    extra: int


class Variant(NamedTuple):
    """An image or video and its measurements.

    Attributes:
        label: Name on the page, for example "HilbertA T=16".
        frames: Frames of the video; an image has one.
        step_seconds: Seconds of one forward pass of the denoiser, one entry per round; empty if not timed.
        seconds: Seconds of the whole run, from prompt to image; None if unknown.
        psnr: PSNR to the dense image in dB; None for dense.
        ssim: SSIM to the dense image; None for dense.
        detail: `detail_ssim` to the dense image; None for dense.
        objects: Counts of objects in the image; None without a recogniser for the model.
        nominal: Sparsity as papers quote it, mean over layers; 0 for dense.
        true: Fraction of all query-key pairs that are skipped, mean over layers; 0 for dense.
        flop_bound: FLOPs of dense attention divided by FLOPs of this variant, an upper bound of attention's speed-up.
        tile_map: Tile of each image token, -1 in the central region; None without tiles.
        table: Key blocks that each query block reads; None if dense.
        why_dense: Reason why the method stayed dense; empty if it did not.
        picked: Raster indices of the tokens that others merge into; None without merging.
        video: Content of the MP4 file; empty for an image.
        without_lora: Whether the page also has this method with its LoRA.
    """

    label: str
    frames: Sequence[Image.Image] = ()
    step_seconds: Sequence[float] = ()
    seconds: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    detail: float | None = None
    objects: Objects | None = None
    nominal: float = 0.0
    true: float = 0.0
    flop_bound: float = 1.0
    tile_map: Int[Tensor, "rows columns"] | None = None
    table: BlockTable | None = None
    why_dense: str = ""
    picked: Int[Tensor, "picked"] | None = None
    video: bytes = b""
    without_lora: bool = False

    @property
    def image(self) -> Image.Image:
        """The image; of a video five frames from first to last, side by side."""
        last = len(self.frames) - 1
        return strip([self.frames[i] for i in sorted({round(part * last / 4) for part in range(5)})])


class Measured(NamedTuple):
    """Measurements of one setting on a GPU: a row of the table of speeds.

    Attributes:
        setting: The setting in words.
        label: Beginning of the labels of its variants.
        objects: Fraction of the requested objects in images of the built-in model.
        small: Time, or speed-up over dense, at the smaller size.
        large: The same at the larger size; empty if it was not measured.
        card: The GPU.
        commit: The commit that was measured.
        what: What the method does, in one line.
    """

    setting: str
    label: str
    objects: str
    small: str
    large: str
    card: str
    commit: str
    what: str = "all tokens attend to all tokens"


class Intro(NamedTuple):
    """Introduction at the top of a page, for readers new to Foveate. Timings of this machine become a footnote.

    Attributes:
        headline: What Foveate is, in one line.
        text: A paragraph about it.
        code: Lines to copy.
        measured: Rows of the table of speeds.
        setting: What was measured, in words.
        columns: Titles of the times; an empty one has no column.
        link: Address of the page about another kind of model.
        other: Text of the link.
    """

    headline: str
    text: str
    code: str
    measured: Sequence[Measured]
    setting: str
    columns: tuple[str, str]
    link: str
    other: str

    def of(self, label: str) -> Measured | None:
        """The row of a variant; None if it was not measured."""
        return next((row for row in self.measured if label.startswith(row.label)), None)


class Comparison(NamedTuple):
    """Variants of one image, for `comparison_page`; displayed in a notebook as a row of images.

    Attributes:
        prompt: The prompt.
        variants: The variants; the first one is dense, and the others are compared with it.
        settings: Settings of the run, by name.
        versions: Versions of hardware and software, by name.
        notice: Notice at the top of the page; may be empty.
        about_times: Remarks on the times of some variants.
        waiting: Names of the variants that are not generated yet.
        running: Whether the comparison is still running; the page then reloads automatically.
        intro: What the page says to readers who do not know Foveate; None: nothing.
    """

    prompt: str
    variants: list[Variant]
    settings: dict[str, str]
    versions: dict[str, str]
    notice: str
    about_times: Sequence[str] = ()
    waiting: Sequence[str] = ()
    running: bool = False
    intro: Intro | None = None

    def _repr_html_(self) -> str:
        return render(
            "notebook.html.j2", comparison=self, verdicts=[verdict(v, self.variants[0]) for v in self.variants]
        )


class Speed(NamedTuple):
    """Speed-up of a variant over dense.

    Attributes:
        factor: Median time of dense divided by median time of the variant.
        certain: Whether the speed-up may be quoted.
        why: Reason if not; empty if so.
    """

    factor: float
    certain: bool = True
    why: str = ""


LEAST_ROUNDS, MOST_SPREAD = 3, 0.25
"""Least rounds, and largest spread of their ratios to dense, for a certain speed-up."""
SAME, ALIKE, RELATED = 0.9, 0.77, 0.5
"""Least `detail_ssim` to dense for "nearly identical", "close to dense" and "the same scene"."""


def comparison_page(comparison: Comparison) -> str:
    """The comparison as one self-contained HTML page."""
    variants, dense = comparison.variants, comparison.variants[0]
    return render(
        "compare.html.j2",
        comparison=comparison,
        cards=[
            (variant, step_speed(variant, dense), verdict(variant, dense, with_speed=comparison.intro is None))
            for variant in variants
        ],
        times_light=draw_times(variants, ink=INK, bar=BLUE),
        times_dark=draw_times(variants, ink="#D5DAE1", bar="#56B4E9"),
    )


def step_speed(variant: Variant, dense: Variant) -> Speed | None:
    """Speed-up of a step; None unless both were timed.

    It is uncertain after fewer than 3 rounds, if the rounds differ by more than a quarter of it, or if it exceeds the
    bound from the FLOPs of attention.
    """
    if not variant.step_seconds or not dense.step_seconds:
        return None
    factor = median(dense.step_seconds) / median(variant.step_seconds)
    ratios = [slow / fast for slow, fast in zip(dense.step_seconds, variant.step_seconds, strict=False)]
    if variant is dense:
        return Speed(1.0)
    if len(ratios) < LEAST_ROUNDS:
        return Speed(factor, False, f"{'one round' if len(ratios) == 1 else f'{len(ratios)} rounds'} only")
    if max(ratios) - min(ratios) > MOST_SPREAD * factor:
        return Speed(factor, False, f"{min(ratios):.2f} to {max(ratios):.2f}\u00d7 in the rounds")
    if factor > max(1.05, variant.flop_bound):
        return Speed(factor, False, f"more than the bound of {variant.flop_bound:.2f}\u00d7")
    return Speed(factor)


def verdict(variant: Variant, dense: Variant, *, with_speed: bool = True) -> str:
    """One line such as "close to dense, 1.6\u00d7 faster per step"; empty for dense."""
    if variant.why_dense:
        return f"Stayed dense: {variant.why_dense}"
    if variant.psnr is None or variant.detail is None:
        return ""
    speed = step_speed(variant, dense) if with_speed else None
    return ", ".join(filter(None, [_looks(variant, dense), _runs(speed)]))


def _looks(variant: Variant, dense: Variant) -> str:
    if variant.psnr == inf:
        return "identical to dense"
    if (seen := variant.objects) and (wanted := dense.objects):
        if (lost := wanted.found - seen.found) > 0:
            return f"{lost} of {seen.requested} objects lost" if seen.requested > 1 else "the object is lost"
        if (more := seen.extra - wanted.extra) > 0:
            return f"{more} stray object{'s' * (more > 1)}"
    similarity = variant.detail or 0.0
    if similarity >= SAME:
        return "nearly identical to dense"
    if similarity >= ALIKE:
        return "close to dense"
    return "the same scene with other details" if similarity >= RELATED else "differs from dense"


def _runs(speed: Speed | None) -> str:
    if speed is None:
        return ""
    if not speed.certain:
        return "speed uncertain"
    if abs(speed.factor - 1) < 0.05:
        return "as fast as dense"
    if speed.factor > 1:
        return f"{speed.factor:.1f}\u00d7 faster per step"
    return f"{1 / speed.factor:.1f}\u00d7 slower per step"


def render(template: str, **values: Any) -> str:
    """An HTML page from a template of this package; the values are escaped."""
    environment = Environment(
        loader=PackageLoader("foveate.apps.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"png": _data_uri, "mp4": _mp4_uri, "time": duration, "median": median}
    filters |= {"tiles": draw_tiles, "blocks": draw_table}
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)


def draw_times(variants: list[Variant], *, ink: str = INK, bar: str = BLUE) -> Figure:
    """Bar chart of the median step time of each timed variant, with whiskers from fastest to slowest.

    Args:
        variants: The variants; the bar of the first one is grey.
        ink: Colour of text and whiskers; the background is transparent.
        bar: Colour of the bars.
    """
    timed = [variant for variant in variants if variant.step_seconds]
    labels = [fill(variant.label, 26) for variant in timed]
    row_height = 0.2 + 0.16 * max((label.count("\n") + 1 for label in labels), default=1)
    figure = Figure(figsize=(4.2, 0.3 + row_height * len(timed)), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none", xticks=[], yticks=range(len(timed)))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(ink)
    axes.set_yticklabels(labels, color=ink, parse_math=False)
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.margins(x=0.02)
    for row, variant in enumerate(timed):
        middle, low, high = (f(variant.step_seconds) for f in (median, min, max))
        axes.barh(row, middle, height=0.62, color="#9AA5B1" if variant is variants[0] else bar)
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color=ink, capsize=3, linewidth=1.2)
        offset: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "verticalalignment": "center"}
        axes.annotate(duration(middle), (high, row), color=ink, **offset)
    return figure


def _data_uri(picture: Image.Image | Figure) -> str:
    """The image as a data URI with a PNG."""
    if isinstance(picture, Figure):
        png = figure_png(picture, dpi=200)
    else:
        file = io.BytesIO()
        picture.save(file, format="png")
        png = file.getvalue()
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _mp4_uri(video: bytes) -> str:
    """The video as a data URI."""
    return "data:video/mp4;base64," + base64.b64encode(video).decode()


def duration(seconds: float) -> str:
    """A duration in seconds if it is 1 s or more, else in milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
