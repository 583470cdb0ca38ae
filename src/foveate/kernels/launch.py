# pyright: basic, reportPrivateImportUsage=false
"""Shared by all kernels: custom ops, recorded launches, memory layouts and device properties."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import Library, infer_schema
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

__all__ = [
    "AMPERE",
    "SMALLEST_DOT",
    "Launch",
    "call",
    "compute_capability",
    "differentiable",
    "empty_like",
    "empty_lse",
    "gpu_op",
    "half_precision",
    "launcher",
    "multiprocessors",
    "padded_size",
    "recorded",
    "row_contiguous",
    "shared_memory",
]

AMPERE = 80  # compute capability from which kernels run
SMALLEST_DOT = 16  # smallest side of a matrix product in Triton


# --- ops -------------------------------------------------------------------------------------------------------------


LIBRARY = Library("foveate", "FRAGMENT")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # the function of each op
_WITH_GRADIENT: dict[Any, Callable[..., Any]] = {}  # the same with autograd
_GRADIENTS: dict[Any, tuple[Any, Any]] = {}  # save and differentiate functions of each op


def gpu_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that registers a function as an op that runs on the GPU of its first tensor.

    Triton launches kernels on the current GPU, which may be a different GPU. Calls cost a third of those of an op from
    `torch.library.custom_op`. `differentiable` gives the op gradients; without them, backward passes raise an error.

    Args:
        name: Name of the op in the namespace ``foveate``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        defaults = function.__defaults__ or ()
        num_args = function.__code__.co_argcount

        @wraps(function)
        def on_gpu_of_first_tensor(*args: Any) -> Any:
            gpu = (args[0][0] if isinstance(args[0], list) else args[0]).get_device()
            if gpu < 0 or gpu == torch.cuda.current_device():
                return function(*args)
            with torch.cuda.device(gpu):
                return function(*args)

        def with_gradient(*args: Any) -> Any:
            flat = _flat(args)
            if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)):
                return _below_autograd(op, args, flat)
            omitted = defaults[len(defaults) - num_args + len(args) :]  # PyTorch omits arguments equal to the default
            outputs = _Gradient.apply(op, args + omitted, *flat, *omitted)
            return list(outputs) if listed else outputs

        LIBRARY.define(name + infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, on_gpu_of_first_tensor, "CompositeExplicitAutograd")
        LIBRARY.impl(name, with_gradient, "Autograd")
        op = getattr(torch.ops.foveate, name).default
        _FUNCTIONS[op], _WITH_GRADIENT[op] = on_gpu_of_first_tensor, with_gradient
        listed = str(op._schema.returns[0].type) == "List[Tensor]"
        return op

    return decorate


def call(op: Any, *args: Any) -> Any:
    """Call an op of `gpu_op`. Bypasses PyTorch's dispatcher in eager mode, which takes as long as a launch."""
    return op(*args) if torch.compiler.is_compiling() else _WITH_GRADIENT[op](*args)


def differentiable(op: Any, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Register the gradient of an op of `gpu_op`. For the arguments, see `torch.library.register_autograd`.

    Args:
        op: The op.
        save: ``save(ctx, inputs, output)`` stores in `ctx` what `differentiate` needs.
        differentiate: ``differentiate(ctx, *grads)`` returns the gradient of each input or None, in a list for a list.
    """
    _GRADIENTS[op] = save, differentiate


class _Gradient(torch.autograd.Function):
    """Autograd function that calls an op.

    Autograd ignores tensors inside lists, so the arguments are passed twice: as they are, and flattened.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, args: tuple[Any, ...], *flat: Any) -> Any:
        output = _below_autograd(op, args, flat)
        ctx.op = op
        if op in _GRADIENTS:
            _GRADIENTS[op][0](ctx, args, output)
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.op not in _GRADIENTS:
            raise RuntimeError(f"{ctx.op} has no gradient: the ops of foveate are differentiable once")
        return None, None, *_flat(_GRADIENTS[ctx.op][1](ctx, *grads))


def _below_autograd(op: Any, args: Sequence[Any], flat: Sequence[Any]) -> Any:
    """Call an op without autograd. Bypasses the dispatcher unless a dispatch mode or a tensor subclass needs it."""
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._len_torch_dispatch_stack() or not all(type(x) in PLAIN for x in flat):
            return op(*args)
        return _FUNCTIONS[op](*args)


PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str}


def _flat(args: Iterable[Any]) -> list[Any]:
    return [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]


# --- launches --------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """Launch description: a kernel with its grid and arguments.

    Attributes:
        kernel: The kernel.
        grid: Number of programs along each axis.
        args: Positional arguments of the kernel.
        constants: Constexpr arguments of the kernel, and launch options such as ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Sequence[Any]
    constants: dict[str, Any]


