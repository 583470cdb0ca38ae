"""Laws of the benchmark of training on several GPUs: the number of processes changes the losses by rounding only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from lab.bench.parallel_training import compared
from lab.bench.ranks import length

ROOT = Path(__file__).parents[3]
COMMAND = (
    "-m torch.distributed.run --standalone --nproc-per-node {} -m lab.bench.parallel_training {} --rounds 1 --batch 2"
)


def run(processes, out, options):
    command = [sys.executable, *COMMAND.format(processes, out).split(), *options.split()]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)


@pytest.mark.parametrize(("model", "pixels"), [("built-in", 96), ("DiT-T", 16)])
def test_two_processes_have_the_losses_of_one(tmp_path, model, pixels):
    options = f"--model {model} --pixels {pixels}"
    for processes in (1, 2):
        done = run(processes, tmp_path, options)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"parallel-training-{model}-{n}-cpu.json").read_text()) for n in (1, 2))
    assert (one["gpus"], two["gpus"]) == (1, 2)
    [alone], [together] = one["rows"], two["rows"]
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert together["loss_difference"] < 1e-5
    assert together["images_per_s"] == pytest.approx(2 / together["step_s"])
    assert together["speed_up"] == pytest.approx(alone["step_s"] / together["step_s"])


def test_other_settings_are_not_compared(tmp_path):
    about, row, file = {"model": "DiT-T", "batch": 2}, {"step_s": 1.0, "losses": [2.0, 1.0]}, tmp_path / "one.json"
    assert compared(row, about, file) == {}
    file.write_text(json.dumps({**about, "gpus": 1, "rows": [{"step_s": 2.0, "losses": [2.0, 0.8]}]}))
    assert compared(row, about | {"batch": 4}, file) == {}
    assert compared(row, about, file) == {"speed_up": 2.0, "loss_difference": pytest.approx(0.25)}


def test_the_length_of_a_union_of_intervals_counts_every_point_once():
    for seed in range(50):
        random = Random(seed)
        pairs = [sorted(random.choices(range(40), k=2)) for _ in range(random.randint(0, 12))]
        points = {point for start, end in pairs for point in range(start, end)}
        assert length([(start, end) for start, end in pairs]) == len(points)
