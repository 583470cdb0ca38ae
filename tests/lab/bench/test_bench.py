"""Laws of the benchmarks: they check before they time, and say what could not run."""

import json
from functools import partial

import pytest
import tiny
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from lab.__main__ import app
from lab.bench import attention
from lab.bench.attention import Case, bench_attention, table_of
from lab.bench.peers import Peer, peers
from lab.bench.reconstruction import reconstruction_error
from lab.bench.step_profile import profile_step, time_shares
from torch.profiler import record_function
from typer.testing import CliRunner

from foveate import HilbertA, ToMA
from foveate.apps.bench.models import MODELS
from foveate.apps.bench.step import Setup
from foveate.methods import ToDo, ToFu
from foveate.ops import merging
from foveate.utils import timing

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
    assert table_of(result).row_count == 2 + 4
    dense, sparse, _, whole = result["rows"]
    assert dense["speed_up"] == dense["flop_bound"] == whole["flop_bound"] == 1
    pairs = CASES[0].table(10).pairs()
    assert sparse["flop_bound"] == pytest.approx(266**2 / pairs)
    assert sparse["tflops"] * sparse["median_s"] == pytest.approx((14 if backward else 4) * pairs * 2 * 16 / 1e12)
    assert sparse["speed_up"] == pytest.approx(dense["median_s"] / sparse["median_s"])


def test_wrong_and_failing_candidates_are_listed_and_not_timed():
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
    rows = {row["peer"]: row for row in measure(everyone=lambda *work: [*peers(*work), *wrong])["rows"]}
    assert rows["wrong"]["failed"].startswith("error ")
    assert rows["spoiled"]["failed"] == "error nan: not timed"
    assert rows["missing"]["failed"] == "no such kernel"
    assert "median_s" not in rows["wrong"]
    assert rows["foveate, portable"]["median_s"] > 0


def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "MIN_SECONDS", 0)
    order = []
    times = timing.time_calls([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert order == ["a", "b"] * 4  # one to see how long it takes
    assert [len(taken) for taken in times] == [3, 3]
    assert timing.peak_memory(order.clear, CPU) is None


def test_a_profile_counts_nested_ranges_once():
    x = torch.randn(200, 200)

    def call():
        with record_function("outer"):
            x @ x
            with record_function("inner"), record_function("outer"):
                x @ x
        x @ x

    outer, inner, never = time_shares(call, ["outer", "inner", "never"], CPU)
    assert 0 < outer < 1
    assert inner == never == 0
    assert 0 < time_shares(call, ["inner"], CPU)[0] < 1
    matmul, mm = time_shares(call, ["aten::matmul", "aten::mm"], CPU)
    assert mm == 0
    assert 0 < matmul <= 1
    assert time_shares(lambda: None, ["outer"], CPU) == [0]


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.25])
def test_merging_random_features_loses_the_energy_that_is_not_kept(keep):
    toma = ToMA(keep=keep, weights="hard")  # a projection on means: sqrt(1 - keep) is lost if groups ignore features
    error = reconstruction_error(toma, "random", 32, CPU)
    assert 0.9 * (1 - keep) ** 0.5 < error < (1 - keep) ** 0.5
    assert reconstruction_error(toma, "smooth", 32, CPU) < error
    assert reconstruction_error(ToMA(keep=1.0), "random", 32, CPU) < 1e-6


def test_a_reconstruction_counts_early_and_late_blocks():
    early, both, late = (
        reconstruction_error(ToFu(separation=separation), "random", 16, CPU) for separation in (1, 0.5, 0)
    )
    assert early != late
    assert both == pytest.approx((early + late) / 2)


def profile(model, build, methods, monkeypatch):
    monkeypatch.setitem(MODELS, model, MODELS[model]._replace(build=lambda *_: build()))
    *_, result = profile_step(Setup.of(model, methods=methods, text=8, device="cpu"), [16], rounds=1)
    return result["rows"]


def test_a_step_is_split_into_attention_merging_plans_and_the_rest(monkeypatch):
    def as_an_op(plain, *given):  # as it is on a GPU
        with record_function(f"foveate::{plain.__name__}"):
            return plain(*given)

    for op in (merging.region_matmul, merging.region_update):
        monkeypatch.setattr(merging, op.__name__, partial(as_an_op, op))
    toma, hilberta = profile("built-in", tiny.pipeline, [ToMA(), HilbertA(tiles=2, centre=0)], monkeypatch)
    assert 0 < toma["merge_share"] < 1
    assert 0 < toma["plan_share"] < 1 - toma["merge_share"]
    assert 0 < hilberta["attention_share"] < 1
    assert hilberta["attention_flop_bound"] > 1
    assert "merge_share" not in hilberta


def test_merging_in_a_unet_is_judged_by_reconstruction(monkeypatch):
    def sdxl():
        none = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        unet = tiny.unet(dtype=torch.float32)
        return StableDiffusionXLPipeline(scheduler=EulerDiscreteScheduler(), unet=unet, add_watermarker=False, **none)

    toma, todo = profile("sdxl", sdxl, [ToMA(), ToDo()], monkeypatch)
    assert 0 < toma["reconstruction_smooth"] < toma["reconstruction_random"] < 1
    assert "reconstruction_smooth" not in todo


def attention_command(out):
    options = ["--pixels", "256", "--tiles", "1,4", "--centre", "0", "--heads", "1", "--rounds", "1"]
    common = ["--device", "cpu", "--commit", "abc", "--out", str(out)]
    return CliRunner().invoke(app, ["attention", *options, *common])


def test_the_command_writes_json(tmp_path):
    result = attention_command(tmp_path)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "attention-forward-cpu.json").read_text())
    assert written["versions"]["commit"] == "abc"
    assert len(written["rows"]) == 4


def test_measured_cases_outlive_an_interruption(tmp_path, monkeypatch):
    measured = iter([attention._case])

    def interrupted(*arguments):
        for once in measured:
            return once(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "_case", interrupted)
    assert attention_command(tmp_path).exit_code == 130
    assert len(json.loads((tmp_path / "attention-forward-cpu.json").read_text())["rows"]) == 2
