# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Token merging by hooks: blocks that share a plan, when the plan is made anew, and what their hooks do.

A plan is made from what the first of its blocks is given. Plans that blocks share are made outside of compiled code,
which sees plans, not how they are made, and hooks around a whole block run outside of it too. A hook reads tensors of
its site and never a number that changes from step to step.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from foveate.diffusers.clock import Step
from foveate.diffusers.order import along
from foveate.methods.base import TokenMerging
from foveate.ops.merging import AnyMerge, Group, Regions

__all__ = ["Site"]


class Site:
    """Blocks that share a plan.

    Args:
        method: How to merge.
        first: The block from whose input the plan is made; None where nothing ever merges.
        raster: The blocks are given tokens in raster order, not in that of the regions.

    Attributes:
        method: How to merge.
        merge: The plan of the current forward; None leaves the blocks dense.
        text: The text tokens of the current forward [batch, text, dim]: in single-stream blocks they stand in front.
    """

    def __init__(self, method: TokenMerging, first: nn.Module | None, *, raster: bool = False) -> None:
        self.method, self._raster = method, raster
        self.merge: AnyMerge | None = None
        self.text: Tensor | None = None
        self._regions: Regions | None = None
        self._plan: AnyMerge | None = None
        self._made: tuple[int, int] | None = None  # the periods of destinations and weights that the plan is of
        self._key: Hashable = None
        self._groups: tuple[Group, ...] = ()
        self._order: Tensor | None = None
        self._last, self._due, self._apart = -1, False, False
        self._whole: tuple[Tensor, Tensor] | None = None  # what whole blocks were given, and those tokens merged
        self._handles: list[RemovableHandle] = []
        self._outs: list[tuple[nn.Module, str, nn.Module, RemovableHandle]] = []
        if first is not None:
            see = self._see if method.per_block else self._see_outside
            self._handles.append(first.register_forward_pre_hook(see, with_kwargs=True))

    # --- one forward ---

    def begin(
        self, regions: Regions | None, step: Step | None, text: Tensor | None = None, apart: bool = False
    ) -> None:
        """Say what the next forward does.

        Args:
            regions: Within these tokens are merged; None merges nothing.
            step: Where in a run the forward stands.
            text: See `Site.text`.
            apart: Something is done with the tokens between whole blocks: have all of them there.
        """
        self.end()
        self.text, self._regions, self._apart, self.merge, self._whole = text, regions, apart, None, None
        if regions is None or step is None:
            return
        same = step.key == self._key and regions.groups == self._groups and regions.order is self._order
        if not same or step.number < self._last:  # another picture
            self._key, self._groups, self._order = step.key, regions.groups, regions.order
            self._plan = self._made = None
        self._last = step.number
        periods = step.number // self.method.dst_every, step.number // self.method.weights_every
        if self._plan is None or self._made != periods:
            if self._made is None or self._made[0] != periods[0]:
                self._plan = None  # new destinations too
            self._made, self._due = periods, True
        else:
            self.merge = self._plan

    def end(self) -> bool:
        """After the forward: whether a plan was due and not made."""
        missed, self._due = self._due, False
        if missed:
            self._made = None
        return missed

    def shown(self, regions: Regions) -> Regions:
        """The regions with what was picked in them, to draw."""
        if self._plan is None:
            return regions
        picked = regions.order.cpu()[self._plan.places[0].cpu()]
        return regions._replace(picked=picked[picked < regions.grid[0] * regions.grid[1]])

    # --- hooks ---

    def whole(self, block: nn.Module, *, last: bool) -> None:
        """Run a block on merged image tokens, and the next one too unless it is the last.

        What the blocks add to the merged tokens is spread over all tokens behind the last. That is what merging and
        unmerging around each would give, wherever merging undoes unmerging: with hard weights exactly.
        """
        unmerge = self._unmerge_block if last else self._unmerge_between
        self._handles += [
            block.register_forward_pre_hook(self._merge_block, with_kwargs=True),
            block.register_forward_hook(unmerge),
        ]

    def positions(self, attn: nn.Module) -> None:
        """Tell attention, whose tokens are merged already, where they stand and how large they are."""
        self._handles.append(attn.register_forward_pre_hook(self._move_rope, with_kwargs=True))

    def sizes(self, attn: nn.Module) -> None:
        """Tell self-attention, whose tokens are merged already, how large they are."""
        self._handles.append(attn.register_forward_pre_hook(self._weigh, with_kwargs=True))

    def per_token(self, module: nn.Module) -> None:
        """Run a module of one argument, such as a feed-forward, on merged tokens."""
        self._handles += [
            module.register_forward_pre_hook(self._merge_first),
            module.register_forward_hook(self._unmerge_output),
        ]

    def self_attention(self, attn: nn.Module) -> None:
        """Run attention that takes the tokens first, and a mask over keys by keyword, on merged tokens."""
        self.per_token(attn)
        self.sizes(attn)

    def keyword_attention(self, attn: nn.Module) -> None:
        """Run attention of one keyword argument on merged tokens."""
        self._handles += [
            attn.register_forward_pre_hook(self._merge_keyword, with_kwargs=True),
            attn.register_forward_hook(self._unmerge_output),
        ]

    def joint_attention(self, attn: nn.Module) -> None:
        """Run attention over image and text, by keyword, on merged image tokens."""
        self._handles += [
            attn.register_forward_pre_hook(self._merge_image, with_kwargs=True),
            attn.register_forward_hook(self._unmerge_image),
        ]

    def single_stream(self, norm: nn.Module, attn: nn.Module, block: nn.Module, out: str) -> None:
        """Run a block over [text | image] on merged tokens from its norm to its last linear layer.

        Args:
            norm: Returns (tokens, ...).
            attn: Takes the rotary embedding by keyword.
            block: Has the last layer.
            out: The name of that. A LoRA may wrap or unwrap it at any time: see `follow`.
        """
        self._handles.append(norm.register_forward_hook(self._merge_normed))
        self.positions(attn)
        layer = getattr(block, out)
        self._outs.append((block, out, layer, layer.register_forward_hook(self._unmerge_stream)))

    def follow(self) -> None:
        """Move hooks to layers that took the place of those that had them."""
        for i, (block, name, hooked, handle) in enumerate(self._outs):
            if (layer := getattr(block, name)) is not hooked:
                handle.remove()
                self._outs[i] = block, name, layer, layer.register_forward_hook(self._unmerge_stream)

    def remove(self) -> None:
        """Take all hooks away."""
        self.end()
        for handle in (*self._handles, *(handle for *_, handle in self._outs)):
            handle.remove()

    def _see(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan, if it is time."""
        if self._due:
            self._due = False
            chosen = self._plan.chosen if self._plan else None
            x = _tokens(args, kwargs).detach()
            with torch.no_grad(), record_function("foveate::plan"):
                features = along(self._regions.order, x) if self._raster else x
                with torch.autocast(x.device.type, enabled=False):  # which tokens are alike is no matter of bfloat16
                    self.merge = self._plan = self.method.plan(features, self._regions, chosen)

    @torch.compiler.disable
    def _see_outside(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._see(block, args, kwargs)

    @torch.compiler.disable
    def _merge_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.merge is None or self._whole:
            return args, kwargs
        x = _tokens(args, kwargs)
        self._whole = x, self.merge.merge(x, 0, self._way(x))
        return (self._whole[1], *args[1:]), {name: value for name, value in kwargs.items() if name != "hidden_states"}

    @torch.compiler.disable
    def _unmerge_block(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._whole is None:
            return output
        (x, merged), self._whole = self._whole, None
        *text, image = output if isinstance(output, tuple) else (output,)
        image = self.merge.update(x, merged, image, self._way(x))
        return (*text, image) if isinstance(output, tuple) else image

    @torch.compiler.disable
    def _unmerge_between(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._unmerge_block(block, args, output) if self._apart else output

    def _way(self, x: Tensor) -> Tensor | None:
        """The order of the regions, unless these tokens are in it."""
        return self._regions.order.to(x.device) if self._raster else None

    def _weigh(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.merge is None or not self.method.size_bias:
            return args, kwargs
        sizes = self.merge.log_sizes().to(args[0].dtype)
        return args, {**kwargs, "attention_mask": sizes[:, None].expand(len(args[0]), 1, -1)}

    def _merge_keyword(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.merge is None:
            return args, kwargs
        return args, {**kwargs, "hidden_states": self.merge.merge(kwargs["hidden_states"])}

    def _merge_first(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return args if self.merge is None else (self.merge.merge(args[0]), *args[1:])

    def _unmerge_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output if self.merge is None else self.merge.unmerge(output)

    def _merge_image(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.merge is None:
            return args, kwargs
        kwargs = {**kwargs, "hidden_states": self.merge.merge(kwargs["hidden_states"])}
        return args, self._positions(kwargs)

    def _unmerge_image(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.merge is None:
            return output
        image, text, *prompt = output  # with an IP-Adapter, what the image prompt adds to the image
        return self.merge.unmerge(image), text, *map(self.merge.unmerge, prompt)

    def _merge_normed(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> Any:
        return output if self.merge is None else (self.merge.merge(output[0], self.text.shape[1]), *output[1:])

    def _move_rope(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args, kwargs) if self.merge is None else (args, self._positions(kwargs))

    def _unmerge_stream(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output if self.merge is None else self.merge.unmerge(output, self.text.shape[1])

    def _positions(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Rotary embedding of the destinations, and the bias of large tokens."""
        if (rope := kwargs.get("image_rotary_emb")) is not None:
            kwargs = {**kwargs, "image_rotary_emb": tuple(map(self._rows, rope))}
        if self.method.size_bias:
            sizes = self.merge.log_sizes()
            bias = torch.cat([sizes.new_zeros(len(sizes), self.text.shape[1]), sizes], 1).to(self.text.dtype)
            kwargs = {**kwargs, "attention_mask": bias[:, None, None]}
        return kwargs

    def _rows(self, rows: Tensor) -> Tensor:
        """Of [text | image] positions those that are left: [tokens, dim], or with the batch in front."""
        text = rows[: self.text.shape[1]]
        image = self.merge.rope(rows[self.text.shape[1] :])
        if len(image) == 1:
            return torch.cat([text, image[0]])
        return torch.cat([text.expand(len(image), -1, -1), image], 1)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Image tokens that a block is given."""
    return args[0] if args else kwargs["hidden_states"]
