"""Laws of `apply` on real diffusers pipelines, built tiny and offline."""

from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tiny
import tiny_pipelines
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from diffusers.pipelines.joyimage.image_processor import BUCKETS
from PIL import Image
from reference import reference

import foveate
from foveate import HilbertA, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.apps.web.compare import PAGE, comparison
from foveate.diffusers.apply import denoisers
from foveate.methods import ComposedMethod, ToMeSD
from foveate.pipelines.checks import check_request
from foveate.pipelines.request import Request, pixels_per_token, text_tokens, unread
from foveate.pipelines.request import draw as draw_request
from foveate.pipelines.steps import record_step, time_steps

SIZE = {"height": 64, "width": 96}  # 16 x 24 tokens
FAST = {"num_inference_steps": 4, "output_type": "latent", "max_sequence_length": 32}


@pytest.fixture(scope="module")
def pipe():
    pipeline = untrained_pipeline(layers=1, single_layers=2, heads=2, rope=(4, 4, 8))
    pipeline.transformer.double()
    pipeline.text_encoder.double()
    pipeline.text_encoder_2.double()
    pipeline.vae.double()
    return pipeline


def draw(pipeline, **options):
    seed = torch.Generator().manual_seed(0)
    return pipeline(**{"prompt": "a cat", **SIZE, **FAST, "generator": seed, **options}).images


def picture(mode="RGB"):
    return Image.effect_noise((SIZE["width"], SIZE["height"]), 50).convert(mode)


def variant(kind, pipe):
    """A pipeline of that class on the parts of `pipe`, and the arguments that it needs besides a prompt."""
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    if kind == "kontext":
        return FluxKontextPipeline(**parts), {"image": picture(), "_auto_resize": False, "max_area": 64 * 96}
    if kind == "img2img":
        parts = {name: part for name, part in parts.items() if name not in ("image_encoder", "feature_extractor")}
        return FluxImg2ImgPipeline(**parts), {"image": picture(), "strength": 0.5}
    names = ("attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim")
    config = {name: pipe.transformer.config[name] for name in (*names, "axes_dims_rope")}
    config |= {"num_layers": 1, "num_single_layers": 2}
    torch.manual_seed(0)
    if kind == "controlnet":
        control = FluxControlNetModel(in_channels=16, **config)
        for block in (*control.controlnet_blocks, *control.controlnet_single_blocks):
            torch.nn.init.normal_(block.weight, std=0.1)  # they start at zero
        return FluxControlNetPipeline(**parts, controlnet=control.double()), {"control_image": picture()}
    # fill: latents, masked latents, mask
    model = FluxTransformer2DModel(in_channels=16 + 16 + 4 * 4, out_channels=16, **config).double()
    keep = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    fill = FluxFillPipeline(**{name: parts[name] for name in keep}, transformer=model.eval())
    return fill, {"image": picture(), "mask_image": picture("L")}


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")  # diffusers' own ControlNet
@pytest.mark.parametrize("kind", ["kontext", "img2img", "controlnet", "fill"])
def test_pipelines_of_the_family_run_sparse_and_equal_dense_with_one_tile(pipe, kind):
    pipeline, options = variant(kind, pipe)
    pipeline.set_progress_bar_config(disable=True)
    want = draw(pipeline, **options)
    with foveate.apply(pipeline, HilbertA(tiles=1)):
        torch.testing.assert_close(draw(pipeline, **options), want, rtol=1e-9, atol=1e-9)
    with foveate.apply(pipeline, HilbertA(tiles=4)) as run:
        assert (draw(pipeline, **options) - want).abs().max() > 1e-6
        rows = run.summary().layers
    assert all(row.method == "HilbertA T=4" for row in rows)
    assert torch.equal(draw(pipeline, **options), want)
    assert all((row.true < 0.5) == (kind == "kontext") for row in rows)  # global references leave less to leave out


