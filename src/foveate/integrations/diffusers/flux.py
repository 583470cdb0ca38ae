# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false
"""Sparse attention in FLUX.1: dev, schnell, Fill, Kontext, ControlNet, IP-Adapter.

Image tokens and their position ids are reordered when they enter the transformer and restored when they leave it; the
layers between are indifferent to the order, and RoPE follows the ids. Sparse layers get a processor of ours and with
every forward the block table of their phase; dense layers keep the processor they had.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
    FluxTransformer2DModel,
)
from torch import Tensor

from foveate.cache import PerTensors
from foveate.integrations.diffusers.clock import Clock
from foveate.integrations.diffusers.family import Family
from foveate.integrations.diffusers.flux_processors import Borrowed, SparseIPAdapterProcessor, SparseProcessor
from foveate.integrations.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.method import AttentionPlan, SparseAttention, StaysDense
from foveate.ops import dispatch

__all__ = ["Flux"]

log = logging.getLogger("foveate")

CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")


class _Layer(NamedTuple):
    name: str
    attn: FluxAttention
    phase: int
    processor: SparseProcessor | SparseIPAdapterProcessor | None  # None: dense by the method's own wish


class _Ran(NamedTuple):
    """What the last forward did."""

    plan: AttentionPlan | None
    why: str
    batch: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


_outside_compiled_code = torch.compiler.disable(
    reason="foveate reads the image grid outside compiled code; should that break a graph that must be whole, "
    "compile the blocks instead: model.compile_repeated_blocks(fullgraph=True)"
)


class _KeepTables:
    """Gradient checkpointing that runs a block again with the table it had, whatever forwards came in between."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, block: Any, *args: Any) -> Any:
        processor = block.attn.processor
        table = getattr(processor, "table", None)

        def run(*args: Any) -> Any:
            if isinstance(processor, Borrowed):
                processor.table = table
            return block(*args)

        return self.original(run, *args)


