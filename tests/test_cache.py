"""Laws of what is remembered of tensors."""

import gc
import weakref

import torch

from foveate.cache import PerTensors


def test_what_was_made_is_remembered_by_every_tensor_and_the_key():
    cache, made = PerTensors[int](), list[int]()

    def of(tensors, key):
        return cache.get(tensors, key, lambda: made.append(len(made)) or made[-1])

    a, b, shared = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    assert [of([a, shared], 0), of([b, shared], 0), of([a, shared], 1), of([shared], 0)] == [0, 1, 2, 3]
    assert [of([a, shared], 0), of([b, shared], 0), of([a, shared], 1), of([shared], 0)] == [0, 1, 2, 3]


def test_an_entry_dies_with_the_last_tensor():
    cache, last = PerTensors[torch.Tensor](), torch.zeros(1)
    value = weakref.ref(cache.get([torch.zeros(1), last], 0, lambda: torch.zeros(1)))
    gc.collect()
    assert value() is not None
    del last
    gc.collect()
    assert value() is None
