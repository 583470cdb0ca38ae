"""Laws of what `apply` does not meddle with: caches, processors of others, training; and what it says afterwards."""

import copy

import pytest
import tiny
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models.attention_processor import AttnProcessor2_0

import foveate
from foveate import HilbertA, ToMA

GRID = 16, 20


class Foreign:
    def __call__(self, *args, **kwargs):
        raise AssertionError


class KeepsMaps(AttnProcessor2_0):
    """As self-attention guidance has: it may lay what it keeps over a raster."""


def ways(model):
    return [(row.method, row.why) for row in model.summary().layers]


@pytest.mark.parametrize(
    ("make", "inputs", "method"),
    [
        (tiny.flux, lambda: tiny.inputs(GRID), HilbertA(tiles=4)),
        (tiny.flux, lambda: tiny.inputs(GRID), ToMA(skip=0)),
        (tiny.sd3, tiny.sd3_inputs, HilbertA(tiles=4, align=1)),
        (tiny.unet, lambda: tiny.unet_inputs(32, 32), HilbertA(tiles=4, align=1)),
    ],
)
@torch.no_grad()
def test_a_summary_tells_afterwards_what_it_told_within(make, inputs, method):
    model = make()
    with foveate.apply(model, method) as run:
        model(**inputs())
        within = ways(run)
    assert ways(run) == within
    assert any(method.title in way for way, _ in within)


@torch.no_grad()
@pytest.mark.parametrize("method", [HilbertA(tiles=4), ToMA(keep=0.5)])
def test_a_section_with_a_processor_that_may_keep_maps_stays_dense(method):
    model, x = tiny.unet(), tiny.unet_inputs(32, 32)
    want = model(**x)[0]
    with foveate.apply(model, method) as run:
        for block in model.modules():
            if isinstance(getattr(block, "attn1", None), torch.nn.Module):
                block.attn1.set_processor(KeepsMaps())
        torch.testing.assert_close(model(**x)[0], want)
        assert all("a KeepsMaps was set after apply" in why for _, why in ways(run))


@torch.no_grad()
def test_where_a_cache_keeps_tokens_their_number_stays():
    pipe, x = tiny.pipeline(), tiny.inputs(GRID)
    pipe.transformer = tiny.flux()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    with foveate.apply(pipe, ToMA(skip=0)) as run, pipe.transformer.cache_context("cond"):
        pipe.transformer(**x)
        assert all("a cache keeps tokens from step to step" in why for _, why in ways(run))


def test_an_apply_that_fails_leaves_nothing():
    model = tiny.flux()
    model.transformer_blocks[1].attn.processor = Foreign()
    before = tiny.fingerprint(model)
    with pytest.raises(ValueError, match="Foreign"):
        foveate.apply(model, ToMA(skip=0))
    assert tiny.fingerprint(model) == before


@torch.no_grad()
def test_a_pause_within_a_pause_does_not_end_it():
    model, x = tiny.flux(), tiny.inputs(GRID)
    dense = model(**copy.copy(x))[0]
    with foveate.apply(model, HilbertA(tiles=4)) as run, run.paused():
        with run.paused():
            pass
        assert torch.equal(model(**x)[0], dense)


def test_while_training_every_forward_has_a_plan_of_its_own():
    model, x = tiny.flux(), tiny.inputs(GRID)
    other = x | {"hidden_states": torch.randn_like(x["hidden_states"])}
    with foveate.apply(model, ToMA(skip=0)):
        model(**copy.copy(x))
        after_another = model(**copy.copy(other))[0]
    with foveate.apply(model, ToMA(skip=0)):
        assert torch.equal(model(**copy.copy(other))[0], after_another)


@pytest.mark.usefixtures("as_a_user")
def test_a_method_of_json_is_the_method():
    assert ToMA(tile=[4, 4]) == ToMA(tile=(4, 4))
    assert hash(ToMA(tile=[4, 4]))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("options", [{"tiles": 2.5}, {"period": 2.0}, {"align": 2.5}])
def test_counts_are_whole_numbers(options):
    with pytest.raises(ValueError, match="not 2"):
        HilbertA(**options)
