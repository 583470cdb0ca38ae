# pyright: basic, reportPrivateImportUsage=false
"""What all kernels share: ops, launches that cost little time, memory layouts, and sizes of the device."""

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
SMALLEST_DOT = 16  # smallest side of a matrix product


# --- ops -------------------------------------------------------------------------------------------------------------


LIBRARY = Library("foveate", "FRAGMENT")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # what each op calls
_WITH_GRADIENT: dict[Any, Callable[..., Any]] = {}  # the same, with gradients
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
            gpu = (args[0][0] if isinstance(args[0], list) else args[0]).get_device()
            if gpu < 0 or gpu == torch.cuda.current_device():
                return function(*args)
            with torch.cuda.device(gpu):
                return function(*args)

        def with_gradient(*args: Any) -> Any:
            flat = _flat(args)
            if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)):
                return _below_autograd(op, args, flat)
            dropped = defaults[len(defaults) - most + len(args) :]  # PyTorch drops arguments that equal the default
            outputs = _Gradient.apply(op, args + dropped, *flat, *dropped)
            return list(outputs) if listed else outputs

        LIBRARY.define(name + infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, on_its_gpu, "CompositeExplicitAutograd")
        LIBRARY.impl(name, with_gradient, "Autograd")
        op = getattr(torch.ops.foveate, name).default
        _FUNCTIONS[op], _WITH_GRADIENT[op] = on_its_gpu, with_gradient
        listed = str(op._schema.returns[0].type) == "List[Tensor]"
        return op

    return decorate


def call(op: Any, *args: Any) -> Any:
    """Call an op of `gpu_op`. Bypasses PyTorch's dispatcher in eager mode, which takes as long as a launch."""
    return op(*args) if torch.compiler.is_compiling() else _WITH_GRADIENT[op](*args)


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
    """Call an op, without PyTorch's dispatcher unless it has more to do: for tracing, fake tensors and subclasses."""
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._len_torch_dispatch_stack() or not all(type(x) in PLAIN for x in flat):
            return op(*args)
        return _FUNCTIONS[op](*args)


PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float}


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


INTERPRETED = knobs.runtime.interpret
MOST_RECORDS = 4096  # that one function remembers
EMPTY = "aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty"
ALIGNED, LINE = 16, 128  # bytes: Triton compiles kernels for aligned and for other addresses; a line of the cache
STREAM, HEADER = 3, 9  # place of the stream among the arguments of a compiled kernel, and how many precede its own


def recorded(body: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """Decorator for a function that allocates tensors and launches kernels, and returns some of the tensors.

    Python and Triton can take longer to prepare launches than the GPU takes to run them. So `body` runs only once for
    arguments of one kind: for tensors of the same shape, strides, dtype and alignment, and for equal other values. Its
    launches and allocations are recorded, and repeated by later calls with the addresses of their tensors.

    Arguments are positional: tensors, hashable values, and tuples and lists of these. `body` sees tensors on the meta
    device, which have no memory. It may make views and empty or zero tensors, and call functions decorated with
    `launcher` or `recorded`; other work on tensors raises an error.
    """
    records: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}

    @wraps(body)
    def run(*args: Any) -> list[Tensor]:
        if INTERPRETED or _RECORDER.get():
            return list(body(*args))
        tensors, kinds = [], []
        _read(args, tensors, kinds)
        key = tensors[0].get_device(), *kinds
        repeat = records.get(key)
        if repeat is None:
            if len(records) >= MOST_RECORDS:
                records.clear()
            repeat = records[key] = _record(body, args, tensors)
        return repeat(tensors)

    return run


def launcher(describe: Callable[..., Launch]) -> Callable[..., Any]:
    """Turns a function that returns a launch description into one that launches it: `recorded` for a single launch.

    Each tensor among the arguments of the kernel, or base of a tensor descriptor, must be an argument of the function
    or a view of one.
    """

    @recorded
    @wraps(describe)
    def launch(*args: Any) -> Sequence[Tensor]:
        call, recorder = describe(*args), _RECORDER.get()
        if recorder:
            recorder.launches.append(call)
        elif math.prod(call.grid):  # interpreted
            call.kernel[call.grid](*call.args, **call.constants)
        return ()

    return launch


class _Recorder(TorchDispatchMode):
    """Mode that notes the launches and the new tensors of a function, and allows nothing else but views."""

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


def _read(args: Iterable[Any], tensors: list[Tensor], kinds: list[Any]) -> None:
    """Collect the tensors in arguments, and what kind each argument is of."""
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
            kinds += x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED
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


