"""The checker that `conftest.py` puts around all of foveate: beartype, with an int good for a float."""

from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook

ROOMS = Path(__file__).parent.parent / "src" / "foveate"
check = beartype(conf=BeartypeConf(is_pep484_tower=True))


class Loader(_import_hook._JaxtypingLoader):
    """Loads foveate's modules with checks, and what they import as ever: jaxtyping's own compiles that anew."""

    exec_module = SourceFileLoader.exec_module

    def get_code(self, fullname):
        cache = partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
        with mock.patch("importlib._bootstrap_external.cache_from_source", cache):
            return super().get_code(fullname)


def install():
    """Check all functions of foveate but Triton's, whose source Triton reads."""
    _import_hook._JaxtypingLoader = Loader
    rooms = [f"foveate.{room.stem}" for room in ROOMS.iterdir() if room.stem != "kernels"]
    _import_hook.install_import_hook(rooms, "shape_check.check")
