"""Laws of HilbertA inside real FluxTransformer2DModel classes."""

import contextlib
import copy
import io
from types import SimpleNamespace

import accelerate
import pytest
import tiny
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from peft import LoraConfig

import foveate
from foveate import HilbertA
from foveate.diffusers.adapter import ModelAdapter
from foveate.diffusers.backend import plan_of
from foveate.diffusers.cards.flux import grids_of
from foveate.ops.block_table import BlockTable

GRID = (16, 20)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return tiny.flux()


def attentions(model):
    return [block.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)]


class Masked:
    """The stock processor with a dense mask over [text | image]: the independent route to a sparse layer."""

    def __init__(self, stock, mask):
        self.stock, self.mask = stock, mask

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None,
        ip_hidden_states=None, ip_adapter_masks=None,
    ):  # fmt: skip
        more = () if ip_hidden_states is None or attn.added_kv_proj_dim is None else (ip_hidden_states, None)
        return self.stock(attn, hidden_states, encoder_hidden_states, self.mask, image_rotary_emb, *more)


def masked(model, method, grids, text):
    """A copy of the model, in raster order, whose layers attend under the plan's masks."""
    model = copy.deepcopy(model)
    plan = method.plan(tuple(grids), text)
    into = torch.cat([torch.arange(text), text + plan.inverse])
    for i, attn in enumerate(attentions(model)):
        if i not in method.dense_layer_set():
            mask = plan.tables[i % method.period].to_dense()[into][:, into]
            stock = attn.processor
            if isinstance(stock, torch.nn.Module):  # set_processor would drop its weights
                del attn._modules["processor"]
            attn.processor = Masked(stock, mask)
    return model


def with_ip_adapter(model):
    for block in model.transformer_blocks:
        processor = FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=[0.7], dtype=torch.float64)
        block.attn.set_processor(processor)
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=32, num_image_text_embeds=4).double()
    model.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    return model


def image_prompt(batch=1):
    return {"joint_attention_kwargs": {"ip_adapter_image_embeds": [torch.randn(batch, 1, 8, dtype=torch.float64)]}}


# --- what it computes ---


@pytest.mark.parametrize(
    "method",
    [
        HilbertA(tiles=4),
        HilbertA(tiles=3, centre=0.0, period=2),
        HilbertA(tiles=5, curve="moore", dense_layers="1, 3"),
    ],
)
@pytest.mark.parametrize("text", [0, 15])
def test_sparse_model_is_the_masked_model_in_raster_order(model, method, text):
    x = tiny.inputs(GRID, text=text, batch=2)
    x |= tiny.residuals(x, 1, 3)
    want = masked(model, method, [GRID], text)(**x)[0]
    with foveate.apply(model, method):
        got = model(**x)[0]
    torch.testing.assert_close(got, want)
    assert (got - model(**x)[0]).abs().max() > 1e-4  # the mask matters


@pytest.mark.parametrize("method", [HilbertA(tiles=4), HilbertA(tiles=4, reference="tiled")])
def test_reference_images_are_segments_of_their_own(model, method):
    grids = [GRID, (16, 20), (10, 12)]
    x = tiny.inputs(*grids)
    want = masked(model, method, grids, 15)(**x)[0]
    with foveate.apply(model, method):
        torch.testing.assert_close(model(**x)[0], want)


def test_image_prompt_is_added_as_the_stock_processor_does(model):
    method = HilbertA(tiles=4)
    model = with_ip_adapter(model)
    x = tiny.inputs(GRID)
    prompt = image_prompt()["joint_attention_kwargs"]
    want = masked(model, method, [GRID], 15)(**x, joint_attention_kwargs=dict(prompt))[0]
    with foveate.apply(model, method):
        torch.testing.assert_close(model(**x, joint_attention_kwargs=dict(prompt))[0], want)
        model.transformer_blocks[0].attn.processor.scale = [0.0]  # as pipe.set_ip_adapter_scale does
        assert (model(**x, joint_attention_kwargs=dict(prompt))[0] - want).abs().max() > 1e-6
    assert model.transformer_blocks[0].attn.processor.scale == [0.0]


