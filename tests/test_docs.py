"""Laws of the documentation: what it shows runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).parent.parent / "docs"


def samples(page):
    """The Python samples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def run(folder, *arguments):
    path = [str(folder), str(Path(__file__).parent)]
    setup = f"import sys, runpy; sys.path[:0] = {path}; sys.argv = {list(arguments)}; "
    result = subprocess.run(
        [sys.executable, "-c", setup + "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_smallest_family_serves_its_model_and_prints_the_summary_shown(tmp_path):
    for name, sample in zip(("tiny_dit", "tiny_family", "check"), samples("add-a-model.md"), strict=True):
        (tmp_path / f"{name}.py").write_text(sample)
    printed = run(tmp_path, "check")
    page = (DOCS / "add-a-model.md").read_text()
    for line in printed.strip().splitlines():
        assert line.rstrip() in page


def test_the_sample_method_passes_its_sample_tests(tmp_path):
    method, tests, *_ = samples("add-a-method.md")
    (tmp_path / "banded.py").write_text(method)
    (tmp_path / "test_banded.py").write_text(tests.replace("foveate.methods.banded", "banded"))
    assert "6 passed" in run(tmp_path, "pytest", "test_banded.py")


@pytest.mark.parametrize("page", ["block-attention.md", "log-linear-attention.md", "llsa.md", "sub-cp.md"])
def test_the_pages_of_methods_run_from_top_to_bottom(page, tmp_path):
    (tmp_path / "page.py").write_text("\n".join(samples(page)))
    run(tmp_path, "page")


def test_the_page_of_infoflow_runs_with_a_tiny_model(tmp_path):
    loading, *rest = samples("infoflow-kv.md")
    assert "from_pretrained" in loading
    tiny = "from tiny_lm import language_model, tokenizer\nmodel, tokenizer = language_model('qwen3'), tokenizer()\n"
    (tmp_path / "page.py").write_text(tiny + "\n".join(rest))
    assert "rows recomputed" in run(tmp_path, "page")


def test_the_page_of_the_pixel_model_runs_as_far_as_a_cpu_goes(tmp_path):
    model, _, training = samples("pixel-dit.md")
    (tmp_path / "page.py").write_text(model + "assert velocity.shape == noisy.shape\n")
    run(tmp_path, "page")
    (tmp_path / "faces").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "faces" / "one.png")
    small = {'.to("cuda")': "", "DiT-S": "DiT-XS", "5000, 64": "1, 1", "(128, 128), 2000, 16": "(16, 16), 1, 1"}
    for old, new in {**small, 'dtype="bfloat16"': "", "(32, 32)": "(16, 16)"}.items():
        assert old in training
        training = training.replace(old, new)
    (tmp_path / "page.py").write_text(training)
    run(tmp_path, "page")
    assert (tmp_path / "trained" / "model_index.json").exists()


def test_the_built_in_model_page_draws(tmp_path):
    (sample,) = samples("built-in-model.md")
    (tmp_path / "page.py").write_text(sample.replace("num_inference_steps=20", "num_inference_steps=1"))
    run(tmp_path, "page")


def test_the_built_in_reader_page_answers(tmp_path):
    (sample,) = samples("built-in-reader.md")
    (tmp_path / "page.py").write_text(sample)
    assert run(tmp_path, "page").strip() == "flute"
