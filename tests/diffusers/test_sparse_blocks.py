"""Laws of sparse attention inside real SD3, PixArt and DiT models."""

import contextlib
import copy
import io

import pytest
import tiny
import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from peft import LoraConfig
from torch.nn.functional import scaled_dot_product_attention

import foveate
from foveate import HilbertA
from foveate.diffusers.processors import DispatchedProcessor as SparseProcessor
from foveate.methods import ToDo

MODELS = {
    "sd3": (tiny.sd3, tiny.sd3_inputs, 9),
    "pixart": (tiny.pixart, tiny.pixart_inputs, 0),
    "dit": (tiny.dit, tiny.dit_inputs, 0),
}
UNETS = {"sdxl": tiny.unet, "sd15": tiny.sd15}
every_model = pytest.mark.parametrize("name", MODELS)
METHOD = HilbertA(tiles=4, align=1, centre=0.25)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def built(name, **size):
    build, inputs, _ = MODELS[name]
    return build(), inputs(**size)


def run(model, x, **more):
    return model(**copy.copy(x), **more)[0]


def attentions(model):
    """(number of the block, attention over the image) in running order."""
    for i, block in enumerate(model.transformer_blocks):
        both = (block.attn, block.attn2) if isinstance(block, JointTransformerBlock) else (block.attn1,)
        yield from ((i, attn) for attn in both if attn is not None)


def masked(model, method, grid, text):
    """A copy of the model, in raster order, whose attention is dense under masks: the independent route."""
    model = copy.deepcopy(model)
    into = method.plan((grid,), 0).inverse
    for number, attn in attentions(model):
        if number in method.dense_layer_set():
            continue
        masks = {}
        for words in {0, text}:
            mask = method.plan((grid,), words).tables[number % method.period].to_dense()
            places = torch.cat([torch.arange(words), words + into])
            mask = mask[places][:, places]
            masks[words + len(into)] = mask.roll((-words, -words), (0, 1))  # SD3 has the image in front
        attn.set_processor(Masked(attn.processor, masks))
    return model


class Masked:
    """The stock processor, whose one call of attention gets the mask of its number of tokens."""

    def __init__(self, stock, masks):
        self.stock, self.masks = stock, masks

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        def attend(q, k, v, attn_mask=None, **_):
            return scaled_dot_product_attention(q, k, v, self.masks[k.shape[2]])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask)


@pytest.mark.parametrize(
    ("name", "grid"),
    [(name, grid) for name in MODELS for grid in [(16, 16), (12, 20)] if name != "dit" or grid[0] == grid[1]],
)
@pytest.mark.parametrize("method", [METHOD, HilbertA(tiles=3, centre=0, period=2, dense_layers="0"), ToDo()])
def test_the_sparse_model_is_the_masked_model_in_raster_order(name, grid, method):
    patch = 1 if name == "sd3" else 2
    model, x = built(name, height=patch * grid[0], width=patch * grid[1], batch=2)
    want = run(masked(model, method, grid, MODELS[name][2]), x)
    dense = run(model, x)
    with foveate.apply(model, method) as handle:
        torch.testing.assert_close(run(model, x), want)
        for row, (number, _) in zip(handle.summary().layers, attentions(model), strict=True):
            text = MODELS[name][2] if row.layer.endswith("attn") else 0
            mask = method.plan((grid,), text).tables[number % method.period].to_dense()
            wished = number in method.dense_layer_set()
            assert row.why == ("named in dense_layers" if wished else "")
            assert wished or row.true == pytest.approx(1 - mask.double().mean().item())
    assert (want - dense).abs().max() > 1e-6
    assert torch.equal(run(model, x), dense)


@every_model
def test_gradients_are_those_of_the_masked_model_also_with_checkpointing(name):
    model, x = built(name)
    reference = masked(model, METHOD, (16, 16), MODELS[name][2])
    with torch.enable_grad(), foveate.apply(model, METHOD):
        run(reference, x).square().sum().backward()
        model.enable_gradient_checkpointing()
        run(model, x).square().sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@every_model
