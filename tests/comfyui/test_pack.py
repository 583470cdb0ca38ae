"""Laws of the ComfyUI nodes: what they do to a model that calls attention and blocks as ComfyUI's models do."""

import ast
import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from log_linear_oracle import log_linear
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from foveate import LLSA, HilbertA, StepCache, ToMA
from foveate.diffusers.preset import Preset
from foveate.ops.hierarchical_pooling import select_blocks

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


class Joint(nn.Module):
    """Double blocks of image and text, then single blocks of both in one sequence, as FLUX calls them."""

    patch_size, pe_dim, image_first = 2, 2, False
    blocks = "double_blocks", "single_blocks"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, count in zip(self.blocks, (2, 3), strict=False):
            self.add_module(name, nn.ModuleList(Block() for _ in range(count)))
        self.embed = nn.Linear(16, DIM).double()

    def image(self, latent):
        return self.embed(nn.functional.unfold(latent, 2, stride=2).mT)

    def join(self, text, image):
        return torch.cat([image, text] if self.image_first else [text, image], 1)

    def split(self, x, text):
        sizes = [x.shape[1] - text, text]
        return x.split(sizes, 1)[::-1] if self.image_first else x.split(sizes[::-1], 1)

    def _forward(self, x, timestep, context, y=None, ref_latents=None, transformer_options={}, **kwargs):  # noqa: B006
        options, text = transformer_options, context
        replace = options.get("patches_replace", {}).get("dit", {})
        image = torch.cat([self.image(latent) for latent in (x, *(ref_latents or []))], 1)
        places = self.join(torch.zeros(1, text.shape[1], 1), torch.linspace(0.1, 1, image.shape[1])[None, :, None])
        pe = places.double().unsqueeze(3 - self.pe_dim).expand(2, *(-1,) * 2, DIM // HEADS)

        def rows(args):
            return args["pe"] if self.pe_dim == 2 else args["pe"].transpose(1, 2)

        def double(block, args):
            out = block(self.join(args["txt"], args["img"]), rows(args), options)
            return dict(zip(("txt", "img"), self.split(out, args["txt"].shape[1]), strict=True))

        def single(block, args):
            return {"img": block(args["img"], rows(args), options)}

        def run(kind, name, call, args):
            for i, block in enumerate(getattr(self, name)):
                original, replaced = partial(call, block), replace.get((kind, i))
                args |= replaced(args, {"original_block": original}) if replaced else original(args)
            return args

        shared = {"pe": pe, "vec": None, "attn_mask": None}
        args = run("double_block", self.blocks[0], double, {"img": image, "txt": text, **shared})
        if len(self.blocks) == 1:
            return args["img"]
        return run("single_block", self.blocks[1], single, {"img": self.join(args["txt"], args["img"]), **shared})[
            "img"
        ]


Flux = type("Flux", (Joint,), {})
Qwen = type("QwenImageTransformer2DModel", (Joint,), {"pe_dim": 1, "blocks": ("transformer_blocks",)})
Hunyuan = type("HunyuanVideo", (Joint,), {})


class Wan(nn.Module):
    """Attention of the image alone, as [batch, tokens, heads x dim], then cross-attention to the text."""

    image_first = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(DIM, 3 * DIM).double() for _ in range(4))
        self.embed = nn.Linear(16, DIM).double()

    def _forward(self, x, timestep, context, clip_fea=None, time_dim_concat=None, transformer_options={}, **kwargs):  # noqa: B006
        frames = nn.functional.unfold(x.transpose(1, 2).flatten(0, 1), 2, stride=2).mT
        tokens, options = self.embed(frames).view(x.shape[0], -1, DIM), transformer_options
        replace = options.get("patches_replace", {}).get("dit", {})
        pe = torch.linspace(0, 1, tokens.shape[1]).double().view(1, -1, 1, 1)

        def call(qkv, args):
            x, text = args["img"], args["txt"]
            q, k, v = (qkv(x) + args["pe"].flatten(2)).chunk(3, 2)
            x = x + attend(q, k, v, heads=HEADS, transformer_options=options)
            return {"img": x + attend(x, text, text, heads=HEADS, transformer_options=options)}

        for i, qkv in enumerate(self.blocks):
            args = {"img": tokens, "txt": context, "vec": timestep.view(len(timestep), -1, 1, 1), "pe": pe}
            original, replaced = partial(call, qkv), replace.get(("double_block", i))
            tokens = (replaced(args, {"original_block": original}) if replaced else original(args))["img"]
        return tokens


def cosmos(self, x, timesteps, context, fps=None, **kwargs):
    return Wan._forward(self, x, timesteps, context, **kwargs)


def aura_flow(self, x, timestep, context, transformer_options={}, **kwargs):  # noqa: B006
    text = torch.cat([self.register_tokens.expand(len(x), -1, -1), context], 1)
    return Joint._forward(self, x, timestep, text, transformer_options=transformer_options)


