"""Laws of the recogniser: its targets and detections, its verdicts, and the Fréchet distance of its features."""

from itertools import islice

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from lab.training.recogniser import targets
from safetensors.torch import save_file
from scoring import accuracy, all_right

from foveate.apps.demo.atlas import OBJECT_NAMES, load_atlas
from foveate.apps.demo.recogniser import (
    Detection,
    FrechetDistance,
    Recogniser,
    Seen,
    Verdict,
    detect,
    judge,
    load_recogniser,
    recognise,
)
from foveate.apps.demo.scenes import Relation, Scene, Scenes, render, scenes

NOTHING = len(OBJECT_NAMES)
SOME = [*islice(scenes(0), 100), *islice(scenes(0, evaluation=True), 100)]


def truth(scene):
    """What a perfect recogniser finds in a perfect image."""
    return [Detection(index, x, y) for index, (x, y, _) in zip(scene.objects, scene.boxes, strict=True)]


def pooled(verdicts):
    """Of all objects, and of all relations, the fraction that is right."""
    found, objects, held, relations = [sum(counts) for counts in zip(*verdicts, strict=True)][:4]
    return found / objects, held / relations


def two(kind, first, second):
    """The verdict on one relation between objects 3 and 5 found at these places."""
    scene = Scene("", (3, 5), ((0.5, 0.5, 0.3),) * 2, "white", (Relation(0, kind, 1),))
    return judge([Detection(5, *second), Detection(3, *first)], scene)


# ---- targets and detections


def test_targets_name_objects_at_the_centres_of_their_boxes_and_nothing_outside():
    batch = SOME[:40]
    for scene, target in zip(batch, targets(Scenes.of(batch)), strict=True):
        for row in range(16):
            for column in range(16):
                expected = NOTHING
                for index, (x, y, size) in zip(scene.objects, scene.boxes, strict=True):
                    aside, down = abs((column + 0.5) / 16 - x), abs((row + 0.5) / 16 - y)
                    if aside < size / 2 and down < size / 2:
                        expected = index if aside < size / 4 and down < size / 4 else -100
                assert target[row, column] == expected


def test_perfect_logits_give_perfect_detections_and_verdicts():
    target = targets(Scenes.of(SOME))
    logits = 20 * F.one_hot(target.where(target >= 0, NOTHING), NOTHING + 1).movedim(-1, 1).float()
    for scene, found in zip(SOME, detect(Seen(logits, torch.zeros(len(SOME), 1))), strict=True):
        assert all_right(judge(found, scene))
        assert {detection.object for detection in found} == set(scene.objects)
        places = dict(zip(scene.objects, scene.boxes, strict=True))
        for detection in found:
            x, y, _ = places[detection.object]
            assert max(abs(detection.x - x), abs(detection.y - y)) < 1 / 16


def test_a_cell_counts_for_its_most_probable_class_if_that_is_sure():
    chance = torch.full((NOTHING + 1, 16, 16), 1e-6)
    chance[NOTHING] = 1
    chance[:, 4, 4:8] = 1e-6
    chance[7, 4, 4:8] = torch.tensor([0.9, 0.6, 0.6, 0.9])
    chance[8, 4, 4:8] = torch.tensor([0.1, 0.4, 0.4, 0.1])  # the same glyph, taken for another
    chance[[7, NOTHING], 14, 14] = torch.tensor([0.4, 0.6])
    chance[[1, 2, NOTHING], 12, 12] = torch.tensor([0.45, 0.40, 0.15])
    [[only]] = detect(Seen(chance.log()[None], torch.zeros(1, 1)))
    assert only == pytest.approx((7, 6 / 16, 4.5 / 16, 1), abs=1e-3)


def test_unrequested_and_repeated_objects_are_extra():
    chance = torch.full((NOTHING + 1, 16, 16), 1e-6)
    chance[NOTHING] = 1
    for index, row, column in (
        (3, 1, 1),
        (3, 2, 2),
        (3, 9, 9),
        (3, 4, 12),
        (5, 8, 2),
        (6, 12, 2),
    ):  # 1, 1 touches 2, 2
        chance[[index, NOTHING], row, column] = torch.tensor([0.9, 0.1])
    chance[[3, NOTHING], 14, 14] = torch.tensor([0.4, 0.6])  # not sure enough
    [found] = detect(Seen(chance.log()[None], torch.zeros(1, 1)))
    assert {detection.object: detection.patches for detection in found} == {3: 3, 5: 1, 6: 1}
    asked = Scene("", (3, 5), ((0.5, 0.5, 0.3),) * 2, "white", ())
    assert judge(found, asked).extra == 3
    assert judge(found, asked).objects_found == 2


def test_bytes_and_batches_do_not_matter():
    torch.manual_seed(0)
    model = Recogniser().eval()
    pictures = torch.randint(256, (5, 3, 96, 96), dtype=torch.uint8)
    found, features = recognise(model, pictures, batch=2)
    again, alike = recognise(model, pictures / 255)
    assert found == again
    torch.testing.assert_close(features, alike)


# ---- verdicts


def test_a_scene_matches_itself_and_hardly_another_one():
    right = [judge(truth(scene), scene) for scene in SOME]
    assert pooled(right) == (1, 1)
    assert all(map(all_right, right))
    wrong = [judge(truth(other), scene) for other, scene in zip(SOME, [*SOME[1:], SOME[0]], strict=True)]
    assert pooled(wrong)[0] < 0.05
    assert pooled(wrong)[1] == 0
    assert sum(map(all_right, wrong)) / len(wrong) < 0.03


