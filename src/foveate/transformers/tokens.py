"""Tokens of texts and images: what a language model computes rows of a cache from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Tokens"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a text that may hold images.

    A model with multi-axis positions (Qwen-VL) gives an image token the positions of its row and column, so that an
    image has fewer positions than tokens.

    Attributes:
        ids: Token ids; for the tokens of images, that of the placeholder.
        positions: Position of each token on each axis.
        image: Row of `features` of each token; -1 for text.
        features: What takes the place of the placeholders' embeddings (level 0), and what is added to the output of
            the first layers (levels 1 and up; "DeepStack" in Qwen3-VL). None without images.
    """

    ids: Int[Tensor, "tokens"]
    positions: Int[Tensor, "axes tokens"]
    image: Int[Tensor, "tokens"]
    features: Float[Tensor, "levels rows width"] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def text(cls, ids: Int[Tensor, "tokens"], axes: int = 1, start: int = 0) -> "Tokens":
        """Tokens of a text, at consecutive positions."""
        positions = torch.arange(start, start + len(ids), device=ids.device).expand(axes, -1)
        return cls(ids, positions, torch.full_like(ids, -1))

    @property
    def extent(self) -> int:
        """Number of positions, from the first token's to that of the text after the last token."""
        return len(self) if self.features is None else int(self.positions.max() - self.positions.min()) + 1

    def moved(self, start: int) -> "Tokens":
        """The tokens at positions from `start` on, if they begin at 0."""
        return replace(self, positions=self.positions + start)

    def on_axes(self, axes: int) -> "Tokens":
        """The tokens with positions on this many axes, if they have one or this many."""
        return replace(self, positions=self.positions.expand(axes, -1))

    def chosen(self, rows: Int[Tensor, "chosen"]) -> "Tokens":
        """Some of the tokens. Features are shared, not copied."""
        return Tokens(self.ids[rows], self.positions[:, rows], self.image[rows], self.features)

    @staticmethod
    def side_by_side(parts: Sequence["Tokens"]) -> "Tokens":
        """Parts one after the other, each of which begins at position 0."""
        moved, start = list[Tokens](), 0
        for part in parts:
            moved.append(part.moved(start))
            start += part.extent
        return Tokens.joined(moved)

    @staticmethod
    def joined(parts: Sequence["Tokens"]) -> "Tokens":
        """Parts one after the other, each at the positions that it has."""
        ids, positions = torch.cat([part.ids for part in parts]), torch.cat([part.positions for part in parts], 1)
        with_images = [part.features for part in parts if part.features is not None]
        if not with_images:
            return Tokens(ids, positions, torch.full_like(ids, -1))
        image, before = list[Tensor](), 0
        for part in parts:
            image.append(torch.where(part.image < 0, -1, part.image + before))
            before += 0 if part.features is None else part.features.shape[1]
        return Tokens(ids, positions, torch.cat(image), torch.cat(with_images, 1))

    def image_ends(self) -> Int[Tensor, "tokens"]:
        """Last row of the image of each token; adjacent image tokens are one image. For text, its own row."""
        rows, is_image = torch.arange(len(self), device=self.ids.device), self.image >= 0
        is_last = torch.ones_like(is_image)
        is_last[:-1] = ~(is_image[1:] & is_image[:-1])
        return rows[is_last][is_last.cumsum(0) - is_last.long()]
