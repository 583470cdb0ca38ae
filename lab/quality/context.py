# pyright: basic
"""Quality of methods that recompute rows of cached chunks, measured with readers trained from scratch.

python -m lab.quality.context --readers out/readers/0/reader,out/readers/1/reader,out/readers/2/reader

`python -m lab reader` trains a reader. Each task consists of texts of facts, split into chunks that are encoded alone,
and one question about each text. A task is reported only if the full prefill answers at least 10 % more questions than
the composed chunks without recomputation, and 10 % more than the best guess: otherwise there is no gap for a method to
close, or a guess closes it. All methods get the same questions and recompute the same number of rows, none of them in
the first chunk. CacheBlend also recomputes all rows of layers 0 and 1, as in its authors' code. Intervals are from a
bootstrap over readers and, within each reader, over questions. Measurements found in --out are reused.
"""

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
from foveate.apps.bench.context import encoder_of_ids
from foveate.apps.console import progress
from foveate.apps.demo.facts import BLANK, ID, SENTENCE, VALUE, Facts, draw_facts
from foveate.apps.demo.lexicon import WORDS
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.recompute_policy import FixedRows, RecomputePolicy, Spans
from foveate.plots.figures import figure_png
from foveate.transformers.context import PatchedBatch, patch_batch
from foveate.utils.device import versions
from foveate.utils.files import claim, write_whole
from foveate.utils.progress import Track
from lab.quality.common import SHEETS, Commit, device_type, save_result
from lab.quality.context_report import draw_tasks, markdown
from lab.training.questions import ask

PREFIX = 1  # tokens before every context
PEOPLE, SENTENCES = 6, 36  # per text: 6 ids and 30 facts, with 5 or 6 relations
CHUNK = PEOPLE * SENTENCE  # tokens: the first chunk has all ids, every other chunk has six sentences
CUT = 18  # tokens, not a multiple of a sentence
GAP = 0.1
SEED = 10**12  # not used in training
RESAMPLES = 2000
ROWS = "subject", "verb", "word before the value", "value", "full stop"
BASELINES = "random", "EPIC", "CacheBlend", "CacheBlend by keys"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Texts and questions of one kind.

    Attributes:
        about: Description.
        chunk: Tokens in a chunk.
        draw: Options of `draw_facts`.
        ask: Options of `ask`.
        fits: Mask of the facts that questions may be about.
    """

    about: str
    chunk: int = CHUNK
    draw: dict[str, Any] = field(default_factory=lambda: {"by_id": (1.0, 1.0), "ids_first": 1.0})
    ask: dict[str, Any] = field(default_factory=dict)
    fits: Callable[[Facts], Bool[Tensor, "batch facts"]] = lambda facts: facts.by_id

    def spans(self) -> Spans:
        """First row of each chunk, and the row after its last."""
        return tuple(pairwise(range(PREFIX, PREFIX + SENTENCES * SENTENCE + 1, self.chunk)))


def _id_in_earlier_chunk(facts: Facts) -> Bool[Tensor, "batch facts"]:
    place = torch.arange(SENTENCES)
    return facts.by_id & (facts.defined // PEOPLE < place // PEOPLE)


def _cut(facts: Facts) -> Bool[Tensor, "batch facts"]:
    """Facts with a chunk boundary between name and value."""
    begin = torch.arange(SENTENCES) * SENTENCE
    return ((begin // CUT) < (begin + VALUE) // CUT) & (facts.relation != ID)


NAMED: dict[str, Any] = {"by_id": (0.0, 0.0)}
TASKS = {
    "one hop": Task(about="facts that name the person", draw=NAMED, fits=lambda facts: facts.relation != ID),
    "two hops": Task(about="facts that name an id, which is told in the first chunk"),
    "starved two hops": Task(about="the same, with the person reached through three letters", ask={"letters": (3, 3)}),
    "passages": Task(
        about="ids told in any earlier chunk",
        draw={"by_id": (1.0, 1.0), "ids_first": 0.0},
        fits=_id_in_earlier_chunk,
    ),
    "other words": Task(about="two hops, and the question has no word of the fact", ask={"nouns": 1.0}),
    "cut facts": Task(about="facts that name the person, cut before the value", chunk=CUT, draw=NAMED, fits=_cut),
}


def policies(budget: float) -> dict[str, Callable[[int], RecomputePolicy]]:
    """The methods at one budget, by name. Each takes the number of the question, which seeds random rows."""
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


class TextsWithQuestions(NamedTuple):
    """Texts, and one question about each.

    Attributes:
        ids: Token ids of prefix and text.
        prompts: Token ids of the questions, all of one length.
        answers: Token id of each answer.
        fact: Rows of the fact in question.
        alike: Rows of all facts with the same relation. If there are fewer than in other texts, the last repeats.
        guess: Probability of the answer for a guesser that does not know whose an id is. It guesses the most frequent
            value among the possible facts: facts with the relation and, if the fact in question names an id, only
            facts that name an id and follow the definition of the id.
    """

    ids: Int[Tensor, "questions rows"]
    prompts: Int[Tensor, "questions prompt"]
    answers: Int[Tensor, "questions"]
    fact: Int[Tensor, "questions rows_of_fact"]
    alike: Int[Tensor, "questions rows_alike"]
    guess: Float[Tensor, "questions"]


def draw_questions(task: Task, count: int) -> TextsWithQuestions:
    """Questions of a task, each about a different text, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    facts = draw_facts(2 * count, SENTENCES, generator, people=(PEOPLE, PEOPLE), **task.draw)
    fits = task.fits(facts)
    kept = fits.any(1).nonzero()[:count, 0]
    facts = Facts(*(part[kept] for part in facts))
    place = torch.multinomial(fits[kept].float(), 1, generator=generator)
    questions = ask(facts, place, generator, **task.ask)
    length = int(questions.length[0, 0])
    start = torch.full((len(kept), 1), WORDS.index("<s>"))
    alike = (facts.relation == facts.relation.gather(1, place)) & (facts.owner != BLANK)
    possible = alike & (facts.by_id == facts.by_id.gather(1, place))
    possible &= ~facts.by_id | (torch.arange(SENTENCES) > facts.defined.gather(1, place))
    counts = torch.zeros(len(kept), len(WORDS)).scatter_add(1, facts.value, possible.float())  # of each value
    others = torch.where(alike, torch.arange(SENTENCES), -1).sort(descending=True).values[:, :PEOPLE]
    return TextsWithQuestions(
        torch.cat([start, facts.ids], 1),
        questions.ids[:, 0, :length],
        questions.ids[:, 0, length],
        _rows(place),
        _rows(torch.where(others < 0, others[:, :1], others)),
        counts.amax(1) / counts.sum(1),
    )


