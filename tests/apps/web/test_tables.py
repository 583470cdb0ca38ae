"""Laws of printed tables: where room is scarce they take more lines, and nothing is cut."""

import re

from typer.testing import CliRunner

from foveate.apps.cli import app
from foveate.apps.demo.about import model_info


def columns(text):
    """The words of each column, put together again."""
    rows = [re.split("[│┃|]", line)[1:-1] for line in text.splitlines() if re.match("[│┃|]", line)]
    return ["".join(cell.replace(" ", "") for cell in column) for column in zip(*rows, strict=True)]


def test_demo_info_tells_every_value_in_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    printed = CliRunner().invoke(app, ["demo", "info"]).output.split("reads texts")[0]
    assert "…" not in printed
    _, values = columns(printed)
    for value in model_info().values():
        assert value.replace(" ", "").replace("\n", "") in values
