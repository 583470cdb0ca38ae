# pyright: basic, reportArgumentType=false
"""Quality of methods that recompute rows of cached chunks, on texts with one token per fact.

python -m lab.quality.one_row --out out/one-row        # trains three readers, about 20 minutes on two CPU cores

A text states four ids ("name has id"), followed by four chunks with 16 facts ("id, relation, value"). Each id or fact
is one token. A question defines a letter as a name, and another letter as a second name, and asks for a relation of
the first letter. Once the prompt has resolved the person, it looks for a fact with a known owner, and only facts read
after the ids have one. So a single recomputed row can be enough. lab/quality/context.py measures readers of words,
whose facts take six tokens.

With two layers, CacheBlend would recompute the whole model, so these readers have six.
"""

from functools import cache, partial
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM

from foveate.utils.files import claim
from foveate.utils.progress import Track
from lab.quality.common import Commit, device_type
from lab.quality.context import TextsWithQuestions, report
from lab.training.loop import train
from lab.training.small_models import llama_config, parallel_questions

PEOPLE = RELATIONS = 4  # per text
FACTS = PEOPLE * RELATIONS
SPANS = tuple(pairwise(range(1, 2 + PEOPLE + FACTS, PEOPLE)))  # one chunk of ids, and four chunks of facts
PROMPT = 3  # tokens in a question
SEED = 10**12  # not used in training

SIZES = {"name": 16, "id": 8, "relation": 8, "value": 16, "letter": 6}
KINDS = {
    "start": (),
    "value": ("value",),
    "id": ("id",),
    "has": ("name", "id"),
    "fact": ("id", "relation", "value"),
    "let": ("letter", "name"),
    "asks by letter": ("letter", "relation"),
    "asks by name": ("name", "relation"),
    "asks by id": ("id", "relation"),
    "asks id": ("name",),
}
"""Kinds of tokens, and their parts. There is one token for every combination."""
FIRST = dict(
    zip(KINDS, accumulate((prod(SIZES[part] for part in parts) for parts in KINDS.values()), initial=0), strict=False)
)
"""First token id of each kind."""


