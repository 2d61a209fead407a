"""Linear layers whose weight is cut over a tensor-parallel group (arXiv:1909.08053, section 3).

Under sequence parallelism (arXiv:2205.05198, section 4.2.2) their outer activations are
[..., seq / tp, size] instead of replicated. Biases are added in place: no backward needs the output
of the product.
"""

from collections.abc import Mapping

from torch import Tensor

from parallel3d.tensor.collectives import reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import CutModule, cut_parameter
from parallel3d.tensor.product import Rows, column_linear, linear


class ColumnParallelLinear(CutModule):
    """y = x W^T + b with the output features cut over the group.

    - Input: x [..., in], replicated, or [..., seq / tp, in] under sequence parallelism.
    - Output: this rank's [..., out / tp].
    - `fused` = n: n such layers on one input (query, key and value), each cut separately. The
      weight is [n, out, in], and the output [..., n * out / tp], layer after layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        context: LayerContext,
        bias: bool = True,
        fused: int = 0,
    ) -> None:
        super().__init__()
        self.context = context
        layers = (fused,) if fused else ()
        cut = len(layers), context.group
        self.weight = cut_parameter((*layers, out_features, in_features), tensor=cut)
        self.bias = cut_parameter((*layers, out_features), tensor=cut) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], or its part of the sequence -> [..., fused * out / tp]."""
        (y,) = column_linear(x, [self.weight], self.context)
        return y if self.bias is None else y.add_(self.bias.flatten())


class GroupedColumnLinear(CutModule):
    """Column-parallel layers of different sizes on one input: query, key and value.

    `heads` maps each layer's name to its number of heads of `head_size` features. If a layer has
    fewer heads than the group has ranks, every rank holds all of it and uses only the head that its
    query heads attend to. Its gradient is then a partial sum (`ParamSpec.partial`).
    """

    def __init__(
        self,
        in_features: int,
        heads: Mapping[str, int],
        head_size: int,
        *,
        context: LayerContext,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.heads = dict(heads)
        self.head_size = head_size
        for name, count in heads.items():
            cut = (0, context.group) if count >= context.group.size() else None
            weight = cut_parameter((count * head_size, in_features), tensor=cut)
            self.register_parameter(f"{name}_weight", weight)
            if bias:
                parameter = cut_parameter((count * head_size,), tensor=cut)
                self.register_parameter(f"{name}_bias", parameter)
        self.has_bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., in], or its part of the sequence -> for each layer [..., heads here, size]."""
        rows = [self._rows(count) for count in self.heads.values()]
        weights = [self.get_parameter(f"{name}_weight") for name in self.heads]
        ys = column_linear(x, weights, self.context, rows)
        if self.has_bias:
            biases = [self.get_parameter(f"{name}_bias") for name in self.heads]
            for y, bias, used in zip(ys, biases, rows, strict=True):
                y.add_(bias if used is None else bias[slice(*used)])
        return tuple(y.unflatten(-1, (-1, self.head_size)) for y in ys)

    def _rows(self, count: int) -> Rows:
        group = self.context.group
        size = group.size()
        if count >= size:
            return None
        start = group.rank() * count // size * self.head_size
        return start, start + self.head_size


class RowParallelLinear(CutModule):
    """y = x W^T + b with the input features cut over the group.

    - Input: this rank's x [..., in / tp].
    - Output: replicated [..., out], or this rank's [..., seq / tp, out] under sequence parallelism.
    - The bias is replicated, and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        context: LayerContext,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.weight = cut_parameter((out_features, in_features), tensor=(1, context.group))
        self.bias = cut_parameter((out_features,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in / tp] -> [..., out], the same on each rank, or its part of the sequence."""
        y = reduce_from_group(linear(x, self.weight), self.context)
        return y if self.bias is None else y.add_(self.bias)
