"""Tiny causal language models with random weights, and a tokenizer of whole words."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast

from foveate.transformers import ChunkEncoder, model
from foveate.transformers.attention import CACHE

FAMILIES = {config.model_type.removesuffix("_text"): config for config in model.FAMILIES}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4,
                 "original_max_position_embeddings": 96},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip
PAIRS = [
    *((family, rope) for family in ("llama", "qwen2", "qwen3", "mistral") for rope in [*ROPES][:4]),
    ("phi3", "default"),
    ("phi3", "longrope"),
    ("phi3", "partial"),
    ("llama", "dynamic"),
    *((family, "default") for family in ("olmo2", "olmo3", "smollm3", "granite", "cohere", "cohere2")),
    *((family, "partial") for family in ("glm", "glm4")),
    *((family, rope) for family in ("mixtral", "qwen3_moe", "gemma3", "gpt_oss") for rope in ("default", "yarn")),
]
WORDS = 64
PROMPTS = ["w20", "w21 w22 w23 w24", "w25 w26"]
DOCUMENTS = [
    "w1 w2 w3 w4 w5 w6 w7",
    "w8 w9 w1 w10 w11",
    "w12 w3 w13 w14 w15 w16 w2 w17 w18",
    "w19 w5 w12 w7 w1 w30",
]


def language_model(family="llama", rope="default", dtype=torch.float64, seed=0, **config):
    """Large random weights, so that attention is far from even. Qwen3 has heads wider than hidden / heads."""
    torch.manual_seed(seed)
    usual = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
             "rope_parameters": {"rope_theta": 100.0, **ROPES[rope]}}  # fmt: skip
    own = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None},
           "phi3": {"sliding_window": None, "original_max_position_embeddings": 96},
           "mixtral": EXPERTS | {"head_dim": 8}, "qwen3_moe": EXPERTS | {"head_dim": 16},
           "gpt_oss": EXPERTS | SLIDING | {"head_dim": 8, "num_attention_heads": 4},
           "olmo3": SLIDING, "cohere2": SLIDING, "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
           "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
           "cohere": {"use_qk_norm": True}, "glm": {"head_dim": 16}, "glm4": {"head_dim": 16},
           "gemma3": SLIDING | {"head_dim": 16, "query_pre_attn_scalar": 16, "rope_parameters": {
               "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
               "full_attention": usual["rope_parameters"]}}}  # fmt: skip
    usual |= own.get(family, {})
    usual |= config
    ours = FAMILIES[family](**usual)
    lm = MODEL_FOR_CAUSAL_LM_MAPPING[type(ours)](ours).to(dtype).eval()
    lm.generation_config.eos_token_id = None
    if usual.get("num_experts"):
        lm.set_experts_implementation("eager")  # the only one in float64
    return lm


def tokenizer(bos="<s>"):
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(1, WORDS - 2))])}
    rules = Tokenizer(WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=rules, bos_token=bos, eos_token="</s>", unk_token="<unk>")


def encoder(*arguments, prefix="<s> w60", **config):
    return ChunkEncoder(language_model(*arguments, **config), tokenizer(), prefix)


def full_logits(encoder, context, prompt):
    """Logits of the prompt after the token ids of the context, in one forward pass."""
    ids = torch.cat([context.ids, encoder.tokens(prompt)])[None]
    with torch.no_grad():
        return encoder.model(input_ids=ids).logits[0, len(context) :]


def cached_logits(encoder, context, prompt):
    """Logits of the prompt after the cache of the context."""
    with torch.no_grad():
        return encoder.model(input_ids=encoder.tokens(prompt)[None], **{CACHE: context.cache()}).logits[0]
