import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import tiny

import foveate
from foveate.utils.requirements import KNOWN, check_version

ROOT = Path(__file__).parents[2]


def test_the_bounds_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = re.findall(r"(diffusers|transformers)>=([\d.]+),<([\d.]+)'", str(extras))
    assert {(name, first, beyond) for name, first, beyond in bounds} == {
        (name, *known) for name, known in KNOWN.items()
    }


@pytest.mark.parametrize("version", ["0.41.2", "0.43.0.dev0", "0.43.1", "1.0"])
def test_other_versions_are_refused_with_the_remedy(monkeypatch, version):
    monkeypatch.setattr("foveate.utils.requirements.version", lambda package: version)
    with pytest.raises(ImportError, match=rf'does not know diffusers {version}: pip install "diffusers>=0.42,<0.43"'):
        foveate.apply(tiny.flux(), foveate.HilbertA())


def test_known_versions_and_absent_libraries_pass(monkeypatch):
    for found in ("5.0.0", "5.24.0", "5.9"):
        monkeypatch.setattr("foveate.utils.requirements.version", lambda package, found=found: found)
        check_version("transformers")

    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("foveate.utils.requirements.version", absent)
    check_version("transformers")
