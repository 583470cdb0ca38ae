# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
"""Token merging in models of stacked transformer blocks: UNets (SD 1.5, SDXL), SD3, PixArt, DiT.

A stage is a stack of blocks over one grid. Where modules merge one by one, its tokens are put in the order of the
tiles as they enter it, and back as they leave it. Whole blocks leave them in raster order: merged tokens are made from
there, and what becomes of them is added there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from diffusers import (
    Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from foveate.diffusers.borrowed import replaced
from foveate.diffusers.clock import Step
from foveate.diffusers.family import Family
from foveate.diffusers.merging import Site
from foveate.diffusers.order import Reorder, along, by_name
from foveate.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.base import DenseFallback, TokenMerging
from foveate.ops.merging import Regions

__all__ = ["SD3", "DiT", "PixArt", "UNet", "stacks_of"]

CONTROL = "block_controlnet_hidden_states"


class Layer(NamedTuple):
    """One block.

    Attributes:
        name: Of its self-attention.
        block: The block.
        site: Where it merges; None if it never does.
    """

    name: str
    block: nn.Module
    site: Site | None


class Stage(Reorder):
    """A stack of blocks over one grid.

    Args:
        family: Decides within what regions the tokens of a forward merge.
        patch: Cells of the map along each side of a token.
        sites: Of its blocks that merge; stages of one grid may share them.
    """

    def __init__(self, family: "Blocks", patch: int, sites: list[Site]) -> None:
        super().__init__()
        self.family, self.patch, self.sites = family, patch, sites

    def on(self, holder: nn.Module) -> None:
        """Read the grid from this module's `hidden_states`: a map [batch, channels, height, width]."""
        self.handles.append(holder.register_forward_pre_hook(self.tell, with_kwargs=True))

    def tell(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the grid, and decide what this forward does here."""
        height, width = (args[0] if args else kwargs["hidden_states"]).shape[-2:]
        regions = self.family.decide(self.sites, (height // self.patch, width // self.patch))
        self.way = None if self.family.raster else regions


class Blocks(Family):
    """A model of stacked blocks with token merging in it."""

    hooks_inside = True

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], pipeline: Any) -> None:
        if len(methods) != 1 or not isinstance(methods[0], TokenMerging):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(
                f"{type(model).__name__} takes one method of token merging or of sparse attention and nothing else so "
                f"far, not {given}"
            )
        super().__init__(model, methods, pipeline)
        self.merging = methods[0]
        self.raster = self.merging.granularity == "block"  # whole blocks merge through the order of the regions
        self.check_method()
        self._hooks = [model.register_forward_pre_hook(self.enter, with_kwargs=True)]
        self.sites: list[Site] = []
        self.stages: list[Stage] = []
        self.idle = Site(self.merging, None)  # of blocks that never merge
        self.layers: list[Layer] = []
        try:
            for layer in self.borrow():
                self.layers.append(layer)
            self.check_layers(len(self.layers))
            if not any(layer.site for layer in self.layers):
                raise ValueError("no block is left to merge with this skip and these dense_layers: skip fewer")
        except BaseException:
            self.remove()
            raise
        modules = (module for layer in self.layers for module in layer.block.modules())
        self._kinds = {module: type(module.processor) for module in modules if hasattr(module, "processor")}
        self._hooks.append(model.register_forward_hook(self.leave))
        self.why, self.reasons = "no forward yet", dict[int, str]()  # of the whole forward; of single sites
        self.ran, self.shown = dict[int, Regions](), dict[int, Regions]()  # by site
        self._batch, self._step, self._begun = 0, None, set[int]()

    def check_method(self) -> None:
        """Refuse options that the model cannot have."""

    def borrow(self) -> Iterator[Layer]:
        """Every block, hooked."""
        raise NotImplementedError

    def stacked(self, name: str, stage: Stage, blocks: nn.ModuleList) -> Iterator[Layer]:
        """The blocks of a stage, hooked."""
        skip = self.skip(len(blocks)) if self.merging.skip is None else self.merging.skip
        dense = {layer - len(self.layers) for layer in self.merging.dense_layer_set()} | {*range(skip), len(blocks)}
        for i, block in enumerate(blocks):
            if getattr(block, "_chunk_size", None):
                raise ValueError("feed-forward chunking cuts merged tokens: call disable_forward_chunking() first")
            merges = i not in dense
            if merges and (self.merging.per_block or not stage.sites):
                depth = len(self.layers) / sum(isinstance(module, type(block)) for module in self.model.modules())
                stage.sites.append(Site(self.merging.at(depth), block, raster=self.raster))
                self.sites.append(stage.sites[-1])
            site = stage.sites[-1] if merges else None
            # a graph that was compiled for a block without hooks would be taken for those with hooks
            self.hook(block, site or self.idle, last=self.merging.per_block or i + 1 in dense)
            attention = "attn" if isinstance(block, JointTransformerBlock) else "attn1"
            yield Layer(f"{name}.{i}.{attention}", block, site)

    def skip(self, blocks: int) -> int:
        """How many blocks are skipped where the method does not say."""
        return min(5, blocks // 3)

    def hook(self, block: nn.Module, site: Site, *, last: bool) -> None:
        """Merge around its modules, or around the whole block and those behind it up to the last."""
        merging = self.merging
        if merging.granularity == "block":
            site.whole(block, last=last)
            site.sizes(block.attn1)
            return
        if merging.merge_attn:
            site.self_attention(block.attn1)
        if merging.merge_cross and block.attn2 is not None:
            site.per_token(block.attn2)
        if merging.merge_mlp in (None, True):
            site.per_token(block.ff)

    def remove(self) -> None:
        """Give the model back."""
        for handle in (*self._hooks, *(handle for stage in self.stages for handle in stage.handles)):
            handle.remove()
        for site in (*self.sites, self.idle):
            site.remove()

    @property
    def plan(self) -> Regions | None:
        """The regions of the first stage that merged; None if none did."""
        return next((site.shown(self.ran[id(site)]) for site in self.sites if id(site) in self.ran), None)

    def report(self) -> list[LayerReport]:
        """One row for each block."""
        return [self._report(layer) for layer in self.layers]

    def _report(self, layer: Layer) -> LayerReport:
        regions = self.shown.get(id(layer.site)) if layer.site else None
        if regions is None:
            skipped = self.layers.index(layer) not in self.merging.dense_layer_set()
            by_wish = (
                f"one of the first blocks, which {type(self.merging).__name__} skips"
                if skipped
                else "named in dense_layers"
            )
            why = self.why or self.reasons.get(id(layer.site), "")
            return LayerReport(layer.name, "dense", why=why if layer.site else by_wish)
        tokens, kept, block = len(regions.order), regions.kept, layer.block
        attn = block.attn if isinstance(block, JointTransformerBlock) else block.attn1
        sparsity = (1 - (kept / tokens) ** 2) * self.merging.merge_attn
        saved = round(4 * tokens**2 * sparsity) * attn.inner_dim
        saved += 8 * attn.inner_dim**2 * (tokens - kept) * self.merging.merge_attn
        if self.merging.merge_mlp in (None, True):
            saved += 2 * sum(p.numel() for p in block.ff.parameters() if p.ndim == 2) * (tokens - kept)
        return LayerReport(layer.name, self.merging.title, "model", sparsity, sparsity, self._batch * saved)

    # --- one forward ---

    @torch.compiler.disable
    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Where in the run this forward stands, and whether anything keeps it dense."""
        self.inputs = by_name(model, args, kwargs)
        x = next(iter(self.inputs.values()))
        self.ran, self.reasons, self._begun, self._batch = {}, {}, set(), x.shape[0]
        self._step, self.why = self.ask(self.merging, lambda: self._allowed(x))

    def _allowed(self, x: Tensor) -> Step:
        if self.merging.keep == 1:
            raise DenseFallback("keep=1.0 is the dense model")
        self.check_step(self.merging, 2**62)
        if self.inputs.get("attention_mask") is not None:
            raise DenseFallback("an attention mask was passed")
        extra = self.inputs.get("cross_attention_kwargs") or self.inputs.get("joint_attention_kwargs") or {}
        if extra.get("ip_adapter_masks") is not None:
            raise DenseFallback("ip_adapter_masks are laid over a raster of all tokens")
        for attn, kind in self._kinds.items():
            if type(attn.processor) not in (kind, AttnProcessor, AttnProcessor2_0):  # it may keep maps of all tokens
                raise DenseFallback(replaced(attn))
        if self.model.is_gradient_checkpointing:  # also without gradients: a backward pass may come after this forward
            raise DenseFallback("gradient checkpointing runs blocks again when their plan may be another one")
        return self.merging_step(self.merging, self.inputs["timestep"], x)

    def decide(self, sites: list[Site], grid: tuple[int, int]) -> Regions | None:
        """Within what regions the tokens of a stage merge in this forward; None leaves it dense."""
        regions, reason = None, ""
        if not self.why:
            device = str(next(iter(self.inputs.values())).device)
            regions, reason = self.ask(self.merging, lambda: self._regions(grid, device))
        for site in sites:
            self.reasons[id(site)] = reason
            if id(site) not in self._begun:
                self._begun.add(id(site))
                site.begin(regions, self._step, apart=self.apart())
                if regions:
                    self.ran[id(site)] = regions
        return regions

    def apart(self) -> bool:
        """Whether something is done with the tokens of this forward between blocks."""
        return False

    def _regions(self, grid: tuple[int, int], device: str) -> Regions:
        self.check_step(self.merging, grid[0] * grid[1])
        return self.merging.regions((grid,), device=device)

    @torch.compiler.disable
    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count what happened."""
        for site in self.sites:
            if site.end():
                self.ran.pop(id(site), None)
                self.reasons[id(site)] = "the block that its plan is made from did not run"
        self.inputs = {}
        why = "" if self.ran else self.why or next(iter(self.reasons.values()), "")
        self.outcomes[why] += 1
        for reason in filter(None, self.reasons.values()):
            self.outcomes[reason] += 0  # said once
        if self.ran or not self.outcomes[""]:
            self.shown = self.ran


def stacks_of(model: UNet2DConditionModel) -> Iterator[list[tuple[str, Transformer2DModel]]]:
    """The stacks of blocks of each section of a UNet, by their names, in running order."""
    sections = [(f"down_blocks.{i}", block) for i, block in enumerate(model.down_blocks)]
    sections += [("mid_block", model.mid_block)] if model.mid_block is not None else []
    sections += [(f"up_blocks.{i}", block) for i, block in enumerate(model.up_blocks)]
    for name, section in sections:
        yield [
            (f"{name}.attentions.{i}", stack)
            for i, stack in enumerate(getattr(section, "attentions", None) or [])
            if isinstance(stack, Transformer2DModel)
            and all(isinstance(block, BasicTransformerBlock) for block in stack.transformer_blocks)
        ]


class UNet(Blocks):
    """SD 1.5, SD 2.1, SDXL. Blocks of one section and resolution share a plan, made from what the first is given."""

    def borrow(self) -> Iterator[Layer]:
        """Every block of every `Transformer2DModel`, in running order."""
        for section in stacks_of(self.model):
            sites: list[Site] = []
            for name, stack in section:
                stage = Stage(self, 1, sites)
                self.stages.append(stage)
                stage.on(stack)
                blocks = stack.transformer_blocks
                stage.before(blocks[0])
                stage.behind(blocks[-1])
                yield from self.stacked(f"{name}.transformer_blocks", stage, blocks)

    def skip(self, blocks: int) -> int:
        """None: the sections differ too much for a rule."""
        return 0


class DiT(Blocks):
    """DiT: one stack of blocks over the whole picture."""

    def borrow(self) -> Iterator[Layer]:
        """Every block of the only stack."""
        self.stages.append(Stage(self, self.model.config.patch_size, []))
        self.stages[0].on(self.model)
        self.stages[0].between(self.model.pos_embed, self.model.norm_out)
        return self.stacked("transformer_blocks", self.stages[0], self.model.transformer_blocks)


class PixArt(DiT):
    """PixArt-alpha and -sigma."""


class SD3(DiT):
    """SD3 and SD3.5: image and text attend to each other in every block."""

    def check_method(self) -> None:
        """Its attention takes no mask."""
        if self.merging.size_bias:
            raise ValueError("SD3's attention takes no mask: leave size_bias off")

    def hook(self, block: nn.Module, site: Site, *, last: bool) -> None:
        """Merge around both attentions and the feed-forward of the image, or around whole blocks."""
        if self.merging.granularity == "block":
            site.whole(block, last=last)
            return
        if self.merging.merge_attn:
            site.joint_attention(block.attn)
            if block.attn2 is not None:
                site.keyword_attention(block.attn2)
        if self.merging.merge_mlp in (None, True):
            site.per_token(block.ff)

    def apart(self) -> bool:
        """Residuals of a ControlNet are added there; and the last block may be one that is skipped."""
        return self.inputs.get(CONTROL) is not None or self.inputs.get("skip_layers") is not None

    @torch.compiler.disable
    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Residuals of a ControlNet are put in the order of the tokens."""
        super().enter(model, args, kwargs)
        residuals = self.inputs.get(CONTROL)
        if residuals is None or self.why or self.raster:
            return args, kwargs
        height, width = (side // model.config.patch_size for side in self.inputs["hidden_states"].shape[-2:])
        regions, _ = self.ask(self.merging, lambda: self._regions((height, width), str(residuals[0].device)))
        if regions is None:
            return args, kwargs
        return (), self.inputs | {CONTROL: [along(regions.order, residual) for residual in residuals]}