class Flux(Family):
    """One `FluxTransformer2DModel` with a method of sparse attention in it."""

    def __init__(self, model: FluxTransformer2DModel, methods: tuple[Method, ...], pipeline: Any) -> None:
        if len(methods) > 1 or not isinstance(methods[0], SparseAttention):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"Flux takes one method of sparse attention, such as HilbertA(), not {given}")
        self.model, self.method = model, methods[0]
        if pipeline is None and not self.method.always:
            raise ValueError(
                "start_percent and end_percent need a scheduler to tell the step: apply to the pipeline, not the model"
            )
        self.clock = Clock(pipeline)
        self.layers = list(self._borrow())
        self.ran = self.shown = _Ran(None, "no forward yet")
        self.outcomes: Counter[str] = Counter()  # forwards by the reason why they were dense; "" is sparse
        self._hooks = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave),
        ]

    def _borrow(self) -> Iterator[_Layer]:
        blocks = [
            (f"{name}.{i}.attn", block.attn)
            for name in ("transformer_blocks", "single_transformer_blocks")
            for i, block in enumerate(getattr(self.model, name))
        ]
        dense = self.method.dense_layer_set()
        if beyond := sorted(dense - set(range(len(blocks)))):
            raise ValueError(f"dense_layers names layer {beyond[0]}, but the model has layers 0 to {len(blocks) - 1}")
        known = {FluxAttnProcessor: SparseProcessor, FluxIPAdapterAttnProcessor: SparseIPAdapterProcessor}
        for i, (_, attn) in enumerate(blocks):
            if i not in dense and type(attn.processor) not in known:
                raise ValueError(
                    f"{blocks[i][0]} has a {type(attn.processor).__name__}, which foveate does not know: "
                    f"restore the model's own processors first, or leave it dense with dense_layers={str(i)!r}"
                )
        for i, (name, attn) in enumerate(blocks):
            processor = None if i in dense else known[type(attn.processor)](attn.processor)
            if processor:
                attn.set_processor(processor)
            yield _Layer(name, attn, i % self.method.period, processor)

    def remove(self) -> None:
        """Give the model back: a processor that someone else has set since stays."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(again := self.model._gradient_checkpointing_func, _KeepTables):
            self.model._gradient_checkpointing_func = again.original
        for layer in self.layers:
            if isinstance(layer.attn.processor, Borrowed):
                layer.attn.set_processor(layer.attn.processor.original)

    @property
    def plan(self) -> AttentionPlan | None:
        """What the method decided for the last forward; None if it was dense."""
        return self.ran.plan

    def report(self) -> list[LayerReport]:
        """One row for each attention layer: of the last sparse forward, or of the last if none was sparse."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: _Layer) -> LayerReport:
        plan = self.shown.plan
        if plan is None or layer.processor is None or layer.attn.processor is not layer.processor:
            return LayerReport(layer.name, "dense", why=self._why_dense(layer))
        table = plan.tables[layer.phase]
        every_pair = table.query_tokens * table.key_tokens
        return LayerReport(
            layer.name,
            plan.title,
            dispatch.choose(
                "block_attention", torch.device(self.shown.device), self.shown.dtype, layer.attn.head_dim
            ).name,
            plan.nominal_sparsity,
            table.sparsity(),
            4 * (every_pair - table.pairs()) * self.shown.batch * layer.attn.inner_dim,
        )

    def _why_dense(self, layer: _Layer) -> str:
        if layer.processor is None:
            return "named in dense_layers"
        if layer.attn.processor is not layer.processor:
            return f"a {type(layer.attn.processor).__name__} was set after apply: remove and apply again"
        return self.shown.why

    # --- one forward ---

    @_outside_compiled_code
    def enter(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Decide what this forward does; hand the layers their tables and put the image tokens in order."""
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        image = inputs["hidden_states"]
        try:
            plan = self._plan(inputs)
            self.ran = _Ran(plan, "", image.shape[0], str(image.device), image.dtype)
        except StaysDense as reason:
            plan = None
            self.ran = _Ran(None, str(reason))
            if not self.paused and not self.outcomes[str(reason)]:
                log.warning("%s stays dense: %s", type(self.method).__name__, reason)
        self.outcomes[self.ran.why] += 1
        if plan or not self.outcomes[""]:
            self.shown = self.ran
        if torch.is_grad_enabled() and self.model.gradient_checkpointing:
            again = self.model._gradient_checkpointing_func
            self.model._gradient_checkpointing_func = again if isinstance(again, _KeepTables) else _KeepTables(again)
        for layer in self.layers:
            if layer.processor:
                layer.processor.table = plan.tables[layer.phase] if plan else None
        if plan:
            inputs["hidden_states"] = _along(plan.order, image, 1)
            inputs["img_ids"] = _along(plan.order, inputs["img_ids"], inputs["img_ids"].ndim - 2)
            for name in CONTROL:
                if inputs.get(name) is not None:
                    inputs[name] = [_along(plan.order, residual, 1) for residual in inputs[name]]
        return (), inputs

    @_outside_compiled_code
    def leave(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the image tokens back in raster order."""
        if (plan := self.ran.plan) is None:
            return output
        if isinstance(output, tuple):
            return _along(plan.inverse, output[0], 1), *output[1:]
        output.sample = _along(plan.inverse, output.sample, 1)
        return output

    def _plan(self, inputs: dict[str, Any]) -> AttentionPlan:
        image, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
        if self.paused:
            raise StaysDense("paused")
        if not self.method.always:
            if (progress := self.clock()) is None:
                raise StaysDense("no scheduler tells the step, and start_percent to end_percent is part of the run")
            if not self.method.covers(progress):
                raise StaysDense("this step lies outside start_percent to end_percent")
        if (inputs.get("joint_attention_kwargs") or {}).get("attention_mask") is not None:
            raise StaysDense("an attention mask was passed")
        if any(layer.processor and layer.processor._parallel_config is not None for layer in self.layers):
            raise StaysDense("context parallelism splits the tokens over devices")
        if image.shape[1] < self.method.min_tokens:
            raise StaysDense(f"{image.shape[1]} image tokens are fewer than min_tokens={self.method.min_tokens}")
        return self.method.plan(grids_of(inputs["img_ids"]), text.shape[1], device=str(image.device))


def _along(order: Tensor, x: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, order.to(x.device))


# Grids by their ids: reading ids means waiting for the device, and a pipeline keeps its ids through all steps.
_GRIDS: PerTensors[tuple[tuple[int, int], ...]] = PerTensors()


def grids_of(ids: Tensor) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of every image in `img_ids`: of the picture, then of its references.

    Args:
        ids: [tokens, 3] or [batch, tokens, 3]: (image, row, column) of each token.

    Raises:
        StaysDense: If an image is not a complete raster of unit steps.
        ValueError: If samples of a batch differ.
    """
    version = None if ids.is_inference() else ids._version
    return _GRIDS.get([ids], version, lambda: _read_grids(ids.detach().cpu()))


def _read_grids(ids: Tensor) -> tuple[tuple[int, int], ...]:
    if ids.ndim == 3:
        if (ids != ids[:1]).any():
            raise ValueError(
                "img_ids differ between the samples of a batch: run samples of different layout one by one"
            )
        ids = ids[0]
    borders = (ids[:, 0].diff() != 0).nonzero().flatten() + 1
    return tuple(_read_grid(image[:, 1:]) for image in ids.tensor_split(borders))


def _read_grid(cells: Tensor) -> tuple[int, int]:
    later_rows = (cells[:, 0] != cells[0, 0]).nonzero()
    width = int(later_rows[0]) if len(later_rows) else len(cells)
    height = len(cells) // width
    raster = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + cells[0].double()
    if not torch.equal(raster.to(cells.dtype), cells):  # half-precision ids are rounded; then so is the raster
        raise StaysDense(f"img_ids are no complete raster of unit steps ({len(cells)} ids, {width} in the first row)")
    return height, width
