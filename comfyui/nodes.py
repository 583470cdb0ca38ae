"""ComfyUI nodes that return a patched copy of the model, by the options of a method."""

from pathlib import Path
from typing import Any

import folder_paths
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.latest import io

from foveate import LLSA, HilbertA, ToMA, load
from foveate.methods import Method, method_from_text
from foveate.ops.curves import CURVES

from .forward import Foveated, check_preset

__all__ = ["NODES"]

KEY = "foveate"
PRESETS = Path(folder_paths.models_dir) / "foveate"
folder_paths.add_model_folder_path("foveate", str(PRESETS))


def when(start_percent: float = 0.0) -> tuple[Any, ...]:
    """Inputs for the layers and steps in which a method works."""
    return (
        io.String.Input(
            "dense_layers", default="", tooltip='Attention layers that stay dense, counted from 0, such as "0-1, 56".'
        ),
        io.Float.Input(
            "start_percent", default=start_percent, min=0.0, max=1.0, step=0.01, tooltip="Earlier steps stay dense."
        ),
        io.Float.Input("end_percent", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Later steps stay dense."),
        io.String.Input(
            "schedule",
            default="",
            tooltip="The first option by the fraction of the run, in its place: ((0, dense), (0.2, 4), (0.5, 16)).",
        ),
    )


def scheduled(name: str, option: str, schedule: str) -> dict[str, Any]:
    """The option of a method as the schedule of a node says; nothing without one."""
    text = schedule.strip()
    return {option: getattr(method_from_text(name, {option: text}), option)} if text else {}


def patched(model: Any, *methods: Method, grids: Any = ()) -> io.NodeOutput:
    """A copy of the model with these methods, and with the method of an earlier Foveate node.

    Raises:
        ValueError: If the model's family is unknown, or the methods do not support it or cannot be combined.
    """
    for before in model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY):
        if grids or before.grids:
            raise ValueError("a preset has all its methods: use no other Foveate node with it")
        methods = *before.methods, *methods
    to_sigma = model.get_model_object("model_sampling").percent_to_sigma
    windows = [(to_sigma(method.end_percent), to_sigma(method.start_percent)) for method in methods]
    levels = [tuple(to_sigma(start) for start, _ in method.schedule) for method in methods]
    foveated = Foveated(*zip(methods, windows, levels, strict=True), grids=grids)
    foveated.check(model.get_model_object("diffusion_model"))
    copy = model.clone()
    copy.remove_wrappers_with_key(WrappersMP.DIFFUSION_MODEL, KEY)
    copy.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    copy.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, foveated)
    copy.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, lambda _patcher: foveated.finish())
    return io.NodeOutput(copy)


def schema(node_id: str, display_name: str, description: str, *options: Any) -> io.Schema:
    """Schema of a node with a model before its options, and a model as its output."""
    return io.Schema(
        node_id=node_id,
        display_name=display_name,
        category="model/foveate",
        description=description,
        inputs=[io.Model.Input("model"), *options],
        outputs=[io.Model.Output()],
    )