INTERPRETED = knobs.runtime.interpret
MAX_RECORDS = 4096  # per recorded function
EMPTY = "aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty"
ALIGNMENT = 16  # bytes: Triton compiles separate kernels for aligned and unaligned addresses
CACHE_LINE = 128  # bytes
STREAM_INDEX = 3  # position of the stream among the arguments of a compiled kernel
NUM_HEADER_ARGS = 9  # arguments of a compiled kernel before those of the Triton function


def recorded(body: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """Decorator for a function that allocates tensors and launches kernels, and returns some of the tensors.

    Python and Triton can take longer to prepare launches than the GPU takes to run them. So `body` runs only once for
    each signature: the shape, strides, dtype and alignment of the tensors, and the values of the other arguments. Its
    launches and allocations are recorded. Later calls repeat them with the addresses of their own tensors.

    Arguments are positional: tensors, hashable values, and tuples and lists of these. `body` gets tensors on the meta
    device, which have no memory. It may make views and empty or zero tensors, and call functions decorated with
    `launcher` or `recorded`; other work on tensors raises an error.

    Recording pays where calls wait for the CPU. On an H100 with 16 cores, against plain Triton launches and standard
    custom ops (`python -m lab.bench.launches`): block attention, forward and backward, 0.84 / 1.55 / 1.75 ms per call;
    log-linear attention 0.93 / 2.35 ms, without custom ops. Eager steps at 1024 px: SDXL with HilbertA
    137 / 145 / 168 ms, FLUX.1-dev with HilbertA and ToMA 88.4 / 90.6 / 94.1 ms. With one method, FLUX.1-dev waits for
    the GPU and gains nothing.
    """
    records: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}

    @wraps(body)
    def run(*args: Any) -> list[Tensor]:
        if INTERPRETED or _RECORDER.get():
            return list(body(*args))
        tensors, signature = [], []
        _read_signature(args, tensors, signature)
        key = tensors[0].get_device(), *signature
        repeat = records.get(key)
        if repeat is None:
            if len(records) >= MAX_RECORDS:
                records.clear()
            repeat = records[key] = _record(body, args, tensors)
        return repeat(tensors)

    return run


def launcher(describe: Callable[..., Launch]) -> Callable[..., Any]:
    """Decorator that turns a function that returns a launch description into one that launches the kernel.

    The launch is recorded, as in `recorded`. Each tensor that the kernel gets, directly or as the base of a tensor
    descriptor, must be an argument of the function or a view of one.
    """

    @recorded
    @wraps(describe)
    def launch(*args: Any) -> Sequence[Tensor]:
        description, recorder = describe(*args), _RECORDER.get()
        if recorder:
            recorder.launches.append(description)
        elif math.prod(description.grid):  # interpreted
            description.kernel[description.grid](*description.args, **description.constants)
        return ()

    return launch


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records launches and allocations. Allows views and rejects all other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.empty: list[Tensor] = []
        self.zero: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in EMPTY:
            self.empty.append(result)
        elif func.name() == "aten::new_zeros":
            self.zero.append(result)
        elif not func.is_view:
            raise ValueError(f"{func} cannot be recorded: call it before the recorded function")
        return result


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def _read_signature(args: Iterable[Any], tensors: list[Tensor], signature: list[Any]) -> None:
    """Append the tensors in `args` to `tensors`, and the properties that a record depends on to `signature`."""
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
            signature += x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT
        elif isinstance(x, tuple | list):
            signature.append(len(x))
            _read_signature(x, tensors, signature)
        else:
            signature.append(x)


