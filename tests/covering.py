"""The choice of the fast tests: a law runs in one family of each kind, the next one each time, and else is slow."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

KINDS = {
    "double blocks, then single": (
        "flux", "flux2", "chroma", "longcat", "bria", "ovis", "hunyuan_image", "hunyuan_video", "fibo",
        "hunyuan_framepack",
    ),
    "blocks with text": (
        "qwen", "krea2", "zimage", "sd3", "hunyuan_video15", "ernie", "glm", "joyimage", "kandinsky5",
    ),
    "blocks beside text": (
        "wan", "pixart", "dit", "chronoedit", "skyreels", "vace", "ltx", "ltx2", "animate", "anyflow", "helios",
        "cosmos",
    ),
    "U-Nets": ("sdxl", "sd15"),
}  # fmt: skip
KIND = {family: kind for kind, families in KINDS.items() for family in families}


def left_to_slow(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests with a family as `name` that the fast tests leave out.

    Tests of one function that differ in family (and `grid`) alone are one law: it runs in one family of each kind.
    """
    laws, turns = defaultdict(lambda: defaultdict(list)), Counter()
    for item in items:
        case = dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        family, _ = case.pop("name", None), case.pop("grid", None)
        if family in KIND:
            laws[item.path, item.originalname, KIND[family], repr(case)][family].append(item)
    for (path, _, kind, _), families in laws.items():
        chosen = list(families)[turns[path, kind] % len(families)]
        turns[path, kind] += 1
        for family in families.keys() - {chosen}:
            yield from families[family]
