# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""One model with methods at work in it, whatever its family: what differs between families is in its card.

Before each forward pass a hook has the `Planner` ask the methods for their plans, and attaches a `LayerPlan` to the
processor of each attention layer; `backend.foveate_attention` does the rest. Outside of attention all tokens stay in
raster order.
"""

import copy
import threading
import traceback
from collections import Counter
from statistics import mean
from types import MethodType
from typing import Any

import torch
from torch import nn

from foveate.diffusers.arguments import ArgumentsToBackend, Rotations, arguments_by_name
from foveate.diffusers.backend import LayerPlan, RerunWithPlans, dispatches, local_tokens, plan_of
from foveate.diffusers.card import Card, Stack
from foveate.diffusers.clock import Clock
from foveate.diffusers.merging import MergedBlock, MergeGroup, MergePass
from foveate.diffusers.planning import Decision, ForwardPass, Layer, Planner
from foveate.diffusers.preset import Preset
from foveate.diffusers.step_cache import InstalledCache
from foveate.diffusers.summary import LayerReport, report
from foveate.methods import Method
from foveate.methods.base import sparse_and_merging

__all__ = ["ModelAdapter", "outside_compiled_code"]

INTERCEPTED = "something intercepts torch's scaled_dot_product_attention, as perturbed attention guidance does"

outside_compiled_code = torch.compiler.disable(
    reason="foveate plans a forward pass outside of compiled code; compile the blocks if a graph must be whole: "
    "model.compile_repeated_blocks(fullgraph=True)"
)


class PassLock:
    """A lock that a thread may take several times. A copy of it is another lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __reduce__(self) -> tuple[type["PassLock"], tuple[()]]:
        return PassLock, ()


def is_running(model: nn.Module) -> bool:
    """Whether this thread is in a forward pass of the model, besides the one whose hooks run now."""
    calls = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code is nn.Module._call_impl.__code__)
    return sum(frame.f_locals["self"] is model for frame in calls) > 1


