"""Markdown tables of the results of lab/quality/examples.py."""

from collections.abc import Iterable
from typing import Any

from lab.quality.example_partitions import CONTROLS

__all__ = ["has_gap", "tables", "verdict"]

Row = dict[str, Any]
SHOWN = {"blocks": 8, "size": 8, "examples": 600}  # setting of the accuracies to show


def verdict(gain: list[float]) -> int:
    """1 or -1 if the whole interval is above or below 0, otherwise 0: no claim possible."""
    _, low, high = gain
    return (low > 0) - (high < 0)


def has_gap(row: Row) -> bool:
    """Whether one text of all examples is more accurate than one random block."""
    return verdict(row["gap"]) > 0


def tables(rows: list[Row]) -> str:
    """Accuracies in one setting, wins of each method over random blocks, and the gain of the partition alone."""
    shown = [row for row in rows if SHOWN.items() <= row.items()]
    parts = [_accuracies(shown, data) for data in _distinct(row["data"] for row in shown)]
    return "\n\n".join([*parts, _other_scores(shown), _wins(rows), _partition_gains(rows)])


def _accuracies(rows: list[Row], data: str) -> str:
    """Accuracies, followed by the gain over random blocks if its interval excludes 0."""
    some = [row for row in rows if row["data"] == data]
    hosts = _distinct(row["host"] for row in some)
    gap = "" if has_gap(some[0]) else " (no gap: no claim possible)"
    head = [f"{data}{gap}", *hosts]
    body = [
        [method, *(_shown(row) for row in some if row["method"] == method)]
        for method in _distinct(row["method"] for row in some)
    ]
    return _markdown(head, body)


def _shown(row: Row) -> str:
    gain = row["over random"]
    return f"{row['accuracy']:.3f}" + (f" ({gain[0]:+.3f})" if verdict(gain) else "")


def _other_scores(rows: list[Row]) -> str:
    """Calibration error and accuracy of the worst class, with weighted blocks."""
    rows = [row for row in rows if row["host"] == "moe, weighted"]
    body = [
        [
            method,
            *(f"{row['calibration error']:.3f}, {row['worst class']:.3f}" for row in rows if row["method"] == method),
        ]
        for method in _distinct(row["method"] for row in rows)
    ]
    data = _distinct(row["data"] for row in rows)
    return _markdown(["moe, weighted: calibration error, worst class", *data], body)


def _wins(rows: list[Row]) -> str:
    """Numbers of settings with a gain over random blocks, a loss, and neither, for each method and host."""
    rows = [row for row in rows if has_gap(row) and row["method"] != "random"]
    hosts = _distinct(row["host"] for row in rows)
    body = []
    for method in _distinct(row["method"] for row in rows):
        cells = []
        for host in hosts:
            found = [verdict(row["over random"]) for row in rows if row["method"] == method and row["host"] == host]
            cells.append(f"{found.count(1)} / {found.count(-1)} / {found.count(0)}")
        body.append([method, *cells])
    return _markdown(["won / lost / neither", *hosts], body)


def _partition_gains(rows: list[Row]) -> str:
    """Gain of global_local over other partitions of the same examples, with equal weights."""
    body = [
        [
            f"{row['data']}, {row['blocks']} x {row['size']} of {row['examples']}",
            *(_interval(row[f"over {against}"]) for against in ("random", *CONTROLS)),
        ]
        for row in rows
        if row["method"] == "global_local" and row["host"] == "moe" and has_gap(row)
    ]
    return _markdown(
        ["global_local, moe", "over random", "over a random partition", "over a partition in order"], body
    )


def _interval(gain: list[float]) -> str:
    text = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gain)
    return f"**{text}**" if verdict(gain) else text


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
