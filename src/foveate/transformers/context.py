# pyright: basic, reportPrivateImportUsage=false
"""A context composed of cached chunks: scored, patched for a prompt, generated from, and restored."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans
from foveate.transformers.attention import attend_by_rows
from foveate.transformers.cache import CacheBatch, PromptedBatch
from foveate.transformers.chunk import ChunkCache
from foveate.transformers.model import LanguageModel, Text
from foveate.utils.choices import check_choice
from foveate.utils.device import Stopwatch

__all__ = ["Context", "Patched"]


class Context:
    """Chunks side by side, their keys rotated to their positions in the context; made by `ChunkEncoder.compose`.

    Attributes:
        lm: Language model and tokenizer.
        batch: Keys and values, a batch of this one context.
    """

    def __init__(self, lm: LanguageModel, batch: CacheBatch) -> None:
        self.lm, self.batch = lm, batch
        self._ticket: object = None  # of the patch that the rows hold now; a reference to it would be a cycle

    def __len__(self) -> int:
        return self.batch.ids.shape[1]

    @property
    def chunks(self) -> tuple[ChunkCache, ...]:
        """Chunks, in order."""
        return self.batch.chunks[0]

    @property
    def ids(self) -> Int[Tensor, "rows"]:
        """Token ids of all rows, prefix first."""
        return self.batch.ids[0]

    @property
    def spans(self) -> Spans:
        """First row of each chunk, and the row after its last."""
        return self.batch.spans

    @property
    def keys(self) -> list[Float[Tensor, "1 groups rows dim"]]:
        """Keys of each layer."""
        return self.batch.keys

    @property
    def values(self) -> list[Float[Tensor, "1 groups rows dim"]]:
        """Values of each layer."""
        return self.batch.values

    def cache(self) -> DynamicCache:
        """All rows as a `DynamicCache`, for a forward pass or `model.generate`, which leave the rows unchanged."""
        return self.batch.dynamic_cache()

    def score(
        self, prompt: Text, layers: Sequence[int], norm: Norm = "l2", geometry: Geometry = "global"
    ) -> Float[Tensor, "rows"]:
        """Attention that each row receives from a prompt after the context, averaged over these layers.

        Args:
            prompt: Text or token ids.
            layers: Layer numbers.
            norm: Norm over the tokens of the prompt.
            geometry: Positions of chunks and prompt while they are scored; see `InfoFlowKV`.

        Raises:
            ValueError: If the prompt is empty, or too long for the model's context, or the model does not have these
                layers, or norm or geometry are unknown.
        """
        ids = self._prompt(prompt)
        if not layers or not all(0 <= layer < len(self.keys) for layer in layers):
            raise ValueError(f"layers must be some of 0 to {len(self.keys) - 1}, not {list(layers)}")
        check_choice("norm", norm, Norm)
        check_choice("geometry", geometry, Geometry)
        return self.batch.score(ids[None], layers, norm, geometry)[0]

    def kv_deviation(self, rank: Literal["v", "k"] = "v") -> Float[Tensor, "rows"]:
        """Mean square change of each row's values or keys in layer 1 when layers 0 and 1 are recomputed.

        All rows of these two layers stay overwritten until `restore`.

        Raises:
            ValueError: If the model has only one layer.
        """
        return self.batch.kv_deviation(rank)[0]

    def recompute(self, rows: Int[Tensor, "chosen"]) -> None:
        """Run these rows through all layers, each over all rows before it, and overwrite them until `restore`.

        Args:
            rows: Row numbers, in any order.

        Raises:
            ValueError: If the context does not have one of the rows.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise ValueError(
                f"rows are numbered from 0 to {len(self) - 1}, not {int(rows.min())} to {int(rows.max())}"
            )
        self.batch.recompute(rows.unique()[None])

    def restore(self) -> None:
        """Put all overwritten rows back, bit for bit."""
        self.batch.restore()
        self._ticket = None

    def patch(self, method: RecomputePolicy, prompt: Text, question: Text | None = None) -> "Patched":
        """Recompute the rows that the method chooses for this prompt.

        Args:
            method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
            prompt: Text or token ids to generate from.
            question: Text or token ids to choose rows by, instead of the prompt. The authors' release chooses by the
                bare question, and generates from a prompt with instructions around it.

        Raises:
            ValueError: If the context is patched already, or the prompt is empty or too long.
        """
        if self._ticket or self.batch.changed:
            raise ValueError("the context is patched already: call undo() on that patch, or restore() on the context")
        ids, watch, context = self._prompt(prompt), Stopwatch(self.lm.device), self
        asked = ids if question is None else self._prompt(question)
        try:
            with watch.step("score"):
                batch, (order,), rows = PromptedBatch(self.batch, asked[None]).choose([method])
                if batch is not self.batch:
                    context = Context(self.lm, batch)
            with watch.step("recompute"):
                batch.recompute(rows)
        except BaseException:
            self.restore()
            raise
        return Patched(context, ids, order, rows[0], watch)

    def answers(self, method: RecomputePolicy, prompts: Sequence[Text], **options: Any) -> list[str]:
        """The generated text for each prompt, one after another. Options are those of `Patched.generate`."""
        if isinstance(prompts, str):
            raise ValueError(f"pass a list of prompts, not one text: [{prompts[:20]!r}]")
        texts: list[str] = []
        for prompt in prompts:
            with self.patch(method, prompt) as patched:
                texts.append(patched.generate(**options))
        return texts

    def _prompt(self, prompt: Text) -> Int[Tensor, "prompt"]:
        ids = self.lm.tokens(prompt)
        if not len(ids):
            raise ValueError("the prompt is empty: pass a question")
        self.lm.check_length(len(self) + len(ids), "context and prompt", "compose fewer chunks")
        return ids


