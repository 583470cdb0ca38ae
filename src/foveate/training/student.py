# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Teacher and student in one model: with method and LoRA it is the student, without them the teacher."""

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, WanPipeline
from diffusers.training_utils import cast_training_params
from jaxtyping import Float
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from foveate.diffusers.apply import apply
from foveate.methods import Method
from foveate.pipelines.lora import pack_lora
from foveate.pipelines.request import Request
from foveate.training.families import family_of
from foveate.training.pictures import NoisyLatents
from foveate.training.trained import unsharded

__all__ = ["Recipe", "Student"]

LAYERS = "paper", "all"
LEVELS = "uniform", "shifted"
RATES = {"prodigy": 1.0, "adamw": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a distillation. Defaults from the HilbertA paper.

    Attributes:
        method: Method of the student.
        rank: Rank of the LoRA, and its alpha.
        layers: Layers with a LoRA: "paper", or "all", which adds the feed-forward and output layers of single blocks
            and the last layer of the model.
        optimizer: "prodigy", which finds its own step size, or "adamw".
        rate: Learning rate; None is 1 for Prodigy and 1e-4 for AdamW.
        levels: Distribution of the noise levels: "uniform", or "shifted" towards noise like the scheduler's, more
            for larger images.
        cool_down: Last fraction of the steps, over which the rate falls linearly to 0.
        batch: Batch size over all devices.
        guidance: Guidance scale of teacher and student, if the model takes one.
        seed: Seed of the initial LoRA, the order of the images and the noise.
    """

    method: Method
    rank: int = 4
    layers: str = "paper"
    optimizer: str = "prodigy"
    rate: float | None = None
    levels: str = "uniform"
    cool_down: float = 0.0
    batch: int = 32
    guidance: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        if self.optimizer not in RATES:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: choose {' or '.join(RATES)}")
        if self.layers not in LAYERS:
            raise ValueError(f"unknown layers {self.layers!r}: choose {' or '.join(LAYERS)}")
        if self.levels not in LEVELS:
            raise ValueError(f"unknown levels {self.levels!r}: choose {' or '.join(LEVELS)}")
        if self.optimizer == "prodigy" and find_spec("prodigyopt") is None:
            raise ValueError("prodigyopt is missing: pip install 'foveate[train]', or use the optimizer adamw")
        if self.rank < 1 or self.batch < 1:
            raise ValueError(f"rank and batch must be 1 or more, not {self.rank} and {self.batch}")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"the learning rate must be above 0, not {self.rate}")
        if not 0 <= self.cool_down <= 1:
            raise ValueError(f"cool_down is the last fraction of the steps, 0 to 1, not {self.cool_down}")
        if not self.method.always:
            raise ValueError(
                "a LoRA is distilled for every noise level: leave start_percent and end_percent out, and take one "
                f"{self.method.scheduled or 'setting'}, no schedule"
            )

    @property
    def first_rate(self) -> float:
        """Learning rate before the cool-down."""
        return self.rate or RATES[self.optimizer]

    def optimizer_of(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer for these parameters."""
        options = {"lr": self.first_rate, "betas": (0.9, 0.999), "weight_decay": 1e-4}
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, **options)
        from prodigyopt import Prodigy

        with redirect_stdout(io.StringIO()):  # it prints that its weight decay is decoupled
            return Prodigy(parameters, use_bias_correction=True, safeguard_warmup=True, **options)


class Student:
    """A pipeline with a method and a LoRA; without both it is the teacher.

    Args:
        pipeline: The pipeline. It keeps the LoRA, and the method until `finish`; all other weights are frozen.
        recipe: Method and LoRA.
        request: Size, and frames of a video.
        start: LoRA file to start from.

    Raises:
        ValueError: If the dtype is unsuitable for training, or `start` or the method does not fit the model.
    """

    def __init__(
        self, pipeline: FluxPipeline | WanPipeline, recipe: Recipe, request: Request, start: Path | None = None
    ):
        self.family = family_of(pipeline, request)
        self.transformer, self.recipe, self.start = pipeline.transformer, recipe, start
        self.dtype = self.transformer.dtype
        if self.dtype == torch.float16:
            raise ValueError("gradients are too small for float16: use bfloat16 or float32")
        self._add_lora()
        self._handle = apply(pipeline, recipe.method)

    def _add_lora(self) -> None:
        self.transformer.requires_grad_(False)
        rank, layers = self.recipe.rank, self.family.layers[self.recipe.layers]
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=layers)
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.seed)
            self.transformer.add_adapter(config)
        if self.start:
            self._load(self.start)
        cast_training_params(self.transformer, torch.float32)

    def _load(self, start: Path) -> None:
        layers = type(self.family.pipeline).lora_state_dict(str(start.parent), weight_name=start.name)
        layers = {name.removeprefix("transformer."): weight for name, weight in layers.items()}
        try:
            unknown = set_peft_model_state_dict(self.transformer, layers).unexpected_keys
        except RuntimeError as error:
            raise ValueError(f"{start} does not fit: it needs the model and the rank it was made with") from error
        if unknown:
            raise ValueError(f"{start} does not fit this model, which has no {unknown[0]}")

    @property
    def trained(self) -> list[nn.Parameter]:
        """Weights of the LoRA."""
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]

    def lora_file(self) -> bytes:
        """The LoRA as the content of a file; all devices must call it together."""
        return pack_lora(
            unsharded(get_peft_model_state_dict(self.transformer)), self.recipe.method, self.family.request.size
        )

    def finish(self) -> None:
        """Remove the method; the LoRA stays."""
        self._handle.remove()

    @contextmanager
    def teacher(self) -> Generator[None]:
        """Context in which the model is the teacher: dense, without the LoRA."""
        with self._handle.paused(), self.without_lora():
            yield

    @contextmanager
    def without_lora(self) -> Generator[None]:
        """Context in which the model runs with the method but without the LoRA."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    def loss(self, model: nn.Module, batch: NoisyLatents) -> Float[Tensor, ""]:
        """Mean squared difference between the velocities of student and teacher.

        Args:
            model: The transformer as the accelerator prepared it.
            batch: Input of both.

        Raises:
            ValueError: If the method stays dense at this size.
        """
        velocity = self._velocity(model, batch)  # before the teacher: FSDP needs the LoRA in its first forward
        if not self._handle.plans():
            raise ValueError(f"{self._handle.summary().layers[0].why}: there is nothing to distil at this size")
        with torch.no_grad(), self.teacher():
            goal = self._velocity(model, batch)
        return F.mse_loss(velocity.float(), goal.float())

    def _velocity(self, model: nn.Module, batch: NoisyLatents) -> Tensor:
        with torch.autocast(self.transformer.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return self.family.velocity(model, batch, self.recipe.guidance)
