"""Laws of the built-in model that generates, as shipped."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from lab.quality.video import judge_video
from lab.training.moving import moving_scenes

from foveate import HilbertA
from foveate.apps.demo import LORAS
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.recogniser import judge, load_recogniser, recognise
from foveate.apps.demo.scenes import Scenes, render, scenes
from foveate.pipelines import request as pipelines
from foveate.pipelines.lora import find_lora, load_lora, using
from foveate.pipelines.request import Request, draw_batch
from foveate_models import find


@pytest.fixture(scope="module")
def pipe():
    return load(find("pipeline"))


def load(folder):
    pipeline = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, *prompts, size=64, steps=2, seed=0):
    seeds = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    options = {"height": size, "width": size, "num_inference_steps": steps, "max_sequence_length": 64}
    return np.stack([np.asarray(image) for image in pipeline(list(prompts), generator=seeds, **options).images])


def megabytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def test_shipped_files_are_small_and_hold_no_code():
    folder = find("pipeline").parent
    files = [path for path in folder.rglob("*.*") if path.parent.name != "__pycache__" and path.stem != "__init__"]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".png"}
    assert megabytes(folder) < 120
    assert sum(megabytes(find(lora)) for lora in LORAS.values()) < 20
    most = {find("pipeline"): 41, find("pixel"): 45, find("video"): 25, find("reader"): 8}
    assert {folder: megabytes(folder) for folder, limit in most.items() if megabytes(folder) >= limit} == {}
    assert "SIL OPEN FONT LICENSE" in find("OFL.txt").read_text()


def test_the_picture_depends_on_seed_and_prompt_only(pipe):
    first = draw(pipe, "a red apple")
    assert (draw(pipe, "a red apple") == first).all()
    assert (draw(pipe, "a red apple", seed=1) != first).any()
    assert (draw(pipe, "an owl") != first).any()


def test_saving_and_loading_changes_no_bit(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        ours, theirs = getattr(pipe, name).state_dict(), getattr(again, name).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (draw(again, "a red apple") == draw(pipe, "a red apple")).all()


@pytest.mark.parametrize("size", [128, 256, 512])
def test_a_token_has_four_pixels_a_side(pipe, size):
    latents, ids = pipe.prepare_latents(1, 4, size, size, torch.float32, "cpu", torch.Generator())
    assert latents.shape == (1, (size // 4) ** 2, 16)
    assert ids.shape == ((size // 4) ** 2, 3)


@pytest.mark.slow
def test_held_out_captions_are_drawn(pipe):
    asked = list(itertools.islice(scenes(3, evaluation=True), 4))
    pictures = torch.from_numpy(draw(pipe, *(scene.caption for scene in asked), size=96, steps=8))
    found, _ = recognise(load_recogniser(), pictures.permute(0, 3, 1, 2))
    verdicts = [judge(detections, scene) for detections, scene in zip(found, asked, strict=True)]
    assert sum(v.objects_found for v in verdicts) >= 0.7 * sum(v.objects for v in verdicts)


LATE = {"start_percent": 0.2}
DISTILLED = {
    "built-in": HilbertA(tiles=4, slide="curve", **LATE),
    "built-in-16": HilbertA(tiles=16, slide="diagonal", **LATE),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", LORAS)
def test_a_lora_halves_the_error_of_its_method(name):
    pipe, scene = load(find("pipeline")), next(scenes(3, evaluation=True))
    picture = render(load_atlas(), Scenes.of([scene]), 192) * 2 - 1
    clean = (pipe.vae.encode(picture).latent_dist.mean - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    noisy = 0.4 * clean + 0.6 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    words, pooled, text_ids = pipe.encode_prompt(scene.caption, None, max_sequence_length=64)
    inputs = {
        "hidden_states": pipe._pack_latents(noisy, *noisy.shape),
        "timestep": torch.tensor([0.6]),
        "encoder_hidden_states": words,
        "pooled_projections": pooled,
        "txt_ids": text_ids,
        "img_ids": pipe._prepare_latent_image_ids(1, 48, 48, "cpu", words.dtype),
    }
    distilled = load_lora(pipe, find_lora(str(find(LORAS[name]))))
    assert distilled[:2] == (DISTILLED[name], (256, 256))
    dense, sparse = None, replace(distilled.method, start_percent=0.0)
    distilled = distilled._replace(method=sparse)
    velocities = []
    for method in (dense, sparse, distilled):
        with using(pipe, method):
            velocities.append(pipe.transformer(**inputs)[0])
    errors = [(velocity - velocities[0]).square().mean() for velocity in velocities]
    assert errors[2] < errors[1] / 2


@pytest.mark.slow
def test_the_pixel_model_draws_held_out_captions():
    pixels = pipelines.load_pipeline(str(find("pixel")), "cpu")
    assert pixels.config.guidance_scale == 3
    asked = list(itertools.islice(scenes(5, evaluation=True), 4))
    request = Request("", (48, 48), 4, 1.0, 0)  # guidance would take twice the time
    requests = [request._replace(prompt=scene.caption, seed=seed) for seed, scene in enumerate(asked)]
    pictures = np.stack([np.asarray(one) for one in draw_batch(pixels, requests)])
    found, _ = recognise(load_recogniser(), torch.from_numpy(pictures).permute(0, 3, 1, 2))
    verdicts = [judge(detections, scene) for detections, scene in zip(found, asked, strict=True)]
    assert sum(v.objects_found for v in verdicts) >= 0.7 * sum(v.objects for v in verdicts)


@pytest.mark.slow
def test_the_video_model_draws_held_out_captions():
    asked = list(itertools.islice(moving_scenes(5, evaluation=True), 3))
    request = Request("", (64, 64), 4, 3.0, 0, frames=9)
    requests = [request._replace(prompt=moving.scene.caption, seed=seed) for seed, moving in enumerate(asked)]
    videos = draw_batch(pipelines.load_pipeline(str(find("video")), "cpu"), requests)
    seen = [recognise(load_recogniser(), torch.from_numpy(np.stack(v)).permute(0, 3, 1, 2))[0] for v in videos]
    verdicts = [judge_video(frames, moving) for frames, moving in zip(seen, asked, strict=True)]
    assert sum(v.found for v in verdicts) >= 0.6 * sum(v.objects for v in verdicts)
    assert sum(v.moves for v in verdicts) >= 0.6 * len(verdicts)


def test_the_autoencoder_reconstructs_pictures(pipe):
    pictures = render(load_atlas(), Scenes.of(list(itertools.islice(scenes(1, evaluation=True), 4))), 128)
    with torch.no_grad():
        latents = pipe.vae.encode(pictures * 2 - 1).latent_dist.mean
        decoded = pipe.vae.decode(latents).sample / 2 + 0.5
    assert -10 * (decoded - pictures).square().mean().log10() > 33  # PSNR in dB
    normal = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    assert normal.std().item() == pytest.approx(1, abs=0.2)