@pytest.mark.parametrize("method", [HilbertA(tiles=1), HilbertA(tiles=4, centre=1.0), HilbertA(dense_layers="0-4")])
@pytest.mark.parametrize("grid", [(16, 20), (9, 31), (32, 16)])
def test_dense_settings_are_the_dense_model(model, method, grid):
    x = tiny.inputs(grid, batch=2)
    x |= tiny.residuals(x, 2, 1)
    want = model(**x)[0]
    with foveate.apply(model, method):
        torch.testing.assert_close(model(**x)[0], want, rtol=1e-10, atol=1e-10)


def test_gradients_equal_the_masked_model(model):
    method = HilbertA(tiles=4)
    x = tiny.inputs(GRID)
    with torch.enable_grad():
        reference = masked(model, method, [GRID], 15)
        reference(**x)[0].square().sum().backward()
        foveate.apply(model, method)
        model.enable_gradient_checkpointing()
        model(**x)[0].square().sum().backward()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)


def test_checkpointed_layers_run_again_with_the_table_they_had(model):
    one, other = tiny.inputs((16, 20)), tiny.inputs((20, 16))  # as many tokens, another grid
    with torch.enable_grad():
        grads = []
        for checkpointing in (False, True):
            with foveate.apply(model, HilbertA(tiles=4)):
                if checkpointing:
                    model.enable_gradient_checkpointing()
                first, second = model(**one)[0], model(**other)[0]
                first.square().sum().backward()
                second.square().sum().backward()
            grads.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
    torch.testing.assert_close(grads[0], grads[1])
    model.disable_gradient_checkpointing()


def test_a_dense_forward_before_the_backward_pass_changes_nothing(model):
    x, before = tiny.inputs(GRID), tiny.fingerprint(model)
    with torch.enable_grad():
        grads = []
        for checkpointing in (False, True):
            with foveate.apply(model, HilbertA(tiles=4)) as run:
                if checkpointing:
                    model.enable_gradient_checkpointing()
                out = model(**x)[0]
                with run.paused(), torch.no_grad():
                    dense = model(**x)[0]
                out.square().sum().backward()
                with run.paused(), torch.no_grad():
                    assert torch.equal(model(**x)[0], dense)
            grads.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
    torch.testing.assert_close(grads[0], grads[1])
    model.disable_gradient_checkpointing()
    assert {name: state[3] for name, state in tiny.fingerprint(model).items()} == {
        name: state[3] for name, state in before.items()
    }
    assert all(vars(attn.processor) == {} for attn in attentions(model))


def test_forwards_repeat_and_samples_ignore_their_batch_mates(model):
    x = tiny.inputs(GRID, batch=3)
    with foveate.apply(model, HilbertA(tiles=4)):
        batch = model(**x)[0]
        assert torch.equal(model(**x)[0], batch)
        one = {
            name: value[1:2] if name not in ("img_ids", "txt_ids", "return_dict") else value
            for name, value in x.items()
        }
        torch.testing.assert_close(model(**one)[0], batch[1:2])


def test_arguments_may_come_by_position_and_outputs_as_objects(model):
    x = tiny.inputs(GRID)
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    with foveate.apply(model, HilbertA(tiles=4)):
        want = model(**x)[0]
        assert torch.equal(model(*(x[name] for name in names)).sample, want)
        assert torch.equal(model(**x | {"img_ids": x["img_ids"].expand(2, -1, -1)})[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_works(dtype):
    x = tiny.inputs(GRID, dtype=dtype)
    model = tiny.flux(dtype=dtype)
    with foveate.apply(model, HilbertA(tiles=4)):
        got = model(**x)[0]
    x64 = {name: value.double() if name.endswith(("states", "tions", "step")) else value for name, value in x.items()}
    with foveate.apply(model.double(), HilbertA(tiles=4)):
        want = model(**x64)[0]
    assert got.dtype == dtype
    assert (got - want).norm() < {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype] * want.norm()


# --- what it leaves dense, and says so ---


def dense_because(model, x, method, reason):
    want = model(**x)[0]
    with foveate.apply(model, method) as run:
        assert torch.equal(model(**x)[0], want)
        assert {row.method for row in run.summary().layers} == {"dense"}
        assert all(reason in row.why for row in run.summary().layers)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids * torch.tensor([1, 2, 2]),
        lambda ids: ids.flip(0),
        lambda ids: ids[torch.randperm(len(ids))],
        lambda ids: torch.cat([ids[:-1], ids[:1]]),
    ],
    ids=["scaled", "flipped", "scattered", "repeated"],
)
def test_ids_that_are_no_raster_stay_dense(model, change):
    x = tiny.inputs(GRID)
    dense_because(model, x | {"img_ids": change(x["img_ids"])}, HilbertA(tiles=4), "no complete raster")


