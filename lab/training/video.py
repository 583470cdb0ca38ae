# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Training of a small text-to-video model of Wan's classes from scratch: autoencoder, then transformer and encoder."""

import itertools
import math
import random
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import typer
from accelerate import PartialState
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import UMT5Config, UMT5EncoderModel

from foveate.apps.console import Minutes, RunFolder, SampleEvery, Seed, print_outcome, progress, training_device
from foveate.apps.demo import MODELS
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.scenes import Scenes
from foveate.apps.demo.text import TEXT_TOKENS, t5_tokenizer
from foveate.training.pictures import noise_shift
from foveate.training.run import RunOptions
from foveate.training.trained import muon_and_adamw
from lab.training.flow import SHOWN, FlowTraining, Kind, started
from lab.training.make import BatchFactor, Compile, Scale
from lab.training.moving import frame_scenes, moving_scenes, render_frames, scene_videos
from lab.training.stages import LONG_TEXT, LONG_TEXT_EACH, UNCAPTIONED, Stage, token_ids
from lab.training.vae import train_vae
from lab.training.velocity import initialise

__all__ = ["RECIPE", "VideoTraining", "untrained_video_pipeline"]

FRAMES = 17
POSITION_BIAS = 2.0  # standard deviation of the text encoder's initial relative position biases; transformers: 0.06
VAE_STEPS = 5000
VAE_SIZES = (9, 64), (1, 96), (5, 96), (1, 64), (5, 64), (1, 32)  # most steps on few frames, which are faster
RECIPE = (  # recipe of the built-in model: 12 minutes on two H100; a batch is of (frames, side)
    Stage(name="draft", images=2_862_000, batches={(1, 32): 2048}, rates=(1.2e-3, 1e-3)),
    Stage(name="pictures", images=715_500, batches={(1, 64): 512}, rates=(1.2e-3, 1e-3)),
    Stage(name="short", images=572_400, batches={(1, 64): 512, (9, 64): 96}, rates=(1e-3, 8e-4)),
    Stage(name="long", images=59_820, batches={(9, 96): 48, (FRAMES, 64): 48}, rates=(8e-4, 5e-4)),
    Stage(name="large", images=19_940, batches={(FRAMES, 96): 24}, rates=(5e-4, 0.0)),
)


