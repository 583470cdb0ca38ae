# pyright: basic
"""What it is worth to recompute some rows of cached chunks, with readers trained from scratch (python -m lab reader).

python -m lab.quality.context --readers out/readers/0/reader,out/readers/1/reader,out/readers/2/reader

Each task is texts of facts, cut into chunks that are encoded alone, and a question about each. A task is reported
where the full prefill answers at least 10 % more of the questions than the chunks side by side, and 10 % more than
the best guess: elsewhere there is no gap that a method could close, or closing it takes no reading. All methods see
the same questions and recompute equally many rows, none of them in the first chunk. CacheBlend has all rows of layers
0 and 1 anew besides, as its authors' code does. Intervals are of a bootstrap over readers and, within each, over
questions. What is found in --out is gone on with.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from foveate import InfoFlowKV
from foveate.cli.common import progress
from foveate.demo.facts import BLANK, ID, SENTENCE, VALUE, Facts, ask, draw_facts
from foveate.demo.lexicon import WORDS
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.recompute_policy import ComposedCache, RecomputePolicy, Spans
from foveate.utils.device import versions
from foveate.utils.files import claim, write_whole
from foveate.utils.progress import Track
from foveate.web.report import figure_png
from lab.quality.batched import PREFIX, Batch, Rows
from lab.quality.context_report import draw_tasks, markdown
from lab.quality.quality import RESULTS, SHEETS, Commit

PEOPLE, SENTENCES = 6, 36  # of a text: 6 ids and 30 facts, of 5 or 6 relations
CHUNK = PEOPLE * SENTENCE  # tokens: the ids are a chunk, whatever else is six sentences each
CUT = 18  # tokens, no multiple of a sentence
GAP = 0.1
SEED = 10**12  # no reader has learned from it
RESAMPLES = 2000
ROWS = "subject", "verb", "word before the value", "value", "full stop"
BASELINES = "random", "EPIC", "CacheBlend", "CacheBlend by keys"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Texts and questions of one kind.

    Attributes:
        about: In words.
        chunk: Tokens of a chunk.
        draw: Options of `draw_facts`.
        ask: Options of `ask`.
        fits: Which facts may be asked about.
    """

    about: str
    chunk: int = CHUNK
    draw: dict[str, Any] = field(default_factory=lambda: {"by_id": (1.0, 1.0), "ids_first": 1.0})
    ask: dict[str, Any] = field(default_factory=dict)
    fits: Callable[[Facts], Bool[Tensor, "batch facts"]] = lambda facts: facts.by_id

    def spans(self) -> Spans:
        """Of the chunks."""
        return tuple(pairwise(range(PREFIX, PREFIX + SENTENCES * SENTENCE + 1, self.chunk)))


