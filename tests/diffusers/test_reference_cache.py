"""Laws of FLUX.2 with cached references: steps that fill or read the cache are sparse, as their definition says."""

from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
from reference import attend
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.methods import ToDo
from foveate.ops.curves import grid_order
from foveate.pipelines.steps import Call
from foveate.tuning.attention_map import attention_map

pytestmark = pytest.mark.usefixtures("no_grad")
GRID, REFERENCES, TEXT = (16, 20), ((10, 12), (8, 9)), 15
CELLS, OTHERS = prod(GRID), sum(map(prod, REFERENCES))
FILL = {"kv_cache_mode": "extract", "num_ref_tokens": OTHERS}
ROUNDED = "hidden_states", "encoder_hidden_states", "timestep"
TILED = HilbertA(tiles=4, align=1, slide="curve")


def caching(**config):
    """A model whose processors cache keys and values of references, as the pipeline sets them."""
    model = tiny.flux2(**config)
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return model


def first_inputs(dtype=torch.float64):
    torch.manual_seed(1)
    x = tiny.flux2_inputs(*REFERENCES, GRID, text=TEXT, batch=2)
    return {name: value.to(dtype) if name in ROUNDED else value for name, value in x.items()}


def later_inputs(x):
    picture = {name: x[name][:, OTHERS:] for name in ("hidden_states", "img_ids")}
    return tiny.at(x, 0.5) | picture | {"hidden_states": 0.9 * picture["hidden_states"]}


def steps(model, look=lambda: None):
    """Outputs of the step that fills the cache and of one that reads it, then all that was cached.

    Args:
        model: The model.
        look: Called after each step.
    """
    x = first_inputs(model.dtype)
    x |= {name: value.to(model.device) for name, value in x.items() if isinstance(value, torch.Tensor)}
    first, cache = model(**x, **FILL)
    look()
    later = model(**later_inputs(x), kv_cache_mode="cached", kv_cache=cache)[0]
    look()
    layers = *cache.double_block_caches, *cache.single_block_caches
    return first, later, *(kept for layer in layers for kept in layer.get())


@contextmanager
def defined(attention):
    """Context in which text and image attend by a definition, called with queries, keys, values and the layer.

    Keys are those of [text, references, image].
    """
    ran = []

    def replaced(query, key, value, attn_mask=None, **options):
        if query.shape[2] == key.shape[2]:  # references among themselves
            return scaled_dot_product_attention(query, key, value, attn_mask, **options)
        ran.append(query)
        return attention(query, key, value, (len(ran) - 1) % 5)

    with mock.patch.object(F, "scaled_dot_product_attention", replaced):
        yield


def seen(layer):
    """Which of [text, image] see which of [text, references, image] with `TILED`, by the grid alone."""
    row, column = torch.arange(CELLS) // GRID[1], torch.arange(CELLS) % GRID[1]
    centre = (row >= 6) & (row < 10) & (column >= 7) & (column < 12)  # a quarter of each side: 4 x 5
    place = grid_order("hilbert", *GRID).argsort()
    tile = (place - layer % 4 * CELLS // 16) % CELLS // (CELLS // 4)
    shared = centre[:, None] | centre | (tile[:, None] == tile)
    return F.pad(F.pad(shared, (TEXT + OTHERS, 0), value=True), (0, 0, TEXT, 0), value=True)


def everywhere(run, method, *saved):
    """Checks that the method works in each layer of a step."""
    rows = run.summary().layers
    name, _, _ = method.title.partition(" slide")  # which the summary leaves out
    assert all(row.method.startswith(name) and not row.why for row in rows)
    assert not saved or {row.true for row in rows} == {*saved}


@pytest.mark.parametrize("method", [HilbertA(tiles=1), LLSA(top_k=99, enrich=False, min_tokens=0)], ids=["one", "all"])
def test_dense_settings_are_the_dense_model_and_fill_its_cache(method):
    model = caching(**tiny.FAMILIES["flux2"].wide)
    before, dense = tiny.fingerprint(model), steps(model)
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(steps(model, lambda: everywhere(run, method, 0)), dense, rtol=1e-10, atol=1e-10)
    assert tiny.fingerprint(model) == before
    assert all(map(torch.equal, steps(model), dense))


@pytest.mark.gpu
def test_a_gpu_computes_the_same():
    model = caching(**tiny.FAMILIES["flux2"].wide)
    with foveate.apply(model, TILED):
        want = steps(model)
    model.to("cuda", torch.bfloat16)
    with foveate.apply(model, TILED) as run:
        got = steps(model, lambda: everywhere(run, TILED))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.cpu() - theirs).norm() < 0.03 * theirs.norm()


