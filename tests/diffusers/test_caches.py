"""Step caches of diffusers and cache-dit beside the methods: none, some or all blocks skipped."""

from contextlib import nullcontext
from functools import cache

import cache_dit
import pytest
import tiny
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import SeaCacheConfig, TextKVCacheConfig
from tiny import built, call

import foveate
from foveate import HilbertA, ToMA

pytestmark = pytest.mark.usefixtures("no_grad")

STEPS, SIZE = 6, {"height": 64, "width": 96}
NOW = {}
TIME = {"current_timestep_callback": lambda: 1000 * NOW["sigma"], "spatial_attention_timestep_skip_range": (-1, 700)}
FASTER = {"is_guidance_distilled": True,
          "attention_weight_callback": lambda module: 0.5, "tensor_format": "BCHW", **TIME}  # fmt: skip
MAG = {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS, "retention_ratio": 0.1}
BLOCKS = ["^(single_)?transformer_blocks\\.[0-9]+$"]
CACHES = {  # a configuration that skips nothing, one that skips, and the family
    "first-block": (FirstBlockCacheConfig(-1.0), FirstBlockCacheConfig(1e9), "flux"),
    "mag": (MagCacheConfig(-1.0, **MAG), MagCacheConfig(1.0, max_skip_steps=2, **MAG), "flux"),
    "taylor-seer": (TaylorSeerCacheConfig(1), TaylorSeerCacheConfig(3, 1, taylor_factors_dtype=torch.float32), "flux"),
    "taylor-seer-blocks": (
        TaylorSeerCacheConfig(1, cache_identifiers=BLOCKS),
        TaylorSeerCacheConfig(3, 1, taylor_factors_dtype=torch.float32, cache_identifiers=BLOCKS), "flux",
    ),
    "faster": (FasterCacheConfig(1, **FASTER), FasterCacheConfig(2, **FASTER), "flux"),
    "pyramid": (PyramidAttentionBroadcastConfig(1, **TIME), PyramidAttentionBroadcastConfig(2, **TIME), "flux"),
    "sea": (SeaCacheConfig(0.0), SeaCacheConfig(1e9, max_consecutive_cached=2), "wan"),
    "first-block-wan": (FirstBlockCacheConfig(-1.0), FirstBlockCacheConfig(1e9), "wan"),
    "text-kv": (None, TextKVCacheConfig(), "qwen"),
    "pyramid-wan": (PyramidAttentionBroadcastConfig(1, **TIME), PyramidAttentionBroadcastConfig(2, **TIME), "wan"),
}  # fmt: skip
MERGING = {"keep": 0.5, "tile": (4, 4), "weights": "hard", "skip": 1, "dst_every": 2, "weights_every": 2}
METHODS = {
    "hilberta": ((HilbertA(tiles=4),), (HilbertA(tiles=1),)),
    "toma-block": ((ToMA(**MERGING),), (ToMA(**MERGING | {"keep": 1.0}),)),
    "toma-module": (
        (ToMA(granularity="module", **MERGING),),
        (ToMA(granularity="module", **MERGING | {"keep": 1.0}),),
    ),
    "both": (
        (HilbertA(tiles=4, slide="curve"), ToMA(**MERGING)),
        (HilbertA(tiles=1), ToMA(**MERGING | {"keep": 1.0})),
    ),
}
ATTENTION_CACHES = "taylor-seer", "faster", "pyramid", "pyramid-wan"
every_method = pytest.mark.parametrize("method", METHODS)
each_cache_and_method = pytest.mark.parametrize(  # which is enabled first alternates
    ("cache", "method", "cache_first"),
    [(c, m, (i + j) % 2 == 0) for i, c in enumerate(CACHES) for j, m in enumerate(METHODS)],
)
either_first = pytest.mark.parametrize("cache_first", [True, False])


def model_of(name):
    torch.manual_seed(0)
    model, x = built(name, {"flux": (16, 16), "wan": (2, 16, 16), "qwen": (16, 16)}[name], 1, dtype=torch.float32)
    # First Block Cache of diffusers adds the residuals of a ControlNet once more
    return model, {name: value for name, value in x.items() if "controlnet" not in name}


def generate(model, x, run=None, steps=STEPS):
    """The latents after each step of a run."""
    latents, found = x["hidden_states"], []
    with run.image() if run else nullcontext():
        for step in range(steps):
            sigma = NOW["sigma"] = 1 - step / steps
            context = {"step_index": step, "num_inference_steps": steps, "sigma": sigma}
            with model.cache_context("cond", **context):
                out = call(model, tiny.at(x, sigma) | {"hidden_states": latents})
            latents = latents - out.view(latents.shape) / steps
            found.append(latents)
    return torch.stack(found)