@pytest.mark.parametrize(
    ("kind", "first", "second", "reversed_first", "reversed_second"),
    [
        ("above", (0.5, 0.2), (0.6, 0.7), (0.6, 0.7), (0.5, 0.2)),
        ("left of", (0.2, 0.5), (0.7, 0.6), (0.7, 0.6), (0.2, 0.5)),
        ("beside", (0.2, 0.5), (0.7, 0.6), (0.5, 0.2), (0.6, 0.7)),
    ],
)
def test_a_relation_fails_when_reversed(kind, first, second, reversed_first, reversed_second):
    assert two(kind, first, second) == Verdict(2, 2, 1, 1, 0)
    assert two(kind, reversed_first, reversed_second) == Verdict(2, 2, 0, 1, 0)


def test_beside_is_symmetric_and_a_diagonal_is_both_above_and_left_of():
    assert all_right(two("beside", (0.7, 0.6), (0.2, 0.5)))
    assert all_right(two("above", (0.2, 0.2), (0.6, 0.5)))
    assert all_right(two("left of", (0.2, 0.2), (0.6, 0.5)))
    assert not all_right(two("above", (0.1, 0.4), (0.9, 0.5)))


def test_relations_of_missing_objects_do_not_hold():
    scene = next(scene for scene in SOME if len(scene.relations) == 3)
    assert judge(truth(scene)[1:], scene) == Verdict(2, 3, 1, 3, 0)
    assert judge([], scene) == Verdict(0, 3, 0, 3, 0)


# ---- Fréchet distance


def samples(mean, covariance, number=400, seed=0):
    """Points with exactly this mean and covariance."""
    points = np.random.default_rng(seed).normal(size=(number, len(mean)))
    points -= points.mean(0)
    white = points @ np.linalg.inv(np.linalg.cholesky(np.cov(points.T))).T
    return torch.from_numpy(white @ np.linalg.cholesky(covariance).T + mean)


def test_the_frechet_distance_is_the_closed_form_of_two_gaussians():
    random = np.random.default_rng(1)
    means, mixings = random.normal(size=(2, 6)), random.normal(size=(2, 6, 6))
    first, second = (mixing @ mixing.T + 0.1 * np.eye(6) for mixing in mixings)
    expected = np.square(means[0] - means[1]).sum() + np.trace(first + second)
    expected -= 2 * np.trace(scipy.linalg.sqrtm(first @ second).real)
    a, b = samples(means[0], first), samples(means[1], second, number=300, seed=2)
    assert FrechetDistance(b)(a) == pytest.approx(expected, rel=1e-9)
    assert FrechetDistance(a)(b) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("number", "other"), [(9, 12), (9, 70), (70, 12)])
def test_the_frechet_distance_of_fewer_images_than_features_is_that_of_their_singular_covariances(number, other):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(number, 40, generator=generator), 2 * torch.randn(other, 40, generator=generator) + 1
    first, second = np.cov(a.double().numpy().T), np.cov(b.double().numpy().T)
    shared = np.sqrt(np.linalg.eigvals(first @ second).real.clip(0)).sum()
    apart = np.square((a.double().mean(0) - b.double().mean(0)).numpy()).sum()
    assert FrechetDistance(b)(a) == pytest.approx(apart + np.trace(first + second) - 2 * shared, rel=1e-4)


def test_the_frechet_distance_is_near_zero_for_one_distribution_and_grows_with_noise():
    a, b = torch.randn(2, 4000, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    distances = [FrechetDistance(b + amount * noise)(a) for amount in (0, 0.3, 0.6, 1, 2)]
    assert 0 <= distances[0] < 0.1
    assert distances == sorted(distances)
    assert distances[-1] > 10
    assert FrechetDistance(a[:10])(a[:10]) == pytest.approx(0, abs=1e-9)  # fewer points than dimensions


def test_a_missing_or_damaged_file_is_named_with_the_command_that_makes_it(tmp_path):
    path = tmp_path / "weights.safetensors"
    remedy = "python -m lab built-in --part recogniser"
    with pytest.raises(ValueError, match=f"weights.safetensors is missing.*{remedy}"):
        load_recogniser(path)
    weights = Recogniser().state_dict()
    save_file(weights, path)
    load_recogniser(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"weights.safetensors is damaged.*{remedy}"):
        load_recogniser(path)
    save_file({"head.bias": weights["head.bias"]}, path)
    with pytest.raises(ValueError, match=f"weights.safetensors is damaged.*{remedy}"):
        load_recogniser(path)


# ---- the trained weights


@pytest.mark.slow
@pytest.mark.parametrize("side", [128, 256])
def test_held_out_scenes_are_recognised(side):
    objects, without_mistake = accuracy(load_recogniser(), scenes=200, seed=7, side=side)
    assert objects >= 0.97
    assert without_mistake >= 0.94


def test_renderings_score_near_one_and_those_of_other_captions_near_chance():
    some = SOME[100:]
    found, _ = recognise(load_recogniser(), render(load_atlas(), Scenes.of(some), 128))
    verdicts = list(map(judge, found, some))
    assert sum(verdict.extra for verdict in verdicts) / len(verdicts) < 0.02
    objects, relations = pooled(verdicts)
    assert objects >= 0.97
    assert relations >= 0.95
    objects, relations = pooled(map(judge, found, [*some[1:], some[0]]))
    assert objects < 0.05
    assert relations < 0.01
