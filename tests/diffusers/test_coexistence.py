"""Beside other features of diffusers and its neighbours: LoRA, IP-Adapter, ControlNet, caches, offloading, threads."""

import threading

import accelerate
import pytest
import tiny
import torch
from covering import in_turn
from diffusers import ControlNetModel
from diffusers.hooks import apply_group_offloading
from diffusers.models import attention_dispatch
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from peft import LoraConfig
from reference import reference
from tiny import FAMILIES, built, call

import foveate
from foveate import HilbertA, ToMA

pytestmark = pytest.mark.usefixtures("no_grad")
SPARSE = HilbertA(tiles=4, align=1)
LOSSLESS = ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4), granularity="module", merge_mlp=True)
every_family = pytest.mark.parametrize("name", FAMILIES)
UNETS = "sdxl", "sd15"
TAKE_LORA = (
    "flux", "chroma", "longcat", "ovis", "krea2", "hunyuan_image", "hunyuan_video", "hunyuan_video15", "zimage", "sd3",
    *UNETS,
)  # fmt: skip
OFFLOADING = "accelerate", "block_level", "leaf_level"


class KeepsMaps:
    """A processor as self-attention guidance has: it may lay what it keeps over a raster of all tokens."""

    def __init__(self, stock):
        self.stock = stock
        self.__call__ = stock.__call__  # diffusers reads its signature

    def __call__(self, *args, **kwargs):
        return self.stock(*args, **kwargs)


def said(run):
    return " ".join(str(run.summary()).split())


def whys(run):
    return [row.why for row in run.summary().layers]


# --- LoRA ---


@pytest.mark.parametrize(
    ("name", "method_and_first"),
    in_turn(TAKE_LORA, [(SPARSE, "lora"), (LOSSLESS, "apply"), (SPARSE, "apply"), (LOSSLESS, "lora")], each=2),
)
def test_a_lora_may_come_before_or_after_and_go(name, method_and_first):
    method, first = method_and_first
    model, x = built(name)
    dense = call(model, x)

    def lora():
        torch.manual_seed(1)
        targets = ["to_q", "to_v", *(("proj_out", "add_v_proj") if name == "flux" else ())]
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        model.double()

    if first == "lora":
        lora()
    run = foveate.apply(model, method)
    if first == "apply":
        before = call(model, x)
        lora()
    got = call(model, x)
    assert not all(whys(run))
    if first == "apply":
        model.delete_adapters("default")
        model.unload_lora()
        torch.testing.assert_close(call(model, x), before)
        lora()
    run.remove()
    if method is LOSSLESS:
        torch.testing.assert_close(got, call(model, x))
    else:
        with reference(FAMILIES[name], method):
            torch.testing.assert_close(got, call(model, x))
    model.delete_adapters("default")
    model.unload_lora()
    assert torch.equal(call(model, x), dense)


# --- image prompts and ControlNets ---


def with_ip_adapter(name, model):
    """The model with random weights for image prompts, and the argument of one forward pass."""
    prompt = torch.randn(1, 1, 8, dtype=torch.float64)
    if name == "flux":
        for block in model.transformer_blocks:
            processor = FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=[0.7], dtype=torch.float64)
            block.attn.set_processor(processor)
        projection = ImageProjection(image_embed_dim=8, cross_attention_dim=32, num_image_text_embeds=4).double()
        model.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
        return {"joint_attention_kwargs": {"ip_adapter_image_embeds": [prompt]}}
    model._load_ip_adapter_weights(ip_adapter_of_a_unet(model))
    model.double()
    return {"added_cond_kwargs": {"image_embeds": [prompt]}}


def ip_adapter_of_a_unet(model):
    names = [name for name in model.attn_processors if "attn2" in name]
    dim, weights = model.config.cross_attention_dim, {}
    for i, name in enumerate(names):
        width = model.get_submodule(name.removesuffix(".processor")).to_q.out_features
        weights |= {f"{2 * i + 1}.{to}_ip.weight": torch.randn(width, dim) for to in ("to_k", "to_v")}
    projection = {"proj.weight": torch.randn(4 * dim, 8), "proj.bias": torch.randn(4 * dim)}
    projection |= {"norm.weight": torch.ones(dim), "norm.bias": torch.zeros(dim)}
    return [{"image_proj": projection, "ip_adapter": weights}]


