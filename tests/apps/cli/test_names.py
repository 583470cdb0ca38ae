"""Laws of printed names: they are shown as they are, because they are no markup of the terminal library."""

from types import SimpleNamespace

import pytest
from command_line import fails, succeeds
from rich.progress import Progress

from foveate.apps.bench.table import results_table
from foveate.apps.console import console, progress, terminal

NAMES = ["[slug].md", "notes [draft].txt", "x[/foo].txt", ":smile:.txt", "[bold]b.txt"]


def test_documents_of_any_name_are_listed_read_and_removed(model, tmp_path):
    for i, name in enumerate([*NAMES, "[/x] empty.txt"]):
        path = tmp_path / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else f"w{i + 1} w9")
    answered = succeeds("rag", "notes", "w9", "--model", model, "--device", "cpu", "--index", "[/i]")
    assert "[/x] empty.txt is empty" in answered
    assert "in [/i]" in answered
    listed = succeeds("rag", "info", "[/i]")
    for name in NAMES:
        assert name in answered
        assert name in listed
        assert "removed 1 documents from [/i]" in succeeds("rag", "remove", "[/i]", name)
    assert "[/i] is no index" in fails("rag", "info", "[/i]")


@pytest.mark.parametrize("name", NAMES)
def test_errors_tables_and_logs_show_names_as_they_are(name, capsys):
    assert name in fails("icl", name)
    assert name in fails("compare", "a cat", "--model", name)
    rows = [{"name": name, "time": 1.0}]
    terminal().print(results_table(rows, [("name", "name", str), (name, "time", str)], lambda row: f"size {name}"))
    with progress() as track:
        track(f"log {name}", 1)()
    out, err = capsys.readouterr()
    assert out.count(name) == 3
    assert err.count(f"log {name}") == 2


def test_progress_bars_show_names_as_they_are(monkeypatch):
    columns = []
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr("foveate.apps.console.Progress", lambda *all, **options: columns.extend(all) or Progress())
    with progress():
        assert columns[0].render(SimpleNamespace(description=NAMES[0])).plain == NAMES[0]
