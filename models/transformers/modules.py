"""The modules of an architecture of transformers with their parameters cut over ranks.

Each module is made anew, because ZeRO-3 shards parameters as modules are made: with parameters of
this rank's part, all else as it was, and the class of the original.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from parallel3d.models.transformers import attention, experts
from parallel3d.models.transformers.plans import (
    COLUMN,
    EXPERTS,
    GATHERED,
    HEADS,
    PACKED,
    ROW,
    SPLIT,
)
from parallel3d.models.transformers.regions import Heads, LayerPlan, Place
from parallel3d.models.transformers.skeleton import biases_of
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.collectives import (
    all_features,
    all_tokens,
    copy_to_group,
    own_features,
    own_tokens,
    reduce_from_group,
)
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import CutModule, cut_parameter
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.norm import RMSNorm
from parallel3d.tensor.product import linear, linear_of_rows


class Copied(CutModule):
    """A module that becomes one of the original's class: its attributes, buffers and parameters."""

    def __init__(self, like: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, value in vars(like).items():
            if name not in _OF_MODULES and "_hooks" not in name:
                self.__dict__[name] = value
        biases = biases_of(like)
        for name, buffer in like._buffers.items():
            if name in biases:
                continue
            device = torch.empty(0).device  # where modules are built
            copy = None if buffer is None else buffer.clone().to(device)
            self.register_buffer(name, copy, persistent=False)
        for name, bias in biases.items():
            self.register_parameter(name, cut_parameter(tuple(bias.shape)))
            # For the engine: no bias moves, whatever the loads (engine/score_biases.py).
            self.register_buffer("counts", torch.zeros(bias.numel(), dtype=torch.int64), False)
            self.bias_rate = 0.0
        for name, value in like._parameters.items():
            self.register_parameter(name, None if value is None else parameters[name])


_OF_MODULES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")


class Linear(CutModule):
    """y = x W^T + b in a region: x is whole or this rank's part, y is whole, a part, or a sum.

    - `style`: that of the plan of transformers.
    - `rows`: the rows of an uncut weight that this rank uses: its queries' key/value head.
    - `enters`: the layer itself begins the region.
    """

    def __init__(
        self,
        like: nn.Linear | Conv1D,
        style: str,
        parameters: dict[str, nn.Parameter],
        *,
        context: LayerContext,
        rows: slice | None = None,
        enters: bool = False,
    ) -> None:
        super().__init__()
        is_turned = isinstance(like, Conv1D)
        self.in_features = like.nx if is_turned else like.in_features
        self.out_features = like.nf if is_turned else like.out_features
        self.style = style
        self.context = context
        self.rows = rows
        self.enters = enters or style == GATHERED
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], or this rank's part of it -> [..., out], or this rank's part of it."""
        if self.enters:
            x = copy_to_group(x, self.context)
        if self.style == SPLIT:
            x = own_features(x, self.context.group)
        y, bias = _product(x, self.weight, self.bias, self.rows)
        if self.style in (ROW, SPLIT):
            y = reduce_from_group(y, self.context)
        if bias is not None:
            y = y.add_(bias.flatten())
        return all_features(y, self.context.group) if self.style == GATHERED else y


class _OfRows:
    """Before the class of a module: its parameters are read as the rows that this rank uses."""

    rows: slice

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return value[self.rows] if isinstance(value, nn.Parameter) else value


class HeadsLinear(CutModule):
    """The fused projections to queries, keys and values, with rows held by key/value head.

    Where there are fewer key/value heads than ranks, a rank computes one head's rows, and keeps the
    queries that are its own.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], heads: Heads, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self.heads = heads
        ranks = group.size()
        self.rows: slice | None = None
        self.own = slice(0, heads.queries)
        if heads.groups < ranks:
            size = (heads.queries + 2) * heads.size
            first = group.rank() * heads.groups // ranks * size
            self.rows = slice(first, first + size)
            own = heads.queries * heads.groups // ranks
            start = group.rank() * own % heads.queries
            self.own = slice(start, start + own)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> this rank's queries, keys and values side by side [..., out]."""
        y, bias = _product(x, self.weight, self.bias, self.rows)
        if bias is not None:
            y = y.add_(bias)
        y = y.unflatten(-1, (-1, self.heads.queries + 2, self.heads.size))
        parts = (y[..., self.own, :], y[..., -2, :], y[..., -1, :])
        return torch.cat([part.flatten(x.dim() - 1) for part in parts], -1)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice | None
) -> tuple[Tensor, Tensor | None]:
    """Return x W^T and the bias to add to it: of all rows, or of those that this rank uses."""
    if rows is None:
        return linear(x, weight), bias
    own_bias = None if bias is None else bias[rows]
    return linear_of_rows(x, weight, rows), own_bias


