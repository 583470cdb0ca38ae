"""Pictures of the built-in model are those that were drawn before the adapter was rewritten."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image

import foveate
from foveate import LLSA, HilbertA, ToMA
from foveate.methods import ToDo, ToFu, ToMeSD
from foveate.pipelines.request import Request, draw, load
from foveate.utils.similarity import psnr
from foveate_models import find

PICTURES = Path(__file__).parent / "pictures"
PROMPT = "a red apple above a blue car on a green background"
METHODS = {
    "dense": (),
    "hilberta-4": (HilbertA(tiles=4, slide="curve"),),
    "hilberta-16": (HilbertA(tiles=16, slide="curve"),),
    "toma": (ToMA(keep=0.5),),
    "toma-module": (ToMA(keep=0.5, granularity="module", tile=(4, 4), merge_mlp=True),),
    "llsa": (LLSA(min_tokens=0),),
    "todo": (ToDo(),),
    "tomesd": (ToMeSD(),),
    "tofu": (ToFu(),),
    "hilberta-toma": (HilbertA(tiles=4), ToMA(keep=0.5)),
}


@pytest.fixture(scope="module")
def pipe():
    return load(str(find("pipeline")), "cpu")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "size", [pytest.param((96, 160), id="96x160"), pytest.param((128, 128), id="128x128", marks=pytest.mark.slow)]
)
def test_the_picture_has_not_changed(pipe, name, size):
    methods = METHODS[name]
    with foveate.apply(pipe, *methods) if methods else nullcontext():
        picture = draw(pipe, Request(PROMPT, size, 4, None, 0))[0]
    before = Image.open(PICTURES / f"{name}-{size[0]}x{size[1]}.png").convert("RGB")
    assert psnr(picture, before) > 50
