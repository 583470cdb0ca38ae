"""Laws under torch.compile. In a process of their own: the shape checks of the other tests are not to be compiled."""

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import logging, tiny, torch, foveate
from torch._dynamo.utils import counters
torch.set_grad_enabled(False)
logging.disable()
torch.set_num_threads(1)
model = tiny.flux(layers=1, single_layers=10, dtype=torch.float32)  # more layers than Dynamo's limit of 8 recompiles
x = tiny.inputs((16, 20), dtype=torch.float32)
graphs = lambda: counters["stats"]["unique_graphs"]
dense = model(**x)[0]
with foveate.apply(model, foveate.HilbertA(tiles=4)):
    sparse = model(**x)[0]
near = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""

REGIONAL = """
model.compile_repeated_blocks(fullgraph=True, backend="eager")
near(model(**x)[0], dense)
stock = graphs()
with foveate.apply(model, foveate.HilbertA(tiles=4)):
    near(model(**x)[0], sparse)
    assert graphs() == stock + 2, (stock, graphs())  # one for each class of blocks, not one for each layer
    model(**tiny.inputs((20, 16), dtype=torch.float32))
    model(**tiny.inputs((24, 16), dtype=torch.float32))
    sizes = graphs()
    model(**tiny.inputs((16, 28), dtype=torch.float32))
    assert graphs() == sizes, (sizes, graphs())  # further sizes are free
near(model(**x)[0], dense)
"""

MERGED = """
steps = [x | {"timestep": torch.full((1,), t)} for t in (1.0, 0.8, 0.6, 0.4)]
toma, whole = foveate.ToMA(weights_every=1, dst_every=2), foveate.ToMA(granularity="block", skip=1)
for methods in (toma,), (whole,), (foveate.HilbertA(tiles=4), foveate.ToMA()):
    model = tiny.flux(layers=2, single_layers=10, dtype=torch.float32)
    with foveate.apply(model, *methods):
        merged = [model(**step)[0] for step in steps]
    dense = model(**x)[0]
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    near(model(**x)[0], dense)
    counters.clear()
    with foveate.apply(model, *methods):
        for step, want in zip(steps, merged, strict=True):
            near(model(**step)[0], want)
        assert graphs() <= 5, graphs()  # of each class those that are skipped and those that merge; stock has 3
        for step, want in zip(steps, merged, strict=True):
            near(model(**step)[0], want)
        assert graphs() <= 5, graphs()
    near(model(**x)[0], dense)
"""

UNET = """
import copy
model = tiny.unet(dtype=torch.float32)
steps = [tiny.unet_inputs(dtype=torch.float32) | {"timestep": torch.tensor(t)} for t in (900.0, 700.0, 500.0)]
dense = [model(**copy.copy(step))[0] for step in steps]
toma = foveate.ToMA(tile=(4, 4), weights_every=1, dst_every=2)
with foveate.apply(model, toma):
    merged = [model(**copy.copy(step))[0] for step in steps]
model.compile_repeated_blocks(fullgraph=True, backend="eager")
for step, want in zip(steps, dense, strict=True):
    near(model(**copy.copy(step))[0], want)
with foveate.apply(model, toma):
    for step, want in zip(2 * steps, 2 * merged, strict=True):
        near(model(**copy.copy(step))[0], want)
near(model(**copy.copy(steps[0]))[0], dense[0])
"""

SPARSE_UNET = """
import copy
wide = dict(dtype=torch.float32, attention_head_dim=2)
sdxl = tiny.unet(block_out_channels=(64, 64), transformer_layers_per_block=(1, 6), **wide)
sd15 = tiny.sd15(block_out_channels=(64, 128, 128), **wide)
todo = foveate.methods.ToDo()
inputs = [tiny.unet_inputs(*size, dtype=torch.float32) for size in ((32, 32), (24, 40), (40, 24), (36, 28))]
call = lambda x: model(**copy.copy(x))[0]
methods = foveate.HilbertA(tiles=4), todo, foveate.LLSA(top_k=2, min_tokens=0), foveate.HilbertA(dense_layers="0")
for model in sdxl, sd15:
    dense = [call(x) for x in inputs]
    wanted = []
    for method in methods:
        with foveate.apply(model, method):
            wanted.append([call(x) for x in inputs])
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    near(call(inputs[0]), dense[0])
    for method, sparse in zip(methods, wanted, strict=True):
        with foveate.apply(model, method):
            counters.clear()
            for x, want in zip(inputs, sparse, strict=True):
                near(call(x), want)
            assert graphs() <= 5, (method, graphs())  # with dense sections, and sizes that change
    near(call(inputs[1]), dense[1])
"""

