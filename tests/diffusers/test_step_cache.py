"""The step cache of a preset: it is that of diffusers, each image has its own, and it comes and goes with methods."""

import copy
import json
import math
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import tiny
import torch
from diffusers import FirstBlockCacheConfig
from tiny import call

import foveate
from foveate import HilbertA, Preset, StepCache, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.diffusers.preset import describe

pytestmark = pytest.mark.usefixtures("no_grad")

STEPS, PROMPTS = 8, ("a cat", "an owl above a castle")
ALWAYS, NEVER = StepCache(threshold=math.inf), StepCache(threshold=0)
SOMETIMES = StepCache(threshold=0.35)
METHODS = {
    "alone": (),
    "hilberta": (HilbertA(tiles=4),),
    "toma": (ToMA(keep=0.5, tile=(4, 4), skip=0, weights="hard"),),
    "both": (HilbertA(tiles=4), ToMA(keep=0.5, tile=(4, 4), skip=0, weights="hard")),
    "late": (HilbertA(tiles=4, start_percent=0.5),),
}
with_every_method = pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def pipe():
    # in single precision matrix products of several threads round differently from call to call
    pipe = untrained_pipeline(layers=1, single_layers=3, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)
    return pipe.to(torch.float64)


def preset_of(model, cache, *methods):
    return Preset(methods=methods, cache=cache, models=[describe(model)], size=(64, 64))


def image(pipe, seed=0, **options):
    """Latents of an image."""
    return pipe(
        PROMPTS[seed % 2], height=64, width=64, num_inference_steps=STEPS, output_type="latent",
        generator=torch.Generator().manual_seed(seed), max_sequence_length=64, **options,
    ).images  # fmt: skip


def applied(pipe, cache, *methods):
    return foveate.apply(pipe, preset_of(pipe.transformer, cache, *methods))


@with_every_method
def test_it_is_the_cache_of_diffusers(pipe, methods):
    with applied(pipe, SOMETIMES, *methods) as run:
        got = image(pipe)
        skipped = run.summary().skipped["transformer"]
    assert 0 < skipped < STEPS - 1
    pipe.transformer.enable_cache(FirstBlockCacheConfig(SOMETIMES.threshold))
    try:
        with foveate.apply(pipe, *methods) if methods else nullcontext():
            want = image(pipe)
    finally:
        pipe.transformer.disable_cache()
    assert torch.equal(got, want)


@with_every_method
def test_a_cache_that_never_skips_is_the_methods_alone(pipe, methods):
    with applied(pipe, NEVER, *methods) as run:
        got = image(pipe)
        assert run.summary().skipped == {"transformer": 0}
    with foveate.apply(pipe, *methods) if methods else nullcontext():
        torch.testing.assert_close(got, image(pipe))  # beside a cache, blocks merge one by one


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_steps_before_the_start_are_computed_and_each_image_begins_anew(pipe, start):
    with applied(pipe, replace(ALWAYS, start_percent=start), HilbertA(tiles=4)) as run:
        first = image(pipe, 0), image(pipe, 1)
        computed = max(1, round(start * STEPS))
        told = run.summary().to_dict()["transformer"]
        assert told["sparse_forwards"] == 2 * computed
        assert told["skipped_forwards"] == 2 * (STEPS - computed)
        if computed < STEPS:
            assert f"{2 * (STEPS - computed)} skipped by the step cache" in str(run.summary())
        assert not any(row.why for row in run.summary().layers)
    with applied(pipe, replace(ALWAYS, start_percent=start), HilbertA(tiles=4)):
        assert torch.equal(image(pipe, 1), first[1])


def test_threads_pipelines_and_nested_passes_share_no_cache(pipe):
    other = type(pipe)(**pipe.components | {"scheduler": copy.deepcopy(pipe.scheduler)})
    pipes, alone, together = (pipe, other), [], {}
    with torch.no_grad():
        embedded = [pipe.encode_prompt(prompt, None, max_sequence_length=64)[:2] for prompt in PROMPTS]

    def one(number):
        prompt, pooled = embedded[number]
        return pipes[number](
            prompt_embeds=prompt, pooled_prompt_embeds=pooled, height=64, width=64 + 32 * number, output_type="latent",
            num_inference_steps=STEPS, generator=torch.Generator().manual_seed(number),
        ).images  # fmt: skip

    for number in (0, 1):
        with applied(pipe, SOMETIMES, HilbertA(tiles=4)):
            alone.append(one(number))

    with applied(pipe, NEVER, HilbertA(tiles=4)):
        whole = one(1)

    def work(number):
        together[number] = [one(number) for _ in range(3)]

    with applied(pipe, SOMETIMES, HilbertA(tiles=4)):
        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def inside(*_):
            handle.remove()
            assert torch.equal(one(1), whole)  # steps inside of another are computed

        handle = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(inside)
        assert torch.equal(one(0), alone[0])
    for number in (0, 1):
        assert all(torch.equal(got, alone[number]) for got in together[number])


