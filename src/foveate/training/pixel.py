# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Training of a pixel diffusion transformer from scratch: flow matching, on small images first."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from foveate.nn.pixel_dit import PixelDiT
from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import Request, draw
from foveate.training.pictures import NoisyPicture, NoisyPictures, Pictures
from foveate.training.run import Phase, Run, RunOptions, cooled_rate, make_accelerator, split_batch
from foveate.training.trained import Trained, muon_and_adamw, unsharded
from foveate.utils.files import write_whole
from foveate.utils.processes import check_shared

__all__ = ["MIXED", "PixelRecipe", "PixelTraining", "Stage", "prepare", "train", "velocity_loss"]

MIXED = {"float32": "no", "bfloat16": "bf16"}
OPTIMIZERS = "adamw", "muon"


class Stage(NamedTuple):
    """Training steps on images of one size.

    Attributes:
        size: (height, width) in pixels.
        steps: Number of steps.
        batch: Batch size over all devices.
    """

    size: tuple[int, int]
    steps: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class PixelRecipe:
    """Hyperparameters of a pixel model. Defaults from the LLSA paper, arXiv 2512.16615.

    Attributes:
        rate: Learning rate.
        cool_down: Last fraction of the steps, over which the rate falls linearly to 0.
        optimizer: "adamw", or "muon" for the matrices inside blocks, at about the same rates.
        weight_decay: Weight decay: of all weights with AdamW, of the matrices with Muon.
        average: Decay of the moving average of the weights, which generates the images, after a warm-up.
        uncaptioned: Fraction of the samples with an empty caption, which classifier-free guidance needs.
        dtype: "float32", or "bfloat16" for everything but the weights.
        seed: Seed of the order of the images and of the noise.
    """

    rate: float = 1e-4
    cool_down: float = 0.0
    optimizer: str = "adamw"
    weight_decay: float = 1e-2
    average: float = 0.9999
    uncaptioned: float = 0.1
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"the learning rate must be above 0, not {self.rate}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: choose {' or '.join(OPTIMIZERS)}")
        if self.weight_decay < 0:
            raise ValueError(f"the weight decay must be 0 or more, not {self.weight_decay}")
        if not (0 <= self.average < 1 and 0 <= self.uncaptioned <= 1 and 0 <= self.cool_down <= 1):
            raise ValueError(
                "average, uncaptioned and cool_down are fractions, from 0 to 1: "
                f"not {self.average}, {self.uncaptioned} and {self.cool_down}"
            )
        if self.dtype not in MIXED:
            raise ValueError(f"unknown dtype {self.dtype!r}: train in {' or '.join(MIXED)}")


def train(
    out: Path,
    pipeline: PixelPipeline,
    pictures: Pictures,
    stages: Sequence[Stage],
    recipe: PixelRecipe,
    options: RunOptions,
) -> bool:
    """Train the transformer of a pipeline. Returns whether all steps are done.

    `out` becomes the folder of the pipeline. An existing run in it is resumed.

    Args:
        out: Folder of the run.
        pipeline: Pipeline with the initial weights, on the CPU or this process's device. It ends with the average.
        pictures: Training images.
        stages: Stages in order, small images first. A resumed run may add stages.
        recipe: Hyperparameters.
        options: Other settings.

    Raises:
        ValueError: If stages, images, pipeline and folder do not fit together.
    """
    accelerator = make_accelerator(pipeline.device, recipe.optimizer, MIXED[recipe.dtype])
    _check(pipeline, pictures, stages, accelerator.num_processes)
    check_shared(out)
    training = PixelTraining(out, pipeline, pictures, stages, recipe, accelerator, options)
    return training.run(sum(stage.steps for stage in stages))


def _check(pipeline: PixelPipeline, pictures: Pictures, stages: Sequence[Stage], devices: int) -> None:
    if not stages or any(stage.steps < 1 or stage.batch < 1 for stage in stages):
        raise ValueError(f"a stage needs at least one step and one image a step, not {list(map(tuple, stages))}")
    if pipeline.text_encoder and not pictures.captioned:
        raise ValueError("these images have no captions: train a model without words")
    patch = pipeline.transformer.config.patch_size
    for stage in stages:
        if any(side % patch for side in stage.size):
            raise ValueError(f"patches of {patch} px do not fill {stage.size[1]} x {stage.size[0]} px: use multiples")
        split_batch(stage.batch, devices)
        pictures.picture(0, stage.size)


def prepare(
    model: PixelDiT, recipe: PixelRecipe, accelerator: Accelerator, checkpointing: bool, compile: bool
) -> tuple[nn.Module, Trained]:
    """The model as the accelerator prepares it, and its weights with their optimizers and average.

    Args:
        model: Model to train; changed in place.
        recipe: Hyperparameters.
        accelerator: Distributes the work.
        checkpointing: Use gradient checkpointing.
        compile: Compile the blocks.
    """
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    if compile:
        model.compile_repeated_blocks(dynamic=False)
    prepared, *optimizers = accelerator.prepare(model, *_optimizers(model, recipe))
    return prepared, Trained(prepared, optimizers, recipe.average)


def _optimizers(model: PixelDiT, recipe: PixelRecipe) -> list[torch.optim.Optimizer]:
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.weight_decay)]
    inside_blocks = lambda name: name.startswith("blocks.")  # noqa: E731
    return muon_and_adamw(model.named_parameters(), inside_blocks, recipe.rate, recipe.weight_decay)


