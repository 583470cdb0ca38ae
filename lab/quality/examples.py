"""Whether blocks of Sub-CP get more answers right than random ones: paired over pools, beside controls.

python -m lab.quality.examples --reader vote                          # minutes on a CPU: as docs/results.md shows it
python -m lab.quality.examples --reader learner                       # three learners; minutes on a GPU
python -m lab.quality.examples --reader learner --width 64 --layers 3 --batch 64 --cells 8x8  # an hour on two cores

Every pool of examples is put into blocks in every way, and the same questions are asked by every host. A way's gain is
what it gets right more than random blocks of the same pool, in the mean, with the 95 % interval of a bootstrap over
the pools; ways that draw by chance are drawn several times. Where one text of all examples gets no more right than one
random block, there is no gap that a choice could close: those settings are marked, and nothing may be said of them.
What is found in --out is gone on with; code that asks otherwise needs another folder.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import typer
from jaxtyping import Float
from torch import Tensor

from foveate.cli.common import progress
from foveate.ops.example_blocks import Blocks
from foveate.transformers.in_context import ensemble
from foveate.utils.device import versions
from foveate.utils.files import write_whole
from foveate.web.report import figure_png
from lab.quality.example_deals import CHANCE, CONTROLS, DEALS, deal
from lab.quality.example_pools import KINDS, Task, draw
from lab.quality.example_readers import Learner, Recipe, Vote, learned
from lab.quality.example_tables import draw_gains, tables, usual
from lab.quality.quality import RESULTS, SHEETS, Commit

CELLS = "8x4,8x8,8x16,5x2"
LARGE = 600  # examples of a pool of which most are left out
DRAWS = 5  # of the ways that draw by chance, for every pool
BINS = 15  # of the calibration error
RESAMPLES = 2000
BIG, SMALL = "one text", "first block alone"
METRICS = "accuracy", "calibration error", "worst class"
Mix = Literal["moe", "poe", "max"]


class Cell(NamedTuple):
    """One setting: which data, how many examples there are, how many blocks of which size."""

    data: str
    examples: int
    blocks: int
    size: int

    def __str__(self) -> str:
        return f"{self.data}-{self.examples}-{self.blocks}x{self.size}"


def hosts(
    reader: Vote | Learner, task: Task, deals: list[list[list[int]]]
) -> Iterator[dict[str, Float[Tensor, "questions labels"]]]:
    """For each way to make blocks the probabilities of the labels by each host. All are read together."""
    apart = reader.apart(task, [block for ids in deals for block in ids]).split(len(deals[0]))
    whole = reader.apart(task, [[example for block in ids for example in block] for ids in deals]).exp()
    windows = reader.windows(task, deals)
    for i, ids in enumerate(deals):
        weights = Blocks(ids, task.embeddings).weights(task.queries)
        said = {BIG: whole[i], SMALL: apart[i][0].exp()}
        for mix in get_args(Mix):
            said[mix] = ensemble(list(apart[i]), None, mix)
            said[f"{mix}, weighted"] = ensemble(list(apart[i]), weights, mix)
        yield said if windows is None else {**said, "parallel windows": windows[i].exp()}


def scores(said: Float[Tensor, "questions labels"], task: Task) -> list[float]:
    """The `METRICS`: how many answers are right, expected calibration error, accuracy of the worst label."""
    sure, label = said.max(1)
    right = (label == task.answers).float()
    place = (sure * BINS).long().clamp(max=BINS - 1)
    error = torch.zeros(BINS).index_add(0, place, sure - right).abs().sum() / len(right)
    asked = task.answers.bincount(minlength=task.classes)
    each = torch.zeros(task.classes).index_add(0, task.answers, right)[asked > 0] / asked[asked > 0]
    return [float(right.mean()), float(error), float(each.min())]


@cache
def dealt(cell: Cell, pool: int) -> tuple[Task, list[str], list[list[list[int]]]]:
    """A pool, and by the names of the ways their blocks of it: the same for every reader."""
    task = draw(cell.data, cell.examples, pool)
    ways = [(way, seed) for way in DEALS for seed in range(DRAWS if way in CHANCE else 1)]
    shape = cell.blocks, cell.size
    deals = [deal(way, task.embeddings, task.labels, *shape, 1000 * pool + seed) for way, seed in ways]
    return task, [way for way, _ in ways], deals


def answer(reader: Vote | Learner, cell: Cell, pool: int) -> dict[str, dict[str, list[float]]]:
    """Scores for one pool, by way and host; means over the draws."""
    task, ways, deals = dealt(cell, pool)
    drawn: dict[str, list[dict[str, list[float]]]] = {way: [] for way in DEALS}
    for way, said in zip(ways, hosts(reader, task, deals), strict=True):
        drawn[way].append({host: scores(each, task) for host, each in said.items()})
    return {
        way: {host: np.mean([draw[host] for draw in found], axis=0).tolist() for host in found[0]}
        for way, found in drawn.items()
    }


def interval(differences: npt.NDArray[np.floating]) -> list[float]:
    """The mean, and the middle 95 % of its bootstrap over the pools."""
    chosen = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    return [
        round(float(x), 4) for x in (differences.mean(), *np.quantile(differences[chosen].mean(1), (0.025, 0.975)))
    ]


def rows_of(cell: Cell, pools: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a setting showed, a row for each host and way.

    Args:
        cell: The setting.
        pools: What `answer` found, for each learner and pool; the mean over learners is taken.
    """
    found: dict[tuple[str, str], npt.NDArray[np.floating]] = {}
    for way, host in product(DEALS, pools[0][0]["random"]):
        found[way, host] = np.mean([[pool[way][host] for pool in learner] for learner in pools], axis=0)
    gate = interval(found["random", BIG][:, 0] - found["random", SMALL][:, 0])
    rows = []
    for (way, host), values in found.items():
        if host == SMALL:
            continue
        row = {**cell._asdict(), "host": host, "way": way, "gap": gate}
        row |= {name: round(float(mean), 4) for name, mean in zip(METRICS, values.mean(0), strict=True)}
        for against in ("random", *CONTROLS):
            row[f"over {against}"] = interval(values[:, 0] - found[against, host][:, 0])
        if len(pools) > 1:
            each = [[pool[way][host][0] - pool["random"][host][0] for pool in learner] for learner in pools]
            row["over random, each learner"] = np.mean(each, axis=1).round(4).tolist()
        rows.append(row)
    return rows


