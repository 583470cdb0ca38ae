"""What Foveate does in a forward pass of a ComfyUI model; it imports nothing of ComfyUI.

A wrapper around the model's forward pass knows the latent, and so the grid of tokens. It hands the model a copy of the
`transformer_options` with an attention override (HilbertA) or block replacements (ToMA), chained to those that were
there. So nothing of the model is changed, and nothing has to be restored.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.diffusers.preset import Preset
from foveate.methods import HilbertA, Method, ToMA
from foveate.methods.base import AttentionPlan, DenseFallback
from foveate.ops.joint_attention import joint_attention

__all__ = ["FAMILIES", "Foveated", "check_preset", "family_of"]

log = logging.getLogger("foveate")

ROUNDING = 1e-5  # noise levels are float32
OUTSIDE = "this step lies outside start_percent to end_percent"


class Family(NamedTuple):
    """Where the tokens of a family of models are.

    Attributes:
        diffusers: How the names of its classes in diffusers begin.
        blocks: Attributes with its blocks, those that ComfyUI calls "double_block" and then those that it calls
            "single_block"; none where tokens cannot be merged.
        text: Whether text and image attend to each other in one sequence.
        image_first: Whether the image precedes the text there.
    """

    diffusers: str | tuple[str, ...]
    blocks: tuple[str, ...] = ()
    text: bool = True
    image_first: bool = False


FAMILIES = {
    "Flux": Family("FluxTransformer", ("double_blocks", "single_blocks")),
    "Chroma": Family("ChromaTransformer", ("double_blocks", "single_blocks")),
    "QwenImageTransformer2DModel": Family("QwenImageTransformer", ("transformer_blocks",)),
    "HunyuanVideo": Family(
        ("HunyuanVideoTransformer", "HunyuanImageTransformer"), ("double_blocks", "single_blocks"), image_first=True
    ),
    "NextDiT": Family("Lumina2Transformer"),
    "HumoWanModel": Family((), text=False),  # attends to audio frame by frame
    "WanModel": Family("Wan", ("blocks",), text=False),
    "LTXVModel": Family("LTXVideoTransformer", text=False),
}
"""Families by the name of the model's class, or of one that it inherits from."""


def family_of(model: Any) -> Family | None:
    """The family of a model; None if it is unknown."""
    return next((FAMILIES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in FAMILIES), None)


