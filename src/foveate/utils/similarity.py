"""How similar two pictures are."""

import numpy as np
import numpy.typing as npt
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

__all__ = ["psnr", "ssim"]


def psnr(image: Image.Image, reference: Image.Image) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit RGB pictures; infinite if they are identical.

    Raises:
        ValueError: If the pictures differ in size.
    """
    ours, theirs = _pixels(image, reference)
    with np.errstate(divide="ignore"):
        return float(peak_signal_noise_ratio(theirs, ours, data_range=255))


def ssim(image: Image.Image, reference: Image.Image) -> float:
    """Structural similarity of 8-bit RGB pictures, mean over channels: 1 if they are identical.

    The window is 7 pixels wide, or the largest odd number of pixels that fits into a smaller picture.

    Raises:
        ValueError: If the pictures differ in size, or a side is below 3 pixels.
    """
    ours, theirs = _pixels(image, reference)
    side = min(image.size)
    if side < 3:
        raise ValueError(f"SSIM needs windows of 3 pixels or more: use larger pictures than {_size(image)}")
    window = min(7, side - 1 + side % 2)
    mean = structural_similarity(theirs, ours, win_size=window, channel_axis=-1, data_range=255)
    return float(mean)  # type: ignore[arg-type]  # a tuple only if more than the mean is asked for


def _pixels(image: Image.Image, reference: Image.Image) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    if image.size != reference.size:
        raise ValueError(f"pictures of {_size(image)} and {_size(reference)} cannot be compared: resize one of them")
    return np.asarray(image.convert("RGB")), np.asarray(reference.convert("RGB"))


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height} pixels"
