"""Laws of ToMA inside real FluxTransformer2DModel classes, alone and along HilbertA's curve."""

import copy
import io
from contextlib import nullcontext

import pytest
import tiny
import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig
from test_flux import image_prompt, with_ip_adapter

import foveate
from foveate import HilbertA, ToMA
from foveate.diffusers.backend import LayerPlan, attach, detach
from foveate.diffusers.card import Card
from foveate.diffusers.clock import Step
from foveate.diffusers.merging import MergedBlock, MergeGroup
from foveate.methods import ToFu, ToMeSD
from foveate.ops.merging import Merge

GRID = (16, 20)
MODULES = {"skip": 0, "granularity": "module", "tile": (4, 4)}
PLUMBING = {"keep": 0.999, "weights": "hard", "merge_mlp": True, **MODULES}  # every hook at work, and nothing is lost


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return tiny.flux()


@pytest.fixture
def plans(monkeypatch):
    """Whether each plan that is made picks new destinations."""
    made = []
    make = ToMA.plan

    def plan(method, features, regions, destinations=None):
        made.append(destinations is None)
        return make(method, features, regions, destinations)

    monkeypatch.setattr(ToMA, "plan", plan)
    return made


def seen_tokens(model, x):
    """How many tokens the attention and the feed-forward of every block see in a forward."""
    seen = []
    watched = [
        module
        for name, module in model.named_modules()
        if name.endswith(("attn.to_q", "proj_mlp")) or (isinstance(module, FeedForward) and "context" not in name)
    ]
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1])) for m in watched]
    model(**x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("grid", [GRID, (9, 31), (13, 7)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2, centre=0.0),)])
@pytest.mark.parametrize("options", [PLUMBING, {**PLUMBING, "granularity": "block"}])
def test_the_plumbing_is_the_model_without_merging(model, grid, batch, others, options):
    x = tiny.inputs(grid, batch=batch)
    x |= tiny.residuals(x, 1, 3)
    with foveate.apply(model, *others) if others else foveate.apply(model, HilbertA(tiles=1)):
        want = model(**x)[0]
    with foveate.apply(model, *others, ToMA(**options)) as run:
        torch.testing.assert_close(model(**x)[0], want)
        assert all("ToMA" in layer.method for layer in run.summary().layers)


@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2),)])
def test_keep_of_one_is_the_model_and_removal_gives_it_back(model, others):
    x = tiny.inputs(GRID)
    dense = model(**x)[0]
    with foveate.apply(model, ToMA(keep=1.0, skip=0)) as run:
        assert torch.equal(model(**x)[0], dense)
        assert {layer.why for layer in run.summary().layers} == {"keep=1.0 is the dense model"}
    with foveate.apply(model, *others, ToMA(skip=0)):
        assert (model(**x)[0] - dense).abs().max() > 1e-4
    assert torch.equal(model(**x)[0], dense)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_who_sees_fewer_tokens(model):
    x, text = tiny.inputs(GRID), 15
    full, half = 320, 160
    with foveate.apply(model, ToMA(**MODULES)):
        # attention of double blocks; then attention and feed-forward of single ones
        assert seen_tokens(model, x) == [half, full] * 2 + [text + half] * 6
    with foveate.apply(model, ToMA(**MODULES, merge_mlp=True, merge_attn=False, dense_layers="0")):
        assert seen_tokens(model, x) == [full, full, full, half] + [text + half] * 6
    with foveate.apply(model, ToMA(skip=0, granularity="block")) as run:
        assert seen_tokens(model, x) == [half] * 4 + [text + half] * 6
        assert run.summary().layers[0].saved == 4 * (335**2 - 175**2) * 32 + 2 * 12 * 32**2 * 160
    with foveate.apply(model, ToMA()) as run:  # double blocks and a third of the single ones are skipped
        assert seen_tokens(model, x) == [full, full] * 2 + [text + full] * 2 + [text + half] * 4
        layers = run.summary().layers
        (regions,) = run.plans().values()
        for tile in regions.tile_maps[0].unique():
            inside = (regions.tile_maps[0] == tile).flatten()
            assert inside[regions.picked].sum() == inside.sum() // 2
    assert [layer.method for layer in layers] == ["dense"] * 3 + ["ToMA keep=0.5"] * 2
    assert layers[2].why == "one of the first blocks, which ToMA skips"
    assert layers[3].true == pytest.approx(1 - (175 / 335) ** 2)
    assert layers[3].saved == 4 * (335**2 - 175**2) * 32 + 2 * 12 * 32**2 * 160
    with foveate.apply(model, ToMA(**MODULES | {"skip": 1})) as run:
        model(**x)
        assert run.summary().layers[1].saved == 4 * (335**2 - 175**2) * 32 + 2 * 4 * 32**2 * 160


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_blocks_that_add_nothing_lose_nothing(model, granularity):
    with torch.no_grad():
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            for weight in block.parameters():
                weight.zero_()
    x = tiny.inputs(GRID)
    want = model(**x)[0]
    with foveate.apply(model, ToMA(keep=0.25, skip=0, granularity=granularity)):
        torch.testing.assert_close(model(**x)[0], want)


