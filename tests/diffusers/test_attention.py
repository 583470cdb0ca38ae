"""Sparse attention in all families: a model computes what it would with the attention of the method's definition."""

import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from covering import KINDS, at_grids_in_turn, in_turn
from diffusers.modular_pipelines.minimax_h3 import before_denoise as minimax_h3_steps
from reference import attend, dense_mask, places, reference
from tiny import FAMILIES, SPARSE, built, call
from torch.utils._pytree import tree_map

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.diffusers.adapter import ModelAdapter
from foveate.diffusers.arguments import Rotations
from foveate.diffusers.backend import plan_of
from foveate.diffusers.card import TokenLayout, card_of, image, padding, text
from foveate.diffusers.cards.flux import grids_of
from foveate.diffusers.planning import sequence_order
from foveate.methods import ToDo, ToMeSD
from foveate.methods.base import SparseAttention
from foveate.ops.curves import grid_order

pytestmark = pytest.mark.usefixtures("no_grad")
LOSSLESS = ToMA(keep=0.999, weights="hard", skip=0, tile=(4, 4))  # merges, and loses nothing
ALL_BLOCKS = LLSA(top_k=99, enrich=False, min_tokens=0)  # picks every block: the dense model
ATTENTION = HilbertA(tiles=4, align=1), LLSA(top_k=2, min_tokens=0)
RAGGED = (*tiny.MASKED, "zimage")  # take prompts of different length
GRIDS = (16, 20), (16, 20), (10, 12)  # a picture and two references
REFERENCES = {
    "flux": tiny.inputs,
    "flux2": tiny.flux2_inputs,
    "longcat": tiny.longcat_inputs,
    "qwen": tiny.qwen_inputs,
}


def every_family_of(*cases, among):
    """Parametrizes a test by cases of methods, each with the families in which they work."""
    sparse = {methods: all(isinstance(method, SparseAttention) for method in methods) for methods in cases}
    pairs = [(name, methods) for methods in cases for name in among if sparse[methods] or name in FAMILIES]
    return pytest.mark.parametrize(("name", "methods"), pairs)


def title(case):
    return getattr(case, "title", None)


def heads_for(name, method):
    return SPARSE[name].wide if isinstance(method, LLSA) else {}


def whys(run):
    return [row.why for row in run.summary().layers]


def as_defined(family, model, x, method, *grids):
    """Checks that every layer works, and attends by the definition of the method."""
    with reference(family, method, *grids):
        want = call(model, x)
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(call(model, x), want)
        assert not any(whys(run))


def unchanged(model, x, *methods, text=None):
    """Checks that every layer works, with so many text tokens, and that the model computes what it does without."""
    want = call(model, x)
    with foveate.apply(model, *methods) as run:
        torch.testing.assert_close(call(model, x), want)
        assert not any(whys(run))
        assert text in (None, ModelAdapter.of(model).now.decisions[model].layout.text)


# --- what it computes ---


@pytest.mark.parametrize(
    ("name", "grid", "method"),
    at_grids_in_turn(
        SPARSE,
        [
            HilbertA(tiles=4, align=1),
            HilbertA(tiles=3, curve="moore", centre=0.0, period=2, slide="diagonal", dense_layers="1"),
        ],
        [ToDo()],
        [
            LLSA(top_k=2, min_tokens=0),
            LLSA(top_k=1, levels=2, curve="hilbert", reweight=False, min_tokens=0),
            LLSA(top_k=3, enrich=False, min_tokens=0),
            LLSA(top_k=2, block_size=32, levels=1, reweight=False, min_tokens=0),
        ],
    ),
    ids=title,
)
def test_a_model_is_the_one_whose_attention_is_the_definition_of_the_method(name, grid, method):
    model, x = built(name, grid, 2, **heads_for(name, method))
    with reference(SPARSE[name], method, grid) as layers:
        want = call(model, x)
    dense = call(model, x)
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(call(model, x), want)
        rows = run.summary().layers
    assert (want - dense).abs().max() > 1e-6
    assert torch.equal(call(model, x), dense)
    for row, (number, tokens) in zip(rows, layers, strict=True):
        assert bool(row.why) == (row.method == "dense")
        if number in method.dense_layer_set():
            assert row.why == "named in dense_layers"
        elif not isinstance(method, LLSA):
            mask = dense_mask(method, number, (grid,), tokens, SPARSE[name].text_first)
            if SPARSE[name].keys:
                mask = mask[places((grid,), tokens, SPARSE[name].text_first)[1]]
            assert row.true == pytest.approx(1 - mask.double().mean().item())


