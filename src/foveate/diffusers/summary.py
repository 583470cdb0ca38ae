"""What ran, layer by layer."""

import io
from collections import Counter
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["LayerReport", "Summary"]


class LayerReport(NamedTuple):
    """What one attention layer did in the last sparse forward, or in the last if none was sparse.

    Attributes:
        layer: Its name in the model, e.g. "transformer_blocks.3.attn".
        method: The method that ran, or "dense".
        backend: What ran it: "portable", ...; "model" is the model's own attention; empty when dense.
        nominal: Sparsity as papers quote it, of image-to-image attention (0 dense).
        true: Fraction of all query-key pairs left out.
        saved: Floating-point operations left out in one forward, all samples together, of linear layers too.
        why: Why it is dense; empty when it is not.
    """

    layer: str
    method: str
    backend: str = ""
    nominal: float = 0.0
    true: float = 0.0
    saved: int = 0
    why: str = ""


class Summary(NamedTuple):
    """One report per layer for every denoiser; `print` shows it as a table.

    Attributes:
        models: Reports of the layers of each denoiser.
        outcomes: How many forwards each denoiser made since `apply`, by the reason why they were dense ("": sparse).
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
        """In words: 14 of 28 forwards sparse; 14 dense: this step lies outside the window."""
        outcomes = self.outcomes[name]
        dense = [f"{count} dense: {why}" for why, count in outcomes.items() if why and count]
        return "; ".join([f"{outcomes['']} of {outcomes.total()} forwards sparse", *dense])
