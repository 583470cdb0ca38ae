"""Custom ops whose kernels run where their tensors are: Triton launches on the current GPU, whichever that is."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

__all__ = ["gpu_op"]


def gpu_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator that makes a function a custom op, which runs with its first tensor's GPU as the current one.

    Args:
        name: Of the op, as `torch.library.custom_op` takes it.
    """

    def add(run: Callable[..., Any]) -> CustomOpDef:
        @wraps(run)
        def there(*given: Any) -> Any:
            parts = (x for y in given for x in (y if isinstance(y, list | tuple) else [y]))
            with torch.cuda.device_of(next(x for x in parts if isinstance(x, Tensor))):
                return run(*given)

        return torch.library.custom_op(name, there, mutates_args=())

    return add
