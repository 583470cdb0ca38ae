"""Report of what ran in each layer."""

import io
from collections import Counter
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["LayerReport", "Summary"]


class LayerReport(NamedTuple):
    """What one attention layer did in the last forward pass with a method at work, else in the last one.

    Attributes:
        layer: Name of the attention module, for example "transformer_blocks.3.attn".
        method: Title of the method, or "dense".
        backend: "portable", "triton", "hopper", ..., or "model" for the model's own attention; empty when dense.
        nominal: Sparsity of attention among image tokens, as papers quote it; 0 is dense.
        true: Fraction of all pairs of a query and a key that is skipped.
        saved: Floating-point operations skipped in one forward pass of the whole batch, linear layers included.
        why: Why it is dense; empty otherwise.
    """

    layer: str
    method: str
    backend: str = ""
    nominal: float = 0.0
    true: float = 0.0
    saved: int = 0
    why: str = ""


class Summary(NamedTuple):
    """Reports of all layers of all denoisers; `print` shows them as tables.

    Attributes:
        models: Reports of the layers of each denoiser.
        outcomes: Number of forward passes of each denoiser since `apply` by the reason why they were dense; "" counts
            those with a method at work.
    """

    models: dict[str, list[LayerReport]]
    outcomes: dict[str, Counter[str]]

    @property
    def layers(self) -> list[LayerReport]:
        """All layers of all denoisers."""
        return [layer for layers in self.models.values() for layer in layers]

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, force_terminal=False)
        for name, layers in self.models.items():
            table = Table(title=f"{name}: {self._forwards(name)}", title_justify="left")
            for column in ("layer", "method", "backend", "nominal", "true", "GFLOP saved", "why dense"):
                number = column in ("nominal", "true", "GFLOP saved")
                table.add_column(column, justify="right" if number else "left", overflow="fold")
            for r in layers:
                numbers = [f"{r.nominal:.1%}", f"{r.true:.1%}", f"{r.saved / 1e9:.2f}"] if not r.why else [""] * 3
                table.add_row(r.layer, r.method, r.backend, *numbers, r.why)
            console.print(table)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _forwards(self, name: str) -> str:
        """Text such as "14 of 28 forwards sparse; 14 dense: this step lies outside start_percent to end_percent"."""
        outcomes = self.outcomes[name]
        dense = [f"{count} dense: {why}" for why, count in outcomes.items() if why and count]
        return "; ".join([f"{outcomes['']} of {outcomes.total()} forwards sparse", *dense])
