"""The cached keys and values of one document, in memory and on disk."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.transformers.fingerprint import digest
from foveate.utils.files import write_whole

if TYPE_CHECKING:
    from foveate.transformers.encoder import ChunkEncoder

__all__ = ["ChunkCache"]


@dataclass(frozen=True, eq=False)
class ChunkCache:
    """Keys and values of one document, computed alone behind the prefix, to be composed with others in any order.

    Attributes:
        ids: Tokens of the document, without the prefix.
        keys: Not rotated yet; prefix first. In the model's dtype, on its device.
        values: Prefix first.
        fingerprint: Of the model, its tokenizer, dtype and prefix, and the format of files.
    """

    ids: Int[Tensor, "tokens"]
    keys: Float[Tensor, "layers groups rows dim"]
    values: Float[Tensor, "layers groups rows dim"]
    fingerprint: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, which appears when it is complete."""
        tensors = {name: getattr(self, name).contiguous() for name in ("ids", "keys", "values")}
        write_whole(Path(path), save(tensors, {**self.fingerprint, "text": digest(self.ids.tolist())}))

    @classmethod
    def load(cls, path: str | Path, encoder: "ChunkEncoder", text: str | None = None) -> "ChunkCache":
        """Read it, onto the encoder's device.

        Args:
            path: What `save` wrote.
            encoder: Of the model and tokenizer that it was computed with.
            text: The document, to make sure that the file is of this version of it. None takes any.

        Raises:
            ValueError: If the file is damaged or of another kind, or model, tokenizer, dtype, prefix or text differ.
            OSError: If it cannot be read.
        """
        with opened(path, encoder) as file:
            text_digest = file.metadata().get("text")
            # copies: the file's own pages would crash the process if somebody cut it short later
            ids, keys, values = (file.get_tensor(name).clone() for name in ("ids", "keys", "values"))
        shape = encoder.shape(len(ids) if ids.ndim == 1 else 0)
        fits = ids.ndim == 1 and all(part.shape == shape and part.dtype == encoder.dtype for part in (keys, values))
        if not fits or digest(ids.tolist()) != text_digest or not (keys.isfinite() & values.isfinite()).all():
            raise ValueError(f"{path} holds other tensors than it says: encode the document again")
        if text is not None and encoder.tokens(text).tolist() != ids.tolist():
            raise ValueError(f"{path} was made of another text: encode the document again")
        return cls(ids, keys, values, dict(encoder.fingerprint))


@contextmanager
def opened(path: str | Path, encoder: "ChunkEncoder") -> Generator[Any]:
    """The file of a cached chunk, whose tensors have not been read yet, and what it says of itself is right.

    Raises:
        ValueError: If the file is cut short or of another kind, or model, tokenizer, dtype or prefix differ.
    """
    try:
        with safe_open(path, "pt", device=str(encoder.device)) as file:
            differ(f"{path}", file.metadata() or {}, encoder.fingerprint)
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole file of a cached chunk ({error}): encode the document again") from None


def differ(what: str, theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Refuse a chunk that was computed with something else.

    Raises:
        ValueError: Names what differs.
    """
    if names := [name for name in ours if theirs.get(name) != ours[name]]:
        raise ValueError(f"{what} was made with another {', '.join(names)}: encode the document again")
