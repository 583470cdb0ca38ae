"""Laws of what is remembered of tensors."""

import gc
import weakref

import torch

from foveate import LLSA, HilbertA, ToMA
from foveate.methods import hilberta, llsa, toma
from foveate.ops.block_table import block_starts, block_table
from foveate.ops.curves import hilbert_order
from foveate.utils.cache import FixedMemory, WeakTensorCache, cached_by_tensor


def test_what_was_made_is_remembered_by_every_tensor_and_the_key():
    cache, made = WeakTensorCache[int](), list[int]()

    def of(tensors, key):
        return cache.get(tensors, key, lambda: made.append(len(made)) or made[-1])

    a, b, shared = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    assert [of([a, shared], 0), of([b, shared], 0), of([a, shared], 1), of([shared], 0)] == [0, 1, 2, 3]
    assert [of([a, shared], 0), of([b, shared], 0), of([a, shared], 1), of([shared], 0)] == [0, 1, 2, 3]


def test_what_follows_from_a_tensor_is_computed_again_only_after_a_change_in_place():
    made = list[int]()

    @cached_by_tensor
    def last(tensor, place=-1):
        made.append(place)
        return int(tensor[place])

    tensor = torch.arange(3)
    assert [last(tensor), last(tensor), last(tensor, 0)] == [2, 2, 0]
    tensor += 1
    assert [last(tensor), last(tensor, 0), last(tensor)] == [3, 1, 3]
    assert made == [-1, 0, -1, 0]


def test_an_entry_dies_with_the_last_tensor():
    cache, last = WeakTensorCache[torch.Tensor](), torch.zeros(1)
    value = weakref.ref(cache.get([torch.zeros(1), last], 0, lambda: torch.zeros(1)))
    gc.collect()
    assert value() is not None
    del last
    gc.collect()
    assert value() is None


def test_plans_are_the_same_under_any_default_device_and_may_be_trained_with():
    def made():
        plan, regions = HilbertA(tiles=2).plan(((24, 33),), 7), ToMA(keep=0.5).regions(((24, 33),))
        merged = regions.merged(block_table([[0]], block_starts(799, block=799)), 7)
        orders = *plan.orders, regions.order, *LLSA().plan(((24, 33),), 7).orders, hilbert_order(5, 9)
        tables = (tensor for table in (*plan.tables, merged) for tensor in table)
        return [*tables, *orders, *plan.tile_maps, *regions.tile_maps]

    def forget():
        for cached in (hilberta._plan, llsa._plan, toma._regions):
            cached.cache_clear()

    forget()
    want = made()
    forget()
    with torch.device("meta"), torch.inference_mode():
        got = made()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not any(tensor.is_inference() for tensor in got)


def test_fixed_memory_copies_to_one_address_as_long_as_shapes_agree():
    memory, given = FixedMemory(), [torch.randn(3, 4) for _ in range(4)]
    with torch.no_grad():
        (first,) = memory.hold((given[0].T,))
        assert torch.equal(first, given[0].T)
        assert first.is_contiguous()
        (second,) = memory.hold((given[1].T,))
        assert second is first
        assert torch.equal(second, given[1].T)
        (other,) = memory.hold((given[2],))  # another shape
        assert other is not first
        assert torch.equal(first, given[1].T)
    with torch.inference_mode():
        assert torch.equal(memory.hold((given[3],))[0], given[3])
    with torch.no_grad():
        assert torch.equal(memory.hold((given[0],))[0], given[0])
    assert torch.equal(other, given[2])
