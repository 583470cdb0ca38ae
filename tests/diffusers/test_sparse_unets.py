"""Laws of sparse attention inside real UNets."""

import contextlib
import copy

import log_linear_oracle
import pytest
import tiny
import torch
from diffusers import ControlNetModel, EulerDiscreteScheduler, UNet2DConditionModel
from oracle import dense_attention
from peft import LoraConfig

import foveate
from foveate import LLSA, HilbertA
from foveate.methods import ToDo
from foveate.ops import select_blocks
from foveate.ops.curves import grid_order

MODELS = {"sdxl": tiny.unet, "sd15": tiny.sd15}
every_model = pytest.mark.parametrize("name", MODELS)
WIDE = {  # LLSA takes heads of 32 channels and more
    "sdxl": {"block_out_channels": (32, 64), "attention_head_dim": (1, 2)},
    "sd15": {"block_out_channels": (64, 64, 64), "attention_head_dim": 2},
}
SIZES = (32, 32), (19, 27)
METHOD = HilbertA(tiles=4, align=1)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def built(name, size=(32, 32), batch=1, **config):
    return MODELS[name](**config), tiny.unet_inputs(*size, batch=batch)


def run(model, x, **more):
    return model(**copy.copy(x), **more)[0]


def sections(model):
    """Every stack of blocks, in running order."""
    parts = *model.down_blocks, model.mid_block, *model.up_blocks
    return [stack for part in parts for stack in getattr(part, "attentions", ())]


def self_attentions(model):
    return [block.attn1 for stack in sections(model) for block in stack.transformer_blocks]


def largest(model):
    """What the names of layers with the largest grid begin with."""
    return "down_blocks.0", f"up_blocks.{len(model.up_blocks) - 1}"


# --- the independent route: in raster order, in float64 ---


class Attends:
    """The stock layer, written out, with an attention of its own: `attend(q, k, v, grid, number of the layer)`."""

    def __init__(self, attend, grids, number):
        self.attend, self.number = attend, number
        self.grids = {height * width: (height, width) for height, width in grids}

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        assert encoder_hidden_states is None
        qkv = (project(hidden_states) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in qkv)
        out = self.attend(q, k, v, self.grids[q.shape[2]], self.number)
        return attn.to_out[0](out.transpose(1, 2).flatten(2).to(hidden_states.dtype))


def referred(model, attend, size):
    """A copy of the model with that attention."""
    model = copy.deepcopy(model)
    grids = [size, tuple(-(-side // 2) for side in size), tuple(-(-side // 4) for side in size)]
    for number, attn in enumerate(self_attentions(model)):
        attn.set_processor(Attends(attend, grids, number))
    return model


def mask_of(method, grid, number):
    """Who reads whom, in raster order; where the method cannot take the grid or the layer, everyone everyone."""
    dense = torch.ones(grid[0] * grid[1], grid[0] * grid[1], dtype=torch.bool)
    if number in method.dense_layer_set():
        return dense
    try:
        plan = method.plan((grid,), 0)
    except ValueError:
        return dense
    return plan.tables[number % method.period].to_dense()[plan.inverse][:, plan.inverse]


def masked(method):
    return lambda q, k, v, grid, number: dense_attention(q, k, v, mask_of(method, grid, number))[0]


def downsampled(q, k, v, grid, number):
    """ToDo as it was published: keys and values of every other row and column. For even sides."""
    k, v = (x.unflatten(2, grid)[:, :, 1::2, 1::2].flatten(2, 3) for x in (k, v))
    return dense_attention(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))[0]


def log_linear(method):
    def attend(q, k, v, grid, number):
        order = grid_order(method.curve, *grid)
        q, k, v = (x[:, :, order] for x in (q, k, v))
        selection = select_blocks(q, k, top_k=method.top_k, block_size=method.block_size, levels=method.levels)
        out, _ = log_linear_oracle.log_linear(q, k, v, selection)
        return out[:, :, order.argsort()]

    return attend


# --- laws ---


@every_model
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "method",
    [
        HilbertA(tiles=1),
        ToDo(factor=1),
        LLSA(top_k=99, enrich=False, min_tokens=0),
    ],
    ids=lambda method: method.title,
)
def test_the_dense_setting_is_the_model(name, size, method):
    model, x = built(name, size, 2, **WIDE[name])
    dense = run(model, x)
    with foveate.apply(model, method) as handle:
        torch.testing.assert_close(run(model, x), dense, rtol=1e-10, atol=1e-10)
        assert all(row.method != "dense" and row.saved == 0 for row in handle.summary().layers)
    assert torch.equal(run(model, x), dense)


@every_model
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "method",
    [METHOD, HilbertA(tiles=3, centre=0, period=2, dense_layers="0, 2"), ToDo()],
    ids=lambda method: method.title,
)
def test_the_sparse_model_is_the_masked_model_in_raster_order(name, size, method):
    model, x = built(name, size, 2)
    want = run(referred(model, masked(method), size), x)
    dense = run(model, x)
    with foveate.apply(model, method) as handle:
        torch.testing.assert_close(run(model, x), want)
        rows = handle.summary().layers
        assert handle.plans()[type(model).__name__].title == rows[1].method
    assert [row.layer for row in rows] == [
        next(name for name, module in model.named_modules() if module is attn) for attn in self_attentions(model)
    ]
    for number, row in enumerate(rows):
        if row.layer.startswith(largest(model)):
            assert row.true == pytest.approx(1 - mask_of(method, size, number).double().mean().item())
        assert bool(row.why) == (row.true == 0)
    assert (want - dense).abs().max() > 1e-6
    assert torch.equal(run(model, x), dense)


