"""Laws of the distilled variants."""

import pytest
from lab.quality.distilled import USUAL, VARIANTS, training, variant

from foveate import HilbertA
from foveate.apps.demo.text import TEXT_TOKENS
from foveate.training.student import Recipe

GRID = (64, 64)  # of 256 px


def sparsity(method):
    tables = method.plan((GRID,), TEXT_TOKENS).tables
    return sum(table.sparsity() for table in tables) / len(tables)


def test_every_variant_may_be_distilled_and_differs_from_all_others():
    chosen = {name: variant(name, 256) for name in VARIANTS}
    assert len({repr(of) for of in chosen.values()}) == len(chosen)
    for method, options in chosen.values():
        assert Recipe(method=method, **USUAL | options).method.plan((GRID,), TEXT_TOKENS).nominal_sparsity > 0.7


def test_clear_is_as_sparse_as_16_tiles():
    assert sparsity(variant("clear", 256)[0]) == pytest.approx(sparsity(HilbertA(tiles=16)), abs=0.005)


def test_unknown_names_and_small_sizes_are_refused():
    with pytest.raises(ValueError, match="unknown variant 't8': choose from t16, t4, "):
        variant("t8", 256)
    with pytest.raises(ValueError, match="256 image tokens cannot make 16 tiles"):
        variant("clear", 64)


def test_the_report_of_a_training_run_follows_its_log(tmp_path):
    rows = [(step, 1.0 if step <= 50 else 0.25, 0.5) for step in range(1, 151)]
    (tmp_path / "log.csv").write_text("".join(f"{step},{loss},{seconds}\n" for step, loss, seconds in rows))
    told = training(tmp_path, Recipe(method=HilbertA(tiles=4), rank=8, optimizer="adamw", rate=1e-3), pictures=7)
    assert (told["rank"], told["optimizer"], told["rate"], told["batch"]) == (8, "adamw", 1e-3, 32)
    assert (told["pictures"], told["steps"], told["loss"], told["seconds"]) == (7, 150, 0.25, 75.0)
    assert "start" not in told
    begun = training(
        tmp_path, Recipe(method=HilbertA(tiles=4), optimizer="adamw"), 7, tmp_path / "t4-after-900.safetensors"
    )
    assert begun["start"] == "t4-after-900"
