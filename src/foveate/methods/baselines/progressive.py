# pyright: basic
"""Resolution over steps: the first denoising steps at lower resolution, the others at full resolution.

1. The pipeline draws its noise at full resolution. The low frequencies of this noise are the noise at low resolution.
2. The first steps run at low resolution. The last of them steps to sigma 0: to the model's estimate of the image.
3. This estimate is upsampled, and the noise at full resolution is added up to the sigma of the next step.
4. The other steps run at full resolution.

Both parts are ordinary calls of the pipeline, whose scheduler runs a part of its steps. Engines offer this under names
such as progressive resolution, to save time without training as token merging does.
"""

import copy
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from foveate.utils.choices import check_options

__all__ = ["ProgressiveResolution", "low_frequencies"]


@dataclass(frozen=True, kw_only=True)
class ProgressiveResolution:
    """Calls a pipeline of FLUX.1 or Wan with its first steps at lower resolution. `factor=1` is the plain call.

    Examples:
        >>> generate = ProgressiveResolution(factor=2, until=0.4)
        >>> def lighthouse(pipe):
        ...     return generate(pipe, prompt="a lighthouse", height=1024, width=1024, num_inference_steps=28).images[0]

    Attributes:
        factor: Full side divided by the side in the first steps, 1 or more. The smaller sides are rounded to what the
            pipeline takes.
        until: Fraction of the denoising steps, 0 to below 1, at low resolution.

    Raises:
        ValueError: If an option is out of its range.
    """

    factor: float = 2
    until: float = 0.4

    def __post_init__(self) -> None:
        check_options(self)
        if not self.factor >= 1:
            raise ValueError(f"factor divides the sides of the image, 1 or more, not {self.factor}")
        if not 0 <= self.until < 1:
            raise ValueError(f"until is a fraction of the run from 0 to below 1, not {self.until}")

    @property
    def title(self) -> str:
        """Name and options."""
        return f"resolution / {self.factor:g} until {self.until:g}"

    def __call__(self, pipeline: Any, *, height: int, width: int, num_inference_steps: int, **request: Any) -> Any:
        """Output of the pipeline.

        Methods that are applied to the pipeline work in both parts. `start_percent` and schedules are fractions of
        each part.

        Args:
            pipeline: The pipeline.
            height: Height in pixels.
            width: Width in pixels.
            num_inference_steps: Number of denoising steps in all.
            **request: Other arguments of the pipeline.

        Raises:
            ValueError: If the pipeline has another kind of latents or of scheduler, or does not take this size.
        """
        steps = num_inference_steps
        first = round(self.until * steps)
        size, plain = (height, width), {**request, "num_inference_steps": steps}
        small = self.small(pipeline, size)
        if first == 0 or small == size:
            return pipeline(height=height, width=width, **plain)
        noise: list[Tensor] = []

        def at_low_resolution(prepare: Callable[..., Any], given: dict[str, Any]) -> Any:
            whole = prepare(**{**given, "height": height, "width": width})
            noise.append(_unpacked(pipeline, _tensor(whole), size))
            rows, columns = (
                side * part // full for side, part, full in zip(noise[0].shape[-2:], small, size, strict=True)
            )
            low = low_frequencies(noise[0].double(), rows, columns).to(noise[0].dtype)
            return prepare(**{**given, "latents": _packed(pipeline, low)})

        with _steps(pipeline, slice(first), at_low_resolution):
            options = {**plain, "output_type": "latent", "return_dict": False}
            estimate = _unpacked(pipeline, pipeline(height=small[0], width=small[1], **options)[0], small)
        upsampled = _upsampled(estimate.float(), *noise[0].shape[-2:])
        latents, sigmas = list[Tensor](), list[float]()

        def add_noise() -> None:  # some pipelines prepare latents first, and others steps
            if latents and sigmas:
                noisy = (1 - sigmas[0]) * upsampled + sigmas[0] * noise[0].float()
                latents[0].copy_(_packed(pipeline, noisy))

        def at_full_resolution(prepare: Callable[..., Any], given: dict[str, Any]) -> Any:
            prepared = prepare(**given)
            latents.append(_tensor(prepared))
            add_noise()
            return prepared

        def begin(sigma: float) -> None:
            sigmas.append(sigma)
            add_noise()

        with _steps(pipeline, slice(first, None), at_full_resolution, begin):
            empty = _packed(pipeline, torch.zeros_like(noise[0]))
            return pipeline(height=height, width=width, **{**plain, "latents": empty})

    def small(self, pipeline: Any, size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) in pixels of the first steps.

        Raises:
            ValueError: If the pipeline does not take this size, or is none that this works with.
        """
        unit = _unit(pipeline)
        if any(side % unit for side in size):
            raise ValueError(f"sides must be multiples of {unit} pixels, not {size[0]} x {size[1]}")
        height, width = (max(1, round(side / unit / self.factor)) * unit for side in size)
        return height, width


def low_frequencies(x: Float[Tensor, "*batch h w"], rows: int, columns: int) -> Float[Tensor, "*batch r c"]:
    """The low frequencies of an image, as an image of fewer rows and columns.

    Orthonormal: independent normal numbers of variance 1 become just such numbers.

    Args:
        x: The image.
        rows: Rows of the result.
        columns: Columns of the result.
    """
    vertical, horizontal = (
        _resampling(full, part).to(x) for full, part in zip(x.shape[-2:], (rows, columns), strict=True)
    )
    return vertical @ x @ horizontal.mT


def _resampling(full: int, part: int) -> Float[Tensor, "part full"]:
    """Cosine transform of `full` numbers, and back from its first `part`."""

    def cosines(n: int) -> Tensor:
        k = torch.arange(n, dtype=torch.float64)
        matrix = torch.cos(math.pi / n * (k + 0.5) * k[:, None]) * math.sqrt(2 / n)
        matrix[0] /= math.sqrt(2)
        return matrix

    return cosines(part).mT @ cosines(full)[:part]


def _upsampled(x: Float[Tensor, "*batch h w"], rows: int, columns: int) -> Float[Tensor, "*batch r c"]:
    flat = x.flatten(0, -4) if x.ndim > 3 else x[None]
    return interpolate(flat, (rows, columns), mode="bicubic").view(*x.shape[:-2], rows, columns)


# --- what differs between pipelines ---


def _packs(pipeline: Any) -> bool:
    """Whether latents are packed as in FLUX.1."""
    unpack = getattr(pipeline, "_unpack_latents", None)
    return unpack is not None and [*signature(unpack).parameters] == ["latents", "height", "width", "vae_scale_factor"]


def _unit(pipeline: Any) -> int:
    """Sides in pixels are multiples of this number; raises a ValueError if the pipeline is of another kind."""
    scheduler, name = getattr(pipeline, "scheduler", None), type(pipeline).__name__
    config = getattr(scheduler, "config", {})
    if scheduler is None or not (hasattr(scheduler, "scale_noise") or config.get("use_flow_sigmas")):
        raise ValueError(f"resolution over steps needs a flow-matching scheduler, not {type(scheduler).__name__}")
    if scheduler.order > 1:
        raise ValueError(f"{type(scheduler).__name__} has several timesteps a step: use one of first order")
    kinds = {
        kind.__name__ for kind in type(pipeline).__mro__
    }  # those that begin from an image prepare more than noise
    if kinds & {"FluxPipeline", "ChromaPipeline"}:
        return 2 * pipeline.vae_scale_factor
    if "WanPipeline" in kinds:
        return pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[-1]
    raise ValueError(f"resolution over steps knows FluxPipeline, ChromaPipeline and WanPipeline, not {name}")


def _unpacked(pipeline: Any, latents: Tensor, size: tuple[int, int]) -> Tensor:
    """Latents [batch, channels, ..., rows, columns]."""
    return pipeline._unpack_latents(latents, *size, pipeline.vae_scale_factor) if _packs(pipeline) else latents


def _packed(pipeline: Any, latents: Tensor) -> Tensor:
    """Latents as the pipeline has them."""
    return pipeline._pack_latents(latents, *latents.shape) if _packs(pipeline) else latents


def _tensor(prepared: Any) -> Tensor:
    """The latents among what `prepare_latents` returns."""
    return prepared[0] if isinstance(prepared, tuple) else prepared


@contextmanager
def _steps(
    pipeline: Any,
    part: slice,
    prepare: Callable[[Callable[..., Any], dict[str, Any]], Any],
    begin: Callable[[float], None] = lambda sigma: None,
) -> Generator[None]:
    """Context in which a pipeline runs a part of its steps; without the last ones it steps to sigma 0 at the end.

    Args:
        pipeline: The pipeline.
        part: The steps.
        prepare: Prepares the latents, given the pipeline's own function for this and its arguments by name.
        begin: Called with the sigma of the first of these steps.
    """
    whole, scheduler, own = pipeline.scheduler, copy.deepcopy(pipeline.scheduler), pipeline.prepare_latents
    set_timesteps = scheduler.set_timesteps

    @wraps(set_timesteps)
    def set_part(*args: Any, **kwargs: Any) -> None:
        set_timesteps(*args, **kwargs)
        sigmas = scheduler.sigmas
        begin(float(sigmas[part.start or 0]))
        scheduler.timesteps = scheduler.timesteps[part]
        scheduler.sigmas = torch.cat([sigmas[:-1][part], sigmas[-1:]])
        scheduler.num_inference_steps = len(scheduler.timesteps)

    @wraps(own)
    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        return prepare(own, signature(own).bind(*args, **kwargs).arguments)

    scheduler.set_timesteps = set_part
    pipeline.scheduler, pipeline.prepare_latents = scheduler, prepare_latents
    try:
        yield
    finally:
        pipeline.scheduler = whole
        del pipeline.prepare_latents
