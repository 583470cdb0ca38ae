"""Laws of every card: what a model computes is what its own attention computes under the dense mask of the plan."""

import copy
import threading

import pytest
import tiny
import torch
from diffusers import ChromaTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch.nn import functional as F

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.diffusers.adapter import _order_of
from foveate.diffusers.card import Layout, image, padding, text

GRID = (16, 20)


def chroma(**config):
    torch.manual_seed(0)
    usual = {"in_channels": 4, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
             "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
             "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}  # fmt: skip
    return ChromaTransformer2DModel(**usual | config).double().eval()


def chroma_inputs(batch=1, real=None):
    x = {name: value for name, value in tiny.inputs(GRID, batch=batch).items() if name != "pooled_projections"}
    if real is not None:
        mask = torch.ones(batch, 15 + 320, dtype=torch.bool)
        mask[:, real:15] = False
        x["attention_mask"] = mask
    return x


# what a card has to tell: (grid, text tokens, text first) of each attention layer, in running order
CASES = {
    "flux": (tiny.flux, lambda: tiny.inputs(GRID, batch=2), 5 * [(GRID, 15, True)]),
    "chroma": (chroma, lambda: chroma_inputs(2), 5 * [(GRID, 15, True)]),
    "sd3": (tiny.sd3, lambda: tiny.sd3_inputs(16, 20, batch=2),
            [(GRID, 9, False), (GRID, 0, False), (GRID, 9, False), (GRID, 9, False)]),
    "pixart": (tiny.pixart, lambda: tiny.pixart_inputs(32, 40, batch=2), 2 * [(GRID, 0, True)]),
    "dit": (tiny.dit, lambda: tiny.dit_inputs(32, 32, batch=2), 2 * [((16, 16), 0, True)]),
}  # fmt: skip
NUMBERS = {"sd3": [0, 0, 1, 2]}  # blocks of the attention layers
METHODS = [
    HilbertA(tiles=4),
    HilbertA(tiles=3, centre=0.0, period=2, dense_layers="1"),
    LLSA(min_tokens=0, top_k=99, enrich=False),
]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def call(model, x):
    return model(**copy.copy(x))[0]


def masks(name, method):
    """The dense mask of each layer, over its attention sequence as diffusers has it."""
    layers = CASES[name][2]
    for number, (grid, n_text, text_first) in zip(NUMBERS.get(name, range(len(layers))), layers, strict=True):
        plan, n = method.plan((grid,), n_text), n_text + grid[0] * grid[1]
        if number in method.dense_layer_set() or isinstance(method, LLSA):  # this LLSA reads every block
            yield torch.ones(n, n, dtype=torch.bool)
            continue
        first = 0 if text_first else n - n_text
        place = torch.cat([first + torch.arange(n_text), (n_text if text_first else 0) + plan.order]).argsort()
        yield plan.tables[number % method.period].to_dense()[place][:, place]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
@pytest.mark.parametrize("name", CASES)
def test_sparse_attention_is_the_models_own_under_a_dense_mask(name, method, monkeypatch):
    make, inputs, _ = CASES[name]
    if isinstance(method, LLSA):
        heads = {"attention_head_dim": 32} | ({"axes_dims_rope": (8, 12, 12)} if name in ("flux", "chroma") else {})
        heads |= {"sd3": {"caption_projection_dim": 128}, "pixart": {"cross_attention_dim": 64}}.get(name, {})
        model, x = make(**heads), inputs()
        if name == "sd3":
            x.pop("block_controlnet_hidden_states")
    else:
        model, x = make(), inputs()
    dense = call(model, x)
    with foveate.apply(model, method) as run:
        got = call(model, x)
        assert any(row.method != "dense" for row in run.summary().layers)
    own, patterns = F.scaled_dot_product_attention, iter(masks(name, method))

    def masked(query, key, value, attn_mask=None, **options):
        if query.shape[2] == key.shape[2] and attn_mask is None:
            attn_mask = next(patterns)
        return own(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", masked)
    torch.testing.assert_close(got, call(model, x))
    assert next(patterns, None) is None
    monkeypatch.undo()
    assert torch.equal(call(model, x), dense)


@pytest.mark.parametrize("granularity", ["block", "module"])
@pytest.mark.parametrize("others", [(), (HilbertA(tiles=2, centre=0.0),)], ids=["alone", "with HilbertA"])
@pytest.mark.parametrize("name", CASES)
def test_merging_that_loses_nothing_changes_nothing(name, others, granularity):
    make, inputs, _ = CASES[name]
    model, x = make(), inputs()
    with foveate.apply(model, *others or (HilbertA(tiles=1),)):
        want = call(model, x)
    toma = ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4), granularity=granularity)
    with foveate.apply(model, *others, toma) as run:
        torch.testing.assert_close(call(model, x), want)
        assert all("ToMA" in row.method for row in run.summary().layers)