def _let_own_heads(module: Any, call: attention.Call, ranks: int) -> None:
    """Let a module split what `HeadsLinear` gives: by the numbers of heads of this rank."""
    module.config = copy.copy(module.config)
    if hasattr(module, "split_size"):
        module.split_size //= ranks
    own = {
        "num_attention_heads": call.heads // ranks,
        "num_heads": call.heads // ranks,
        "num_key_value_heads": max(1, call.kv_heads // ranks),
    }
    for name, count in own.items():
        for owner in (module, module.config):
            if hasattr(owner, name):
                setattr(owner, name, count)


def copied(
    like: Any, context: LayerContext, place: str, rms_norms: Mapping[nn.Module, float]
) -> nn.Module:
    """Return a module outside of the layers, such as a norm, whose parameters are not cut.

    - `rms_norms`: the modules that the library's RMSNorm replaces, with their eps.
    """
    if isinstance(like, nn.Dropout):
        over = context.sequence_group
        return Dropout(like.p, place, key=context.key, split_over=over)
    if like in rms_norms:
        return RMSNorm(like.weight.numel(), rms_norms[like], context=context)
    own = Copied(like, {n: cut_parameter(tuple(p.shape)) for n, p in _own_parameters(like)})
    own.__class__ = type(like)
    for name, child in like.named_children():
        own.add_module(name, copied(child, context, f"{place}.{name}", rms_norms))
    return own


class LayerBuilder:
    """Makes a layer of a model by its plan.

    - `place`: the name of the layer in the model, which seeds its dropout masks.
    """

    def __init__(self, plan: LayerPlan, place: str, context: LayerContext) -> None:
        self._plan = plan
        self._place = place
        self._context = context
        self._whole = replace(context, sequence_parallel=False)

    def build(self, name: str = "") -> nn.Module:
        """Return the module of this name in the layer; "" is the layer itself."""
        like: Any = self._plan.layer.get_submodule(name)
        plan = self._plan
        style = plan.style(name)
        is_whole = name.partition(".")[0] in plan.wholes
        context = self._whole if is_whole else self._context
        if isinstance(like, nn.Dropout):
            return self._dropout(like, name, context)
        if like in plan.rms_norms:
            return RMSNorm(like.weight.numel(), plan.rms_norms[like], context=context)
        parameters = self._parameters(name, like)
        if isinstance(like, nn.Linear | Conv1D):
            return self._linear(like, name, parameters, context)
        own: nn.Module = Copied(like, parameters)
        own.__class__ = type(like)
        self._take_own_heads(own, like, name)
        for child, _ in like.named_children():
            own.add_module(child, self.build(f"{name}.{child}" if name else child))
        if any(plan.style(f"{name}.{child}") == HEADS for child, _ in like.named_children()):
            _let_own_heads(own, plan.calls[name], context.group.size())
        if name in plan.calls:
            setattr(own, attention.CORE, self._core(name, context))
        if name == plan.experts:
            experts.divide(own, context)
        if style == EXPERTS:
            experts.cut(own, context)
        elif name in plan.regions and name:
            own.register_forward_pre_hook(partial(_enter, context), with_kwargs=True)
        if name in plan.wholes and self._context.sequence_parallel:
            own.register_forward_pre_hook(partial(_gather, self._context), with_kwargs=True)
            own.register_forward_hook(partial(_leave, self._context))
        return own

    def _parameters(self, name: str, like: nn.Module) -> dict[str, nn.Parameter]:
        made = {}
        for leaf, _ in _own_parameters(like):
            place = self._plan.place(f"{name}.{leaf}" if name else leaf)
            owners = self._context.expert_group
            made[leaf] = cut_parameter(
                place.shape,
                tensor=self._cut(place),
                experts=(0, owners) if place.experts and owners is not None else None,
            )
        return made

    def _cut(self, place: Place) -> tuple[int, dist.ProcessGroup] | None:
        group = self._context.group
        if place.dim is None or (place.units is not None and place.units < group.size()):
            return None
        return place.dim, group

    def _take_own_heads(self, module: Any, like: nn.Module, name: str) -> None:
        """Let a module's forward see the rows of this rank's head, where heads serve several."""
        for leaf, _ in _own_parameters(like):
            rows = self._rows(self._plan.place(f"{name}.{leaf}" if name else leaf))
            if rows is not None:
                module.__class__ = type(type(module).__name__, (_OfRows, type(module)), {})
                module.rows = rows

    def _rows(self, place: Place) -> slice | None:
        """Return the rows of an uncut parameter that this rank uses; None: it uses all."""
        group = self._context.group
        if place.units is None or place.units >= group.size():
            return None
        size = place.shape[0] // place.units
        first = group.rank() * place.units // group.size() * size
        return slice(first, first + size)

    def _linear(
        self,
        like: nn.Linear | Conv1D,
        name: str,
        parameters: dict[str, nn.Parameter],
        context: LayerContext,
    ) -> nn.Module:
        style = self._plan.style(name)
        place = self._plan.place(f"{name}.weight")
        if place.heads is not None:
            return HeadsLinear(parameters, place.heads, context.group)
        rows = self._rows(place)
        enters = style in (COLUMN, PACKED) and "." not in name
        return Linear(like, style, parameters, context=context, rows=rows, enters=enters)

    def _core(self, name: str, context: LayerContext) -> CausalAttention:
        call = self._plan.calls[name]
        core = CausalAttention(
            call.dropout,
            f"{self._place}.{name}",
            context=context,
            heads=(call.heads, call.kv_heads),
            head_size=call.key_size,
            value_size=call.value_size,
            scale=call.scale,
            window=call.sight.window,
            softcap=call.softcap,
            chunk=call.sight.chunk,
        )
        if name not in self._plan.regions:  # every rank computes all heads
            core.heads_here = (call.heads, call.kv_heads)
            core.dropout.split_over = None
        return core

    def _dropout(self, like: nn.Dropout, name: str, context: LayerContext) -> Dropout:
        is_cut = self._plan.is_within(name)
        over = context.group if is_cut else context.sequence_group
        return Dropout(like.p, f"{self._place}.{name}", key=context.key, split_over=over)


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _tokens_changed(change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Apply a function to the activations among the arguments.

    They are the first one, and all that have a gradient.
    """
    first = args[0] if args else kwargs.get("hidden_states")

    def changed(value: Any) -> Any:
        if value is first:
            return change(value)
        is_activation = isinstance(value, Tensor) and value.is_floating_point()
        return change(value) if is_activation and value.requires_grad else value

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def _enter(context: LayerContext, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _tokens_changed(lambda x: copy_to_group(x, context), args, kwargs)


def _gather(context: LayerContext, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _tokens_changed(lambda x: all_tokens(x, context), args, kwargs)


def _leave(context: LayerContext, _: nn.Module, args: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return own_tokens(output[0], context), *output[1:]
    return own_tokens(output, context)
