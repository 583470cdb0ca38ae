"""What ran, layer by layer."""

import io
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["LayerReport", "Summary"]


class LayerReport(NamedTuple):
    """What one attention layer did in the last forward.

    Attributes:
        layer: Its name in the model, e.g. "transformer_blocks.3.attn".
        method: The method that ran, or "dense".
        backend: What ran it: "portable", ...; empty when dense.
        nominal: Sparsity as papers quote it, of image-to-image attention (0 dense).
        true: Fraction of all query-key pairs left out.
        saved: Floating-point operations left out in one forward, all samples together.
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
    """One report per layer for every denoiser; `print` shows it as a table."""

    models: dict[str, list[LayerReport]]

    @property
    def layers(self) -> list[LayerReport]:
        """All layers of all denoisers."""
        return [layer for layers in self.models.values() for layer in layers]

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, force_terminal=False)
        for name, layers in self.models.items():
            table = Table("layer", "method", "backend", title=name, title_justify="left")
            for column in ("nominal", "true", "GFLOP saved"):
                table.add_column(column, justify="right")
            table.add_column("why dense", overflow="fold")
            for r in layers:
                numbers = [f"{r.nominal:.1%}", f"{r.true:.1%}", f"{r.saved / 1e9:.2f}"] if not r.why else [""] * 3
                table.add_row(r.layer, r.method, r.backend, *numbers, r.why)
            console.print(table)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
