"""Laws of results on disk."""

import pytest

from foveate.files import claim, slug, write_whole


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


def test_any_prompt_gives_a_file_name():
    assert slug("A red  apple, above/../a car!") == "a-red-apple-above-a-car"
    assert slug("苹果") == "picture"
    assert len(slug("long " * 100)) <= 60


def test_a_folder_belongs_to_the_settings_that_claimed_it(tmp_path):
    claim(tmp_path / "run", {"steps": "2"})
    claim(tmp_path / "run", {"steps": "2"})
    with pytest.raises(ValueError, match="holds pictures drawn with steps=2: name another folder with --out"):
        claim(tmp_path / "run", {"steps": "3"})
