"""Laws of the vocabulary: a word means the same in every command, and all words are in one table."""

import inspect
import runpy
import subprocess
import sys
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import get_args

import pytest
from command_line import succeeds
from typer.main import get_command

from foveate.apps.cli import app
from foveate.methods import METHODS, RECOMPUTE_POLICIES, sub_cp
from foveate.ops.curves import CURVES

DOCS = Path(__file__).parents[3] / "docs"
page = runpy.run_path(str(DOCS / "cli.py"))


def test_the_table_of_options_is_that_of_the_commands():
    text = (DOCS / "cli.md").read_text()
    meanings = {option: meaning for option, meaning, _ in page["ROW"].findall(text)}
    assert "?" not in meanings.values()
    assert page["table"](meanings) in text, "run python docs/cli.py"


OTHERS = {"--size", "--steps", "--batch", "--tiles"}  # several, separated by commas, or auto


def kind_of(annotation):
    """The type of one value, without None, lists and typer's additions."""
    parts = [part for part in get_args(annotation) if isinstance(part, type | GenericAlias | UnionType)]
    inner = [part for part in parts if part is not NoneType]
    return annotation if isinstance(annotation, type) or not inner else kind_of(inner[0])


def test_an_option_takes_the_same_kind_of_value_in_every_command():
    kinds = {}
    for name, command in page["commands"]():
        for option in command.params:
            if option.param_type_name == "option" and not OTHERS & set(option.opts):
                kind = kind_of(inspect.signature(command.callback).parameters[option.name].annotation)
                kinds.setdefault(option.opts[0], {}).setdefault(str(kind), []).append(name)
    assert len(kinds) > 80
    assert {option: found for option, found in kinds.items() if len(found) > 1} == {}


def test_the_help_names_all_that_can_be_chosen():
    for command, names in (
        ("generate", ["dense", *METHODS]),
        ("rag ask", RECOMPUTE_POLICIES),
        ("curves", CURVES),
        ("icl", [*sub_cp.Strategy.__args__, *sub_cp.Order.__args__, *sub_cp.Balance.__args__]),
    ):
        told = succeeds(*command.split(), "--help")
        assert [name for name in names if name not in told.replace("- ", "-")] == []


HEAVY = "torch", "numpy", "diffusers", "transformers", "matplotlib", "PIL", "skimage", "gradio", "ray"


def test_no_command_loads_pytorch_before_it_runs():
    """The import of PyTorch takes most of the start-up time."""
    script = f"import sys, foveate.apps.cli; print([name for name in {HEAVY} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_while_modules_are_loaded_ends_without_a_traceback(module):
    script = f"""
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["foveate", "info"]
from foveate.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 1


def test_every_command_is_in_the_group():
    assert len([*page["commands"]()]) > 15
    assert {"generate", "bench step", "rag ask"} <= dict(page["commands"]()).keys()
    assert get_command(app).commands
