"""Tables and figures of the measurements of lab/quality/context.py."""

from typing import Any

from matplotlib.figure import Figure

__all__ = ["draw_tasks", "markdown"]

STYLES = {
    "InfoFlow": {"color": "#2E6FB7", "marker": "o", "linewidth": 2},
    "InfoFlow boundary=1": {"color": "#2E6FB7", "marker": "s", "linestyle": "--"},
    "CacheBlend": {"color": "#D9822B", "marker": "^"},
    "EPIC": {"color": "#3D9970", "marker": "v"},
    "random": {"color": "#9AA5B1", "marker": "."},
}
"""Methods in the figure, and their line styles."""


def markdown(tasks: dict[str, Any]) -> str:
    """A table for each task that can compare methods, and one line with the reason for every other task."""
    parts = []
    for name, task in tasks.items():
        cells = task["cells"]
        full, none = (f"{cells[end]['accuracy']['value']:.1%}" for end in ("full", "none"))
        ends = f"full prefill {full}, none recomputed {none}, a guess {task['guess']:.1%}; {_passed(task)}"
        if not task["separates"]:
            parts.append(f"**{name}** ({task['about']}): {task['objection']}; {ends}.")
            continue
        budgets = sorted({cell.rsplit(" ", 1)[1] for cell in cells if cell.startswith("EPIC")}, key=float)
        methods = dict.fromkeys(cell.rsplit(" ", 1)[0] for cell in cells if cell[-1].isdigit())
        rows = [f"| recovered, at | {' | '.join(f'{float(b):.0%} ({_rows(cells, b)} rows)' for b in budgets)} |"]
        rows.append("|---" * (1 + len(budgets)) + "|")
        rows += [
            f"| {method} | {' | '.join(_recovered(cells[f'{method} {b}']) for b in budgets)} |" for method in methods
        ]
        known_rows = [name for name in cells if name in ("the fact", "facts alike") or name.startswith("its ")]
        known = (f"{part} alone recovers {_recovered(cells[part])}" for part in known_rows)
        parts.append(
            f"**{name}** ({task['about']}): {ends}; {', '.join(known)}."
            + ("\n\n" + "\n".join(rows) if budgets else "")
        )
    return "\n\n".join(parts)


def _passed(task: dict[str, Any]) -> str:
    """Readers with which alone the task could compare methods."""
    passed = (str(i) for i, passes in enumerate(task["readers"]) if passes)
    return f"readers that pass: {', '.join(passed) or 'none'} (of {len(task['readers'])})"


def _rows(cells: dict[str, Any], budget: str) -> int:
    (count,) = {cell["rows"] for name, cell in cells.items() if name.endswith(f" {budget}")}
    return round(count)


def _recovered(cell: dict[str, Any]) -> str:
    value = cell["recovered"]
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def draw_tasks(tasks: dict[str, Any]) -> Figure:
    """A figure of accuracy over the fraction of recomputed rows, with a panel for each task that can compare methods.

    The title lists the other tasks with the reasons.
    """
    shown = {name: task["cells"] for name, task in tasks.items() if task["separates"]}
    left_out = [f"{name}: {task['objection']}" for name, task in tasks.items() if not task["separates"]]
    figure = Figure(figsize=(3.2 * max(2, len(shown)), 3.4 + 0.16 * len(left_out)), layout="constrained")
    figure.suptitle("\n".join(left_out), fontsize="small", color="#444444")
    panels = figure.subplots(1, max(1, len(shown)), sharey=True, squeeze=False)[0]
    for axes, (name, cells) in zip(panels, shown.items(), strict=False):
        for method, style in STYLES.items():
            budgets = sorted(float(cell.rsplit(" ", 1)[1]) for cell in cells if cell.rsplit(" ", 1)[0] == method)
            points = [cells[f"{method} {budget}"]["accuracy"] for budget in budgets]
            values, lows, highs = ([point[part] for point in points] for part in ("value", "low", "high"))
            axes.plot(budgets, values, label=method, **style)
            axes.fill_between(budgets, lows, highs, color=style["color"], alpha=0.12, linewidth=0)
        for end, line in (("full", "-"), ("none", ":")):
            axes.axhline(cells[end]["accuracy"]["value"], color="#444444", linestyle=line, linewidth=0.8, label=end)
        axes.axhline(tasks[name]["guess"], color="#9AA5B1", linestyle="-.", linewidth=0.8, label="a guess")
        axes.set(title=name, xlabel="fraction of rows recomputed", ylim=(0, 1.02))
    figure.axes[0].set_ylabel("accuracy")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure
