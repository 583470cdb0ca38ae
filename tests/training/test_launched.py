"""Laws of training in several processes: their number changes nothing, and none of them is missed for long."""

import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from training_runs import alone, losses, start, together
from typer.testing import CliRunner

from foveate.apps import console
from foveate.apps.cli import app
from foveate.pipelines.lora import LORA_FILE
from foveate.training.run import split_batch

TESTS = Path(__file__).parents[1]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def fsdp(tmp_path):
    """Launches processes with the FSDP2 settings of the docs."""
    (settings,) = re.findall(r"```yaml\n(.*?)```", (TESTS.parent / "docs/scale.md").read_text(), re.DOTALL)
    (tmp_path / "fsdp2.yaml").write_text(settings)
    config = f"--config_file {tmp_path / 'fsdp2.yaml'} --num_processes {{}}"
    return f"-m accelerate.commands.launch {config} {TESTS / 'fsdp_on_cpus.py'}"


@pytest.fixture
def pixels(tmp_path):
    """Arguments that train a small pixel model."""
    (photos := tmp_path / "photos").mkdir()
    for index in range(5):
        Image.fromarray(np.full((20, 20, 3), 50 * index, np.uint8)).save(photos / f"{index}.png")
    return f"train --data {photos} --dit DiT-T --patch 8 --rate 0.003 --average 0.9"


def assert_same_run(out, other, file):
    """Losses and exported weights agree up to rounding."""
    ours, theirs = losses(out), losses(other)
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-3)
    ours, theirs = load_file(out / file), load_file(other / file)
    ours, theirs = (torch.cat([weights[name].flatten() for name in theirs]) for weights in (ours, theirs))
    assert (ours - theirs).norm() < 1e-2 * theirs.norm()


def pieces(checkpoint, name):
    return len(FileSystemReader(checkpoint).read_metadata().state_dict_metadata[name].chunks)


@pytest.mark.slow
def test_one_process_then_two_sharded_ones_then_one_train_like_one(pixels, fsdp, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    first, second = "16 --steps 3 --batch 4", "16,32x16 --steps 3,2 --batch 4"
    third = "16,32x16,16 --steps 3,2,2 --batch 4"
    alone(f"{pixels} --size {third} --out {whole}")
    AcceleratorState._reset_state(reset_partial_state=True)
    alone(f"{pixels} --size {first} --out {out}")
    assert pieces(out / "000000003", "model.weights.blocks.0.attn.q.weight") == 1
    together(2, f"{pixels} --size {second} --out {out} --at-once 1", fsdp)
    assert pieces(out / "000000005", "model.weights.blocks.0.attn.q.weight") == 2
    AcceleratorState._reset_state(reset_partial_state=True)
    alone(f"{pixels} --size {third} --out {out}")
    assert_same_run(out, whole, WEIGHTS)


@pytest.mark.slow
def test_two_processes_and_two_sharded_ones_distil_like_one(fsdp, tmp_path):
    tiny.pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text("\n".join(tiny.PROMPTS))
    command = f"distill --model {tmp_path / 'model'} --prompts {tmp_path / 'prompts'} --size 64 --draw-steps 2"
    command += " --tiles 4 --optimizer adamw --rate 0.01 --batch 4 --seed 0"
    whole, out = tmp_path / "whole", tmp_path / "out"
    alone(f"{command} --steps 5 --out {whole}")
    together(2, f"{command} --steps 2 --out {out}")
    together(2, f"{command} --steps 5 --out {out}", fsdp)
    assert_same_run(out, whole, LORA_FILE)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_then_goes_on_from_its_last_checkpoint(pixels, tmp_path):
    out, log = tmp_path / "out", tmp_path / "out" / "log.csv"
    with start(2, f"{pixels} --size 16 --steps 1000 --batch 4 --out {out} --checkpoint-minutes 0") as run:
        while run.poll() is None and not (log.exists() and len(losses(out)) > 4):
            time.sleep(0.05)
        (victim,) = [process for process in psutil.Process(run.pid).children() if process.environ()["RANK"] == "1"]
        victim.send_signal(signal.SIGKILL)
        output, _ = run.communicate()
    assert run.returncode != 0
    assert re.search(rf"rank +: 1 .*exitcode +: -9 \(pid: {victim.pid}\)", output, re.DOTALL), output
    steps = len(losses(out))
    checkpoints = [int(path.parent.name) for path in out.glob("*/.metadata")]
    assert max(checkpoints) >= steps - 1
    alone(f"{pixels} --size 16 --steps {steps + 2} --batch 4 --out {out}")
    AcceleratorState._reset_state(reset_partial_state=True)
    alone(f"{pixels} --size 16 --steps {steps + 2} --batch 4 --out {tmp_path / 'whole'}")
    assert_same_run(out, tmp_path / "whole", WEIGHTS)


@pytest.mark.parametrize(
    ("batch", "devices", "at_once", "parts"),
    [(32, 1, 1, (1, 32)), (32, 4, 64, (8, 1)), (12, 2, 4, (3, 2)), (14, 2, 4, (1, 7)), (4, 4, 1, (1, 1))],
)
def test_a_batch_is_split_evenly(batch, devices, at_once, parts):
    assert split_batch(batch, devices, at_once) == parts


@pytest.mark.parametrize("command", ["train --batch 12,4 --size 16,16 --steps 1", "distill --batch 4"])
def test_a_batch_that_processes_cannot_share_is_refused_before_anything_is_loaded(monkeypatch, command):
    three = SimpleNamespace(num_processes=3, is_main_process=True, device=torch.device("cpu"))
    monkeypatch.setattr(console, "join", lambda device: three)
    monkeypatch.setattr("foveate.pipelines.request.load_pipeline", None)
    monkeypatch.setattr("foveate.apps.demo.text.built_in_text_encoder", None)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert "3 processes cannot share a batch of 4 evenly: use 3 or 6" in result.output
    with pytest.raises(ValueError, match=r"8 processes cannot share a batch of 4 evenly: use 8"):
        split_batch(4, 8)
