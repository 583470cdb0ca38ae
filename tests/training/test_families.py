"""Wan, text to video, is distilled as the other tests of this folder say of FLUX.1."""

import math
from dataclasses import replace

import pytest
import tiny_pipelines
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import default_collate

import foveate
from foveate import HilbertA
from foveate.pipelines.lora import LORA_FILE, load_lora, using
from foveate.pipelines.request import Request, draw
from foveate.training.distill import distill
from foveate.training.families import family_of
from foveate.training.pairs import make_pairs
from foveate.training.pictures import NoisyPairs, noise_shift
from foveate.training.run import RunOptions
from foveate.training.student import Recipe, Student

PROMPTS = ["a cat", "an owl"]
REQUEST = Request("", (128, 128), 2, 3.0, 0, frames=5)  # 2 x 8 x 8 tokens
METHOD = HilbertA(tiles=4)
RECIPE = Recipe(method=METHOD, optimizer="adamw", rate=1e-2, batch=2, levels="shifted")


@pytest.fixture
def pipe():
    return tiny_pipelines.wan()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan") / "pairs"
    make_pairs(folder, tiny_pipelines.wan(), PROMPTS, REQUEST, at_once=2)
    return folder


def test_the_grid_is_that_of_the_latents(pipe, pairs):
    frames, rows, columns = family_of(pipe, REQUEST).grid
    assert load_file(pairs / "000000.safetensors")["latents"].shape == (4, frames, 2 * rows, 2 * columns)
    assert family_of(pipe, REQUEST._replace(frames=None)).grid[0] == 21


@torch.no_grad()
def test_a_pair_holds_the_latents_that_the_pipeline_draws_and_the_embeddings(pipe, pairs):
    pair = load_file(pairs / "000001.safetensors")
    size = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 3.0}
    seed = torch.Generator().manual_seed(1)
    want = pipe(PROMPTS[1], generator=seed, output_type="latent", max_sequence_length=64, **size).frames[0]
    torch.testing.assert_close(pair["latents"], want)
    torch.testing.assert_close(pair["prompt_embeds"], pipe.encode_prompt(PROMPTS[1], max_sequence_length=64)[0][0])


def test_pairs_of_another_number_of_frames_are_refused(pipe, pairs):
    with pytest.raises(ValueError, match="frames=5: name another folder"):
        make_pairs(pairs, pipe, PROMPTS, REQUEST._replace(frames=9))


def test_noise_levels_are_shifted_as_the_scheduler_shifts_them(pipe):
    assert noise_shift(pipe.scheduler, 128) == pytest.approx(math.log(3))


def test_the_loss_is_the_mean_squared_difference_to_the_dense_model(pipe, pairs):
    samples = NoisyPairs(pairs, PROMPTS, seed=0)
    batch = default_collate([samples[0], samples[1]])
    inputs = batch.latents, 1000 * batch.level, batch.text["prompt_embeds"]
    with torch.no_grad():
        dense = pipe.transformer(*inputs).sample
        with foveate.apply(pipe, METHOD):
            sparse = pipe.transformer(*inputs).sample
    loss = Student(pipe, RECIPE, REQUEST).loss(pipe.transformer, batch).item()
    assert loss == pytest.approx(F.mse_loss(sparse, dense).item(), rel=1e-4)
    assert loss > 0


@pytest.mark.parametrize("layers", ["paper", "all"])
def test_all_chosen_layers_have_gradients(pipe, pairs, layers):
    student = Student(pipe, Recipe(method=METHOD, optimizer="adamw", layers=layers), REQUEST)
    samples = NoisyPairs(pairs, PROMPTS, seed=0)
    student.loss(pipe.transformer, default_collate([samples[0]])).backward()
    assert all(weight.grad is not None for weight in student.trained)
    assert len(student.trained) == 2 * (2 * 10 + (layers == "all"))  # two blocks


@pytest.mark.slow
def test_a_run_learns_and_leaves_a_lora_that_the_pipeline_takes(pipe, pairs, tmp_path):
    options = RunOptions(at_once=2, captions=PROMPTS[:1])
    assert distill(tmp_path, pipe, RECIPE, REQUEST, PROMPTS, pairs=pairs, steps=30, options=options)
    losses = [float(line.split(",")[1]) for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    fresh = tiny_pipelines.wan()
    distilled = load_lora(fresh, tmp_path / LORA_FILE)
    assert distilled is not None
    assert (distilled.method, distilled.size) == (replace(METHOD, slide="diagonal"), (128, 128))
    request = REQUEST._replace(prompt="a cat")
    dense = draw(tiny_pipelines.wan(), request)
    with using(fresh, distilled) as run:
        taught = draw(fresh, request)
        assert run is not None
        assert run.plans()
    assert len(taught) == 5
    assert taught != dense


def test_what_cannot_be_distilled_is_refused_before_anything_is_drawn(pipe, tmp_path, as_a_user):
    given = {"steps": 1, "options": RunOptions(at_once=1)}
    with pytest.raises(ValueError, match="two transformers, one for much noise"):
        distill(tmp_path, tiny_pipelines.wan(2), RECIPE, REQUEST, PROMPTS, **given)
    with pytest.raises(ValueError, match="not a WanImageToVideoPipeline: name its base model"):
        distill(tmp_path, tiny_pipelines.wan(image=True), RECIPE, REQUEST, PROMPTS, **given)
    assert list(tmp_path.iterdir()) == []
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="trains on its own videos"):
        distill(tmp_path / "run", pipe, RECIPE, REQUEST, ["a"], pictures=[tmp_path / "a.png"], **given)
