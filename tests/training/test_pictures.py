"""Laws of collections of training images."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.scenes import ScenePictures, Scenes, render, scenes
from foveate.training.pictures import FolderPictures, HubPictures


def gray(folder, name, shade, size=(8, 8)):
    (folder / name).parent.mkdir(exist_ok=True)
    Image.new("L", size, shade).save(folder / name)


def test_folders_are_read_with_subfolders_sorted_by_name(tmp_path):
    gray(tmp_path, "b.png", 255)
    gray(tmp_path, "a/c.png", 0)
    pictures = FolderPictures(tmp_path)
    assert (pictures.count, pictures.captioned) == (2, False)
    for index, shade in enumerate((-1.0, 1.0)):
        pixels, caption = pictures.picture(index, (4, 6))
        assert torch.equal(pixels, torch.full((3, 4, 6), shade))
        assert caption == ""


def test_pictures_are_centre_cropped(tmp_path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    cut, _ = FolderPictures(tmp_path).picture(0, (10, 10))
    assert cut.min() > 0.8  # resampled: a little of the black beside it
    whole, _ = FolderPictures(tmp_path).picture(0, (20, 60))
    assert torch.equal(whole, torch.from_numpy(pixels / 127.5 - 1).float().permute(2, 0, 1))


def test_all_pictures_or_none_have_captions(tmp_path):
    gray(tmp_path, "a.png", 0)
    gray(tmp_path, "b.png", 0)
    (tmp_path / "a.txt").write_text("an owl\n")
    with pytest.raises(ValueError, match=r"b\.png has no caption and others have: put one into b\.txt"):
        FolderPictures(tmp_path)
    (tmp_path / "a.txt").unlink()
    bare = FolderPictures(tmp_path).checksum
    for name, caption in (("a", "an owl"), ("b", "a cat")):
        (tmp_path / f"{name}.txt").write_text(f"{caption}\n")
    pictures = FolderPictures(tmp_path)
    assert [pictures.picture(index, (4, 4))[1] for index in range(2)] == ["an owl", "a cat"]
    assert pictures.checksum != bare


def test_a_folder_without_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no images: name a folder of"):
        FolderPictures(tmp_path)


def hub(monkeypatch, features, rows):
    """A library `datasets` that knows one data set."""

    class Data(list):
        pass

    data, module = Data(rows), ModuleType("datasets")
    data.features = {name: type(kind, (), {"names": names})() for name, (kind, names) in features.items()}
    module.load_dataset = lambda name, split: data
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_data_set_gives_pictures_with_captions_or_class_names(monkeypatch):
    row = {"image": Image.new("L", (8, 8), 255), "text": "a cat", "label": 1}
    hub(monkeypatch, {"image": ("Image", None), "text": ("Value", None)}, [row])
    pixels, caption = HubPictures("some/cats").picture(0, (4, 4))
    assert torch.equal(pixels, torch.ones(3, 4, 4))
    assert caption == "a cat"
    hub(monkeypatch, {"image": ("Image", None), "label": ("ClassLabel", ["dog", "cat"])}, [row])
    assert HubPictures("some/cats").picture(0, (4, 4))[1] == "cat"
    hub(monkeypatch, {"image": ("Image", None)}, [row])
    pictures = HubPictures("some/cats")
    assert (pictures.count, pictures.captioned, pictures.picture(0, (4, 4))[1]) == (1, False, "")
    hub(monkeypatch, {"text": ("Value", None)}, [row])
    with pytest.raises(ValueError, match="has no images among its columns text"):
        HubPictures("some/words")


def test_a_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"some/cats is no folder, .*: pip install datasets, or name a folder"):
        HubPictures("some/cats")


def test_scenes_are_training_scenes_by_number():
    pictures = ScenePictures(3)
    captions = [pictures.picture(index, (16, 16))[1] for index in range(40)]
    assert len(set(captions)) > 35
    judged = {scene.caption for _, scene in zip(range(200), scenes(3, evaluation=True), strict=False)}
    assert not judged & set(captions)
    scene = next(scenes(3 * 2**40 + 7))
    pixels, caption = pictures.picture(7, (32, 32))
    assert caption == scene.caption
    assert torch.equal(pixels, render(load_atlas(), Scenes.of([scene]), 32)[0] * 2 - 1)
    others = ScenePictures(4)
    assert not set(captions) & {others.picture(index, (16, 16))[1] for index in range(40)}
