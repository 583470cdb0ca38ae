# pyright: basic
"""One prompt drawn with several methods, side by side on one HTML page."""

from collections.abc import Callable, Sequence
from math import inf, log10
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

from PIL import Image

from foveate.diffusers.lora import MethodLike, using
from foveate.diffusers.pipelines import Request, draw, frame_rate, record_step, time_steps, write_video
from foveate.methods import METHODS, ComposedMethod, HilbertA, Method, ToMA
from foveate.ops.block_table import BlockTable
from foveate.utils.device import versions
from foveate.utils.files import slug, write_picture, write_whole
from foveate.utils.progress import Track, silent
from foveate.web.report import Comparison, Variant, comparison_page, psnr, ssim

__all__ = ["compare", "draw_variant", "showcase"]

PAGE = "index.html"


def showcase() -> list[Method | ComposedMethod]:
    """The settings of every method that `compare` shows by default, and a combination."""
    alone = [method for cls in METHODS.values() for method in cls.showcase()]
    return [*alone, ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))]


def compare(
    pipeline: Any,
    request: Request,
    methods: Sequence[MethodLike],
    out: Path,
    *,
    settings: dict[str, str],
    notice: str = "",
    rounds: int = 3,
    track: Track = silent,
) -> Path:
    """Draw a prompt dense and with each method, time the denoiser, and write the page. Returns its path.

    Every picture is written as soon as it is drawn, and an interrupted run leaves a page of what is finished. A video
    is written as MP4, beside a picture of some frames. Pictures and videos of an older page in the folder are removed.

    Args:
        pipeline: A diffusers pipeline.
        request: What to draw.
        methods: Methods, one variant each. A method that does not fit is left out, with a notice on the page.
        out: Folder of the page and its pictures.
        settings: Settings that the page and the pictures report.
        notice: Notice at the top of the page.
        rounds: Timed steps of each variant.
        track: Shows progress.
    """
    page, variants, notices = out / PAGE, list[Variant](), [notice] if notice else []
    methods, refused = _supported(pipeline, methods)
    notices += refused
    notices += [
        f"{method.title} works in a part of the steps: its time is that of a step in which it works."
        for method in methods
        if not all(part.always for part in method.parts)
    ]
    notices += [
        f"{method.title} reuses its plan for up to {most} steps: its time is that of a step that makes a new "
        "plan, the slowest."
        for method in methods
        if (most := max(getattr(part, "dst_every", 1) for part in method.parts)) > 1
    ]
    _remove_pictures(out)
    files: set[str] = set()
    ran: list[MethodLike | None] = []
    try:
        for method in (None, *methods):
            advance = track(method.title if method else "dense", request.steps)
            try:
                variant = draw_variant(pipeline, request, method, variants[0].frames if variants else [], advance)
            except ValueError as error:
                if method is None:
                    raise
                notices.append(f"{method.title} is left out: {error}.")
                continue
            about = {**settings, "method": repr(method) if method else "dense"}
            name = slug(variant.label)
            name += f"-{crc32(about['method'].encode()):08x}" if name in files else ""  # slugs are cut
            files.add(name)
            write_picture(out / f"{name}.png", variant.image, {**about, "page": PAGE})
            if len(variant.frames) > 1:
                write_video(out / f"{name}.mp4", variant.frames, frame_rate(pipeline, request))
                variant = variant._replace(video=(out / f"{name}.mp4").read_bytes())
            variants.append(variant)
            ran.append(method)
        step = record_step(pipeline, request)
        for taken in time_steps(pipeline, step, ran, rounds, track("timing", len(ran) * (rounds + 1))):
            timed = zip(variants, taken, strict=True)
            variants = [v._replace(step_seconds=[*v.step_seconds, seconds]) for v, seconds in timed]
    finally:
        if variants:
            comparison = Comparison(request.prompt, variants, settings, versions(), " ".join(notices))
            write_whole(page, comparison_page(comparison).encode())
    return page


def _remove_pictures(out: Path) -> None:
    """Remove the pictures that a page was made of, with the videos that they are of, and no others."""
    for path in out.glob("*.png"):
        try:
            with Image.open(path) as picture:
                ours = picture.info.get("page") == PAGE
        except (OSError, Image.DecompressionBombError):  # not a picture of a page
            continue
        if ours:
            path.unlink()
            path.with_suffix(".mp4").unlink(missing_ok=True)


def _supported(pipeline: Any, methods: Sequence[MethodLike]) -> tuple[list[MethodLike], list[str]]:
    """The methods that the model supports, and a notice for each of the others."""
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
    dense: list[Image.Image],
    advance: Callable[[], None],
) -> Variant:
    """What a method draws, and its distance to the frames of `dense`; not timed yet."""
    with using(pipeline, method) as run:
        frames = draw(pipeline, request, advance)
        if method is None or run is None:
            return Variant("dense", frames, [], None, None, 0.0, 0.0, 1.0, None, None, "")
        layers, plan = run.summary().layers, next(iter(run.plans().values()), None)
    sparsity = mean(layer.true for layer in layers)
    tile_map, picked = plan.tile_maps[0] if plan else None, getattr(plan, "picked", None)
    if tile_map is not None and tile_map.ndim == 3:  # (frames, rows, columns): shown is the first frame
        tile_map = tile_map[0]
        picked = None if picked is None else picked[picked < tile_map.numel()]
    return Variant(
        label=method.title,
        frames=frames,
        step_seconds=[],
        psnr=_video_psnr(frames, dense),
        ssim=mean(map(ssim, frames, dense)),
        nominal=mean(layer.nominal for layer in layers),
        true=sparsity,
        flop_bound=1 / (1 - sparsity),
        tile_map=tile_map,
        table=next((table for table in plan.tables if isinstance(table, BlockTable)), None) if plan else None,
        why_dense="" if plan else layers[0].why,
        picked=picked,
    )


def _video_psnr(frames: list[Image.Image], reference: list[Image.Image]) -> float:
    """PSNR in dB over the pixels of all frames."""
    error = mean(10 ** (-psnr(*pair) / 10) for pair in zip(frames, reference, strict=True))
    return -10 * log10(error) if error else inf
