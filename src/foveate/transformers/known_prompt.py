"""Prompts that begin with passages of an index, and the keys and values that a method composes for them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.recompute_policy import RecomputePolicy, Spans
from foveate.transformers.fingerprint import digest
from foveate.transformers.index import ChunkIndex

__all__ = ["KnownPrompt", "PromptMatcher", "paged_slots"]

QUESTION_BLIND = EPIC, CacheBlend, RandomRows, NoRecompute, FullPrefill
"""Policies whose rows do not depend on the question."""


class KnownPrompt(NamedTuple):
    """A prompt that begins with passages of an index, after the prefix of its encoder.

    Attributes:
        ids: Token ids of the whole prompt, with at least one token after the passages, the question.
        spans: First token of each passage, and the token after its last.
    """

    ids: tuple[int, ...]
    spans: Spans

    @property
    def rows(self) -> int:
        """Number of tokens of prefix and passages."""
        return self.spans[-1][1]

    def salt(self, method: RecomputePolicy) -> str:
        """A hash that two prompts share only if the method composes equal rows for them.

        It covers all passages, because the choice of rows depends on them, and the question if the method uses it, as
        InfoFlow KV does.
        """
        used = self.ids[: self.rows] if isinstance(method, QUESTION_BLIND) else self.ids
        return digest([repr(method), self.spans, used])

    def compose(
        self, index: ChunkIndex, method: RecomputePolicy
    ) -> tuple[Float[Tensor, "layers rows groups dim"], Float[Tensor, "layers rows groups dim"]]:
        """Cached keys and values of prefix and passages, with rotated keys and the method's rows recomputed.

        Raises:
            ValueError: If the index does not have one of the passages.
        """
        passages = [list(self.ids[start:stop]) for start, stop in self.spans]
        if missing := [ids for ids in passages if ids not in index.ids]:
            raise ValueError(
                f"{index.place} lacks {len(missing)} of {len(passages)} passages of the prompt: open it again"
            )
        context = index.encoder.compose(index.load([index.ids.index(ids) for ids in passages]))
        with context.patch(method, self.ids[self.rows :]) as patched:
            layers = patched.cache().layers
        keys, values = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
        return keys.transpose(1, 2), values.transpose(1, 2)


class PromptMatcher:
    """Matcher of prompts that begin with passages of an index. It needs no model.

    Args:
        prefix: Token ids of the encoder's prefix.
        passages: Token ids of each passage.
        longest: Largest number of tokens that the model takes.
    """

    def __init__(self, prefix: Sequence[int], passages: Iterable[Sequence[int]], longest: int) -> None:
        self.prefix, self.longest = tuple(prefix), longest
        self._passages = {tuple(ids) for ids in passages if ids}
        self._lengths = sorted({len(ids) for ids in self._passages}, reverse=True)

    def match(self, ids: Sequence[int]) -> KnownPrompt | None:
        """Match a prompt, with the longest passage at each place. None without prefix or passages.

        Args:
            ids: Token ids of the prompt.

        Examples:
            >>> matcher = PromptMatcher([0], [[5, 6], [7], [5, 6, 8]], longest=128)
            >>> matcher.match([0, 7, 5, 6, 9, 7]).spans
            ((1, 2), (2, 4))
        """
        known = tuple(ids[:-1])  # the last token must be computed
        spans, start = list[tuple[int, int]](), len(self.prefix)
        if len(ids) > self.longest or known[:start] != self.prefix:
            return None
        while stop := self._stop(known, start):
            spans.append((start, stop))
            start = stop
        return KnownPrompt(tuple(ids), tuple(spans)) if spans else None

    def _stop(self, ids: tuple[int, ...], start: int) -> int:
        """End of the longest passage that begins at `start`; 0 if there is none."""
        stops = (start + length for length in self._lengths if start + length <= len(ids))
        return next((stop for stop in stops if ids[start:stop] in self._passages), 0)


def paged_slots(blocks: Sequence[int], block_size: int, start: int, stop: int) -> Int[Tensor, "rows"]:
    """Slot of each row of a text in a paged cache, where block b starts at slot b * block_size.

    Args:
        blocks: Block of each `block_size` consecutive rows.
        block_size: Number of rows of a block.
        start: First row.
        stop: Row after the last.

    Examples:
        >>> paged_slots([7, 2], block_size=4, start=2, stop=6).tolist()
        [30, 31, 8, 9]
    """
    rows = torch.arange(start, stop)
    return torch.tensor(blocks)[rows // block_size] * block_size + rows % block_size