def token(kind: str, *parts: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """Token id of this kind with these parts."""
    code = torch.zeros((), dtype=torch.long)
    for size, part in zip((SIZES[part] for part in KINDS[kind]), parts, strict=True):
        code = code * size + part
    return FIRST[kind] + code


@cache
def composition() -> Float[Tensor, "tokens parts"]:
    """Multi-hot matrix of the kind and the parts of each token."""
    columns = [("kind", kind) for kind in KINDS] + [(part, i) for part, size in SIZES.items() for i in range(size)]
    rows = []
    for kind, parts in KINDS.items():
        for values in product(*(range(SIZES[part]) for part in parts)):
            made_of = {("kind", kind), *zip(parts, values, strict=True)}
            rows.append([float(column in made_of) for column in columns])
    return torch.tensor(rows)


class Texts(NamedTuple):
    """Texts and their content.

    Attributes:
        ids: Token ids: first the ids of the persons, then the facts.
        names: Name of each person.
        numbers: Id of each person.
        relations: Relations of the facts, the same for all persons.
        values: Value of each fact, ordered by person and relation.
        order: Fact at each place of the text, as an index into `values`.
    """

    ids: Int[Tensor, "texts tokens"]
    names: Int[Tensor, "texts people"]
    numbers: Int[Tensor, "texts people"]
    relations: Int[Tensor, "texts relations"]
    values: Int[Tensor, "texts facts"]
    order: Int[Tensor, "texts facts"]


def draw(count: int, generator: torch.Generator) -> Texts:
    """Random texts."""

    def distinct(picked: int, among: int) -> Tensor:
        return torch.rand(count, among, generator=generator).argsort(1)[:, :picked]

    names, numbers = distinct(PEOPLE, SIZES["name"]), distinct(PEOPLE, SIZES["id"])
    relations = distinct(RELATIONS, SIZES["relation"])
    values = torch.randint(SIZES["value"], (count, FACTS), generator=generator)
    order = distinct(FACTS, FACTS)
    facts = token("fact", numbers.repeat_interleave(RELATIONS, 1), relations.repeat(1, PEOPLE), values)
    definitions = token("has", names, numbers).gather(1, distinct(PEOPLE, PEOPLE))
    return Texts(torch.cat([definitions, facts.gather(1, order)], 1), names, numbers, relations, values, order)


class TextQuestions(NamedTuple):
    """Several questions about each text.

    Attributes:
        ids: Token ids of the questions.
        answers: Token id of each answer.
        fact: Fact in question, as an index into `Texts.values`.
        kind: Kind of the question, as an index into `QUESTION_KINDS`.
    """

    ids: Int[Tensor, "texts questions prompt"]
    answers: Int[Tensor, "texts questions"]
    fact: Int[Tensor, "texts questions"]
    kind: Int[Tensor, "texts questions"]


QUESTION_KINDS = "asks by letter", "asks by name", "asks by id", "asks id"


def ask(text: Texts, kind: Int[Tensor, "texts questions"], generator: torch.Generator) -> TextQuestions:
    """Random questions of these kinds."""
    fact = torch.randint(FACTS, kind.shape, generator=generator)
    who = fact // RELATIONS
    other = (who + torch.randint(1, PEOPLE, kind.shape, generator=generator)) % PEOPLE
    letters = torch.rand(*kind.shape, SIZES["letter"], generator=generator).argsort(-1)[..., :2]
    name, number = text.names.gather(1, who), text.numbers.gather(1, who)
    relation = text.relations.gather(1, fact % RELATIONS)
    lets = token("let", letters, torch.stack([name, text.names.gather(1, other)], -1))
    flipped = torch.rand(kind.shape, generator=generator) < 0.5
    by_letter = kind == QUESTION_KINDS.index("asks by letter")  # others have start tokens instead
    lets = torch.where(flipped[..., None], lets.flip(-1), lets) * by_letter[..., None]
    last = torch.stack(
        [
            token("asks by letter", letters[..., 0], relation),
            token("asks by name", name, relation),
            token("asks by id", number, relation),
            token("asks id", name),
        ]
    ).gather(0, kind[None])[0]
    answers = torch.where(
        kind == QUESTION_KINDS.index("asks id"), token("id", number), token("value", text.values.gather(1, fact))
    )
    return TextQuestions(torch.cat([lets, last[..., None]], -1), answers, fact, kind)


class Recipe(NamedTuple):
    """Size and training of a reader.

    Attributes:
        layers: Number of layers.
        width: Hidden size, divided into heads of 32 channels.
        steps: Training steps.
        batch: Texts per step.
        questions: Questions per text.
        rate: Learning rate of AdamW, which rises over 200 steps and falls to 0 over the last half.
        owner_weight: Weight of a second loss, which predicts the owner of each fact after the first layer, and the
            person of each question after half of the layers.
        seed: Seed of weights and texts.
    """

    layers: int = 6
    width: int = 128
    steps: int = 1000
    batch: int = 128
    questions: int = 6
    rate: float = 1.5e-3
    owner_weight: float = 0.5
    seed: int = 0


class Reader(nn.Module):
    """A Llama with token embeddings that are sums of embeddings of their parts in training."""

    made_of: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        made_of = composition()
        self.recipe = recipe
        options = {"max_position_embeddings": 64, "bos_token_id": FIRST["start"]}
        self.llama = LlamaForCausalLM(llama_config(len(made_of), recipe.width, recipe.layers, **options))
        self.llama.model.embed_tokens.requires_grad_(False)
        self.parts = nn.Parameter(torch.randn(made_of.shape[1], recipe.width) / 2)
        self.who = nn.Linear(recipe.width, SIZES["name"], bias=False)
        self.register_buffer("made_of", made_of, persistent=False)

    def loss(self, step: int) -> Tensor:
        """Training loss: cross entropy of the answers, and of the persons of facts and questions."""
        recipe, device = self.recipe, self.parts.device
        generator = torch.Generator().manual_seed(10**6 * recipe.seed + step)
        text = draw(recipe.batch, generator)
        chance = torch.tensor([0.25, 0.25, 0.3, 0.2]).expand(recipe.batch, -1)
        kind = torch.multinomial(chance, recipe.questions, replacement=True, generator=generator)
        tasks = ask(text, kind, generator)
        read = 1 + text.ids.shape[1]
        ids = torch.cat([torch.zeros(recipe.batch, 1).long(), text.ids, tasks.ids.flatten(1)], 1)
        positions, mask = parallel_questions(ids.shape[1], read, PROMPT)
        states = self.llama.model(
            inputs_embeds=embedding(ids.to(device), self.made_of @ self.parts),
            position_ids=positions[None].to(device),
            attention_mask=mask[None, None].to(device),
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states
        last = read - 1 + PROMPT * torch.arange(1, 1 + recipe.questions)
        logits = self.llama.lm_head(states[-1][:, last])
        answers = cross_entropy(logits.flatten(0, 1).float(), tasks.answers.flatten().to(device))
        facts, questions = states[1][:, 1 + PEOPLE : read], states[recipe.layers // 2][:, last]
        owners = text.names.gather(1, text.order // RELATIONS), text.names.gather(1, tasks.fact // RELATIONS)
        named = (tasks.kind != QUESTION_KINDS.index("asks by id")).to(device)
        owner_loss = self._owner_loss(facts.flatten(0, 1), owners[0].flatten())
        owner_loss += self._owner_loss(questions[named], owners[1][named.cpu()])
        return answers + recipe.owner_weight * owner_loss

    def _owner_loss(self, states: Float[Tensor, "places width"], names: Int[Tensor, "places"]) -> Tensor:
        return cross_entropy(self.who(self.llama.model.norm(states)).float(), names.to(states.device))

    def finished(self) -> LlamaForCausalLM:
        """The trained language model, with ordinary token embeddings."""
        self.llama.model.embed_tokens.weight.data = (self.made_of @ self.parts).detach()
        return self.llama.eval()


def reader(recipe: Recipe, folder: Path, track: Track) -> Any:
    """A trained reader. An interrupted training is resumed."""
    model = Reader(recipe).to(device_type())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, recipe.rate, (0.9, 0.98), weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 200, 2 - 2 * step / recipe.steps))
    advance = track(f"reader {recipe.seed}", recipe.steps)
    loss = torch.autocast(device_type(), torch.bfloat16, enabled=device_type() == "cuda")(model.loss)
    train(folder, model, optimizer, schedule, loss, recipe.steps, recipe._asdict(), advance)
    return model.finished()


TASKS = {
    "starved": ("asks by letter", "facts of one token that name an id, with the person reached through a letter"),
    "by name": ("asks by name", "the same, with the person named in the question"),
}


def draw_questions(kind: str, count: int) -> TextsWithQuestions:
    """Questions of one kind, each about a different text, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    text = draw(count, generator)
    questions = ask(text, torch.full((count, 1), QUESTION_KINDS.index(kind)), generator)
    alike = text.order % RELATIONS == questions.fact % RELATIONS
    values = text.values.gather(1, text.order)[alike].view(count, PEOPLE)
    counts = torch.zeros(count, SIZES["value"]).scatter_add(1, values, torch.ones(values.shape))
    return TextsWithQuestions(
        torch.cat([torch.zeros(count, 1).long(), text.ids], 1),
        questions.ids[:, 0],
        questions.answers[:, 0],
        1 + PEOPLE + (text.order == questions.fact).nonzero()[:, 1:],
        1 + PEOPLE + alike.nonzero()[:, 1].view(count, PEOPLE),
        counts.amax(1) / PEOPLE,
    )


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the readers, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Training steps.")] = Recipe().steps,
    count: Annotated[int, typer.Option(help="Questions per task.")] = 1024,
    batch: Annotated[int, typer.Option(help="Questions in a batch.")] = 256,
    budgets: Annotated[
        str, typer.Option(help="Fractions of the rows to recompute, separated by commas.")
    ] = "0.05,0.15,0.3,0.5",
    out: Annotated[Path, typer.Option(help="Folder of readers and measurements.")] = Path("eval-one-row"),
    commit: Commit = "",
) -> None:
    """Train, measure, summarise and write."""
    settings = {"seeds": seeds, "steps": str(steps), "questions": str(count), "budgets": budgets}
    claim(out, settings)
    tasks = {name: (about, SPANS, draw_questions(kind, count)) for name, (kind, about) in TASKS.items()}
    recipes = [Recipe(steps=steps, seed=int(seed)) for seed in seeds.split(",")]
    readers = {f"reader {one.seed}": cache(partial(reader, one, out / f"reader-{one.seed}")) for one in recipes}
    parts = [float(part) for part in budgets.split(",")]
    report("one-row", readers, tasks, parts, batch, out, settings, commit)


if __name__ == "__main__":
    typer.run(main)
