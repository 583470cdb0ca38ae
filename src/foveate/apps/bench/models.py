# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false
"""The models that `foveate bench step` times, and the inputs of one forward pass."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import psutil
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames, video_latent_num_frames
from torch import nn

from foveate.apps.demo.untrained import untrained_pipeline
from foveate.methods import LLSA, ComposedMethod, HilbertA, Method, ToDo, ToFu, ToMA, ToMeSD
from foveate.methods.base import Grid
from foveate.pipelines.request import Request, load_pipeline, pixels_per_token
from foveate.pipelines.steps import Call, record_step
from foveate.utils.device import dtype_name

__all__ = ["MODELS", "Model", "find_model", "random_model"]

TWO_ENCODERS: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
ONE_ENCODER: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer"))


class Model(NamedTuple):
    """A model to time.

    Attributes:
        build: Makes the pipeline on a device, in a dtype; of a model with `layers`, with so many blocks, or as many as
            fit into memory if None.
        inputs: Returns the arguments of one forward pass, given the pipeline, the grid of tokens and the number of
            text tokens.
        text: Default number of text tokens; None if the pipeline decides.
        methods: Methods that are timed by default.
        weights: Description of the weights, for the report.
        layers: Number of blocks of the published model, of which fewer may be built; None where all are.
        grid: Returns the grid of tokens for (height, width) in pixels and a number of frames, where the pipeline
            itself does not tell it.
    """

    build: Callable[..., Any]
    inputs: Callable[[Any, Grid, int | None], Call]
    text: int | None
    methods: tuple[Method | ComposedMethod, ...]
    weights: str = "random weights"
    layers: int | None = None
    grid: Callable[[tuple[int, int], int | None], Grid] | None = None


def find_model(name: str) -> Model:
    """The model of that name in `MODELS`, or the pipeline of that folder or hub id.

    Raises:
        ValueError: If the name is neither.
    """
    if name in MODELS:
        return MODELS[name]
    if "/" not in name and not name.startswith("."):
        raise ValueError(
            f"unknown model {name!r}: choose one of {', '.join(MODELS)}, "
            f"or give a pipeline as a hub id or a folder such as ./{name}"
        )
    return Model(partial(_load, name), _recorded_inputs, None, (), "its own weights")


def random_model(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> Any:
    """Create the model of `make` with its weights on `device` and in `dtype`.

    Raises:
        ValueError: If the weights do not fit into the free memory of the device.
    """
    needed, free = weight_bytes(make, dtype), free_memory(device)
    if needed > free:
        raise ValueError(
            f"the weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, but {device} has "
            f"{free / 1e9:.1f} GB of free memory: choose a smaller model or another --device or --dtype"
        )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make().eval()
    finally:
        torch.set_default_dtype(default)


def weight_bytes(make: Callable[[], nn.Module], dtype: torch.dtype) -> int:
    """Bytes of the weights of the model that `make` builds, without building it."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in make().parameters()) * dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Free memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _built_in(device: torch.device, dtype: torch.dtype) -> FluxPipeline:
    return untrained_pipeline().to(device, dtype)


def _random(pipeline: Any, transformer: Any, device: torch.device, dtype: torch.dtype, **config: Any) -> Any:
    """A pipeline without encoders; the weights of its transformer are random."""
    model = random_model(partial(transformer, **config), device, dtype)
    encoders = TWO_ENCODERS if pipeline is FluxPipeline else ONE_ENCODER
    return pipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=model, **encoders)


def _sdxl(device: torch.device, dtype: torch.dtype) -> StableDiffusionXLPipeline:
    unet = random_model(
        lambda: UNet2DConditionModel(
            sample_size=128,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        ),
        device,
        dtype,
    )
    return StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(), unet=unet, add_watermarker=False, **TWO_ENCODERS
    )


