"""The methods, one paper per file; each is a frozen dataclass of options."""

import re
from ast import literal_eval
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from foveate.methods.base import ComposedMethod, Method, sparse_and_merging
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.baselines.progressive import ProgressiveResolution
from foveate.methods.baselines.todo import ToDo
from foveate.methods.baselines.tomesd import ToFu, ToMeSD
from foveate.methods.hilberta import HilbertA
from foveate.methods.infoflow_kv import InfoFlowKV
from foveate.methods.llsa import LLSA
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.methods.sub_cp import SubCP
from foveate.methods.toma import ToMA
from foveate.utils.choices import check_names, suggestion

__all__ = [
    "LLSA",
    "METHODS",
    "RECOMPUTE_POLICIES",
    "ComposedMethod",
    "HilbertA",
    "InfoFlowKV",
    "Method",
    "ProgressiveResolution",
    "SubCP",
    "ToDo",
    "ToFu",
    "ToMA",
    "ToMeSD",
    "method_from_text",
    "options_from_pairs",
    "options_in",
    "read_method",
    "recompute_policy_from_text",
]

METHODS: dict[str, type[Method]] = {
    "hilberta": HilbertA,
    "toma": ToMA,
    "llsa": LLSA,
    "tomesd": ToMeSD,
    "tofu": ToFu,
    "todo": ToDo,
}
"""Methods for denoisers, by their names on the command line."""

RECOMPUTE_POLICIES: dict[str, type[RecomputePolicy]] = {
    "infoflow_kv": InfoFlowKV,
    "epic": EPIC,
    "cacheblend": CacheBlend,
    "random": RandomRows,
    "none": NoRecompute,
    "full": FullPrefill,
}
"""Policies that choose the rows of a composed KV cache to recompute, by their names on the command line."""

LITERALS = {"true": "True", "false": "False", "none": "None"}


def method_from_text(name: str, options: dict[str, str]) -> Method:
    """A method from its name and options as text, such as ``method_from_text("hilberta", {"tiles": "16"})``.

    Raises:
        ValueError: If the method or an option is unknown, or the value of an option is invalid.
    """
    return _from_text(METHODS, name, options)


def read_method(text: str) -> Method | ComposedMethod:
    """The method of "hilberta:tiles=16,centre=0", or the methods of "hilberta:tiles=16+toma:keep=0.5,tile=(8,8)".

    Raises:
        ValueError: If the text cannot be read, or the methods cannot be combined.
    """
    parts = [part.partition(":") for part in text.split("+")]
    methods = tuple(method_from_text(name, options_in(options)) for name, _, options in parts)
    if len(methods) == 1:
        return methods[0]
    sparse_and_merging(methods)  # fails before a model is loaded
    return ComposedMethod(methods)


def options_in(text: str) -> dict[str, str]:
    """The options of a text such as "keep=0.5, tile=(8,8)" as a dictionary.

    Raises:
        ValueError: If an option has no value, or two.
    """
    within = r"\((?:[^()]|\([^()]*\))*\)"  # parentheses, and one level within
    parts = re.findall(rf"(?:[^,()]|{within}|[()])+", text)  # not at a comma within them
    return options_from_pairs([part.strip() for part in parts if part.strip()])


def options_from_pairs(texts: Iterable[str]) -> dict[str, str]:
    """The options of texts such as "keep=0.5" as a dictionary.

    Raises:
        ValueError: If an option has no value, or two.
    """
    options: dict[str, str] = {}
    for name, equals, value in (text.partition("=") for text in texts):
        if not equals:
            raise ValueError(f"option {name} has no value: write {name}=VALUE")
        if name in options:
            raise ValueError(f"option {name} is given twice, as {options[name]} and {value}: leave one of them out")
        options[name] = value
    return options


def recompute_policy_from_text(name: str, options: dict[str, str]) -> RecomputePolicy:
    """A policy from its name and options as text: ``recompute_policy_from_text("infoflow_kv", {"recompute": "0.3"})``.

    Raises:
        ValueError: If the policy or an option is unknown, or the value of an option is invalid.
    """
    return _from_text(RECOMPUTE_POLICIES, name, options)


def _quoted(text: str) -> str:
    """The text of a schedule with quotes around its words, which shells take off: ((0, dense), (0.2, 4))."""
    return re.sub(r"""["']?\b(dense|auto)\b["']?""", r'"\1"', text)


def _from_text(methods: dict[str, Any], name: str, options: dict[str, str]) -> Any:
    if name not in methods:
        raise ValueError(f"unknown method {name!r}{suggestion(name, methods)}: choose one of {', '.join(methods)}")
    cls = methods[name]
    check_names(cls, options)
    types = {field.name: field.type for field in fields(cls)}
    values: dict[str, object] = {}
    for option, text in options.items():
        try:
            values[option] = text if types[option] is str else literal_eval(LITERALS.get(text, _quoted(text)))
        except (ValueError, SyntaxError):
            values[option] = text
    return cls(**values)
