"""What is special about models that pack text, references and padding, or give text keys alone."""

from math import prod
from unittest import mock

import pytest
import tiny
import tiny_others
import torch
from diffusers import AuraFlowPipeline, AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor, QwenImage21KVCache
from reference import reference
from tiny import SPARSE, built, call
from torch.nn import functional as F

import foveate
from foveate import LLSA, HilbertA, ToMA

pytestmark = pytest.mark.usefixtures("no_grad")
ONE_TILE, TILED = HilbertA(tiles=1), HilbertA(tiles=4, align=1)
COSMOS3 = tiny.Family(tiny_others.cosmos3, tiny_others.cosmos3_inputs, ((5, 8, 9),), keys=7)
each_method = pytest.mark.parametrize(
    "method", [ONE_TILE, TILED, LLSA(top_k=2, min_tokens=0)], ids=["one", "tiles", "llsa"]
)


def as_defined(family, model, run_model, method, *grids):
    """Checks that what a function returns follows from the definition of a method, and that every layer works."""
    if method is ONE_TILE:
        want = run_model()
    else:
        with reference(family, method, *grids):
            want = run_model()
    with foveate.apply(model, method) as run:
        torch.testing.assert_close(run_model(), want)
        assert not any(row.why for row in run.summary().layers)


def dense_because(model, x, why, method=TILED):
    dense = call(model, x)
    with foveate.apply(model, method) as run:
        assert torch.equal(call(model, x), dense)
        assert all(row.method == "dense" and why in row.why for row in run.summary().layers)


# --- keys alone ---


@each_method
@pytest.mark.parametrize("padded", [False, True])
def test_qwen_image_2_1_is_sparse_in_the_step_that_fills_the_cache_and_in_those_that_read_it(method, padded):
    model, x = built("qwen21", batch=2)
    wide = SPARSE["qwen21"].wide if isinstance(method, LLSA) else {}
    model = SPARSE["qwen21"].make(**wide)
    if padded:
        x["encoder_hidden_states_mask"] = torch.arange(14) < torch.tensor([[14], [12]])

    def steps():
        cache = QwenImage21KVCache(3)
        first = call(model, x, kv_cache=cache, kv_cache_mode="extract")
        return first, call(model, tiny.at(x, 0.5), kv_cache=cache, kv_cache_mode="cached")

    as_defined(SPARSE["qwen21"]._replace(numbers=2 * (0, 1, 2)), model, steps, method)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_qwen_image_2_1_with_flex_attention_is_sparse_where_the_cache_is_read():
    model, x = built("qwen21")
    cache, method = QwenImage21KVCache(3), TILED
    with reference(SPARSE["qwen21"], method):
        call(model, x, kv_cache=cache, kv_cache_mode="extract")
    for block in model.transformer_blocks:
        block.attn.set_processor(QwenImage21FlexAttnProcessor())
    dense_because(model, x, "flex attention reads a mask of its own")
    later = {"kv_cache": cache, "kv_cache_mode": "cached"}
    as_defined(SPARSE["qwen21"], model, lambda: call(model, x, **later), method)


@each_method
@pytest.mark.parametrize("sound", [0, 6])
def test_cosmos3_attends_by_the_definition_with_sound_as_without(method, sound):
    model = COSMOS3.make(**({"head_dim": 32, "rope_axes_dim": (6, 5, 5)} if isinstance(method, LLSA) else {}))
    x = COSMOS3.inputs(model, (5, 8, 9), sound=sound)
    model.enable_gradient_checkpointing()

    def gradients():
        model.zero_grad()
        with torch.enable_grad():
            outputs = model(**x, return_dict=False)
            (outputs[0][0].square().sum() + (outputs[1][0].square().sum() if sound else 0)).backward()
        return outputs[0][0].detach(), model.layers[0].self_attn.add_q_proj.weight.grad.clone()

    # the sound is behind the video; blocks run again from the last to the first
    family = COSMOS3._replace(text_first=lambda _: 7, numbers=(0, 1, 2, 2, 1, 0))
    as_defined(family, model, gradients, method)


