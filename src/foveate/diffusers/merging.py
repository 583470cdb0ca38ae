# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Token merging by hooks on blocks: groups of blocks that share a plan, and what their hooks do.

A plan is made from the input of the first block of its group. Outside of merged modules all tokens stay in raster
order. Plans that blocks share are made outside of compiled code, and so are the hooks around whole blocks; hooks
around single modules are compiled with their block, and read tensors only, never a number that changes between steps.
"""

from collections.abc import Hashable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from foveate.diffusers.arguments import Argument
from foveate.diffusers.backend import LayerPlan, with_text
from foveate.diffusers.card import Card
from foveate.diffusers.clock import Step
from foveate.methods.base import TokenMerging
from foveate.ops.merging import AnyMerge, Group, Regions
from foveate.utils.cache import FixedMemory, cached_by_tensor

__all__ = ["MergeGroup", "MergePass", "MergedBlock"]


class MergePass:
    """How the tokens of a group of blocks merge in one forward pass.

    Args:
        regions: Regions within which tokens merge.
        text: As long as the text, padding included, where a tensor holds text and image.
        skip_unmerge: Leave tokens merged between the blocks of the group.
        image_first: Whether the image precedes the text where a tensor holds both.

    Attributes:
        merge: The plan; None leaves the blocks dense.
        due: Whether the plan is to be made from the input of the first block.
        order: Position of the image token at each place of the regions; None if they follow the raster.
        inverse: Place of each image token.
        layer_plans: Plans of the attention layers of the group.
        whole: Tokens before a run of merged blocks, and the same merged.
    """

    def __init__(self, regions: Regions, text: Tensor, *, skip_unmerge: bool, image_first: bool) -> None:
        self.regions, self.text, self.skip_unmerge, self.image_first = regions, text, skip_unmerge, image_first
        self.merge: AnyMerge | None = None
        self.due = False
        raster = regions.order is regions.inverse
        self.order, self.inverse = (None, None) if raster else (regions.order, regions.inverse)
        # order and inverse of a sequence that begins with the text
        self._joint = tuple(None if x is None else after_text(x, len(text)) for x in (self.order, self.inverse))
        self.layer_plans: list[LayerPlan] = []
        self.whole: tuple[Tensor, Tensor] | None = None

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of a rotary embedding of text and merged tokens: a merged token has the position of its destination."""
        text, image = self.split(rows if rows.ndim == 3 else rows[None], len(self.text))
        image = self.merge.rope(image if self.order is None else image.index_select(1, self.order))
        rows = self._joined(text.expand(len(image), -1, -1), image)
        return rows[0] if len(rows) == 1 else rows

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


