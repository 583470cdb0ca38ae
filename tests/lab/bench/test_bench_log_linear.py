"""Laws of the benchmark of log-linear attention: it checks before it times, and says what it skips."""

import json
from itertools import pairwise

import pytest
import torch
from lab.__main__ import app
from lab.bench import log_linear
from lab.bench.log_linear import (
    Candidate,
    Case,
    Settings,
    bench_log_linear,
    candidates,
    growth,
    stages,
    table_of,
)
from lab.bench.reference import Call, key_gradient_error, query_error, selection_error
from typer.testing import CliRunner

from foveate.ops.log_linear_attention import portable

CPU = Settings(torch.device("cpu"), torch.float32, rounds=2)
CASES = [Case(tokens, 2, 32, 2, 2, 16, "balanced") for tokens in (300, 600)]


def measure(cases=CASES, settings=CPU):
    *_, result = bench_log_linear(cases, settings)
    return result


def called(case, backward=True):
    """A call of the portable path, with everything that is checked."""
    options, qkv = case.options(), case.tensors(CPU)
    leaves = [x.requires_grad_() for x in qkv]
    out, _, lists, _ = portable(*leaves, None, None, None, None, options)
    grads = torch.autograd.grad(out, leaves, qkv[0]) if backward else ()
    return Call(*(x.detach() for x in qkv), out.detach(), lists, options, grads)


