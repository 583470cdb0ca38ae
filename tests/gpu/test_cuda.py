"""Laws of the portable path, and of models and pipelines, on a CUDA device."""

import pytest
import tiny
import torch
from oracle import dense_attention, random_table

import foveate
from foveate import HilbertA, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.ops.block_attention import block_attention

pytestmark = pytest.mark.gpu
GRID = (32, 40)


@pytest.mark.parametrize("runs", [(63,), (500,), (1000,), (77, 400, 523)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-3), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_output_and_every_gradient_equal_the_dense_mask(runs, dtype, tolerance, with_lse):
    table = random_table(int(torch.randint(2**31, ())), runs)
    q, k, v = (
        torch.randn(2, sum(runs), 3, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    mask = table.to_dense().cuda()
    want, want_lse = dense_attention(q, k, v, mask)
    weight = torch.randn_like(want)
    if with_lse:
        got, lse = block_attention(q, k, v, table, return_lse=True)
        seen = want_lse.isfinite()
        assert (lse - want_lse)[seen].norm() <= tolerance * want_lse[seen].norm()
    else:
        got = block_attention(q, k, v, table)
    assert (got - want).norm() <= tolerance * want.norm()
    got_grads = torch.autograd.grad((got.double() * weight).sum(), (q, k, v))
    for got_grad, grad in zip(got_grads, torch.autograd.grad((want * weight).sum(), (q, k, v)), strict=True):
        assert (got_grad - grad).norm() <= tolerance * grad.norm()


def test_memory_at_16896_tokens_stays_below_twice_that_of_q_k_v_and_out():
    table = HilbertA(tiles=16).plan(((128, 128),), 512).tables[1]
    q, k, v = (torch.randn(1, 16896, 24, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = block_attention(q, k, v, table)
    assert torch.cuda.max_memory_allocated() - before - out.nbytes < 2 * 4 * out.nbytes


@torch.no_grad()
def test_a_model_moved_to_the_device_after_apply_runs_sparse():
    model, x = tiny.flux(dtype=torch.float32), tiny.inputs(GRID, dtype=torch.float32)
    run = foveate.apply(model, HilbertA(tiles=4))
    want = model(**x)[0]
    model.cuda()
    x = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in x.items()}
    torch.testing.assert_close(model(**x)[0].cpu(), want, rtol=1e-3, atol=1e-4)
    run.remove()


@pytest.mark.parametrize(
    "offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_offloaded_pipelines_give_the_same_images(offload, when):
    pipe = untrained_pipeline(layers=1, single_layers=2, heads=2, rope=(4, 4, 8))

    def draw(pipeline):
        seed = torch.Generator("cpu").manual_seed(0)
        size = {"height": 96, "width": 128, "num_inference_steps": 2, "output_type": "latent"}
        return pipeline("a cat", generator=seed, **size).images.cpu()

    with foveate.apply(pipe, HilbertA(tiles=4)):
        want = draw(pipe)
    dense = draw(pipe)

    def start():
        if offload == "enable_group_offload":
            pipe.enable_group_offload(onload_device=torch.device("cuda"), offload_type="leaf_level")
        else:
            getattr(pipe, offload)()

    if when == "before":
        start()
    run = foveate.apply(pipe, HilbertA(tiles=4))
    if when == "after":
        start()
    torch.testing.assert_close(draw(pipe), want, rtol=1e-2, atol=1e-3)
    assert all(row.why == "" for row in run.summary().layers)
    run.remove()
    torch.testing.assert_close(draw(pipe), dense, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("others", [(), (HilbertA(tiles=4),)])
@torch.no_grad()
def test_merging_on_a_gpu_equals_merging_on_a_cpu(others):
    model, x = tiny.flux(dtype=torch.float32), tiny.inputs(GRID, dtype=torch.float32)
    steps = [x | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8, 0.6)]
    toma = ToMA(weights_every=1, dst_every=2)
    with foveate.apply(model, *others, toma):
        want = [model(**step)[0] for step in steps]
    model.cuda()
    with foveate.apply(model, *others, toma):
        for step, expected in zip(steps, want, strict=True):
            step = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in step.items()}
            torch.testing.assert_close(model(**step)[0].cpu(), expected, rtol=1e-3, atol=1e-3)


def moved(value):
    """Arguments of a model on the GPU."""
    if isinstance(value, dict):
        return {name: moved(item) for name, item in value.items()}
    if isinstance(value, list):
        return [moved(item) for item in value]
    return value.cuda() if isinstance(value, torch.Tensor) else value


# these make their rotary embedding on the CPU, leave out the text, or cannot do without
@pytest.mark.parametrize(
    "name", ["glm", "cogview4", "joyimage", "joyimage_plus", "ideogram4", "nucleus", "hidream", "cosmos", "kandinsky5"]
)
@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2),)], ids=["alone", "sparse"])
@torch.no_grad()
def test_merging_where_foveate_rotates_equals_a_cpu(name, others):
    model, x = tiny.built(name, batch=2, dtype=torch.float32)
    methods = *others, ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4))  # no choice depends on rounding
    with foveate.apply(model, *methods):
        want = tiny.call(model, x)
    model.cuda()
    with foveate.apply(model, *methods) as run:
        got = tiny.call(model, moved(x))
        assert all("ToMA" in layer.method for layer in run.summary().layers)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("build", [(tiny.unet, tiny.unet_inputs), (tiny.sd3, tiny.sd3_inputs)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_merging_that_keeps_every_token_is_dense_in_half_precision(build, dtype):
    model, x = build[0](dtype=dtype).cuda(), build[1](dtype=dtype)
    want = model(**moved(x))[0]
    with foveate.apply(model, ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4))) as run:
        got = model(**moved(x))[0]
        assert all(layer.why == "" for layer in run.summary().layers)
    assert (got - want).norm() <= 2e-2 * want.norm()
