"""Space-filling curves: orders of the cells of a rectangle or a box.

An *order* is a permutation: ``order[i]`` is the raster index ``row * width + column`` of the cell at curve step ``i``.
``tokens[order]`` puts raster tokens on the curve and ``tokens[inverse_order(order)]`` puts curve tokens back. Orders
are computed once per size and device and shared by all callers: treat them as read-only. A side below 1 is a
ValueError.

The Hilbert curves are the generalised ones of Jakub Červený ("gilbert", own implementation): they fill any rectangle
or box, and are the classical Hilbert curve on squares whose side is a power of two.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import ParamSpec

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from foveate.utils.cache import persistent

__all__ = [
    "CURVES",
    "CURVES_3D",
    "edge_average_stretch",
    "geometric_distortion_error",
    "grid_order",
    "hilbert_order",
    "hilbert_order_3d",
    "inverse_order",
    "moore_order",
    "morton_order",
    "morton_order_3d",
    "raster_order",
    "serpentine_order",
]

Steps = npt.NDArray[np.integer]  # [axes, cells]: coordinates of each curve step
Piece = tuple[Steps, tuple[int, ...], str]  # a curve, the corner it starts from, the directions of its axes


# --- the generalised Hilbert curve -----------------------------------------------------------------------------------
# A curve starts at the origin of its frame and ends at the far end of its first axis. It is joined from smaller
# curves, each placed at a corner with its axes turned: "+y-x" means that its first axis points up and its second to
# the left. Few shapes occur, so `cache` makes the work linear in the number of cells.


def _half(length: int) -> int:
    """Half of `length`, or 1 more to make it even: a part of even length ends without a diagonal step."""
    half = length // 2
    return half + 1 if half % 2 and length > 2 else half


def _line(length: int, axis: int, axes: int) -> Steps:
    line = np.zeros((axes, length), np.int32)
    line[axis] = np.arange(length)
    return line


def _join(*pieces: Piece) -> Steps:
    cells = sum(steps.shape[1] for steps, _, _ in pieces)
    joined = np.empty((len(pieces[0][1]), cells), np.int32)
    start = 0
    for steps, corner, axes in pieces:
        part = joined[:, start : start + steps.shape[1]]
        for own, sign, name in zip(steps, axes[::2], axes[1::2], strict=True):
            axis = "xyz".index(name)
            (np.add if sign == "+" else np.subtract)(corner[axis], own, out=part[axis])
        start += steps.shape[1]
    return joined


def _hilbert_2d() -> Callable[[int, int], Steps]:
    @cache
    def curve(w: int, h: int) -> Steps:
        if h == 1 or w == 1:
            return _line(w * h, axis=0 if h == 1 else 1, axes=2)
        if 2 * w > 3 * h:  # long: cut the first axis only
            w2 = _half(w)
            return _join((curve(w2, h), (0, 0), "+x+y"), (curve(w - w2, h), (w2, 0), "+x+y"))
        w2, h2 = w // 2, _half(h)
        return _join(  # up, across, down
            (curve(h2, w2), (0, 0), "+y+x"),
            (curve(w, h - h2), (0, h2), "+x+y"),
            (curve(h2, w - w2), (w - 1, h2 - 1), "-y-x"),
        )

    return curve


def _hilbert_3d() -> Callable[[int, int, int], Steps]:
    @cache
    def curve(w: int, h: int, d: int) -> Steps:
        if sorted((w, h, d))[1] == 1:  # two of the three lengths are 1: walk the third
            return _line(w * h * d, axis=(w, h, d).index(w * h * d), axes=3)
        w2, h2, d2 = _half(w), _half(h), _half(d)
        if 2 * w > 3 * h and 2 * w > 3 * d:  # long: cut the first axis only
            return _join((curve(w2, h, d), (0, 0, 0), "+x+y+z"), (curve(w - w2, h, d), (w2, 0, 0), "+x+y+z"))
        if 3 * h > 4 * d:  # flat: do not cut the third axis
            return _join(
                (curve(h2, d, w2), (0, 0, 0), "+y+z+x"),
                (curve(w, h - h2, d), (0, h2, 0), "+x+y+z"),
                (curve(h2, d, w - w2), (w - 1, h2 - 1, 0), "-y+z-x"),
            )
        if 3 * d > 4 * h:  # flat: do not cut the second axis
            return _join(
                (curve(d2, w2, h), (0, 0, 0), "+z+x+y"),
                (curve(w, h, d - d2), (0, 0, d2), "+x+y+z"),
                (curve(d2, w - w2, h), (w - 1, 0, d2 - 1), "-z-x+y"),
            )
        return _join(
            (curve(h2, d2, w2), (0, 0, 0), "+y+z+x"),
            (curve(d, w2, h - h2), (0, h2, 0), "+z+x+y"),
            (curve(w, h2, d - d2), (0, h2 - 1, d - 1), "+x-y-z"),
            (curve(d, w - w2, h - h2), (w - 1, h2, d - 1), "-z-x+y"),
            (curve(h2, d2, w - w2), (w - 1, h2 - 1, 0), "-y+z-x"),
        )

    return curve


# --- orders ----------------------------------------------------------------------------------------------------------

P = ParamSpec("P")


def _cached(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorator that checks the sizes of a grid, and computes its order once per size and device."""
    signature = inspect.signature(make)
    cached = lru_cache(maxsize=64)(persistent(make))

    @wraps(make)
    def order(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        *sizes, device = call.arguments.values()
        if min(sizes) < 1:
            raise ValueError(f"a grid needs at least one cell along every side, not {' x '.join(map(str, sizes))}")
        return cached(*sizes, torch.empty(0, device=device or "cpu").device)  # type: ignore[reportCallIssue]

    return order


def _raster_index(y: Steps, x: Steps, height: int, width: int) -> Int[Tensor, "cells"]:
    """Raster indices of cells whose rows are counted from the bottom."""
    index = np.multiply(y, -width, dtype=np.int64)
    index += x
    index += (height - 1) * width
    return torch.from_numpy(index)


@_cached
def hilbert_order(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices of a `height` x `width` grid along a generalised Hilbert curve, for any rectangle.

    The curve starts at the bottom left and runs along the longer side: it ends at the bottom right, or at the top left
    if the grid is taller than wide. On squares of side 2^n it is the classical Hilbert curve. Every step goes to one
    of the four neighbours, except for one diagonal step if the longer side is odd and the shorter one even and above
    2: then no path over all cells connects these corners (colour the cells like a chessboard to see why). If the
    shorter side is 2 and the longer one odd, the curve ends next to the corner instead (2 x 7: in row 1, column 5).

    Examples:
        >>> hilbert_order(2, 2).tolist()  # up, right, down
        [2, 0, 1, 3]

    Source: J. Červený, "gilbert: space-filling curves for rectangles of any size"; HilbertA, arXiv 2509.26538.
    """
    if width >= height:
        x, y = _hilbert_2d()(width, height)
    else:
        y, x = _hilbert_2d()(height, width)
    return _raster_index(y, x, height, width).to(device)


@_cached
def hilbert_order_3d(
    frames: int, height: int, width: int, device: torch.device | str | None = None
) -> Int[Tensor, "cells"]:
    """Raster indices ``(frame * height + row) * width + column`` of a box along a generalised 3-D Hilbert curve.

    With even sides every step goes to a neighbouring cell. An odd side causes some diagonal steps, which change two
    coordinates by one (21 x 45 x 80: 552 of 75,599 steps).

    Source: J. Červený, "gilbert".
    """
    if width >= max(frames, height):
        x, y, t = _hilbert_3d()(width, height, frames)
    elif height >= frames:
        y, x, t = _hilbert_3d()(height, width, frames)
    else:
        t, x, y = _hilbert_3d()(frames, width, height)
    return (_raster_index(y, x, height, width) + torch.from_numpy(t).long() * (height * width)).to(device)


@_cached
def moore_order(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices along a Moore curve: two Hilbert curves, up one half of the grid and down the other.

    If a side is even and none is 1, the curve is closed: its ends are neighbours (diagonal ones if one side is 4 and
    the other odd), so that a run that wraps around stays in one piece. If both sides and their halves are even, every
    step goes to a neighbour; otherwise each half may take the one diagonal step of `hilbert_order`.
    """
    if min(height, width) == 1:
        return torch.arange(height * width, device=device)
    turned = width % 2 == 1 and height % 2 == 0  # halve an even side if there is one, or the loop cannot close
    w, h = (height, width) if turned else (width, height)
    curve, left = _hilbert_2d(), w // 2
    x, y = _join((curve(h, left), (left - 1, 0), "+y-x"), (curve(h, w - left), (left, h - 1), "-y+x"))
    return _raster_index(*((x, y) if turned else (y, x)), height, width).to(device)


def _morton(*sides: int) -> Int[Tensor, "cells"]:
    cells = [torch.zeros(1, dtype=torch.int32) for _ in sides]  # coordinates of each curve step
    for bit in range((max(sides) - 1).bit_length()):  # every bit doubles the curve along each side of that length
        for axis in reversed(range(len(sides))):
            if (sides[axis] - 1) >> bit:
                cells = [torch.cat([x, x + (1 << bit) if i == axis else x]) for i, x in enumerate(cells)]
    order, inside = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    for side, x in zip(sides, cells, strict=True):
        order, inside = order * side + x, inside & (x < side)
    return order[inside]


@_cached
def morton_order(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices in Z-order: cells sorted by the interleaved bits of row and column, for any rectangle."""
    return _morton(height, width).to(device)


@_cached
def morton_order_3d(
    frames: int, height: int, width: int, device: torch.device | str | None = None
) -> Int[Tensor, "cells"]:
    """Raster indices of a box in Z-order: cells sorted by the interleaved bits of frame, row and column."""
    return _morton(frames, height, width).to(device)


@_cached
def serpentine_order(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices row by row, every other row from right to left."""
    cells = torch.arange(height * width).view(height, width)
    cells[1::2] = cells[1::2].flip(1)
    return cells.flatten().to(device)


@_cached
def raster_order(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices row by row: the order of tokens in models."""
    return torch.arange(height * width, device=device)


CURVES = {
    "hilbert": hilbert_order,
    "moore": moore_order,
    "morton": morton_order,
    "serpentine": serpentine_order,
    "raster": raster_order,
}
"""Curves by name."""

CURVES_3D = {"hilbert": hilbert_order_3d, "morton": morton_order_3d}
"""Curves through a box by name; the other curves visit a box frame by frame."""


def grid_order(curve: str, *sides: int, device: torch.device | str | None = None) -> Int[Tensor, "cells"]:
    """Raster indices of a grid along the named curve.

    Args:
        curve: Name of the curve, one of `CURVES`.
        sides: (rows, columns) of a rectangle, or (frames, rows, columns) of a box.
        device: Device of the result.

    Raises:
        ValueError: If the name is not in `CURVES`, or a side is below 1.
    """
    if curve not in CURVES:
        raise ValueError(f"unknown curve {curve!r}: choose one of {', '.join(CURVES)}")
    if len(sides) == 2:
        return CURVES[curve](*sides, device=device)
    if curve in CURVES_3D:
        return CURVES_3D[curve](*sides, device=device)
    frames, height, width = sides
    frame = CURVES[curve](height, width, device=device)
    return (torch.arange(frames, device=device)[:, None] * len(frame) + frame).flatten()


def inverse_order(order: Int[Tensor, "cells"]) -> Int[Tensor, "cells"]:
    """Inverse permutation: the curve step of each raster cell."""
    inverse = torch.empty_like(order)
    return inverse.scatter_(0, order, torch.arange(len(order), dtype=order.dtype, device=order.device))


# --- locality --------------------------------------------------------------------------------------------------------

MOST_PAIRS = 2_000_000  # pairs of cells to compare


def edge_average_stretch(order: Int[Tensor, "cells"], height: int, width: int, *, within: int | None = None) -> float:
    """Mean number of curve steps between two neighbouring cells of the grid (EAS of the HilbertA paper).

    Args:
        order: An order of the `height` x `width` grid.
        height: Rows of the grid.
        width: Columns of the grid.
        within: Largest number of steps between counted neighbours, such as the size of a tile. None counts all, as
            in the paper's formula.

    Returns:
        The mean in curve steps; NaN if no neighbours are counted.
    """
    step = inverse_order(order).view(height, width)
    stretch = torch.cat([step.diff(dim=0).abs().flatten(), step.diff(dim=1).abs().flatten()]).double()
    return (stretch if within is None else stretch[stretch <= within]).mean().item()


def geometric_distortion_error(
    order: Int[Tensor, "cells"], height: int, width: int, *, within: int | None = None
) -> float:
    """Mean squared difference between grid distance and rescaled curve distance (GDE of the HilbertA paper).

    Averages ``(alpha * d1 - d2)^2`` over pairs of distinct cells, with d1 their distance in curve steps, d2 their
    Euclidean distance in cells, and the scale alpha that minimises the mean. Grids of more than two million pairs are
    sampled, the same pairs every time.

    Args:
        order: An order of the `height` x `width` grid.
        height: Rows of the grid.
        width: Columns of the grid.
        within: Largest number of steps between counted pairs, such as the size of a tile. None counts all, as in the
            paper's formula.

    Raises:
        ValueError: If the grid has a single cell, or `within` is below 1.
    """
    cells, reach = height * width, height * width - 1 if within is None else min(within, height * width - 1)
    if reach < 1:
        raise ValueError(f"no pairs to compare in a {height} x {width} grid within {within} steps: use within >= 1")
    # pairs (i, i + d) are numbered by distance: there are cells - d of distance d
    ends = torch.cumsum(cells - torch.arange(1, reach + 1), 0)
    total = int(ends[-1])
    if total > MOST_PAIRS:
        pair = torch.randint(total, (MOST_PAIRS,), generator=torch.Generator().manual_seed(0))
    else:
        pair = torch.arange(total)
    shorter = torch.searchsorted(ends, pair, right=True)  # distance - 1
    i = ends[shorter] - 1 - pair
    order = order.cpu()
    first, second = order[i], order[i + shorter + 1]
    d1 = (shorter + 1).double()
    d2 = torch.hypot((first // width - second // width).double(), (first % width - second % width).double())
    alpha = (d1 @ d2) / (d1 @ d1)
    return (alpha * d1 - d2).square().mean().item()
