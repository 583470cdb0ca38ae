"""The methods, one paper per file; each a frozen dataclass."""

from ast import literal_eval
from dataclasses import fields

from foveate.methods.best_match import ToFu, ToMeSD
from foveate.methods.hilberta import HilbertA
from foveate.methods.infoflow_kv import InfoFlowKV
from foveate.methods.llsa import LLSA
from foveate.methods.method import Method, Together
from foveate.methods.sub_cp import SubCP
from foveate.methods.todo import ToDo
from foveate.methods.toma import ToMA

__all__ = [
    "LLSA",
    "METHODS",
    "HilbertA",
    "InfoFlowKV",
    "Method",
    "SubCP",
    "ToDo",
    "ToFu",
    "ToMA",
    "ToMeSD",
    "Together",
    "method_from_text",
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


SPELLED = {"true": "True", "false": "False", "none": "None"}


def method_from_text(name: str, options: dict[str, str]) -> Method:
    """The method of that name, its options read from text: ``method_from_text("hilberta", {"tiles": "16"})``.

    Raises:
        ValueError: If the method or an option is unknown, or a value does not fit its option.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    cls = METHODS[name]
    types = {field.name: field.type for field in fields(cls)}
    values: dict[str, object] = {}
    for option, text in options.items():
        if option not in types:
            raise ValueError(f"{cls.__name__} has no option {option!r}: choose from {', '.join(types)}")
        try:
            values[option] = text if types[option] is str else literal_eval(SPELLED.get(text, text))
        except (ValueError, SyntaxError):
            values[option] = text
        if types[option] is bool and not isinstance(values[option], bool):
            raise ValueError(f"{option} is true or false, not {text!r}")
    try:
        return cls(**values)  # type: ignore[arg-type]
    except TypeError:
        shown = ", ".join(f"{option}={text}" for option, text in options.items())
        raise ValueError(f"{cls.__name__} cannot use {shown}: a value has the wrong type") from None
