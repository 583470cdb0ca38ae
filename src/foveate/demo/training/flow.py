# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""How the built-in model learned to draw: flow matching on random scenes, small pictures first, then larger ones.

What step n of a stage sees (sizes, scenes, noise) depends on n and the seed alone, so a run that was broken off goes
on as if it had not been.
"""

import csv
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from foveate.demo.atlas import load_atlas
from foveate.demo.scenes import Scenes, render, scenes
from foveate.demo.text import TEXT_TOKENS
from foveate.demo.training.checkpoints import resume, write_checkpoint
from foveate.files import write_picture

__all__ = ["RECIPE", "FlowTraining", "Painter", "Stage", "sample_grid"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stretch of the training.

    Attributes:
        name: What the log calls it.
        images: How many pictures it sees, over all devices.
        batches: {side in px: pictures a step and device}; every step takes one of the sides.
        rates: Learning rate at its start and at its end, along a straight line.
    """

    name: str
    images: int
    batches: dict[int, int]
    rates: tuple[float, float]

    def steps(self, devices: int) -> int:
        """How many steps see that many pictures when every size comes up equally often."""
        a_step = devices * sum(self.batches.values()) / len(self.batches)
        return math.ceil(self.images / a_step)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step."""
        first, last = self.rates
        return (first + (last - first) * step / steps) * min(1, (step + 1) / WARM_UP)


RECIPE = (  # batches are for four H200s
    Stage(name="draft", images=2_000_000, batches={64: 512}, rates=(1.2e-3, 1e-3)),
    Stage(name="small", images=1_500_000, batches={128: 160}, rates=(8e-4, 5e-4)),
    Stage(name="large", images=900_000, batches={128: 160, 256: 40}, rates=(4e-4, 2.5e-4)),
    Stage(name="largest", images=150_000, batches={128: 160, 256: 40, 512: 8}, rates=(2.5e-4, 0.0)),
)
UNCAPTIONED = 0.1  # of the pictures are seen without their caption
LONG_TEXT, LONG_TEXT_EACH = 512, 32  # FLUX pads a prompt to 512 tokens unless told otherwise: one step in 32 does too
WARM_UP = 200  # steps
EMA_DECAY = 0.999
SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's backward: see Painter
WORKERS = 8
LOG_EVERY = 50  # steps
STAGE = 10**6  # more steps than any stage has: stage and step as one number


class Batch(NamedTuple):
    """What one step sees."""

    side: int
    scenes: Scenes
    clip_ids: Tensor
    t5_ids: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(self.side, self.scenes.to(device), self.clip_ids.to(device), self.t5_ids.to(device))


class Batches(Dataset[Batch]):
    """The batches of a stage by the number of their step."""

    def __init__(self, stage: Stage, pipeline: FluxPipeline, seed: int, device: int, devices: int):
        self.stage, self.seed, self.device, self.devices = stage, seed, device, devices
        self.clip, self.t5 = pipeline.tokenizer, pipeline.tokenizer_2

    def __len__(self) -> int:
        return self.stage.steps(self.devices)

    def __getitem__(self, step: int) -> Batch:
        everywhere = random.Random(f"{self.stage.name} {self.seed} {step}")  # all devices draw pictures of one size
        side = everywhere.choice(list(self.stage.batches))
        long = len(self.stage.batches) > 1 and everywhere.randrange(LONG_TEXT_EACH) == 0
        number = everywhere.randrange(2**40) + self.device
        batch = list(itertools.islice(scenes(number), self.stage.batches[side]))
        here = random.Random(number)
        captions = ["" if here.random() < UNCAPTIONED else scene.caption for scene in batch]
        clip_ids = token_ids(self.clip, captions, TEXT_TOKENS)
        return Batch(
            side, Scenes.of(batch), clip_ids, token_ids(self.t5, captions, LONG_TEXT if long else TEXT_TOKENS)
        )


def token_ids(tokenizer: Callable, captions: list[str], length: int) -> Tensor:
    """[captions, length], as the pipeline reads them."""
    padded = {"padding": "max_length", "max_length": length, "truncation": True}
    return tokenizer(captions, **padded, return_tensors="pt").input_ids


class Painter(nn.Module):
    """The trained parts of a pipeline as one module: words and noisy latents in, velocities out."""

    def __init__(self, pipeline: FluxPipeline):
        super().__init__()
        self.transformer, self.clip, self.t5 = pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2
        # torch 2.11 on an H200: the fused backwards of a learned bias, and cuDNN's of these shapes, read stray memory
        self.t5.set_attn_implementation("eager")

    def forward(self, noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity of packed latents [batch, tokens, channels] at noise levels [batch]."""
        side = math.isqrt(noisy.shape[1])
        return self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids).last_hidden_state,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, noisy.device, torch.float32),
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device),
            return_dict=False,
        )[0]

    def start_afresh(self) -> None:
        """Weights to train from: every block begins as the identity, the velocity as zero."""
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
                if name == "proj_out" or name.endswith("norm.linear") or ".norm1" in name or name == "norm_out.linear":
                    nn.init.zeros_(module.weight)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside blocks, AdamW for everything else."""
        inside, others = [], []
        for name, parameter in self.named_parameters():
            block = any(words in name for words in ("transformer_blocks.", ".layers.", ".block."))
            matrix = parameter.ndim == 2 and not name.endswith("relative_attention_bias.weight")
            (inside if block and matrix else others).append(parameter)
        return [
            torch.optim.Muon(inside, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98)),
        ]


class Latents:
    """Pictures of scenes, and noise levels, as the transformer sees them."""

    def __init__(self, pipeline: FluxPipeline, device: torch.device):
        self.vae, self.scheduler, self.atlas = pipeline.vae.to(device), pipeline.scheduler, load_atlas().to(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Packed latents [batch, tokens, channels]."""
        pictures = render(self.atlas, batch.scenes, batch.side) * 2 - 1
        latents = torch.cat([self.vae.encode(part).latent_dist.mean for part in pictures.split(64)])
        latents = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return FluxPipeline._pack_latents(latents, *latents.shape)

    def noise_levels(self, count: int, tokens: int, generator: torch.Generator) -> Tensor:
        """Random noise levels, moved for the size as the scheduler moves them when it draws."""
        names = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
        shift = calculate_shift(tokens, *(self.scheduler.config[name] for name in names))
        return torch.sigmoid(torch.randn(count, device=generator.device, generator=generator) + shift)


