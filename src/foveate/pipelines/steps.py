# pyright: basic, reportPrivateImportUsage=false
"""Single forward passes of a pipeline's denoiser: record, replay and time them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from torch import Tensor, nn

from foveate.diffusers.apply import Handle
from foveate.pipelines.lora import MethodLike, throughout, using
from foveate.pipelines.request import Request, denoiser, draw
from foveate.utils.timing import now

__all__ = ["Call", "counting", "record_step", "recording", "time_steps"]


class Call(NamedTuple):
    """Arguments of one forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def run(self, model: nn.Module) -> Tensor:
        """Prediction of a denoiser with these arguments. A list of samples is stacked into one tensor."""
        # some models remove entries from their dictionaries
        kwargs = {name: dict(value) if isinstance(value, dict) else value for name, value in self.kwargs.items()}
        prediction = model(*self.args, **kwargs)[0]
        return torch.stack(prediction) if isinstance(prediction, list) else prediction


@contextmanager
def recording(models: Sequence[nn.Module], on_call: Callable[[nn.Module, Call], None]) -> Generator[None]:
    """Context that calls `on_call` with model and arguments before every call of these models."""

    def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_call(model, Call(args, kwargs))

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield


@contextmanager
def counting(run: Handle) -> Generator[Callable[[int], None]]:
    """Context of one image without a pipeline; yields a function that sets the number of the step."""
    scheduler = SimpleNamespace(timesteps=torch.ones(1000), step_index=0, begin_index=None)
    with run.image(SimpleNamespace(scheduler=scheduler)):
        yield partial(setattr, scheduler, "step_index")


def record_step(pipeline: DiffusionPipeline, request: Request) -> Call:
    """Arguments of the denoiser's first call for a request; the run stops there."""

    class Stop(Exception):
        pass

    calls: list[Call] = []

    def stop(_model: nn.Module, call: Call) -> None:
        calls.append(call)
        raise Stop

    with suppress(Stop), recording([denoiser(pipeline)], stop):
        draw(pipeline, request)
    if not calls:
        raise ValueError(f"{type(pipeline).__name__} never called its denoiser")
    return calls[0]


@torch.no_grad()
def time_steps(
    pipeline: DiffusionPipeline | ModularPipeline,
    step: Call,
    variants: Sequence[MethodLike | None],
    rounds: int,
    on_forward: Callable[[], None] = lambda: None,
    *,
    warm_up: bool = True,
) -> Iterator[list[float]]:
    """Seconds of one forward pass of the denoiser with each variant, round by round.

    Methods with start_percent or end_percent are timed in an active step, schedules with their last setting.

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
