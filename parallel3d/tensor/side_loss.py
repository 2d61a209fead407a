"""Scalars that a layer adds to the loss, such as a router's balance loss and z-loss.

A layer returns them by name beside its activation, and its `LayerSpec` declares the names:

    return x, {"balance": SideLoss(value, 0.01)}
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.tensor.collectives import Conjugate


class SideLoss(NamedTuple):
    """A scalar of one layer and microbatch; training minimises the loss + coefficient × value.

    - `value` []: the mean over the microbatch's samples of a number of each sample, so that it does
      not depend on how a batch is cut into microbatches. It is the same on every tp rank. Under
      sequence parallelism a rank has a part of each sample's tokens: the layer sums the parts of a
      sum over tokens by `collectives.sum_parts`, whose backward is the identity, so each rank's
      gradient is that of its own part. Where cp ranks share a sample, gradients are averaged
      over them: means over tokens are taken by `collectives.mean_over_group`.
    - `coefficient`: 0 for a number that is only reported, which may be a vector.
    - `pooled`: True if `value` is [2, n]. Its two rows are averaged over the layers of the stage,
      and n × their scalar product is the side loss of all these layers.
    """

    value: Tensor
    coefficient: float
    pooled: bool = False


LayerOutput = Tensor | tuple[Tensor, dict[str, SideLoss]]
"""The output of a layer: an activation, or an activation and side losses by name."""


class SideLosses(NamedTuple):
    """The side losses of a stage and microbatch.

    - `total` []: the sum over its layers of coefficient × value.
    - `values`: by name, the sums over its layers of the values, [], without gradient.
    """

    total: Tensor
    values: dict[str, Tensor]


StageOutput = Tensor | tuple[Tensor, SideLosses]
"""The output of a stage: an activation or the loss, and in training the side losses, if any."""


def sum_side_losses(side_losses: list[tuple[str, SideLoss]]) -> SideLosses:
    """Return the sums of the side losses of a stage's layers, of which there is at least one."""
    values: dict[str, Tensor] = {}
    total = torch.zeros((), device=side_losses[0][1].value.device)
    pools: dict[str, list[SideLoss]] = {}
    single: list[tuple[str, SideLoss]] = []
    for name, own in side_losses:
        if own.pooled:
            pools.setdefault(name, []).append(own)
        else:
            single.append((name, own))
    for name, layers in pools.items():
        one, other = torch.stack([own.value for own in layers]).mean(0)  # [n] each
        share = layers[0].coefficient / len(layers)  # each layer has the same value
        single += [(name, SideLoss(len(one) * (one @ other), share))] * len(layers)
    for name, (value, coefficient, _) in single:
        values[name] = values.get(name, 0.0) + value.detach().float()
        if coefficient:
            total = total + coefficient * value.float()
    return SideLosses(total, values)


def alias(x: Tensor) -> Tensor:
    """Return `x` as another tensor with the same data and gradient.

    If the data of the alias is replaced, `x` keeps its own as long as a backward needs it.
    """
    return Conjugate.apply(x, lambda x: x.detach(), lambda grad: grad)
