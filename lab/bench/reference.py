"""Float64 reference for the benchmark of log-linear attention: sampled queries, computed node by node."""

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.hierarchical_pooling import children
from foveate.ops.log_linear_attention import Options, portable

__all__ = ["Call", "key_gradient_error", "query_error", "selection_error"]

SAMPLED = 100  # queries per head


class Call(NamedTuple):
    """Inputs and results of a call of attention; tensors [batch, heads, tokens, head_dim].

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        out: Output.
        lists: Lists of the `Selection` used; empty for dense attention.
        options: Options of log-linear attention; 0 levels mean dense attention.
        grads: Gradients of q, k and v with q as the output gradient; empty for a forward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lists: list[Tensor]
    options: Options
    grads: tuple[Tensor, ...] = ()

    def heads(self) -> list["Call"]:
        """The first and the last head of the last sample, tensors [tokens, head_dim]."""

        def head(which: int) -> Call:
            q, k, v, out = (x[-1, which] for x in (self.q, self.k, self.v, self.out))
            lists, grads = ([x[-1, which] for x in xs] for xs in (self.lists, self.grads))
            return Call(q, k, v, out, lists, self.options, tuple(grads))

        return [head(0), head(-1)]


def query_error(call: Call) -> float:
    """Largest relative error of the output and of the gradient of q; NaN if a checked head contains NaN.

    Checks sampled queries of two heads, always including the first and the last token.
    """
    errors: list[float] = []
    for head in call.heads():
        spans = _spans(head.options)[: head.options.enriched + 1]
        means = [(_means(head.k, span), _means(head.v, span)) for span in spans]
        rows = _sample(head.q)
        wanted = [_query(head, means, row) for row in rows.tolist()]
        for got, want in zip((head.out, *head.grads[:1]), zip(*wanted, strict=True), strict=False):
            errors.append(_relative(got[rows], torch.stack(want)) if got.isfinite().all() else nan)
    return torch.tensor(errors).max().item()


def key_gradient_error(call: Call) -> float:
    """Largest relative error of the gradients of two heads of k and v against the portable path in float64."""
    some = [x[-1:, [0, -1]] for x in (call.q, call.k, call.v)]
    leaves = [x.double().requires_grad_() for x in some]
    lists = [x[-1:, [0, -1]] for x in call.lists]
    out = portable(*leaves, None, None, None, lists, call.options)[0]
    wanted = torch.autograd.grad(out, leaves[1:], leaves[0].detach())
    pairs = zip(call.grads[1:], wanted, strict=True)
    return torch.tensor([_relative(got[-1:, [0, -1]], want) for got, want in pairs]).max().item()


def selection_error(call: Call) -> float:
    """Best score of an unselected node minus worst score of a selected node, relative to the largest score.

    At least 0, and infinite for invalid lists. Checks the lists of sampled queries of two heads.
    """
    worst = 0.0
    for head in call.heads():
        options, spans = head.options, _spans(head.options)
        means = [(_means(head.q, span), _means(head.k, span)) for span in spans[1:]]
        for row in _sample(head.q).tolist():
            for level, (mean_q, mean_k) in enumerate(means, start=1):
                candidates = _visible(head, level, row, len(mean_k))
                picks = head.lists[level - 1][row // spans[level]].long()
                picks = picks[picks >= 0]
                if len(picks) != min(options.top_k, len(candidates)) or not torch.isin(picks, candidates).all():
                    return torch.inf
                scores, picked = mean_k[candidates] @ mean_q[row // spans[level]], torch.isin(candidates, picks)
                if picked.sum() != len(picks):
                    return torch.inf
                if not picked.all():
                    gap = scores[~picked].max() - scores[picked].min()
                    worst = max(worst, (gap / scores.abs().max()).item())
    return worst


def _query(head: Call, means: list[tuple[Tensor, Tensor]], row: int) -> tuple[Tensor, Tensor]:
    """Output of one query, and its gradient with the query as the output gradient."""
    options, q = head.options, head.q[row].double()
    visible = [_visible(head, level, row, len(keys)) for level, (keys, _) in enumerate(means)]
    keys, values = (
        torch.cat([x[numbers] for x, numbers in zip(xs, visible, strict=True)]) for xs in zip(*means, strict=True)
    )
    spans = zip(_spans(options), visible, strict=False)
    counts = torch.cat([(len(head.q) - numbers * span).clamp(max=span) for span, numbers in spans])
    weights = (options.scale * keys @ q + counts.double().log()).softmax(0)
    out = weights @ values
    return out, options.scale * (weights * (values @ q - out @ q)) @ keys


def _visible(head: Call, level: int, row: int, nodes: int) -> Tensor:
    """Indices of the nodes of a level that a query attends to or may select; level 0 is the tokens."""
    if level == head.options.levels:
        return torch.arange(nodes, device=head.q.device)
    block = head.options.block_size
    numbers = children(head.lists[level][None, row // block ** (level + 1)].long(), nodes, block)[0]
    return numbers[numbers >= 0]


def _spans(options: Options) -> list[int]:
    """Number of tokens of a node on each level."""
    return [options.block_size**level for level in range(options.levels + 1)]


def _means(x: Tensor, span: int) -> Tensor:
    """Mean of each run of `span` tokens."""
    whole = len(x) // span * span
    means = x[:whole].double().unflatten(0, (-1, span)).mean(1)
    return means if whole == len(x) else torch.cat([means, x[whole:].double().mean(0, keepdim=True)])


def _sample(x: Tensor) -> Tensor:
    ends = torch.tensor([0, len(x) - 1], device=x.device)
    return torch.cat([ends, torch.randint(len(x), (SAMPLED - 2,), device=x.device)])


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()