class FlowTraining:
    """A run of a recipe: what it trains, where it stands, and its folder.

    Args:
        out: Folder of checkpoints, sample grids and log.csv. A run that is found there is gone on with.
        pipeline: Its autoencoder is trained; transformer and text encoders are trained in place.
        recipe: The stages.
        seed: The same seed, recipe and number of devices give the same run.
        compile: Compile the transformer, once for every size.
    """

    def __init__(
        self,
        out: Path,
        pipeline: FluxPipeline,
        *,
        recipe: Sequence[Stage] = RECIPE,
        seed: int = 0,
        compile: bool = False,
    ):
        self.out, self.recipe, self.seed, self.compile = out, tuple(recipe), seed, compile
        self.accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
        self.device = self.accelerator.device
        self.painter = Painter(pipeline).to(self.device)
        torch.manual_seed(seed)
        self.painter.start_afresh()
        self.average = AveragedModel(self.painter, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        self.optimizers = self.painter.optimizers()
        self.latents = Latents(pipeline, self.device)
        mean: Any = self.average.module
        self.pipeline = FluxPipeline(
            pipeline.scheduler, pipeline.vae, mean.clip, pipeline.tokenizer, mean.t5, pipeline.tokenizer_2,
            mean.transformer,
        )  # fmt: skip
        self.pipeline.set_progress_bar_config(disable=True)
        self._parts = {"painter": self.painter, "average": self.average}
        self._parts |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        self._settings = {"recipe": repr(self.recipe), "seed": seed, "devices": self.accelerator.num_processes}
        self.stage, self.step = divmod(resume(out, self._parts, self._settings), STAGE)
        self.average.module.eval()

    def run(
        self,
        *,
        minutes: float = math.inf,
        checkpoint_every: int = 1000,
        sample_every: int = 2000,
        workers: int | None = None,
        track: Callable[[str, int], Callable[[], None]] = lambda name, length: lambda: None,
    ) -> bool:
        """Train until the recipe is done or the time is up; whether it is done.

        Args:
            minutes: When to write a checkpoint and stop.
            checkpoint_every: Steps between checkpoints.
            sample_every: Steps between sample grids; 0 draws none.
            workers: Processes that invent scenes; eight, or as many as there are cores.
            track: Shows progress, stage by stage.
        """
        deadline = time.monotonic() + 60 * minutes
        workers = min(WORKERS, os.cpu_count() or 0) if workers is None else workers
        if self.compile:
            self.painter.transformer.compile(dynamic=False)
        model = self.accelerator.prepare(self.painter).train()
        for stage in self.recipe[self.stage :]:
            steps = stage.steps(self.accelerator.num_processes)
            advance = track(stage.name, steps)
            for _ in range(self.step):
                advance()
            self._losses, self._began = [], time.monotonic()
            for loss in self._steps(stage, model, workers):
                advance()
                late = self.step % 10 == 0 and self._anywhere(time.monotonic() > deadline)
                last = late or self.step == steps
                self._log(stage, loss, last)
                if sample_every and (last or self.step % sample_every == 0):
                    self._sample(stage)
                if self.step == steps:
                    self.stage, self.step = self.stage + 1, 0
                if last or self.step % checkpoint_every == 0:
                    self._save()
                if late:
                    return self.stage == len(self.recipe)
        return True

    def minutes(self) -> float:
        """How long all steps took so far, by the log."""
        total, before = 0.0, 0
        for _, step, _, seconds in csv.reader((self.out / "log.csv").read_text().splitlines()):
            total += (int(step) - before if int(step) > before else int(step)) * float(seconds)
            before = int(step)
        return total / 60

    def _steps(self, stage: Stage, model: nn.Module, workers: int) -> Iterator[Tensor]:
        """The losses of the steps that are left of a stage."""
        index, devices = self.accelerator.process_index, self.accelerator.num_processes
        batches = Batches(stage, self.pipeline, self.seed, index, devices)
        left = range(self.step, len(batches))
        loader = DataLoader(
            batches, batch_size=None, sampler=left, num_workers=workers, prefetch_factor=4 if workers else None
        )
        generator = torch.Generator(self.device)
        for step, batch in zip(left, loader, strict=True):
            generator.manual_seed(hash((self.seed, self.stage, step, index)) % 2**62)
            rare = batch.t5_ids.shape[1] > TEXT_TOKENS  # not worth compiling for
            with torch.compiler.set_stance("force_eager" if rare else "default"), sdpa_kernel(SDPA):
                loss = flow_loss(model, self.latents, batch.to(self.device), generator)
                self.accelerator.backward(loss)
            nn.utils.clip_grad_norm_(self.painter.parameters(), 1.0)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stage.rate(step, len(batches))
                optimizer.step()
                optimizer.zero_grad()
            self.average.update_parameters(self.painter)
            self.step = step + 1
            yield loss.detach()

    def _anywhere(self, here: bool) -> bool:
        flag = torch.tensor(float(here), device=self.device)
        return bool(self.accelerator.reduce(flag).item())

    def _log(self, stage: Stage, loss: Tensor, last: bool) -> None:
        """Add a line to log.csv now and then: stage, step, mean loss and mean seconds of the steps since the last."""
        self._losses.append(loss)
        if self.accelerator.is_main_process and (last or len(self._losses) == LOG_EVERY):
            mean = torch.stack(self._losses).mean().item()
            seconds = (time.monotonic() - self._began) / len(self._losses)
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "log.csv").open("a", newline="") as file:
                csv.writer(file).writerow([stage.name, self.step, f"{mean:.5f}", f"{seconds:.4f}"])
        if last or len(self._losses) == LOG_EVERY:
            self._losses, self._began = [], time.monotonic()

    def _sample(self, stage: Stage) -> None:
        if self.accelerator.is_main_process:
            with torch.compiler.set_stance("force_eager"):
                grid = sample_grid(self.pipeline, max(stage.batches))
            write_picture(self.out / f"{self.stage}-{stage.name}-{self.step:06}.png", grid, {})

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            write_checkpoint(self.out, self.stage * STAGE + self.step, self._parts, self._settings)
        self.accelerator.wait_for_everyone()


