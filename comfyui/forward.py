"""Foveate in the forward pass of a ComfyUI model. This module does not import ComfyUI.

A wrapper around the model's forward pass knows the latent, and so the grid of tokens. It passes the model a copy of
the `transformer_options` with an attention override (HilbertA, LLSA), block replacements (ToMA) or both, chained to
existing ones. So the model is not changed, and nothing has to be restored.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foveate.diffusers.preset import Preset
from foveate.methods import LLSA, HilbertA, ToMA
from foveate.methods.base import AttentionPlan, DenseFallback, DenseStep, default_skip, sparse_and_merging
from foveate.ops.joint_attention import joint_attention
from foveate.ops.merging import Regions, merged_pattern

__all__ = ["FAMILIES", "Foveated", "check_preset", "family_of"]

log = logging.getLogger("foveate")

T = TypeVar("T")

Layout = tuple[tuple[int, ...], ...]  # grid of the image, then of each reference image

ROUNDING = 1e-5  # noise levels are float32


class Family(NamedTuple):
    """Token layout of a family of models.

    Attributes:
        diffusers: Prefixes of its class names in diffusers.
        blocks: Attributes with its blocks, first ComfyUI's "double_block", then "single_block"; empty if tokens cannot
            be merged.
        text: Whether text and image attend to each other in one sequence.
        image_first: Whether the image precedes the text in this sequence.
        levels: Attribute of a UNet with one entry per level, each half as large as the one before; empty for others.
    """

    diffusers: str | tuple[str, ...]
    blocks: tuple[str, ...] = ()
    text: bool = True
    image_first: bool = False
    levels: str = ""


FAMILIES: dict[str, Family | None] = {
    "Flux": Family(("FluxTransformer", "Flux2Transformer"), ("double_blocks", "single_blocks")),
    "Chroma": Family("ChromaTransformer", ("double_blocks", "single_blocks")),
    "QwenImageTransformer2DModel": Family("QwenImageTransformer", ("transformer_blocks",)),
    "HunyuanVideo": Family(("HunyuanVideoTransformer", "HunyuanImageTransformer"), ("double_blocks", "single_blocks")),
    "NextDiT": Family("Lumina2Transformer"),
    "HumoWanModel": Family((), text=False),  # attends to audio frame by frame
    "WanModel": Family("Wan", ("blocks",), text=False),
    "LTXVModel": Family("LTXVideoTransformer", text=False),
    "HiDreamImageTransformer2DModel": Family((), image_first=True),
    "GeneralDIT": Family("CosmosTransformer", text=False),
    "MiniTrainDIT": Family("CosmosTransformer", text=False),
    "OpenAISignatureMMDITWrapper": None,  # SD3, which inherits from a namesake of AuraFlow, calls no wrappers
    "MMDiT": Family(()),
    "UNetModel": Family("UNet2DConditionModel", text=False, levels="channel_mult"),
}
"""Families by the name of the model's class or a base class; None if not supported."""


def family_of(model: Any) -> Family | None:
    """Family of a model, or None."""
    return next((FAMILIES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in FAMILIES), None)


class Part:
    """A method in a model, with counts for the log.

    Args:
        method: The method.
        window: Lowest and highest noise level at which the method is active.
        levels: Noise level at which each entry of the method's schedule begins.

    Attributes:
        outcomes: Number of forward passes by the reason why they were dense; "" counts passes with the method.
        layers: Number of attention calls or blocks with the method, under "", and without it, under "dense".
    """

    def __init__(self, method: Any, window: tuple[float, float], levels: tuple[float, ...] = (inf,)) -> None:
        self.method, self.window, self.levels = method, window, levels
        self.outcomes: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self._warned: set[str] = set()

    def ask(self, decide: Callable[[], T]) -> T | None:
        """Result of `decide` for a forward pass; None if the pass stays dense."""
        try:
            decided = decide()
        except DenseFallback as reason:
            if not isinstance(reason, DenseStep):
                self.warn(reason)
            self.outcomes[str(reason)] += 1
            return None
        self.outcomes[""] += 1
        return decided

    def warn(self, reason: DenseFallback) -> None:
        """Log why something stays dense, once a run."""
        if str(reason) not in self._warned:
            log.warning("%s stays dense: %s", self.method.title, reason)
            self._warned.add(str(reason))

    def at_level(self, sigma: float) -> Any:
        """The method with the options that it has at this noise level.

        Raises:
            DenseStep: If it leaves this step dense.
        """
        low, high = self.window
        if not low - ROUNDING <= sigma <= high + ROUNDING:
            raise DenseStep("this step lies outside start_percent to end_percent")
        starts = [start for (start, _), level in zip(self.method.schedule, self.levels, strict=True)
                  if sigma <= level + ROUNDING]  # fmt: skip
        return self.method.at_progress(max(self.method.start_percent, *starts))

    def finish(self) -> None:
        """Log the counts of the run and reset them."""
        if self.outcomes:
            dense = [f"{count} dense: {why}" for why, count in self.outcomes.items() if why]
            at_work = f"{self.method.title}: {self.outcomes['']} of {self.outcomes.total()} forward passes"
            layers = f"{self.layers['']} attention calls or blocks with it, {self.layers['dense']} without"
            write = log.warning if self.outcomes[""] and not self.layers[""] else log.info
            write("; ".join([f"{at_work} ({layers})", *dense]))
        self.outcomes.clear()
        self.layers.clear()
        self._warned.clear()


