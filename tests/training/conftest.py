"""A tiny pipeline for the tests of training, and pairs that it generated."""

import pytest
import tiny
from accelerate.state import AcceleratorState

from foveate.training.pairs import make_pairs


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Forget the device that accelerate otherwise keeps for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def pipe():
    return tiny.pipeline()


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "pairs"
    make_pairs(folder, tiny.pipeline(), tiny.PROMPTS, tiny.REQUEST)
    return folder
