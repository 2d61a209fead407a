"""Linear layers whose weight is cut over a tensor-parallel group (arXiv:1909.08053, section 3).

Under sequence parallelism (arXiv:2205.05198, section 4.2.2) their activations outside are
[..., seq / tp, size] instead of replicated.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.tensor.collectives import (
    all_gather_sequence,
    all_reduce,
    reduce_from_group,
    reduce_scatter_sequence,
)
from parallel3d.tensor.cut import cut_of, cut_parameter
from parallel3d.tensor.held_back import now_or_later


class _Linear(torch.autograd.Function):
    """x @ weight.T with the *parameter itself* saved for backward.

    torch saves a view of the weight, and a view holds on to its storage: under ZeRO-3 the gathered
    weights of the whole stage would then live until the backward pass, although the engine
    released them. A saved parameter is read again when it is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # recomputation saves another tensor in its place
        return x @ weight.flatten(0, -2).t()  # [..., fused * out]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            shape = weight.shape
            grad_weight = now_or_later(ctx.weight, lambda: _weight_gradient(grad, x).view(shape))
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., in] times `weight` [out, in] or [fused, out, in]: [..., fused * out]."""
    result: Tensor = _Linear.apply(x, weight)
    return result


Rows = tuple[int, int] | None  # the rows [start, stop) of a weight that are used; None: all


class _ColumnLinear(torch.autograd.Function):
    """Several products with one input, which is f of tensor parallelism: one collective for all.

    Under sequence parallelism this rank's part of the input is what is saved, and gathered again
    in backward (arXiv:2205.05198, section 4.2.2). The parameters themselves are saved, as above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        rows: Sequence[Rows],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel, ctx.rows = group, sequence_parallel, rows
        ctx.weights = weights
        whole = all_gather_sequence(x, group) if sequence_parallel else x
        return tuple(whole @ _used(w, r).t() for w, r in zip(weights, rows, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for grad, weight, rows in zip(grads, weights, ctx.rows, strict=True):
                share = grad @ _used(weight, rows)
                grad_x = share if grad_x is None else grad_x.add_(share)
            del share  # the same memory, which would outlive the reduction
            assert grad_x is not None
            reduce = reduce_scatter_sequence if ctx.sequence_parallel else all_reduce
            grad_x = reduce(grad_x, ctx.group)
        gather = cache(lambda: all_gather_sequence(x, ctx.group) if ctx.sequence_parallel else x)
        grad_weights = [
            now_or_later(parameter, partial(_gradient_of_rows, grad, gather, weight.shape, rows))
            for parameter, grad, weight, rows in zip(
                ctx.weights, grads, weights, ctx.rows, strict=True
            )
        ]
        return grad_x, None, None, None, *grad_weights


def _used(weight: Tensor, rows: Rows) -> Tensor:
    """The matrix that takes part: [out, in]."""
    return weight.flatten(0, -2) if rows is None else weight[slice(*rows)]


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[..., out] and [..., in] -> [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _gradient_of_rows(
    grad: Tensor, x: Callable[[], Tensor], shape: torch.Size, rows: Rows
) -> Tensor:
    """The gradient of a weight of this shape, zero but for the rows that are used."""
    used = _weight_gradient(grad, x())
    if rows is None:
        return used.view(shape)
    padded = used.new_zeros(shape)
    padded[slice(*rows)] = used
    return padded


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    sequence_parallel: bool = False,
    rows: Sequence[Rows] | None = None,
) -> tuple[Tensor, ...]:
    """`x` times each of `weights`, whose output features are this rank's part of the group's.

    x is replicated [..., in], or [..., seq / tp, in] under sequence parallelism; each result is
    [..., out] over the whole sequence. `rows`: the rows of each weight that this rank uses.
    """
    rows = rows or [None] * len(weights)
    result: tuple[Tensor, ...] = _ColumnLinear.apply(x, group, sequence_parallel, rows, *weights)
    return result


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut over the group.

    Takes replicated x [..., in], or its part [..., seq / tp, in] under sequence parallelism; gives
    this rank's [..., out / tp]. With `fused` = n the layer is n such layers side by side, each cut
    by itself (query, key and value): weight [n, out, in], result [..., n * out / tp], ordered layer
    by layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup,
        bias: bool = True,
        fused: int = 0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        layers = (fused,) if fused else ()
        dim = len(layers)
        self.weight = cut_parameter((*layers, out_features, in_features), dim, group)
        self.bias = cut_parameter((*layers, out_features), dim, group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], or its part of the sequence -> [..., fused * out / tp]."""
        (y,) = column_linear(x, [self.weight], self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias.flatten()

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, columns / {self.group.size()}"


class GroupedColumnLinear(nn.Module):
    """Column-parallel layers of different sizes on one input: query, key and value.

    `heads` gives each layer's name and number of heads of `head_size` features. A layer with fewer
    heads than the group has ranks is held whole by every rank, which uses the head that its share
    of the others attends to; its gradient is then a part of the whole (`ParamSpec.partial`).
    """

    def __init__(
        self,
        in_features: int,
        heads: Mapping[str, int],
        head_size: int,
        group: dist.ProcessGroup,
        bias: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.heads, self.head_size = dict(heads), head_size
        for name, count in heads.items():
            dim = 0 if count >= group.size() else None
            weight = cut_parameter((count * head_size, in_features), dim, group)
            self.register_parameter(f"{name}_weight", weight)
            if bias:
                parameter = cut_parameter((count * head_size,), dim, group)
                self.register_parameter(f"{name}_bias", parameter)
        self.has_bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., in], or its part of the sequence -> for each layer [..., heads here, size]."""
        rows = [self._rows(count) for count in self.heads.values()]
        weights = [self.get_parameter(f"{name}_weight") for name in self.heads]
        ys = column_linear(x, weights, self.group, self.sequence_parallel, rows)
        if self.has_bias:
            biases = [self.get_parameter(f"{name}_bias") for name in self.heads]
            ys = tuple(
                y + (b if r is None else b[slice(*r)])
                for y, b, r in zip(ys, biases, rows, strict=True)
            )
        return tuple(y.unflatten(-1, (-1, self.head_size)) for y in ys)

    def _rows(self, count: int) -> Rows:
        size = self.group.size()
        if count >= size:
            return None
        start = self.group.rank() * count // size * self.head_size
        return start, start + self.head_size

    def extra_repr(self) -> str:
        size = self.group.size()
        each = (f"{n} {c}{' / ' + str(size) if c >= size else ''}" for n, c in self.heads.items())
        return f"{', '.join(each)} heads of {self.head_size}"


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut over the group.

    Takes this rank's x [..., in / tp], gives replicated [..., out], or under sequence parallelism
    its part [..., seq / tp, out]; the bias is whole on each rank and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = cut_parameter((out_features, in_features), 1, group)
        self.bias = cut_parameter((out_features,), None, group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in / tp] -> [..., out], the same on each rank, or its part of the sequence."""
        y = reduce_from_group(linear(x, self.weight), self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, rows / {self.group.size()}"
