# pyright: basic
"""Accuracy of small pretrained language models with in-context examples chosen by Sub-CP, at random and otherwise.

python -m lab.quality.pretrained_examples --device cuda --dtype bfloat16   # 20 pools, 200 questions each
python -m lab.quality.pretrained_examples --pools 3 --questions 40         # hours on two cores

Every method chooses 16 examples of each pool; "nearest" (by embedding) and BM25 choose them for each question. A model
reads them as one text, each block in a window of its own, or each block alone, whose answers are mixed. The answer is
the label whose first token is likeliest. Gains are over random examples of the same pool, with 95 % intervals from a
bootstrap over pools. Answers are appended to --out, and an interrupted run is continued.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foveate.apps.console import progress
from foveate.methods.example_blocks import Blocks
from foveate.transformers.in_context import PrefilledContext, concatenate, ensemble, parallel_windows
from foveate.transformers.retrieval import bm25
from foveate.utils.device import versions
from lab.quality.common import Commit, device_type, save_result
from lab.quality.example_partitions import CONTROLS, PARTITIONS, RANDOM, partition
from lab.quality.examples import interval
from lab.quality.pretrained import read
from lab.quality.pretrained_models import MODELS, pretrained
from lab.quality.pretrained_pools import DATA, Pool, draw_pool, embedded, labelled

BLOCKS, SIZE = 4, 4
EXAMPLES = 300  # of a pool
DRAWS = 3  # runs of each random method
BATCH = 16  # questions in a forward pass on a CPU
BATCH_CUDA = 256
FOR_EACH_QUESTION = "nearest", "BM25"
ONE_TEXT, WINDOWS, MIXTURE = "one text", "parallel windows", "mixture"


class Reader:
    """A language model that reads examples and names the label of a text."""

    def __init__(self, model: Any, tokenizer: Any, labels: list[str]) -> None:
        self.model, self.tokenizer, self.labels = model, tokenizer, labels
        self.start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.first = torch.tensor([self._ids(f" {label}")[0] for label in labels])
        if len(self.first.unique()) < len(labels):
            raise ValueError(f"two of the labels {', '.join(labels)} begin with the same token: rename one")

    def example(self, text: str, label: str) -> list[int]:
        """Token ids of an example."""
        return self._ids(f"Text: {text}\nLabel: {label}\n\n")

    def question(self, text: str) -> Int[Tensor, "tokens"]:
        """Token ids of a text without its label."""
        return torch.tensor(self._ids(f"Text: {text}\nLabel:"))

    def probabilities(self, context: PrefilledContext, questions: list[Tensor]) -> Float[Tensor, "questions labels"]:
        """Probabilities of the labels, with sum 1."""
        size = BATCH if self.model.device.type == "cpu" else BATCH_CUDA
        batches = (questions[start : start + size] for start in range(0, len(questions), size))
        return torch.cat([self._after_the_last(some, context.logits) for some in batches]).softmax(-1)

    @torch.no_grad()
    def each_with_its_own(self, told: list[list[int]], questions: list[Tensor]) -> Float[Tensor, "questions labels"]:
        """Probabilities of the labels of questions, each after the tokens of its own examples."""
        found = []
        for start in range(0, len(questions), BATCH):
            some = [
                torch.cat([torch.tensor([*self.start, *before]), question])
                for before, question in zip(told[start : start + BATCH], questions[start : start + BATCH], strict=True)
            ]
            found.append(self._after_the_last(some, self._logits))
        return torch.cat(found).softmax(-1)

    def _logits(self, ids: Int[Tensor, "batch tokens"], keep: Int[Tensor, "kept"]) -> Tensor:
        device = self.model.device
        return self.model(ids.to(device), logits_to_keep=keep.to(device), use_cache=False).logits

    def _after_the_last(self, texts: list[Tensor], logits: Callable[..., Tensor]) -> Float[Tensor, "texts labels"]:
        """Logits of the labels after the last token of each text."""
        last = torch.tensor([len(ids) - 1 for ids in texts])
        kept, at = last.unique(return_inverse=True)
        # no token attends to the padding, which follows it
        found = logits(pad_sequence(texts, batch_first=True), kept).float().cpu()
        return found[torch.arange(len(texts)), at][:, self.first]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def hosts(reader: Reader, pool: Pool, ids: list[list[int]]) -> dict[str, Float[Tensor, "questions labels"]]:
    """Probabilities of the labels by each host that reads these blocks."""
    blocks = [[reader.example(pool.texts[i], pool.labels[i]) for i in block] for block in ids]
    questions = [reader.question(text) for text in pool.questions]
    separate = [
        reader.probabilities(concatenate(reader.model, [block], reader.start), questions).log() for block in blocks
    ]
    return {
        ONE_TEXT: reader.probabilities(concatenate(reader.model, blocks, reader.start), questions),
        WINDOWS: reader.probabilities(parallel_windows(reader.model, blocks, reader.start), questions),
        MIXTURE: ensemble(separate),
        f"{MIXTURE}, weighted": ensemble(separate, Blocks(ids, pool.embeddings).weights(pool.queries)),
    }


def nearest(method: str, pool: Pool, count: int) -> Iterator[list[int]]:
    """Examples for each question, the best last: nearest by embedding, or by BM25."""
    if method == "BM25":
        rank = bm25(tuple(pool.texts))
        for text in pool.questions:
            found = rank(text)  # only texts that share a word with the question
            yield [*found, *(i for i in range(len(pool.texts)) if i not in found)][:count][::-1]
    else:
        yield from (pool.queries @ pool.embeddings.T).topk(count).indices.flip(1).tolist()


def answer(reader: Reader, pool: Pool, method: str, seed: int) -> dict[str, float]:
    """Accuracy with the examples of a method, by host."""
    right = torch.tensor([reader.labels.index(label) for label in pool.answers])
    if method in FOR_EACH_QUESTION:
        told = [
            [token for i in ids for token in reader.example(pool.texts[i], pool.labels[i])]
            for ids in nearest(method, pool, BLOCKS * SIZE)
        ]
        found = reader.each_with_its_own(told, [reader.question(text) for text in pool.questions])
        return {ONE_TEXT: float((found.argmax(1) == right).float().mean())}
    codes = torch.tensor([reader.labels.index(label) for label in pool.labels])
    drawn: dict[str, list[float]] = {}
    for draw in range(DRAWS if method in RANDOM else 1):
        ids = partition(method, pool.embeddings, codes, BLOCKS, SIZE, 1000 * seed + draw)
        for host, probabilities in hosts(reader, pool, ids).items():
            drawn.setdefault(host, []).append(float((probabilities.argmax(1) == right).float().mean()))
    return {host: sum(each) / len(each) for host, each in drawn.items()}


def summarise(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean accuracy of each data set, method and host, and its gain over random examples and the controls."""
    rows: list[dict[str, Any]] = []
    for data in dict.fromkeys(line["data"] for line in lines):
        found = {(line["pool"], line["method"]): line["accuracy"] for line in lines if line["data"] == data}
        methods = list(dict.fromkeys(method for _, method in found))
        pools = [pool for pool in sorted({pool for pool, _ in found}) if all((pool, m) in found for m in methods)]
        for method in methods if pools else ():
            for host in found[pools[0], method]:
                ours = np.array([found[pool, method][host] for pool in pools])
                row = {"data": data, "method": method, "host": host, "pools": len(pools)}
                row["accuracy"] = round(float(ours.mean()), 4)
                for other in ("random", *CONTROLS):
                    if (pools[0], other) in found:
                        theirs = np.array([found[pool, other][host] for pool in pools])
                        row[f"gain over {other}"] = interval(ours - theirs)
                rows.append(row)
    return rows


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    data: Annotated[str, typer.Option(help="Data sets, separated by commas.")] = ",".join(DATA),
    pools: Annotated[int, typer.Option(min=0, help="Pools of each data set. 0 only makes the table.")] = 20,
    questions: Annotated[int, typer.Option(min=1, help="Questions about each pool.")] = 200,
    methods: Annotated[str, typer.Option(help="Methods, separated by semicolons. [dim]default: all[/]")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder of answers, which are continued.")] = Path("out/pretrained"),
    commit: Commit = "",
) -> None:
    """Choose examples, ask and write."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = methods.split(";") if methods else [*PARTITIONS, *FOR_EACH_QUESTION]
    sets = {name: labelled(name) for name in data.split(",")} if pools else {}
    rows_of = {name: embedded(name) for name in sets}
    with progress() as track:
        for name in models.split(",") if pools else ():
            model, tokenizer = pretrained(name, out, device, dtype)
            path = out / f"examples-{name}-{questions}.jsonl"
            done = {(line["data"], line["pool"], line["method"]) for line in read(path)}
            for kind, texts in sets.items():
                reader = Reader(model, tokenizer, sorted(set(texts.values())))
                advance = track(f"{name}, {kind}", pools * len(wanted))
                for number in range(pools):
                    pool = draw_pool(texts, rows_of[kind], EXAMPLES, questions, number)
                    for method in wanted:
                        if (kind, number, method) not in done:
                            line = {"data": kind, "pool": number, "method": method}
                            line["accuracy"] = answer(reader, pool, method, number)
                            with path.open("a") as file:
                                file.write(json.dumps(line) + "\n")
                        advance()
    rows = [
        {
            "model": path.stem.removeprefix("examples-").rpartition("-")[0],
            "questions": int(path.stem.rpartition("-")[2]),
        }
        | row
        for path in sorted(out.glob("examples-*.jsonl"))
        for row in summarise(read(path))
    ]
    about = {"models": {name: about for name, (_, about) in MODELS.items()}, "blocks": BLOCKS, "size": SIZE}
    about |= {"examples": EXAMPLES, "draws": DRAWS, "dtype": dtype}
    print(save_result(f"pretrained-examples-{device_type()}", {"versions": versions(), **about, "rows": rows}, commit))


if __name__ == "__main__":
    typer.run(main)
