"""Accuracy of in-context learning with blocks of Sub-CP, random blocks, baselines and controls, paired over pools.

python -m lab.quality.examples --reader vote     # minutes on a CPU, as docs/benchmarks-language.md shows it
python -m lab.quality.examples --reader learner  # three learners; minutes on a GPU
python -m lab.quality.examples --reader learner --width 64 --layers 3 --batch 64 --cells 8x8  # an hour on two cores

Every method partitions every pool of examples, and every host gets the same questions. The gain of a method is its
accuracy minus the accuracy of random blocks of the same pool, averaged over pools, with the 95 % interval of a
bootstrap over pools. Random methods run several times. If one text of all examples is no more accurate than one random
block, there is no gap for a choice of examples to close: these settings are marked, and allow no claim. Answers found
in --out are reused; after a change of the code, use another folder.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import typer
from jaxtyping import Float
from torch import Tensor

from foveate.apps.console import progress
from foveate.methods.example_blocks import Blocks
from foveate.transformers.in_context import Mix, ensemble
from foveate.utils.device import versions
from foveate.utils.files import write_whole
from lab.quality.common import RESULTS, Commit, device_type
from lab.quality.example_partitions import CONTROLS, PARTITIONS, RANDOM, partition
from lab.quality.example_pools import KINDS, Task, draw
from lab.quality.example_readers import Learner, Recipe, Vote, trained_learner
from lab.quality.example_tables import tables

CELLS = "8x4,8x8,8x16,5x2"
LARGE = 600  # examples of a large pool, most of them not chosen
DRAWS = 5  # runs of each random method, for every pool
BINS = 15  # bins of the calibration error
RESAMPLES = 2000
ONE_TEXT, ONE_BLOCK = "one text", "first block alone"
MIXES: tuple[Mix, ...] = get_args(Mix)
METRICS = "accuracy", "calibration error", "worst class"


class Cell(NamedTuple):
    """A setting: kind of data, number of examples, number and size of blocks."""

    data: str
    examples: int
    blocks: int
    size: int

    def __str__(self) -> str:
        return f"{self.data}-{self.examples}-{self.blocks}x{self.size}"


def hosts(
    reader: Vote | Learner, task: Task, partitions: list[list[list[int]]]
) -> Iterator[dict[str, Float[Tensor, "questions labels"]]]:
    """Probabilities of the labels by each host, for each partition. All partitions are read in one batch."""
    by_block = reader.by_block(task, [block for ids in partitions for block in ids]).split(len(partitions[0]))
    whole = reader.by_block(task, [[example for block in ids for example in block] for ids in partitions]).exp()
    windows = reader.windows(task, partitions)
    for i, ids in enumerate(partitions):
        weights = Blocks(ids, task.embeddings).weights(task.queries)
        found = {ONE_TEXT: whole[i], ONE_BLOCK: by_block[i][0].exp()}
        for mix in MIXES:
            found[mix] = ensemble(list(by_block[i]), None, mix)
            found[f"{mix}, weighted"] = ensemble(list(by_block[i]), weights, mix)
        yield found if windows is None else {**found, "parallel windows": windows[i].exp()}


def scores(probabilities: Float[Tensor, "questions labels"], task: Task) -> list[float]:
    """The `METRICS`: accuracy, expected calibration error, accuracy of the worst class."""
    confidence, label = probabilities.max(1)
    right = (label == task.answers).float()
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    error = torch.zeros(BINS).index_add(0, place, confidence - right).abs().sum() / len(right)
    counts = task.answers.bincount(minlength=task.classes)
    each = torch.zeros(task.classes).index_add(0, task.answers, right)[counts > 0] / counts[counts > 0]
    return [float(right.mean()), float(error), float(each.min())]


@cache
def partitioned(cell: Cell, pool: int) -> tuple[Task, list[str], list[list[list[int]]]]:
    """A pool, the method of each partition, and the partitions, the same for every reader."""
    task = draw(cell.data, cell.examples, pool)
    draws = [(method, seed) for method in PARTITIONS for seed in range(DRAWS if method in RANDOM else 1)]
    shape = cell.blocks, cell.size
    ids = [partition(method, task.embeddings, task.labels, *shape, 1000 * pool + seed) for method, seed in draws]
    return task, [method for method, _ in draws], ids


def answer(reader: Vote | Learner, cell: Cell, pool: int) -> dict[str, dict[str, list[float]]]:
    """Scores for one pool, by method and host, averaged over random runs."""
    task, methods, partitions = partitioned(cell, pool)
    drawn: dict[str, list[dict[str, list[float]]]] = {method: [] for method in PARTITIONS}
    for method, found in zip(methods, hosts(reader, task, partitions), strict=True):
        drawn[method].append({host: scores(probabilities, task) for host, probabilities in found.items()})
    return {
        method: {host: np.mean([draw[host] for draw in draws], axis=0).tolist() for host in draws[0]}
        for method, draws in drawn.items()
    }


def interval(differences: npt.NDArray[np.floating]) -> list[float]:
    """Mean, and its 95 % interval from a bootstrap over pools."""
    chosen = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    return [
        round(float(x), 4) for x in (differences.mean(), *np.quantile(differences[chosen].mean(1), (0.025, 0.975)))
    ]


def rows_of(cell: Cell, pools: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Result rows of a setting, one for each host and method, averaged over learners.

    Args:
        cell: Setting.
        pools: Result of `answer` for each learner and pool.
    """
    found: dict[tuple[str, str], npt.NDArray[np.floating]] = {}
    for method, host in product(PARTITIONS, pools[0][0]["random"]):
        found[method, host] = np.mean([[pool[method][host] for pool in learner] for learner in pools], axis=0)
    gate = interval(found["random", ONE_TEXT][:, 0] - found["random", ONE_BLOCK][:, 0])
    rows = []
    for (method, host), values in found.items():
        if host == ONE_BLOCK:
            continue
        row = {**cell._asdict(), "host": host, "method": method, "gap": gate}
        row |= {name: round(float(mean), 4) for name, mean in zip(METRICS, values.mean(0), strict=True)}
        for against in ("random", *CONTROLS):
            row[f"over {against}"] = interval(values[:, 0] - found[against, host][:, 0])
        if len(pools) > 1:
            each = [[pool[method][host][0] - pool["random"][host][0] for pool in learner] for learner in pools]
            row["over random, each learner"] = np.mean(each, axis=1).round(4).tolist()
        rows.append(row)
    return rows