@pytest.mark.parametrize("dense_layers", ["", "3"])
@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2),)])
def test_blocks_that_stay_merged_compute_what_each_on_its_own_does(model, monkeypatch, dense_layers, others):
    """Merging undoes unmerging where weights are hard."""
    x, merges, merge = tiny.inputs(GRID, batch=2), [], Merge.merge
    monkeypatch.setattr(Merge, "merge", lambda *args: merges.append(1) or merge(*args))
    method = ToMA(skip=0, granularity="block", weights="hard", dense_layers=dense_layers)
    with foveate.apply(model, *others, method):
        together = model(**x)[0]
        assert len(merges) == (3 if dense_layers else 2)  # before blocks 0 and 2, and 4 if 3 is dense
        monkeypatch.setattr(Card, "residuals_between_blocks", lambda card, inputs: True)
        torch.testing.assert_close(model(**x)[0], together)
        assert len(merges) == 7


def test_residuals_between_blocks_meet_all_tokens(model, monkeypatch):
    x = tiny.inputs(GRID)
    x |= tiny.residuals(x, 2, 3)
    merges, merge = [], Merge.merge
    monkeypatch.setattr(Merge, "merge", lambda *args: merges.append(1) or merge(*args))
    with foveate.apply(model, ToMA(skip=0)):
        model(**x)
    assert len(merges) == 5  # one for each block


def test_a_forward_that_broke_off_between_blocks_leaves_nothing_behind(model):
    x = tiny.inputs(GRID)
    with foveate.apply(model, ToMA(skip=0)):
        want = model(**x)[0]
        attn = model.single_transformer_blocks[1].attn
        attn.forward, forward = None, attn.forward
        with pytest.raises(TypeError):
            model(**x)
        attn.forward = forward
        assert torch.equal(model(**x)[0], want)


def merged_attention(attn, image, text, method, rope=None):
    """The output of one attention layer on merged tokens of an 8 x 8 image, and the plan of merging."""
    group, layer_plan = MergeGroup(method, "image_rotary_emb"), LayerPlan(torch.arange(5 + round(64 * method.keep)))
    block = MergedBlock(group, attn, [attn], joined=False)
    block.merge_module(attn)
    attach(attn.processor, layer_plan)
    group.begin(method.regions(((8, 8),)), Step(0, 0), torch.empty(5))
    group.layer_plans.append(layer_plan)
    group.plan(image, rope)
    out = attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=rope)
    block.remove()
    detach(attn.processor, layer_plan)
    return out, group.merge


@pytest.mark.parametrize("size_bias", [False, True])
def test_identical_tokens_beside_text_are_exact_only_with_their_size(model, size_bias):
    attn, text = model.transformer_blocks[0].attn, torch.randn(2, 5, 32).double()
    image = torch.randn(2, 4, 4, 32).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2).double()
    want = attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=None)
    got, _ = merged_attention(attn, image, text, ToMA(keep=0.25, size_bias=size_bias))
    errors = [(a - b).abs().max() for a, b in zip(got, want, strict=True)]
    assert all(error < 1e-6 for error in errors) if size_bias else all(error > 1e-4 for error in errors)


@pytest.mark.parametrize("batch", [1, 2])
def test_merged_tokens_stand_where_their_destinations_stand(model, batch):
    attn, text = model.transformer_blocks[0].attn, torch.randn(batch, 5, 32).double()
    image, angles = torch.randn(batch, 64, 32).double(), torch.randn(69, 8).double().repeat_interleave(2, 1)
    rope, method = (angles.cos(), angles.sin()), ToMA()
    got, plan = merged_attention(attn, image, text, method, rope)
    regions = method.regions(((8, 8),))
    for i in range(batch):
        one = slice(i, i + 1)
        rows = torch.cat([torch.arange(5), 5 + regions.order[plan.positions[i]]])
        moved = tuple(x[rows] for x in rope)
        merged = plan.merge(image[:, regions.order])[one]
        want = attn(hidden_states=merged, encoder_hidden_states=text[one], image_rotary_emb=moved)
        weights = plan.spread[0][one].mT  # [1, regions, tokens, kept]
        spread = (weights @ want[0].unflatten(1, (weights.shape[1], -1))).flatten(1, 2)
        torch.testing.assert_close(got[0][one, regions.order], spread)
        torch.testing.assert_close(got[1][one], want[1])


