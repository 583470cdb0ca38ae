"""Laws of the pixel model: with every block picked it is dense, and dense it does not mind the order."""

import copy

import pytest
import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch._dynamo.utils import counters

import foveate
from foveate import LLSA, HilbertA
from foveate.nn.pixel_dit import PixelDiT, layout
from foveate.ops.curves import CURVES
from foveate.pipelines.pixel import PixelPipeline, as_method


def model(attention="log-linear", **config):
    return tiny.pixel(attention=attention, **config)


def like(other, **config):
    """A model of another configuration with the same weights."""
    kept = {name: value for name, value in other.config.items() if not name.startswith("_")}
    made = PixelDiT(**{**kept, **config}).double().eval()
    made.load_state_dict(other.state_dict())
    return made


def inputs(height=20, width=36, text_dim=None, batch=2):
    torch.manual_seed(1)
    text = None if text_dim is None else torch.randn(batch, 5, text_dim).double()
    return torch.randn(batch, 3, height, width).double(), torch.tensor([10.0, 700.0])[:batch].double(), text


def velocity(of, x):
    with torch.no_grad():
        return of(*x, return_dict=False)[0]


@pytest.mark.parametrize("text_dim", [None, 7])
@pytest.mark.parametrize("levels", [1, 2])
def test_every_block_picked_and_no_means_is_the_dense_model(text_dim, levels):
    dense = model(attention="dense", text_dim=text_dim)
    sparse = like(dense, attention="log-linear", top_k=45, enrich=False, levels=levels)
    x = inputs(text_dim=text_dim)
    torch.testing.assert_close(velocity(sparse, x), velocity(dense, x))
    fewer = like(sparse, top_k=2)
    assert not torch.allclose(velocity(fewer, x), velocity(dense, x))


@pytest.mark.parametrize("order", CURVES)
def test_the_dense_model_is_indifferent_to_the_order(order):
    dense = model(attention="dense", order="raster")
    x = inputs()
    torch.testing.assert_close(velocity(like(dense, order=order), x), velocity(dense, x))
    if order != "raster":
        sparse = like(dense, attention="log-linear", top_k=1)
        assert not torch.allclose(velocity(like(sparse, order=order), x), velocity(sparse, x))


