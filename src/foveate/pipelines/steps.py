# pyright: basic, reportPrivateImportUsage=false
"""Single forward passes of a pipeline's denoiser: recorded, run again, and timed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline

from foveate.pipelines.lora import MethodLike, throughout, using
from foveate.pipelines.request import Request, denoiser, draw
from foveate.utils.timing import now

__all__ = ["Call", "record_step", "time_steps"]


class Call(NamedTuple):
    """Arguments of one forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def run(self, model: torch.nn.Module) -> Any:
        """The output of a forward pass; some models remove entries from dictionaries they get."""
        kwargs = {name: dict(value) if isinstance(value, dict) else value for name, value in self.kwargs.items()}
        return model(*self.args, **kwargs)


def record_step(pipeline: DiffusionPipeline, request: Request) -> Call:
    """Arguments of the first call of the denoiser for a request; the run stops there."""

    class Recorded(Exception):
        pass

    def stop(_model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Recorded(args, kwargs)

    hook = denoiser(pipeline).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        draw(pipeline, request)
    except Recorded as recorded:
        return Call(*recorded.args)
    finally:
        hook.remove()
    raise ValueError(f"{type(pipeline).__name__} never called its denoiser")


@torch.no_grad()
def time_steps(
    pipeline: DiffusionPipeline,
    step: Call,
    variants: Sequence[MethodLike | None],
    rounds: int,
    on_forward: Callable[[], None] = lambda: None,
    *,
    warm_up: bool = True,
) -> Iterator[list[float]]:
    """Seconds of one forward pass of the denoiser with each variant, round by round.

    Methods with start_percent or end_percent are timed at work.

    Args:
        pipeline: The pipeline.
        step: Arguments of the forward pass, from `record_step`.
        variants: Methods to compare; None is dense.
        rounds: Number of measurements of each.
        on_forward: Called after every forward pass.
        warm_up: Run a round first that is not timed.
    """
    for round_ in range(not warm_up, rounds + 1):
        seconds: list[float] = []
        for method in variants:
            with using(pipeline, method and throughout(method)):
                start = now(pipeline.device)
                step.run(denoiser(pipeline))
                seconds.append(now(pipeline.device) - start)
            on_forward()
        if round_:
            yield seconds
