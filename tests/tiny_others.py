"""Tiny models whose processors call torch's attention, whose text has keys alone, or that pack their sequence.

The last part of `tiny`, which knows their families.
"""

from math import prod

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    BriaFibo2Transformer2DModel,
    CogView4Transformer2DModel,
    Cosmos3OmniTransformer,
    DreamLiteUNetModel,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    Ideogram4Transformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    Kandinsky6Transformer3DModel,
    Lumina2Transformer2DModel,
    NucleusMoEImageTransformer2DModel,
    PRXTransformer2DModel,
    QwenImage21Transformer2DModel,
)
from tiny import _VIDEOS, _WIDE, NARROW, Family, given, ids, maker, not_zero, unet_inputs, without_zeros

SIZES = ((16, 20), (8, 30))  # whole slots of 2 x 2 tokens

auraflow = maker(
    AuraFlowTransformer2DModel, NARROW, sample_size=16, patch_size=1, num_mmdit_layers=2, num_single_dit_layers=3,
    joint_attention_dim=16, caption_projection_dim=32, pos_embed_max_size=34 * 34,
)  # fmt: skip


def latent_inputs(model, grid, batch=1, patch=1, text=11, timestep=500.0, **more):
    """Keyword arguments of one forward of a model with a latent and a text."""
    latent = 4, patch * grid[0], patch * grid[1]
    return given(batch, model.dtype, timestep, hidden_states=latent, encoder_hidden_states=(text, 16)) | more


cogview4 = maker(
    CogView4Transformer2DModel, NARROW, patch_size=1, in_channels=4, out_channels=4, num_layers=3, text_embed_dim=16,
    time_embed_dim=16, condition_dim=8, rope_axes_dim=(32, 32),
)  # fmt: skip


def cogview4_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    sizes = {name: torch.full((batch, 2), 64.0) for name in ("original_size", "target_size", "crop_coords")}
    return latent_inputs(model, grid, batch) | sizes


hidream = maker(
    HiDreamImageTransformer2DModel, NARROW, patch_size=1, in_channels=4, num_layers=2, num_single_layers=3,
    caption_channels=[16, 16], text_emb_dim=16, num_routed_experts=0, axes_dims_rope=(4, 4, 8),
    max_resolution=(18, 18), llama_layers=[0, 1, 0, 1, 0],
)  # fmt: skip


def hidream_inputs(model, grid, batch=1):
    """Keyword arguments of one forward; latents that are no squares are filled up to 18 x 18 tokens."""
    x = given(
        batch, model.dtype, 500.0, hidden_states=(4, *grid), encoder_hidden_states_t5=(5, 16), pooled_embeds=(16,)
    )
    llama = [torch.randn(batch, 4, 16, dtype=model.dtype) for _ in range(2)]
    return x | {"timesteps": x.pop("timestep"), "encoder_hidden_states_llama3": llama}


hunyuan_dit = maker(
    HunyuanDiT2DModel, NARROW, in_channels=4, patch_size=1, sample_size=16, hidden_size=32, num_layers=4,
    mlp_ratio=1.0, learn_sigma=False, cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=16,
    text_len=7, text_len_t5=5, use_style_cond_and_image_meta_size=False,
)  # fmt: skip


def hunyuan_dit_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    angles = torch.linspace(0, 3, prod(grid) * model.config.attention_head_dim // 2).view(prod(grid), -1)
    return latent_inputs(model, grid, batch, text=7) | {
        "encoder_hidden_states_t5": torch.randn(batch, 5, 16, dtype=model.dtype),
        "text_embedding_mask": torch.ones(batch, 7, dtype=torch.long),
        "text_embedding_mask_t5": torch.ones(batch, 5, dtype=torch.long),
        "image_rotary_emb": tuple(part.repeat_interleave(2, 1) for part in (angles.cos(), angles.sin())),
    }


lumina2 = maker(
    Lumina2Transformer2DModel, patch_size=2, in_channels=4, hidden_size=32, num_layers=3, num_refiner_layers=2,
    num_attention_heads=2, num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 8), axes_lens=(64, 64, 64),
    cap_feat_dim=16, finish=not_zero,
)  # fmt: skip


def lumina2_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    mask = torch.ones(batch, 11, dtype=torch.long)
    return latent_inputs(model, grid, batch, patch=2, timestep=0.5, encoder_attention_mask=mask)


prx = maker(
    PRXTransformer2DModel, in_channels=4, patch_size=1, context_in_dim=16, hidden_size=32, mlp_ratio=1.0,
    num_heads=2, depth=3, axes_dim=[8, 8], finish=not_zero,
)  # fmt: skip


def prx_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    return latent_inputs(model, grid, batch, timestep=0.5)


