# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false
"""Benchmark of one training step of a pixel model, with dense and with log-linear attention."""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate

from foveate.bench.step import TOLERANCE
from foveate.diffusers.pixel_dit import MODELS, PixelDiT
from foveate.ops import dispatch
from foveate.ops.hierarchical_pooling import automatic_levels
from foveate.training.pictures import NoisyPicture, NoisyPictures
from foveate.training.pixel import MIXED, PixelRecipe, prepare, velocity_loss
from foveate.training.run import train_step
from foveate.training.trained import Trained
from foveate.utils.device import now, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import first_line, peak_memory, time_calls
from foveate.web.report import TILE_COLOURS as COLOURS

__all__ = ["VARIANTS", "How", "Variant", "bench_train", "draw_train", "table_of", "usual_variants"]

CHECKED = 32  # tokens along each side of the pictures in the check
ALL_BLOCKS = CHECKED**2 // 16
CHECKED_LEVELS = 3  # maximum for so few tokens
ENOUGH = 8.0  # seconds of measuring, after which it stops


class Variant(NamedTuple):
    """A kind of attention.

    Attributes:
        attention: Option of `PixelDiT`: "dense" or "log-linear".
        kernel: Kernel for dense attention; None leaves the choice to PyTorch.
        levels: Option of `PixelDiT`: pooled levels, None for automatic.
        enrich: Option of `PixelDiT`: attend to means.
    """

    attention: str = "log-linear"
    kernel: SDPBackend | None = None
    levels: int | None = None
    enrich: bool = True

    def at(self, tokens: int) -> "Variant":
        """The variant with the number of levels for this many tokens."""
        return self if self.dense() else self._replace(levels=self.levels or automatic_levels(tokens))

    def dense(self) -> bool:
        """Whether the attention is dense."""
        return self.attention == "dense"

    def title(self) -> str:
        """Name in tables and plots."""
        if self.dense():
            return f"dense, {KERNELS[self.kernel]}"
        levels = f"{self.levels} level" + "s" * (self.levels != 1)
        return f"LLSA, {levels}" if self.enrich else f"top-k, {levels}"

    @contextmanager
    def chosen(self) -> Generator[None]:
        """Context in which dense attention runs in `kernel`; compile caches, which ignore it, are off."""
        kernel = nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)
        with torch.compiler.config.patch(force_disable_caches=True), kernel:
            yield

    def seconds_at(self, tokens: int, fewer: dict[str, Any]) -> float:
        """Predicted seconds of a step, extrapolated from one with fewer tokens."""
        more, attention = tokens / fewer["tokens"], fewer["attention_share"]
        power = 2 if (self.levels or 0) < 2 else 1  # with a single level all blocks are scored against all
        return fewer["step_s"] * (attention * more**power + (1 - attention) * more)


KERNELS = {
    None: "PyTorch's choice",
    SDPBackend.MATH: "with all scores",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention 2",
}
VARIANTS = {
    "cudnn": Variant("dense", SDPBackend.CUDNN_ATTENTION),
    "fa2": Variant("dense", SDPBackend.FLASH_ATTENTION),
    "dense": Variant("dense"),
    "top-k": Variant(levels=1, enrich=False),
    "llsa": Variant(),
    "llsa-2": Variant(levels=2),
}
"""Variants by name: dense attention, one-level top-k without means, and log-linear attention."""


def usual_variants(device: torch.device) -> list[str]:
    """The variants that are timed by default on a device."""
    return [*(("cudnn", "fa2") if device.type == "cuda" else ("dense",)), "top-k", "llsa", "llsa-2"]


class How(NamedTuple):
    """Settings of the model and of the measurement.

    Attributes:
        device: Device to run on.
        dtype: "float32", or "bfloat16" for everything but the weights.
        dit: Name in `MODELS`.
        patch: Pixels along each side of a token.
        batch: Batch size.
        compile: Compile the blocks.
        checkpointing: Use gradient checkpointing.
        longest: Longest step in seconds; slower variants are skipped.
        rounds: Most measurements of a variant; slow ones have fewer.
    """

    device: torch.device
    dtype: str = "float32"
    dit: str = "DiT-S"
    patch: int = 1
    batch: int = 1
    compile: bool = False
    checkpointing: bool = False
    longest: float = 15.0
    rounds: int = 7


