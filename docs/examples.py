"""Lets mkdocstrings show "Example:" in docstrings as code: it knows only "Examples:"."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """One object of the package."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