def untrained_video_pipeline(
    *, layers: int = 8, heads: int = 4, text_dim: int = 256, text_layers: int = 2, base: int = 24, seed: int = 0
) -> WanPipeline:
    """A `WanPipeline` with random weights: 11 M parameters by default; a token is 4 x 4 px of two frames.

    Args:
        layers: Number of blocks.
        heads: Number of attention heads of 64 channels.
        text_dim: Width of the text encoder.
        text_layers: Layers of the text encoder.
        base: Smallest number of channels in the autoencoder.
        seed: The same seed gives the same weights.
    """
    words, channels = t5_tokenizer(MODELS["built-in-video"].words), 16
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel(
            patch_size=(1, 1, 1), num_attention_heads=heads, attention_head_dim=64, in_channels=channels,
            out_channels=channels, text_dim=text_dim, ffn_dim=4 * 64 * heads, num_layers=layers,
        )  # fmt: skip
        vae = AutoencoderKLWan(
            base_dim=base, z_dim=channels, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True], patch_size=2,
            in_channels=12, out_channels=12, scale_factor_temporal=2, scale_factor_spatial=4,
            latents_mean=[0.0] * channels, latents_std=[1.0] * channels,
        )  # fmt: skip
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(words), d_model=text_dim, d_kv=32, d_ff=2 * text_dim, num_layers=text_layers,
                num_heads=text_dim // 32, dropout_rate=0.0,
            )
        )  # fmt: skip
    pipeline = WanPipeline(
        words, text_encoder.eval(), vae.eval(), FlowMatchEulerDiscreteScheduler(shift=3.0), transformer.eval()
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class VideoBatch(NamedTuple):
    """Scenes and captions of one step."""

    frames: int
    side: int
    scenes: Scenes
    """Scenes of all frames."""
    text: tuple[Tensor, Tensor]
    """Token ids without shared padding, and the mask of tokens that are not padding."""


class VideoBatches(Dataset[VideoBatch]):
    """Batches of a stage, step by step, each step with the batches of all devices."""

    def __init__(self, stage: Stage, pipeline: WanPipeline, seed: int, devices: int):
        self.stage, self.seed, self.devices = stage, seed, devices
        self.tokenizer = pipeline.tokenizer

    def __getitem__(self, index: int) -> VideoBatch:
        step, device = divmod(index, self.devices)
        everywhere = random.Random(f"{self.stage.name} {self.seed} {step}")  # all devices use the same size
        size = everywhere.choice(list(self.stage.batches))
        long = len(self.stage.batches) > 1 and everywhere.randrange(LONG_TEXT_EACH) == 0
        number = everywhere.randrange(2**40) + device
        batch = list(itertools.islice(moving_scenes(number), self.stage.batches[size]))
        here = random.Random(number)
        captions = ["" if here.random() < UNCAPTIONED else scene.caption for scene, _ in batch]
        ids = token_ids(self.tokenizer, captions, LONG_TEXT if long else TEXT_TOKENS)
        real = ids != self.tokenizer.pad_token_id
        return VideoBatch(*size, frame_scenes(batch, size[0]), (ids[:, : int(real.sum(1).max())], real))


class VideoVelocityModel(nn.Module):
    """Trained parts of a pipeline as one module, from token ids and noisy latents to velocities."""

    def __init__(self, pipeline: WanPipeline):
        super().__init__()
        self.transformer, self.text = pipeline.transformer, pipeline.text_encoder
        self.text.set_attn_implementation("eager")  # see VelocityModel

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        """Velocity of latents [batch, channels, frames, rows, columns] at noise levels [batch]."""
        read, padding = ids.shape[1], real.shape[1] - ids.shape[1]
        text = self.text(ids, real[:, :read]).last_hidden_state * real[:, :read, None]
        text = F.pad(text, (0, 0, 0, padding))  # WanPipeline pads with zeros
        return self.transformer(noisy, 1000 * sigma, text, return_dict=False)[0]

    def parts(self) -> dict[str, nn.Module]:
        """Modules by their names in the pipeline."""
        return {"transformer": self.transformer, "text_encoder": self.text}

    def initialise(self) -> None:
        """Initialise the weights: every block starts as the identity, the velocity as zero.

        The text encoder gets large relative position biases. With biases near zero, the default of transformers, it
        ignores the order of words for most of the training, and so cannot know which object should move.
        """
        initialise(self.transformer, lambda name: name.endswith(("proj_out", "time_proj", "attn2.to_out.0")))
        for name, parameter in self.named_parameters():
            if name.endswith("scale_shift_table"):
                nn.init.zeros_(parameter)
            if name.endswith("relative_attention_bias.weight"):
                nn.init.normal_(parameter, std=POSITION_BIAS)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside blocks, AdamW for everything else."""

        def inside(name: str) -> bool:
            return ".block" in name and not name.endswith("relative_attention_bias.weight")

        return muon_and_adamw(self.named_parameters(), inside, rate=1e-3, weight_decay=0.01)


class VideoLatents:
    """Latents of moving scenes."""

    def __init__(self, pipeline: WanPipeline, device: torch.device):
        self.vae, self.scheduler, self.atlas = pipeline.vae.to(device), pipeline.scheduler, load_atlas().to(device)

    @torch.no_grad()
    def __call__(self, batch: VideoBatch) -> Tensor:
        """Latents [batch, channels, frames, rows, columns]."""
        videos = render_frames(self.atlas, batch.scenes, batch.frames, batch.side) * 2 - 1
        with torch.autocast(self.atlas.device.type, torch.bfloat16, enabled=self.atlas.is_cuda):
            latents = self.vae.encode(videos).latent_dist.mean.float()
        mean, std = (
            torch.tensor(of, device=latents.device).view(-1, 1, 1, 1)
            for of in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents - mean) / std

    def shift(self, latents: Tensor) -> float:
        """Shift of the logit of the noise levels."""
        return noise_shift(self.scheduler, 0)


class VideoTraining(FlowTraining):
    """A training run of a video model; see `FlowTraining`."""

    kind: ClassVar[Kind] = Kind(VideoVelocityModel, VideoLatents, VideoBatches)

    def drawn(self, size: Any) -> tuple[dict[str, list[Image.Image]], list[str]]:
        """Rows of a sheet of samples, with five frames of each video, and the captions of its columns."""
        frames, side = size
        captions = [scene.caption for scene, _ in itertools.islice(moving_scenes(0, evaluation=True), SHOWN)]
        videos = self.pipeline(
            captions, negative_prompt=[""] * len(captions), height=side, width=side, num_frames=frames,
            num_inference_steps=20, guidance_scale=3.0, max_sequence_length=TEXT_TOKENS,
            generator=torch.Generator("cpu").manual_seed(0), output_type="pil",
        ).frames  # fmt: skip
        shown = sorted({round(i * (frames - 1) / 4) for i in range(5)})
        return {f"frame {frame + 1}": [video[frame] for video in videos] for frame in shown}, captions


def main(
    out: RunFolder = Path("video-run"),
    start: Annotated[Path | None, typer.Option(help="Pipeline folder to start from, with its autoencoder.")] = None,
    stages: Annotated[
        str, typer.Option(help=f"Of {', '.join(stage.name for stage in RECIPE)}, with commas. [dim]default: all[/]")
    ] = "",
    seed: Seed = 0,
    minutes: Minutes = math.inf,
    scale: Scale = 1.0,
    batch: BatchFactor = 1.0,
    sample_every: SampleEvery = 1000,
    compile: Compile = False,
) -> None:
    """Train a small text-to-video model from scratch: emoji that move.

    The folder gets the pipeline, in pipeline/, and recipe.json. You may stop it at any time; the same command resumes
    from the newest checkpoint. --minutes limits the transformer's training. On several GPUs:

    accelerate launch --multi_gpu --num_processes 4 -m lab video --compile
    """
    known = {stage.name: stage.scaled(scale, batch) for stage in RECIPE}
    wanted = stages.split(",") if stages else [*known]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown stage {unknown[0]!r}: choose from {', '.join(known)}")
    recipe = [known[name] for name in wanted]
    pipeline, before = started(start) if start else (untrained_video_pipeline(seed=seed), None)
    device, state, vae = training_device("auto"), PartialState(), out / "pipeline" / "vae"
    made = start is not None or (vae / "config.json").exists()
    state.wait_for_everyone()  # before one of them makes it
    with progress() as track:
        if not made:
            steps = max(1, round(VAE_STEPS * scale))
            train_vae(
                out / "vae", pipeline.vae, draw=scene_videos, steps=steps, pixels=round(64 * 64 * 512 * batch),
                sizes=VAE_SIZES, seed=seed, device=device,
                advance=track("autoencoder", steps),
            )  # fmt: skip
            if state.is_main_process:
                pipeline.vae.save_pretrained(vae)
            state.wait_for_everyone()
        if not start:
            pipeline.vae = AutoencoderKLWan.from_pretrained(vae).eval()
        torch.backends.cudnn.benchmark = True  # latents of 24 videos take 31 ms instead of 51 (H100)
        options = RunOptions(at_once=1, compile=compile, minutes=minutes, sample_every=sample_every, track=track)
        training = VideoTraining(
            out / "flow", pipeline, recipe, options, seed=seed, initialise=start is None, before=before
        )
        done = training.train()
    print_outcome(done, out)
