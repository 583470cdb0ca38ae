"""Laws of ToMA inside real UNets, SD3, PixArt and DiT."""

import contextlib
import copy

import pytest
import tiny
import torch
from diffusers import Transformer2DModel
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock

import foveate
from foveate import ToMA
from foveate.diffusers.backend import LayerPlan, attach
from foveate.diffusers.card import Card
from foveate.diffusers.clock import Step
from foveate.diffusers.merging import MergedBlock, MergeGroup
from foveate.diffusers.pipelines import Request
from foveate.diffusers.processors import DispatchedProcessor
from foveate.methods import ComposedMethod, ToMeSD
from foveate.ops.merging import IndexMerge, Merge
from foveate.web.compare import compare

# every hook at work, and nothing is lost
PLUMBING = {"keep": 0.999, "weights": "hard", "skip": 0, "tile": (4, 4), "granularity": "module"}
MODELS = {
    "unet": (tiny.unet, tiny.unet_inputs),
    "sd3": (tiny.sd3, tiny.sd3_inputs),
    "pixart": (tiny.pixart, tiny.pixart_inputs),
    "dit": (tiny.dit, tiny.dit_inputs),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def built(name, **size):
    build, inputs = MODELS[name]
    return build(), inputs(**size)


def watched(model):
    """The linear layers that see queries and the feed-forward of the image, by name."""
    return {
        f"{name}.{part}": module
        for name, block in model.named_modules()
        if isinstance(block, BasicTransformerBlock | JointTransformerBlock)
        for part, module in {
            "attn1": getattr(block, "attn1", None), "attn": getattr(block, "attn", None), "attn2": block.attn2,
            "ff": block.ff,
        }.items()
        if module is not None
    }  # fmt: skip


def seen_tokens(model, x):
    """How many image tokens the modules of every block see in a forward."""
    seen, hooks = {}, []
    for name, module in watched(model).items():
        inner = module.net[0].proj if name.endswith("ff") else module.to_q

        def see(_, args, name=name):
            seen[name] = args[0].shape[1]

        hooks.append(inner.register_forward_pre_hook(see))
    model(**copy.copy(x))
    for hook in hooks:
        hook.remove()
    return seen


@every_model
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("granularity", ["module", "block"])
def test_the_plumbing_is_the_model_without_merging(name, batch, granularity):
    model, x = built(name, batch=batch)
    want = model(**copy.copy(x))[0]
    with foveate.apply(model, ToMA(**PLUMBING | {"granularity": granularity})) as run:
        torch.testing.assert_close(model(**copy.copy(x))[0], want)
        assert all(layer.method.startswith("ToMA keep=0.999 ") for layer in run.summary().layers)


@every_model
def test_keep_of_one_is_the_model_and_removal_gives_it_back(name):
    model, x = built(name)
    dense = model(**copy.copy(x))[0]
    with foveate.apply(model, ToMA(keep=1.0, skip=0)) as run:
        assert torch.equal(model(**copy.copy(x))[0], dense)
        assert {layer.why for layer in run.summary().layers} == {"keep=1.0 is the dense model"}
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4))):
        assert (model(**copy.copy(x))[0] - dense).abs().max() > 1e-6
    assert torch.equal(model(**copy.copy(x))[0], dense)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@every_model