@pytest.mark.parametrize("guidance", [{}, {"true_cfg_scale": 2.0, "negative_prompt": "a dog"}], ids=["plain", "cfg"])
@pytest.mark.parametrize(
    ("window", "sparse"),
    [
        ({}, [True] * 4),
        ({"start_percent": 0.5}, [False, False, True, True]),
        ({"end_percent": 0.25}, [True, True, False, False]),
        ({"start_percent": 0.25, "end_percent": 0.6}, [False, True, True, False]),
    ],
)
def test_steps_inside_the_window_are_sparse_however_many_calls_a_step_takes(pipe, guidance, window, sparse):
    seen = []

    def look(_pipe, step, _time, tensors):
        seen.append(bool(run.plans()))
        return tensors

    with foveate.apply(pipe, HilbertA(tiles=4, **window)) as run:
        draw(pipe, callback_on_step_end=look, **guidance)
        assert seen == sparse
        draw(pipe, callback_on_step_end=look, **guidance)  # a second run starts anew
        assert run.summary().outcomes["transformer"].total() == 8 * (1 + len(guidance) // 2)
        text = " ".join(str(run.summary()).split())
    assert seen == sparse * 2
    assert ("outside start_percent" in text) == (False in sparse)


def test_a_window_is_of_the_whole_schedule_when_a_run_starts_in_the_middle(pipe):
    pipeline, options = variant("img2img", pipe)
    pipeline.set_progress_bar_config(disable=True)
    seen = []

    def look(_pipe, step, _time, tensors):
        seen.append(bool(run.plans()))
        return tensors

    with foveate.apply(pipeline, HilbertA(tiles=4, start_percent=0.7)) as run:
        draw(pipeline, callback_on_step_end=look, **options)
    assert seen == [False, True]  # strength 0.5 of 4 steps: steps 2 and 3


@pytest.fixture
def plans(monkeypatch):
    """The plans of ToMA that are made, and whether each picks new destinations."""
    made, make = [], ToMA.plan

    def plan(method, features, regions, destinations=None):
        made.append((make(method, features, regions, destinations), destinations is None))
        return made[-1][0]

    monkeypatch.setattr(ToMA, "plan", plan)
    return made


@pytest.mark.parametrize("guidance", [{}, {"true_cfg_scale": 2.0, "negative_prompt": "a dog"}], ids=["plain", "cfg"])
def test_each_pass_of_a_step_has_plans_of_its_own_for_the_whole_run(pipe, guidance, plans):
    each = 2 * (2 if guidance else 1)  # double-stream and single-stream blocks, in one or two passes
    with foveate.apply(pipe, ToMA(skip=0)):
        first = draw(pipe, num_inference_steps=12, **guidance)
        assert [new for _, new in plans] == [new for new in (True, False, True) for _ in range(each)]  # 0, 5 and 10
        plans.clear()
        assert torch.equal(draw(pipe, num_inference_steps=12, **guidance), first)  # another run begins anew
        assert len(plans) == 3 * each
        plans.clear()
        for _ in range(2):
            draw(pipe, num_inference_steps=1, **guidance)
        assert [new for _, new in plans] == 2 * each * [True]
    plans.clear()
    dense = draw(pipe, num_inference_steps=3, **guidance)
    with foveate.apply(pipe, ToMA(skip=0, merge_every=3, dst_every=1, weights_every=1)):
        assert not torch.equal(draw(pipe, num_inference_steps=3, **guidance), dense)
        assert len(plans) == each
        draw(pipe, num_inference_steps=4, **guidance)
        assert len(plans) == 3 * each


def test_size_and_prompt_length_may_change_from_call_to_call(pipe):
    with foveate.apply(pipe, HilbertA(tiles=4)):
        wide = draw(pipe)
        draw(pipe, height=96, width=64, max_sequence_length=16)
        assert torch.equal(draw(pipe), wide)
        draw(pipe, height=48, width=64, num_images_per_prompt=2)


def test_pipelines_that_share_a_model_share_its_methods(pipe):
    other = FluxImg2ImgPipeline.from_pipe(pipe)
    with foveate.apply(pipe, HilbertA(tiles=4)):
        assert len(foveate.summary(other).layers) == 3
        with pytest.raises(ValueError, match="already applied to transformer"):
            foveate.apply(other, HilbertA())


@pytest.mark.usefixtures("as_a_user")
def test_text_is_padded_as_the_pipeline_does_unless_its_tokenizer_holds_less(pipe):
    def sized(tokens):
        return SimpleNamespace(model_max_length=tokens)

    def signed(default, **tokenizers):
        return type("Pipeline", (), {"__call__": lambda self, max_sequence_length=default: None} | tokenizers)()

    assert text_tokens(signed(512, tokenizer=sized(77), tokenizer_2=sized(512))) == 512  # FLUX
    assert text_tokens(signed(256, tokenizer=sized(77), tokenizer_2=sized(77), tokenizer_3=sized(512))) == 256  # SD3
    assert text_tokens(signed(120, tokenizer=sized(512))) == 120  # PixArt
    assert text_tokens(signed(256, tokenizer=sized(8192), tokenizer_2=sized(77))) == 256  # HunyuanVideo
    assert text_tokens(signed(512, tokenizer=SimpleNamespace(tokenizer=sized(4096)))) == 512  # FLUX.2: a processor
    assert text_tokens(pipe) == pipe.tokenizer_2.model_max_length < 512
    assert text_tokens(type("SDXL", (), {"__call__": lambda self: None})()) is None


def test_the_end_of_a_prompt_that_nobody_reads_is_named(pipe):
    prompt = " ".join(20 * ["a red apple above a blue car"])
    ids = pipe.tokenizer_2(prompt, truncation=True, max_length=text_tokens(pipe)).input_ids
    read = pipe.tokenizer_2.decode(ids, skip_special_tokens=True)
    assert f"{read} {unread(pipe, prompt)}" == prompt
    assert unread(pipe, "a red apple above a blue car") == ""


# --- Z-Image ---


@pytest.mark.parametrize("guidance", [0.0, 4.0])
def test_z_image_draws_from_a_prompt_with_both_methods(guidance):
    pipe = tiny.z_image_pipeline()

    def run(*methods, prompt="w1 w2 w3"):
        size = {"height": 32, "width": 48, "num_inference_steps": 4, "max_sequence_length": 64}
        with foveate.apply(pipe, *methods) if methods else nullcontext() as handle:
            seed = torch.Generator().manual_seed(0)
            images = pipe(prompt, guidance_scale=guidance, generator=seed, output_type="pt", **size).images
            return images, handle and handle.summary()

    dense, _ = run()
    assert dense.shape == (1, 3, 32, 48)
    torch.testing.assert_close(run(HilbertA(tiles=1))[0], dense, rtol=1e-3, atol=1e-3)
    picture, summary = run(*(methods := (HilbertA(tiles=4), ToMA(skip=0, tile=(4, 4)))))
    assert (picture - dense).abs().max() > 1e-4
    assert summary.outcomes["transformer"] == {"": 4}
    assert all(row.method.startswith("HilbertA T=4 + ToMA") for row in summary.layers)
    assert torch.equal(run()[0], dense)
    _, summary = run(*methods, prompt=" ".join(40 * ["w4"]))  # more than 32 tokens; the empty prompt has one
    assert summary.outcomes["transformer"] == {"": 4}


# --- Stable Diffusion ---


@pytest.fixture
def stable_diffusion():
    return tiny.stable_diffusion()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of the scheduler
def test_a_unet_with_guidance_runs_sparse_in_a_part_of_the_run(stable_diffusion):
    pipe = stable_diffusion
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)  # tells the step
    options = {"height": 16, "width": 24, "num_inference_steps": 4, "output_type": "latent"}

    def run(*methods):
        with foveate.apply(pipe, *methods) if methods else nullcontext() as handle:
            latents = pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images
            return latents, handle and handle.summary().outcomes["unet"][""]

    dense, _ = run()
    sparse, steps = run(method := HilbertA(tiles=4, align=1))
    assert steps == 4
    assert torch.equal(run()[0], dense)
    own = pipe.unet.forward

    def forward(*args, **kwargs):
        with reference(tiny.FAMILIES["sd15"], method, (16, 24)):
            return own(*args, **kwargs)

    with mock.patch.object(pipe.unet, "forward", forward):
        torch.testing.assert_close(run()[0], sparse, rtol=1e-3, atol=1e-3)
    half, steps = run(HilbertA(tiles=4, align=1, end_percent=0.25))
    assert steps == 2
    assert all((half - other).abs().max() > 1e-4 for other in (dense, sparse))


