# pyright: basic, reportPrivateImportUsage=false
"""What all kernels share: ops, launches that cost little time, memory layouts, and sizes of the device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import Library, infer_schema
from triton.runtime import JITFunction

__all__ = [
    "SMALLEST_DOT",
    "Launch",
    "differentiable",
    "empty_like",
    "empty_lse",
    "gpu_op",
    "half_precision",
    "launcher",
    "multiprocessors",
    "padded_size",
    "row_contiguous",
    "shared_memory",
]

SMALLEST_DOT = 16  # smallest side of a matrix product


# --- ops -------------------------------------------------------------------------------------------------------------


LIBRARY = Library("foveate", "FRAGMENT")
_GRADIENTS: dict[Any, tuple[Any, Any]] = {}  # how to save and differentiate each op


def gpu_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes a function an op that runs on the GPU of its first tensor.

    Triton launches kernels on the current GPU, which may be another one. Calls cost a third of those of an op from
    `torch.library.custom_op`. `differentiable` gives the op gradients; without them, backward passes raise an error.

    Args:
        name: Name of the op in the namespace ``foveate``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        defaults = function.__defaults__ or ()
        most = function.__code__.co_argcount

        @wraps(function)
        def on_its_gpu(*args: Any) -> Any:
            gpu = next(x for x in _flat(args) if isinstance(x, Tensor)).get_device()
            if gpu < 0 or gpu == torch.cuda.current_device():
                return function(*args)
            with torch.cuda.device(gpu):
                return function(*args)

        def with_gradient(*args: Any) -> Any:
            if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in _flat(args))):
                with torch._C._AutoDispatchBelowAutograd():
                    return op(*args)
            args += defaults[len(defaults) - most + len(args) :]  # PyTorch drops arguments that equal the default
            outputs = _Gradient.apply(op, args, *_flat(args))
            return list(outputs) if listed else outputs

        LIBRARY.define(name + infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, on_its_gpu, "CompositeExplicitAutograd")
        LIBRARY.impl(name, with_gradient, "Autograd")
        op = getattr(torch.ops.foveate, name).default
        listed = str(op._schema.returns[0].type) == "List[Tensor]"
        return op

    return decorate


def differentiable(op: Any, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Give an op of `gpu_op` gradients; arguments are those of `torch.library.register_autograd`.

    Args:
        op: The op.
        save: ``save(ctx, inputs, output)`` stores in `ctx` what `differentiate` needs.
        differentiate: ``differentiate(ctx, *grads)`` returns the gradient of each input or None, in a list for a list.
    """
    _GRADIENTS[op] = save, differentiate