def _told_elsewhere(facts: Facts) -> Bool[Tensor, "batch facts"]:
    place = torch.arange(SENTENCES)
    return facts.by_id & (facts.defined // PEOPLE < place // PEOPLE)


def _cut(facts: Facts) -> Bool[Tensor, "batch facts"]:
    """Between the name and the value."""
    begin = torch.arange(SENTENCES) * SENTENCE
    return ((begin // CUT) < (begin + VALUE) // CUT) & (facts.relation != ID)


NAMED: dict[str, Any] = {"by_id": (0.0, 0.0)}
TASKS = {
    "one hop": Task(about="facts that name the person", draw=NAMED, fits=lambda facts: facts.relation != ID),
    "two hops": Task(about="facts that name an id, which the first chunk tells"),
    "starved two hops": Task(about="the same, the person behind three letters", ask={"letters": (3, 3)}),
    "passages": Task(
        about="ids told in any chunk before",
        draw={"by_id": (1.0, 1.0), "ids_first": 0.0},
        fits=_told_elsewhere,
    ),
    "other words": Task(about="two hops, no word of the fact in the question", ask={"nouns": 1.0}),
    "cut facts": Task(about="facts that name the person, cut before the value", chunk=CUT, draw=NAMED, fits=_cut),
}


class Known(RecomputePolicy):
    """Rows that are known beforehand."""

    def __init__(self, rows: Int[Tensor, "rows"]):
        self.known = rows

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """They alone."""
        return self.known


def ways(budget: float) -> dict[str, Callable[[int], RecomputePolicy]]:
    """By name the methods of a budget; each is given the number of the question."""
    infoflow = partial(InfoFlowKV, recompute=budget)
    same: dict[str, RecomputePolicy] = {
        "EPIC": EPIC(recompute=budget),
        "CacheBlend": CacheBlend(recompute=budget, exclude_first=True),
        "CacheBlend by keys": CacheBlend(recompute=budget, exclude_first=True, rank="k"),
        "InfoFlow": infoflow(),
        "InfoFlow l1": infoflow(norm="l1"),
        "InfoFlow all layers": infoflow(scoring_layers="0%-100%"),
        "InfoFlow hl-hp": infoflow(geometry="hl-hp"),
        "InfoFlow tl-tp": infoflow(geometry="tl-tp"),
        "InfoFlow hl-tp": infoflow(geometry="hl-tp"),
        "InfoFlow reorder": infoflow(reorder=True),
        "InfoFlow boundary=1": infoflow(boundary=1),
        "InfoFlow boundary=2": infoflow(boundary=2),
    }
    return {
        "random": lambda i: RandomRows(recompute=budget, seed=i),
        **{name: lambda i, method=method: method for name, method in same.items()},
    }


class Asked(NamedTuple):
    """The questions of a task.

    Attributes:
        ids: Of prefix and text.
        prompts: Questions, all of one length.
        answers: One token each.
        fact: The rows of the fact that is asked about.
        alike: The rows of all facts of its relation, the last repeated where there are fewer.
        guess: How probable the answer is to one who does not know whose ids are whose, and says what most of the facts
            say that can be meant: those of the relation; where the fact names an id, others that do, behind the place
            that tells it.
    """

    ids: Int[Tensor, "questions rows"]
    prompts: Int[Tensor, "questions prompt"]
    answers: Int[Tensor, "questions"]
    fact: Int[Tensor, "questions rows_of_fact"]
    alike: Int[Tensor, "questions rows_alike"]
    guess: Float[Tensor, "questions"]


def questions(task: Task, count: int) -> Asked:
    """So many, each about a text of its own; the same ones every time."""
    generator = torch.Generator().manual_seed(SEED)
    facts = draw_facts(2 * count, SENTENCES, generator, people=(PEOPLE, PEOPLE), **task.draw)
    fits = task.fits(facts)
    kept = fits.any(1).nonzero()[:count, 0]
    facts = Facts(*(part[kept] for part in facts))
    place = torch.multinomial(fits[kept].float(), 1, generator=generator)
    asked = ask(facts, place, generator, **task.ask)
    length = int(asked.length[0, 0])
    start = torch.full((len(kept), 1), WORDS.index("<s>"))
    alike = (facts.relation == facts.relation.gather(1, place)) & (facts.owner != BLANK)
    meant = alike & (facts.by_id == facts.by_id.gather(1, place))
    meant &= ~facts.by_id | (torch.arange(SENTENCES) > facts.defined.gather(1, place))
    said = torch.zeros(len(kept), len(WORDS)).scatter_add(1, facts.value, meant.float())  # by how many, each word
    others = torch.where(alike, torch.arange(SENTENCES), -1).sort(descending=True).values[:, :PEOPLE]
    return Asked(
        torch.cat([start, facts.ids], 1),
        asked.ids[:, 0, :length],
        asked.ids[:, 0, length],
        _rows(place),
        _rows(torch.where(others < 0, others[:, :1], others)),
        said.amax(1) / said.sum(1),
    )


def _rows(places: Int[Tensor, "questions facts"]) -> Int[Tensor, "questions rows"]:
    """Of facts at these places."""
    return (PREFIX + places[..., None] * SENTENCE + torch.arange(SENTENCE)).flatten(1).sort().values


Cells = dict[str, Float[Tensor, "measures questions"]]


def measure(
    model: Any,
    spans: Spans,
    asked: Asked,
    budgets: list[float],
    batch: int,
    track: Callable[[int], Callable[[], None]] = lambda length: lambda: None,
) -> Cells:
    """For each "method budget" four measures: rightness, KL divergence, the part of the fact chosen, how many rows.

    The divergence, in nats, is that of the answer's distribution from a full prefill's. All chunks have one length.
    """
    chunk = spans[0][1] - spans[0][0]
    ends: dict[str, Callable[[int], RecomputePolicy]] = {
        "full": lambda i: FullPrefill(),
        "none": lambda i: NoRecompute(),
        "the fact": lambda i: Known(some.fact[i]),
        "facts alike": lambda i: Known(some.alike[i]),
    }
    for at, word in enumerate(ROWS if asked.fact.shape[1] == SENTENCE else ()):
        ends[f"its {word}"] = lambda i, at=at: Known(some.fact[i, at : at + 1])
    trials = ends | {f"{name} {budget}": way for budget in budgets for name, way in ways(budget).items()}
    found: dict[str, list[Tensor]] = {name: [] for name in trials}
    batches = list(zip(*(part.split(batch) for part in asked), strict=True))
    advance = track(len(batches) * len(trials))
    for some in map(Asked._make, batches):
        contexts = Batch(model, some.ids.to(model.device), spans, some.prompts.to(model.device))
        full = contexts.patch([FullPrefill()] * len(some.ids)).logits.log_softmax(-1)
        for name, way in trials.items():
            found[name].append(_score(contexts.patch([way(i) for i in range(len(full))]), full, some, chunk))
            advance()
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def _score(patched: Rows, full: Tensor, asked: Asked, chunk: int) -> Float[Tensor, "measures questions"]:
    """What `measure` says of one method; `full` are the log-probabilities of a full prefill."""
    home = (asked.fact - PREFIX) // chunk
    moved = (patched.order[:, None] == home[..., None]).long().argmax(-1)
    rows = asked.fact + (moved - home) * chunk
    ours = patched.logits.log_softmax(-1)
    right = ours.argmax(-1).cpu() == asked.answers
    divergence = (full.exp() * (full - ours)).sum(-1).cpu()
    chosen = (patched.rows[:, :, None] == rows[:, None]).any(1).float().mean(1)
    return torch.stack([right, divergence, chosen, torch.full_like(divergence, patched.rows.shape[1])]).float()


def objection(gap: float, lead: float) -> str:
    """Why nothing can be said of methods on a task; empty if something can.

    Args:
        gap: What the full prefill gets right above the chunks side by side.
        lead: And above a guess.
    """
    reasons = {"no gap": gap, "the full prefill is no better than a guess": lead}
    return " and ".join(reason for reason, above in reasons.items() if above < GAP)


def summarise(
    cells: dict[str, Float[np.ndarray, "measures readers questions"]], guess: Float[np.ndarray, "questions"]
) -> dict[str, Any]:
    """Means and 95 % intervals of each method and budget; where there is an objection only what shows it."""
    readers, count = next(iter(cells.values())).shape[1:]
    draws = np.random.default_rng(0)
    weights = np.zeros((RESAMPLES, readers, count), np.float32)
    for resample in weights:
        for reader in draws.integers(readers, size=readers):
            resample[reader] += np.bincount(draws.integers(count, size=count), minlength=count)
    weights = weights.reshape(RESAMPLES, -1) / (readers * count)

    def interval(values: np.ndarray, resampled: np.ndarray) -> dict[str, float]:
        low, high = np.quantile(resampled, [0.025, 0.975])
        return {"value": float(values), "low": float(low), "high": float(high)}

    means = {name: cell.reshape(4, -1).mean(1) for name, cell in cells.items()}
    drawn = {name: weights @ cell[:2].reshape(2, -1).T for name, cell in cells.items()}  # [resamples, right and KL]
    full, none = (cells[end][0].mean(1) for end in ("full", "none"))  # by reader
    gap = interval(means["full"][0] - means["none"][0], drawn["full"][:, 0] - drawn["none"][:, 0])
    lead = interval(means["full"][0] - guess.mean(), drawn["full"][:, 0] - weights @ np.tile(guess, readers))
    why_not = objection(gap["value"], lead["value"])
    result: dict[str, Any] = {
        "guess": float(guess.mean()),
        "gap": gap,
        "lead": lead,
        "separates": not why_not,
        "objection": why_not,
        "readers": [not objection(*above) for above in zip(full - none, full - guess.mean(), strict=True)],
        "cells": {},
        "margins": {},
    }
    shown = ("full", "none") if why_not else cells

    def recovered(of: dict[str, np.ndarray], name: str) -> np.ndarray:
        right = {key: of[key][..., 0] for key in (name, "full", "none")}
        return (right[name] - right["none"]) / np.maximum(right["full"] - right["none"], 1e-9)

    for name in shown:
        result["cells"][name] = {
            "accuracy": interval(means[name][0], drawn[name][:, 0]),
            "recovered": interval(recovered(means, name), recovered(drawn, name)),
            "KL": interval(means[name][1], drawn[name][:, 1]),
            "of the fact": float(means[name][2]),
            "rows": float(means[name][3]),
            "readers": cells[name][0].mean(1).tolist(),
        }
    for budget in {name.rsplit(" ", 1)[1] for name in shown if name.startswith("EPIC")}:
        best = max((f"{name} {budget}" for name in BASELINES), key=lambda name: recovered(means, name))
        for name, other in (
            ("InfoFlow", best),
            ("InfoFlow boundary=1", f"EPIC {budget}"),
            ("InfoFlow boundary=2", f"EPIC {budget}"),
        ):
            ours = f"{name} {budget}"
            result["margins"][f"{ours} - {other}"] = interval(
                recovered(means, ours) - recovered(means, other), recovered(drawn, ours) - recovered(drawn, other)
            )
    return result


def report(
    title: str,
    readers: dict[str, Callable[[Track], Any]],
    tasks: dict[str, tuple[str, Spans, Asked]],
    budgets: list[float],
    batch: int,
    out: Path,
    about: dict[str, Any],
    commit: str,
) -> None:
    """Measure every task with every reader, and write what `summarise` says as JSON, a table and a picture.

    Args:
        title: Name of the files.
        readers: What brings each; it is given what shows progress.
        tasks: By name what it is about, its chunks, and its questions.
        budgets: Parts of the rows to recompute.
        batch: Questions that are answered together.
        out: Folder of what is measured; what is found there is not measured again.
        about: What else the JSON says.
        commit: That is measured, where git cannot tell.
    """
    found: dict[str, Any] = {}
    with progress() as track:
        for name, (kind, spans, asked) in tasks.items():
            files = [out / f"{i}-{name}.safetensors" for i in range(len(readers))]
            for (reader, bring), path in zip(readers.items(), files, strict=True):
                if not path.exists():
                    advance = partial(track, f"{name}, {reader}")
                    write_whole(path, save(measure(bring(track), spans, asked, budgets, batch, advance)))
            read = [load_file(path) for path in files]
            cells = {cell: torch.stack([one[cell] for one in read], 1).numpy() for cell in read[0]}
            found[name] = {"about": kind, **summarise(cells, asked.guess.numpy())}
    about = {"versions": versions(), **about, "tasks": found}
    if commit:
        about["versions"]["commit"] = commit
    path = RESULTS / f"{title}-{fastest()}.json"
    write_whole(path, json.dumps(about, indent=2).encode() + b"\n")
    write_whole(path.with_suffix(".md"), markdown(found).encode() + b"\n")
    write_whole(SHEETS / f"{title}-{fastest()}.png", figure_png(draw_tasks(found)))
    print(markdown(found))
    print(path)


def fastest() -> str:
    """The device for readers."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(
    readers: Annotated[str, typer.Option(help="Folders of readers, separated by commas.")],
    count: Annotated[int, typer.Option(help="Questions of a task.")] = 1024,
    batch: Annotated[int, typer.Option(help="Questions that are answered together.")] = 256,
    budgets: Annotated[
        str, typer.Option(help="Parts of the rows to recompute; '' leaves the methods out.")
    ] = "0.05,0.15,0.3,0.5",
    only: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    out: Annotated[Path, typer.Option(help="Folder of what is measured.")] = Path("eval-context"),
    commit: Commit = "",
) -> None:
    """Measure, summarise and write."""
    parts, names, folders = [float(part) for part in budgets.split(",") if part], only.split(","), readers.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(TASKS)}")
    settings = {"readers": readers, "questions": str(count), "budgets": budgets}
    claim(out, settings)
    tasks = {name: (TASKS[name].about, TASKS[name].spans(), questions(TASKS[name], count)) for name in names}
    about = {**settings, "sentences": SENTENCES}
    report("context", {folder: partial(_load, folder) for folder in folders}, tasks, parts, batch, out, about, commit)


def _load(folder: str, track: Track) -> Any:
    """The reader of a folder, where it is fastest."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.to(fastest()).eval()


if __name__ == "__main__":
    typer.run(main)
