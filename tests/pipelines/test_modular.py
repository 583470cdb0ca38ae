"""Modular pipelines generate with methods what pipelines with the same parts do."""

from types import SimpleNamespace

import pytest
import tiny
import tiny_pipelines
import torch
from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    MiniMaxH3Scheduler,
    modular_pipelines,
)
from diffusers.modular_pipelines.flux3 import modular_blocks_flux3 as flux3_blocks
from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3 as minimax_h3
from diffusers.modular_pipelines.modular_pipeline import PipelineState

import foveate
from foveate import HilbertA, ToMA

pytestmark = pytest.mark.usefixtures("no_grad")
LATE = HilbertA(tiles=2, start_percent=0.5)
IMAGE = {"prompt": "a cat", "height": 64, "width": 96, "num_inference_steps": 2, "max_sequence_length": 32}
VIDEO = {**IMAGE, "negative_prompt": "a dog", "height": 96, "width": 128, "num_frames": 5}


def sparse_passes(run):
    return sum(counts[""] for counts in run.summary().outcomes.values())


# The pipeline, the blocks, arguments of both, guidance of the pipeline, and whether tokens merge
CASES = {
    "flux": (tiny.pipeline, "FluxAutoBlocks", IMAGE, {}, True),
    "flux2": (tiny_pipelines.flux2, "Flux2AutoBlocks", IMAGE, {}, True),
    "klein": (tiny_pipelines.klein, "Flux2KleinBaseAutoBlocks", IMAGE, {"guidance_scale": 4.0}, True),
    "qwen": (tiny_pipelines.qwen, "QwenImageAutoBlocks", {**IMAGE, "negative_prompt": "a dog"},
             {"true_cfg_scale": 4.0}, True),
    "wan 2.2": (lambda: tiny_pipelines.wan(2), "Wan22Blocks", VIDEO, {"guidance_scale": 5.0}, True),
    "ltx": (tiny_pipelines.ltx, "LTXAutoBlocks", VIDEO, {"guidance_scale": 3.0}, False),
}  # fmt: skip


def modular(blocks, pipe, scale):
    """A modular pipeline of these parts, with guidance of that scale."""
    pipeline = getattr(modular_pipelines, blocks)().init_pipeline()
    guidance = ClassifierFreeGuidance(scale)
    more = {"guider": guidance, "guider_2": guidance, "boundary_ratio": pipe.config.get("boundary_ratio")}
    parts = pipe.components | more
    known = {*pipeline._component_specs, *pipeline._config_specs}
    pipeline.update_components(**{name: part for name, part in parts.items() if part is not None and name in known})
    return pipeline


@pytest.mark.parametrize("name", CASES)
def test_pipelines_and_modular_pipelines_of_the_same_parts_generate_the_same(name):
    make, blocks, options, guidance, merges = CASES[name]
    pipe = make()
    twin = modular(blocks, pipe, next(iter(guidance.values()), 1.0))
    video = options is VIDEO

    def generate(target):
        seed, more = torch.Generator().manual_seed(0), {"output": "videos" if video else "images"}
        out = target(**options, generator=seed, output_type="pt", **(more if target is twin else guidance))
        out = out if target is twin else out.frames if video else out.images
        return torch.stack([*out])

    dense, found = [generate(target) for target in (pipe, twin)], []
    for target, want in zip((pipe, twin), dense, strict=True):
        with foveate.apply(target, LATE, *[ToMA(keep=0.5, skip=0, tile=(4, 4), start_percent=0.5)] * merges) as run:
            found.append(generate(target))
            shares = [counts[""] / sum(counts.values()) for counts in run.summary().outcomes.values() if counts]
        assert (found[-1] - want).abs().max() > 1e-4
        assert sum(shares) / len(shares) == 0.5
        assert torch.equal(generate(target), want)
    for pair in (dense, found):  # the prompts of guidance of LTX run as one batch, or one by one
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5 if name == "ltx" else 0)