@every_model
def test_todo_reads_every_other_row_and_column(name):
    model, x = built(name)
    want = run(referred(model, downsampled, (32, 32)), x)
    with foveate.apply(model, ToDo()) as handle:
        torch.testing.assert_close(run(model, x), want)
        assert {row.true for row in handle.summary().layers} == {0.75}


@every_model
@pytest.mark.parametrize("size", SIZES)
def test_log_linear_attention_is_its_definition(name, size):
    method = LLSA(top_k=2, min_tokens=0)
    model, x = built(name, size, 2, **WIDE[name])
    with foveate.apply(model, method):
        got = run(model, x)
    torch.testing.assert_close(got, run(referred(model, log_linear(method), size), x))


@every_model
def test_a_sample_does_not_depend_on_its_batch_mates(name):
    model, x = built(name, batch=3)
    second = {key: value[1:2] for key, value in x.items() if isinstance(value, torch.Tensor) and value.ndim}
    second["added_cond_kwargs"] = {key: value[1:2] for key, value in x["added_cond_kwargs"].items()}
    with foveate.apply(model, METHOD):
        torch.testing.assert_close(run(model, x | second), run(model, x)[1:2])


@every_model
def test_gradients_are_those_of_the_masked_model_also_with_checkpointing_and_other_sizes_between(name):
    model, x = built(name, (19, 27))
    reference = referred(model, masked(METHOD), (19, 27))
    with torch.enable_grad(), foveate.apply(model, METHOD):
        run(reference, x).square().sum().backward()
        model.enable_gradient_checkpointing()
        out = run(model, x)
        run(model, tiny.unet_inputs(27, 19))
        with torch.no_grad():
            run(model, tiny.unet_inputs(8, 8))  # dense
        out.square().sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@every_model
def test_the_model_is_given_back_also_after_an_exception_and_a_failed_apply(name):
    model, x = built(name)
    model.enable_gradient_checkpointing()
    dense, before = run(model, x), tiny.fingerprint(model)
    with contextlib.suppress(KeyboardInterrupt), torch.enable_grad(), foveate.apply(model, METHOD):
        run(model, x)
        raise KeyboardInterrupt
    assert tiny.fingerprint(model) == before
    stock, model.mid_block.attentions[0].transformer_blocks[0].attn1.processor = tiny.fingerprint(model), print
    with pytest.raises(ValueError, match="which foveate does not know"):
        foveate.apply(model, METHOD)
    model.mid_block.attentions[0].transformer_blocks[0].attn1.processor = self_attentions(model)[0].processor
    with pytest.raises(ValueError, match="names layer 99"):
        foveate.apply(model, HilbertA(dense_layers="99"))
    assert {key: value[:3] for key, value in tiny.fingerprint(model).items()} == {k: v[:3] for k, v in stock.items()}
    assert torch.equal(run(model, x), dense)


