# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportGeneralTypeIssues=false
"""Sparse attention and token merging in FLUX.1: dev, schnell, Fill, Kontext, ControlNet, IP-Adapter.

Image tokens and their position ids are reordered when they enter the transformer and restored when they leave it; the
layers between are indifferent to the order, and RoPE follows the ids. Layers with a method get a processor of ours and
with every forward the table of their phase; dense layers keep the processor they had. Merging is done by hooks,
see `merging`: double blocks merge for their attention, single blocks from their norm to their last layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
    FluxTransformerBlock,
)
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from foveate.diffusers.borrowed import (
    KeepTables,
    check_processor,
    check_strangers,
    give_back,
    outside_compiled_code,
    replaced,
    strangers,
)
from foveate.diffusers.clock import Step
from foveate.diffusers.family import Family
from foveate.diffusers.flux_processors import SparseIPAdapterProcessor, SparseProcessor
from foveate.diffusers.merging import Site
from foveate.diffusers.order import along, by_name
from foveate.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, DenseFallback, SparseAttention, TokenMerging
from foveate.ops.block_table import BlockTable
from foveate.ops.joint_attention import LogLinear, Pattern, backend_of
from foveate.ops.merging import Regions
from foveate.utils.cache import WeakTensorCache, persistent

__all__ = ["Flux"]

KNOWN = FluxAttnProcessor, FluxIPAdapterAttnProcessor
CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")


class _Layer(NamedTuple):
    name: str
    attn: FluxAttention
    phase: int
    processor: SparseProcessor | SparseIPAdapterProcessor | None  # None: dense by every method's own wish
    sparse: bool  # whether sparse attention is wanted here
    site: Site | None  # where tokens are merged


class _Ran(NamedTuple):
    """What the last forward did."""

    plan: AttentionPlan | None = None
    regions: Regions | None = None
    why: str = "no forward yet"  # both are None
    text: int = 0
    batch: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    strangers: Mapping[str, str] = {}  # layers that are dense by a processor that was set after apply, and why


class Flux(Family):
    """One `FluxTransformer2DModel` with sparse attention, token merging, or both in it."""

    def __init__(self, model: FluxTransformer2DModel, methods: tuple[Method, ...], pipeline: Any) -> None:
        self.sparse = next((method for method in methods if isinstance(method, SparseAttention)), None)
        self.merging = next((method for method in methods if isinstance(method, TokenMerging)), None)
        if len(methods) != (self.sparse is not None) + (self.merging is not None):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"Flux takes one method of sparse attention, one of token merging, or both, not {given}")
        if self.sparse and self.merging and self.merging.size_bias:
            raise ValueError("size_bias needs dense attention: leave it off beside sparse attention")
        super().__init__(model, methods, pipeline)
        self.hooks_inside = self.merging is not None
        self.sites: list[Site] = []
        self.idle = Site(self.merging, None) if self.merging else None  # of blocks that never merge
        self.layers: list[_Layer] = []
        self._hooks: list[RemovableHandle] = []
        try:
            for layer in self._borrow():
                self.layers.append(layer)
        except BaseException:
            self.remove()
            raise
        self.ran = self.shown = _Ran()
        self._step: Step | None = None
        self._hooks += [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave),
        ]

    def _borrow(self) -> Iterator[_Layer]:
        blocks = [
            (f"{name}.{i}.attn", block)
            for name in ("transformer_blocks", "single_transformer_blocks")
            for i, block in enumerate(getattr(self.model, name))
        ]
        self.check_layers(len(blocks))
        sparse = set(range(len(blocks))) - self.sparse.dense_layer_set() if self.sparse else set[int]()
        merging = self._merging([block for _, block in blocks])
        known = {FluxAttnProcessor: SparseProcessor, FluxIPAdapterAttnProcessor: SparseIPAdapterProcessor}
        for i in sorted(sparse | merging.keys()):
            name, block = blocks[i]
            check_processor(name, block.attn, i, known)
            if i in merging and getattr(block, "_chunk_size", None):
                raise ValueError("feed-forward chunking cuts merged tokens: call disable_forward_chunking() first")
        for i, (name, block) in enumerate(blocks):
            processor = None
            if i in sparse or i in merging:
                processor = known[type(block.attn.processor)](block.attn.processor)
                block.attn.set_processor(processor)
            if self.merging:  # a graph that was compiled for a block without hooks would be taken for those with hooks
                site = merging.get(i, self.idle)
                self._hook(block, site, last=merging.get(i + 1) is not site)
            phase = i % self.sparse.period if self.sparse else 0
            yield _Layer(name, block.attn, phase, processor, i in sparse, merging.get(i))

    def _merging(self, blocks: list[torch.nn.Module]) -> dict[int, Site]:
        """The site of every block that merges: blocks of a kind share one, and the first of each kind are skipped."""
        if self.merging is None:
            return {}
        merging: dict[int, Site] = {}
        for kind in (FluxTransformerBlock, FluxSingleTransformerBlock):
            mine = [i for i, block in enumerate(blocks) if isinstance(block, kind)]
            usual = len(mine) if kind is FluxTransformerBlock else len(mine) // 3
            skip = min(5, usual) if self.merging.skip is None else self.merging.skip
            if merge := [i for i in mine[skip:] if i not in self.merging.dense_layer_set()]:
                for i in merge if self.merging.per_block else merge[:1]:
                    self.sites.append(Site(self.merging.at(i / len(blocks)), blocks[i]))
                    merging[i] = self.sites[-1]
                merging = dict.fromkeys(merge, self.sites[-1]) | merging
        if not merging and self.merging.keep < 1:
            raise ValueError(
                f"no block is left to merge with skip={self.merging.skip} and these dense_layers: skip fewer"
            )
        return merging

    def _hook(self, block: torch.nn.Module, site: Site, *, last: bool) -> None:
        if self.merging.granularity == "block":
            site.whole(block, last=last)
            site.positions(block.attn)
            return
        if isinstance(block, FluxSingleTransformerBlock):
            site.single_stream(block.norm, block.attn, block, "proj_out")
            return
        if self.merging.merge_attn:
            site.joint_attention(block.attn)
        if self.merging.merge_mlp:
            site.per_token(block.ff)

    def remove(self) -> None:
        """Give the model back: a processor that someone else has set since stays."""
        for hook in self._hooks:
            hook.remove()
        for site in (*self.sites, *([self.idle] if self.idle else [])):
            site.remove()
        give_back(self.model, (layer.attn for layer in self.layers))

    @property
    def plan(self) -> Any | None:
        """What the methods decided for the last forward; None if it was dense."""
        return self.ran.plan or (self.ran.regions and self.sites[-1].shown(self.ran.regions))

    def report(self) -> list[LayerReport]:
        """One row for each attention layer: of the last forward with a method at work, or of the last if none was."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: _Layer) -> LayerReport:
        plan = self.shown.plan if layer.sparse else None
        regions = self.shown.regions if layer.site else None
        if (plan is None and regions is None) or layer.name in self.shown.strangers:
            return LayerReport(layer.name, "dense", why=self._why_dense(layer))
        shown = self.shown
        image = len((plan or regions).order)
        merged = regions if regions and self._merged(layer) else None
        pairs, backend = (shown.text + (merged.kept if merged else image)) ** 2, "model"
        if plan:
            table = plan.tables[layer.phase]
            pairs = (_merged(table, merged, shown.text) if merged else table).pairs()
            backend = backend_of(table, torch.device(shown.device), shown.dtype, layer.attn.head_dim)
        every_pair = (shown.text + image) ** 2
        return LayerReport(
            layer.name,
            " + ".join([*([plan.title] if plan else []), *([self.merging.title] if regions else [])]),
            backend,
            1 - (1 - (plan.nominal_sparsity if plan else 0)) * ((merged.kept / image) ** 2 if merged else 1),
            1 - pairs / every_pair,
            shown.batch * (4 * (every_pair - pairs) * layer.attn.inner_dim + self._linear(layer, image, regions)),
        )

    def _merged(self, layer: _Layer) -> bool:
        """Whether attention of this layer sees merged tokens: single blocks merge as a whole."""
        return layer.site is not None and (layer.attn.pre_only or self.merging.merge_attn)

    def _linear(self, layer: _Layer, image: int, regions: Regions | None) -> int:
        """Floating-point operations of linear layers that merging leaves out of one sample."""
        if regions is None:
            return 0
        mlp = self.merging.merge_mlp or self.merging.granularity == "block"
        in_double = 4 * self.merging.merge_attn + 8 * bool(mlp)  # q, k, v, out; feed-forward
        products = 12 if layer.attn.pre_only else in_double
        return 2 * products * layer.attn.inner_dim**2 * (image - regions.kept)

    def _why_dense(self, layer: _Layer) -> str:
        if layer.processor is None:
            return (
                f"one of the first blocks, which {type(self.merging).__name__} skips"
                if self._skipped(layer)
                else "named in dense_layers"
            )
        return self.shown.strangers.get(layer.name, self.shown.why)

    def _skipped(self, layer: _Layer) -> bool:
        return self.merging is not None and self.layers.index(layer) not in self.merging.dense_layer_set()

    # --- one forward ---

    @outside_compiled_code
    def enter(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Decide what this forward does; hand the layers their tables and put the image tokens in order."""
        inputs = by_name(model, args, kwargs)
        image, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
        plan, why_not_sparse = self.ask(self.sparse, lambda: self._plan(inputs))
        regions, why_not_merged = self.ask(self.merging, lambda: self._regions(inputs, plan))
        why = "" if plan or regions else why_not_sparse or why_not_merged
        others = {name: replaced(attn) for name, attn in strangers(self.layers).items()}
        self.ran = _Ran(plan, regions, why, text.shape[1], image.shape[0], str(image.device), image.dtype, others)
        self.outcomes[why] += 1
        if not why or not self.outcomes[""]:
            self.shown = self.ran
        KeepTables.on(model)
        self._tell_layers(plan, regions, text.shape[1])
        self._tell_sites(regions, text, apart=any(inputs.get(name) is not None for name in CONTROL))
        if order := plan or regions:
            inputs["hidden_states"] = along(order.order, image, 1)
            inputs["img_ids"] = along(order.order, inputs["img_ids"], inputs["img_ids"].ndim - 2)
            for name in CONTROL:
                if inputs.get(name) is not None:
                    inputs[name] = [along(order.order, residual, 1) for residual in inputs[name]]
        return (), inputs

    @outside_compiled_code
    def leave(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the image tokens back in raster order."""
        for site in self.sites:
            site.end()
        if (order := self.ran.plan or self.ran.regions) is None:
            return output
        if isinstance(output, tuple):
            return along(order.inverse, output[0], 1), *output[1:]
        output.sample = along(order.inverse, output.sample, 1)
        return output

    def _tell_layers(self, plan: AttentionPlan | None, regions: Regions | None, text: int) -> None:
        """Hand every layer its table, of merged tokens where tokens are merged."""
        for layer in self.layers:
            if layer.processor is None:
                continue
            table = plan.tables[layer.phase] if plan and layer.sparse else None
            if table is not None and regions and self._merged(layer):
                table = _merged(table, regions, text)
            layer.processor.table = table

    def _tell_sites(self, regions: Regions | None, text: Tensor, *, apart: bool) -> None:
        if self.idle:
            self.idle.follow()
        for site in self.sites:
            site.follow()
            site.begin(regions, self._step, text, apart)

    def _plan(self, inputs: dict[str, Any]) -> AttentionPlan:
        self._check(self.sparse, inputs)
        self.sparse.check_head_dim(self.model.config.attention_head_dim)
        image, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
        return self.sparse.plan(grids_of(inputs["img_ids"]), text.shape[1], device=str(image.device))

    def _regions(self, inputs: dict[str, Any], plan: AttentionPlan | None) -> Regions:
        if self.merging.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        self._check(self.merging, inputs)
        if self.model.gradient_checkpointing:  # also without gradients: a backward pass may come after this forward
            raise DenseFallback("gradient checkpointing runs blocks again when their plan may be another one")
        self._step = self.merging_step(self.merging, inputs["timestep"], inputs["hidden_states"])
        grids = grids_of(inputs["img_ids"])
        if plan:
            return self.merging.regions_along(plan, grids[0])
        return self.merging.regions(grids, device=str(inputs["hidden_states"].device))

    def _check(self, method: Method, inputs: dict[str, Any]) -> None:
        """Raise what keeps any method from working in this forward."""
        self.check_step(method, inputs["hidden_states"].shape[1])
        if (inputs.get("joint_attention_kwargs") or {}).get("attention_mask") is not None:
            raise DenseFallback("an attention mask was passed")
        if any(layer.processor and layer.processor._parallel_config is not None for layer in self.layers):
            raise DenseFallback("context parallelism splits the tokens over devices")
        check_strangers(self.layers, () if isinstance(method, TokenMerging) else KNOWN)


# Tables of merged tokens, by the tables that they come from.
_MERGED: WeakTensorCache[tuple[Tensor, Tensor]] = WeakTensorCache()


def _merged(table: Pattern, regions: Regions, text: int) -> Pattern:
    """Who attends to whom of merged tokens."""
    if isinstance(table, LogLinear):
        return table.merged(regions.kept)
    queries, keys = _MERGED.get([*table], (regions.groups, text), lambda: regions.merged(table, text)[:2])
    return BlockTable(queries, keys, *table[2:])  # what is kept of a table must not hold it


# Grids by their ids: reading ids means waiting for the device, and a pipeline keeps its ids through all steps.
_GRIDS: WeakTensorCache[tuple[tuple[int, int], ...]] = WeakTensorCache()


def grids_of(ids: Tensor) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of every image in `img_ids`: of the picture, then of its references.

    Args:
        ids: [tokens, 3] or [batch, tokens, 3]: (image, row, column) of each token.

    Raises:
        DenseFallback: If an image is not a complete raster of unit steps.
        ValueError: If samples of a batch differ.
    """
    version = None if ids.is_inference() else ids._version
    return _GRIDS.get([ids], version, lambda: _read_grids(ids.detach().cpu()))


@persistent
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
        raise DenseFallback(
            f"img_ids are no complete raster of unit steps ({len(cells)} ids, {width} in the first row)"
        )
    return height, width
