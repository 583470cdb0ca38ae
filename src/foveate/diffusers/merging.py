# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Token merging by hooks on blocks: groups of blocks that share a plan, and what their hooks do.

A plan is made from the input of the first block of its group. Outside of merged modules all tokens stay in raster
order: merging lies below all hooks of diffusers, so that caches, offloading and skipped layers see whole tokens.
Plans that blocks share are made outside of compiled code, and whole blocks merge outside of it; what merges around
single modules is compiled with their block, and reads tensors only, never a number that changes between steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from foveate.diffusers.arguments import Argument, ArgumentsToBackend, InnermostForward, UncompiledForward
from foveate.diffusers.backend import LayerPlan, with_text
from foveate.diffusers.card import Card
from foveate.diffusers.clock import Step
from foveate.methods.base import TokenMerging
from foveate.ops.merging import AnyMerge, Regions
from foveate.utils.cache import FixedMemory, cached_by_tensor

__all__ = ["KeptPlan", "MergeGroup", "MergePass", "MergedBlock", "keeps_state"]


class MergePass:
    """How the tokens of a group of blocks merge in one forward pass.

    Args:
        regions: Regions within which tokens merge.
        text: As long as the text, padding included, where a tensor holds text and image.
        skip_unmerge: Leave tokens merged between the blocks of the group.
        image_first: Whether the image precedes the text where a tensor holds both.

    Attributes:
        merge: The plan; None until the first block of the group runs, and leaves blocks dense.
        order: Position of the image token at each place of the regions; None if they follow the raster.
        inverse: Place of each image token.
        layer_plans: Plans of the attention layers of the group.
        whole: Tokens before a run of merged blocks, and the same merged.
    """

    def __init__(self, regions: Regions, text: Tensor, *, skip_unmerge: bool, image_first: bool) -> None:
        self.regions, self.text, self.skip_unmerge, self.image_first = regions, text, skip_unmerge, image_first
        self.merge: AnyMerge | None = None
        raster = regions.order is regions.inverse
        self.order, self.inverse = (None, None) if raster else (regions.order, regions.inverse)
        # order and inverse of a sequence that begins with the text
        self._joint = tuple(None if x is None else after_text(x, len(text)) for x in (self.order, self.inverse))
        self.layer_plans: list[LayerPlan] = []
        self.whole: tuple[Tensor, Tensor] | None = None
        self._of_blocks: tuple[Tensor, Tensor] | None = None  # an argument, and its rows

    def rows(self, rows: Tensor, text: int) -> Tensor:
        """Rows of an argument for text and merged tokens: a merged token has that of its destination.

        Args:
            rows: Those of text and image, [tokens], [tokens, dim] or [batch, tokens, dim].
            text: Number of those of the text.

        Returns:
            The same; without `batch` if there is one sample.
        """
        words, image = self.split(
            rows if rows.ndim == 3 else rows[None] if rows.ndim == 2 else rows[None, :, None], text
        )
        image = self.merge.rope(image if self.order is None else image.index_select(1, self.order))
        merged = self._joined(words.expand(len(image), -1, -1), image)
        if rows.ndim == 1:
            return merged[0, :, 0]
        return merged[0] if len(merged) == 1 else merged

    def rows_of_blocks(self, rows: Tensor, text: int) -> Tensor:
        """`rows` of an argument that consecutive blocks share: made once."""
        if self._of_blocks is None or self._of_blocks[0] is not rows:
            self._of_blocks = rows, self.rows(rows, text)
        return self._of_blocks[1]

    def split(self, x: Tensor, text: int) -> tuple[Tensor, Tensor]:
        """Text and image of a tensor that holds both."""
        if self.image_first:
            image = x.shape[1] - text
            return x[:, image:], x[:, :image]
        return x[:, :text], x[:, text:]

    def _joined(self, text: Tensor, image: Tensor) -> Tensor:
        return torch.cat([image, text] if self.image_first else [text, image], 1)

    def merged(self, x: Tensor, text: int = 0) -> Tensor:
        """Tokens [batch, text + image, dim] with the image merged."""
        if text and self.image_first:
            words, image = self.split(x, text)
            return self._joined(words, self.merged(image))
        return self.merge.merge(x, text, self._joint[0] if text else self.order)

    def unmerged(self, y: Tensor, text: int = 0) -> Tensor:
        """Tokens [batch, text + merged, dim] with the image unmerged, in raster order."""
        if text and self.image_first:
            words, image = self.split(y, text)
            return self._joined(words, self.unmerged(image))
        x, inverse = self.merge.unmerge(y, text), self._joint[1] if text else self.inverse
        return x if inverse is None else x.index_select(1, inverse)

    def updated(self, x: Tensor, before: Tensor, after: Tensor, text: int) -> Tensor:
        """`x` plus the unmerged difference of its merged tokens before and after a run of blocks; text as after it."""
        (_, x), (_, before), (words, after) = (self.split(tokens, text) for tokens in (x, before, after))
        image = self.merge.update(x, before, after, self.order)
        return self._joined(words, image) if text else image


