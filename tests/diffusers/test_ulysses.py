"""Two processes under Ulysses context parallelism compute what one computes."""

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig

import foveate
from foveate import HilbertA

GRID = (16, 20)


def enable_parallelism(model, degree):
    """What `model.enable_parallelism` does, which needs an accelerator, with a mesh of CPU processes."""
    context = ContextParallelConfig(ulysses_degree=degree)
    mesh = dist.device_mesh.init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    for processor in model.attn_processors.values():
        processor._parallel_config = config
    apply_context_parallel(model, context, model._cp_plan)


@torch.no_grad()
def work(rank, ranks, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    model = tiny.flux(dtype=torch.float32)
    torch.manual_seed(0)
    x = tiny.inputs(GRID, text=14, dtype=torch.float32)
    dense = model(**x)[0]
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        alone = model(**x)[0]
        enable_parallelism(model, ranks)
        torch.testing.assert_close(model(**x)[0], alone, rtol=1e-5, atol=1e-5)
        assert all(row.method == "HilbertA T=4" for row in run.summary().layers)
        model(**tiny.inputs(GRID, text=16, dtype=torch.float32))  # another text
    torch.testing.assert_close(model(**x)[0], dense, rtol=1e-5, atol=1e-5)  # diffusers' own parallelism is back
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(tmp_path):
    mp.spawn(work, (2, tmp_path / "store"), nprocs=2)