def flow_loss(painter: nn.Module, latents_of: Latents, batch: Batch, generator: torch.Generator) -> Tensor:
    """Mean squared error of the velocity, of scenes at random noise levels."""
    latents = latents_of(batch)
    sigma = latents_of.noise_levels(len(latents), latents.shape[1], generator)
    noise = torch.randn(latents.shape, device=latents.device, generator=generator)
    level = sigma[:, None, None]
    velocity = painter((1 - level) * latents + level * noise, sigma, batch.clip_ids, batch.t5_ids)
    return F.mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def sample_grid(pipeline: FluxPipeline, side: int, count: int = 16, steps: int = 20, seed: int = 0) -> Image.Image:
    """Pictures of held-out captions, four in a row."""
    captions = [scene.caption for scene in itertools.islice(scenes(seed, evaluation=True), count)]
    generators = [torch.Generator("cpu").manual_seed(seed + index) for index in range(count)]
    size = {"height": side, "width": side, "max_sequence_length": TEXT_TOKENS}
    pictures = pipeline(captions, generator=generators, num_inference_steps=steps, **size).images
    grid = Image.new("RGB", (4 * side, -(-count // 4) * side))
    for index, picture in enumerate(pictures):
        grid.paste(picture, (index % 4 * side, index // 4 * side))
    return grid