LLSA = """
wide = dict(dtype=torch.float32, attention_head_dim=32, num_attention_heads=2)
model = tiny.flux(layers=1, single_layers=10, axes_dims_rope=(8, 12, 12), **wide)
method = foveate.LLSA(top_k=2, min_tokens=0)
sizes = ((16, 20), 15), ((20, 16), 9), ((24, 16), 7)
inputs = [tiny.inputs(grid, text=text, dtype=torch.float32) for grid, text in sizes]
with foveate.apply(model, method):
    wanted = [model(**x)[0] for x in inputs]
dense = model(**inputs[0])[0]
model.compile_repeated_blocks(fullgraph=True, backend="eager")
near(model(**inputs[0])[0], dense)
stock = graphs()
with foveate.apply(model, method):
    near(model(**inputs[0])[0], wanted[0])
    assert graphs() == stock + 2, (stock, graphs())  # one for each class of blocks
    for x, want in zip(inputs, wanted, strict=True):
        near(model(**x)[0], want)
    sizes = graphs()
    model(**tiny.inputs((28, 16), text=11, dtype=torch.float32))
    assert graphs() == sizes, (sizes, graphs())  # further sizes and texts are free
near(model(**inputs[0])[0], dense)

model, x = tiny.sd3(caption_projection_dim=64, num_layers=12, **wide), tiny.sd3_inputs(dim=64, dtype=torch.float32)
dense = model(**x)[0]
with foveate.apply(model, method):
    sparse = model(**x)[0]
for block in model.transformer_blocks:
    block.compile(fullgraph=True, backend="eager")
near(model(**x)[0], dense)
stock = graphs()
with foveate.apply(model, method):
    near(model(**x)[0], sparse)
    assert graphs() == stock + 3, (stock, graphs())  # blocks of two attentions, of one, and the last
near(model(**x)[0], dense)
"""

REGIONAL_AFTER = """
run = foveate.apply(model, foveate.HilbertA(tiles=4, dense_layers="0"))
mixed = model(**x)[0]
model.compile_repeated_blocks(fullgraph=True, backend="eager")
near(model(**x)[0], mixed)
assert graphs() <= 4, graphs()
run.remove()
near(model(**x)[0], dense)
"""

WHOLE = """
{compile}
near(compiled(**x)[0], dense)
run = foveate.apply(compiled, foveate.HilbertA(tiles=4))
near(compiled(**x)[0], sparse)
run.remove()
near(compiled(**x)[0], dense)
"""

INDUCTOR = """
model, x = model.cuda(), {name: x[name].cuda() if isinstance(x[name], torch.Tensor) else x[name] for name in x}
model.compile_repeated_blocks(fullgraph=True)
with foveate.apply(model, foveate.HilbertA(tiles=4)):
    torch.testing.assert_close(model(**x)[0].cpu(), sparse, rtol=1e-3, atol=1e-4)
    assert graphs() <= 3, graphs()
steps = [x | {"timestep": torch.full((1,), t, device="cuda")} for t in (1.0, 0.8, 0.6)]
for methods in (foveate.ToMA(weights_every=1),), (foveate.HilbertA(tiles=4), foveate.ToMA(weights_every=1)):
    with torch.compiler.set_stance("force_eager"), foveate.apply(model, *methods):
        merged = [model(**step)[0] for step in steps]
    with foveate.apply(model, *methods):
        for step, want in zip(steps, merged, strict=True):
            torch.testing.assert_close(model(**step)[0], want, rtol=1e-3, atol=1e-3)
"""

TABLES = """
torch.set_grad_enabled(True)
from foveate.ops.block_attention import block_attention
compiled = torch.compile(block_attention, fullgraph=True)
q, k, v = (torch.randn(1, 2, 32 * 32 + 77, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3))
before = graphs()
for table in foveate.HilbertA(tiles=4).plan(((32, 32),), 77).tables:
    want, got = block_attention(q, k, v, table), compiled(q, k, v, table)
    assert torch.equal(got, want)
    grads, others = (torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (got, want))
    assert all(torch.equal(grad, other) for grad, other in zip(grads, others, strict=True))
assert graphs() == before + 1, (before, graphs())
"""


@pytest.mark.parametrize(
    "script",
    [
        REGIONAL,
        MERGED,
        WHOLE.format(compile='compiled = torch.compile(model, backend="eager", fullgraph=True)'),
        pytest.param(REGIONAL_AFTER, marks=pytest.mark.slow),
        pytest.param(UNET, marks=pytest.mark.slow),
        pytest.param(SPARSE_UNET, marks=pytest.mark.slow),
        pytest.param(LLSA, marks=pytest.mark.slow),
        pytest.param(WHOLE.format(compile='compiled = model; model.compile(backend="eager")'), marks=pytest.mark.slow),
        pytest.param(INDUCTOR, marks=pytest.mark.gpu),
        pytest.param(TABLES, marks=pytest.mark.gpu),
    ],
    ids=[
        *("blocks before apply", "merged", "torch.compile", "blocks after apply", "unet", "sparse unet", "llsa"),
        *("model.compile", "inductor", "any table"),
    ],
)
def test_compiled_models_run_sparse_without_breaks_or_a_graph_per_layer(script):
    here = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", SETUP + script], capture_output=True, text=True, cwd=here)
    assert result.returncode == 0, result.stderr[-3000:]
