# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportOptionalSubscript=false, reportOptionalCall=false
# pyright: reportCallIssue=false
"""Sparse attention in models of stacked transformer blocks: SD3, PixArt, DiT, and UNets (SD 1.5, SDXL).

A section is a stack of blocks over one grid: all of a transformer, each `Transformer2DModel` of a UNet. Where they
enter it, image tokens are put in the order of the method, and back where they leave it. Layers with the method get a
processor of ours and with every forward the table of their phase; dense layers keep theirs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    FusedJointAttnProcessor2_0,
    JointAttnProcessor2_0,
)
from torch import Tensor, nn

from foveate.diffusers.blocks import CONTROL, stacks_of
from foveate.diffusers.borrowed import (
    Borrowed,
    KeepTables,
    check_processor,
    check_strangers,
    give_back,
    outside_compiled_code,
    replaced,
    strangers,
)
from foveate.diffusers.family import Family
from foveate.diffusers.order import Reorder, along, by_name
from foveate.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, DenseFallback
from foveate.ops.joint_attention import backend_of, joint_attention

__all__ = ["SparseBlocks", "SparseUNet"]

KNOWN = AttnProcessor2_0, JointAttnProcessor2_0
HARMLESS = *KNOWN, AttnProcessor, FusedAttnProcessor2_0, FusedJointAttnProcessor2_0  # blind to the order of tokens


class SparseProcessor(Borrowed):
    """The original with sparse attention, over [text | image] where a text is given; without a table the original."""

    def __init__(self, original: Any = None) -> None:
        if original is None:  # diffusers makes all processors anew when an IP-Adapter comes or goes
            raise ValueError("an IP-Adapter cannot come or go under sparse attention: call foveate.remove(...) first")
        self.original, self.table = original, None

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """What the original returns; arguments as diffusers passes them."""
        if self.table is None:
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask)
        projections, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k, None)
        qkv = _heads(attn, hidden_states, projections, norms)
        if encoder_hidden_states is not None:
            projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            text = _heads(attn, encoder_hidden_states, projections, (attn.norm_added_q, attn.norm_added_k, None))
            qkv = [torch.cat(both, 2) for both in zip(text, qkv, strict=True)]
        out = joint_attention(*qkv, self.table).transpose(1, 2).flatten(2)
        text, image = out.split([out.shape[1] - hidden_states.shape[1], hidden_states.shape[1]], 1)
        image = attn.to_out[1](attn.to_out[0](image))
        if encoder_hidden_states is None:
            return image
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _heads(attn: Attention, x: Tensor, projections: tuple[Any, ...], norms: tuple[Any, ...]) -> list[Tensor]:
    """Queries, keys and values [batch, heads, tokens, head_dim]."""
    qkv = (project(x).unflatten(2, (attn.heads, -1)).transpose(1, 2) for project in projections)
    return [x if norm is None else norm(x).to(x.dtype) for x, norm in zip(qkv, norms, strict=True)]  # as in autocast


class Layer(NamedTuple):
    """One layer of attention.

    Attributes:
        name: Its name in the model.
        attn: The layer.
        number: Of its block, counted through the whole model.
        joint: Whether text and image attend to each other in it.
        processor: Ours; None if it is dense by the method's own wish.
    """

    name: str
    attn: Attention
    number: int
    joint: bool
    processor: SparseProcessor | None


class Ran(NamedTuple):
    """What a section did in a forward.

    Attributes:
        plans: For layers of the image alone, and for those of text and image; None if it was dense.
        why: It was dense.
    """

    plans: tuple[AttentionPlan, AttentionPlan] | None = None
    why: str = "no forward yet"
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    strangers: Mapping[str, str] = {}


class Section(Reorder):
    """A stack of blocks over one grid.

    Args:
        family: Whose method it has.
        holder: Reads the map [batch, channels, height, width] as `hidden_states`.
        layers: Its attention.
    """

    def __init__(self, family: "SparseBlocks", holder: nn.Module, layers: list[Layer]) -> None:
        super().__init__()
        self.family, self.holder, self.layers = family, holder, layers
        self.ran = self.shown = Ran()
        self.handles.append(holder.register_forward_pre_hook(self.enter, with_kwargs=True))
        for layer in layers:
            if layer.processor:
                layer.attn.set_processor(layer.processor)

    def remove(self) -> None:
        """Give the blocks back: a processor that someone else has set since stays."""
        for handle in self.handles:
            handle.remove()
        give_back(self.holder, (layer.attn for layer in self.layers))

    def report(self, layer: Layer) -> LayerReport:
        """What a layer did."""
        shown, attn = self.shown, layer.attn
        if layer.processor is None:
            return LayerReport(layer.name, "dense", why="named in dense_layers")
        if layer.name in shown.strangers:
            return LayerReport(layer.name, "dense", why=shown.strangers[layer.name])
        if shown.plans is None:
            return LayerReport(layer.name, "dense", why=shown.why)
        plan = shown.plans[layer.joint]
        table = plan.tables[layer.number % self.family.sparse.period]
        return LayerReport(
            layer.name,
            plan.title,
            backend_of(table, shown.device, shown.dtype, attn.inner_dim // attn.heads),
            plan.nominal_sparsity,
            table.sparsity(),
            4 * shown.batch * (table.query_tokens**2 - table.pairs()) * attn.inner_dim,
        )

    @outside_compiled_code
    def enter(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Decide what this forward does; hand the layers their tables, and put residuals of a ControlNet in order."""
        inputs, method = by_name(holder, args, kwargs), self.family.sparse
        x = inputs["hidden_states"]
        plans, why = self.family.ask(method, lambda: self._plans(inputs))
        self.family.outcomes[why] += 0  # said once
        others = {name: replaced(attn) for name, attn in strangers(self.layers).items()}
        self.ran = Ran(plans, why, x.shape[0], x.device, x.dtype, others)
        self.way = plans and plans[True]
        KeepTables.on(holder, self)
        for layer in self.layers:
            if layer.processor:
                layer.processor.table = plans and plans[layer.joint].tables[layer.number % method.period]
        if plans and inputs.get(CONTROL) is not None:
            inputs[CONTROL] = [along(self.way.order, residual) for residual in inputs[CONTROL]]
        return (), inputs

    def _plans(self, inputs: dict[str, Any]) -> tuple[AttentionPlan, AttentionPlan]:
        x, family, attn = inputs["hidden_states"], self.family, self.layers[0].attn
        height, width = (side // (self.holder.config.patch_size or 1) for side in x.shape[-2:])
        family.check_step(family.sparse, height * width)
        family.sparse.check_head_dim(attn.inner_dim // attn.heads)
        if inputs.get("attention_mask") is not None:
            raise DenseFallback("an attention mask was passed")
        if (inputs.get("cross_attention_kwargs") or {}).get("ip_adapter_masks") is not None:
            raise DenseFallback("ip_adapter_masks are laid over a raster of all tokens")
        check_strangers(self.layers, HARMLESS)
        joint = any(layer.joint for layer in self.layers)
        text = inputs["encoder_hidden_states"].shape[1] if joint else 0
        alone, with_text = (family.plan_for((height, width), tokens, str(x.device)) for tokens in (0, text))
        return alone, with_text


class SparseBlocks(Family):
    """One SD3, PixArt or DiT transformer with sparse attention in it."""

    hooks_inside = True

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], pipeline: Any) -> None:
        super().__init__(model, methods, pipeline)
        (self.sparse,) = methods
        layers = self._layers()
        self._hooks = [model.register_forward_pre_hook(self.enter), model.register_forward_hook(self.leave)]
        self.sections = [Section(self, holder, of_holder) for holder, of_holder in layers.items()]
        for section in self.sections:
            self.reorder(section)

    def _layers(self) -> dict[nn.Module, list[Layer]]:
        """Self-attention by what holds its stack of blocks, in running order."""
        blocks = [
            (f"{prefix}transformer_blocks.{i}", holder, block)
            for prefix, holder in self.holders()
            for i, block in enumerate(holder.transformer_blocks)
        ]
        self.check_layers(len(blocks))
        dense, found = self.sparse.dense_layer_set(), dict[nn.Module, list[Layer]]()
        for number, (block_name, holder, block) in enumerate(blocks):
            for attention in ("attn", "attn2") if isinstance(block, JointTransformerBlock) else ("attn1",):
                name, attn = f"{block_name}.{attention}", getattr(block, attention)
                if attn is None or getattr(block, "only_cross_attention", False):
                    continue
                if number not in dense:
                    check_processor(name, attn, number, KNOWN)
                processor = None if number in dense else SparseProcessor(attn.processor)
                found.setdefault(holder, []).append(Layer(name, attn, number, attention == "attn", processor))
        if not found:
            raise ValueError(f"this {type(self.model).__name__} has no self-attention that foveate knows")
        return found

    def holders(self) -> Iterator[tuple[str, nn.Module]]:
        """What holds `transformer_blocks` over one grid, behind what their names begin with."""
        yield "", self.model

    def reorder(self, section: Section) -> None:
        """Put tokens in order behind the position embedding, and back behind the last norm."""
        section.between(self.model.pos_embed, self.model.norm_out)

    def plan_for(self, grid: tuple[int, int], text: int, device: str) -> AttentionPlan:
        """What the method decides for one grid."""
        return self.sparse.plan((grid,), text, device=device)

    def remove(self) -> None:
        """Give the model back: a processor that someone else has set since stays."""
        for hook in self._hooks:
            hook.remove()
        for section in self.sections:
            section.remove()

    @property
    def plan(self) -> AttentionPlan | None:
        """What the method decided for the first sparse section of the last forward; None if there was none."""
        return next((section.ran.plans[True] for section in self.sections if section.ran.plans), None)

    def report(self) -> list[LayerReport]:
        """One row for each attention layer."""
        return [section.report(layer) for section in self.sections for layer in section.layers]

    @outside_compiled_code
    def enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward begins."""
        for section in self.sections:
            section.ran = Ran(why="it did not run")

    @outside_compiled_code
    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count what happened."""
        whys = [section.ran.why for section in self.sections]
        why = "" if "" in whys else whys[0]
        self.outcomes[why] += 1
        if not why or not self.outcomes[""]:
            for section in self.sections:
                section.shown = section.ran


class SparseUNet(SparseBlocks):
    """One UNet with sparse attention in it. Sections that the method cannot take stay dense, the others do not."""

    def holders(self) -> Iterator[tuple[str, nn.Module]]:
        """Every `Transformer2DModel`, in running order."""
        for section in stacks_of(self.model):
            yield from ((f"{name}.", stack) for name, stack in section)

    def reorder(self, section: Section) -> None:
        """Put tokens in order before the first block, and back behind the last."""
        blocks: Any = section.holder.transformer_blocks
        section.before(blocks[0])
        section.behind(blocks[-1])

    def plan_for(self, grid: tuple[int, int], text: int, device: str) -> AttentionPlan:
        """What the method decides; a setting that this grid is too small for may fit others."""
        try:
            return super().plan_for(grid, text, device)
        except ValueError as reason:
            raise DenseFallback(str(reason)) from None