class Foveated:
    """A wrapper around the forward pass of a model.

    Args:
        method: Method to run.
        window: Lowest and highest noise level at which it works.
        grids: Grids of tokens for which the method was tuned; other ones are logged.
    """

    def __init__(self, method: Method, window: tuple[float, float], grids: Any = ()) -> None:
        self.method, self.window, self.grids = method, window, grids
        self.outcomes: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self._sigma, self._step = -1.0, -1
        self._merges: dict[Any, tuple[tuple[int, int], Any]] = {}

    def check(self, model: Any) -> None:
        """Check that the method fits the model.

        Raises:
            ValueError: If it does not, or the model is unknown.
        """
        name, method, family = type(model).__name__, self.method, family_of(model)
        if family is None:
            raise ValueError(f"Foveate does not know {name}: it works in {', '.join(FAMILIES)} and their kin")
        if isinstance(method, ToMA):
            if not family.blocks:
                merging = ", ".join(known for known, one in FAMILIES.items() if one.blocks)
                raise ValueError(f"tokens are not merged in {name}, only in {merging}: use HilbertA")
            if (method.granularity, method.merge_every, method.size_bias) != ("block", 1, False):
                raise ValueError(f"in ComfyUI whole blocks merge in every step, without size_bias: not {method!r}")

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output, by the method where it can work."""
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        named = "transformer_options" in call.signature.parameters
        given = call.arguments if named else call.arguments.setdefault("kwargs", {})
        options = given.get("transformer_options") or {}
        try:
            changed = self._options(executor.class_obj, call.arguments, options)
        except DenseFallback as reason:
            if str(reason) not in (*self.outcomes, OUTSIDE):
                log.warning("%s stays dense: %s", self.method.title, reason)
            self.outcomes[str(reason)] += 1
            return executor(*args, **kwargs)
        self.outcomes[""] += 1
        given["transformer_options"] = {**options, **changed}
        return executor(*call.args, **call.kwargs)

    def finish(self) -> None:
        """Log what was done in the run, and forget its plans."""
        if self.outcomes:
            dense = [f"{count} dense: {why}" for why, count in self.outcomes.items() if why]
            at_work = f"{self.method.title}: {self.outcomes['']} of {self.outcomes.total()} forward passes"
            layers = f"{self.layers['']} attention calls or blocks with it, {self.layers['dense']} without"
            log.info("; ".join([f"{at_work} ({layers})", *dense]))
        self._sigma, self._step = -1.0, -1
        self.outcomes.clear()
        self.layers.clear()
        self._merges.clear()

    def _options(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """The entries of `transformer_options` that differ in this forward pass."""
        sigma = float(options["sigmas"].max()) if "sigmas" in options else 0.0
        low, high = self.window
        if not low - ROUNDING <= sigma <= high + ROUNDING:
            raise DenseFallback(OUTSIDE)
        if sigma != self._sigma:
            self._step = self._step + 1 if sigma < self._sigma else 0
            self._sigma = sigma
        family = family_of(model)
        if family is None:
            raise DenseFallback(f"{type(model).__name__} is not known")
        x, context = inputs["x"], inputs["context"]
        references = inputs.get("ref_latents") or inputs.get("kwargs", {}).get("ref_latents") or []
        grids = tuple(grid_of(model, latent) for latent in (x, *references))
        if prod(grids[0]) < self.method.min_tokens:
            raise DenseFallback(f"{prod(grids[0])} image tokens are fewer than min_tokens={self.method.min_tokens}")
        if self.grids and grids not in self.grids:
            log.warning("the preset was tuned for other sizes: error and gain are unknown here")
            self.grids = ()
        text = inputs.get("num_tokens", context.shape[1]) if family.text else 0
        if getattr(model, "byt5_in", None) is not None and (glyphs := inputs.get("txt_byt5")) is not None:
            text += glyphs.shape[1]  # HunyuanImage
        if isinstance(self.method, ToMA):
            key = (grids, text, len(x), x.dtype, x.device, tuple(options.get("cond_or_uncond", ())))
            return self._merging(model, family, grids, options, key)
        if not family.text and context.shape[1] == prod(grids[0]):
            raise DenseFallback(f"{context.shape[1]} text tokens cannot be told from as many image tokens")
        plan = self.method.plan(grids, text, device=str(x.device))
        words, first, images = torch.arange(text, device=x.device), family.image_first, len(plan.orders[0])
        orders = [torch.cat([words + images, order] if first else [words, order + text]) for order in plan.orders]
        former = options.get("optimized_attention_override")
        attend = Attention(plan, orders, self.method.dense_layer_set(), self.layers, former)
        return {"optimized_attention_override": attend}

    def _merging(
        self, model: Any, family: Family, grids: tuple[tuple[int, ...], ...], options: dict[str, Any], key: Any
    ) -> dict[str, Any]:
        if self.method.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        merging = Merging(self, self.method.regions(grids, device=str(key[4])), key, family.image_first)
        replaced = dict(options.get("patches_replace") or {})
        blocks, number = dict(replaced.get("dit") or {}), 0
        for kind, attribute in zip(("double_block", "single_block"), family.blocks, strict=False):
            length = len(getattr(model, attribute))
            dense = min(5, length if (len(family.blocks), kind) == (2, "double_block") else length // 3)
            dense = dense if self.method.skip is None else self.method.skip
            for i in range(length):
                if i < dense or number in self.method.dense_layer_set():
                    self.layers["dense"] += 1
                else:
                    blocks[kind, i] = partial(merging.block, blocks.get((kind, i)))
                number += 1
        return {"patches_replace": {**replaced, "dit": blocks}}

    def plan(self, key: Any, tokens: Tensor, regions: Any) -> Any:
        """The plan of merging of these tokens, made anew where it is due."""
        periods = self._step // self.method.dst_every, self._step // self.method.weights_every
        made, plan = self._merges.get(key, (None, None))
        if made != periods:
            chosen = plan.chosen if made and made[0] == periods[0] else None
            with torch.no_grad():
                plan = self.method.plan(tokens.index_select(1, regions.order), regions, chosen)
            self._merges[key] = periods, plan
        return plan


def check_preset(preset: Preset, model: Any) -> None:
    """Check that a preset was made on this model, as far as its class and its number of blocks say.

    Raises:
        ValueError: If it was not, or needs what there is in diffusers only.
    """
    family = family_of(model)
    if len(preset.methods) != 1 or not isinstance(preset.methods[0], HilbertA | ToMA):
        raise ValueError(f"{preset.title} works in diffusers only: tune with one of hilberta and toma for ComfyUI")
    made, name = preset.models[0], type(model).__name__
    if family is None or not made["class"].startswith(family.diffusers):
        raise ValueError(f"the preset is for {made['class']}, and this is {name}: presets hold for one model")
    counts = made["config"].get("num_layers"), made["config"].get("num_single_layers")
    for attribute, count in zip(family.blocks, counts, strict=False):
        if count not in (None, length := len(getattr(model, attribute))):
            raise ValueError(f"the preset is for {count} {attribute}, and this model has {length}: tune it itself")


def grid_of(model: Any, latent: Tensor) -> tuple[int, ...]:
    """(rows, columns) or (frames, rows, columns) in tokens of a latent [batch, channels, *sides]."""
    sides = tuple(latent.shape[2:])
    patch = getattr(model, "patch_size", 1)
    patch = (1,) * (len(sides) - 2) + (patch, patch) if isinstance(patch, int) else tuple(patch)[-len(sides) :]
    grid = tuple(-(-side // size) for side, size in zip(sides, patch, strict=True))
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid


class Attention:
    """An attention override: calls of the planned length attend by the plan, others as before.

    Args:
        plan: Plan of sparse attention.
        orders: Positions in the attention sequence in each order of the plan, text first.
        dense_layers: Numbers of the layers that stay dense.
        layers: Counts the layers.
        former: The override that was there; None if there was none.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        orders: list[Tensor],
        dense_layers: frozenset[int],
        layers: Counter[str],
        former: Callable[..., Tensor] | None,
    ) -> None:
        self.plan, self.orders, self.former = plan, orders, former
        self.dense_layers, self.layers = dense_layers, layers
        self._number = -1

    def __call__(
        self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output of an attention call, in the form that the caller asks for."""
        shaped = kwargs.get("skip_reshape", False)
        tokens, mask = len(self.orders[0]), args[0] if args else kwargs.get("mask")
        same = q.shape[2 if shaped else 1] == k.shape[2 if shaped else 1] == tokens
        self._number += same
        if not same or mask is not None or self._number in self.dense_layers:
            self.layers["dense"] += same
            attend = partial(self.former, func) if self.former else func
            return attend(q, k, v, heads, *args, **kwargs)
        self.layers[""] += 1
        if not shaped:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        table, order = (each[self._number % len(each)] for each in (self.plan.tables, self.orders))
        q, k, v = (x.index_select(2, order) for x in (q, k, v))
        out = joint_attention(q, k, v, table, scatter=order)
        return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)


class Merging:
    """Block replacements that run blocks on merged tokens, chained to the replacements that were there.

    Args:
        owner: Keeps the plans from step to step.
        regions: Regions within which tokens merge.
        key: What a plan belongs to.
        image_first: Whether the image precedes the text where both are in one sequence.
    """

    def __init__(self, owner: Foveated, regions: Any, key: Any, image_first: bool) -> None:
        self.owner, self.regions, self.key, self.image_first = owner, regions, key, image_first
        self.images, self.text = len(regions.order), key[1]

    def block(self, former: Callable[..., Any] | None, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """The output of a block, single-stream (text and image in one tensor) or double-stream."""
        original = (lambda given: former(given, extra)) if former else extra["original_block"]
        x, double = args["img"], "txt" in args
        dim = 2 if args["pe"].shape[1] == 1 else 1  # [batch, 1, tokens, ...] or [batch, tokens, 1, ...]
        lengths = args["pe"].shape[dim], x.shape[1] + (self.text if double else 0)
        if any(length != self.images + self.text for length in lengths) or _varies(args):
            self.owner.layers["dense"] += 1
            return original(args)
        self.owner.layers[""] += 1
        image, words = self._split(x)
        order = self.regions.order
        merge = self.owner.plan(self.key, image, self.regions)
        merged = merge.merge(image, 0, order)
        out = original({**args, "img": self._join(merged, words), "pe": self._rope(args["pe"], dim, merge)})
        after, words = self._split(out["img"], merged.shape[1])
        return {**out, "img": self._join(merge.update(image, merged, after, order), words)}

    def _split(self, x: Tensor, images: int = 0, dim: int = 1) -> tuple[Tensor, Tensor]:
        """Image and text of a sequence."""
        sizes = [images or self.images, x.shape[dim] - (images or self.images)]
        if self.image_first:
            return x.split(sizes, dim)
        return x.split(sizes[::-1], dim)[::-1]

    def _join(self, image: Tensor, text: Tensor, dim: int = 1) -> Tensor:
        return torch.cat((image, text) if self.image_first else (text, image), dim)

    def _rope(self, pe: Tensor, dim: int, merge: Any) -> Tensor:
        """The rotary embedding with the rows of the destinations in place of all images'; tokens are along `dim`."""
        image, text = self._split(pe, dim=dim)
        rows = self.regions.order[merge.positions]  # [plans, merged]
        taken = torch.stack([image[min(i, len(pe) - 1)].index_select(dim - 1, row) for i, row in enumerate(rows)])
        return self._join(taken, text[: len(rows)].expand(len(rows), *text.shape[1:]), dim)


def _varies(args: dict[str, Any]) -> bool:
    """Whether a block has masks or a modulation that differs from token to token."""
    special = "attn_mask", "attention_mask", "modulation_dims", "modulation_dims_img"
    vec = args["vec"]
    return any(args.get(name) is not None for name in special) or (
        isinstance(vec, Tensor) and vec.ndim == 4 and vec.shape[1] > 1
    )
