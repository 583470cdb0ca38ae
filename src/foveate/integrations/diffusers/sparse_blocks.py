# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportOptionalSubscript=false, reportOptionalCall=false
# pyright: reportCallIssue=false
"""Sparse attention in transformers of stacked blocks: SD3, PixArt, DiT.

Image tokens are put in the order of the method behind the position embedding, and back behind the last norm. Layers
with the method get a processor of ours and with every forward the table of their phase; dense layers keep theirs.
"""

from typing import Any, NamedTuple

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor, nn

from foveate.integrations.diffusers.blocks import CONTROL
from foveate.integrations.diffusers.borrowed import (
    Borrowed,
    KeepTables,
    check_processor,
    give_back,
    outside_compiled_code,
    replaced,
)
from foveate.integrations.diffusers.family import Family
from foveate.integrations.diffusers.order import Reorder, along, by_name
from foveate.integrations.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.method import AttentionPlan, StaysDense
from foveate.ops.joint_attention import backend_of, joint_attention

__all__ = ["SparseBlocks"]

KNOWN = AttnProcessor2_0, JointAttnProcessor2_0


class SparseProcessor(Borrowed):
    """The original with sparse attention, over [text | image] where a text is given; without a table the original."""

    def __init__(self, original: Any) -> None:
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
    return [x if norm is None else norm(x) for x, norm in zip(qkv, norms, strict=True)]


class Layer(NamedTuple):
    """One layer of attention.

    Attributes:
        name: Its name in the model.
        attn: The layer.
        number: Of its block.
        joint: Whether text and image attend to each other in it.
        processor: Ours; None if it is dense by the method's own wish.
    """

    name: str
    attn: Attention
    number: int
    joint: bool
    processor: SparseProcessor | None


class Ran(NamedTuple):
    """What the last forward did.

    Attributes:
        plans: For layers of the image alone, and for those of text and image; None if it was dense.
        why: It was dense.
    """

    plans: tuple[AttentionPlan, AttentionPlan] | None = None
    why: str = "no forward yet"
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


class SparseBlocks(Family):
    """One SD3, PixArt or DiT transformer with sparse attention in it."""

    hooks_inside = True

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], pipeline: Any) -> None:
        super().__init__(model, methods, pipeline)
        (self.sparse,) = methods
        self.layers = self._borrow()
        self.ran = self.shown = Ran()
        self.reorder = Reorder()
        self.reorder.between(model.pos_embed, model.norm_out)
        self._hooks = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            *self.reorder.handles,
        ]

    def _borrow(self) -> list[Layer]:
        blocks = self.model.transformer_blocks
        self.check_layers(len(blocks))
        found = [
            (f"transformer_blocks.{i}.{name}", getattr(block, name), i, name == "attn")
            for i, block in enumerate(blocks)
            for name in (("attn", "attn2") if isinstance(block, JointTransformerBlock) else ("attn1",))
            if getattr(block, name) is not None
        ]
        dense = self.sparse.dense_layer_set()
        for name, attn, number, _ in found:
            if number not in dense:
                check_processor(name, attn, number, KNOWN)
        layers = [Layer(*layer, None if layer[2] in dense else SparseProcessor(layer[1].processor)) for layer in found]
        for layer in layers:
            if layer.processor:
                layer.attn.set_processor(layer.processor)
        return layers

    def remove(self) -> None:
        """Give the model back: a processor that someone else has set since stays."""
        for hook in self._hooks:
            hook.remove()
        give_back(self.model, (layer.attn for layer in self.layers))

    @property
    def plan(self) -> AttentionPlan | None:
        """What the method decided for the last forward; None if it was dense."""
        return self.ran.plans and self.ran.plans[True]

    def report(self) -> list[LayerReport]:
        """One row for each attention layer."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: Layer) -> LayerReport:
        shown, attn = self.shown, layer.attn
        if layer.processor is None:
            return LayerReport(layer.name, "dense", why="named in dense_layers")
        if attn.processor is not layer.processor:
            return LayerReport(layer.name, "dense", why=replaced(attn))
        if shown.plans is None:
            return LayerReport(layer.name, "dense", why=shown.why)
        plan = shown.plans[layer.joint]
        table = plan.tables[layer.number % self.sparse.period]
        return LayerReport(
            layer.name,
            plan.title,
            backend_of(table, shown.device, shown.dtype, attn.inner_dim // attn.heads),
            plan.nominal_sparsity,
            table.sparsity(),
            4 * shown.batch * (table.query_tokens**2 - table.pairs()) * attn.inner_dim,
        )

    # --- one forward ---

    @outside_compiled_code
    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Decide what this forward does; hand the layers their tables, and put residuals of a ControlNet in order."""
        inputs = by_name(model, args, kwargs)
        x = inputs["hidden_states"]
        plans, why = self.ask(self.sparse, lambda: self._plans(inputs))
        self.ran = Ran(plans, why, x.shape[0], x.device, x.dtype)
        self.outcomes[why] += 1
        if plans or not self.outcomes[""]:
            self.shown = self.ran
        KeepTables.on(model)
        for layer in self.layers:
            if layer.processor:
                layer.processor.table = plans and plans[layer.joint].tables[layer.number % self.sparse.period]
        self.reorder.way = self.plan
        if plans and inputs.get(CONTROL) is not None:
            inputs[CONTROL] = [along(self.plan.order, residual) for residual in inputs[CONTROL]]
        return (), inputs

    def _plans(self, inputs: dict[str, Any]) -> tuple[AttentionPlan, AttentionPlan]:
        x, config = inputs["hidden_states"], self.model.config
        height, width = (side // config.patch_size for side in x.shape[-2:])
        self.check_step(self.sparse, height * width)
        self.sparse.check_head_dim(config.attention_head_dim)
        if inputs.get("attention_mask") is not None:
            raise StaysDense("an attention mask was passed")
        joint = any(layer.joint for layer in self.layers)
        text = inputs["encoder_hidden_states"].shape[1] if joint else 0
        alone, with_text = (self.sparse.plan(((height, width),), tokens, device=str(x.device)) for tokens in (0, text))
        return alone, with_text