@pytest.mark.parametrize(
    ("name", "grid", "method"),
    at_grids_in_turn(
        SPARSE, [HilbertA(tiles=1), HilbertA(tiles=4, align=1, centre=1.0)], [ALL_BLOCKS, ToDo(factor=1)]
    ),
    ids=title,
)
def test_dense_settings_are_the_dense_model(name, grid, method):
    model, x = built(name, grid, 2, **heads_for(name, method))
    dense = call(model, x)
    in_float32 = name.startswith(("hunyuan", "joyimage", "nucleus"))  # the rotation, also of text by nothing
    tolerance = 1e-7 if in_float32 else 1e-10
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(call(model, x), dense, rtol=tolerance, atol=tolerance)
        rows = run.summary().layers
    parts_of_a_unet = name in KINDS["U-Nets"]  # some are too small
    assert all((row.method != "dense" or parts_of_a_unet) and row.saved == 0 for row in rows)
    if method is ALL_BLOCKS:
        assert rows[0].method == f"LLSA K=99 enrich=False (all {-(-math.prod(grid) // 16)} blocks)"
        assert (rows[0].backend, rows[0].nominal) == ("portable", 0)


@pytest.mark.parametrize(("name", "dtype"), in_turn(SPARSE, [torch.float32, torch.bfloat16, torch.float16], each=2))
def test_every_dtype_works(name, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    tolerance *= 2 if name == "ideogram4" else 1  # it rounds its rotary embedding

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value

    model, x = built(name)
    with foveate.apply(model, HilbertA(tiles=4, align=1)):
        want = call(model, x)
    with foveate.apply(model.to(dtype), HilbertA(tiles=4, align=1)):
        got = call(model, tree_map(cast, x))
    assert got.dtype == dtype
    assert (got - want).norm() < tolerance * want.norm()
    model, x = built(name, dtype=dtype, **SPARSE[name].wide)
    dense, tolerance = call(model, x), min(tolerance, 0.03)
    with foveate.apply(model, ALL_BLOCKS):
        torch.testing.assert_close(call(model, x), dense, rtol=tolerance, atol=tolerance)


def test_todo_reads_the_keys_of_every_other_row_and_column():
    model, x = built("sdxl", (32, 32))

    def downsampled(q, k, v, *_, **__):
        if q.shape[2] != k.shape[2]:
            return own(q, k, v)
        side = round(q.shape[2] ** 0.5)
        k, v = (y.unflatten(2, (side, side))[:, :, 1::2, 1::2].flatten(2, 3) for y in (k, v))
        return own(q, k, v)

    own = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", downsampled)
        want = call(model, x)
    with foveate.apply(model, ToDo()) as run:
        torch.testing.assert_close(call(model, x), want)
        assert {row.true for row in run.summary().layers} == {0.75}


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        *in_turn(SPARSE, [(method,) for method in ATTENTION]),
        *in_turn(FAMILIES, [(ToMA(skip=0, tile=(4, 4)),), (HilbertA(tiles=2), ToMA(skip=0)), (ToMeSD(skip=0),)]),
    ],
)
def test_a_sample_does_not_depend_on_its_batch_mates(name, methods):
    model, x = built(name, batch=3, **heads_for(name, methods[0]))
    with foveate.apply(model, *methods) as run:
        batch = call(model, x)
        assert any(row.method != "dense" for row in run.summary().layers)
        assert torch.equal(call(model, x), batch)
        torch.testing.assert_close(call(model, tiny.sample(x, 1)), batch[1:2])


@pytest.mark.parametrize(
    ("name", "method", "checkpointing"),
    [
        *((name, method, SPARSE[name].checkpoints) for name, method in in_turn(SPARSE, ATTENTION)),
        *((next(iter(families)), method, False) for families in KINDS.values() for method in ATTENTION),
    ],
    ids=title,
)
def test_gradients_are_those_of_the_definition_whatever_runs_before_the_backward_pass(name, method, checkpointing):
    family = SPARSE[name]
    model, x = built(name, **heads_for(name, method))
    other = family.inputs(model, family.grids[1])
    dense = call(model, x)
    with torch.enable_grad():
        with reference(family, method):
            call(model, x).square().sum().backward()
        want = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        before = tiny.fingerprint(model)
        with foveate.apply(model, method) as run:
            out = call(model, x)
            call(model, other)
            with run.paused(), torch.no_grad():
                assert torch.equal(call(model, x), dense)
            with tiny.exact(model):
                out.square().sum().backward()
            with run.paused(), torch.no_grad():
                assert torch.equal(call(model, x), dense)
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        in_float32 = name.startswith(("joyimage", "zimage"))  # the rotation
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6 if in_float32 else 1e-7)
    assert tiny.fingerprint(model) == before


def test_checkpointed_blocks_run_again_with_their_own_plan_after_another_forward_pass_of_as_many_tokens():
    model = tiny.flux()
    inputs = tiny.inputs((16, 20)), tiny.inputs((20, 16))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.enable_gradient_checkpointing()
        with torch.enable_grad(), foveate.apply(model, HilbertA(tiles=4)):
            for out in [call(model, x) for x in inputs]:
                out.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["qwen", "zimage", "hunyuan_image"])
