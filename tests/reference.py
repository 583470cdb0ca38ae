"""The independent route: a model whose own attention is replaced by a definition, in raster order."""

import math
from contextlib import contextmanager
from unittest import mock

import log_linear_oracle
import torch
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from foveate import LLSA
from foveate.ops import select_blocks
from foveate.ops.curves import grid_order


@contextmanager
def reference(family, method, *grids):
    """Context in which a model of a family, without Foveate, computes self-attention by the definition of a method.

    Yields (number of the block, tokens) of each layer of self-attention that has run.
    """
    layers, ran = [], []

    def attention(query, key, value, attn_mask=None, *more, **options):
        if query.shape[2] + family.keys != key.shape[2]:
            return scaled_dot_product_attention(query, key, value, attn_mask, *more, **options)
        if options.get("enable_gqa"):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if not family.keys:
            return of_all(query, key, value, attn_mask)
        nobody = query.new_zeros(*query.shape[:2], family.keys, query.shape[3])  # asks in the place of the text
        asked = torch.cat([nobody, query] if family.text_first else [query, nobody], 2)
        out = of_all(asked, key, value, attn_mask)
        return out[:, :, family.keys :] if family.text_first else out[:, :, : -family.keys]

    def of_all(query, key, value, attn_mask):
        ran.append(query)
        number = family.numbers[len(ran) - 1] if family.numbers else len(ran) - 1
        if number is None:
            return scaled_dot_product_attention(query, key, value, attn_mask)
        layers.append((number, query.shape[2]))
        if attn_mask is None:
            return attend(query, key, value, method, number, grids or family.grids[:1], family.text_first)
        out = torch.zeros_like(query)  # padding, which no query sees, is left out of each sample
        for i, seen in enumerate(attn_mask.expand(len(query), -1, -1, -1).any((1, 2))):
            real = (x[i : i + 1, :, seen] for x in (query, key, value))
            out[i, :, seen] = attend(*real, method, number, grids or family.grids[:1], family.text_first)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield layers


def attend(q, k, v, method, number, grids, text_first=True):
    """Attention of one layer [batch, heads, tokens, head_dim]."""
    plan = plan_for(method, number, grids, q.shape[2])
    if plan is None:
        return scaled_dot_product_attention(q, k, v)
    if not isinstance(method, LLSA):
        mask = dense_mask(method, number, grids, q.shape[2], text_first)
        return scaled_dot_product_attention(q, k, v, mask)
    words, image = places(grids, q.shape[2], text_first)
    order = image[grid_order(method.curve, *section(grids, q.shape[2])[0])]
    iq, ik, iv = (x[:, :, order] for x in (q, k, v))
    tq, tk, tv = (x[:, :, words] for x in (q, k, v))
    selection = select_blocks(iq, ik, top_k=method.top_k, block_size=method.block_size, levels=method.levels)
    enrich = None if method.enrich is True else int(method.enrich)
    text = {"extra_k": tk, "extra_v": tv} if tk.shape[2] else {}
    out, _ = log_linear_oracle.log_linear(iq, ik, iv, selection, enrich, reweight=method.reweight, **text)
    out = torch.cat([scaled_dot_product_attention(tq, k, v), out.to(q.dtype)], 2)
    return out[:, :, torch.cat([words, order]).argsort()]


def places(grids, tokens, text_first):
    """Positions of the text and of the images in an attention sequence."""
    images = sum(map(math.prod, section(grids, tokens)))
    text = tokens - images
    first = text_first(grids[0]) if callable(text_first) else text * text_first
    image = torch.arange(first, first + images)
    return torch.cat([torch.arange(first), torch.arange(first + images, tokens)]), image


def section(grids, tokens):
    """The grids of a layer: parts of a UNet have the picture's grid, or half of it, or a quarter."""
    first, *others = grids
    while math.prod(first) > tokens:
        first = tuple(-(-side // 2) for side in first)
    return (first, *others)


def plan_for(method, number, grids, tokens):
    """The plan of a layer; None if the layer, or the part of a UNet that it is in, is dense."""
    grids = section(grids, tokens)
    if number in method.dense_layer_set():
        return None
    try:
        return method.plan(grids, tokens - sum(map(math.prod, grids)))
    except ValueError:
        return None


def dense_mask(method, number, grids, tokens, text_first=True):
    """Which of the tokens of a layer attend to which, over its attention sequence in raster order."""
    plan = plan_for(method, number, grids, tokens)
    if plan is None:
        return torch.ones(tokens, tokens, dtype=torch.bool)
    words, image = places(grids, tokens, text_first)
    place = torch.cat([words, image[plan.orders[number % len(plan.orders)]]]).argsort()
    return plan.tables[number % len(plan.tables)].to_dense()[place][:, place]
