"""Laws of the attention map: it shows the weights with which a layer mixes the values of its tokens."""

from unittest import mock

import pytest
import torch
from diffusers import DiffusionPipeline
from reference import attend, dense_mask
from tiny import FAMILIES, SPARSE, built, exact
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from foveate import HilbertA, ToMA
from foveate.methods import LLSA, ToMeSD
from foveate.pipelines.steps import Call
from foveate.tuning.attention_map import attention_layers, attention_map

pytestmark = pytest.mark.usefixtures("no_grad")


class Pipeline(DiffusionPipeline):
    def __init__(self, model):
        self.transformer = model


def pipeline(name, **config):
    model, x = built(name, **config)
    return Pipeline(model), Call((), x), exact(model)


def explicit(pipe, step, name, method, layer, token):
    """The weights by the definition: softmax of the scores of a layer where the method's mask allows them."""
    family, ran, found = SPARSE[name], [], []
    grid = family.grids[0]

    def attention(query, key, value, attn_mask=None, **options):
        if query.shape[2] != key.shape[2] or (attn_mask is not None and not attn_mask.all()):
            return scaled_dot_product_attention(query, key, value, attn_mask, **options)
        number = family.numbers[len(ran)] if family.numbers else len(ran)
        ran.append(number)
        if number is None:
            return scaled_dot_product_attention(query, key, value)
        mask = dense_mask(method, number, (grid,), query.shape[2], family.text_first)
        if len([number for number in ran if number is not None]) == layer + 1:
            scores = query @ key.mT / query.shape[3] ** 0.5
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)[-1].mean(0)
            cells = torch.Size(grid).numel()
            image = slice(-cells, None) if family.text_first else slice(cells)
            found.append(weights[image, image].view(*grid, *grid)[token])
        return attend(query, key, value, method, number, (grid,), family.text_first)

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        pipe.transformer(*step.args, **step.kwargs)
    return found[0].to(torch.float32)


@pytest.mark.parametrize("method", [None, HilbertA(tiles=4, align=1)], ids=["dense", "hilberta"])
@pytest.mark.parametrize("name", ["flux", "qwen", "zimage", "wan", pytest.param("ltx", marks=pytest.mark.slow)])
def test_the_map_is_the_softmax_of_the_scores_where_the_mask_allows_them(name, method):
    pipe, step, as_float64 = pipeline(name)
    grid = SPARSE[name].grids[0]
    token = tuple(side // 3 for side in grid)
    layer = len(attention_layers(pipe)) // 2
    with as_float64:
        want = explicit(pipe, step, name, method or HilbertA(tiles=1), layer, token)
        torch.testing.assert_close(attention_map(pipe, step, method, layer, token), want, atol=1e-6, rtol=1e-4)
    assert (want == 0).any() == (method is not None)


@pytest.mark.parametrize(
    "method",
    [
        ToMA(keep=0.5, skip=0),
        ToMA(keep=0.5, skip=0, granularity="module"),
        ToMeSD(keep=0.5, skip=0),
        LLSA(min_tokens=0),
    ],
    ids=lambda method: method.title,
)
@pytest.mark.parametrize("name", ["dit", "wan"])
def test_the_weights_of_an_image_that_attends_to_itself_alone_sum_to_one(name, method):
    pipe, step, as_float64 = pipeline(name, **SPARSE[name].wide)
    token = tuple(side // 3 for side in SPARSE[name].grids[0])
    with as_float64:
        weights = attention_map(pipe, step, method, 1, token)
        dense = attention_map(pipe, step, None, 1, token)
    assert weights.shape == SPARSE[name].grids[0]
    assert weights.sum() == pytest.approx(1, abs=1e-4)
    assert (weights - dense).abs().max() > 1e-6


def test_merging_of_all_tokens_into_themselves_shows_the_dense_map():
    pipe, step, _ = pipeline("flux")
    exactly = ToMA(keep=0.999, tile=(2, 2), weights="hard", skip=0)  # 4 of 4 tokens of a tile
    torch.testing.assert_close(
        attention_map(pipe, step, exactly, 3, (5, 9)), attention_map(pipe, step, None, 3, (5, 9))
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_layers_and_is_left_as_it_was(name):
    pipe, step, as_float64 = pipeline(name)
    processors = [getattr(module, "processor", None) for module in pipe.transformer.modules()]
    with as_float64:
        before = pipe.transformer(*step.args, **step.kwargs)[0]
        shown = attention_map(pipe, step, SPARSE[name].method, 0, (0,) * len(SPARSE[name].grids[0]))
        again = pipe.transformer(*step.args, **step.kwargs)[0]
    assert 0 < shown.sum() < 1 + 1e-4
    assert all(map(torch.equal, before, again))
    assert processors == [getattr(module, "processor", None) for module in pipe.transformer.modules()]


@pytest.mark.parametrize(("layer", "token"), [(99, (0, 0)), (-1, (0, 0)), (0, (99, 0)), (0, (0,))])
def test_layers_and_tokens_that_do_not_exist_are_named(layer, token):
    pipe, step, _ = pipeline("flux")
    with pytest.raises(ValueError, match="there is no"):
        attention_map(pipe, step, None, layer, token)


def test_a_step_whose_tokens_have_no_grid_is_refused_with_the_reason():
    pipe, step, _ = pipeline("flux")
    step.kwargs["img_ids"] = step.kwargs["img_ids"][torch.randperm(320)]
    with pytest.raises(ValueError, match="is dense: img_ids are no complete raster"):
        attention_map(pipe, step, None, 0, (0, 0))
