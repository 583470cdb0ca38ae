"""Laws of the built-in model on a CUDA device: it draws what captions ask for, and its training runs."""

import itertools

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from lab.training.flow import FlowTraining
from lab.training.recogniser import train_recogniser
from lab.training.stages import Stage
from lab.training.vae import train_vae
from scoring import accuracy

from foveate.apps.demo.recogniser import judge, load_recogniser, recognise
from foveate.apps.demo.scenes import scenes
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.pipelines.request import Request, draw_batch
from foveate.training.run import RunOptions
from foveate_models import find

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_draws_what_held_out_captions_ask_for(dtype):
    pipe = FluxPipeline.from_pretrained(find("pipeline"), dtype=dtype, local_files_only=True).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    asked = list(itertools.islice(scenes(11, evaluation=True), 40))
    requests = [Request(scene.caption, (128, 128), 12, None, seed) for seed, scene in enumerate(asked)]
    pictures = np.stack([np.asarray(image) for image in draw_batch(pipe, requests)])
    recogniser = load_recogniser(device="cuda")
    found, _ = recognise(recogniser, torch.from_numpy(pictures).permute(0, 3, 1, 2))
    verdicts = [judge(detections, scene) for detections, scene in zip(found, asked, strict=True)]
    assert sum(v.objects_found for v in verdicts) >= 0.75 * sum(v.objects for v in verdicts)
    assert accuracy(recogniser, scenes=200, seed=3) > (0.97, 0.94)


@pytest.mark.parametrize("compile", [False, True])
def test_the_transformers_training_runs_and_learns(tmp_path, compile):
    stage = Stage(name="short", images=64 * 60, batches={64: 64}, rates=(2e-3, 1e-3))
    options = RunOptions(at_once=1, compile=compile)
    assert FlowTraining(tmp_path / "flow", untrained_pipeline(), (stage,), options).train()
    rows = [float(row.split(",")[1]) for row in (tmp_path / "flow" / "log.csv").read_text().splitlines()]
    assert rows[-1] < rows[0] < 3


def test_the_other_trainings_run(tmp_path):
    train_vae(tmp_path / "vae", untrained_pipeline().vae, steps=20, pixels=8 * 128**2, device="cuda")
    train_recogniser(tmp_path / "recogniser.safetensors", steps=20, batch=8, device="cuda")