@every_model
def test_a_failed_forward_does_not_spoil_the_next_and_a_pause_is_dense(name):
    model, x = built(name)
    dense = run(model, x)
    with foveate.apply(model, METHOD) as handle:
        want = run(model, x)
        with pytest.raises(RuntimeError):
            run(model, x | {"encoder_hidden_states": x["encoder_hidden_states"][..., :3]})
        assert torch.equal(run(model, x), want)
        with handle.paused():
            assert torch.equal(run(model, x), dense)
        outcomes = handle.summary().outcomes[type(model).__name__]
        assert (outcomes[""], outcomes["paused"], outcomes.total()) == (2, 1, 3)
        assert handle.summary().layers[0].method == "HilbertA T=4"


# --- what stays dense ---


@every_model
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (HilbertA(tiles=16), "tiles need 32 tokens or more: 256 image tokens cannot make 16 tiles; use tiles<=8"),
        (HilbertA(), "16 x 16 image tokens are too few"),
        (HilbertA(tiles=4, min_tokens=257), "256 image tokens are fewer than min_tokens=257"),
        (ToDo(factor=17), "16 x 16 image tokens are too few for a factor of 17"),
    ],
    ids=lambda case: getattr(case, "title", ""),
)
def test_sections_that_are_too_small_stay_dense_and_the_others_do_not(name, method, why, caplog):
    model, x = built(name)
    with foveate.apply(model, method) as handle:
        for _ in range(2):
            run(model, x)
        rows = handle.summary().layers
        assert handle.summary().outcomes[type(model).__name__][""] == 2
    assert [bool(row.why) for row in rows] == [not row.layer.startswith(largest(model)) for row in rows]
    assert why in next(row.why for row in rows if row.why)
    assert sum(why in record.message for record in caplog.records) == 1


def test_sections_of_narrow_heads_stay_dense_and_the_others_do_not():
    model, x = built("sdxl", block_out_channels=(16, 64), attention_head_dim=(1, 2))
    with foveate.apply(model, LLSA(top_k=2, min_tokens=0)) as handle:
        run(model, x)
        rows = handle.summary().layers
    assert "does not support these heads: head_dim must be 32 to 256, not 16" in rows[0].why
    assert {row.why for row in rows[1:-2]} == {""}


@every_model
def test_what_stays_dense_as_a_whole_is_the_model_and_says_why(name, caplog):
    model, x = built(name)
    dense = run(model, x)
    with foveate.apply(model, HilbertA(min_tokens=2000)) as handle:
        assert torch.equal(run(model, x), dense)
        assert all("are fewer than min_tokens=2000" in row.why for row in handle.summary().layers)
        assert handle.plans() == {}
    with foveate.apply(model, METHOD), contextlib.suppress(RuntimeError):  # a stock processor may not take it
        run(model, x, attention_mask=torch.ones(1, 1024))
    assert "HilbertA stays dense: an attention mask was passed" in caplog.text


def test_attention_to_the_text_alone_is_left_alone():
    model, x = built("sdxl", only_cross_attention=(True, False))
    dense = run(model, x)
    with foveate.apply(model, METHOD) as handle:
        got = run(model, x)
        rows = handle.summary().layers
    assert {row.layer.split(".attentions")[0] for row in rows} == {"down_blocks.1", "mid_block", "up_blocks.0"}
    assert (got - dense).abs().max() > 1e-6
    none = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "mid_block_type": None}
    with pytest.raises(ValueError, match="has no self-attention that foveate knows"):
        foveate.apply(tiny.unet(**none), METHOD)