def bench_train(
    sides: Sequence[int], variants: Sequence[str], how: How, track: Track = silent
) -> Iterator[dict[str, Any]]:
    """The times of one step of `foveate train` so far, after every new row, ready for JSON.

    A step is forward, loss, backward, clipping, AdamW and the moving average. Weights and pictures are random. The
    variants are timed one after the other, so that each has all the memory; then attention alone, forward and
    backward, in the same shapes. Before that, loss and gradients of a step on small pictures, with every block
    selected and no means, are compared with those of plain dense attention. A wrong variant is not timed, and a
    variant that cannot run or would take too long is listed with the reason.

    Args:
        sides: Sides of the pictures in pixels.
        variants: Names in `VARIANTS`. Speed-ups are over the first dense one.
        how: Settings of the model and of the measurement.
        track: Shows progress.

    Raises:
        ValueError: If a variant or the model is unknown, or patches do not fill a picture.
    """
    recipe = PixelRecipe(dtype=how.dtype)
    if how.dit not in MODELS:
        raise ValueError(f"unknown size {how.dit!r} of the model: choose {', '.join(MODELS)}")
    for name in variants:
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
        if VARIANTS[name].kernel and how.device.type != "cuda":
            raise ValueError(f"{name} needs an NVIDIA GPU: use dense on a {how.device.type}")
    for side in sides:
        if side < 1 or side % how.patch:
            raise ValueError(f"patches of {how.patch} px do not fill {side} x {side} px: use multiples")
    rows: list[dict[str, Any]] = []
    result = {
        "what": f"one training step of {how.dit} with random weights",
        **{name: value for name, value in how._asdict().items() if name != "device"},
        "rate": recipe.rate,
        "rows": rows,
        "versions": versions(),
    }
    timed: dict[Variant, dict[str, Any]] = {}
    for side in sorted(sides):
        tokens = (side // how.patch) ** 2
        everyone = list(dict.fromkeys(VARIANTS[name].at(tokens) for name in variants))  # without duplicates
        advance, dense_s = track(f"{side} px, {tokens:,} tokens", len(everyone)), None
        for variant in everyone:
            wait = variant.seconds_at(tokens, timed[variant]) if variant in timed else 0.0
            row = {"pixels": side, "tokens": tokens, "variant": variant.title()} | _measured(variant, side, wait, how)
            if "failed" not in row:
                timed[variant] = row
                dense_s = dense_s or (row["step_s"] if variant.dense() else None)
                row["speed_up"] = dense_s and dense_s / row["step_s"]
            rows.append(row)
            advance()
            yield result


def _measured(variant: Variant, side: int, wait: float, how: How) -> dict[str, Any]:
    row: dict[str, Any] = {}
    try:
        _in_time(wait, how, "predicted from fewer tokens")
        row |= _checked(variant, how)
        row |= _timed(variant, side, how)
    except Exception as error:  # a failing variant must not end the benchmark
        row["failed"] = first_line(error)
    gc.collect()  # frees the memory for the next variant
    torch.cuda.empty_cache()
    return row


def _in_time(seconds: float, how: How, source: str) -> None:
    if seconds > how.longest:
        raise ValueError(f"skipped: about {seconds:.2g} s a step, {source}; more than {how.longest:g} s")


# --- what is trained ---


class RandomPictures:
    """Pictures of independent random pixels."""

    count, captioned, checksum = None, False, "random"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Tensor, str]:
        """Pixels from -1 to 1, and no caption."""
        return 2 * torch.rand(3, *size) - 1, ""


def _begun(variant: Variant, how: How, compile: bool, **picked: Any) -> tuple[Accelerator, nn.Module, Trained]:
    """A model with random weights, prepared for training."""
    torch.manual_seed(0)
    options = {"attention": variant.attention, "levels": variant.levels, "enrich": variant.enrich, **picked}
    model = PixelDiT(**MODELS[how.dit], patch_size=how.patch, **options)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()  # zero weights would block all gradients
    accelerator = Accelerator(cpu=how.device.type == "cpu", mixed_precision=MIXED[how.dtype])
    return accelerator, *prepare(model, PixelRecipe(dtype=how.dtype), accelerator, how.checkpointing, compile)


def _batch(side: int, count: int, how: How) -> NoisyPicture:
    """Random pictures under noise."""
    samples = NoisyPictures(RandomPictures(), (side, side), seed=0)
    return NoisyPicture(*(x.to(how.device) for x in default_collate([samples[number] for number in range(count)])))


# --- check ---


def _checked(variant: Variant, how: How) -> dict[str, float]:
    """Relative errors of loss and gradients to dense attention, with every block selected.

    Raises:
        ValueError: If one is too large.
    """
    batch = _batch(CHECKED * how.patch, 2, how)
    loss, grads = _gradients(variant, batch, how)
    want, wanted = _gradients(Variant("dense", SDPBackend.MATH), batch, how)
    pairs = zip(grads, wanted, strict=True)
    errors = {
        "loss_error": abs(loss - want) / want,
        "gradient_error": torch.stack([(got - true).norm() / true.norm() for got, true in pairs]).max(),
    }
    for name, error in errors.items():
        if not error <= TOLERANCE[getattr(torch, how.dtype)]:  # NaN is wrong too
            raise ValueError(f"{name.replace('_', ' ')} {error:.1e}: not timing a wrong step")
    return {name: error.item() for name, error in errors.items()}


