"""Processes under Ulysses context parallelism, and under tensor parallelism, compute what one computes."""

from dataclasses import replace
from types import SimpleNamespace

import processes
import pytest
import tiny
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel, HeliosTransformer3DModel, TensorParallelConfig
from diffusers.hooks import tensor_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.pipelines.parallel import divides, enable_parallelism, share_pictures

PARALLEL = (
    "flux",
    "flux2",
    "qwen",
    "wan",
    "ltx",
    "minimax_h3",
)  # diffusers' own plan for LTX-2 fails, with or without foveate


@torch.no_grad()
def check(
    ranks, name, method, *, before=False, batch=1, compiled=False, config=None, grid=None, plan=None, why="", **context
):
    """Check one family, with parallelism enabled before or after the method is applied; `why` it is dense, if so."""
    torch.manual_seed(0)
    config = config or (tiny.SPARSE[name].wide if isinstance(method, LLSA) else {})
    model, x = built(name, grid=grid, batch=batch, **config)
    dense = tiny.call(model, x)
    with foveate.apply(model, method) as run:
        alone, layers = tiny.call(model, x), run.summary().layers
    if compiled:
        model.compile_repeated_blocks(backend="eager")
    context = context or {"ulysses_degree": ranks}
    if before:
        enable_parallelism(model, plan, **context)
    with foveate.apply(model, method) as run:
        if not before:
            enable_parallelism(model, plan, **context)
        assert error(tiny.call(model, x), dense if why else alone) < 1e-12, name
        assert any(why in row.why for row in run.summary().layers) if why else run.summary().layers == layers
    assert error(tiny.call(model, x), dense) < 1e-12, name  # diffusers' own parallelism is back
    assert error(alone, dense) > 1e-3  # sparse indeed


def built(name, **options):
    model, x = tiny.built(name, **options)
    unsplit = ("controlnet_", "audio_encoder_attention_mask", "encoder_attention_mask")  # in diffusers' own plans
    return model, {key: None if key.startswith(unsplit) else value for key, value in x.items()}


def error(got, want):
    return (got - want).norm() / want.norm()


def check_gradients(ranks, name, method):
    """Check that the gradients of the processes add up to those of one, or that there is an error."""
    torch.manual_seed(0)
    model, x = built(name, batch=2, **tiny.SPARSE[name].wide if isinstance(method, LLSA) else {})
    x["encoder_hidden_states"] = x["encoder_hidden_states"].repeat(1, 2, 1)  # divides evenly
    if "txt_ids" in x:
        x["txt_ids"] = x["txt_ids"].repeat(*[1] * (x["txt_ids"].ndim - 2), 2, 1)

    def gradients():
        model.zero_grad()
        tiny.call(model, x).square().sum().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    with foveate.apply(model, method):
        alone = gradients()
        enable_parallelism(model, ulysses_degree=ranks)
        for name, part in gradients().items():
            dist.all_reduce(part)
            assert error(part, alone[name]) < 1e-9 or part.norm() < 1e-9, name


def check_no_gradients(ranks):
    model, x = built("flux")
    enable_parallelism(model, ulysses_degree=ranks, ulysses_anything=True)
    with foveate.apply(model, HilbertA(tiles=4, align=1)), pytest.raises(ValueError, match="no gradients"):
        tiny.call(model, x)


@torch.no_grad()
def check_tensor_parallel(ranks, name, method, *, before=False):
    """Check that processes which hold a part of the heads each compute what one computes."""
    torch.manual_seed(0)
    model, x = tiny.built(name, **tiny.SPARSE[name].wide | {"num_attention_heads": 4})
    dense = tiny.call(model, x)
    with foveate.apply(model, method):
        alone = tiny.call(model, x)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    config = TensorParallelConfig(mesh=mesh)
    config.setup(dist.get_rank(), ranks, torch.device("cpu"), mesh=mesh)
    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)  # diffusers allows GPUs only
    if before:
        tensor_parallel.apply_tensor_parallel(model, config, model._tp_plan)
    with foveate.apply(model, method):
        if not before:
            tensor_parallel.apply_tensor_parallel(model, config, model._tp_plan)
        assert error(tiny.call(model, x), alone) < 1e-12, name
    assert error(tiny.call(model, x), dense) < 1e-12, name
    assert error(alone, dense) > 1e-3


