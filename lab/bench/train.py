# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportReturnType=false
"""Benchmark of one training step of a pixel model, with dense and with log-linear attention."""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from accelerate import Accelerator
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import default_collate

from foveate.apps.bench.step import TOLERANCE
from foveate.apps.bench.table import TableColumn, results_table
from foveate.apps.console import (
    Checkpointing,
    Commit,
    Compile,
    Out,
    TrainingDevice,
    TrainingDtype,
    numbers,
    run_and_save,
    training_device,
)
from foveate.nn.pixel_dit import MODELS, PixelDiT
from foveate.ops import dispatch
from foveate.ops.hierarchical_pooling import automatic_levels
from foveate.training.pictures import NoisyPicture, NoisyPictures, seeded
from foveate.training.pixel import MIXED, PixelRecipe, prepare, velocity_loss
from foveate.training.run import train_step
from foveate.training.trained import Trained
from foveate.utils.device import choose_dtype, dtype_name, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import now, peak_memory, time_calls
from lab.bench.common import check_errors, check_time, note_failure

__all__ = ["VARIANTS", "RandomPictures", "Settings", "Variant", "bench_train", "main", "random_dit", "table_of"]

CHECKED = 32  # tokens along each side of the images in the check
ALL_BLOCKS = CHECKED**2 // 16
CHECKED_LEVELS = 3  # maximum for CHECKED**2 tokens
MEASURING_SECONDS = 8.0  # no further step is measured after this time


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
        """Name in tables."""
        if self.dense():
            return f"dense, {KERNELS[self.kernel]}"
        levels = f"{self.levels} level" + "s" * (self.levels != 1)
        return f"LLSA, {levels}" if self.enrich else f"top-k, {levels}"

    @contextmanager
    def chosen(self) -> Generator[None]:
        """Context manager that runs dense attention in `kernel`, without compile caches, which ignore the kernel."""
        kernel = nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)
        with torch.compiler.config.patch(force_disable_caches=True), kernel:
            yield

    def seconds_at(self, tokens: int, fewer: dict[str, Any]) -> float:
        """Predicted seconds of a step, extrapolated from a step with fewer tokens."""
        more, attention = tokens / fewer["tokens"], fewer["attention_share"]
        power = 2 if (self.levels or 0) < 2 else 1  # one level scores every pair of blocks
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


class Settings(NamedTuple):
    """Settings of the model and of the measurement; the options of `main` describe them."""

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
    sides: Sequence[int], variants: Sequence[str], settings: Settings, track: Track = silent
) -> Iterator[dict[str, Any]]:
    """Yield the times of one step of `foveate train` so far after every new row, ready for JSON.

    A step is forward, loss, backward, clipping, AdamW and the moving average. Weights and images are random. The
    variants are timed one after the other, so that each has all the memory; then attention alone, forward and
    backward, in the same shapes. Before that, loss and gradients of a step on small images, with every block selected
    and no means, are compared with plain dense attention. A wrong variant is not timed, and a variant that cannot run
    or would take too long is listed with the reason.

    Args:
        sides: Sides of the images in pixels.
        variants: Names in `VARIANTS`. Speed-ups are over the first dense variant.
        settings: Settings of the model and of the measurement.
        track: Shows progress.

    Raises:
        ValueError: If a variant or the model is unknown, or patches do not fill an image.
    """
    recipe = PixelRecipe(dtype=settings.dtype)
    if settings.dit not in MODELS:
        raise ValueError(f"unknown size {settings.dit!r} of the model: choose {', '.join(MODELS)}")
    for name in variants:
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
        if VARIANTS[name].kernel and settings.device.type != "cuda":
            raise ValueError(f"{name} needs an NVIDIA GPU: use dense on a {settings.device.type}")
    for side in sides:
        if side < 1 or side % settings.patch:
            raise ValueError(f"patches of {settings.patch} px do not fill {side} x {side} px: use multiples")
    rows: list[dict[str, Any]] = []
    result = {
        "what": f"one training step of {settings.dit} with random weights",
        **{name: value for name, value in settings._asdict().items() if name != "device"},
        "rate": recipe.rate,
        "rows": rows,
        "versions": versions(),
    }
    timed: dict[Variant, dict[str, Any]] = {}
    for side in sorted(sides):
        tokens = (side // settings.patch) ** 2
        everyone = list(dict.fromkeys(VARIANTS[name].at(tokens) for name in variants))  # without duplicates
        advance, dense_s = track(f"{side} px, {tokens:,} tokens", len(everyone)), None
        for variant in everyone:
            predicted = variant.seconds_at(tokens, timed[variant]) if variant in timed else 0.0
            row = {"pixels": side, "tokens": tokens, "variant": variant.title()}
            row |= _measured(variant, side, predicted, settings)
            if "failed" not in row:
                timed[variant] = row
                dense_s = dense_s or (row["step_s"] if variant.dense() else None)
                row["speed_up"] = dense_s and dense_s / row["step_s"]
            rows.append(row)
            advance()
            yield result


def _measured(variant: Variant, side: int, predicted: float, settings: Settings) -> dict[str, Any]:
    row: dict[str, Any] = {}
    with note_failure(row):
        check_time(predicted, settings.longest, "predicted from fewer tokens")
        row |= _checked(variant, settings)
        row |= _timed(variant, side, settings)
    gc.collect()  # frees the memory for the next variant
    torch.cuda.empty_cache()
    return row


class RandomPictures:
    """Images of independent random pixels, the same in every process."""

    count, captioned, checksum = None, False, "random"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Tensor, str]:
        """Pixels from -1 to 1, and no caption."""
        return 2 * torch.rand(3, *size, generator=seeded("pixels", 0, index)) - 1, ""