@pytest.mark.parametrize("name", ["flux", *UNETS])
def test_an_image_prompt_is_added_as_the_models_own_processor_does(name):
    model, x = built(name)
    without, plain = call(model, x), x
    x = {key: x.get(key, {}) | value for key, value in with_ip_adapter(name, model).items()}
    x = plain | x
    before, dense = tiny.fingerprint(model), call(model, x)
    assert (dense - without).abs().max() > 1e-6
    with reference(FAMILIES[name], SPARSE):
        want = call(model, x)
    with foveate.apply(model, SPARSE):
        torch.testing.assert_close(call(model, x), want)
        if name == "flux":  # as pipe.set_ip_adapter_scale does
            model.transformer_blocks[0].attn.processor.scale = [0.0]
            assert (call(model, x) - want).abs().max() > 1e-6
            model.transformer_blocks[0].attn.processor.scale = [0.7]
    assert tiny.fingerprint(model) == before
    assert torch.equal(call(model, x), dense)
    with foveate.apply(model, LOSSLESS) as run:
        torch.testing.assert_close(call(model, x), dense)
        assert not any(whys(run))


@pytest.mark.parametrize("name", UNETS)
def test_an_ip_adapter_of_a_unet_cannot_come_under_sparse_attention(name):
    model = FAMILIES[name].make()
    refused = pytest.raises(ValueError, match="an IP-Adapter cannot come or go under sparse attention")
    with foveate.apply(model, SPARSE), refused:
        model._load_ip_adapter_weights(ip_adapter_of_a_unet(model))


@pytest.mark.parametrize("name", UNETS)
@pytest.mark.parametrize("method", [SPARSE, LOSSLESS], ids=["sparse", "merged"])
def test_residuals_of_a_controlnet_are_added_where_they_belong(name, method):  # others take them in all tests
    model, x = built(name)
    control = ControlNetModel.from_unet(model, conditioning_channels=3).double().eval()
    for block in (*control.controlnet_down_blocks, control.controlnet_mid_block):
        torch.nn.init.normal_(block.weight, std=0.1)  # they start at zero
    rows, columns = x["sample"].shape[2:]
    picture = torch.randn(1, 3, 8 * rows, 8 * columns, dtype=torch.float64)
    down, mid = control(**x, controlnet_cond=picture)
    residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    assert (call(model, x, **residuals) - call(model, x)).abs().max() > 1e-3
    with reference(FAMILIES[name], SPARSE if method is SPARSE else HilbertA(tiles=1)):
        want = call(model, x, **residuals)
    with foveate.apply(model, method):
        torch.testing.assert_close(call(model, x, **residuals), want)


# --- processors and backends ---


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl"])
def test_fused_projections_run_sparse_and_so_do_unfused_ones(name):
    model, x = built(name, **({"dual_attention_layers": ()} if name == "sd3" else {}))  # diffusers fuses but one
    with foveate.apply(model, SPARSE) as run:
        want = call(model, x)
        for change in (model.fuse_qkv_projections, model.unfuse_qkv_projections):
            change()
            torch.testing.assert_close(call(model, x), want)
            assert not any("set after apply" in why for why in whys(run))


@every_family
def test_a_processor_set_after_apply_runs_sparse_if_it_can_and_is_named_if_not(name):
    model, x = built(name)
    dense, i = call(model, x), 2 if name == "sd3" else 1  # the first layer of block 1
    with foveate.apply(model, SPARSE) as run:
        want, reasons = call(model, x), whys(run)
        attn = model.get_submodule(run.summary().layers[i].layer)
        stock = attn.processor
        attn.set_processor(type(getattr(stock, "original", stock))())
        assert torch.equal(call(model, x), want)
        attn.set_processor(foreign := KeepsMaps(attn.processor))
        got = call(model, x)
        assert whys(run)[i] == "a KeepsMaps was set after apply: remove and apply again"
        assert [*whys(run)[:i], *whys(run)[i + 1 :]] == [*reasons[:i], *reasons[i + 1 :]]
    assert attn.processor is foreign
    with reference(FAMILIES[name], HilbertA(tiles=4, align=1, dense_layers="1")):
        torch.testing.assert_close(got, call(model, x))
    attn.set_processor(foreign.stock)
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4))) as run:
        attn.set_processor(foreign)
        got = call(model, x)
        assert whys(run)[i] == "a KeepsMaps was set after apply: remove and apply again"
        if name not in (*UNETS, "zimage", "lumina2", "flux3"):  # whose other parts merge
            torch.testing.assert_close(got, dense)


def test_a_forward_in_which_every_layer_was_replaced_or_named_counts_as_dense(caplog):
    model, x = built("flux")
    dense = call(model, x)
    with foveate.apply(model, SPARSE) as run:
        call(model, x)
        for layer in run.summary().layers:
            attn = model.get_submodule(layer.layer)
            attn.set_processor(KeepsMaps(attn.processor))
        call(model, x)
        call(model, x)
        assert "1 of 3 forward passes sparse; 2 dense: a KeepsMaps was set" in said(run)
        assert all("a KeepsMaps was set after apply" in why for why in whys(run))
        assert run.plans() == {}
    assert caplog.text.count("a KeepsMaps was set after apply") == 1
    everywhere = HilbertA(tiles=4, dense_layers=f"0-{len(run.summary().layers) - 1}")
    with foveate.apply(model := built("flux")[0], everywhere) as run:
        assert torch.equal(call(model, x), dense)
        assert "0 of 1 forward passes sparse; 1 dense: every layer is named" in said(run)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("backend", ["_native_math", "flex"])  # others need packages or a GPU
