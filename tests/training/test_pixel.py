"""Laws of training on pixels: it learns, its average generates, and it can be interrupted and resumed."""

import contextlib
import itertools
import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file
from training_runs import losses

from foveate.apps.demo.scenes import ScenePictures
from foveate.nn.pixel_dit import PixelDiT
from foveate.pipelines.pixel import PixelPipeline, noise_scale
from foveate.training.pictures import FolderPictures, NoisyPictures
from foveate.training.pixel import PixelRecipe, PixelTraining, Stage, train
from foveate.training.run import RunOptions

QUICK = PixelRecipe(rate=3e-3, average=0.9)
STAGES = [Stage((16, 16), 4, 4), Stage((24, 16), 3, 2)]


def pipeline(captioned=False, **config):
    torch.manual_seed(0)
    text_dim = 32 if captioned else None
    config = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 32, "top_k": 2, **config}
    words = (tiny.pipeline().tokenizer_2, tiny.pipeline().text_encoder_2) if captioned else ()
    return PixelPipeline(PixelDiT(text_dim=text_dim, **config), FlowMatchEulerDiscreteScheduler(), *words)


def weights(out):
    return load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Five images, light on the left, without captions."""
    folder = tmp_path_factory.mktemp("photos")
    for index in range(5):
        pixels = np.full((40, 30 + 4 * index, 3), 40 * index, np.uint8)
        pixels[:, : pixels.shape[1] // 2] = 255
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def run(photos, tmp_path):
    def run(name, stages=STAGES, recipe=QUICK, pipe=None, pictures=None, at_once=64, **options):
        out, options = tmp_path / name, RunOptions(at_once=at_once, **options)
        return out, train(out, pipe or pipeline(), pictures or FolderPictures(photos), stages, recipe, options)

    return run


@pytest.mark.parametrize(
    ("attention", "captioned"),
    [
        ("log-linear", False),
        pytest.param("dense", False, marks=pytest.mark.slow),
        pytest.param("dense", True, marks=pytest.mark.slow),
        pytest.param("log-linear", True, marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_and_the_average_approaches_the_pictures(run, photos, attention, captioned):
    pictures = ScenePictures(0) if captioned else FolderPictures(photos)
    pipe = pipeline(captioned, attention=attention)
    out, done = run("out", [Stage((16, 16), 60, 8)], pipe=pipe, pictures=pictures)
    assert done
    curve = [loss for _, loss in losses(out)]
    assert sum(curve[-10:]) < 0.6 * sum(curve[:10])
    seen = NoisyPictures(pictures, (16, 16), 9, pipe.tokenizer)
    gaps = {"before": 0.0, "after": 0.0}
    for sample in (seen[number] for number in range(10)):
        for name, model in (("before", pipeline(captioned, attention=attention)), ("after", pipe)):
            with torch.no_grad():
                text = model.text_encoder(sample.words[None]).last_hidden_state if captioned else None
                velocity = model.transformer(sample.pixels[None], 1000 * sample.level[None], text).sample[0]
            gaps[name] += (velocity - sample.velocity).square().mean().item()
    assert gaps["after"] < 0.6 * gaps["before"]


def test_the_average_is_that_of_the_weights_after_every_step(run, monkeypatch):
    seen, step = [], torch.optim.AdamW.step

    def noting(optimizer, *args):
        step(optimizer, *args)
        seen.append([weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]])

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    out, _ = run("out", [Stage((16, 16), 6, 2)])
    average = [weight.double() for weight in pipeline().transformer.parameters()]
    for number, after in enumerate(seen):
        keep = min(0.9, (1 + number) / (10 + number)) if number else 0.0
        average = [keep * mean + (1 - keep) * weight for mean, weight in zip(average, after, strict=True)]
    names = [name for name, _ in pipeline().transformer.named_parameters()]
    for name, mean in zip(names, average, strict=True):
        torch.testing.assert_close(weights(out)[name].double(), mean, atol=1e-6, rtol=1e-4)


def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest_at_one_rate(run, monkeypatch):
    seen = []
    for kind in (torch.optim.Muon, torch.optim.AdamW):
        step = kind.step

        def noting(optimizer, *args, kind=kind, step=step):
            (group,) = optimizer.param_groups
            seen.append((kind.__name__, group["lr"], sum(weight.numel() for weight in group["params"])))
            step(optimizer, *args)

        monkeypatch.setattr(kind, "step", noting)
    run("out", [Stage((16, 16), 4, 1)], recipe=replace(QUICK, optimizer="muon", cool_down=0.5))
    named = list(pipeline().transformer.named_parameters())
    inside = sum(weight.numel() for name, weight in named if name.startswith("blocks.") and weight.ndim == 2)
    outside = sum(weight.numel() for _, weight in named) - inside
    rates = [3e-3, 3e-3, 3e-3, 1.5e-3]
    assert seen == [entry for rate in rates for entry in (("Muon", rate, inside), ("AdamW", rate, outside))]


@pytest.mark.parametrize(
    ("attention", "optimizer"), [("dense", "muon"), pytest.param("log-linear", "adamw", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_an_interrupted_run_ends_like_an_uninterrupted_one(run, attention, optimizer, monkeypatch):
    recipe = replace(QUICK, optimizer=optimizer, cool_down=0.5)
    whole, _ = run("whole", recipe=recipe, pipe=pipeline(attention=attention), at_once=2)
    calls, loss = itertools.count(1), PixelTraining.loss

    def failing(*arguments):
        if next(calls) % 6 == 0:
            raise SystemError
        return loss(*arguments)

    monkeypatch.setattr(PixelTraining, "loss", failing)
    attempts, done = 0, False
    while not done:
        attempts += 1
        with contextlib.suppress(SystemError):
            model = pipeline(attention=attention)
            broken, done = run("broken", recipe=recipe, pipe=model, at_once=2, checkpoint_minutes=0)
    assert attempts > 2
    assert losses(broken) == losses(whole)
    assert [step for step, _ in losses(whole)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(torch.equal(weights(broken)[name], weight) for name, weight in weights(whole).items())


def test_a_run_stops_in_time_and_can_be_extended(run):
    whole, _ = run("whole")
    out, done = run("out", STAGES[:1], minutes=0)
    assert not done
    assert len(losses(out)) == 1
    assert run("out", STAGES[:1])[1]
    assert json.loads((out / "model_index.json").read_text())["height"] == 16
    assert run("out")[1]
    assert json.loads((out / "model_index.json").read_text())["height"] == 24
    assert run("out")[1]  # nothing is left to do
    assert losses(out) == losses(whole)
    assert all(torch.equal(weights(out)[name], weight) for name, weight in weights(whole).items())


def test_a_run_of_other_stages_recipe_model_or_pictures_is_refused(run):
    run("out", STAGES)
    for stages in ([Stage((16, 16), 4, 2)], [Stage((16, 16), 3, 4), STAGES[1]], STAGES[:1]):
        with pytest.raises(ValueError, match="began with sizes 16x16:4:4,16x24:3:2: begin with these and add more"):
            run("out", stages)
    for change in (
        {"recipe": PixelRecipe(rate=3e-3, average=0.9, seed=1)},
        {"pipe": pipeline(top_k=3)},
        {"pictures": ScenePictures(0)},
    ):
        with pytest.raises(ValueError, match="name another folder"):
            run("out", [Stage((16, 16), 4, 4), Stage((16, 16), 3, 2)], **change)


@pytest.mark.slow
def test_gradient_accumulation_changes_nothing_but_rounding(run):
    for attention in ("dense", "log-linear"):
        at_once = [run(f"{attention} {n}", pipe=pipeline(attention=attention), at_once=n)[0] for n in (1, 4)]
        ours, theirs = map(losses, at_once)
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-4)


def test_checkpointing_and_compiling_change_nothing_but_rounding(run, monkeypatch):
    plain, _ = run("plain")
    monkeypatch.setattr(PixelDiT, "compile_repeated_blocks", lambda _model, dynamic: compiled.append(dynamic))
    compiled = []
    other, _ = run("other", checkpointing=True, compile=True)
    assert compiled == [False]
    assert [loss for _, loss in losses(other)] == pytest.approx([loss for _, loss in losses(plain)], rel=1e-4)


@pytest.mark.slow
def test_bfloat16_trains_float32_weights_nearly_as_well(run):
    plain, _ = run("plain")
    AcceleratorState._reset_state(reset_partial_state=True)
    narrow, _ = run("narrow", recipe=PixelRecipe(rate=3e-3, average=0.9, dtype="bfloat16"))
    assert {weight.dtype for weight in weights(narrow).values()} == {torch.float32}
    ours, theirs = ([loss for _, loss in losses(out)] for out in (narrow, plain))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_run_writes_a_pipeline_that_draws_like_the_trained_one(run, tmp_path):
    bars = []
    pipe = pipeline(captioned=True)
    out, _ = run(
        "out",
        [Stage((16, 16), 2, 2), Stage((32, 32), 2, 2)],
        pipe=pipe,
        pictures=ScenePictures(0),
        captions=["a cat", "a dog"],
        sample_every=2,
        track=lambda name, length: lambda: bars.append((name, length)),
    )
    assert bars == 4 * [("training", 4)]
    assert {path.name for path in out.glob("*.png")} == {"loss.png", "samples-000002.png", "samples-000004.png"}
    assert len(list(out.glob("0*"))) == 1
    again = PixelPipeline.from_pretrained(out)
    options = {"num_inference_steps": 2, "output_type": "np"}
    got, want = (one("a cat", generator=torch.Generator().manual_seed(1), **options).images for one in (again, pipe))
    assert got.shape == (1, 32, 32, 3)
    assert abs(got - want).max() < 1e-5


def test_samples_interpolate_to_noise_and_depend_on_their_number_only(photos):
    pictures = FolderPictures(photos)
    for size in ((16, 16), (128, 128)):
        samples = NoisyPictures(pictures, size, seed=3)
        levels, again = [], NoisyPictures(pictures, size, seed=3)
        for number in range(40):
            pixels, velocity, level, words = samples[number]
            clean = pixels - level * velocity  # the line from image to noise
            noise = (velocity + clean) / noise_scale(*size)
            assert clean.abs().max() < 1 + 1e-4
            assert abs(noise.std() - 1) < 0.1
            assert words.shape == (0,)
            levels.append(round(1000 * level.item()))
            assert torch.equal(again[number].pixels, pixels)
        assert min(levels) >= 1
        assert max(levels) <= 1000
        assert len(set(levels)) > 30


def test_every_epoch_sees_every_picture_once(photos, monkeypatch):
    pictures, seen = FolderPictures(photos), []
    picture = pictures.picture
    monkeypatch.setattr(pictures, "picture", lambda index, size: seen.append(index) or picture(index, size))
    samples = NoisyPictures(pictures, (16, 16), seed=0)
    for number in range(15):
        samples[number]
    epochs = [tuple(seen[start : start + 5]) for start in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1


@pytest.mark.slow
def test_some_captions_are_left_empty(photos):
    tokenizer = tiny.pipeline().tokenizer_2
    empty = tokenizer("", padding="max_length", max_length=64, return_tensors="pt").input_ids[0]
    for part in (0.0, 0.3, 1.0):
        samples = NoisyPictures(ScenePictures(0), (16, 16), 0, tokenizer, part)
        left = [torch.equal(samples[number].words, empty) for number in range(200)]
        assert sum(left) / 200 == pytest.approx(part, abs=0.1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("attention", ["dense", "log-linear"])
def test_a_gpu_learns_what_a_cpu_learns(run, attention):
    here, _ = run("cpu", pipe=pipeline(attention=attention))
    want = [loss for _, loss in losses(here)]
    bfloat16 = PixelRecipe(rate=3e-3, average=0.9, dtype="bfloat16")
    for name, recipe, near in (("float32", QUICK, 1e-2), ("bfloat16", bfloat16, 0.05)):
        AcceleratorState._reset_state(reset_partial_state=True)
        there, _ = run(name, recipe=recipe, pipe=pipeline(attention=attention).to("cuda"))
        assert [loss for _, loss in losses(there)] == pytest.approx(want, rel=near)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.0}, "the learning rate must be above 0"),
        ({"weight_decay": -1.0}, "the weight decay must be 0 or more, not -1"),
        ({"average": 1.0}, "are fractions, from 0 to 1: not 1.0, 0.1 and 0.0"),
        ({"uncaptioned": 1.5}, "are fractions, from 0 to 1: not 0.9999, 1.5 and 0.0"),
        ({"cool_down": -0.5}, "are fractions, from 0 to 1: not 0.9999, 0.1 and -0.5"),
        ({"optimizer": "sgd"}, "unknown optimizer .sgd.: choose adamw or muon"),
        ({"dtype": "float16"}, "unknown dtype 'float16': train in float32 or bfloat16"),
    ],
)
def test_bad_recipes_are_refused_with_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        PixelRecipe(**change)


def test_bad_arguments_are_refused_before_anything_is_written(run, tmp_path):
    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            run("out", **options)
        assert not (tmp_path / "out").exists()

    refused("a stage needs at least one step and one image a step", stages=[])
    refused("a stage needs at least one step and one image a step", stages=[Stage((16, 16), 1, 0)])
    refused("these images have no captions: train a model without words", pipe=pipeline(captioned=True))
    refused("patches of 3 px do not fill 16 x 16 px", pipe=pipeline(patch_size=3))
    refused("scenes are square: use 24 or 16 for 16 x 24 px", pictures=ScenePictures(0))