def test_rotary_embeddings_of_the_attention_sequence_are_made_once_for_all_blocks(name, monkeypatch):
    model = tiny.SPARSE[name].make()
    made, of = [], type(card_of(model)).rotation
    monkeypatch.setattr(type(card_of(model)), "rotation", lambda card, rope: made.append(rope) or of(card, rope))
    for grid in tiny.SPARSE[name].grids[:2]:
        x = tiny.SPARSE[name].inputs(model, grid)
        made.clear()
        with foveate.apply(model, HilbertA(tiles=4)):
            out = call(model, x)
        stacks = len({id(rope) for rope in made})
        assert len(made) == stacks <= 3, made
        with foveate.apply(model, HilbertA(tiles=4)), monkeypatch.context() as patch:
            patch.setattr(Rotations, "of", lambda self, rope, plan: self.card.rotation(rope))  # each block its own
            torch.testing.assert_close(call(model, x), out)


def test_a_block_that_runs_twice_rotates_queries_and_keys_once_in_each_run():
    model, x, runs = tiny.flux(), tiny.inputs(), []
    block = model.single_transformer_blocks[1]

    def note(block, args, kwargs):
        runs.append(kwargs)

    def again(block, args, output):
        if len(runs) % 2:  # the first run
            words, picture = output
            output = block(**runs[-1] | {"hidden_states": picture, "encoder_hidden_states": words})
        return output

    block.register_forward_pre_hook(note, with_kwargs=True)
    block.register_forward_hook(again)
    want = call(model, x)
    with foveate.apply(model, HilbertA(tiles=1)):
        torch.testing.assert_close(call(model, x), want)
    assert len(runs) == 4
    assert all(run["image_rotary_emb"] is not None for run in runs)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("method", [HilbertA(tiles=4), HilbertA(tiles=4, reference="tiled")])
def test_reference_images_have_tiles_of_their_own(name, method):
    model, x = SPARSE[name].make(), REFERENCES[name](*GRIDS)
    as_defined(SPARSE[name], model, x, method, *GRIDS)


