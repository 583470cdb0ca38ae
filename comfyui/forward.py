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

from foveate.methods import Method, ToMA
from foveate.methods.base import AttentionPlan, DenseFallback
from foveate.ops.joint_attention import joint_attention

__all__ = ["FAMILIES", "Foveated", "family_of"]

log = logging.getLogger("foveate")

ROUNDING = 1e-5  # noise levels are float32
OUTSIDE = "this step lies outside start_percent to end_percent"


class Family(NamedTuple):
    """Where the tokens of a family of models are.

    Attributes:
        text: Whether text and image attend to each other in one sequence.
        image_first: Whether the image precedes the text there.
        merges: Whether tokens can be merged around its blocks.
    """

    text: bool = True
    image_first: bool = False
    merges: bool = False


FAMILIES = {
    "Flux": Family(merges=True),
    "Chroma": Family(merges=True),
    "QwenImageTransformer2DModel": Family(),
    "HunyuanVideo": Family(image_first=True),
    "WanModel": Family(text=False),
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
    """

    def __init__(self, method: Method, window: tuple[float, float]) -> None:
        self.method, self.window = method, window
        self.outcomes: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self._sigma, self._step = -1.0, -1
        self._merges: dict[Any, tuple[int, Any]] = {}

    def check(self, model: Any) -> None:
        """Raise a ValueError if the method does not fit the model."""
        family = family_of(model)
        if isinstance(self.method, ToMA) and family and not family.merges:
            merging = ", ".join(name for name, known in FAMILIES.items() if known.merges)
            raise ValueError(f"tokens are not merged in {type(model).__name__} yet, only in {merging}: use HilbertA")

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output, by the method where it can work."""
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        options = call.arguments.get("transformer_options") or {}
        try:
            changed = self._options(executor.class_obj, call.arguments, options)
        except DenseFallback as reason:
            if str(reason) not in (*self.outcomes, OUTSIDE):
                log.warning("%s stays dense: %s", self.method.title, reason)
            self.outcomes[str(reason)] += 1
            return executor(*args, **kwargs)
        self.outcomes[""] += 1
        call.arguments["transformer_options"] = {**options, **changed}
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
        text = context.shape[1] if family.text else 0
        if isinstance(self.method, ToMA):
            key = (grids, text, len(x), x.dtype, x.device, tuple(options.get("cond_or_uncond", ())))
            return self._merging(model, grids, options, key)
        if not family.text and context.shape[1] == prod(grids[0]):
            raise DenseFallback(f"{context.shape[1]} text tokens cannot be told from as many image tokens")
        plan = self.method.plan(grids, text, device=str(x.device))
        images, words = len(plan.order), torch.arange(text, device=plan.order.device)
        order = [plan.order, words + images] if family.image_first else [plan.order + text, words]
        attend = Attention(plan, torch.cat(order[::-1]), self.method.dense_layer_set(), self.layers)
        attend.former = options.get("optimized_attention_override")
        return {"optimized_attention_override": attend}

    def _merging(
        self, model: Any, grids: tuple[tuple[int, ...], ...], options: dict[str, Any], key: Any
    ) -> dict[str, Any]:
        if self.method.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        device = key[4]
        merging = Merging(self, self.method.regions(grids, device=str(device)), key)
        replaced = dict(options.get("patches_replace") or {})
        blocks = dict(replaced.get("dit") or {})
        names = [("double_block", i) for i in range(len(model.double_blocks))]
        names += [("single_block", i) for i in range(len(model.single_blocks))]
        skip = 5 if self.method.skip is None else self.method.skip
        for number, name in enumerate(names):
            if number < skip or number in self.method.dense_layer_set():
                self.layers["dense"] += 1
            else:
                blocks[name] = partial(merging.block, blocks.get(name))
        return {"patches_replace": {**replaced, "dit": blocks}}

    def plan(self, key: Any, tokens: Tensor, regions: Any) -> Any:
        """The plan of merging of these tokens, made anew where it is due."""
        period = self._step // self.method.dst_every
        made = self._merges.get(key)
        if made is None or made[0] != period:
            with torch.no_grad():
                made = period, self.method.plan(tokens.index_select(1, regions.order), regions)
            self._merges[key] = made
        return made[1]


def grid_of(model: Any, latent: Tensor) -> tuple[int, ...]:
    """(rows, columns) or (frames, rows, columns) in tokens of a latent [batch, channels, *sides]."""
    sides = tuple(latent.shape[2:])
    patch = model.patch_size
    patch = (1,) * (len(sides) - 2) + (patch, patch) if isinstance(patch, int) else tuple(patch)[-len(sides) :]
    grid = tuple(-(-side // size) for side, size in zip(sides, patch, strict=True))
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid


class Attention:
    """An attention override: calls of the planned length attend by the plan, others as before.

    Args:
        plan: Plan of sparse attention.
        order: Positions in the attention sequence in the order of the plan, text first.
        dense_layers: Numbers of the layers that stay dense.
        layers: Counts the layers.

    Attributes:
        former: The override that was there; None if there was none.
    """

    def __init__(self, plan: AttentionPlan, order: Tensor, dense_layers: frozenset[int], layers: Counter[str]) -> None:
        self.plan, self.order, self.dense_layers, self.layers = plan, order, dense_layers, layers
        self.former: Callable[..., Tensor] | None = None
        self._number = -1

    def __call__(
        self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output of an attention call, in the form that the caller asks for."""
        shaped = kwargs.get("skip_reshape", False)
        tokens, mask = len(self.order), args[0] if args else kwargs.get("mask")
        same = q.shape[2 if shaped else 1] == k.shape[2 if shaped else 1] == tokens
        self._number += same
        if not same or mask is not None or self._number in self.dense_layers:
            self.layers["dense"] += same
            return (
                self.former(func, q, k, v, heads, *args, **kwargs)
                if self.former
                else func(q, k, v, heads, *args, **kwargs)
            )
        self.layers[""] += 1
        if not shaped:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        table = self.plan.tables[self._number % len(self.plan.tables)]
        q, k, v = (x.index_select(2, self.order) for x in (q, k, v))
        out = joint_attention(q, k, v, table, scatter=self.order)
        return out if kwargs.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)


class Merging:
    """Block replacements that run blocks on merged tokens, chained to the replacements that were there.

    Args:
        owner: Keeps the plans from step to step.
        regions: Regions within which tokens merge.
        key: What a plan belongs to.
    """

    def __init__(self, owner: Foveated, regions: Any, key: Any) -> None:
        self.owner, self.regions, self.key = owner, regions, key
        self.images = len(regions.order)

    def block(self, former: Callable[..., Any] | None, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """The output of a block, single-stream ([text, image] in one tensor) or double-stream."""
        original = (lambda given: former(given, extra)) if former else extra["original_block"]
        x = args["img"]
        text = 0 if "txt" in args else x.shape[1] - self.images
        if x.shape[1] != text + self.images or text < 0 or args.get("attn_mask") is not None:
            self.owner.layers["dense"] += 1
            return original(args)
        self.owner.layers[""] += 1
        image = x[:, text:]
        merge = self.owner.plan(self.key, image, self.regions)
        order = self.regions.order
        merged = merge.merge(image, 0, order)
        pe = args["pe"]
        given = {**args, "img": torch.cat([x[:, :text], merged], 1), "pe": self._rope(pe, merge)}
        out = original(given)
        words, after = out["img"][:, :text], out["img"][:, text:]
        return {**out, "img": torch.cat([words, merge.update(image, merged, after, order)], 1)}

    def _rope(self, pe: Tensor, merge: Any) -> Tensor:
        """The rotary embedding [batch, 1, tokens, ...] with the rows of the destinations in place of all images'."""
        text = pe.shape[2] - self.images
        rows = text + self.regions.order[merge.positions]  # [plans, merged]
        taken = [pe[min(i, len(pe) - 1)].index_select(1, row) for i, row in enumerate(rows)]
        return torch.cat(
            [pe[:, :, :text].expand(len(rows), *pe.shape[1:2], text, *pe.shape[3:]), torch.stack(taken)], 2
        )
