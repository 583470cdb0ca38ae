"""Mistakes of users, which are refused before anything is loaded or drawn, or told in one line."""

import errno
import json
import math
import socket
from pathlib import Path

import pytest
from command_line import fails, run, succeeds

from foveate import HilbertA
from foveate.diffusers.preset import Preset, describe
from foveate.pipelines.checks import check_request
from foveate.pipelines.request import Request, denoiser, load_pipeline
from foveate.utils.files import write_whole

SMALL = ["--size", "64", "--steps", "2", "--device", "cpu"]


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr("foveate.pipelines.request.load_pipeline", None)
    monkeypatch.setattr("foveate.transformers.model.load_model", None)


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize(
    "command",
    [
        "generate a-cat --out {}/a.png", "generate a-cat --seeds 2 --out {}", "compare a-cat --out {}",
        "eval --out {}", "tune --out {}", "distill --out {}", "train --out {}", "icl pool.csv --out {}/b.jsonl",
        "rag notes w --out {}/a.html", "curves --out {}/a.png", "bench step --out {}", "bench context --out {}",
        "demo texts --out {}", "ui --out {}",
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(command, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "pool.csv").write_text("text\na\nb\n")
    assert "cannot write into /proc/nowhere" in fails(*command.format("/proc/nowhere").split())
    (tmp_path / "taken").write_text("mine")
    assert "taken is a file" in fails(*command.format("taken/inside").split())
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate a-cat --guidance nan", "guidance is nan: give a number"),
        ("train --rate nan", "rate is nan"),
        ("distill --minutes nan", "minutes is nan"),
        ("tune --min-ssim nan", "min-ssim is nan"),
        ("curves --centre nan", "centre is nan"),
        ("serve --timeout nan", "timeout is nan"),
        ("rag . w --recompute nan", "recompute is nan"),
        ("generate a-cat --size 99999999", "use a smaller size"),
        ("generate a-cat --method hilberta -o tiles=4 -o tiles=8", "option tiles is given twice, as 4 and 8"),
        ("generate a-cat --method hilberta --tiles 4 -o tiles=8", "option tiles is given twice, as 8 and 4"),
        ("generate a-cat --method hilberta:tiles=4,tiles=8", "option tiles is given twice"),
        ("compare a-cat --method hilberta:tiles=4,tiles=8", "option tiles is given twice"),
        ("rag . w -o norm=l1 -o norm=l2", "option norm is given twice"),
        ("serve --method toma --method toma:keep=0.5", "--method toma:keep=0.5 is given twice"),
        ("serve --method dense --method dense", "--method dense is given twice"),
        ("tune --method toma --method toma", "--method toma is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(command, message):
    output = fails(*command.split())
    assert message in output or ("nan" in message and "Invalid value" in output)  # an option with a range
    assert "100000000" not in output


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("command", ["ui", "serve", "rag serve"])
def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in (said := fails(*command.split(), "--port", port))
        assert "name another --port" in said


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(tmp_path / "a.png", b"1")
    assert raised.value.filename == str(tmp_path / "a.png")


def test_a_long_prompt_does_not_fill_the_screen(folder):
    prompt = "an owl " * 1500
    output = succeeds("generate", prompt, "--model", folder, *SMALL)
    assert len(output) < 1000
    unknown = " ".join(f"{chr(97 + i % 26)}zq{chr(97 + i // 26)}" for i in range(200))
    output = succeeds("generate", unknown, "--size", 32, "--steps", 1, "--device", "cpu")
    assert "and 192 more words, and can only guess" in output
    assert len(output) < 2000


def test_a_preset_draws_at_its_own_steps_and_tells_of_others(folder, tmp_path):
    pipe = load_pipeline(str(folder), "cpu")
    preset = Preset(
        methods=(HilbertA(tiles=2),), models=[describe(denoiser(pipe))], size=(64, 64), evidence={"steps": 3}
    )
    preset.save("preset.json")
    own = "generate", "a cat", "--model", folder, "--method", "preset.json", "--device", "cpu"
    assert "was measured at" not in succeeds(*own, "--out", "own.png")
    told = "was measured at 3 steps, not at 2"
    assert told in succeeds(*own, "--steps", 2, "--out", "two.png")
    compared = "compare", "a cat", "--model", folder, "--method", "preset.json", "--rounds", 1, "--device", "cpu"
    assert told in succeeds(*compared, "--steps", 2)
    settings = json.loads((tmp_path / "compare" / "settings.json").read_text())
    assert (settings["steps"], settings["size"]) == ("2", "64 x 64 px")


def test_dense_is_a_method_of_every_command(folder, tmp_path):
    assert run("compare", "a cat", "--model", folder, *SMALL, "--method", "dense", "--rounds", 1).exit_code == 0
    assert {path.name for path in (tmp_path / "compare").glob("*.png")} == {"dense.png"}
    both = "--method", "dense", "--method", "hilberta:tiles=2"
    succeeds("compare", "a cat", "--model", folder, *SMALL, *both, "--rounds", 1)
    assert {path.name for path in (tmp_path / "compare").glob("*.png")} == {"dense.png", "hilberta-t-2.png"}
    assert "--method dense is given twice" in fails("eval", "--method", "dense", "--method", "dense")
    assert "one sparse method, not for dense: name one" in fails("distill", "--method", "dense")


def test_compare_numbers_its_folders_and_refuses_one_that_is_taken(folder, tmp_path):
    command = "compare", "--model", folder, *SMALL, "--method", "hilberta:tiles=2", "--rounds", 1
    first = succeeds(*command, "a cat")
    assert str(tmp_path / "compare" / "index.html") in first

    assert str(tmp_path / "compare-2" / "index.html") in succeeds(*command, "a dog")
    assert str(tmp_path / "compare" / "index.html") in succeeds(*command, "a cat")  # resumes
    assert "compare holds results of prompt=a cat" in fails(*command, "a dog", "--out", "compare")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("mine")
    assert "site/index.html would be overwritten" in fails(*command, "a cat", "--out", "site")
    assert (tmp_path / "site" / "index.html").read_text() == "mine"


def test_the_library_refuses_a_guidance_scale_that_is_no_number(folder):
    pipe = load_pipeline(str(folder), "cpu")
    with pytest.raises(ValueError, match="the guidance scale is nan"):
        check_request(pipe, Request("a cat", (64, 64), 2, math.nan, 0))
