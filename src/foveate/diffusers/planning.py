# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""From methods to the `LayerPlan` of each attention layer in a forward pass, or to the reason why it is dense.

1. Before a stack of blocks runs, `Planner.plan` asks the card for the layout of the attention sequence, and each
   method for its plan for this layout. What they answer is a `Decision`.
2. `Decision.layer_plan` puts the order of the image tokens in the place of the image in the sequence, and fits the
   pattern to merged, cached and padded tokens.
3. `ForwardPass.attach` hands the plans to the processors of the layers; `backend.foveate_attention` attends by them.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foveate.diffusers.backend import KeysAlone, LayerPlan, attach, context_of, detach, dispatches
from foveate.diffusers.card import Card, TokenLayout
from foveate.diffusers.clock import Clock, Step
from foveate.diffusers.merging import MergedBlock, MergeGroup, MergePass, keeps_state
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, DenseFallback, DenseStep, SparseAttention, TokenMerging
from foveate.ops.block_table import BlockTable, block_starts, block_table
from foveate.ops.curves import inverse_order
from foveate.ops.joint_attention import LogLinear, Pattern
from foveate.ops.merging import Regions, merged_pattern
from foveate.utils.cache import WeakTensorCache, cached_by_tensor, persistent

__all__ = ["Decision", "ForwardPass", "Layer", "Planner", "sequence_order"]

log = logging.getLogger("foveate")

T = TypeVar("T")
M = TypeVar("M", bound=Method)

# Tables of compiled blocks, for as long as there is the block: its CUDA graphs, which outlive the adapter, read their
# schedules, which are freed with them.
_IN_GRAPHS: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], BlockTable]] = WeakKeyDictionary()


class Layer(NamedTuple):
    """One self-attention layer of a model.

    Attributes:
        name: Its name in the model.
        attn: The attention module.
        block: The block that holds it.
        holder: See `Stack.holder`.
        number: Number of its block, counted through the whole model.
        joint: Whether text and image attend to each other in it.
        sparse: Whether sparse attention works in it.
        group: The group that its block merges with; None if the block never merges.
        merges: Whether its attention sees merged tokens when the group merges.
    """

    name: str
    attn: Any
    block: nn.Module
    holder: nn.Module
    number: int
    joint: bool
    sparse: bool
    group: MergeGroup | None
    merges: bool

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return getattr(self.attn, "head_dim", None) or self.inner_dim // self._heads

    @property
    def inner_dim(self) -> int:
        """Channels of all heads together."""
        if head_dim := getattr(self.attn, "head_dim", None):
            return self._heads * head_dim
        if inner_dim := getattr(self.attn, "inner_dim", None):
            return inner_dim
        return next(getattr(self.attn, name).out_features for name in ("to_q", "to_query") if hasattr(self.attn, name))

    @property
    def _heads(self) -> int:
        names = "heads", "num_heads", "num_attention_heads"
        return next(getattr(self.attn, name) for name in names if hasattr(self.attn, name))

    @property
    def replaced(self) -> str:
        """Why it is dense if its processor was replaced after `apply`."""
        return f"a {type(self.attn.processor).__name__} was set after apply: remove and apply again"

    def takes_merged_tokens(self, card: Card) -> bool:
        """Whether its processor works on fewer tokens: an unknown one may keep maps of all tokens."""
        processor = self.attn.processor
        if card.wrapper is None:
            return dispatches(processor)
        return isinstance(processor, card.wrapper) or card.wrapper.wraps(processor)


