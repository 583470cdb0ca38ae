"""Laws of LLSA's options and plans. Its attention is tested in ops/, its use in models in diffusers/."""

import pytest
import torch

from foveate.methods import LLSA, method_from_text
from foveate.methods.base import DenseFallback
from foveate.ops.curves import grid_order
from foveate.ops.hierarchical_pooling import automatic_levels
from foveate.ops.joint_attention import joint_attention


@pytest.mark.parametrize("grid", [(16, 20), (9, 31), (64, 64)])
@pytest.mark.parametrize("curve", ["morton", "hilbert"])
def test_tokens_lie_along_the_curve_and_come_back(grid, curve):
    plan = LLSA(curve=curve).plan((grid,), 7)
    assert torch.equal(plan.orders[0], grid_order(curve, *grid))
    assert plan.tables[0].query_tokens == 7 + grid[0] * grid[1]


def test_a_block_of_morton_is_a_square_patch():
    rows, columns = LLSA().plan(((32, 64),), 0).orders[0].view(-1, 16).div(64, rounding_mode="floor"), None
    columns = LLSA().plan(((32, 64),), 0).orders[0].view(-1, 16) % 64
    for places in (rows, columns):
        assert ((places.amax(1) - places.amin(1)) == 3).all()


def test_every_option_reaches_attention():
    changed = {"top_k": 3, "block_size": 32, "levels": 2, "enrich": 1, "reweight": False}
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 700, 32)
    usual = {"top_k": 2, "levels": 1}
    plans = [LLSA(**usual | {name: value}).plan(((20, 35),), 0) for name, value in changed.items()]
    outs = [joint_attention(q, k, v, plan.tables[0]) for plan in plans]
    base = joint_attention(q, k, v, LLSA(**usual).plan(((20, 35),), 0).tables[0])
    same = [name for name, out in zip(changed, outs, strict=True) if torch.equal(out, base)]
    assert same == ["enrich"]  # with one level, 1 means all levels


def test_enrich_1_and_enrich_true_have_separate_plans():
    plans = [LLSA(levels=2, enrich=enrich).plan(((32, 32),), 0) for enrich in (True, 1, False)]
    assert [plan.tables[0].keys() for plan in plans] == [196, 192, 128]
    assert [plan.title for plan in plans] == [
        "LLSA K=8 levels=2", "LLSA K=8 levels=2, enrich=1", "LLSA K=8 levels=2, enrich=False"
    ]  # fmt: skip


def test_levels_follow_the_rule_unless_given():
    for side in (64, 128, 512):
        tokens = side * side
        levels = automatic_levels(tokens)
        keys = 8 * 16 * levels + tokens // 16**levels
        assert LLSA().plan(((side, side),), 0).tables[0].keys() == keys
        assert LLSA().plan(((side, side),), 0).nominal_sparsity == 1 - keys / tokens
    assert LLSA(levels=2).plan(((64, 64),), 0).tables[0].keys() == 2 * 128 + 16
    with pytest.raises(ValueError, match="use levels<=2, or None"):
        LLSA(levels=3).plan(((16, 16),), 0)


def test_more_picks_than_blocks_are_all_blocks_and_the_title_says_so():
    assert LLSA(top_k=20).plan(((16, 16),), 0).title == "LLSA K=20 (all 16 blocks)"
    assert LLSA(top_k=16).plan(((16, 16),), 0).title == "LLSA K=16 (all 16 blocks)"
    assert LLSA(top_k=15).plan(((16, 16),), 0).title == "LLSA K=15"
    assert LLSA(top_k=20, enrich=False).plan(((16, 16),), 9).tables[0].sparsity() == 0


def test_unsupported_head_dims_stay_dense():
    LLSA().check_head_dim(32)
    LLSA().check_head_dim(256)
    for head_dim in (31, 257):
        with pytest.raises(DenseFallback, match=f"head_dim must be 32 to 256, not {head_dim}"):
            LLSA().check_head_dim(head_dim)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 or more, not 0"),
        ({"top_k": 2.5}, "top_k must be a whole number or a schedule, .*, not 2.5"),
        ({"block_size": 8}, "block_size must be one of 16, 32, 64, not 8"),
        ({"block_size": 16.0}, "block_size must be a whole number, not 16.0"),
        ({"levels": 2.0}, "levels must be a whole number or None, not 2.0"),
        ({"levels": 5}, "levels must be 1 to 4, or None for automatic, not 5"),
        ({"levels": 1, "enrich": 2}, "a number of levels up to 1, not 2"),
        ({"enrich": "no"}, "enrich must be true or false or a whole number, not 'no'"),
        ({"curve": "zigzag"}, "unknown curve 'zigzag': choose one of hilbert, moore, morton"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
    ],
)
def test_bad_options_are_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        LLSA(**options)


def test_llsa_is_read_from_text():
    assert method_from_text("llsa", {"top_k": "16", "enrich": "false", "levels": "none"}) == LLSA(
        top_k=16, enrich=False
    )
