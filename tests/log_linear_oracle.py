"""Log-linear attention and its selection by their definitions: in float64, with sets of tokens and dense masks."""

import torch

from foveate.ops.hierarchical_pooling import Selection


def members(tokens, block, level):
    """Mask [nodes, tokens] of the tokens of each node of a level."""
    nodes = torch.arange(-(-tokens // block**level))
    return nodes[:, None] == torch.arange(tokens) // block**level


def pooled(x, real, block, level):
    """Means and counts of the real tokens of each node, for x [batch, heads, tokens, dim]."""
    member = (members(x.shape[2], block, level) & real[:, None]).double()
    count = member.sum(-1)
    return member[:, None] @ x.double() / count.clamp(min=1)[:, None, :, None], count


def picks(lists):
    """Mask [batch, heads, nodes, nodes] of the nodes that each node of a level picked."""
    table = torch.zeros(*lists.shape[:3], lists.shape[2], dtype=torch.bool)
    for row, numbers in zip(table.flatten(0, 2), lists.flatten(0, 2).tolist(), strict=True):
        row[[number for number in numbers if number >= 0]] = True
    return table


def visible(selection, level):
    """Mask [batch, heads, tokens, nodes] of the nodes of a level that each query reads; level 0 is the tokens."""
    block, tokens = selection.block_size, torch.arange(selection.tokens)
    nodes = torch.arange(-(-selection.tokens // block**level))
    if level == selection.levels:
        return torch.ones(*selection.lists[0].shape[:2], len(tokens), len(nodes), dtype=torch.bool)
    parents = picks(selection.lists[level])
    return parents[:, :, tokens // block ** (level + 1)][..., nodes // block]


def log_linear(
    q,
    k,
    v,
    selection,
    enrich=None,
    reweight=True,
    scale=None,
    extra_k=None,
    extra_v=None,
    real=None,
    exclude_selected=False,
):
    """Output and LSE over the keys that a selection makes visible; rows that see nothing give zeros and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    scale = scale or q.shape[3] ** -0.5
    real = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if real is None else real
    scores, values = [], []
    for level in range(1 + (selection.levels if enrich is None else enrich)):
        (means, count), (mean_values, _) = (pooled(x, real, selection.block_size, level) for x in (k, v))
        score, count = scale * q @ means.mT, count[:, None, None]
        if level and reweight:
            score = score + count.clamp(min=1).log()
        seen = visible(selection, level) & (count > 0) & real[:, None, :, None]
        if level and exclude_selected:
            own = torch.arange(selection.tokens) // selection.block_size**level
            seen = seen & ~picks(selection.lists[level - 1])[:, :, own]
        scores.append(score.masked_fill(~seen, -torch.inf))
        values.append(mean_values)
    if extra_k is not None:
        seen = real[:, None, :, None]
        scores.append((scale * q @ extra_k.double().mT).masked_fill(~seen, -torch.inf))
        values.append(extra_v.double())
    return softmax(torch.cat(scores, -1), torch.cat(values, 2))


def softmax(scores, values):
    """Output and LSE, without NaN in values or gradients of rows whose scores are all -inf."""
    hidden = (scores == -torch.inf).all(-1)
    visible_scores = scores.masked_fill(hidden[..., None], 0)
    out = (visible_scores.softmax(-1) @ values).masked_fill(hidden[..., None], 0)
    return out, visible_scores.logsumexp(-1).masked_fill(hidden, -torch.inf)


def select(q, k, top_k, block, levels, real=None):
    """The lists of one head [tokens, dim] for each level, the finest first, by a search node by node."""
    real = torch.ones(1, len(q), dtype=torch.bool) if real is None else real[None]
    both = [[pooled(x[None, None].double(), real, block, level) for level in range(1, levels + 1)] for x in (q, k)]
    queries, keys = ([means[0, 0] for means, _ in parts] for parts in both)
    return select_nodes(queries, keys, [count[0] for _, count in both[1]], top_k, block)


def select_nodes(queries, keys, counts, top_k, block):
    """The lists of one head from the means [nodes, dim] and the counts of each level."""
    lists = []
    for level in reversed(range(len(queries))):
        scores = (queries[level].double() @ keys[level].double().mT).tolist()
        above = lists[0] if lists else None
        numbers = [candidates(above and above[node // block], block, counts[level]) for node in range(len(scores))]
        lists.insert(0, [best(row, those, top_k) for row, those in zip(scores, numbers, strict=True)])
    return lists


def candidates(parents, block, count):
    """Nodes with a real token among the children of `parents`, or among all nodes if None."""
    return [i for i in range(len(count)) if count[i] > 0 and (parents is None or i // block in parents)]


def best(scores, numbers, top_k):
    """The `top_k` numbers with the largest scores, ascending; ties go to the smaller number."""
    return sorted(sorted(numbers, key=lambda i: (-scores[i], i))[:top_k])


def relative(got, want):
    """Norm of the difference, relative to the norm of `want`."""
    return ((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-9)).item()


def check(run, qkv, extras, real, options, forward, backward):
    """Assert that a backend equals float64 attention over its own picks: output, LSE, and every gradient.

    Its padding holds NaN and infinities. `forward` and `backward` are tolerances of results and of gradients.
    """
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4], device=qkv[0].device).repeat(qkv[0].shape[2])
    poison = poison[: qkv[0].shape[2], None].to(qkv[0].dtype)
    given = qkv if real is None else [x.where(real[:, None, :, None], poison) for x in qkv]
    given = [x.detach().requires_grad_() for x in (*given, *extras)]
    exact = [x.detach().double().cpu().requires_grad_() for x in (*qkv, *extras)]
    out, lse, lists, _ = run(*given[:3], *(given[3:] or (None, None)), real, None, options)
    chosen = Selection(tuple(x.cpu() for x in lists), (), out.shape[2], options.block_size, options.top_k)
    want, want_lse = log_linear(
        *exact[:3], chosen, options.enriched, options.reweight, options.scale, *(exact[3:] or (None, None)),
        None if real is None else real.cpu(), options.exclude_selected,
    )  # fmt: skip
    seen = want_lse.isfinite()
    assert (out.dtype, lse.dtype) == (qkv[0].dtype, torch.float32)
    assert torch.equal(lse.cpu().isfinite(), seen)
    assert (lse.cpu()[~seen] == -torch.inf).all()
    assert not out.cpu()[~seen].any()
    assert relative(out, want) < forward
    assert relative(lse.cpu()[seen], want_lse[seen]) < min(forward, 1e-3)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(~seen.to(lse.device), 0)
    got = torch.autograd.grad([out, lse], given, [grad, grad_lse], retain_graph=True)
    goal = (want * grad.double().cpu()).sum() + (want_lse * grad_lse.double().cpu())[seen].sum()
    for ours, theirs in zip(got, torch.autograd.grad(goal, exact), strict=True):
        assert ours.dtype == out.dtype
        assert relative(ours, theirs) < backward
    if out.is_cuda:  # gradients are added in a fixed order
        again = torch.autograd.grad([out, lse], given, [grad, grad_lse])
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def check_readers(q, k, real, top_k, block, levels):
    """Check that the kernels' lists of the readers of each node are those of the transposed selection."""
    from foveate.kernels.log_linear.backward import Readers, list_readers
    from foveate.kernels.log_linear.forward import Keys
    from foveate.kernels.log_linear.select_blocks import select_blocks

    lists, counts = select_blocks(q, k, real, top_k, block, levels)
    numbers = torch.cat(counts, 1)
    tensors = k, k, k[:, :, :0], k[:, :, :0], k[None], numbers, numbers.float(), lists, real
    found = list_readers(Keys(*tensors, block, top_k, levels, True, False, False, 1.0))
    selection = Selection(tuple(lists), counts, q.shape[2], block, top_k)
    for level in range(levels):
        got, want = Readers(*found[4 * level : 4 * level + 4]), selection.transpose(level + 1)
        offsets, rows = want.offsets.flatten(0, 1), want.rows.flatten(0, 1)
        assert torch.equal(got.bounds[..., 1] - got.bounds[..., 0], offsets.diff())
        assert torch.equal(got.used[:, 0], offsets[:, -1])
        places = torch.arange(rows.shape[1], device=rows.device)
        node = torch.searchsorted(offsets[:, 1:].contiguous(), places.expand_as(rows).contiguous(), right=True)
        node = node.clamp(max=offsets.shape[1] - 2)
        where = got.bounds[..., 0].gather(1, node) + places - offsets.gather(1, node)
        ours = got.readers.gather(1, where.clamp(0, rows.shape[1] - 1).long())
        assert torch.equal(ours.where(rows >= 0, -1), rows)
