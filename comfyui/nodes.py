"""The nodes: options of a method in, a patched copy of the model out."""

from typing import Any

from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.latest import io

from foveate import HilbertA, ToMA
from foveate.methods import Method
from foveate.ops.curves import CURVES

from .forward import FAMILIES, Foveated, family_of

__all__ = ["NODES"]

KEY = "foveate"
DENSE_LAYERS = io.String.Input(
    "dense_layers", default="", tooltip='Attention layers that stay dense, counted from 0, such as "0-1, 56".'
)
WINDOW = (
    io.Float.Input("start_percent", default=0.0, min=0.0, max=1.0, step=0.01, tooltip="Earlier steps stay dense."),
    io.Float.Input("end_percent", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Later steps stay dense."),
)


def patched(model: Any, method: Method, start_percent: float, end_percent: float) -> Any:
    """A copy of the model that runs with a method between two points of the run.

    Raises:
        ValueError: If the model is of no known family, the method does not fit it, or a Foveate node came before.
    """
    diffusion_model = model.get_model_object("diffusion_model")
    if family_of(diffusion_model) is None:
        raise ValueError(
            f"Foveate does not know {type(diffusion_model).__name__}: it works in {', '.join(FAMILIES)} and their kin"
        )
    if model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY):
        raise ValueError("this model has a Foveate node already: use one")
    if start_percent > end_percent:
        raise ValueError(f"start_percent {start_percent} must not be above end_percent {end_percent}")
    sampling = model.get_model_object("model_sampling")
    window = sampling.percent_to_sigma(end_percent), sampling.percent_to_sigma(start_percent)
    foveated = Foveated(method, window)
    foveated.check(diffusion_model)
    copy = model.clone()
    copy.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, foveated)
    copy.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, lambda _patcher: foveated.finish())
    return copy


class FoveateHilbertA(io.ComfyNode):
    """Sparse attention in tiles of a Hilbert curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        return io.Schema(
            node_id="FoveateHilbertA",
            display_name="HilbertA sparse attention",
            category="model/foveate",
            description="Image tokens attend within sliding tiles of a Hilbert curve, to the text and to the centre. "
            "Needs a LoRA that was distilled for it for best quality. tiles=1 is the dense model.",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input(
                    "tiles", default=4, min=1, max=1024, tooltip="More tiles: faster and further from dense."
                ),
                io.Int.Input(
                    "period", default=4, min=1, max=64, tooltip="Layers in which tiles slide by one; 1: never."
                ),
                io.Float.Input(
                    "centre", default=0.25, min=0.0, max=1.0, step=0.01, tooltip="Side of the global centre."
                ),
                io.Combo.Input("curve", options=list(CURVES), default="hilbert"),
                io.Combo.Input("reference", options=["global", "tiled"], tooltip="Attention of reference images."),
                DENSE_LAYERS,
                *WINDOW,
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, start_percent: float, end_percent: float, **options: Any) -> io.NodeOutput:
        """The patched model."""
        return io.NodeOutput(patched(model, HilbertA(**options), start_percent, end_percent))


class FoveateToMA(io.ComfyNode):
    """Token merging."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        return io.Schema(
            node_id="FoveateToMA",
            display_name="ToMA token merging",
            category="model/foveate",
            description="Blocks run on the tokens that represent their windows best; the others follow them. "
            "keep=1.0 is the dense model.",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("keep", default=0.5, min=0.01, max=1.0, step=0.01, tooltip="Fraction of tokens kept."),
                io.Int.Input("tile", default=8, min=2, max=64, tooltip="Side of the windows in tokens."),
                io.Int.Input("skip", default=5, min=0, max=256, tooltip="First blocks that stay dense."),
                io.Int.Input("every", default=5, min=1, max=1000, tooltip="Steps that share a plan."),
                DENSE_LAYERS,
                *WINDOW,
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, start_percent: float, end_percent: float, tile: int, every: int, **options: Any
    ) -> io.NodeOutput:
        """The patched model."""
        method = ToMA(tile=(tile, tile), dst_every=every, weights_every=every, **options)
        return io.NodeOutput(patched(model, method, start_percent, end_percent))


NODES = FoveateHilbertA, FoveateToMA