def all_gather(gathered, tensor, group=None):
    """`dist.all_gather` of tensors of different sizes, as packed sequences need it: gloo gathers none."""
    for rank, part in enumerate(gathered):
        dist.broadcast(part.copy_(tensor) if rank == dist.get_rank() else part, rank)


def work(ranks, cases):
    dist.all_gather = all_gather
    for name, method, options in cases:
        check(ranks, name, method, **options)
    if ranks == 2:
        check_gradients(ranks, "flux", HilbertA(tiles=4, align=1))
        check_gradients(ranks, "wan", LLSA(top_k=1, min_tokens=0))
        check_no_gradients(ranks)
        for name in ("flux", "flux2", "qwen"):  # diffusers has plans for these
            check_tensor_parallel(ranks, name, HilbertA(tiles=4, align=1))
            check_tensor_parallel(ranks, name, TOMA)
            check_tensor_parallel(ranks, name, LLSA(top_k=1, min_tokens=0), before=True)


ANY = {"ulysses_degree": 2, "ulysses_anything": True}  # uneven parts
TOMA = ToMA(keep=0.5, tile=(4, 4), skip=1)
# its own plan names 40 blocks
HELIOS = {
    path: split
    for path, split in HeliosTransformer3DModel._cp_plan.items()
    if path.split(".")[1] in ("*", "0", "1", "2")
}
CASES = [
    *((name, HilbertA(tiles=4, align=1), ANY) for name in PARALLEL),
    ("flux", HilbertA(tiles=4, align=1), {"before": True, "batch": 2, **ANY}),
    ("wan", HilbertA(tiles=4, align=1), {"compiled": True}),
    ("chroma", HilbertA(tiles=4, align=1), {"plan": FluxTransformer2DModel._cp_plan, **ANY}),  # has none of its own
    ("helios", HilbertA(tiles=4, align=1), {"plan": HELIOS, "batch": 2, **ANY}),
    ("helios", LLSA(top_k=1, min_tokens=0), {"plan": HELIOS, "before": True, **ANY}),
    *((name, LLSA(top_k=1, min_tokens=0), ANY) for name in ("flux2", "wan", "minimax_h3")),
    ("wan", HilbertA(tiles=4, align=1), {"before": True, "batch": 2}),
    *((name, TOMA, {"batch": 2, **ANY}) for name in ("flux", "flux2", "qwen")),
    ("flux", replace(TOMA, granularity="module"), ANY),
    ("wan", replace(TOMA, tile=(2, 4, 4)), {"grid": (4, 8, 9)}),
    ("wan", TOMA, {"why": "cross the borders", **ANY}),  # 5 frames
    ("minimax_h3", TOMA, {"why": "as one sequence", **ANY}),
    ("wan", replace(TOMA, skip=0), {"grid": (4, 8, 9), "why": "use skip=1"}),
]
MORE_RANKS = [  # uneven heads
    ("flux2", HilbertA(tiles=4, align=1), {"config": {"num_attention_heads": 7}, **ANY, "ulysses_degree": 4})
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, MORE_RANKS)])
def test_processes_compute_what_one_computes(tmp_path, ranks, cases):
    processes.run(ranks, tmp_path, work, ranks, cases)


@torch.no_grad()
def test_ring_attention_is_left_to_the_model(monkeypatch):
    model, x = tiny.built("wan")
    dense = tiny.call(model, x)

    def ring(query, key, value, *_, **__):  # diffusers has none for CPUs
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    monkeypatch.setattr(attention_dispatch, "_templated_context_parallel_attention", ring)
    for block in model.blocks:
        block.attn1.processor._parallel_config = ParallelConfig(ContextParallelConfig(ring_degree=2))
    with foveate.apply(model, HilbertA(tiles=4, align=1)) as run:
        assert error(tiny.call(model, x), dense) < 1e-9
        assert all("ring attention" in layer.why for layer in run.summary().layers)


def test_a_picture_that_processes_cannot_share_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"2 attention heads of Flux.* do not divide over 3.*use 2, or"):
        share_pictures(tiny.pipeline(), 3)
    with pytest.raises(ValueError, match=r"no plan to divide an image of UNet2DConditionModel.*its own images"):
        share_pictures(SimpleNamespace(unet=tiny.unet()), 2)


def test_only_the_last_process_may_have_fewer_heads():
    assert [ranks for ranks in range(2, 25) if divides(24, ranks)] == [2, 3, 4, 5, 6, 8, 12, 24]
