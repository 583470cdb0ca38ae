# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""What each layer did in a forward pass, counted from its plan."""

from foveate.diffusers.card import Card
from foveate.diffusers.layers import Layer, attentions
from foveate.diffusers.merging import is_single_stream, merged_modules
from foveate.diffusers.plans import StackPlan
from foveate.diffusers.summary import LayerReport
from foveate.methods.base import TokenMerging
from foveate.ops.joint_attention import backend_of

__all__ = ["report"]


def report(layer: Layer, stack: StackPlan, card: Card, merging: TokenMerging | None) -> LayerReport:
    """What one layer did.

    Args:
        layer: The layer.
        stack: What was decided for its stack.
        card: Card of the model.
        merging: The method of token merging, if any.
    """
    sparse = stack.is_sparse(layer) and layer.name not in stack.replaced
    merges = layer.group is not None and stack.regions is not None
    if not (sparse or merges):
        return LayerReport(layer.name, "dense", why=why_dense(layer, stack, merging))
    image = stack.layout.only_images().tokens
    kept = stack.kept if stack.is_merged(layer) else image
    layouts = stack.layouts_of(layer)
    texts = [layout.text for layout in layouts]
    patterns = [stack.pattern(layer, text) if sparse else None for text in texts]
    pairs = sum((text + kept) ** 2 if p is None else p.pairs() for p, text in zip(patterns, texts, strict=True))
    every_pair = sum((text + image) ** 2 for text in texts)
    to_references = sum(layout.tokens * layout.references for layout in layouts)  # none is skipped
    pattern, plan = patterns[0], stack.attention[texts[0]] if sparse else None
    saved = 4 * (every_pair - pairs) * layer.inner_dim * stack.batch // len(texts)
    if merges:
        saved += 2 * merged_weights(layer, card) * (image - stack.kept) * stack.batch
    return LayerReport(
        layer.name,
        " + ".join([*([plan.title] if plan else []), *([merging.title] if merges else [])]),
        "model" if pattern is None else backend_of(pattern, stack.device, stack.dtype, layer.head_dim),
        1 - (1 - (plan.nominal_sparsity if plan else 0)) * (kept / image) ** 2,
        (every_pair - pairs) / (every_pair + to_references),
        saved,
    )


def merged_weights(layer: Layer, card: Card) -> int:
    """Number of weights in linear layers that merged tokens go through; the first attention has the feed-forward."""
    if is_single_stream(card, layer.block):
        modules = [layer.block]
    else:
        first = layer.attn is next(iter(attentions(card, layer.block).values()))
        modules = [
            module
            for name, module in merged_modules(layer.group.method, card, layer.block).items()
            if module is layer.attn or (first and card.merged_modules[name] == "mlp")
        ]
    skipped = "norm", "add_", "added", "lora"  # modulation, text and adapters
    return sum(
        weight.numel()
        for module in modules
        for name, weight in module.named_parameters()
        if weight.ndim == 2 and not any(word in name for word in skipped)
    )


def why_dense(layer: Layer, stack: StackPlan, merging: TokenMerging | None) -> str:
    """Why a layer was dense."""
    if layer.sparse or layer.group:
        return stack.replaced.get(layer.name, stack.why)
    if merging and layer.number not in merging.dense_layer_set():
        return f"one of the first blocks, which {type(merging).__name__} skips"
    return "named in dense_layers"
