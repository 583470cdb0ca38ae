"""An emulator of Gluon kernels on a CPU: every warp group of a program is a thread.

It supports what Foveate's kernels use. Barriers have phases and count arrivals and bytes as the hardware does. Copies
and products take a random time, and products are computed when they are waited for. A buffer that is read before it is
full or released too early gives wrong output, and a barrier that never completes is reported as a deadlock.
"""

import importlib
import itertools
import math
import random
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import torch

PATIENCE = 20  # seconds after which a wait counts as a deadlock
LONGEST = 0.005  # longest time of a copy or product, in seconds


class Barrier:
    """An mbarrier in shared memory."""

    def __init__(self):
        self.changed, self.count, self.arrived, self.bytes, self.phase = threading.Condition(), 0, 0, 0, 0

    def update(self, arrivals, size):
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + size
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != int(parity), PATIENCE):
                raise RuntimeError("deadlock")


class Shared:
    """Buffers in shared memory, filled with NaN until written."""

    def __init__(self, dtype, shape, layout):
        self.dtype, self.layout = dtype, layout
        barriers = layout == "barrier"
        self.items = [Barrier() if barriers else Buffer.of(shape[1:], dtype) for _ in range(shape[0])]

    def index(self, i):
        return self.items[int(i)]


class Buffer(torch.Tensor):
    """A tensor in shared memory."""

    @classmethod
    def of(cls, shape, dtype):
        return torch.full(shape, torch.nan, dtype=dtype).as_subclass(cls)

    def load(self, layout):
        return self.clone().as_subclass(torch.Tensor)

    def store(self, value):
        self.copy_(value)

    def slice(self, start, length, dim):
        return self.narrow(dim, start, length)


class Pointer:
    """Offsets into the memory of a tensor."""

    def __init__(self, memory, place):
        self.memory, self.place = memory, place

    def __add__(self, more):
        return Pointer(self.memory, self.place + more)


class Product:
    """An asynchronous matrix product."""

    def __init__(self, a, b, acc):
        self.inputs, self.value = (a, b, acc), None

    def finish(self):
        dawdle()
        a, b, acc = self.inputs
        self.value = a.float() @ b.float() + (acc.value if isinstance(acc, Product) else acc)


class Descriptor:
    """A descriptor of a matrix for the copy engine."""

    def __init__(self, base, shape, strides, block, layout):
        self.base, self.shape, self.strides = base, shape, strides
        self.block, self.dtype, self.layout = block, base.dtype, layout
        self.block_type = SimpleNamespace(nbytes=math.prod(block) * base.element_size())

    @property
    def view(self):
        return self.base.as_strided(self.shape, self.strides)


class Kernel:
    """A device function or a kernel."""

    def __init__(self, function):
        self.function, self.arg_names = function, list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, launch_cooperative_grid=False, **constants):
            arguments = [_pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            programs = list(itertools.product(*map(range, grid)))
            _run_together([(program, self.function, arguments, constants) for program in programs])

        return launch


HERE = threading.local()


def dawdle():
    time.sleep(random.random() ** 8 * LONGEST)  # mostly short, rarely long


def _pointer(tensor):
    storage = tensor.untyped_storage().nbytes() // tensor.element_size()
    return Pointer(tensor.as_strided((storage,), (1,), 0), torch.tensor(tensor.storage_offset()))


def _load_block(descriptor, place, barrier, target):
    if int(place[-1]) * descriptor.view.element_size() % 16:
        raise RuntimeError(f"illegal instruction: a copy from {place} does not begin at a multiple of 16 bytes")
    where = tuple(slice(int(first), int(first) + size) for first, size in zip(place, descriptor.block, strict=True))

    @torch.no_grad()
    def copy():
        dawdle()
        target.zero_()
        part = descriptor.view[where]
        target[tuple(slice(size) for size in part.shape)] = part
        barrier.update(0, -descriptor.block_type.nbytes)

    threading.Thread(target=copy).start()  # the copy engine works on its own, and in no certain order


def _load(pointer, mask=None, other=0.0):
    if mask is None:
        return pointer.memory[pointer.place]
    return torch.where(mask, pointer.memory[torch.where(mask, pointer.place, 0)], other)


def _store(pointer, value, mask=None):
    place, mask = torch.broadcast_tensors(pointer.place, torch.tensor(True) if mask is None else mask)
    pointer.memory[place[mask]] = value.expand(place.shape)[mask].to(pointer.memory.dtype)


def _mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc if use_acc else 0 * acc)
    HERE.started = [*getattr(HERE, "started", []), product]
    return product


