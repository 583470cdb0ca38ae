"""Tiny models with random weights, and inputs for them; a tiny pipeline, and what it is asked to draw."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import tiny_lm
import torch
from diffusers import (
    AnyFlowTransformer3DModel,
    AutoencoderKL,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    ChronoEditTransformer3DModel,
    CosmosTransformer3DModel,
    DDIMScheduler,
    DiTTransformer2DModel,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    GlmImageTransformer2DModel,
    HeliosTransformer3DModel,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    JoyImageEditTransformer3DModel,
    Kandinsky5Transformer3DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    SkyReelsV2Transformer3DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.models.transformers import transformer_kandinsky
from diffusers.modular_pipelines.minimax_h3 import before_denoise as minimax_h3_steps

from foveate import LLSA, HilbertA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.methods import Method
from foveate.nn.pixel_dit import PixelDiT
from foveate.pipelines.request import Request

PROMPTS = ["a cat", "a dog", "an owl", "a car", "a red apple"]
REQUEST = Request("", (64, 64), 2, None, 0)  # 16 x 16 tokens


def pipeline():
    return untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


def maker(cls, *shared, finish=lambda model: model, **usual):
    """A function that builds a model from a dtype and changes of its configuration, with equal weights each time."""
    usual = {name: value for part in (*shared, usual) for name, value in part.items()}

    def make(dtype=torch.float64, **config):
        torch.manual_seed(0)
        return finish(cls(**usual | config)).to(dtype).eval()

    return make


def not_zero(model):
    """The model with random weights in place of those that begin as zero."""
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.2)
    return model


NARROW = {"attention_head_dim": 16, "num_attention_heads": 2}
LIKE_FLUX = {"in_channels": 4, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32,
             "axes_dims_rope": (4, 4, 8), **NARROW}  # fmt: skip
HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16,
           "rope_axes_dim": (4, 4, 8), **NARROW}  # fmt: skip


make_flux = maker(FluxTransformer2DModel, LIKE_FLUX, pooled_projection_dim=32)


def flux(layers=2, single_layers=3, dtype=torch.float64, **config):
    return make_flux(dtype, num_layers=layers, num_single_layers=single_layers, **config)


def ids(*grids, image=lambda i: i):
    """Position ids of the picture and its references: (image number, row, column)."""
    parts = []
    for i, (height, width) in enumerate(grids):
        part = FluxPipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32)
        part[:, 0] = image(i)
        parts.append(part)
    return torch.cat(parts)


def given(batch, dtype, timestep, **shapes):
    """Random tensors of these shapes for each sample of a batch, and the timestep."""
    tensors = {name: torch.randn(batch, *shape, dtype=dtype) for name, shape in shapes.items()}
    return tensors | {"timestep": torch.full((batch,), timestep, dtype=dtype), "return_dict": False}


def inputs(*grids, text=15, batch=1, dtype=torch.float64, **more):
    """Keyword arguments of one forward; fresh random numbers each time."""
    grids = grids or ((16, 20),)
    tokens = sum(height * width for height, width in grids)
    return given(
        batch, dtype, 0.5, hidden_states=(tokens, 4), encoder_hidden_states=(text, 32), pooled_projections=(32,)
    ) | {"img_ids": ids(*grids), "txt_ids": torch.zeros(text, 3), **more}


def residuals(x, *counts, dim=32):
    """ControlNet residuals for double and single blocks."""
    names = ("controlnet_block_samples", "controlnet_single_block_samples")
    shape = (*x["hidden_states"].shape[:2], dim)
    dtype = x["hidden_states"].dtype
    return {name: [torch.randn(shape, dtype=dtype) for _ in range(n)] for name, n in zip(names, counts, strict=True)}


chroma = maker(
    ChromaTransformer2DModel, LIKE_FLUX, approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1
)


longcat = maker(LongCatImageTransformer2DModel, LIKE_FLUX)
ovis = maker(OvisImageTransformer2DModel, LIKE_FLUX, out_channels=4)
bria = maker(BriaTransformer2DModel, LIKE_FLUX)


def longcat_inputs(*grids, text=15, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward of LongCat-Image, Ovis-Image or Bria."""
    x = inputs(*grids, text=text, batch=batch, dtype=dtype)
    del x["pooled_projections"]
    return x


fibo = maker(BriaFiboTransformer2DModel, LIKE_FLUX, text_encoder_dim=16)