def hi_dream(self, x, t, context, encoder_hidden_states_llama3, image_cond=None, transformer_options={}):  # noqa: B006
    text = torch.cat([context, *encoder_hidden_states_llama3.unbind(1)], 1)
    return Joint._forward(self, x, t, text, transformer_options=transformer_options)


WanModel = type("WanModel", (Wan,), {"patch_size": (1, 2, 2)})
Cosmos = type("MiniTrainDIT", (Wan,), {"patch_temporal": 1, "patch_spatial": 2, "_forward": cosmos})


class UNet(nn.Module):
    """Two levels of self- and cross-attention, the second of half the size, as [batch, tokens, heads x dim]."""

    image_first, channel_mult = False, (1, 2)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, 3 * DIM).double() for _ in range(4))
        self.embed = nn.Linear(4, DIM).double()

    def _forward(self, x, timesteps=None, context=None, y=None, transformer_options={}, **kwargs):  # noqa: B006
        image = self.embed(x.movedim(1, 3))
        outs = []
        for i, qkv in enumerate(self.layers):
            if i == 2:
                image = nn.functional.avg_pool2d(image.movedim(3, 1), 2, ceil_mode=True).movedim(1, 3)
            tokens = image.flatten(1, 2)
            tokens = tokens + attend(*qkv(tokens).chunk(3, 2), heads=HEADS, transformer_options=transformer_options)
            tokens = tokens + attend(tokens, context, context, heads=HEADS, transformer_options=transformer_options)
            image = tokens.view_as(image)
            outs.append(tokens)
        return torch.cat(outs, 1)


UNetModel = type("UNetModel", (UNet,), {})
Registers = {"register_tokens": torch.ones(1, 8, DIM).double()}
AuraFlow = type("MMDiT", (Joint,), {**Registers, "_forward": aura_flow})
HiDream = type("HiDreamImageTransformer2DModel", (Joint,), {"image_first": True, "_forward": hi_dream})
Lumina = type("NextDiT", (Flux,), {"pad_tokens_multiple": 16, "_forward": lambda self, x, time, context, **kwargs: (
    Flux._forward(self, x, time, nn.functional.pad(context, (0, 0, 0, 4)), **kwargs))})  # fmt: skip


class Executor:
    def __init__(self, model):
        self.class_obj, self.original = model, model._forward

    def __call__(self, *args, **kwargs):
        return self.original(*args, **kwargs)


def inputs(cls, references=(), text=TEXT):
    torch.manual_seed(1)
    shape = (2, 4, 3, 16, 20) if issubclass(cls, Wan) else (2, 4, 32, 40)
    latents = [torch.randn(2, 4, *sides, dtype=torch.float64) for sides in references]
    context = torch.randn(2, text, DIM, dtype=torch.float64)
    named = {"ref_latents": latents} if latents else {}
    if cls is HiDream:
        named["encoder_hidden_states_llama3"] = torch.randn(2, 2, 5, DIM, dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64), torch.ones(2), context, named


def by_level(method, grids, text=0):
    """An override that masks self-attention of a UNet with one layer order, by the number of tokens."""
    masks = {prod(grid): mask_of(method, 0, (grid,), text) for grid in grids}
    return masked(lambda _, tokens: masks.get(tokens))


def options(sigma=0.5, **more):
    return {"sigmas": torch.tensor([sigma, sigma]), "cond_or_uncond": [0, 1], **more}


def run(wrapper, model, case, **more):
    x, time, context, named = case
    return wrapper(Executor(model), x, time, context, transformer_options=options(**more), **named)


CASES = [(Flux, ()), (Flux, ((16, 16),)), (WanModel, ()), (Qwen, ()), (Hunyuan, ())]
IDS = ["flux", "kontext", "wan", "qwen", "hunyuan"]
every_case = pytest.mark.parametrize(("cls", "references"), CASES, ids=IDS)
unmerged = [(Cosmos, ()), (AuraFlow, ()), (HiDream, ()), (Lumina, ())]
sparse_case = pytest.mark.parametrize(
    ("cls", "references"), [*CASES, *unmerged], ids=[*IDS, "cosmos", "auraflow", "hidream", "z-image"]
)


def mask_of(method, number, grids, text, image_first=False):
    """Which of the tokens of a layer attend to which, in raster order behind or before the text."""
    plan = method.plan(grids, text)
    images = 0 if image_first else text
    order = plan.orders[number % len(plan.orders)]
    words = torch.arange(text) + (len(order) if image_first else 0)
    place = torch.cat([words, order + images]).argsort()
    return plan.tables[number % len(plan.tables)].to_dense()[place][:, place]


def grids_of(cls, references):
    """Grids of image tokens, and the number of text tokens in one sequence with them."""
    if issubclass(cls, Wan):
        return ((3, 8, 10),), 0
    return ((16, 20), *((8, 8) for _ in references)), TEXT + {AuraFlow: 8, HiDream: 10, Lumina: 4}.get(cls, 0)


