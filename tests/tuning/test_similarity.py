"""Laws of PSNR and SSIM: they are their formulas."""

import math

import numpy as np
import pytest
from random_pictures import picture
from skimage.metrics import structural_similarity

from foveate.tuning.similarity import psnr, ssim


def test_psnr_is_its_formula():
    a, b = picture(20, 11), picture(20, 11, seed=1)
    error = np.mean((np.asarray(a, float) - np.asarray(b, float)) ** 2)
    assert psnr(a, b) == pytest.approx(10 * math.log10(255**2 / error))


@pytest.mark.parametrize("size", [(3, 3), (4, 9), (64, 48)])
def test_a_picture_is_identical_to_itself(size):
    assert psnr(picture(*size), picture(*size)) == math.inf
    assert ssim(picture(*size), picture(*size)) == 1.0


def test_ssim_is_the_mean_over_channels():
    a, b = picture(30, 20), picture(30, 20, seed=1)
    channels = [structural_similarity(np.asarray(x), np.asarray(y)) for x, y in zip(a.split(), b.split(), strict=True)]
    assert ssim(a, b) == pytest.approx(np.mean(channels))


def test_ssim_of_one_window_is_its_formula():
    # in an image of 5 x 5 pixels the only whole window is the image
    a, b = picture(5, 5).convert("L"), picture(5, 5, seed=1).convert("L")
    x, y = np.asarray(a, float).ravel(), np.asarray(b, float).ravel()
    (var_x, cov), (_, var_y) = np.cov(x, y)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * x.mean() * y.mean() + c1) / (x.mean() ** 2 + y.mean() ** 2 + c1)
    assert ssim(a, b) == pytest.approx(luminance * (2 * cov + c2) / (var_x + var_y + c2))


@pytest.mark.parametrize(
    ("metric", "sizes", "message"),
    [
        (psnr, [(8, 8), (8, 9)], "8 x 8 pixels and 8 x 9 pixels"),
        (ssim, [(8, 8), (8, 9)], "8 x 8 pixels and 8 x 9 pixels"),
        (ssim, [(2, 9), (2, 9)], "larger images than 2 x 9 pixels"),
    ],
)
def test_pictures_that_cannot_be_compared_are_refused(metric, sizes, message):
    with pytest.raises(ValueError, match=message):
        metric(*(picture(*size) for size in sizes))
