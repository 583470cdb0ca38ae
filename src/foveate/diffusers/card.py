"""What Foveate has to know about a model class of diffusers: a card. docs/add-a-model.md adds one step by step."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib import import_module
from itertools import groupby
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from foveate.methods.base import DenseFallback, Grid, TokenMerging, default_skip
from foveate.utils.cache import cached_by_tensor

__all__ = [
    "Card",
    "Segment",
    "Segments",
    "Stack",
    "TokenLayout",
    "card_of",
    "cos_and_sin",
    "earlier_frames",
    "image",
    "padding",
    "patches",
    "refiner_and_layers",
    "register_card",
    "text",
    "text_and_padding",
    "text_lengths",
    "video",
]

CARDS: dict[str, str | type["Card"]] = {
    "FluxTransformer2DModel": "foveate.diffusers.cards.flux:FluxCard",
    "Flux2Transformer2DModel": "foveate.diffusers.cards.flux:Flux2Card",
    "ChromaTransformer2DModel": "foveate.diffusers.cards.flux:ChromaCard",
    "BriaTransformer2DModel": "foveate.diffusers.cards.flux:BriaCard",
    "BriaFiboTransformer2DModel": "foveate.diffusers.cards.flux:BriaFiboCard",
    "LongCatImageTransformer2DModel": "foveate.diffusers.cards.flux:FluxCard",
    "OvisImageTransformer2DModel": "foveate.diffusers.cards.flux:FluxCard",
    "Flux3Transformer2DModel": "foveate.diffusers.cards.flux3:Flux3Card",
    "HunyuanImageTransformer2DModel": "foveate.diffusers.cards.hunyuan_image:HunyuanImageCard",
    "HunyuanVideoTransformer3DModel": "foveate.diffusers.cards.hunyuan_video:HunyuanVideoCard",
    "HunyuanVideo15Transformer3DModel": "foveate.diffusers.cards.hunyuan_video:HunyuanVideo15Card",
    "HunyuanVideoFramepackTransformer3DModel": "foveate.diffusers.cards.hunyuan_video:FramepackCard",
    "Krea2Transformer2DModel": "foveate.diffusers.cards.krea2:Krea2Card",
    "MiniMaxH3Transformer3DModel": "foveate.diffusers.cards.minimax_h3:MiniMaxH3Card",
    "QwenImageTransformer2DModel": "foveate.diffusers.cards.qwen:QwenImageCard",
    "ZImageTransformer2DModel": "foveate.diffusers.cards.zimage:ZImageCard",
    "SD3Transformer2DModel": "foveate.diffusers.cards.blocks:SD3Card",
    "PixArtTransformer2DModel": "foveate.diffusers.cards.blocks:PixArtCard",
    "DiTTransformer2DModel": "foveate.diffusers.cards.blocks:DiTCard",
    "UNet2DConditionModel": "foveate.diffusers.cards.blocks:UNetCard",
    "CosmosTransformer3DModel": "foveate.diffusers.cards.blocks:CosmosCard",
    "WanTransformer3DModel": "foveate.diffusers.cards.wan:WanCard",
    "WanVACETransformer3DModel": "foveate.diffusers.cards.wan:WanVACECard",
    "WanAnimateTransformer3DModel": "foveate.diffusers.cards.wan:WanAnimateCard",
    "AnyFlowTransformer3DModel": "foveate.diffusers.cards.wan:AnyFlowCard",
    "HeliosTransformer3DModel": "foveate.diffusers.cards.wan:HeliosCard",
    "ChronoEditTransformer3DModel": "foveate.diffusers.cards.wan:WanCard",
    "SkyReelsV2Transformer3DModel": "foveate.diffusers.cards.wan:SkyReelsV2Card",
    "JoyImageEditTransformer3DModel": "foveate.diffusers.cards.self_rotating:JoyImageEditCard",
    "ErnieImageTransformer2DModel": "foveate.diffusers.cards.self_rotating:ErnieImageCard",
    "GlmImageTransformer2DModel": "foveate.diffusers.cards.self_rotating:GlmImageCard",
    "Kandinsky5Transformer3DModel": "foveate.diffusers.cards.self_rotating:Kandinsky5Card",
    "LTXVideoTransformer3DModel": "foveate.diffusers.cards.ltx:LTXCard",
    "LTX2VideoTransformer3DModel": "foveate.diffusers.cards.ltx:LTXCard",
    "AuraFlowTransformer2DModel": "foveate.diffusers.cards.torch_attention:AuraFlowCard",
    "CogView4Transformer2DModel": "foveate.diffusers.cards.torch_attention:CogView4Card",
    "HiDreamImageTransformer2DModel": "foveate.diffusers.cards.torch_attention:HiDreamCard",
    "HunyuanDiT2DModel": "foveate.diffusers.cards.torch_attention:HunyuanDiTCard",
    "Lumina2Transformer2DModel": "foveate.diffusers.cards.torch_attention:Lumina2Card",
    "QwenImage21Transformer2DModel": "foveate.diffusers.cards.keys_alone:QwenImage21Card",
    "PRXTransformer2DModel": "foveate.diffusers.cards.keys_alone:PRXCard",
    "NucleusMoEImageTransformer2DModel": "foveate.diffusers.cards.keys_alone:NucleusCard",
    "Cosmos3OmniTransformer": "foveate.diffusers.cards.keys_alone:Cosmos3Card",
    "Ideogram4Transformer2DModel": "foveate.diffusers.cards.packed:Ideogram4Card",
    "JoyImageEditPlusTransformer3DModel": "foveate.diffusers.cards.packed:JoyImageEditPlusCard",
    "BriaFibo2Transformer2DModel": "foveate.diffusers.cards.packed:BriaFibo2Card",
    "Kandinsky6Transformer3DModel": "foveate.diffusers.cards.self_rotating:Kandinsky6Card",
    "DreamLiteUNetModel": "foveate.diffusers.cards.dreamlite:DreamLiteCard",
    "PixelDiT": "foveate.diffusers.cards.pixel_dit:PixelDiTCard",
}
"""Card of each model class, by name; nothing is imported before it is needed."""


def register_card(model_class: str) -> Callable[[type["Card"]], type["Card"]]:
    """Decorator that makes a class the card of a model class, given by name.

    Examples:
        >>> @foveate.register_card("BriaTransformer2DModel")
        ... class BriaCard(foveate.Card): ...
    """

    def register(card: type[Card]) -> type[Card]:
        CARDS[model_class] = card
        return card

    return register


def card_of(model: nn.Module) -> "Card":
    """The card of a model.

    Raises:
        ValueError: If its class has none.
    """
    card = CARDS.get(type(model).__name__)
    if card is None:
        raise ValueError(
            f"{type(model).__name__} is not supported: foveate knows {', '.join(CARDS)}; "
            "docs/add-a-model.md shows how to add a model with foveate.register_card"
        )
    if isinstance(card, str):
        module, name = card.split(":")
        card = getattr(import_module(module), name)
    return card()


class Segment(NamedTuple):
    """Consecutive tokens of one kind in an attention sequence.

    Attributes:
        kind: "text", "image" (the picture, a video or a reference image), "reference" (references that attend to each
            other alone, and that all others attend to), or "padding", which nothing attends to.
        shape: (rows, columns) of an image, (frames, rows, columns) of a video, (tokens,) of others.
    """

    kind: Literal["text", "image", "reference", "padding"]
    shape: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return torch.Size(self.shape).numel()


def text(tokens: int) -> Segment:
    """Text tokens: they attend to all tokens, and all attend to them."""
    return Segment("text", (tokens,))


def image(rows: int, columns: int) -> Segment:
    """Tokens of an image, row by row. The first image is the picture, others are references."""
    return Segment("image", (rows, columns))


def video(frames: int, rows: int, columns: int) -> Segment:
    """Tokens of a video, frame by frame and row by row."""
    return Segment("image", (frames, rows, columns))


def patches(sides: Sequence[int], patch: Any) -> Segment:
    """Tokens of an image or video whose latent, with these sides, is cut into patches of this side or these."""
    sizes = (patch,) * len(sides) if isinstance(patch, int) else patch
    return Segment("image", tuple(side // size for side, size in zip(sides, sizes, strict=True)))


def padding(tokens: int) -> Segment:
    """Tokens that no token attends to; their own output is zero."""
    return Segment("padding", (tokens,))


def earlier_frames(inputs: dict[str, Any], full: str, half: str, quarter: str) -> Segment:
    """Tokens of earlier frames at three resolutions, which attend as text does.

    Args:
        inputs: Forward arguments of the model by name.
        full: Name of the latents in patches of (1, 2, 2).
        half: Name of the latents in patches of (2, 4, 4).
        quarter: Name of the latents in patches of (4, 8, 8).
    """
    patches = ((full, (1, 2, 2)), (half, (2, 4, 4)), (quarter, (4, 8, 8)))
    given = [(x.shape[2:], patch) for name, patch in patches if (x := inputs.get(name)) is not None]
    return text(sum(prod(-(-side // size) for side, size in zip(*one, strict=True)) for one in given))


Segments = tuple[Segment, ...]


def text_and_padding(tokens: int, mask: Tensor | None) -> tuple[Segments, ...]:
    """Segments of a padded text in each sample of the batch; of one sample only if there is no padding.

    Args:
        tokens: Number of tokens, padding included.
        mask: False or 0 where a token is padding [batch, ..., tokens or more]; None if there is no padding.

    Raises:
        DenseFallback: If the mask hides more than the text.
    """
    return ((text(tokens),),) if mask is None else _read_mask(mask, tokens)


@cached_by_tensor
def _read_mask(mask: Tensor, tokens: int) -> tuple[Segments, ...]:
    rows = mask.detach().cpu().bool().flatten(1)
    if not rows[:, tokens:].all():
        raise DenseFallback("the mask of the text hides image tokens")
    runs = [zip(*row.unique_consecutive(return_counts=True), strict=True) for row in rows[:, :tokens]]
    return tuple(tuple((text if real else padding)(int(length)) for real, length in row) for row in runs)


@cached_by_tensor
def text_lengths(mask: Tensor) -> tuple[int, ...]:
    """Number of real tokens of each text, from a mask that is False or 0 where a token is padding [batch, tokens]."""
    return tuple(mask.sum(1).tolist())


class TokenLayout(NamedTuple):
    """The attention sequence of a sample in a forward pass.

    Attributes:
        segments: Its tokens, in order.
        cached: Number of tokens of references whose keys are cached: all tokens attend to them too.
        keys: Text, and its padding, with keys and no queries: all tokens attend to it.
        keys_last: Whether these keys come after those of the sequence, not before.
        packed: Whether context parallelism splits the sequence as a whole, not text and images one by one.
    """

    segments: Segments
    cached: int = 0
    keys: Segments = ()
    keys_last: bool = False
    packed: bool = False

    @property
    def text(self) -> int:
        """Number of text tokens."""
        return self.count("text")

    @property
    def grids(self) -> tuple[Grid, ...]:
        """(rows, columns) of the picture or (frames, rows, columns) of the video, then of each reference image."""
        return tuple(segment.shape for segment in self.segments if segment.kind == "image")

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def references(self) -> int:
        """Number of tokens of references that attend to each other alone, now or when their keys were cached."""
        return self.cached + self.count("reference")

    @property
    def text_keys(self) -> int:
        """Number of text tokens with keys alone."""
        return sum(segment.tokens for segment in self.keys if segment.kind == "text")

    @property
    def padded(self) -> bool:
        """Whether some tokens are padding."""
        return any(segment.kind == "padding" and segment.tokens for segment in self.segments)

    def streams(self) -> list[int]:
        """Lengths of the parts that belong to one tensor of the model: text or images, or all of a packed sequence."""
        if self.packed:
            return [self.tokens]
        runs = groupby(self.segments, key=lambda segment: segment.kind in ("image", "reference"))
        return [sum(segment.tokens for segment in run) for _, run in runs]

    def only_images(self) -> "TokenLayout":
        """The sequence of attention among image tokens alone."""
        return TokenLayout(tuple(segment for segment in self.segments if segment.kind == "image"))

    def merged(self, kept: int) -> "TokenLayout":
        """The sequence when the image tokens are merged into `kept` tokens, in the place of the first image."""
        first = next(i for i, segment in enumerate(self.segments) if segment.kind == "image")
        others = [(i, segment) for i, segment in enumerate(self.segments) if segment.kind != "image"]
        before = [segment for i, segment in others if i < first]
        after = [segment for i, segment in others if i > first]
        return self._replace(segments=(*before, image(1, kept), *after))

    def count(self, kind: str) -> int:
        """Number of tokens of a kind."""
        return sum(segment.tokens for segment in self.segments if segment.kind == kind)

    def positions(self, kind: str) -> Int[Tensor, "tokens"]:
        """Positions of all tokens of a kind."""
        ends = torch.tensor([segment.tokens for segment in self.segments]).cumsum(0).tolist()
        parts = [
            torch.arange(end - s.tokens, end) for s, end in zip(self.segments, ends, strict=True) if s.kind == kind
        ]
        return torch.cat([torch.empty(0, dtype=torch.long), *parts])


class Stack(NamedTuple):
    """Consecutive blocks of a model that have the same token grid.

    Attributes:
        name: Name of the list of blocks in the model.
        blocks: The blocks.
        holder: The module whose forward arguments tell the layout: the model itself, or a part of a UNet. A list of
            blocks with an attention sequence of its own is its own holder, and gets the arguments of the model.
        group: Stacks with an equal value may share one plan of token merging.
        skip: Number of first blocks that token merging leaves dense unless told otherwise.
        joined: Whether the blocks are given text and image in one tensor.
    """

    name: str
    blocks: nn.ModuleList
    holder: nn.Module
    group: Hashable
    skip: int
    joined: bool = False


def refiner_and_layers(model: Any) -> Iterator[Stack]:
    """The blocks of a model that refine the image alone, then its main blocks; those for the text alone stay dense."""
    refiner, layers = model.noise_refiner, model.layers
    yield Stack("noise_refiner", refiner, refiner, "noise_refiner", len(refiner), joined=True)
    yield Stack("layers", layers, model, "layers", default_skip(len(layers)), joined=True)


def submodule(block: nn.Module, name: str) -> Any:
    """A module inside of a block by its dotted name; None if there is none."""
    for part in name.split("."):
        block = getattr(block, part, None)  # pyright: ignore[reportAssignmentType]
    return block


def cos_and_sin(turns: Tensor) -> tuple[Tensor, Tensor]:
    """What `Card.rotation` returns, from complex rotations of each pair of channels [batch or 1, tokens, pairs]."""
    turns = turns[0] if len(turns) == 1 else turns
    return turns.real.repeat_interleave(2, -1), turns.imag.repeat_interleave(2, -1)


class Card:
    """What Foveate has to know about a model class. Subclasses say what is different in it.

    Attributes:
        blocks: Name of the list of blocks.
        attention: Self-attention modules of a block by name, and whether text and image attend to each other there.
        rope: Name of a block's argument with the rotary embedding, which `rotation` understands; None if there is
            none. Several names where blocks differ, that of the attention modules last.
        rotates_halves: Whether channels i and i + half of the rotated ones form a pair, not channels 2i and 2i + 1.
        rows: Name of a block's argument with a row for each of its tokens, [tokens] if samples share them, or [batch,
            tokens, dim]. They are equal for all tokens of an image; a merged token takes that of its destination.
        joins_in_blocks: Whether modules are given text and image in one tensor by blocks that are given them in two.
        merged_modules: Modules that token merging with granularity="module" runs on merged tokens, by the option of
            the method that turns them on: "attn", "cross" or "mlp".
        merge_mlp: Whether the "mlp" modules merge where the method does not say.
        stream: First and last module of the part of a single-stream block that runs on merged tokens. Blocks that have
            the first one are single-stream blocks.
        wrapper: Processor class to put around processors that attend without diffusers' dispatcher.
        merging_unsupported_reason: Why token merging cannot work in this class of models; empty if it can.
        padding_mask: Name of the argument of the model or its blocks with an attention mask that only hides padding,
            for which `layout` has `padding` segments.
        cache: Name of a block's argument, a dictionary whose "kv_cache" keeps keys and values of references; None if
            there is none. Foveate's backend then reads and fills it.
        rotates_text: Whether the rotary embedding always has rows for text too, and is on the device of the tokens.
        returns_image_first: Whether blocks that return image and text return the image first.
        timestep_scale: Timestep of pure noise, as the model is given it; None if timesteps have another scale.
        start_percent: Fraction of the run before which a comparison keeps steps dense for methods without a LoRA.
    """

    blocks: ClassVar[str] = "transformer_blocks"
    attention: ClassVar[dict[str, bool]] = {"attn": True}
    rope: ClassVar[str | tuple[str, ...] | None] = None
    rotates_halves: ClassVar[bool] = False
    rows: ClassVar[str | None] = None
    joins_in_blocks: ClassVar[bool] = False
    merged_modules: ClassVar[dict[str, str]] = {"attn": "attn", "ff": "mlp"}
    merge_mlp: ClassVar[bool] = True
    stream: ClassVar[tuple[str, str]] = ("norm", "proj_out")
    wrapper: ClassVar[Any] = None
    merging_unsupported_reason: ClassVar[str] = ""
    padding_mask: ClassVar[str | None] = None
    cache: ClassVar[str | None] = None
    rotates_text: ClassVar[bool] = True
    returns_image_first: ClassVar[bool] = False
    timestep_scale: ClassVar[float | None] = 1000.0
    start_percent: ClassVar[float] = 0.2

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout | list[TokenLayout]:
        """The attention sequence of a forward pass, or that of each sample of the batch.

        The sequences of samples may differ in their padding only. Unless a card says otherwise, it is the image or
        video alone, whose grid is that of the latent's patches.

        Args:
            holder: `Stack.holder`.
            inputs: Its forward arguments by name. Arguments may be replaced in place.

        Raises:
            DenseFallback: If this forward pass has to stay dense.
        """
        patch = getattr(holder.config, "patch_size", None) or 1  # UNets have none
        return TokenLayout((patches(inputs["hidden_states"].shape[2:], patch),))

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The stacks of blocks, in running order."""
        blocks: Any = getattr(model, self.blocks)
        yield Stack(self.blocks, blocks, model, None, default_skip(len(blocks)))

    def samples(self, inputs: dict[str, Any]) -> Tensor:
        """A tensor with a row for each sample of the batch, in the dtype and on the device of the tokens."""
        return inputs["hidden_states"] if "hidden_states" in inputs else inputs["sample"]

    def timestep(self, inputs: dict[str, Any]) -> Tensor | float:
        """The timestep of a forward pass, which falls from step to step."""
        return inputs["timestep"]

    def rotation(self, rope: Any) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the attention sequence, from the argument `rope` of a block.

        Each is [tokens, head_dim], or [batch, tokens, head_dim] where samples differ, or has the first channels alone.
        Channels 2i and 2i + 1 of queries and keys form a pair unless `rotates_halves`. Rows for text are left out if
        `rotates_text` is false.
        """
        return rope

    def unrotated(self, rope: Any) -> Any:
        """Replacement for `rope`, so that the processor does not rotate queries and keys again: None by default.

        Processors that cannot do without get one that rotates by zero.
        """
        return None

    def attentions(self, block: nn.Module) -> dict[str, Any]:
        """The self-attention modules of a block by name."""
        if getattr(block, "only_cross_attention", False):
            return {}
        return {name: attn for name in self.attention if (attn := submodule(block, name)) is not None}

    def is_single_stream(self, block: nn.Module) -> bool:
        """Whether a part of the block, from a norm to a linear layer, merges as a whole: see `stream`."""
        return hasattr(block, self.stream[0])

    def modules_to_merge(self, method: TokenMerging, block: nn.Module) -> dict[str, nn.Module]:
        """The modules of a block that run on merged tokens by name, unless it is a single-stream block."""
        mlp = self.merge_mlp if method.merge_mlp is None else method.merge_mlp
        on = {"attn": method.merge_attn, "cross": method.merge_cross, "mlp": mlp or method.granularity == "block"}
        return {
            name: module
            for name, kind in self.merged_modules.items()
            if on[kind] and (module := submodule(block, name)) is not None
        }

    def check(self, model: Any, methods: tuple[Any, ...]) -> None:
        """Raise a ValueError if the methods do not fit this kind of model."""
        merging = [method for method in methods if isinstance(method, TokenMerging)]
        if merging and self.merging_unsupported_reason:
            raise ValueError(f"{type(model).__name__} {self.merging_unsupported_reason}: use HilbertA or LLSA alone")
        why = self.block_merging_unsupported_reason(model)
        if why and any(method.granularity == "block" for method in merging):
            raise ValueError(f"this model {why}: merge with granularity='module'")

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Why whole blocks of this model cannot merge; empty if they can."""
        return ""

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Raise a DenseFallback if token merging has to leave this forward pass dense.

        Args:
            method: The method.
            inputs: Forward arguments of the model by name.
        """

    def dense_plan(self) -> Any:
        """Plan of the layers that stay dense; None where the model's own attention is dense."""
        return None

    def residuals_between_blocks(self, inputs: dict[str, Any]) -> bool:
        """Whether this forward pass adds something to all image tokens between blocks, as a ControlNet does."""
        return any(inputs.get(name) is not None for name in inputs if "controlnet" in name or name == "skip_layers")
