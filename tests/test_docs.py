"""Laws of the documentation: what it shows runs, and what it claims was measured."""

import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import diffusers
import pytest
from doc_tables import device, tables
from lab import scale
from PIL import Image

import foveate
from foveate.diffusers.card import CARDS

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "lab" / "results"


def samples(page):
    """The Python samples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs code as a script in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run_script(code):
        (tmp_path / "page.py").write_text(code)
        runpy.run_path("page.py", run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.mark.parametrize("page", ["block-attention.md", pytest.param("llsa.md", marks=pytest.mark.slow), "sub-cp.md"])
def test_a_page_runs_from_top_to_bottom(page, run):
    run("\n".join(samples(page)))


def test_the_sample_card_serves_its_model_and_prints_what_the_page_shows(run, monkeypatch):
    monkeypatch.setitem(CARDS, "BriaTransformer2DModel", None)  # puts the shipped card back afterwards
    card, check = samples("add-a-model.md")
    printed = run(card + check).strip()
    assert printed in (DOCS / "add-a-model.md").read_text()


@pytest.mark.slow
def test_the_sample_method_passes_its_sample_tests(tmp_path):
    method, tests, *_ = samples("add-a-method.md")
    (tmp_path / "banded.py").write_text(method)
    (tmp_path / "test_banded.py").write_text(tests.replace("foveate.methods.banded", "banded"))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "pytest", "test_banded.py"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "6 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_made(run):
    path = DOCS / "notebook.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert "steps = 20" in code
    run(code.replace("steps = 20", "steps = 1"))
    assert not [cell for cell in cells[1:-1] if not cell["outputs"]]
    assert path.stat().st_size < 400_000


@pytest.mark.slow
def test_the_page_of_infoflow_runs_with_a_tiny_model(run):
    loading, *rest = samples("infoflow-kv.md")
    assert "from_pretrained" in loading
    others = "AutoModelForImageTextToText", "image.crop", "init_process_group"  # need a large model or processes
    left_out = [sample for sample in rest if any(name in sample for name in others)]
    assert len(left_out) == len(others)
    rest = [sample for sample in rest if sample not in left_out]
    tiny = "from tiny_lm import language_model, tokenizer\nmodel, tokenizer = language_model('qwen3'), tokenizer()\n"
    assert "rows recomputed" in run(tiny + "\n".join(rest))


@pytest.mark.slow
def test_the_page_of_the_pixel_model_runs_as_far_as_a_cpu_goes(run, tmp_path):
    model, _, training = samples("pixel-dit.md")
    run(model + "assert velocity.shape == noisy.shape\n")
    (tmp_path / "faces").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "faces" / "one.png")
    small = {'.to("cuda")': "", "DiT-S": "DiT-T", "5000, 64": "1, 1", "(128, 128), 2000, 16": "(16, 16), 1, 1"}
    for old, new in {**small, 'dtype="bfloat16"': "", "(32, 32)": "(16, 16)"}.items():
        assert old in training
        training = training.replace(old, new)
    run(training)
    assert (tmp_path / "trained" / "model_index.json").exists()


@pytest.mark.slow
def test_the_page_of_the_built_in_model_draws(run):
    (sample,) = samples("built-in-model.md")
    run(sample.replace("num_inference_steps=20", "num_inference_steps=1"))


def test_the_page_of_the_built_in_reader_answers(run):
    (sample,) = samples("built-in-reader.md")
    assert run(sample).strip() == "flute"


@pytest.mark.parametrize(
    "page",
    sorted(
        path.relative_to(ROOT)
        for pages in ("*.md", "docs/*.md", "lab/**/*.md", "models/*.md")
        for path in ROOT.glob(pages)
    ),
    ids=str,
)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text) + re.findall(r'src="([^"#]*)(#.*)?"', text)
    for target, anchor in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def anchors(path):
    """The anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_each_image_and_each_result_is_on_a_page_and_each_page_is_in_the_navigation():
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    shown = "".join(pages.values()) + (ROOT / "README.md").read_text()
    files = [*DOCS.glob("images/**/*.*g"), *RESULTS.glob("*.json")]
    assert [path.name for path in files if path.name not in shown] == []
    assert sorted(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == sorted(pages)


def test_the_tables_of_models_list_all_cards_and_nothing_that_does_not_exist():
    supported, rest = (DOCS / "models.md").read_text().split("## Not supported")
    ours, others = (set(re.findall(r"^\| [^|]*\| (`.*?`) \|", part, re.MULTILINE)) for part in (supported, rest))
    names = {name for cell in others for name in re.findall(r"`(\w+)`", cell)}
    shipped = {name for name, card in CARDS.items() if isinstance(card, str)}  # others were registered by a test
    assert {cell.strip("`") for cell in ours} == {name for name in shipped if hasattr(diffusers, name)}
    assert names
    assert all(hasattr(diffusers, name) and name not in shipped for name in names)


@pytest.mark.parametrize("name", re.findall(r"^::: (.*)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
def test_each_name_of_the_api_page_exists_and_is_documented(name):
    assert pkgutil.resolve_name(name).__doc__


@pytest.mark.skipif(find_spec("triton") is None, reason="it names kernels")
def test_each_name_of_the_architecture_page_exists():
    rooms = "|".join(path.name for path in (ROOT / "src" / "foveate").iterdir() if path.is_dir())
    names = re.findall(rf"`((?:{rooms})(?:\.\w+)+)`", (DOCS / "architecture.md").read_text())
    assert len(names) > 50
    for name in names:
        pkgutil.resolve_name(f"foveate.{name}")


def test_the_drawing_of_the_rooms_shows_their_imports(monkeypatch):
    monkeypatch.chdir(ROOT)
    drawing = runpy.run_path("docs/architecture.py")["drawing"]()
    assert (DOCS / "images" / "architecture.svg").read_text() == drawing, "run python docs/architecture.py"


def test_the_changelog_names_existing_modules_beside_those_that_moved():
    rows = re.findall(r"^\| (`foveate.*`) \| (`foveate.*`) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    before, after = (re.findall(r"`([\w.]+)`", " ".join(column)) for column in zip(*rows, strict=True))
    for name in after:
        pkgutil.resolve_name(name)
    assert not any((ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists() for name in before)


def test_the_citation_file_has_the_version_and_the_papers_of_the_readme():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {foveate.__version__}" in citation
    papers = re.findall(r"https://arxiv.org/abs/[\d.]+", (ROOT / "README.md").read_text())
    assert len(papers) == 5
    assert all(paper in citation for paper in papers)


PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if tables(text)])
def test_each_number_of_a_table_is_that_of_its_row_and_column_in_the_results(page):
    for table in tables(PAGES[page]):
        assert not table.differences(), "\n".join([page, *table.differences()])


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if tables(text)])
def test_a_table_with_results_of_several_devices_names_each_of_them(page):
    for table in tables(PAGES[page]):
        missing = table.unnamed_devices()
        assert not missing, f"{page}, the table of {table.rows[0][0]!r} has numbers of {missing}, and does not say so"


def test_each_number_beside_that_of_a_paper_has_its_device_and_commit():
    for table in tables(PAGES["papers.md"]):
        for i, _, place in table.places():
            for file in place.files():
                devices, commit = device(file)
                assert ", ".join([*sorted(devices), commit or "commit unknown"]) in table.rows[i][-1], table.rows[i]


def test_a_table_that_is_computed_names_who_checks_it():
    for page, text in PAGES.items():
        for path in re.findall(r"<!-- computed by (\S+) -->", text):
            assert page in (ROOT / path).read_text()


def test_the_page_of_several_gpus_shows_what_is_computed():
    for table in (*map(scale.latency, scale.STEPS), scale.throughput()):
        assert table.partition("|")[2] in PAGES["scale.md"]


def test_the_page_of_steps_shows_what_bounds_them():
    def seconds(file, **where):
        rows = json.loads((RESULTS / file).read_text())["rows"]
        return next(row for row in rows if where.items() <= row.items())

    image = seconds("attention-forward-cuda.json", case="2048 px, dense table", peer="cuDNN, dense")["median_s"] / 24
    video = seconds("attention-video-cuda.json", title="dense (cuDNN)")["seconds"]
    calls = {
        "flux2-dev": 56 * 48 * image,
        "qwen-image": 60 * 24 * image,
        "z-image": 32 * 30 * image,
        "wan-14b": 40 * video,
    }
    shares, bounds = [], []
    for model, attention in calls.items():
        file = f"step-{model}-compiled-cuda.json"
        share = attention / seconds(file, variant="dense")["step_s"]
        bound = seconds(file, variant="HilbertA T=16")["attention_flop_bound"]
        shares.append(f"{100 * share:.0f} %")
        bounds.append(f"{1 / (1 - share + share / bound):.2f}x")
    assert f"| {' | '.join(shares)} |\n" in PAGES["benchmarks-steps.md"], shares
    assert f"| {' | '.join(bounds)} |\n" in PAGES["benchmarks-steps.md"], bounds


def test_the_errors_of_the_faq_are_those_that_foveate_raises():
    source = "".join(path.read_text() for path in (ROOT / "src" / "foveate").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", source)
    messages = re.findall(r"^\| `([^`]+)` \| ", PAGES["faq.md"], re.MULTILINE)
    assert len(messages) == 10
    for message in messages:
        for part in filter(None, re.split(r" ?… ?|…|\[|\]|'", message)):
            assert part.strip() in said, message


def test_the_page_of_a_photograph_runs(run, tmp_path):
    (sample,) = samples("photograph.md")
    Image.new("RGB", (90, 60), "teal").save(tmp_path / "photograph.jpg")
    small = {
        'FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16).to("cuda")': (
            "untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))"
        ),
        "1024, 768": "64, 48",
        "height=768, width=1024": "height=48, width=64, max_sequence_length=64",
        "num_inference_steps=28": "num_inference_steps=5",
    }
    for old, new in small.items():
        assert old in sample
        sample = sample.replace(old, new)
    printed = run("from foveate.apps.demo.untrained import untrained_pipeline\n" + sample)
    assert "3 of 3 forward passes sparse" in printed
    with Image.open(tmp_path / "merged.png") as merged:
        assert merged.size == (64, 48)