def _gradients(variant: Variant, batch: NoisyPicture, how: How) -> tuple[Tensor, list[Tensor]]:
    """The loss with every block selected, and the gradients of all weights."""
    variant = variant._replace(levels=variant.levels and min(variant.levels, CHECKED_LEVELS))
    accelerator, model, trained = _begun(variant, how, False, top_k=ALL_BLOCKS, enrich=False)
    with variant.chosen():
        loss = velocity_loss(model, batch)
        accelerator.backward(loss)
    return loss.detach(), [weight.grad for weight in trained.weights]


# --- time ---


def _timed(variant: Variant, side: int, how: How) -> dict[str, Any]:
    torch.compiler.reset()  # each variant compiles graphs of its own, and their number is limited
    accelerator, model, trained = _begun(variant, how, how.compile)
    step = partial(
        train_step, accelerator, model, trained, partial(velocity_loss, model, _batch(side, how.batch, how))
    )
    taken: list[float] = []

    def timed_step() -> None:
        began = now(how.device)
        step()
        taken.append(now(how.device) - began)
        _in_time(taken[-1], how, "measured")

    with variant.chosen():
        if not step().isfinite():
            raise ValueError("the loss is not finite: not timing a wrong step")
        peak = peak_memory(timed_step, how.device, beyond=False)
        while not taken or (len(taken) < how.rounds and sum(taken) < ENOUGH):
            timed_step()
        attend = _attention(model, side, how)
        attend()
        (alone,) = time_calls([attend], len(taken), how.device)
    attention = len(model.blocks) * median(alone)
    return {
        **({} if variant.dense() else {"kernel": _kernel(model, how)}),
        "rounds": len(taken),
        "step_s": median(taken),
        "fastest_s": min(taken),
        "slowest_s": max(taken),
        "images_per_s": how.batch / median(taken),
        "peak_bytes": peak,
        "attention_s": attention,
        "attention_share": attention / median(taken),
    }


def _attention(model: Any, side: int, how: How) -> Callable[[], object]:
    """A call of the attention of one block, forward and backward, on random inputs."""
    config, attend = model.config, model.blocks[0].attn.attend
    shape = how.batch, (side // how.patch) ** 2, config.num_attention_heads, config.attention_head_dim
    like: dict[str, Any] = {"device": how.device, "dtype": getattr(torch, how.dtype)}
    qkv = [torch.randn(shape, **like).transpose(1, 2).requires_grad_() for _ in range(3)]

    def call() -> object:
        out = attend(*qkv, extra_k=None, extra_v=None)[0]
        if how.checkpointing:  # it runs forward twice
            out = attend(*qkv, extra_k=None, extra_v=None)[0]
        return torch.autograd.grad(out, qkv, qkv[0].detach())

    return call


def _kernel(model: Any, how: How) -> str:
    """Name of the backend of log-linear attention."""
    work = how.device, getattr(torch, how.dtype), model.config.attention_head_dim
    return dispatch.choose("log_linear_attention", *work).name


# --- show ---


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("s a step", "step_s", "{:.4g}".format),
    ("images/s", "images_per_s", "{:.3g}".format),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("attention", "attention_share", "{:.0%}".format),
    ("GB", "peak_bytes", lambda count: f"{count / 1e9:.1f}"),
    ("error", "gradient_error", "{:.0e}".format),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by size."""
    table = Table("", *(title for title, _, _ in COLUMNS))
    for (side, tokens), rows in groupby(result["rows"], lambda row: (row["pixels"], row["tokens"])):
        table.add_row(f"[bold]{side} px, {tokens:,} tokens")
        for row in rows:
            about = [row[field] for field in ("variant", "kernel", "failed") if field in row]
            cells = [show(row[field]) if row.get(field) is not None else "" for _, field, show in COLUMNS]
            table.add_row(", ".join(about), *cells)
        table.add_section()
    return table


def draw_train(result: dict[str, Any]) -> Figure:
    """A figure of the pictures per second of every variant, for each size."""
    rows = [row for row in result["rows"] if "failed" not in row]
    names, sides = (list(dict.fromkeys(row[key] for row in rows)) for key in ("variant", "pixels"))
    figure = Figure(figsize=(6.4, 0.8 + 0.25 * len(rows) + 0.7 * len(sides)), layout="constrained")
    shapes = [sum(row["pixels"] == side for row in rows) for side in sides] or [1]
    panels = figure.subplots(len(shapes), squeeze=False, height_ratios=shapes)[:, 0]
    for axes, side in zip(panels, sides, strict=False):
        mine = [row for row in rows if row["pixels"] == side]
        bars = axes.barh(
            [row["variant"] for row in mine],
            [row["images_per_s"] for row in mine],
            color=[COLOURS[names.index(row["variant"]) % len(COLOURS)] for row in mine],
        )
        axes.bar_label(bars, [f"{row['images_per_s']:.3g}" for row in mine], padding=3, fontsize=8)
        axes.set_title(f"{side} px, {mine[0]['tokens']:,} tokens: pictures a second", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()  # the first on top
    return figure