def test_a_unet_plans_once_per_section_and_period(stable_diffusion, plans):
    size = {"height": 16, "width": 24, "num_inference_steps": 6, "output_type": "latent"}
    with foveate.apply(stable_diffusion, ToMA(tile=(4, 4), dst_every=5)) as run:
        stable_diffusion("a cat", generator=torch.Generator().manual_seed(0), **size)
        assert run.summary().outcomes["unet"] == {"": 6}
    sections = 3  # down, middle, up
    assert len(plans) == 2 * sections  # steps 0 and 5
    assert all(len(merge.positions) == 2 for merge, _ in plans)  # the samples of a guidance pair


def test_a_comparison_leaves_out_what_cannot_be_applied(stable_diffusion, tmp_path):
    request, both = Request("a cat", (16, 16), 2, None, 0), ComposedMethod((ToMeSD(), ToMA()))
    comparison(stable_diffusion, request, [both, ToMA(tile=(4, 4))], tmp_path, settings={}, rounds=1)
    why = "choose one method of sparse attention, one of token merging, or both"
    assert f"ToMeSD keep=0.5 + ToMA keep=0.5 is left out: {why}" in (tmp_path / PAGE).read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"dense.png", "toma-keep-0-5-tile-4-4.png"}
    with pytest.raises(ValueError, match=why):
        comparison(stable_diffusion, request, [both], tmp_path, settings={})


