# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""What the methods do in a forward pass, decided stack by stack before it begins, or why they stay dense."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from foveate.diffusers.backend import context_of, dispatches
from foveate.diffusers.card import Card
from foveate.diffusers.clock import Clock, Step
from foveate.diffusers.layers import Layer, replaced_later, takes_merged_tokens
from foveate.diffusers.plans import StackPlan, alike
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, DenseFallback, SparseAttention, TokenMerging
from foveate.ops.merging import Regions

__all__ = ["Planner"]

log = logging.getLogger("foveate")

T = TypeVar("T")

OUTSIDE = "this step lies outside start_percent to end_percent"  # as the user wants it: no warning


class Planner:
    """Asks the methods for their plans.

    Args:
        model: The denoiser.
        card: Its card.
        sparse: The method of sparse attention, if any.
        merging: The method of token merging, if any.
        clock: Tells the step.
        layers: The self-attention layers of each stack, by `Stack.holder`.
        grids: Grids of image tokens that the methods were tuned for; a warning tells of others. Empty: all.

    Attributes:
        inputs: Arguments of the model in the current forward pass, by name.
        paused: While it is true, every forward pass is dense: see `Handle.paused`.
        step: Step of the denoising run, if tokens merge in this forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        card: Card,
        sparse: SparseAttention | None,
        merging: TokenMerging | None,
        clock: Clock,
        layers: Mapping[nn.Module, list[Layer]],
        grids: tuple[Any, ...],
    ) -> None:
        self.card, self.sparse, self.merging, self.clock, self.layers = card, sparse, merging, clock, layers
        self.paused, self.grids = False, grids
        self._one_grid = len(layers) == 1 or model in layers
        self._modules = list(model.modules())  # walking the tree takes milliseconds
        self._logged: set[str] = set()
        self.begin({})

    def begin(self, inputs: dict[str, Any]) -> None:
        """A forward pass begins.

        Args:
            inputs: Arguments of the model by name.
        """
        self.inputs = inputs
        self.step: Step | None = None
        self._unmerged: str | None = None  # what in the model keeps tokens from merging; None: not known yet

    def plan(self, holder: nn.Module, inputs: dict[str, Any]) -> StackPlan:
        """What the layers of a stack do in this forward pass.

        Args:
            holder: See `Stack.holder`.
            inputs: Its forward arguments by name.
        """
        layers, x = self.layers[holder], self.card.samples(inputs)
        layouts, why = self._ask(self.sparse or self.merging, lambda: alike(self.card.layout(holder, inputs)))
        stack = StackPlan(
            tuple(layouts or ()),
            why=why,
            context=next(filter(None, (context_of(layer.attn.processor) for layer in layers)), None),
            batch=x.shape[0],
            device=x.device,
            dtype=x.dtype,
            replaced={
                layer.name: replaced_later(layer)
                for layer in layers
                if layer.sparse and not dispatches(layer.attn.processor)
            },
        )
        if layouts is None:
            return stack
        if self.grids and (given := stack.layout.grids) not in self.grids:
            log.warning("the preset was measured at %s image tokens, not at %s", self.grids[0], given)
            self.grids = ()  # tell it once
        attention, why_not_sparse = self._ask(self.sparse, lambda: self._attention(layers, inputs, stack))
        stack = stack._replace(attention=attention)
        regions, why_not_merged = self._ask(self.merging, lambda: self._regions(layers, inputs, stack))
        why = "" if attention or regions else why_not_sparse or why_not_merged
        return stack._replace(regions=regions, why=why)

    def _ask(self, method: Method | None, decide: Callable[[], T]) -> tuple[T | None, str]:
        """What a method decides for this forward pass, or None and why it stays dense."""
        if method is None:
            return None, ""
        try:
            return decide(), ""
        except DenseFallback as reason:
            why = str(reason)
            if not self.paused and why != OUTSIDE and why not in self._logged:
                log.warning("%s stays dense: %s", type(method).__name__, why)
                self._logged.add(why)
            return None, why

    def _attention(self, layers: list[Layer], inputs: dict[str, Any], stack: StackPlan) -> dict[int, AttentionPlan]:
        """Plan of sparse attention for each number of text tokens."""
        layers = [layer for layer in layers if layer.sparse]
        self._check(self.sparse, inputs, stack)
        if not layers:
            raise DenseFallback("every layer is named in dense_layers")
        if not any(dispatches(layer.attn.processor) for layer in layers):
            raise DenseFallback(replaced_later(layers[0]))
        self.sparse.check_head_dim(layers[0].head_dim)
        texts = {sample.text if layer.joint else 0 for layer in layers for sample in stack.layouts}
        plan = partial(self.sparse.plan, stack.layout.grids, device=str(stack.device))
        try:
            return {text: plan(text) for text in sorted(texts, reverse=True)}
        except ValueError as reason:
            if self._one_grid or isinstance(reason, DenseFallback):
                raise
            raise DenseFallback(str(reason)) from None  # in a UNet the setting may fit other parts

    def _regions(self, layers: list[Layer], inputs: dict[str, Any], stack: StackPlan) -> Regions:
        """The regions within which tokens merge."""
        if self.merging.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        self._check(self.merging, inputs, stack)
        self._check_merging([layer for layer in layers if layer.group], stack)
        if self.step is None:
            run, number = self.clock.step(torch.as_tensor(self.card.timestep(self.inputs)))
            x = self.card.samples(self.inputs)
            self.step = Step(number, (run, x.shape[0], x.dtype, x.device))
        if self.step.number % self.merging.merge_every:
            raise DenseFallback(f"this is no step that merges: merge_every={self.merging.merge_every}")
        grids = stack.layout.grids
        if stack.attention:
            return self.merging.regions_along(next(iter(stack.attention.values())), grids[0])
        regions = self.merging.regions(grids, device=str(stack.device))
        return regions if stack.ranks == 1 else self._regions_of_rank(regions, stack)

    def _regions_of_rank(self, regions: Regions, stack: StackPlan) -> Regions:
        """Regions of the rows or frames that each process holds under context parallelism, alike in all of them.

        Raises:
            DenseFallback: If a region has tokens of several processes.
        """
        (sides, *references), ranks = stack.layout.grids, stack.ranks
        if not references and sides[0] % ranks == 0:
            part = self.merging.regions(((sides[0] // ranks, *sides[1:]),), device=str(stack.device))
            if regions.groups == tuple(group._replace(number=ranks * group.number) for group in part.groups):
                return part
        raise DenseFallback(f"regions to merge within cross the borders between the tokens of {ranks} devices")

    # --- what keeps a method from working: each raises a DenseFallback ---

    def _check(self, method: Method, inputs: dict[str, Any], stack: StackPlan) -> None:
        """Checks for any method."""
        if self.paused:
            raise DenseFallback("paused")
        if not method.always:
            if (progress := self.clock()) is None:
                raise DenseFallback("no scheduler tells the step, and start_percent to end_percent is part of the run")
            if not method.covers(progress):
                raise DenseFallback(OUTSIDE)
        method.check_tokens(stack.layout.only_images().tokens)
        if self.card.padding_mask != "attention_mask" and any(
            given.get("attention_mask") is not None for given in (inputs, *self._attention_kwargs())
        ):
            raise DenseFallback("an attention mask was passed")
        if stack.context is not None:
            if stack.layout.references:
                raise DenseFallback("diffusers caches keys of references on one device only")
            self._check_context(stack.context, stack.layout.streams(), stack.ranks)

    def _check_context(self, context: Any, streams: list[int], ranks: int) -> None:
        """Checks that context parallelism splits the sequence by Ulysses and evenly."""
        if (context.ring_degree or 1) > 1:
            raise DenseFallback("ring attention splits keys over devices: use ulysses_degree alone")
        if any(tokens % ranks for tokens in streams) and not context.ulysses_anything:
            raise DenseFallback(
                f"{streams} text and image tokens do not divide evenly over {ranks} devices: "
                "use ContextParallelConfig(ulysses_anything=True)"
            )

    def _check_merging(self, layers: list[Layer], stack: StackPlan) -> None:
        """Checks for token merging in these layers."""
        self.card.check_merging(self.merging, self.inputs)
        if stack.layout.references:
            raise DenseFallback("tokens do not merge while keys of references are cached")
        if stack.ranks > 1:
            if stack.attention:
                raise DenseFallback("each device holds rows of the image, not runs of tokens along the sparse order")
            if splits_tokens(layers[0].block):
                raise DenseFallback("context parallelism splits the tokens within the first block: use skip=1 or more")
        if self._unmerged is None:
            self._unmerged = why_not_merged(self._modules)
        if self._unmerged:
            raise DenseFallback(self._unmerged)
        if any(given.get("ip_adapter_masks") is not None for given in self._attention_kwargs()):
            raise DenseFallback("ip_adapter_masks are laid over a raster of all tokens")
        for layer in layers:
            if not takes_merged_tokens(layer, self.card):
                raise DenseFallback(replaced_later(layer))

    def _attention_kwargs(self) -> list[dict[str, Any]]:
        """Arguments of the model that it hands to its attention modules."""
        return [given for name, given in self.inputs.items() if name.endswith("attention_kwargs") and given]


def splits_tokens(block: nn.Module) -> bool:
    """Whether context parallelism splits the tokens when the block has been given them, after hooks saw them whole."""
    hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", {})
    return any("hidden_states" in (getattr(hook, "metadata", None) or ()) for hook in hooks.values())


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
