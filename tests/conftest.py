"""Shapes and types of all functions are checked while tests run; nothing reaches a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jaxtyping
import pytest
import torch
from hypothesis import settings

jaxtyping.install_import_hook("foveate", "shape_check.check")

settings.register_profile("foveate", deadline=None, max_examples=60)
settings.load_profile("foveate")
torch.set_num_threads(1)


@pytest.fixture
def as_a_user():
    """Without the checks of the tests, which would refuse a wrong argument before foveate can."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
