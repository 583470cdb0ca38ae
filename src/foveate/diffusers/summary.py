# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""What each layer did in a forward pass, counted from its plan, and the summary that prints it."""

import re
from collections import Counter
from collections.abc import Mapping
from html import escape
from itertools import groupby, zip_longest
from statistics import mean
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from foveate.ops.joint_attention import backend_of

if TYPE_CHECKING:  # importing foveate does not import diffusers
    from foveate.diffusers.card import Card
    from foveate.diffusers.planning import Decision, Layer
    from foveate.methods.base import TokenMerging

__all__ = ["LayerReport", "Summary", "report"]

WIDTH = 80
ANOTHER = "the pipeline has another {} now, which is dense: apply again"


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


def report(layer: "Layer", stack: "Decision", card: "Card", merging: "TokenMerging | None") -> LayerReport:
    """What one layer did.

    Args:
        layer: The layer.
        stack: What was decided for its stack.
        card: Card of the model.
        merging: The method of token merging, if any.
    """
    sparse = stack.is_sparse(layer) and layer.name not in stack.dense_layers
    merges = layer.group is not None and stack.regions is not None
    if not (sparse or merges):
        return LayerReport(layer.name, "dense", why=why_dense(layer, stack, merging))
    image = stack.layout.only_images().tokens
    kept = stack.kept if stack.is_merged(layer) else image
    layouts = stack.layouts_of(layer)
    texts = [layout.text for layout in layouts]
    patterns = [stack.pattern(layer, text) if sparse else None for text in texts]
    pairs = sum((text + kept) ** 2 if p is None else p.pairs() for p, text in zip(patterns, texts, strict=True))
    every_pair = sum((text + image) ** 2 for text in texts)
    # none of these is skipped
    to_keys_alone = sum(layout.tokens * (layout.references + layout.text_keys) for layout in layouts)
    pattern, plan = patterns[0], stack.attention[texts[0]] if sparse else None
    saved = 4 * (every_pair - pairs) * layer.inner_dim * stack.batch // len(texts)
    if merges:
        saved += 2 * merged_weights(layer, card) * (image - stack.kept) * stack.batch
    return LayerReport(
        layer.name,
        " + ".join([*([plan.title] if plan else []), *([stack.merging.title] if merges else [])]),
        "model" if pattern is None else backend_of(pattern, stack.device, stack.dtype, layer.head_dim),
        1 - (1 - (plan.nominal_sparsity if plan else 0)) * (kept / image) ** 2,
        (every_pair - pairs) / (every_pair + to_keys_alone),
        saved,
    )


def merged_weights(layer: "Layer", card: "Card") -> int:
    """Number of weights in linear layers that merged tokens go through; the first attention has the feed-forward."""
    if card.is_single_stream(layer.block):
        modules = [layer.block]
    else:
        first = layer.attn is next(iter(card.attentions(layer.block).values()))
        modules = [
            module
            for name, module in card.modules_to_merge(layer.group.method, layer.block).items()
            if module is layer.attn or (first and card.merged_modules[name] == "mlp")
        ]
    skipped = "norm", "add_", "added", "lora"  # modulation, text and adapters
    return sum(
        weight.numel()
        for module in modules
        for name, weight in module.named_parameters()
        if weight.ndim == 2 and not any(word in name for word in skipped)
    )


def why_dense(layer: "Layer", stack: "Decision", merging: "TokenMerging | None") -> str:
    """Why a layer was dense."""
    if layer.sparse or layer.group:
        return stack.dense_layers.get(layer.name, stack.why)
    if merging and layer.number not in merging.dense_layer_set():
        return f"one of the first blocks, which {type(merging).__name__} skips"
    return "named in dense_layers"


