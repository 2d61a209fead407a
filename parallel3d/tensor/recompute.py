"""Parts of a layer whose results are computed again in the backward instead of being saved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from parallel3d.model.recompute import Recompute
from parallel3d.tensor.collectives import Context

_ALIASES = 3  # the most modules whose ZeRO-3 hooks pass on an alias of the kept tensor


class _Keep(torch.autograd.Function):
    """A tensor that is saved here, for the product that follows (`save`).

    torch's recomputation stops at the last tensor that was saved. A product saves its input only
    after it has run, and would run again.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.storage = StorageWeakRef(x.untyped_storage())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad


def run_again(function: Callable[..., Any], *args: object) -> Any:
    """Return `function(*args)`, which runs again in the backward in place of saving tensors."""
    # Dropout masks depend only on their place, so no generator state is saved.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)`, computed again in the backward; a linear layer must take it next."""
    if not torch.is_grad_enabled():
        return function(x)
    kept: Tensor = run_again(lambda x: _Keep.apply(function(x)), x)
    return kept


def activated(
    up: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    recompute: Recompute,
) -> Tensor:
    """Return the activation function of the product `up(x)`, recomputed as `recompute` says."""
    if "mlp" in recompute.parts:
        return recomputed(lambda x: activation(up(x)), x)
    return recomputed(activation, up(x)) if "mlp_act" in recompute.parts else activation(up(x))


def save(ctx: Context, x: Tensor, *weights: Tensor) -> None:
    """Save a product's input and weights for its backward; an input that is recomputed is saved.

    Then `ctx.source` is the context that has saved the input, else None.
    """
    node: Any = x.grad_fn
    for _ in range(_ALIASES):
        if getattr(node, "_forward_cls", None) is _Keep or not getattr(node, "next_functions", ()):
            break
        node = node.next_functions[0][0]
    kept = getattr(node, "storage", None)
    ctx.source = node if kept and kept == StorageWeakRef(x.untyped_storage()) else None
    ctx.save_for_backward(*(() if ctx.source else (x,)), *weights)


def saved(ctx: Context) -> tuple[Tensor, ...]:
    """Return the input and the weights that `save` saved. It recomputes an input only once."""
    return (*ctx.source.saved_tensors, *ctx.saved_tensors) if ctx.source else ctx.saved_tensors
