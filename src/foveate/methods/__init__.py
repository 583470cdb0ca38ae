"""The methods, one paper per file; each a frozen dataclass."""

from foveate.methods.hilberta import HilbertA
from foveate.methods.method import Method

__all__ = ["METHODS", "HilbertA", "Method"]

METHODS: dict[str, type[Method]] = {"hilberta": HilbertA}
"""Every method by the name it has on the command line."""