class Decision(NamedTuple):
    """What the methods decided for the layers of one stack in a forward pass.

    Attributes:
        layouts: The attention sequence of each sample; one if all are alike, none if the card could not tell.
        attention: Plan of sparse attention for each number of text tokens, 0 for layers of the image alone; None if
            dense.
        regions: Regions within which tokens merge, those of one process if several share the tokens; None if they
            do not merge.
        merging: The method of token merging, with the options that it has in this step; None if tokens do not merge.
        why: Why the stack is dense.
        context: Config of the context parallelism that divides the tokens over processes; None without it.
        batch: Number of samples.
        device: Device of the tokens.
        dtype: Their dtype.
        dense_layers: Why single layers are dense, by name: their processor was replaced, or their attention is
            intercepted.
    """

    layouts: tuple[TokenLayout, ...] = ()
    attention: dict[int, AttentionPlan] | None = None
    regions: Regions | None = None
    merging: TokenMerging | None = None
    why: str = "no forward yet"
    context: Any = None
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    dense_layers: Mapping[str, str] = {}

    @property
    def layout(self) -> TokenLayout:
        """The attention sequence of the first sample. Others have the same images and number of tokens."""
        return self.layouts[0]

    @property
    def ranks(self) -> int:
        """Number of processes that share the tokens."""
        return 1 if self.context is None else self.context.ulysses_degree or 1

    @property
    def kept(self) -> int:
        """Number of image tokens after merging, of all processes."""
        return self.regions.kept * self.layout.only_images().tokens // len(self.regions.order)

    @property
    def title(self) -> str:
        """What is at work, such as "HilbertA T=4 + ToMA keep=0.5"; empty if the stack is dense."""
        attention = next(iter(self.attention.values())) if self.attention else None
        return " + ".join(part.title for part in (attention, self.regions and self.merging) if part)

    @property
    def period(self) -> int:
        """Number of layers after which the patterns repeat."""
        return len(next(iter(self.attention.values())).tables) if self.attention else 1

    def is_sparse(self, layer: Layer) -> bool:
        """Whether sparse attention works in a layer."""
        return layer.sparse and self.attention is not None

    def is_merged(self, layer: Layer) -> bool:
        """Whether a layer attends among merged tokens."""
        return layer.merges and self.regions is not None

    def layouts_of(self, layer: Layer) -> list[TokenLayout]:
        """The sequence of each sample in one layer; one if all are alike."""
        return alike([layout if layer.joint else layout.only_images() for layout in self.layouts])

    def pattern(self, layer: Layer, text: int) -> Pattern | None:
        """Which tokens attend to which in a layer with this many text tokens; None if all to all."""
        if not self.is_sparse(layer):
            return None
        tables = self.attention[text].tables
        table = tables[layer.number % len(tables)]
        return merged_pattern(table, self.regions, text) if self.is_merged(layer) else table

    def layer_plan(self, layer: Layer, card: Card) -> LayerPlan | None:
        """The plan of one layer; None if its attention is the model's own."""
        if not self.is_sparse(layer) and not (self.is_merged(layer) and card.rope):
            return card.dense_plan()
        runs = [(layout, len([*same])) for layout, same in groupby(self.layouts_of(layer))]
        parts = tuple(self._plan_of_layout(layer, layout, card) for layout, _ in runs)
        return parts[0] if len(parts) == 1 else replace(parts[0], parts=parts, samples=tuple(n for _, n in runs))

    def _plan_of_layout(self, layer: Layer, layout: TokenLayout, card: Card) -> LayerPlan:
        """The plan of one layer for samples with this layout."""
        pattern = self.pattern(layer, layout.text)
        if self.is_merged(layer):
            layout = layout.merged(self.kept)
            order, inverse = merged_order(layout, self.device, self.ranks)
        else:
            orders = self.attention[layout.text].orders
            order, inverse = sequence_order(orders[layer.number % len(orders)], layout, self.ranks)
        if pattern is None and any(sample.padded or sample.keys for sample in self.layouts):
            pattern = attend_to_all(len(order))  # padding is left out
        if more := layout.references + layout.text_keys:
            pattern = with_first_keys(pattern, more)
        return LayerPlan(
            order,
            inverse,
            pattern,
            mask_is_padding=card.padding_mask is not None,
            streams=tuple(layout.streams()),
            references=layout.count("reference"),
            keys=keys_alone(layout, self.device) if layout.keys else None,
            halves=card.rotates_halves,
            text_first=layout.segments[-1].kind == "image",
        )


@dataclass(eq=False)
class ForwardPass:
    """State of one forward pass of a model, from the hook before it until the next one begins.

    Attributes:
        decisions: What the methods decided for each stack, by `Stack.holder`.
        inputs: Arguments of the model by name; none after the pass.
        outer: The pass that this one interrupts in the same thread; its plans come back when this one ends.
        reuse: Whether memory and plans of earlier passes may be used again. A backward pass may still read them, and
            so may the outer pass.
        thread: Identifier of the thread that it runs in.
        step: Position in the denoising run; None until a method asks for it.
        unmergeable: What in the model keeps tokens from merging; None: not known yet.
        running: Whether it has not ended.
        cached: State of the step cache.
        merging: How groups of blocks merge.
        attached: Layers, their processors and the plans that these attend by.
    """

    decisions: dict[nn.Module, Decision]
    inputs: dict[str, Any] = field(default_factory=dict)
    outer: "ForwardPass | None" = None
    reuse: bool = True
    thread: int = field(default_factory=threading.get_ident)
    step: Step | None = None
    unmergeable: str | None = None
    running: bool = False
    cached: Any = None
    merging: dict[MergeGroup, MergePass] = field(default_factory=dict)
    attached: list[tuple[Layer, Any, LayerPlan]] = field(default_factory=list)

    def attach(self, layer: Layer, plan: LayerPlan) -> None:
        """Let a layer attend by a plan, until `detach`."""
        attach(layer.attn.processor, plan)
        self.attached.append((layer, layer.attn.processor, plan))
        if layer.block._compiled_call_impl:
            tables = [part.pattern for part in plan.parts or (plan,) if isinstance(part.pattern, BlockTable)]
            _IN_GRAPHS.setdefault(layer.block, {}).update({tuple(map(id, table)): table for table in tables})

    def attach_again(self) -> None:
        """Attach the plans that `detach` took off for a pass inside of this one."""
        for _, processor, plan in self.attached:
            attach(processor, plan)

    def detach(self) -> None:
        """Give all processors their own backends back."""
        for _, processor, plan in self.attached:
            detach(processor, plan)
        if not self.running:
            self.attached = []