def test_the_model_is_given_back_also_after_an_exception_and_a_failed_apply(name):
    model, x = built(name)
    model.enable_gradient_checkpointing()
    dense, before = run(model, x), tiny.fingerprint(model)
    with contextlib.suppress(KeyboardInterrupt), foveate.apply(model, METHOD):
        run(model, x)
        raise KeyboardInterrupt
    assert tiny.fingerprint(model) == before
    with pytest.raises(ValueError, match="names layer 7"):
        foveate.apply(model, HilbertA(dense_layers="7"))
    assert tiny.fingerprint(model) == before
    assert torch.equal(run(model, x), dense)


@pytest.mark.parametrize("name", [*MODELS, *UNETS])
def test_a_copy_and_a_saved_model_have_the_method_too(name):
    model, x = built(name) if name in MODELS else (UNETS[name](), tiny.unet_inputs(32, 32))
    dense = run(model, x)
    with foveate.apply(model, METHOD):
        sparse = run(model, x)
        twin = copy.deepcopy(model)
        torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(run(torch.load(file, weights_only=False), x), sparse)
    assert torch.equal(run(twin, x), sparse)
    foveate.remove(twin)
    assert torch.equal(run(twin, x), dense)


@every_model
def test_a_failed_forward_does_not_spoil_the_next_and_a_pause_is_dense(name):
    model, x = built(name)
    dense = run(model, x)
    with foveate.apply(model, METHOD) as handle:
        want = run(model, x)
        with pytest.raises(RuntimeError):
            run(model, x | {"hidden_states": x["hidden_states"][:, :3]})
        assert torch.equal(run(model, x), want)
        with handle.paused():
            assert torch.equal(run(model, x), dense)
        assert torch.equal(run(model, x), want)
        assert handle.summary().outcomes[type(model).__name__] == {"": 3, "paused": 1}


@every_model
def test_processors_that_it_does_not_know_are_refused_before_and_named_after(name):
    model, x = built(name)
    attn = next(attentions(model))[1]
    stock = attn.processor
    attn.processor = Masked(stock, {})
    with pytest.raises(ValueError, match="has a Masked, which foveate does not know"):
        foveate.apply(model, METHOD)
    attn.processor = stock
    with foveate.apply(model, METHOD) as handle:
        attn.set_processor(stock)
        run(model, x)
        whys = [row.why for row in handle.summary().layers]
        assert "2_0 was set after apply" in whys[0]
        assert set(whys[1:]) == {""}
    assert all(type(attn.processor) in (AttnProcessor2_0, JointAttnProcessor2_0) for _, attn in attentions(model))


@pytest.mark.parametrize("skipped", [0, 2])
def test_blocks_that_are_skipped_leave_the_order_right(skipped):
    model, x = built("sd3")
    want = run(masked(model, METHOD, (16, 16), 9), x, skip_layers=[skipped])
    with foveate.apply(model, METHOD):
        torch.testing.assert_close(run(model, x, skip_layers=[skipped]), want)


def test_fused_projections_after_apply_are_named_and_unfusing_brings_ours_back():
    model, x = tiny.sd3(dual_attention_layers=()), tiny.sd3_inputs()  # diffusers' own cannot do the second attention
    with foveate.apply(model, METHOD) as handle:
        sparse = run(model, x)
        model.fuse_qkv_projections()
        run(model, x)
        assert all("was set after apply" in row.why for row in handle.summary().layers)
        model.unfuse_qkv_projections()
        torch.testing.assert_close(run(model, x), sparse)
        assert all(type(attn.processor) is SparseProcessor for _, attn in attentions(model))


def test_lora_after_apply_works():
    model, x = built("sd3")
    with foveate.apply(model, METHOD):
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        model.double()
        got = run(model, x)
    torch.testing.assert_close(got, run(masked(model, METHOD, (16, 16), 9), x))


@every_model
def test_what_stays_dense_says_why(name):
    model, x = built(name)
    dense = run(model, x)
    for method, why in (
        (HilbertA(), "16 x 16 image tokens are too few"),
        (HilbertA(min_tokens=257), "256 image tokens are fewer than min_tokens=257"),
    ):
        with foveate.apply(model, method) as handle:
            assert torch.equal(run(model, x), dense)
            assert all(why in row.why for row in handle.summary().layers)
            assert handle.plans() == {}
