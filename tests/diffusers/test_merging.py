"""Token merging in all families, alone and beside sparse attention."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny
import torch
from covering import at_grids_in_turn, in_turn
from tiny import FAMILIES, built, call
from torch.utils._python_dispatch import TorchDispatchMode

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.diffusers.arguments import InnermostForward
from foveate.diffusers.backend import LayerPlan, attach, detach
from foveate.diffusers.card import Card
from foveate.diffusers.cards.flux import FluxCard
from foveate.diffusers.clock import Step
from foveate.diffusers.merging import MergedBlock, MergeGroup, MergePass
from foveate.methods import ToFu, ToMeSD
from foveate.ops.merging import IndexMerge, Merge

pytestmark = pytest.mark.usefixtures("no_grad")
every_family = pytest.mark.parametrize("name", FAMILIES)
granularities_in_turn = pytest.mark.parametrize(("name", "granularity"), in_turn(FAMILIES, ["module", "block"]))
SPARSE = (HilbertA(tiles=2, centre=0.0, slide="curve"),)  # as "auto" is beside merging
beside = pytest.mark.parametrize("sparse", [(), SPARSE], ids=["alone", "sparse"])
MERGES = {"skip": 0, "tile": (4, 4)}
LOSSLESS = {"keep": 0.999, "weights": "hard", "merge_mlp": True, **MERGES}  # every hook at work, and nothing is lost


@pytest.fixture
def plans(monkeypatch):
    """Whether each plan that is made picks new destinations."""
    made, make = [], ToMA.plan

    def plan(method, features, regions, destinations=None):
        made.append(destinations is None)
        return make(method, features, regions, destinations)

    monkeypatch.setattr(ToMA, "plan", plan)
    return made


@pytest.fixture
def merges(monkeypatch):
    """One entry for every time that tokens are merged."""
    made, merge = [], Merge.merge
    monkeypatch.setattr(Merge, "merge", lambda *args: made.append(1) or merge(*args))
    return made


ATTENTION = "attn.to_q", "attn1.to_q", "attention.to_q", "attention.img_qkv_proj"
FEED_FORWARD = (
    "ff.net.0.proj", "ff.gate", "ffn.net.0.proj", "feed_forward.w1", "ff.linear_1", "feed_forward.linear_1"
)  # fmt: skip


def without_controlnet(x):
    return {name: value for name, value in x.items() if "controlnet" not in name}


def blocks(model):
    """The blocks by name, in running order."""
    path = re.compile(
        r"((?!text).*(transformer|stream|double)_blocks|mode_blocks\.image|blocks|noise_refiner|layers)\.\d+"
    )
    named = {name: m for name, m in model.named_modules() if path.fullmatch(name)}
    return dict(sorted(named.items(), key=lambda item: item[0].startswith("up_blocks")))


def seen_tokens(model, x):
    """How many tokens the attention and feed-forward modules of every block see in a forward pass, by name."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        part = re.sub(r".*?(transformer_blocks|^blocks|noise_refiner|layers)\.\d+\.", "", name)
        if part in (*ATTENTION, "attn2.to_q", *FEED_FORWARD, "proj_mlp"):
            note = lambda _, args, name=name: seen.update({name: args[0].shape[1]})  # noqa: E731
            hooks.append(module.register_forward_pre_hook(note))
    call(model, x)
    for hook in hooks:
        hook.remove()
    return seen


# --- what is exact ---


@pytest.mark.parametrize(
    ("name", "grid", "methods"),
    at_grids_in_turn(
        FAMILIES,
        [(sparse, ToMA(**LOSSLESS, granularity="module")) for sparse in ((), SPARSE)],
        [(sparse, ToMA(**LOSSLESS, granularity="block")) for sparse in (SPARSE, ())],
        [
            ((), ToMeSD(keep=0.9999, skip=0)),
            ((), ToFu(keep=0.9999, separation=0.0, skip=0)),
            ((), ToFu(keep=0.9999, skip=0)),
        ],
    ),
)
def test_merging_that_loses_nothing_changes_nothing(name, grid, methods):
    sparse, method = methods
    model, x = built(name, grid, 2)
    with foveate.apply(model, *sparse) if sparse else nullcontext():
        want = call(model, x)
    auto = (replace(one, slide="auto") for one in sparse)
    with foveate.apply(model, *auto, method) as run:
        torch.testing.assert_close(call(model, x), want)
        assert all(row.method.endswith(method.title) for row in run.summary().layers)


