# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""The architecture of the built-in model with random weights."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from foveate.apps.demo.text import TEXT_TOKENS, clip_tokenizer, t5_tokenizer

__all__ = ["untrained_pipeline"]


def untrained_pipeline(
    *,
    layers: int = 2,
    single_layers: int = 6,
    heads: int = 5,
    rope: tuple[int, int, int] = (8, 28, 28),
    text_dim: int = 256,
    text_layers: int = 2,
    seed: int = 0,
) -> FluxPipeline:
    """A `FluxPipeline` with random weights: 17 M parameters by default; a token is 4 px, so 256 px are 64 x 64 tokens.

    Args:
        layers: Number of double-stream blocks.
        single_layers: Number of single-stream blocks.
        heads: Number of attention heads.
        rope: RoPE channels of (image, row, column); their sum is the head dimension.
        text_dim: Width of both text encoders.
        text_layers: Layers of both text encoders.
        seed: The same seed gives the same weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=layers,
            num_single_layers=single_layers,
            attention_head_dim=sum(rope),
            num_attention_heads=heads,
            joint_attention_dim=text_dim,
            pooled_projection_dim=text_dim,
            axes_dims_rope=rope,
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(32, 64),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=256,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            shift_factor=0.0,
            scaling_factor=1.0,
        )
        words, pairs = t5_tokenizer(), clip_tokenizer()
        start, end = map(pairs.convert_tokens_to_ids, ("<|startoftext|>", "<|endoftext|>"))
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(pairs),
                hidden_size=text_dim,
                intermediate_size=2 * text_dim,
                num_attention_heads=text_dim // 32,
                num_hidden_layers=text_layers,
                projection_dim=text_dim,
                max_position_embeddings=TEXT_TOKENS,
                bos_token_id=start,
                eos_token_id=end,
                pad_token_id=end,
            )
        )
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(words),
                d_model=text_dim,
                d_kv=32,
                d_ff=2 * text_dim,
                num_layers=text_layers,
                num_heads=text_dim // 32,
                dropout_rate=0.0,
            )
        )
    # more noise for larger images, whose neighbouring pixels are more redundant
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=1024, max_image_seq_len=16384, base_shift=0.5, max_shift=2.0
    )
    pipeline = FluxPipeline(
        scheduler=scheduler,
        vae=vae.eval(),
        transformer=transformer.eval(),
        text_encoder=clip.eval(),
        tokenizer=pairs,
        text_encoder_2=t5.eval(),
        tokenizer_2=words,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
