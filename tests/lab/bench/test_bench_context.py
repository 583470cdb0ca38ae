"""Laws of the benchmarks of contexts and examples: they check before they time, and stages add up."""

import json

import pytest
import torch
from lab.__main__ import app
from lab.bench import context, examples
from lab.bench.context import Settings, bench_context, first_token, table_of
from typer.testing import CliRunner

from foveate.apps.bench import context as library

CPU = torch.device("cpu")
SETTINGS = Settings(
    "small", CPU, torch.float32, library.QuestionWorkload(chunk=40, prompt=6, recompute=0.25), rounds=1
)
EXAMPLES = examples.Settings(CPU, picks=12, blocks=3, dim=8, rounds=1)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(library.MODELS, "small", library.SMALL | shape | {"initializer_range": 0.4})
    monkeypatch.setattr(library, "CHECKED", (30, 30, 31))
    monkeypatch.setattr(examples, "CHECKED", 60)


@pytest.fixture
def result():
    *_, result = bench_context([120], SETTINGS)
    return result


def test_every_variant_is_timed_in_its_stages(result):
    full, none, ours, blend, epic, fly = rows = result["rows"]
    assert [row["cached"] for row in rows] == [False, True, True, True, True, False]
    assert [row["rows"] for row in rows] == [0, 0, 30, 30, 30, 30]
    assert full["speed_up"] == full["flop_bound"] == 1
    assert none["flop_bound"] > epic["flop_bound"] > ours["flop_bound"] > 1
    assert ours["flop_bound"] > fly["flop_bound"]
    assert blend["flop_bound"] < epic["flop_bound"]
    for row in rows:
        stages = sum(row.get(f"{stage}_s", 0) for stage in context.STAGES)
        assert stages == pytest.approx(row["first_token_s"])  # of a single round
        assert row["all_recomputed_error"] < 1e-4
    assert fly["encode_s"] > 0
    assert ours["score_share"] == pytest.approx(ours["score_s"] / ours["first_token_s"])
    assert table_of(result).row_count == 7
    assert result["small_model"]["all_recomputed_error"] < 1e-4 < result["small_model"]["stale_error"]


def test_a_variant_gives_the_answer_of_the_context_it_patches():
    work = library.Work(library.find_encoder("small", CPU, torch.float32), 61, SETTINGS.workload._replace(chunk=30))
    (question,) = work.draw(1, 0)
    (variant,) = (variant for variant in context.variants(SETTINGS) if variant.name == "InfoFlow 25%")
    logits, rows = first_token(variant, work, question)
    with work.context(question).patch(variant.method, question.prompt.tolist()) as patched:
        assert len(patched.rows) == rows
        torch.testing.assert_close(logits, patched.logits(last=1))


def test_selections_of_examples_are_checked_and_timed():
    *_, result = examples.bench_examples([60, 100], EXAMPLES)
    assert {(row["pool"], row["inputs"]) for row in result["rows"]} == {
        (pool, inputs) for pool in (60, 100) for inputs in examples.INPUTS
    }
    for row in result["rows"]:
        assert row["error"] < 1e-4
        assert 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
    assert examples.table_of(result).row_count == len(result["rows"]) + 4


def test_a_wrong_selection_of_examples_is_not_timed(monkeypatch):
    select = examples.SubCP.select
    monkeypatch.setattr(examples.SubCP, "select", lambda self, pool, n: select(self, pool.flip(0), n))
    with pytest.raises(ValueError, match="differs from greedy on the full"):
        next(examples.bench_examples([60], EXAMPLES))


def test_the_commands_write_json(tmp_path):
    common = ["--rounds", "1", "--device", "cpu", "--commit", "abc", "--out", str(tmp_path)]
    given = ["context", "--model", "small", "--tokens", "120", "--chunk", "40", "--prompt", "6"]
    done = CliRunner().invoke(app, [*given, *common])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["examples", "--pool", "60", "--picks", "12", "--blocks", "3", *common])
    assert done.exit_code == 0, done.output
    for name in ("context-small-cpu", "examples-cpu"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["versions"]["commit"] == "abc"