@granularities_in_turn
def test_blocks_that_add_nothing_lose_nothing(name, granularity):
    model, x = built(name)
    for block in blocks(model).values():
        for weight in block.parameters():
            weight.zero_()
    want = call(model, x)
    with foveate.apply(model, ToMA(keep=0.25, granularity=granularity, **MERGES)):
        torch.testing.assert_close(call(model, x), want)


@pytest.mark.parametrize(("name", "sparse"), in_turn(FAMILIES, [(), SPARSE]))
def test_keep_of_one_is_the_model_and_less_is_not(name, sparse):
    model, x = built(name)
    dense = call(model, x)
    with foveate.apply(model, ToMA(keep=1.0, skip=0)) as run:
        assert torch.equal(call(model, x), dense)
        assert {row.why for row in run.summary().layers} == {"keep=1.0 is the dense model"}
    with foveate.apply(model, *sparse, ToMA(**MERGES)):
        assert (call(model, x) - dense).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("name", "methods"), in_turn(FAMILIES, [((), ""), (SPARSE, "1"), ((), "1"), (SPARSE, "")], each=2)
)
def test_blocks_that_stay_merged_compute_what_each_does_on_its_own(name, methods, merges, monkeypatch):
    """Merging undoes unmerging where weights are hard."""
    sparse, dense_layers = methods
    model, x = built(name, batch=2)
    x = without_controlnet(x)
    method = ToMA(granularity="block", weights="hard", dense_layers=dense_layers, **MERGES)
    with foveate.apply(model, *sparse, method) as run:
        together, runs = call(model, x), len(merges)
        merging = {row.layer for row in run.summary().layers if "ToMA" in row.method}
        parts = {(stack, int(i)) for stack, i in (re.match(r"(.*)\.(\d+)\.", layer).groups() for layer in merging)}
        each = name in ("animate", "hidream")  # which change all tokens between blocks
        assert runs == sum(each or (stack, i - 1) not in parts for stack, i in parts)
        monkeypatch.setattr(Card, "residuals_between_blocks", lambda card, inputs: True)
        torch.testing.assert_close(call(model, x), together)
        assert len(merges) == runs + len(parts)