def test_a_raster_is_known_behind_rounded_ids():
    rounded = tiny.ids((3, 301), (300, 2)).bfloat16()  # whole numbers above 256 lose their last bit
    assert grids_of(rounded) == ((3, 301), (300, 2))


def test_a_plan_made_in_inference_mode_can_be_trained_with(model):
    x = tiny.inputs((13, 27))  # a size that no other test has planned for
    with foveate.apply(model, HilbertA(tiles=3)), torch.enable_grad():
        with torch.inference_mode():
            want = model(**x)[0].clone()
        got = model(**x)[0]
        got.square().sum().backward()
    assert torch.equal(got, want)


def test_a_raster_may_start_anywhere(model):
    x = tiny.inputs(GRID)
    x["img_ids"] = x["img_ids"] + torch.tensor([0, 7, -3])
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        model(**x)
        assert all(row.method == "HilbertA T=4" for row in run.summary().layers)


def test_small_images_and_masks_stay_dense(model):
    x = tiny.inputs(GRID)
    dense_because(model, x, HilbertA(min_tokens=321), "320 image tokens are fewer than min_tokens=321")
    dense_because(model, x, HilbertA(), "16 x 20 image tokens are too few")
    mask = torch.ones(335, 335, dtype=torch.bool).tril()
    dense_because(model, x | {"joint_attention_kwargs": {"attention_mask": mask}}, HilbertA(tiles=4), "mask")


def test_a_window_of_steps_stays_dense_where_no_scheduler_tells_the_step(model):
    class Pipeline:
        transformer = model
        scheduler = SimpleNamespace(timesteps=[1.0, 0.5])

    pipeline = Pipeline()
    for window, dense in (({"start_percent": 0.5}, True), ({}, False)):
        with foveate.apply(pipeline, HilbertA(tiles=4, **window)) as run:
            model(**tiny.inputs(GRID))
            assert all(("no scheduler tells the step" in row.why) == dense for row in run.summary().layers)


def test_a_pause_is_the_dense_model_and_ends_also_after_an_exception(model, caplog):
    x = tiny.inputs(GRID)
    dense = model(**x)[0]
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        sparse = model(**x)[0]
        with contextlib.suppress(KeyError), run.paused():
            assert torch.equal(model(**x)[0], dense)
            raise KeyError
        assert torch.equal(model(**x)[0], sparse)
        assert "2 of 3 forwards sparse; 1 dense: paused" in str(run.summary())
    assert not caplog.records


def test_split_tokens_stay_dense(model):
    run = foveate.apply(model, HilbertA(tiles=4))
    context = SimpleNamespace(ulysses_degree=1, ring_degree=2)
    for attn in attentions(model):  # as enable_parallelism sets it
        attn.processor._parallel_config = SimpleNamespace(context_parallel_config=context)
    adapter = ModelAdapter.of(model)
    adapter.before_model(model, (), tiny.inputs(GRID))  # the forward itself needs several processes
    adapter.after_model(model, (), None)
    assert all("ring attention" in row.why for row in run.summary().layers)
    assert run.plans() == {}
    run.remove()


def test_summary_counts_what_was_left_out(model):
    method = HilbertA(tiles=4, dense_layers="1")
    x = tiny.inputs(GRID, batch=2)
    with foveate.apply(model, method) as run:
        assert all(
            "no forward yet" in row.why for row in run.summary().layers if row.layer != "transformer_blocks.1.attn"
        )
        model(**x)
        rows = run.summary().layers
    assert [row.layer for row in rows] == [
        *(f"transformer_blocks.{i}.attn" for i in range(2)),
        *(f"single_transformer_blocks.{i}.attn" for i in range(3)),
    ]
    assert (rows[1].method, rows[1].why) == ("dense", "named in dense_layers")
    for i in (0, 2, 3, 4):
        mask = method.plan((GRID,), 15).tables[i % 4].to_dense()
        assert rows[i].method == "HilbertA T=4"
        assert rows[i].backend == "portable"
        assert rows[i].nominal == 0.75
        assert rows[i].true == pytest.approx(1 - mask.float().mean().item())
        assert rows[i].saved == 2 * 4 * 32 * (~mask).sum()
    text = str(run.summary())
    assert all(row.layer in text for row in rows)
    assert "named in dense_layers" in text