class MergeGroup:
    """Blocks that share a plan of token merging, and what they keep of it from step to step.

    Args:
        method: How to merge.
        card: Card of the model.

    Attributes:
        now: Its merging in the current forward pass; None if it does not merge.
    """

    def __init__(self, method: TokenMerging, card: Card) -> None:
        self.method, self.card = method, card
        self.now: MergePass | None = None
        self._plan: AnyMerge | None = None
        self._made: tuple[int, int] | None = None  # periods of the destinations and the weights of the plan
        self._made_for: tuple[Hashable, tuple[Group, ...]] | None = None  # run and regions of the plan
        self._order: Tensor | None = None  # order of these regions
        self._last = -1  # number of the last step
        self._rope = FixedMemory()

    @property
    def merging(self) -> MergePass | None:
        """`now` as soon as its plan is made."""
        return None if self.now is None or self.now.merge is None else self.now

    def reset(self) -> None:
        """Merge nothing, until `begin`."""
        self.end()
        self.now = None

    def begin(
        self, regions: Regions, step: Step, text: Tensor, *, skip_unmerge: bool = True, image_first: bool = False
    ) -> None:
        """Merge in the next forward pass, at this step of the denoising run; for other arguments see `MergePass`."""
        self.reset()
        self.now = MergePass(regions, text, skip_unmerge=skip_unmerge, image_first=image_first)
        made_for = step.key, regions.groups
        if made_for != self._made_for or regions.order is not self._order or step.number < self._last:
            self._made_for, self._order = made_for, regions.order
            self._plan = self._made = None  # another picture
        self._last = step.number
        periods = self.method.periods(step.number)
        if self._plan is not None and self._made == periods:
            self.now.merge = self._plan
            return
        if self._made is None or self._made[0] != periods[0]:
            self._plan = None  # new destinations too
        self._made, self.now.due = periods, True

    def end(self) -> bool:
        """Whether a plan was due in the forward pass that ended, and was not made."""
        missed = self.now is not None and self.now.due
        if missed:
            self._made, self.now.due = None, False
        return missed

    def with_picks(self, regions: Regions) -> Regions:
        """The regions with the destinations of the first sample, to draw."""
        if self._plan is None:
            return regions
        picked = regions.order.cpu()[self._plan.positions[0].cpu()]
        return regions._replace(picked=picked[picked < prod(regions.grid)])

    def plan(self, tokens: Tensor, rope: tuple[Tensor, Tensor] | None) -> None:
        """Make the plan from the image tokens of the first block if it is due, and complete the layers' plans.

        Args:
            tokens: Image tokens in raster order [batch, image, dim].
            rope: Rotary embedding (cos, sin) of text and image in raster order, each [tokens, head_dim] or [batch,
                tokens, head_dim].
        """
        now = self.now
        if now.due:
            now.due = False
            chosen = self._plan.chosen if self._plan else None
            x = tokens.detach() if now.order is None else tokens.detach().index_select(1, now.order)
            exact = torch.autocast(x.device.type, enabled=False)  # similarities need more than bfloat16
            with torch.no_grad(), record_function("foveate::plan"), exact:
                now.merge = self._plan = self.method.plan(x, now.regions, chosen)
        rows = None if rope is None else self._rope.hold(tuple(map(now.rows, rope)))
        for layer in now.layer_plans:
            layer.rope = rows