def test_processors_that_come_after_are_named_and_stay():
    model, x = built("sdxl")
    first = self_attentions(model)[0]
    with foveate.apply(model, METHOD) as handle:
        sparse = run(model, x)
        model.fuse_qkv_projections()
        run(model, x)
        assert all("was set after apply" in row.why for row in handle.summary().layers)
        model.unfuse_qkv_projections()
        torch.testing.assert_close(run(model, x), sparse)
        first.set_processor(stock := copy.copy(first.processor.original))
        run(model, x)
        assert "2_0 was set after apply" in handle.summary().layers[0].why
        assert not handle.summary().layers[1].why
    assert first.processor is stock


# --- neighbours ---


@every_model
def test_residuals_of_a_controlnet_are_added_where_they_belong(name):
    model, x = built(name)
    control = ControlNetModel.from_unet(model, conditioning_channels=3).double().eval()
    for block in (*control.controlnet_down_blocks, control.controlnet_mid_block):
        torch.nn.init.normal_(block.weight, std=0.1)  # they start at zero
    image = torch.randn(1, 3, 256, 256, dtype=torch.float64)
    down, mid = control(**{**x, "controlnet_cond": image})
    residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    want = run(referred(model, masked(METHOD), (32, 32)), x, **residuals)
    assert (want - run(model, x)).abs().max() > 1e-3
    with foveate.apply(model, METHOD):
        torch.testing.assert_close(run(model, x, **residuals), want)


def ip_adapter(model):
    """A state with random weights, and what the model is given with it."""
    names = [name for name in model.attn_processors if "attn2" in name]
    dim, weights = model.config.cross_attention_dim, {}
    for i, name in enumerate(names):
        width = model.get_submodule(name.removesuffix(".processor")).to_q.out_features
        weights |= {f"{2 * i + 1}.{to}_ip.weight": torch.randn(width, dim) for to in ("to_k", "to_v")}
    projection = {"proj.weight": torch.randn(4 * dim, 8), "proj.bias": torch.randn(4 * dim)}
    projection |= {"norm.weight": torch.ones(dim), "norm.bias": torch.zeros(dim)}
    return [{"image_proj": projection, "ip_adapter": weights}]


@every_model
def test_an_ip_adapter_keeps_its_part_and_comes_before(name):
    model, x = built(name)
    model._load_ip_adapter_weights(ip_adapter(model))
    model.double()
    prompt = {"image_embeds": [torch.randn(1, 1, 8, dtype=torch.float64)]}
    x["added_cond_kwargs"] = x["added_cond_kwargs"] | prompt
    want = run(referred(model, masked(METHOD), (32, 32)), x)
    with foveate.apply(model, METHOD):
        torch.testing.assert_close(run(model, x), want)
    other = MODELS[name]()
    with (
        foveate.apply(other, METHOD),
        pytest.raises(ValueError, match="an IP-Adapter cannot come or go under sparse attention"),
    ):
        other._load_ip_adapter_weights(ip_adapter(other))


def test_lora_after_apply_works():
    model, x = built("sdxl")
    with foveate.apply(model, METHOD):
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "proj_in"], init_lora_weights=False))
        model.double()
        got = run(model, x)
    torch.testing.assert_close(got, run(referred(model, masked(METHOD), (32, 32)), x))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of the scheduler
def test_a_pipeline_with_guidance_runs_sparse_in_a_part_of_the_run():
    pipe = tiny.stable_diffusion()
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)  # tells the step
    size = {"height": 16, "width": 24, "num_inference_steps": 4, "output_type": "latent"}

    def draw():
        return pipe("a cat", generator=torch.Generator().manual_seed(0), **size).images

    dense = draw()
    method = HilbertA(tiles=4, align=1)
    with foveate.apply(pipe, method) as handle:
        sparse = draw()
        assert handle.summary().outcomes["unet"][""] == 4
    assert torch.equal(draw(), dense)
    stock: UNet2DConditionModel = pipe.unet
    pipe.unet = referred(stock, masked(method), (16, 24))
    torch.testing.assert_close(draw(), sparse, rtol=1e-3, atol=1e-3)
    pipe.unet = stock
    with foveate.apply(pipe, HilbertA(tiles=4, align=1, end_percent=0.25)) as handle:
        half = draw()
        assert handle.summary().outcomes["unet"][""] == 2
    assert (half - dense).abs().max() > 1e-4
    assert (half - sparse).abs().max() > 1e-4
