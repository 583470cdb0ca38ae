"""Laws of `foveate bench step`: it checks before it times, and says what cannot be timed."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    MiniMaxH3Scheduler,
    QwenImagePipeline,
    StableDiffusionXLPipeline,
    WanPipeline,
    ZImagePipeline,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from typer.testing import CliRunner

from foveate import LLSA, HilbertA, ToMA
from foveate.apps.bench import models, step
from foveate.apps.bench.models import MODELS
from foveate.apps.cli import app
from foveate.methods import ComposedMethod, ToDo, ToMeSD
from foveate.ops.hierarchical_pooling import MAX_KERNEL_TOP_K


def tiny_sdxl():
    nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    unet = tiny.unet(dtype=torch.float32)
    return StableDiffusionXLPipeline(scheduler=EulerDiscreteScheduler(), unet=unet, add_watermarker=False, **nothing)


def tiny_flux2():
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return Flux2Pipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=tiny.flux2(torch.float32), **parts)


def tiny_qwen():
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), transformer=tiny.qwen(torch.float32), **parts
    )


def tiny_wan():
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return WanPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=tiny.wan(torch.float32), **parts)


def tiny_z_image():
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return ZImagePipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=tiny.zimage(torch.float32), **parts)


def tiny_minimax_h3():
    pipe = MiniMaxH3CoreDenoiseStep().init_pipeline()
    pipe.update_components(scheduler=MiniMaxH3Scheduler(), transformer=tiny.minimax_h3(torch.float32))
    pipe.scheduler.set_timesteps(1000)
    return pipe


TINY = {
    "minimax-h3": tiny_minimax_h3,
    "built-in": tiny.pipeline,
    "sdxl": tiny_sdxl,
    "flux2-dev": tiny_flux2,
    "qwen-image": tiny_qwen,
    "wan-14b": tiny_wan,
    "z-image": tiny_z_image,
}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    for name, build in TINY.items():
        monkeypatch.setitem(MODELS, name, MODELS[name]._replace(build=lambda *_, build=build, **__: build()))


def bench(sides, **options):
    grids = [side if isinstance(side, tuple) else (side, side) for side in sides]
    *_, result = step.bench_step(step.Setup.of(**{"text": 8, "device": "cpu", **options}), grids, rounds=1)
    return result


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", "step", "--device", "cpu", *map(str, arguments)])
    return result, " ".join(result.output.split())


def test_dense_and_every_method_are_checked_and_timed():
    methods = [HilbertA(tiles=4), ToMA(keep=0.5), ToDo(), ComposedMethod((HilbertA(tiles=4), ToMA(keep=0.5)))]
    result = bench([16], methods=methods)
    dense, hilberta, todo, toma, both, again = result["rows"]
    assert [row["variant"] for row in (dense, hilberta, todo, toma, both, again)] == [
        *("dense", "HilbertA T=4", "ToDo f=2", "ToMA keep=0.5", "HilbertA T=4 + ToMA keep=0.5", "dense, again")
    ]
    for row in result["rows"]:
        assert max(row["one_tile_error"], row["all_kept_error"]) < 1e-4
        assert row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
        assert 0 < row["enqueue_s"] < 10
        assert row["speed_up"] == pytest.approx(dense["step_s"] / row["step_s"])
        assert (row["image_tokens"], row["batch"]) == (256, 1)
    assert dense["attention_flop_bound"] == again["attention_flop_bound"] == 1
    pairs = sum(table.pairs() for table in methods[0].plan(((16, 16),), 8).tables) / methods[0].period
    assert hilberta["attention_flop_bound"] == pytest.approx(264**2 / pairs)
    assert todo["attention_flop_bound"] == pytest.approx(264 / (8 + 64))  # every token reads text and a quarter
    assert step.table_of(result).row_count == 6


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("flux2-dev", (16, 16)),
        ("qwen-image", (16, 16)),
        ("z-image", (16, 16)),
        ("wan-14b", (5, 8, 9)),
        ("minimax-h3", (5, 8, 9)),
    ],
)
def test_models_of_today_are_timed_with_every_method(model, size):
    result = bench([size], model=model, methods=[HilbertA(tiles=4), ToMA(keep=0.5)])
    assert [row["image_tokens"] for row in result["rows"]] == 4 * [math.prod(size)]
    assert all(max(row["one_tile_error"], row["all_kept_error"]) < 1e-4 for row in result["rows"])


def test_a_part_of_minimax_h3_is_timed_and_scaled(monkeypatch):
    dense, merged, _ = bench([(5, 8, 9)], model="minimax-h3", methods=[ToMA(keep=0.5)])["rows"]
    assert merged["variant"] == "ToMA keep=0.5 skip=0"
    for row in (dense, merged):  # 3 of 50 layers
        assert row["all_layers_s"] == pytest.approx(50 / 3 * row["step_s"])
    with pytest.raises(ValueError, match=r"51 layers cannot be built of minimax-h3, only of minimax-h3 \(1 to 50\)"):
        step.Setup.of("minimax-h3", layers=51, device="cpu")
    with pytest.raises(ValueError, match="2 layers cannot be built of flux2-dev"):
        step.Setup.of("flux2-dev", layers=2, device="cpu")
    monkeypatch.setattr(
        models, "MiniMaxH3Transformer3DModel", lambda num_layers: tiny.minimax_h3(num_layers=num_layers)
    )
    monkeypatch.setattr(models, "ACTIVATIONS", 10**6)
    sizes = [models.weight_bytes(lambda n=n: tiny.minimax_h3(num_layers=n), torch.float32) for n in (0, 1)]
    for fitting, free in ((7, 8 * sizes[1] - 7 * sizes[0] - 1), (50, 10**9), (1, 0)):
        monkeypatch.setattr(models, "free_memory", lambda device, free=free: free + 10**6)
        monkeypatch.setattr(models, "random_model", lambda make, *_: make())
        pipe = models._minimax_h3(torch.device("cpu"), torch.float32)
        assert len(pipe.transformer.transformer_blocks) == fitting
    setup = step.Setup.of("minimax-h3", layers=2, device="cpu")
    assert setup.grid((736, 1280), 124) == (37, 23, 40)
    for size, frames in (((736, 1280), None), ((736, 1280), 125), ((720, 1280), 124)):
        with pytest.raises(ValueError, match="do not fit: MiniMax-H3 takes"):
            setup.grid(size, frames)
    assert (setup.about["layers"], setup.about["all_layers"]) == (3, 50)  # of the tiny model


@pytest.mark.parametrize("layers", [10, 20, 50])
def test_a_part_of_a_model_leaves_the_same_share_of_it_unmerged(layers):
    both = ComposedMethod((HilbertA(tiles=4), ToMA(keep=0.5)))
    whole = sum(ToMA(keep=0.5).merging_blocks(50, 5))
    part = step.in_part(both, layers, 50)
    assert sum(part.parts[1].merging_blocks(layers, 5)) == whole * layers / 50
    assert step.in_part(HilbertA(tiles=4), layers, 50) == HilbertA(tiles=4)
    assert step.in_part(ToMA(skip=3), layers, 50) == ToMA(skip=3)


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("flux-dev", 23.8),
        ("flux2-dev", 64.4),
        ("flux2-klein", 7.8),
        ("qwen-image", 40.9),
        ("z-image", 12.3),
        ("wan-14b", 28.6),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_their_size(monkeypatch, model, gigabytes):
    monkeypatch.undo()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=int(5e9)))
    with pytest.raises(ValueError, match=rf"take {gigabytes} GB in bfloat16, but cpu has 5.0 GB"):
        MODELS[model].build(torch.device("cpu"), torch.bfloat16)


@pytest.mark.slow
def test_log_linear_attention_is_compared_with_every_block_selected(monkeypatch):
    monkeypatch.undo()  # the heads of the tiny model are too small for it
    dense, llsa = bench([16], methods=[LLSA(top_k=2, min_tokens=0)])["rows"]
    assert llsa["every_block_error"] < 1e-4
    assert llsa["attention_flop_bound"] == pytest.approx(264**2 / (8 * 264 + 256 * (8 + 2 * 16 + 16)))
    assert dense["variant"] == "dense"


@pytest.mark.slow
def test_log_linear_attention_is_checked_on_as_many_tokens_as_its_kernels_read_in_full(monkeypatch):
    monkeypatch.undo()
    assert step.EVERY_BLOCK.top_k == MAX_KERNEL_TOP_K
    monkeypatch.setattr(step, "EVERY_BLOCK", replace(step.EVERY_BLOCK, top_k=8))  # reads 128 tokens in full
    rows = bench([16, (16, 20)], methods=[LLSA(top_k=2, min_tokens=0)])["rows"]
    assert all(row["every_block_error"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_a_unet_is_timed_with_guidance():
    result = bench([8], model="sdxl", methods=[ToDo(), ToMA(keep=0.5)], text=5)
    assert [row["variant"] for row in result["rows"]] == ["dense", "ToDo f=2", "ToMA keep=0.5", "dense, again"]
    assert {row["batch"] for row in result["rows"]} == {2}
    assert all(row["all_kept_error"] < 1e-4 for row in result["rows"])


def test_any_pipeline_may_be_timed_with_its_own_inputs(tmp_path):
    tiny.pipeline().save_pretrained(tmp_path / "mine")
    result, output = run("--model", tmp_path / "mine", "--size", 64, "--method", "hilberta:tiles=4", "--rounds", 1,
                         "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, output
    written = json.loads((tmp_path / "step-mine-eager-cpu.json").read_text())
    assert written["what"] == "one forward of FluxTransformer2DModel with its own weights"
    assert [row["image_tokens"] for row in written["rows"]] == [256, 256]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_methods_to_time(name):
    assert len(MODELS[name].methods) > 1


def test_sdxl_has_the_size_of_sdxl(monkeypatch):
    monkeypatch.undo()
    unet = MODELS["sdxl"].build(torch.device("meta"), torch.bfloat16).unet
    assert sum(p.numel() for p in unet.parameters()) == 2_567_463_684
    assert unet.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("method", "forwards", "plans"),
    [
        (ToMA(), 10, 2),
        (ToMA(dst_every=20, weights_every=10), 20, 2),
        (ToMA(dst_every=3, weights_every=3, merge_every=2), 12, 4),
        (ToMeSD(), 10, 10),
    ],
)
@torch.no_grad()  # which the checks of the tests keep from a generator
def test_each_plan_of_the_schedule_is_timed_once(monkeypatch, method, forwards, plans):
    made, plan = [], type(method).plan
    monkeypatch.setattr(type(method), "plan", lambda *given: made.append(0) or plan(*given))
    monkeypatch.setattr(step, "now", lambda device: len(made))  # the time is the number of plans
    _, row, _ = bench([16], methods=[method])["rows"]
    assert row["forwards"] == forwards
    assert row["step_s"] * forwards == pytest.approx(plans)


def test_methods_of_a_compiled_model_are_timed_one_by_one(monkeypatch):
    made = step.Setup.step
    monkeypatch.setattr(step.Setup, "step", lambda setup, grid: made(setup, grid)._replace(compiled=True))
    rows = bench([16], methods=[HilbertA(tiles=4), ToDo()])["rows"]
    assert [row["variant"] for row in rows] == ["dense", "HilbertA T=4", "ToDo f=2", "dense, again"]
    assert rows[1]["forwards"] == 10
    assert rows[1]["step_s"] == rows[1]["median_s"]  # its steps are all alike, as those of dense


def test_cuda_graphs_are_refused_without_a_gpu():
    result, output = run("--cuda-graphs")
    assert result.exit_code != 0
    assert "CUDA graphs need an NVIDIA GPU, not cpu: leave --cuda-graphs out" in output


@pytest.mark.parametrize(("error", "shown"), [(0.1, "1.0e-01"), (float("nan"), "nan")])
def test_a_wrong_step_is_not_timed(monkeypatch, error, shown):
    monkeypatch.setattr(step, "_difference", lambda *_: error)
    with pytest.raises(
        ValueError, match=rf"T=1 differs from dense by {shown} at 16 x 16 tokens: not timing a wrong step"
    ):
        bench([16], methods=[HilbertA(tiles=4)])


def test_what_cannot_run_is_skipped_and_named_and_the_rest_is_timed(tmp_path):
    options = ["--method", "hilberta:tiles=4", "--method", "hilberta:tiles=64", "--out", tmp_path]
    result, output = run("--size", 64, "--text-tokens", 8, "--rounds", 1, *options)
    assert result.exit_code == 0, output
    assert "skipped: tiles need 32 tokens or more: 256 image tokens cannot make 64 tiles" in output
    written = json.loads((tmp_path / "step-built-in-eager-cpu.json").read_text())
    assert [row["variant"] for row in written["rows"]] == ["dense", "HilbertA T=4"]
    assert [one["method"] for one in written["skipped"]] == [repr(HilbertA(tiles=64))]


def test_the_command_writes_json_and_prints_a_table(tmp_path):
    methods = "todo", "toma:dst_every=20,weights_every=10,merge_reference=True"
    options = [text for method in methods for text in ("--method", method)]
    result, output = run(
        "--size", 64, "--text-tokens", 8, "--rounds", 1, *options, "--out", tmp_path, "--commit", "abc"
    )
    assert result.exit_code == 0, output
    written = json.loads((tmp_path / "step-built-in-eager-cpu.json").read_text())
    assert written["versions"]["commit"] == "abc"
    toma = "ToMA keep=0.5 dst_every=20, weights_every=10, merge_reference=True"
    assert [row["variant"] for row in written["rows"]] == ["dense", "ToDo f=2", toma, "dense, again"]
    assert "dst_every=20" in written["rows"][2]["method"]
    assert "weights_every=10" in "".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "flux"],
            "unknown model 'flux': choose one of built-in, flux-dev, flux2-dev, flux2-klein, qwen-image, z-image, "
            "wan-14b, minimax-h3, sdxl",
        ),
        (["--model", "./nowhere", "--method", "toma"], "cannot load ./nowhere"),
        (["--model", "me/mine"], "name the methods to time on me/mine"),
        (["--method", "toma:keep=1.0"], "ToMA keep=1 stays dense at 64 x 64 tokens: keep=1.0 is the dense model"),
        (["--size", "64", "--method", "hilberta"], "HilbertA T=auto stays dense at 16 x 16 tokens: 16 x 16 image"),
        (["--size", "64;128"], "cannot read the size '64;128'"),
        (["--size", "66"], "66 x 66 px does not fit: this model packs 4 x 4 px into a token"),
        (["--size", "64", "--frames", "5"], "FluxPipeline generates images: leave frames and fps out"),
        (["--method", "dense"], "dense is always timed: name a method to compare it with"),
        (["--method", "hilberta+llsa"], "choose one method of sparse attention, one of token merging, or both"),
    ],
)
def test_a_step_that_cannot_be_timed_is_one_clear_line(options, message):
    result, output = run("--text-tokens", 8, *options)
    assert result.exit_code == 2
    assert message in output
