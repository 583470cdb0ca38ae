"""Laws of LLSA inside real Flux, SD3, PixArt and DiT models."""

import copy
from unittest import mock

import log_linear_oracle
import pytest
import tiny
import torch
from diffusers.models.transformers import transformer_flux

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.ops import select_blocks
from foveate.ops.curves import grid_order

HEADS = {"attention_head_dim": 32, "num_attention_heads": 2}  # it takes 32 channels and more
EVERY = LLSA(top_k=99, enrich=False, min_tokens=0)  # picks all blocks: the dense model


def flux_inputs(height, width, **more):
    x = tiny.inputs((height, width), **more)
    return x | tiny.residuals(x, 2, 1, dim=64)


MODELS = {  # the model, inputs for a grid, text tokens
    "flux": (lambda **more: tiny.flux(axes_dims_rope=(8, 12, 12), **HEADS, **more), flux_inputs, 15),
    "sd3": (
        lambda **more: tiny.sd3(caption_projection_dim=64, **HEADS, **more),
        lambda height, width, **more: tiny.sd3_inputs(height, width, dim=64, **more),
        9,
    ),
    "pixart": (
        lambda **more: tiny.pixart(cross_attention_dim=64, **HEADS, **more),
        lambda height, width, **more: tiny.pixart_inputs(2 * height, 2 * width, **more),
        0,
    ),
    "dit": (
        lambda **more: tiny.dit(**HEADS, **more),
        lambda height, width, **more: tiny.dit_inputs(2 * height, 2 * width, **more),
        0,
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)
SIZES = [
    (name, grid) for name in MODELS for grid in [(16, 16), (12, 20), (9, 13)] if grid[0] == grid[1] or name != "dit"
]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def built(name, *, grid=(16, 16), **more):
    build, inputs, _ = MODELS[name]
    return build(), inputs(*grid, **more)


def run(model, x):
    return model(**copy.copy(x))[0]


class Reference:
    """Attention in the place of a stock model's, in raster order: the independent route. In float64."""

    def __init__(self, method, grid, text, text_in_front):
        self.method, self.text, self.text_in_front = method, text, text_in_front
        self.order = grid_order(method.curve, *grid)
        self.stock = torch.nn.functional.scaled_dot_product_attention

    def __call__(self, q, k, v, *args, **kwargs):
        """[batch, heads, tokens, dim]."""
        cells = len(self.order)
        if k.shape[2] not in (cells, cells + self.text) or q.shape != k.shape:
            return self.stock(q, k, v, *args, **kwargs)  # of a text alone
        text = k.shape[2] - cells
        pieces = [text, cells] if self.text_in_front else [cells, text]
        (tq, iq), (tk, ik), (tv, iv) = (x.split(pieces, 2)[:: 1 if self.text_in_front else -1] for x in (q, k, v))
        iq, ik, iv = (x[:, :, self.order] for x in (iq, ik, iv))
        m = self.method
        selection = select_blocks(iq, ik, top_k=m.top_k, block_size=m.block_size, levels=m.levels)
        options = {"reweight": m.reweight}
        enrich = None if m.enrich is True else int(m.enrich)
        image, _ = log_linear_oracle.log_linear(iq, ik, iv, selection, enrich, extra_k=tk, extra_v=tv, **options)
        raster = torch.empty_like(image)
        raster[:, :, self.order] = image
        words = self.stock(tq, k, v)
        return torch.cat([words, raster] if self.text_in_front else [raster, words], 2)

    def of_flux(self, q, k, v, *args, **kwargs):
        """[batch, tokens, heads, dim]."""
        return self(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def referred(name, model, x, method, grid):
    """What the stock model returns with that attention."""
    reference = Reference(method, grid, MODELS[name][2], text_in_front=name == "flux")
    where = (transformer_flux, "dispatch_attention_fn") if name == "flux" else (torch.nn.functional,)
    if name == "flux":
        patch = mock.patch.object(*where, reference.of_flux)
    else:
        patch = mock.patch.object(*where, "scaled_dot_product_attention", reference)
    with patch:
        return run(model, x)


@pytest.mark.parametrize(("name", "grid"), SIZES)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_block_picked_and_no_means_is_the_dense_model(name, grid, batch):
    model, x = built(name, grid=grid, batch=batch)
    want = run(model, x)
    with foveate.apply(model, EVERY) as handle:
        torch.testing.assert_close(run(model, x), want, rtol=1e-10, atol=1e-10)
        blocks = -(-grid[0] * grid[1] // 16)
        rows = handle.summary().layers
        assert all(row.method == f"LLSA K=99 enrich=False (all {blocks} blocks)" for row in rows)
        assert all((row.backend, row.nominal, row.saved) == ("portable", 0, 0) for row in rows)
    assert torch.equal(run(model, x), want)


@every_model
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_so_it_is_in_other_dtypes(name, dtype, tolerance):
    build, inputs, _ = MODELS[name]
    model, x = build(dtype=dtype), inputs(16, 16, dtype=dtype)
    want = run(model, x)
    with foveate.apply(model, EVERY):
        torch.testing.assert_close(run(model, x), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "grid"), SIZES)
@pytest.mark.parametrize(
    "method",
    [
        LLSA(top_k=2, min_tokens=0),
        LLSA(top_k=1, levels=2, curve="hilbert", reweight=False, min_tokens=0),
        LLSA(top_k=3, enrich=False, min_tokens=0),
        LLSA(top_k=2, block_size=32, levels=1, reweight=False, min_tokens=0),
    ],
    ids=lambda method: method.title,
)
def test_the_model_is_the_one_whose_attention_is_the_definition(name, grid, method):
    model, x = built(name, grid=grid, batch=2)
    want = referred(name, model, x, method, grid)
    with foveate.apply(model, method):
        got = run(model, x)
    torch.testing.assert_close(got, want)
    assert (got - run(model, x)).abs().max() > 1e-6  # it matters


@every_model
def test_a_sample_does_not_depend_on_its_batch_mates(name):
    model, x = built(name, batch=3)

    def second(value):
        if isinstance(value, dict):
            return {key: second(item) for key, item in value.items() if key not in ("img_ids", "txt_ids")} | {
                key: item for key, item in value.items() if key in ("img_ids", "txt_ids")
            }
        if isinstance(value, list):
            return [second(item) for item in value]
        return value[1:2] if isinstance(value, torch.Tensor) and value.ndim else value

    with foveate.apply(model, LLSA(top_k=2, min_tokens=0)):
        torch.testing.assert_close(run(model, second(x)), run(model, x)[1:2])


@every_model
def test_gradients_are_those_of_the_dense_model_where_it_is_dense_and_survive_checkpointing(name):
    model, x = built(name)

    def gradients():
        with torch.enable_grad():
            run(model, x).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    dense = gradients()
    with foveate.apply(model, EVERY):
        torch.testing.assert_close(gradients(), dense)
    with foveate.apply(model, LLSA(top_k=2, min_tokens=0)):
        sparse = gradients()
        model.enable_gradient_checkpointing()
        torch.testing.assert_close(gradients(), sparse)
    model.disable_gradient_checkpointing()
    assert any((a - b).abs().max() > 1e-9 for a, b in zip(sparse, dense, strict=True) if a is not None)


def dense_because(model, x, method, why):
    dense = run(model, x)
    with foveate.apply(model, method) as handle:
        assert torch.equal(run(model, x), dense)
        assert all(row.method == "dense" and why in row.why for row in handle.summary().layers)


@every_model
def test_small_images_stay_dense(name):
    dense_because(*built(name), LLSA(), "256 image tokens are fewer than min_tokens=1024")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (tiny.flux, tiny.inputs),
        (tiny.sd3, tiny.sd3_inputs),
        (tiny.pixart, tiny.pixart_inputs),
        (tiny.dit, tiny.dit_inputs),
    ],
)
def test_narrow_heads_stay_dense(model, inputs):
    why = "does not support these heads: head_dim must be 32 to 256, not "
    dense_because(model(), inputs(), LLSA(min_tokens=0), why)