@cached_by_tensor
def after_text(order: Tensor, text: int) -> Tensor:
    """The order of text and image in which the text precedes the image and stays as it is."""
    return torch.cat([torch.arange(text).to(order.device), order + text])


@dataclass(eq=False)
class KeptPlan:
    """A plan of token merging that later steps of a run may use again.

    Attributes:
        plan: The plan; None if there is none yet.
        periods: Periods of its destinations and of its weights.
        key: Batch size, dtype, device and regions that it was made for.
        order: Order of these regions.
    """

    plan: AnyMerge | None = None
    periods: tuple[int, int] | None = None
    key: Any = None
    order: Tensor | None = None


class MergeGroup:
    """Blocks that share a plan of token merging.

    Args:
        method: How to merge.
        card: Card of the model.

    Attributes:
        now: Its merging in the current forward pass; None if it does not merge.
    """

    def __init__(self, method: TokenMerging, card: Card) -> None:
        self.method, self.card = method, card
        self.now: MergePass | None = None
        self._step: Step | None = None
        self._rope = FixedMemory()
        self._reuse = True

    @property
    def merging(self) -> MergePass | None:
        """`now` as soon as its plan is made."""
        return None if self.now is None or self.now.merge is None else self.now

    def begin(self, now: MergePass, step: Step, *, reuse: bool) -> None:
        """Merge in this forward pass.

        Args:
            now: How.
            step: Position in the denoising run.
            reuse: Whether the memory of an earlier rotary embedding may be used again.
        """
        self.now, self._step, self._reuse = now, step, reuse

    def with_picks(self, regions: Regions) -> Regions:
        """The regions with the destinations of the first sample, to draw."""
        if self.merging is None:
            return regions
        picked = regions.order.cpu()[self.now.merge.positions[0].cpu()]
        return regions._replace(picked=picked[picked < prod(regions.grid)])

    def plan(self, tokens: Tensor, rope: tuple[Tensor, Tensor] | None) -> None:
        """Make the plan from the image tokens of the first block unless an earlier one still holds.

        Args:
            tokens: Image tokens in raster order [batch, image, dim].
            rope: Rotary embedding (cos, sin) of text and image in raster order, each [tokens, head_dim] or [batch,
                tokens, head_dim].
        """
        now = self.now
        kept: KeptPlan = self._step.kept.setdefault(self, KeptPlan())
        key = len(tokens), tokens.dtype, tokens.device, now.regions.groups
        if key != kept.key or now.regions.order is not kept.order:
            kept.plan, kept.key, kept.order = None, key, now.regions.order
        periods = self.method.periods(self._step.number)
        if kept.plan is None or kept.periods != periods:
            chosen = None
            if kept.plan is not None and kept.periods is not None and kept.periods[0] == periods[0]:
                chosen = kept.plan.chosen  # new weights for the same destinations
            x = tokens.detach() if now.order is None else tokens.detach().index_select(1, now.order)
            exact = torch.autocast(x.device.type, enabled=False)  # similarities need more than bfloat16
            with torch.no_grad(), record_function("foveate::plan"), exact:
                kept.plan = self.method.plan(x, now.regions, chosen)
            kept.periods = periods
        now.merge = kept.plan
        rows = None if rope is None else tuple(now.rows(x, len(now.text)) for x in rope)
        if rows is not None and self._reuse:
            rows = self._rope.hold(rows)
        for layer in now.layer_plans:
            layer.rope = rows