def as_json(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A line for each row, and the names of its values once."""
    lines = ",\n".join(json.dumps(list(row.values())) for row in rows)
    return f'{{"about": {json.dumps(about)},\n"columns": {json.dumps(list(rows[0]))},\n"rows": [\n{lines}\n]}}\n'


def main(
    reader: Annotated[str, typer.Option(help="vote, or learner.")] = "vote",
    pools: Annotated[int, typer.Option(help="Pools of each setting. 0: 30 for the vote, 10 for the learner.")] = 0,
    seeds: Annotated[int, typer.Option(help="Learners.")] = 3,
    cells: Annotated[str, typer.Option(help="Blocks x size, separated by commas.")] = CELLS,
    width: Annotated[int, typer.Option(help="Of the learner.")] = Recipe.width,
    layers: Annotated[int, typer.Option(help="Of the learner.")] = Recipe.layers,
    steps: Annotated[int, typer.Option(help="Of the learner's training.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = Recipe.batch,
    rate: Annotated[float, typer.Option(help="Of AdamW.")] = Recipe.rate,
    out: Annotated[Path, typer.Option(help="Folder of learners and of what they answered.")] = Path("out/examples"),
    commit: Commit = "",
) -> None:
    """Train, ask and write."""
    if reader not in ("vote", "learner"):
        raise ValueError(f"unknown reader {reader!r}: choose vote or learner")
    device = "cuda" if torch.cuda.is_available() and reader == "learner" else "cpu"
    pools = pools or (30 if reader == "vote" else 10)
    shapes = [tuple(map(int, cell.split("x"))) for cell in cells.split(",")]
    grid = [
        Cell(data, examples, blocks, size)
        for data, (blocks, size) in product(KINDS, shapes)
        for examples in (LARGE, blocks * size)
    ]
    recipes = [Recipe(width, layers, steps, batch, rate, seed) for seed in range(seeds if reader == "learner" else 1)]
    answers: dict[Cell, list[list[Any]]] = {cell: [] for cell in grid}
    with progress() as track:
        for recipe in recipes:
            folder = out / (
                f"learner-{width}x{layers}-{steps}x{batch}-{recipe.seed}" if reader == "learner" else reader
            )
            who = learned(recipe, folder, device, track) if reader == "learner" else Vote()
            advance = track(f"pools {recipe.seed}", len(grid) * pools)
            for cell in grid:
                answers[cell].append([])
                for pool in range(pools):
                    answers[cell][-1].append(_kept(folder / f"{cell}-{pool}.json", who, cell, pool))
                    advance()
    rows = [row for cell, found in answers.items() for row in rows_of(cell, found)]
    about: dict[str, Any] = {"reader": reader, "pools": pools, "draws": DRAWS, "versions": versions()}
    if reader == "learner":
        about |= {"learners": seeds, "width": width, "layers": layers, "steps": steps, "batch": batch, "rate": rate}
    if commit:
        about["versions"]["commit"] = commit
    name = f"examples-{reader}-{device}"
    write_whole(RESULTS / f"{name}.json", as_json(about, rows).encode())
    if shown := usual(rows):
        write_whole(SHEETS / f"{name}.png", figure_png(draw_gains(shown)))
    print(tables(rows))
    print(RESULTS / f"{name}.json")


def _kept(path: Path, reader: Vote | Learner, cell: Cell, pool: int) -> dict[str, Any]:
    """What was answered for a pool; asked only if it was not before."""
    if not path.exists():
        write_whole(path, json.dumps(answer(reader, cell, pool)).encode())
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(main)
