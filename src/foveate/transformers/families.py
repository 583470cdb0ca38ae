"""Which models can be served: rotary positions that do not depend on the length, and full causal attention."""

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

__all__ = ["check_model"]

FAMILIES = {
    LlamaConfig: LlamaForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    MistralConfig: MistralForCausalLM,
}
ROTATIONS = "default", "linear", "llama3", "yarn"
ATTENTION = "sdpa", "eager"


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose cached chunks could not be composed.

    Raises:
        ValueError: With what stands in the way, and the remedy where there is one.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if type(config) not in FAMILIES:
        why = (
            "other models have not been tested" if rope else "it has no rotary positions that keys could be turned by"
        )
        raise ValueError(
            f"cached chunks work with Llama, Qwen2, Qwen3 and Mistral, not {type(config).__name__}: {why}"
        )
    if not isinstance(model, FAMILIES[type(config)]):
        raise ValueError(
            f"give the {FAMILIES[type(config)].__name__} itself, not {type(model).__name__}; of a PeftModel that is "
            "what get_base_model() returns, its adapters included"
        )
    if rope["rope_type"] not in ROTATIONS:
        raise ValueError(
            f"rope_type {rope['rope_type']!r} turns keys by angles that change with the total length: use one of "
            f"{', '.join(ROTATIONS)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} has not been tested: it must be 1")
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention" if window else ""]):
        raise ValueError(
            f"a sliding window of {window} tokens hides most of a long context: for contexts that fit into the window "
            "load the model with sliding_window=None (Qwen: use_sliding_window=False), which changes nothing there"
        )
    if config._attn_implementation not in ATTENTION:
        raise ValueError(
            f"{config._attn_implementation!r} attention takes no mask of selected rows: load the model with "
            'attn_implementation="sdpa"'
        )
    if len(devices := {weight.device for weight in model.parameters()}) > 1 or "meta" in {d.type for d in devices}:
        raise ValueError(f"the model must lie on one device, not on {', '.join(sorted(map(str, devices)))}")
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes what is cached: call model.eval()")
