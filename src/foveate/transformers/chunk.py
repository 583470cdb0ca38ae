# pyright: basic, reportPrivateImportUsage=false
"""Key/value cache of one document, in memory and on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.transformers.fingerprint import checksum, digest
from foveate.transformers.model import Document, LanguageModel
from foveate.transformers.tokens import Tokens
from foveate.utils.files import write_whole

__all__ = ["ChunkCache", "check_fingerprint", "differences"]

TENSORS = "keys", "values"
IMAGES = "positions", "image", "features"
"""Further tensors of a chunk that holds images; see `Tokens`."""


@dataclass(frozen=True, eq=False, repr=False)
class ChunkCache:
    """Keys and values of one document, encoded alone after the prefix.

    Attributes:
        ids: Token ids of the document, without the prefix.
        stored: "keys", before rotation, and "values", prefix first, [layers, groups, rows, dim], on the model's
            device: in the model's dtype, or 8-bit integers with float32 "keys_scale" and "values_scale" per channel.
        fingerprint: Hashes of model, tokenizer, dtype, prefix and file format, by name.
        images: Hash of each image.
        holder: Rank of the process that keeps `stored`, which is empty in the others. None: every process has it.
    """

    ids: Int[Tensor, "tokens"]
    stored: dict[str, Tensor]
    fingerprint: dict[str, str]
    images: tuple[str, ...] = ()
    holder: int | None = None

    @classmethod
    def of(
        cls, tokens: Tokens, keys: Tensor, values: Tensor, images: tuple[str, ...], fingerprint: dict[str, str]
    ) -> "ChunkCache":
        """The chunk of these tokens, at positions from 0."""
        stored = {"keys": keys, "values": values}
        if tokens.features is not None:
            stored |= {name: getattr(tokens, name).contiguous() for name in IMAGES}
        return cls(tokens.ids, stored, fingerprint, images)

    @property
    def tokens(self) -> Tokens:
        """Tokens at positions from 0, on one axis if there are no images."""
        if not self.images:
            return Tokens.text(self.ids)
        return Tokens(self.ids, *(self.stored[name] for name in IMAGES))

    def __repr__(self) -> str:
        return f"ChunkCache({len(self.ids)} tokens, {self.nbytes / 2**20:.1f} MiB)"

    @property
    def keys(self) -> Float[Tensor, "layers groups rows dim"]:
        """Keys before rotation, prefix first, in the model's dtype."""
        return self._exact("keys")

    @property
    def values(self) -> Float[Tensor, "layers groups rows dim"]:
        """Values, prefix first, in the model's dtype."""
        return self._exact("values")

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def check_here(self) -> None:
        """Raise a ValueError if another process keeps the keys and values."""
        if not self.stored:
            raise ValueError(f"process {self.holder} keeps this chunk: use it there")

    def quantized(self) -> "ChunkCache":
        """The chunk with keys and values as integers from -127 to 127, with a scale for each channel of a head."""
        stored = {name: tensor for name, tensor in self.stored.items() if name in IMAGES}
        for name in TENSORS:
            exact = getattr(self, name)
            scale = exact.abs().amax(2, keepdim=True).float().clamp(min=1e-30) / 127
            stored |= {name: (exact / scale).round().to(torch.int8), f"{name}_scale": scale}
        return ChunkCache(self.ids, stored, self.fingerprint, self.images)

    def _exact(self, name: str) -> Tensor:
        if (scale := self.stored.get(f"{name}_scale")) is None:
            return self.stored[name]
        return (self.stored[name] * scale).to(getattr(torch, self.fingerprint["dtype"].removeprefix("torch.")))

    def to_bytes(self) -> bytes:
        """Content of a safetensors file, with a hash of each tensor in its header."""
        self.check_here()
        tensors = {name: tensor.contiguous() for name, tensor in self.stored.items()}
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        header = {**self.fingerprint, **sums, "text": digest(self.ids.tolist()), "images": ",".join(self.images)}
        return save(tensors | {"ids": self.ids.contiguous()}, header)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file atomically."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, encoder: LanguageModel, text: Document | None = None) -> "ChunkCache":
        """Read a file written by `save`, onto the encoder's device. On a CPU the file is mapped into memory.

        Do not overwrite the file in place while it is mapped; replacing or removing it does no harm.

        Args:
            path: File to read.
            encoder: Encoder with the model, tokenizer and prefix of the chunk.
            text: Expected document, as for `ChunkEncoder.encode`. None accepts any.

        Raises:
            ValueError: If the file is damaged or not a chunk, or if model, tokenizer, dtype, prefix or text differ.
            OSError: If the file cannot be read.
        """
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete chunk file ({error}): encode the document again") from None
        check_fingerprint(f"{path}", header, encoder.fingerprint)
        ids = tensors.pop("ids", torch.empty(0))
        same = [digest(ids.tolist()), *map(checksum, tensors.values())]
        if not _fits(tensors, ids, encoder) or same != [header.get(name) for name in ("text", *tensors)]:
            raise ValueError(f"the tensors in {path} do not match its header: encode the document again")
        images = tuple(filter(None, header.get("images", "").split(",")))
        if text is not None:
            expected = encoder.read(text)
            if expected.ids.tolist() != ids.tolist():
                raise ValueError(f"{path} was made from another text: encode the document again")
            if expected.images != images:
                raise ValueError(f"{path} was made from another image: encode the document again")
        stored = {name: tensor.to(encoder.device) for name, tensor in tensors.items()}
        return cls(ids.to(encoder.device), stored, dict(encoder.fingerprint), images)


def check_fingerprint(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
    """Check that a chunk's fingerprint is the expected one.

    Raises:
        ValueError: If not, with the names of the entries that differ.
    """
    if names := differences(found, expected):
        raise ValueError(f"{what} was made with another {', '.join(names)}: encode the document again")


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Names of the expected entries that differ."""
    return [name for name in expected if found.get(name) != expected[name]]


def _fits(tensors: dict[str, Tensor], ids: Tensor, encoder: LanguageModel) -> bool:
    """Whether these are the tensors of a chunk of this model."""
    layers, _, *states = encoder.cache_shape(1, len(encoder.prefix) + ids.numel())
    shape = [layers, *states]
    exact = dict.fromkeys(TENSORS, (shape, encoder.dtype))
    scales = {f"{name}_scale": ([*shape[:2], 1, shape[3]], torch.float32) for name in TENSORS}
    quantized = dict.fromkeys(TENSORS, (shape, torch.int8)) | scales
    found = {name: (list(t.shape), t.dtype) for name, t in tensors.items() if name not in IMAGES}
    seen = [name for name in IMAGES if name in tensors]
    return ids.ndim == 1 and found in (exact, quantized) and seen in ([], [*IMAGES])