class FoveateHilbertA(io.ComfyNode):
    """Sparse attention in tiles of a Hilbert curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        return schema(
            "FoveateHilbertA",
            "HilbertA sparse attention",
            "Image tokens attend within sliding tiles of a Hilbert curve, to the text and to the centre. "
            "For best quality it needs a LoRA distilled for it. tiles=1 is the dense model.",
            io.Int.Input(
                "tiles",
                default=4,
                min=0,
                max=1024,
                tooltip="More tiles: faster and further from dense. 0: the most, up to 16, with 256 tokens to a tile.",
            ),
            io.Int.Input("period", default=4, min=1, max=64, tooltip="Layers in which tiles slide by one; 1: never."),
            io.Float.Input("centre", default=0.25, min=0.0, max=1.0, step=0.01, tooltip="Side of the global centre."),
            io.Combo.Input("curve", options=list(CURVES), default="hilbert"),
            io.Combo.Input("reference", options=["global", "tiled"], tooltip="Attention of reference images."),
            *when(),
            io.Combo.Input(
                "slide",
                options=["auto", "diagonal", "curve"],
                default="auto",
                optional=True,  # workflows that were saved before it was there
                tooltip="How the LoRA was distilled. auto: diagonally over the image, or along the curve beside ToMA.",
            ),
        )

    @classmethod
    def execute(cls, model: Any, tiles: int, schedule: str = "", **options: Any) -> io.NodeOutput:
        """The patched model."""
        return patched(
            model, HilbertA(**{"tiles": tiles or "auto", **options, **scheduled("hilberta", "tiles", schedule)})
        )


class FoveateLLSA(io.ComfyNode):
    """Log-linear sparse attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        return schema(
            "FoveateLLSA",
            "LLSA log-linear attention",
            "Each block of image tokens attends to the blocks that match it best, and to averages of the others. It "
            "needs no LoRA if the first steps stay dense.",
            io.Int.Input(
                "top_k", default=16, min=1, max=1024, tooltip="Blocks read token by token: more is closer to dense."
            ),
            io.Combo.Input("block_size", options=["16", "32", "64"], tooltip="Tokens in a block."),
            io.Combo.Input("curve", options=list(CURVES), default="morton"),
            *when(start_percent=0.4),
        )

    @classmethod
    def execute(cls, model: Any, block_size: str, schedule: str = "", **options: Any) -> io.NodeOutput:
        """The patched model."""
        return patched(model, LLSA(block_size=int(block_size), **{**options, **scheduled("llsa", "top_k", schedule)}))


class FoveateToMA(io.ComfyNode):
    """Token merging."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        return schema(
            "FoveateToMA",
            "ToMA token merging",
            "Blocks run on the tokens that represent their windows best; the other tokens take on their changes. "
            "keep=1.0 is the dense model.",
            io.Float.Input("keep", default=0.5, min=0.01, max=1.0, step=0.01, tooltip="Fraction of tokens kept."),
            io.Int.Input("tile", default=8, min=2, max=64, tooltip="Side of the windows in tokens."),
            io.Int.Input("skip", default=5, min=0, max=256, tooltip="First blocks of each kind that stay dense."),
            io.Int.Input("every", default=5, min=1, max=1000, tooltip="Steps that share a plan."),
            *when(),
        )

    @classmethod
    def execute(cls, model: Any, tile: int, every: int, schedule: str = "", **options: Any) -> io.NodeOutput:
        """The patched model."""
        options |= scheduled("toma", "keep", schedule)
        return patched(model, ToMA(tile=(tile, tile), dst_every=every, weights_every=every, **options))


def preset_path(name: str) -> Path:
    """File of a preset in the list of the node."""
    return Path(folder_paths.get_full_path_or_raise("foveate", name))


class FoveatePreset(io.ComfyNode):
    """Settings chosen by `foveate tune`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Name, inputs and output."""
        presets = [name for name in folder_paths.get_filename_list("foveate") if name.endswith(".json")]
        return schema(
            "FoveatePreset",
            "Foveate preset",
            "Methods and options of a preset: a JSON file in models/foveate that foveate tune wrote for this model.",
            io.Combo.Input("preset", options=presets),
        )

    @classmethod
    def execute(cls, model: Any, preset: str) -> io.NodeOutput:
        """The patched model."""
        tuned = load(preset_path(preset))
        check_preset(tuned, model.get_model_object("diffusion_model"))
        return patched(model, *tuned.methods, grids=tuned.grids)

    @classmethod
    def fingerprint_inputs(cls, preset: str, **_others: Any) -> str:
        """Content of the file, so that a changed file is read again."""
        return preset_path(preset).read_text()


NODES = FoveateHilbertA, FoveateLLSA, FoveateToMA, FoveatePreset
