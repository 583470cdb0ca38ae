# pyright: basic, reportPrivateImportUsage=false
"""A language model that attends by rows: each token over the rows of a cache up to its own.

The model's forward pass runs unchanged in a copy that shares all weights. The model itself gets no hooks or settings,
so that other threads may use it at the same time.
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from foveate.methods.recompute_policy import Norm
from foveate.ops.attention_received import attention_received
from foveate.ops.row_attention import row_attention

__all__ = ["CACHE", "DecoderInputs", "RowPass", "StopForward", "capture_unrotated_keys", "row_model"]

CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""Name of the argument of models and of `generate` that takes a cache."""

ROW_ATTENTION = "foveate_rows"
_CAPTURED: ContextVar[dict[int, list[Tensor]] | None] = ContextVar("_CAPTURED", default=None)


class StopForward(Exception):
    """Ends a forward pass whose deeper layers are not needed."""


class DecoderInputs(Exception):
    """Ends a forward pass before its decoder, with the decoder's inputs as argument."""


@dataclass
class RowPass:
    """Attention in one forward pass, its keyword argument `row_pass`: options and results.

    Attributes:
        rows: Row of each token, ascending, for each context or for all of them.
        counted: Mask of the tokens whose attention is collected.
        scoring: Layers that collect the attention received by each row.
        norm: Norm of the collected attention over the tokens.
        last: Layer at which the pass ends, before attention. None runs all layers.
        causal: Whether the tokens are all rows of the cache, in order.
        seen: Last row visible to each token, if tokens of an image attend to all of it. None is its own row.
        received: Collected attention of each row, [contexts, rows] for each scoring layer.
    """

    rows: Int[Tensor, "#contexts tokens"]
    counted: Bool[Tensor, "#contexts tokens"]
    scoring: tuple[int, ...] = ()
    norm: Norm = "l2"
    last: int | None = None
    causal: bool = False
    seen: Int[Tensor, "contexts tokens"] | None = None
    received: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        # one tensor for all layers: row attention caches results by it
        self.shared = self.rows[0] if len(self.rows) == 1 else self.rows

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "batch heads tokens dim"],
        key: Float[Tensor, "batch groups rows dim"],
        value: Float[Tensor, "batch groups rows dim"],
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Attention of a layer. Collects the attention received if the layer scores."""
        if layer in self.scoring:
            contexts = (x.expand(len(query), -1) for x in (self.rows, self.counted))
            each = zip(query, key, *contexts, strict=True)
            received = [attention_received(q, k, at, scale, self.norm, use, window, sinks) for q, k, at, use in each]
            self.received.append(torch.stack(received))
        if layer == self.last:
            raise StopForward
        if self.causal and self.seen is None and window is None and sinks is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return row_attention(query, key, value, self.shared, scale, window, sinks, self.seen)


def _attend(
    module: Any,
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch groups rows dim"],
    value: Float[Tensor, "batch groups rows dim"],
    attention_mask: None,
    scaling: float,
    row_pass: RowPass,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for `AttentionInterface`: each token sees the rows up to its own, or a window of them."""
    return row_pass.attend(module.layer_idx, query, key, value, scaling, sliding_window, s_aux).transpose(1, 2), None


AttentionInterface.register(ROW_ATTENTION, _attend)


def row_model(model: Any) -> Any:
    """A copy of a model that shares its weights and attends by rows; see `RowPass`.

    It has the current adapters and hooks of the model. `capture_unrotated_keys` works for the copy only.
    """
    weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    copy = deepcopy(model, weights)  # tensors in the memo are not copied
    decoder = copy.get_decoder()
    decoder.config._attn_implementation = ROW_ATTENTION
    if decoder is not copy.model:  # a vision-language model
        decoder.forward = partial(_decode, decoder.forward)
    copy.model.forward = partial(_forward, copy.model.forward)
    copy._optimize_model_for_decode = nullcontext  # would change how experts compute while other threads run them
    for layer, block in enumerate(decoder.layers):
        _keep_unrotated_keys(block.self_attn, layer)
    return copy


# not a class statement: type checks of the tests would hold tensors against annotations of transformers
_OTHERS = "rope_deltas", "image_outputs", "video_outputs", "image_hidden_states", "video_hidden_states"
_Output: Any = type("_Output", (MoeModelOutputWithPast,), dict.fromkeys(_OTHERS))
"""What any causal model reads of its decoder's output: dense models and models without images read less."""


def _forward(forward: Any, input_ids: Tensor, row_pass: RowPass | None = None, **options: Any) -> Any:
    """The model's forward pass. Calls of `model.generate`, which knows no rows, append to a `RowCache`."""
    if row_pass is None and (cache := options.get(CACHE)) is not None:
        return _Output(cache.append(input_ids), cache)
    return forward(input_ids=input_ids, **options | ({"row_pass": row_pass} if row_pass else {}))


def _decode(forward: Any, row_pass: RowPass | None = None, **options: Any) -> Any:
    """The decoder's forward pass. Without rows, it gives its inputs, as the model prepares them from images."""
    if row_pass is None:
        raise DecoderInputs(options)
    return forward(row_pass=row_pass, **options)


def _keep_unrotated_keys(attention: Any, layer: int) -> None:
    source = next(part for name in ("k_norm", "k_proj", "qkv_proj") if (part := getattr(attention, name, None)))
    heads_first = attention.config.model_type == "gemma3_text"  # its norm takes [batch, groups, tokens, dim]

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        captured = _CAPTURED.get()
        if captured is not None:
            heads = output.view(*output.shape[:2], -1, attention.head_dim)
            if source is getattr(attention, "qkv_proj", None):  # queries, keys and values
                first = attention.config.num_attention_heads
                heads = heads[:, :, first : first + attention.config.num_key_value_heads]
            captured.setdefault(layer, []).append(heads if heads_first else heads.transpose(1, 2))

    source.register_forward_hook(keep)


@contextmanager
def capture_unrotated_keys() -> Generator[dict[int, list[Float[Tensor, "batch groups tokens dim"]]]]:
    """Capture the keys of each layer before rotation, in forward passes of this thread inside a `with` block."""
    captured: dict[int, list[Tensor]] = {}
    token = _CAPTURED.set(captured)
    try:
        yield captured
    finally:
        _CAPTURED.reset(token)
