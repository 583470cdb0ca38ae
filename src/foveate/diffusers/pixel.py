# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""LLSA in a `PixelDiT`, which puts its tokens in order by itself."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.diffusers.borrowed import outside_compiled_code
from foveate.diffusers.family import Family
from foveate.diffusers.order import by_name
from foveate.diffusers.pixel_dit import PixelDiT, attend_densely
from foveate.diffusers.pixel_pipeline import PixelPipeline
from foveate.diffusers.summary import LayerReport
from foveate.methods import LLSA, Method
from foveate.methods.llsa import OPTIONS, LLSAPlan
from foveate.ops.joint_attention import backend_of
from foveate.ops.log_linear_attention import log_linear_attention

__all__ = ["Pixel", "as_method"]

OF_A_MODEL = "top_k", "block_size", "levels", "enrich", "reweight"


class _Ran(NamedTuple):
    """What the last forward did."""

    plan: LLSAPlan | None = None
    why: str = "no forward yet"  # it was dense
    words: int = 0
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


class Pixel(Family):
    """One `PixelDiT` with LLSA in it. Where the method is not at work the model is dense, however it was trained."""

    def __init__(self, model: PixelDiT, methods: tuple[Method, ...], pipeline: Any) -> None:
        if len(methods) != 1 or not isinstance(methods[0], LLSA):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"PixelDiT takes one LLSA and nothing else so far, not {given}")
        (self.method,) = methods
        if self.method.curve != (order := model.config.order):
            raise ValueError(f"this model's tokens are in {order} order: use curve={order}, not {self.method.curve}")
        super().__init__(model, methods, pipeline)
        self.check_layers(len(model.blocks))
        self.sparse = partial(log_linear_attention, **{name: getattr(self.method, name) for name in OPTIONS})
        self.own = [(block.attn, block.attn.attend) for block in model.blocks]
        self.ran = self.shown = _Ran()
        self._hook = model.register_forward_pre_hook(self.enter, with_kwargs=True)

    def remove(self) -> None:
        """Give every block its own attention back."""
        self._hook.remove()
        for attn, own in self.own:
            attn.attend = own

    @property
    def plan(self) -> LLSAPlan | None:
        """What the method decided for the last forward; None if it was dense."""
        return self.ran.plan

    def report(self) -> list[LayerReport]:
        """One row for each block."""
        return [self._report(i) for i in range(len(self.model.blocks))]

    def _report(self, block: int) -> LayerReport:
        (plan, why, words, batch, device, dtype), name = self.shown, f"blocks.{block}.attn"
        if plan is None or block in self.method.dense_layer_set():
            return LayerReport(name, "dense", why=why or "named in dense_layers")
        table, tokens, heads = plan.tables[0], len(plan.order), self.model.config.num_attention_heads
        left_out, head_dim = tokens - table.keys(), self.model.config.attention_head_dim
        return LayerReport(
            name,
            plan.title,
            backend_of(table, device, dtype, head_dim),
            plan.nominal_sparsity,
            left_out / (tokens + words),
            4 * batch * tokens * left_out * heads * head_dim,
        )

    @outside_compiled_code
    def enter(self, model: PixelDiT, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide what this forward does, and tell the blocks."""
        inputs = by_name(model, args, kwargs)
        x, text = inputs["hidden_states"], inputs.get("encoder_hidden_states")
        plan, why = self.ask(self.method, lambda: self._plan(x))
        self.ran = _Ran(plan, why, 0 if text is None else text.shape[1], len(x), x.device, x.dtype)
        self.outcomes[why] += 1
        if not why or not self.outcomes[""]:
            self.shown = self.ran
        for i, block in enumerate(model.blocks):
            dense = plan is None or i in self.method.dense_layer_set()
            block.attn.attend = attend_densely if dense else self.sparse

    def _plan(self, x: Tensor) -> LLSAPlan:
        rows, columns = (side // self.model.config.patch_size for side in x.shape[2:])
        self.check_step(self.method, rows * columns)
        return self.method.plan(((rows, columns),), 0, device=str(x.device))


def as_method(pipeline: PixelPipeline) -> LLSA:
    """The log-linear attention of a pipeline's model, taken out of it: without this method the model is dense."""
    model = pipeline.transformer
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    dense = PixelDiT(**{**config, "attention": "dense"}).to(model.device, model.dtype)
    dense.load_state_dict(model.state_dict())
    pipeline.register_modules(transformer=dense.eval())
    options = {name: config[name] for name in OF_A_MODEL}
    return LLSA(**options, curve=config["order"], min_tokens=0)