def test_own_loops_and_single_passes():
    model, x = tiny.flux(dtype=torch.float64), tiny.inputs((16, 16))
    dense = call(model, x)
    with foveate.apply(model, preset_of(model, ALWAYS)) as run:
        assert torch.equal(call(model, x), dense)
        assert torch.equal(call(model, x), dense)  # nothing tells whether it belongs to the same image
        assert run.summary().skipped["FluxTransformer2DModel"] == 0
        for _ in range(2):
            with run.image():
                for left in (1.0, 0.8, 0.6):
                    call(model, tiny.at(x, left))
        assert run.summary().skipped["FluxTransformer2DModel"] == 4
        with run.image(), run.paused():
            for left in (1.0, 0.8):
                with_methods = call(model, tiny.at(x, left))
        assert run.summary().skipped["FluxTransformer2DModel"] == 4
    assert torch.equal(with_methods, call(model, tiny.at(x, 0.8)))


def test_steps_with_a_controlnet_are_computed():
    model, x = tiny.flux(dtype=torch.float64), tiny.inputs((16, 16))
    x |= tiny.residuals(x, 1, 1)
    wanted = [call(model, tiny.at(x, left)) for left in (1.0, 0.8)]
    with foveate.apply(model, preset_of(model, ALWAYS)) as run, run.image():
        for left, want in zip((1.0, 0.8), wanted, strict=True):
            assert torch.equal(call(model, tiny.at(x, left)), want)


def test_it_goes_with_the_methods_and_an_error_changes_nothing(pipe):
    model = pipe.transformer
    before = image(pipe)
    with suppress(RuntimeError), applied(pipe, ALWAYS):
        assert model.is_cache_enabled
        raise RuntimeError
    assert not model.is_cache_enabled
    assert torch.equal(image(pipe), before)
    model.enable_cache(FirstBlockCacheConfig(0.5))
    with pytest.raises(ValueError, match="has a cache already, and the preset brings one: call disable_cache"):
        applied(pipe, ALWAYS)
    assert model.is_cache_enabled
    model.disable_cache()
    assert torch.equal(image(pipe), before)
    run = applied(pipe, ALWAYS)
    model.disable_cache()
    model.enable_cache(mine := FirstBlockCacheConfig(ALWAYS.threshold))  # another cache since apply stays
    run.remove()
    assert model._cache_config is mine
    model.disable_cache()


@pytest.mark.parametrize("name", ["zimage", "chroma", "sdxl"])
def test_models_without_one_refuse_it_with_the_remedy(name):
    model = tiny.SPARSE[name].make(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"no First Block Cache for \w+: use a preset without a step cache"):
        foveate.apply(model, preset_of(model, NEVER))
    assert foveate.diffusers.apply._applied(model)._adapters == {}
    assert not getattr(model, "is_cache_enabled", False)
    assert not any(
        getattr(module, "_diffusers_hook", None) and module._diffusers_hook.hooks for module in model.modules()
    )


def test_it_is_saved_and_loaded(pipe, tmp_path):
    preset = preset_of(pipe.transformer, StepCache(threshold=0.2, start_percent=0.1), HilbertA(tiles=4))
    preset.save(tmp_path / "preset.json")
    loaded = foveate.load(tmp_path / "preset.json")
    assert (loaded.cache, loaded.methods) == (preset.cache, preset.methods)
    assert loaded.title == "HilbertA T=4 + step cache threshold=0.2, start_percent=0.1"
    content = json.loads((tmp_path / "preset.json").read_text())
    del content["cache"]  # as version 1 wrote it
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert foveate.load(tmp_path / "old.json").cache is None


@pytest.mark.parametrize(
    "options", [{"threshold": -0.1}, {"threshold": math.nan}, {"threshold": 0.1, "start_percent": 1.5}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=r"threshold|start_percent"):
        StepCache(**options)


def test_a_preset_of_nothing_is_refused(pipe):
    with pytest.raises(ValueError, match="a preset needs a method or a step cache"):
        preset_of(pipe.transformer, None)


def test_a_window_of_steps_needs_a_pipeline():
    model = tiny.flux(dtype=torch.float32)
    with pytest.raises(ValueError, match="apply to the pipeline, not the model"):
        foveate.apply(model, preset_of(model, StepCache(threshold=0.1, start_percent=0.5)))


def test_a_deep_copy_has_a_cache_of_its_own(pipe):
    with applied(pipe, ALWAYS):
        twin = copy.deepcopy(pipe.transformer)
    foveate.remove(twin)
    assert not twin.is_cache_enabled
