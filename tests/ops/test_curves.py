"""Laws of the orders of a grid."""

import pytest
import torch
from hilbertcurve.hilbertcurve import HilbertCurve
from hypothesis import given
from hypothesis import strategies as st

from foveate.ops.curves import (
    CURVES,
    CURVES_3D,
    edge_average_stretch,
    geometric_distortion_error,
    grid_order,
    hilbert_order,
    hilbert_order_3d,
    inverse_order,
    moore_order,
)

sides = st.integers(1, 70)


def steps(order, *shape):
    """Absolute length of each step of `order` along every axis."""
    return torch.stack(torch.unravel_index(order, shape)).diff(dim=1).abs()


def is_permutation(order, cells):
    return torch.equal(order.sort().values, torch.arange(cells))


@pytest.mark.parametrize("curve", CURVES)
@given(height=sides, width=sides)
def test_every_curve_visits_every_cell_once(curve, height, width):
    order = grid_order(curve, height, width)
    assert is_permutation(order, height * width)
    assert torch.equal(order[inverse_order(order)], torch.arange(height * width))


@given(height=sides, width=sides)
def test_hilbert_steps_to_neighbours_with_one_diagonal_only_where_parity_forces_it(height, width):
    moves = steps(hilbert_order(height, width), height, width)
    diagonals = int((moves.sum(0) == 2).sum())
    assert (moves.sum(0) >= 1).all()
    assert (moves <= 1).all()
    longer, shorter = max(height, width), min(height, width)
    assert diagonals == int(longer % 2 == 1 and shorter % 2 == 0 and shorter > 2)


@given(height=st.integers(3, 70), width=st.integers(3, 70))
def test_hilbert_runs_from_bottom_left_along_the_longer_side(height, width):
    order = hilbert_order(height, width)
    assert order[0] == (height - 1) * width
    assert order[-1] == (height * width - 1 if width >= height else 0)


@pytest.mark.parametrize("power", [1, 2, 3, 5])
def test_squares_of_powers_of_two_give_the_classical_hilbert_curve(power):
    side = 2**power
    points = torch.tensor(HilbertCurve(power, 2).points_from_distances(range(side * side)))
    candidates = [(side - 1 - y) * side + x for x, y in (points.T, points.T.flip(0))]  # y up; either orientation
    assert any(torch.equal(hilbert_order(side, side), candidate) for candidate in candidates)


@given(frames=st.integers(1, 14), height=st.integers(1, 14), width=st.integers(1, 14))
def test_boxes_are_filled_by_steps_to_neighbours_or_diagonals(frames, height, width):
    order = hilbert_order_3d(frames, height, width)
    assert is_permutation(order, frames * height * width)
    moves = steps(order, frames, height, width)
    assert (moves <= 1).all()
    assert (moves.sum(0) <= 2).all()
    if not (frames % 2 or height % 2 or width % 2):
        assert (moves.sum(0) == 1).all()


@given(frames=st.integers(1, 6), height=st.integers(1, 9), width=st.integers(1, 9))
def test_morton_sorts_the_cells_of_a_box_by_interleaved_bits(frames, height, width):
    def bits(cell):
        t, y, x = cell // (height * width), cell // width % height, cell % width
        return sum((t >> i & 1) << 3 * i + 2 | (y >> i & 1) << 3 * i + 1 | (x >> i & 1) << 3 * i for i in range(4))

    assert grid_order("morton", frames, height, width).tolist() == sorted(range(frames * height * width), key=bits)


@pytest.mark.parametrize("curve", sorted(set(CURVES) - set(CURVES_3D)))
def test_other_curves_visit_a_box_frame_by_frame(curve):
    frame = grid_order(curve, 4, 6)
    assert grid_order(curve, 3, 4, 6).tolist() == torch.cat([frame, 24 + frame, 48 + frame]).tolist()


def test_box_with_an_odd_side_takes_the_documented_number_of_diagonals():
    assert int((steps(hilbert_order_3d(21, 45, 80), 21, 45, 80).sum(0) == 2).sum()) == 552


@given(height=st.integers(2, 40).map(lambda n: 2 * n), width=st.integers(2, 40).map(lambda n: 2 * n))
def test_moore_is_a_closed_loop_on_even_sides(height, width):
    order = moore_order(height, width)
    assert steps(torch.cat([order, order[:1]]), height, width)[:, -1].sum() == 1


def test_orders_are_cached_per_size():
    assert hilbert_order(48, 20) is hilbert_order(48, 20)
    assert hilbert_order(48, 20) is not hilbert_order(20, 48)


def test_every_run_of_64_steps_on_a_64_grid_is_an_8x8_block():
    rows, columns = torch.unravel_index(hilbert_order(64, 64).view(64, 64), (64, 64))
    for cells in (rows, columns):
        assert (cells.amax(1) - cells.amin(1) == 7).all()
        assert (cells.amin(1) % 8 == 0).all()


# The method file's table for 64 x 64: literal, and restricted to pairs that share a tile.
@pytest.mark.parametrize(
    ("curve", "stretch", "error", "error_within_1024", "error_within_256"),
    [
        ("raster", 32.5, 238, 300, 336),
        ("serpentine", 32.5, 238, 300, 336),
        ("morton", 32.5, 283, 181, 96),
        ("hilbert", 39.05, 310, 87, 22.6),
        ("moore", 39.05, 339, 97, 23.1),
    ],
)
def test_locality_metrics_reproduce_the_table(curve, stretch, error, error_within_1024, error_within_256):
    order = grid_order(curve, 64, 64)
    assert edge_average_stretch(order, 64, 64) == pytest.approx(stretch, abs=0.01)
    assert geometric_distortion_error(order, 64, 64) == pytest.approx(error, rel=0.01)
    assert geometric_distortion_error(order, 64, 64, within=1024) == pytest.approx(error_within_1024, rel=0.01)
    assert geometric_distortion_error(order, 64, 64, within=256) == pytest.approx(error_within_256, rel=0.01)


def test_metrics_equal_their_formulas_by_brute_force():
    order, (h, w) = hilbert_order(5, 7), (5, 7)
    at = inverse_order(order).tolist()
    cells = [(r, c) for r in range(h) for c in range(w)]
    d1 = {(a, b): abs(at[a[0] * w + a[1]] - at[b[0] * w + b[1]]) for a in cells for b in cells if a < b}
    d2 = {(a, b): ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5 for a, b in d1}
    edges = [d1[pair] for pair in d1 if d2[pair] == 1]
    near = [pair for pair in d1 if d1[pair] <= 6]
    alpha = sum(d1[p] * d2[p] for p in near) / sum(d1[p] ** 2 for p in near)
    error = sum((alpha * d1[p] - d2[p]) ** 2 for p in near) / len(near)
    assert edge_average_stretch(order, h, w) == pytest.approx(sum(edges) / len(edges))
    short = [d for d in edges if d <= 6]
    assert edge_average_stretch(order, h, w, within=6) == pytest.approx(sum(short) / len(short))
    assert geometric_distortion_error(order, h, w, within=6) == pytest.approx(error)


def test_bad_sizes_and_names_are_refused():
    with pytest.raises(ValueError, match="0 x 4"):
        hilbert_order(0, 4)
    with pytest.raises(ValueError, match=r"unknown curve 'peano'.*hilbert"):
        grid_order("peano", 4, 4)
    with pytest.raises(ValueError, match="no pairs"):
        geometric_distortion_error(hilbert_order(1, 1), 1, 1)
