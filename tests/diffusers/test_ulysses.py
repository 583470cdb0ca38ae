"""Processes under Ulysses context parallelism compute what one computes."""

import processes
import pytest
import tiny
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig

import foveate
from foveate import LLSA, HilbertA

PARALLEL = "flux", "flux2", "qwen", "wan", "ltx"  # diffusers' own plan for LTX-2 fails, with or without foveate


def enable_parallelism(model, **context):
    """What `model.enable_parallelism` does, which needs an accelerator, with a mesh of CPU processes."""
    context = ContextParallelConfig(**context)
    mesh = dist.device_mesh.init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = config
    apply_context_parallel(model, context, model._cp_plan)


@torch.no_grad()
def check(ranks, name, method, *, before=False, batch=1, compiled=False, config=None, **context):
    """Check one family, with parallelism enabled before or after the method is applied."""
    torch.manual_seed(0)
    config = config or (tiny.SPARSE[name].wide if isinstance(method, LLSA) else {})
    model, x = tiny.built(name, batch=batch, **config)
    unsplit = ("controlnet_", "audio_encoder_attention_mask", "encoder_attention_mask")  # in diffusers' own plans
    x = {key: None if key.startswith(unsplit) else value for key, value in x.items()}
    dense = tiny.call(model, x)
    with foveate.apply(model, method):
        alone = tiny.call(model, x)
    if compiled:
        model.compile_repeated_blocks(backend="eager")
    if before:
        enable_parallelism(model, ulysses_degree=ranks, **context)
    with foveate.apply(model, method) as run:
        if not before:
            enable_parallelism(model, ulysses_degree=ranks, **context)
        assert error(tiny.call(model, x), alone) < 1e-12, name
        assert not any(row.why for row in run.summary().layers if "audio" not in row.layer), run.summary()
    assert error(tiny.call(model, x), dense) < 1e-12, name  # diffusers' own parallelism is back
    assert error(alone, dense) > 1e-3  # sparse indeed


def error(got, want):
    return (got - want).norm() / want.norm()


def work(ranks, cases):
    for name, method, options in cases:
        check(ranks, name, method, **options)


ANY = {"ulysses_anything": True}  # uneven parts
CASES = [
    *((name, HilbertA(tiles=4, align=1), ANY) for name in PARALLEL),
    ("flux", HilbertA(tiles=4, align=1), {"before": True, "batch": 2, **ANY}),
    ("wan", HilbertA(tiles=4, align=1), {"compiled": True}),
    *((name, LLSA(top_k=1, min_tokens=0), ANY) for name in ("flux2", "wan")),
    ("wan", HilbertA(tiles=4, align=1), {"before": True, "batch": 2}),
]
MORE_RANKS = [("flux2", HilbertA(tiles=4, align=1), {"config": {"num_attention_heads": 7}, **ANY})]  # uneven heads


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, MORE_RANKS)])
def test_processes_compute_what_one_computes(tmp_path, ranks, cases):
    processes.run(ranks, tmp_path, work, ranks, cases)
