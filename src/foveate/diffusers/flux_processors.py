# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportReturnType=false
"""Flux's attention processors, made sparse, or with positions of their own for every sample."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
    _get_qkv_projections,
)
from torch import Tensor

from foveate.diffusers.borrowed import Borrowed, of_original
from foveate.ops.joint_attention import Pattern, joint_attention

__all__ = ["SparseIPAdapterProcessor", "SparseProcessor"]


def _attention(
    processor: "Borrowed",
    attn: FluxAttention,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    mask: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention over [text | image]: (image out, text out, image queries before RoPE).

    In single-stream blocks `hidden_states` is text and image already, and the text output is None.
    """
    *image, text_q, text_k, text_v = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
    q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in image)  # [batch, tokens, heads, head_dim]
    q, k = attn.norm_q(q), attn.norm_k(k)
    image_q = q
    if encoder_hidden_states is not None:
        text_q, text_k, text_v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (text_q, text_k, text_v))
        q = torch.cat([attn.norm_added_q(text_q), q], dim=1)
        k = torch.cat([attn.norm_added_k(text_k), k], dim=1)
        v = torch.cat([text_v, v], dim=1)
    if rope is not None:
        q, k = (_rotated(x, rope) for x in (q, k))
    q, k = q.to(v.dtype), k.to(v.dtype)
    if processor.table is not None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = joint_attention(q, k, v, processor.table).transpose(1, 2).flatten(2)
    else:
        out = dispatch_attention_fn(
            q, k, v, mask, backend=processor._attention_backend, parallel_config=processor._parallel_config
        ).flatten(2)
    if encoder_hidden_states is None:
        return out, None, image_q
    text_out, image_out = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
    return attn.to_out[1](attn.to_out[0](image_out)), attn.to_add_out(text_out), image_q


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [batch, tokens, heads, head_dim], rotated by [tokens, head_dim], or the batch in front of it."""
    if rope[0].ndim == 2:
        return apply_rotary_emb(x, rope, sequence_dim=1)
    one_by_one = [
        apply_rotary_emb(sample[None], (cos, sin), sequence_dim=1) for sample, cos, sin in zip(x, *rope, strict=True)
    ]
    return torch.cat(one_by_one)


def _stock(table: Pattern | None, rope: tuple[Tensor, Tensor] | None) -> bool:
    """Whether there is nothing that the original cannot do."""
    return table is None and (rope is None or rope[0].ndim == 2)


class SparseProcessor(Borrowed):
    """`FluxAttnProcessor` with sparse attention; what the original can do is left to it."""

    def __init__(self, original: FluxAttnProcessor | None = None) -> None:
        self.original = original or FluxAttnProcessor()  # diffusers makes processors anew without arguments
        self.table = None

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """What the original returns; arguments as diffusers passes them."""
        if _stock(self.table, image_rotary_emb):
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        image, text, _ = _attention(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return image if text is None else (image, text)


class SparseIPAdapterProcessor(Borrowed, FluxIPAdapterAttnProcessor):
    """`FluxIPAdapterAttnProcessor` with sparse self-attention; it shares all weights."""

    def __init__(self, original: FluxIPAdapterAttnProcessor) -> None:
        torch.nn.Module.__init__(self)
        self.to_k_ip, self.to_v_ip = original.to_k_ip, original.to_v_ip
        self.__dict__["original"] = original  # not as a submodule: its weights are there already
        self.table = None

    scale = of_original("scale")

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
        ip_adapter_masks: Tensor | None = None,
    ) -> Any:
        """What the original returns; arguments as diffusers passes them."""
        if _stock(self.table, image_rotary_emb):
            return self.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, ip_hidden_states,
                ip_adapter_masks,
            )  # fmt: skip
        image, text, query = _attention(
            self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )
        prompt = torch.zeros_like(image)
        for states, scale, to_k, to_v in zip(
            ip_hidden_states or [], self.scale, self.to_k_ip, self.to_v_ip, strict=False
        ):
            key, value = (
                project(states).flatten(1, -2).unflatten(-1, (-1, attn.head_dim)) for project in (to_k, to_v)
            )
            seen = dispatch_attention_fn(
                query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
            )
            prompt = prompt + scale * seen.flatten(2).to(query.dtype)
        return image, text, prompt
