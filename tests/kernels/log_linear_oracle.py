"""Log-linear attention a second time, in float64 from its definition: every query over all that there is, masked."""

import torch


def nodes_of(tokens, block, levels):
    """How many nodes each level has."""
    return [-(-tokens // block**level) for level in range(1, levels + 1)]


def means(x, real, block, levels):
    """For each level the means of real tokens, and how many there are: lists of [batch, heads, nodes, dim]."""
    x = x.double().masked_fill(~real[:, None, :, None], 0)
    result, counts = [], []
    for level, nodes in enumerate(nodes_of(x.shape[2], block, levels), 1):
        owner = torch.arange(x.shape[2]) // block**level
        counts.append(torch.zeros(len(x), nodes, dtype=torch.float64).index_add_(1, owner, real.double()))
        sums = torch.zeros(*x.shape[:2], nodes, x.shape[3], dtype=torch.float64).index_add(2, owner, x)
        result.append(sums / counts[-1].clamp(min=1)[:, None, :, None])
    return result, counts


def select(q, k, counts, block, top_k):
    """Python lists [level][batch][head][node] of picked nodes: a loop over sorted candidates."""
    levels = len(q)
    lists = [[[[] for _ in range(q[0].shape[1])] for _ in range(q[0].shape[0])] for _ in range(levels)]
    for level in reversed(range(levels)):
        scores = q[level].double() @ k[level].double().mT
        for batch, head in torch.cartesian_prod(*map(torch.arange, q[0].shape[:2])).view(-1, 2).tolist():
            for row in range(scores.shape[2]):
                candidates = range(scores.shape[3])
                if level < levels - 1:
                    above = lists[level + 1][batch][head][row // block]
                    candidates = [j for p in above for j in range(p * block, (p + 1) * block) if j in candidates]
                alive = [j for j in candidates if counts[level][batch, j] > 0]
                best = sorted(alive, key=lambda j, s=scores[batch, head, row]: (-s[j].item(), j))[:top_k]
                lists[level][batch][head].append(sorted(best))
    return lists


def visible(lists, tokens, block, enriched, exclude):
    """Which tokens and which means each query sees: of each level from 0 on, bool [batch, heads, tokens, nodes]."""
    batch, heads = lists[0].shape[:2]
    sizes = [tokens, *nodes_of(tokens, block, len(lists))]
    rows, picked = torch.arange(tokens), []
    for level, chosen in enumerate(lists, 1):
        mask = torch.zeros(batch, heads, sizes[level], sizes[level] + 1, dtype=torch.bool)
        mask.scatter_(3, chosen.long().where(chosen >= 0, sizes[level]), True)
        picked.append(mask[:, :, rows // block**level, :-1])
    seen = [picked[level][..., torch.arange(sizes[level]) // block] for level in range(len(lists))]
    seen.append(torch.ones(batch, heads, tokens, sizes[-1], dtype=torch.bool))
    for level in range(1, len(seen)):
        seen[level] = seen[level] & (level <= enriched)
        if exclude:
            seen[level] = seen[level] & ~picked[level - 1]
    return seen


def attention(q, k, v, lists, real, block, *, enriched, reweight, exclude, scale, extra=None):
    """(output, LSE) in float64, differentiable; zeros and -inf for queries that see nothing or are padding."""
    q, k, v = (x.double().masked_fill(~real[:, None, :, None], 0) for x in (q, k, v))
    (means_k, counts), (means_v, _) = (means(x, real, block, len(lists)) for x in (k, v))
    seen = visible(lists, q.shape[2], block, enriched, exclude)
    weights = [real.double(), *((count if reweight else count.clamp(max=1)) for count in counts)]
    keys, values = [k, *means_k], [v, *means_v]
    if extra is not None:
        keys, values = [*keys, extra[0].double()], [*values, extra[1].double()]
        seen.append(torch.ones(*q.shape[:3], extra[0].shape[2], dtype=torch.bool))
        weights.append(torch.ones(len(q), extra[0].shape[2], dtype=torch.float64))
    scores = torch.cat([scale * q @ x.mT + w.log()[:, None, None] for x, w in zip(keys, weights, strict=True)], 3)
    scores = scores.masked_fill(~(torch.cat(seen, 3) & real[:, None, :, None]), -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    weights = scores.masked_fill(empty[..., None], 0).softmax(-1).masked_fill(empty[..., None], 0)
    lse = scores.masked_fill(empty[..., None], 0).logsumexp(-1).masked_fill(empty, -torch.inf)
    return weights @ torch.cat(values, 2), lse