def test_everything_in_a_block_runs_on_merged_tokens(name):
    model, x = built(name)
    dense = seen_tokens(model, x)
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4))) as run:
        merged = seen_tokens(model, x)
        assert all(layer.saved > 0 and not layer.why for layer in run.summary().layers)
    assert merged == {part: tokens // 2 for part, tokens in dense.items()}
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4), granularity="module", merge_cross=False, merge_mlp=False)):
        merged = seen_tokens(model, x)
    for part, tokens in dense.items():
        halved = part.endswith(("attn1", "attn")) or (part.endswith("attn2") and name == "sd3")
        assert merged[part] == (tokens // 2 if halved else tokens), part


@every_model
def test_a_sample_does_not_depend_on_its_batch_mates(name):
    model, x = built(name, batch=3)

    def second(value):
        if isinstance(value, dict):
            return {key: second(item) for key, item in value.items()}
        if isinstance(value, list):
            return [second(item) for item in value]
        return value[1:2] if isinstance(value, torch.Tensor) and value.ndim else value

    for method in (ToMA(skip=0, tile=(4, 4)), ToMeSD(skip=0, size_bias=name != "sd3")):
        with foveate.apply(model, method):
            together = model(**copy.copy(x))[0]
            torch.testing.assert_close(model(**second(x))[0], together[1:2])


@pytest.mark.parametrize("name", ["unet", "sd3", "pixart"])
@pytest.mark.parametrize("size", [(16, 24), (18, 26)])
def test_any_shape_of_picture(name, size):
    model, x = built(name, height=size[0], width=size[1])
    want = model(**copy.copy(x))[0]
    with foveate.apply(model, ToMA(**PLUMBING)):
        torch.testing.assert_close(model(**copy.copy(x))[0], want)


def test_sections_of_a_unet_have_plans_of_their_own_and_small_ones_stay_dense():
    model, x = built("unet")
    with foveate.apply(model, ToMA()) as run:  # tiles of 8 x 8
        seen = seen_tokens(model, x)
        layers = {layer.layer: layer for layer in run.summary().layers}
    assert seen["down_blocks.0.attentions.0.transformer_blocks.0.attn1"] == 128
    assert seen["mid_block.attentions.0.transformer_blocks.0.attn1"] == 32
    assert layers["up_blocks.1.attentions.1.transformer_blocks.0.attn1"].true == 0.75
    with foveate.apply(model, ToMA(tile=(16, 16))) as run:
        seen = seen_tokens(model, x)
        whys = {layer.layer.split(".")[0]: layer.why for layer in run.summary().layers if layer.why}
    assert seen["down_blocks.0.attentions.0.transformer_blocks.0.attn1"] == 128
    assert whys["mid_block"] == "8 x 8 image tokens are fewer than a tile of 16 x 16"


def test_the_first_blocks_of_transformers_are_skipped():
    model, x = built("sd3")
    with foveate.apply(model, ToMA()) as run:
        model(**copy.copy(x))
        whys = {layer.layer: layer.why for layer in run.summary().layers}
    for block, why in enumerate(("one of the first blocks, which ToMA skips", "", "")):
        assert whys[f"transformer_blocks.{block}.attn"] == why


def test_plans_are_shared_by_blocks_and_steps(monkeypatch):
    made = []
    make = ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda *args: made.append(len(args) > 3 and args[3] is not None) or make(*args))
    model, x = built("unet")
    with foveate.apply(model, ToMA(tile=(4, 4))):
        for timestep in (900.0, 800.0, 800.0, 700.0, 600.0, 500.0, 400.0):
            model(**x | {"timestep": torch.tensor(timestep)})
    sites = 5  # down 0 and 1, middle, up 0 and 1
    assert made == sites * [False] + sites * [True]  # whether they keep destinations: steps 0 and 5


@pytest.mark.parametrize("name", ["dit", "pixart", "sd3"])
@pytest.mark.parametrize("granularity", ["module", "block"])
def test_plans_are_made_from_what_the_first_block_is_given(name, granularity, monkeypatch):
    seen, given, make = [], [], ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda *args: seen.append((args[1], args[2].order)) or make(*args))
    model, x = built(name)

    def note(block, args, kwargs):
        given.append(args[0] if args else kwargs["hidden_states"])

    with foveate.apply(model, ToMA(skip=1, granularity=granularity)):
        model.transformer_blocks[1].register_forward_pre_hook(note, with_kwargs=True, prepend=True)
        model(**copy.copy(x))
    ((features, order),), (x,) = seen, given
    assert torch.equal(features, x[:, order])


