# pyright: basic
"""One prompt generated with several methods, side by side on one HTML page."""

import time
from collections.abc import Callable, Sequence
from math import inf, log10
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

from PIL import Image, ImageSequence

from foveate.apps.web.report import Comparison, Intro, Objects, Variant, comparison_page
from foveate.diffusers.apply import Handle
from foveate.methods import LLSA, METHODS, ComposedMethod, HilbertA, ToMA
from foveate.ops.block_table import BlockTable
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import Distilled, MethodLike, throughout, using
from foveate.pipelines.request import Request, denoiser, draw, fingerprint, frame_rate, write_video
from foveate.pipelines.steps import Call, record_step, time_steps
from foveate.tuning.similarity import detail_ssim, psnr, ssim
from foveate.utils.device import versions
from foveate.utils.files import CLAIM, claim, slug, write_whole
from foveate.utils.progress import Track, silent
from foveate.utils.timing import now

__all__ = ["PAGE", "comparison", "draw_variant", "recommended", "reserve", "showcase"]

PAGE = "index.html"
"""Name of the page in its folder."""


def recommended(distilled: Distilled) -> list[MethodLike]:
    """Recommended settings for a model with a LoRA: the LoRA's method, and two that need no training."""
    return [distilled, ToMA(keep=0.75), LLSA(top_k=16, start_percent=0.4)]


def showcase(start_percent: float = 0.0) -> list[MethodLike]:
    """All settings of methods without a LoRA on the page of `compare`.

    Args:
        start_percent: Fraction of the run before which steps stay dense: see `Card.start_percent`.
    """
    alone = [method for cls in METHODS.values() for method in cls.showcase()]
    together = ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))
    return [throughout(method, start_percent) for method in (*alone, together)]


def comparison(
    pipeline: Any,
    request: Request,
    methods: Sequence[MethodLike],
    out: Path,
    *,
    settings: dict[str, str] | None = None,
    notice: str = "",
    judge: Callable[[Image.Image], Objects] | None = None,
    rounds: int = 3,
    track: Track = silent,
    intro: Intro | None = None,
) -> Comparison:
    """One prompt generated dense and with each method, with times of the denoiser; also a page in `out`.

    A notebook displays the result as a row of images.

    The page is rewritten after each image. Images of the same settings that are already in the folder are kept. A
    video is written as MP4, and as an animated PNG, which keeps the exact pixels.

    Args:
        pipeline: A diffusers pipeline.
        request: Prompt, size, steps and seed.
        methods: Methods, one variant each. A method that does not fit is left out, with a notice on the page.
        out: Folder of the page and its images.
        settings: Settings for the page and the metadata of the images.
        notice: Notice at the top of the page.
        judge: Counts the requested objects in an image.
        rounds: Timed steps of each variant.
        track: Shows progress.
        intro: Introduction of the page.

    Raises:
        ValueError: If no method fits, or the folder is one that `reserve` refuses.
    """
    methods, refused = _supported(pipeline, methods)
    settings = settings or {}
    machine, shown = versions(), list[Comparison]()
    made = {"request": repr(request), "weights": fingerprint(denoiser(pipeline)), "foveate": machine["commit"]}
    files = _files(methods, {**settings, **made})
    reserve(out, pipeline, request, settings)
    with_lora = [one.method for one in methods if isinstance(one, Distilled)]
    page, variants, ran = out / PAGE, list[Variant](), list[MethodLike | None]()
    notices, waiting = [*filter(None, [notice]), *refused], ["dense", *(method.title for method in methods)]

    def write(*, running: bool) -> None:
        told = " ".join(notices), _about_times(methods), waiting, running
        shown[:] = [Comparison(request.prompt, variants, settings, machine, *told, intro)]
        write_whole(page, comparison_page(*shown).encode())

    try:
        step = record_step(pipeline, request)
        for method, (name, about) in zip((None, *methods), files.items(), strict=True):
            advance = track(waiting[0], request.steps)
            try:
                variant = _inspect_step(pipeline, step, method)
                frames, seconds = _drawn(pipeline, request, method, out / f"{name}.png", about, advance)
            except ValueError as error:
                if method is None:
                    raise
                notices.append(f"{method.title} is left out: {error}.")
                waiting.pop(0)
                continue
            variant = _compared(variant, frames, variants[0].frames if variants else [])
            variant = variant._replace(seconds=seconds, objects=judge(frames[0]) if judge else None)
            variant = variant._replace(without_lora=method in with_lora)
            if (video := out / f"{name}.mp4").exists():
                variant = variant._replace(video=video.read_bytes())
            variants.append(variant)
            ran.append(method)
            waiting.pop(0)
            write(running=True)
        timing = track("timing", len(ran) * rounds)
        for taken in time_steps(pipeline, step, ran, rounds, timing, warm_up=False):
            timed = zip(variants, taken, strict=True)
            variants[:] = [v._replace(step_seconds=[*v.step_seconds, spent]) for v, spent in timed]
    finally:
        if variants:
            write(running=False)
    return shown[0]


def reserve(out: Path, pipeline: Any, request: Request, settings: dict[str, str]) -> None:
    """Reserve a folder for the comparisons of one request with one model.

    Raises:
        ValueError: If the folder holds those of another request, or files that would be overwritten.
    """
    ours = (out / CLAIM).exists()
    if foreign := [path for path in (out / PAGE, out / "dense.png") if not ours and path.exists()]:
        raise ValueError(f"{foreign[0]} would be overwritten: name another folder")
    shared = {name: text for name, text in settings.items() if name != "device"}
    claim(out, shared | {"request": repr(request), "weights": fingerprint(denoiser(pipeline))})