class Ops(TorchDispatchMode):
    """Counts the ops that are not views: on a GPU each is a launch of a kernel."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not op.is_view and op is not torch.ops.aten._unsafe_view.default:
            self.count["attention" if "attention" in str(op) else str(op)] += 1
        return op(*args, **(kwargs or {}))


def ops(methods, double, single):
    """The ops of a forward pass of a FLUX with that many blocks."""
    model, x = tiny.flux(double, single, torch.float32), tiny.inputs((16, 16), dtype=torch.float32)
    with foveate.apply(model, *methods) if methods else nullcontext():
        model(**x)  # fills caches
        with Ops() as counted:
            model(**x)
    return counted.count


@pytest.mark.parametrize("double", [False, True])
@beside
def test_a_merged_block_runs_the_ops_of_a_dense_block_and_no_more(double, sparse):
    # merging, unmerging, plans and rotary embeddings are paid for once, whatever the number of blocks
    of_two_blocks = [
        ops(methods, 4 if double else 2, 2 if double else 4) - ops(methods, 2, 2)
        for methods in ((), (*sparse, ToMA(skip=0)))
    ]
    dense, merged = (sum(count.values()) for count in of_two_blocks)
    assert 0 < merged <= dense, of_two_blocks[1] - of_two_blocks[0]


@pytest.mark.parametrize("name", ["flux", "chroma", "zimage", "sd3"])
def test_residuals_of_a_controlnet_meet_all_tokens(name, merges):
    model, x = built(name)
    with foveate.apply(model, ToMA(**MERGES)):
        call(model, x)
    assert len(merges) == len(blocks(model))


@pytest.mark.parametrize(
    ("name", "method"),
    in_turn(
        FAMILIES,
        [
            ToMA(**MERGES),
            ToMA(dense_layers="1", **MERGES),
            ToMeSD(skip=0, granularity="block", merge_cross=True, merge_mlp=True),
        ],
        each=2,
    ),
)
def test_whole_blocks_compute_what_they_do_on_tokens_in_the_order_of_regions(name, method, monkeypatch):
    model, x = built(name, FAMILIES[name].grids[1], 2)
    with foveate.apply(model, method) as run:
        got = call(model, x)
        assert any(row.method != "dense" for row in run.summary().layers)
    for kind in (Merge, IndexMerge):
        merge, unmerge = kind.merge, kind.unmerge

        def in_order(plan, x, ahead, order, merge=merge):
            x = x if order is None else x[:, order]
            return torch.cat([x[:, :ahead], merge(plan, x[:, ahead:], 0, None)], 1)

        def and_back(plan, x, before, after, order, unmerge=unmerge):
            order = torch.arange(x.shape[1]) if order is None else order
            return (x[:, order] + unmerge(plan, after - before))[:, order.argsort()]

        monkeypatch.setattr(kind, "merge", in_order)
        monkeypatch.setattr(kind, "update", and_back)
    with foveate.apply(model, method):
        torch.testing.assert_close(got, call(model, x))


def merged_attention(attn, image, text, method, rope=None):
    """The output of one attention layer of FLUX on merged tokens of an 8 x 8 image, and the plan of merging."""
    group, plan = MergeGroup(method, FluxCard()), LayerPlan(torch.arange(5 + round(64 * method.keep)))
    block = MergedBlock(group, attn, [attn], joined=False)
    attention = InnermostForward(attn, block.run_attention)
    attach(attn.processor, plan)
    now = MergePass(method.regions(((8, 8),)), torch.empty(5), skip_unmerge=True, image_first=False)
    group.begin(now, Step(0, 0.0, {}), reuse=True)
    now.layer_plans.append(plan)
    group.plan(image, rope)
    out = attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=rope)
    attention.remove()
    detach(attn.processor, plan)
    return out, group.now.merge


def identical_tokens(dim):
    """An 8 x 8 image in which every 2 x 2 tokens are equal."""
    return torch.randn(2, 4, 4, dim).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2).double()


def test_identical_tokens_are_exact_without_text_but_not_beside_it():
    method = ToMA(keep=0.25)
    attn, text, image = tiny.flux().transformer_blocks[0].attn, torch.randn(2, 5, 32).double(), identical_tokens(32)
    want = attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=None)
    got, _ = merged_attention(attn, image, text, method)
    errors = [(a - b).abs().max() for a, b in zip(got, want, strict=True)]
    assert all(error > 1e-4 for error in errors)  # text weighs more among fewer tokens

    attn, x = tiny.unet().mid_block.attentions[0].transformer_blocks[0].attn1, identical_tokens(16)
    want, group = attn(x), MergeGroup(method, FluxCard())
    InnermostForward(attn, MergedBlock(group, attn, [attn], joined=False).run_module)
    now = MergePass(method.regions(((8, 8),)), torch.empty(0), skip_unmerge=True, image_first=False)
    group.begin(now, Step(0, 0.0, {}), reuse=True)
    group.plan(x, None)
    torch.testing.assert_close(attn(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2])
def test_merged_tokens_stand_where_their_destinations_stand(batch):
    attn, text = tiny.flux().transformer_blocks[0].attn, torch.randn(batch, 5, 32).double()
    image, angles = torch.randn(batch, 64, 32).double(), torch.randn(69, 8).double().repeat_interleave(2, 1)
    rope, method = (angles.cos(), angles.sin()), ToMA(tile=(4, 4))
    got, plan = merged_attention(attn, image, text, method, rope)
    regions = method.regions(((8, 8),))
    for i in range(batch):
        one = slice(i, i + 1)
        rows = torch.cat([torch.arange(5), 5 + regions.order[plan.positions[i]]])
        merged = plan.merge(image[:, regions.order])[one]
        moved = tuple(x[rows] for x in rope)
        want = attn(hidden_states=merged, encoder_hidden_states=text[one], image_rotary_emb=moved)
        weights = plan.spread[0][one].mT  # [1, regions, tokens, kept]
        spread = (weights @ want[0].unflatten(1, (weights.shape[1], -1))).flatten(1, 2)
        torch.testing.assert_close(got[0][one, regions.order], spread)
        torch.testing.assert_close(got[1][one], want[1])


@granularities_in_turn
@pytest.mark.usefixtures("fixed_destinations")
def test_autocast_is_near_full_precision(name, granularity):
    model, x = built(name, batch=2, dtype=torch.float32)
    with foveate.apply(model, ToMA(granularity=granularity, **MERGES)):
        want = call(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            got = call(model, x)
    assert (got - want).norm() < 0.1 * want.norm()


# --- who sees fewer tokens ---


@every_family
def test_everything_in_a_block_runs_on_merged_tokens_or_what_the_options_name(name):
    model, x = built(name, (16, 16))
    words = {"krea2": 11, "qwen": 0, "sd3": 0, "zimage": 32, "auraflow": 19, "lumina2": 11}
    words |= {"glm": 11, "cogview4": 11, "ideogram4": 11}
    text = words.get(name, 15)  # in the same tensor as the image
    dense = seen_tokens(model, x)

    def half(part):
        words = (
            text if part.startswith(("single", "layers")) or name in ("krea2", "minimax_h3", "glm", "cogview4") else 0
        )
        return words + (dense[part] - words) // 2

    with foveate.apply(model, ToMA(**MERGES)) as run:
        assert seen_tokens(model, x) == {part: half(part) for part in dense}
        assert all(row.saved > 0 and not row.why for row in run.summary().layers)
    with foveate.apply(model, ToMA(granularity="module", merge_cross=False, merge_mlp=False, **MERGES)):
        cross = ("attn2.to_q",) if name != "sd3" else ()
        left = (*FEED_FORWARD, *cross)  # single-stream blocks merge as a whole
        assert seen_tokens(model, x) == {part: dense[part] if part.endswith(left) else half(part) for part in dense}
    with foveate.apply(model, ToMA(granularity="module", merge_attn=False, merge_mlp=True, **MERGES)):
        left = (*ATTENTION, *(("attn2.to_q",) if name == "sd3" else ()))
        whole = "none" if name == "flux3" else "single"  # blocks that merge as a whole
        assert seen_tokens(model, x) == {
            part: dense[part] if part.endswith(left) and (whole not in part or name == "auraflow") else half(part)
            for part in dense
        }


def test_the_first_blocks_are_skipped_and_savings_are_counted():
    model, x = tiny.flux(), tiny.inputs()
    with foveate.apply(model, ToMA()) as run:  # the double-stream blocks and a third of the others are skipped
        call(model, x)
        layers = run.summary().layers
        (regions,) = run.plans().values()
        for tile in regions.tile_maps[0].unique():
            inside = (regions.tile_maps[0] == tile).flatten()
            assert inside[regions.picked].sum() == inside.sum() // 2
    assert [layer.method for layer in layers] == ["dense"] * 3 + ["ToMA keep=0.5"] * 2
    assert layers[2].why == "one of the first blocks, which ToMA skips"
    assert layers[3].true == pytest.approx(1 - (175 / 335) ** 2)
    attention = 4 * (335**2 - 175**2) * 32
    assert layers[3].saved == attention + 2 * 12 * 32**2 * 160
    for options, weights in (({"granularity": "block", "skip": 0}, 12), ({"granularity": "module", "skip": 1}, 4)):
        with foveate.apply(model, ToMA(**options)) as run:
            call(model, x)
            assert run.summary().layers[1].saved == attention + 2 * weights * 32**2 * 160
    model, x = built("sd3")
    with foveate.apply(model, ToMA()) as run:
        call(model, x)
        assert [row.why for row in run.summary().layers[1:]] == [layers[2].why, "", ""]


def test_parts_of_a_unet_have_plans_of_their_own_and_small_ones_stay_dense():
    model, x = built("sdxl", (16, 16))
    first, middle = (
        f"{part}.transformer_blocks.0.attn1" for part in ("down_blocks.0.attentions.0", "mid_block.attentions.0")
    )
    with foveate.apply(model, ToMA()) as run:  # tiles of 8 x 8
        seen = seen_tokens(model, x)
        layers = {layer.layer: layer for layer in run.summary().layers}
    assert (seen[f"{first}.to_q"], seen[f"{middle}.to_q"]) == (128, 32)
    assert layers["up_blocks.1.attentions.1.transformer_blocks.0.attn1"].true == 0.75
    with foveate.apply(model, ToMA(tile=(16, 16))) as run:
        seen = seen_tokens(model, x)
        layers = {layer.layer: layer for layer in run.summary().layers}
    assert (seen[f"{first}.to_q"], seen[f"{middle}.to_q"]) == (128, 64)
    assert layers[middle].why == "8 x 8 image tokens are fewer than a tile of 16 x 16"


# --- beside sparse attention ---


@pytest.mark.parametrize("options", [{}, {"merge_mlp": True}])
def test_blocks_that_do_not_merge_attention_keep_their_tables(options):
    model, x = tiny.flux(), tiny.inputs()
    method = ToMA(granularity="module", merge_attn=False, **MERGES, **options)
    with foveate.apply(model, HilbertA(tiles=2), method) as run:
        call(model, x)
        double, single = (run.summary().layers[i] for i in (0, 2))
    assert double.true == pytest.approx(HilbertA(tiles=2).plan(((16, 20),), 15).tables[0].sparsity())
    assert single.true > double.true


def test_log_linear_attention_attends_to_merged_tokens():
    model, x = built("flux", (16, 16), **FAMILIES["flux"].wide)
    toma = ToMA(keep=0.5, **MERGES)
    with foveate.apply(model, HilbertA(tiles=1, centre=0, curve="morton"), toma):
        want = call(model, x)
    with foveate.apply(model, LLSA(top_k=99, enrich=False, min_tokens=0), toma) as run:
        torch.testing.assert_close(call(model, x), want)  # where all is picked, only merging counts
        assert all(row.true == pytest.approx(1 - (143 / 271) ** 2) for row in run.summary().layers)
    with foveate.apply(model, LLSA(top_k=1, min_tokens=0), toma) as run:
        assert (call(model, x) - want).abs().max() > 1e-6
        pairs = 15 * 143 + 128 * (15 + 16 + 8)
        assert all(row.true == pytest.approx(1 - pairs / 271**2) for row in run.summary().layers)


@pytest.mark.parametrize(
    ("methods", "remedy"),
    [
        ((HilbertA(tiles=4, align=10), ToMA()), "tokens, too short for a ToMA tile"),
        ((HilbertA(tiles=4), ToMA(tile=(3, 5))), "tokens, too short for a ToMA tile"),
        ((HilbertA(tiles=2), ToMeSD()), "ToMeSD cannot be combined"),
    ],
)
def test_merging_that_does_not_fit_the_sparse_tiles_is_refused(methods, remedy):
    model = tiny.flux()
    with foveate.apply(model, *methods), pytest.raises(ValueError, match=remedy):
        call(model, tiny.inputs())


# --- when plans are made ---


@granularities_in_turn
def test_plans_are_made_from_the_input_of_the_first_block_that_merges(name, granularity, monkeypatch):
    seen, given, make = [], [], ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda *args: seen.append((args[1], args[2].order)) or make(*args))
    model, x = built(name)
    firsts = {}
    for path, block in list(blocks(model).items())[1:]:  # the first block of all is dense
        firsts.setdefault(re.sub(r"\.attentions.*|\.\d+$", "", path), block)
    for block in firsts.values():
        note = lambda _, args, kwargs: given.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
        block.register_forward_pre_hook(note, with_kwargs=True)
    with foveate.apply(model, ToMA(granularity=granularity, dense_layers="0", **MERGES)):
        call(model, x)
    assert len(seen) == len(firsts)
    for (features, order), tokens in zip(seen, given, strict=True):
        image = tokens[:, -len(order) :] if FAMILIES[name].text_first else tokens[:, : len(order)]
        assert torch.equal(features, image[:, order])


def test_plans_are_shared_by_blocks_and_steps_of_a_run(plans):
    model, x = tiny.flux(), tiny.inputs()
    steps = [x | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8, 0.8, 0.6)]
    with foveate.apply(model, ToMA(skip=0, dst_every=2, weights_every=1)) as run, run.image():
        for step in steps:
            call(model, step)
        # of double-stream and single-stream blocks; the second pass of a step has a plan of its own
        assert plans == [True, True, False, False, True, True, True, True]
        for another_run in (steps[0], tiny.inputs((20, 16)) | {"timestep": torch.full((1,), 1.0)}):
            plans.clear()
            call(model, another_run)
            assert plans == [True, True]
    model, x = built("sdxl")
    plans.clear()
    with foveate.apply(model, ToMA(tile=(4, 4))) as run, run.image():
        for timestep in (900.0, 800.0, 800.0, 700.0, 600.0, 500.0, 400.0):
            call(model, x | {"timestep": torch.tensor(timestep)})
    sections = 5  # down 0 and 1, middle, up 0 and 1
    assert plans == 2 * sections * [True] + sections * [False]  # step 0, second pass of step 1, step 5
    model, x = built("zimage")
    plans.clear()
    with foveate.apply(model, ToMA(dst_every=2, weights_every=1, **MERGES)) as run, run.image():
        for left in (1.0, 0.8, 0.6):
            call(model, tiny.at(x, left))
    assert plans == [True, True, False, False, True, True]  # of refiners and other blocks


@pytest.mark.parametrize("method", [ToMeSD(skip=0), ToFu(skip=0)])
def test_baselines_match_anew_in_every_block_and_step(method, monkeypatch):
    model, x, made, make = tiny.flux(), tiny.inputs(), [], type(method).plan
    monkeypatch.setattr(type(method), "plan", lambda method, *args: made.append(make(method, *args)) or made[-1])
    with foveate.apply(model, method):
        assert list(seen_tokens(model, x).values()) == [160, 320] * 2 + [175] * 6
        call(model, x | {"timestep": torch.full((1,), 0.1)})
    assert len(made) == 2 * 5
    if isinstance(method, ToFu):
        assert [plan.pruned for plan in made[:5]] == [True, True, True, False, False]


@beside
def test_a_step_between_merging_steps_is_what_it_is_without_merging_and_says_so(sparse):
    model = tiny.flux()
    first, between = (tiny.inputs() | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8))
    with foveate.apply(model, *sparse) if sparse else nullcontext():
        want = call(model, between)
    with foveate.apply(model, *sparse, ToMA(merge_every=2, **MERGES)) as run, run.image():
        call(model, first)
        assert all("ToMA" in layer.method for layer in run.summary().layers)
        assert torch.equal(call(model, between), want)
        if sparse:
            assert not any("ToMA" in layer.method for layer in run.summary().layers)
        else:
            assert "1 dense: this is no step that merges: merge_every=2" in " ".join(str(run.summary()).split())


def test_while_training_every_forward_pass_has_a_plan_of_its_own():
    model, x = tiny.flux(), tiny.inputs()
    other = x | {"hidden_states": torch.randn_like(x["hidden_states"])}
    with torch.enable_grad():
        with foveate.apply(model, ToMA(skip=0)):
            call(model, x)
            after_another = call(model, other)
        with foveate.apply(model, ToMA(skip=0)):
            assert torch.equal(call(model, other), after_another)


def test_parts_whose_plan_was_not_made_say_so_and_it_is_made_the_next_time(plans, monkeypatch):
    model, x = built("sdxl")

    def at(timestep):
        plans.clear()
        call(model, x | {"timestep": torch.tensor(timestep)})
        return len(plans)

    with foveate.apply(model, ToMA(tile=(4, 4), dst_every=4, weights_every=1)) as run, run.image():
        assert at(900.0) == 5
        with monkeypatch.context() as patch:
            patch.setattr(model.up_blocks[0].attentions[0], "forward", lambda sample, *args, **kwargs: (sample,))
            assert at(800.0) == 4  # the new weights of that section are not made
            whys = {row.why for row in run.summary().layers if row.layer.startswith("up_blocks.0")}
        assert whys == {"the block that its plan is made from did not run"}
        assert at(700.0) == 5
        assert not any(row.why for row in run.summary().layers)


# --- what cannot be merged ---


def test_what_cannot_be_merged_stays_dense_and_says_so(caplog):
    model, x = tiny.flux(), tiny.inputs((3, 9))
    dense = call(model, x)
    with foveate.apply(model, ToMA(skip=0)) as run:
        assert torch.equal(call(model, x), dense)
        assert "fewer than a tile" in run.summary().layers[0].why
        call(model, tiny.inputs(), joint_attention_kwargs={"ip_adapter_masks": []})
        assert "ip_adapter_masks" in run.summary().layers[0].why
    model.enable_gradient_checkpointing()
    with foveate.apply(model, ToMA(skip=0)) as run:
        call(model, tiny.inputs())
        assert "gradient checkpointing runs blocks again" in run.summary().layers[0].why


def test_rows_of_minimax_h3_with_timesteps_of_their_own_merge_by_modules_alone():
    model, x = built("minimax_h3", batch=2)
    x["timestep_indices"] = x["timestep_indices"].clone()
    x["timestep_indices"][-72:] = 0  # the last frame has the timestep of the audio
    dense = call(model, x)
    with foveate.apply(model, ToMA(**LOSSLESS, granularity="module")):
        torch.testing.assert_close(call(model, x), dense)
    with foveate.apply(model, ToMA(**LOSSLESS, granularity="block")) as run:
        assert torch.equal(call(model, x), dense)
        assert "each token has its own modulation" in run.summary().layers[0].why


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("cosmos", {"timestep": torch.full((2, 1, 5, 1, 1), 500.0).double()}, "each frame has its own timestep"),
        ("cosmos", {"block_controlnet_hidden_states": [torch.ones(2, 360, 36).double()]}, "what a ControlNet returns"),
        ("ideogram4", {"timestep": torch.linspace(0.4, 0.6, 331).double().expand(2, -1)}, "its own timestep"),
    ],
    ids=["frames", "controlnet", "tokens"],
)
def test_models_that_treat_tokens_one_by_one_merge_by_modules(name, more, why):
    model, x = built(name, batch=2)
    if "block_controlnet_hidden_states" in more:
        model.register_to_config(controlnet_block_every_n=1)
        more = {"block_controlnet_hidden_states": 3 * more["block_controlnet_hidden_states"]}
    dense = call(model, x | more)
    with foveate.apply(model, ToMA(**LOSSLESS, granularity="module")):
        torch.testing.assert_close(call(model, x | more), dense)
    with foveate.apply(model, ToMA(**LOSSLESS)) as run:
        assert torch.equal(call(model, x | more), dense)
        assert why in run.summary().layers[0].why


def test_cosmos_with_learned_positions_merges_by_modules_alone():
    model, x = built("cosmos", extra_pos_embed_type="learnable", dtype=torch.float32)  # their norm is in float32
    with pytest.raises(ValueError, match="adds positions to all tokens in each block"):
        foveate.apply(model, ToMA())
    dense = call(model, x)
    with foveate.apply(model, ToMA(**LOSSLESS, granularity="module")):
        torch.testing.assert_close(call(model, x), dense)


def test_text_of_joyimage_may_be_rotated():
    model, x = built("joyimage", batch=2, rope_type="mrope")
    dense = call(model, x)
    with foveate.apply(model, HilbertA(tiles=1), ToMA(**LOSSLESS)):
        torch.testing.assert_close(call(model, x), dense)


@pytest.mark.parametrize("granularity", ["block", "module"])
def test_experts_of_nucleus_choose_among_merged_tokens_or_among_all(granularity):
    experts = {"num_experts": 4, "moe_intermediate_dim": 32, "capacity_factors": [0.5] * 3}
    model, x = built("nucleus", moe_enabled=True, dense_moe_strategy="all_moe", **experts)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    dense, seen = call(model, x), []
    hook = model.transformer_blocks[2].img_mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with foveate.apply(model, ToMA(**LOSSLESS, granularity=granularity)):
        torch.testing.assert_close(call(model, x), dense)
    with foveate.apply(model, ToMA(granularity=granularity, **MERGES)):
        call(model, x)
    assert seen == [320, 160 if granularity == "block" else 320]
    hook.remove()


def test_images_that_share_their_tensor_with_filling_do_not_merge():
    for name, x in (("joyimage_plus", {"filling": 5}), ("hidream", {})):
        model = FAMILIES[name].make()
        x = FAMILIES[name].inputs(model, (16, 20), **x)
        dense = call(model, x)
        with foveate.apply(model, ToMA(**LOSSLESS)) as run:
            assert torch.equal(call(model, x), dense)
            assert re.search("fill|padded within the sequence", run.summary().layers[0].why)


@pytest.mark.parametrize(("name", "sparse"), in_turn(tiny.BY_MODULES, [(), SPARSE], each=2))
def test_models_that_merge_by_modules_alone(name, sparse):
    model, x = built(name, batch=2)
    dense = call(model, x)
    with foveate.apply(model, *sparse) if sparse else nullcontext():
        want = call(model, x)
    auto = (replace(one, slide="auto") for one in sparse)
    with foveate.apply(model, *auto, ToMA(**LOSSLESS, granularity="module")) as run:
        torch.testing.assert_close(call(model, x), want)
        assert all("ToMA" in row.method for row in run.summary().layers)
    with foveate.apply(model, ToMA(keep=1.0, skip=0, granularity="module")):
        assert torch.equal(call(model, x), dense)
    with foveate.apply(model, *sparse, ToMA(granularity="module", **MERGES)):
        assert (call(model, x) - dense).abs().max() > 1e-6
    assert torch.equal(call(model, x), dense)
    with pytest.raises(ValueError, match=r"merge with granularity=.module."):
        foveate.apply(model, ToMA())


@pytest.mark.parametrize("name", [name for name in tiny.SPARSE if name not in (*FAMILIES, *tiny.BY_MODULES)])
def test_models_whose_tokens_cannot_merge_refuse_it(name):
    with pytest.raises(ValueError, match="use HilbertA or LLSA alone"):
        foveate.apply(tiny.SPARSE[name].make(), ToMA())


@pytest.mark.parametrize(
    ("methods", "remedy"),
    [
        ((HilbertA(slide="diagonal"), ToMA()), "use slide=.auto. or .curve. beside it"),
        ((ToMA(), ToMA()), "choose one method of sparse attention, one of token merging, or both"),
        ((ToMA(skip=9),), "no block is left to merge with skip=9 .*: skip fewer"),
        ((ToMA(dense_layers="99"),), "layer 99"),
    ],
)
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_methods_that_do_not_fit_are_refused_with_the_remedy(name, methods, remedy):
    with pytest.raises(ValueError, match=remedy):
        foveate.apply(FAMILIES[name].make(), *methods)
