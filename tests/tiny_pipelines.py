"""Pipelines of today's models with tiny random weights, from prompt to picture or video, in float32 and offline."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    JoyImageEditPipeline,
    JoyImageEditTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.models import WordLevel
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from foveate.apps.demo.text import clip_tokenizer, t5_tokenizer

WIDTH = 16  # of the text encoders
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
LANGUAGE = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8}  # fmt: skip
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 1, "num_heads": 2}
SIMPLE_CHAT = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
CHAT_IN_PARTS = "{% for turn in messages %}{% for part in turn.content %}{{ part.text }}{% endfor %}{% endfor %}"


def tokenizer(chat=SIMPLE_CHAT, tokens=512):
    """A tokenizer that can format a conversation."""
    words = t5_tokenizer()
    words.chat_template, words.model_max_length = chat, tokens
    return words


def built(cls, *parts, **named):
    pipe = cls(*parts, **named)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe


def _flux2_parts(text_layers):
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, joint_attention_dim=text_layers * WIDTH,
        axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16, guidance_embeds=False, **HEADS,
    )  # fmt: skip
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    return {"scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "vae": vae,
            "transformer": transformer}  # fmt: skip


def flux2():
    """FLUX.2's pipeline; its text encoder reads three of 30 layers of Mistral 3."""
    torch.manual_seed(0)
    words = tokenizer(CHAT_IN_PARTS)
    text = {"model_type": "mistral", "vocab_size": len(words), "num_hidden_layers": 30, **LANGUAGE}
    vision = {"model_type": "pixtral", "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}  # fmt: skip
    encoder = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))
    return built(Flux2Pipeline, text_encoder=encoder, tokenizer=words, **_flux2_parts(3))


def klein(kind=Flux2KleinPipeline):
    """FLUX.2 klein's pipeline before distillation, with guidance."""
    torch.manual_seed(0)
    words = tokenizer()
    encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_hidden_layers=27, **LANGUAGE))
    return built(kind, text_encoder=encoder, tokenizer=words, **_flux2_parts(3))


def klein_kv():
    """FLUX.2 klein's pipeline that caches keys and values of references."""
    return klein(Flux2KleinKVPipeline)


def _qwen_encoder(words):
    """Qwen 2.5 VL."""
    text = {"vocab_size": len(words), "num_hidden_layers": 1, **LANGUAGE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def qwen():
    torch.manual_seed(0)
    words = tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=(8, 4, 4), **HEADS
    )
    statistics = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
                                 **statistics)  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return built(QwenImagePipeline, scheduler, vae, _qwen_encoder(words), words, transformer)


def _vae(halvings):
    """A VAE of so many halvings of a picture's sides."""
    blocks = halvings + 1
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks, up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks, norm_num_groups=4, latent_channels=4, shift_factor=0.0,
    )  # fmt: skip


def chroma():
    torch.manual_seed(0)
    words = tokenizer(tokens=64)
    transformer = ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1, **HEADS,
    )  # fmt: skip
    encoder = T5EncoderModel(T5Config(vocab_size=len(words), **T5))
    return built(ChromaPipeline, FlowMatchEulerDiscreteScheduler(), _vae(1), encoder, words, transformer)


def bria():
    """Bria 3.2's pipeline, whose VAE halves sides three times as it takes for granted."""
    torch.manual_seed(0)
    words = tokenizer(tokens=64)
    transformer = BriaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8), **HEADS
    )
    encoder = T5EncoderModel(T5Config(vocab_size=len(words), **T5))
    return built(BriaPipeline, transformer, FlowMatchEulerDiscreteScheduler(), _vae(1), encoder, words)


WAN = {"out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 64,
       **HEADS}  # fmt: skip


def _wan_vae():
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )


def _wan_parts():
    words = tokenizer(tokens=64)
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(words), **T5))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return {"tokenizer": words, "text_encoder": encoder, "vae": _wan_vae(), "scheduler": scheduler}


def wan(experts=1, image=False):
    """Wan's pipeline: with two experts that of Wan 2.2, with `image` that from image to video of Wan 2.2."""
    torch.manual_seed(0)
    models = [WanTransformer3DModel(in_channels=4 + (4 + 4) * image, **WAN) for _ in range(experts)]
    return built(
        WanImageToVideoPipeline if image else WanPipeline,
        transformer=models[0],
        transformer_2=models[1] if experts == 2 else None,
        boundary_ratio=0.5 if experts == 2 else None,
        **_wan_parts(),
    )


def skyreels():
    torch.manual_seed(0)
    transformer = SkyReelsV2Transformer3DModel(in_channels=4, **WAN)
    return built(SkyReelsV2Pipeline, transformer=transformer, **_wan_parts())


def chronoedit():
    """ChronoEdit's pipeline. Its rotary embedding is cut wrongly for heads of 16 channels."""
    torch.manual_seed(0)
    transformer = ChronoEditTransformer3DModel(
        in_channels=4 + 4 + 4, image_dim=WIDTH, **WAN | {"attention_head_dim": 24}
    )
    vision = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    return built(
        ChronoEditPipeline,
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**vision)),
        image_processor=CLIPImageProcessorPil(size=28, crop_size=28),
        transformer=transformer,
        **_wan_parts(),
    )


class WordsOnly:
    """A processor of text and images whose text encoder sees the text alone: the real one needs torchvision."""

    def __init__(self, words):
        self.words = words

    def __call__(self, text, images, **options):
        return self.words(text, **options)


def joyimage():
    """JoyImage Edit's pipeline."""
    torch.manual_seed(0)
    words = tokenizer()
    transformer = JoyImageEditTransformer3DModel(
        in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=WIDTH, num_layers=2, rope_dim_list=[4, 4, 8]
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=4.0)
    return built(JoyImageEditPipeline, scheduler, _wan_vae(), _qwen_encoder(words), words, transformer,
                 WordsOnly(words))  # fmt: skip


def hunyuan_video():
    """HunyuanVideo's pipeline; unknown words are one token each, so that its long system prompt fits."""
    torch.manual_seed(0)
    words, clip = tokenizer(), clip_tokenizer()
    words.backend_tokenizer.model = WordLevel(words.get_vocab(), unk_token=words.unk_token)
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, num_single_layers=2, num_refiner_layers=1, text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH, rope_axes_dim=(4, 4, 8), **HEADS,
    )  # fmt: skip
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    clip_text = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 1,
                 "projection_dim": WIDTH}  # fmt: skip
    return built(
        HunyuanVideoPipeline,
        text_encoder=LlamaModel(LlamaConfig(vocab_size=len(words), num_hidden_layers=3, **LANGUAGE)),
        tokenizer=words,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(CLIPTextConfig(vocab_size=len(clip), **clip_text)),
        tokenizer_2=clip,
    )


def ltx():
    torch.manual_seed(0)
    words = tokenizer(tokens=64)
    transformer = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=32, caption_channels=WIDTH, **HEADS
    )
    widths, layers, scaling = (8, 8, 8, 8), (1, 1, 1, 1, 1), (True, True, False, False)
    vae = AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=widths, decoder_block_out_channels=widths, layers_per_block=layers,
        decoder_layers_per_block=layers, spatio_temporal_scaling=scaling, decoder_spatio_temporal_scaling=scaling,
    )  # fmt: skip
    encoder = T5EncoderModel(T5Config(vocab_size=len(words), **T5))
    return built(LTXPipeline, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae, encoder, words,
                 transformer)  # fmt: skip
