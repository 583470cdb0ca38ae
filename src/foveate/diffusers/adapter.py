# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportReturnType=false
"""One model with methods at work in it, whatever its family: what differs between families is in its card.

Before each forward pass a hook asks the methods for their plans and attaches a `LayerPlan` to the processor of each
attention layer; `backend.foveate_attention` does the rest. Outside of attention all tokens stay in raster order.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foveate.diffusers.arguments import Argument, arguments_by_name
from foveate.diffusers.backend import (
    LayerPlan,
    attach,
    detach,
    dispatches,
    local_tokens,
    plan_of,
    set_attention,
    with_text,
)
from foveate.diffusers.card import Card, Layout, Stack
from foveate.diffusers.clock import Clock, Step
from foveate.diffusers.merging import MergedBlock, MergeGroup
from foveate.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, DenseFallback, SparseAttention, TokenMerging
from foveate.ops.block_table import BlockTable, block_starts, block_table
from foveate.ops.curves import inverse_order
from foveate.ops.joint_attention import LogLinear, Pattern, backend_of
from foveate.ops.merging import Grid, Regions
from foveate.utils.cache import FixedMemory, WeakTensorCache, persistent

__all__ = ["ModelAdapter", "outside_compiled_code"]

log = logging.getLogger("foveate")

T = TypeVar("T")

OUTSIDE = "this step lies outside start_percent to end_percent"  # as the user wants it: no warning

outside_compiled_code = torch.compiler.disable(
    reason="foveate plans a forward pass outside of compiled code; compile the blocks if a graph must be whole: "
    "model.compile_repeated_blocks(fullgraph=True)"
)


class Layer(NamedTuple):
    """One self-attention layer.

    Attributes:
        name: Its name in the model.
        attn: The attention module.
        block: The block that holds it.
        holder: See `Stack.holder`.
        number: Number of its block, counted through the whole model.
        joint: Whether text and image attend to each other in it.
        sparse: Whether sparse attention works in it.
        group: The group it merges with; None if its block never merges.
    """

    name: str
    attn: nn.Module
    block: nn.Module
    holder: nn.Module
    number: int
    joint: bool
    sparse: bool
    group: MergeGroup | None

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return getattr(self.attn, "head_dim", None) or self.inner_dim // self.heads

    @property
    def inner_dim(self) -> int:
        """Channels of all heads together."""
        if head_dim := getattr(self.attn, "head_dim", None):
            return self.heads * head_dim
        return getattr(self.attn, "inner_dim", None) or self.attn.to_query.out_features

    @property
    def heads(self) -> int:
        """Number of heads."""
        return getattr(self.attn, "heads", None) or self.attn.num_heads


class Forward(NamedTuple):
    """What the layers of one stack did in a forward pass.

    Attributes:
        layouts: The attention sequence of each sample; one if all are alike.
        plans: Plan of sparse attention for each number of text tokens, 0 for layers of the image alone; None if dense.
        regions: Regions within which tokens merged, those of one process if several share the tokens; None if they
            did not merge.
        why: Why it was dense.
        batch: Number of samples.
        device: Device of the tokens.
        dtype: Their dtype.
        replaced: Why layers are dense whose processor was replaced by one that knows no backends, by name.
    """

    layouts: tuple[Layout, ...] = ()
    plans: dict[int, AttentionPlan] | None = None
    regions: Regions | None = None
    why: str = "no forward yet"
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    replaced: Mapping[str, str] = {}

    @property
    def layout(self) -> Layout:
        """The attention sequence of the first sample. Others have the same images and number of tokens."""
        return self.layouts[0]

    @property
    def kept(self) -> int:
        """Number of image tokens after merging, of all processes."""
        return self.regions.kept * self.layout.only_images().tokens // len(self.regions.order)

    def layouts_of(self, layer: Layer) -> list[Layout]:
        """The sequence of each sample in one layer; one if all are alike."""
        return alike([layout if layer.joint else layout.only_images() for layout in self.layouts])


class ModelAdapter:
    """One model with methods in it, from construction to `remove`.

    Hooks on the model are bound methods of the adapter: that is how `of` finds it, also in a deep copy.

    Args:
        model: The denoiser.
        card: The card of its class.
        methods: One method of sparse attention, one of token merging, or both.
        pipeline: The pipeline around the model, or None.
        grids: Grids of image tokens that the methods were tuned for; a warning tells of others. Empty: all.

    Raises:
        ValueError: If the methods do not fit each other or the model. The model is left as it was.

    Attributes:
        outcomes: Number of forward passes by the reason why they were dense; "" counts those with a method at work.
        paused: While it is true, every forward pass is dense: see `Handle.paused`.
    """

    def __init__(
        self, model: nn.Module, card: Card, methods: tuple[Method, ...], pipeline: Any, grids: tuple[Any, ...] = ()
    ) -> None:
        self.sparse = next((method for method in methods if isinstance(method, SparseAttention)), None)
        self.merging = next((method for method in methods if isinstance(method, TokenMerging)), None)
        if len(methods) != (self.sparse is not None) + (self.merging is not None):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"apply takes one method of sparse attention, one of token merging, or both, not {given}")
        if self.sparse and self.merging:
            if self.merging.size_bias:
                raise ValueError("size_bias needs dense attention: leave it off beside sparse attention")
            self.sparse = self.sparse.in_one_order()
        if pipeline is None and not all(method.always for method in methods):
            raise ValueError(
                "start_percent and end_percent need a scheduler to tell the step: apply to the pipeline, not the model"
            )
        card.check(model, methods)
        self.model, self.card, self.methods, self.clock = model, card, methods, Clock(pipeline)
        self.outcomes, self.paused, self.grids = Counter[str](), False, grids
        self.layers: list[Layer] = []
        self.groups: list[MergeGroup] = []
        self.blocks: list[MergedBlock] = []
        self._replaced: list[tuple[nn.Module, Any, Any]] = []  # attention modules, original and new processor
        self._hooks: list[Any] = []
        self._attached: list[tuple[Any, LayerPlan]] = []  # processors with the plans of the current forward pass
        self._inputs: dict[str, Any] = {}
        self._unmerged: str | None = None  # why tokens do not merge in this forward pass; None: not known yet
        self._ropes = Rotations(card)
        self._modules = list(model.modules())  # walking the tree takes milliseconds
        try:
            stacks = list(card.stacks(model))
            self._build(stacks)
            holders = list(dict.fromkeys(layer.holder for layer in self.layers))
            self._hooks.append(model.register_forward_pre_hook(self.before_model, with_kwargs=True))
            self._hooks += [
                holder.register_forward_pre_hook(self.before_stack, with_kwargs=True)
                for holder in holders
                if not self._plans_with_model(holder)
            ]
            self._hooks.append(model.register_forward_hook(self.after_model))
        except BaseException:
            self.remove()
            raise
        self.ran: dict[nn.Module, Forward] = dict.fromkeys(holders, Forward())
        self.shown = self.ran  # of the last forward pass with a method at work, or of the last if there was none
        self._step: Step | None = None

    @staticmethod
    def of(model: nn.Module) -> "ModelAdapter | None":
        """The adapter at work in a model; a deep copy of a model carries one of its own."""
        owners = (hook.__self__ for hook in model._forward_pre_hooks.values() if isinstance(hook, MethodType))
        return next((owner for owner in owners if isinstance(owner, ModelAdapter)), None)

    @property
    def hooks_inside(self) -> bool:
        """Whether there are hooks inside the model, in what may have been compiled, not on its root alone."""
        return bool(self.blocks) or any(not self._plans_with_model(layer.holder) for layer in self.layers)

    def _plans_with_model(self, holder: nn.Module) -> bool:
        """Whether the hook before the model plans a stack: a list of blocks has no forward pass."""
        return holder is self.model or isinstance(holder, nn.ModuleList)

    def remove(self) -> None:
        """Restore the model exactly. Doing it twice is fine."""
        for handle in self._hooks:
            handle.remove()
        for block in self.blocks:
            block.remove()
        for holder in {layer.holder for layer in self.layers}:
            if isinstance(again := getattr(holder, "_gradient_checkpointing_func", None), RerunWithPlans):
                holder._gradient_checkpointing_func = again.original
        self._detach_plans()
        for attn, original, replacement in self._replaced:
            if attn.processor is replacement:  # a processor that was set after apply stays
                attn.processor = original
        self._replaced = []

    def _detach_plans(self) -> None:
        for processor, plan in self._attached:
            detach(processor, plan)
        self._attached = []

    # --- construction ---

    def _build(self, stacks: list[Stack]) -> None:
        total = sum(len(stack.blocks) for stack in stacks)
        for method in self.methods:
            if beyond := sorted(method.dense_layer_set() - set(range(total))):
                raise ValueError(f"dense_layers names layer {beyond[0]}, but the model has layers 0 to {total - 1}")
        shared, first = dict[Any, MergeGroup](), 0
        idle = MergeGroup(self.merging, self.card) if self.merging else None
        for stack in stacks:
            skip = stack.skip if self.merging is None or self.merging.skip is None else self.merging.skip
            dense = self.merging.dense_layer_set() if self.merging else frozenset()
            merges = [
                self.merging is not None and i >= skip and first + i not in dense for i in range(len(stack.blocks))
            ]
            for i, block in enumerate(stack.blocks):
                group = self._group(stack, block, first + i, total, shared) if merges[i] else None
                self._add_layers(stack, i, first + i, block, group)
                if self.sparse and self.card.rope:
                    rope = RopeInBackend(block, self._attentions(block), self.card.rope, self._ropes)
                    self._hooks.append(block.register_forward_pre_hook(rope.take, with_kwargs=True))
                if self.merging:  # a graph compiled for a block without hooks would be taken for blocks with hooks
                    last = not any(merges[i + 1 : i + 2]) or self.merging.per_block
                    self._hook(stack, block, group or idle, last=last)
            first += len(stack.blocks)
        if not self.layers:
            raise ValueError(f"this {type(self.model).__name__} has no self-attention that foveate knows")
        if self.merging and self.merging.keep < 1 and not self.groups:
            raise ValueError(
                f"no block is left to merge with skip={self.merging.skip} and these dense_layers: skip fewer"
            )

    def _group(
        self, stack: Stack, block: nn.Module, number: int, total: int, shared: dict[Any, MergeGroup]
    ) -> MergeGroup:
        key = block if self.merging.per_block else stack.group
        if key not in shared:
            shared[key] = MergeGroup(self.merging.at(number / total), self.card)
            self.groups.append(shared[key])
            self.blocks.append(MergedBlock(shared[key], block, self._attentions(block), stack.joined))
            self.blocks[-1].plan_here()
        return shared[key]

    def _attentions(self, block: nn.Module) -> list[Any]:
        """The self-attention modules of a block."""
        if getattr(block, "only_cross_attention", False):
            return []
        return [attn for name in self.card.attention if (attn := getattr(block, name, None)) is not None]

    def _add_layers(self, stack: Stack, i: int, number: int, block: nn.Module, group: MergeGroup | None) -> None:
        sparse = self.sparse is not None and number not in self.sparse.dense_layer_set()
        if group and getattr(block, "_chunk_size", None):
            raise ValueError("feed-forward chunking cuts merged tokens: call disable_forward_chunking() first")
        for name, joint in self.card.attention.items():
            if (attn := getattr(block, name, None)) is None or attn not in self._attentions(block):
                continue
            layer = Layer(f"{stack.name}.{i}.{name}", attn, block, stack.holder, number, joint, sparse, group)
            if sparse or (group and (self.card.wrapper is None or group.method.size_bias)):
                self._take_processor(layer)
            self.layers.append(layer)

    def _take_processor(self, layer: Layer) -> None:
        """Make the processor one that attends through diffusers' dispatcher and belongs to this layer alone."""
        processor, wrapper = layer.attn.processor, self.card.wrapper
        if wrapper is not None and type(processor) in wrapper.known:
            self._replace(layer.attn, wrapper(processor))
        elif not dispatches(processor):
            raise ValueError(
                f"{layer.name} has a {type(processor).__name__}, which foveate does not know: restore the model's own "
                f"processors first, or leave it dense with dense_layers={str(layer.number)!r}"
            )
        elif any(other.attn.processor is processor for other in self.layers):
            self._replace(layer.attn, copy.copy(processor))

    def _replace(self, attn: nn.Module, processor: Any) -> None:
        self._replaced.append((attn, attn.processor, processor))
        attn.processor = processor

    def _hook(self, stack: Stack, block: nn.Module, group: MergeGroup, *, last: bool) -> None:
        """Add the hooks that merge around a block or around its modules."""
        merged = MergedBlock(group, block, self._attentions(block), stack.joined)
        self.blocks.append(merged)
        if self.merging.granularity == "block":
            merged.merge_block(last=last)
        elif hasattr(block, self.card.stream[0]):
            merged.merge_stream(*self.card.stream)
        else:
            mlp = self.card.merge_mlp if self.merging.merge_mlp is None else self.merging.merge_mlp
            on = {"attn": self.merging.merge_attn, "cross": self.merging.merge_cross, "mlp": mlp}
            for name, kind in self.card.merged_modules.items():
                if on[kind] and (module := getattr(block, name, None)) is not None:
                    merged.merge_module(module)

    # --- one forward pass ---

    @outside_compiled_code
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hook before the model: a forward pass begins."""
        self._inputs = arguments_by_name(model, args, kwargs)
        if not torch.is_grad_enabled() and any(layer.block._compiled_call_impl for layer in self.layers[:1]):
            torch.compiler.cudagraph_mark_step_begin()  # blocks may read what CUDA graphs of other blocks wrote
        self.ran = dict.fromkeys(self.ran, Forward(why="it did not run"))
        self._detach_plans()
        for block in self.blocks:
            block.follow()
        for group in self.groups:
            group.begin()
        self._step = self._unmerged = None
        self._ropes.clear()
        for holder in filter(self._plans_with_model, self.ran):
            self._plan_stack(holder, self._inputs)
        return (), self._inputs

    @outside_compiled_code
    def before_stack(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a part of a model that has a token grid of its own."""
        self._plan_stack(holder, arguments_by_name(holder, args, kwargs))

    @outside_compiled_code
    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook after the model: count what happened."""
        for group in self.groups:
            if group.end():
                for holder in {layer.holder for layer in self.layers if layer.group is group}:
                    why = "the block that its plan is made from did not run"
                    ran = self.ran[holder]
                    self.ran[holder] = ran._replace(regions=None, why=ran.why if ran.plans else why)
        self._inputs = {}
        whys = [ran.why for ran in self.ran.values()]
        why = "" if any(ran.plans or ran.regions for ran in self.ran.values()) else whys[0]
        self.outcomes[why] += 1
        if not why or not self.outcomes[""] or any(ran.replaced for ran in self.ran.values()):
            self.shown = self.ran

    def _plan_stack(self, holder: nn.Module, inputs: dict[str, Any]) -> None:
        """Decide what the layers of a stack do, and tell them."""
        x = self.card.samples(inputs)
        layouts, why = self._ask(self.methods[0], lambda: alike(self.card.layout(holder, inputs)))
        plans = regions = None
        if layouts is not None:
            if self.grids and (given := layouts[0].grids) not in self.grids:
                log.warning("the preset was measured at %s image tokens, not at %s", self.grids[0], given)
                self.grids = ()  # tell it once
            plans, why_not_sparse = self._ask(self.sparse, lambda: self._plans(holder, inputs, layouts))
            regions, why_not_merged = self._ask(self.merging, lambda: self._regions(holder, inputs, layouts, plans))
            why = "" if plans or regions else why_not_sparse or why_not_merged
        layers = [layer for layer in self.layers if layer.holder is holder]
        replaced = {
            layer.name: set_later(layer.attn)
            for layer in layers
            if layer.sparse and not dispatches(layer.attn.processor)
        }
        ran = Forward(tuple(layouts or ()), plans, regions, why, x.shape[0], x.device, x.dtype, replaced)
        self.ran[holder] = ran
        if torch.is_grad_enabled() and getattr(holder, "gradient_checkpointing", False):
            RerunWithPlans.in_place_of(holder)
        known: dict[Hashable, LayerPlan | None] = {}
        for layer in layers:
            if not dispatches(processor := layer.attn.processor):
                continue
            if (kind := self._kind(layer)) not in known:
                known[kind] = self._layer_plan(layer)
            if (plan := copy.copy(known[kind])) is not None:
                attach(processor, plan)
                self._attached.append((processor, plan))
                for pattern in (part.pattern for part in plan.parts or (plan,)):
                    if layer.block._compiled_call_impl and isinstance(pattern, BlockTable):
                        _IN_GRAPHS.setdefault(self.model, {})[tuple(map(id, pattern))] = pattern
        if regions and self._step:
            tokens = ran.layout.tokens - ran.layout.only_images().tokens
            text = regions.order.new_empty(local_tokens((tokens,), self._context(layers)))
            together = not self.card.residuals_between_blocks(self._inputs)
            for group in dict.fromkeys(layer.group for layer in layers if layer.group):
                if not group.begun:  # a section of a UNet has several stacks
                    image_first = ran.layout.segments[0].kind == "image"
                    group.begin(regions, self._step, text, skip_unmerge=together, image_first=image_first)
                merged = (layer.attn for layer in layers if layer.group is group and self._merges_attention(layer))
                group.layer_plans += filter(None, (plan_of(attn.processor) for attn in merged))

    def _ask(self, method: Method | None, decide: Callable[[], T]) -> tuple[T | None, str]:
        """What a method decides for this forward pass, or None and why it stays dense."""
        if method is None:
            return None, ""
        try:
            return decide(), ""
        except DenseFallback as reason:
            if not self.paused and str(reason) not in (OUTSIDE, *self.outcomes):
                log.warning("%s stays dense: %s", type(method).__name__, reason)
            self.outcomes[str(reason)] += 0  # log it once
            return None, str(reason)

    def _check(self, method: Method, holder: nn.Module, inputs: dict[str, Any], tokens: int) -> None:
        """Raise what keeps any method from working in this forward pass."""
        if self.paused:
            raise DenseFallback("paused")
        if not method.always:
            if (progress := self.clock()) is None:
                raise DenseFallback("no scheduler tells the step, and start_percent to end_percent is part of the run")
            if not method.covers(progress):
                raise DenseFallback(OUTSIDE)
        if tokens < method.min_tokens:
            raise DenseFallback(f"{tokens} image tokens are fewer than min_tokens={method.min_tokens}")
        nested = [v for k, v in self._inputs.items() if k.endswith("attention_kwargs") and v]
        if self.card.padding_mask != "attention_mask" and any(
            given.get("attention_mask") is not None for given in (inputs, *nested)
        ):
            raise DenseFallback("an attention mask was passed")

    def _plans(self, holder: nn.Module, inputs: dict[str, Any], layouts: list[Layout]) -> dict[int, AttentionPlan]:
        image = layouts[0].only_images()
        self._check(self.sparse, holder, inputs, image.tokens)
        layers = [layer for layer in self.layers if layer.holder is holder and layer.sparse]
        if not layers:
            raise DenseFallback("every layer is named in dense_layers")
        if not any(dispatches(layer.attn.processor) for layer in layers):
            raise DenseFallback(set_later(layers[0].attn))
        self.sparse.check_head_dim(layers[0].head_dim)
        self._ranks(layers, layouts[0])
        device = str(self.card.samples(inputs).device)
        texts = {layout.text if layer.joint else 0 for layer in layers for layout in layouts}
        try:
            return {text: self.sparse.plan(image.grids, text, device=device) for text in sorted(texts, reverse=True)}
        except ValueError as reason:
            if len(self.ran) == 1 or self.model in self.ran or isinstance(reason, DenseFallback):
                raise
            raise DenseFallback(str(reason)) from None  # in a UNet the setting may fit other parts

    def _context(self, layers: list[Layer]) -> Any:
        """The config of context parallelism in these layers; None without it."""
        processors = (layer.attn.processor for layer in layers)
        configs = (plan.parallel if (plan := plan_of(p)) else getattr(p, "_parallel_config", None) for p in processors)
        return getattr(next((config for config in configs if config), None), "context_parallel_config", None)

    def _ranks(self, layers: list[Layer], layout: Layout) -> int:
        """Number of processes over which the sequence is split.

        Raises:
            DenseFallback: If it is split in another way than by Ulysses.
        """
        context = self._context(layers)
        if context is None:
            return 1
        ranks = context.ulysses_degree or 1
        if (context.ring_degree or 1) > 1:
            raise DenseFallback("ring attention splits keys over devices: use ulysses_degree alone")
        if any(tokens % ranks for tokens in layout.streams()) and not context.ulysses_anything:
            raise DenseFallback(
                f"{layout.streams()} text and image tokens do not divide evenly over {ranks} devices: "
                "use ContextParallelConfig(ulysses_anything=True)"
            )
        return ranks

    def _regions(
        self, holder: nn.Module, inputs: dict[str, Any], layouts: list[Layout], plans: dict[int, AttentionPlan] | None
    ) -> Regions:
        if self.merging.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        layout, image = layouts[0], layouts[0].only_images()
        self._check(self.merging, holder, inputs, image.tokens)
        self.card.check_merging(self.merging, self._inputs)
        layers = [layer for layer in self.layers if layer.holder is holder and layer.group]
        if self.merging.size_bias and any(sample.padded for sample in layouts):
            raise DenseFallback("size_bias needs a text without padding")
        if (ranks := self._ranks(layers, layout)) > 1:
            if plans:
                raise DenseFallback("each device holds rows of the image, not runs of tokens along the sparse order")
            if self.merging.size_bias:
                raise DenseFallback("context parallelism takes no size_bias")
            if splits_tokens(layers[0].block):
                raise DenseFallback("context parallelism splits the tokens within the first block: use skip=1 or more")
        if self._unmerged is None:
            self._unmerged = why_not_merged(self._modules)
        if self._unmerged:
            raise DenseFallback(self._unmerged)
        extra = (v for k, v in self._inputs.items() if k.endswith("attention_kwargs") and v)
        if any(given.get("ip_adapter_masks") is not None for given in extra):
            raise DenseFallback("ip_adapter_masks are laid over a raster of all tokens")
        for layer in layers:
            if not self._takes_merged(layer.attn):
                raise DenseFallback(set_later(layer.attn))
        if self._step is None:
            run, number = self.clock.step(torch.as_tensor(self.card.timestep(self._inputs)))
            x = self.card.samples(self._inputs)
            self._step = Step(number, (run, x.shape[0], x.dtype, x.device))
        if self._step.number % self.merging.merge_every:
            raise DenseFallback(f"this is no step that merges: merge_every={self.merging.merge_every}")
        if plans:
            return self.merging.regions_along(next(iter(plans.values())), layout.grids[0])
        regions = self.merging.regions(layout.grids, device=str(self.card.samples(inputs).device))
        return regions if ranks == 1 else self._regions_of_rank(regions, layout.grids, ranks)

    def _regions_of_rank(self, regions: Regions, grids: tuple[Grid, ...], ranks: int) -> Regions:
        """Regions of the rows or frames that each process holds under context parallelism, alike in all of them.

        Raises:
            DenseFallback: If a region has tokens of several processes.
        """
        sides = grids[0]
        if len(grids) == 1 and sides[0] % ranks == 0:
            part = self.merging.regions(((sides[0] // ranks, *sides[1:]),), device=str(regions.order.device))
            if regions.groups == tuple(group._replace(number=ranks * group.number) for group in part.groups):
                return part
        raise DenseFallback(f"regions to merge within cross the borders between the tokens of {ranks} devices")

    def _takes_merged(self, attn: nn.Module) -> bool:
        """Whether the processor of a layer works on fewer tokens: an unknown one may keep maps of all tokens."""
        if self.card.wrapper is None:
            return dispatches(attn.processor)
        return type(attn.processor) in (self.card.wrapper, *self.card.wrapper.known)

    # --- plans of layers ---

    def _merges_attention(self, layer: Layer) -> bool:
        """Whether attention of this layer sees merged tokens when its group merges."""
        if layer.group is None:
            return False
        return (
            self.merging.granularity == "block" or self.merging.merge_attn or hasattr(layer.block, self.card.stream[0])
        )

    def _kind(self, layer: Layer) -> Hashable:
        """What tells apart layers of a stack with different plans."""
        ran, config = self.ran[layer.holder], layer.attn.processor._parallel_config
        period = len(next(iter(ran.plans.values())).tables) if ran.plans else 1
        return layer.joint, layer.sparse, layer.number % period, self._merges_attention(layer), id(config)

    def _pattern(self, layer: Layer, ran: Forward, text: int) -> Pattern | None:
        """Which tokens attend to which in a layer with this many text tokens; None if all to all."""
        if not ran.plans or not layer.sparse:
            return None
        tables = ran.plans[text].tables
        table = tables[layer.number % len(tables)]
        return merged_pattern(table, ran.regions, text) if ran.regions and self._merges_attention(layer) else table

    def _layer_plan(self, layer: Layer) -> LayerPlan | None:
        """The plan of one layer; None if its attention is the model's own."""
        ran = self.ran[layer.holder]
        sparse = ran.plans is not None and layer.sparse
        merged = ran.regions is not None and self._merges_attention(layer)
        if not sparse and not (merged and (self.card.rope or self.merging.size_bias)):
            return self.card.dense_plan()
        runs = [(self._sample_plan(layer, layout), len([*same])) for layout, same in groupby(ran.layouts_of(layer))]
        return runs[0][0] if len(runs) == 1 else LayerPlan.ragged(*zip(*runs, strict=True))

    def _sample_plan(self, layer: Layer, layout: Layout) -> LayerPlan:
        """The plan of one layer for samples with this layout."""
        ran = self.ran[layer.holder]
        pattern = self._pattern(layer, ran, layout.text)
        if ran.regions is not None and self._merges_attention(layer):
            layout = layout.merged(ran.kept)
            order, inverse = merged_order(layout, str(ran.device), self._ranks([layer], layout))
        else:
            orders = ran.plans[layout.text].orders
            order = orders[layer.number % len(orders)]
            order, inverse = sequence_order(order, layout, self._ranks([layer], layout))
        if pattern is None and any(sample.padded for sample in ran.layouts):
            pattern = attend_to_all(len(order))  # padding is left out
        streams = tuple(layout.streams())
        return LayerPlan(order, inverse, pattern, self.card.padding_mask is not None, streams)

    # --- reports ---

    @property
    def plan(self) -> Any | None:
        """What the methods decided for the first stack with one at work in the last forward pass; None if dense."""
        for holder, ran in self.ran.items():
            if ran.plans:
                return next(iter(ran.plans.values()))
            if ran.regions:
                group = [layer.group for layer in self.layers if layer.holder is holder and layer.group][-1]
                return group.with_picks(ran.regions)
        return None

    def report(self) -> list[LayerReport]:
        """What each layer did, in running order: see `Handle.summary`."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: Layer) -> LayerReport:
        ran = self.shown[layer.holder]
        sparse = layer.sparse and ran.plans is not None and layer.name not in ran.replaced
        merges = layer.group is not None and ran.regions is not None
        if not (sparse or merges):
            return LayerReport(layer.name, "dense", why=self._why_dense(layer, ran))
        image = ran.layout.only_images().tokens
        kept = ran.kept if merges and self._merges_attention(layer) else image
        texts = [layout.text for layout in ran.layouts_of(layer)]
        patterns = [self._pattern(layer, ran, text) if sparse else None for text in texts]
        pairs = sum((text + kept) ** 2 if p is None else p.pairs() for p, text in zip(patterns, texts, strict=True))
        every_pair = sum((text + image) ** 2 for text in texts)
        pattern, plan = patterns[0], ran.plans[texts[0]] if sparse else None
        saved = 4 * (every_pair - pairs) * layer.inner_dim * ran.batch // len(texts)
        if merges:
            saved += 2 * self._merged_weights(layer) * (image - ran.kept) * ran.batch
        return LayerReport(
            layer.name,
            " + ".join([*([plan.title] if plan else []), *([self.merging.title] if merges else [])]),
            "model" if pattern is None else backend_of(pattern, ran.device, ran.dtype, layer.head_dim),
            1 - (1 - (plan.nominal_sparsity if plan else 0)) * (kept / image) ** 2,
            1 - pairs / every_pair,
            saved,
        )

    def _merged_weights(self, layer: Layer) -> int:
        """Number of weights in the linear layers of a block that merged tokens go through."""
        block, whole = layer.block, self.merging.granularity == "block"
        mlp = self.card.merge_mlp if self.merging.merge_mlp is None else self.merging.merge_mlp
        if hasattr(block, self.card.stream[0]):
            modules = [block]
        else:
            modules = [layer.attn] if whole or self.merging.merge_attn else []
            if (whole or mlp) and layer.attn is self._attentions(block)[0]:
                modules += [getattr(block, name) for name, kind in self.card.merged_modules.items() if kind == "mlp"]
        skipped = "norm", "add_", "added", "lora"  # modulation, text and adapters
        return sum(
            weight.numel()
            for module in modules
            for name, weight in module.named_parameters()
            if weight.ndim == 2 and not any(word in name for word in skipped)
        )

    def _why_dense(self, layer: Layer, ran: Forward) -> str:
        if layer.sparse or layer.group:
            return ran.replaced.get(layer.name, ran.why)
        if self.merging and layer.number not in self.merging.dense_layer_set():
            return f"one of the first blocks, which {type(self.merging).__name__} skips"
        return "named in dense_layers"


class Rotations:
    """Rotary embeddings of a forward pass: those of the attention sequence are made once for all blocks.

    Args:
        card: Card of the model.
    """

    def __init__(self, card: Card) -> None:
        self.card, self._memory = card, FixedMemory()
        self.clear()

    def clear(self) -> None:
        """Forget those of the last forward pass."""
        self._given: Any = None
        self._made: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def of(self, rope: Any, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """(cos, sin) for a layer, from the argument of its block."""
        if self._given is not rope or self._made[0].shape[-2] != plan.tokens:
            self._given, self._made = rope, self._memory.hold(with_text(self.card.rotation(rope), plan.tokens))
        return self._made


class RopeInBackend:
    """A hook on a block that lets the backend rotate queries and keys while it gathers them, not the processor.

    On a GPU one kernel then does what many would.

    Args:
        block: The block.
        attentions: Its attention modules.
        name: Name of the block's argument that holds the rotary embedding: see `Card.rope`.
        rotations: Those of the model.
    """

    def __init__(
        self, block: nn.Module, attentions: list[nn.Module], name: str | tuple[str, ...], rotations: Rotations
    ) -> None:
        self.attentions, self.rope, self.rotations = attentions, Argument(block, name), rotations

    def take(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move the rotary embedding from the arguments of the block into the plans of its layers."""
        rope, plans = self.rope.of(args, kwargs), [plan_of(attn.processor) for attn in self.attentions]
        if rope is None or not all(plan and plan.pattern is not None and not plan.parallel for plan in plans):
            return None
        for plan in plans:
            if plan.rope is None:  # that of merged tokens is set already
                compiling = torch.compiler.is_compiling()  # then the backend adds rows for text
                plan.rope = self.rotations.card.rotation(rope) if compiling else self.rotations.of(rope, plan)
        return self.rope.dropped(args, kwargs)


