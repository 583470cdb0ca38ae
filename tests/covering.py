"""Choices among the cases of a law: what is tested at all, and what the fast tests choose from that.

The fast tests leave the others to `make test-all`:

* Where one parameter is a family of models, as `name`, the law runs in a family of each kind, the next one each time.
* Where parameters multiply, each value of each is in one case: the diagonal of the product.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

KINDS = {
    "double blocks, then single": (
        "flux", "flux2", "chroma", "longcat", "bria", "ovis", "hunyuan_image", "hunyuan_video", "fibo",
        "hunyuan_framepack", "auraflow", "hidream", "flux3",
    ),
    "blocks with text": (
        "qwen", "krea2", "zimage", "sd3", "hunyuan_video15", "ernie", "glm", "joyimage", "kandinsky5", "cogview4",
        "lumina2", "ideogram4", "fibo2", "joyimage_plus", "minimax_h3",
    ),
    "blocks beside text": (
        "wan", "pixart", "dit", "chronoedit", "skyreels", "vace", "ltx", "ltx2", "animate", "anyflow", "helios",
        "cosmos", "hunyuan_dit", "kandinsky6",
    ),
    "keys of text alone": ("prx", "qwen21", "nucleus"),
    "U-Nets": ("sdxl", "sd15", "dreamlite"),
}  # fmt: skip
KIND = {family: kind for kind, families in KINDS.items() for family in families}


def at_grids_in_turn(families: Mapping[str, Any], *choices: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """(name, grid, case) for all families, with one case of each choice at one grid. Cases and grids take turns."""
    return [
        (name, family.grids[(i // len(cases) + j) % len(family.grids)], cases[i % len(cases)])
        for i, (name, family) in enumerate(families.items())
        for j, cases in enumerate(choices)
    ]


def in_turn(names: Iterable[str], cases: Sequence[Any], each: int = 1) -> list[tuple[Any, ...]]:
    """(name, case) for so many cases of each name. Cases take turns."""
    return [(name, cases[(each * i + j) % len(cases)]) for i, name in enumerate(names) for j in range(each)]


def left_to_slow(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests that the fast tests leave out."""
    laws = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            laws[item.path, item.originalname].append(item)
    turns = Counter()
    for (path, _), cases in laws.items():
        kinds = defaultdict(lambda: defaultdict(list))  # the cases by kind and parameters but the family, by family
        for item in cases:
            given = dict(item.callspec.params)
            family, _ = given.pop("name", None), given.pop("grid", None)
            if family in KIND:
                kinds[KIND[family], repr(given)][family].append(item)
        for (kind, _), families in kinds.items():
            chosen = list(families)[turns[path, kind] % len(families)]
            turns[path, kind] += 1
            for family in families.keys() - {chosen}:
                yield from families[family]
        if not kinds:
            yield from off_the_diagonal(cases)


def off_the_diagonal(cases: list[pytest.Function]) -> Iterator[pytest.Function]:
    """The cases of a product of parameters but those in which each has its next value each time."""
    ids = [tuple(item.callspec._idlist) for item in cases]  # one of each `parametrize`
    values = [list(dict.fromkeys(column)) for column in zip(*ids, strict=True)]
    turns = range(max(map(len, values)))
    diagonal = {tuple(column[turn % len(column)] for column in values) for turn in turns}
    yield from (item for item, case in zip(cases, ids, strict=True) if case not in diagonal)
