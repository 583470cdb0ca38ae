# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Training of the built-in reader on texts of facts and of labelled examples, with several questions about each.

A question attends to the text and to itself, not to other questions. An auxiliary loss at the middle layer predicts
the person of each fact and each question, so that an id is resolved where it is read and not only when a question
needs it.
"""

import copy
import csv
import io
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from accelerate import Accelerator
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM
from transformers.utils import logging

from foveate.apps.console import Minutes, RunFolder, Seed, console, print_outcome, progress
from foveate.apps.demo.facts import BLANK, SENTENCE, VALUE, Facts, draw_facts
from foveate.apps.demo.labels import EXAMPLE, INPUT, draw_labelled
from foveate.apps.demo.lexicon import WORDS, reader_tokenizer
from foveate.training.run import Phase, Run, RunOptions
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.progress import Track, silent
from lab.training.questions import QuestionTokens, ask
from lab.training.small_models import HEAD_DIM, llama_config, parallel_questions

__all__ = ["Lesson", "ReaderRecipe", "ReaderTraining", "lesson", "main", "train_reader", "untrained_reader"]

START = WORDS.index("<s>")
LIKENESS = 2.5  # initial attention score between equal tokens
EXAM = 10**9  # first held-out seed
EASY: dict[str, Any] = {"begun": 1.0, "numbers": 0.5}
ALL_BY_ID: dict[str, Any] = {"by_id": (1.0, 1.0), "ids_first": 1.0}  # while names suffice, a reader never learns ids
USUAL: dict[str, Any] = {"begun": 0.2, "nouns": 0.3, "numbers": 0.4}


@dataclass(frozen=True, kw_only=True)
class ReaderRecipe:
    """Model size and hyperparameters.

    Attributes:
        layers: Number of layers.
        width: Width of the hidden states; a head has 32 channels, and two heads share keys and values.
        steps: Training steps.
        batch: Texts in a step.
        questions: Questions about each text.
        labelled: Fraction of the texts that are labelled examples.
        sentences: Possible numbers of sentences, chosen at random in each step; multiples of 6.
        letters: Maximum length of the chain of letters between a question and a name.
        easy: First fraction of the steps, with the two shortest texts, all facts by id, and sentences to complete.
        rate: Learning rate of AdamW: warms up over the first 2 % of the steps, falls to 0 over the last half.
        knowing: Weight of the auxiliary loss.
        seed: Seed of weights and texts.
    """

    layers: int = 6
    width: int = 256
    steps: int = 3000
    batch: int = 256
    questions: int = 8
    labelled: float = 0.2
    sentences: tuple[int, ...] = (6, 12, 18, 24, 30, 36)
    letters: int = 3
    easy: float = 0.4
    rate: float = 1.5e-3
    knowing: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % 64 or self.width < 64:
            raise ValueError(f"width must be a multiple of 64, not {self.width}: two heads share keys and values")


def untrained_reader(recipe: ReaderRecipe) -> LlamaForCausalLM:
    """A Llama with random weights in which every other head attends to equal tokens.

    A head that attends to earlier occurrences of the same word resolves ids. This takes longest to learn; with plain
    random weights most readers never learned it.
    """
    torch.manual_seed(recipe.seed)
    config = llama_config(
        -(-len(WORDS) // 8) * 8,
        recipe.width,
        recipe.layers,
        num_key_value_heads=recipe.width // HEAD_DIM // 2,
        max_position_embeddings=256,  # the longest lesson has 210 tokens
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=WORDS.index("</s>"),
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    usual = model.config.initializer_range**2 * recipe.width * HEAD_DIM**0.5  # usual score between equal tokens
    with torch.no_grad():
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            queries, keys = attention.q_proj.weight, attention.k_proj.weight
            queries *= (LIKENESS / usual) ** 0.5
            keys.copy_(queries.unflatten(0, (-1, 2, HEAD_DIM))[:, 0].flatten(0, 1))
    return model


class Lesson(NamedTuple):
    """A batch of texts, each followed by its questions.

    Attributes:
        ids: Tokens.
        next: Target of the next token, or BLANK.
        owners: Target of the auxiliary loss: the person at the subject and value of a fact and at the last token of a
            question, BLANK elsewhere.
        text: Number of tokens of the text.
        question: Number of tokens of each question, with padding.
    """

    ids: Int[Tensor, "batch tokens"]
    next: Int[Tensor, "batch tokens"]
    owners: Int[Tensor, "batch tokens"]
    text: int
    question: int

    def places(self) -> tuple[Int[Tensor, "tokens"], Bool[Tensor, "tokens tokens"]]:
        """Position of each token, with every question directly after the text, and the attention mask."""
        positions, mask = parallel_questions(self.ids.shape[1], self.text, self.question)
        return positions.to(self.ids.device), mask.to(self.ids.device)


def lesson(recipe: ReaderRecipe, seed: int, sentences: int, *, easy: bool = False) -> Lesson:
    """Texts of one step; easy texts have all facts by id and only sentences to complete."""
    generator = torch.Generator().manual_seed(seed)
    labelled = round(recipe.labelled * recipe.batch)
    facts = draw_facts(recipe.batch - labelled, sentences, generator, **(ALL_BY_ID if easy else {}))
    places = torch.multinomial((facts.owner != BLANK).float(), recipe.questions, replacement=True, generator=generator)
    questions = ask(facts, places, generator, **(EASY if easy else {**USUAL, "letters": (0, recipe.letters)}))
    examples = draw_labelled(labelled, sentences * SENTENCE // EXAMPLE, recipe.questions, generator)
    inputs = _about_labels(examples.questions)
    length = max(part.shape[-1] for part in (questions.ids, inputs.ids))

    def with_questions(texts: Tensor, *questions: Tensor) -> Tensor:
        rows = [F.pad(part, (0, length - part.shape[-1]), value=BLANK).flatten(1) for part in questions]
        return torch.cat([texts, torch.cat(rows)], 1)

    first = torch.full((recipe.batch, 1), BLANK)
    ids = with_questions(torch.cat([facts.ids, examples.ids]), questions.ids, inputs.ids)
    following = torch.cat([torch.full_like(facts.ids, BLANK), examples.labels])
    following = with_questions(following, questions.answers, inputs.answers)
    owners = torch.cat([_owners(facts), torch.full_like(examples.ids, BLANK)])
    owners = with_questions(owners, questions.owners, inputs.owners)
    return Lesson(
        torch.cat([first.clamp(min=START), ids.clamp(min=START)], 1),
        torch.cat([first, following], 1),
        torch.cat([first, owners], 1),
        1 + facts.ids.shape[1],
        length,
    )


def _owners(facts: Facts) -> Int[Tensor, "batch tokens"]:
    """Name of the person at the subject and at the value of each fact, BLANK elsewhere."""
    spread = torch.full((*facts.owner.shape, SENTENCE), BLANK)
    spread[..., [0, VALUE]] = facts.owner[..., None]
    return spread.flatten(1)


def _about_labels(ids: Int[Tensor, "batch questions tokens"]) -> QuestionTokens:
    """Inputs of labelled examples as questions without a person."""
    return QuestionTokens(ids, torch.full(ids.shape[:2], INPUT + 1), torch.full(ids.shape[:2], BLANK))


class Lessons(Dataset[Lesson]):
    """The lessons of a run, by step."""

    def __init__(self, recipe: ReaderRecipe):
        self.recipe = recipe

    def __getitem__(self, step: int) -> Lesson:
        easy = step < self.recipe.easy * self.recipe.steps
        chance = random.Random(f"{self.recipe.seed} {step}")
        sentences = chance.choice(self.recipe.sentences[: 2 if easy else None])
        return lesson(self.recipe, chance.randrange(EXAM), sentences, easy=easy)


class ReaderTraining(Run):
    """A training run on one device.

    Args:
        out: Folder of the run, with the reader in its folder "reader".
        recipe: Model size and hyperparameters.
        accelerator: Determines the device.
        options: Other settings.
    """

    def __init__(self, out: Path, recipe: ReaderRecipe, accelerator: Accelerator, options: RunOptions):
        self.recipe = recipe
        model = untrained_reader(recipe).to(accelerator.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), recipe.rate, (0.9, 0.98), weight_decay=0.01, fused=accelerator.device.type == "cuda"
        )
        trained = Trained(model, [accelerator.prepare(optimizer)])
        super().__init__(out, accelerator, model, trained, {"recipe": repr(recipe)}, options)

    def parts(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return {"model": self.trained}

    def phases(self, steps: int) -> Iterator[Phase]:
        """Remaining steps, with one lesson each."""
        if self.step < steps:
            yield Phase(Lessons(self.recipe), range(self.step, steps), 1, 1, itemgetter(0))

    def loss(self, batch: Lesson) -> Tensor:
        """Cross entropy of the next token, plus the auxiliary loss."""
        model: Any = self.model
        at, mask = batch.places()
        with self.accelerator.autocast():
            states = model.model(
                input_ids=batch.ids,
                position_ids=at[None],
                attention_mask=mask[None, None],
                use_cache=False,
                output_hidden_states=True,
            ).hidden_states
            known, owned = batch.next != BLANK, batch.owners != BLANK
            answers = F.cross_entropy(model.lm_head(states[-1][known]).float(), batch.next[known])
            middle = model.model.norm(states[self.recipe.layers // 2][owned])
            owners = F.cross_entropy(model.lm_head(middle).float(), batch.owners[owned])
        return answers + self.recipe.knowing * owners

    def rate(self, done: float) -> float:
        """Warm-up, constant, decay to 0."""
        return self.recipe.rate * min(1.0, done / 0.02, (1 - done) / 0.5)

    def export(self) -> None:
        """Write the folder of the reader in float16; it loads in float32."""
        logging.disable_progress_bar()
        copy.deepcopy(self.model).half().save_pretrained(self.out / "reader")
        reader_tokenizer().save_pretrained(self.out / "reader")
        path = self.out / "reader" / "config.json"
        write_whole(path, json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2).encode() + b"\n")

    @torch.no_grad()
    def sample(self) -> None:
        """Append a line to accuracy.csv: the accuracy on each kind of question."""
        path, kinds = self.out / "accuracy.csv", accuracy(self.model)
        file = io.StringIO()
        file.write(path.read_text() if path.exists() else ",".join(["step", *kinds]) + "\n")
        csv.writer(file, lineterminator="\n").writerow([self.step, *(f"{value:.4f}" for value in kinds.values())])
        write_whole(path, file.getvalue().encode())


KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "begun": (False, {"begun": 1.0}),
    "begun by id": (True, {"begun": 1.0}),
    "named": (False, {}),
    "by id": (True, {}),
    "1 letter": (True, {"letters": (1, 1)}),
    "2 letters": (True, {"letters": (2, 2)}),
    "3 letters": (True, {"letters": (3, 3)}),
    "other words": (True, {"nouns": 1.0}),
}
"""Kinds of questions by name: whether the fact mentions the id, and the options of `ask`."""


@torch.no_grad()
def accuracy(model: Any, sentences: int = 30, texts: int = 256) -> dict[str, float]:
    """Accuracy on each kind of question, on held-out texts."""

    def right(ids: Tensor, questions: Any) -> float:
        longest = int(questions.length.max())
        rows = torch.cat([torch.full((len(ids), 1), START), ids, questions.ids[:, 0, : longest + 1]], 1)
        last = ids.shape[1] + longest
        logits = model(input_ids=rows[:, :-1].to(model.device)).logits[:, last]
        return float((logits.argmax(-1).cpu() == rows[:, -1]).float().mean())

    found = {}
    for name, (by_id, options) in KINDS.items():
        generator = torch.Generator().manual_seed(EXAM)
        facts = draw_facts(texts, sentences, generator, by_id=(0.5, 0.5), ids_first=1.0)
        chosen = torch.where(facts.by_id, 1.0, 0.01) if by_id else (facts.owner == facts.subject).float()
        chosen = chosen * (facts.owner != BLANK)
        found[name] = right(
            facts.ids, ask(facts, torch.multinomial(chosen, 1, generator=generator), generator, **options)
        )
    generator = torch.Generator().manual_seed(EXAM)
    labelled = draw_labelled(texts, sentences * SENTENCE // EXAMPLE, 1, generator)
    return {**found, "labels": right(labelled.ids, _about_labels(labelled.questions))}


def train_reader(
    out: Path,
    recipe: ReaderRecipe,
    *,
    minutes: float = math.inf,
    sample_every: int = 1000,
    track: Track = silent,
) -> bool:
    """Train a reader. Returns whether all steps are done. An existing run in `out` is resumed.

    Args:
        out: Folder of the run.
        recipe: Model size and hyperparameters.
        minutes: Time after which to write a checkpoint and stop.
        sample_every: Steps between lines of accuracy.csv.
        track: Shows progress.
    """
    options = RunOptions(at_once=1, minutes=minutes, sample_every=sample_every, track=track)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    return ReaderTraining(out, recipe, accelerator, options).run(recipe.steps, "reader")


def main(
    out: RunFolder = Path("reader-run"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = ReaderRecipe.steps,
    batch: Annotated[int, typer.Option(min=8, help="Texts in a step; 32 suits a CPU.")] = ReaderRecipe.batch,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = ReaderRecipe.layers,
    width: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = ReaderRecipe.width,
    minutes: Minutes = math.inf,
    seed: Seed = 0,
) -> None:
    """Train the built-in reader from scratch: a small Llama that answers questions about texts of facts.

    AutoModelForCausalLM and AutoTokenizer load the folder "reader" of the run. accuracy.csv records how many
    questions of each kind it answers, every 1,000 steps. The same command resumes from the newest checkpoint.
    """
    recipe = ReaderRecipe(steps=steps, batch=batch, layers=layers, width=width, seed=seed)
    with progress() as track:
        done = train_reader(out, recipe, minutes=minutes, track=track)
    console.print((out / "accuracy.csv").read_text(), end="")
    print_outcome(done, out / "reader")
