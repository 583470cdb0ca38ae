"""Fixtures of the command line: an empty folder for every test, a tiny pipeline and a tiny language model."""

import pytest
import torch
from tiny_lm import language_model, tokenizer

from foveate.apps.demo.untrained import untrained_pipeline


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-lm"
    language_model("qwen3", dtype=torch.float32).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path