class RerunWithPlans:
    """A checkpointing function that runs a block again with the plans it had, whatever forward passes came between.

    Args:
        original: The model's own checkpointing function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    @classmethod
    def in_place_of(cls, holder: Any) -> None:
        """Replace the checkpointing function of a module, once."""
        if not isinstance(holder._gradient_checkpointing_func, cls):
            holder._gradient_checkpointing_func = cls(holder._gradient_checkpointing_func)

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Run the block; the backward pass will run it again."""
        processors = [module.processor for module in block.modules() if dispatches(getattr(module, "processor", None))]
        plans = [(processor, processor._attention_backend, processor._parallel_config) for processor in processors]

        def run(*args: Any) -> Any:
            now = [(processor, processor._attention_backend, processor._parallel_config) for processor in processors]
            for plan in plans:
                set_attention(*plan)
            try:
                return block(*args)
            finally:
                for plan in now:
                    set_attention(*plan)

        return self.original(run, *args)


def splits_tokens(block: nn.Module) -> bool:
    """Whether context parallelism splits the tokens when the block has been given them, after hooks saw them whole."""
    hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", {})
    return any("hidden_states" in (getattr(hook, "metadata", None) or ()) for hook in hooks.values())


def set_later(attn: nn.Module) -> str:
    """Why a layer is dense whose processor was replaced."""
    return f"a {type(attn.processor).__name__} was set after apply: remove and apply again"


