# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Teacher and student in one model: with pattern and LoRA it is the student, without both it is the teacher."""

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from diffusers.training_utils import cast_training_params
from jaxtyping import Float
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from foveate.diffusers.apply import apply
from foveate.diffusers.lora import pack_lora
from foveate.methods import Method
from foveate.training.pairs import Noisy
from foveate.training.run import cooled
from foveate.training.trained import whole

__all__ = ["Recipe", "Student"]

PAPER = [
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),  # of these, single blocks have the first three
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]
LAYERS = {"paper": PAPER, "all": [*PAPER, "proj_mlp", "proj_out"]}
LEVELS = "uniform", "shifted"
RATES = {"prodigy": 1.0, "adamw": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a LoRA is distilled. The defaults are those of HilbertA's authors.

    Attributes:
        method: What the student runs with.
        rank: Of the LoRA; its alpha is the same.
        layers: "paper", or "all": of single blocks the feed-forward and output layers too, and the last layer.
        optimizer: "prodigy", which finds its own step size, or "adamw".
        rate: Learning rate; None is 1 for Prodigy and 1e-4 for AdamW.
        levels: How noisy the pictures are: "uniform" from clean to noise, or "shifted", as often as drawing meets a
            level: nearer to noise, where the layout is decided, the larger the picture.
        cool_down: Over this last fraction of the steps the rate falls to 0, linearly.
        batch: Pictures a step, over all devices.
        guidance: What both are told as guidance scale, if they take one.
        seed: Of the LoRA's first weights, the order of the pictures and their noise.
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
            raise ValueError("prodigyopt is missing: pip install 'foveate[train]', or use --optimizer adamw")
        if self.rank < 1 or self.batch < 1:
            raise ValueError(f"rank and batch must be 1 or more, not {self.rank} and {self.batch}")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"the learning rate must be above 0, not {self.rate}")
        if not 0 <= self.cool_down <= 1:
            raise ValueError(f"cool_down is the last fraction of the steps, 0 to 1, not {self.cool_down}")
        if not self.method.always:
            raise ValueError("a LoRA is distilled for every noise level: leave start_percent and end_percent out")

    def rate_at(self, done: float) -> float:
        """Learning rate when this fraction of the steps is done."""
        return cooled(self.rate or RATES[self.optimizer], done, self.cool_down)

    def optimizer_of(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        options = {"lr": self.rate_at(0), "betas": (0.9, 0.999), "weight_decay": 1e-4}
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, **options)
        from prodigyopt import Prodigy

        with redirect_stdout(io.StringIO()):  # it says that its weight decay is decoupled
            return Prodigy(parameters, use_bias_correction=True, safeguard_warmup=True, **options)


class Student:
    """A pipeline that runs with a method and a LoRA, and whose dense self is the teacher.

    Args:
        pipeline: Keeps the LoRA, and the method until `finish`; all its other weights are frozen.
        recipe: Method and LoRA.
        size: (height, width) of the pictures in pixels.
        start: The LoRA to begin with.

    Raises:
        ValueError: If the dtype cannot be trained in, or `start` or the method do not fit the model.
    """

    def __init__(self, pipeline: FluxPipeline, recipe: Recipe, size: tuple[int, int], start: Path | None = None):
        self.transformer, self.recipe, self.size, self.start = pipeline.transformer, recipe, size, start
        self.dtype = self.transformer.dtype
        if self.dtype == torch.float16:
            raise ValueError("gradients are too small for float16: use --dtype bfloat16 or float32")
        rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in size)
        self._ids = pipeline._prepare_latent_image_ids(1, rows, columns, pipeline.device, self.dtype)
        self._add_lora()
        self._handle = apply(pipeline, recipe.method)

    def _add_lora(self) -> None:
        self.transformer.requires_grad_(False)
        rank, layers = self.recipe.rank, LAYERS[self.recipe.layers]
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=layers)
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.seed)
            self.transformer.add_adapter(config)
        if self.start:
            self._load(self.start)
        cast_training_params(self.transformer, torch.float32)

    def _load(self, start: Path) -> None:
        layers = FluxPipeline.lora_state_dict(str(start.parent), weight_name=start.name)
        layers = {name.removeprefix("transformer."): weight for name, weight in layers.items()}
        try:
            strangers = set_peft_model_state_dict(self.transformer, layers).unexpected_keys
        except RuntimeError as error:
            raise ValueError(f"{start} does not fit: it needs the model and --rank it was made with") from error
        if strangers:
            raise ValueError(f"{start} does not fit this model, which has no {strangers[0]}")

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights of the LoRA."""
        return [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]

    def packed(self) -> bytes:
        """The LoRA as a file; all devices must ask together."""
        return pack_lora(whole(get_peft_model_state_dict(self.transformer)), self.recipe.method, self.size)

    def finish(self) -> None:
        """Take the method out; the LoRA stays."""
        self._handle.remove()

    @contextmanager
    def teacher(self) -> Generator[None]:
        """Within it the model is the teacher: dense, without the LoRA."""
        with self._handle.paused(), self.untaught():
            yield

    @contextmanager
    def untaught(self) -> Generator[None]:
        """Within it the model runs with the method, without the LoRA."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    def loss(self, model: nn.Module, batch: Noisy) -> Float[Tensor, ""]:
        """Mean squared difference between the velocities of student and teacher.

        Args:
            model: The transformer, as wrapped for training.
            batch: What both see.

        Raises:
            ValueError: If the method leaves these pictures dense.
        """
        velocity = self._velocity(model, batch)  # first: FSDP trains what it first saw to be trainable
        if not self._handle.plans():
            raise ValueError(f"{self._handle.summary().layers[0].why}: there is nothing to distil at this size")
        with torch.no_grad(), self.teacher():
            goal = self._velocity(model, batch)
        return F.mse_loss(velocity.float(), goal.float())

    def _velocity(self, model: nn.Module, batch: Noisy) -> Float[Tensor, "batch tokens channels"]:
        guided = self.transformer.config.guidance_embeds
        with torch.autocast(self._ids.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return model(
                hidden_states=batch.latents.to(self.dtype),
                timestep=batch.level,
                guidance=torch.full_like(batch.level, self.recipe.guidance) if guided else None,
                pooled_projections=batch.pooled,
                encoder_hidden_states=batch.text,
                txt_ids=self._ids.new_zeros(batch.text.shape[1], 3),
                img_ids=self._ids,
                return_dict=False,
            )[0]