@pytest.mark.parametrize("options", [{"merge_attn": False}, {"merge_attn": False, "merge_mlp": True}])
def test_double_blocks_that_do_not_merge_attention_keep_their_tables(model, options):
    x = tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=2), ToMA(**MODULES, **options)) as run:
        assert seen_tokens(model, x)[::2][:2] == [320, 320]
        double, single = (run.summary().layers[i] for i in (0, 2))
    assert double.true == pytest.approx(HilbertA(tiles=2).plan((GRID,), 15).tables[0].sparsity())
    assert single.true > double.true


@pytest.mark.parametrize("methods", [(HilbertA(tiles=4, align=10), ToMA()), (HilbertA(tiles=4), ToMA(tile=(3, 5)))])
def test_nothing_merges_across_a_border_of_the_sparse_tiles(model, methods):
    with (
        foveate.apply(model, *methods),
        pytest.raises(ValueError, match="tokens, too short for a ToMA tile"),
    ):
        model(**tiny.inputs(GRID))


@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2),)])
def test_a_sample_does_not_depend_on_its_batch_mates(model, others):
    x = tiny.inputs(GRID, batch=3)
    alone = {name: value[1:2] if name in ("hidden_states", "encoder_hidden_states", "pooled_projections") else value
             for name, value in x.items()} | {"timestep": x["timestep"][:1]}  # fmt: skip
    with foveate.apply(model, *others, ToMA(skip=0)):
        together = model(**x)[0]
        torch.testing.assert_close(model(**alone)[0], together[1:2])
        assert torch.equal(model(**x)[0], together)


def test_image_prompts_are_unmerged_too(model):
    model = with_ip_adapter(model)
    x = tiny.inputs(GRID, batch=2) | image_prompt(batch=2)
    want = model(**copy.deepcopy(x))[0]
    with foveate.apply(model, ToMA(**PLUMBING)):
        torch.testing.assert_close(model(**copy.deepcopy(x))[0], want)
    with foveate.apply(model, ToMA(skip=0)):
        assert model(**copy.deepcopy(x))[0].shape == want.shape


def test_a_lora_may_come_and_go(model):
    x = tiny.inputs(GRID)
    run = foveate.apply(model, ToMA(**PLUMBING))
    want = model(**x)[0]
    model.add_adapter(LoraConfig(r=2, target_modules=["proj_out", "to_q"]))
    torch.testing.assert_close(model(**x)[0], want)
    model.delete_adapters("default")
    model.unload_lora()
    torch.testing.assert_close(model(**x)[0], want)
    run.remove()
    torch.testing.assert_close(model(**x)[0], want)


def test_a_deep_copy_and_a_saved_model_merge_on_their_own(model):
    x = tiny.inputs(GRID)
    run = foveate.apply(model, ToMA(skip=0))
    want = model(**x)[0]
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    run.remove()
    torch.testing.assert_close(twin(**x)[0], want)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(**x)[0], want)
    foveate.remove(twin)
    assert torch.equal(twin(**x)[0], model(**x)[0])


