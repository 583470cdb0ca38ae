"""Laws of the benchmarks: they check before they time, and say what could not run."""

import json

import pytest
import torch
from typer.testing import CliRunner

from foveate import HilbertA
from foveate.bench import attention, step, timing
from foveate.bench.attention import Case, bench_attention, draw_attention, table_of
from foveate.bench.peers import Peer, peers
from foveate.cli import app
from foveate.report import figure_png

CPU = torch.device("cpu")
CASES = [Case(256, HilbertA(tiles=4, centre=0)), Case(256, HilbertA(tiles=1))]


def measure(**options):
    *_, result = bench_attention(CASES, CPU, torch.float32, heads=2, head_dim=16, text=10, rounds=2, **options)
    return result


@pytest.mark.parametrize("backward", [False, True])
def test_every_case_has_dense_and_ours_checked_and_timed(backward):
    result = measure(backward=backward)
    assert [(row["case"], row["peer"]) for row in result["rows"]] == [
        (case, peer)
        for case in ("256 px, HilbertA T=4 centre=0", "256 px, dense table")
        for peer in ("dense", "foveate, portable")
    ]
    for row in result["rows"]:
        assert row["error"] < 1e-5
        assert 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
    dense, sparse, _, whole = result["rows"]
    assert dense["speed_up"] == dense["flop_bound"] == whole["flop_bound"] == 1
    pairs = CASES[0].table(10).pairs()
    assert sparse["flop_bound"] == pytest.approx(266**2 / pairs)
    assert sparse["tflops"] * sparse["median_s"] == pytest.approx((14 if backward else 4) * pairs * 2 * 16 / 1e12)
    assert sparse["speed_up"] == pytest.approx(dense["median_s"] / sparse["median_s"])


def test_what_is_wrong_or_cannot_run_is_listed_and_not_timed(monkeypatch):
    def missing(table, device):
        raise RuntimeError("no such kernel\nand more")

    def spoiled(q, k, v):  # in the last head alone
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out[:, -1, 5, 3] = torch.nan
        return out

    wrong = [
        Peer("wrong", False, lambda *_: lambda q, k, v: v),
        Peer("spoiled", False, lambda *_: spoiled),
        Peer("missing", True, missing),
    ]
    monkeypatch.setattr(attention, "peers", lambda *work: [*peers(*work), *wrong])
    rows = {row["peer"]: row for row in measure()["rows"]}
    assert rows["wrong"]["failed"].startswith("wrong by ")
    assert rows["spoiled"]["failed"] == "wrong by nan: not timed"
    assert rows["missing"]["failed"] == "no such kernel"
    assert "median_s" not in rows["wrong"]
    assert rows["foveate, portable"]["median_s"] > 0


def test_a_result_is_shown_as_table_and_plot():
    result = measure()
    assert table_of(result).row_count == 6
    assert figure_png(draw_attention(result)).startswith(b"\x89PNG")


def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "LONG_ENOUGH", 0)
    order = []
    times = timing.time_calls([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert order == ["a", "b"] * 4  # one to see how long it takes
    assert [len(taken) for taken in times] == [3, 3]
    assert timing.peak_memory(order.clear, CPU) is None


def test_a_step_is_timed_dense_and_with_every_method():
    (result,) = step.bench_step([24], text=8, rounds=1, device="cpu")
    attending, merging = result["rows"][:4], result["rows"][4:]
    assert [row["variant"] for row in attending] == ["dense", "HilbertA T=1", "HilbertA T=4", "HilbertA T=16"]
    assert [row["variant"] for row in merging] == ["ToMA keep=0.5", "ToMA keep=0.25", "HilbertA T=16 + ToMA keep=0.5"]
    for row in merging:
        assert row["all_kept_error"] < 1e-4
        assert row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
    for row in attending:
        assert row["one_tile_error"] < 1e-4
        assert 0 < row["attention_share"] < 1
    assert result["rows"][0]["speed_up"] == result["rows"][1]["attention_flop_bound"] == 1
    assert step.table_of(result).row_count == len(result["rows"])


@pytest.mark.parametrize(("error", "shown"), [(0.1, "1.0e-01"), (float("nan"), "nan")])
def test_a_wrong_step_is_not_timed(monkeypatch, error, shown):
    monkeypatch.setattr(step, "_difference", lambda *_: error)
    with pytest.raises(
        ValueError, match=rf"T=1 differs from dense by {shown} at 16 x 16 tokens: not timing a wrong step"
    ):
        next(step.bench_step([16], text=8, device="cpu"))


def test_the_commands_write_json_and_a_plot_and_refuse_what_is_no_number(tmp_path):
    small = ["--rounds", "1", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    attended = ["bench", "attention", "--pixels", "256", "--tiles", "1,4", "--centre", "0", "--heads", "1", *small]
    stepped = ["bench", "step", "--sides", "24", "--text", "8", *small]
    for command, name in ((attended, "attention-forward-cpu"), (stepped, "step-small-eager-cpu")):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["versions"]["commit"] == "abc"
        assert len(written["rows"]) == {"attention-forward-cpu": 4, "step-small-eager-cpu": 7}[name]
    assert (tmp_path / "attention-forward-cpu.png").exists()
    result = CliRunner().invoke(app, ["bench", "step", "--sides", "64;128"])
    assert result.exit_code == 2
    assert "'64;128' is no list of whole numbers: write them as 64,128" in result.output


def test_cases_that_were_measured_outlive_an_interruption(tmp_path, monkeypatch):
    measured = iter([attention._case])

    def lights_out(*arguments):
        for once in measured:
            return once(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "_case", lights_out)
    command = [
        "bench",
        "attention",
        "--pixels",
        "256",
        "--tiles",
        "1,4",
        "--centre",
        "0",
        "--heads",
        "1",
        "--rounds",
        "1",
    ]
    result = CliRunner().invoke(app, [*command, "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert len(json.loads((tmp_path / "attention-forward-cpu.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pixels", "1000"], "1000 px do not fit: a token of FLUX.1 is 16 x 16 px"),
        (["--pixels", "256", "--centre", "x"], "'x' is no list of numbers: write them as 0.25,0"),
    ],
)
def test_bad_input_is_one_clear_line(options, message):
    result = CliRunner().invoke(app, ["bench", "attention", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
