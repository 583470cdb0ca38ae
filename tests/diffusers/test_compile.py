"""Laws under torch.compile. In a process of their own: the shape checks of the other tests are not to be compiled."""

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import logging, sys, tiny, torch, foveate
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

FAMILY = """
torch._dynamo.reset()
name, config, methods, (first, total) = {case}
family = tiny.SPARSE[name]
model = family.make(dtype=torch.float32, **config)
grids = [(16, 20), (20, 16), (24, 16), (16, 28)] if name != "sd3" else [(16, 16)]
x = family.inputs(model, grids[0])
inputs = [x, *(tiny.at(x, left) for left in (0.8, 0.6, 0.4))]
if all(isinstance(method, foveate.methods.base.SparseAttention) for method in methods):
    inputs = [family.inputs(model, grid) for grid in grids]
outputs = lambda: [tiny.call(model, x) for x in inputs]
dense = outputs()
with foveate.apply(model, *methods):
    wanted = outputs()
names = model._repeated_blocks or ["JointTransformerBlock", "PRXBlock", "Lumina2TransformerBlock"]
for block in model.modules():
    if type(block).__name__ in names:
        block.compile(fullgraph=True, backend="eager")
near(tiny.call(model, inputs[0]), dense[0])
counters.clear()
print(name, methods, file=sys.stderr)
with foveate.apply(model, *methods):
    near(tiny.call(model, inputs[0]), wanted[0])
    assert graphs() <= first, graphs()
    for x, want in zip(inputs[:3], wanted, strict=False):
        near(tiny.call(model, x), want)
    seen = graphs()
    assert seen <= total, seen
    for got, want in zip(outputs(), wanted, strict=True):  # further sizes and steps are free
        near(got, want)
    assert graphs() == seen, (graphs(), seen)
near(tiny.call(model, inputs[0]), dense[0])
"""

# family, configuration with more layers than Dynamo's limit of 8 recompiles, methods,
# most graphs (for one size, for three sizes or steps): one for each class of blocks, not one for each layer
DEEP = "dict(layers=1, single_layers=10)"
SINGLE = "dict(num_layers=1, num_single_layers=10)"
TEN = "dict(num_layers=10)"
WIDE = "dict(layers=1, single_layers=10, **tiny.FAMILIES['flux'].wide)"
WIDE_SD3 = "caption_projection_dim=64, num_layers=12, attention_head_dim=32, num_attention_heads=2"
UNET = "dict(block_out_channels=(64, 64), transformer_layers_per_block=(1, 6), attention_head_dim=2)"
HILBERTA = "[foveate.HilbertA(tiles=4)]"
LLSA = "[foveate.LLSA(top_k=2, min_tokens=0)]"
TOMA = "foveate.ToMA(skip=0, tile=(4, 4), weights_every=1, dst_every=2)"
BOTH = "[foveate.HilbertA(tiles=4), foveate.ToMA()]"
CASES = [
    f"'flux', {DEEP}, [{TOMA}], (5, 5)",
    f"'flux', {DEEP}, [foveate.ToMA(granularity='block', skip=1)], (5, 5)",
    f"'flux', {WIDE}, {LLSA}, (2, 6)",
    f"'flux', {DEEP}, {BOTH}, (5, 5)",
    f"'flux2', {SINGLE}, {HILBERTA}, (2, 6)",
    f"'hunyuan_video', {SINGLE}, {BOTH}, (7, 7)",
    f"'qwen', {TEN}, {BOTH}, (5, 5)",
    f"'sd3', dict({WIDE_SD3}), {LLSA}, (3, 6)",
    f"'sdxl', {{}}, [{TOMA}], (5, 5)",
    f"'sdxl', {UNET}, {HILBERTA}, (5, 5)",
]
MORE_CASES = [  # with a GPU only, to spare time
    f"'zimage', dict(n_layers=10), {BOTH}, (6, 6)",
    f"'prx', dict(depth=10), {BOTH}, (5, 5)",
    f"'lumina2', {TEN}, {HILBERTA}, (4, 8)",
    f"'hunyuan_image', {SINGLE}, {HILBERTA}, (3, 9)",
    f"'krea2', {TEN}, {HILBERTA}, (2, 8)",
    f"'minimax_h3', {TEN}, {BOTH}, (5, 5)",
    f"'ltx2', {TEN}, {HILBERTA}, (1, 4)",
    "'sd15', dict(block_out_channels=(64, 128, 128), attention_head_dim=2), [foveate.methods.ToDo()], (5, 5)",
]
GRAPH_CASES = {
    "flux": f"'flux', {WIDE}, [foveate.HilbertA(tiles=4)]",
    "flux merged": f"'flux', {WIDE}, [{TOMA}]",
    "flux both": f"'flux', {WIDE}, [foveate.HilbertA(tiles=4), {TOMA}]",
    "qwen both": f"'qwen', dict(num_layers=10), [foveate.HilbertA(tiles=4), {TOMA}]",
    "sdxl merged": f"'sdxl', {UNET}, [{TOMA}]",
}