@pytest.mark.parametrize("method", [HilbertA(tiles=4), HilbertA(tiles=4, reference="tiled")])
def test_references_of_flux3_have_tiles_of_their_own_in_the_blocks_of_all_tokens(method, monkeypatch):
    model, x, numbers = tiny.flux3(), tiny.flux3_inputs(*GRIDS, batch=2), iter(range(5))
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, **_):
        grids = {320: GRIDS[:1], 775: GRIDS}.get(query.shape[2])  # the picture alone, or all tokens
        return attend(query, key, value, method, next(numbers), grids) if grids else own(query, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        want = call(model, x)
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(call(model, x), want)
        assert not any(whys(run))
    x["image_cond_ids"][-1, 1] += 1
    with foveate.apply(model, method) as run:
        call(model, x)
        assert ["no complete raster" in why for why in whys(run)] == [False] * 2 + [True] * 3


@pytest.mark.parametrize("method", [HilbertA(tiles=4), HilbertA(tiles=4, reference="tiled")])
def test_layers_of_qwen_image_layered_have_tiles_of_their_own(method):
    grids = 3 * ((16, 20),)
    model = tiny.qwen(use_layer3d_rope=True, use_additional_t_cond=True)
    x = tiny.qwen_inputs(*grids) | {"additional_t_cond": torch.zeros(1, dtype=torch.long)}
    as_defined(FAMILIES["qwen"], model, x, method, *grids)
    unchanged(model, x, LOSSLESS)


def test_reference_images_are_segments_of_their_own():
    x = tiny.inputs(*GRIDS)
    model = tiny.flux(**FAMILIES["flux"].wide)
    unchanged(model, x, ALL_BLOCKS)
    plan = ALL_BLOCKS.plan(GRIDS, 15)
    assert plan.segments == ((0, 320), (1, 320), (2, 120))
    orders = [grid_order("morton", *grid) for grid in GRIDS]
    assert plan.orders[0].tolist() == torch.cat([orders[0], 320 + orders[1], 640 + orders[2]]).tolist()


def test_each_image_of_joyimage_edit_has_tiles_of_its_own():
    model, x, method = tiny.joyimage(), tiny.joyimage_inputs(items=3, batch=2), HilbertA(tiles=4)
    as_defined(SPARSE["joyimage"], model, x, method, *3 * ((16, 20),))
    x["hidden_states"] = torch.randn(1, 4, 2, 32, 40).double()
    dense_because(model, x, method, "several frames")


def test_frames_of_skyreels_that_attend_causally_stay_dense():
    dense_because(*built("skyreels", num_frame_per_block=5), HilbertA(tiles=4, align=1), "attend causally")


def test_no_text_is_no_special_case():
    model, x, method = tiny.flux(), tiny.inputs(text=0), HilbertA(tiles=4)
    as_defined(FAMILIES["flux"], model, x, method)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_blocks_of_sd3_may_be_skipped(skipped):
    model, x = built("sd3")
    x |= {"block_controlnet_hidden_states": None, "skip_layers": [skipped]}
    numbers = [n for n in (0, 0, 1, 2) if n != skipped]
    as_defined(FAMILIES["sd3"]._replace(numbers=numbers), model, x, HilbertA(tiles=4, align=1))
    want = call(model, x)
    with foveate.apply(model, LOSSLESS):  # dense if the first block, which makes the plan, is skipped
        torch.testing.assert_close(call(model, x), want)


@every_family_of((HilbertA(tiles=1),), (LOSSLESS,), among=tiny.MASKED)
@pytest.mark.parametrize("missing", [0, 6])
def test_the_padding_of_a_text_is_left_out(name, methods, missing):
    model, x = built(name, batch=2)
    text_name = tiny.text_name(name)
    text = x[text_name].shape[1]
    real = text - missing
    mask = (torch.arange(text) < real).expand(2, -1)
    want = call(model, x | tiny.masked(name, mask))
    with foveate.apply(model, *methods) as run:
        torch.testing.assert_close(call(model, x | tiny.masked(name, mask)), want)
        assert not any(whys(run))
    shorter = x | {text_name: x[text_name][:, :real]}
    shorter |= {name: [one[:, :real] for one in x[name]] for name in ("text_encoder_layers",) if name in x}
    shorter |= {"txt_ids": x["txt_ids"][:real]} if "txt_ids" in x else {}
    shorter |= {"position_ids": x["position_ids"][missing:]} if "position_ids" in x else {}
    shorter |= tiny.masked(name, mask[:, :real]) if name.startswith(("hunyuan", "ernie")) else {}
    torch.testing.assert_close(call(model, shorter), want)


@pytest.mark.parametrize(("name", "method"), in_turn(RAGGED, [HilbertA(tiles=1), *ATTENTION], each=2))
def test_prompts_of_different_length_attend_by_the_definition(name, method):
    model, x = tiny.ragged(name, **heads_for(name, method))
    with nullcontext() if method == HilbertA(tiles=1) else reference(SPARSE[name], method):
        want = call(model, x)
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(call(model, x), want)
        rows = run.summary().layers
    assert not any(row.why for row in rows)
    assert all(row.saved == 0 for row in rows) == (method == HilbertA(tiles=1))


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        *in_turn(RAGGED, [(method,) for method in ATTENTION]),
        *in_turn(
            [name for name in RAGGED if name in FAMILIES],
            [
                (ToMA(skip=0, tile=(4, 4), granularity="module"),),
                (HilbertA(tiles=2), ToMA(skip=0, granularity="block")),
            ],
        ),
    ],
)
def test_prompts_of_different_length_do_not_depend_on_each_other(name, methods):
    model, x = tiny.ragged(name, **heads_for(name, methods[0]))
    with foveate.apply(model, *methods) as run:
        batch, rows, saved = call(model, x), run.summary().layers, []
    assert not any(row.why for row in rows)
    for i in range(3):
        with foveate.apply(model, *methods) as run:
            torch.testing.assert_close(call(model, tiny.sample(x, i)), batch[i : i + 1])
            saved.append([row.saved for row in run.summary().layers])
    assert [row.saved for row in rows] == [sum(layer) for layer in zip(*saved, strict=True)]


@pytest.mark.parametrize("methods", [(HilbertA(tiles=1),), (LOSSLESS,)])
@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("krea2", {"encoder_attention_mask": [1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]}),
        ("hunyuan_image", {"encoder_attention_mask": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
                           "encoder_attention_mask_2": [1, 1, 1, 0]}),
        ("hunyuan_video", {"encoder_attention_mask": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]}),
        ("hunyuan_video15", {"encoder_attention_mask": [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1],
                             "encoder_attention_mask_2": [1, 0, 0, 0]}),
    ],
)  # fmt: skip
def test_padding_may_be_amid_the_text(name, masks, methods):
    model, x = built(name, batch=2)
    x |= {argument: torch.tensor([mask, mask], dtype=torch.bool) for argument, mask in masks.items()}
    unchanged(model, x, *methods, text=7)


def test_the_refiner_of_hunyuan_image_stays_dense():
    model = tiny.hunyuan_image(patch_size=(1, 1, 1), rope_axes_dim=(4, 4, 8))
    x = tiny.hunyuan_image_inputs() | {"hidden_states": torch.randn(1, 4, 2, 16, 20).double()}
    dense_because(model, x, HilbertA(tiles=2), "latents with frames are no images")