def reference(made, x, time, text):
    """The dense model in raster order written anew: every pair of pixels turned by the angle between them."""
    batch, _, height, width = x.shape
    angle = 10000 ** -(torch.arange(8).double() / 8)
    rows, columns = ((torch.arange(side).double() + 0.5) * 64 / (height * width) ** 0.5 for side in (height, width))
    row, column = torch.meshgrid(rows, columns, indexing="ij")
    angles = torch.cat([row.reshape(-1, 1) * angle, column.reshape(-1, 1) * angle], 1)
    turn = torch.polar(torch.ones_like(angles), angles)
    wave = 10000 ** -(torch.arange(128).double() / 128)
    time = torch.cat([(time[:, None] * wave).cos(), (time[:, None] * wave).sin()], 1)
    time = torch.nn.functional.silu(made.time(time.float().double()))
    y = made.proj_in(x.permute(0, 2, 3, 1).reshape(batch, -1, 3))
    words = made.text_in(text)
    norm = lambda y: (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()  # noqa: E731
    for block in made.blocks:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = block.norm1.linear(time)[:, None].chunk(6, 2)
        seen = torch.cat([norm(y) * (1 + scale) + shift, words], 1)
        q, k, v = (
            part(seen).unflatten(2, (2, 32)).transpose(1, 2) for part in (block.attn.q, block.attn.k, block.attn.v)
        )
        q, k = (
            z / (z.square().mean(-1, keepdim=True) + torch.finfo(z.dtype).eps).sqrt() * norm_.weight
            for z, norm_ in ((q, block.attn.q_norm), (k, block.attn.k_norm))
        )
        here = height * width
        q, pixels = (
            torch.view_as_real(torch.view_as_complex(z[:, :, :here].unflatten(3, (-1, 2)).contiguous()) * turn)
            for z in (q, k)
        )
        k = torch.cat([pixels.flatten(3), k[:, :, here:]], 2)
        read = (q.flatten(3) @ k.mT / 32**0.5).softmax(-1) @ v
        y = y + gate * block.attn.out(read.transpose(1, 2).flatten(2))
        y = y + ff_gate * block.ff(norm(y) * (1 + ff_scale) + ff_shift)
    scale, shift = made.norm_out.linear(time)[:, None].chunk(2, 2)
    y = made.proj_out(norm(y) * (1 + scale) + shift)
    return y.unflatten(1, (height, width)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("order", ["raster", "morton", "hilbert"])
def test_a_token_is_turned_by_its_own_row_and_column_whatever_the_order(order):
    made = model(attention="dense", order=order, text_dim=7)
    x = inputs(9, 14, text_dim=7)
    with torch.no_grad():
        want = reference(made, *x)
    torch.testing.assert_close(velocity(made, x), want, rtol=1e-4, atol=1e-4)  # angles are in float32


def test_the_same_place_of_a_larger_picture_is_turned_alike():
    *_, cos, sin = layout("raster", 4, 6, 32, torch.device("cpu"))
    *_, larger_cos, larger_sin = layout("raster", 12, 18, 32, torch.device("cpu"))
    for turn, larger in ((cos, larger_cos), (sin, larger_sin)):
        middles = larger.view(12, 18, 32)[1::3, 1::3].flatten(0, 1)
        torch.testing.assert_close(middles, turn, rtol=0, atol=1e-5)


def test_a_patch_of_pixels_is_a_token():
    made = model(attention="dense", patch_size=2)
    x, time, _ = inputs(8, 12)
    seen = []
    made.blocks[0].register_forward_pre_hook(lambda _block, args: seen.append(args[0].shape[1]))
    assert velocity(made, (x, time)).shape == x.shape
    assert seen == [24]
    made.proj_in.weight.data.zero_()
    made.proj_in.weight.data[:, :4] = 1  # the red of a patch, which is told the places within it
    made.proj_out.weight.data.zero_()
    made.proj_out.bias.data.copy_(torch.arange(12))
    assert torch.equal(velocity(made, (x, time))[0, :, 2:4, 6:8], torch.arange(12.0).double().view(3, 2, 2))


def test_an_untrained_model_says_nothing_and_learns_everywhere():
    torch.manual_seed(0)
    made = PixelDiT(num_layers=2, num_attention_heads=1, text_dim=7)
    x, time, text = (part.float() for part in inputs(16, 16, text_dim=7))
    assert torch.equal(velocity(made, (x, time, text)), torch.zeros_like(x))
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    for _ in range(3):  # what begins as zero holds back the gradients of what is behind it
        optimizer.zero_grad()
        (made(x, time, text).sample - x).square().mean().backward()
        optimizer.step()
    assert all(weight.grad.abs().sum() > 0 for weight in made.parameters())


@pytest.mark.parametrize("attention", ["dense", "log-linear"])
def test_checkpointing_changes_no_gradient(attention):
    made = model(attention=attention, text_dim=7)
    other = copy.deepcopy(made)
    other.enable_gradient_checkpointing()
    x = inputs(16, 24, text_dim=7)
    for one in (made, other):
        one.train()(*x).sample.square().sum().backward()
    for ours, theirs in zip(other.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("attention", ["dense", "log-linear"])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_it_says_the_same_at_every_size(attention, whole, as_a_user):
    torch.compiler.reset()
    made = model(attention=attention, top_k=2, text_dim=7)
    compiled = copy.deepcopy(made)
    options = {"backend": "eager", "fullgraph": True, "dynamic": False}
    if whole:
        compiled = torch.compile(compiled, **options)
    else:
        compiled.compile_repeated_blocks(**options)
    for size in ((16, 24), (20, 36)):
        x = inputs(*size, text_dim=7)
        torch.testing.assert_close(velocity(compiled, x), velocity(made, x))
        compiled(*x).sample.sum().backward()
    torch.compiler.reset()


def test_in_bfloat16_it_says_nearly_the_same():
    made = model(top_k=100, enrich=False)
    x = inputs()[:2]
    narrow = copy.deepcopy(made).to(torch.bfloat16)
    got = velocity(narrow, [part.to(torch.bfloat16) for part in x])
    assert got.dtype == torch.bfloat16
    assert (got.double() - velocity(made, x)).norm() < 0.05 * velocity(made, x).norm()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention": "sparse"}, "unknown attention 'sparse': choose log-linear or dense"),
        ({"order": "peano"}, "unknown order 'peano': choose one of hilbert, "),
        ({"attention_head_dim": 34}, "use a multiple of 4"),
        ({"attention_head_dim": 16}, "head_dim must be 32 to 256, not 16"),
        ({"patch_size": 0}, "patch_size and num_layers must be 1 or more, not 0 and 12"),
        ({"top_k": 0}, "top_k must be 1 or more"),
        ({"block_size": 8}, "block_size must be one of 16, 32, 64, not 8"),
        ({"levels": 5}, "levels must be 1 to 4"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        PixelDiT(**config)


def test_pictures_and_words_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="9 x 12 px is not a multiple of the patch size, 2 px"):
        model(patch_size=2)(*inputs(9, 12))
    with pytest.raises(ValueError, match="takes no encoder_hidden_states"):
        model()(*inputs(text_dim=7))
    with pytest.raises(ValueError, match="this model needs encoder_hidden_states"):
        model(text_dim=7)(*inputs())
    with pytest.raises(ValueError, match="levels=3 is too many for 256 tokens"):
        model(levels=3)(*inputs(16, 16))


def test_llsa_applied_to_a_dense_model_is_the_model_that_was_made_with_it():
    dense, x = model(attention="dense", order="hilbert", text_dim=7), inputs(text_dim=7)
    sparse = like(dense, attention="log-linear", top_k=2, enrich=False, reweight=False)
    before, want = velocity(dense, x), velocity(sparse, x)
    method = LLSA(top_k=2, enrich=False, reweight=False, curve="hilbert", min_tokens=0)
    with foveate.apply(dense, method) as run:
        assert torch.equal(velocity(dense, x), want)
        summary = run.summary()
    assert torch.equal(velocity(dense, x), before)
    assert [layer.layer for layer in summary.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert {layer.backend for layer in summary.layers} == {"portable"}
    left_out = 720 - 2 * 16
    assert {layer.true for layer in summary.layers} == {left_out / 720}
    assert {layer.saved for layer in summary.layers} == {4 * 2 * 720 * left_out * 64}


def test_where_llsa_is_not_at_work_a_pixel_model_is_dense():
    dense, x = model(attention="dense"), inputs()
    own = like(dense, attention="log-linear", top_k=1)
    before = velocity(own, x)
    with foveate.apply(own, LLSA(min_tokens=1000)) as run:
        assert torch.equal(velocity(own, x), velocity(dense, x))
        assert "720 image tokens are fewer" in str(run.summary())
    with foveate.apply(own, LLSA(top_k=1, min_tokens=0, dense_layers="0-1")) as run:
        assert torch.equal(velocity(own, x), velocity(dense, x))
        assert "named in dense_layers" in str(run.summary())
    with foveate.apply(own, LLSA(top_k=1, min_tokens=0)) as run:
        assert torch.equal(velocity(own, x), before)
        assert "1 of 1 forward passes sparse" in str(run.summary())
    assert torch.equal(velocity(own, x), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_compiled_blocks_follow_what_is_applied(as_a_user):
    torch.compiler.reset()
    made, x, method = model(attention="dense", num_layers=3), inputs(), LLSA(top_k=1, min_tokens=0)
    dense = velocity(made, x)
    with foveate.apply(made, method):
        sparse = velocity(made, x)
    made.compile_repeated_blocks(backend="eager", fullgraph=True)
    counters.clear()
    for _ in range(2):
        torch.testing.assert_close(velocity(made, x), dense)
        with foveate.apply(made, method):
            torch.testing.assert_close(velocity(made, x), sparse)
    assert counters["stats"]["unique_graphs"] == 2  # not one for each layer, nor anew each time
    torch.compiler.reset()


def test_a_pixel_model_takes_no_other_method_and_no_other_order():
    made = model()
    for methods, why in (
        ([HilbertA()], "not HilbertA"),
        ([LLSA(), HilbertA()], r"not LLSA \+ HilbertA"),
        ([LLSA(curve="hilbert")], "use curve=morton"),
        ([LLSA(dense_layers="2")], "layers 0 to 1"),
    ):
        with pytest.raises(ValueError, match=why):
            foveate.apply(made, *methods)
    assert not made._forward_pre_hooks


def test_the_attention_that_a_model_was_trained_with_comes_out_as_a_method():
    made, x = model(top_k=1, enrich=False, order="hilbert"), inputs()
    pipe = PixelPipeline(made, FlowMatchEulerDiscreteScheduler())
    want = velocity(made, x)
    method = as_method(pipe)
    assert method == LLSA(top_k=1, enrich=False, curve="hilbert", min_tokens=0)
    assert torch.equal(velocity(pipe.transformer, x), velocity(like(made, attention="dense"), x))
    with foveate.apply(pipe, method):
        assert torch.equal(velocity(pipe.transformer, x), want)