def _mma_wait(left, deps):
    while len(HERE.started) > left:
        HERE.started.pop(0).finish()
    values = [dep.value if isinstance(dep, Product) else dep for dep in deps]
    return values[0] if len(values) == 1 else values


def _warp_specialize(jobs, warps, registers):
    _run_together([(HERE.program, function, arguments, {}) for function, arguments in jobs])


def _run_together(jobs):
    """Run functions as parts of programs, each in a thread."""
    failures = []

    @torch.no_grad()
    def run(program, function, arguments, constants):
        HERE.program = program
        try:
            function(*arguments, **constants)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


COUNTED = threading.Condition()


def _await_turn(pointer, rank):
    with COUNTED:
        if not COUNTED.wait_for(lambda: pointer.memory[pointer.place] == rank, PATIENCE):
            raise RuntimeError("deadlock")


def _end_turn(pointer):
    with COUNTED:
        pointer.memory[pointer.place] += 1
        COUNTED.notify_all()


def _add(pointer, x, rank, layout):
    m, n = torch.arange(64)[:, None], torch.arange(64)
    place = m // 16 * 128 + m % 8 * 16 + m % 16 // 8 * 2 + n // 8 * 512 + n % 8 // 2 * 4 + n % 2
    before = pointer.memory[pointer.place + place] if rank else 0
    dawdle()
    pointer.memory[pointer.place + place] = before + x


INLINE = {"_await_turn": _await_turn, "_end_turn": _end_turn, "_add": _add}  # functions with inline assembly


def load(*names):
    """Modules of these names, with an emulated Gluon."""

    def layout(*_, **__):
        return "layout"

    language = ModuleType("language")
    vars(language).update(
        constexpr=lambda value: value, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
        int64=torch.int64, program_id=lambda axis: torch.tensor(HERE.program[axis]), static_range=range,
        arange=lambda a, b, _: torch.arange(a, b),
        load=_load, store=_store,
        zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype), where=torch.where,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)), max=lambda x, dim: x.amax(dim),
        sum=torch.sum, exp2=torch.exp2, log2=torch.log2, expand_dims=torch.unsqueeze, convert_layout=lambda x, _: x,
        allocate_shared_memory=Shared, warp_specialize=_warp_specialize, SliceLayout=layout,
        NVMMADistributedLayout=layout, DotOperandLayout=layout,
        NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
    )  # fmt: skip
    barriers = SimpleNamespace(
        init=lambda barrier, count: setattr(barrier, "count", count),
        expect=lambda barrier, size: barrier.update(1, size),
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=lambda barrier, count, pred=True: barrier.update(count, 0) if pred else None,
        MBarrierLayout=lambda: "barrier",
    )
    hopper = ModuleType("hopper")
    vars(hopper).update(
        mbarrier=barriers, tma=SimpleNamespace(async_load=_load_block, async_copy_global_to_shared=None),
        warpgroup_mma=_mma, warpgroup_mma_init=lambda x: x, warpgroup_mma_wait=_mma_wait,
        fence_async_shared=lambda: None,
    )  # fmt: skip
    gluon = ModuleType("gluon")
    gluon.jit, gluon.language = Kernel, language
    descriptors = ModuleType("descriptors")
    descriptors.TensorDescriptor = Descriptor
    root = "triton.experimental"
    fakes = {
        root: SimpleNamespace(gluon=gluon), f"{root}.gluon": gluon, f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia": ModuleType("nvidia"), f"{root}.gluon.language.nvidia.hopper": hopper,
        f"{root}.gluon.nvidia": ModuleType("nvidia"), f"{root}.gluon.nvidia.hopper": descriptors,
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in (*fakes, *names)}
    sys.modules.update(fakes)
    try:
        for name in names:
            sys.modules.pop(name, None)
        modules = [importlib.import_module(name) for name in names]
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    for module in modules:
        vars(module).update({name: function for name, function in INLINE.items() if name in vars(module)})
    return modules
