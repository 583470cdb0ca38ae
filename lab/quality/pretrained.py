# pyright: basic
"""Quality of methods that recompute rows of cached chunks, measured with small pretrained language models.

python -m lab pretrained                                              # hours on two cores, minutes on a GPU
python -m lab pretrained --budgets 0.05,0.1,0.2,0.3 --no-variants     # continues with other budgets
python -m lab pretrained --tokens 8192                                # longer texts, in the same table

`lab.quality.pretrained_models` names the packages to install, `lab.quality.pretrained_questions` the kinds of
questions. Each text has four. A question is right if each token of its answer is the likeliest one, as in greedy
decoding. The divergence is that of the method's next-token distributions from those of the full prefill, and the NLL
that of the answer, both in nats and averaged over the tokens of the answer. All methods recompute the same number of
rows, none of them in the first chunk. Differences between methods are over the same questions; all intervals are from
a bootstrap over texts. Measurements are appended to --out: an interrupted run is continued, and the table is of all
texts there that every method of a budget has read; a variant of InfoFlow KV is over those that it has read too.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from foveate import InfoFlowKV
from foveate.apps.console import progress
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, NoRecompute, ProphetKV, RandomRows
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkEncoder
from foveate.transformers.attention import CACHE
from foveate.transformers.context import Context
from foveate.utils.device import versions
from foveate.utils.progress import Track
from foveate.utils.timing import now
from lab.quality.common import Commit, device_type, save_result
from lab.quality.pretrained_models import MODELS, pretrained
from lab.quality.pretrained_questions import KINDS, Text, digest, documentation, draw_news, draw_text

CHUNK = 256
BOUNDARY, SHARE = 8, 0.25
RESAMPLES = 2000
MEASURES = "right", "nll", "divergence", "rows", "seconds"
VARIANTS = (
    "hl-hp",
    "tl-tp",
    "hl-tp",
    "reorder",
    "all layers",
    "full-attention layers",
    f"boundary={BOUNDARY}, all layers",
)

Line = dict[str, Any]


def policies(budget: float, seed: int, layer_types: list[str]) -> dict[str, RecomputePolicy]:
    """Methods that recompute this fraction of the rows, by name.

    Args:
        budget: Fraction of the rows.
        seed: Seed of random rows.
        layer_types: Type of each layer of the model.
    """
    infoflow = partial(InfoFlowKV, recompute=budget)
    band = infoflow().layers(len(layer_types))
    full = tuple(layer for layer in band if layer_types[layer] == "full_attention")
    return {
        "InfoFlow KV": infoflow(),
        f"boundary={BOUNDARY}": infoflow(boundary=BOUNDARY),
        f"boundary={SHARE}": infoflow(boundary=SHARE),
        "ProphetKV": ProphetKV(recompute=budget),
        "CacheBlend": CacheBlend(recompute=budget, exclude_first=True),
        "EPIC": EPIC(recompute=budget),
        "random": RandomRows(recompute=budget, seed=seed),
        "hl-hp": infoflow(geometry="hl-hp"),
        "tl-tp": infoflow(geometry="tl-tp"),
        "hl-tp": infoflow(geometry="hl-tp"),
        "reorder": infoflow(reorder=True),
        "all layers": infoflow(scoring_layers="0%-100%"),
        f"boundary={BOUNDARY}, all layers": infoflow(boundary=BOUNDARY, scoring_layers="0%-100%"),
        **({"full-attention layers": infoflow(scoring_layers=full)} if 0 < len(full) < len(band) else {}),
    }


def measure(
    encoder: ChunkEncoder, text: Text, names: list[str], seed: int, runs: int = 1
) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Each method of `names`, such as "EPIC 0.15", with its measures of each question about the text.

    Everything is run so many times, and the seconds are those of the last one: the first also compiles kernels.
    """
    context = encoder.compose(encoder.encode(text.chunks))
    layer_types = _layer_types(encoder.model.config)
    prompts = [encoder.tokens(question.prompt) for question in text.questions]
    answers = [encoder.tokens(question.answer) for question in text.questions]
    both = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    for _ in range(runs):
        full, seconds = _full_prefill(context, both, [len(answer) for answer in answers])
    yield (
        "full",
        [
            _measures(logits, logits, answer, len(context), taken)
            for logits, answer, taken in zip(full, answers, seconds, strict=True)
        ],
    )
    for name in names:
        if name == "full":
            continue
        found: list[dict[str, float]] = []
        method, _, budget = name.rpartition(" ")  # no method: "none"
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            policy = policies(float(budget), seed + i, layer_types)[method] if method else NoRecompute()
            for _ in range(runs):
                began = now(encoder.device)
                with context.patch(policy, both[i].tolist(), prompt.tolist()) as patched:
                    logits = patched.logits(last=len(answer) + 1)[:-1]
                    taken = now(encoder.device) - began
                    measures = _measures(logits, full[i], answer, len(patched.rows), taken)
            found.append(measures)
        yield name, found