@every_model
def test_blocks_that_stay_merged_compute_what_each_on_its_own_does(name, monkeypatch):
    """Merging undoes unmerging where weights are hard."""
    model, x = built(name)
    x.pop("block_controlnet_hidden_states", None)
    merges, merge = [], Merge.merge
    monkeypatch.setattr(Merge, "merge", lambda *args: merges.append(1) or merge(*args))
    stacks = sum(isinstance(module, Transformer2DModel) for module in model.modules()) or 1
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4), granularity="block", weights="hard")) as run:
        together = model(**copy.copy(x))[0]
        assert len(merges) == stacks
        monkeypatch.setattr(Card, "residuals_between_blocks", lambda card, inputs: True)
        torch.testing.assert_close(model(**copy.copy(x))[0], together)
        assert len(merges) == stacks + len({row.layer.rpartition(".")[0] for row in run.summary().layers})


@every_model
@pytest.mark.parametrize("size", [(16, 16), (18, 26)])
@pytest.mark.parametrize(
    "method",
    [
        ToMA(skip=0, tile=(4, 4)),
        ToMA(skip=0, tile=(4, 4), dense_layers="1", size_bias=True, share="batch"),
        ToMeSD(skip=0, granularity="block", merge_cross=True, merge_mlp=True),
    ],
)
def test_whole_blocks_compute_what_they_do_on_tokens_in_the_order_of_regions(name, size, method, monkeypatch):
    shape = {} if name == "dit" else {"height": size[0], "width": size[1]}
    model, x = built(name, batch=2, **shape)
    with foveate.apply(model, method) as run:
        got = model(**copy.copy(x))[0]
        assert any(layer.method != "dense" for layer in run.summary().layers)
    for kind in (Merge, IndexMerge):
        merge, unmerge = kind.merge, kind.unmerge

        def in_order(plan, x, ahead, order, merge=merge):
            return merge(plan, x if order is None else x[:, order])

        def and_back(plan, x, before, after, order, unmerge=unmerge):
            order = torch.arange(x.shape[1]) if order is None else order
            return (x[:, order] + unmerge(plan, after - before))[:, order.argsort()]

        monkeypatch.setattr(kind, "merge", in_order)
        monkeypatch.setattr(kind, "update", and_back)
    with foveate.apply(model, method):
        torch.testing.assert_close(got, model(**copy.copy(x))[0])


@every_model
@pytest.mark.parametrize("granularity", ["module", "block"])
def test_autocast_is_near_full_precision(name, granularity):
    build, inputs = MODELS[name]
    model, x = build(dtype=torch.float32), inputs(batch=2, dtype=torch.float32)
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4), select="grid", granularity=granularity)):
        want = model(**copy.copy(x))[0]
        with torch.autocast("cpu", torch.bfloat16):
            got = model(**copy.copy(x))[0]
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_block_that_is_skipped_leaves_no_tokens_merged(skipped):
    model, x = built("sd3")
    del x["block_controlnet_hidden_states"]
    want = model(**copy.copy(x), skip_layers=[skipped])[0]
    with foveate.apply(model, ToMA(**PLUMBING | {"granularity": "block"})):
        torch.testing.assert_close(model(**copy.copy(x), skip_layers=[skipped])[0], want)
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4))):
        assert model(**copy.copy(x), skip_layers=[skipped])[0].shape == want.shape


def test_blocks_whose_plan_was_not_made_say_so_and_it_is_made_the_next_time(monkeypatch):
    model, x = built("unet")
    made, make = [], ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda *args: made.append(1) or make(*args))

    def at(timestep):
        made.clear()
        model(**x | {"timestep": torch.tensor(timestep)})
        return len(made)

    with foveate.apply(model, ToMA(tile=(4, 4), dst_every=2, weights_every=1)) as run:
        assert at(900.0) == 5
        with monkeypatch.context() as patch:
            patch.setattr(model.up_blocks[0].attentions[0], "forward", lambda sample, *args, **kwargs: (sample,))
            assert at(800.0) == 4  # the new weights of that section are not made
            whys = [layer.why for layer in run.summary().layers if layer.layer.startswith("up_blocks.0")]
        assert set(whys) == {"the block that its plan is made from did not run"}
        assert at(800.0) == 1
        assert not any(layer.why for layer in run.summary().layers)


