"""Tiny vision-language models with random weights, with their families' own processors."""

import torch
from PIL import Image
from tiny_lm import WORDS, tokenizer
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    Gemma3Config,
    Gemma3Processor,
    Idefics3Config,
    Idefics3Processor,
    LlavaOnevisionConfig,
    LlavaOnevisionProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    SmolVLMConfig,
    SmolVLMProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from foveate.transformers import ChunkEncoder

FAMILIES = "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3", "llava_onevision"
SPECIAL = [
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]  # fmt: skip
PAD, VIDEO, SOFT, IMAGE, CLIP = (WORDS + SPECIAL.index(SPECIAL[i]) for i in (0, 1, 6, 7, 8))
TEXT = {"vocab_size": WORDS + len(SPECIAL), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 100.0}
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
          "patch_size": 4, "image_size": 16, "initializer_range": 0.3, "vision_use_head": False}  # fmt: skip


def picture(seed=0, width=16, height=24):
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def _config(family):
    qwen = {"depth": 3, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "out_hidden_size": 32}  # fmt: skip
    ids = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": PAD + 2,
           "vision_end_token_id": PAD + 3}  # fmt: skip
    if family == "qwen2_5_vl":
        rope = {**ROPE, "mrope_section": [1, 1, 2]}
        qwen = qwen | {"hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=qwen, **ids)
    if family == "qwen3_vl":
        rope = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        seen = {"hidden_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text = TEXT | {"head_dim": 16, "rope_parameters": rope}
        return Qwen3VLConfig(text_config=text, vision_config=qwen | seen, **ids)
    if family == "gemma3":
        sliding = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16,
                   "query_pre_attn_scalar": 16, "rope_parameters": {
                       "sliding_attention": ROPE | {"rope_theta": 20.0}, "full_attention": ROPE}}  # fmt: skip
        return Gemma3Config(
            text_config=TEXT | sliding, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=SOFT,
            image_token_id=SOFT, boi_token_index=SOFT - 2, eoi_token_index=SOFT - 1,
        )  # fmt: skip
    llama = {"model_type": "llama", "rope_parameters": ROPE}
    if family in ("smolvlm", "idefics3"):
        kind = SmolVLMConfig if family == "smolvlm" else Idefics3Config
        return kind(text_config=TEXT | llama, vision_config=SIGLIP, image_token_id=IMAGE, scale_factor=2)
    return LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "rope_parameters": ROPE},
        vision_config=SIGLIP | {"model_type": "siglip_vision_model"}, image_token_index=IMAGE, video_token_index=CLIP,
        image_grid_pinpoints=[[16, 32], [32, 16]], vision_feature_layer=-1,
    )  # fmt: skip


def model(family, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    config = _config(family)
    made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).to(dtype).eval()
    made.generation_config.eos_token_id = None
    return made


def processor(family):
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    if family in ("qwen2_5_vl", "qwen3_vl"):
        images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 2048}
        )
        kind = Qwen2_5_VLProcessor if family == "qwen2_5_vl" else Qwen3VLProcessor
        template = (
            "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|>"
            "<|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
        )
        return _made(kind, images, words, video_processor=None, chat_template=template)
    square = {"height": 16, "width": 16}
    if family == "gemma3":
        words.image_token, words.boi_token, words.eoi_token = (
            "<image_soft_token>",
            "<start_of_image>",
            "<end_of_image>",
        )
        words.image_token_id, words.boi_token_id, words.eoi_token_id = SOFT, SOFT - 2, SOFT - 1
        return _made(Gemma3Processor, Gemma3ImageProcessorPil(size=square), words, image_seq_length=4)
    if family == "llava_onevision":
        images = LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=[[16, 32], [32, 16]])
        return _made(LlavaOnevisionProcessor, images, words, video_processor=None, num_image_tokens=16,
                     vision_feature_select_strategy="full", image_token="<image>")  # fmt: skip
    edge = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if family == "smolvlm":
        processing_smolvlm.num2words = str  # for videos only
        return _made(SmolVLMProcessor, SmolVLMImageProcessorPil(**edge), words, video_processor=None, image_seq_len=4)
    return _made(Idefics3Processor, Idefics3ImageProcessorPil(**edge), words, image_seq_len=4)


def _made(kind, images, words, **options):
    """A processor without a video processor, which would need torchvision."""
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *arguments: None})
    return lenient(images, words, **options)


def encoder(family, **options):
    return ChunkEncoder(model(family, **options), processor(family), "<s> w60")
