# pyright: basic, reportPrivateImportUsage=false
"""A language model and its tokenizer from a folder or the hub, and what its chats look like."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from foveate.utils.device import choose_device, choose_dtype

__all__ = ["frame", "load", "unknown_words"]

SAID = "<<what the user says>>"


def load(model: str | Path, device: str = "auto", dtype: str = "auto") -> tuple[PreTrainedModel, Any]:
    """A causal language model, in evaluation mode, and its tokenizer.

    Args:
        model: Folder or hub id.
        device: See `foveate.utils.device.choose_device`.
        dtype: A name, or "auto": the model's own on a GPU, float32 on a CPU.

    Raises:
        ValueError: If there is no such model, or device or dtype are unknown.
    """
    where = choose_device(device)
    precision = "auto" if dtype == "auto" and where.type != "cpu" else choose_dtype(dtype, where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=precision)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error
    return loaded.to(where).eval(), tokenizer


def frame(tokenizer: Any, chat: bool | None = None) -> tuple[str, str]:
    """What stands in front of documents and behind a question: a chat in which the model answers next, or plain text.

    Args:
        tokenizer: Its chat template makes the chat; without one text begins with its start-of-text token.
        chat: Whether to make a chat. None makes one if there is a template.

    Raises:
        ValueError: If there is no chat template, or one that changes what users say.
    """
    if chat is False or (chat is None and not tokenizer.chat_template):
        return tokenizer.bos_token or "", ""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: leave --chat out, or name a chat model")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": SAID}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    if text.count(SAID) != 1:
        raise ValueError("the chat template changes what users say: use --no-chat, and write the frame into --prefix")
    before, behind = text.split(SAID)
    return before, behind


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """The words that a fast tokenizer reads as its unknown token, each once."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return []
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = zip(read.input_ids, read.offset_mapping, strict=True)
    return list(dict.fromkeys(text[start:stop] for token, (start, stop) in places if token == tokenizer.unk_token_id))
