# pyright: basic, reportPrivateImportUsage=false
"""A context whose rows were computed again for one prompt."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.transformers.layers import by_rows
from foveate.utils.device import Stopwatch

if TYPE_CHECKING:
    from foveate.transformers.context import Context

__all__ = ["Patched"]


class Patched:
    """What `Context.patch` returns. At the end of a `with` block, or by `undo`, the rows are put back.

    Attributes:
        context: The context; with its chunks in another order if the method moved them.
        prompt: Its tokens.
        order: Which chunk stands at each place.
        rows: The rows that were computed again, ascending.
        watch: Has timed its steps: "score", with selection and a new order; "recompute"; after it "generate".
    """

    def __init__(
        self,
        context: "Context",
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
        """Put the rows back, bit for bit. Nothing can be generated afterwards."""
        if self.context._ticket is self._ticket:
            self.context.restore()

    def generate(self, max_new_tokens: int = 32, do_sample: bool = False, **options: Any) -> str:
        """The model's answer, by `model.generate` over the patched cache: greedy unless asked otherwise.

        Args:
            max_new_tokens: Most tokens of the answer.
            do_sample: Draw tokens at random.
            **options: Whatever else `model.generate` takes.

        Raises:
            ValueError: If the patch has been undone, or context, prompt and answer may become too long for the model.
        """
        encoder, ids = self._open(), torch.cat([self.context.ids, self.prompt])
        with self.watch.step("generate"), by_rows(encoder.model):
            return encoder.generate(
                ids, self.context.cache(), max_new_tokens=max_new_tokens, do_sample=do_sample, **options
            )

    @torch.no_grad()
    def logits(self, last: int = 0) -> Float[Tensor, "prompt vocabulary"]:
        """Of the token behind each of the prompt's `last` tokens; behind all of them if 0.

        Raises:
            ValueError: If the patch has been undone.
        """
        model = self._open().model
        with by_rows(model):
            cache = self.context.cache()
            return model(input_ids=self.prompt[None], past_key_values=cache, logits_to_keep=last).logits[0]

    @torch.no_grad()
    def fidelity(self) -> float:
        """How far the next token's distribution is from that of a full prefill: KL divergence in nats.

        The mean over the tokens of the prompt; 0 is equal. It computes the full prefill.

        Raises:
            ValueError: If the patch has been undone.
        """
        model = self._open().model
        ids = torch.cat([self.context.ids, self.prompt])[None]
        full = model(input_ids=ids, logits_to_keep=len(self.prompt), use_cache=False).logits[0]
        p, q = (logits.float().log_softmax(-1) for logits in (full, self.logits()))
        return float((p.exp() * (p - q)).sum(-1).mean())

    def summary(self) -> str:
        """How many rows of each chunk were computed again, and what the steps took."""
        times = ", ".join(f"{step} {1000 * taken:.1f} ms" for step, taken in self.watch.seconds.items())
        lines = [f"{len(self.rows)} of {len(self.context)} rows computed again: {times}"]
        for chunk, (start, stop) in zip(self.order, self.context.spans, strict=True):
            rows = int(((self.rows >= start) & (self.rows < stop)).sum())
            lines.append(f"chunk {chunk}: {rows} of {stop - start}")
        return "\n".join(lines)

    def _open(self) -> Any:
        if self.context._ticket is not self._ticket:
            raise ValueError("the patch has been undone: patch the context again")
        return self.context.encoder
