"""Laws of the house: which room may import which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "foveate"

# Imports run one way. A room may import itself and what stands here, and nothing else of foveate.
INNER = {"utils", "ops", "methods"}
MODELS = INNER | {"nn", "diffusers", "transformers"}
ROOMS = {
    "utils": set(),
    "kernels": {"utils", "ops.block_table"},
    "ops": {"utils"},
    "methods": {"utils", "ops"},
    "nn": {"ops"},
    "diffusers": INNER | {"nn"},
    "transformers": INNER,
    "pipelines": MODELS,
    "plots": MODELS,
    "training": MODELS | {"pipelines", "plots"},
    "tuning": MODELS | {"pipelines", "plots"},
    "apps": MODELS | {"pipelines", "plots", "training", "tuning"},
    "__init__": {"methods", "diffusers", "tuning"},
    "__main__": {"apps"},
}
APPS = {  # the same within apps/
    "console": set(),
    "web": set(),
    "serve": set(),
    "demo": {"web"},
    "bench": {"demo"},
    "cli": {"console", "web", "serve", "demo", "bench"},
}
LIBRARIES = {
    "diffusers": {"nn", "diffusers", "pipelines", "training", "tuning", "apps"},
    "transformers": {"diffusers", "transformers", "pipelines", "training", "apps"},
    "foveate_models": {"apps"},
    "typer": {"apps"},
    "rich": {"apps"},
    "jinja2": {"apps"},
    "matplotlib": {"plots", "apps"},
    "skimage": {"plots", "tuning", "apps"},
    "PIL": {"pipelines", "plots", "training", "transformers", "tuning", "apps"},
    "fsspec": {"transformers"},
    **{reader: {"transformers"} for reader in ("bs4", "markdownify", "pypdf", "docx")},
}
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def imports(path):
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names = [alias.name for alias in node.names] if node.module == "foveate" else [""]
            yield from (f"{node.module}.{name}".rstrip(".") for name in names)


def loaded_with(path):
    """The modules of foveate that a file imports outside of functions."""
    nodes, found = [ast.parse(path.read_text())], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= set(MODULES) else inner | {node.module}
        elif not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)
    return sorted(found & set(MODULES))


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    here = room(path)
    for module in imports(path):
        package, *inner = module.split(".")
        if package == "foveate" and inner:
            within = {".".join(inner[: depth + 1]) for depth in range(len(inner))}
            assert within & (ROOMS[here] | {here}), f"{here} must not import {module}"
            if here == inner[0] == "apps" and inner[1:]:
                app = path.relative_to(SOURCE).parts[1].removesuffix(".py")
                assert inner[1] in APPS.get(app, set()) | {app, "errors"}, f"apps/{app} must not import {module}"
        assert here in LIBRARIES.get(package, {here}), f"{here} must not import {module}"
        assert package != "lab", "the library must not import the lab"


@pytest.mark.parametrize("path", [path for path in FILES if room(path) != "apps"], ids=lambda path: path.stem)
def test_no_message_of_the_library_speaks_of_command_line_flags(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise):
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            assert not [text for text in texts if isinstance(text, str) and re.search(r"(^|\s)--?[a-z]", text)]


def test_the_lab_does_not_import_the_command_line():
    for path in (SOURCE.parent.parent / "lab").rglob("*.py"):
        assert not any(module.startswith("foveate.apps.cli") for module in imports(path)), path


def test_names_are_never_printed_as_markup():
    """Only apps/console.py makes consoles, which print names and texts as they are."""
    for path in (SOURCE / "apps").rglob("*.py"):
        if path.name != "console.py":
            assert not {"rich", "rich.console", "rich.markup"} & set(imports(path)), path


def test_no_imports_run_in_circles():
    done = set()

    def visit(name, chain):
        assert name not in chain, " -> ".join([*chain[chain.index(name) :], name])
        if name not in done:
            for imported in loaded_with(MODULES[name]):
                visit(imported, [*chain, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def test_methods_never_import_each_other():
    shared = "base", "recompute_policy", "example_blocks", "deduplicate"  # what methods derive from or consist of
    methods = [path for path in (SOURCE / "methods").glob("*.py") if path.stem not in ("__init__", *shared)]
    names = {f"foveate.methods.{path.stem}" for path in methods}
    for path in methods:
        assert not names & set(imports(path)), f"{path.name} imports another method"


def test_ops_reach_kernels_through_the_dispatcher_only():
    for path in (SOURCE / "ops").glob("*.py"):
        if path.stem != "dispatch":
            assert not any(module.startswith(("foveate.kernels", "triton")) for module in imports(path))


def test_importing_foveate_is_light():
    heavy = "torch", "triton", "diffusers", "transformers", "matplotlib", "skimage", "PIL", "typer", "rich"
    script = f"import foveate, sys; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_names_and_rooms_are_there_when_they_are_used():
    script = """
import foveate
assert foveate.methods.ToDo().factor == 2
assert set(foveate.__all__) == {*sum(foveate.MODULES.values(), ()), "__version__"}
assert all(getattr(foveate, name) for name in foveate.__all__)
assert not hasattr(foveate, "nothing")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_kernels_and_picks_are_timed_without_the_libraries_of_models():
    script = """
import sys
for name in ("diffusers", "transformers", "accelerate", "peft"):
    sys.modules[name] = None
import lab.bench.attention, lab.bench.examples, lab.bench.log_linear
"""
    subprocess.run([sys.executable, "-c", script], check=True)