@torch.no_grad()
def test_a_backend_chosen_by_the_user_serves_the_dense_layers_and_steps_and_stays(backend, before, monkeypatch):
    model, x = tiny.flux(), tiny.inputs()
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)  # a choice for one model changes it
    functions = registry._backends
    name, calls = attention_dispatch.AttentionBackendName(backend), []
    own = functions[name]
    monkeypatch.setitem(functions, name, lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))[1])
    with attention_dispatch.attention_backend(backend):
        dense = call(model, x)
    assert len(calls) == 5  # one per layer
    if before:
        model.set_attention_backend(backend)
    with foveate.apply(model, HilbertA(tiles=4, dense_layers="4")) as run:
        sparse = call(model, x)
        assert len(calls) == 5 + before
        model.set_attention_backend(backend)
        with run.paused():
            assert torch.equal(call(model, x), dense)
        assert len(calls) == 10 + before
        torch.testing.assert_close(call(model, x), sparse)
        assert len(calls) == 11 + before
    assert {processor._attention_backend for processor in model.attn_processors.values()} == {backend}
    assert {processor._parallel_config for processor in model.attn_processors.values()} == {None}


def test_layers_that_share_a_processor_have_plans_of_their_own():
    model, x = tiny.flux(), tiny.inputs()
    with foveate.apply(model, HilbertA(tiles=4)):
        want = call(model, x)
    shared = FluxAttnProcessor()
    model.set_attn_processor(shared)
    with foveate.apply(model, HilbertA(tiles=4)):
        assert torch.equal(call(model, x), want)
    assert all(processor is shared for processor in model.attn_processors.values())
    assert vars(shared) == {}


def test_the_private_names_of_diffusers_are_where_the_backend_expects_them():
    """If this fails after an upgrade of diffusers, `foveate/diffusers/backend.py` is the file to change."""
    registry, names = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName
    for owner, name in (
        (registry, "register"), (registry, "_backends"), (registry, "_supports_context_parallel"),
        (names, "_value2member_map_"), (names, "_member_map_"), (names, "_member_names_"),
        (attention_dispatch, "SeqAllToAllDim"), (attention_dispatch, "dispatch_attention_fn"),
    ):  # fmt: skip
        assert hasattr(owner, name), f"diffusers moved {owner.__name__}.{name}"
    assert {"_attention_backend", "_parallel_config"} <= vars(FluxAttnProcessor).keys()
    assert names("foveate") in registry._backends


# --- offloading, caches, threads ---


@pytest.mark.parametrize(
    ("name", "how_and_when"), in_turn(FAMILIES, [*zip(2 * OFFLOADING, 3 * ("before", "after"), strict=True)], each=2)
)
def test_offloading_before_or_after(name, how_and_when):
    how, when = how_and_when
    model, x = built(name, dtype=torch.float32)
    cpu = torch.device("cpu")

    def offload():
        if how == "accelerate":
            accelerate.cpu_offload(model, execution_device=cpu)
        else:
            apply_group_offloading(
                model, onload_device=cpu, offload_device=cpu, offload_type=how, num_blocks_per_group=1
            )

    methods = (HilbertA(tiles=2), ToMA(skip=0, tile=(4, 4)))
    with foveate.apply(model, *methods):
        want = call(model, x)
    dense = call(model, x)
    if when == "before":
        offload()
    run = foveate.apply(model, *methods)
    if when == "after":
        offload()
    torch.testing.assert_close(call(model, x), want)
    run.remove()
    torch.testing.assert_close(call(model, x), dense)


def test_two_models_in_two_threads_draw_what_each_draws_alone():
    pairs = [built("flux"), built("chroma")]
    methods = [(HilbertA(tiles=4),), (HilbertA(tiles=2), ToMA(skip=0))]
    runs = [foveate.apply(model, *each) for (model, _), each in zip(pairs, methods, strict=True)]
    alone, results = [call(*pair) for pair in pairs], [[], []]

    @torch.no_grad()
    def draw(i):
        for _ in range(5):
            results[i].append(call(*pairs[i]))

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, got in zip(alone, results, strict=True):
        assert len(got) == 5
        assert all(torch.equal(each, want) for each in got)
    for run in runs:
        run.remove()
