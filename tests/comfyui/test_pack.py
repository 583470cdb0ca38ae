"""Laws of the ComfyUI nodes: what they do to a model that calls attention and blocks as ComfyUI's models do."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from foveate import LLSA, HilbertA, ToMA

PACK = Path(__file__).parents[2] / "comfyui"
pytestmark = pytest.mark.usefixtures("no_grad")
TEXT, DIM, HEADS = 12, 32, 2
ALWAYS = 0.0, 1.0


@pytest.fixture(scope="module")
def pack():
    spec = importlib.util.spec_from_file_location("foveate_forward", PACK / "forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    if not skip_reshape:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def attend(q, k, v, heads, **kwargs):
    override = kwargs["transformer_options"].get("optimized_attention_override")
    return override(attention, q, k, v, heads, **kwargs) if override else attention(q, k, v, heads, **kwargs)


class Block(nn.Module):
    """A block whose queries and keys are changed by `pe`, and reach attention as [batch, heads, tokens, dim]."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM).double()

    def forward(self, x, pe, options):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        return x + attend(q + pe, k + pe, v, HEADS, skip_reshape=True, transformer_options=options)


class Flux(nn.Module):
    patch_size = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.double_blocks = nn.ModuleList(Block() for _ in range(2))
        self.single_blocks = nn.ModuleList(Block() for _ in range(3))
        self.embed = nn.Linear(16, DIM).double()

    def image(self, latent):
        patches = nn.functional.unfold(latent, 2, stride=2).mT
        return self.embed(patches)

    def _forward(self, x, timestep, context, y=None, ref_latents=None, transformer_options={}, **kwargs):  # noqa: B006
        options, text = transformer_options, context
        replace = options.get("patches_replace", {}).get("dit", {})
        image = torch.cat([self.image(latent) for latent in (x, *(ref_latents or []))], 1)
        tokens = text.shape[1] + image.shape[1]
        pe = torch.linspace(0, 1, tokens, dtype=torch.float64).view(1, 1, tokens, 1).expand(1, 1, tokens, DIM // HEADS)

        def double(block, args):
            out = block(torch.cat([args["txt"], args["img"]], 1), args["pe"], options)
            return {"txt": out[:, : args["txt"].shape[1]], "img": out[:, args["txt"].shape[1] :]}

        for i, block in enumerate(self.double_blocks):
            args = {"img": image, "txt": text, "pe": pe, "vec": None, "attn_mask": None}
            call = replace.get(("double_block", i))
            original = partial(double, block)
            out = call(args, {"original_block": original}) if call else original(args)
            image, text = out["img"], out["txt"]
        joined = torch.cat([text, image], 1)

        def single(block, args):
            return {"img": block(args["img"], args["pe"], options)}

        for i, block in enumerate(self.single_blocks):
            args, call = {"img": joined, "pe": pe, "vec": None}, replace.get(("single_block", i))
            original = partial(single, block)
            joined = (call(args, {"original_block": original}) if call else original(args))["img"]
        return joined


class Wan(nn.Module):
    """Attention of the image alone, as [batch, tokens, heads x dim], then cross-attention to the text."""

    patch_size = (1, 2, 2)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(DIM, 3 * DIM).double() for _ in range(4))
        self.embed = nn.Linear(16, DIM).double()

    def _forward(self, x, timestep, context, clip_fea=None, time_dim_concat=None, transformer_options={}, **kwargs):  # noqa: B006
        frames = nn.functional.unfold(x.transpose(1, 2).flatten(0, 1), 2, stride=2).mT
        tokens = self.embed(frames).view(x.shape[0], -1, DIM)
        for qkv in self.blocks:
            tokens = tokens + attend(*qkv(tokens).chunk(3, 2), heads=HEADS, transformer_options=transformer_options)
            tokens = tokens + attend(tokens, context, context, heads=HEADS, transformer_options=transformer_options)
        return tokens


WanModel = type("WanModel", (Wan,), {})


class Executor:
    def __init__(self, model):
        self.class_obj, self.original = model, model._forward

    def __call__(self, *args, **kwargs):
        return self.original(*args, **kwargs)


def inputs(cls, references=(), text=TEXT):
    torch.manual_seed(1)
    shape = (2, 4, 3, 16, 20) if cls is WanModel else (2, 4, 32, 40)
    latents = [torch.randn(2, 4, *sides, dtype=torch.float64) for sides in references]
    context = torch.randn(2, text, DIM, dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64), torch.ones(2), context, {"ref_latents": latents} if latents else {}


def options(sigma=0.5, **more):
    return {"sigmas": torch.tensor([sigma, sigma]), "cond_or_uncond": [0, 1], **more}


def run(wrapper, model, case, **more):
    x, time, context, named = case
    return wrapper(Executor(model), x, time, context, transformer_options=options(**more), **named)


CASES = [(Flux, ()), (Flux, ((16, 16),)), (WanModel, ())]
every_case = pytest.mark.parametrize(("cls", "references"), CASES, ids=["flux", "kontext", "wan"])


def mask_of(method, number, grids, text):
    """Which of the tokens of a layer attend to which, in raster order behind the text."""
    plan = method.plan(grids, text)
    place = torch.cat([torch.arange(text), plan.order + text]).argsort()
    return plan.tables[number % len(plan.tables)].to_dense()[place][:, place]