def test_an_image_of_zeros_is_padding_in_hunyuan_video():
    model, x = built("hunyuan_video15")
    x["image_embeds"] = torch.zeros_like(x["image_embeds"])
    unchanged(model, x, HilbertA(tiles=1), text=15)


def test_hunyuan_video_may_modulate_the_first_frame_in_its_own_way():
    model, x = built("hunyuan_video", image_condition_type="token_replace")
    lossless = replace(LOSSLESS, granularity="module")
    for methods in (HilbertA(tiles=1),), (lossless,), (HilbertA(tiles=1), lossless):
        unchanged(model, x, *methods)
    with pytest.raises(ValueError, match="merge with granularity='module'"):
        foveate.apply(model, ToMA(granularity="block"))


@pytest.mark.parametrize("keyframes", [("first",), ("first", "last")])
@pytest.mark.parametrize("method", [HilbertA(tiles=4, align=1), LLSA(top_k=2, min_tokens=0)], ids=title)
def test_keyframes_of_minimax_h3_attend_as_text_does(keyframes, method):
    model = tiny.minimax_h3(**heads_for("minimax_h3", method))
    x = tiny.minimax_h3_inputs(keyframes=keyframes, batch=2)
    as_defined(SPARSE["minimax_h3"], model, x, method)
    unchanged(model, x, LOSSLESS, text=9 + len(keyframes) * 72 + 6)


def test_references_of_minimax_h3_attend_as_text_does():
    kinds = [SimpleNamespace(kind=kind, has_audio=True) for kind in ("image", "audio", "video")]
    latents = torch.empty(1, 4, 1, 16, 18), torch.empty(1, 4, 5, 8, 12)
    layout = minimax_h3_steps.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.ones(9), kinds, latents, (torch.empty(4, 4), torch.empty(8, 4)), 5, 16, 18, 3, (1, 2, 2), 2, 2, 0
    )
    model, x = tiny.minimax_h3(), tiny.minimax_h3_packed(*layout)
    as_defined(SPARSE["minimax_h3"], model, x, HilbertA(tiles=4, align=1))
    unchanged(model, x, LOSSLESS, text=9 + 72 + 4 + 8 + 5 * 24 + 6)


def test_a_packed_sequence_that_does_not_end_with_frames_of_one_size_stays_dense():
    model, x = built("minimax_h3")
    places = x["position_ids"].clone()
    places[-1, 2] += 1
    dense_because(model, x | {"position_ids": places}, HilbertA(tiles=4), "no frames of one size")
    places = x["position_ids"].clone()
    places[-72:, 0] = places[-73, 0]  # the last frame at the time of the one before
    dense_because(model, x | {"position_ids": places}, HilbertA(tiles=4), "no frames of one size")
    reordered = {name: x[name].flip(0) for name in ("position_ids", "token_tags", "timestep_indices")}
    reordered |= {name: 374 - x[name] for name in ("video_indices", "audio_indices", "text_indices")}
    dense_because(model, x | reordered, HilbertA(tiles=4), "does not end with the video")


def coordinates(grid, *conditions, ends=False):
    """(time, row, column) in pixels of each token of conditions, (first frame, frames), and of a video."""
    times = torch.tensor([start + 8.0 * i for start, frames in (*conditions, (0, grid[0])) for i in range(frames)])
    places = torch.cartesian_prod(times, *(32.0 * torch.arange(side) for side in grid[1:])).mT[None]
    return torch.stack([places, places + 32.0], -1) if ends else places


@pytest.mark.parametrize(("name", "ends"), [("ltx", False), ("ltx2", True)])
@pytest.mark.parametrize("conditions", [[], [(40, 1), (80, 2)]])
def test_frames_of_conditions_of_ltx_are_frames_of_the_video(name, ends, conditions):
    grid, method = (5, 8, 9), HilbertA(tiles=4, align=1)
    whole = (5 + sum(frames for _, frames in conditions), 8, 9)
    model, x = built(name, whole)
    x |= {"num_frames": None, "video_coords": coordinates(grid, *conditions, ends=ends)}
    as_defined(SPARSE[name], model, x, method, whole)
    x["video_coords"][:, 1, :9] += 1
    dense_because(model, x, method, "no frames of one size")


def test_ltx_without_a_grid_stays_dense():
    model, x = built("ltx2")
    masked = {"video_self_attention_mask": torch.ones(1, 360, 360).double()}
    dense_because(model, x, HilbertA(tiles=4, align=1), "an attention mask was passed", **masked)


