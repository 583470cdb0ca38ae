"""Laws of the command line, tried as a user would."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
import tiny_pipelines
import torch
from command_line import fails, run, succeeds
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image
from safetensors import safe_open

import foveate
from foveate.apps.cli.pictures import place_of, request_of, size_of
from foveate.apps.demo import MODELS
from foveate.apps.demo.scenes import scenes
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.apps.errors import EXTRAS
from foveate.apps.web import compare as side_by_side
from foveate.pipelines.checks import check_size
from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import Request, load_pipeline, own_size, pixels_per_token

SMALL = ["--size", "64", "--steps", "2", "--device", "cpu"]  # 16 x 16 tokens


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def test_generate_draws_what_the_pipeline_draws_and_the_seed_repeats_it(folder, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        succeeds("generate", "a cat", "--model", folder, *SMALL, "--seed", seed, "--out", f"{name}.png")
    pipe = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    seed = torch.Generator().manual_seed(1)
    want = pipe("a cat", height=64, width=64, num_inference_steps=2, generator=seed, max_sequence_length=64).images[0]
    assert (pixels("a.png") == np.asarray(want)).all()
    assert (pixels("a.png") == pixels("b.png")).all()
    assert (pixels("a.png") != pixels("c.png")).any()


def test_a_picture_carries_its_settings_and_a_summary_is_printed(folder):
    output = succeeds(
        "generate", "An  Ox!", "--model", folder, *SMALL, "--method", "hilberta", "--tiles", 2, "-o", "centre=0.5"
    )
    with Image.open("an-ox-0-hilberta-t-2-centre-0-5.png") as picture:
        settings = picture.text
    assert settings["prompt"] == "An  Ox!"
    assert settings["size"] == "64 x 64 px"
    assert settings["steps"] == "2"
    assert settings["model"] == str(folder)
    assert "tiles=2" in settings["method"]
    assert "centre=0.5" in settings["method"]
    assert "HilbertA T=2" in output
    assert "portable" in output


def test_generate_draws_many_prompts_and_seeds_and_resumes(folder, tmp_path):
    long = "a lighthouse on a cliff at dusk with waves below and a boat far away"
    (tmp_path / "prompts.txt").write_text(f"a cat\n\n{long} in rain\n{long} in snow\n")
    command = "generate", "--prompts", "prompts.txt", "--seeds", 2, "--model", folder, *SMALL, "--steps", 1
    output = succeeds(*command, "--method", "hilberta:tiles=4")
    assert "6 generated" in output
    assert "HilbertA T=4" in output
    index = json.loads((tmp_path / "pictures" / "pictures.json").read_text())
    assert [one["prompt"] for one in index.values()] == [
        p for p in ("a cat", f"{long} in rain", f"{long} in snow") for _ in "12"
    ]
    assert {one["seed"] for one in index.values()} == {0, 1}
    one = "--seed", 1, "--method", "hilberta:tiles=4", "--out", "one.png"
    succeeds("generate", "a cat", "--model", folder, *SMALL, "--steps", 1, *one)
    second = list(index)[1]
    assert (pixels(f"pictures/{second}") == pixels("one.png")).all()
    (tmp_path / "pictures" / second).unlink()
    assert "1 generated" in succeeds(*command, "--method", "hilberta:tiles=4")
    assert "holds results of method=" in fails(*command)


def test_what_generate_is_to_draw_and_where_must_be_clear(folder, tmp_path):
    assert "give a prompt" in fails("generate")
    (tmp_path / "prompts.txt").write_text("\n")
    both = fails("generate", "a cat", "--prompts", "prompts.txt")
    assert "a prompt, 'a cat', and --prompts prompts.txt are given: leave one of them out" in both
    assert "holds no prompts" in fails("generate", "--prompts", "prompts.txt")
    assert "cannot read the prompts" in fails("generate", "--prompts", "none.txt")
    assert "names the folder" in fails("generate", "a cat", "--seeds", 2, "--out", "a.png")
    assert "less than 2^63" in fails("generate", "a cat", "--seed", 2**63)
    assert "unknown --split images" in fails("generate", "a cat", "--split", "images")


def test_a_picture_can_be_wide(folder):
    succeeds("generate", "a cat", "--model", folder, "--size", "96x64", "--steps", 1, "--out", "wide.png")
    assert pixels("wide.png").shape == (64, 96, 3)


def test_without_a_model_the_built_in_one_draws_and_names_the_words_it_does_not_know():
    output = succeeds("generate", "a cat on an elefant", "--size", "32", "--steps", 1, "--device", "cpu")
    assert "never taught 'elefant' (known: elephant," in output
    assert "'cat'" not in output
    output = succeeds("generate", "3 cats 🍎", "--size", "32", "--steps", 1, "--device", "cpu")
    assert "never taught '3', 'cats' (known: cat" in output
    assert "'🍎'" in output
    assert pixels("a-cat-on-an-elefant-0.png").shape == (32, 32, 3)
    assert "never taught" not in succeeds("generate", "a cat", "--size", "32", "--steps", 1, "--device", "cpu")


def test_the_built_in_model_takes_no_guidance_scale(tmp_path):
    output = fails("generate", "a cat", "--guidance", 3, "--device", "cpu")
    assert "takes no guidance scale (3.0): leave the guidance out" in output
    assert list(tmp_path.iterdir()) == []


VIDEO = ["--size", "48x32", "--steps", 1, "--device", "cpu"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "wan"
    tiny_pipelines.wan().save_pretrained(path)
    return path


def test_generate_writes_a_video_with_its_frames_and_their_rate(wan):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    output = succeeds("generate", "a cat", "--model", wan, *VIDEO, "--frames", 9, "--fps", 12, "--negative", "a dog")
    assert "a-cat-0.mp4" in output
    assert ffmpeg.count_frames_and_secs("a-cat-0.mp4") == (9, pytest.approx(9 / 12, abs=0.01))
    output = fails("generate", "a cat", "--model", wan, *VIDEO, "--frames", 9, "--out", "a.png")
    assert "--out must name an MP4 file, not a.png: end it with .mp4" in output


def test_one_frame_is_a_picture_that_carries_its_settings(wan):
    succeeds("generate", "a cat", "--model", wan, *VIDEO, "--frames", 1, "--negative", "a dog", "--guidance", 3)
    with Image.open("a-cat-0.png") as picture:
        assert picture.size == (48, 32)
        told = picture.text
    assert (told["frames"], told["negative prompt"], told["guidance"]) == ("1", "a dog", "3.0")
    output = fails("generate", "a cat", "--model", wan, *VIDEO, "--frames", 1, "--out", "a.mp4")
    assert "--out must name a PNG file, not a.mp4: end it with .png" in output


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_without_an_encoder_nothing_is_drawn_and_the_remedy_is_named(wan, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    output = fails(command, "a cat", "--model", wan, *VIDEO, "--frames", 5)
    assert "this needs imageio_ffmpeg: pip install 'foveate[diffusers,video]'" in output
    assert list(tmp_path.iterdir()) == []


def test_options_that_a_pipeline_does_not_take_are_refused(folder, wan, tmp_path):
    for model, options, message in (
        (folder, ["--frames", 5], "FluxPipeline generates images: leave frames and fps out, or name a video model"),
        (folder, ["--negative", "a dog"], "no effect with a guidance scale of 1.0: use one above 1"),
        (folder, ["--image", "a.png"], "FluxPipeline takes no images: leave them out"),
        (wan, ["--frames", 6], "use a multiple of 4 plus 1, for example 5"),
    ):
        assert message in fails("generate", "a cat", "--model", model, "--size", "64x64", "--device", "cpu", *options)
    assert "the recogniser knows images, and WanPipeline makes videos" in fails(
        "eval", "--model", wan, "--size", 32, "--steps", 1, "--captions", 2
    )
    assert not list(tmp_path.glob("*.*"))


def test_generate_takes_several_methods_at_once(folder):
    output = succeeds(
        "generate", "a cat", "--model", folder, *SMALL, "--method", "hilberta:tiles=2+toma:keep=0.25,tile=(2,2)"
    )
    assert "HilbertA T=2 + ToMA" in output
    output = fails("generate", "a cat", "--model", folder, *SMALL, "--method", "hilberta+toma", "-o", "keep=0.5")
    assert "write all options into --method" in output


def test_log_linear_attention_is_a_method_like_any_other(tmp_path):
    untrained_pipeline(layers=1, single_layers=1, heads=1, rope=(8, 12, 12)).save_pretrained(tmp_path / "wide")
    options = "--model", "wide", *SMALL
    output = succeeds("generate", "a cat", *options, "--method", "llsa:top_k=4,enrich=false,min_tokens=0")
    assert "LLSA K=4 enrich=False" in output
    output = succeeds("eval", *options, "--captions", 2, "--method", "llsa:top_k=4,min_tokens=0", "--out", "eval")
    assert json.loads((tmp_path / "eval" / "scores.json").read_text())["scores"][2]["flop_bound"] > 1
    output = fails("eval", *options, "--captions", 2, "--method", "llsa", "--out", "eval")
    assert "fewer than min_tokens=1024: LLSA K=8 would only repeat dense" in output
    output = fails("generate", "a cat", "--method", "llsa:block_size=8")
    assert "block_size must be one of 16, 32, 64, not 8" in output


def test_compare_makes_one_page_with_every_picture_and_names_what_it_left_out(folder, tmp_path):
    succeeds("compare", "a cat", "--model", folder, *SMALL, "--rounds", 2, "--out", "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dense.png",
        "hilberta-t-4-start-percent-0-2.png",
        "index.html",
        "llsa-k-8-start-percent-0-2.png",
        "settings.json",
        "toma-keep-0-25-start-percent-0-2.png",
        "toma-keep-0-5-start-percent-0-2.png",
    ]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "HilbertA T=4" in page
    assert "HilbertA T=16 start_percent=0.2 is left out" in page
    assert "256 image tokens cannot make 16 tiles" in page
    assert "Token merging" in page
    assert "Stayed dense: 256 image tokens are fewer than min_tokens=1024" in page
    shown = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    dense = (tmp_path / "out" / "dense.png").read_bytes()
    (tmp_path / "first.png").write_bytes(base64.b64decode(shown[0]))
    (tmp_path / "dense.png").write_bytes(dense)
    assert (pixels("first.png") == pixels("dense.png")).all()


@pytest.mark.slow
def test_ctrl_c_while_timing_leaves_pictures_page_and_the_rounds_that_were_finished(folder, tmp_path, monkeypatch):
    def interrupted(pipeline, step, variants, *_, **_more):
        yield [1.25] * len(variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "time_steps", interrupted)
    result = run("compare", "a cat", "--model", folder, *SMALL, "--out", "out")
    assert result.exit_code == 130
    assert "finished" in result.output
    assert (tmp_path / "out" / "hilberta-t-4-start-percent-0-2.png").exists()
    page = (tmp_path / "out" / "index.html").read_text()
    assert "HilbertA T=4" in page
    assert "1.25 s" in page
    assert not list(tmp_path.rglob("*.part"))


def test_ctrl_c_while_drawing_leaves_no_half_picture(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Image.Image, "save", lambda *_args, **_more: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("generate", "a cat", "--model", folder, *SMALL).exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_file_as_the_output_folder_is_refused_before_anything_is_drawn(folder, tmp_path):
    (tmp_path / "taken").write_text("mine")
    output = fails("compare", "a cat", "--model", folder, *SMALL, "--out", "taken")
    assert "taken is a file" in output
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_error_without_a_message_is_still_one_line(folder, monkeypatch):
    def silent(*_args, **_more):
        raise OSError

    monkeypatch.setattr("foveate.pipelines.request.draw", silent)
    output = fails("generate", "a cat", "--model", folder, *SMALL)
    assert "something failed without a message" in output


def test_folders_without_a_usable_pipeline_are_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    headless = tmp_path / "headless"
    pipe = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    pipe.save_pretrained(headless)
    for file in (headless / "transformer").iterdir():
        file.unlink()
    other = tmp_path / "other"
    unet = UNet2DModel(sample_size=8, block_out_channels=(4,), down_block_types=("DownBlock2D",),
                       up_block_types=("UpBlock2D",), norm_num_groups=2, attention_head_dim=4)  # fmt: skip
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(other)
    for model, message in (
        ("empty", "empty is no pipeline folder: name one that holds a model_index.json"),
        ("headless", "cannot load headless"),
        ("nobody/nothing", "cannot load nobody/nothing"),
    ):
        output = fails("generate", "a cat", "--model", model, *SMALL)
        assert message in output
    output = fails("compare", "a cat", "--model", "other", *SMALL)
    assert "DDPMPipeline takes no prompt, which this command passes: generate with it from Python" in output


@pytest.mark.parametrize(
    "damaged",
    [
        "transformer/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "vae/config.json",
        "tokenizer/tokenizer.json",
        "scheduler/scheduler_config.json",
    ],
)
@pytest.mark.parametrize("how", ["cut off", "gone"])
def test_a_damaged_model_is_one_clear_line(folder, tmp_path, monkeypatch, damaged, how):
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    file = copied / damaged
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-40])
    output = fails("generate", "a cat", "--model", copied, *SMALL)
    assert "cannot load" in output
    monkeypatch.setitem(MODELS, "", MODELS[""]._replace(name=str(copied)))
    output = fails("generate", "a cat", *SMALL)
    assert "the built-in model is damaged, install foveate-models again" in output


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_one_line_with_remedies(folder, tmp_path, monkeypatch, error):
    def out_of_memory(*_args, **_more):
        raise error

    monkeypatch.setattr("foveate.pipelines.request.draw", out_of_memory)
    output = fails("generate", "a cat", "--model", folder, *SMALL)
    assert "out of memory: use a smaller --size" in output
    assert list(tmp_path.iterdir()) == []


def test_curves_draws_and_prints_the_metrics():
    output = succeeds("curves", "moore", "--size", "32x16", "--tiles", 8, "--phase", 1)
    assert pixels("moore-32x16.png").shape[1] > 500
    assert "EAS" in output
    for arguments, message in (
        (["peano"], "unknown curve 'peano'"),
        (["--size", "999"], "at most 256 x 256"),
        (["--size", "1000000"], "1000000 cells are too many to draw"),
    ):
        output = fails("curves", *arguments)
        assert message in output


def test_nothing_is_overwritten_unless_told(folder, tmp_path):
    draw = "generate", "a cat", "--model", folder, *SMALL[2:]
    for size, name in ((64, "a-cat-0.png"), (32, "a-cat-0-2.png"), (32, "a-cat-0-3.png")):
        assert name in succeeds(*draw, "--size", size)
        assert pixels(name).shape == (size, size, 3)
    assert pixels("a-cat-0.png").shape == (64, 64, 3)
    assert "a-cat-0.png exists: name another --out, or overwrite it with --force" in fails(
        *draw, "--size", 32, "--out", "a-cat-0.png"
    )
    succeeds(*draw, "--size", 32, "--out", "a-cat-0.png", "--force")
    assert pixels("a-cat-0.png").shape == (32, 32, 3)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "cuda:63"], "this machine has no cuda:63"),
        (["--size", "129"], "129 x 129 px does not fit: this model packs 4 x 4 px into a token"),
        (["--lora", "nowhere"], "cannot find the LoRA nowhere"),
        (["--method", "toma", "--method", "toma:keep=0.5"], "--method toma:keep=0.5 is given twice"),
        (["--method", "toma+toma"], "one of token merging, or both, not ToMA + ToMA"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(folder, monkeypatch, options, message):
    monkeypatch.setattr("foveate.pipelines.request.load_pipeline", None)
    command = ["compare" if "--method" in options else "generate", "a cat", "--model", folder]
    assert message in fails(*command, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--size", "129"], "129 x 129 px does not fit"), (["--start", "nowhere"], "cannot find the LoRA nowhere")],
)
def test_distill_checks_its_options_before_a_model_is_loaded(monkeypatch, options, message):
    monkeypatch.setattr("foveate.pipelines.request.load_pipeline", None)
    assert message in fails("distill", *options)


def test_compare_takes_methods_and_prints_its_progress_into_a_log(folder, tmp_path):
    output = succeeds("compare", "a cat", "--model", folder, *SMALL, "--method", "hilberta:tiles=2", "--rounds", 1)
    assert {path.name for path in (tmp_path / "compare").iterdir()} == {
        *("dense.png", "hilberta-t-2.png", "index.html", "settings.json")
    }
    for line in ("dense: 0 of 2", "dense: 2 of 2", "HilbertA T=2: 2 of 2", "timing: 2 of 2"):
        assert line in output


def test_the_size_is_the_models_own_unless_given(tmp_path):
    pipe = tiny.stable_diffusion()
    assert own_size(pipe) == (pipe.unet.config.sample_size * pipe.vae_scale_factor,) * 2
    assert own_size(tiny_pipelines.wan()) == (480, 832)
    assert own_size(untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))) == (256, 256)


def test_the_size_of_a_token_is_told_by_the_files_of_a_model(tmp_path):
    for name, pipe in (("qwen", tiny_pipelines.qwen()), ("klein", tiny_pipelines.klein())):
        pipe.save_pretrained(tmp_path / name)
        multiple = pixels_per_token(pipe)
        check_size(str(tmp_path / name), (multiple, 3 * multiple))
        with pytest.raises(ValueError, match=f"packs {multiple} x {multiple} px into a token"):
            check_size(str(tmp_path / name), (multiple, 3 * multiple + 1))
    check_size(str(tmp_path / "nowhere"), (7, 7))  # loading it says what is wrong


def test_eval_does_not_judge_what_its_recogniser_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setattr("foveate.apps.demo.efficientnet.PACKAGES", ("efficientnet_lite_pytorch", "gone"))
    monkeypatch.setitem(EXTRAS, "gone", "eval")
    other = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    other.tokenizer_2.add_tokens(["lighthouse"])
    other.text_encoder_2.resize_token_embeddings(len(other.tokenizer_2))
    other.save_pretrained("other")
    output = succeeds("eval", "--model", "other", *SMALL, "--captions", 2, "--method", "hilberta:tiles=2")
    assert "cannot judge this model: only distances to the dense images are reported" in output
    assert "EfficientNet distances are left out: this needs gone: pip install 'foveate[eval]'" in output
    assert "PSNR" in output
    for word in ("objects", "Fréchet", "real"):
        assert word not in output.split("reported")[1]
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())["scores"]
    assert [(score["label"], score["objects"]) for score in scores] == [("dense", None), ("HilbertA T=2", None)]
    assert scores[1]["psnr"]["value"] > 0
    assert scores[1]["efficientnet"] is None


def test_the_version_is_printed():
    assert succeeds("--version") == f"foveate {foveate.__version__}"


def test_info_is_also_json():
    told = json.loads(run("info", "--json").stdout)
    assert told["versions"]["foveate"] == foveate.__version__
    assert told["backends"]["block_attention on cpu"] == "portable"
    assert "hilberta" in told["methods"]


def test_info_names_versions_devices_and_backends():
    output = succeeds("info")
    for word in ("foveate", "torch", "Python", "CPU", "block_attention on cpu", "portable", "hilberta"):
        assert word in output


def test_eval_scores_pictures_and_resumes(folder, tmp_path):
    command = ["eval", "--method", "hilberta:tiles=2,centre=0.5", "--model", folder, *SMALL, "--captions", 3]
    output = succeeds(*command)
    for word in ("real", "dense", "HilbertA T=2", "objects", "PSNR", "EfficientNet"):
        assert word in output
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())
    assert [score["label"] for score in scores["scores"]] == ["real", "dense", "HilbertA T=2 centre=0.5"]
    assert pixels("eval/sheet.png").size
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "eval").rglob("0*.png")}
    assert len(written) == 6
    succeeds(*command)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "eval").rglob("0*.png")} == written


def test_demo_info_tells_size_recipe_vocabulary_and_licence():
    output = succeeds("demo", "info")
    for words in (
        "MB",
        "M parameters",
        "a red apple",
        "turquoise",
        "A above B",
        "SIL Open Font License",
        "images of",
        "--lora built-in-16",
        "--model built-in-pixel",
        "--model built-in-video",
    ):
        assert words in output


DISTIL = ["--tiles", 2, "-o", "centre=0.5", "--optimizer", "adamw", "--rate", 0.05, "--batch", 1, "--size", "64"]
DISTIL += ["--draw-steps", 1, "--device", "cpu"]
TITLE, SLUG = "HilbertA T=2 centre=0.5", "hilberta-t-2-centre-0-5"


@pytest.fixture(scope="module")
def lora(folder, tmp_path_factory):
    """A LoRA of the tiny model, distilled from a shell."""
    path = tmp_path_factory.mktemp("loras")
    (path / "prompts.txt").write_text("a cat\n\nan owl\n")
    options = ["--prompts", path / "prompts.txt", "--pictures", 3, "--steps", 2, "--out", path / "lora"]
    output = succeeds("distill", "--model", folder, *options, *DISTIL)
    assert "done" in output
    return path / "lora"


def test_distill_leaves_a_lora_and_generate_applies_its_method(folder, lora):
    assert len(list((lora / "pairs").glob("*.safetensors"))) == 3
    output = succeeds("generate", "a cat", "--model", folder, *SMALL, "--lora", lora, "--out", "ours.png")
    assert "HilbertA T=2" in output
    with Image.open("ours.png") as picture:
        assert "tiles=2" in picture.text["method"]
        assert picture.text["lora"] == str(lora)
    pipe = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    pipe.load_lora_weights(lora, weight_name="pytorch_lora_weights.safetensors")
    pipe.fuse_lora()
    with foveate.apply(pipe, foveate.HilbertA(tiles=2, centre=0.5)):
        seed = torch.Generator().manual_seed(0)
        size = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64}
        want = pipe("a cat", generator=seed, **size).images[0]
    assert (pixels("ours.png") == np.asarray(want)).all()
    arguments = ["--lora", lora, "--method", "hilberta", "--tiles", 2, "-o", "end_percent=0", "--out", "early.png"]
    output = succeeds("generate", "a cat", "--model", folder, *SMALL, *arguments)
    assert "1 of 2 forward passes sparse" in output


@pytest.mark.slow
def test_compare_and_eval_show_the_distilled_method_beside_the_others(folder, lora, tmp_path):
    output = succeeds("compare", "a cat", "--model", folder, *SMALL, "--rounds", 1, "--lora", lora, "--out", "out")
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {
        "dense", "hilberta-t-4", "toma-keep-0-5", "toma-keep-0-25", "llsa-k-8", SLUG, f"{SLUG}-distilled"
    }  # fmt: skip
    assert (pixels(f"out/{SLUG}.png") != pixels(f"out/{SLUG}-distilled.png")).any()
    output = succeeds("eval", "--model", folder, *SMALL, "--captions", 2, "--lora", lora)
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())["scores"]
    assert [score["label"] for score in scores] == ["real", "dense", TITLE, f"{TITLE}, distilled"]
    for arguments in (["compare", "a cat"], ["eval"], ["generate", "a cat"]):
        output = fails(*arguments, "--model", folder, *SMALL, "--lora", "nowhere")
        assert "cannot find the LoRA nowhere: there is no such file" in output
    output = fails("generate", "a cat", "--model", folder, *SMALL, "--lora", "built-in")
    assert "does not fit this model" in output


def test_a_lora_sets_the_size_that_it_was_distilled_with(folder, lora):
    output = succeeds(
        "generate", "a cat", "--model", folder, "--steps", 1, "--device", "cpu", "--lora", lora, "--out", "a.png"
    )
    assert pixels("a.png").shape == (64, 64, 3)
    assert "other sizes may be worse" not in output
    output = succeeds(
        "generate", "a cat", "--model", folder, *SMALL[2:], "--size", 96, "--lora", lora, "--out", "b.png"
    )
    assert "distilled with 64 x 64 px: other sizes may be worse than without it" in output
    assert pixels("b.png").shape == (96, 96, 3)


def test_a_schedule_is_an_option_like_others(folder):
    output = succeeds(
        "generate", "a cat", "--model", folder, *SMALL, "--method", "hilberta", "-o", "tiles=((0, dense), (0.5, 2))"
    )
    assert "1 of 2 forward passes sparse" in output


def test_a_page_marks_methods_that_run_in_some_steps_only(folder, tmp_path):
    pipe, request = load_pipeline(str(folder), "cpu", "float32"), Request("a cat", (64, 64), 2, None, 0)
    late = foveate.HilbertA(tiles=2, start_percent=0.5)
    changing = foveate.HilbertA(tiles=((0.0, 2), (0.5, 4)))
    side_by_side.comparison(pipe, request, [late, changing], tmp_path, settings={}, rounds=1)
    page = (tmp_path / side_by_side.PAGE).read_text()
    assert "HilbertA T=2 start_percent=0.5: sparse in part of the steps; the time is for a sparse step." in page
    assert "HilbertA T=(2, 4 from 0.5): changes during the run; the time is for its last setting." in page


def test_the_built_in_model_draws_with_its_lora():
    output = succeeds("generate", "an owl", *SMALL, "--lora", "built-in")
    assert "HilbertA T=4" in output
    with Image.open("an-owl-0-hilberta-t-4-slide-curve-start-percent-0-2-distilled.png") as picture:
        assert picture.text["lora"] == "built-in"


def test_the_built_in_model_of_pixels_is_drawn_by_its_name():
    command = "generate", "an owl on a green sofa", "--model", "built-in-pixel", "--size", 16, *SMALL[2:]
    output = succeeds(*command, "--out", "owl.png")
    assert "loading built-in-pixel" in output
    assert "never taught 'sofa'" in output
    with Image.open("owl.png") as picture:
        assert (picture.size, picture.text["model"]) == ((16, 16), "built-in-pixel")


def test_the_built_in_model_of_videos_is_drawn_by_its_name():
    command = "generate", "an owl moves up", "--model", "built-in-video", "--frames", 5, "--size", 32, *SMALL[2:]
    output = succeeds(*command, "--out", "owl.mp4")
    assert "loading built-in-video" in output
    assert "never taught" not in output
    assert os.path.getsize("owl.mp4")


@pytest.mark.parametrize(("device", "sides"), [("cpu", (128, 64, 64)), ("cuda", (256, 128, 96))])
def test_built_in_models_draw_smaller_on_a_cpu(device, sides):
    assert [size_of(model, device) for model in MODELS] == [(side, side) for side in sides]
    assert size_of("other/model", device) is None


def test_the_built_in_model_of_videos_brings_its_defaults():
    asked = request_of(
        load_pipeline(place_of("built-in-video"), "cpu"), "built-in-video", "an owl moves up", None, None, None, 0
    )
    assert (asked.size, asked.frames, asked.guidance, asked.steps) == ((64, 64), 17, 3.0, 20)


@pytest.mark.slow
def test_distill_takes_a_video_model(wan, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\nan owl")
    command = "distill", "--model", wan, "--size", 128, "--frames", 5, "--tiles", 4, "--prompts", "prompts.txt"
    succeeds(*command, "--optimizer", "adamw", "--steps", 1, "--batch", 2, "--draw-steps", 1, "--sample-every", 0)
    output = succeeds("generate", "a cat", "--model", wan, "--lora", "distilled", "--frames", 5, "--steps", 1)
    assert "HilbertA T=4, distilled" in output
    assert "2 of 2 forward passes sparse" in output


def test_distill_learns_from_given_pictures(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    for name, caption in (("one", "a cat"), ("two", "an owl"), ("three", "a car")):
        Image.effect_noise((64, 80), 50).save(tmp_path / "mine" / f"{name}.png")
        (tmp_path / "mine" / f"{name}.txt").write_text(caption)
    succeeds("distill", "--model", folder, "--images", "mine", "--pictures", 2, "--steps", 1, *DISTIL)
    sources = []
    for path in sorted((tmp_path / "distilled" / "pairs").glob("*.safetensors")):
        with safe_open(path, "pt") as pair:
            sources.append(pair.metadata()["source"])
    assert sources == ["one.png: a cat", "three.png: a car"]


def test_distill_never_uses_evaluation_captions_of_the_built_in_model(folder, monkeypatch):
    monkeypatch.setitem(MODELS, "", MODELS[""]._replace(name=str(folder)))
    some_drawn = lambda _pipe, some: drawn.extend(one.prompt for one in some) or [{}]  # noqa: E731
    monkeypatch.setattr("foveate.training.pairs._drawn", some_drawn)
    drawn = []
    assert run("distill", "--pictures", 30, "--steps", 1, *DISTIL).exit_code != 0  # there is nothing in the pairs
    judged = {scene.caption for _, scene in zip(range(500), scenes(42, evaluation=True), strict=False)}
    assert len(set(drawn)) > 25
    assert not set(drawn) & judged


TRAIN = ["--dit", "DiT-T", "--patch", 4, "--device", "cpu"]


@pytest.fixture
def one_sample(monkeypatch):
    """Generate one image on a sheet of samples, which takes most of the time of these runs."""
    monkeypatch.setattr("foveate.apps.cli.train.SHOWN", 1)


@pytest.mark.usefixtures("one_sample")
@pytest.mark.slow
def test_train_leaves_a_folder_that_generate_draws_with(tmp_path):
    output = succeeds("train", "--size", "16,32", "--steps", 1, "--batch", 2, *TRAIN)
    assert "done" in output
    output = succeeds("train", "--size", "16,32", "--steps", "1,2", "--batch", 2, "--minutes", 0, *TRAIN)
    assert "done" in output  # its last step was made in time
    assert len((tmp_path / "trained" / "log.csv").read_text().splitlines()) == 3
    output = succeeds("generate", "a cat", "--model", "trained", "--steps", 2, "--device", "cpu", "--out", "cat.png")
    pipe = PixelPipeline.from_pretrained("trained")
    want = pipe("a cat", num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images[0]
    assert pixels("cat.png").shape == (32, 32, 3)
    assert abs(pixels("cat.png") - np.asarray(want).astype(int)).max() <= 1
    output = fails("generate", "a cat", "--model", "trained", "--steps", 1, "--method", "hilberta", "--device", "cpu")
    assert "PixelDiT" in output
    for method, said in ([], "log-linear"), (["--method", "dense"], "dense"):
        drawn = "cat", "--model", "trained", "--steps", 1, "--size", 128, "--device", "cpu", "--out", f"{said}.png"
        succeeds("generate", *drawn, *method)
        with Image.open(f"{said}.png") as picture:
            assert picture.text["method"] == said
    output = succeeds("compare", "a cat", "--model", "trained", "--steps", 1, "--rounds", 1, "--device", "cpu")
    assert sorted(path.name for path in (tmp_path / "compare").glob("*.png")) == ["dense.png", "llsa-k-8.png"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_sample")
def test_train_starts_from_the_weights_of_another_run(tmp_path):
    succeeds("train", "--size", 16, "--steps", 1, "--batch", 1, *TRAIN)
    again = ["--seed", 1, "--rate", 1e-9, "--start", "trained", "--out", "again"]
    succeeds("train", "--size", 32, "--steps", 1, "--batch", 1, *TRAIN, *again)
    before, after = (PixelPipeline.from_pretrained(name).transformer.state_dict() for name in ("trained", "again"))
    torch.testing.assert_close(after, before)
    again[-1] = "others"
    output = fails("train", "--size", 32, "--steps", 1, "--batch", 1, *TRAIN, "--patch", 8, *again)
    assert "--start trained does not fit: give the --dit and --patch" in output
    weights = tmp_path / "trained/transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    output = fails("train", "--size", 32, "--steps", 1, "--batch", 1, *TRAIN, *again)
    assert "cannot load trained" in output
    assert not (tmp_path / "others").exists()


@pytest.mark.slow
def test_train_learns_from_a_folder_with_or_without_captions(tmp_path):
    (tmp_path / "mine").mkdir()
    Image.effect_noise((40, 40), 50).save(tmp_path / "mine" / "one.png")
    options = ["--data", "mine", "--size", "32x16", "--steps", 1, "--batch", 1, *TRAIN]
    succeeds("train", *options, "--attention", "dense", "--out", "bare")
    assert PixelPipeline.from_pretrained("bare").transformer.config.attention == "dense"
    succeeds("generate", "", "--model", "bare", "--steps", 1, "--device", "cpu", "--out", "a.png")
    assert pixels("a.png").shape == (16, 32, 3)
    (tmp_path / "mine" / "one.txt").write_text("a cat")
    succeeds("train", *options, "--no-enrich", "--top-k", 3, "--out", "captioned")
    trained = PixelPipeline.from_pretrained("captioned")
    assert (trained.transformer.config.enrich, trained.transformer.config.top_k) == (False, 3)
    assert trained.text_encoder is not None


BAD_INPUT = {
    "generate": [
        (["--method", "hilbert"], "unknown method 'hilbert' (did you mean hilberta?): choose one of"),
        (["--method", "hilberta", "-o", "tile=3"], "HilbertA has no option 'tile' (did you mean tiles?)"),
        (["--method", "hilberta", "-o", "centre"], "option centre has no value: write centre=VALUE"),
        (["--method", "hilberta", "--tiles", "-2"], "not -2"),
        (["--method", "hilberta", "--tiles", "9"], "use tiles<=8"),
        (["--tiles", "4"], "dense takes no options (tiles)"),
        (["--size", "66"], "66 x 66 px does not fit"),
        (
            ["--size", "9998x65"],
            "9998 x 65 px does not fit: this model packs 4 x 4 px into a token; "
            "use multiples of 4, for example 10000x64",
        ),
        (["--size", "0"], "cannot read the size '0'"),
        (["--size", "big"], "cannot read the size 'big'"),
        (["--size", "99996"], "624,950,001 tokens"),
        (["--device", "cuda:63"], "this machine has no cuda:63: use cpu or auto"),
        (["--device", "quantum"], "unknown device 'quantum'"),
        (["--dtype", "int4"], "unknown dtype 'int4'"),
        (["--out", "picture.jpg"], "not picture.jpg: end it with .png"),
        (["--out", "."], "not .: end it with .png"),
        (["--out", f"{__file__}/a.png"], "name another --out"),
        (["--steps", "0"], "--steps"),
        (["--guidance", "-1"], "--guidance"),
        (["--seed", "-1"], "--seed"),
    ],
    "eval": [
        (["--method", "hilbert"], "unknown method 'hilbert' (did you mean hilberta?): choose one of"),
        (["--method", "hilberta:tile=3"], "HilbertA has no option 'tile'"),
        (["--method", "hilberta:tiles=9"], "use tiles<=8"),
        (["--size", "64x32"], "knows square images, not 64 x 32 px"),
        (["--captions", "1"], "--captions"),
    ],
    "distill": [
        ([], "name prompts with --prompts FILE"),
        (["--prompts", "empty.txt"], "empty.txt holds no prompts: write one a line"),
        (["--prompts", "nowhere.txt"], "cannot read the prompts nowhere.txt: name a text file"),
        (["--images", "."], "holds no images"),
        (["--prompts", "one.txt", "--method", "hilberta+toma"], "write all options into --method"),
        (["--prompts", "one.txt", "--optimizer", "sgd"], "unknown optimizer 'sgd'"),
        (["--prompts", "one.txt", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES says which GPUs"),
        (["--prompts", "one.txt", "--tiles", 9], "use tiles<=8"),
        (
            ["--prompts", "one.txt", "--start", "nowhere"],
            "cannot find the LoRA nowhere: there is no such file",
        ),
        (["--prompts", "one.txt", "--guidance", 3], "takes no guidance scale"),
    ],
    "train": [
        (
            ["--size", "64,32", "--steps", "1,2,3"],
            "--steps 1,2,3 has 3 numbers for 2 sizes: give one, or one for each",
        ),
        (["--steps", "0"], "--steps 0 has a number below 1"),
        (["--batch", "many"], "'many' is no list of whole numbers"),
        (["--size", "big", "--steps", 5], "cannot read the size 'big': write 1024, or WIDTHxHEIGHT"),
        (["--size", "18", "--steps", 1], "patches of 4 px do not fill 18 x 18 px"),
        (["--size", "32x16", "--steps", 1], "scenes are square: use 16 or 32 for 32 x 16 px"),
        (["--dit", "DiT-XXL"], "unknown size 'DiT-XXL' of the model: choose DiT-T, DiT-XS, DiT-S, DiT-B"),
        (["--attention", "sparse"], "unknown attention 'sparse'"),
        (["--block-size", 8], "block_size must be one of 16, 32, 64, not 8"),
        (["--curve", "peano"], "unknown order 'peano'"),
        (["--rate", 0], "the learning rate must be above 0"),
        (["--dtype", "float16"], "unknown dtype 'float16'"),
        (["--device", "cuda:1"], "CUDA_VISIBLE_DEVICES says which GPUs"),
        (["--data", "."], "holds no images"),
        (["--start", "."], ". is no pipeline folder: name one that holds a model_index.json"),
        (["--start", "nowhere"], "cannot load nowhere"),
        (["--data", "nowhere"], "pip install datasets, or name a folder"),
    ],
    "generate with a LoRA": [
        (["--tiles", 4], "was distilled for tiles=2, not 4: leave tiles out"),
        (["--method", "hilberta:tiles=4"], "was distilled for tiles=2, not 4: leave tiles out"),
        (["--method", "dense"], "was distilled for HilbertA T=2 centre=0.5, not dense"),
        (["--method", "hilberta", "-o", "centre=0.25"], "was distilled for centre=0.5, not 0.25"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"), [(command, *case) for command, cases in BAD_INPUT.items() for case in cases]
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(
    request, folder, tmp_path, monkeypatch, command, arguments, message
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    usual = {
        "generate": ["a cat", "--model", folder, *SMALL],
        "eval": ["--model", folder, *SMALL, "--captions", 2],
        "distill": ["--model", folder, "--steps", 1, *DISTIL],
        "train": ["--size", 16, "--steps", 1, "--batch", 1, *TRAIN],
    }
    name, _, with_lora = command.partition(" with ")
    lora = ["--lora", request.getfixturevalue("lora")] if with_lora else []
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "one.txt").write_text("a cat")
    before = sorted(tmp_path.iterdir())
    assert message in fails(name, *usual[name], *lora, *arguments)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        "generate", "compare", "eval", "distill", "train", "icl", "rag", "rag ask", "curves", "info", "demo", "ui",
        "rag index", "rag add", "rag remove", "rag info", "demo info", "demo texts", "bench", "bench step",
    ],
)  # fmt: skip
def test_help_teaches(command):
    *above, last = command.split()
    succeeds(*above, last, "--help")
    assert last in succeeds(*above, "--help")


@pytest.mark.parametrize("command", ["ui", "serve", "rag serve"])
def test_help_names_the_extra_to_install(command):
    text = " ".join(succeeds(*command.split(), "--help").split())
    assert re.search(r"pip install 'foveate\[[\w,]+\]'", text)


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        pytest.param("diffusers", "diffusers", "generate an-owl", marks=pytest.mark.slow),
        pytest.param("transformers", "transformers", "rag . anything", marks=pytest.mark.slow),
        ("gradio", "ui", "ui"),
        pytest.param("tokenizers", "transformers", "demo texts", marks=pytest.mark.slow),
        pytest.param("accelerate", "diffusers,train", "train --size 16 --steps 1", marks=pytest.mark.slow),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(missing, extra, command):
    script = f"import sys; sys.modules[{missing!r}] = None; from foveate.apps.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", script, *command.split()], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"error: this needs {missing}: pip install 'foveate[{extra}]'" in result.stderr
