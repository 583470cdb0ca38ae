"""Laws of printed tables: where room is scarce they take more lines, and nothing is cut."""

import re
from collections import Counter

from typer.testing import CliRunner

from foveate.cli import app
from foveate.demo.about import facts
from foveate.integrations.diffusers.summary import LayerReport, Summary


def columns(text):
    """The words of each column, put together again."""
    rows = [re.split("[│┃|]", line)[1:-1] for line in text.splitlines() if re.match("[│┃|]", line)]
    return ["".join(cell.replace(" ", "") for cell in column) for column in zip(*rows, strict=True)]


def test_a_summary_fits_the_terminal_and_names_every_layer_in_full(monkeypatch):
    layers = [LayerReport(f"single_transformer_blocks.{i}.attn", "HilbertA T=16", "portable") for i in (7, 38)]
    summary = Summary({"transformer": layers}, {"transformer": Counter({"": 2})})
    for width in (60, 80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        text = str(summary)
        assert max(map(len, text.splitlines())) <= width
        names, methods, backends, *_ = columns(text)
        assert names == "layer" + "".join(layer.layer for layer in layers)
        assert methods == "method" + 2 * "HilbertAT=16"
        assert backends == "backend" + 2 * "portable"
        assert (layers[1].layer in text) == (width == 140)


def test_demo_info_tells_every_value_in_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    printed = CliRunner().invoke(app, ["demo", "info"]).output.split("reads texts")[0]
    assert "…" not in printed
    _, values = columns(printed)
    for value in facts().values():
        assert value.replace(" ", "").replace("\n", "") in values
