"""What a cached chunk depends on besides its text. It guards against mistakes, not against malice."""

import json
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["checksum", "digest", "fingerprint"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 2**24
PASSING = "_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"  # say nothing of the numbers


def fingerprint(model: PreTrainedModel, tokenizer: Any, prefix: tuple[int, ...]) -> dict[str, str]:
    """What must be equal for a cached chunk to be of use, by name.

    Args:
        model: All of its weights and buffers count, its config, and which adapters are active, how strongly.
        tokenizer: Its rules and its special tokens.
        prefix: Token ids in front of every chunk.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in PASSING}
    tensors = model.state_dict() | dict(model.named_buffers())  # with those that no checkpoint holds: the frequencies
    weights = [(name, str(tensor.dtype), checksum(tensor)) for name, tensor in sorted(tensors.items())]
    adapters = [
        (name, module.active_adapters, module.disable_adapters, getattr(module, "scaling", None))  # type: ignore[union-attr]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), list)
    ]
    return {
        "format": "foveate-chunk-1",
        "config": digest(config),
        "weights": digest(weights),
        "adapters": digest(adapters),
        "tokenizer": digest([_rules(tokenizer), tokenizer.special_tokens_map]),
        "dtype": str(model.dtype),
        "prefix": digest(prefix),
    }


def digest(value: Any) -> str:
    """A short hash of anything that JSON can hold."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def checksum(tensor: Tensor) -> int:
    """A sum of all bits, weighted by position: whole numbers, so it is the same on every device and in every order."""
    bits = tensor.detach().contiguous().flatten().view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].long()
        total += (piece * (2 * torch.arange(start, start + len(piece), device=bits.device) + 1)).sum()
    return int(total)


def _rules(tokenizer: Any) -> Any:
    """The tokenizer in its serialised form, without the padding and truncation that its last call left in it."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return tokenizer.get_vocab()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