def _rows(places: Int[Tensor, "questions facts"]) -> Int[Tensor, "questions rows"]:
    """Rows of the facts at these places."""
    return (PREFIX + places[..., None] * SENTENCE + torch.arange(SENTENCE)).flatten(1).sort().values


Cells = dict[str, Float[Tensor, "measures questions"]]


def measure(
    model: Any,
    spans: Spans,
    questions: TextsWithQuestions,
    budgets: list[float],
    batch: int,
    track: Callable[[int], Callable[[], None]] = lambda length: lambda: None,
) -> Cells:
    """Four measures for each "method budget": correctness, KL divergence, chosen fraction of the fact, number of rows.

    The divergence of the answer's distribution from the full prefill is in nats. All chunks have one length.
    """
    chunk = spans[0][1] - spans[0][0]
    trials: dict[str, Callable[[int], RecomputePolicy]] = {
        "full": lambda i: FullPrefill(),
        "none": lambda i: NoRecompute(),
        "the fact": lambda i: FixedRows(some.fact[i]),
        "facts alike": lambda i: FixedRows(some.alike[i]),
    }
    for at, word in enumerate(ROWS if questions.fact.shape[1] == SENTENCE else ()):
        trials[f"its {word}"] = lambda i, at=at: FixedRows(some.fact[i, at : at + 1])
    for budget in budgets:
        trials |= {f"{name} {budget}": policy for name, policy in policies(budget).items()}
    found: dict[str, list[Tensor]] = {name: [] for name in trials}
    batches = list(zip(*(part.split(batch) for part in questions), strict=True))
    advance = track(len(batches) * len(trials))
    encoder = encoder_of_ids(model)
    for some in map(TextsWithQuestions._make, batches):
        chunks = encoder.encode([ids[start:stop].tolist() for ids in some.ids for start, stop in spans])
        texts = [chunks[i : i + len(spans)] for i in range(0, len(chunks), len(spans))]
        contexts = [encoder.compose(text) for text in texts]
        prompts = list(some.prompts.to(model.device))
        full = torch.empty(0)
        for name, policy in trials.items():
            patched = patch_batch(contexts, prompts, [policy(i) for i in range(len(contexts))])
            answers = torch.cat(patched.logits(last=1)).float().log_softmax(-1)
            patched.close()
            full = answers if name == "full" else full
            found[name].append(_score(patched, answers, full, some, chunk))
            advance()
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def _score(
    patched: PatchedBatch, answers: Tensor, full: Tensor, questions: TextsWithQuestions, chunk: int
) -> Float[Tensor, "measures questions"]:
    """Measures of one method, from the log-probabilities of the answers by the method and by the full prefill."""
    place = (questions.fact - PREFIX) // chunk  # chunk of each row of the fact
    moved = (torch.tensor(patched.orders)[:, None] == place[..., None]).long().argmax(-1)
    rows = questions.fact + (moved - place) * chunk
    right = answers.argmax(-1).cpu() == questions.answers
    divergence = (full.exp() * (full - answers)).sum(-1).cpu()
    found = [torch.isin(some, among) for some, among in zip(rows, patched.rows, strict=True)]
    chosen = torch.stack(found).float().mean(1)
    return torch.stack([right, divergence, chosen, torch.full_like(divergence, len(patched.rows[0]))]).float()


