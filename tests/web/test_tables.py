"""Laws of printed tables: where room is scarce they take more lines, and nothing is cut."""

import re
from collections import Counter

from typer.testing import CliRunner

from foveate.cli import app
from foveate.demo.about import facts
from foveate.diffusers.summary import LayerReport, Summary


def columns(text):
    """The words of each column, put together again."""
    rows = [re.split("[│┃|]", line)[1:-1] for line in text.splitlines() if re.match("[│┃|]", line)]
    return ["".join(cell.replace(" ", "") for cell in column) for column in zip(*rows, strict=True)]


def test_a_summary_names_every_layer_in_full():
    names = [f"single_transformer_blocks.{i}.attn.processor.of.a.name.that.is.long" for i in (7, 38)]
    layers = [LayerReport(name, "HilbertA T=16 + ToMA keep=0.5 granularity=module", "portable") for name in names]
    text = str(Summary({"transformer": layers}, {"transformer": Counter({"": 2})}))
    assert max(map(len, text.splitlines())) <= 140
    assert columns(text)[0] == "layer" + "".join(names)


def test_demo_info_tells_every_value_in_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    printed = CliRunner().invoke(app, ["demo", "info"]).output.split("reads texts")[0]
    assert "…" not in printed
    _, values = columns(printed)
    for value in facts().values():
        assert value.replace(" ", "").replace("\n", "") in values
