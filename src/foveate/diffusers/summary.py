"""Report of what ran in each layer."""

import re
from collections import Counter
from html import escape
from itertools import groupby, zip_longest
from statistics import mean
from textwrap import fill, wrap
from typing import Any, NamedTuple

__all__ = ["LayerReport", "Summary"]

WIDTH = 80


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
    """Reports of all layers of all denoisers. `print` and notebooks show them as tables, with equal layers in one row.

    Attributes:
        models: Reports of the layers of each denoiser.
        outcomes: Number of forward passes of each denoiser since `apply` by the reason why they were dense; "" counts
            those with a method at work.
        replaced: Denoisers in whose place the pipeline has another model by now, which is dense.
    """

    models: dict[str, list[LayerReport]]
    outcomes: dict[str, Counter[str]]
    replaced: frozenset[str] = frozenset()

    @property
    def layers(self) -> list[LayerReport]:
        """All layers of all denoisers."""
        return [layer for layers in self.models.values() for layer in layers]

    def to_dict(self) -> dict[str, Any]:
        """The reports as a dictionary, ready for JSON: forward passes and layers of each denoiser."""
        return {
            name: {
                "sparse_forwards": self.outcomes[name][""],
                "dense_forwards": {why: count for why, count in self.outcomes[name].items() if why},
                "replaced": name in self.replaced,
                "layers": [layer._asdict() for layer in layers],
            }
            for name, layers in self.models.items()
        }

    def __str__(self) -> str:
        texts: list[str] = []
        for name, layers in self.models.items():
            groups = grouped(layers)
            texts.append(fill(self._title(name), WIDTH))
            rows = [(names, g[0].method, g[0].backend, *_numbers(g)) for names, g in groups if not g[0].why]
            texts += _table([("layers", "method", "backend", "skipped", "GFLOP"), *rows]) if rows else []
            whys = [f"dense: {name}: {group[0].why}" for name, group in groups if group[0].why]
            texts += [fill(why, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for why in whys]
        return "\n".join(texts) or "no method is applied"

    def _repr_html_(self) -> str:
        parts: list[str] = []
        for name, layers in self.models.items():
            rows = [("layers", "method", "backend", "pairs skipped", "GFLOP saved")]
            for names, group in grouped(layers):
                first = group[0]
                rows.append((names, f"dense: {first.why}", "", "", "") if first.why else
                            (names, first.method, first.backend, *_numbers(group)))  # fmt: skip
            cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
            parts.append(f"<p><b>{escape(self._title(name))}</b></p><table>{''.join(f'<tr>{c}</tr>' for c in cells)}")
            parts.append("</table>")
        return "".join(parts) or "no method is applied"

    def _title(self, name: str) -> str:
        """Text such as "transformer: 14 of 28 forward passes sparse; 14 dense: this step lies outside ..."."""
        outcomes = self.outcomes[name]
        texts = [f"{name}: {outcomes['']} of {outcomes.total()} forward passes sparse"]
        texts += [f"{count} dense: {why}" for why, count in outcomes.items() if why]
        if name in self.replaced:
            texts.append(f"the pipeline has another {name} now, which is dense: apply again")
        return "; ".join(texts)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table of names, methods, backends and two numbers; long cells are folded."""
    names = min(36, max(len(row[0]) for row in rows))
    methods = min(WIDTH - names - 30, max(len(row[1]) for row in rows))
    lines: list[str] = []
    for row in rows:
        folded = (wrap(cell, width) for cell, width in zip(row, (names, methods, 8, 7, 7), strict=True))
        for name, method, backend, skipped, saved in zip_longest(*folded, fillvalue=""):
            line = f"{name:{names}}  {method:{methods}}  {backend:8}  {skipped:>7}  {saved:>7}"
            lines.append(line.rstrip())
    return lines


def grouped(layers: list[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """The layers of one kind of block that did the same, with their common name: "transformer_blocks.0-18.attn"."""

    def kind(layer: LayerReport) -> tuple[str, ...]:
        return (*_split(layer.layer)[::2], layer.method, layer.backend, layer.why)

    groups: dict[tuple[str, ...], list[LayerReport]] = {}
    for layer in layers:
        groups.setdefault(kind(layer), []).append(layer)
    return [(_common_name([layer.layer for layer in group]), group) for group in groups.values()]


def _split(name: str) -> tuple[str, str, str]:
    """A name before, in and after its last number."""
    found = re.fullmatch(r"(.*\.|)(\d+)(\..*|)", name)
    return (found[1], found[2], found[3]) if found else (name, "", "")


def _common_name(names: list[str]) -> str:
    before, _, after = _split(names[0])
    if len(names) == 1:
        return names[0]
    numbers = [int(_split(name)[1]) for name in names]
    runs = [[i for _, i in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return before + ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs) + after


def _numbers(group: list[LayerReport]) -> tuple[str, str]:
    """Mean fraction of the pairs that was skipped, and GFLOP that were saved in all."""
    saved = sum(layer.saved for layer in group) / 1e9
    return f"{mean(layer.true for layer in group):.1%}", f"{saved:.3g}" if saved < 100 else f"{saved:,.0f}"
