"""Laws of the benchmark of log-linear attention over text and image."""

import json

import pytest
import torch
from lab.bench import text_and_image
from lab.bench.text_and_image import bench, error_of, main

from foveate.ops.joint_attention import LogLinear, joint_attention


def pattern(text, image):
    return LogLinear(*map(torch.empty, (text, image)), {"top_k": 2, "block_size": 16, "levels": None, "enrich": True})


@pytest.mark.parametrize(("text", "image"), [(0, 100), (7, 300), (20, 256)])
def test_the_error_is_that_of_text_and_image(text, image):
    q, k, v = (torch.randn(1, 3, text + image, 32) for _ in range(3))
    out = joint_attention(q, k, v, pattern(text, image))
    assert error_of(out, q, k, v, pattern(text, image)) < 1e-6
    for row in (0, text, -1):
        wrong = out.clone()
        wrong[:, -1, row] += 1
        assert error_of(wrong, q, k, v, pattern(text, image)) > 1e-3


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(text_and_image, "joint_attention", lambda q, k, v, _: 2 * q)
    *_, result = bench([("case", pattern(7, 100))], 2, 32, torch.device("cpu"), torch.float32, rounds=1)
    dense, ours = result["rows"]
    assert "median_s" in dense
    assert "median_s" not in ours
    assert "error" in ours["failed"]


def test_the_result_is_written(tmp_path):
    sizes = {"pixels": "256", "text": 7, "keys": "64,128", "block_size": "32", "heads": 1, "head_dim": 32}
    main(tmp_path / "a.json", **sizes, device="cpu", commit="abc")
    result = json.loads((tmp_path / "a.json").read_text())
    assert [row["case"] for row in result["rows"][::2]] == [f"256 px, top_k={k}, block_size=32" for k in (2, 4)]
    assert result["versions"]["commit"] == "abc"
    assert all(row["speed_up"] > 0 for row in result["rows"])
