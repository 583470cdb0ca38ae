"""Random scenes of emoji as training pictures."""

from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from foveate.demo.atlas import load_atlas
from foveate.demo.scenes import Scenes, render, scenes

__all__ = ["ScenePictures"]


class ScenePictures:
    """Endless training scenes by number, without the held-out ones: a `foveate.training.pictures.Pictures`.

    Args:
        seed: The same seed gives the same scenes.
    """

    count = None
    captioned = True

    def __init__(self, seed: int):
        self.seed, self.checksum = seed, f"scenes {seed}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """A picture of (height, width) pixels from -1 to 1, and its caption.

        Raises:
            ValueError: If the size is no square.
        """
        height, width = size
        if height != width:
            raise ValueError(f"scenes are square: use {height} or {width} for {width} x {height} px")
        scene = next(scenes(self.seed * 2**40 + index))
        return render(self._atlas, Scenes.of([scene]), height)[0] * 2 - 1, scene.caption

    @cached_property
    def _atlas(self) -> Float[Tensor, "emoji 4 cell cell"]:
        return load_atlas()
