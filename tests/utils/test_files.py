"""Laws of results on disk."""

import os
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image, ImageSequence

from foveate.pipelines.image_files import write_picture
from foveate.utils.files import claim, slug, write_whole


@pytest.mark.parametrize("step", ["pathlib.Path.write_bytes", "os.replace"])
def test_an_interrupted_write_leaves_what_was_there_and_nothing_half_written(tmp_path, monkeypatch, step):
    path = tmp_path / "page.html"
    write_whole(path, b"old")

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_file_do_not_meet(tmp_path, monkeypatch):
    path, inner = tmp_path / "chunk", {}
    original = os.replace

    def meanwhile(part, target):
        monkeypatch.setattr("os.replace", original)
        other = Thread(target=write_whole, args=(path, b"other"))
        other.start()
        other.join()
        inner["read"] = Path(part).read_bytes()
        original(part, target)

    monkeypatch.setattr("os.replace", meanwhile)
    write_whole(path, b"ours")
    assert inner["read"] == b"ours"
    assert path.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [path]


def test_frames_are_kept_exactly_also_where_nothing_moves(tmp_path):
    frames = [Image.new("RGB", (5, 3), color) for color in ("red", "red", "blue", "blue", "red")]
    write_picture(tmp_path / "video.png", frames[0], {"seed": "3"}, more=frames[1:])
    with Image.open(tmp_path / "video.png") as video:
        assert video.info["seed"] == "3"
        kept = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(video)]
    assert kept == [frame.tobytes() for frame in frames]


def test_any_prompt_gives_a_file_name():
    assert slug("A red  apple, above/../a car!") == "a-red-apple-above-a-car"
    assert slug("红 苹果") == "红-苹果"
    assert slug("🍎") == "picture"
    assert len(slug("long " * 100)) <= 60


def test_a_folder_belongs_to_the_settings_that_claimed_it(tmp_path):
    claim(tmp_path / "run", {"steps": "2"})
    claim(tmp_path / "run", {"steps": "2"})
    with pytest.raises(ValueError, match="holds results of steps=2: name another folder"):
        claim(tmp_path / "run", {"steps": "3"})