def test_masks_stay_dense():
    model, x = built("flux")
    mask = torch.ones(271, 271, dtype=torch.bool).tril()
    dense_because(model, x | {"joint_attention_kwargs": {"attention_mask": mask}}, LLSA(min_tokens=0), "mask")
    model, x = built("pixart")
    dense_because(model, x | {"attention_mask": torch.ones(1, 256)}, LLSA(min_tokens=0), "mask")


@every_model
def test_too_many_levels_are_refused_with_the_most_there_can_be(name):
    model, x = built(name)
    dense = run(model, x)
    with foveate.apply(model, LLSA(levels=3, min_tokens=0)), pytest.raises(ValueError, match="use levels<=2"):
        run(model, x)
    assert torch.equal(run(model, x), dense)


def test_summary_counts_what_was_left_out():
    model, x = built("flux", grid=(16, 20), batch=2)
    with foveate.apply(model, LLSA(top_k=2, min_tokens=0, dense_layers="1")) as handle:
        run(model, x)
        rows = handle.summary().layers
        (plan,) = handle.plans().values()
    image, text, keys = 320, 15, 2 * 16 + 20
    pairs, every = text * (text + image) + image * (text + keys), (text + image) ** 2
    assert rows[1].why == "named in dense_layers"
    for row in (rows[0], *rows[2:]):
        assert row.method == "LLSA K=2"
        assert (row.nominal, row.true) == pytest.approx((1 - keys / image, 1 - pairs / every))
        assert row.saved == 2 * 4 * 64 * (every - pairs)
    assert plan.order.tolist() == grid_order("morton", 16, 20).tolist()


def test_reference_images_are_read_with_the_picture_each_along_its_own_curve():
    model = MODELS["flux"][0]()
    x = tiny.inputs((16, 20), (10, 12))
    dense = run(model, x)
    with foveate.apply(model, EVERY) as handle:
        torch.testing.assert_close(run(model, x), dense)
        (plan,) = handle.plans().values()
    assert plan.segments == ((0, 320), (1, 120))
    assert plan.order.tolist() == [
        *grid_order("morton", 16, 20).tolist(),
        *(grid_order("morton", 10, 12) + 320).tolist(),
    ]


def test_beside_toma_it_reads_merged_tokens():
    model, x = built("flux", grid=(16, 16))
    toma = ToMA(keep=0.5, tile=(4, 4), skip=0)
    with foveate.apply(model, HilbertA(tiles=1, centre=0, curve="morton"), toma):
        want = run(model, x)
    with foveate.apply(model, EVERY, toma) as handle:
        torch.testing.assert_close(run(model, x), want)  # where all is read, only merging counts
        assert all(row.true == pytest.approx(1 - (143 / 271) ** 2) for row in handle.summary().layers)
    with foveate.apply(model, LLSA(top_k=1, min_tokens=0), toma) as handle:
        assert (run(model, x) - want).abs().max() > 1e-6
        keys = 16 + 8
        pairs = 15 * 143 + 128 * (15 + keys)
        assert all(row.true == pytest.approx(1 - pairs / 271**2) for row in handle.summary().layers)


def test_other_methods_beside_it_are_refused():
    flux = MODELS["flux"][0]()
    with pytest.raises(ValueError, match=r"takes one method of sparse attention, .*, not LLSA \+ HilbertA"):
        foveate.apply(flux, LLSA(), HilbertA())