@pytest.mark.parametrize("backward", [False, True])
def test_every_case_has_dense_one_level_and_ours_checked_and_timed(backward):
    result = measure(settings=CPU._replace(backward=backward))
    assert [(row["tokens"], row["peer"], row["keys"]) for row in result["rows"]] == [
        (300, "dense", 300), (300, "top-k of one level, portable", 32), (300, "foveate, portable", 32 + 19 + 2),
        (600, "dense", 600), (600, "top-k of one level, portable", 32), (600, "foveate, portable", 32 + 32 + 3),
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["error"] < 1e-5
        assert ("key_gradient_error" in row) == (backward and not row["dense"])
        assert 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
        flops = (14 if backward else 4) * row["tokens"] * row["keys"] * 2 * 32
        assert row["tflops"] * row["median_s"] == pytest.approx(flops / 1e12)
    dense, _, ours, *_ = result["rows"]
    assert ours["speed_up"] == pytest.approx(dense["median_s"] / ours["median_s"])


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("inputs", log_linear.INPUTS)
def test_right_results_pass_the_reference(levels, inputs):
    call = called(Case(1000, 3, 32, levels, 3, 16, inputs))
    assert query_error(call) < 1e-5
    assert key_gradient_error(call) < 1e-5
    assert selection_error(call) < 1e-6


def test_one_wrong_key_channel_or_selection_fails_the_check():
    call = called(CASES[1])
    spoiled = call.out.clone()
    spoiled[:, -1, -1] += 1  # the last token is always looked at
    assert query_error(call._replace(out=spoiled)) > 1e-3
    spoiled[:, 0, 5, 3] = torch.nan
    assert not query_error(call._replace(out=spoiled)) <= 1
    dq, dk, dv = call.grads
    assert query_error(call._replace(grads=(2 * dq, dk, dv))) > 0.5
    assert key_gradient_error(call._replace(grads=(dq, dk, dv.roll(1, 2)))) > 0.5
    finest, top = call.lists
    assert selection_error(call._replace(lists=[finest, top.flip(3)])) < 1e-6  # the order of a list is another law's
    unpicked = torch.tensor([0, 2], dtype=torch.int32).expand_as(top)
    assert selection_error(call._replace(lists=[finest, unpicked])) > 1e-3
    assert selection_error(call._replace(lists=[finest[..., :1].expand_as(finest), top])) == torch.inf
    assert selection_error(call._replace(lists=[finest.roll(1, 2), top])) > 1e-3


def test_skewed_inputs_make_every_block_select_the_same_few():
    case = Case(4096, 1, 32, 2, 8, 16, "skewed")
    assert (called(case, backward=False).lists[0] >= 0).all()
    hot = set(range(128, 132))
    assert all(hot <= set(picks) for picks in called(case, backward=False).lists[0][0, 0].tolist())


def test_wrong_and_failing_candidates_are_listed_and_not_timed(monkeypatch):
    def missing(q, k, v):
        raise RuntimeError("no such kernel\nand more")

    def greedy(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    def others(case, settings):
        dense = case.options()._replace(levels=0, enriched=0)
        wrong = [Candidate("wrong", dense, lambda q, k, v: (v, []))]
        wrong += [Candidate(run.__name__, dense, run) for run in (missing, greedy)]
        return [*wrong, *candidates(case, settings)]

    monkeypatch.setattr(log_linear, "candidates", others)
    rows = {row["peer"]: row for row in measure(CASES[:1])["rows"]}
    assert rows["wrong"]["failed"].startswith("error ")
    assert rows["wrong"]["failed"].endswith(": not timed")
    assert rows["missing"]["failed"] == "no such kernel"
    assert rows["greedy"]["failed"] == "skipped: out of memory"
    assert all("median_s" not in rows[name] for name in ("wrong", "missing", "greedy"))
    assert rows["foveate, portable"]["median_s"] > 0


def test_slow_candidates_are_skipped_with_a_reason(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(log_linear, "now", lambda device: next(clock))  # every call takes a second
    rows = measure(settings=CPU._replace(longest=3))["rows"]
    assert [row.get("failed") for row in rows[:3]] == [None] * 3
    assert [row.get("failed") for row in rows[3:]] == [
        "skipped: about 4 s, predicted from fewer tokens; more than 3 s"  # all tokens with all others
    ] * 2 + [None]
    rows = measure(settings=CPU._replace(longest=0.5))["rows"]
    assert rows[0]["failed"] == "skipped: about 1 s, measured; more than 0.5 s"
    assert table_of(measure(CASES, CPU._replace(longest=0))).row_count == 8


def test_slow_calls_are_measured_less_often():
    assert log_linear._rounds([0.001] * 4, 15) == 15
    assert log_linear._rounds([0.5, 0.25], 15) == 4
    assert log_linear._rounds([0.9, 0.9], 15) == 3
    assert log_linear._rounds([0.9, 0.9], 2) == 2


def test_growth_is_the_exponent_of_foveate_from_64k_tokens_on():
    def row(tokens, peer, seconds, series="a"):
        return {"series": series, "tokens": tokens, "peer": peer, "median_s": seconds}

    rows = [row(2**n, "dense", 4.0**n) for n in range(12, 21)]
    rows += [row(2**n, "ours", 1 if n < 16 else 2.0 ** (1.25 * n)) for n in range(12, 21)]
    rows += [row(2**16, "ours", 1, "b"), row(2**17, "ours", 1, "b") | {"failed": "skipped"}]
    rows += [row(2**n, "ours", seconds, "c") for n, seconds in ((16, 1), (18, 4), (20, 64))]
    assert growth(rows) == pytest.approx({"a": 1.25, "c": 1.5})


def test_a_table_has_every_row_stage_and_series():
    result = measure()
    result["rows"][-1]["stages_s"] = {"pooling": 0.001, "selection": 0.002}
    result["growth"] = {result["rows"][0]["series"]: 1.02}
    assert table_of(result).row_count == 2 * 4 + 2 + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter takes tensors of the CPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_the_kernels_pass_and_their_stages_are_those_of_one_call():
    kernels = pytest.importorskip("foveate.kernels.log_linear.log_linear_attention")
    case = Case(300, 1, 32, 2, 3, 16, "balanced")
    options, qkv = case.options(), case.tensors(CPU)
    ours = Candidate("triton", options, log_linear._by(kernels.log_linear_attention, options))
    errors = log_linear._checked(ours, qkv, True)
    assert set(errors) == {"error", "selection_error", "key_gradient_error"}
    assert max(errors.values()) < 1e-5
    calls = stages(qkv, options, True)
    assert list(calls) == [
        *("pooling", "selection", "attention", "reader lists", "gradient of q", "gradients of k, v")
    ]
    want = called(case)._replace(q=qkv[0], k=qkv[1], v=qkv[2])
    out, lists = ours.attend(*qkv)
    assert torch.equal(calls["attention"]()[0], out)
    assert all(torch.equal(a, b) for a, b in zip(calls["selection"](), lists, strict=True))
    grads = calls["gradient of q"]()[0], *calls["gradients of k, v"]()[:2]
    whole = want._replace(out=out, lists=lists, grads=grads)
    assert max(query_error(whole), key_gradient_error(whole)) < 1e-5
    assert len(calls["reader lists"]()) == 8  # four tensors for each level
    assert list(stages(qkv, options, False)) == ["pooling", "selection", "attention"]


def test_the_command_writes_json(tmp_path):
    options = ["--tokens", "600,300", "--heads", "1,2", "--head-dim", "32", "--levels", "auto,2"]
    options += ["--top-k", "2", "--inputs", "skewed", "--rounds", "1", "--device", "cpu", "--commit", "abc"]
    options += ["--backward", "--contiguous", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["log-linear", *options])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "log-linear-backward-cpu.json").read_text())
    assert written["versions"]["commit"] == "abc"
    assert written["gradients_of_keys_checked_up_to_tokens"] == 65536
    assert len(written["rows"]) == 2 * 2 * 2 * 3
    tokens = [row["tokens"] for row in written["rows"][::3]]
    assert all(fewer < more for fewer, more in list(pairwise(tokens))[::2])  # shorter ones first