# --- how it borrows ---


@pytest.mark.parametrize("image_prompted", [False, True])
def test_removal_gives_the_model_back_bit_for_bit(model, image_prompted):
    more = {}
    if image_prompted:
        model, more = with_ip_adapter(model), image_prompt()
    x = tiny.inputs(GRID)
    run_dense = lambda: model(**x, **copy.deepcopy(more))[0]  # noqa: E731
    model.enable_gradient_checkpointing()
    again = model._gradient_checkpointing_func
    want, before, state = run_dense(), tiny.fingerprint(model), list(model.state_dict())
    run = foveate.apply(model, HilbertA(tiles=4))
    assert list(model.state_dict()) == state
    with torch.enable_grad():
        run_dense()
    run.remove()
    run.remove()
    assert tiny.fingerprint(model) == before
    assert model._gradient_checkpointing_func is again
    assert torch.equal(run_dense(), want)


def test_an_exception_inside_the_block_still_restores(model):
    before = tiny.fingerprint(model)
    with pytest.raises(KeyboardInterrupt), foveate.apply(model, HilbertA(tiles=4)):
        raise KeyboardInterrupt
    assert tiny.fingerprint(model) == before


def test_a_failed_apply_leaves_nothing_behind(model):
    before = tiny.fingerprint(model)
    with pytest.raises(ValueError, match="names layer 5, but the model has layers 0 to 4"):
        foveate.apply(model, HilbertA(dense_layers="3-9"))
    assert tiny.fingerprint(model) == before


def test_a_failed_forward_does_not_spoil_the_next(model):
    x = tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=4)):
        want = model(**x)[0]
        with pytest.raises(RuntimeError):
            model(**x | {"pooled_projections": torch.randn(1, 31, dtype=torch.float64)})
        assert torch.equal(model(**x)[0], want)


def test_apply_twice_is_an_error_that_says_so(model):
    with foveate.apply(model, HilbertA(tiles=4)), pytest.raises(ValueError, match="already applied"):
        foveate.apply(model, HilbertA(tiles=2))


def test_a_deep_copy_has_methods_of_its_own(model):
    x = tiny.inputs(GRID)
    dense = model(**x)[0]
    run = foveate.apply(model, HilbertA(tiles=4))
    sparse = model(**x)[0]
    twin = copy.deepcopy(model)
    run.remove()
    assert torch.equal(twin(**x)[0], sparse)
    foveate.remove(twin)
    assert torch.equal(twin(**x)[0], dense)
    assert all(type(attn.processor) is FluxAttnProcessor for attn in attentions(twin))


def test_a_model_with_methods_can_be_saved_whole(model):
    x = tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=4)):
        want = model(**x)[0]
        torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(**x)[0], want)


def test_foveate_remove_and_summary_work_without_the_handle(model):
    before = tiny.fingerprint(model)
    foveate.apply(model, HilbertA(tiles=4))
    model(**tiny.inputs(GRID))
    assert len(foveate.summary(model).layers) == 5
    foveate.remove(model)
    foveate.remove(model)
    assert foveate.summary(model).layers == []
    assert tiny.fingerprint(model) == before


# --- beside other libraries ---


@pytest.mark.parametrize("first", ["lora", "apply"])
def test_lora_before_or_after(model, first):
    x = tiny.inputs(GRID)
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "add_v_proj", "proj_out"], init_lora_weights=False)
    method = HilbertA(tiles=4)
    if first == "apply":
        run = foveate.apply(model, method)
    torch.manual_seed(1)
    model.add_adapter(config)
    model.double()
    if first == "lora":
        run = foveate.apply(model, method)
    got = model(**x)[0]
    run.remove()
    torch.testing.assert_close(got, masked(model, method, [GRID], 15)(**x)[0])


def test_fused_projections(model):
    x = tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=4)):
        want = model(**x)[0]
        model.fuse_qkv_projections()
        torch.testing.assert_close(model(**x)[0], want)
        model.unfuse_qkv_projections()
        torch.testing.assert_close(model(**x)[0], want)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["accelerate", "block_level", "leaf_level"])