def masked(mask):
    """An override that masks self-attention by its number in the forward pass and its number of tokens."""
    calls = []

    def override(func, q, k, v, heads, **kwargs):
        length = 2 if kwargs.get("skip_reshape") else 1
        if q.shape[length] == k.shape[length]:
            kwargs["mask"] = mask(len(calls), q.shape[length])
            calls.append(1)
        return func(q, k, v, heads, **kwargs)

    return override


@sparse_case
@pytest.mark.parametrize(
    "method", [HilbertA(tiles=1), HilbertA(centre=1.0, tiles=4), HilbertA(tiles=4, align=1, slide="diagonal")]
)
def test_attention_is_that_of_the_mask(pack, cls, references, method):
    model, case, (grids, text) = cls(), inputs(cls, references), grids_of(cls, references)
    override = masked(lambda number, _: mask_of(method, number, grids, text, cls.image_first))
    want = model._forward(*case[:3], transformer_options=options(optimized_attention_override=override), **case[3])
    torch.testing.assert_close(run(pack.Foveated((method, ALWAYS)), model, case), want)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    assert torch.allclose(want, dense) == (method.tiles == 1 or method.centre == 1)


@sparse_case
def test_other_calls_and_dense_layers_go_to_the_former_override(pack, cls, references):
    model, case, seen = cls(), inputs(cls, references), []

    def former(func, *args, **kwargs):
        seen.append(args[0].shape)
        return func(*args, **kwargs)

    given = options(optimized_attention_override=former)
    wrapper = pack.Foveated((HilbertA(tiles=4, dense_layers="0-1"), ALWAYS))
    x, time, context, named = case
    wrapper(Executor(model), x, time, context, transformer_options=given, **named)
    layers = {WanModel: 4, Cosmos: 4, Qwen: 2}.get(cls, 5)
    assert len(seen) == (6 if issubclass(cls, Wan) else 2)
    assert given["optimized_attention_override"] is former
    assert (wrapper.sparse.layers[""], wrapper.sparse.layers["dense"]) == (layers - 2, 2)


def test_a_unet_has_a_plan_for_each_level_and_small_levels_stay_dense(pack):
    model, case = UNetModel(), inputs(UNetModel)
    x, time, context, _ = case

    def drawn(method):
        wrapper = pack.Foveated((method, ALWAYS))
        return run(wrapper, model, case), wrapper.sparse

    method = HilbertA(tiles=4, period=1)
    override = by_level(method, [(32, 40), (16, 20)])
    want = model._forward(x, time, context, transformer_options=options(optimized_attention_override=override))
    got, part = drawn(method)
    torch.testing.assert_close(got, want)
    assert dict(part.layers) == {"": 4, "dense": 0}
    dense = model._forward(x, time, context, transformer_options=options())
    torch.testing.assert_close(drawn(HilbertA(tiles=1))[0], dense)
    for small in (HilbertA(tiles=16), HilbertA(tiles=4, min_tokens=1000)):  # 320 tokens are too few
        got, part = drawn(small)
        assert dict(part.layers) == {"": 2, "dense": 2}
        assert not part.outcomes.keys() - {""}
    got, part = drawn(HilbertA(min_tokens=9999))
    assert torch.equal(got, dense)
    assert list(part.outcomes) == ["1280 image tokens are fewer than min_tokens=9999"]
    with pytest.raises(ValueError, match=r"not merged in UNetModel, only in .*: use HilbertA or LLSA"):
        pack.Foveated((ToMA(keep=0.5), ALWAYS)).check(model)


@sparse_case
def test_llsa_of_all_blocks_is_dense_and_of_some_is_that_of_the_definition(pack, cls, references, monkeypatch):
    monkeypatch.setitem(globals(), "HEADS", 1)  # heads of 32 channels
    model, case, (grids, text) = cls(), inputs(cls, references), grids_of(cls, references)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    everything = LLSA(top_k=64, enrich=False, min_tokens=0)
    torch.testing.assert_close(run(pack.Foveated((everything, ALWAYS)), model, case), dense)
    few = LLSA(top_k=4, min_tokens=0)
    plan = few.plan(grids, text)
    tokens = text + sum(map(prod, grids))
    words = torch.arange(text) + (tokens - text if cls.image_first else 0)
    place = torch.cat([words, plan.orders[0] + (0 if cls.image_first else text)])

    def by_definition(func, q, k, v, heads, **kwargs):
        shaped = kwargs.get("skip_reshape")
        if not q.shape[2 if shaped else 1] == k.shape[2 if shaped else 1] == tokens:
            return func(q, k, v, heads, **kwargs)
        q, k, v = ((x if shaped else x[:, None])[:, :, place] for x in (q, k, v))
        images = [x[:, :, text:] for x in (q, k, v)]
        selection = select_blocks(*images[:2], top_k=4)
        extra = {"extra_k": k[:, :, :text], "extra_v": v[:, :, :text]} if text else {}
        image = log_linear(*images, selection, **extra)[0]
        out = torch.cat([scaled_dot_product_attention(q[:, :, :text], k, v), image], 2)
        return out[:, :, place.argsort()].transpose(1, 2).flatten(2)

    given = options(optimized_attention_override=by_definition)
    want = model._forward(*case[:3], transformer_options=given, **case[3])
    wrapper = pack.Foveated((few, ALWAYS))
    torch.testing.assert_close(run(wrapper, model, case), want)
    assert not torch.allclose(want, dense)
    assert wrapper.sparse.layers[""]