def random_dit(size: str, **options: Any) -> PixelDiT:
    """A model of this size with the same random weights in every process."""
    torch.manual_seed(0)
    model = PixelDiT(**MODELS[size], **options)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()  # zero weights would block all gradients
    return model


def _prepared(
    variant: Variant, settings: Settings, compile: bool, **changes: Any
) -> tuple[Accelerator, nn.Module, Trained]:
    """A model with random weights, prepared for training."""
    options = {"attention": variant.attention, "levels": variant.levels, "enrich": variant.enrich, **changes}
    model = random_dit(settings.dit, patch_size=settings.patch, **options)
    accelerator = Accelerator(cpu=settings.device.type == "cpu", mixed_precision=MIXED[settings.dtype])
    return accelerator, *prepare(
        model, PixelRecipe(dtype=settings.dtype), accelerator, settings.checkpointing, compile
    )


def _batch(side: int, count: int, settings: Settings) -> NoisyPicture:
    """Random noisy images."""
    samples = NoisyPictures(RandomPictures(), (side, side), seed=0)
    return NoisyPicture(
        *(x.to(settings.device) for x in default_collate([samples[number] for number in range(count)]))
    )


def _checked(variant: Variant, settings: Settings) -> dict[str, float]:
    """Relative errors of loss and gradients against dense attention, with every block selected.

    Raises:
        ValueError: If an error is too large.
    """
    batch = _batch(CHECKED * settings.patch, 2, settings)
    loss, grads = _gradients(variant, batch, settings)
    want, wanted = _gradients(Variant("dense", SDPBackend.MATH), batch, settings)
    pairs = zip(grads, wanted, strict=True)
    errors = {
        "loss_error": (abs(loss - want) / want).item(),
        "gradient_error": torch.stack([(got - true).norm() / true.norm() for got, true in pairs]).max().item(),
    }
    check_errors(errors, TOLERANCE[getattr(torch, settings.dtype)])
    return errors


def _gradients(variant: Variant, batch: NoisyPicture, settings: Settings) -> tuple[Tensor, list[Tensor]]:
    """The loss with every block selected, and the gradients of all weights."""
    variant = variant._replace(levels=variant.levels and min(variant.levels, CHECKED_LEVELS))
    accelerator, model, trained = _prepared(variant, settings, False, top_k=ALL_BLOCKS, enrich=False)
    with variant.chosen():
        loss = velocity_loss(model, batch)
        accelerator.backward(loss)
    return loss.detach(), [weight.grad for weight in trained.weights]


def _timed(variant: Variant, side: int, settings: Settings) -> dict[str, Any]:
    torch.compiler.reset()  # each variant compiles new graphs, and their number is limited
    accelerator, model, trained = _prepared(variant, settings, settings.compile)
    step = partial(
        train_step, accelerator, model, trained, partial(velocity_loss, model, _batch(side, settings.batch, settings))
    )
    taken: list[float] = []

    def timed_step() -> None:
        began = now(settings.device)
        step()
        taken.append(now(settings.device) - began)
        check_time(taken[-1], settings.longest, "measured")

    with variant.chosen():
        if not step().isfinite():
            raise ValueError("the loss is not finite: not timing a wrong step")
        peak = peak_memory(timed_step, settings.device, beyond=False)
        while not taken or (len(taken) < settings.rounds and sum(taken) < MEASURING_SECONDS):
            timed_step()
        attend = _attention(model, side, settings)
        attend()
        (alone,) = time_calls([attend], len(taken), settings.device)
    attention = len(model.blocks) * median(alone)
    return {
        **({} if variant.dense() else {"kernel": _kernel(model, settings)}),
        "rounds": len(taken),
        "step_s": median(taken),
        "fastest_s": min(taken),
        "slowest_s": max(taken),
        "images_per_s": settings.batch / median(taken),
        "peak_bytes": peak,
        "attention_s": attention,
        "attention_share": attention / median(taken),
    }