@pytest.mark.parametrize("size_bias", [False, True])
def test_identical_tokens_are_exact_where_there_is_no_text(size_bias):
    attn = tiny.unet().mid_block.attentions[0].transformer_blocks[0].attn1
    x = torch.randn(2, 4, 4, 16).double().repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    method, want = ToMA(keep=0.25, size_bias=size_bias), attn(x)
    attn.processor, layer_plan = DispatchedProcessor(attn.processor), LayerPlan(torch.arange(16))
    attach(attn.processor, layer_plan)
    group = MergeGroup(method)
    MergedBlock(group, attn, [attn], joined=False).merge_module(attn)
    group.begin(method.regions(((8, 8),)), Step(0, 0), torch.empty(0))
    group.layer_plans.append(layer_plan)
    group.plan(x, None)
    torch.testing.assert_close(attn(x), want, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_merged_says_so(caplog):
    model, x = built("unet")
    dense = model(**copy.copy(x))[0]
    with foveate.apply(model, ToMA(tile=(4, 4))):
        for extra, says in (
            ({"attention_mask": torch.ones(1, 256)}, "an attention mask was passed"),
            ({"cross_attention_kwargs": {"ip_adapter_masks": []}}, "ip_adapter_masks"),
        ):
            with contextlib.suppress(Exception):  # a stock processor may not take it
                model(**copy.copy(x), **extra)
            assert f"ToMA stays dense: {says}" in caplog.text
    for methods, says in (
        ((ToMeSD(), ToMA()), "takes one method of sparse attention, one of token merging, or both"),
        ((ToMA(dense_layers="99"),), "layer 99"),
        ((ToMA(skip=9),), "skip fewer"),
    ):
        with pytest.raises(ValueError, match=says):
            foveate.apply(model, *methods)
    assert torch.equal(model(**copy.copy(x))[0], dense)


@pytest.fixture(scope="module")
def stable_diffusion():
    return tiny.stable_diffusion()


def test_a_pipeline_with_batched_guidance_shares_plans_between_the_pair(stable_diffusion, monkeypatch):
    made = []
    make = ToMA.plan

    def plan(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(ToMA, "plan", plan)
    size = {"height": 16, "width": 24, "num_inference_steps": 6, "output_type": "latent"}
    with foveate.apply(stable_diffusion, ToMA(tile=(4, 4), share="cfg", dst_every=5)) as run:
        stable_diffusion("a cat", generator=torch.Generator().manual_seed(0), **size)
        assert run.summary().outcomes["unet"] == {"": 6}
    sections = 3  # down, middle, up
    assert len(made) == 2 * sections  # steps 0 and 5
    assert all(len(merge.positions) == 2 and torch.equal(*merge.positions) for merge in made)


def test_compare_leaves_out_what_a_unet_cannot_take(stable_diffusion, tmp_path):
    request, both = Request("a cat", (16, 16), 2, None, 0), ComposedMethod((ToMeSD(), ToMA()))
    with torch.enable_grad():
        page = compare(stable_diffusion, request, [both, ToMA(tile=(4, 4))], tmp_path, settings={}, rounds=1)
    assert (
        "ToMeSD keep=0.5 + ToMA keep=0.5 is left out: apply takes one method of sparse attention" in page.read_text()
    )
    assert {path.name for path in tmp_path.glob("*.png")} == {"dense.png", "toma-keep-0-5-tile-4-4.png"}
    with pytest.raises(ValueError, match="takes one method of sparse attention"):
        compare(stable_diffusion, request, [both], tmp_path, settings={})