nucleus = maker(
    NucleusMoEImageTransformer2DModel, NARROW, patch_size=1, in_channels=4, num_layers=3, num_key_value_heads=1,
    joint_attention_dim=16, axes_dims_rope=(8, 4, 4), mlp_ratio=8.0, moe_enabled=False,
)  # fmt: skip


def nucleus_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    x = given(batch, model.dtype, 0.5, hidden_states=(prod(grid), 4), encoder_hidden_states=(11, 16))
    return x | {"img_shapes": [(1, *grid)] * batch}


qwen21 = maker(
    QwenImage21Transformer2DModel, NARROW, in_channels=4, out_channels=4, num_layers=3, context_in_dim=16,
    axes_dims_rope=(8, 4, 4), finish=not_zero,
)  # fmt: skip
REFERENCE = 4, 6


def qwen21_inputs(model, grid, batch=1):
    """Keyword arguments of one forward, with a reference amid the text."""
    slots = [False] * 5 + [True] * (prod(REFERENCE) // 4) + [False] * 3 + [True] * (prod(grid) // 4)
    tokens = prod(REFERENCE) + prod(grid)
    return given(batch, model.dtype, 0.5, hidden_states=(tokens, 4), encoder_hidden_states=(14, 16)) | {
        "img_shapes": [[(1, *REFERENCE), (1, *grid)]] * batch,
        "img_mask": torch.tensor([slots] * batch),
    }


cosmos3 = maker(
    Cosmos3OmniTransformer, head_dim=16, hidden_size=32, intermediate_size=32, num_attention_heads=2,
    num_key_value_heads=1, num_hidden_layers=3, latent_channel=4, latent_patch_size=1, patch_latent_dim=4,
    vocab_size=16, rope_axes_dim=(4, 2, 2), sound_gen=True, sound_dim=4,
)  # fmt: skip


def cosmos3_inputs(model, grid, text=7, sound=0):
    """Keyword arguments of one forward of the only sample, with so many tokens of text and sound."""
    tokens = prod(grid)
    x = {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.arange(text + tokens + sound).expand(3, -1),
        "und_len": text,
        "sequence_length": text + tokens + sound,
        "vision_tokens": [torch.randn(1, 4, *grid, dtype=model.dtype)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": torch.arange(text, text + tokens),
        "vision_mse_loss_indexes": torch.arange(text, text + tokens),
        "vision_timesteps": torch.full((tokens,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(grid[0])],
    }
    if sound:
        x |= {
            "sound_tokens": [torch.randn(4, sound, dtype=model.dtype)],
            "sound_token_shapes": [(sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(text + tokens, text + tokens + sound),
            "sound_mse_loss_indexes": torch.arange(text + tokens, text + tokens + sound),
            "sound_timesteps": torch.full((sound,), 500.0),
            "sound_noisy_frame_indexes": [torch.arange(sound)],
        }
    return x


ideogram4 = maker(
    Ideogram4Transformer2DModel, NARROW, in_channels=4, num_layers=3, intermediate_size=32, adaln_dim=16,
    llm_features_dim=16, mrope_section=(4, 2, 2),
)  # fmt: skip


def ideogram4_inputs(model, grid, batch=1, text=11):
    """Keyword arguments of one forward."""
    tokens = text + prod(grid)
    roles = torch.tensor([3] * text + [2] * prod(grid))
    positions = torch.cat([torch.arange(text)[:, None].expand(-1, 3), ids(grid).long() + 65536])
    return given(batch, model.dtype, 0.5, hidden_states=(tokens, 4), encoder_hidden_states=(tokens, 16)) | {
        "position_ids": positions.expand(batch, -1, -1),
        "segment_ids": torch.ones(batch, tokens, dtype=torch.long),
        "indicator": roles.expand(batch, -1),
    }


joyimage_plus = maker(
    JoyImageEditPlusTransformer3DModel, patch_size=[1, 1, 1], in_channels=4, hidden_size=32, num_attention_heads=2,
    text_dim=16, mlp_width_ratio=1.0, num_layers=3, rope_dim_list=[4, 4, 8], finish=not_zero,
)  # fmt: skip


def joyimage_plus_inputs(model, grid, batch=1, others=(), text=11, filling=0):
    """Keyword arguments of one forward, with references of other sizes and tokens that fill up the sequence."""
    grids = grid, *others
    tokens = sum(map(prod, grids)) + filling
    x = given(batch, model.dtype, 500.0, hidden_states=(tokens, 4, 1, 1, 1), encoder_hidden_states=(text, 16))
    return x | {"shape_list": [[(1, *grid) for grid in grids]] * batch}


fibo2 = maker(
    BriaFibo2Transformer2DModel, in_channels=4, patch_size=1, dim=32, n_layers=3, n_refiner_layers=2, n_heads=2,
    cap_feat_dim=16, injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=4, max_num_gist_tokens=16,
    gist_step=4, gist_min_text_len=4, gist_max_text_len=32, axes_dims=(4, 4, 8), axes_lens=(64, 64, 64),
    finish=not_zero,
)  # fmt: skip


def fibo2_inputs(model, grid, batch=1, others=(), text=11):
    """Keyword arguments of one forward, with references of other sizes; the text becomes 8 tokens."""
    x = given(batch, model.dtype, 0.5, hidden_states=(4, *grid), encoder_hidden_states=(2, text, 16))
    return x | {"context_latents": [torch.randn(batch, 4, *other, dtype=model.dtype) for other in others]}


kandinsky6 = maker(
    Kandinsky6Transformer3DModel, in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=16,
    model_dim=32, ff_dim=32, num_text_blocks=1, num_visual_blocks=3, axes_dims=(4, 4, 8), visual_cond=False,
    in_audio_dim=4, out_audio_dim=4, ca_rope=True, cross_gates=True, fix_modulation=True, finish=not_zero,
)  # fmt: skip


def kandinsky6_inputs(model, grid, batch=1):
    """Keyword arguments of one forward, with audio; an image is a video of one frame."""
    frames, rows, columns = (1, *grid)[-3:]
    return given(
        batch, model.dtype, 500.0, hidden_states=(frames, 2 * rows, 2 * columns, 4), encoder_hidden_states=(7, 16),
        pooled_projections=(16,), audio_hidden_states=(6, 4),
    )  # fmt: skip


dreamlite = maker(
    DreamLiteUNetModel, sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
    down_block_types=("DreamLiteCrossAttnDownBlock2D", "DreamLiteCrossAttnNoSelfAttnDownBlock2D"),
    up_block_types=("DreamLiteCrossAttnNoSelfAttnUpBlock2D", "DreamLiteCrossAttnUpBlock2D"), cross_attention_dim=16,
    attention_head_dim=(2, 4), num_kv_heads=1, ff_mult=1, finish=without_zeros,
)  # fmt: skip


def dreamlite_inputs(model, grid, batch=1):
    """Keyword arguments of one forward."""
    x = unet_inputs(*grid, batch=batch, dtype=model.dtype)
    del x["added_cond_kwargs"]
    return x


ROPE = {"axes_dims_rope": (8, 12, 12), **_WIDE}
MERGING = {
    "auraflow": Family(auraflow, lambda model, grid, batch=1: latent_inputs(model, grid, batch, timestep=0.5), SIZES,
                       {"caption_projection_dim": 64, **_WIDE}),
    "lumina2": Family(lumina2, lumina2_inputs, SIZES, {"hidden_size": 64, "axes_dim_rope": (8, 12, 12)},
                      (None, None, 0, 1, 2, 3, 4)),
    "prx": Family(prx, prx_inputs, SIZES, {"hidden_size": 64, "axes_dim": [16, 16]}, keys=11),
    "cogview4": Family(cogview4, cogview4_inputs, SIZES, _WIDE),
    "ideogram4": Family(ideogram4, ideogram4_inputs, SIZES, {"mrope_section": (6, 5, 5), **_WIDE}),
    "joyimage_plus": Family(joyimage_plus, joyimage_plus_inputs, SIZES,
                            {"hidden_size": 64, "rope_dim_list": [8, 12, 12]}, text_first=False),
    "nucleus": Family(nucleus, nucleus_inputs, SIZES, ROPE, text_first=False, keys=11),
    "hidream": Family(hidream, hidream_inputs, ((16, 16), (17, 17)), ROPE, text_first=False),
}  # fmt: skip
"""Families that tokens merge in."""
OTHERS = {
    "fibo2": Family(fibo2, fibo2_inputs, SIZES, {"dim": 64, "axes_dims": (8, 12, 12)}, (0, 1, None, 2, 3, 4)),
    "hunyuan_dit": Family(hunyuan_dit, hunyuan_dit_inputs, SIZES, {"hidden_size": 64, **_WIDE}, checkpoints=False),
    "qwen21": Family(qwen21, qwen21_inputs, SIZES, ROPE, keys=32),
    "kandinsky6": Family(kandinsky6, kandinsky6_inputs, _VIDEOS, {"model_dim": 64, "axes_dims": (8, 12, 12)},
                         (None, None, 0, None, 1, None, 2, None)),
    "dreamlite": Family(dreamlite, dreamlite_inputs, ((19, 27), (16, 24)), {"block_out_channels": (32, 64),
                        "attention_head_dim": (1, 2)}, (0, 2, 5, 6)),
}  # fmt: skip
"""Families that sparse attention alone works in."""