class Patched:
    """A context with recomputed rows, from `Context.patch`. `undo`, or the end of a `with` block, restores them.

    Attributes:
        context: The context, or a new one with its chunks reordered if the method asked for that.
        prompt: Token ids of the prompt.
        order: Chunk at each place.
        rows: Rows that were recomputed, ascending.
        watch: Stopwatch with the steps "score" (choice and reordering), "recompute" and "generate".
    """

    def __init__(
        self,
        context: Context,
        prompt: Int[Tensor, "prompt"],
        order: tuple[int, ...],
        rows: Int[Tensor, "rows"],
        watch: Stopwatch,
    ) -> None:
        self.context, self.prompt, self.order, self.rows, self.watch = context, prompt, order, rows, watch
        self._ticket = context._ticket = object()

    def __enter__(self) -> "Patched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Restore the rows, bit for bit. Nothing can be generated afterwards."""
        if self.context._ticket is self._ticket:
            self.context.restore()

    def generate(self, max_new_tokens: int = 32, do_sample: bool = False, **options: Any) -> str:
        """The text that `model.generate` continues with from the patched cache, greedy by default.

        Args:
            max_new_tokens: Largest number of tokens to generate.
            do_sample: Whether to sample tokens.
            **options: Other options of `model.generate`.

        Raises:
            ValueError: If the patch has been undone, or context, prompt and answer may become too long for the model.
        """
        context = self._open()
        with self.watch.step("generate"), attend_by_rows(context.lm.model):
            ids = torch.cat([context.ids, self.prompt])
            return context.lm.generate(
                ids, context.cache(), max_new_tokens=max_new_tokens, do_sample=do_sample, **options
            )

    def logits(self, last: int = 0) -> Float[Tensor, "last vocabulary"]:
        """Next-token logits after each of the last tokens of the prompt, or after all of them if `last` is 0.

        Raises:
            ValueError: If the patch has been undone.
        """
        return self._open().batch.logits(self.prompt[None], last)[0]

    @torch.no_grad()
    def fidelity(self) -> float:
        """KL divergence in nats of the next token's distribution from that of a full prefill, which this computes.

        The mean over the tokens of the prompt; 0 means equal.

        Raises:
            ValueError: If the patch has been undone.
        """
        context = self._open()
        ids = torch.cat([context.ids, self.prompt])[None]
        full = context.lm.model(input_ids=ids, logits_to_keep=len(self.prompt), use_cache=False).logits[0]
        p, q = (logits.float().log_softmax(-1) for logits in (full, self.logits()))
        return float((p.exp() * (p - q)).sum(-1).mean())

    def summary(self) -> str:
        """Number of recomputed rows of each chunk, and the time of each step."""
        times = ", ".join(f"{step} {1000 * taken:.1f} ms" for step, taken in self.watch.seconds.items())
        lines = [f"{len(self.rows)} of {len(self.context)} rows recomputed: {times}"]
        for chunk, (start, stop) in zip(self.order, self.context.spans, strict=True):
            rows = int(((self.rows >= start) & (self.rows < stop)).sum())
            lines.append(f"chunk {chunk}: {rows} of {stop - start}")
        return "\n".join(lines)

    def _open(self) -> Context:
        if self.context._ticket is not self._ticket:
            raise ValueError("the patch has been undone: patch the context again")
        return self.context