@pytest.mark.parametrize(
    "method", [ToMeSD(keep=0.999, skip=0), ToFu(keep=0.999, separation=0.0, skip=0), ToFu(keep=0.999, skip=0)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_baselines_that_keep_every_token_are_the_dense_model(model, method, batch):
    x = tiny.inputs(GRID, batch=batch)
    want = model(**x)[0]
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(model(**x)[0], want)
        assert {layer.method for layer in run.summary().layers} == {method.title}


@pytest.mark.parametrize("method", [ToMeSD(skip=0), ToFu(skip=0)])
def test_baselines_match_anew_in_every_block_and_step(model, method):
    x = tiny.inputs(GRID)
    made = []
    make = type(method).plan

    def plan(method, *args):
        made.append(method)
        return make(method, *args)

    with pytest.MonkeyPatch.context() as patch, foveate.apply(model, method):
        patch.setattr(type(method), "plan", plan)
        assert seen_tokens(model, x) == [160, 320] * 2 + [175] * 6
        model(**x | {"timestep": torch.full((1,), 0.1)})
    assert len(made) == 2 * 5
    if isinstance(method, ToFu):
        assert [m.depth < m.separation for m in made[:5]] == [True, True, True, False, False]
    with (
        pytest.raises(ValueError, match="ToMeSD cannot be combined"),
        foveate.apply(model, HilbertA(), ToMeSD()),
    ):
        model(**tiny.inputs((32, 32)))


def draw(pipe, **options):
    seed = torch.Generator().manual_seed(0)
    options = {"height": 64, "width": 96, "num_inference_steps": 12, "output_type": "latent"} | options
    return pipe("a cat", generator=seed, **options).images


@pytest.mark.parametrize("guided", [False, True])
def test_plans_are_made_by_the_step_whatever_calls_it_takes(plans, guided):
    pipe = tiny.pipeline()
    options = {"negative_prompt": "a dog", "true_cfg_scale": 2.0} if guided else {}
    with foveate.apply(pipe, ToMA(skip=0)):
        first = draw(pipe, **options)
        sites = 2  # double blocks and single blocks
        assert plans == [new for new in (True, False, True) for _ in range(sites)]  # steps 0, 5 and 10
        plans.clear()
        assert torch.equal(draw(pipe, **options), first)  # another run begins anew
        assert plans[:2] == [True, True]
        plans.clear()
        draw(pipe, num_inference_steps=1)
        draw(pipe, num_inference_steps=1)
        assert plans == 4 * [True]


def test_steps_between_merging_steps_are_dense(plans):
    pipe = tiny.pipeline()
    dense = draw(pipe, num_inference_steps=3)
    with foveate.apply(pipe, ToMA(skip=0, merge_every=3, dst_every=1, weights_every=1)):
        assert not torch.equal(draw(pipe, num_inference_steps=3), dense)
        assert plans == [True, True]
        draw(pipe, num_inference_steps=4)
        assert plans == 6 * [True]


@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2),)])
def test_a_step_between_is_what_it_is_without_merging_and_says_so(model, others):
    steps = [tiny.inputs(GRID) | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8)]
    with foveate.apply(model, *others) if others else nullcontext():
        want = model(**steps[1])[0]
    with foveate.apply(model, *others, ToMA(skip=0, merge_every=2)) as run:
        model(**steps[0])
        assert all("ToMA" in layer.method for layer in run.summary().layers)
        assert torch.equal(model(**steps[1])[0], want)
        if others:
            assert not any("ToMA" in layer.method for layer in run.summary().layers)
        else:
            assert "1 dense: this is no step that merges" in str(run.summary())


@pytest.mark.parametrize("options", [{}, {"granularity": "module"}, {"granularity": "module", "merge_attn": False}])
def test_plans_are_made_from_what_the_first_block_is_given(model, monkeypatch, options):
    seen, given, make = [], [], ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda *args: seen.append(args[1:3]) or make(*args))
    firsts = model.transformer_blocks[1], model.single_transformer_blocks[1]
    for block in firsts:
        block.register_forward_pre_hook(
            lambda block, args, kwargs: given.append(kwargs["hidden_states"]), with_kwargs=True
        )
    with foveate.apply(model, ToMA(skip=1, **options)):
        model(**tiny.inputs(GRID))
    assert len(seen) == 2
    for (features, regions), tokens in zip(seen, given, strict=True):
        assert torch.equal(features, tokens[:, regions.order])


def test_without_a_pipeline_steps_are_timesteps(model, plans):
    x = tiny.inputs(GRID)
    steps = [x | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8, 0.8, 0.6)]
    with foveate.apply(model, ToMA(skip=0, dst_every=2, weights_every=1)):
        for step in steps:
            model(**step)
        assert plans == [True, True, False, False, True, True]
        plans.clear()
        model(**steps[0])
        assert plans == [True, True]
        plans.clear()
        model(**tiny.inputs((20, 16)) | {"timestep": torch.full((1,), 1.0)})  # another grid
        assert plans == [True, True]


def test_what_cannot_be_merged_says_so(model):
    x = tiny.inputs((3, 9))
    dense = model(**x)[0]
    with foveate.apply(model, ToMA(skip=0)) as run:
        assert torch.equal(model(**x)[0], dense)
        assert "fewer than a tile" in run.summary().layers[0].why
    with pytest.raises(ValueError, match="size_bias"):
        foveate.apply(model, HilbertA(), ToMA(size_bias=True))
    with pytest.raises(ValueError, match="one of token merging"):
        foveate.apply(model, ToMA(), ToMA())
    with pytest.raises(ValueError, match="no block is left"):
        foveate.apply(model, ToMA(skip=3))
    with pytest.raises(ValueError, match="layer 9"):
        foveate.apply(model, ToMA(dense_layers="9"))
    with pytest.raises(ValueError, match="mode"), foveate.apply(model, HilbertA(tiles=2), ToMA(mode="global")):
        model(**tiny.inputs(GRID))