def as_json(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """JSON with one line for each row, and the column names once."""
    lines = ",\n".join(json.dumps(list(row.values())) for row in rows)
    return f'{{"about": {json.dumps(about)},\n"columns": {json.dumps(list(rows[0]))},\n"rows": [\n{lines}\n]}}\n'


def main(
    reader: Annotated[str, typer.Option(help="Reader: vote or learner.")] = "vote",
    pools: Annotated[int, typer.Option(help="Pools per setting. 0: 30 for the vote, 10 for the learner.")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of learners.")] = 3,
    cells: Annotated[str, typer.Option(help="Blocks x size, separated by commas.")] = CELLS,
    width: Annotated[int, typer.Option(help="Hidden size of the learner.")] = Recipe.width,
    layers: Annotated[int, typer.Option(help="Layers of the learner.")] = Recipe.layers,
    steps: Annotated[int, typer.Option(help="Training steps of the learner.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = Recipe.batch,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = Recipe.rate,
    out: Annotated[Path, typer.Option(help="Folder of learners and answers.")] = Path("out/examples"),
    commit: Commit = "",
) -> None:
    """Train, ask and write."""
    if reader not in ("vote", "learner"):
        raise ValueError(f"unknown reader {reader!r}: choose vote or learner")
    device = device_type() if reader == "learner" else "cpu"
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
            model = trained_learner(recipe, folder, device, track) if reader == "learner" else Vote()
            advance = track(f"pools {recipe.seed}", len(grid) * pools)
            for cell in grid:
                answers[cell].append([])
                for pool in range(pools):
                    answers[cell][-1].append(_cached_answer(folder / f"{cell}-{pool}.json", model, cell, pool))
                    advance()
    rows = [row for cell, found in answers.items() for row in rows_of(cell, found)]
    about: dict[str, Any] = {"reader": reader, "pools": pools, "draws": DRAWS, "versions": versions()}
    if reader == "learner":
        about |= {"learners": seeds, "width": width, "layers": layers, "steps": steps, "batch": batch, "rate": rate}
    if commit:
        about["versions"]["commit"] = commit
    name = f"examples-{reader}-{device}"
    write_whole(RESULTS / f"{name}.json", as_json(about, rows).encode())
    print(tables(rows))
    print(RESULTS / f"{name}.json")


def _cached_answer(path: Path, reader: Vote | Learner, cell: Cell, pool: int) -> dict[str, Any]:
    """Scores for one pool, computed unless the file exists."""
    if not path.exists():
        write_whole(path, json.dumps(answer(reader, cell, pool)).encode())
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(main)
