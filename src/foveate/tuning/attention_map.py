# pyright: basic, reportPrivateUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalIterable=false
"""The attention weights of one image token in a layer of a pipeline's denoiser, dense or with a method.

Attention is linear in its values. With the columns of the identity matrix as values, the output of the layer is its
weights. They come from the code that generates images, so they are right for every pattern and for merged tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from foveate.diffusers.adapter import ModelAdapter
from foveate.diffusers.backend import LayerPlan, dispatches, plan_of
from foveate.diffusers.planning import Layer
from foveate.methods import HilbertA
from foveate.pipelines.lora import MethodLike, throughout, using
from foveate.pipelines.request import denoiser
from foveate.pipelines.steps import Call

__all__ = ["attention_layers", "attention_map"]


def attention_layers(pipeline: Any) -> list[str]:
    """Names of the self-attention layers of a pipeline's denoiser, in running order.

    Raises:
        ValueError: If its model class has no card.
    """
    with using(pipeline, HilbertA()):
        return [layer.name for layer in ModelAdapter.of(denoiser(pipeline)).layers]


@torch.no_grad()
def attention_map(
    pipeline: Any, step: Call, method: MethodLike | None, layer: int, token: tuple[int, ...]
) -> Float[Tensor, "*grid"]:
    """Attention weights of one image token over the image tokens, mean over heads; other tokens get the rest of 1.

    The weight of a merged token is spread over its source tokens.

    Args:
        pipeline: A diffusers pipeline.
        step: Arguments of a forward pass of its denoiser; the last sample of the batch is used.
        method: Method to apply; None is dense.
        layer: Index of the layer in `attention_layers`.
        token: (row, column) of the token, or (frame, row, column) in a video.

    Raises:
        ValueError: If there is no such layer or token, or the layer's processor is not known.
    """
    found: list[Tensor] = []
    with using(pipeline, throughout(method) if method else HilbertA()):
        adapter = ModelAdapter.of(denoiser(pipeline))
        if not 0 <= layer < len(adapter.layers):
            raise ValueError(f"there is no attention layer {layer}: choose one of 0 to {len(adapter.layers) - 1}")
        watched = adapter.layers[layer]
        if not dispatches(watched.attn.processor):
            adapter.take_processor(watched)

        def watch(*_: Any) -> None:
            if any(layout.references for layout in adapter.now.decisions[watched.holder].layouts):
                raise ValueError("a step that caches keys of references has no attention map: choose another step")
            plan = plan_of(watched.attn.processor)
            if plan is None:  # a dense layer
                plan = LayerPlan(torch.arange(_tokens(adapter, watched)))
                adapter.now.attach(watched, plan)
            plan.watch = lambda attend, value: found.append(_weights(adapter, watched, token, attend, value))

        holder = denoiser(pipeline) if adapter.planned_with_model(watched.holder) else watched.holder
        hook = holder.register_forward_pre_hook(watch)  # after the hook that attaches the plans
        try:
            adapter.clock.caller.paused = method is None
            step.run(denoiser(pipeline))
        finally:
            hook.remove()
    if not found:
        raise ValueError(f"{watched.name} did not run in this step: choose another layer")
    return found[0]


def _tokens(adapter: ModelAdapter, layer: Layer) -> int:
    ran = adapter.now.decisions[layer.holder]
    if not ran.layouts:
        raise ValueError(f"{layer.name} is dense: {ran.why}")
    layout = ran.layouts_of(layer)[0]
    return (layout.merged(ran.kept) if ran.is_merged(layer) else layout).tokens


def _weights(
    adapter: ModelAdapter, layer: Layer, token: tuple[int, ...], attend: Callable[[Tensor], Tensor], value: Tensor
) -> Tensor:
    ran = adapter.now.decisions[layer.holder]
    layout = ran.layouts_of(layer)[0]
    grid = layout.grids[0]
    if len(token) != len(grid) or not all(0 <= place < side for place, side in zip(token, grid, strict=True)):
        raise ValueError(f"there is no token {token} in a grid of {' x '.join(map(str, grid))}: count from 0")
    images = layout.positions("image")[: torch.Size(grid).numel()].to(value.device)
    place = images[torch.arange(len(images)).view(grid)[token]]
    merging = layer.group.now if ran.is_merged(layer) else None
    text = len(merging.text) if merging and layer.joint else 0
    alone = sum(segment.tokens for segment in layout.keys)
    around = (0, alone) if layout.keys_last else (alone, 0)
    batch, _, heads, width = value.shape
    rows: list[Tensor] = []
    for first in range(0, layout.tokens, width):
        columns = torch.arange(first, first + width, device=value.device)
        unit = (torch.arange(layout.tokens, device=value.device)[:, None] == columns).to(value.dtype)
        unit = unit.expand(batch, -1, -1)
        if merging:
            unit = merging.merged(unit, text)
        unit = pad(unit, (0, 0, *around))
        out = attend(unit[:, :, None].expand(-1, -1, heads, -1).contiguous()).mean(2)
        if merging:
            out = merging.unmerged(out, text)
        rows.append(out[-1, place].to(torch.float32))
    return torch.cat(rows)[images].view(grid).cpu()
