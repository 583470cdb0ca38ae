"""Shapes of all public functions are checked while tests run; nothing reaches a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook("foveate", "beartype.beartype")

import torch
from hypothesis import settings

settings.register_profile("foveate", deadline=None, max_examples=60)
settings.load_profile("foveate")
torch.set_num_threads(1)