def test_cosmos3_stays_dense_with_several_images():
    model = COSMOS3.make()
    x = COSMOS3.inputs(model, (5, 8, 9))
    x |= {
        "vision_tokens": [*x["vision_tokens"][0].split([2, 3], 2)],
        "vision_token_shapes": [(2, 8, 9), (3, 8, 9)],
        "vision_noisy_frame_indexes": [torch.arange(2), torch.arange(3)],
    }
    with foveate.apply(model, TILED) as run:
        model(**x)
        assert {row.why for row in run.summary().layers} == {"several images or videos share the sequence"}


# --- packed sequences ---


def test_the_padding_of_ideogram_is_left_out_of_attention():
    model, x = built("ideogram4", batch=2)
    padded = torch.arange(331) < torch.tensor([[4], [0]])
    x["segment_ids"] = x["segment_ids"].masked_fill(padded, -1)
    x["indicator"] = x["indicator"].masked_fill(padded, 0)
    as_defined(SPARSE["ideogram4"], model, lambda: call(model, x)[:, 11:], ONE_TILE)
    with foveate.apply(model, TILED):
        batch = call(model, x)[:, 11:]
        for i in range(2):
            torch.testing.assert_close(call(model, tiny.sample(x, i))[:, 11:], batch[i : i + 1])


def test_ideogram_without_text_is_the_image_alone():
    model = SPARSE["ideogram4"].make()
    x = tiny_others.ideogram4_inputs(model, (16, 20), text=0)
    as_defined(SPARSE["ideogram4"], model, lambda: call(model, x), TILED)


def test_several_samples_in_a_row_of_ideogram_stay_dense():
    model, x = built("ideogram4")
    x["segment_ids"] = torch.cat([torch.zeros(1, 5), torch.ones(1, 326)], 1).long()
    dense_because(model, x, "several samples are packed into one row")
    x["segment_ids"][:] = 1
    x["indicator"] = x["indicator"].flip(1)
    dense_because(model, x, "does not end the sequence")


@pytest.mark.parametrize("masked", [False, True])
def test_images_of_joyimage_edit_plus_have_tiles_of_their_own_and_may_be_filled_up(masked):
    grids = (16, 20), (10, 12), (9, 8)
    model = SPARSE["joyimage_plus"].make()
    x = tiny_others.joyimage_plus_inputs(model, grids[0], 2, grids[1:], filling=9)
    if masked:
        x["encoder_hidden_states_mask"] = torch.arange(11) < torch.tensor([[11], [6]])
    tokens = sum(map(prod, grids))
    for method in (ONE_TILE, TILED):
        as_defined(SPARSE["joyimage_plus"], model, lambda: call(model, x)[:, :tokens], method, *grids)


def test_images_of_joyimage_edit_plus_that_differ_in_a_batch_stay_dense():
    model, x = built("joyimage_plus", batch=2)
    x["shape_list"] = [[(1, 16, 20)], [(1, 20, 16)]]
    dense_because(model, x, "differ in size between the samples")


@each_method
def test_prompts_of_different_length_of_lumina2_and_fibo2_attend_by_the_definition(method):
    for name in ("lumina2", "fibo2"):
        model, x = built(name, batch=3, **(SPARSE[name].wide if isinstance(method, LLSA) else {}))
        text = x["encoder_hidden_states"].shape[-2]
        x["encoder_attention_mask"] = torch.arange(text) < torch.tensor([[text], [2], [text]])
        family = SPARSE[name] if name == "lumina2" else SPARSE[name]._replace(text_first=False)
        as_defined(family, model, lambda model=model, x=x: call(model, x), method)


def test_images_of_lumina2_that_begin_at_different_positions_do_not_merge():
    model, x = built("lumina2", batch=2)
    x["encoder_attention_mask"] = (torch.arange(11) < torch.tensor([[11], [2]])).long()
    dense_because(model, x, "begin at different positions", ToMA(skip=0))


@pytest.mark.parametrize("method", [ONE_TILE, TILED])
def test_references_of_fibo2_have_tiles_of_their_own(method):
    grids = (16, 20), (10, 12)
    model = SPARSE["fibo2"].make()
    x = tiny_others.fibo2_inputs(model, grids[0], 2, grids[1:])
    as_defined(SPARSE["fibo2"], model, lambda: call(model, x), method, *grids)


