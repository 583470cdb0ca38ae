# pyright: basic, reportPrivateImportUsage=false
"""The key/value cache of one document, in memory and on disk."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.transformers.fingerprint import checksum, digest
from foveate.transformers.model import LanguageModel
from foveate.utils.files import write_whole

__all__ = ["ChunkCache", "check_fingerprint", "open_chunk"]


@dataclass(frozen=True, eq=False)
class ChunkCache:
    """Keys and values of one document that was encoded alone, after the prefix.

    Attributes:
        ids: Token ids of the document, without the prefix.
        keys: Keys before rotation, prefix first, in the model's dtype and on its device.
        values: Values, prefix first.
        fingerprint: Hashes of model, tokenizer, dtype, prefix and file format, by name.
    """

    ids: Int[Tensor, "tokens"]
    keys: Float[Tensor, "layers groups rows dim"]
    values: Float[Tensor, "layers groups rows dim"]
    fingerprint: dict[str, str]

    def __repr__(self) -> str:
        return f"ChunkCache({len(self.ids)} tokens, {self.nbytes / 2**20:.1f} MiB)"

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, which appears only when it is complete."""
        tensors = {name: getattr(self, name).contiguous() for name in ("ids", "keys", "values")}
        sums = {name: str(checksum(tensors[name])) for name in ("keys", "values")}
        write_whole(Path(path), save(tensors, {**self.fingerprint, **sums, "text": digest(self.ids.tolist())}))

    @classmethod
    def load(cls, path: str | Path, encoder: LanguageModel, text: str | None = None) -> "ChunkCache":
        """Read a file that `save` has written, onto the encoder's device.

        Args:
            path: File to read.
            encoder: Encoder with the model, tokenizer and prefix that the chunk was computed with.
            text: Expected document. None accepts any.

        Raises:
            ValueError: If the file is damaged or no chunk, or if model, tokenizer, dtype, prefix or text differ.
            OSError: If the file cannot be read.
        """
        with open_chunk(path, encoder) as file:
            header = file.metadata()
            # copies: memory-mapped pages would crash the process if the file were truncated later
            ids, keys, values = (file.get_tensor(name).clone() for name in ("ids", "keys", "values"))
        config, rows = encoder.model.config, len(encoder.prefix) + ids.numel()
        shape = config.num_hidden_layers, config.num_key_value_heads, rows, encoder.head_dim
        fits = ids.ndim == 1 and all(part.shape == shape and part.dtype == encoder.dtype for part in (keys, values))
        same = [digest(ids.tolist()), str(checksum(keys)), str(checksum(values))]
        if not fits or same != [header.get(name) for name in ("text", "keys", "values")]:
            raise ValueError(f"{path} holds other tensors than its header says: encode the document again")
        if text is not None and encoder.tokens(text).tolist() != ids.tolist():
            raise ValueError(f"{path} was made from another text: encode the document again")
        return cls(ids, keys, values, dict(encoder.fingerprint))


@contextmanager
def open_chunk(path: str | Path, encoder: LanguageModel) -> Generator[Any]:
    """Open the file of a cached chunk and check its fingerprint, before any tensor is read.

    Raises:
        ValueError: If the file is truncated or no chunk, or if model, tokenizer, dtype or prefix differ.
    """
    try:
        with safe_open(path, "pt", device=str(encoder.device)) as file:
            check_fingerprint(f"{path}", file.metadata() or {}, encoder.fingerprint)
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete chunk file ({error}): encode the document again") from None


def check_fingerprint(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
    """Raise an error if a chunk was computed with something else.

    Raises:
        ValueError: With the names of the entries that differ.
    """
    if names := [name for name in expected if found.get(name) != expected[name]]:
        raise ValueError(f"{what} was made with another {', '.join(names)}: encode the document again")