def _minimax_h3(device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Denoising blocks of MiniMax-H3. The transformer has as many layers as fit beside `ACTIVATIONS` bytes."""
    if layers is None:
        of_none, of_one = (weight_bytes(partial(MiniMaxH3Transformer3DModel, num_layers=n), dtype) for n in (0, 1))
        fitting = (free_memory(device) - ACTIVATIONS - of_none) // (of_one - of_none)
        layers = max(1, min(H3_LAYERS, fitting))
    pipe = MiniMaxH3CoreDenoiseStep().init_pipeline()
    pipe.update_components(
        transformer=random_model(partial(MiniMaxH3Transformer3DModel, num_layers=layers), device, dtype),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )
    pipe.scheduler.set_timesteps(1000)
    return pipe


def _load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    return load_pipeline(name, str(device), dtype_name(dtype))


def _joint_inputs(transformer: Any, grid: Grid, text: int | None) -> dict[str, Any]:
    """Common arguments of FLUX, FLUX.2 and Qwen-Image."""
    config = transformer.config
    like: dict[str, Any] = {"device": transformer.device, "dtype": transformer.dtype}
    return {
        "hidden_states": torch.randn(1, prod(grid), config.in_channels, **like),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, **like),
        "timestep": torch.full((1,), 0.5, **like),
        "guidance": torch.full((1,), 3.5, **like) if config.guidance_embeds else None,
        "return_dict": False,
    }


def _flux_inputs(pipe: FluxPipeline, grid: Grid, text: int | None) -> Call:
    like: dict[str, Any] = {"device": pipe.transformer.device, "dtype": pipe.transformer.dtype}
    ids = {
        "pooled_projections": torch.randn(1, pipe.transformer.config.pooled_projection_dim, **like),
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, *grid, **like),
        "txt_ids": torch.zeros(text, 3, **like),
    }
    return Call((), _joint_inputs(pipe.transformer, grid, text) | ids)


def _flux2_inputs(pipe: Flux2Pipeline, grid: Grid, text: int | None) -> Call:
    zero, device = torch.arange(1), pipe.transformer.device
    ids = {
        "img_ids": torch.cartesian_prod(zero, *map(torch.arange, grid), zero)[None].to(device),
        "txt_ids": torch.cartesian_prod(zero, zero, zero, torch.arange(text))[None].to(device),
    }
    return Call((), _joint_inputs(pipe.transformer, grid, text) | ids)


def _qwen_inputs(pipe: QwenImagePipeline, grid: Grid, text: int | None) -> Call:
    return Call((), _joint_inputs(pipe.transformer, grid, text) | {"img_shapes": [[(1, *grid)]]})


def _wan_inputs(pipe: WanPipeline, grid: Grid, text: int | None) -> Call:
    config: Any = pipe.transformer.config
    like: dict[str, Any] = {"device": pipe.transformer.device, "dtype": pipe.transformer.dtype}
    sides = (side * patch for side, patch in zip((1, *grid)[-3:], config.patch_size, strict=True))
    kwargs = {
        "hidden_states": torch.randn(1, config.in_channels, *sides, **like),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim, **like),
        "timestep": torch.tensor([500.0], device=pipe.transformer.device),
        "return_dict": False,
    }
    return Call((), kwargs)


def _minimax_h3_grid(size: tuple[int, int], frames: int | None) -> Grid:
    if frames is None or frames % 17 != 5:
        raise ValueError(f"{frames} frames do not fit: MiniMax-H3 takes 17 n + 5 frames, for example --frames 124")
    if any(side < 32 or side % 32 for side in size):
        raise ValueError(
            f"{size[1]} x {size[0]} px do not fit: MiniMax-H3 takes multiples of 32, for example 1280x736"
        )
    return video_latent_num_frames(frames, 17, 5), size[0] // 32, size[1] // 32


def _minimax_h3_inputs(pipe: Any, grid: Grid, text: int | None) -> Call:
    """Inputs of a text to video, with stereo audio as long as the video: 17 frames take 5 frames of latents."""
    model, (frames, rows, columns) = pipe.transformer, (1, *grid)[-3:]
    config, audio_rows = model.config, audio_latent_num_frames(17 * (frames - 2) // 5 + 5)
    places, tags, *indices, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text), frames, 2 * rows, 2 * columns, max(1, audio_rows), (1, 2, 2), 2, 2, 0
    )
    times = MiniMaxH3SetTimestepsStep.build_row_timesteps(*indices[:2], 0, 0, text, 0.5, 0.7, 0.999, 1.0)
    video, audio, _ = (len(rows) for rows in indices)
    like: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
    sequence = dict(zip(("video_indices", "audio_indices", "text_indices"), indices, strict=True))
    sequence |= {"token_tags": tags, "position_ids": places, "timestep": times[0], "timestep_indices": times[1]}
    kwargs = {
        "hidden_states": torch.randn(1, video, config.in_channels * prod(config.patch_size), **like),
        "audio_hidden_states": torch.randn(1, audio, config.audio_in_channels, **like),
        "encoder_hidden_states": torch.randn(1, text, config.text_dim, **like),
        **{name: value.to(model.device) for name, value in sequence.items()},
        "return_dict": False,
    }
    return Call((), kwargs)


def _z_image_inputs(pipe: ZImagePipeline, grid: Grid, text: int | None) -> Call:
    config: Any = pipe.transformer.config
    like: dict[str, Any] = {"device": pipe.transformer.device, "dtype": pipe.transformer.dtype}
    kwargs = {
        "x": [torch.randn(config.in_channels, 1, *(2 * side for side in grid), **like)],
        "t": torch.full((1,), 0.5, **like),
        "cap_feats": [torch.randn(text, config.cap_feat_dim, **like)],
        "return_dict": False,
    }
    return Call((), kwargs)


def _sdxl_inputs(pipe: StableDiffusionXLPipeline, grid: Grid, text: int | None) -> Call:
    """Inputs of two samples, for classifier-free guidance; `grid` is for the largest feature maps with attention."""
    config: Any = pipe.unet.config
    like: dict[str, Any] = {"device": pipe.unet.device, "dtype": pipe.unet.dtype}
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    kwargs = {
        "sample": torch.randn(2, config.in_channels, *(2 * side for side in grid), **like),
        "timestep": torch.tensor(500.0, device=pipe.unet.device),
        "encoder_hidden_states": torch.randn(2, text, config.cross_attention_dim, **like),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, pooled, **like),
            "time_ids": torch.zeros(2, 6, **like),
        },
        "return_dict": False,
    }
    return Call((), kwargs)


def _recorded_inputs(pipe: Any, grid: Grid, text: int | None) -> Call:
    """Inputs of the pipeline's first step, for an image with this grid of tokens."""
    if text is not None:
        raise ValueError("the pipeline decides how many text tokens there are: leave --text-tokens out")
    pixels, (*frames, rows, columns) = pixels_per_token(pipe), grid
    request = Request("a lighthouse at dusk", (pixels * rows, pixels * columns), 1000, None, 0)
    if frames:
        request = request._replace(frames=(frames[0] - 1) * pipe.vae_scale_factor_temporal + 1)
    return record_step(pipe, request)


KLEIN = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
FLUX = (
    *(HilbertA(tiles=1), HilbertA(tiles=4), HilbertA(tiles=16)),
    *(ToMA(keep=0.5), ToMA(keep=0.25), ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))),
)
VIDEO = HilbertA(tiles=4), HilbertA(tiles=16), ToMA(keep=0.5), ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))
H3_LAYERS, ACTIVATIONS = 50, 10_000_000_000  # bytes
H3_SPARSE = HilbertA(tiles=4), HilbertA(tiles=16), LLSA(top_k=16)
H3 = *H3_SPARSE, ToMA(keep=0.5), *(ComposedMethod((sparse, ToMA(keep=0.5))) for sparse in H3_SPARSE)
SDXL = *(ToMA(keep=keep) for keep in (0.75, 0.5, 0.25)), ToMeSD(keep=0.5), ToFu(keep=0.5), ToDo()