def test_steps_of_glm_image_that_write_or_read_keys_of_references_stay_dense():
    model, x = built("glm")
    caches = GlmImageKVCache(3)
    for mode in ("write", "read"):
        caches.set_mode(mode)
        with foveate.apply(model, TILED, ToMA(skip=0)) as run:
            call(model, x, kv_caches=caches)
            assert {row.why for row in run.summary().layers} == {"keys of the references are cached"}


# --- torch's attention in wrapped processors ---


@each_method
def test_tokens_that_fill_up_an_image_of_hidream_attend_as_text_does(method):
    model, x = built("hidream", (16, 20), **(SPARSE["hidream"].wide if isinstance(method, LLSA) else {}))
    as_defined(SPARSE["hidream"], model, lambda: call(model, x), method, (16, 20))


def test_packed_images_of_hidream_stay_dense():
    model, x = built("hidream", (16, 20))
    x |= {
        "hidden_states": x["hidden_states"].flatten(2).mT,
        "hidden_states_masks": torch.ones(1, 320).double(),
        "img_ids": tiny.ids((16, 20))[None],
        "img_sizes": torch.tensor([[16, 20]]),
    }
    dense_because(model, x, "the image is packed already")


def test_a_processor_that_attends_without_torch_is_an_error():
    model, x = built("auraflow")

    def instead(query, key, value, **_):
        return value

    error = pytest.raises(ValueError, match="attended without torch's scaled_dot_product_attention")
    with foveate.apply(model, TILED), mock.patch.object(F, "scaled_dot_product_attention", instead), error:
        call(model, x)


# --- pipelines ---


def generated(pipe, embeds, **more):
    """The latent image of four steps."""
    drawn = {"height": 256, "width": 320, "num_inference_steps": 4, "output_type": "latent"}
    more |= {"prompt_embeds": embeds, "negative_prompt_embeds": -embeds, "generator": torch.manual_seed(0)}
    return pipe(**drawn, **more)[0]


@pytest.mark.parametrize("name", ["lumina2", "auraflow"])
def test_pipelines_generate_the_same_with_one_tile_and_know_the_step(name):
    kind = Lumina2Pipeline if name == "lumina2" else AuraFlowPipeline
    transformer = SPARSE[name].make(dtype=torch.float32, **({"patch_size": 2} if name == "auraflow" else {}))
    vae = AutoencoderKL(block_out_channels=(8,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
                        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4)  # fmt: skip
    parts = {"transformer": transformer, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler()}
    pipe = kind(**parts, text_encoder=None, tokenizer=None)
    pipe.set_progress_bar_config(disable=True)
    masks = {f"{sign}prompt_attention_mask": torch.ones(1, 11, dtype=torch.long) for sign in ("", "negative_")}
    embeds = torch.randn(1, 11, 16)
    dense = generated(pipe, embeds, **masks)
    with foveate.apply(pipe, ONE_TILE):
        torch.testing.assert_close(generated(pipe, embeds, **masks), dense, rtol=1e-3, atol=1e-3)
    with foveate.apply(pipe, HilbertA(tiles=4, align=1, start_percent=0.6)) as run:
        assert not torch.equal(generated(pipe, embeds, **masks), dense)
        text = str(run.summary())
    assert ("1 of 4 forward passes sparse" if name == "auraflow" else "2 of 8 forward passes sparse") in text


def test_both_transformers_of_ideogram_are_sparse():
    class Pipeline:
        transformer, unconditional_transformer = SPARSE["ideogram4"].make(), SPARSE["ideogram4"].make()
        scheduler = None

    pipeline = Pipeline()
    with foveate.apply(pipeline, TILED) as run:
        for text, model in ((11, pipeline.transformer), (0, pipeline.unconditional_transformer)):
            call(model, tiny_others.ideogram4_inputs(model, (16, 20), text=text))
        assert [row.why for row in run.summary().layers] == 6 * [""]
