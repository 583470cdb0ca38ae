# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false
"""HilbertA in FLUX.1: dev, schnell, Fill, Kontext, ControlNet, IP-Adapter.

Image tokens and their position ids are reordered when they enter the transformer and restored when they leave it; the
layers between are indifferent to the order, and RoPE follows the ids. Sparse layers get a processor of ours and with
every forward the block table of their phase; dense layers keep the processor they had.
"""

import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
    FluxTransformer2DModel,
    _get_qkv_projections,
)
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from foveate.integrations.diffusers.family import Family
from foveate.integrations.diffusers.summary import LayerReport
from foveate.methods import HilbertA, Method
from foveate.methods.hilberta import HilbertPlan
from foveate.methods.method import StaysDense
from foveate.ops import dispatch
from foveate.ops.block_attention import block_attention
from foveate.ops.block_table import BlockTable

__all__ = ["Flux"]

log = logging.getLogger("foveate")

CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")


# --- attention -------------------------------------------------------------------------------------------------------


def _sparse_attention(
    attn: FluxAttention,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
    table: BlockTable,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention over [text | image] through the table: (image out, text out, image queries before RoPE).

    In single-stream blocks `hidden_states` is text and image already, and the text output is None.
    """
    *image, text_q, text_k, text_v = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
    q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in image)  # [batch, tokens, heads, head_dim]
    q, k = attn.norm_q(q), attn.norm_k(k)
    image_q = q
    if encoder_hidden_states is not None:
        text_q, text_k, text_v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (text_q, text_k, text_v))
        q = torch.cat([attn.norm_added_q(text_q), q], dim=1)
        k = torch.cat([attn.norm_added_k(text_k), k], dim=1)
        v = torch.cat([text_v, v], dim=1)
    if rope is not None:
        q, k = (apply_rotary_emb(x, rope, sequence_dim=1) for x in (q, k))
    q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
    out = block_attention(q, k, v, table).transpose(1, 2).flatten(2)
    if encoder_hidden_states is None:
        return out, None, image_q
    text_out, image_out = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
    return attn.to_out[1](attn.to_out[0](image_out)), attn.to_add_out(text_out), image_q


class _Borrowed:
    """A processor in the place of another; what diffusers sets on it reaches the other too.

    Attributes:
        original: The processor to give back.
        table: Who attends to whom in the current forward; None is dense and left to the original.
    """

    original: Any
    table: BlockTable | None

    @property
    def _attention_backend(self) -> Any:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: Any) -> None:
        self.original._attention_backend = value

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: Any) -> None:
        self.original._parallel_config = value


class SparseProcessor(_Borrowed):
    """`FluxAttnProcessor` with its attention restricted to a block table."""

    def __init__(self, original: FluxAttnProcessor | None = None) -> None:
        self.original = original or FluxAttnProcessor()  # diffusers makes processors anew without arguments
        self.table = None

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        if self.table is None:
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        image, text, _ = _sparse_attention(attn, hidden_states, encoder_hidden_states, image_rotary_emb, self.table)
        return image if text is None else (image, text)


class SparseIPAdapterProcessor(_Borrowed, FluxIPAdapterAttnProcessor):
    """`FluxIPAdapterAttnProcessor` with its self-attention restricted to a block table; it shares all weights."""

    def __init__(self, original: FluxIPAdapterAttnProcessor) -> None:
        torch.nn.Module.__init__(self)
        self.to_k_ip, self.to_v_ip = original.to_k_ip, original.to_v_ip
        self.__dict__["original"] = original  # not as a submodule: its weights are there already
        self.table = None

    @property
    def scale(self) -> list[float]:
        return self.original.scale

    @scale.setter
    def scale(self, value: list[float]) -> None:
        self.original.scale = value

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
        ip_adapter_masks: Tensor | None = None,
    ) -> Any:
        if self.table is None:
            return self.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, ip_hidden_states,
                ip_adapter_masks,
            )  # fmt: skip
        image, text, query = _sparse_attention(
            attn, hidden_states, encoder_hidden_states, image_rotary_emb, self.table
        )
        prompt = torch.zeros_like(image)
        for states, scale, to_k, to_v in zip(
            ip_hidden_states or [], self.scale, self.to_k_ip, self.to_v_ip, strict=False
        ):
            key, value = (
                project(states).flatten(1, -2).unflatten(-1, (-1, attn.head_dim)) for project in (to_k, to_v)
            )
            seen = dispatch_attention_fn(
                query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
            )
            prompt = prompt + scale * seen.flatten(2).to(query.dtype)
        return image, text, prompt


# --- the model -------------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    name: str
    attn: FluxAttention
    phase: int
    processor: SparseProcessor | SparseIPAdapterProcessor | None  # None: dense by the method's own wish


class _Clock:
    """How far a pipeline's denoising run is, without counting calls."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)

    def __call__(self) -> float | None:
        """Fraction of the steps that are done; None where there is no scheduler to ask."""
        pipeline = self._pipeline() if self._pipeline else None
        scheduler = getattr(pipeline, "scheduler", None)
        if scheduler is None or not len(getattr(scheduler, "timesteps", [])):
            return None
        step = scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
        return step / len(scheduler.timesteps)

    def __reduce__(self) -> tuple[type["_Clock"], tuple[None]]:
        return _Clock, (None,)  # a copied or saved model has no pipeline


class _Ran(NamedTuple):
    """What the last forward did."""

    plan: HilbertPlan | None
    why: str
    batch: int = 0
    device: str = "cpu"


_outside_compiled_code = torch.compiler.disable(
    reason="foveate reads the image grid outside compiled code: instead of the whole model with fullgraph=True, "
    "compile its blocks with model.compile_repeated_blocks(fullgraph=True)"
)


class Flux(Family):
    """One `FluxTransformer2DModel` with HilbertA in it."""

    def __init__(self, model: FluxTransformer2DModel, methods: tuple[Method, ...], pipeline: Any) -> None:
        if len(methods) > 1 or not isinstance(methods[0], HilbertA):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"Flux takes one HilbertA so far, not {given}")
        self.model, self.method = model, methods[0]
        if pipeline is None and (self.method.start_percent, self.method.end_percent) != (0, 1):
            raise ValueError(
                "start_percent and end_percent need a scheduler to tell the step: apply to the pipeline, not the model"
            )
        self.clock = _Clock(pipeline)
        self.layers = list(self._borrow())
        self.ran = _Ran(None, "no forward yet")
        self._logged: set[str] = set()
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
        for layer in self.layers:
            if isinstance(layer.attn.processor, _Borrowed):
                layer.attn.set_processor(layer.attn.processor.original)

    @property
    def plan(self) -> HilbertPlan | None:
        """What HilbertA decided for the last forward; None if it was dense."""
        return self.ran.plan

    def report(self) -> list[LayerReport]:
        """One row for each attention layer, in running order."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: _Layer) -> LayerReport:
        plan = self.ran.plan
        if plan is None or layer.processor is None or layer.attn.processor is not layer.processor:
            return LayerReport(layer.name, "dense", why=self._why_dense(layer))
        table = plan.tables[layer.phase]
        every_pair = table.query_tokens * table.key_tokens
        return LayerReport(
            layer.name,
            f"HilbertA T={plan.tiles}",
            dispatch.choose("block_attention", torch.device(self.ran.device)).name,
            plan.nominal_sparsity,
            table.sparsity(),
            4 * (every_pair - table.pairs()) * self.ran.batch * layer.attn.inner_dim,
        )

    def _why_dense(self, layer: _Layer) -> str:
        if layer.processor is None:
            return "named in dense_layers"
        if layer.attn.processor is not layer.processor:
            return f"a {type(layer.attn.processor).__name__} was set after apply: remove and apply again"
        return self.ran.why

    # --- one forward ---

    @_outside_compiled_code
    def enter(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Decide what this forward does; hand the layers their tables and put the image tokens in order."""
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        image = inputs["hidden_states"]
        try:
            plan = self._plan(inputs)
            self.ran = _Ran(plan, "", image.shape[0], str(image.device))
        except StaysDense as reason:
            plan = None
            self.ran = _Ran(None, str(reason))
            if str(reason) not in self._logged:
                self._logged.add(str(reason))
                log.warning("HilbertA stays dense: %s", reason)
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

    def _plan(self, inputs: dict[str, Any]) -> HilbertPlan:
        image, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
        progress = self.clock()
        if progress is not None and not self.method.covers(progress):
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
_GRIDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def grids_of(ids: Tensor) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of every image in `img_ids`: of the picture, then of its references.

    Args:
        ids: [tokens, 3] or [batch, tokens, 3]: (image, row, column) of each token.

    Raises:
        StaysDense: If an image is not a complete raster of unit steps.
        ValueError: If samples of a batch differ.
    """
    version = None if ids.is_inference() else ids._version
    known = _GRIDS.get(ids)
    if known is None or known[0] != version:
        known = _GRIDS[ids] = version, _read_grids(ids.detach().cpu().float())
    return known[1]


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
    height, width = (int(side) for side in cells.amax(0) - cells.amin(0) + 1)
    if height * width == len(cells):
        raster = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + cells[0]
        if torch.equal(raster, cells):
            return height, width
    raise StaysDense(f"img_ids are no complete raster of unit steps ({len(cells)} ids over {height} x {width})")