def alike(layouts: Layout | list[Layout]) -> list[Layout]:
    """The layouts of all samples; one if they are alike."""
    layouts = [layouts] if isinstance(layouts, Layout) else layouts
    return layouts if len(set(layouts)) > 1 else layouts[:1]


def why_not_merged(modules: Iterable[nn.Module]) -> str:
    """What in the modules of a model keeps tokens from merging; empty if nothing does."""
    for module in modules:  # thousands
        own = vars(module)
        registry = own.get("_diffusers_hook")  # of First Block Cache, TaylorSeer, ...
        if registry is not None and any(hook._is_stateful for hook in registry.hooks.values()):
            return "a cache keeps tokens from step to step, whose number must not change"
        if own.get("gradient_checkpointing"):  # also without gradients: a backward pass may follow
            return "gradient checkpointing runs blocks again when their plan may be another one"
    return ""


# Tables of compiled blocks, for as long as there is the model: its CUDA graphs, which outlive the adapter, read their
# schedules, which are freed with them.
_IN_GRAPHS: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], BlockTable]] = WeakKeyDictionary()
_ORDERS: WeakTensorCache[tuple[Tensor, Tensor | None]] = WeakTensorCache()
_MERGED: WeakTensorCache[tuple[Tensor, Tensor]] = WeakTensorCache()


