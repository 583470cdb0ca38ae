"""Laws of installing: small wheels, few dependencies, and a clear message where an extra is missing."""

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
APPLY = """
import torch
from diffusers import FluxTransformer2DModel

import foveate

model = FluxTransformer2DModel(
    in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
).eval()
grid = torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(16.0))
inputs = dict(
    hidden_states=torch.randn(1, 256, 4), encoder_hidden_states=torch.randn(1, 3, 8), txt_ids=torch.zeros(3, 3),
    pooled_projections=torch.randn(1, 8), timestep=torch.ones(1), img_ids=grid, return_dict=False,
)
with torch.no_grad():
    dense = model(**inputs)[0]
    with foveate.apply(model, foveate.HilbertA(tiles=4, min_tokens=0)) as run:
        sparse = model(**inputs)[0]
    assert "1 of 1 forward passes sparse" in str(run.summary()), str(run.summary())
    assert not torch.equal(sparse, dense)
    assert torch.equal(model(**inputs)[0], dense)
"""


ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing of this checkout


def pip(python, *arguments):
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True, env=ALONE)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The two wheels of a clone."""
    folder = tmp_path_factory.mktemp("wheels")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, ROOT / "models")
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def add_needed(found, package, extras):
    """Add to `found` the installed packages that a package with these extras needs, and what they need."""
    for requirement in map(Requirement, package.requires or ()):
        marker, key = requirement.marker, (requirement.name, *sorted(requirement.extras))
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            other = distribution(requirement.name)
            assert other.version in requirement.specifier, requirement
            if key not in found:
                found[key] = other
                add_needed(found, other, requirement.extras)


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory):
    """The interpreter of a new environment with the library and what its extra `diffusers` names, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": folder}))
    pip(sys.executable, "install", "--no-deps", "--no-compile", "--target", packages, wheels["foveate"])
    library = Distribution.at(next(packages.glob("foveate-*.dist-info")))
    add_needed(found := {}, library, ["diffusers"])
    for other in found.values():  # links, since copies take a minute
        for name in {path.parts[0] for path in other.files} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(other.locate_file(name))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_library_is_small_and_so_are_its_models(wheels):
    assert wheels["foveate"].stat().st_size < 1e6
    assert wheels["foveate_models"].stat().st_size < 100e6


@pytest.mark.slow
def test_methods_need_nothing_but_the_extra_of_diffusers(python, tmp_path):
    subprocess.run([python, "-c", APPLY], check=True, cwd=tmp_path, env=ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "foveate", "info"], ["-c", "import foveate.apps.cli"]])
def test_the_command_says_which_extra_it_needs(python, command, tmp_path):
    result = subprocess.run([python, *command], capture_output=True, text=True, cwd=tmp_path, env=ALONE)
    assert result.returncode != 0
    assert "pip install 'foveate[apps]'" in result.stderr


def test_a_command_says_that_the_models_are_missing(monkeypatch):
    from foveate.apps.demo import find

    monkeypatch.setitem(sys.modules, "foveate_models", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'foveate\[models\]'"):
        find("pipeline")
