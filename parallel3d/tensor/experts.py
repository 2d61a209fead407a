"""Experts whose inner width is cut over a tensor-parallel group, and the products of their tokens.

A token's rows are sorted by expert, so all experts are one grouped product, and none has a limit on
its tokens (arXiv:2211.15841). Between `copy_to_group` and `reduce_from_group` a rank has a part of
each sum over the inner width, and of each gradient: parameters there that the group does not cut
are marked `ParamSpec.partial`, and a loss that every rank computes alike counts in part on each.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.tensor.collectives import Conjugate, Pending
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import CutModule, cut_of, cut_parameter
from parallel3d.tensor.pointwise import swiglu
from parallel3d.tensor.product import Product, linear

_ALIGNMENT = 16  # bytes; torch's grouped product needs strides and addresses in multiples of it


class PartialLinear(CutModule):
    """y = x W^T with dim 1 of the weight cut over the group, without collectives."""

    def __init__(self, shape: tuple[int, ...], *, context: LayerContext) -> None:
        super().__init__()
        self.weight = cut_parameter(shape, tensor=(1, context.group))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., fused * out], of which one of in and out is this rank's part."""
        return linear(x, self.weight)


class PartialSwiGLU(nn.Module):
    """An MLP whose sum over the inner width is left to the caller."""

    def __init__(self, size: int, inner: int, *, context: LayerContext) -> None:
        super().__init__()
        self.swiglu = swiglu.compiled_if(context.pointwise)
        self.gate_up = PartialLinear((2, inner, size), context=context)
        self.down = PartialLinear((size, inner), context=context)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> this rank's part of the sum [..., size]."""
        return self.down(self.swiglu(self.gate_up(x)))