@torch.no_grad()
def _full_prefill(context: Context, texts: list[Tensor], answers: list[int]) -> tuple[list[Tensor], list[float]]:
    """Logits before each token of the answers, by the model itself, and the seconds of each question."""
    model = context.lm.model
    began = now(model.device)
    prefilled = model(input_ids=context.ids[None].to(model.device), use_cache=True, logits_to_keep=1)
    prefill = now(model.device) - began
    cache = getattr(prefilled, CACHE)
    found, seconds = [], []
    for ids, count in zip(texts, answers, strict=True):
        some = {CACHE: deepcopy(cache)}
        began = now(model.device)
        logits = model(input_ids=ids[None].to(model.device), **some, logits_to_keep=count + 1).logits
        found.append(logits[0, :-1])
        seconds.append(prefill + now(model.device) - began)
    return found, seconds


def _measures(logits: Tensor, full: Tensor, answer: Tensor, rows: int, seconds: float) -> dict[str, float]:
    ours, theirs = (x.float().log_softmax(-1).cpu() for x in (logits, full))
    answer = answer.cpu()
    return {
        "right": float((ours.argmax(-1) == answer).all()),
        "nll": -float(ours.gather(1, answer[:, None]).mean()),
        "divergence": max(0.0, float((theirs.exp() * (theirs - ours)).sum(-1).mean())),
        "rows": rows,
        "seconds": round(seconds, 4),
    }


def run(
    encoder: ChunkEncoder, path: Path, paragraphs: list[str], texts: int, names: list[str], tokens: int, track: Track,
    runs: int = 1,
) -> None:  # fmt: skip
    """Measure what the file does not have yet, and append one line of JSON for each text and method."""
    done = {(line["text"], line["method"]) for line in read(path)}
    advance = track(path.stem, texts)
    length = partial(_length, encoder)
    for number in range(texts):
        if missing := [name for name in names if (number, name) not in done]:
            # every fifth text is news, so that there are as many questions of each kind
            news = number % 5 == 4
            text = draw_news(number, tokens, length) if news else draw_text(number, paragraphs, tokens, CHUNK, length)
            kinds = [question.kind for question in text.questions]
            for name, found in measure(encoder, text, missing, 10 * number, runs):
                line = {"text": number, "method": name, "kinds": kinds}
                line |= {key: [one[key] for one in found] for key in MEASURES}
                if name in missing:
                    with path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        advance()


def read(path: Path) -> list[Line]:
    """The complete lines of a file of measurements; an interrupted write leaves at most a part of the last line."""
    if not path.exists():
        return []
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        path.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def _length(encoder: ChunkEncoder, text: str) -> int:
    return len(encoder.tokens(text))


def summarise(lines: list[Line]) -> list[dict[str, Any]]:
    """Rows of the result: each method and budget, over all questions and over those of each kind."""
    found = {(line["text"], line["method"]): line for line in lines}
    methods = list(dict.fromkeys(line["method"] for line in lines))
    budgets = dict.fromkeys(method.rpartition(" ")[2] for method in methods if method not in ("full", "none"))
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        every = ["full", "none", *(method for method in methods if method.endswith(f" {budget}"))]
        main = [name for name in every if name.removesuffix(f" {budget}") not in VARIANTS]
        variants = [[*main, name] for name in every if name not in main]
        for names in (main, *variants):  # a variant may have read fewer texts
            texts = [
                text for text in sorted({text for text, _ in found}) if all((text, name) in found for name in names)
            ]
            for kind in ("all", *KINDS) if texts else ():
                cells = {name: [_of_kind(found[text, name], kind) for text in texts] for name in names}
                shown = names if names == main else names[-1:]
                if count := sum(len(cell) for cell in cells["full"]):
                    about = {"budget": budget, "kind": kind, "texts": len(texts), "questions": count}
                    rows += [_row(name, cells, about) for name in shown]
    return rows


