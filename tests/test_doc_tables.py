"""Laws of the check of documented tables: it accepts what was measured, and nothing of another row or column."""

import json
from itertools import permutations
from pathlib import Path

import doc_tables
import pytest

RESULT = {
    "parameters": 4_000_000_000,
    "rows": [
        {"variant": "dense", "pixels": 1024, "step_s": 0.2, "found": {"value": 0.957, "low": 0.944, "high": 0.97}},
        {"variant": "ToMA keep=0.5", "pixels": 1024, "step_s": 0.125, "found": [0.956, 0.942, 0.969]},
        {"variant": "dense", "pixels": 2048, "step_s": 1.5, "found": None},
        {"variant": "ToMA keep=0.5", "pixels": 2048, "step_s": 0.5, "found": None},
    ],
}
COMMENT = """<!-- results: result.json
columns: step_s, base.step_s / step_s where pixels=1024 | step_s, base.step_s / step_s where pixels=2048
| found where pixels=1024 | 2 * parameters where pixels=1024
rows: dense | ToMA keep=0.5 -->
"""
HEAD = ["", "1024 px", "2048 px", "objects found", "weights"]
CELLS = [
    ["dense", "200 ms, 1.00x", "1.50 s, 1.00x", "95.7 % [94.4, 97.0]", "8.0 GB"],
    ["half of the tokens", "**125 ms**, 1.60x", "500 ms (3.0x)", "95.6 %", ""],
]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """A folder with one result."""
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    monkeypatch.setattr(doc_tables, "FOLDERS", [tmp_path])
    monkeypatch.setattr(doc_tables, "ROOT", tmp_path)
    doc_tables.load.cache_clear()
    yield
    doc_tables.load.cache_clear()


def differences(cells, comment=COMMENT):
    """What the check says about a table with these cells."""
    lines = [HEAD, ["---"] * len(HEAD), *cells]
    (table,) = doc_tables.tables(comment + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return table.differences()


def test_what_was_measured_is_accepted_with_units_intervals_ratios_and_empty_cells():
    assert differences(CELLS) == []


def test_a_cell_with_the_number_of_another_row_or_column_is_reported():
    places = [(row, column) for row in range(2) for column in range(1, 5) if CELLS[row][column]]
    for (row, column), (other_row, other_column) in permutations(places, 2):
        cells = [list(line) for line in CELLS]
        cells[row][column] = CELLS[other_row][other_column]
        (wrong,) = differences(cells)
        assert f"row {cells[row][0]!r}, column {HEAD[column]!r}: " in wrong


@pytest.mark.parametrize(
    ("row", "column", "shown"),
    [(0, 1, "201 ms, 1.00x"), (1, 1, "125 ms, 1.61x"), (0, 3, "95.7 % [94.4, 97.1]"), (0, 3, "96 %, 94 %, 97 %, 1")],
)
def test_a_wrong_number_is_reported_with_what_was_measured(row, column, shown):
    cells = [list(line) for line in CELLS]
    cells[row][column] = shown
    (wrong,) = differences(cells)
    assert repr(shown) in wrong
    assert "measured is" in wrong


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows: dense | ToMA", "rows: dense | ToMe", "has 0 records instead of 1 named 'ToMe keep=0.5'"),
        (" where pixels=1024 | 2 *", " | 2 *", "has 2 records instead of 1"),
        ("result.json", "results.json", "there is no results.json"),
        ("2 * parameters", "2 * parameter", "'parameter' is not defined"),
        ("rows: dense | ", "rows: ", "1 rows and 4 columns, the table has 2 rows and 4 columns"),
    ],
)
def test_a_comment_that_names_no_result_is_reported(old, new, message):
    assert old in COMMENT
    assert message in "\n".join(differences(CELLS, COMMENT.replace(old, new)))


def test_comments_share_a_table_and_skip_what_another_one_names():
    left = COMMENT.replace("rows: dense |", "rows: - |")
    right = COMMENT.replace("ToMA keep=0.5", "-")
    assert differences(CELLS, left + right) == []
    cells = [CELLS[0], ["half of the tokens", "200 ms", "1.50 s", "95.7 %", ""]]
    assert len(differences(cells, left + right)) == 3
    assert len(differences(cells, right)) == 3


@pytest.mark.parametrize(
    "above", ["", "On an H200, half of the tokens on an H100.\n\n", "H100 and H200.\n\n## Other\n\n"]
)
def test_devices_that_neither_the_table_nor_the_text_above_it_names_are_found(above, tmp_path):
    for file, name in {"result.json": "NVIDIA H200", "other.json": "NVIDIA H100 80GB HBM3"}.items():
        (tmp_path / file).write_text(json.dumps(RESULT | {"versions": {"GPU": name}}))
    rows = "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *CELLS))
    (same,) = doc_tables.tables(above + COMMENT + rows + "\n")
    (mixed,) = doc_tables.tables(above + COMMENT.replace("ToMA keep=0.5", "ToMA keep=0.5 in other.json") + rows + "\n")
    assert not same.unnamed_devices()
    assert mixed.unnamed_devices() == (set() if above.startswith("On an H200") else {"H100", "H200"})
    of_rows = [[f"{name}, {card}", *cells] for (name, *cells), card in zip(mixed.rows, ("H200", "H100"), strict=True)]
    assert not mixed._replace(rows=of_rows).unnamed_devices()


@pytest.mark.parametrize("comment", ["", "<!-- of an older run -->\n", COMMENT.replace("columns:", "colums:")])
def test_numbers_need_a_comment_that_names_their_results(comment):
    assert differences(CELLS, comment)


def test_numbers_that_were_not_measured_need_a_reason():
    assert differences(CELLS, "<!-- not measured -->\n")
    assert differences(CELLS, "<!-- not measured: settings -->\n") == []


def test_a_table_of_the_readme_with_two_rows_exchanged_is_reported(monkeypatch):
    monkeypatch.undo()
    doc_tables.load.cache_clear()
    table = next(
        table
        for table in doc_tables.tables((Path(__file__).parent.parent / "README.md").read_text())
        if table.comments
    )
    (name, *cells), (other, *others), *rest = table.rows[2:]
    exchanged = table._replace(rows=[*table.rows[:2], [name, *others], [other, *cells], *rest])
    assert table.differences() == []
    assert len(exchanged.differences()) == 8
