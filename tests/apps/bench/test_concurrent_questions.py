"""Laws of `foveate bench context`: it checks before it times, and halves batches that do not fit into memory."""

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from foveate.apps.bench import context
from foveate.apps.bench.context import QuestionWorkload, bench_context, check, table_of
from foveate.apps.cli import app
from foveate.transformers.row_cache import RowCache

CPU = torch.device("cpu")
ASKED = QuestionWorkload(chunk=20, prompt=5, answer=3, concurrent=(1, 4), count=4, recompute=0.25)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.4}
    monkeypatch.setitem(context.MODELS, "small", context.SMALL | shape)
    monkeypatch.setattr(context, "CHECKED", (20, 20, 21))


def test_every_way_answers_all_questions():
    *_, result = bench_context([50], "small", ASKED, CPU, torch.float32)
    rows = result["rows"]
    assert [row["variant"] for row in rows[:4]] == [row["variant"] for row in rows[4:]]
    for row in rows:
        assert row["questions"] == 4
        assert row["batch"] == row["concurrent"]
        assert 0 < row["first_token_p50_s"] <= row["first_token_p99_s"]
        assert row["tokens_per_s"] > 0
    assert [row["throughput"] for row in rows[:4]] == [1] * 4
    assert rows[7]["throughput"] == pytest.approx(rows[7]["tokens_per_s"] / rows[3]["tokens_per_s"])
    assert result["small_model"]["all_recomputed_error"] < 1e-4 < result["small_model"]["stale_error"]
    assert table_of(result).row_count == 10


def test_the_ways_that_are_exact_give_the_same_answers(monkeypatch):
    texts = []
    work = context.Work(context.find_encoder("small", CPU, torch.float32), 41, ASKED)

    def recorded(generate, **options):
        output = generate(**options)
        texts.append(output[:, -3:].tolist())
        return output

    for model in (work.encoder.model, work.encoder.row_model):
        monkeypatch.setattr(model, "generate", partial(recorded, model.generate))
    drawn = [[one._replace(order=(1, 0)) for one in work.draw(3, 0)]]
    for _, answer, (questions,) in context._ways(work, drawn, drawn):
        answer(questions, {"max_new_tokens": 3, "min_new_tokens": 3})
    work.patch(context.FullPrefill(), drawn[0], {"max_new_tokens": 3})
    full, prefix, stale, _, patched = texts
    assert full == prefix == patched != stale


def test_batches_that_do_not_fit_into_memory_are_halved():
    work = context.Work(context.find_encoder("small", CPU, torch.float32), 41, ASKED)
    sizes = []

    def answer(questions, options, most):
        sizes.append(len(questions))
        if len(questions) > most:
            raise torch.OutOfMemoryError
        for clock in options["logits_processor"]:
            clock(torch.empty(0), torch.empty(0))

    drawn = [work.draw(6, 0)]
    row = context._measured(work, lambda *given: answer(*given, most=3), drawn, lambda: None)
    assert (row["batch"], row["questions"]) == (3, 6)
    assert sizes == [6, *[3, 3] * 2]  # one round of warm-up, where no memory is measured
    assert context._measured(work, lambda *given: answer(*given, most=0), drawn, lambda: None) == {
        "failed": "out of memory"
    }


def test_a_wrong_context_is_not_timed(monkeypatch):
    repair = RowCache.repair
    monkeypatch.setattr(
        RowCache, "repair", lambda cache, ids, rows, prompts: repair(cache, ids, [some[:0] for some in rows], prompts)
    )
    with pytest.raises(ValueError, match="is not the full prefill of a small model"):
        check(CPU, torch.float32)


def test_the_command_writes_json_and_refuses_bad_input(tmp_path):
    sizes = (
        "--context-tokens 50 --chunk 20 --question-tokens 5 --max-new-tokens 2 --questions 1 --device cpu --commit abc"
    )
    given = ["bench", "context", *sizes.split(), "--out", str(tmp_path), "--concurrent"]
    done = CliRunner().invoke(app, [*given, "1"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "questions-small-cpu.json").read_text())
    assert result["versions"]["commit"] == "abc"
    assert len(result["rows"]) == 4
    for options, message in (
        (["1", "--chunk", "40"], "less than two chunks of 40: use --chunk 25"),
        (["1", "--model", "llama-8b"], "too many for a CPU"),
        (["1", "--model", "tiny"], "unknown model 'tiny': choose one of llama-8b, small"),
        (["0"], "--concurrent 0 asks no question"),
    ):
        failed = CliRunner().invoke(app, [*given, *options])
        assert failed.exit_code
        assert message in " ".join(failed.output.split())