def without(pipe):
    """The pipeline without its denoiser, as those that only encode prompts."""
    pipe.register_modules(transformer=None)
    return pipe


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        (lambda: modular_pipelines.FluxAutoBlocks().init_pipeline(), "has not loaded its transformer: call load_comp"),
        (lambda: modular_pipelines.Wan22Blocks().init_pipeline(), "has not loaded its transformer and transformer_2"),
        (lambda: without(tiny.pipeline()), "its transformer: call from_pretrained"),
        (modular_pipelines.FluxAutoBlocks, "FluxAutoBlocks are blocks of a modular pipeline: pass the pipeline that"),
        (lambda: [modular_pipelines.FluxAutoBlocks()], "pass a diffusers pipeline with a denoiser"),
    ],
    ids=["empty", "experts", "without", "blocks", "list"],
)
def test_what_has_no_denoiser_is_refused_with_the_remedy(target, remedy):
    target = target()
    for call in (lambda: foveate.apply(target, LATE), lambda: foveate.summary(target), lambda: foveate.remove(target)):
        with pytest.raises(ValueError, match=remedy):
            call()


def h3(reference=False):
    """The blocks of MiniMax-H3 that denoise, their pipeline, and its arguments for 4 steps of 37 x 4 x 4 tokens."""
    blocks = (minimax_h3.MiniMaxH3Ref2VACoreDenoiseStep if reference else minimax_h3.MiniMaxH3CoreDenoiseStep)()
    pipe = blocks.init_pipeline()
    model = tiny.minimax_h3(torch.float32, in_channels=24, audio_in_channels=32)
    pipe.update_components(
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **{"transformer_ref" if reference else "transformer": model},
    )
    torch.manual_seed(0)
    given = {"prompt_embeds": torch.randn(1, 9, 16), "text_token_tags": torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1])}
    given |= {"height": 128, "width": 128, "num_frames": 124, "num_inference_steps": 5}
    if reference:
        given |= {
            "normalized_references": [SimpleNamespace(kind="image")],
            "condition_latents": [torch.randn(1, 24, 1, 8, 8)],
        }
        given |= {"audio_condition_latents": []}
    return blocks, pipe, given


def flux3(reference=False):
    """The blocks of FLUX.3 that denoise, their pipeline, and its arguments for 4 steps of 16 x 24 tokens."""
    blocks = flux3_blocks.Flux3AutoCoreDenoiseStep()
    pipe = blocks.init_pipeline()
    pipe.update_components(
        transformer=tiny.flux3(torch.float32, in_channels=16, cond_in_channels=16),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        guider=ClassifierFreeGuidance(1.0),
    )
    torch.manual_seed(0)
    given = {"prompt_embeds": torch.randn(1, 9, 32), "height": 256, "width": 384, "num_inference_steps": 4}
    return blocks, pipe, given | ({"image_cond_latents": [torch.randn(1, 16, 8, 12)]} if reference else {})


@pytest.mark.parametrize("parts", [h3, flux3])
@pytest.mark.parametrize("reference", [False, True])
def test_models_without_another_pipeline_generate_in_their_own_and_in_its_blocks_alone(parts, reference):
    blocks, pipe, given = parts(reference)

    def generate(run_blocks=False):
        seed = torch.Generator().manual_seed(0)
        if not run_blocks:
            return pipe(**given, generator=seed, output="latents")
        state = PipelineState()
        for name, value in (given | {"generator": seed}).items():
            state.set(name, value)
        return blocks(pipe, state)[1].get("latents")

    dense = generate()
    with foveate.apply(pipe, HilbertA(tiles=1)):
        torch.testing.assert_close(generate(), dense)
    for methods in ((LATE,), (LATE, ToMA(keep=0.5, skip=0, tile=(4, 4), start_percent=0.5))):
        with foveate.apply(pipe, *methods) as run:
            sparse = generate()
            assert sparse_passes(run) == 2
            assert torch.equal(generate(run_blocks=True), sparse)
            assert sparse_passes(run) == 4
        assert (sparse - dense).abs().max() > 1e-3
    assert torch.equal(generate(), dense)


def test_a_loop_over_the_timesteps_of_minimax_h3_is_told_by_its_scheduler():
    _, pipe, _ = h3()
    pipe.scheduler.set_timesteps(5)
    model, x = pipe.transformer, tiny.minimax_h3_inputs(37, 4, 4, dtype=torch.float32)
    x |= {"hidden_states": torch.randn(1, 592, 96), "audio_hidden_states": torch.randn(1, 6, 32)}
    with foveate.apply(pipe, LATE) as run:
        for t in pipe.scheduler.timesteps:
            model(**x | {"timestep": x["timestep"].masked_fill(x["timestep"] == 0.5, t)})
            pipe.scheduler.step(torch.zeros(1), t, torch.zeros(1))
        assert sparse_passes(run) == 2