class Summary(NamedTuple):
    """Reports of all layers of all denoisers. `print` and notebooks show them as tables, with equal layers in one row.

    Attributes:
        models: Reports of the layers of each denoiser.
        outcomes: Number of forward passes of each denoiser since `apply` by the reason why they were dense; "" counts
            those with a method at work.
        replaced: Denoisers that the pipeline got since `apply`, in the place of others or not; they run dense.
        skipped: Number of forward passes of each denoiser that a step cache skipped since `apply`.
        settings: What was at work in each denoiser since `apply`, by title; several with a schedule. Each has its
            number of forward passes, and the mean fraction of pairs that a layer skips.
    """

    models: dict[str, list[LayerReport]]
    outcomes: dict[str, Counter[str]]
    replaced: frozenset[str] = frozenset()
    skipped: Mapping[str, int] = {}
    settings: Mapping[str, Mapping[str, tuple[int, float]]] = {}

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
                "settings": {title: passes for title, (passes, _) in self.settings.get(name, {}).items()},
                "skipped_forwards": self.skipped.get(name, 0),
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
            rows = [(names, first.method, first.backend, *_numbers(group))
                    for names, group in groups if not (first := group[0]).why]  # fmt: skip
            texts += _table(rows, min(36, max(len(names) for names, _ in groups))) if rows else []
            whys = [f"dense: {name}: {group[0].why}" for name, group in groups if group[0].why]
            texts += [fill(why, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for why in whys]
        texts += [f"{name}: {ANOTHER.format(name)}" for name in sorted(self.replaced - self.models.keys())]
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
        parts += [
            f"<p><b>{name}: {ANOTHER.format(name)}</b></p>" for name in sorted(self.replaced - self.models.keys())
        ]
        return "".join(parts) or "no method is applied"

    def _title(self, name: str) -> str:
        """Text such as "transformer: 14 of 28 forward passes sparse; 14 dense: this step lies outside ...".

        With a schedule "14 of 28 forward passes sparse (6 HilbertA T=4, 8 HilbertA T=16)".
        """
        outcomes, skipped = self.outcomes[name], self.skipped.get(name, 0)
        texts = [f"{name}: {outcomes['']} of {outcomes.total() + skipped} forward passes sparse"]
        if len(settings := self.settings.get(name, {})) > 1:
            texts[0] += f" ({', '.join(f'{passes} {title}' for title, (passes, _) in settings.items())})"
        texts += [f"{skipped} skipped by the step cache"] if skipped else []
        texts += [f"{count} dense: {why}" for why, count in outcomes.items() if why]
        if name in self.replaced:
            texts.append(ANOTHER.format(name))
        return "; ".join(texts)


def grouped(layers: list[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """The layers of one kind of block that did the same, with their common name: "transformer_blocks.0-18.attn"."""

    def kind(layer: LayerReport) -> tuple[str, ...]:
        return (*_split(layer.layer)[::2], layer.method, layer.backend, layer.why)

    groups: dict[tuple[str, ...], list[LayerReport]] = {}
    for layer in layers:
        groups.setdefault(kind(layer), []).append(layer)
    return [(_common_name([layer.layer for layer in group]), group) for group in groups.values()]


def _table(rows: list[tuple[str, ...]], first: int) -> list[str]:
    """Lines of a table whose names, `first` wide, and methods are folded to fit."""
    rows = [("layers", "method", "backend", "skipped", "GFLOP"), *rows]
    others = [max(map(len, column)) for column in [*zip(*rows, strict=True)][2:]]
    second = min(max(len(row[1]) for row in rows), WIDTH - first - max(28, sum(others) + 8))
    widths = first, second, *others
    lines: list[str] = []
    for row in rows:
        columns = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*columns, fillvalue=""):
            cells = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
            cells += [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
            lines.append("  ".join(cells).rstrip())
    return lines


def _folded(text: str, width: int) -> list[str]:
    """The lines of a cell, cut between words or, where a word is too long, within it."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
        while len(lines[-1]) > width:
            lines[-1:] = lines[-1][:width], lines[-1][width:]
    return lines


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
