# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Foveate as an attention backend of diffusers; the only file that uses private names of diffusers' dispatcher.

A processor of diffusers calls ``dispatch_attention_fn(q, k, v, ..., backend=self._attention_backend,
parallel_config=self._parallel_config)``. `attach` sets both on one processor: the backend is `FOVEATE`, and the
`LayerPlan` of the layer travels as the parallel config, which diffusers hands to the backend untouched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    SeqAllToAllDim,
    all_to_all_single_any_o_async,
    all_to_all_single_any_qkv_async,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._device import DeviceContext

from foveate.ops.joint_attention import Pattern, joint_attention
from foveate.ops.permute_tokens import permute_tokens

__all__ = [
    "FOVEATE",
    "KeysAlone",
    "LayerPlan",
    "RerunWithPlans",
    "attach",
    "context_of",
    "detach",
    "dispatches",
    "foveate_attention",
    "local_tokens",
    "plan_of",
    "set_attention",
    "with_text",
]


class KeysAlone(NamedTuple):
    """Tokens of a call that have keys and no queries.

    Attributes:
        positions: Their positions among the keys of the call; padding is left out.
        tokens: Their number, padding included.
        sequence: Position where the keys of the tokens with queries begin.
    """

    positions: Tensor
    tokens: int
    sequence: int


@dataclass(eq=False)
class LayerPlan:
    """How one attention layer attends in one forward; passed in the place of a `ParallelConfig`, and wraps one.

    Attributes:
        order: Positions in the attention sequence in the order of the pattern, text first; padding is left out. Where
            the sequence has references that attend to each other alone, they come before the text.
        inverse: Place of each position in `order`; None where `order` is ascending and complete.
        pattern: Which tokens attend to which; None if all attend to all.
        mask_is_padding: Whether an attention mask only hides the padding, which `order` leaves out.
        streams: Lengths of the parts of the sequence that context parallelism splits one by one: text and image.
        references: Number of tokens of these references.
        cache: Cache of diffusers for their keys and values: it is filled where the sequence has them, else read.
        keys: Tokens of the call with keys alone, which all tokens attend to; None if there are none.
        parts: One plan for each run of consecutive samples with equal padding; empty if all samples use this plan.
        samples: Number of samples of each part.
        rope: (cos, sin), [tokens, head_dim] or [batch, tokens, head_dim], to rotate queries and keys by; None if the
            processor has done so. Rows for the text may be left out: it is not rotated.
        halves: Whether `rope` pairs channels of two halves: see `permute_tokens`.
        text_first: Whether the rows for text that `rope` may leave out are the first ones, not the last.
        intercepted: Whether it attended densely because something intercepts torch's attention.
        called: Whether torch's attention was called in a processor that uses it, for the plan or not.
        watch: Called once with attention as a function of the values, and the values; see `attention_map`.
        backend: The backend of the processor before `attach`.
        parallel: The parallel config of the processor before `attach`.
        stored: Names of the attributes that the processor itself had before `attach`, not only its class.
    """

    order: Tensor
    inverse: Tensor | None = None
    pattern: Pattern | None = None
    mask_is_padding: bool = False
    streams: tuple[int, ...] = ()
    references: int = 0
    cache: Any = None
    keys: KeysAlone | None = None
    parts: tuple["LayerPlan", ...] = ()
    samples: tuple[int, ...] = ()
    rope: tuple[Tensor, Tensor] | None = None
    halves: bool = False
    text_first: bool = False
    intercepted: bool = False
    called: bool = False
    watch: Callable[[Callable[[Tensor], Tensor], Tensor], None] | None = None
    backend: Any = None
    parallel: Any = None
    stored: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Length of the attention sequence."""
        return self.order.shape[0] if self.inverse is None else self.inverse.shape[0]

    @property
    def context_parallel_config(self) -> Any:
        """That of the wrapped config."""
        return getattr(self.parallel, "context_parallel_config", None)

    @property
    def local_tokens(self) -> int:
        """Number of tokens on this process; all of them without context parallelism."""
        context = self.context_parallel_config
        return self.tokens if context is None else local_tokens(self.streams, context)

    def rotation(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`rope` of the whole sequence on its device: see `with_text`."""
        return with_text(rope, self.local_tokens, self.order.device, text_first=self.text_first)

    def fits(self, queries: int, keys: int) -> bool:
        """Whether the plan was made for this number of queries and keys."""
        alone = 0 if self.keys is None else self.keys.tokens
        return queries == self.local_tokens and keys == queries + alone


def _add_backend(name: str) -> AttentionBackendName:
    """A member of diffusers' enum of backends, added at run time."""
    if name not in AttentionBackendName._value2member_map_:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
    return AttentionBackendName(name)