RAGGED = """
def prompts(*lengths):
    x = tiny.zimage_inputs(batch=len(lengths), dtype=torch.float32)
    return x | dict(cap_feats=[torch.randn(n, 16) for n in lengths], controlnet_block_samples=None)
steps = {1.0: (19, 40), 0.8: (70, 40), 0.6: (40, 20), 0.4: (25, 90), 0.2: (35, 70)}
inputs = [tiny.at(prompts(*lengths), left) for left, lengths in steps.items()]
for methods in [foveate.HilbertA(tiles=4)], [foveate.HilbertA(tiles=4), foveate.ToMA(skip=0)]:
    torch._dynamo.reset()
    model = tiny.zimage(torch.float32, n_layers=10)
    with foveate.apply(model, *methods):
        wanted = [tiny.call(model, x) for x in inputs]
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    counters.clear()
    with foveate.apply(model, *methods) as run:
        for x, want in zip(inputs[:4], wanted):
            near(tiny.call(model, x), want)
        assert not any(row.why for row in run.summary().layers)
        seen = graphs()
        assert seen <= 12, seen
        for x, want in zip(inputs, wanted):  # prompts of other lengths are free
            near(tiny.call(model, x), want)
        assert graphs() == seen, (graphs(), seen)
"""

# what compiled code reads at recorded addresses must not move: CUDA graphs would be recorded again
ADDRESSES = f"""
from torch._dynamo.utils import get_static_address_type
kept, seen = [], []
def backend(graph, inputs):
    fixed = [isinstance(x, torch.Tensor) and get_static_address_type(x) is not None for x in inputs]
    def run(*args):
        kept.extend(args)  # so that no address is used twice
        seen.append([x.data_ptr() for x, static in zip(args, fixed, strict=True) if static])
        return graph.forward(*args)
    return run
for methods in {HILBERTA}, [foveate.HilbertA(tiles=4), {TOMA}]:
    torch._dynamo.reset()
    model = tiny.flux(**{DEEP}, dtype=torch.float32)
    pictures = [tiny.inputs(grid, dtype=torch.float32) for grid in ((16, 20), (20, 16))]
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    with foveate.apply(model, *methods) as run:
        passes = []
        for x in 2 * pictures:
            with run.image():
                for left in (1.0, 0.8, 0.6, 0.4):
                    seen.clear()
                    tiny.call(model, tiny.at(x, left))
                    passes.append(list(seen))
    assert any(map(any, passes))
    for first, *others in (passes[1:4] + passes[8:12], passes[5:8] + passes[12:]):
        assert all(other == first for other in others), methods
"""

SCHEDULE = """
class Pipeline:
    transformer, scheduler = tiny.flux(**tiny.FAMILIES["flux"].wide, dtype=torch.float32), None
tiles, top_k = ((0.0, "dense"), (0.2, 2), (0.4, 4), (0.6, 8)), ((0.0, "dense"), (0.2, 4), (0.4, 2), (0.6, 1))
keep = ((0.0, 0.75), (0.2, "dense"), (0.4, 0.5), (0.6, 0.25))
hilberta, toma = foveate.HilbertA(tiles=tiles), foveate.ToMA(keep=keep, skip=0)
for methods in [foveate.LLSA(top_k=top_k, min_tokens=0)], [hilberta, toma]:
    torch._dynamo.reset()
    pipeline = Pipeline()
    steps = [tiny.at(x, left) for left in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
    with foveate.apply(pipeline, *methods):
        wanted = [tiny.call(pipeline.transformer, step) for step in steps]
    pipeline.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    counters.clear()
    with foveate.apply(pipeline, *methods):
        for step, want in zip(steps, wanted, strict=True):
            near(tiny.call(pipeline.transformer, step), want)
        seen = graphs()
        assert seen <= 8, (methods, seen)  # one for each of four settings and two classes of blocks
        for step, want in zip(steps, wanted, strict=True):  # a second image is free
            near(tiny.call(pipeline.transformer, step), want)
        assert graphs() == seen, (graphs(), seen)
    Pipeline.transformer = tiny.flux(**tiny.FAMILIES["flux"].wide, dtype=torch.float32)
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

ANEW = """
torch._dynamo.reset()
model = tiny.flux(layers=1, single_layers=2, dtype=torch.float32)
dense = model(**x)[0]
with foveate.apply(model, foveate.HilbertA(tiles=4)):
    sparse = model(**x)[0]
"""

CACHED = (
    ANEW
    + """
