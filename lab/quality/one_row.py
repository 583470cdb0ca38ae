# pyright: basic, reportArgumentType=false
"""What it is worth to recompute some rows of cached chunks where every fact is a single token: the starved task.

python -m lab.quality.one_row --out out/one-row        # trains three readers, about 20 minutes on two CPU cores

A text tells four ids ("name has id"), and in four chunks behind them 16 facts ("id, relation, value"), each with one
token. A question lets a letter stand for a name, and another for a second name, and asks for the letter's relation: so
a prompt that has found out who is meant looks for a fact that knows its owner, which only a fact that was read behind
the ids does. One row can make all right; lab/quality/context.py asks readers of words, whose facts take six.

With two layers, as in the pilot of this task, CacheBlend would have all of them anew: here are six.
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
from transformers import LlamaConfig, LlamaForCausalLM

from foveate.utils.files import claim
from foveate.utils.progress import Track
from lab.quality.context import Asked, fastest, report
from lab.quality.quality import Commit
from lab.quality.small_training import trained

PEOPLE = RELATIONS = 4  # of a text
FACTS = PEOPLE * RELATIONS
SPANS = tuple(pairwise(range(1, 2 + PEOPLE + FACTS, PEOPLE)))  # a chunk of ids, and four of facts
PROMPT = 3  # tokens
EXAM = 10**12  # seeds from here on are never learned from

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
"""What a token of each kind says: there is one for every combination."""
FIRST = dict(
    zip(KINDS, accumulate((prod(SIZES[part] for part in parts) for parts in KINDS.values()), initial=0), strict=False)
)
"""The first token of each kind."""


def token(kind: str, *parts: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """The token of a kind that says this."""
    code = torch.zeros((), dtype=torch.long)
    for size, part in zip((SIZES[part] for part in KINDS[kind]), parts, strict=True):
        code = code * size + part
    return FIRST[kind] + code


@cache
def composition() -> Float[Tensor, "tokens parts"]:
    """Of which parts each token is made: its kind, and what it says."""
    columns = [("kind", kind) for kind in KINDS] + [(part, i) for part, size in SIZES.items() for i in range(size)]
    rows = []
    for kind, parts in KINDS.items():
        for said in product(*(range(SIZES[part]) for part in parts)):
            made_of = {("kind", kind), *zip(parts, said, strict=True)}
            rows.append([float(column in made_of) for column in columns])
    return torch.tensor(rows)


class Text(NamedTuple):
    """Texts, and what they tell.

    Attributes:
        ids: Tokens: who has which id, then the facts.
        names: Of the people.
        numbers: Their ids.
        relations: That are told of everybody.
        values: Of each person's relations.
        order: Which fact, by person and relation, stands at each place.
    """

    ids: Int[Tensor, "texts tokens"]
    names: Int[Tensor, "texts people"]
    numbers: Int[Tensor, "texts people"]
    relations: Int[Tensor, "texts relations"]
    values: Int[Tensor, "texts facts"]
    order: Int[Tensor, "texts facts"]


def draw(count: int, generator: torch.Generator) -> Text:
    """So many texts."""

    def some(kinds: int, of: int) -> Tensor:
        return torch.rand(count, of, generator=generator).argsort(1)[:, :kinds]

    names, numbers = some(PEOPLE, SIZES["name"]), some(PEOPLE, SIZES["id"])
    relations = some(RELATIONS, SIZES["relation"])
    values = torch.randint(SIZES["value"], (count, FACTS), generator=generator)
    order = some(FACTS, FACTS)
    facts = token("fact", numbers.repeat_interleave(RELATIONS, 1), relations.repeat(1, PEOPLE), values)
    told = token("has", names, numbers).gather(1, some(PEOPLE, PEOPLE))
    return Text(torch.cat([told, facts.gather(1, order)], 1), names, numbers, relations, values, order)


class Questions(NamedTuple):
    """Some about each text.

    Attributes:
        ids: Their tokens.
        answers: A token each.
        fact: Of person and relation, that is asked for.
        kind: What its last token is.
    """

    ids: Int[Tensor, "texts questions prompt"]
    answers: Int[Tensor, "texts questions"]
    fact: Int[Tensor, "texts questions"]
    kind: Int[Tensor, "texts questions"]


ASKS = "asks by letter", "asks by name", "asks by id", "asks id"


def ask(text: Text, kind: Int[Tensor, "texts questions"], generator: torch.Generator) -> Questions:
    """Questions of these kinds, which count the `ASKS`."""
    fact = torch.randint(FACTS, kind.shape, generator=generator)
    who = fact // RELATIONS
    other = (who + torch.randint(1, PEOPLE, kind.shape, generator=generator)) % PEOPLE
    letters = torch.rand(*kind.shape, SIZES["letter"], generator=generator).argsort(-1)[..., :2]
    name, number = text.names.gather(1, who), text.numbers.gather(1, who)
    relation = text.relations.gather(1, fact % RELATIONS)
    lets = token("let", letters, torch.stack([name, text.names.gather(1, other)], -1))
    turned = torch.rand(kind.shape, generator=generator) < 0.5
    lets = (
        torch.where(turned[..., None], lets.flip(-1), lets) * (kind == ASKS.index("asks by letter"))[..., None]
    )  # else starts
    last = torch.stack(
        [
            token("asks by letter", letters[..., 0], relation),
            token("asks by name", name, relation),
            token("asks by id", number, relation),
            token("asks id", name),
        ]
    ).gather(0, kind[None])[0]
    answers = torch.where(
        kind == ASKS.index("asks id"), token("id", number), token("value", text.values.gather(1, fact))
    )
    return Questions(torch.cat([lets, last[..., None]], -1), answers, fact, kind)


class Recipe(NamedTuple):
    """A reader and how it learns.

    Attributes:
        layers: Of the model.
        width: Of its hidden states, in heads of 32 channels.
        steps: Of training.
        batch: Texts of a step.
        questions: About each.
        rate: Of AdamW: rises over 200 steps, falls to 0 over the last half.
        knowing: Weight of knowing whom facts, behind the first layer, and questions, behind half of them, are about.
        seed: Of weights and texts.
    """

    layers: int = 6
    width: int = 128
    steps: int = 1000
    batch: int = 128
    questions: int = 6
    rate: float = 1.5e-3
    knowing: float = 0.5
    seed: int = 0


class Reader(nn.Module):
    """A Llama whose tokens are the sums of their parts while it learns."""

    made_of: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        made_of = composition()
        self.recipe = recipe
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(made_of),
                hidden_size=recipe.width,
                intermediate_size=2 * recipe.width,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.width // 32,
                max_position_embeddings=64,
                bos_token_id=FIRST["start"],
                eos_token_id=None,
            )
        )
        self.llama.model.embed_tokens.requires_grad_(False)
        self.parts = nn.Parameter(torch.randn(made_of.shape[1], recipe.width) / 2)
        self.who = nn.Linear(recipe.width, SIZES["name"], bias=False)
        self.register_buffer("made_of", made_of, persistent=False)

    def loss(self, step: int) -> Tensor:
        """Of the answers, and of whom facts and questions are about."""
        recipe, device = self.recipe, self.parts.device
        generator = torch.Generator().manual_seed(10**6 * recipe.seed + step)
        text = draw(recipe.batch, generator)
        chance = torch.tensor([0.25, 0.25, 0.3, 0.2]).expand(recipe.batch, -1)
        kind = torch.multinomial(chance, recipe.questions, replacement=True, generator=generator)
        asked = ask(text, kind, generator)
        read = 1 + text.ids.shape[1]
        ids = torch.cat([torch.zeros(recipe.batch, 1).long(), text.ids, asked.ids.flatten(1)], 1)
        at = torch.arange(ids.shape[1])
        part = torch.where(at < read, -1, (at - read) // PROMPT)  # -1 is the text, which all questions see
        seen = ((part == -1) | (part[:, None] == part)) & (at[:, None] >= at)
        states = self.llama.model(
            inputs_embeds=embedding(ids.to(device), self.made_of @ self.parts),
            position_ids=torch.where(at < read, at, read + (at - read) % PROMPT)[None].to(device),
            attention_mask=seen[None, None].to(device),
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states
        last = read - 1 + PROMPT * torch.arange(1, 1 + recipe.questions)
        said = self.llama.lm_head(states[-1][:, last])
        answers = cross_entropy(said.flatten(0, 1).float(), asked.answers.flatten().to(device))
        facts, questions = states[1][:, 1 + PEOPLE : read], states[recipe.layers // 2][:, last]
        owners = text.names.gather(1, text.order // RELATIONS), text.names.gather(1, asked.fact // RELATIONS)
        meant = (asked.kind != ASKS.index("asks by id")).to(device)
        known = self._known(facts.flatten(0, 1), owners[0].flatten()) + self._known(
            questions[meant], owners[1][meant.cpu()]
        )
        return answers + recipe.knowing * known

    def _known(self, states: Float[Tensor, "places width"], names: Int[Tensor, "places"]) -> Tensor:
        return cross_entropy(self.who(self.llama.model.norm(states)).float(), names.to(states.device))

    def finished(self) -> LlamaForCausalLM:
        """The language model alone."""
        self.llama.model.embed_tokens.weight.data = (self.made_of @ self.parts).detach()
        self.llama.set_attn_implementation("eager")
        return self.llama.eval()


def reader(recipe: Recipe, folder: Path, track: Track) -> Any:
    """It after its training, which goes on where it was broken off."""
    model = Reader(recipe).to(fastest())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, recipe.rate, (0.9, 0.98), weight_decay=0.01)

    def rate(step: int) -> float:
        return recipe.rate * min(1.0, (step + 1) / 200, 2 - 2 * step / recipe.steps)

    advance = track(f"reader {recipe.seed}", recipe.steps)
    trained(model, optimizer, model.loss, rate, recipe.steps, folder, recipe._asdict(), advance)
    return model.finished()


TASKS = {
    "starved": ("asks by letter", "facts of one token that name an id, the person behind a letter"),
    "by name": ("asks by name", "the same, and the question names the person"),
}


def questions(kind: str, count: int) -> Asked:
    """So many, each about a text of its own; the same ones every time."""
    generator = torch.Generator().manual_seed(EXAM)
    text = draw(count, generator)
    asked = ask(text, torch.full((count, 1), ASKS.index(kind)), generator)
    alike = text.order % RELATIONS == asked.fact % RELATIONS
    values = text.values.gather(1, text.order)[alike].view(count, PEOPLE)
    told = torch.zeros(count, SIZES["value"]).scatter_add(1, values, torch.ones(values.shape))
    return Asked(
        torch.cat([torch.zeros(count, 1).long(), text.ids], 1),
        asked.ids[:, 0],
        asked.answers[:, 0],
        1 + PEOPLE + (text.order == asked.fact).nonzero()[:, 1:],
        1 + PEOPLE + alike.nonzero()[:, 1].view(count, PEOPLE),
        told.amax(1) / PEOPLE,
    )


def main(
    seeds: Annotated[str, typer.Option(help="Of the readers, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Of training.")] = Recipe().steps,
    count: Annotated[int, typer.Option(help="Questions of a task.")] = 1024,
    batch: Annotated[int, typer.Option(help="Questions that are answered together.")] = 256,
    budgets: Annotated[str, typer.Option(help="Parts of the rows to recompute.")] = "0.05,0.15,0.3,0.5",
    out: Annotated[Path, typer.Option(help="Folder of readers and what is measured.")] = Path("eval-one-row"),
    commit: Commit = "",
) -> None:
    """Train, measure, summarise and write."""
    settings = {"seeds": seeds, "steps": str(steps), "questions": str(count), "budgets": budgets}
    claim(out, settings)
    tasks = {name: (about, SPANS, questions(kind, count)) for name, (kind, about) in TASKS.items()}
    recipes = [Recipe(steps=steps, seed=int(seed)) for seed in seeds.split(",")]
    readers = {f"reader {one.seed}": cache(partial(reader, one, out / f"reader-{one.seed}")) for one in recipes}
    parts = [float(part) for part in budgets.split(",")]
    report("one-row", readers, tasks, parts, batch, out, settings, commit)


if __name__ == "__main__":
    typer.run(main)