class Foveated:
    """A wrapper around the forward pass of a model.

    Args:
        *parts: Methods, each with the lowest and highest noise level at which it is active, and those at which the
            entries of its schedule begin.
        grids: (rows, columns) of image tokens that the methods were tuned for; other sizes log a warning.
    """

    def __init__(self, *parts: Any, grids: Any = ()) -> None:
        self.parts, self.grids = [Part(*part) for part in parts], grids
        self.sparse = next((part for part in self.parts if not isinstance(part.method, ToMA)), None)
        self.merging = next((part for part in self.parts if isinstance(part.method, ToMA)), None)
        if self.sparse and self.merging:
            self.sparse.method, _ = sparse_and_merging(self.methods)
        self._warned = False
        self._sigma, self._step = -1.0, -1
        self._passes: Counter[Any] = Counter()  # of this step, by kind
        self._merges: dict[Any, tuple[tuple[int, int, float], Any]] = {}

    @property
    def methods(self) -> list[Any]:
        """The methods."""
        return [part.method for part in self.parts]

    def check(self, model: Any) -> None:
        """Check that the methods can be combined and support the model.

        Raises:
            ValueError: If not, or if the model is unknown.
        """
        name, family = type(model).__name__, family_of(model)
        if family is None:
            known = ", ".join(known for known, one in FAMILIES.items() if one)
            raise ValueError(f"Foveate does not know {name}: it works in {known} and models derived from them")
        sparse_and_merging(self.methods)
        if self.merging is None:
            return
        method = self.merging.method
        if not family.blocks:
            merging = ", ".join(known for known, one in FAMILIES.items() if one and one.blocks)
            raise ValueError(f"tokens are not merged in {name}, only in {merging}: use HilbertA or LLSA")
        if (method.granularity, method.merge_every) != ("block", 1):
            raise ValueError(f"in ComfyUI whole blocks merge in every step: not {method!r}")

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output, with the methods where possible."""
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        named = "transformer_options" in call.signature.parameters
        given = call.arguments if named else call.arguments.setdefault("kwargs", {})
        options = given.get("transformer_options") or {}
        changed = self._options(executor.class_obj, call.arguments, options)
        if not changed:
            return executor(*args, **kwargs)
        given["transformer_options"] = {**options, **changed}
        return executor(*call.args, **call.kwargs)

    def finish(self) -> None:
        """Log the counts of the run, and drop its plans."""
        for part in self.parts:
            part.finish()
        self._sigma, self._step = -1.0, -1
        self._merges.clear()

    def _options(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Changed entries of `transformer_options` for this forward pass."""
        changed: dict[str, Any] = {}
        attend = self.sparse and self.sparse.ask(lambda: self._attention(model, inputs, options))
        if attend:
            changed["optimized_attention_override"] = attend
        if self.merging and (blocks := self.merging.ask(lambda: self._blocks(model, inputs, options, attend))):
            changed["patches_replace"] = {**(options.get("patches_replace") or {}), "dit": blocks}
        return changed

    def _tokens(
        self, part: Part, model: Any, inputs: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Any, Family, list[Layout], int]:
        """The method in this step, family of the model, grids of its image tokens, and number of text tokens.

        A UNet has grids for each of its levels, other models have them once.

        Raises:
            DenseFallback: If the method cannot run in this forward pass.
        """
        method, family = part.at_level(sigma_of(options)), family_of(model)
        if family is None:
            raise DenseFallback(f"{type(model).__name__} is not known")
        references = inputs.get("ref_latents") or inputs.get("kwargs", {}).get("ref_latents") or []
        layouts: list[Layout] = [tuple(grid_of(model, latent) for latent in (inputs["x"], *references))]
        while len(layouts) < len(getattr(model, family.levels, [1])):
            layouts.append((tuple(-(-side // 2) for side in layouts[-1][0]),))
        if self.grids and not self._warned and not any(layout in self.grids for layout in layouts):
            log.warning("the preset was tuned for other sizes: error and gain are unknown here")
            self._warned = True
        text = inputs["context"].shape[1] if family.text else 0
        if multiple := getattr(model, "pad_tokens_multiple", None):
            text += -text % multiple  # Z-Image
        if getattr(model, "byt5_in", None) is not None and (glyphs := inputs.get("txt_byt5")) is not None:
            text += glyphs.shape[1]  # HunyuanImage
        if (registers := getattr(model, "register_tokens", None)) is not None:
            text += registers.shape[1]  # AuraFlow
        if (llama := inputs.get("encoder_hidden_states_llama3")) is not None:
            text += 2 * llama.shape[2]  # HiDream: one layer's text in all blocks, and another layer's in each block
        if inputs.get("image_cond") is not None:
            raise DenseFallback("the latent also holds the image to edit")
        return method, family, layouts, text

    def _attention(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> "Attention":
        """Sparse attention of this forward pass."""
        method, family, layouts, text = self._tokens(self.sparse, model, inputs, options)
        plans: dict[int, AttentionPlan | None] = {}
        reasons: list[DenseFallback] = []
        for layout in layouts:
            tokens = text + sum(map(prod, layout))
            try:
                plans[tokens] = self._plan(method, family, layout, text, inputs)
            except DenseFallback as reason:
                plans[tokens] = None
                reasons.append(reason)
        if not any(plans.values()):
            raise reasons[0]
        former = options.get("optimized_attention_override")
        return Attention(self.sparse, plans, text, family.image_first, former)

    def _plan(self, method: Any, family: Family, layout: Layout, text: int, inputs: dict[str, Any]) -> AttentionPlan:
        """Plan of sparse attention for these grids; a DenseFallback if they stay dense."""
        method.check_tokens(prod(layout[0]))
        if not family.text:
            check_cross_attention(inputs, prod(layout[0]))
        try:
            return method.plan(layout, text, device=str(inputs["x"].device))
        except ValueError as reason:
            if family.levels:  # the setting may fit other levels
                raise DenseFallback(str(reason)) from None
            raise

    def _blocks(
        self, model: Any, inputs: dict[str, Any], options: dict[str, Any], attend: "Attention | None"
    ) -> dict[Any, Callable[..., Any]]:
        """Replaced blocks of this forward pass; merged tokens attend sparsely if `attend` is given."""
        part, x = self.merging, inputs["x"]
        method, family, (grids,), text = self._tokens(part, model, inputs, options)
        method.check_tokens(prod(grids[0]))
        if method.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        if (sigma := sigma_of(options)) != self._sigma:
            if sigma > self._sigma:  # another image
                self._step = -1
                self._merges.clear()
            self._sigma, self._step = sigma, self._step + 1
            self._passes.clear()
        if attend:
            (plan,) = attend.plans.values()
            regions = method.regions_along(plan, grids[0])
            if not family.text:
                check_cross_attention(inputs, regions.kept)
            attend.merge(regions)
        else:
            regions = method.regions(grids, device=str(x.device))
        run = bool(attend), grids, len(x), x.dtype, x.device, tuple(options.get("cond_or_uncond", ()))
        self._passes[run] += 1  # each window of a tiled image has a plan of its own
        merging = Merging(self, method, regions, text, attend, (text, self._passes[run], *run))
        blocks, number = dict((options.get("patches_replace") or {}).get("dit") or {}), 0
        for kind, attribute in zip(("double_block", "single_block"), family.blocks, strict=False):
            length = len(getattr(model, attribute))
            skip = default_skip(length, double=(len(family.blocks), kind) == (2, "double_block"))
            for i, merges in enumerate(method.merging_blocks(length, skip, number)):
                if merges:
                    blocks[kind, i] = partial(merging.block, kind, blocks.get((kind, i)))
                else:
                    part.layers["dense"] += 1
            number += length
        return blocks

    def plan(self, key: Any, method: Any, tokens: Tensor, regions: Regions) -> Any:
        """Merge plan of these tokens by this setting of the method, recomputed when due."""
        periods = (method.keep, *method.periods(self._step))
        made, plan = self._merges.get(key, (None, None))
        if made != periods:
            chosen = plan.chosen if made and made[:2] == periods[:2] else None
            with torch.no_grad():
                plan = method.plan(tokens.index_select(1, regions.order), regions, chosen)
            self._merges[key] = periods, plan
        return plan


def check_preset(preset: Preset, model: Any) -> None:
    """Check that a preset was made for this model, by its class and its number of blocks.

    Raises:
        ValueError: If not, or if the preset works in diffusers only.
    """
    family = family_of(model)
    if preset.cache or not all(isinstance(method, HilbertA | LLSA | ToMA) for method in preset.methods):
        raise ValueError(
            f"{preset.title} works in diffusers only: tune hilberta, llsa and toma with --no-cache for ComfyUI"
        )
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
    if hasattr(model, "patch_spatial"):  # Cosmos
        patch = model.patch_temporal, model.patch_spatial, model.patch_spatial
    patch = (1,) * (len(sides) - 2) + (patch, patch) if isinstance(patch, int) else tuple(patch)[-len(sides) :]
    grid = tuple(-(-side // size) for side, size in zip(sides, patch, strict=True))
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid


def sigma_of(options: dict[str, Any]) -> float:
    """Noise level of a forward pass."""
    return float(options["sigmas"].max()) if "sigmas" in options else 0.0


def check_cross_attention(inputs: dict[str, Any], tokens: int) -> None:
    """Check that cross-attention to the text and self-attention of `tokens` image tokens differ in their keys' number.

    Raises:
        DenseFallback: If both have equally many keys.
    """
    if inputs["context"].shape[1] == tokens:
        raise DenseFallback(f"{tokens} text tokens cannot be distinguished from as many image tokens")


def in_sequence(image: Tensor, text: int, image_first: bool) -> Tensor:
    """Positions of text, then image in this order, in the attention sequence."""
    words = torch.arange(text, device=image.device)
    return torch.cat([words + len(image), image] if image_first else [words, image + text])


class Attention:
    """An attention override: calls of the planned length attend by the plan, others as before.

    Args:
        part: The method, which counts the layers.
        plans: Plan for each number of tokens in the attention sequence; None if calls of this length stay dense.
        text: Number of text tokens in the attention sequence.
        image_first: Whether the image precedes the text in this sequence.
        former: Existing override, or None.

    Attributes:
        now: For each number of tokens, positions in the attention sequence in each order of the plan, text first, and
            the patterns.
        of_all: `now` in blocks without merging.
        of_merged: `now` in blocks with merged tokens.
    """

    def __init__(
        self,
        part: Part,
        plans: dict[int, AttentionPlan | None],
        text: int,
        image_first: bool,
        former: Callable[..., Tensor] | None,
    ) -> None:
        self.part, self.plans, self.text, self.image_first, self.former = part, plans, text, image_first, former
        self.layers, self.dense_layers = part.layers, part.method.dense_layer_set()
        self.now = self.of_all = self.of_merged = {
            tokens: plan and ([in_sequence(order, text, image_first) for order in plan.orders], [*plan.tables])
            for tokens, plan in plans.items()
        }
        self._number = -1

    def merge(self, regions: Regions) -> None:
        """Prepare for blocks that merge the tokens of these regions."""
        kept = torch.arange(regions.kept, device=regions.order.device)
        (plan,) = self.plans.values()
        patterns = [merged_pattern(table, regions, self.text) for table in plan.tables] if plan else []
        self.of_merged = {self.text + regions.kept: ([in_sequence(kept, self.text, self.image_first)], patterns)}

    def __call__(
        self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Output of an attention call, in the layout requested by the caller."""
        shaped = kwargs.get("skip_reshape", False)
        dim, mask = 2 if shaped else 1, args[0] if args else kwargs.get("mask")
        same = q.shape[dim] == k.shape[dim] and q.shape[dim] in self.now
        self._number += same
        planned = self.now[q.shape[dim]] if same and mask is None and self._number not in self.dense_layers else None
        if planned is None or not self._fits(q.shape[-1] if shaped else q.shape[-1] // heads):
            self.layers["dense"] += same
            attend = partial(self.former, func) if self.former else func
            return attend(q, k, v, heads, *args, **kwargs)
        self.layers[""] += 1
        if not shaped:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        order, pattern = (each[self._number % len(each)] for each in planned)
        q, k, v = (x.index_select(2, order) for x in (q, k, v))
        out = joint_attention(q, k, v, pattern, scatter=order)
        return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)

    def _fits(self, head_dim: int) -> bool:
        """Whether the method supports heads with this number of channels."""
        try:
            self.part.method.check_head_dim(head_dim)
        except DenseFallback as reason:
            self.part.warn(reason)
            return False
        return True


class Merging:
    """Block replacements that run blocks on merged tokens, chained to existing replacements.

    Args:
        owner: Keeps the plans from step to step.
        method: How to merge in this step.
        regions: Regions within which tokens merge.
        text: Number of text tokens in the attention sequence.
        attend: Sparse attention of merged tokens; None for dense attention.
        key: Cache key of a plan.
    """

    def __init__(
        self,
        owner: Foveated,
        method: Any,
        regions: Regions,
        text: int,
        attend: Attention | None,
        key: Any,
    ) -> None:
        self.owner, self.method, self.regions, self.text = owner, method, regions, text
        self.attend, self.key = attend, key
        self.layers, self.images = owner.merging.layers, len(regions.order)

    def block(
        self, kind: str, former: Callable[..., Any] | None, args: dict[str, Any], extra: dict[str, Any]
    ) -> dict[str, Any]:
        """Output of a block, single-stream (text and image in one tensor) or double-stream, with its kind's plan."""
        original = (lambda given: former(given, extra)) if former else extra["original_block"]
        x, double = args["img"], "txt" in args
        dim = 2 if args["pe"].shape[1] == 1 else 1  # [batch, 1, tokens, ...] or [batch, tokens, 1, ...]
        lengths = args["pe"].shape[dim], x.shape[1] + (self.text if double else 0)
        if any(length != self.images + self.text for length in lengths) or _varies(args):
            self.layers["dense"] += 1
            return original(args)
        self.layers[""] += 1
        words, image = self._split(x)
        order = self.regions.order
        merge = self.owner.plan((kind, *self.key), self.method, image, self.regions)
        merged = merge.merge(image, 0, order)
        given = {**args, "img": torch.cat((words, merged), 1), "pe": self._rope(args["pe"], dim, merge)}
        if self.attend:
            self.attend.now = self.attend.of_merged
        out = original(given)
        if self.attend:
            self.attend.now = self.attend.of_all
        words, after = self._split(out["img"], merged.shape[1])
        return {**out, "img": torch.cat((words, merge.update(image, merged, after, order)), 1)}

    def _split(self, x: Tensor, images: int = 0, dim: int = 1) -> tuple[Tensor, Tensor]:
        """Split a sequence into text and image."""
        images = images or self.images
        return x.split([x.shape[dim] - images, images], dim)

    def _rope(self, pe: Tensor, dim: int, merge: Any) -> Tensor:
        """Rotary embedding with the destinations' rows instead of the rows of all images; tokens are along `dim`."""
        text, image = self._split(pe, dim=dim)
        rows = self.regions.order[merge.positions]  # [plans, merged]
        taken = torch.stack([image[min(i, len(pe) - 1)].index_select(dim - 1, row) for i, row in enumerate(rows)])
        return torch.cat((text[: len(rows)].expand(len(rows), *text.shape[1:]), taken), dim)


def _varies(args: dict[str, Any]) -> bool:
    """Whether a block has masks or a modulation per token."""
    special = "attn_mask", "attention_mask", "modulation_dims", "modulation_dims_img"
    vec = args["vec"]
    return any(args.get(name) is not None for name in special) or (
        isinstance(vec, Tensor) and vec.ndim == 4 and vec.shape[1] > 1
    )
