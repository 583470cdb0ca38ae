"""Draw the rooms of src/foveate and their imports: `python docs/architecture.py`, from the root of the repository."""

import ast
from pathlib import Path
from typing import NamedTuple

SOURCE, IMAGE = Path("src/foveate"), Path("docs/images/architecture.svg")
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT = 880, 92, 190, 52
COLUMNS = 115, 332, 549, 765  # centres
ARROW, FILL, STROKE, INK, GREY = "#7A8794", "#E9EFF5", "#9FB1C2", "#17202A", "#46535F"


class Room(NamedTuple):
    """The box of a room: its text, and its place from the left column to the right one, which may be halves."""

    text: str
    row: int
    left: float
    right: float

    @property
    def sides(self) -> tuple[float, float]:
        """Left and right side in pixels."""
        return _centre(self.left) - BOX_WIDTH / 2, _centre(self.right) + BOX_WIDTH / 2

    @property
    def top(self) -> float:
        """Upper side in pixels."""
        return 8 + self.row * ROW

    @property
    def middle(self) -> float:
        """Centre in pixels from the left."""
        return sum(self.sides) / 2


ROOMS = {
    "apps": Room("command line, pages, services, benchmarks, built-in models", 0, 0, 3),
    "tuning": Room("the fastest good setting", 1, 0, 0),
    "training": Room("LoRAs, pixel models", 1, 1, 1),
    "pipelines": Room("load, request, run", 2, 0.5, 0.5),
    "plots": Room("figures", 2, 2, 2),
    "nn": Room("attention for own models", 3, 0, 0),
    "diffusers": Room("apply: adapter and cards", 3, 1, 1),
    "transformers": Room("cached contexts", 3, 3, 3),
    "methods": Room("one paper a file: what attends to what, which tokens merge", 4, 1, 3),
    "ops": Room("the definitions in plain PyTorch", 5, 0, 2),
    "kernels": Room("the same on GPUs", 5, 3, 3),
    "utils": Room("caching, devices, files, timing", 6, 0, 3),
}


def imports() -> dict[str, set[str]]:
    """The rooms that the files of each room import."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package, *inner in (name.split(".") for name in names):
                if room in ROOMS and package == "foveate" and inner and inner[0] != room:
                    found[room].add(inner[0])
    return found


def arrows() -> list[tuple[str, str]]:
    """The imports that are not implied by a chain of others."""
    direct = imports()

    def reached(room: str) -> set[str]:
        return direct[room].union(*map(reached, direct[room]))

    return [
        (room, other)
        for room in ROOMS
        for other in ROOMS
        if other in direct[room] and not any(other in reached(step) for step in direct[room])
    ]


def drawing() -> str:
    """The drawing as SVG. Its colours are readable on a light and on a dark page."""
    height = 8 + (max(room.row for room in ROOMS.values()) + 1) * ROW - (ROW - BOX_HEIGHT) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" text-anchor="middle">',
        "<title>The rooms of src/foveate and what they import</title>",
        '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        f'<path d="M0 0 L9 4 L0 8 Z" fill="{ARROW}"/></marker>',
    ]
    parts += [_arrow(ROOMS[room], ROOMS[other]) for room, other in arrows()]
    parts.append(_arrow(ROOMS["ops"], ROOMS["kernels"], at_run_time=True))
    parts += [_box(name, room) for name, room in ROOMS.items()]
    return "\n".join([*parts, "</svg>", ""])


def _centre(column: float) -> float:
    """Pixels from the left; half a column is between two."""
    low = int(column)
    return COLUMNS[low] if column == low else (COLUMNS[low] + COLUMNS[low + 1]) / 2


def _box(name: str, room: Room) -> str:
    left, right = room.sides
    return (
        f'<rect x="{left:g}" y="{room.top:g}" width="{right - left:g}" height="{BOX_HEIGHT}" rx="7" '
        f'fill="{FILL}" stroke="{STROKE}"/>'
        + _text(room, 22, name, f'font-size="16" font-weight="600" fill="{INK}"')
        + _text(room, 40, room.text, f'font-size="13" fill="{GREY}"')
    )


def _text(room: Room, down: float, text: str, style: str) -> str:
    return f'\n<text x="{room.middle:g}" y="{room.top + down:g}" {style}>{text}</text>'


def _arrow(start: Room, end: Room, *, at_run_time: bool = False) -> str:
    """An arrow as steep as the two boxes allow; between boxes of one row it is level."""
    if start.row == end.row:
        rightwards = end.middle > start.middle
        x1, x2 = (start.sides[1], end.sides[0]) if rightwards else (start.sides[0], end.sides[1])
        y1 = y2 = start.top + BOX_HEIGHT * (0.7 if at_run_time else 0.3)
    else:
        narrow = min((start, end), key=lambda room: room.sides[1] - room.sides[0])
        x1, x2 = (min(max(narrow.middle, room.sides[0] + 40), room.sides[1] - 40) for room in (start, end))
        y1, y2 = start.top + BOX_HEIGHT, end.top
    dashes = ' stroke-dasharray="3 3"' if at_run_time else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ARROW}" stroke-width="1.8"{dashes} '
        'marker-end="url(#head)"/>'
    )


if __name__ == "__main__":
    IMAGE.write_text(drawing())
    print(IMAGE)