def with_both(cache, method, cache_first, make=model_of):
    """The latents of a run beside a cache, and what the summary says."""
    model, x = make(cache[-1])
    if cache_first and cache[0] is not None:
        model.enable_cache(cache[0])
    with foveate.apply(model, *method) if method else nullcontext() as run:
        if not cache_first and cache[0] is not None:
            model.enable_cache(cache[0])
        found = generate(model, x, run)
        return found, run and run.summary()


def merges_inside(cache, method):
    """Whether the cache is around modules that the method would give merged tokens."""
    around_attention = method == "toma-module" and cache == "pyramid-wan"  # FLUX merges from norm to linear layer
    return cache in ATTENTION_CACHES and method != "hilberta" and not around_attention


@each_cache_and_method
def test_a_cache_that_skips_nothing_changes_nothing(cache, method, cache_first):
    never, _, family = CACHES[cache]
    methods = METHODS[method][0]
    got, summary = with_both((never, family), methods, cache_first)
    if merges_inside(cache, method):
        methods = methods[:-1]  # without ToMA
        whys = {row.why for row in summary.layers if "ToMA" not in row.method}
        assert methods or all("a cache inside of merged blocks" in why or "first blocks" in why for why in whys)
    want, _ = with_both((None, family), methods, True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@each_cache_and_method
def test_a_dense_setting_leaves_the_cache_alone(cache, method, cache_first):
    _, skips, family = CACHES[cache]
    want, _ = with_both((skips, family), (), True)
    got, _ = with_both((skips, family), METHODS[method][1], cache_first)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@every_method
@either_first
def test_first_block_cache_adds_the_residual_of_the_first_step(method, cache_first):
    got, summary = with_both((FirstBlockCacheConfig(1e9), "flux"), METHODS[method][0], cache_first)
    assert all(row.method != "dense" or "first blocks" in row.why for row in summary.layers)
    model, x = model_of("flux")
    head, tail, kept = model.transformer_blocks[0], model.single_transformer_blocks[-1], {}

    def keep_head(block, args, output):
        kept["head"] = output

    def reuse(block, args, output):
        if "residual" not in kept:
            kept["residual"] = [after - before for after, before in zip(output, kept["head"], strict=True)]
        return tuple(before + change for before, change in zip(kept["head"], kept["residual"], strict=True))

    head.register_forward_hook(keep_head)
    tail.register_forward_hook(reuse)
    with foveate.apply(model, *METHODS[method][0]) as run:
        torch.testing.assert_close(generate(model, x, run), got, rtol=1e-4, atol=1e-5)


def test_hooks_around_blocks_see_whole_tokens():
    """Between the blocks of a run they would be given merged ones, and a cache of blocks would keep these."""
    model, x = model_of("flux")
    tokens, seen = x["hidden_states"].shape[1], set()
    with foveate.apply(model, *METHODS["toma-block"][0]):
        want = call(model, x)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.register_forward_hook(lambda block, args, output: seen.add(output[1].shape[1]))
        torch.testing.assert_close(call(model, x), want, rtol=1e-5, atol=1e-6)
    assert seen == {tokens}


# --- cache-dit, which calls the blocks in place of the model ---


@cache
def with_cache_dit(method, threshold, cache_first=True):
    """The latents of a pipeline beside cache-dit, and what it generates after both are removed."""
    torch.manual_seed(0)
    pipe = tiny.untrained_pipeline(layers=6, single_layers=6, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)
    pipe.set_progress_bar_config(disable=True)
    config = cache_dit.DBCacheConfig(
        residual_diff_threshold=threshold or 0, max_warmup_steps=2, Fn_compute_blocks=2, Bn_compute_blocks=1
    )

    def image():
        generator = torch.Generator().manual_seed(0)
        return pipe("x", **SIZE, num_inference_steps=STEPS, output_type="latent", generator=generator).images

    def cache():
        if threshold is not None:
            cache_dit.enable_cache(pipe, cache_config=config)

    if cache_first:
        cache()
    with foveate.apply(pipe, *method) if method else nullcontext():
        if not cache_first:
            cache()
        found = image()
    if threshold is not None:
        cache_dit.disable_cache(pipe)
    return found, image()


@every_method
@either_first
def test_beside_cache_dit(method, cache_first):
    """Blocks that were given merged tokens returned fewer than its residuals had."""
    sparse, dense = METHODS[method]
    never, after = with_cache_dit(sparse, -1.0, cache_first)
    torch.testing.assert_close(never, with_cache_dit(sparse, None)[0], rtol=1e-5, atol=2e-6)
    assert torch.equal(after, with_cache_dit((), None)[0])
    cached, _ = with_cache_dit((), 1e9)
    assert (cached - after).abs().max() > 1e-3
    torch.testing.assert_close(with_cache_dit(dense, 1e9, cache_first)[0], cached, rtol=1e-5, atol=2e-6)