class ModelAdapter:
    """One model with methods in it, from construction to `remove`.

    One forward pass runs at a time: passes of other threads wait. A pass that begins inside of another in the same
    thread gets plans of its own, and the outer ones come back after it.

    Hooks on the model are bound methods of the adapter: that is how `of` finds it, also in a deep copy.

    Args:
        model: The denoiser.
        card: The card of its class.
        methods: One method of sparse attention, one of token merging, or both.
        pipeline: The pipeline around the model, or None.
        preset: The preset that they come from, or None.

    Raises:
        ValueError: If the methods do not fit each other or the model. The model is left as it was.

    Attributes:
        layers: The self-attention layers, in running order.
        now: The current forward pass, or the last one.
        shown: Decisions of the last forward pass with a method at work, or of the last if there was none.
        outcomes: Number of computed forward passes by the reason why they were dense; "" counts those with a method
            at work.
        settings: What was at work in computed forward passes, by title: their number, and the decisions of the last.
        skipped: Number of forward passes that the step cache skipped.
    """

    def __init__(
        self, model: nn.Module, card: Card, methods: tuple[Method, ...], pipeline: Any, preset: Preset | None = None
    ) -> None:
        self.sparse, self.merging = sparse_and_merging(methods)
        cache = preset.cache if preset else None
        late = [*(not method.always for method in methods), cache is not None and cache.start_percent > 0]
        if pipeline is None and any(late):
            raise ValueError(
                "start_percent, end_percent and schedules need a scheduler to tell the step: apply to the pipeline, "
                "not the model"
            )
        card.check(model, methods)
        self.model, self.card, self.clock = model, card, Clock(pipeline)
        self.layers: list[Layer] = []
        self.groups: list[MergeGroup] = []
        self.blocks: list[MergedBlock] = []
        self.outcomes, self.skipped = Counter[str](), 0
        self.settings: dict[str, tuple[int, dict[nn.Module, Decision]]] = {}
        self._replaced: list[tuple[nn.Module, Any, Any]] = []  # attention modules, original and new processor
        self._hooks: list[Any] = []
        self._rotations = Rotations(card)
        self._lock = PassLock()
        self._cache: InstalledCache | None = None
        self.now = ForwardPass({})
        try:
            self._build(list(card.stacks(model)))
            if cache is not None:
                self._cache = InstalledCache(model, cache, self._cache_state)
        except BaseException:
            self.remove()
            raise
        by_holder: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers:
            by_holder.setdefault(layer.holder, []).append(layer)
        grids = preset.grids if preset else ()
        self.planner = Planner(model, card, self.sparse, self.merging, self.clock, by_holder, self.blocks, grids)
        self.now.decisions = self.shown = dict.fromkeys(by_holder, Decision())
        self._hooks += [
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            *(
                holder.register_forward_pre_hook(self.before_stack, with_kwargs=True)
                for holder in by_holder
                if not self.planned_with_model(holder)
            ),
            model.register_forward_hook(self.after_model, always_call=True),
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
        return bool(self.blocks or self._cache) or any(
            not self.planned_with_model(layer.holder) for layer in self.layers
        )

    def planned_with_model(self, holder: nn.Module) -> bool:
        """Whether the hook before the model plans a stack: a list of blocks has no forward pass."""
        return holder is self.model or isinstance(holder, nn.ModuleList)

    def remove(self) -> None:
        """Restore the model exactly, after the forward passes of other threads. Doing it twice is fine."""
        self._lock.acquire()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for block in self.blocks:
            block.remove()
        if self._cache:
            self._cache.remove()
        self._cache = None
        for holder in {layer.holder for layer in self.layers}:
            RerunWithPlans.remove(holder)
        self.now.detach()
        for group in self.groups:
            group.now = None
        for attn, original, replacement in self._replaced:
            if attn.processor is replacement:  # a processor that was set after apply stays
                attn.processor = original
        self._replaced = []
        if self.now.running:  # this thread is in a pass, whose hooks are gone
            self._end_passes()
        self._lock.release()

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
                moved = None
                if self.sparse and (self.card.rope or self.card.cache):
                    moved = ArgumentsToBackend(block, [*attns.values()], self._rotations)
                    if not makes_plan:
                        self._hooks.append(block.register_forward_pre_hook(moved, with_kwargs=True))
                if self.merging:
                    last = not any(merges[i + 1 : i + 2]) or self.merging.per_block
                    merged.install(plans=makes_plan, last=last, arguments=moved if makes_plan else None)
            first += len(stack.blocks)
        self.groups = [*groups.values()]
        if not self.layers:
            raise ValueError(f"this {type(self.model).__name__} has no self-attention that foveate knows")
        if self.merging and min(self.merging.settings, default=1) < 1 and not self.groups:
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
            if sparse or (group and (self.card.rope or self.card.wrapper is None)):
                self.take_processor(layer)
            self.layers.append(layer)

    def take_processor(self, layer: Layer) -> None:
        """Make the processor one that attends through diffusers' dispatcher and belongs to this layer alone.

        Raises:
            ValueError: If it attends in another way and the card has no wrapper for it.
        """
        processor = layer.attn.processor
        if self.card.wrapper is not None and self.card.wrapper.wraps(processor):
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
        """Hook before the model: a forward pass begins, as soon as no other thread is in one."""
        inputs = arguments_by_name(model, args, kwargs)
        self._lock.acquire()
        if not self._hooks:  # removed while this pass waited for another
            self._lock.release()
            return (), inputs
        if self.now.running and not is_running(model):  # KeyboardInterrupt ended it without `after_model`
            self._end_passes()
        if not torch.is_grad_enabled() and self.layers[0].block._compiled_call_impl:
            torch.compiler.cudagraph_mark_step_begin()  # blocks may read what CUDA graphs of other blocks wrote
        self.now.detach()
        outer = self.now if self.now.running else None
        self.now = ForwardPass(
            dict.fromkeys(self.now.decisions, Decision(why="it did not run")),
            inputs,
            outer=outer,
            reuse=outer is None and not torch.is_grad_enabled(),
            running=True,
        )
        for block in self.blocks:
            block.follow()
        self._set_merging()
        self._rotations.clear(reuse=self.now.reuse)
        if self._cache:  # in skipped steps diffusers adds the residuals of a ControlNet twice
            whole = self.clock.caller.paused or self.card.residuals_between_blocks(inputs)
            self.now.cached = self._cache.state(None if whole else self.planner.step(self.now))
        for holder in filter(self.planned_with_model, self.now.decisions):
            self._plan_stack(holder, inputs)
        return (), inputs

    def _end_passes(self) -> None:
        """End the passes of this thread whose `after_model` will not run."""
        while self.now.outer is not None:
            self.now = self.now.outer
            self._lock.release()
        self.now.running = False
        self._lock.release()

    @outside_compiled_code
    def before_stack(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a part of a model that has a token grid of its own."""
        self._plan_stack(holder, arguments_by_name(holder, args, kwargs))

    @outside_compiled_code
    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook after the model, also after an error: count what happened, and let other passes begin."""
        now = self.now
        if not now.running or now.thread != threading.get_ident():
            return  # a hook before `before_model` failed
        now.inputs, now.running, decisions = {}, False, now.decisions
        for group in now.merging:
            if group.merging is None:
                for holder in {layer.holder for layer in self.layers if layer.group is group}:
                    why, stack = "the block that its plan is made from did not run", decisions[holder]
                    decisions[holder] = stack._replace(regions=None, why=stack.why if stack.attention else why)
        for layer, _, plan in now.attached:
            if plan.intercepted:
                stack = decisions[layer.holder]
                decisions[layer.holder] = stack._replace(dense_layers={**stack.dense_layers, layer.name: INTERCEPTED})
        if now.cached is not None and not now.cached.should_compute:
            self.skipped += output is not None  # None: an error
        else:
            self._count(decisions, output)
        if now.outer is not None or not torch.is_grad_enabled():  # a backward pass may run blocks again
            now.detach()
        if now.outer is not None:
            self.now = now.outer
            self.now.attach_again()
            self._set_merging()
        self._lock.release()

    def _count(self, decisions: dict[nn.Module, Decision], output: Any) -> None:
        """Count a computed forward pass, and show its decisions if a method was at work."""
        at_work = next(filter(None, (stack.title for stack in decisions.values())), "")
        if output is not None:
            self.outcomes["" if at_work else next(iter(decisions.values())).why] += 1
        if output is not None and at_work:
            self.settings[at_work] = self.settings.get(at_work, (0, {}))[0] + 1, decisions
        if at_work or not self.outcomes[""] or any(stack.dense_layers for stack in decisions.values()):
            self.shown = decisions

    def _cache_state(self) -> Any:
        """State of the step cache in the current forward pass."""
        return self.now.cached

    def _set_merging(self) -> None:
        """Have the groups of blocks merge as the current pass does."""
        for group in self.groups:
            group.now = self.now.merging.get(group)

    def _plan_stack(self, holder: nn.Module, inputs: dict[str, Any]) -> None:
        """Decide what the layers of a stack do, and attach their plans."""
        layers = self.planner.layers[holder]
        for layer in layers if self.card.wrapper is not None else ():
            if layer.sparse and self.card.wrapper.wraps(layer.attn.processor):  # set since `apply`
                self.take_processor(layer)
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
        now, card = self.now, self.card
        tokens = stack.layout.tokens - stack.layout.only_images().tokens
        text = stack.regions.order.new_empty(local_tokens((tokens,), stack.context))
        between = card.residuals_between_blocks(now.inputs) or any(block.is_watched for block in self.blocks)
        between = between or "_is_cached" in vars(self.model)  # by cache-dit, which calls the blocks itself
        image_first = stack.layout.segments[0].kind == "image"
        for group in dict.fromkeys(layer.group for layer in layers if layer.group):
            if group not in now.merging:  # a section of a UNet has several stacks
                now.merging[group] = MergePass(stack.regions, text, skip_unmerge=not between, image_first=image_first)
                group.begin(now.merging[group], self.planner.step(now), reuse=now.reuse)
            plans = (plan_of(layer.attn.processor) for layer in layers if layer.group is group and layer.merges)
            now.merging[group].layer_plans += filter(None, plans)

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
        return self._report(self.shown)

    def _report(self, decisions: dict[nn.Module, Decision]) -> list[LayerReport]:
        return [report(layer, decisions[layer.holder], self.card, self.merging) for layer in self.layers]

    def skipped_pairs(self) -> dict[str, tuple[int, float]]:
        """What was at work, by title: number of forward passes, and mean fraction of pairs skipped in a layer."""
        return {
            title: (passes, mean(layer.true for layer in self._report(decisions)))
            for title, (passes, decisions) in self.settings.items()
        }