@pytest.mark.parametrize("left_out", [[], [1]])
def test_guidance_of_ltx2_may_leave_attention_out_in_some_blocks(left_out):
    model, x = built(
        "ltx2", rope_type="split", gated_attn=True, audio_gated_attn=True, cross_attn_mod=True,
        audio_cross_attn_mod=True, perturbed_attn=True,
    )  # fmt: skip
    x |= {"sigma": x["timestep"], "spatio_temporal_guidance_blocks": left_out}
    unchanged(model, x, HilbertA(tiles=1))


def test_a_mask_that_hides_image_tokens_stays_dense():
    mask = torch.ones(1, 15 + 320, dtype=torch.bool)
    mask[:, 200:] = False
    dense_because(*built("chroma"), HilbertA(tiles=2), "hides image tokens", attention_mask=mask)


def test_an_additive_mask_stays_dense():
    additive = {"attention_mask": torch.ones(1, 15 + 320).double()}
    dense_because(*built("chroma"), HilbertA(tiles=2), "the attention mask is additive", **additive)


@pytest.mark.parametrize("options", [{}, {"merge_reference": True}, {"granularity": "module"}])
def test_tokens_of_flux3_merge_beside_references_that_have_another_modulation(options):
    model = tiny.flux3()
    x = tiny.flux3_inputs(*GRIDS, batch=2)
    unchanged(model, x, replace(LOSSLESS, **options))
    with foveate.apply(model, ToMA(skip=0, tile=(4, 4), **options)) as run:
        batch = call(model, x)
        torch.testing.assert_close(call(model, tiny.sample(x, 1)), batch[1:])
        assert not any(whys(run))


def test_qwen_images_of_other_sizes_in_a_batch_or_with_frames_stay_dense():
    model, x = built("qwen", batch=2)
    for shapes, why in (([[(1, 16, 20)], [(1, 20, 16)]], "differ in size"), (2 * [[(4, 8, 10)]], "several frames")):
        dense_because(model, x | {"img_shapes": shapes}, HilbertA(tiles=2), why)
    model = tiny.qwen(zero_cond_t=True)
    with pytest.raises(ValueError, match="merge with granularity='module'"):
        foveate.apply(model, ToMA(granularity="block"))
    unchanged(model, tiny.qwen_inputs(*GRIDS), replace(LOSSLESS, granularity="module"))


@pytest.mark.parametrize("methods", [(HilbertA(tiles=1),), (LOSSLESS,)])
def test_prompts_of_z_image_that_fill_the_same_multiple_of_32_tokens_share_a_layout(methods):
    model, x = built("zimage", (9, 31), batch=2)
    x["cap_feats"][1] = x["cap_feats"][1][:7]
    unchanged(model, x, *methods)


def test_z_image_stays_dense_with_frames_or_references():
    model, x = built("zimage", batch=2)
    long, frames, wide = torch.randn(40, 16).double(), torch.randn(4, 2, 32, 40).double(), x["x"][0].mT
    several = {"x": [frames, frames], "controlnet_block_samples": None}
    dense_because(model, x | several, HilbertA(tiles=4), "several frames")
    model, x = built("zimage")
    x |= {"x": [[wide, x["x"][0]]], "cap_feats": [[long, x["cap_feats"][0]]], "controlnet_block_samples": None}
    more = {"siglip_feats": [None], "image_noise_mask": [[0, 1]]}
    dense_because(model, x, HilbertA(tiles=4), "modulates each token by its image", **more)


def test_z_image_needs_images_of_one_size():
    model, x = built("zimage", batch=2)
    x |= {"x": [x["x"][0], x["x"][0].mT[..., :30]], "controlnet_block_samples": None}
    want = model(**x)[0]
    with foveate.apply(model, HilbertA(tiles=4)) as run:
        assert all(torch.equal(*pair) for pair in zip(model(**x)[0], want, strict=True))
        assert all("the images differ in size" in why for why in whys(run))


def test_an_order_undoes_the_interleaving_of_ulysses_and_leaves_padding_out():
    layout = TokenLayout((text(2), padding(2), image(2, 4)))
    order, inverse = sequence_order(torch.arange(8).flip(0), layout, ranks=2)
    gathered = torch.tensor([0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11])  # process 0: text, image; 1: padding, image
    assert gathered[order].tolist() == [0, 1, *range(11, 3, -1)]
    assert order[inverse[:2]].tolist() == [0, 1]
    assert sorted(inverse.tolist()) == list(range(12))


def test_a_plan_made_in_inference_mode_can_be_trained_with():
    model, x = tiny.flux(), tiny.inputs((13, 27))  # a size that no other test has planned for
    with foveate.apply(model, HilbertA(tiles=3)), torch.enable_grad():
        with torch.inference_mode():
            want = call(model, x).clone()
        got = call(model, x)
        got.square().sum().backward()
    assert torch.equal(got, want)