FOVEATE = _add_backend("foveate")


def dispatches(processor: Any) -> bool:
    """Whether a processor attends through diffusers' dispatcher, so that a backend can be chosen for it."""
    return hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")


def plan_of(processor: Any) -> LayerPlan | None:
    """The plan attached to a processor, if any."""
    config = getattr(processor, "_parallel_config", None)
    return config if isinstance(config, LayerPlan) else None


def context_of(processor: Any) -> Any:
    """The config of context parallelism of a processor; None without it."""
    return getattr(getattr(processor, "_parallel_config", None), "context_parallel_config", None)


def local_tokens(streams: Sequence[int], context: Any) -> int:
    """Number of tokens that this process holds of streams which Ulysses context parallelism splits; all without it."""
    if context is None:
        return sum(streams)
    rank, ranks = context._ulysses_local_rank, context._ulysses_mesh.size()
    return sum(stream // ranks + (rank < stream % ranks) for stream in streams)  # as Tensor.tensor_split


def attach(processor: Any, plan: LayerPlan) -> None:
    """Let a processor attend by this plan. Its own backend and parallel config are kept in the plan."""
    plan.backend, plan.parallel = processor._attention_backend, processor._parallel_config
    plan.stored = tuple(vars(processor))
    processor._attention_backend, processor._parallel_config = FOVEATE, plan


def detach(processor: Any, plan: LayerPlan) -> None:
    """Give a processor its own backend and parallel config back, unless something else has set them since."""
    backend, config = processor._attention_backend, processor._parallel_config
    set_attention(
        processor,
        plan.backend if backend is FOVEATE else backend,
        config.parallel if isinstance(config, LayerPlan) else config,
        plan.stored,
    )


def set_attention(processor: Any, backend: Any, config: Any, stored: Sequence[str]) -> None:
    """Set backend and parallel config of a processor.

    Defaults of its class are stored in the instance only if their names are among `stored`.
    """
    for name, value in (("_attention_backend", backend), ("_parallel_config", config)):
        setattr(processor, name, value)
        if name not in stored and getattr(type(processor), name, ...) is value:
            vars(processor).pop(name)


class RerunWithPlans:
    """A checkpointing function that runs a block again with the plans it had, whatever forward passes came between.

    Args:
        original: The model's own checkpointing function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    @classmethod
    def install(cls, holder: Any) -> None:
        """Replace the checkpointing function of a module, once."""
        if not isinstance(holder._gradient_checkpointing_func, cls):
            holder._gradient_checkpointing_func = cls(holder._gradient_checkpointing_func)

    @classmethod
    def remove(cls, holder: Any) -> None:
        """Give a module its own checkpointing function back."""
        if isinstance(rerun := getattr(holder, "_gradient_checkpointing_func", None), cls):
            holder._gradient_checkpointing_func = rerun.original

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        """Run the block, or its method `__call__`; the backward pass will run it again."""
        module: Any = getattr(block, "__self__", block)
        owned: list[Any] = [getattr(part, "processor", None) for part in module.modules()]
        processors = [processor for processor in owned if dispatches(processor)]

        def attached() -> list[Any]:
            return [(x, x._attention_backend, x._parallel_config, tuple(vars(x))) for x in processors]

        plans = attached()

        def run(*args: Any) -> Any:
            now = attached()
            for plan in plans:
                set_attention(*plan)
            try:
                return block(*args)
            finally:
                for plan in now:
                    set_attention(*plan)

        return self.original(run, *args)


def with_text(
    rope: tuple[Tensor, Tensor], tokens: int, device: torch.device, *, text_first: bool
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of text and image, from that of the image if the text is not rotated.

    Args:
        rope: (cos, sin), each [image or all, head_dim] or [batch, image or all, head_dim], on any device.
        tokens: Length of the sequence.
        device: Device of the result.
        text_first: Whether the text comes before the image.
    """
    cos, sin = (x.to(device) for x in rope)
    if not (text := tokens - cos.shape[-2]):
        return cos, sin
    rows = (0, 0, text, 0) if text_first else (0, 0, 0, text)
    return pad(cos, rows, value=1.0), pad(sin, rows)


@attention_dispatch._AttentionBackendRegistry.register(FOVEATE, supports_context_parallel=True)
def foveate_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention by the `LayerPlan` in `_parallel_config`, [batch, tokens, heads, head_dim] as diffusers has it.

    Calls that the plan is not for (other lengths, as those of an image prompt, or a mask) go to the processor's own
    backend.
    """
    plan: LayerPlan = _parallel_config
    has_lengths = plan.fits(query.shape[1], key.shape[1])
    if has_lengths and plan.watch is not None:
        watch, plan.watch = plan.watch, None
        others = (attn_mask, dropout_p, is_causal, scale, enable_gqa, plan)
        watch(lambda values: foveate_attention(query, key, values, *others), value)
    context = plan.context_parallel_config
    rope = None if plan.rope is None else plan.rotation(plan.rope)
    fits = has_lengths and not is_causal and (attn_mask is None or plan.mask_is_padding)
    plan.intercepted = fits and plan.pattern is not None and is_intercepted()
    if not fits or plan.pattern is None or plan.intercepted:
        if plan.intercepted and plan.cache is not None:
            raise ValueError("attention that reads cached references cannot be intercepted: remove the methods first")
        if rope is not None and has_lengths:
            if plan.keys is None:
                query, key = permute_tokens(query, key, rope=rope, halves=plan.halves)
            else:  # tokens with keys alone are not rotated
                first = plan.keys.sequence
                before, own, after = key.tensor_split([first, first + query.shape[1]], 1)
                query, own = permute_tokens(query, own, rope=rope, halves=plan.halves)
                key = torch.cat([before, own, after], 1)
        if fits and plan.pattern is None:
            attn_mask = None  # it hides nothing: padding takes a pattern
        return dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            backend=plan.backend, parallel_config=plan.parallel,
        )  # fmt: skip
    if scale is not None and scale != query.shape[3] ** -0.5:
        query = query * (scale * query.shape[3] ** 0.5)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    if context is None:
        return _attend(query, key, value, plan, rope)
    if rope is not None:  # that of this process's tokens
        query, key, value = permute_tokens(query, key, value, rope=rope, halves=plan.halves)
    group = context._ulysses_mesh.get_group()  # each process gets all tokens of some heads
    if context.ulysses_anything:
        if query.requires_grad:
            raise ValueError("ulysses_anything has no gradients: draw under torch.no_grad(), or train without it")
        held = {"NUM_QO_HEAD": query.shape[2], "Q_S_LOCAL": query.shape[1]}
        waiting = [all_to_all_single_any_qkv_async(x, group) for x in (query, key, value)]
        out = _attend(*(wait() for wait in waiting), plan, None)
        return all_to_all_single_any_o_async(out, group, **held)()
    query, key, value = (SeqAllToAllDim.apply(group, x.contiguous(), 2, 1) for x in (query, key, value))
    return SeqAllToAllDim.apply(group, _attend(query, key, value, plan, None).contiguous(), 1, 2)


def is_intercepted() -> bool:
    """Whether something intercepts functions of torch, as perturbed attention guidance does with attention."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _attend(query: Tensor, key: Tensor, value: Tensor, plan: LayerPlan, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Gather the sequence into the order of the plan, attend by its pattern, and scatter the result back."""
    if plan.parts:
        tensors = *(x.split(plan.samples) for x in (query, key, value)), plan.parts, _split(rope, plan.samples)
        return torch.cat([_attend(*part) for part in zip(*tensors, strict=True)])
    order, alone = None if plan.inverse is None else plan.order.to(query.device), None
    if plan.keys is not None:
        positions, _, first = plan.keys
        alone = [x.index_select(1, positions.to(x.device)) for x in (key, value)]
        key, value = (x[:, first : first + query.shape[1]] for x in (key, value))
    query, key, value = permute_tokens(query, key, value, order=order, rope=rope, halves=plan.halves)
    if n := plan.references:  # they attend to each other alone
        own = [x[:, :n].clone() for x in (query, key, value)]
        plan.cache.store(*own[1:])
        references, query = dispatch_attention_fn(*own, backend=plan.backend), query[:, n:]
    elif plan.cache is not None:
        alone = plan.cache.get()
    if alone is not None:
        key, value = (torch.cat(both, 1) for both in zip(alone, (key, value), strict=True))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if not n and (plan.inverse is None or len(plan.order) == len(plan.inverse)):
        return joint_attention(query, key, value, plan.pattern, scatter=order).transpose(1, 2)
    # padding gets zeros
    out = joint_attention(query, key, value, plan.pattern).transpose(1, 2)
    out = torch.cat([references, out], 1) if n else out
    return out.new_zeros(out.shape[0], len(plan.inverse), *out.shape[2:]).index_copy(1, order, out)


def _split(rope: tuple[Tensor, Tensor] | None, samples: tuple[int, ...]) -> list[tuple[Tensor, Tensor] | None]:
    """The rotary embedding of each part of a batch."""
    if rope is None or rope[0].ndim == 2:
        return [rope] * len(samples)
    return [*zip(*(x.split(samples) for x in rope), strict=True)]