def _files(methods: Sequence[MethodLike], settings: dict[str, str]) -> dict[str, dict[str, str]]:
    """File name and image metadata of each variant, dense first."""
    files: dict[str, dict[str, str]] = {}
    for method in (None, *methods):
        about = {**settings, "method": repr(method) if method else "dense", "page": PAGE}
        name = slug(method.title if method else "dense")
        name += f"-{crc32(about['method'].encode()):08x}" if name in files else ""  # slugs are cut
        files[name] = about
    return files


def _read_metadata(path: Path) -> dict[str, str]:
    """Metadata of an image; empty for other files."""
    try:
        with Image.open(path) as picture:
            return {str(name): str(text) for name, text in picture.info.items()}
    except (OSError, Image.DecompressionBombError):
        return {}


def _supported(pipeline: Any, methods: Sequence[MethodLike]) -> tuple[list[MethodLike], list[str]]:
    """Methods that the model supports, and a notice for each other method."""
    supported: list[MethodLike] = []
    notices: list[str] = []
    for method in methods:
        try:
            with using(pipeline, method):
                supported.append(method)
        except ValueError as error:
            notices.append(f"{method.title} is left out: {error}.")
    if notices and not supported:
        raise ValueError(" ".join(notices))
    return supported, notices


def draw_variant(
    pipeline: Any,
    request: Request,
    method: MethodLike | None,
    dense: Sequence[Image.Image],
    advance: Callable[[], None],
) -> Variant:
    """Variant of a method with its frames and their distance to the frames of `dense`; not timed."""
    with using(pipeline, method) as run:
        frames = draw(pipeline, request, advance)
        return _compared(_variant_from_run(method, run), frames, dense)


def _compared(variant: Variant, frames: Sequence[Image.Image], dense: Sequence[Image.Image]) -> Variant:
    """The variant with frames and, if there is a dense image, the distance to it."""
    if not dense:
        return variant._replace(frames=frames)
    return variant._replace(
        frames=frames,
        psnr=_video_psnr(frames, dense),
        ssim=mean(map(ssim, frames, dense)),
        detail=mean(map(detail_ssim, frames, dense)),
    )


def _about_times(methods: Sequence[MethodLike]) -> list[str]:
    """Remarks on the step times of these methods."""
    changing = [method for method in methods if any(len(part.schedule) > 1 for part in method.parts)]
    late = [
        method.title for method in methods
        if method not in changing and not all(part.always for part in method.parts)
    ]  # fmt: skip
    merging = [m.title for m in methods if any(getattr(part, "dst_every", 1) > 1 for part in m.parts)]
    caching = [method.title for method in methods if getattr(method, "cache", None)]
    return [
        f"{' and '.join(titles)}: {remark}."
        for titles, remark in (
            (caching, "skips steps; the time is for a computed step"),
            ([method.title for method in changing], "changes during the run; the time is for its last setting"),
            (late, "sparse in part of the steps; the time is for a sparse step"),
            (merging, "a plan serves several steps; the time is for the slowest step, which makes a new plan"),
        )
        if titles
    ]


def _drawn(
    pipeline: Any,
    request: Request,
    method: MethodLike | None,
    path: Path,
    about: dict[str, str],
    advance: Callable[[], None],
) -> tuple[list[Image.Image], float]:
    """The frames, and the seconds to generate them; an existing image of the same settings is read instead."""
    told = _read_metadata(path)
    if path.exists() and told.get("page") != PAGE:
        raise ValueError(f"{path} would be overwritten: name another folder")
    if told and about.items() <= told.items():
        for _ in range(request.steps):
            advance()
        with Image.open(path) as picture:
            return [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)], float(told["seconds"])
    with using(pipeline, method):
        start = now(pipeline.device)
        frames = draw(pipeline, request, advance)
        seconds = time.perf_counter() - start
    if len(frames) > 1:
        write_video(path.with_suffix(".mp4"), frames, frame_rate(pipeline, request))
    write_picture(path, frames[0], {**about, "seconds": f"{seconds:.3f}"}, more=frames[1:])
    return frames, seconds


def _inspect_step(pipeline: Any, step: Call, method: MethodLike | None) -> Variant:
    """Variant with a method's sparsity, plan and pattern in one step, without an image."""
    with using(pipeline, method and throughout(method)) as run:
        step.run(denoiser(pipeline))
        return _variant_from_run(method, run)


def _variant_from_run(method: MethodLike | None, run: Handle | None) -> Variant:
    """Variant with a method's sparsity, plan and pattern in the last step."""
    if method is None or run is None:
        return Variant("dense")
    layers, plan = run.summary().layers, next(iter(run.plans().values()), None)
    sparsity = mean(layer.true for layer in layers)
    tile_map, picked = plan.tile_maps[0] if plan else None, getattr(plan, "picked", None)
    if tile_map is not None and tile_map.ndim == 3:  # (frames, rows, columns): shown is the first frame
        tile_map = tile_map[0]
        picked = None if picked is None else picked[picked < tile_map.numel()]
    return Variant(
        label=method.title,
        nominal=mean(layer.nominal for layer in layers),
        true=sparsity,
        flop_bound=1 / (1 - sparsity),
        tile_map=tile_map,
        table=next((table for table in plan.tables if isinstance(table, BlockTable)), None) if plan else None,
        why_dense="" if plan else layers[0].why,
        picked=picked,
    )


def _video_psnr(frames: Sequence[Image.Image], reference: Sequence[Image.Image]) -> float:
    """PSNR in dB over the pixels of all frames."""
    error = mean(10 ** (-psnr(*pair) / 10) for pair in zip(frames, reference, strict=True))
    return -10 * log10(error) if error else inf