# --- models of today, from prompt to image or video ---

FIRST = (Path(__file__).parents[1] / "unchanged" / "dense-96x160.png",)
TODAY = {
    "flux2": (HilbertA(tiles=4), {}),
    "klein": (HilbertA(tiles=4), {}),
    "klein_kv": (HilbertA(tiles=4), {"images": FIRST}),
    "qwen": (HilbertA(tiles=4), {"guidance": 3.0, "negative": "a red apple above a blue car"}),
    "wan": (HilbertA(tiles=2, align=1), {"frames": 9, "negative": "a dog"}),
    "hunyuan_video": (HilbertA(tiles=2, align=1), {"frames": 9, "guidance": 3.0, "negative": "a dog"}),
    "ltx": (HilbertA(tiles=2, align=1), {"frames": 9, "fps": 8, "negative": "a dog"}),
    "bria": (HilbertA(tiles=2), {"negative": "a dog"}),
    "skyreels": (HilbertA(tiles=2, align=1), {"frames": 9, "negative": "a dog"}),
    "chronoedit": (HilbertA(tiles=2, align=1), {"size": (96, 128), "frames": 5, "images": FIRST}),
    "joyimage": (HilbertA(tiles=2, align=1), {"size": (128, 192), "negative": "a dog", "images": FIRST}),
}
"""A method for each pipeline and what is requested besides an image of 64 x 96 px."""


@pytest.fixture(scope="module")
def today():
    made = {}
    with mock.patch.dict(BUCKETS, {1024: [(128, 192)]}):  # JoyImage generates a million pixels
        yield lambda name, **options: made.setdefault((name, *options), getattr(tiny_pipelines, name)(**options))


def request(name, **changes):
    return Request("a cat", (64, 96), 2, None, 0)._replace(**TODAY[name][1])._replace(**changes)


def numbers(frames):
    return np.stack([np.asarray(frame) for frame in frames]).astype(int)


@contextmanager
def calls(pipe):
    """The arguments of every call of a denoiser."""
    seen = []
    with ExitStack() as hooks:
        for model in denoisers(pipe).values():
            look = model.register_forward_pre_hook(lambda _model, _args, more: seen.append(more), with_kwargs=True)
            hooks.callback(look.remove)
        yield seen


