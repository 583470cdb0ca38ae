"""The methods, one paper per file; each a frozen dataclass."""

from ast import literal_eval
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from foveate.methods.base import ComposedMethod, Method
from foveate.methods.baselines.best_match import ToFu, ToMeSD
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.baselines.todo import ToDo
from foveate.methods.hilberta import HilbertA
from foveate.methods.infoflow_kv import InfoFlowKV
from foveate.methods.llsa import LLSA
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.methods.sub_cp import SubCP
from foveate.methods.toma import ToMA

__all__ = [
    "LLSA",
    "METHODS",
    "RECOMPUTE_POLICIES",
    "ComposedMethod",
    "HilbertA",
    "InfoFlowKV",
    "Method",
    "SubCP",
    "ToDo",
    "ToFu",
    "ToMA",
    "ToMeSD",
    "method_from_text",
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
"""Every method for denoisers by the name it has on the command line."""

RECOMPUTE_POLICIES: dict[str, type[RecomputePolicy]] = {
    "infoflow_kv": InfoFlowKV,
    "epic": EPIC,
    "cacheblend": CacheBlend,
    "random": RandomRows,
    "none": NoRecompute,
    "full": FullPrefill,
}
"""Every choice of rows to compute again by the name it has on the command line."""

SPELLED = {"true": "True", "false": "False", "none": "None"}


def method_from_text(name: str, options: dict[str, str]) -> Method:
    """The method of that name, its options read from text: ``method_from_text("hilberta", {"tiles": "16"})``.

    Raises:
        ValueError: If the method or an option is unknown, or a value does not fit its option.
    """
    return _from_text(METHODS, name, options)


def recompute_policy_from_text(name: str, options: dict[str, str]) -> RecomputePolicy:
    """The choice of rows of that name: ``recompute_policy_from_text("infoflow_kv", {"recompute": "0.3"})``.

    Raises:
        ValueError: If the name or an option is unknown, or a value does not fit its option.
    """
    return _from_text(RECOMPUTE_POLICIES, name, options)


def _from_text(methods: dict[str, Any], name: str, options: dict[str, str]) -> Any:
    if name not in methods:
        raise ValueError(f"unknown method {name!r}{_near(name, methods)}: choose one of {', '.join(methods)}")
    cls = methods[name]
    types = {field.name: field.type for field in fields(cls)}
    values: dict[str, object] = {}
    for option, text in options.items():
        if option not in types:
            known = ", ".join(types) or "none"
            raise ValueError(f"{cls.__name__} has no option {option!r}{_near(option, types)}: choose from {known}")
        try:
            values[option] = text if types[option] is str else literal_eval(SPELLED.get(text, text))
        except (ValueError, SyntaxError):
            values[option] = text
        if types[option] is bool and not isinstance(values[option], bool):
            raise ValueError(f"{option} is true or false, not {text!r}")
    try:
        return cls(**values)
    except TypeError:
        shown = ", ".join(f"{option}={text}" for option, text in options.items())
        raise ValueError(f"{cls.__name__} cannot use {shown}: a value has the wrong type") from None


def _near(name: str, known: Iterable[str]) -> str:
    """What may have been meant."""
    near = get_close_matches(name.lower(), list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