def objection(gap: float, lead: float) -> str:
    """Reason why a task cannot compare methods, or an empty string if it can.

    Args:
        gap: Accuracy of the full prefill minus accuracy of the composed chunks without recomputation.
        lead: Accuracy of the full prefill minus accuracy of a guess.
    """
    reasons = {"no gap": gap, "the full prefill is no better than a guess": lead}
    return " and ".join(reason for reason, above in reasons.items() if above < GAP)


def summarise(
    cells: dict[str, Float[np.ndarray, "measures readers questions"]], guess: Float[np.ndarray, "questions"]
) -> dict[str, Any]:
    """Means and 95 % intervals of each method and budget; with an objection, only of the full prefill and none."""
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
    tasks: dict[str, tuple[str, Spans, TextsWithQuestions]],
    budgets: list[float],
    batch: int,
    out: Path,
    about: dict[str, Any],
    commit: str,
) -> None:
    """Measure every task with every reader, and write the summary as JSON, as a table and as a figure.

    Args:
        title: Name of the files.
        readers: Loader of each reader, called with a progress bar.
        tasks: Description, chunks and questions of each task, by name.
        budgets: Fractions of the rows to recompute.
        batch: Questions in a batch.
        out: Folder of measurements. Existing measurements are reused.
        about: Further entries of the JSON file.
        commit: Measured commit, if git cannot tell.
    """
    found: dict[str, Any] = {}
    with progress() as track:
        for name, (kind, spans, questions) in tasks.items():
            files = [out / f"{i}-{name}.safetensors" for i in range(len(readers))]
            for (reader, load), path in zip(readers.items(), files, strict=True):
                if not path.exists():
                    advance = partial(track, f"{name}, {reader}")
                    write_whole(path, save(measure(load(track), spans, questions, budgets, batch, advance)))
            read = [load_file(path) for path in files]
            cells = {cell: torch.stack([one[cell] for one in read], 1).numpy() for cell in read[0]}
            found[name] = {"about": kind, **summarise(cells, questions.guess.numpy())}
    path = save_result(f"{title}-{device_type()}", {"versions": versions(), **about, "tasks": found}, commit)
    write_whole(path.with_suffix(".md"), markdown(found).encode() + b"\n")
    write_whole(SHEETS / f"{path.stem}.png", figure_png(draw_tasks(found)))
    print(markdown(found))
    print(path)


def main(
    readers: Annotated[str, typer.Option(help="Folders of readers, separated by commas.")],
    count: Annotated[int, typer.Option(help="Questions per task.")] = 1024,
    batch: Annotated[int, typer.Option(help="Questions in a batch.")] = 256,
    budgets: Annotated[
        str, typer.Option(help="Fractions of the rows to recompute, separated by commas; '' skips the methods.")
    ] = "0.05,0.15,0.3,0.5",
    only: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    out: Annotated[Path, typer.Option(help="Folder of measurements.")] = Path("eval-context"),
    commit: Commit = "",
) -> None:
    """Measure, summarise and write."""
    parts, names, folders = [float(part) for part in budgets.split(",") if part], only.split(","), readers.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}: choose from {', '.join(TASKS)}")
    settings = {"readers": readers, "questions": str(count), "budgets": budgets}
    claim(out, settings)
    tasks = {name: (TASKS[name].about, TASKS[name].spans(), draw_questions(TASKS[name], count)) for name in names}
    about = {**settings, "sentences": SENTENCES}
    report("context", {folder: partial(_load, folder) for folder in folders}, tasks, parts, batch, out, about, commit)


def _load(folder: str, track: Track) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.to(device_type()).eval()


if __name__ == "__main__":
    typer.run(main)
