"""Laws of the benchmarks: they check before they time, and say what could not run."""

import json
from functools import partial

import pytest
import tiny
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from lab.bench import attention
from lab.bench.attention import Case, bench_attention, draw_attention, table_of
from lab.bench.peers import Peer, peers
from lab.bench.reconstruction import reconstruction_error
from torch.profiler import record_function
from typer.testing import CliRunner

from foveate import LLSA, HilbertA, ToMA
from foveate.cli import app
from foveate.demo import bench as step
from foveate.demo.random_models import MODELS
from foveate.methods import ToFu, ToMeSD
from foveate.ops import merging
from foveate.utils import timing
from foveate.web.report import figure_png

CPU = torch.device("cpu")
CASES = [Case(256, HilbertA(tiles=4, centre=0)), Case(256, HilbertA(tiles=1))]


def tiny_sdxl():
    nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    unet = tiny.unet(dtype=torch.float32)
    return StableDiffusionXLPipeline(scheduler=EulerDiscreteScheduler(), unet=unet, add_watermarker=False, **nothing)


@pytest.fixture
def _tiny_models(monkeypatch):
    for name, build in (("built-in", tiny.pipeline), ("sdxl", tiny_sdxl)):
        monkeypatch.setitem(MODELS, name, MODELS[name]._replace(build=lambda *_, build=build: build()))


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
    monkeypatch.setattr(timing, "MIN_SECONDS", 0)
    order = []
    times = timing.time_calls([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert order == ["a", "b"] * 4  # one to see how long it takes
    assert [len(taken) for taken in times] == [3, 3]
    assert timing.peak_memory(order.clear, CPU) is None


def test_a_profile_counts_what_lies_in_a_name_once():
    x = torch.randn(200, 200)

    def call():
        with record_function("outer"):
            x @ x
            with record_function("inner"), record_function("outer"):
                x @ x
        x @ x

    outer, inner, never = timing.time_shares(call, ["outer", "inner", "never"], CPU)
    assert 0 < outer < 1
    assert inner == never == 0
    assert 0 < timing.time_shares(call, ["inner"], CPU)[0] < 1
    matmul, mm = timing.time_shares(call, ["aten::matmul", "aten::mm"], CPU)
    assert mm == 0
    assert 0 < matmul <= 1
    assert timing.time_shares(lambda: None, ["outer"], CPU) == [0]


def test_a_step_is_timed_dense_and_with_every_method():
    *_, result = step.bench_step([24], text=8, rounds=1, device="cpu")
    attending, merging, again = result["rows"][:4], result["rows"][4:-1], result["rows"][-1]
    assert [row["variant"] for row in attending] == ["dense", "HilbertA T=1", "HilbertA T=4", "HilbertA T=16"]
    assert [row["variant"] for row in merging] == ["ToMA keep=0.5", "ToMA keep=0.25", "HilbertA T=16 + ToMA keep=0.5"]
    assert (again["variant"], again["method"]) == ("dense, again", "dense")
    for row in merging:
        assert row["all_kept_error"] < 1e-4
        assert row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
    for row in attending:
        assert row["one_tile_error"] < 1e-4
        assert 0 < row["attention_share"] < 1
    assert result["rows"][0]["speed_up"] == result["rows"][1]["attention_flop_bound"] == 1
    assert again["speed_up"] == pytest.approx(attending[0]["step_s"] / again["step_s"])
    assert step.table_of(result).row_count == len(result["rows"])


def test_a_step_of_log_linear_attention_is_checked_and_timed():
    *_, result = step.bench_step([16], methods=[LLSA(top_k=2, min_tokens=0)], text=8, rounds=1, device="cpu")
    dense, ours = result["rows"]
    assert ours["variant"] == "LLSA K=2"
    assert ours["every_block_error"] < 1e-4
    assert ours["attention_flop_bound"] == pytest.approx(264**2 / (8 * 264 + 256 * (8 + 2 * 16 + 16)))
    assert 0 < ours["attention_share"] < 1
    assert dense["attention_speed_up"] == 1


@pytest.mark.usefixtures("_tiny_models")
def test_a_unet_is_timed_with_guidance_and_judged_by_reconstruction():
    *_, result = step.bench_step([8], model="sdxl", text=5, rounds=1, device="cpu")
    dense, todo, *rows, again = result["rows"]
    assert [row["variant"] for row in (dense, todo, again)] == ["dense", "ToDo f=2", "dense, again"]
    assert [row["variant"] for row in rows] == [
        *("ToMA keep=0.75", "ToMA keep=0.5", "ToMA keep=0.25", "ToMeSD keep=0.5", "ToFu keep=0.5")
    ]
    for row in rows:
        assert row["batch"] == 2
        assert row["all_kept_error"] < 1e-4
        assert row["one_tile_error"] < 1e-4
        assert 0 < row["reconstruction_smooth"] < row["reconstruction_random"] < 1
    assert not {"attention_share", "reconstruction_smooth"} & {*dense, *todo}
    assert todo["speed_up"] == pytest.approx(dense["step_s"] / todo["step_s"])
    assert step.table_of(result).row_count == 8


def test_sdxl_has_the_size_of_sdxl():
    unet = MODELS["sdxl"].build(torch.device("meta"), torch.bfloat16).unet
    assert sum(p.numel() for p in unet.parameters()) == 2_567_463_684
    assert unet.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.25])