def _attention(model: Any, side: int, settings: Settings) -> Callable[[], object]:
    """A call of the attention of one block, forward and backward, on random inputs."""
    config, attend = model.config, model.blocks[0].attn.attend
    shape = settings.batch, (side // settings.patch) ** 2, config.num_attention_heads, config.attention_head_dim
    like: dict[str, Any] = {"device": settings.device, "dtype": getattr(torch, settings.dtype)}
    qkv = [torch.randn(shape, **like).transpose(1, 2).requires_grad_() for _ in range(3)]

    def call() -> object:
        out = attend(*qkv, extra_k=None, extra_v=None)[0]
        if settings.checkpointing:  # it runs forward twice
            out = attend(*qkv, extra_k=None, extra_v=None)[0]
        return torch.autograd.grad(out, qkv, qkv[0].detach())

    return call


def _kernel(model: Any, settings: Settings) -> str:
    """Name of the backend of log-linear attention."""
    work = settings.device, getattr(torch, settings.dtype), model.config.attention_head_dim
    return dispatch.choose("log_linear_attention", *work).name


COLUMNS: list[TableColumn] = [
    ("", "title", str),
    ("s a step", "step_s", "{:.4g}".format),
    ("images/s", "images_per_s", "{:.3g}".format),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("attention", "attention_share", "{:.0%}".format),
    ("GB", "peak_bytes", lambda count: f"{count / 1e9:.1f}"),
    ("error", "gradient_error", "{:.0e}".format),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by size."""
    rows = [{**row, "title": ", ".join(row[key] for key in ("variant", "kernel") if key in row)}
            for row in result["rows"]]  # fmt: skip
    return results_table(rows, COLUMNS, lambda row: f"{row['pixels']} px, {row['tokens']:,} tokens")


def main(
    pixels: Annotated[str, typer.Option(help="Sides of the images in pixels.")] = "256,512",
    variants: Annotated[
        str,
        typer.Option(
            help="What to time: cudnn, fa2 (dense attention by cuDNN or FlashAttention 2), dense (PyTorch's choice), "
            "top-k (one level, no means), llsa, llsa-2 (two levels). "
            "[dim]default: all but dense; without a GPU all but cudnn and fa2[/]"
        ),
    ] = "",
    dit: Annotated[str, typer.Option(help="Depth and width: DiT-T, DiT-XS, DiT-S, DiT-B.")] = "DiT-S",
    patch: Annotated[int, typer.Option(min=1, help="Pixels along each side of a token.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    checkpointing: Checkpointing = False,
    compile: Compile = False,
    longest: Annotated[float, typer.Option(min=0, help="Longest step in seconds; slower variants are skipped.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Most measurements of each variant; fewer if slow.")] = 7,
    out: Out = Path("bench"),
    device: TrainingDevice = "auto",
    dtype: TrainingDtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one training step of a pixel model with random weights, with dense and with log-linear attention.

    A step as in [bold]foveate train[/]: forward, loss, backward, clipping, AdamW and the average of the weights.

    python -m lab train --compile                                         # a GPU: about 4 minutes

    python -m lab train --pixels 128 --batch 16 --variants cudnn,llsa     # as in the paper's ablation

    python -m lab train --pixels 32,64 --dit DiT-T                       # a CPU
    """
    where = torch.device(training_device(device))
    precision = dtype_name(choose_dtype(dtype, where))
    settings = Settings(where, precision, dit, patch, batch, compile, checkpointing, longest, rounds)
    usual = ["cudnn", "fa2"] if where.type == "cuda" else ["dense"]
    names = variants.split(",") if variants else [*usual, "top-k", "llsa", "llsa-2"]
    run_and_save(
        out / f"train-{where.type}.json", commit, partial(bench_train, numbers(pixels), names, settings), table_of
    )