def test_several_tiles_are_the_mask_of_the_grid():
    model = caching()
    dense = steps(model)
    with defined(lambda q, k, v, layer: scaled_dot_product_attention(q, k, v, seen(layer))):
        want = steps(model)
    sparsity = []
    with foveate.apply(model, TILED) as run:
        got = steps(model, lambda: sparsity.append([row.true for row in run.summary().layers]))
    torch.testing.assert_close(got, want)
    assert all((a - b).abs().max() > 1e-6 for a, b in zip(want[:2], dense[:2], strict=True))
    assert all(map(torch.equal, steps(model), dense))
    for layer, (filling, reading) in enumerate(zip(*sparsity, strict=True)):
        mask = seen(layer)
        assert reading == pytest.approx((~mask).sum() / mask.numel())
        assert filling == pytest.approx((~mask).sum() / (mask.numel() + OTHERS**2))


@pytest.mark.parametrize(
    "method",
    [HilbertA(tiles=3, slide="diagonal", dense_layers="1"), LLSA(top_k=2, min_tokens=0), ToDo()],
    ids=["hilberta", "llsa", "todo"],
)
def test_references_are_read_as_text(method):
    def as_text(q, k, v, layer):
        words, picture = q.tensor_split([TEXT], 2)
        q = torch.cat([words, torch.zeros_like(k[:, :, TEXT : TEXT + OTHERS]), picture], 2)
        out = attend(q, k, v, method, layer, (GRID,))
        return torch.cat([out[:, :, :TEXT], out[:, :, TEXT + OTHERS :]], 2)

    model = caching(**tiny.FAMILIES["flux2"].wide)
    with defined(as_text):
        want = steps(model)
    with foveate.apply(model, method):
        torch.testing.assert_close(steps(model), want)


@pytest.mark.parametrize("method", [TILED, LLSA(top_k=2, min_tokens=0)], ids=["hilberta", "llsa"])
def test_half_precision_works(method):
    model, drawn = caching(**tiny.FAMILIES["flux2"].wide), []
    for dtype in (torch.float64, torch.bfloat16):
        with foveate.apply(model.to(dtype), method):
            drawn.append(steps(model)[:2])
    for want, got in zip(*drawn, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() < 0.05 * want.norm()


def test_merging_leaves_these_steps_dense():
    model, whys = caching(), []
    dense = steps(model)
    with foveate.apply(model, ToMA(skip=0)) as run:
        got = steps(model, lambda: whys.append({row.why for row in run.summary().layers}))
    assert all(map(torch.equal, got, dense))
    assert whys == 2 * [{"tokens do not merge while keys of references are cached"}]
    with foveate.apply(model, TILED):
        alone = steps(model)
    with foveate.apply(model, TILED, ToMA(skip=0)) as run:
        torch.testing.assert_close(steps(model, lambda: everywhere(run, TILED)), alone)


def dense_because(model, why, x, **more):
    dense = model(**x, **more)[0]
    with foveate.apply(model, TILED) as run:
        assert torch.equal(model(**x, **more)[0], dense)
        assert all(row.method == "dense" and why in row.why for row in run.summary().layers)


def test_processors_that_do_not_cache_stay_dense():
    dense_because(tiny.flux2(), "not all processors cache", first_inputs(), **FILL)


def test_several_devices_stay_dense():
    model = caching()
    config = SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_degree=2, ring_degree=1))
    for processor in model.attn_processors.values():
        processor._parallel_config = config
    dense_because(model, "on one device only", first_inputs(), **FILL)


def test_without_references_there_is_no_cache():
    model, x = caching(), tiny.flux2_inputs(GRID) | {"joint_attention_kwargs": {}}
    with foveate.apply(model, TILED) as run:
        want = model(**x)[0]
        assert torch.equal(model(**x, kv_cache_mode="extract")[0], want)
        assert torch.equal(model(**x, kv_cache_mode="cached")[0], want)
        everywhere(run, TILED)


@pytest.mark.parametrize("method", [None, TILED], ids=["dense", "sparse"])
def test_an_attention_map_is_refused(method):
    class Pipeline(DiffusionPipeline):
        def __init__(self, model):
            self.transformer = model

    with pytest.raises(ValueError, match="choose another step"):
        attention_map(Pipeline(caching()), Call((), first_inputs() | FILL), method, 0, (3, 4))