def fibo_inputs(grid, text=15, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, with text for each of 5 blocks."""
    layers = [torch.randn(batch, text, 16, dtype=dtype) for _ in range(5)]
    return longcat_inputs(grid, text=text, batch=batch, dtype=dtype) | {"text_encoder_layers": layers}


krea2 = maker(
    Krea2Transformer2DModel, in_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=64, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=3,
    text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32, num_layerwise_text_blocks=1,
    num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 8)
)  # fmt: skip


def krea2_inputs(*grids, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    positions = ids(*grids)
    return given(batch, dtype, 0.5, hidden_states=(len(positions), 4), encoder_hidden_states=(text, 3, 16)) | {
        "position_ids": torch.cat([torch.zeros(text, 3), positions])
    }


hunyuan_image = maker(
    HunyuanImageTransformer2DModel, HUNYUAN, num_single_layers=3, rope_axes_dim=(8, 8), text_embed_2_dim=16
)


def hunyuan_image_inputs(rows=16, columns=20, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, with the two prompts and without padding."""
    x = given(
        batch, dtype, 500.0, hidden_states=(4, rows, columns), encoder_hidden_states=(text, 16),
        encoder_hidden_states_2=(4, 16),
    )  # fmt: skip
    return x | {
        "encoder_attention_mask": torch.ones(batch, text, dtype=torch.long),
        "encoder_attention_mask_2": torch.ones(batch, 4, dtype=torch.long),
    }


VIDEO = {**HUNYUAN, "num_single_layers": 3, "pooled_projection_dim": 16, "guidance_embeds": False}
hunyuan_video = maker(HunyuanVideoTransformer3DModel, VIDEO)


def hunyuan_video_inputs(frames=5, rows=8, columns=9, text=15, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens, without padding."""
    x = given(
        batch, dtype, 500.0, hidden_states=(4, frames, 2 * rows, 2 * columns), encoder_hidden_states=(text, 16),
        pooled_projections=(16,),
    )  # fmt: skip
    return x | {"encoder_attention_mask": torch.ones(batch, text, dtype=torch.long)}


hunyuan_video15 = maker(
    HunyuanVideo15Transformer3DModel, HUNYUAN, num_layers=3, text_embed_2_dim=16, image_embed_dim=16
)


def hunyuan_video15_inputs(frames=5, rows=8, columns=9, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens, with an image and two prompts, without padding."""
    x = given(
        batch, dtype, 500.0, hidden_states=(4, frames, rows, columns), encoder_hidden_states=(text, 16),
        encoder_hidden_states_2=(4, 16), image_embeds=(3, 16),
    )  # fmt: skip
    return x | {
        "encoder_attention_mask": torch.ones(batch, text, dtype=torch.long),
        "encoder_attention_mask_2": torch.ones(batch, 4, dtype=torch.long),
    }


framepack = maker(
    HunyuanVideoFramepackTransformer3DModel, VIDEO, has_image_proj=True, image_proj_dim=16, has_clean_x_embedder=True
)


def framepack_inputs(frames, rows, columns, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, with 1, 2 and 4 earlier frames at falling resolution and an image."""
    x = hunyuan_video_inputs(frames, rows, columns, batch=batch, dtype=dtype) | {
        "image_embeds": torch.randn(batch, 3, 16, dtype=dtype),
        "indices_latents": torch.arange(7, 7 + frames),
    }
    for i, (name, earlier) in enumerate((("clean", 1), ("history_2x", 2), ("history_4x", 4))):
        x[f"latents_{name}"] = torch.randn(batch, 4, earlier, 2 * rows, 2 * columns, dtype=dtype)
        x[f"indices_latents_{name}"] = torch.arange(earlier) + (6, 4, 0)[i]
    return x


def earlier_tokens(grid):
    """Number of tokens of the earlier frames of `framepack_inputs`: at full size, a half and a quarter of it."""
    return sum(math.ceil(grid[1] / scale) * math.ceil(grid[2] / scale) for scale in (1, 2, 4))


flux2 = maker(
    Flux2Transformer2DModel, LIKE_FLUX, axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16,
    guidance_embeds=False,
)  # fmt: skip


def flux2_inputs(*grids, text=15, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; ids are (image, row, column, text token)."""
    x = inputs(*grids, text=text, batch=batch, dtype=dtype)
    del x["pooled_projections"]
    words = torch.cat([torch.zeros(text, 3), torch.arange(float(text))[:, None]], 1)
    pixels = torch.cat([x["img_ids"], torch.zeros(len(x["img_ids"]), 1)], 1)
    return x | {"img_ids": pixels.expand(batch, -1, -1), "txt_ids": words.expand(batch, -1, -1)}


flux3 = maker(
    Flux3Transformer2DModel, in_channels=4, cond_in_channels=4, num_layers=2, num_single_layers=3,
    joint_attention_dim=32, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4), **NARROW
)  # fmt: skip


def flux3_inputs(*grids, text=15, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; ids are (time, row, column, image or text token)."""
    places = [torch.cartesian_prod(*(torch.arange(n) / 2 for n in (1, *grid))) for grid in grids]
    places = [torch.cat([x, torch.full((len(x), 1), -float(i))], 1) for i, x in enumerate(places)]
    words = torch.cat([torch.zeros(text, 3), torch.arange(float(text))[:, None]], 1)
    x = given(batch, dtype, 0.5, hidden_states=(len(places[0]), 4), encoder_hidden_states=(text, 32))
    if len(places) > 1:
        references = torch.cat(places[1:])
        x |= {"image_cond_hidden_states": torch.randn(batch, len(references), 4, dtype=dtype)}
        x |= {"image_cond_ids": references}
    return x | {"img_ids": places[0], "txt_ids": words}


qwen = maker(
    QwenImageTransformer2DModel, in_channels=16, out_channels=4, num_layers=4, attention_head_dim=16,
    num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4)
)  # fmt: skip


def qwen_inputs(*grids, text=11, batch=1, dtype=torch.float64, dim=48):
    """Keyword arguments of one forward, with residuals of a ControlNet."""
    tokens = sum(rows * columns for rows, columns in grids)
    return given(batch, dtype, 0.5, hidden_states=(tokens, 16), encoder_hidden_states=(text, 16)) | {
        "img_shapes": [[(1, *grid) for grid in grids]] * batch,
        "controlnet_block_samples": [torch.randn(batch, tokens, dim, dtype=dtype)],
    }


def padded(model):
    """The model with learned padding that is not zero."""
    for token in (model.x_pad_token, model.cap_pad_token):
        torch.nn.init.normal_(token)
    return model


zimage = maker(
    ZImageTransformer2DModel, in_channels=4, dim=48, n_layers=3, n_refiner_layers=2, n_heads=3, n_kv_heads=3,
    cap_feat_dim=16, axes_dims=(8, 4, 4), axes_lens=(128, 64, 64), finish=padded,
)  # fmt: skip


def zimage_inputs(height=32, width=40, text=19, batch=1, dtype=torch.float64, dim=48):
    """Keyword arguments of one forward, with residuals of a ControlNet; lists have an entry for each sample."""
    tokens = sum(length + -length % 32 for length in (height * width // 4, text))
    return {
        "x": [torch.randn(4, 1, height, width, dtype=dtype) for _ in range(batch)],
        "t": torch.full((batch,), 0.5, dtype=dtype),
        "cap_feats": [torch.randn(text, 16, dtype=dtype) for _ in range(batch)],
        "controlnet_block_samples": {0: torch.randn(batch, tokens, dim, dtype=dtype)},
        "return_dict": False,
    }


# SDXL's layout: two sections with blocks of different resolution, and the middle
unet = maker(
    UNet2DConditionModel, sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=16,
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    attention_head_dim=(2, 4), transformer_layers_per_block=(1, 2), use_linear_projection=True,
    addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
)  # fmt: skip


def sd15(dtype=torch.float64, **config):
    """SD 1.5's layout: convolutions around the blocks, one block each, the middle behind a section without any."""
    usual = {
        "block_out_channels": (8, 16, 16), "attention_head_dim": 2, "transformer_layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "use_linear_projection": False, "addition_embed_type": None,
    }  # fmt: skip
    return unet(dtype, **usual | config)


def stable_diffusion():
    """Stable Diffusion 1.5's parts on FLUX's text encoder, in float32."""
    flux = pipeline()
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=flux.text_encoder.config.hidden_size, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = unet, scheduler, None, None
    pipe = StableDiffusionPipeline(vae, flux.text_encoder, flux.tokenizer, *parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def z_image_pipeline():
    """Z-Image's parts, in float32; it reads words w1 to w61."""
    tokenizer = tiny_lm.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %} {{ message.content }}{% endfor %}"
    text_encoder = tiny_lm.language_model("qwen3", dtype=torch.float32).model
    transformer = zimage(torch.float32, cap_feat_dim=text_encoder.config.hidden_size)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, shift_factor=0.0)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = ZImagePipeline(scheduler, vae.eval(), text_encoder, tokenizer, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unet_inputs(height=16, width=16, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    return {
        "sample": torch.randn(batch, 4, height, width, dtype=dtype),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": torch.randn(batch, 7, 16, dtype=dtype),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(batch, 32, dtype=dtype),
            "time_ids": torch.ones(batch, 6, dtype=dtype),
        },
        "return_dict": False,
    }


# With one block of two attentions
sd3 = maker(
    SD3Transformer2DModel, sample_size=32, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8,
    num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
    out_channels=4, pos_embed_max_size=96, dual_attention_layers=(0,), qk_norm="rms_norm"
)  # fmt: skip


def sd3_inputs(height=16, width=16, batch=1, dtype=torch.float64, dim=32):
    """Keyword arguments of one forward, with residuals of a ControlNet."""
    return given(
        batch, dtype, 500.0, hidden_states=(4, height, width), encoder_hidden_states=(9, 32), pooled_projections=(64,)
    ) | {"block_controlnet_hidden_states": [torch.randn(batch, height * width, dim, dtype=dtype)]}


WAN = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 16,
       "freq_dim": 16, "ffn_dim": 32, "num_layers": 3, "rope_max_seq_len": 64}  # fmt: skip


wan = maker(WanTransformer3DModel, WAN)


def wan_inputs(frames=5, rows=8, columns=9, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens."""
    return given(batch, dtype, 500.0, hidden_states=(4, frames, 2 * rows, 2 * columns), encoder_hidden_states=(7, 16))


# Its rotary embedding is cut wrongly for heads of 16 channels
chronoedit = maker(ChronoEditTransformer3DModel, WAN, attention_head_dim=24)
skyreels = maker(SkyReelsV2Transformer3DModel, WAN)
joyimage = maker(
    JoyImageEditTransformer3DModel, in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=3,
    rope_dim_list=[4, 4, 8]
)  # fmt: skip


def joyimage_inputs(rows=16, columns=20, items=1, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; the last item is the picture, others are references."""
    return given(
        batch, dtype, 500.0, hidden_states=(items, 4, 1, 2 * rows, 2 * columns), encoder_hidden_states=(text, 16)
    )


# Two blocks of the control and three of the video
vace = maker(WanVACETransformer3DModel, WAN, vace_layers=[0, 2], vace_in_channels=4)
# A face of 8 x 8 pixels is added after every other block
animate = maker(
    WanAnimateTransformer3DModel, WAN, in_channels=12, latent_channels=4, image_dim=None, motion_encoder_size=8,
    motion_encoder_channel_sizes={"4": 8, "8": 8}, motion_style_dim=8, motion_dim=4, motion_encoder_dim=8,
    face_encoder_hidden_dim=8, face_encoder_num_heads=2, inject_face_latents_blocks=2, num_layers=4
)  # fmt: skip


def animate_inputs(frames, rows, columns, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens."""
    x = wan_inputs(frames, rows, columns, batch, dtype)
    pose = x["hidden_states"][:, :, 1:]
    face = torch.randn(batch, 3, 4 * (frames - 1), 8, 8, dtype=dtype)
    latents = torch.cat([x["hidden_states"]] * 3, 1)
    return x | {"hidden_states": latents, "pose_hidden_states": pose, "face_pixel_values": face}


anyflow = maker(AnyFlowTransformer3DModel, WAN)


def anyflow_inputs(frames, rows, columns, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens."""
    x = wan_inputs(frames, rows, columns, batch, dtype)
    times = torch.full((batch, frames), 500.0)
    return x | {"hidden_states": x["hidden_states"].transpose(1, 2), "timestep": times, "r_timestep": times - 9}


helios = maker(
    HeliosTransformer3DModel, {name: value for name, value in WAN.items() if name != "rope_max_seq_len"},
    rope_dim=(4, 4, 8),
)  # fmt: skip


def helios_inputs(frames, rows, columns, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, with 1, 2 and 4 earlier frames at falling resolution."""
    places = {"indices_hidden_states": torch.arange(7, 7 + frames).expand(batch, -1)}
    x = wan_inputs(frames, rows, columns, batch, dtype) | places
    for i, (name, earlier) in enumerate((("short", 1), ("mid", 2), ("long", 4))):
        x[f"latents_history_{name}"] = torch.randn(batch, 4, earlier, 2 * rows, 2 * columns, dtype=dtype)
        x[f"indices_latents_history_{name}"] = (torch.arange(earlier) + (6, 4, 0)[i]).expand(batch, -1)
    return x


kandinsky5 = maker(
    Kandinsky5Transformer3DModel, in_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=16, out_visual_dim=4,
    model_dim=32, ff_dim=32, num_text_blocks=1, num_visual_blocks=3, axes_dims=(4, 4, 8), finish=not_zero
)  # fmt: skip


def kandinsky5_inputs(frames, rows, columns, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens."""
    x = given(
        batch, dtype, 500.0, hidden_states=(frames, 2 * rows, 2 * columns, 4), encoder_hidden_states=(7, 16),
        pooled_projections=(16,),
    )  # fmt: skip
    return x | {"visual_rope_pos": tuple(map(torch.arange, (frames, rows, columns))), "text_rope_pos": torch.arange(7)}


ernie = maker(
    ErnieImageTransformer2DModel, hidden_size=32, num_attention_heads=2, num_layers=3, ffn_hidden_size=32,
    in_channels=4, out_channels=4, text_in_dim=16, rope_axes_dim=(4, 4, 8), finish=not_zero
)  # fmt: skip


def ernie_inputs(rows=16, columns=20, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    return given(batch, dtype, 500.0, hidden_states=(4, rows, columns), text_bth=(text, 16)) | {
        "text_lens": torch.full((batch,), text)
    }


glm = maker(
    GlmImageTransformer2DModel, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16,
    num_attention_heads=2, text_embed_dim=16, time_embed_dim=16, condition_dim=8,
    prior_vq_quantizer_codebook_size=8
)  # fmt: skip


def glm_inputs(rows=16, columns=20, text=11, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, for a grid of tokens."""
    return given(batch, dtype, 500.0, hidden_states=(4, 2 * rows, 2 * columns), encoder_hidden_states=(text, 16)) | {
        "prior_token_id": torch.randint(8, (batch, rows * columns)),
        "prior_token_drop": torch.zeros(batch, rows * columns, dtype=torch.bool),
        "target_size": torch.full((batch, 2), 64.0, dtype=dtype),
        "crop_coords": torch.zeros(batch, 2, dtype=dtype),
    }


# Without the mask of padded pixels, for which diffusers needs torchvision
cosmos = maker(
    CosmosTransformer3DModel, in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=18,
    num_layers=3, text_embed_dim=16, adaln_lora_dim=8, max_size=(16, 64, 64), concat_padding_mask=False,
    extra_pos_embed_type=None
)  # fmt: skip


LTX = {"in_channels": 4, "out_channels": 4, "num_layers": 3, "cross_attention_dim": 32, "caption_channels": 16,
       **NARROW}  # fmt: skip
make_ltx = maker(LTXVideoTransformer3DModel, LTX)
make_ltx2 = maker(
    LTX2VideoTransformer3DModel, LTX, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
    audio_attention_head_dim=8, audio_cross_attention_dim=16,
)  # fmt: skip


def as_wide(make):
    """A function that builds a model whose cross-attention is as wide as its self-attention."""

    def wide(dtype=torch.float64, **config):
        sides = NARROW | config
        width = sides["num_attention_heads"] * sides["attention_head_dim"]
        return make(dtype, cross_attention_dim=width, **config)

    return wide


ltx, ltx2 = as_wide(make_ltx), as_wide(make_ltx2)


def ltx_inputs(frames=5, rows=8, columns=9, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; some of the text is padding."""
    return given(batch, dtype, 500.0, hidden_states=(frames * rows * columns, 4), encoder_hidden_states=(7, 16)) | {
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).expand(batch, -1),
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


def ltx2_inputs(*grid, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward, with the audio."""
    x = ltx_inputs(*grid, batch=batch, dtype=dtype)
    audio = {"audio_" + name: x[name] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    return x | audio | {"audio_hidden_states": torch.randn(batch, 6, 4, dtype=dtype), "audio_num_frames": 6}


# Heads of 16 channels, 12 of which rotate
minimax_h3 = maker(
    MiniMaxH3Transformer3DModel, num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=3,
    num_refiner_layers=1, ffn_dim=32, in_channels=4, audio_in_channels=4, text_dim=16, freq_dim=16,
    time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2
)  # fmt: skip


def minimax_h3_inputs(frames=5, rows=8, columns=9, keyframes=(), batch=1, dtype=torch.float64):
    """Keyword arguments of one forward: 9 rows of text, three with the tag of the video, and 3 of stereo audio."""
    tags = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1])
    layout = minimax_h3_steps.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, frames, 2 * rows, 2 * columns, 3, (1, 2, 2), 2, 2, 0, keyframes
    )
    return minimax_h3_packed(*layout, batch, dtype)


def minimax_h3_packed(places, tags, video, audio, text, keyframes, references, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward with this packed sequence."""
    times = minimax_h3_steps.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, keyframes, references, len(text), 0.5, 0.4, 0.999, 1.0
    )
    x = given(
        batch, dtype, 0.5, hidden_states=(len(video), 16), audio_hidden_states=(len(audio), 4),
        encoder_hidden_states=(len(text), 16),
    )  # fmt: skip
    rows = {"video_indices": video, "audio_indices": audio, "text_indices": text}
    return x | rows | {"timestep": times[0], "timestep_indices": times[1], "token_tags": tags, "position_ids": places}


DIT = {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
       "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 8}  # fmt: skip


pixart = maker(
    PixArtTransformer2DModel, DIT, use_additional_conditions=False, cross_attention_dim=16, caption_channels=8
)  # fmt: skip


def pixart_inputs(height=32, width=32, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; some of the text is padding."""
    return given(batch, dtype, 5.0, hidden_states=(4, height, width), encoder_hidden_states=(7, 8)) | {
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).expand(batch, -1),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


dit = maker(DiTTransformer2DModel, DIT)


def dit_inputs(height=32, width=32, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    return given(batch, dtype, 5.0, hidden_states=(4, height, width)) | {
        "class_labels": torch.ones(batch, dtype=torch.long)
    }


def without_zeros(model):
    """The model with random weights alone."""
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


pixel = maker(
    PixelDiT, num_layers=2, num_attention_heads=2, attention_head_dim=32, attention="dense", finish=without_zeros
)


class Family(NamedTuple):
    """A model class with what tests of all families need to know.

    Attributes:
        make: Builds the model from a dtype and configuration.
        inputs: Keyword arguments of one forward pass of a model, for a token grid and a batch size.
        grids: Token grids; the first is the usual one.
        wide: Configuration with attention heads of 32 channels, as LLSA needs them.
        numbers: Number of the block of each self-attention layer, in running order, or None for a layer of no block;
            None if each block has one.
        text_first: Whether the text precedes the image in the attention sequence, or how much of it does for a grid.
        method: A method that works at the first grid.
        checkpoints: Whether gradient checkpointing works in diffusers 0.42.
        keys: Number of text tokens that have keys alone.
    """

    make: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    grids: tuple[tuple[int, ...], ...]
    wide: dict[str, Any] = {}  # noqa: RUF012
    numbers: tuple[int | None, ...] | None = None
    text_first: bool | Callable[[tuple[int, ...]], int] = True
    method: Method = HilbertA(tiles=4, align=1)
    checkpoints: bool = True
    keys: int = 0


def _flux_inputs(model, grid, batch=1):
    x = inputs(grid, batch=batch, dtype=model.dtype)
    if isinstance(model, ChromaTransformer2DModel):
        del x["pooled_projections"]
    return x | residuals(x, 1, 3, dim=model.inner_dim)


def _latent_inputs(make, patch=1):
    """Inputs of a model whose tokens are patches of a latent."""
    return lambda model, grid, batch=1: make(patch * grid[0], patch * grid[1], batch=batch, dtype=model.dtype)


def _sd3_inputs(model, grid, batch=1):
    return sd3_inputs(*grid, batch=batch, dtype=model.dtype, dim=model.inner_dim)


def _zimage_inputs(model, grid, batch=1):
    return zimage_inputs(2 * grid[0], 2 * grid[1], batch=batch, dtype=model.dtype, dim=model.dim)


def _grid_inputs(make):
    """Inputs of a model that are made from the grid."""
    return lambda model, grid, batch=1: make(grid, batch=batch, dtype=model.dtype)


def _pixel_inputs(model, grid, batch=1):
    return given(batch, model.dtype, 700.0, hidden_states=(3, *grid))


def _video_inputs(make):
    """Inputs of a model that are made from the grid of a video; an image is a video of one frame."""
    return lambda model, grid, batch=1: make(*(1, *grid)[-3:], batch=batch, dtype=model.dtype)


def _wan_inputs(model, grid, batch=1):
    x = _video_inputs(wan_inputs)(model, grid, batch)
    if isinstance(model, WanVACETransformer3DModel):
        x["control_hidden_states"] = torch.randn_like(x["hidden_states"])
    return x


def _animate_inputs(model, grid, batch=1):
    """The video has two frames at least, the first one being the reference."""
    grid = grid if len(grid) == 3 else (2, grid[0] // 2, grid[1])
    return animate_inputs(*grid, batch=batch, dtype=model.dtype)


_WIDE = {"attention_head_dim": 32, "num_attention_heads": 2}
_ROPE = {"axes_dims_rope": (8, 12, 12), **_WIDE}
_SIZES = ((16, 20), (9, 31))
_VIDEOS = ((5, 8, 9), (3, 12, 10))
import tiny_others  # noqa: E402, needs what is above

_LATENTS = ((19, 27), (16, 24))
FAMILIES = {
    "flux": Family(flux, _flux_inputs, _SIZES, _ROPE),
    "flux2": Family(flux2, _grid_inputs(flux2_inputs), _SIZES, {"axes_dims_rope": (8, 8, 8, 8), **_WIDE}),
    "flux3": Family(flux3, _grid_inputs(flux3_inputs), _SIZES, {"axes_dims_rope": (8, 8, 8, 8), **_WIDE},
                    (None, None, 0, 1, 2, 3, 4)),
    "chroma": Family(chroma, _flux_inputs, _SIZES, _ROPE),
    "longcat": Family(longcat, _grid_inputs(longcat_inputs), _SIZES, _ROPE),
    "bria": Family(bria, _grid_inputs(longcat_inputs), _SIZES, _ROPE),
    "fibo": Family(fibo, _grid_inputs(fibo_inputs), _SIZES, _ROPE),
    "ovis": Family(ovis, _grid_inputs(longcat_inputs), _SIZES, _ROPE),
    "krea2": Family(krea2, _grid_inputs(krea2_inputs), _SIZES, _ROPE, (None, None, 0, 1, 2, 3)),
    "hunyuan_image": Family(hunyuan_image, _latent_inputs(hunyuan_image_inputs), _SIZES,
                            {"rope_axes_dim": (16, 16), **_WIDE}, (None, 0, 1, 2, 3, 4), text_first=False,
                            checkpoints=False),
    "qwen": Family(qwen, lambda model, grid, batch=1: qwen_inputs(grid, batch=batch, dtype=model.dtype,
                   dim=model.inner_dim), _SIZES, _ROPE),
    "zimage": Family(zimage, _zimage_inputs, _SIZES, {"dim": 64, "n_heads": 2, "n_kv_heads": 2,
                     "axes_dims": (8, 12, 12)}, (0, 1, None, None, 2, 3, 4), text_first=False),
    "sd3": Family(sd3, _sd3_inputs, _SIZES, {"caption_projection_dim": 64, **_WIDE}, (0, 0, 1, 2), text_first=False),
    "pixart": Family(pixart, _latent_inputs(pixart_inputs, 2), _SIZES, {"cross_attention_dim": 64, **_WIDE}),
    "dit": Family(dit, _latent_inputs(dit_inputs, 2), ((16, 16), (20, 20)), _WIDE),
    "wan": Family(wan, _wan_inputs, _VIDEOS, _WIDE),
    "chronoedit": Family(chronoedit, _wan_inputs, _VIDEOS, _WIDE),
    "skyreels": Family(skyreels, _wan_inputs, _VIDEOS, _WIDE),
    "hunyuan_video": Family(hunyuan_video, _video_inputs(hunyuan_video_inputs), _VIDEOS,
                            {"rope_axes_dim": (8, 12, 12), **_WIDE}, (None, 0, 1, 2, 3, 4), text_first=False),
    "hunyuan_video15": Family(hunyuan_video15, _video_inputs(hunyuan_video15_inputs), _VIDEOS,
                              {"rope_axes_dim": (8, 12, 12), **_WIDE}, (None, 0, 1, 2), text_first=False),
    "minimax_h3": Family(minimax_h3, _video_inputs(minimax_h3_inputs), _VIDEOS, {"rope_freq_dim": 4, **_WIDE},
                         (None, 0, 1, 2)),
    "sdxl": Family(unet, _latent_inputs(unet_inputs), _LATENTS, {"block_out_channels": (32, 64),
                   "attention_head_dim": (1, 2)}),
    "sd15": Family(sd15, _latent_inputs(unet_inputs), _LATENTS, {"block_out_channels": (32, 32, 32),
                   "attention_head_dim": 1}),
    "animate": Family(animate, _animate_inputs, _VIDEOS, _WIDE),
    "kandinsky5": Family(kandinsky5, _video_inputs(kandinsky5_inputs), _VIDEOS,
                         {"model_dim": 64, "axes_dims": (8, 12, 12)}, (None, 0, 1, 2)),
    "glm": Family(glm, _latent_inputs(glm_inputs), _SIZES, _WIDE),
    "cosmos": Family(cosmos, _video_inputs(wan_inputs), _VIDEOS, _WIDE),
    "joyimage": Family(joyimage, _latent_inputs(joyimage_inputs), _SIZES,
                       {"hidden_size": 64, "rope_dim_list": [8, 12, 12]}, text_first=False),
    **tiny_others.MERGING,
}  # fmt: skip
SPARSE = FAMILIES | {
    "vace": Family(vace, _wan_inputs, _VIDEOS, _WIDE),
    "anyflow": Family(anyflow, _video_inputs(anyflow_inputs), _VIDEOS, _WIDE),
    "helios": Family(helios, _video_inputs(helios_inputs), ((5, 8, 10), (3, 12, 10)),
                     {"rope_dim": (8, 12, 12), **_WIDE}, text_first=earlier_tokens),
    "ernie": Family(ernie, _latent_inputs(ernie_inputs), _SIZES, {"hidden_size": 64, "rope_axes_dim": (8, 12, 12)},
                    text_first=False),
    "hunyuan_framepack": Family(framepack, _video_inputs(framepack_inputs), ((5, 8, 10), (3, 12, 10)),
                                {"rope_axes_dim": (8, 12, 12), **_WIDE}, (None, 0, 1, 2, 3, 4),
                                text_first=earlier_tokens),
    "ltx": Family(ltx, _video_inputs(ltx_inputs), _VIDEOS, _WIDE),
    "ltx2": Family(ltx2, _video_inputs(ltx2_inputs), _VIDEOS, _WIDE, (0, None, 1, None, 2, None)),
    **tiny_others.OTHERS,
}  # fmt: skip
"""Families that sparse attention works in; tokens merge in the `FAMILIES` among them."""
BY_MODULES = "vace", "anyflow", "fibo2", "dreamlite"
"""Families of `SPARSE` whose tokens merge with granularity="module" alone."""
LLSA_ONLY = {"pixel": Family(pixel, _pixel_inputs, _SIZES, method=LLSA(top_k=1, min_tokens=0))}


def built(name, grid=None, batch=1, **config):
    """A model of a family, and keyword arguments of one forward pass."""
    family = (SPARSE | LLSA_ONLY)[name]
    model = family.make(**config)
    return model, family.inputs(model, grid or family.grids[0], batch)


MASKED = ("chroma", "fibo", "ernie", "qwen", "krea2", "hunyuan_image", "hunyuan_video", "hunyuan_video15",
          "hunyuan_framepack", "prx", "nucleus", "joyimage_plus")  # fmt: skip
"""Families that take a mask of a padded text; Z-Image pads its prompts itself."""


def text_name(name):
    """Name of the argument with the text."""
    return "text_bth" if name == "ernie" else "encoder_hidden_states"


def masked(name, mask):
    """The argument of a model of a family that hides text, from a mask of the text [batch, tokens]."""
    whole = torch.cat([mask, torch.ones(len(mask), 320, dtype=torch.bool)], 1)  # with the image
    if name == "chroma":
        return {"attention_mask": whole}
    if name == "fibo":
        return {"joint_attention_kwargs": {"attention_mask": whole[:, None, None]}}
    if name == "ernie":
        return {"text_lens": mask.sum(1)}
    if name == "prx":
        return {"attention_mask": mask}
    names = "qwen", "nucleus", "joyimage_plus"
    return {"encoder_hidden_states_mask" if name in names else "encoder_attention_mask": mask}


def ragged(name, batch=3, **config):
    """A model of a family, and keyword arguments of one forward pass of prompts of different length."""
    model, x = built(name, batch=batch, **config)
    x = {key: value for key, value in x.items() if "controlnet" not in key}
    if name == "zimage":
        return model, x | {"cap_feats": [torch.randn(n, 16, dtype=model.dtype) for n in (40, 19, 70)[:batch]]}
    text = x[text_name(name)].shape[1]
    real = torch.tensor([7, text, 2])[:batch, None]
    return model, x | masked(name, torch.arange(text) < real)


def exact(model):
    """Context in which models that compute parts of a block in float32 keep float64; for one thread at a time."""
    if isinstance(model, Kandinsky5Transformer3DModel):  # it has parts in bfloat16
        one = {"bfloat16": model.dtype, "float32": model.dtype, "outer": lambda *x: torch.outer(*x).to(model.dtype)}
        return mock.patch.object(transformer_kandinsky, "torch", SimpleNamespace(**vars(torch) | one))
    names = (
        "Wan", "LTX", "ChronoEdit", "SkyReels", "AnyFlow", "Helios", "Ernie", "AuraFlow", "Lumina2", "HiDream", "PRX",
        "HunyuanDiT", "Nucleus", "QwenImage21", "Kandinsky6", "JoyImage", "CogView4", "Ideogram4", "GlmImage",
        "Cosmos",
    )  # fmt: skip
    if not type(model).__name__.startswith(names):
        return nullcontext()
    return mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))


def call(model, x, **more):
    """The output of a forward pass, which may change the dictionaries that it is given."""
    x = {name: dict(value) if isinstance(value, dict) else value for name, value in x.items()}
    with exact(model):
        out = model(**x, **more)
    out = out if isinstance(out, torch.Tensor) else out[0]
    return torch.stack(out) if isinstance(out, list) else out


def at(x, left):
    """The inputs of a later step, with that fraction of what is left of the run."""
    name = next(name for name in ("t", "timestep", "timesteps") if name in x)
    return x | {name: 1 - (1 - x[name]) * left if rises(x) else x[name] * left}


def rises(x):
    """Whether the timestep rises during a run, as in Z-Image, Ideogram 4, Lumina 2 and MiniMax-H3."""
    is_lumina2 = "encoder_attention_mask" in x and x["hidden_states"].ndim == 4 and x["timestep"][0] <= 1
    return "t" in x or "indicator" in x or "timestep_indices" in x or is_lumina2


def sample(x, i):
    """The inputs of one sample of a batch."""
    if isinstance(x, dict):
        parts = {name: sample(value, i) for name, value in x.items() if not _shared(name, value, x)}
        return x | parts | {name: x[name][i : i + 1] for name in ("x", "cap_feats") if name in x}
    if isinstance(x, list):
        return [sample(value, i) for value in x]
    return x[i : i + 1] if isinstance(x, torch.Tensor) and x.ndim else x


_SHARED = ("img_ids", "txt_ids", "image_cond_ids", "text_rope_pos", "visual_rope_pos", "token_tags",
           "timestep_indices", "video_indices", "audio_indices", "text_indices")  # fmt: skip


def _shared(name, value, x):
    """Whether all samples of a batch share an argument: positions do."""
    of_all = {"position_ids": 2} | ({name: 1} if str(name).startswith("indices") else {})  # with so many dimensions
    packed = "timestep_indices" in x and name in ("timestep", "position_ids")
    return name in _SHARED or packed or getattr(value, "ndim", None) == of_all.get(name, -1)


def fingerprint(model):
    """Everything that could be left behind on a module or its processor."""

    def of(module):
        processor = module.__dict__.get("processor", module._modules.get("processor"))
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        return sorted(module.__dict__), *hooks, id(processor), sorted(getattr(processor, "__dict__", ()))

    return {name: of(module) for name, module in model.named_modules()}