class MergedBlock:
    """What merges in one block.

    Args:
        group: The group of the block.
        block: The block.
        attentions: Its self-attention modules.
        joined: Whether it is given text and image in one tensor.
    """

    def __init__(self, group: MergeGroup, block: nn.Module, attentions: list[nn.Module], joined: bool) -> None:
        self.group, self.block, self.attentions, self.joined = group, block, attentions, joined
        self.rope = Argument(block, group.card.rope)
        self.rows = Argument(block, group.card.rows)
        self.attention_rope = Argument(attentions[0], group.card.rope) if attentions else None
        self.inside: list[nn.Module] = []  # modules that are given merged tokens
        self._forwards: list[InnermostForward] = []
        self._plans = self._whole = False
        self._arguments: ArgumentsToBackend | None = None
        self._ends_run = True  # whether tokens are unmerged after this block
        self._stream_end: InnermostForward | None = None  # see `follow`

    def remove(self) -> None:
        """Restore the modules."""
        if self._stream_end is not None:
            self._stream_end.remove()
        for forward in reversed(self._forwards):
            forward.remove()

    def install(self, *, plans: bool, last: bool, arguments: ArgumentsToBackend | None = None) -> None:
        """Have the block merge.

        Args:
            plans: Whether the plan of the group is made from this block's input.
            arguments: What takes arguments of the block once the plan is made from them.
            last: Whether the next block does not merge with the same plan.
        """
        method, card = self.group.method, self.group.card
        self._plans, self._ends_run, self._whole = plans, last, method.granularity == "block"
        self._arguments = arguments
        if self._whole or (plans and not method.per_block):
            self._forwards.append(UncompiledForward(self.block, self.enter, self.leave))
        elif plans:
            self._replace(self.block, self.run_planned)
        if self._whole or card.is_single_stream(self.block):
            self.inside = [*self.block.modules()][1:]
        if self._whole:
            return
        if card.is_single_stream(self.block):
            self.merge_stream()
        else:
            for module in card.modules_to_merge(method, self.block).values():
                self.inside += [*module.modules()][1:]
                attends = any(module is attn for attn in self.attentions)
                self._replace(module, self.run_attention if attends else self.run_module)

    @property
    def is_watched(self) -> bool:
        """Whether hooks of others see the tokens that the block is given and returns."""
        hooks = [*self.block._forward_hooks.values(), *self.block._forward_pre_hooks.values()]
        foreign = any(not isinstance(hook, ArgumentsToBackend) for hook in hooks)
        return bool(self._forwards) and (foreign or keeps_state(self.block))

    def _replace(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._forwards.append(InnermostForward(module, run))

    # --- whole blocks ---

    def run_planned(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block, after the plan is made from its input."""
        args, kwargs = self.plan(args, kwargs)
        return forward(*args, **kwargs)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the plan of the group from the arguments of the block if tokens merge, and return those left to it."""
        if (now := self.group.now) is not None:
            rope = self.rope.of(args, kwargs)
            rotation = None if rope is None else self.group.card.rotation(rope)
            image = now.split(tokens_of(args, kwargs), self._text_of(now))[1]
            if rotation is not None and not self.group.card.rotates_text:
                tokens = image.shape[1] + len(now.text)
                rotation = with_text(rotation, tokens, image.device, text_first=not now.image_first)
            self.group.plan(image, rotation)
        taken = self._arguments.take(args, kwargs) if self._arguments else None
        return taken or (args, kwargs)

    @torch.compiler.disable
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the block: make the plan if it is made here, and merge if whole blocks merge.

        With granularity="block", a run of blocks works on merged tokens. What the blocks add to the merged tokens is
        added to all tokens after the last. That is what merging and unmerging around each block gives wherever
        merging undoes unmerging: with hard weights exactly.
        """
        if self._plans:
            args, kwargs = self.plan(args, kwargs)
        if not self._whole or (now := self.group.merging) is None:
            return args, kwargs
        if now.whole is None:
            x = tokens_of(args, kwargs)
            now.whole = x, now.merged(x, self._text_of(now))
            args, kwargs = with_tokens(now.whole[1], args, kwargs)
        if (rows := self.rows.of(args, kwargs)) is not None:
            args, kwargs = self.rows.replaced(args, kwargs, now.rows_of_blocks(rows, self._text_of(now)))
        return self.without_rope(self.rope, args, kwargs)

    @torch.compiler.disable
    def leave(self, output: Any) -> Any:
        """The output of the block with unmerged tokens, unless the next block takes them merged."""
        now = self.group.now
        if now is None or now.whole is None or (now.skip_unmerge and not self._ends_run):
            return output
        (x, merged), now.whole = now.whole, None
        parts = list(output) if isinstance(output, tuple) else [output]
        i = 0 if self.group.card.returns_image_first else -1
        parts[i] = now.updated(x, merged, parts[i], self._text_of(now))
        return tuple(parts) if isinstance(output, tuple) else parts[0]

    def _text_of(self, now: MergePass) -> int:
        """Number of text tokens in the tensor of image tokens that the block is given."""
        return len(now.text) if self.joined else 0

    # --- single modules ---

    def run_module(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module on merged tokens.

        Its first argument holds image tokens, and text where the block has both in one tensor. It returns image
        tokens, or (image, text, and what an image prompt adds).
        """
        if (now := self.group.merging) is None:
            return forward(*args, **kwargs)
        text = len(now.text) if self.joined or self.group.card.joins_in_blocks else 0
        args, kwargs = with_tokens(now.merged(tokens_of(args, kwargs), text), args, kwargs)
        output = forward(*args, **kwargs)
        if not isinstance(output, tuple):
            return now.unmerged(output, text)
        image, words, *prompt = output
        return now.unmerged(image), words, *map(now.unmerged, prompt)

    def run_attention(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`run_module` for an attention module, whose rotary embedding travels in its plan."""
        return self.run_module(partial(self.run_rotated, forward), *args, **kwargs)

    def run_rotated(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an attention module that may be given merged tokens."""
        if self.group.merging is not None:
            args, kwargs = self.without_rope(self.attention_rope, args, kwargs)
        return forward(*args, **kwargs)

    def without_rope(self, rope: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of the block; the rotary embedding rotates nothing if the plan has its own for merged tokens."""
        plans, given = self.group.merging.layer_plans, rope.of(args, kwargs)
        if given is None or not plans or plans[0].rope is None:
            return args, kwargs
        return rope.replaced(args, kwargs, self.group.card.unrotated(given))

    def merge_stream(self) -> None:
        """Run a single-stream block on merged tokens from its norm to its last linear layer: see `Card.stream`."""
        (attn,) = self.attentions
        self._replace(getattr(self.block, self.group.card.stream[0]), self.run_norm)
        self._replace(attn, self.run_rotated)
        self._stream_end = InnermostForward(getattr(self.block, self.group.card.stream[1]), self.run_stream_end)

    def follow(self) -> None:
        """Move the end of `merge_stream` to a layer that replaced the last one, as LoRA adapters do."""
        if self._stream_end is None:
            return
        if (layer := getattr(self.block, self.group.card.stream[1])) is not self._stream_end.module:
            self._stream_end.remove()
            self._stream_end = InnermostForward(layer, self.run_stream_end)

    def run_norm(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the norm, and merge what it returns: text and image tokens, alone or first in a tuple."""
        output = forward(*args, **kwargs)
        if (now := self.group.merging) is None:
            return output
        if isinstance(output, tuple):
            return now.merged(output[0], len(now.text)), *output[1:]
        return now.merged(output, len(now.text))

    def run_stream_end(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run the last layer, and unmerge what it returns: text and merged tokens."""
        output = forward(*args, **kwargs)
        return output if (now := self.group.merging) is None else now.unmerged(output, len(now.text))


def keeps_state(module: nn.Module) -> bool:
    """Whether a hook of diffusers on the module keeps something from step to step, as caches do."""
    registry = vars(module).get("_diffusers_hook")
    return registry is not None and any(hook._is_stateful for hook in registry.hooks.values())


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens in a call of a block or module: its first argument."""
    return args[0] if args else kwargs["hidden_states"]


def with_tokens(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other tokens, also where they are given a second time, as keys."""
    old = tokens_of(args, kwargs)
    return tuple(x if y is old else y for y in args), {name: x if y is old else y for name, y in kwargs.items()}