@every_case
@pytest.mark.parametrize("method", [HilbertA(tiles=1), HilbertA(centre=1.0, tiles=4), HilbertA(tiles=4, align=1)])
def test_attention_is_that_of_the_mask(pack, cls, references, method):
    model, case = cls(), inputs(cls, references)
    grids = ((3, 8, 10),) if cls is WanModel else ((16, 20), *((8, 8) for _ in references))
    text, calls = 0 if cls is WanModel else TEXT, []

    def masked(func, q, k, v, heads, **kwargs):
        length = 2 if kwargs.get("skip_reshape") else 1
        if q.shape[length] == k.shape[length]:
            calls.append(mask_of(method, len(calls), grids, text))
            kwargs["mask"] = calls[-1]
        return func(q, k, v, heads, **kwargs)

    want = model._forward(*case[:3], transformer_options=options(optimized_attention_override=masked), **case[3])
    torch.testing.assert_close(run(pack.Foveated(method, ALWAYS), model, case), want)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    assert torch.allclose(want, dense) == (method.tiles == 1 or method.centre == 1)


@every_case
def test_other_calls_and_dense_layers_go_to_the_former_override(pack, cls, references):
    model, case, seen = cls(), inputs(cls, references), []

    def former(func, *args, **kwargs):
        seen.append(args[0].shape)
        return func(*args, **kwargs)

    given = options(optimized_attention_override=former)
    wrapper = pack.Foveated(HilbertA(tiles=4, dense_layers="0-1"), ALWAYS)
    x, time, context, named = case
    wrapper(Executor(model), x, time, context, transformer_options=given, **named)
    assert len(seen) == (6 if cls is WanModel else 2)
    assert given["optimized_attention_override"] is former
    assert dict(wrapper.layers) == {"": 2 if cls is WanModel else 3, "dense": 2}


@every_case
def test_steps_outside_the_window_are_dense(pack, cls, references):
    model, case = cls(), inputs(cls, references)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    wrapper = pack.Foveated(HilbertA(tiles=4), (0.2, 0.8))
    for sigma, equal in ((0.9, True), (0.8, False), (0.2, False), (0.1, True)):
        assert torch.equal(run(wrapper, model, case, sigma=sigma), dense) == equal
    wrapper.finish()
    assert not wrapper.outcomes


@pytest.mark.parametrize("references", [(), ((16, 16),)], ids=["flux", "kontext"])
def test_merging_everything_into_itself_is_the_dense_model(pack, references):
    model, case = Flux(), inputs(Flux, references)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    exactly = ToMA(keep=0.999, tile=(2, 2), weights="hard", skip=0)
    torch.testing.assert_close(run(pack.Foveated(exactly, ALWAYS), model, case), dense)
    wrapper = pack.Foveated(ToMA(keep=0.5, skip=2), ALWAYS)
    assert (run(wrapper, model, case) - dense).abs().max() > 1e-3
    assert dict(wrapper.layers) == {"": 3, "dense": 2}


def test_merged_blocks_call_the_replacements_that_were_there(pack):
    model, case, seen = Flux(), inputs(Flux), []

    def former(args, extra):
        seen.append(args["img"].shape[1])
        return extra["original_block"](args)

    x, time, context, _ = case
    there = {"dit": {("double_block", 1): former}}
    wrapper = pack.Foveated(ToMA(keep=0.5, skip=0), ALWAYS)
    wrapper(Executor(model), x, time, context, transformer_options=options(patches_replace=there))
    assert seen == [160]
    assert there == {"dit": {("double_block", 1): former}}


def test_a_plan_of_merging_lasts_for_its_steps_and_is_forgotten_after_the_run(pack):
    model, case = Flux(), inputs(Flux)
    wrapper = pack.Foveated(ToMA(keep=0.5, skip=0, dst_every=2, weights_every=2), ALWAYS)
    made = []
    for sigma in (1.0, 0.9, 0.8, 0.7, 1.0):
        run(wrapper, model, case, sigma=sigma)
        made.append(next(iter(wrapper._merges.values()))[1])
    assert [made[i] is made[i + 1] for i in range(3)] == [True, False, True]
    wrapper.finish()
    assert not wrapper._merges


def test_what_cannot_be_sparse_stays_dense_and_says_why(pack, caplog):
    model, case = WanModel(), inputs(WanModel, text=240)
    wrapper = pack.Foveated(HilbertA(tiles=4), ALWAYS)
    dense = model._forward(*case[:3], transformer_options=options())
    assert torch.equal(run(wrapper, model, case), dense)
    assert "240 text tokens cannot be told from as many image tokens" in caplog.text
    assert torch.equal(run(pack.Foveated(LLSA(), ALWAYS), model, case), dense)
    with pytest.raises(ValueError, match="not merged in WanModel"):
        pack.Foveated(ToMA(keep=0.5), ALWAYS).check(model)
    assert pack.family_of(nn.Linear(1, 1)) is None


def test_the_example_workflow_names_our_nodes(pack):
    source = (PACK / "nodes.py").read_text()
    for path in (PACK / "example_workflows").glob("*.json"):
        graph = json.loads(path.read_text())
        nodes = graph["nodes"] if "nodes" in graph else graph.values()
        classes = {node.get("type") or node["class_type"] for node in nodes}
        ours = {name for name in classes if name.startswith("Foveate")}
        assert ours
        assert all(f'node_id="{name}"' in source for name in ours)