class MergedBlock:
    """The hooks of one block.

    Args:
        group: The group of the block.
        block: The block.
        attentions: Its self-attention modules.
        joined: Whether it is given text and image in one tensor.
    """

    def __init__(self, group: MergeGroup, block: nn.Module, attentions: list[nn.Module], joined: bool) -> None:
        self.group, self.block, self.attentions, self.joined = group, block, attentions, joined
        self.rope = Argument(block, group.card.rope)
        self.attention_rope = Argument(attentions[0], group.card.rope) if attentions else None
        self.handles: list[RemovableHandle] = []
        self._ends_run = True  # whether tokens are unmerged after this block
        self._stream_end: tuple[nn.Module, RemovableHandle] | None = None  # see `follow`

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self.handles, *(self._stream_end or ())[1:]):
            handle.remove()

    def install(self, *, last: bool) -> None:
        """Add the hooks that merge and unmerge.

        Args:
            last: Whether the next block does not merge with the same plan.
        """
        method, card = self.group.method, self.group.card
        if method.granularity == "block":
            self.merge_block(last=last)
        elif card.is_single_stream(self.block):
            self.merge_stream()
        else:
            for module in card.modules_to_merge(method, self.block).values():
                self.merge_module(module)

    # --- the hook that makes the plan ---

    def plan_here(self) -> None:
        """Make the plan of the group from this block's input."""
        hook = self.plan if self.group.method.per_block else self.plan_outside
        self.handles.append(self.block.register_forward_pre_hook(hook, with_kwargs=True))

    def plan(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the block."""
        if (now := self.group.now) is None:
            return
        rope = self.rope.of(args, kwargs)
        rotation = None if rope is None else self.group.card.rotation(rope)
        image = now.split(tokens_of(args, kwargs), self._text_of(now))[1]
        if rotation is not None and not self.group.card.rotates_text:
            rotation = with_text(rotation, image.shape[1] + len(now.text))
        self.group.plan(image, rotation)

    @torch.compiler.disable
    def plan_outside(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`plan`, outside of compiled code."""
        self.plan(block, args, kwargs)

    # --- hooks around the whole block ---

    def merge_block(self, *, last: bool) -> None:
        """Run the block on merged tokens, and the next block of the group too unless this is the last one.

        What the blocks add to the merged tokens is added to all tokens after the last. That is what merging and
        unmerging around each block gives wherever merging undoes unmerging: with hard weights exactly.
        """
        self._ends_run = last
        self.handles += [
            self.block.register_forward_pre_hook(self.enter, with_kwargs=True),
            self.block.register_forward_hook(self.leave),
        ]

    @torch.compiler.disable
    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the block: merge its tokens unless they are merged already."""
        if (now := self.group.merging) is None:
            return args, kwargs
        if now.whole is None:
            x = tokens_of(args, kwargs)
            now.whole = x, now.merged(x, self._text_of(now))
            args, kwargs = with_tokens(now.whole[1], args, kwargs)
        return without_rope(now, self.rope, args, kwargs)

    @torch.compiler.disable
    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after the block: unmerge its tokens unless the next block takes them merged."""
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

    # --- hooks around single modules ---

    def merge_module(self, module: nn.Module) -> None:
        """Run an attention or feed-forward module on merged tokens."""
        self.handles += [
            module.register_forward_pre_hook(self.merge_input, with_kwargs=True),
            module.register_forward_hook(self.unmerge_output),
        ]

    def merge_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before a module: its first argument holds image tokens, and text where the block has both in one."""
        if (now := self.group.merging) is None:
            return args, kwargs
        args, kwargs = with_tokens(now.merged(tokens_of(args, kwargs), self._text_of(now)), args, kwargs)
        attends = any(module is attn for attn in self.attentions)
        return without_rope(now, self.attention_rope, args, kwargs) if attends else (args, kwargs)

    def unmerge_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after a module that returns image tokens, or (image, text, and what an image prompt adds)."""
        if (now := self.group.merging) is None:
            return output
        if not isinstance(output, tuple):
            return now.unmerged(output, self._text_of(now))
        image, text, *prompt = output
        return now.unmerged(image), text, *map(now.unmerged, prompt)

    def merge_stream(self) -> None:
        """Run a single-stream block on merged tokens from its norm to its last linear layer: see `Card.stream`."""
        norm, (attn,) = getattr(self.block, self.group.card.stream[0]), self.attentions
        self.handles += [
            norm.register_forward_hook(self.merge_normed),
            attn.register_forward_pre_hook(self.take_rope, with_kwargs=True),
        ]
        layer = getattr(self.block, self.group.card.stream[1])
        self._stream_end = layer, layer.register_forward_hook(self.unmerge_stream)

    def follow(self) -> None:
        """Move the last hook of `merge_stream` to a layer that replaced the hooked one, as LoRA adapters do."""
        if self._stream_end is None:
            return
        layer, handle = self._stream_end
        if (now := getattr(self.block, self.group.card.stream[1])) is not layer:
            handle.remove()
            self._stream_end = now, now.register_forward_hook(self.unmerge_stream)

    def merge_normed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook after the norm: it returns text and image tokens, alone or first in a tuple."""
        if (now := self.group.merging) is None:
            return output
        if isinstance(output, tuple):
            return now.merged(output[0], len(now.text)), *output[1:]
        return now.merged(output, len(now.text))

    def take_rope(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the attention of a single-stream block."""
        now = self.group.merging
        return (args, kwargs) if now is None else without_rope(now, self.attention_rope, args, kwargs)

    def unmerge_stream(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Hook after the last layer: it returns text and merged tokens."""
        return output if (now := self.group.merging) is None else now.unmerged(output, len(now.text))


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens in a call of a block or module: its first argument."""
    return args[0] if args else kwargs["hidden_states"]


def with_tokens(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other tokens."""
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def without_rope(now: MergePass, rope: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call on merged tokens, whose rotary embedding travels in the plan of the layer."""
    plans = now.layer_plans
    return rope.dropped(args, kwargs) if plans and plans[0].rope is not None else (args, kwargs)
