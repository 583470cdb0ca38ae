# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""A small Flux pipeline with random weights: every part is a real diffusers class, its pictures are noise.

It shows speed and plumbing on any machine without a download; it cannot show quality.
"""

import json
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["untrained_pipeline"]

TEXT_DIM = 32


def untrained_pipeline(
    *, layers: int = 2, single_layers: int = 6, heads: int = 5, rope: tuple[int, int, int] = (8, 28, 28), seed: int = 0
) -> FluxPipeline:
    """A `FluxPipeline` with random weights: 17 M parameters by default, 4 px a token, so 256 px are 64 x 64 tokens.

    Args:
        layers: Double-stream blocks.
        single_layers: Single-stream blocks.
        heads: Attention heads.
        rope: RoPE channels of (image, row, column); their sum is the size of a head.
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
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            axes_dims_rope=rope,
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            latent_channels=4,
            norm_num_groups=4,
            sample_size=128,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            shift_factor=0.0,
            scaling_factor=1.0,
        )
        clip, clip_tokenizer = _clip()
        t5, t5_tokenizer = _t5()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        text_encoder=clip.eval(),
        tokenizer=clip_tokenizer,
        text_encoder_2=t5.eval(),
        tokenizer_2=t5_tokenizer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _clip() -> tuple[CLIPTextModel, CLIPTokenizer]:
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        merges.write_text("#version: 0.2\n")
        tokenizer = CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_attention_heads=4,
        num_hidden_layers=1,
        projection_dim=TEXT_DIM,
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
        pad_token_id=len(tokens) - 1,
    )
    return CLIPTextModel(config), tokenizer


def _t5() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    tokens = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127))]
    letters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    config = T5Config(vocab_size=len(tokens), d_model=TEXT_DIM, d_kv=8, d_ff=2 * TEXT_DIM, num_layers=1, num_heads=4)
    return T5EncoderModel(config), tokenizer
