"""Compares tables of the documentation, number by number, with the results that a comment above each table names.

lab/results/README.md says how to write one.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT / folder for folder in ("lab/results", "models/foveate_models", "src/foveate/diffusers/presets")]
NAMES = "variant", "label", "case", "title", "method", "way", "name"
"""Fields that name a record: the first that it has."""
SCALES = {"ms": 1e3, "%": 100, "GB": 1e-9, "MB": 1e-6}
NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)( ?(?:ms|%|GB|MB|dB|s|x)(?!\w))?")
CLAIM = re.compile(r"\**[-+]?\d")
"""The start of a cell that shows a number."""
ELSEWHERE = re.compile(r"not measured: \w|computed by \w")
"""The start of a comment that says why numbers are not compared with a result."""
CARD = re.compile(r"H\d+|CPU")
"""The names of the devices of results, as pages write them."""
TABLE = re.compile(r"(?P<comments>(?:^<!-- (?:(?!-->).)*-->\n)*)(?P<table>(?:^\|[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


class Fields(dict[str, Any]):
    """A record of a result. Its fields are attributes, with `_` for what cannot be in an identifier."""

    def __missing__(self, name: str) -> Any:
        for key, value in self.items():
            if re.sub(r"\W+", "_", key.partition(" [")[0]) == name:
                return value
        raise KeyError(f"{name!r} is not defined; there are {', '.join(self)}")

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Record(NamedTuple):
    """A dict of a JSON document: its name, its fields and those of the dicts that hold it, and how many these are."""

    name: str
    fields: Fields
    depth: int


def records(value: Any, key: str = "", held: Fields = Fields(), depth: int = 0) -> Iterator[Record]:  # noqa: B008
    """All dicts of a JSON document."""
    if isinstance(value, dict):
        fields = Fields(held | value)
        yield Record(str(next((value[name] for name in NAMES if name in value), key)), fields, depth)
        for name, item in value.items():
            yield from records(item, name, fields, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from records(item, key, held, depth)


@cache
def load(file: str) -> list[Record]:
    """The records of a file of results."""
    paths = [folder / file for folder in FOLDERS if (folder / file).exists()]
    if not paths:
        raise LookupError(f"there is no {file} in {', '.join(str(folder.relative_to(ROOT)) for folder in FOLDERS)}")
    return list(records(json.loads(paths[0].read_text(), object_hook=Fields)))


def device(file: str) -> tuple[set[str], str]:
    """The devices that a result was measured on, such as {"H200"}, and the commit; empty where it does not say."""
    result = load(file)[0].fields
    about = result.get("versions") or result
    name = about.get("GPU") or about.get("device") or ""
    return set(CARD.findall(name.replace("none", "CPU").replace("cpu", "CPU"))), str(about.get("commit") or "")


class Selection(NamedTuple):
    """`FIELDS of NAME where KEY=VALUE; KEY=VALUE in FILE`, or some of these."""

    fields: str
    name: str
    where: dict[str, str]
    file: str

    @classmethod
    def parse(cls, text: str, *, bare: str) -> "Selection":
        """Read a selection. `bare` says what words without `of` are: "fields" or "name"."""
        file = re.search(r"\bin (\S+\.json)", text)
        text, _, where = " ".join(text.replace(file[0] if file else "", "").split()).partition("where ")
        parts = [part.strip() for part in re.split(r"\bof\b", text, maxsplit=1)]
        fields, name = parts if len(parts) == 2 else (parts[0], "") if bare == "fields" else ("", parts[0])
        conditions = [pair.strip().partition("=") for pair in where.split(";") if where]
        return cls(fields, name, {key: value for key, _, value in conditions}, file[1] if file else "")

    def over(self, other: "Selection") -> "Selection":
        """This selection, completed by another one."""
        where = other.where | self.where
        return Selection(self.fields or other.fields, self.name or other.name, where, self.file or other.file)

    def record(self) -> Fields:
        """The only record with this name and these values. Without a file, the values themselves."""
        if not self.file:
            return Fields({key: float(value) for key, value in self.where.items()})
        agreeing = [record for record in load(self.file) if self.agrees(record.fields)]
        named = [record for record in agreeing if self.name in ("", record.name)]
        outermost = [record for record in named if record.depth == min(other.depth for other in named)]
        if len(outermost) != 1:
            names = sorted({record.name for record in agreeing})
            wanted = f"{self.name!r} where {self.where}"
            raise LookupError(
                f"{self.file} has {len(outermost)} records instead of 1 named {wanted}; there are {names}"
            )
        return outermost[0].fields

    def agrees(self, fields: Fields) -> bool:
        """Whether a record has the values of `where`."""
        has = {key: fields.get(key) for key in self.where}
        return all(value in (has[key], json.dumps(has[key])) for key, value in self.where.items())

    def numbers(self, base: "Selection") -> list[float | None]:
        """The numbers that a cell of this selection shows."""
        fields = self.record()
        if "base." in self.fields:
            fields = Fields(fields | {"base": base.record()})
        try:
            return list(flat(eval(self.fields, {"__builtins__": {"min": min, "max": max, "sum": sum}}, fields)))
        except (NameError, SyntaxError, TypeError) as error:
            raise LookupError(
                f"{self.fields!r}: {error}; {self.name!r} in {self.file} has {', '.join(fields)}"
            ) from error


def flat(value: Any) -> Iterator[float | None]:
    """The numbers of a value, an interval or several of these."""
    if isinstance(value, dict):
        value = [value["value"], value["low"], value["high"]]
    if isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


class Place(NamedTuple):
    """Where the numbers of a cell are, and those that it compares them with."""

    own: Selection
    base: Selection

    def files(self) -> set[str]:
        """The results that the numbers come from."""
        compared = [self.own, self.base] if "base." in self.own.fields else [self.own]
        return {selection.file for selection in compared if selection.file}


class Table(NamedTuple):
    """A table of a page, the text above it, and the comments between them."""

    text: str
    comments: list[str]
    head: list[str]
    rows: list[list[str]]

    def differences(self) -> list[str]:
        """What the table shows and its results do not say."""
        try:
            places = self.places()
        except LookupError as error:
            return [str(error)]
        compared = [(i, j, difference(self.rows[i][j], place)) for i, j, place in places]
        found = [f"{self.place(i, j)}: {wrong}" for i, j, wrong in compared if wrong]
        if not any(ELSEWHERE.match(comment) for comment in self.comments):
            named = {(i, j) for i, j, _ in places}
            numbers = [(i, j) for i, row in enumerate(self.rows) for j in range(1, len(row)) if CLAIM.match(row[j])]
            found += [
                f"{self.place(i, j)}: no comment above the table names the result of {self.rows[i][j]!r}"
                for i, j in numbers
                if (i, j) not in named
            ]
        return found

    def place(self, i: int, j: int) -> str:
        """Row and column of a cell, in words."""
        return f"row {self.rows[i][0]!r}, column {self.head[j]!r}"

    def unnamed_devices(self) -> set[str]:
        """The devices that its numbers come from, if there are several of which it does not name each.

        They may be named in the table or in the text above it.
        """
        devices = set().union(*(device(file)[0] for _, _, place in self.places() for file in place.files()))
        named = " ".join([self.text, *self.head, *(cell for row in self.rows for cell in row)])
        return devices - set(CARD.findall(named)) if len(devices) > 1 else set()

    def places(self) -> list[tuple[int, int, Place]]:
        """Row and column of each cell that a comment names, and where its numbers are."""
        return [place for comment in self.comments if not ELSEWHERE.match(comment) for place in self.read(comment)]

    def read(self, comment: str) -> Iterator[tuple[int, int, Place]]:
        """Row and column of each cell that a comment does not skip, and where its numbers are."""
        said = dict(re.findall(r"^(\w+): +(.*?)\s*(?=^\w+: |\Z)", comment, re.DOTALL | re.MULTILINE))
        if not {"rows", "columns"} <= said.keys() <= {"rows", "columns", "results", "base"}:
            raise LookupError(f"a comment above a table needs `rows: ` and `columns: `, this one says {comment!r}")
        results = Selection.parse("in " + said["results"] if "results" in said else "", bare="name")
        columns = [Selection.parse(text, bare="fields") for text in said["columns"].split("|")]
        rows = [Selection.parse(text, bare="name") for text in said["rows"].split("|")]
        bases = [Selection.parse(text, bare="name") for text in said.get("base", "dense").split("|")]
        if (len(rows), len(columns)) != (len(self.rows), len(self.head) - 1):
            shape = f"{len(self.rows)} rows and {len(self.head) - 1} columns after the first"
            raise LookupError(f"the comment names {len(rows)} rows and {len(columns)} columns, the table has {shape}")
        for i, row in enumerate(rows):
            for j, column in enumerate(columns, start=1):
                if self.rows[i][j] and row.name != "-" and column.fields != "-":
                    own = row.over(column).over(results)
                    yield i, j, Place(own, bases[i % len(bases)].over(own))


def difference(cell: str, place: Place) -> str | None:
    """What a cell shows and its results do not say."""
    own, base = place
    try:
        values = own.numbers(base)
    except LookupError as error:
        return f"{cell!r} cannot be checked: {error}"
    shown, scale = NUMBER.findall(cell), 1.0
    if not shown or len(shown) > len(values):
        return f"shows {cell!r}, measured is {values}"
    for (number, unit), value in zip(shown, values, strict=False):
        scale = SCALES.get(unit.strip(), 1) if unit else scale  # an interval has the unit of its value
        near = 0.5001 * 10.0 ** -len(number.partition(".")[2])
        if value is None or abs(scale * value - float(number.replace(",", ""))) > near + 1e-5 * abs(scale * value):
            measured = value and scale * value
            return f"{cell!r} shows {number}, measured is {measured}: {own.fields} of {own.name} in {own.file}"
    return None


def tables(text: str) -> list[Table]:
    """The tables of a page."""
    found, end = [], 0
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for match in TABLE.finditer(text):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in match["table"].splitlines()
        )
        above = re.split(r"^#+ ", text[end : match.start()], flags=re.MULTILINE)[-1]  # below the last heading
        found.append(Table(above, re.findall(r"<!-- (.*?)-->", match["comments"], re.DOTALL), head, rows))
        end = match.end()
    return found