def sequence_order(image_order: Tensor, layout: Layout, ranks: int = 1) -> tuple[Tensor, Tensor | None]:
    """Order and inverse of an attention sequence: text first, then the image tokens in the order of a plan.

    The inverse has the length of the whole sequence. It is None if the sequence has this order already.

    Args:
        image_order: Raster index of the image token at each place.
        layout: The sequence.
        ranks: Number of processes whose parts of the sequence Ulysses concatenates.
    """
    make = lambda: _order_of(layout, image_order.cpu(), image_order.device, ranks)  # noqa: E731
    return _ORDERS.get([image_order], (layout, ranks), make)


@lru_cache(maxsize=64)
def merged_order(layout: Layout, device: str, ranks: int) -> tuple[Tensor, Tensor | None]:
    """`sequence_order` of a sequence whose image tokens are merged, which leaves them in the order of the plan."""
    return _order_of(layout, slice(None), device, ranks)


@persistent
def _order_of(layout: Layout, image_order: Any, device: Any, ranks: int = 1) -> tuple[Tensor, Tensor | None]:
    # every process holds a part of the text and a part of the image: [text 0, image 0, text 1, image 1, ...]
    streams = [stream.tensor_split(ranks) for stream in torch.arange(layout.tokens).split(layout.streams())]
    place = inverse_order(torch.cat([part for parts in zip(*streams, strict=True) for part in parts]))
    order = place[torch.cat([layout.positions("text"), layout.positions("image")[image_order]])]
    if torch.equal(order, torch.arange(layout.tokens)):
        return order.to(device), None
    return order.to(device), inverse_order(torch.cat([order, place[layout.positions("padding")]])).to(device)


@lru_cache(maxsize=16)
def attend_to_all(tokens: int) -> BlockTable:
    """The table in which every token attends to every other."""
    starts = block_starts(tokens)
    return block_table([range(len(starts) - 1)] * (len(starts) - 1), starts)


def merged_pattern(table: Pattern, regions: Regions, text: int) -> Pattern:
    """Which merged tokens attend to which."""
    if isinstance(table, LogLinear):
        return table.merged(regions.kept)
    queries, keys = _MERGED.get([*table], (regions.groups, text), lambda: regions.merged(table, text)[:2])
    return BlockTable(queries, keys, *table[2:])  # the cache must not hold the table that it is keyed by