class Experts(CutModule):
    """SwiGLUs side by side, whose sum over the inner width is left to the caller.

    - `context`: `group` cuts the inner width, and the ranks of `expert_group` own as many experts
      each.
    - `capacity`: the most tokens of an expert in training, relative to the mean; later ones skip
      it.
    """

    def __init__(
        self,
        experts: int,
        size: int,
        inner: int,
        *,
        context: LayerContext,
        capacity: float | None = None,
    ) -> None:
        super().__init__()
        group = context.group
        owners = context.expert_group
        over = None if owners is None else (0, owners)
        self.gate_up = cut_parameter((experts, 2, inner, size), tensor=(2, group), experts=over)
        self.down = cut_parameter((experts, size, inner), tensor=(2, group), experts=over)
        self.capacity = capacity
        self.swiglu = swiglu.compiled_if(context.pointwise)
        self.owners = owners if owners is not None and owners.size() > 1 else None

    def forward(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        counts: Tensor,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, this rank's part of it.

        - `x` [tokens, size].
        - `chosen`, `weights` [tokens, k]: each token's experts, and their weights.
        - `counts` [experts]: the number of each expert's tokens.
        - `meanwhile`: called while tokens are on their way to the owners of their experts.
        """
        k = chosen.shape[1]
        # Stable, so that a sum over an expert's tokens has one order on every mesh.
        order = chosen.flatten().sort(stable=True).indices  # [tokens * k]
        place = inverse(order)  # where each row goes
        ends = counts.cumsum(0)
        if self.capacity is not None and self.training:
            first = (ends - counts).index_select(0, chosen.flatten())
            weights = weights * (place - first < self.limit(len(order))).view_as(weights)
        ends = ends.to(torch.int32)
        rows = dispatch(x, order, place, k)  # [tokens * k, size]
        weights = weights.flatten().index_select(0, order).unsqueeze(-1).to(rows.dtype)
        if self.owners is None:
            inner = self.swiglu(grouped_linear(rows, self.gate_up, ends))  # [rows, inner / tp]
            rows = grouped_linear(inner * weights, self.down, ends)
            meanwhile()
        else:
            rows = sent_to_owners(rows, counts, self.owners, self._computed, meanwhile) * weights
        return combine(rows, order, place, k)  # [tokens, size]

    def _computed(self, rows: Tensor, ends: Tensor, _: Tensor) -> Tensor:
        # Not compiled: the number of rows changes.
        return grouped_linear(swiglu(grouped_linear(rows, self.gate_up, ends)), self.down, ends)

    def limit(self, rows: int) -> int:
        """Return the most rows of an expert, of `rows` in all."""
        experts = cut_of(self.down).global_shape[0]
        return rows if self.capacity is None else ceil(self.capacity * rows / experts)


@graph_break("exchanges whose sizes are known at run time")
def sent_to_owners(
    rows: Tensor,
    counts: Tensor,
    owners: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return what the experts make of `rows` [rows, size], which are sorted by expert.

    - `counts` [experts]: the rows here of each expert; `owners` have as many experts each.
    - `compute`: called with rows for experts here, sorted by expert, with the row before which each
      expert's rows end (int32), and with the number of each row's expert, from 0.
    - `meanwhile`: called while rows are on their way to the owners.
    """
    counts = counts.long().view(owners.size(), -1)  # [owners, experts of each]
    received = torch.empty_like(counts)  # the rows from each rank for each expert here
    dist.all_to_all_single(received, counts, group=owners)
    # On a device the host waits here: it must know how much comes.
    sent_rows, received_rows = torch.stack([counts, received]).sum(-1).tolist()
    rows, exchange = _start_exchange(rows, received_rows, sent_rows, owners)
    meanwhile()
    exchange.wait()
    del exchange  # it keeps the rows
    experts = torch.arange(counts.shape[1], device=rows.device).repeat(owners.size())
    experts = experts.repeat_interleave(received.flatten(), output_size=len(rows))
    order = experts.sort(stable=True).indices  # by expert, and each one's rows by their rank
    place = inverse(order)
    ends = received.sum(0).cumsum(0).to(torch.int32)
    rows = compute(dispatch(rows, order, place, 1), ends, experts.index_select(0, order))
    rows = combine(rows, order, place, 1)
    rows, exchange = _start_exchange(rows, sent_rows, received_rows, owners)
    exchange.wait()
    return rows


def _exchange(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Pending:
    """Start to send rows; `received` and `sent` are those from and to each rank of the group."""
    arriving = rows.new_empty((sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(
        arriving, rows.contiguous(), received, sent, group=group, async_op=True
    )
    return Pending(arriving, [work])


def _start_exchange(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Pending]:
    """Return the tensor that the rows of the other ranks arrive in, with autograd, and the wait.

    | pass | result | collective |
    |---|---|---|
    | forward | [sum of sent, size] -> [sum of received, size] | all-to-all |
    | backward | [sum of received, size] -> [sum of sent, size] | all-to-all |
    """
    started: list[Pending] = []

    def send(rows: Tensor) -> Tensor:
        started.append(_exchange(rows, received, sent, group))
        return started[0].result

    back = partial(_exchange, received=sent, sent=received, group=group)
    return Conjugate.apply(rows, send, lambda grad: back(grad).wait()), started[0]


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _scatter(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Return each token k times, in order: [tokens, size] -> [tokens * k, size]."""
    return x.index_select(0, order // k)


def _gather(rows: Tensor, place: Tensor, k: int) -> Tensor:
    """Return the sum of each token's k rows: [tokens * k, size] -> [tokens, size]."""
    if k == 1:
        return rows.index_select(0, place)
    return F.embedding_bag(place.view(-1, k), rows, mode="sum")  # one pass, in the order of k


def dispatch(x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
    """Return each token k times, in order; the gradient adds in a fixed order, unlike torch's.

    | pass | result | collective |
    |---|---|---|
    | forward | rows by `order` -> [tokens * k, size] | none |
    | backward | sum of each token's k rows -> [tokens, size] | none |
    """
    return Conjugate.apply(
        x, lambda x: _scatter(x, order, k), lambda grad, place: _gather(grad, place, k), place
    )


def combine(rows: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
    """Return the sum of each token's k rows.

    | pass | result | collective |
    |---|---|---|
    | forward | sum of each token's k rows -> [tokens, size] | none |
    | backward | rows by `order` -> [tokens * k, size] | none |
    """
    return Conjugate.apply(
        rows,
        lambda rows: _gather(rows, place, k),
        lambda grad, order: _scatter(grad, order, k),
        order,
    )


@graph_break("products whose sizes are known at run time")
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [rows, in] by their experts' weights [experts, ..., out, in] -> [rows, out]."""
    return Product.apply(
        x,
        weight,
        lambda x, weight: grouped_product(x, weight.flatten(1, -2).mT, ends),
        lambda grad, weight: grouped_product(grad.contiguous(), weight.flatten(1, -2), ends),
        lambda grad, x: grouped_product(grad.contiguous().mT, x, ends),
    )


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply group by group; group i ends before row `ends[i]` (int32) and may be empty.

    - a [rows, n] and b [groups, n, m]: each group's rows times its matrix -> [rows, m].
    - a [n, rows] and b [rows, m]: products over each group's rows -> [groups, n, m].
    """
    n = a.shape[0] if b.dim() == 2 else a.shape[1]
    m = b.shape[-1]
    aligned = all(size * a.element_size() % _ALIGNMENT == 0 for size in (n, m))
    if aligned and a.dtype != torch.float64:
        return F.grouped_mm(_at_alignment(a), _at_alignment(b), offs=ends)
    groups = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    return torch.cat([a[group] @ matrix for group, matrix in zip(groups, b, strict=True)])


def _at_alignment(x: Tensor) -> Tensor:
    """Return x, or a copy where its first element can be addressed by the kernel's copy engine.

    A weight is a view into ZeRO's flat group, behind parameters of any size.
    """
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