MODELS = {
    "built-in": Model(_built_in, _flux_inputs, 512, FLUX),
    "flux-dev": Model(
        partial(_random, FluxPipeline, FluxTransformer2DModel, guidance_embeds=True), _flux_inputs, 512, FLUX
    ),
    "flux2-dev": Model(partial(_random, Flux2Pipeline, Flux2Transformer2DModel), _flux2_inputs, 512, FLUX),
    "flux2-klein": Model(partial(_random, Flux2Pipeline, Flux2Transformer2DModel, **KLEIN), _flux2_inputs, 512, FLUX),
    "qwen-image": Model(partial(_random, QwenImagePipeline, QwenImageTransformer2DModel), _qwen_inputs, 512, FLUX),
    "z-image": Model(partial(_random, ZImagePipeline, ZImageTransformer2DModel), _z_image_inputs, 512, FLUX),
    "wan-14b": Model(partial(_random, WanPipeline, WanTransformer3DModel), _wan_inputs, 512, VIDEO),
    "minimax-h3": Model(_minimax_h3, _minimax_h3_inputs, 512, H3, layers=H3_LAYERS, grid=_minimax_h3_grid),
    "sdxl": Model(_sdxl, _sdxl_inputs, 77, SDXL),
}
"""Models by name: the built-in model (17 M parameters), FLUX.1-dev (12 B), FLUX.2-dev (32 B), FLUX.2-klein (4 B),
Qwen-Image (20 B), Z-Image (6 B), Wan 2.1 (14 B), MiniMax-H3 (33 B) and SDXL (2.6 B)."""