@pytest.mark.parametrize("name", TODAY)
def test_a_prompt_becomes_a_picture_or_video_dense_and_sparse(today, name):
    pipe, asked, steps = today(name), request(name), []
    check_request(pipe, asked)
    dense = numbers(draw_request(pipe, asked, lambda: steps.append(1)))
    assert dense.shape == (asked.frames or 1, *asked.size, 3)
    assert dense.std() > 5
    assert len(steps) == asked.steps
    with foveate.apply(pipe, HilbertA(tiles=1)):
        assert np.abs(numbers(draw_request(pipe, asked)) - dense).max() <= 1
    with foveate.apply(pipe, method := TODAY[name][0]) as run:
        assert (numbers(draw_request(pipe, asked)) != dense).any()
        assert all(row.method == method.title for row in run.summary().layers)
    assert (numbers(draw_request(pipe, asked)) == dense).all()


def test_chroma_runs_sparse_with_boolean_masks_of_the_text(today):
    pipe, options = today("chroma"), {"height": 64, "width": 96, "num_inference_steps": 2}
    text, _, mask, negative, _, negative_mask = pipe.encode_prompt("a cat", "a dog", max_sequence_length=32)
    options |= {"prompt_embeds": text, "prompt_attention_mask": mask.bool()}
    options |= {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask.bool()}

    def drawn():
        return numbers(pipe(generator=torch.Generator().manual_seed(0), **options).images)

    dense = drawn()
    with foveate.apply(pipe, HilbertA(tiles=1)):
        assert np.abs(drawn() - dense).max() <= 1
    with foveate.apply(pipe, HilbertA(tiles=4)) as run:
        assert (drawn() != dense).any()
        assert all(row.method == "HilbertA T=4" for row in run.summary().layers)


def test_guidance_of_qwen_image_takes_a_negative_prompt_even_if_none_is_given(today):
    pipe = today("qwen")
    guided = request("qwen", guidance=3.0, negative=None)
    options = {"negative_prompt": " ", "true_cfg_scale": 3.0, "height": 64, "width": 96, "num_inference_steps": 2}
    want = pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images
    with calls(pipe) as seen:
        assert (numbers(draw_request(pipe, guided)) == numbers(want)).all()
        assert len(seen) == 2 * guided.steps
        seen.clear()
        draw_request(pipe, request("qwen"))  # the negative prompt is longer than the prompt
        assert len({one["encoder_hidden_states"].shape[1] for one in seen}) == 2
        seen.clear()
        draw_request(pipe, request("qwen", guidance=None, negative=None))
        assert len(seen) == guided.steps


def test_a_negative_prompt_of_flux_is_for_true_guidance(today):
    plain, pipe = Request("a cat", (64, 96), 2, None, 0), tiny.pipeline()
    with calls(pipe) as seen:
        draw_request(pipe, plain._replace(negative="a dog", guidance=2.0))
        assert len(seen) == 4
    with calls(today("klein")) as seen:
        draw_request(today("klein"), plain._replace(guidance=2.0))
        draw_request(today("klein"), plain._replace(guidance=1.0))
        assert len(seen) == 4 + 2


def refuses(pipe, asked, message):
    with pytest.raises(ValueError, match=message):
        check_request(pipe, asked)


def test_what_a_pipeline_would_ignore_is_refused_with_a_remedy(pipe, today, tmp_path):
    picture().save(tmp_path / "first.png")
    flux, first = Request("a cat", (64, 96), 2, None, 0), (tmp_path / "first.png",)
    refuses(pipe, flux._replace(frames=5), "generates images: leave frames and fps out, or name a video model")
    refuses(pipe, flux._replace(fps=8), "generates images: leave frames and fps out")
    refuses(
        pipe,
        flux._replace(guidance=3.0),
        r"no guidance scale \(3.0\): leave the guidance out, or add a negative prompt",
    )
    refuses(pipe, flux._replace(negative="a dog"), "no effect with a guidance scale of 1.0: use one above 1")
    refuses(pipe, flux._replace(images=first), "FluxPipeline takes no images: leave them out")
    refuses(
        today("flux2"),
        flux._replace(negative="a dog"),
        "Flux2Pipeline takes no negative prompt: leave the negative prompt out",
    )
    refuses(today("flux2"), flux._replace(guidance=3.0), "no guidance scale .* leave the guidance out$")
    distilled = tiny_pipelines.klein()
    distilled.register_to_config(is_distilled=True)
    refuses(distilled, flux._replace(guidance=3.0), "no guidance scale")
    refuses(today("wan", image=True), request("wan"), "starts from an image: name its file")
    refuses(today("wan", image=True), request("wan", images=2 * first), "takes one image, not 2")
    broken = request("wan", images=(Path("nowhere.png"),))
    refuses(today("wan", image=True), broken, "cannot read the image nowhere.png: name a PNG or JPEG file")
    check_request(today("flux2"), flux._replace(images=2 * first))
    refuses(today("chronoedit"), request("chronoedit", frames=9), "always generates 5 frames: leave frames out")
    wide = request("joyimage", size=(64, 96))
    refuses(today("joyimage"), wide, "generates 192x128 px, not 96x64: use 192x128")