def _record(body: Callable[..., Any], args: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that repeats the allocations and launches of a call of `body`, for tensors like these."""
    shapes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    with _Recorder() as recorder:
        token = _RECORDER.set(recorder)
        try:
            results = body(*_replaced(args, iter(shapes)))
        finally:
            _RECORDER.reset(token)
    whole = {(_storage(x), x.untyped_storage().nbytes()) for x in (*recorder.empty, *recorder.zero)}
    if not all((_storage(x), x.numel() * x.element_size()) in whole for x in results):
        raise ValueError("a recorded function returns only tensors that it made, not views of them")
    device = tensors[0].device
    cleared = {_storage(x) for x in recorder.zero}
    allocations = [
        partial(torch.zeros, x.shape, dtype=x.dtype, device=device)
        if _storage(x) in cleared
        else partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=device)
        for x in results
    ]
    places = {_storage(x): (i, 0) for i, x in enumerate((*shapes, *results))}  # which memory, and where in it
    for allocate, made in ((torch.empty, recorder.empty), (torch.zeros, recorder.zero)):
        parts = [x for x in made if _storage(x) not in places]  # those that are not returned share their memory
        sizes = [triton.cdiv(x.untyped_storage().nbytes(), LINE) * LINE for x in parts]
        for x, skip in zip(parts, accumulate(sizes, initial=0), strict=False):
            places[_storage(x)] = len(shapes) + len(allocations), skip
        if parts:
            allocations.append(partial(allocate, sum(sizes), dtype=torch.uint8, device=device))
    memory = [*tensors, *(allocate() for allocate in allocations)]
    launches = [_prepared(call, places, memory) for call in recorder.launches if math.prod(call.grid)]
    returned, index = slice(len(shapes), len(shapes) + len(results)), device.index

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


def _prepared(
    call: Launch, places: dict[int, tuple[int, int]], memory: list[Tensor]
) -> Callable[[list[int], int], None]:
    """A function that launches a kernel on a stream, given the addresses of all memory.

    Args:
        call: The launch, with meta tensors.
        places: The number of the memory that each storage of a meta tensor stands for, and where it begins there.
        memory: Tensors for which the kernel is compiled.
    """
    kernel, args, (x, y, z) = call.kernel, list(call.args), (*call.grid, 1, 1)[:3]
    pointers: list[tuple[int, int, int]] = []
    descriptors: list[tuple[int, int, int, Any]] = []
    examples = args.copy()
    for i, value in enumerate(args):
        view = getattr(value, "base", value)
        if isinstance(view, Tensor):
            number, skip = places[_storage(view)]
            skip += int(view.storage_offset()) * view.element_size()
            example = _at(memory[number], skip, view)
            if view is value:
                pointers.append((HEADER + i, number, skip))
                examples[i] = example
            else:
                descriptors.append((HEADER + i, number, skip, value))
                examples[i] = _moved(value, example)
    compiled = kernel.warmup(*examples, grid=call.grid, **call.constants)
    run = compiled.run  # loads the kernel
    rest = [call.constants[name] for name in kernel.arg_names[len(args) :]]
    given = [x, y, z, None, compiled.function, compiled.packed_metadata, None, None, None, *args, *rest]

    def launch(addresses: list[int], stream: int) -> None:
        values = given.copy()
        values[STREAM] = stream
        for place, number, skip in pointers:
            values[place] = addresses[number] + skip
        for place, number, skip, descriptor in descriptors:
            values[place] = _moved(descriptor, _Address(addresses[number] + skip))
        run(*values)

    launch.compiled = compiled  # pyright: ignore[reportFunctionMemberAccess] - keeps the kernel loaded
    return launch


def _at(memory: Tensor, skip: int, view: Tensor) -> Tensor:
    """The view of memory that a meta tensor stands for, from a byte on."""
    skip = (int(memory.storage_offset()) * memory.element_size() + skip) // view.element_size()
    example = torch.empty(0, dtype=view.dtype, device=memory.device)
    return example.set_(memory.untyped_storage(), skip, view.shape, view.stride())


class _Address(NamedTuple):
    """Base of a tensor descriptor, of which Triton needs only the address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _moved(descriptor: Any, base: Any) -> Any:
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


@torch.compiler.assume_constant_result
@cache
def compute_capability(index: int) -> int:
    """80 for sm_80. One number, because Dynamo of PyTorch 2.11 cannot compare constant tuples."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


_properties = cache(torch.cuda.get_device_properties)