@pytest.mark.parametrize("methods", [(HilbertA(tiles=1),), (ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4)),)])
@pytest.mark.parametrize("real", [15, 6])
def test_the_padding_of_chroma_is_left_out(methods, real):
    model, x = chroma(), chroma_inputs(batch=2, real=real)
    want = call(model, x)
    with foveate.apply(model, *methods) as run:
        torch.testing.assert_close(call(model, x), want)
        assert all(row.method != "dense" for row in run.summary().layers)
    shorter = x | {"encoder_hidden_states": x["encoder_hidden_states"][:, :real], "txt_ids": x["txt_ids"][:real]}
    torch.testing.assert_close(call(model, shorter | {"attention_mask": None}), want)
    with foveate.apply(model, HilbertA(tiles=2)) as run:
        call(model, x | {"attention_mask": x["attention_mask"].double()})
        assert all("the attention mask is additive" in row.why for row in run.summary().layers)


def test_two_models_in_two_threads_draw_what_each_draws_alone():
    models = [tiny.flux(), chroma()]
    methods = [(HilbertA(tiles=4),), (HilbertA(tiles=2), ToMA(skip=0))]
    xs = [tiny.inputs(GRID), chroma_inputs()]
    runs = [foveate.apply(model, *each) for model, each in zip(models, methods, strict=True)]
    alone, results = [call(model, x) for model, x in zip(models, xs, strict=True)], [[], []]

    @torch.no_grad()
    def draw(i):
        for _ in range(5):
            results[i].append(call(models[i], xs[i]))

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, got in zip(alone, results, strict=True):
        assert len(got) == 5
        assert all(torch.equal(each, want) for each in got)
    for run in runs:
        run.remove()


def test_an_order_undoes_the_interleaving_of_ulysses_and_leaves_padding_out():
    layout = Layout((text(2), padding(2), image(2, 4)))
    order, inverse = _order_of(layout, torch.arange(8).flip(0), "cpu", ranks=2)
    gathered = torch.tensor(
        [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]
    )  # process 0: text, image; process 1: padding, image
    assert gathered[order].tolist() == [0, 1, *range(11, 3, -1)]
    assert order[inverse[:2]].tolist() == [0, 1]
    assert sorted(inverse.tolist()) == list(range(12))


def test_the_private_names_of_diffusers_are_where_the_backend_expects_them():
    """If this fails after an upgrade of diffusers, `foveate/diffusers/backend.py` is the file to change."""
    registry, names = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName
    for owner, name in (
        (registry, "register"), (registry, "_backends"), (registry, "_supports_context_parallel"),
        (names, "_value2member_map_"), (names, "_member_map_"), (names, "_member_names_"),
        (attention_dispatch, "SeqAllToAllDim"), (attention_dispatch, "dispatch_attention_fn"),
    ):  # fmt: skip
        assert hasattr(owner, name), f"diffusers moved {owner.__name__}.{name}"
    assert {"_attention_backend", "_parallel_config"} <= vars(FluxAttnProcessor).keys()
    assert names("foveate") in registry._backends