def velocity_loss(
    model: nn.Module, batch: NoisyPicture, text: Float[Tensor, "batch words text_dim"] | None = None
) -> Float[Tensor, ""]:
    """Mean squared error of the velocity."""
    velocity = model(batch.pixels, 1000 * batch.level, text, return_dict=False)[0]
    return F.mse_loss(velocity.float(), batch.velocity)


class StageHistory(NamedTuple):
    """Stages of a run so far, as a part of its checkpoints: a resumed run must begin with the same ones."""

    stages: Sequence[Stage]
    step: int

    def state_dict(self) -> dict[str, list[list[int]]]:
        """[height, width, steps, batch] of every stage so far."""
        seen, left = [], self.step
        for (height, width), steps, batch in self.stages:
            if left > 0:
                seen.append([height, width, min(steps, left), batch])
            left -= steps
        return {"seen": seen}

    def load_state_dict(self, state: dict[str, list[list[int]]]) -> None:
        """Raise a ValueError unless the stages begin with the checkpoint's."""
        step = sum(steps for *_, steps, _ in state["seen"])
        if StageHistory(self.stages, step).state_dict() != state:
            before = ",".join(f"{width}x{height}:{steps}:{batch}" for height, width, steps, batch in state["seen"])
            raise ValueError(
                f"the run began with sizes {before}: begin with these and add more, or use another folder"
            )


class PixelTraining(Run):
    """A training run of a pixel model. Takes the arguments of `train`, and the accelerator.

    Raises:
        ValueError: If `out` holds another run.
    """

    def __init__(
        self,
        out: Path,
        pipeline: PixelPipeline,
        pictures: Pictures,
        stages: Sequence[Stage],
        recipe: PixelRecipe,
        accelerator: Accelerator,
        options: RunOptions,
    ):
        self.pipeline, self.pictures, self.stages, self.recipe = pipeline, pictures, tuple(stages), recipe
        model = copy.deepcopy(pipeline.transformer)
        pipeline.to(accelerator.device).set_progress_bar_config(disable=True)
        config = {name: value for name, value in model.config.items() if not name.startswith("_")}
        settings = {"recipe": repr(recipe), "model": repr(config), "pictures": pictures.checksum}
        model, trained = prepare(model, recipe, accelerator, options.checkpointing, options.compile)
        super().__init__(out, accelerator, model, trained, settings, options)

    def parts(self) -> dict[str, Any]:
        """Weights, optimizers and average, and the stages so far."""
        return {"stages": StageHistory(self.stages, self.step), "model": self.trained}

    def phases(self, steps: int) -> Iterator[Phase]:
        """The remaining part of every stage."""
        first_step = first_sample = 0
        for size, length, batch in self.stages:
            done = min(max(self.step - first_step, 0), length)
            samples = range(first_sample + done * batch, first_sample + length * batch)
            if samples:
                data = NoisyPictures(
                    self.pictures, size, self.recipe.seed, self.pipeline.tokenizer, self.recipe.uncaptioned
                )
                yield Phase(data, samples, *split_batch(batch, self.accelerator.num_processes, self.options.at_once))
            first_step, first_sample = first_step + length, first_sample + length * batch

    def loss(self, batch: NoisyPicture) -> Tensor:
        """Mean squared error of the velocity."""
        text = None
        if self.pipeline.text_encoder:
            with torch.no_grad():
                text = self.pipeline.text_encoder(batch.words).last_hidden_state
        return velocity_loss(self.model, batch, text)

    def rate(self, done: float) -> float:
        """Constant learning rate with a cool-down."""
        return cooled_rate(self.recipe.rate, done, self.recipe.cool_down)

    def export(self) -> None:
        """Write the folder of the pipeline."""
        self._copy_average()
        if not self.accelerator.is_main_process:
            return
        height, width = self._size()
        self.pipeline.register_to_config(height=height, width=width)
        model = self.pipeline.transformer
        if not (self.out / self.pipeline.config_name).exists():
            self.pipeline.save_pretrained(self.out)
        write_whole(self.out / "transformer" / SAFETENSORS_WEIGHTS_NAME, save(model.state_dict(), {"format": "pt"}))
        self.pipeline.save_config(self.out)

    def sample(self) -> None:
        """Write a sheet of samples, one for every caption; one device generates them."""
        self._copy_average()
        captions = self.options.captions
        if captions and self.accelerator.is_main_process:
            requests = [Request(words, self._size(), 20, None, seed) for seed, words in enumerate(captions)]
            with self.accelerator.autocast():
                pictures = [draw(self.pipeline, request)[0] for request in requests]
            self.write_sheet({f"{self.step} steps": pictures}, captions)
        self.accelerator.wait_for_everyone()

    def _size(self) -> tuple[int, int]:
        """(height, width) of the current stage."""
        (height, width, *_) = StageHistory(self.stages, self.step).state_dict()["seen"][-1]
        return height, width

    @torch.no_grad()
    def _copy_average(self) -> None:
        """Copy the average into the pipeline."""
        means = unsharded(self.trained.average.shadow_params)
        for weight, mean in zip(self.pipeline.transformer.parameters(), means, strict=True):
            weight.copy_(mean)
