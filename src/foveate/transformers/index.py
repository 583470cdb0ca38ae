"""Cached chunks of passages in a folder: computed once, read when they are needed."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import NamedTuple

from foveate.transformers.chunk import ChunkCache, opened
from foveate.transformers.documents import Passage
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.fingerprint import digest
from foveate.utils.progress import Track, silent

__all__ = ["Built", "ChunkIndex"]

ABANDONED = 3600
"""Seconds after which nobody is still writing a file."""


class Built(NamedTuple):
    """What building an index has done.

    Attributes:
        encoded: Chunks that were computed.
        found: Chunks that were there.
        removed: Files of passages that are gone.
    """

    encoded: int
    found: int
    removed: int


class ChunkIndex:
    """The cached chunks of passages, a safetensors file each, named by a hash of its tokens.

    Attributes:
        folder: Of the files. Files of other kinds are left alone.
        encoder: Of the model.
        passages: In order.
        ids: Token ids of each passage.
        refused: Why files could not be used, whose chunks were computed again.

    Raises:
        ValueError: If a passage has no tokens, or is longer than the model's context. Files stay as they are.
    """

    def __init__(self, folder: Path, encoder: ChunkEncoder, passages: Sequence[Passage]) -> None:
        self.folder, self.encoder, self.passages = folder, encoder, list(passages)
        self.ids = [encoder.tokens(passage.text).tolist() for passage in passages]
        for passage, ids in zip(passages, self.ids, strict=True):
            if not ids:
                raise ValueError(f"{passage.name} has no tokens: leave it out")
            encoder.check_length(
                len(encoder.prefix) + len(ids), f"{passage.name} with its prefix", "cut it into parts"
            )
        self.refused: list[str] = []
        self._loaded: dict[int, ChunkCache] = {}

    def path(self, passage: int) -> Path:
        """The file of a passage; passages of equal tokens share one."""
        return self.folder / f"{digest(self.ids[passage])}.safetensors"

    def build(self, track: Track = silent) -> Built:
        """Compute what is missing, and remove files of passages that are gone. What is there is not read yet.

        Each file appears when it is complete: whoever stops it loses the passage at hand, and calls it again.

        Args:
            track: Shows progress.
        """
        missing: list[int] = []
        paths = {self.path(passage): passage for passage in range(len(self.passages))}
        for path, passage in paths.items():
            try:
                with opened(path, self.encoder):
                    pass
            except FileNotFoundError:
                missing.append(passage)
            except ValueError as error:
                self.refused.append(str(error))
                missing.append(passage)
        if missing:
            advance = track("reading passages", len(missing))
            for passage in missing:
                self._encode(passage)
                advance()
        gone = [path for path in self._files() if path not in paths]
        for path in gone:
            path.unlink(missing_ok=True)  # another run may be at it too
        self._sweep()
        return Built(len(missing), len(paths) - len(missing), len(gone))

    def load(self, passages: Sequence[int]) -> list[ChunkCache]:
        """The chunks of these passages; they stay in memory until others are asked for.

        A file whose tensors turn out to be damaged is computed again.
        """
        self._loaded = {passage: self._loaded.get(passage) or self._read(passage) for passage in passages}
        return [self._loaded[passage] for passage in passages]

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self._files())

    def words(self, passage: int) -> list[str]:
        """The text of each token of a passage, with what stands between it and the one before.

        Where a character is made of several tokens, the first one has it and the others are empty.
        """
        tokenizer, text = self.encoder.tokenizer, self.passages[passage].text
        if not tokenizer.is_fast:
            return [tokenizer.decode([token]) for token in self.ids[passage]]
        words, done = list[str](), 0
        for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping:
            words.append(text[done:end])
            done = max(done, end)
        return words

    def _read(self, passage: int) -> ChunkCache:
        try:
            return ChunkCache.load(self.path(passage), self.encoder, self.passages[passage].text)
        except (ValueError, FileNotFoundError) as error:
            self.refused.append(str(error))
            return self._encode(passage)

    def _encode(self, passage: int) -> ChunkCache:
        (chunk,) = self.encoder.encode([self.ids[passage]])
        chunk.save(self.path(passage))
        return chunk

    def _files(self) -> list[Path]:
        """Those that are ours by their names."""
        return [path for path in self.folder.glob("*.safetensors") if re.fullmatch("[0-9a-f]{32}", path.stem)]

    def _sweep(self) -> None:
        """Remove what a run that was killed left half written; what is younger another run may be writing."""
        for path in self.folder.glob("*.part"):
            with suppress(FileNotFoundError):
                if re.match(r"[0-9a-f]{32}\.safetensors\.", path.name) and path.stat().st_mtime < time() - ABANDONED:
                    path.unlink()