from foveate.diffusers.preset import describe
methods = foveate.HilbertA(tiles=4), foveate.ToMA(skip=0, tile=(4, 4), weights="hard")
cache = foveate.StepCache(threshold=float("inf"))
preset = foveate.Preset(methods=methods, cache=cache, models=[describe(model)], size=(1, 1))
def skipping():
    with foveate.apply(model, preset) as run, run.image():
        outputs = [tiny.call(model, tiny.at(x, left)) for left in (1.0, 0.9, 0.8)]
        assert run.summary().skipped["FluxTransformer2DModel"] == 2
        return outputs
wanted = skipping()
model.compile_repeated_blocks(backend="eager")
for got, want in zip(skipping(), wanted, strict=True):
    near(got, want)
"""
)

WHOLE_MODELS = (
    'compiled = torch.compile(model, backend="eager", fullgraph=True)',
    'compiled = model; model.compile(backend="eager")',
)
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

# with more methods than Dynamo compiles a block for
BENCHMARK = """
from foveate.apps.bench import step
regional = type(model).compile_repeated_blocks
type(model).compile_repeated_blocks = lambda self, **options: regional(self, backend="eager", **options)
torch._dynamo.config.recompile_limit = 2
step.LEAST_STEPS = 1
methods = [foveate.HilbertA(tiles=tiles) for tiles in (2, 4)]
setup = step.Setup.of(methods=methods, text=8, compile=True, device="cpu")
*_, result = step.bench_step(setup, [(16, 16)], rounds=1)
assert [row["method"] for row in result["rows"]] == ["dense", *map(repr, methods), "dense"], result
"""

# CUDA graphs of the blocks: several pictures with grids of one shape of plans, several steps with new plans
GRAPHS = """
from torch.utils._pytree import tree_map
name, config, methods = {case}
family = tiny.SPARSE[name]
model = family.make(dtype=torch.float16, **config).cuda()
grids = ((16, 20), (20, 16)) if name != "sdxl" else ((16, 16), (16, 16))
cuda = lambda x: tree_map(lambda y: y.cuda() if isinstance(y, torch.Tensor) else y, x)
pictures = [cuda(family.inputs(model, grid)) for grid in grids]
inputs = [tiny.at(x, left) for _ in range(2) for x in pictures for left in (1.0, 0.8, 0.6, 0.4)]
def outputs(apart):
    for x in inputs:
        apart.append(torch.empty(len(apart) % 5 + 1, 2**18, device="cuda"))  # other tensors get other addresses
        yield tiny.call(model, x).float().cpu()
model.compile_repeated_blocks(fullgraph=True)
with foveate.apply(model, *methods):
    wanted = list(outputs([]))  # compiled too: rounding may choose other destinations
torch._dynamo.reset()
model.compile_repeated_blocks(fullgraph=True, mode="reduce-overhead")
with foveate.apply(model, *methods):
    recorded = []
    for got, want in zip(outputs([]), wanted, strict=True):
        assert ((got - want).norm() / want.norm()) < 1e-2
        recorded.append(counters["inductor"]["cudagraph_recorded_non_static_inputs"])
of_pictures = [recorded[i : i + 4] for i in range(0, 16, 4)]
assert recorded[-1] > 0, recorded
assert recorded[0] == 0 or name == "sdxl", recorded  # equal blocks of a U-Net record within the first pass
assert all(last == before for *_, before, last in of_pictures), recorded  # no plan makes it record anew
assert recorded[9] == recorded[-1], recorded  # nor does a size that was seen twice
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


def slow(*scripts):
    """A slow case of scripts that share a process, which takes longer to start than most of them run."""
    script = f"""
for script in {scripts!r}:
    torch._dynamo.reset()
    counters.clear()
    exec(script, dict(globals()))
"""
    return pytest.param(script, marks=pytest.mark.slow)


SCRIPTS = {
    "families": slow(*(FAMILY.format(case=case) for case in CASES)),
    "more families": pytest.param("".join(FAMILY.format(case=case) for case in MORE_CASES), marks=pytest.mark.gpu),
    "prompts of different length, fixed addresses, schedules": slow(RAGGED, ADDRESSES, SCHEDULE),
    "after apply, step caches, whole models, benchmark": slow(
        REGIONAL_AFTER, CACHED, *(ANEW + WHOLE.format(compile=compile) for compile in WHOLE_MODELS), BENCHMARK
    ),
    "inductor": pytest.param(INDUCTOR, marks=pytest.mark.gpu),
    **{
        f"CUDA graphs of {name}": pytest.param(GRAPHS.format(case=case), marks=pytest.mark.gpu)
        for name, case in GRAPH_CASES.items()
    },
    "any table": pytest.param(TABLES, marks=pytest.mark.gpu),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_compiled_models_run_sparse_without_breaks_or_a_graph_per_layer(script):
    here = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", SETUP + script], capture_output=True, text=True, cwd=here)
    assert result.returncode == 0, result.stderr[-3000:]