class _Gradient(torch.autograd.Function):
    """A call of an op. Autograd looks only at the inputs that stand for themselves, so lists are passed twice."""

    @staticmethod
    def forward(ctx: Any, op: Any, args: tuple[Any, ...], *flat: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = op(*args)
        ctx.op = op
        if op in _GRADIENTS:
            _GRADIENTS[op][0](ctx, args, output)
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.op not in _GRADIENTS:
            raise RuntimeError(f"{ctx.op} has no gradient: the ops of foveate are differentiable once")
        return None, None, *_flat(_GRADIENTS[ctx.op][1](ctx, *grads))


def _flat(args: Iterable[Any]) -> list[Any]:
    return [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]


# --- launches --------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A kernel and what it is launched with.

    Attributes:
        kernel: The kernel.
        grid: Number of programs along each axis.
        args: Positional arguments.
        constants: Constants of the kernel, and launch options such as ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Sequence[Any]
    constants: dict[str, Any]


MOST_LAUNCHES = 4096  # that one launcher remembers


def launcher(describe: Callable[..., Launch]) -> Callable[..., None]:
    """Decorator that makes a function that describes a launch launch it.

    For each launch, Triton looks at all arguments to find the compiled kernel, which can take longer than the kernel
    runs. Here this is done once for arguments of one kind, together with all that `describe` computes: for tensors of
    the same shape, strides, dtype and alignment, and for equal other values. Later launches only fill in addresses.

    Arguments are positional: tensors, hashable values, and tuples and lists of these. `describe` sees tensors on the
    meta device, which have no memory. Each tensor among the arguments of the kernel, or base of a tensor descriptor,
    must be one of them or a view of one.
    """
    known: dict[Any, Callable[[list[Tensor]], None]] = {}

    @wraps(describe)
    def launch(*args: Any) -> None:
        tensors, kinds = [], []
        _read(args, tensors, kinds)
        key = tensors[0].get_device(), *kinds
        repeat = known.get(key)
        if repeat is None:
            shapes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
            call = describe(*_replaced(args, iter(shapes)))
            repeat = _prepared(call, shapes, tensors)
            if len(known) >= MOST_LAUNCHES:
                known.clear()
            if isinstance(call.kernel, JITFunction):  # not interpreted: tests change the sizes of tiles
                known[key] = repeat
        repeat(tensors)

    return launch


def _read(args: Iterable[Any], tensors: list[Tensor], kinds: list[Any]) -> None:
    """Collect the tensors in arguments, and what kind each argument is of."""
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
            kinds += x.shape, x.stride(), x.dtype, x.data_ptr() % 16
        elif isinstance(x, tuple | list):
            kinds.append(len(x))
            _read(x, tensors, kinds)
        else:
            kinds.append(x)


def _replaced(args: Any, tensors: Iterator[Tensor]) -> Any:
    """Arguments with other tensors."""
    found = [
        next(tensors) if isinstance(x, Tensor) else _replaced(x, tensors) if isinstance(x, tuple | list) else x
        for x in args
    ]
    return args._make(found) if hasattr(args, "_make") else found


def _prepared(call: Launch, shapes: list[Tensor], tensors: list[Tensor]) -> Callable[[list[Tensor]], None]:
    """A function that launches a kernel with given tensors.

    Args:
        call: The launch, with meta tensors.
        shapes: The meta tensors that stand for tensors.
        tensors: Tensors like the meta tensors.
    """
    kernel, (x, y, z), args, constants = call.kernel, (*call.grid, 1, 1)[:3], list(call.args), call.constants
    if not x * y * z:
        return lambda tensors: None
    number = {shape.untyped_storage()._cdata: i for i, shape in enumerate(shapes)}
    slots = [
        (place, number[view.untyped_storage()._cdata], value)
        for place, value in enumerate(args)
        if isinstance(view := getattr(value, "base", value), Tensor)
    ]

    def views(tensors: list[Tensor]) -> list[Any]:
        values = args.copy()
        for place, i, value in slots:
            values[place] = _view(value, tensors[i]) if isinstance(value, Tensor) else _moved(value, tensors[i])
        return values

    if not isinstance(kernel, JITFunction):  # interpreted
        return lambda tensors: kernel[x, y, z](*views(tensors), **constants)
    run = kernel.warmup(*views(tensors), grid=(x, y, z), **constants)[x, y, z]
    args += [constants[name] for name in kernel.arg_names[len(args) :]]
    pointers = [(place, i, x.storage_offset() * x.element_size()) for place, i, x in slots if isinstance(x, Tensor)]
    descriptors = [(place, i, x) for place, i, x in slots if not isinstance(x, Tensor)]

    def launch(tensors: list[Tensor]) -> None:
        values = args.copy()
        for place, i, skip in pointers:
            values[place] = tensors[i].data_ptr() + skip
        for place, i, descriptor in descriptors:
            values[place] = _moved(descriptor, tensors[i])
        run(*values)

    return launch


def _view(view: Tensor, tensor: Tensor) -> Tensor:
    """The view of a tensor that a meta tensor stands for."""
    tensor = tensor.view(view.dtype)
    return tensor.as_strided(view.shape, view.stride(), int(tensor.storage_offset()) + int(view.storage_offset()))


def _moved(descriptor: Any, base: Tensor) -> Any:
    """A tensor descriptor with another base, without its checks."""
    moved = object.__new__(type(descriptor))
    moved.__dict__ = vars(descriptor) | {"base": base}
    return moved


# --- layouts and sizes -----------------------------------------------------------------------------------------------


def half_precision(dtype: torch.dtype) -> bool:
    """Whether a dtype is bfloat16 or float16."""
    return dtype in (torch.bfloat16, torch.float16)


def padded_size(size: int) -> int:
    """The smallest power of two that holds `size` and is a valid side of a matrix product."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


# Kernels accept any stride from token to token, but need stride 1 within a token.


def row_contiguous(x: Tensor) -> Tensor:
    """`x`, copied unless its last dimension has stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """An uninitialized tensor of the shape of `x`, in its layout if the last dimension has stride 1 there."""
    empty = torch.empty_like(x)  # does not keep the layout of overlapping tensors
    return empty if empty.stride(-1) == 1 else x.new_empty(x.shape)


def empty_lse(q: Tensor) -> Tensor:
    """An uninitialized float32 number for each query of q [batch, heads, queries, head_dim]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    return 1 if device.type != "cuda" else _properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program; Triton's interpreter has no limit."""
    return 2**20 if device.type != "cuda" else _properties(device).shared_memory_per_block_optin


_properties = cache(torch.cuda.get_device_properties)
