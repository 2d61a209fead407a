"""The library's grouped products behind the experts interface of transformers."""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from parallel3d.models.transformers import attention
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.tensor.collectives import copy_to_group, reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.experts import combine, dispatch, grouped_linear, inverse, sent_to_owners
from parallel3d.tensor.router_losses import RouterLosses

_OFF = ("output_router_logits", "use false")  # the field of a refusal, and its remedy


def register(name: str) -> None:
    """Let modules whose implementation has this name compute their experts by `compute`."""
    ALL_EXPERTS_FUNCTIONS.register(name, compute)


def compute(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, size], or this rank's part of it.

    - `experts`: a module of transformers with packed weights (`use_experts_implementation`).
    - `x` [tokens, size]; `chosen`, `weights` [tokens, k]: each token's experts and their weights.
    """
    if attention.is_recording():
        experts.parallel3d_choices = chosen.shape[1]
        touched: Tensor = sum((p.sum() for p in experts.parameters()), weights.sum())
        return x + touched
    k = chosen.shape[1]
    experts.parallel3d_chosen = chosen
    order = chosen.flatten().sort(stable=True).indices  # [tokens * k]
    place = inverse(order)
    counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
    ends = counts.cumsum(0).to(torch.int32)
    weights = weights.flatten().index_select(0, order).unsqueeze(-1)
    rows = dispatch(x, order, place, k)  # [tokens * k, size]
    scales_inputs = getattr(experts, "scales_inputs", False)
    if scales_inputs:
        rows = rows * weights
    owners = getattr(experts, "parallel3d_owners", None)
    if owners is None:
        expert = chosen.flatten().index_select(0, order)  # each row's
        y = _made(experts, rows, ends, expert)
    else:
        y = sent_to_owners(rows, counts, owners, partial(_made, experts))
    if not scales_inputs:
        y = (y * weights).to(x.dtype)
    return combine(y, order, place, k)


def _made(experts: Any, rows: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
    """Return what experts make of `rows` [rows, size], which are sorted by them.

    - `ends`: the row before which each expert's rows end. `expert` [rows]: the expert of each.
    """
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _product(experts, up, rows, ends, expert)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    y = _product(experts, "down_proj", inner, ends, expert)
    made: Tensor = experts.post_expert_norm(y) if experts.has_post_expert_norm else y
    return made


def _product(experts: Any, name: str, rows: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
    """Multiply rows [rows, in], sorted by expert, by the weights `name` of their experts."""
    weight = getattr(experts, name)
    y = grouped_linear(rows, weight, ends)
    if not experts.has_bias:
        return y
    bias: Tensor = getattr(experts, f"{name}_bias")
    bias = bias.flatten(1).index_select(0, expert)
    if name == "down_proj":  # the ranks' parts are summed
        bias = bias / getattr(experts, "parallel3d_parts", 1)
    return y + bias


def divide(experts: nn.Module, context: LayerContext) -> None:
    """Let a module send tokens to the owners of their experts, if several ranks divide them."""
    owners = context.expert_group
    if owners is not None and owners.size() > 1:
        experts.parallel3d_owners = owners  # type: ignore[assignment]


def balance_of(model: PreTrainedModel) -> float:
    """Return the coefficient of the balance loss that a model adds to its loss.

    Raises Unsupported for a loss of another form than ours, which is found by trying.
    """
    own: Any = model
    coefficient = getattr(own, "router_aux_loss_coef", None)
    loss = getattr(sys.modules[type(own).__module__], "load_balancing_loss_func", None)
    if coefficient is None or loss is None:
        raise Unsupported("adds no balance loss that is known", *_OFF)
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(6, 4, generator=generator) for _ in range(2)]
    losses = RouterLosses({"balance": 1.0, "z": 0.0}, "pooled")
    halves = []
    for logits in layers:
        shares = logits.softmax(-1)
        halves.append(losses.of(logits, shares, shares.topk(2, -1).indices, 1)["balance"].value)
    loads, shares = torch.stack(halves).mean(0)
    try:
        theirs = loss(tuple(layers), 4, 2)
    except Exception:  # broad: the function may be another one of this name
        theirs = None
    if theirs is None or not torch.allclose(theirs, 4 * (loads @ shares), rtol=1e-5):
        raise Unsupported("adds a balance loss of another form", *_OFF)
    return float(coefficient)


def cut(experts: nn.Module, context: LayerContext) -> None:
    """Let a module whose experts' inner width is cut begin and end with collectives."""
    if getattr(experts, "has_post_expert_norm", False):
        raise Unsupported("norms what each expert returns, so experts cannot be cut")
    experts.parallel3d_parts = context.group.size()  # type: ignore[assignment]
    experts.register_forward_pre_hook(partial(_enter, context), with_kwargs=True)
    experts.register_forward_hook(partial(_leave, context))


def _enter(context: LayerContext, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Begin to compute parts: of tokens and of their weights, which have gradients both."""

    def entered(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return copy_to_group(value, context) if is_float else value

    return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}


def _leave(context: LayerContext, _: nn.Module, args: object, output: Tensor) -> Tensor:
    return reduce_from_group(output.contiguous(), context)