def _replace_tensors(args: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of `args` in which the next of `tensors` takes the place of each tensor."""
    new = [
        next(tensors) if isinstance(x, Tensor) else _replace_tensors(x, tensors) if isinstance(x, tuple | list) else x
        for x in args
    ]
    return args._make(new) if hasattr(args, "_make") else new


def _record(body: Callable[..., Any], args: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Record a call of `body`. Returns a function that repeats it for tensors with the signature of `tensors`."""
    meta_tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    with _Recorder() as recorder:
        token = _RECORDER.set(recorder)
        try:
            results = body(*_replace_tensors(args, iter(meta_tensors)))
        finally:
            _RECORDER.reset(token)
    allocated = {(_storage(x), x.untyped_storage().nbytes()) for x in (*recorder.empty, *recorder.zero)}
    if not all((_storage(x), x.numel() * x.element_size()) in allocated for x in results):
        raise ValueError("a recorded function must return tensors that it allocates, not arguments or views")
    device = tensors[0].device
    zero_storages = {_storage(x) for x in recorder.zero}
    allocations = [
        partial(torch.zeros, x.shape, dtype=x.dtype, device=device)
        if _storage(x) in zero_storages
        else partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=device)
        for x in results
    ]
    # memory index and byte offset of each storage
    locations = {_storage(x): (i, 0) for i, x in enumerate((*meta_tensors, *results))}
    for allocate, new_tensors in ((torch.empty, recorder.empty), (torch.zeros, recorder.zero)):
        scratch = [x for x in new_tensors if _storage(x) not in locations]  # not returned: share one allocation
        sizes = [triton.cdiv(x.untyped_storage().nbytes(), CACHE_LINE) * CACHE_LINE for x in scratch]
        for x, offset in zip(scratch, accumulate(sizes, initial=0), strict=False):
            locations[_storage(x)] = len(meta_tensors) + len(allocations), offset
        if scratch:
            allocations.append(partial(allocate, sum(sizes), dtype=torch.uint8, device=device))
    memory = [*tensors, *(allocate() for allocate in allocations)]
    launches = [_prepare_launch(x, locations, memory) for x in recorder.launches if math.prod(x.grid)]
    returned, index = slice(len(meta_tensors), len(meta_tensors) + len(results)), device.index

    def repeat(tensors: list[Tensor]) -> list[Tensor]:
        memory = [*tensors, *[allocate() for allocate in allocations]]
        if launches:
            active: Any = driver.active
            addresses, stream = [x.data_ptr() for x in memory], active.get_current_stream(index)
            for launch in launches:
                launch(addresses, stream)
        return memory[returned]

    return repeat


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _prepare_launch(
    description: Launch, locations: dict[int, tuple[int, int]], memory: list[Tensor]
) -> Callable[[list[int], int], None]:
    """Compile a kernel. Returns a function that launches it, given the memory addresses and the stream.

    Args:
        description: Launch description with meta tensors.
        locations: For each storage of a meta tensor, the index in `memory` and the offset there in bytes.
        memory: Tensors for which the kernel is compiled.
    """
    kernel, args, (x, y, z) = description.kernel, list(description.args), (*description.grid, 1, 1)[:3]
    pointers: list[tuple[int, int, int]] = []
    descriptors: list[tuple[int, int, int, Any]] = []
    examples = args.copy()
    for i, value in enumerate(args):
        view = getattr(value, "base", value)
        if isinstance(view, Tensor):
            index, offset = locations[_storage(view)]
            offset += int(view.storage_offset()) * view.element_size()
            example = _materialize(memory[index], offset, view)
            if view is value:
                pointers.append((NUM_HEADER_ARGS + i, index, offset))
                examples[i] = example
            else:
                descriptors.append((NUM_HEADER_ARGS + i, index, offset, value))
                examples[i] = _with_base(value, example)
    compiled = kernel.warmup(*examples, grid=description.grid, **description.constants)
    run = compiled.run  # loads the kernel
    constants = [description.constants[name] for name in kernel.arg_names[len(args) :]]
    template = [x, y, z, None, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants]

    def launch(addresses: list[int], stream: int) -> None:
        values = template.copy()
        values[STREAM_INDEX] = stream
        for position, index, offset in pointers:
            values[position] = addresses[index] + offset
        for position, index, offset, descriptor in descriptors:
            values[position] = _with_base(descriptor, _Address(addresses[index] + offset))
        run(*values)

    launch.compiled = compiled  # pyright: ignore[reportFunctionMemberAccess] - keeps the kernel loaded
    return launch


def _materialize(memory: Tensor, offset: int, view: Tensor) -> Tensor:
    """A tensor like the meta tensor `view` in the storage of `memory`, `offset` bytes after the start of `memory`."""
    offset = (int(memory.storage_offset()) * memory.element_size() + offset) // view.element_size()
    example = torch.empty(0, dtype=view.dtype, device=memory.device)
    return example.set_(memory.untyped_storage(), offset, view.shape, view.stride())


class _Address(NamedTuple):
    """Base of a tensor descriptor. Triton reads only its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _with_base(descriptor: Any, base: Any) -> Any:
    """A copy of a tensor descriptor with a different base. Skips the checks of the constructor."""
    copy = object.__new__(type(descriptor))
    copy.__dict__ = vars(descriptor) | {"base": base}
    return copy


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
    """Uninitialized per-query log-sum-exp, float32 [batch, heads, queries], for q [batch, heads, queries, dim]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    return 1 if device.type != "cuda" else _properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program; Triton's interpreter has no limit."""
    return 2**20 if device.type != "cuda" else _properties(device).shared_memory_per_block_optin


@torch.compiler.assume_constant_result  # on a cached function, Dynamo would ignore this, trace it and warn
def compute_capability(index: int) -> int:
    """Compute capability of a GPU as one number: 80 for sm_80.

    Not a tuple, because Dynamo of PyTorch 2.11 cannot compare constant tuples.
    """
    major, minor = _capability(index)
    return 10 * major + minor


_capability = cache(torch.cuda.get_device_capability)
_properties = cache(torch.cuda.get_device_properties)
