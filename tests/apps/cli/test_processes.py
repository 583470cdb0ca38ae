"""Commands in several processes, started as users start them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from foveate.apps.cli import app
from foveate.apps.demo.untrained import untrained_pipeline

pytestmark = pytest.mark.slow

TORCHRUN = "torch.distributed.run", "--nproc-per-node"
ACCELERATE = "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--num_processes"
SMALL = "--model", "tiny", "--size", "64", "--steps", "2", "--device", "cpu"
PROMPTS = "a cat\na dog\n\nan owl\n"

FAILING = """
import os, signal
from foveate.apps.cli import main
from foveate.pipelines import request as pipelines
draw, drawn = pipelines.draw, []
def failing(*args):
    drawn.append(args)
    if os.environ["RANK"] == "1" and len(drawn) == 2:
        {what}
    return draw(*args)
pipelines.draw = failing
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    untrained_pipeline(layers=1, single_layers=1, heads=4, rope=(4, 4, 8)).save_pretrained(path / "tiny")
    (path / "prompts.txt").write_text(PROMPTS)
    return path


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def launch(launcher, number, *arguments, module=("-m", "foveate")):
    module = [{"-m": "--module"}.get(part, part) for part in module] if launcher is ACCELERATE else module
    command = [sys.executable, "-m", *launcher, str(number), *module, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def succeeds(*command, **options):
    done = launch(*command, **options)
    assert done.returncode == 0, done.stderr
    return done


def alone(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def test_processes_share_one_picture(folder):
    method = "--method", "hilberta:tiles=4"
    alone("generate", "a cat", *SMALL, *method, "--out", "one.png")
    done = succeeds(TORCHRUN, 2, "generate", "a cat", *SMALL, *method, "--out", "two.png")
    assert done.stdout.count("HilbertA T=4") == 2  # rows of the summary, printed once
    assert done.stdout.splitlines()[-1] == "two.png"
    assert abs(pixels("two.png") - pixels("one.png")).max() <= 1


def test_processes_share_each_of_several_pictures(folder):
    alone("generate", "a cat", *SMALL, "--seeds", 2, "--out", "alone")
    succeeds(TORCHRUN, 2, "generate", "a cat", *SMALL, "--seeds", 2, "--split", "picture", "--out", "shared")
    names = sorted(path.name for path in (folder / "alone").iterdir())
    assert names == sorted(path.name for path in (folder / "shared").iterdir())
    for name in names[:2]:
        assert abs(pixels(f"shared/{name}") - pixels(f"alone/{name}")).max() <= 1


def test_processes_divide_prompts_and_finish_what_a_killed_one_left(folder):
    command = "generate", "--prompts", "prompts.txt", "--seeds", 2, *SMALL
    alone(*command, "--out", "by-one")
    (folder / "killed.py").write_text(FAILING.format(what="os.kill(os.getpid(), signal.SIGKILL)"))
    done = launch(ACCELERATE, 2, *command, "--out", "by-two", module=("killed.py",))
    assert done.returncode != 0
    assert "rank      : 1 (local_rank: 1)" in done.stderr
    assert "SIGKILL" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in (folder / "by-two").glob("*.png")}
    assert 1 <= len(before) <= 5
    done = succeeds(ACCELERATE, 2, *command, "--out", "by-two")
    assert f"{6 - len(before)} generated" in done.stderr
    assert done.stderr.count("loading") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    names = sorted(path.name for path in (folder / "by-one").glob("*.png"))
    assert len(names) == 6
    assert names == sorted(json.loads((folder / "by-two" / "pictures.json").read_text()))
    for name in names:
        assert (pixels(f"by-two/{name}") == pixels(f"by-one/{name}")).all()


def test_a_process_that_fails_says_which_it_is_and_what_it_drew(folder):
    (folder / "failing.py").write_text(FAILING.format(what='raise MemoryError("full")'))
    arguments = "generate", "an owl", *SMALL, "--seeds", 4, "--out", "failed"
    done = launch(TORCHRUN, 2, *arguments, module=("failing.py",))
    assert done.returncode != 0
    assert "error: out of memory" in done.stderr
    assert "[generating 'an owl' with seed 3] [rank 1 of 2 on " in done.stderr
    assert (folder / "failed").exists()


def test_processes_divide_an_evaluation(folder):
    command = "eval", "--method", "hilberta:tiles=4", "--captions", 3, *SMALL
    alone(*command, "--out", "eval-1")
    done = succeeds(TORCHRUN, 2, *command, "--out", "eval-2")
    assert done.stdout.count("scores.json") == 1
    one, two = (json.loads((folder / out / "scores.json").read_text())["scores"] for out in ("eval-1", "eval-2"))
    assert [score | {"seconds": 0} for score in one] == [score | {"seconds": 0} for score in two]
