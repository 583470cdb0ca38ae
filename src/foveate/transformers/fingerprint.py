"""Hashes of everything that a cached chunk depends on. They guard against mistakes, not against forgery."""

import json
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

__all__ = ["checksum", "digest", "fingerprint"]

# config entries with no effect on the cache
IGNORED = {
    "_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "pad_token_id", "bos_token_id",
    "eos_token_id", "sep_token_id", "attention_dropout", "hidden_dropout", "initializer_range", "id2label", "label2id",
    "num_labels", "problem_type", "return_dict", "output_hidden_states", "output_attentions", "tie_word_embeddings",
    "max_position_embeddings",
}  # fmt: skip


def fingerprint(model: Any, tokenizer: Any, prefix: tuple[int, ...]) -> dict[str, str]:
    """Hashes that must match for a cached chunk to be usable, by name.

    Args:
        model: Language model: its weights, buffers, config, and active adapters with their scaling.
        tokenizer: Tokenizer: its rules.
        prefix: Token ids before every chunk.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in IGNORED}
    tensors = model.state_dict() | dict(model.named_buffers())  # rotary frequencies are in no state dict
    weights = [(name, str(tensor.dtype), checksum(tensor)) for name, tensor in sorted(tensors.items())]
    adapters = [
        (name, module.active_adapters, module.disable_adapters, getattr(module, "scaling", None))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), list)
    ]
    return {
        "format": "foveate-chunk-4",
        "config": digest(config),
        "weights": digest(weights),
        "adapters": digest(adapters),
        "tokenizer": digest(_rules(tokenizer)),
        "dtype": str(model.dtype),
        "prefix": digest(prefix),
    }


def digest(value: Any) -> str:
    """Short hash of a value that JSON can represent."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def checksum(tensor: Tensor) -> str:
    """Hash of a tensor's bytes; of a quantised tensor, of the tensors that it consists of."""
    if flatten := getattr(tensor, "__tensor_flatten__", None):
        names, _ = flatten()
        return digest([(name, checksum(getattr(tensor, name))) for name in names])
    return xxh3_128(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _rules(tokenizer: Any) -> Any:
    """Serialised tokenizer, without the padding and truncation of its last call."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return tokenizer.get_vocab()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