def test_llsa_leaves_heads_that_it_does_not_support_dense_and_says_so_once(pack, caplog):
    model, case = Flux(), inputs(Flux)
    wrapper = pack.Foveated((LLSA(min_tokens=0), ALWAYS))
    dense = model._forward(*case[:3], transformer_options=options())
    assert torch.equal(run(wrapper, model, case), dense)
    assert caplog.text.count("log-linear attention does not support these heads") == 1
    wrapper.finish()
    assert "1 of 1 forward passes (0 attention calls or blocks with it, 5 without)" in caplog.text


@every_case
def test_steps_outside_the_window_are_dense(pack, cls, references):
    model, case = cls(), inputs(cls, references)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    wrapper = pack.Foveated((HilbertA(tiles=4), (0.2, 0.8)))
    for sigma, equal in ((0.9, True), (0.8, False), (0.2, False), (0.1, True)):
        assert torch.equal(run(wrapper, model, case, sigma=sigma), dense) == equal
    wrapper.finish()
    assert not wrapper.sparse.outcomes


@every_case
def test_merging_everything_into_itself_is_the_dense_model(pack, cls, references):
    model, case = cls(), inputs(cls, references)
    dense = model._forward(*case[:3], transformer_options=options(), **case[3])
    exactly = ToMA(keep=0.999, tile=(2, 2), weights="hard", skip=0)
    wrapper = pack.Foveated((exactly, ALWAYS))
    torch.testing.assert_close(run(wrapper, model, case), dense)
    assert not wrapper.merging.layers["dense"]
    blocks, kinds = (4, 1) if cls is WanModel else (2, 1) if cls is Qwen else (5, 2)
    wrapper = pack.Foveated((ToMA(keep=0.5, skip=1), ALWAYS))
    assert (run(wrapper, model, case) - dense).abs().max() > 1e-3
    assert dict(wrapper.merging.layers) == {"": blocks - kinds, "dense": kinds}


@every_case
@pytest.mark.parametrize("tiles", [1, 4])
def test_sparse_attention_beside_a_merge_of_everything_into_itself_is_as_alone(pack, cls, references, tiles):
    model, case = cls(), inputs(cls, references)
    sparse, exactly = HilbertA(tiles=tiles, slide="curve", dense_layers="1"), ToMA(keep=0.999, weights="hard", skip=1)
    auto = replace(sparse, slide="auto")
    alone, both = pack.Foveated((sparse, ALWAYS)), pack.Foveated((auto, ALWAYS), (exactly, ALWAYS))
    want, dense = run(alone, model, case), model._forward(*case[:3], transformer_options=options(), **case[3])
    torch.testing.assert_close(run(both, model, case), want)
    assert torch.allclose(want, dense) == (tiles == 1)
    assert both.sparse.layers == alone.sparse.layers
    assert both.merging.layers[""]


@every_case
def test_merged_tokens_attend_as_the_tokens_of_their_region(pack, cls, references, monkeypatch):
    model, case, (grids, text) = cls(), inputs(cls, references), grids_of(cls, references)
    sparse, merging = HilbertA(tiles=4, slide="curve"), ToMA(keep=0.5, skip=1)
    both = run(pack.Foveated((sparse, ALWAYS), (merging, ALWAYS)), model, case)
    plan = sparse.plan(grids, text)
    regions = merging.regions_along(plan, grids[0])
    places, first = [*range(text)], text
    for group in regions.groups:
        for _ in range(group.number):
            places += [first] * group.kept if group.merges else range(first, first + group.tokens)
            first += group.tokens

    def mask(number, tokens):
        if tokens != text + regions.kept:
            return mask_of(sparse, number, grids, text, cls.image_first)
        merged = plan.tables[number % len(plan.tables)].to_dense()[places][:, places]
        return merged

    monkeypatch.setattr(ToMA, "regions", lambda *args, **kwargs: regions)
    x, time, context, named = case
    given = options(optimized_attention_override=masked(mask))
    merged = pack.Foveated((merging, ALWAYS))
    want = merged(Executor(model), x, time, context, transformer_options=given, **named)
    torch.testing.assert_close(both, want)
    assert not torch.allclose(want, run(merged, model, case))