def test_arguments_may_come_by_position_and_outputs_as_objects():
    model, x = tiny.flux(), tiny.inputs()
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    with foveate.apply(model, HilbertA(tiles=4)):
        want = call(model, x)
        assert torch.equal(model(*(x[name] for name in names)).sample, want)
        assert torch.equal(call(model, x | {"img_ids": x["img_ids"].expand(2, -1, -1)}), want)


def test_layers_of_a_phase_share_one_table_and_all_tables_have_one_shape():
    model, tables = tiny.flux(), []
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.register_forward_pre_hook(lambda attn, _: tables.append(plan_of(attn.processor).pattern))
    with foveate.apply(model, HilbertA(tiles=4)):
        call(model, tiny.inputs())
    assert len({id(table) for table in tables}) == 4
    assert len({tuple(map(len, table)) for table in tables}) == 1


@pytest.mark.parametrize(
    "method", [HilbertA(tiles=4, dense_layers="1"), LLSA(top_k=2, min_tokens=0, dense_layers="1")]
)
def test_a_summary_counts_what_was_left_out(method):
    model, x = built("flux", batch=2, **FAMILIES["flux"].wide)
    with foveate.apply(model, method) as run:
        assert all("no forward yet" in why for i, why in enumerate(whys(run)) if i != 1)
        call(model, x)
        rows, printed = run.summary().layers, str(run.summary())
    assert [row.layer for row in rows] == [
        *(f"transformer_blocks.{i}.attn" for i in range(2)),
        *(f"single_transformer_blocks.{i}.attn" for i in range(3)),
    ]
    assert rows[1][:2] == ("transformer_blocks.1.attn", "dense")
    assert "transformer_blocks.0.attn" in printed
    assert "single_transformer_blocks.0-2.attn" in printed
    assert "dense: transformer_blocks.1.attn: named in dense_layers" in printed
    for i in (0, 2, 3, 4):
        if isinstance(method, HilbertA):
            left_out, nominal = int((~method.plan(((16, 20),), 15).tables[i % 4].to_dense()).sum()), 0.75
        else:
            keys = 2 * 16 + 20  # of two blocks, and the means
            left_out, nominal = 320 * (320 - keys), 1 - keys / 320
        assert rows[i][1:3] == (method.plan(((16, 20),), 15).title, "portable")
        assert (rows[i].nominal, rows[i].true) == pytest.approx((nominal, left_out / 335**2))
        assert rows[i].saved == 2 * 4 * 64 * left_out


# --- what stays dense, and says so ---


def dense_because(model, x, method, why, **more):
    dense = call(model, x, **more)
    with foveate.apply(model, method) as run:
        assert torch.equal(call(model, x, **more), dense)
        assert all(row.method == "dense" and why in row.why for row in run.summary().layers)
        assert run.plans() == {}


@pytest.mark.parametrize(
    ("name", "method_and_why"),
    in_turn(
        SPARSE,
        [
            (HilbertA(), "image tokens are too few"),
            (HilbertA(min_tokens=401), " image tokens are fewer than min_tokens=401"),
            (ToDo(factor=17), "image tokens are too few for a factor of 17"),
            (LLSA(), " image tokens are fewer than min_tokens=1024"),
            (LLSA(min_tokens=0), "does not support these heads: head_dim must be 32 to 256, not "),
        ],
        each=2,
    ),
)
def test_a_model_stays_dense_and_says_why(name, method_and_why):
    dense_because(*built(name, (16, 16)), *method_and_why)


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (HilbertA(tiles=16), "tiles need 32 tokens or more: 256 image tokens cannot make 16 tiles; use tiles<=8"),
        (HilbertA(), "16 x 16 image tokens are too few"),
        (HilbertA(tiles=4, min_tokens=257), "256 image tokens are fewer than min_tokens=257"),
        (ToDo(factor=17), "16 x 16 image tokens are too few for a factor of 17"),
    ],
)
def test_parts_of_a_unet_that_are_too_small_stay_dense_and_the_others_do_not(name, method, why, caplog):
    model, x = built(name, (32, 32))
    with foveate.apply(model, method) as run:
        for _ in range(2):
            call(model, x)
        rows = run.summary().layers
        assert run.summary().outcomes[type(model).__name__][""] == 2
    largest = "down_blocks.0", f"up_blocks.{len(model.up_blocks) - 1}"
    assert [bool(row.why) for row in rows] == [not row.layer.startswith(largest) for row in rows]
    assert why in next(row.why for row in rows if row.why)
    assert sum(why in record.message for record in caplog.records) == 1