def _row(name: str, cells: dict[str, list[np.ndarray]], about: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name.removesuffix(f" {about['budget']}"), **about}
    for at, measure in enumerate(MEASURES[:3]):
        row[measure] = interval(cells[name], at)
        row[f"{measure} minus InfoFlow KV"] = interval(cells[name], at, cells[f"InfoFlow KV {about['budget']}"])
    values = np.concatenate(cells[name])
    return row | {"rows": round(float(values[:, 3].mean()), 1), "median_s": round(float(np.median(values[:, 4])), 4)}


def _of_kind(line: Line, kind: str) -> np.ndarray:
    """Measures of the questions of a kind about a text, [questions, measures]."""
    every = np.array([line[key] for key in MEASURES], float).T
    return every[[kind in ("all", one) for one in line["kinds"]]]


def interval(cells: list[np.ndarray], at: int, minus: list[np.ndarray] | None = None) -> list[float | None]:
    """Mean of a measure over questions, or of its difference, and its 95 % interval from a bootstrap over texts.

    A single text has no interval.
    """
    other = minus or [np.zeros_like(cell) for cell in cells]
    sums = np.array([(a - b)[:, at].sum() for a, b in zip(cells, other, strict=True)])
    counts = np.array([len(cell) for cell in cells])
    if len(cells) == 1:
        return [round(float(sums.sum() / counts.sum()), 4), None, None]
    drawn = np.random.default_rng(0).integers(len(cells), size=(RESAMPLES, len(cells)))
    totals = counts[drawn].sum(1)
    means = sums[drawn].sum(1)[totals > 0] / totals[totals > 0]
    return [round(float(x), 4) for x in (sums.sum() / counts.sum(), *np.quantile(means, (0.025, 0.975)))]


def markdown(models: dict[str, list[dict[str, Any]]], budget: str) -> str:
    """Table of all questions at one budget: accuracy, NLL and divergence with each model."""
    lines = [f"| {budget} of the rows | " + " | ".join(models) + " |", "|---" * (1 + len(models)) + "|"]
    some = {
        name: {row["method"]: row for row in rows if (row["budget"], row["kind"]) == (budget, "all")}
        for name, rows in models.items()
    }
    for method in dict.fromkeys(method for rows in some.values() for method in rows):
        cells = []
        for rows in some.values():
            row = rows.get(method)
            cells.append("" if row is None else "{:.2f}, {:.2f}, {:.4f}".format(*(row[m][0] for m in MEASURES[:3])))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    texts: Annotated[int, typer.Option(min=0, help="Texts, with four questions each. 0 only makes the table.")] = 75,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of a text.")] = 2048,
    budgets: Annotated[str, typer.Option(help="Fractions of the rows, separated by commas.")] = "0.15",
    variants: Annotated[bool, typer.Option(help="Measure variants of InfoFlow KV too.")] = True,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each method. The seconds are those of the last one.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder of measurements, which are continued.")] = Path("out/pretrained"),
    commit: Commit = "",
) -> None:
    """Judge InfoFlow KV and other methods with small pretrained language models."""
    out.mkdir(parents=True, exist_ok=True)
    paragraphs = documentation(out)
    with progress() as track:
        for name in models.split(",") if texts else ():
            model, tokenizer = pretrained(name, out, device, dtype)
            encoder = ChunkEncoder(model, tokenizer)
            names = ["full", "none"]
            for budget in budgets.split(","):
                some = list(policies(float(budget), 0, _layer_types(model.config)))
                names += [f"{method} {budget}" for method in some if variants or method not in VARIANTS]
            run(encoder, out / f"{name}-{tokens}.jsonl", paragraphs, texts, names, tokens, track, runs)
    found = {path.stem: summarise(read(path)) for name in MODELS for path in sorted(out.glob(f"{name}-*.jsonl"))}
    about = {"models": {name: about for name, (_, about) in MODELS.items()}, "texts": digest(paragraphs)}
    rows = [
        {"model": stem.rpartition("-")[0], "tokens": int(stem.rpartition("-")[2])} | row
        for stem, rows in found.items()
        for row in rows
    ]
    path = save_result(f"pretrained-{device_type()}", {"versions": versions(), **about, "rows": rows}, commit)
    for budget in dict.fromkeys(row["budget"] for row in rows):
        print(markdown(found, budget), end="\n\n")
    print(path)