class Planner:
    """Asks the methods for their plans.

    Args:
        model: The denoiser.
        card: Its card.
        sparse: The method of sparse attention, if any.
        merging: The method of token merging, if any.
        clock: Tells the step.
        layers: The self-attention layers of each stack, by `Stack.holder`.
        merged: The blocks that may merge.
        grids: Grids of image tokens that the methods were tuned for; a warning tells of others. Empty: all.
    """

    def __init__(
        self,
        model: nn.Module,
        card: Card,
        sparse: SparseAttention | None,
        merging: TokenMerging | None,
        clock: Clock,
        layers: Mapping[nn.Module, list[Layer]],
        merged: list[MergedBlock],
        grids: tuple[Any, ...],
    ) -> None:
        self.card, self.sparse, self.merging, self.clock, self.layers = card, sparse, merging, clock, layers
        self.grids = grids
        self._one_grid = len(layers) == 1 or model in layers
        self._merged = merged
        self._modules = list(model.modules())  # walking the tree takes milliseconds
        self._logged: set[str] = set()

    def plan(self, now: ForwardPass, holder: nn.Module, inputs: dict[str, Any]) -> Decision:
        """What the layers of a stack do in a forward pass.

        Args:
            now: The forward pass.
            holder: See `Stack.holder`.
            inputs: Its forward arguments by name.
        """
        layers, x = self.layers[holder], self.card.samples(inputs)
        layouts, why = self._ask(self.sparse or self.merging, lambda: alike(self.card.layout(holder, inputs)))
        stack = Decision(
            tuple(layouts or ()),
            why=why,
            context=next(filter(None, (context_of(layer.attn.processor) for layer in layers)), None),
            batch=x.shape[0],
            device=x.device,
            dtype=x.dtype,
            dense_layers={
                layer.name: layer.replaced for layer in layers if layer.sparse and not dispatches(layer.attn.processor)
            },
        )
        if layouts is None:
            return stack
        if self.grids and (given := stack.layout.grids) not in self.grids:
            log.warning("the preset was measured at %s image tokens, not at %s", self.grids[0], given)
            self.grids = ()  # tell it once
        attention, why_not_sparse = self._ask(self.sparse, lambda: self._attention(now, layers, inputs, stack))
        stack = stack._replace(attention=attention)
        merged, why_not_merged = self._ask(self.merging, lambda: self._regions(now, layers, inputs, stack))
        merging, regions = merged or (None, None)
        why = "" if attention or regions else why_not_sparse or why_not_merged or "the preset is a step cache alone"
        return stack._replace(regions=regions, merging=merging, why=why)

    def step(self, now: ForwardPass) -> Step:
        """Position of a forward pass in its denoising run."""
        if now.step is None:
            timestep = torch.as_tensor(self.card.timestep(now.inputs))
            now.step = self.clock.step(timestep, self.card.timestep_scale, keep=now.reuse)
        return now.step

    def _ask(self, method: Method | None, decide: Callable[[], T]) -> tuple[T | None, str]:
        """What a method decides for this forward pass, or None and why it stays dense."""
        if method is None:
            return None, ""
        try:
            return decide(), ""
        except DenseFallback as reason:
            why = str(reason)
            wanted = self.clock.caller.paused or isinstance(reason, DenseStep)
            if not wanted and why not in self._logged:
                log.warning("%s stays dense: %s", type(method).__name__, why)
                self._logged.add(why)
            return None, why

    def _attention(
        self, now: ForwardPass, layers: list[Layer], inputs: dict[str, Any], stack: Decision
    ) -> dict[int, AttentionPlan]:
        """Plan of sparse attention for each number of text tokens."""
        layers = [layer for layer in layers if layer.sparse]
        sparse = self._at_work(self.sparse, now, inputs, stack)
        if not layers:
            raise DenseFallback("every layer is named in dense_layers")
        if not any(dispatches(layer.attn.processor) for layer in layers):
            raise DenseFallback(layers[0].replaced)
        sparse.check_head_dim(layers[0].head_dim)
        texts = {sample.text if layer.joint else 0 for layer in layers for sample in stack.layouts}
        plan = partial(sparse.plan, stack.layout.grids, device=str(stack.device))
        try:
            return {text: plan(text) for text in sorted(texts, reverse=True)}
        except ValueError as reason:
            if self._one_grid or isinstance(reason, DenseFallback):
                raise
            raise DenseFallback(str(reason)) from None  # in a UNet the setting may fit other parts

    def _regions(
        self, now: ForwardPass, layers: list[Layer], inputs: dict[str, Any], stack: Decision
    ) -> tuple[TokenMerging, Regions]:
        """The method of token merging in this step, and the regions within which tokens merge."""
        merging = self._at_work(self.merging, now, inputs, stack)
        if merging.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        self._check_merging(now, [layer for layer in layers if layer.group], stack)
        if self.step(now).number % merging.merge_every:
            raise DenseFallback(f"this is no step that merges: merge_every={merging.merge_every}")
        grids = stack.layout.grids
        if stack.attention:
            return merging, merging.regions_along(next(iter(stack.attention.values())), grids[0])
        regions = merging.regions(grids, device=str(stack.device))
        return merging, regions if stack.ranks == 1 else self._regions_of_rank(merging, regions, stack)

    def _regions_of_rank(self, merging: TokenMerging, regions: Regions, stack: Decision) -> Regions:
        """Regions of the rows or frames that each process holds under context parallelism, alike in all of them.

        Raises:
            DenseFallback: If a region has tokens of several processes.
        """
        (sides, *references), ranks = stack.layout.grids, stack.ranks
        if not references and sides[0] % ranks == 0:
            part = merging.regions(((sides[0] // ranks, *sides[1:]),), device=str(stack.device))
            if regions.groups == tuple(group._replace(number=ranks * group.number) for group in part.groups):
                return part
        raise DenseFallback(f"regions to merge within cross the borders between the tokens of {ranks} devices")

    # --- what keeps a method from working: each raises a DenseFallback ---

    def _at_work(self, method: M, now: ForwardPass, inputs: dict[str, Any], stack: Decision) -> M:
        """The method with the options that it has in this step, after checks for any method."""
        if self.clock.caller.paused:
            raise DenseFallback("paused")
        if not method.always:
            method = method.at_progress(self.step(now).progress)
        method.check_tokens(stack.layout.only_images().tokens)
        if self.card.padding_mask != "attention_mask" and any(
            given.get("attention_mask") is not None for given in (inputs, *attention_kwargs(now))
        ):
            raise DenseFallback("an attention mask was passed")
        if stack.context is not None:
            if stack.layout.references or stack.layout.keys:
                raise DenseFallback("text or references with keys and no queries are whole on one device only")
            check_context(stack.context, stack.layout.streams(), stack.ranks)
        return method

    def _what_keeps_tokens(self) -> str:
        """What in the model keeps tokens from merging; empty if nothing does."""
        # also without gradients: a backward pass may follow
        if any(vars(module).get("gradient_checkpointing") for module in self._modules):  # thousands
            return "gradient checkpointing runs blocks again when their plan may be another one"
        if any(keeps_state(module) for block in self._merged for module in block.inside):
            return (
                "a cache inside of merged blocks keeps tokens from step to step, whose number must not change: "
                "use a cache of whole blocks, or granularity='module' for one of attention modules"
            )
        return ""

    def _check_merging(self, now: ForwardPass, layers: list[Layer], stack: Decision) -> None:
        """Checks for token merging in these layers."""
        self.card.check_merging(self.merging, now.inputs)
        if stack.layout.references:
            raise DenseFallback("tokens do not merge while keys of references are cached")
        if stack.ranks > 1:
            if stack.layout.packed:
                raise DenseFallback("each device holds a part of text and video as one sequence")
            if stack.attention:
                raise DenseFallback("each device holds rows of the image, not runs of tokens along the sparse order")
            if splits_tokens(layers[0].block):
                raise DenseFallback("context parallelism splits the tokens within the first block: use skip=1 or more")
        if now.unmergeable is None:
            now.unmergeable = self._what_keeps_tokens()
        if now.unmergeable:
            raise DenseFallback(now.unmergeable)
        if any(given.get("ip_adapter_masks") is not None for given in attention_kwargs(now)):
            raise DenseFallback("ip_adapter_masks are laid over a raster of all tokens")
        for layer in layers:
            if not layer.takes_merged_tokens(self.card):
                raise DenseFallback(layer.replaced)


def attention_kwargs(now: ForwardPass) -> list[dict[str, Any]]:
    """Arguments of the model that it hands to its attention modules."""
    return [given for name, given in now.inputs.items() if name.endswith("attention_kwargs") and given]


def check_context(context: Any, streams: list[int], ranks: int) -> None:
    """Checks that context parallelism splits the sequence by Ulysses and evenly.

    Raises:
        DenseFallback: If it does not.
    """
    if (context.ring_degree or 1) > 1:
        raise DenseFallback("ring attention splits keys over devices: use ulysses_degree alone")
    if any(tokens % ranks for tokens in streams) and not context.ulysses_anything:
        raise DenseFallback(
            f"{streams} text and image tokens do not divide evenly over {ranks} devices: "
            "use ContextParallelConfig(ulysses_anything=True)"
        )


def splits_tokens(block: nn.Module) -> bool:
    """Whether context parallelism splits the tokens when the block has been given them, after hooks saw them whole."""
    hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", {})
    return any("hidden_states" in (getattr(hook, "metadata", None) or ()) for hook in hooks.values())


# --- orders and patterns of a whole attention sequence ---


def alike(layouts: TokenLayout | list[TokenLayout]) -> list[TokenLayout]:
    """The layouts of all samples; one if they are alike."""
    layouts = [layouts] if isinstance(layouts, TokenLayout) else layouts
    return layouts if len(set(layouts)) > 1 else layouts[:1]


@cached_by_tensor
def sequence_order(image_order: Tensor, layout: TokenLayout, ranks: int = 1) -> tuple[Tensor, Tensor | None]:
    """Order and inverse of an attention sequence: references, text, then the image tokens in the order of a plan.

    The inverse has the length of the whole sequence. It is None if the sequence has this order already.

    Args:
        image_order: Raster index of the image token at each place.
        layout: The sequence.
        ranks: Number of processes whose parts of the sequence Ulysses concatenates.
    """
    return _order_of(layout, image_order.cpu(), image_order.device, ranks)


@lru_cache(maxsize=64)
@persistent
def merged_order(layout: TokenLayout, device: torch.device, ranks: int) -> tuple[Tensor, Tensor | None]:
    """`sequence_order` of a sequence whose image tokens are merged, which leaves them in the order of the plan."""
    return _order_of(layout, slice(None), device, ranks)


def _order_of(layout: TokenLayout, image_order: Any, device: torch.device, ranks: int) -> tuple[Tensor, Tensor | None]:
    # every process holds a part of the text and a part of the image: [text 0, image 0, text 1, image 1, ...]
    streams = [stream.tensor_split(ranks) for stream in torch.arange(layout.tokens).split(layout.streams())]
    place = inverse_order(torch.cat([part for parts in zip(*streams, strict=True) for part in parts]))
    first = layout.positions("reference"), layout.positions("text")
    order = place[torch.cat([*first, layout.positions("image")[image_order]])]
    if torch.equal(order, torch.arange(layout.tokens)):
        return order.to(device), None
    return order.to(device), inverse_order(torch.cat([order, place[layout.positions("padding")]])).to(device)


@lru_cache(maxsize=16)
def attend_to_all(tokens: int) -> BlockTable:
    """The table in which every token attends to every other."""
    starts = block_starts(tokens)
    return block_table([range(len(starts) - 1)] * (len(starts) - 1), starts)


_WITH_FIRST_KEYS: WeakTensorCache[BlockTable] = WeakTensorCache()


def with_first_keys(pattern: Pattern, tokens: int) -> Pattern:
    """The pattern with the keys of so many tokens without queries in front, which all queries read."""
    if isinstance(pattern, LogLinear):
        return pattern
    return _WITH_FIRST_KEYS.get([*pattern], tokens, lambda: pattern.with_first_keys(tokens))


@lru_cache(maxsize=64)
@persistent
def keys_alone(layout: TokenLayout, device: torch.device) -> KeysAlone:
    """Where the tokens with keys alone are among the keys of a call."""
    tokens = sum(segment.tokens for segment in layout.keys)
    first = layout.tokens if layout.keys_last else 0
    positions = first + TokenLayout(layout.keys).positions("text")
    return KeysAlone(positions.to(device), tokens, 0 if layout.keys_last else tokens)
