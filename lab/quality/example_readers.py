"""Readers for lab/quality/examples.py, which answer questions from examples: a vote, and a trained in-context learner.

The learner is a small Llama that reads vectors instead of words: a start, one vector for the embedding and label of
each example, then the questions, each of which attends to the start, the examples and itself. The meaning of labels is
random in every training sequence, so the learner must infer it from the examples.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaModel

from foveate.utils.progress import Track
from lab.quality.example_pools import DIM, Task
from lab.training.loop import train
from lab.training.small_models import llama_config

__all__ = ["Learner", "Recipe", "Vote", "trained_learner", "training_batch"]

LABELS = 8
TEMPERATURE = 0.15  # temperature of the vote
SMOOTHING = 0.01  # fraction of the vote shared equally by all labels, so that a product of votes is not 0

Ids = list[list[int]]


class Vote:
    """A reader without training: examples vote for their labels, weighted by a softmax of cosines to the question."""

    def by_block(self, task: Task, ids: Ids) -> Float[Tensor, "blocks questions labels"]:
        """Log-probabilities of the labels from each block alone."""
        near = task.queries @ task.embeddings.T / TEMPERATURE
        label = one_hot(task.labels, task.classes).float()
        said = torch.stack([near[:, block].softmax(1) @ label[block] for block in ids])
        return ((1 - SMOOTHING) * said + SMOOTHING / task.classes).log()

    def windows(self, task: Task, partitions: list[Ids]) -> None:
        """None: a vote has no positions, so that windows equal one text."""


@dataclass(frozen=True)
class Recipe:
    """Size and training of a learner.

    Attributes:
        width: Hidden size.
        layers: Number of layers.
        steps: Training steps.
        batch: Sequences per step.
        rate: Learning rate of AdamW, which rises for the first twentieth of the steps and then falls to 0.
        seed: Seed of initial weights and sequences.
    """

    width: int = 128
    layers: int = 4
    steps: int = 5000
    batch: int = 128
    rate: float = 1e-3
    seed: int = 0


class Learner(nn.Module):
    """An in-context classifier of vectors."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.llama = LlamaModel(llama_config(1, recipe.width, recipe.layers, intermediate_size=3 * recipe.width))
        self.llama.embed_tokens.requires_grad_(False)  # it reads vectors
        self.embedding = nn.Linear(DIM, recipe.width)
        self.label = nn.Embedding(LABELS + 2, recipe.width)  # the last two: a question, and the start
        self.head = nn.Linear(recipe.width, LABELS)

    def forward(
        self,
        examples: Float[Tensor, "rows examples dim"],
        labels: Int[Tensor, "rows examples"],
        questions: Float[Tensor, "rows questions dim"],
        windows: int = 1,
    ) -> Float[Tensor, "rows questions labels"]:
        """Logits of the labels. The examples are read in parallel windows of equal length."""
        rows, count = questions.shape[:2]
        unknown = torch.full((rows, count), LABELS, device=labels.device)
        start = self.label.weight[-1].expand(rows, 1, -1)
        inputs = self.embedding(DIM**0.5 * torch.cat([examples, questions], 1)) + self.label(
            torch.cat([labels, unknown], 1)
        )
        mask, positions = layout(examples.shape[1], count, windows)
        hidden = self.llama(
            inputs_embeds=torch.cat([start, inputs], 1),
            attention_mask=mask.to(labels.device).expand(rows, 1, -1, -1),
            position_ids=positions.to(labels.device)[None],
            use_cache=False,
        ).last_hidden_state
        return self.head(hidden[:, -count:])

    @torch.no_grad()
    def by_block(self, task: Task, ids: Ids) -> Float[Tensor, "blocks questions labels"]:
        """Log-probabilities of the labels from each block alone."""
        return self._ask(task, torch.tensor(ids), 1)

    @torch.no_grad()
    def windows(self, task: Task, partitions: list[Ids]) -> Float[Tensor, "partitions questions labels"]:
        """Log-probabilities of the labels with each block as a parallel window."""
        return self._ask(task, torch.tensor(partitions).flatten(1), len(partitions[0]))

    def _ask(
        self, task: Task, ids: Int[Tensor, "rows examples"], windows: int
    ) -> Float[Tensor, "rows questions labels"]:
        device = self.head.weight.device
        name = torch.randperm(LABELS, generator=torch.Generator().manual_seed(len(task.labels)))[: task.classes]
        questions = task.queries.expand(len(ids), -1, -1)
        logits = self(
            task.embeddings[ids].to(device), name[task.labels[ids]].to(device), questions.to(device), windows
        )
        return logits.float().cpu()[..., name].log_softmax(-1)


def layout(examples: int, questions: int, windows: int) -> tuple[Bool[Tensor, "1 1 all all"], Int[Tensor, "all"]]:
    """Attention mask and positions of a start, windows of examples, and questions."""
    length = examples // windows
    window = torch.arange(examples) // length
    one = torch.ones(1, dtype=torch.long)
    positions = torch.cat([0 * one, 1 + torch.arange(examples) % length, (1 + length) * one.expand(questions)])
    among = (window[:, None] == window) & (torch.arange(examples)[:, None] >= torch.arange(examples))
    mask = torch.eye(1 + examples + questions, dtype=torch.bool)
    mask[:, 0] = True
    mask[1 : 1 + examples, 1 : 1 + examples] = among
    mask[1 + examples :, 1 : 1 + examples] = True
    return mask[None, None], positions


def training_batch(recipe: Recipe, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Examples, labels, questions and answers of a training step: random clusters with random labels."""
    generator = torch.Generator().manual_seed(recipe.seed * 10**6 + step)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    rows, questions = recipe.batch, 32
    examples = int(2 ** (1 + 6 * uniform(1)))  # 2 to 128
    preference = 1.5 * uniform(rows, 1) * torch.randn(rows, LABELS, generator=generator)
    unused = torch.arange(LABELS) >= torch.randint(2, LABELS + 1, (rows, 1), generator=generator)
    shares = preference.masked_fill(unused, -torch.inf).softmax(1).gather(1, uniform(rows, LABELS).argsort(1))
    labels = torch.multinomial(shares, examples + questions, replacement=True, generator=generator)
    clusters = torch.randint(1, 5, (rows, 1), generator=generator)
    cluster = labels * 4 + (clusters * uniform(rows, examples + questions)).long()
    centres = normalize(torch.randn(rows, LABELS * 4, DIM, generator=generator), dim=2)
    spread = (0.3 + 1.5 * uniform(rows, 1, 1)) / DIM**0.5
    vectors = centres.gather(1, cluster[..., None].expand(-1, -1, DIM))
    vectors = normalize(vectors + spread * torch.randn(vectors.shape, generator=generator), dim=2)
    return vectors[:, :examples], labels[:, :examples], vectors[:, examples:], labels[:, examples:]


def trained_learner(recipe: Recipe, folder: Path, device: str, track: Track) -> Learner:
    """A trained learner. An interrupted training is resumed."""
    learner = Learner(recipe).to(device)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=recipe.rate)
    schedule = LambdaLR(optimizer, lambda step: min(1, 20 * (step + 1) / recipe.steps, 1.02 - step / recipe.steps))

    def loss(step: int) -> Tensor:
        examples, labels, questions, answers = (part.to(device) for part in training_batch(recipe, step))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return cross_entropy(learner(examples, labels, questions).float().flatten(0, 1), answers.flatten())

    advance = track(f"learner {recipe.seed}", recipe.steps)
    train(folder, learner, optimizer, schedule, loss, recipe.steps, asdict(recipe), advance)
    return learner.eval()
