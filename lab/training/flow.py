# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Training of the transformer and text encoders of the built-in models by flow matching; it can be resumed."""

import copy
import csv
import itertools
import json
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.apps.demo.scenes import captions
from foveate.apps.demo.text import TEXT_TOKENS
from foveate.pipelines.request import Request, draw_batch, fingerprint, load_pipeline
from foveate.training.run import Phase, Run, RunOptions, make_accelerator
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.processes import join
from lab.training.stages import ImageBatches, Stage
from lab.training.velocity import Latents, VelocityModel, flow_loss

__all__ = ["SHOWN", "FlowTraining", "Kind", "started"]

EMA_DECAY = 0.999
SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # not cuDNN: see VelocityModel
SHOWN = 8  # held-out captions of a sheet of samples


class Kind(NamedTuple):
    """Classes of a training run: trained modules, latents and data."""

    network: Callable[[Any], Any]
    latents: Callable[[Any, torch.device], Any]
    batches: Callable[[Stage, Any, int, int], Any]


class FlowTraining(Run):
    """A training run of an image model; a subclass trains another kind of model.

    The folder of the pipeline, with the averaged weights, is next to the folder of the run.

    Args:
        out: Folder of the run.
        pipeline: Pipeline with a trained autoencoder; transformer and text encoders are trained in place.
        recipe: Stages of the training.
        seed: The same seed, recipe and number of devices give the same run.
        initialise: Start from new weights instead of the pipeline's.
        before: Recipe of the pipeline's weights, if any.
        options: Other settings.
    """

    kind: ClassVar[Kind] = Kind(VelocityModel, Latents, ImageBatches)

    def __init__(
        self,
        out: Path,
        pipeline: Any,
        recipe: Sequence[Stage],
        options: RunOptions,
        *,
        seed: int = 0,
        initialise: bool = True,
        before: dict[str, Any] | None = None,
    ):
        self.recipe, self.seed, self.before = tuple(recipe), seed, before
        accelerator = make_accelerator(join().device, "muon", "bf16" if torch.cuda.is_available() else "no")
        settings = {"recipe": repr(self.recipe), "seed": seed, "devices": accelerator.num_processes}
        if not initialise:
            settings["start"] = fingerprint(pipeline.transformer)
        self.lengths = [stage.steps(accelerator.num_processes) for stage in self.recipe]
        self.starts = [0, *itertools.accumulate(self.lengths)]
        self.latents = self.kind.latents(pipeline, accelerator.device)
        network = self.kind.network(pipeline).to(accelerator.device)
        torch.manual_seed(seed)
        if initialise:
            network.initialise()
        self.average = copy.deepcopy(network).eval()
        self.pipeline = type(pipeline)(**{**pipeline.components, **self.average.parts()})
        self.pipeline.set_progress_bar_config(disable=True)
        if options.compile:
            network.transformer.compile_repeated_blocks(dynamic=False)  # once for every size
        model, *optimizers = accelerator.prepare(network.train(), *network.optimizers())
        super().__init__(out, accelerator, model, Trained(model, optimizers, EMA_DECAY), settings, options)

    def train(self) -> bool:
        """Train all stages. Returns whether all steps are done."""
        return self.run(self.starts[-1], "transformer")

    def parts(self) -> dict[str, Any]:
        """Weights, optimizers and average."""
        return {"network": self.trained}

    def phases(self, steps: int) -> Iterator[Phase]:
        """Remaining part of every stage; each device has different batches."""
        devices = self.accelerator.num_processes
        for stage, start, length in zip(self.recipe, self.starts, self.lengths, strict=False):
            done = max(self.step - start, 0)
            if done < length:
                batches = self.kind.batches(stage, self.pipeline, self.seed, devices)
                yield Phase(batches, range(done * devices, length * devices), 1, 1, itemgetter(0))

    def loss(self, batch: Any) -> Tensor:
        """Flow matching loss; its noise depends on seed, step and device only."""
        generator = torch.Generator(self.accelerator.device)
        generator.manual_seed(hash((self.seed, *self._place(self.step), self.accelerator.process_index)) % 2**62)
        rare = batch.text[-1].shape[1] > TEXT_TOKENS  # not worth compiling
        with torch.compiler.set_stance("force_eager" if rare else "default"), sdpa_kernel(SDPA):
            return flow_loss(self.model, self.latents, batch, generator)

    def rate(self, done: float) -> float:
        """Learning rate of the stage."""
        stage, step = self._place(self.step)
        return self.recipe[stage].rate(step, self.lengths[stage])

    def export(self) -> None:
        """Write the folder of the pipeline, and recipe.json next to it."""
        self._copy_average()
        if not self.accelerator.is_main_process:
            return
        _write_pipeline(self.pipeline, self.out.with_name("pipeline"))
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        about = {
            "stages": [stage.about() for stage in self.recipe],
            "seed": self.seed,
            "devices": f"{self.accelerator.num_processes} x {gpu}",
            "minutes": self._minutes(),
            "before": self.before,
        }
        write_whole(self.out.with_name("recipe.json"), json.dumps(about, indent=2).encode() + b"\n")

    @torch.no_grad()
    def sample(self) -> None:
        """Generate images of held-out captions on one device."""
        self._copy_average()
        if self.accelerator.is_main_process:
            stage, _ = self._place(self.step - 1)
            self.write_sheet(*self.drawn(max(self.recipe[stage].batches)))
        self.accelerator.wait_for_everyone()

    def drawn(self, size: Any) -> tuple[dict[str, list[Image.Image]], list[str]]:
        """Rows of a sheet of samples of a size in `Stage.batches`, and the captions of its columns."""
        shown = captions(SHOWN, 0, evaluation=True)
        requests = [Request(caption, (size, size), 20, None, seed) for seed, caption in enumerate(shown)]
        return {f"{self.step} steps": draw_batch(self.pipeline, requests)}, shown

    def _place(self, step: int) -> tuple[int, int]:
        """Stage of a step, and the number of the step in the stage."""
        stage = bisect(self.starts, step) - 1
        return stage, step - self.starts[stage]

    def _minutes(self) -> float:
        """Minutes of all steps so far."""
        rows = csv.reader((self.out / "log.csv").read_text().splitlines())
        return sum(float(seconds) for *_, seconds in rows) / 60

    def _copy_average(self) -> None:
        """Copy the average into the pipeline."""
        self.trained.average.copy_to(self.average.parameters())


def started(folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """A trained pipeline to start from, and its recipe, if any."""
    recipe = folder.parent / "recipe.json"
    return load_pipeline(str(folder), "cpu"), json.loads(recipe.read_text()) if recipe.exists() else None


def _write_pipeline(pipeline: Any, folder: Path) -> None:
    """Write a pipeline folder in bfloat16 that loads in float32.

    diffusers loads in float32 by default; transformers loads in the config's dtype, here set to float32.
    """
    pipeline = copy.deepcopy(pipeline).to(torch.bfloat16)
    for name, part in pipeline.components.items():
        if name.startswith("tokenizer"):
            part.backend_tokenizer.no_padding()  # the backend keeps the padding of its last call
    pipeline.save_pretrained(folder)
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        if path.parent.name.startswith("text_encoder"):
            config["dtype"] = "float32"
        config.pop("_name_or_path", None)  # a path on this machine
        write_whole(path, json.dumps(config, indent=2).encode() + b"\n")