def test_each_of_two_methods_has_a_window_and_reasons_of_its_own(pack, caplog):
    model, case = WanModel(), inputs(WanModel)
    sparse, merging = HilbertA(tiles=4, slide="curve"), ToMA(keep=0.5, skip=0)
    both = pack.Foveated((sparse, (0.4, 1.0)), (merging, (0.0, 0.6)))
    alone = {method: pack.Foveated((method, ALWAYS)) for method in (sparse, merging)}
    for sigma, method in ((0.9, sparse), (0.1, merging)):
        assert torch.equal(run(both, model, case, sigma=sigma), run(alone[method], model, case, sigma=sigma))
    run(both, model, case)
    assert [part.outcomes[""] for part in both.parts] == [2, 2]
    kept = merging.regions_along(sparse.plan(((3, 8, 10),), 0), (3, 8, 10)).kept
    wordy = inputs(WanModel, text=kept)
    assert torch.equal(run(both, model, wordy), run(alone[sparse], model, wordy))
    assert f"ToMA keep=0.5 skip=0 stays dense: {kept} text tokens cannot be distinguished" in caplog.text


class Patcher:
    """A model as ComfyUI's nodes hand it on: copies share the weights."""

    def __init__(self, model, wrappers=(), callbacks=()):
        self.model, self.wrappers, self.callbacks = model, dict(wrappers), dict(callbacks)

    def clone(self):
        return Patcher(self.model, self.wrappers, self.callbacks)

    def get_model_object(self, name):
        return (
            self.model if name == "diffusion_model" else SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)
        )

    def get_wrappers(self, kind, key):
        return [self.wrappers[kind, key]] if (kind, key) in self.wrappers else []

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.pop((kind, key), None)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks.pop((kind, key), None)

    def add_wrapper_with_key(self, kind, key, wrapper):
        assert (kind, key) not in self.wrappers
        self.wrappers[kind, key] = wrapper

    def add_callback_with_key(self, kind, key, callback):
        assert (kind, key) not in self.callbacks
        self.callbacks[kind, key] = callback


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """The nodes, in the place of ComfyUI a stub, whose models are in `tmp_path`."""
    comfy, api, folders = ModuleType("comfy"), ModuleType("comfy_api"), ModuleType("folder_paths")
    known = {}
    folders.models_dir, folders.add_model_folder_path = str(tmp_path), known.__setitem__
    folders.get_filename_list = lambda name: sorted(path.name for path in Path(known[name]).glob("*"))
    folders.get_full_path_or_raise = lambda name, file: str(Path(known[name]) / file)
    comfy.patcher_extension, api.latest = MagicMock(), MagicMock()
    api.latest.io.ComfyNode, api.latest.io.NodeOutput = object, lambda model: model
    version = ModuleType("comfyui_version")
    version.__version__ = "0.33.0"
    stubs = {"comfy": comfy, "comfy_api": api, "folder_paths": folders, "comfyui_version": version}
    stubs |= {"comfy.patcher_extension": comfy.patcher_extension, "comfy_api.latest": api.latest}
    spec = importlib.util.spec_from_file_location("foveate_nodes", PACK / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    for name, module in (stubs | {"foveate_nodes": package}).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("foveate_nodes.nodes", "foveate_nodes.forward"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec.loader.exec_module(package)
    yield package.nodes
    for name in ("foveate_nodes.nodes", "foveate_nodes.forward"):
        sys.modules.pop(name, None)


def test_an_old_comfyui_is_refused(nodes, monkeypatch):
    monkeypatch.setattr(sys.modules["comfyui_version"], "__version__", "0.3.64")
    with pytest.raises(ImportError, match=r"need ComfyUI 0\.14 or newer, and this is 0\.3\.64: update"):
        (package := sys.modules["foveate_nodes"]).__spec__.loader.exec_module(package)


SPARSE = {"tiles": 4, "period": 4, "centre": 0.25, "curve": "hilbert", "reference": "global"}
MERGE = {"keep": 0.5, "tile": 8, "skip": 1, "every": 5}


def test_chained_nodes_work_together_in_any_order_and_leave_the_models_before_them(nodes):
    loaded, case = Patcher(Flux()), inputs(Flux)

    def tiles(model):
        return nodes.FoveateHilbertA.execute(model, **SPARSE)

    def merge(model):
        return nodes.FoveateToMA.execute(model, **MERGE, start_percent=0.2)

    def drawn(patched):
        (wrapper,), (_,) = patched.wrappers.values(), patched.callbacks.values()
        return {type(part.method): part.window for part in wrapper.parts}, run(wrapper, patched.model, case)

    sparse, merged = tiles(loaded), merge(loaded)
    alone = [drawn(sparse), drawn(merged)]
    (windows, both), (others, reverse) = drawn(merge(sparse)), drawn(tiles(merged))
    assert windows == others == {HilbertA: (0.0, 1.0), ToMA: (0.0, 0.8)}
    assert torch.equal(both, reverse)
    for patched, (windows, before) in zip((sparse, merged), alone, strict=True):
        assert len(windows) == 1
        assert torch.equal(drawn(patched)[1], before)
        assert not torch.allclose(both, before)
    assert not loaded.wrappers
    assert not loaded.callbacks
    with pytest.raises(ValueError, match=r"or both, not HilbertA \+ ToMA \+ HilbertA"):
        tiles(merge(sparse))
    with pytest.raises(ValueError, match="tokens are not merged in NextDiT"):
        merge(tiles(Patcher(Lumina())))


@pytest.mark.usefixtures("as_a_user")
def test_a_schedule_follows_the_noise_level(nodes):
    loaded, case = Patcher(Flux()), inputs(Flux)
    tiles = {**SPARSE, "schedule": "((0, dense), (0.2, 2), (0.5, 4))"}
    keep = {**MERGE, "schedule": "((0, 0.75), (0.5, 0.5))", "start_percent": 0.2}
    x, time, context, named = case
    dense = loaded.model._forward(x, time, context, transformer_options={}, **named)
    methods = {"tiles": (nodes.FoveateHilbertA, tiles), "keep": (nodes.FoveateToMA, keep)}
    for option, (node, given) in methods.items():
        scheduled = node.execute(loaded, **given)
        (wrapper,) = scheduled.wrappers.values()
        for sigma, value in ((0.95, None), (0.8, 2), (0.5, 4), (0.1, 4)):
            got = run(wrapper, loaded.model, case, sigma=sigma)
            if value is None:
                assert torch.equal(got, dense)
                continue
            plain = {**given, "schedule": "", option: {2: 0.75, 4: 0.5}[value] if option == "keep" else value}
            (alone,) = node.execute(loaded, **plain).wrappers.values()
            assert torch.equal(got, run(alone, loaded.model, case, sigma=sigma))
        with pytest.raises(ValueError, match=f"{option} must be"):
            node.execute(loaded, **{**given, "schedule": "0: dense"})


def test_a_preset_has_all_its_methods(nodes, tmp_path):
    models = [{"class": "FluxTransformer2DModel", "config": {}}]
    path, methods = tmp_path / "foveate" / "preset.json", (HilbertA(tiles=4, slide="curve"), ToMA(skip=1))
    path.parent.mkdir()
    (path.parent / "notes.txt").write_text("no preset")
    Preset(methods=methods, models=models, size=(512, 640), grids=(((16, 20),),)).save(path)
    loaded = Patcher(Flux())
    nodes.FoveatePreset.define_schema()
    listed = [call for call in nodes.io.Combo.Input.call_args_list if call.args == ("preset",)]
    assert listed[-1].kwargs["options"] == ["preset.json"]
    patched = nodes.FoveatePreset.execute(loaded, "preset.json")
    (wrapper,) = patched.wrappers.values()
    assert (*wrapper.methods,) == methods
    with pytest.raises(ValueError, match="a preset has all its methods"):
        nodes.FoveateHilbertA.execute(patched, **SPARSE)
    with pytest.raises(ValueError, match="a preset has all its methods"):
        nodes.FoveatePreset.execute(nodes.FoveateHilbertA.execute(loaded, **SPARSE), "preset.json")
    before = nodes.FoveatePreset.fingerprint_inputs("preset.json")
    Preset(methods=methods[:1], models=models, size=(512, 640), grids=()).save(path)
    assert nodes.FoveatePreset.fingerprint_inputs("preset.json") != before


def test_nodes_take_automatic_tiles_the_slide_of_a_lora_and_llsa(nodes):
    def method(node, **given):
        (wrapper,) = node.execute(Patcher(Flux()), **given).wrappers.values()
        return wrapper.methods[0]

    assert method(nodes.FoveateHilbertA, **{**SPARSE, "tiles": 0}) == HilbertA(tiles="auto")
    assert method(nodes.FoveateHilbertA, **SPARSE, slide="curve") == HilbertA(tiles=4, slide="curve")
    late = {**SPARSE, "schedule": "((0, dense), (0.2, auto))"}
    assert method(nodes.FoveateHilbertA, **late) == HilbertA(tiles=((0, "dense"), (0.2, "auto")))
    llsa = {"top_k": 8, "block_size": "32", "curve": "hilbert", "start_percent": 0.4}
    want = LLSA(top_k=8, block_size=32, curve="hilbert", start_percent=0.4)
    assert method(nodes.FoveateLLSA, **llsa) == want
    assert method(nodes.FoveateLLSA, **llsa, schedule="((0, 16), (0.6, 8))") == replace(
        want, top_k=((0, 16), (0.6, 8))
    )
    both = nodes.FoveateToMA.execute(nodes.FoveateLLSA.execute(Patcher(Flux()), **llsa), **MERGE)
    assert len(both.wrappers) == 1


def test_blocks_skip_as_in_diffusers_and_a_modulation_of_each_frame_stays_dense(pack):
    wrapper = pack.Foveated((ToMA(keep=0.5), ALWAYS))
    run(wrapper, Flux(), inputs(Flux))
    assert dict(wrapper.merging.layers) == {"": 2, "dense": 3}  # both double blocks, a third of the single ones
    wrapper = pack.Foveated((ToMA(keep=0.5, skip=0, dense_layers="1, 3"), ALWAYS))
    run(wrapper, Flux(), inputs(Flux))
    assert dict(wrapper.merging.layers) == {"": 3, "dense": 2}
    x, _, context, named = inputs(WanModel)
    wrapper = pack.Foveated((ToMA(keep=0.5, skip=0), ALWAYS))
    run(wrapper, WanModel(), (x, torch.ones(2, 3), context, named))
    assert dict(wrapper.merging.layers) == {"dense": 4}


def test_merged_blocks_call_the_replacements_that_were_there(pack):
    model, case, seen = Flux(), inputs(Flux), []

    def former(args, extra):
        seen.append(args["img"].shape[1])
        return extra["original_block"](args)

    x, time, context, _ = case
    there = {"dit": {("double_block", 1): former}}
    wrapper = pack.Foveated((ToMA(keep=0.5, skip=0), ALWAYS))
    wrapper(Executor(model), x, time, context, transformer_options=options(patches_replace=there))
    assert seen == [160]
    assert there == {"dit": {("double_block", 1): former}}


@every_case
def test_each_kind_of_blocks_has_a_plan_of_its_first_tokens(pack, cls, references, monkeypatch):
    model, case, seen, make = cls(), inputs(cls, references), [], ToMA.plan
    monkeypatch.setattr(ToMA, "plan", lambda method, x, *args: seen.append(x) or make(method, x, *args))
    run(pack.Foveated((ToMA(keep=0.5, skip=0), ALWAYS)), model, case)
    assert len(seen) == (1 if cls in (WanModel, Qwen) else 2)
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def test_a_plan_of_merging_lasts_for_its_steps_and_is_forgotten_after_the_run(pack):
    model, case = Flux(), inputs(Flux)
    wrapper = pack.Foveated((ToMA(keep=0.5, skip=0, dst_every=2, weights_every=2), ALWAYS))
    made = []
    for sigma in (1.0, 0.9, 0.8, 0.7, 1.0):
        run(wrapper, model, case, sigma=sigma)
        made.append(next(iter(wrapper._merges.values()))[1])
    assert [made[i] is made[i + 1] for i in range(3)] == [True, False, True]
    halves = pack.Foveated((ToMA(keep=0.5, skip=0, dst_every=2, weights_every=1), ALWAYS))
    made = []
    for sigma in (1.0, 0.9):
        run(halves, model, case, sigma=sigma)
        made.append(next(iter(halves._merges.values()))[1])
    assert made[0] is not made[1]
    assert torch.equal(made[0].chosen[0], made[1].chosen[0])
    wrapper.finish()
    assert not wrapper._merges


def test_each_window_of_a_tiled_image_and_each_image_has_a_plan_of_its_own(pack):
    """Two windows at one noise level shared a plan, and so did a second image at a higher level."""
    model, method = Flux(), ToMA(keep=0.5, skip=0, dst_every=9, weights_every=9)
    x, *others = inputs(Flux)
    windows = [(x, *others), (x.flip(2), *others)]

    def alone(case, sigma):
        return run(pack.Foveated((method, ALWAYS)), model, case, sigma=sigma)

    wrapper = pack.Foveated((method, ALWAYS))
    assert all(torch.equal(run(wrapper, model, case, sigma=1.0), alone(case, 1.0)) for case in windows)
    run(wrapper, model, windows[0], sigma=0.5)
    assert torch.equal(run(wrapper, model, windows[1], sigma=1.0), alone(windows[1], 1.0))


def test_what_cannot_be_sparse_stays_dense_and_says_why(pack, caplog):
    model, case = WanModel(), inputs(WanModel, text=240)
    wrapper = pack.Foveated((HilbertA(tiles=4), ALWAYS))
    dense = model._forward(*case[:3], transformer_options=options())
    assert torch.equal(run(wrapper, model, case), dense)
    assert "240 text tokens cannot be distinguished from as many image tokens" in caplog.text
    assert torch.equal(run(pack.Foveated((LLSA(), ALWAYS)), model, case), dense)
    lumina, case = Lumina(), inputs(Lumina)
    wrapper = pack.Foveated((HilbertA(tiles=4), ALWAYS))
    assert not torch.equal(run(wrapper, lumina, case), lumina._forward(*case[:3], transformer_options=options()))
    with pytest.raises(ValueError, match="not merged in NextDiT"):
        pack.Foveated((ToMA(keep=0.5), ALWAYS)).check(lumina)
    with pytest.raises(ValueError, match="does not know OpenAISignatureMMDITWrapper"):
        pack.Foveated((HilbertA(), ALWAYS)).check(type("OpenAISignatureMMDITWrapper", (AuraFlow,), {})())
    x, time, context, named = inputs(HiDream)
    wrapper = pack.Foveated((HilbertA(tiles=4), ALWAYS))
    run(wrapper, HiDream(), (x, time, context, {**named, "image_cond": x}))
    assert dict(wrapper.sparse.outcomes) == {"the latent also holds the image to edit": 1}
    with pytest.raises(ValueError, match="whole blocks merge in every step"):
        pack.Foveated((ToMA(keep=0.5, granularity="module"), ALWAYS)).check(model)
    with pytest.raises(ValueError, match="does not know Linear"):
        pack.Foveated((ToMA(keep=0.5), ALWAYS)).check(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"needs one order: use slide=.auto. or .curve. beside it"):
        pack.Foveated((HilbertA(slide="diagonal"), ALWAYS), (ToMA(), ALWAYS)).check(model)


def test_a_method_that_met_no_attention_call_or_block_says_so_in_a_warning(pack, caplog):
    deaf = type("Flux", (Joint,), {"_forward": lambda self, x, t, context, transformer_options: x})()
    x, time, context, _ = inputs(Flux)
    for model in (Flux(), deaf):
        wrapper = pack.Foveated((HilbertA(tiles=4), ALWAYS))
        wrapper(Executor(model), x, time, context, transformer_options=options())
        wrapper.finish()
    assert caplog.text.count("1 of 1 forward passes") == 1
    assert "1 of 1 forward passes (0 attention calls or blocks with it" in caplog.text


def test_a_preset_runs_in_the_model_that_it_was_made_for_and_warns_at_other_sizes(pack, caplog):
    def preset(*methods, name="FluxTransformer2DModel", layers=2):
        models = [{"class": name, "config": {"num_layers": layers, "num_single_layers": 3}}]
        return Preset(methods=methods or (ToMA(),), models=models, size=(1, 1), grids=(((8, 8),),))

    model, case = Flux(), inputs(Flux)
    pack.check_preset(preset(), model)
    for other, why in (
        (preset(name="WanTransformer3DModel"), "is for WanTransformer3DModel, and this is Flux"),
        (preset(layers=19), "is for 19 double_blocks, and this model has 2"),
        (replace(preset(), cache=StepCache(threshold=0.2)), "works in diffusers only: tune .* with --no-cache"),
    ):
        with pytest.raises(ValueError, match=why):
            pack.check_preset(other, model)
    pack.check_preset(preset(HilbertA(), ToMA()), model)
    pack.check_preset(preset(LLSA()), model)
    pack.check_preset(preset(name="Flux2Transformer2DModel"), model)
    wrapper = pack.Foveated((ToMA(), ALWAYS), grids=preset().grids)
    run(wrapper, model, case)
    run(wrapper, model, case)
    assert caplog.text.count("tuned for other sizes") == 1


def test_the_example_workflow_names_our_nodes(pack):
    source = (PACK / "nodes.py").read_text()
    for path in (PACK / "example_workflows").glob("*.json"):
        graph = json.loads(path.read_text())
        nodes = graph["nodes"] if "nodes" in graph else graph.values()
        classes = {node.get("type") or node["class_type"] for node in nodes}
        ours = {name for name in classes if name.startswith("Foveate")}
        assert ours
        assert all(f'"{name}"' in source for name in ours)


def inputs_of(tree):
    """Names of the inputs that a part of the nodes' source defines, in order."""
    calls = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Input")
    )
    return [call.args[0].value for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


def test_saved_workflows_have_the_inputs_of_the_node_in_its_order(pack):
    source = ast.parse((PACK / "nodes.py").read_text()).body
    when, node = (next(n for n in source if getattr(n, "name", "") == name) for name in ("when", "FoveateHilbertA"))
    *own, slide = inputs_of(node)  # the slide came last: workflows that were saved before still load
    wanted = [*own, *inputs_of(when), slide]
    api = json.loads((PACK / "example_workflows" / "flux_hilberta_api.json").read_text())
    assert [name for name in api["sparse"]["inputs"] if name != "model"] == wanted
    graph = json.loads((PACK / "example_workflows" / "flux_hilberta.json").read_text())["nodes"]
    (saved,) = (node for node in graph if node["type"] == "FoveateHilbertA")
    assert [one["name"] for one in saved["inputs"] if one["name"] != "model"] == wanted
    assert saved["widgets_values"] == [value for name, value in api["sparse"]["inputs"].items() if name != "model"]