def test_merging_random_features_leaves_about_what_is_kept_of_their_energy(keep):
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


@pytest.mark.usefixtures("_tiny_models")
@pytest.mark.parametrize(
    ("method", "forwards", "plans"),
    [
        (ToMA(), 10, 2),
        (ToMA(dst_every=20, weights_every=10), 20, 2),
        (ToMA(dst_every=3, weights_every=3), 12, 4),
        (ToMA(dst_every=3, weights_every=3, merge_every=2), 12, 4),
        (ToMeSD(), 10, 10),
    ],
)
@torch.no_grad()  # which the checks of the tests keep from a generator
def test_a_plan_counts_as_often_as_the_schedule_makes_one(monkeypatch, method, forwards, plans):
    made, plan = [], type(method).plan
    monkeypatch.setattr(type(method), "plan", lambda *given: made.append(0) or plan(*given))
    monkeypatch.setattr(step, "now", lambda device: len(made))  # the time is the number of plans
    *_, result = step.bench_step([16], methods=[method], text=8, rounds=1, device="cpu")
    _, row, _ = result["rows"]
    assert row["forwards"] == forwards
    assert row["step_s"] * forwards == pytest.approx(plans)


@pytest.mark.usefixtures("_tiny_models")
def test_a_merging_run_is_split_into_merging_plans_and_the_rest(monkeypatch):
    def as_an_op(plain, *given):  # as it is on a GPU
        with record_function(f"foveate::{plain.__name__}"):
            return plain(*given)

    for op in (merging.region_matmul, merging.region_update):
        monkeypatch.setattr(merging, op.__name__, partial(as_an_op, op))
    *_, result = step.bench_step([16], methods=[ToMA(), HilbertA(tiles=2)], text=8, rounds=1, device="cpu")
    dense, sparse, row, _ = result["rows"]
    assert 0 < row["merge_share"] < 1
    assert 0 < row["plan_share"] < 1 - row["merge_share"]
    assert "merge_share" not in dense | sparse


@pytest.mark.parametrize(("error", "shown"), [(0.1, "1.0e-01"), (float("nan"), "nan")])
def test_a_wrong_step_is_not_timed(monkeypatch, error, shown):
    monkeypatch.setattr(step, "_difference", lambda *_: error)
    with pytest.raises(
        ValueError, match=rf"T=1 differs from dense by {shown} at 16 x 16 tokens: not timing a wrong step"
    ):
        next(step.bench_step([16], text=8, device="cpu"))


@pytest.mark.usefixtures("_tiny_models")
def test_the_commands_write_json_and_a_plot_and_refuse_what_is_no_number(tmp_path):
    small = ["--rounds", "1", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    attended = ["bench", "attention", "--pixels", "256", "--tiles", "1,4", "--centre", "0", "--heads", "1", *small]
    stepped = ["bench", "step", "--sides", "24", "--text", "8", *small]
    for command, name in ((attended, "attention-forward-cpu"), (stepped, "step-built-in-eager-cpu")):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["versions"]["commit"] == "abc"
        assert len(written["rows"]) == {"attention-forward-cpu": 4, "step-built-in-eager-cpu": 8}[name]
    assert (tmp_path / "attention-forward-cpu.png").exists()
    result = CliRunner().invoke(app, ["bench", "step", "--sides", "64;128"])
    assert result.exit_code == 2
    assert "'64;128' is no list of whole numbers: write them as 64,128" in result.output


@pytest.mark.usefixtures("_tiny_models")
def test_the_methods_of_the_command_line_are_timed_and_told_apart(tmp_path):
    methods = "toma", "todo", "toma:dst_every=20,weights_every=10,size_bias=True", "hilberta:tiles=2+toma:keep=0.25"
    command = ["bench", "step", "--sides", "16", "--text", "8", "--rounds", "1", "--device", "cpu"]
    options = [text for method in methods for text in ("--method", method)]
    result = CliRunner().invoke(app, [*command, *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "step-built-in-eager-cpu.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == [
        "dense",
        "ToDo f=2",
        "ToMA keep=0.5",
        "ToMA keep=0.5 size_bias=True, dst_every=20, weights_every=10",
        "HilbertA T=2 + ToMA keep=0.25",
        "dense, again",
    ]
    assert rows[1]["attention_flop_bound"] == pytest.approx(264 / (8 + 64))  # every token reads text and a quarter
    assert "dst_every=20" in rows[3]["method"]
    assert "weights_every=10" in "".join(result.output.split())


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


@pytest.mark.usefixtures("_tiny_models")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "flux"], "unknown model 'flux': choose one of built-in, flux-dev, sdxl"),
        (["--method", "toma:keep=1.0"], "ToMA keep=1 stays dense at 64 x 64 tokens: keep=1.0 is the dense model"),
        (["--sides", "16", "--method", "hilberta"], "HilbertA T=auto stays dense at 16 x 16 tokens: 16 x 16 image"),
        (
            ["--model", "sdxl", "--sides", "8", "--method", "hilberta+toma"],
            "takes one method of token merging or of sparse attention and nothing else",
        ),
    ],
)
def test_a_step_that_cannot_be_timed_is_one_clear_line(options, message):
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", "--text", "8", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


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
