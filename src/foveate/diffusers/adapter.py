# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""One model with methods at work in it, whatever its family: what differs between families is in its card.

Before each forward pass a hook has the `Planner` ask the methods for their plans, and attaches a `LayerPlan` to the
processor of each attention layer; `backend.foveate_attention` does the rest. Outside of attention all tokens stay in
raster order.
"""

import copy
from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import nn

from foveate.diffusers.arguments import ArgumentsToBackend, Rotations, arguments_by_name
from foveate.diffusers.backend import LayerPlan, RerunWithPlans, dispatches, local_tokens, plan_of
from foveate.diffusers.card import Card, Stack
from foveate.diffusers.clock import Clock
from foveate.diffusers.merging import MergedBlock, MergeGroup
from foveate.diffusers.planning import Decision, ForwardPass, Layer, Planner
from foveate.diffusers.summary import LayerReport, report
from foveate.methods import Method
from foveate.methods.base import sparse_and_merging

__all__ = ["ModelAdapter", "outside_compiled_code"]

outside_compiled_code = torch.compiler.disable(
    reason="foveate plans a forward pass outside of compiled code; compile the blocks if a graph must be whole: "
    "model.compile_repeated_blocks(fullgraph=True)"
)


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
        layers: The self-attention layers, in running order.
        now: The current forward pass, or the last one.
        shown: Decisions of the last forward pass with a method at work, or of the last if there was none.
        outcomes: Number of forward passes by the reason why they were dense; "" counts those with a method at work.
    """

    def __init__(
        self, model: nn.Module, card: Card, methods: tuple[Method, ...], pipeline: Any, grids: tuple[Any, ...] = ()
    ) -> None:
        self.sparse, self.merging = sparse_and_merging(methods)
        if pipeline is None and not all(method.always for method in methods):
            raise ValueError(
                "start_percent and end_percent need a scheduler to tell the step: apply to the pipeline, not the model"
            )
        card.check(model, methods)
        self.model, self.card, self.clock = model, card, Clock(pipeline)
        self.layers: list[Layer] = []
        self.groups: list[MergeGroup] = []
        self.blocks: list[MergedBlock] = []
        self.outcomes = Counter[str]()
        self._replaced: list[tuple[nn.Module, Any, Any]] = []  # attention modules, original and new processor
        self._hooks: list[Any] = []
        self._rotations = Rotations(card)
        self.now = ForwardPass({})
        try:
            self._build(list(card.stacks(model)))
        except BaseException:
            self.remove()
            raise
        by_holder: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers:
            by_holder.setdefault(layer.holder, []).append(layer)
        self.planner = Planner(model, card, self.sparse, self.merging, self.clock, by_holder, grids)
        self.now.decisions = self.shown = dict.fromkeys(by_holder, Decision())
        self._hooks += [
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            *(
                holder.register_forward_pre_hook(self.before_stack, with_kwargs=True)
                for holder in by_holder
                if not self.planned_with_model(holder)
            ),
            model.register_forward_hook(self.after_model),
        ]

    @staticmethod
    def of(model: nn.Module) -> "ModelAdapter | None":
        """The adapter at work in a model; a deep copy of a model carries one of its own."""
        hooks = getattr(model, "_orig_mod", model)._forward_pre_hooks  # without the wrapper of torch.compile
        owners = (hook.__self__ for hook in hooks.values() if isinstance(hook, MethodType))
        return next((owner for owner in owners if isinstance(owner, ModelAdapter)), None)

    @property
    def hooks_inside(self) -> bool:
        """Whether submodules carry hooks, not only the root."""
        return bool(self.blocks) or any(not self.planned_with_model(layer.holder) for layer in self.layers)

    def planned_with_model(self, holder: nn.Module) -> bool:
        """Whether the hook before the model plans a stack: a list of blocks has no forward pass."""
        return holder is self.model or isinstance(holder, nn.ModuleList)

    def remove(self) -> None:
        """Restore the model exactly. Doing it twice is fine."""
        for handle in self._hooks:
            handle.remove()
        for block in self.blocks:
            block.remove()
        for holder in {layer.holder for layer in self.layers}:
            RerunWithPlans.remove(holder)
        self.now.detach()
        for attn, original, replacement in self._replaced:
            if attn.processor is replacement:  # a processor that was set after apply stays
                attn.processor = original
        self._replaced = []

    # --- construction ---

    def _build(self, stacks: list[Stack]) -> None:
        """Find the layers, make their processors ours, and hook the blocks."""
        total = sum(len(stack.blocks) for stack in stacks)
        for method in filter(None, (self.sparse, self.merging)):
            if beyond := sorted(method.dense_layer_set() - set(range(total))):
                raise ValueError(f"dense_layers names layer {beyond[0]}, but the model has layers 0 to {total - 1}")
        idle = MergeGroup(self.merging, self.card) if self.merging else None
        groups: dict[Any, MergeGroup] = {}
        first = 0
        for stack in stacks:
            merges = [False] * len(stack.blocks)
            if self.merging:
                merges = self.merging.merging_blocks(len(stack.blocks), stack.skip, first)
            for i, block in enumerate(stack.blocks):
                attns = self.card.attentions(block)
                key = block if self.merging and self.merging.per_block else stack.group
                makes_plan = merges[i] and key not in groups
                if makes_plan:
                    groups[key] = MergeGroup(self.merging.at((first + i) / total), self.card)
                group = groups[key] if merges[i] else None
                self._add_layers(stack, i, first + i, attns, group)
                if self.merging:  # a graph compiled for a block without hooks would be taken for blocks with hooks
                    merged = MergedBlock(group or idle, block, [*attns.values()], stack.joined)
                    self.blocks.append(merged)
                    if makes_plan:
                        merged.plan_here()
                if self.sparse and (self.card.rope or self.card.cache):
                    moved = ArgumentsToBackend(block, [*attns.values()], self._rotations)
                    self._hooks.append(block.register_forward_pre_hook(moved.take, with_kwargs=True))
                if self.merging:
                    merged.install(last=not any(merges[i + 1 : i + 2]) or self.merging.per_block)
            first += len(stack.blocks)
        self.groups = [*groups.values()]
        if not self.layers:
            raise ValueError(f"this {type(self.model).__name__} has no self-attention that foveate knows")
        if self.merging and self.merging.keep < 1 and not self.groups:
            raise ValueError(
                f"no block is left to merge with skip={self.merging.skip} and these dense_layers: skip fewer"
            )

    def _add_layers(self, stack: Stack, i: int, number: int, attns: dict[str, Any], group: MergeGroup | None) -> None:
        """The attention layers of a block that merges with this group."""
        block = stack.blocks[i]
        if group and getattr(block, "_chunk_size", None):
            raise ValueError("feed-forward chunking cuts merged tokens: call disable_forward_chunking() first")
        sparse = self.sparse is not None and number not in self.sparse.dense_layer_set()
        merges = group is not None and (group.method.merge_attn or self.card.is_single_stream(block))
        for name, attn in attns.items():
            layer = Layer(
                f"{stack.name}.{i}.{name}", attn, block, stack.holder, number, self.card.attention[name], sparse,
                group, merges,
            )  # fmt: skip
            if sparse or (group and self.card.wrapper is None):
                self.take_processor(layer)
            self.layers.append(layer)

    def take_processor(self, layer: Layer) -> None:
        """Make the processor one that attends through diffusers' dispatcher and belongs to this layer alone.

        Raises:
            ValueError: If it attends in another way and the card has no wrapper for it.
        """
        processor = layer.attn.processor
        if self.card.wrapper is not None and type(processor) in self.card.wrapper.known:
            processor = self.card.wrapper(processor)
        elif not dispatches(processor):
            raise ValueError(
                f"{layer.name} has a {type(processor).__name__}, which foveate does not know: restore the model's own "
                f"processors first, or leave it dense with dense_layers={str(layer.number)!r}"
            )
        if any(other.attn.processor is processor for other in self.layers):
            processor = copy.copy(processor)
        if processor is not layer.attn.processor:
            self._replaced.append((layer.attn, layer.attn.processor, processor))
            layer.attn.processor = processor

    # --- one forward pass ---

    @outside_compiled_code
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hook before the model: a forward pass begins."""
        inputs = arguments_by_name(model, args, kwargs)
        if not torch.is_grad_enabled() and self.layers[0].block._compiled_call_impl:
            torch.compiler.cudagraph_mark_step_begin()  # blocks may read what CUDA graphs of other blocks wrote
        self.now.detach()
        self.now = ForwardPass(dict.fromkeys(self.now.decisions, Decision(why="it did not run")), inputs)
        for block in self.blocks:
            block.follow()
        for group in self.groups:
            group.reset()
        self._rotations.clear()
        for holder in filter(self.planned_with_model, self.now.decisions):
            self._plan_stack(holder, inputs)
        return (), inputs

    @outside_compiled_code
    def before_stack(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a part of a model that has a token grid of its own."""
        self._plan_stack(holder, arguments_by_name(holder, args, kwargs))

    @outside_compiled_code
    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook after the model: count what happened."""
        self.now.inputs, self.now.step, decisions = {}, None, self.now.decisions
        for group in self.groups:
            if group.end():
                for holder in {layer.holder for layer in self.layers if layer.group is group}:
                    why, stack = "the block that its plan is made from did not run", decisions[holder]
                    decisions[holder] = stack._replace(regions=None, why=stack.why if stack.attention else why)
        at_work = any(stack.attention or stack.regions for stack in decisions.values())
        self.outcomes["" if at_work else next(iter(decisions.values())).why] += 1
        if at_work or not self.outcomes[""] or any(stack.replaced for stack in decisions.values()):
            self.shown = decisions

    def _plan_stack(self, holder: nn.Module, inputs: dict[str, Any]) -> None:
        """Decide what the layers of a stack do, and attach their plans."""
        layers = self.planner.layers[holder]
        stack = self.now.decisions[holder] = self.planner.plan(self.now, holder, inputs)
        if torch.is_grad_enabled() and getattr(holder, "gradient_checkpointing", False):
            RerunWithPlans.install(holder)
        period = stack.period
        known: dict[tuple[bool, bool, bool, int], LayerPlan | None] = {}
        for layer in layers:
            if not dispatches(layer.attn.processor):
                continue
            kind = layer.joint, layer.sparse, layer.merges, layer.number % period
            if kind not in known:
                known[kind] = stack.layer_plan(layer, self.card)
            if (plan := copy.copy(known[kind])) is not None:
                self.now.attach(layer, plan)
        if stack.regions:
            self._begin_merging(layers, stack)

    def _begin_merging(self, layers: list[Layer], stack: Decision) -> None:
        """Tell the groups of these layers how to merge."""
        tokens = stack.layout.tokens - stack.layout.only_images().tokens
        text = stack.regions.order.new_empty(local_tokens((tokens,), stack.context))
        skip_unmerge = not self.card.residuals_between_blocks(self.now.inputs)
        image_first = stack.layout.segments[0].kind == "image"
        for group in dict.fromkeys(layer.group for layer in layers if layer.group):
            if group.now is None:  # a section of a UNet has several stacks
                group.begin(stack.regions, self.now.step, text, skip_unmerge=skip_unmerge, image_first=image_first)
            plans = (plan_of(layer.attn.processor) for layer in layers if layer.group is group and layer.merges)
            group.now.layer_plans += filter(None, plans)

    # --- reports ---

    @property
    def plan(self) -> Any | None:
        """What the methods decided for the first stack with one at work in the last forward pass; None if dense."""
        for holder, stack in self.now.decisions.items():
            if stack.attention:
                return next(iter(stack.attention.values()))
            if stack.regions:
                group = [layer.group for layer in self.layers if layer.holder is holder and layer.group][-1]
                return group.with_picks(stack.regions)
        return None

    def report(self) -> list[LayerReport]:
        """What each layer did, in running order: see `Handle.summary`."""
        return [report(layer, self.shown[layer.holder], self.card, self.merging) for layer in self.layers]