def test_offloading_before_or_after(when, how):
    model, x = tiny.flux(dtype=torch.float32), tiny.inputs(GRID, dtype=torch.float32)
    cpu = torch.device("cpu")

    def offload():
        if how == "accelerate":
            accelerate.cpu_offload(model, execution_device=cpu)
        else:
            apply_group_offloading(
                model, onload_device=cpu, offload_device=cpu, offload_type=how, num_blocks_per_group=1
            )

    method = HilbertA(tiles=4)
    with foveate.apply(model, method):
        want = model(**x)[0]
    dense = model(**x)[0]
    if when == "before":
        offload()
    run = foveate.apply(model, method)
    if when == "after":
        offload()
    torch.testing.assert_close(model(**x)[0], want)
    run.remove()
    torch.testing.assert_close(model(**x)[0], dense)


def test_a_processor_set_after_apply_runs_sparse_if_it_can_and_is_named_if_not(model):
    x = tiny.inputs(GRID)
    unknown = Masked(FluxAttnProcessor(), None)
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor())
        model.single_transformer_blocks[0].attn.set_processor(unknown)
        got = model(**x)[0]
        rows = run.summary().layers
    assert "a Masked was set after apply" in rows[2].why
    assert all(row.why == "" for row in (rows[0], rows[1], rows[3], rows[4]))
    assert model.single_transformer_blocks[0].attn.processor is unknown
    torch.testing.assert_close(got, masked(model, HilbertA(tiles=4, dense_layers="2"), [GRID], 15)(**x)[0])


def test_a_backend_chosen_by_the_user_reaches_the_dense_steps_and_stays(model):
    attn, x = model.transformer_blocks[0].attn, tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        model(**x)
        attn.set_attention_backend("_native_math")
        assert plan_of(attn.processor) is not None
        with run.paused():
            model(**x)
            assert attn.processor._attention_backend == "_native_math"
    assert attn.processor._attention_backend == "_native_math"
    assert attn.processor._parallel_config is None


def test_layers_that_share_a_processor_have_plans_of_their_own(model):
    x = tiny.inputs(GRID)
    with foveate.apply(model, HilbertA(tiles=4)):
        want = model(**x)[0]
    shared = FluxAttnProcessor()
    model.set_attn_processor(shared)
    with foveate.apply(model, HilbertA(tiles=4)):
        assert torch.equal(model(**x)[0], want)
    assert all(attn.processor is shared for attn in attentions(model))
    assert vars(shared) == {}


# --- bad input ---


def test_bad_calls_are_refused_with_the_remedy(model):
    x = tiny.inputs(GRID, batch=2)
    apart = torch.stack([x["img_ids"], x["img_ids"].flip(0)])
    with foveate.apply(model, HilbertA(tiles=4)), pytest.raises(ValueError, match="differ between the samples"):
        model(**x | {"img_ids": apart})
    with foveate.apply(model, HilbertA(tiles=16)), pytest.raises(ValueError, match="use tiles<=10"):
        model(**x)
    with pytest.raises(ValueError, match="nothing to apply"):
        foveate.apply(model)
    with pytest.raises(ValueError, match="apply to the pipeline"):
        foveate.apply(model, HilbertA(start_percent=0.2))
    with pytest.raises(ValueError, match="Linear is not supported: foveate knows FluxTransformer2DModel"):
        foveate.apply(torch.nn.Linear(2, 2), HilbertA())
    with pytest.raises(ValueError, match=r"takes one method of sparse attention, .*, not HilbertA \+ HilbertA"):
        foveate.apply(model, HilbertA(), HilbertA())
    model.transformer_blocks[1].attn.processor = Masked(FluxAttnProcessor(), None)
    with pytest.raises(ValueError, match=r"transformer_blocks.1.attn has a Masked.*dense_layers='1'"):
        foveate.apply(model, HilbertA())


@pytest.mark.usefixtures("as_a_user")
def test_things_that_are_no_pipeline_or_method_are_refused(model):
    with pytest.raises(ValueError, match="not a method: 'hilberta'"):
        foveate.apply(model, "hilberta")
    with pytest.raises(ValueError, match="str has no transformer"):
        foveate.apply("pipe", HilbertA())


def test_layers_share_tables_by_phase_and_nothing_depends_on_the_layer_number(model):
    with foveate.apply(model, HilbertA(tiles=4)):
        model(**tiny.inputs(GRID))
        tables = [plan_of(attn.processor).pattern for attn in attentions(model)]
    assert all(isinstance(table, BlockTable) for table in tables)
    assert tables[0] is tables[4]
    assert len({tuple(map(len, table)) for table in tables}) == 1