def test_parts_of_a_unet_with_narrow_heads_or_without_self_attention_stay_dense():
    model, x = built("sdxl", block_out_channels=(16, 64), attention_head_dim=(1, 2))
    with foveate.apply(model, LLSA(top_k=2, min_tokens=0)) as run:
        call(model, x)
        assert "head_dim must be 32 to 256, not 16" in whys(run)[0]
        assert set(whys(run)[1:-2]) == {""}
    model, x = built("sdxl", only_cross_attention=(True, False))
    with foveate.apply(model, HilbertA(tiles=4, align=1)) as run:
        call(model, x)
        sections = {row.layer.split(".attentions")[0] for row in run.summary().layers}
    assert sections == {"down_blocks.1", "mid_block", "up_blocks.0"}
    none = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "mid_block_type": None}
    with pytest.raises(ValueError, match="has no self-attention that foveate knows"):
        foveate.apply(tiny.unet(**none), HilbertA())


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids * torch.tensor([1, 2, 2]),
        lambda ids: ids.flip(0),
        lambda ids: ids[torch.randperm(len(ids))],
        lambda ids: torch.cat([ids[:-1], ids[:1]]),
    ],
    ids=["scaled", "flipped", "scattered", "repeated"],
)
def test_position_ids_that_are_no_raster_stay_dense(change):
    x = tiny.inputs()
    dense_because(tiny.flux(), x | {"img_ids": change(x["img_ids"])}, HilbertA(tiles=4), "no complete raster")


def test_a_raster_may_start_anywhere_and_is_recognised_in_rounded_position_ids():
    assert grids_of(tiny.ids((16, 20)) + torch.tensor([0, 7, -3])) == ((16, 20),)
    rounded = tiny.ids((3, 301), (300, 2)).bfloat16()  # whole numbers above 256 lose their last bit
    assert grids_of(rounded) == ((3, 301), (300, 2))


@pytest.mark.parametrize("method", [HilbertA(tiles=4, align=1), LLSA(min_tokens=0), ToMA(skip=0)], ids=title)
def test_attention_masks_stay_dense(method, caplog):
    mask = torch.ones(335, 335, dtype=torch.bool).tril()
    heads = heads_for("flux", method)
    dense_because(*built("flux", **heads), method, "mask", joint_attention_kwargs={"attention_mask": mask})
    dense_because(*built("pixart", **heads_for("pixart", method)), method, "mask", attention_mask=torch.ones(1, 320))
    model, x = built("sdxl", **heads_for("sdxl", method))
    with foveate.apply(model, method), suppress(RuntimeError):  # the model's own processor cannot take it
        call(model, x, attention_mask=torch.ones(1, 513))
    assert f"{type(method).__name__} stays dense: an attention mask was passed" in caplog.text


def test_layers_named_in_dense_layers_stay_dense():
    model, x = tiny.flux(), tiny.inputs()
    dense = call(model, x)
    with foveate.apply(model, HilbertA(dense_layers="0-4")) as run:
        torch.testing.assert_close(call(model, x), dense, rtol=1e-10, atol=1e-10)
        assert set(whys(run)) == {"named in dense_layers"}


@pytest.mark.parametrize("scheduler", [SimpleNamespace(timesteps=torch.tensor([1000.0, 500.0])), None])
def test_a_window_of_steps_follows_the_timestep_where_the_scheduler_does_not_count(scheduler):
    class Pipeline:
        transformer = tiny.flux()

    pipeline = Pipeline()
    pipeline.scheduler = scheduler
    with foveate.apply(pipeline, HilbertA(tiles=4, start_percent=0.5)) as run:
        for timestep in (1.0, 0.75, 0.5, 0.25):
            call(pipeline.transformer, tiny.inputs() | {"timestep": torch.tensor([timestep])})
    assert "2 of 4 forward passes sparse" in str(run.summary())


def test_ring_attention_stays_dense():
    model = tiny.flux()
    run = foveate.apply(model, HilbertA(tiles=4))
    context = SimpleNamespace(ulysses_degree=1, ring_degree=2)
    for processor in model.attn_processors.values():  # as enable_parallelism sets it
        processor._parallel_config = SimpleNamespace(context_parallel_config=context)
    adapter = ModelAdapter.of(model)
    adapter.before_model(model, (), tiny.inputs())  # the forward pass itself needs several processes
    adapter.after_model(model, (), None)
    assert all("ring attention" in why for why in whys(run))
    assert run.plans() == {}
    run.remove()


# --- what is refused, with the remedy ---


def test_inputs_that_do_not_fit_are_refused_with_the_remedy():
    model, x = tiny.flux(**FAMILIES["flux"].wide), tiny.inputs(batch=2)
    apart = x | {"img_ids": torch.stack([x["img_ids"], x["img_ids"].flip(0)])}
    for method, given, remedy in (
        (HilbertA(tiles=4), apart, "differ between the samples"),
        (HilbertA(tiles=16), x, "use tiles<=10"),
        (LLSA(levels=4, min_tokens=0), x, "use levels<=3"),
    ):
        with foveate.apply(model, method), pytest.raises(ValueError, match=remedy):
            call(model, given)