@pytest.mark.parametrize(
    ("size", "frames", "message"),
    [
        ((32, 48), 6, "6 frames do not fit: .* packs 4 frames into one; use a multiple of 4 plus 1, for example 5"),
        ((32, 48), 8, "for example 9"),
        ((32, 40), 5, "packs 16 x 16 px into a token; use multiples of 16, for example 32x32"),
        ((8192, 8192), 81, "5,505,024 tokens, more than 1,048,576: use a smaller size or fewer frames"),
    ],
)
def test_the_nearest_size_and_number_of_frames_is_named(today, size, frames, message):
    refuses(today("wan"), request("wan", size=size, frames=frames), message)


@pytest.mark.parametrize(
    ("parts", "pixels", "frames"),
    [
        ({"vae_scale_factor_spatial": 8, "vae_scale_factor_temporal": 4, "patch": (1, 2, 2)}, 16, 4),  # Wan 2.1
        ({"vae_scale_factor_spatial": 16, "vae_scale_factor_temporal": 4, "patch": 1}, 16, 4),  # HunyuanVideo 1.5
        ({"vae_spatial_compression_ratio": 32, "vae_temporal_compression_ratio": 8, "patch": 1}, 32, 8),  # LTX
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_multiples_are_those_of_the_model(parts, pixels, frames):
    config = SimpleNamespace(patch_size=parts.pop("patch"))
    call = {"__call__": lambda self, prompt, height, width, num_frames=None: None, "config": {}}
    pipe = type("Pipeline", (), call | parts | {"transformer": SimpleNamespace(config=config)})()
    assert pixels_per_token(pipe) == pixels
    check_request(pipe, Request("", (pixels, 3 * pixels), 1, None, 0, frames=2 * frames + 1))
    refuses(pipe, Request("", (pixels, 3 * pixels), 1, None, 0, frames=2 * frames), f"example {2 * frames + 1}")


def test_reference_images_reach_the_model(today, tmp_path):
    picture().save(tmp_path / "one.png")
    files = (tmp_path / "one.png",)
    for number in range(3):
        with calls(today("flux2")) as seen:
            draw_request(today("flux2"), request("flux2", images=number * files, steps=1))
        assert seen[0]["hidden_states"].shape[1] == (1 + number) * 16 * 24
    with calls(today("wan", image=True)) as seen:
        check_request(today("wan", image=True), request("wan", images=files))
        draw_request(today("wan", image=True), request("wan", images=files))
    assert seen[0]["hidden_states"].shape[1] == 4 + 4 + 4  # latents, mask, first frame


def test_both_experts_of_wan_draw(today):
    pipe = today("wan", experts=2)
    assert list(denoisers(pipe)) == ["transformer", "transformer_2"]
    with calls(pipe) as seen:
        assert numbers(draw_request(pipe, request("wan", steps=4))).shape == (9, 64, 96, 3)
    assert len(seen) == 2 * 4


def test_a_step_of_a_video_is_recorded_and_timed(today):
    pipe, asked = today("wan"), request("wan")
    before = numbers(draw_request(pipe, asked))
    step = record_step(pipe, asked)
    assert step.kwargs["hidden_states"].shape == (1, 4, 3, 8, 12)
    assert len(list(time_steps(pipe, step, [TODAY["wan"][0]], rounds=2))) == 2
    assert (numbers(draw_request(pipe, asked)) == before).all()
