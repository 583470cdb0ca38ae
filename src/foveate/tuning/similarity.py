"""Similarity of two images: PSNR and SSIM."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

__all__ = ["detail_ssim", "psnr", "ssim"]

FLAT = 16
"""Largest range of grey levels in a flat window."""


def psnr(image: Image.Image, reference: Image.Image) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit RGB images; infinite if they are identical.

    Raises:
        ValueError: If the images differ in size.
    """
    ours, theirs = _pixels(image, reference)
    with np.errstate(divide="ignore"):
        return float(peak_signal_noise_ratio(theirs, ours, data_range=255))


def ssim(image: Image.Image, reference: Image.Image) -> float:
    """Structural similarity of 8-bit RGB images, mean over channels: 1 if they are identical.

    The window is 7 pixels wide, or the largest odd number of pixels that fits into a smaller image.

    Raises:
        ValueError: If the images differ in size, or a side is below 3 pixels.
    """
    return float(_ssim_map(image, reference).mean())


def detail_ssim(image: Image.Image, reference: Image.Image) -> float:
    """`ssim` over the windows that are not flat in both images.

    A flat background, which every method renders well, would dominate the mean over all windows. If all windows are
    flat, it is that mean.

    Raises:
        ValueError: As `ssim`.
    """
    similarity, window = _ssim_map(image, reference), _ssim_window(image)
    busy = np.zeros(similarity.shape, bool)
    for picture in (image, reference):
        windows = sliding_window_view(np.asarray(picture.convert("L")), (window, window))
        busy |= windows.max((-2, -1)) - windows.min((-2, -1)) > FLAT
    return float(similarity[busy].mean() if busy.any() else similarity.mean())


def _ssim_map(image: Image.Image, reference: Image.Image) -> npt.NDArray[np.floating]:
    """SSIM of each window, averaged over channels. Windows that cross the border of the image are left out."""
    ours, theirs = _pixels(image, reference)
    window = _ssim_window(image)
    options: dict[str, Any] = {"win_size": window, "channel_axis": -1, "data_range": 255, "full": True}
    similarity = structural_similarity(theirs, ours, **options)[1].mean(-1)
    margin = window // 2
    return similarity[margin : image.height - margin, margin : image.width - margin]


def _ssim_window(image: Image.Image) -> int:
    side = min(image.size)
    if side < 3:
        raise ValueError(f"SSIM needs windows of 3 pixels or more: use larger images than {_size(image)}")
    return min(7, side - 1 + side % 2)


def _pixels(image: Image.Image, reference: Image.Image) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    if image.size != reference.size:
        raise ValueError(f"images of {_size(image)} and {_size(reference)} cannot be compared: resize one of them")
    return np.asarray(image.convert("RGB")), np.asarray(reference.convert("RGB"))


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height} pixels"
