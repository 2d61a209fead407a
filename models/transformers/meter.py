"""Measure what blocks cost, on the meta device: no tensor has memory, no collective sends anything.

A process that has no process group runs it, because it makes one of the "fake" backend (`helper`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from parallel3d import models
from parallel3d.mesh.fake_groups import make_fake_groups
from parallel3d.model.measured_cost import MeasuredCost, Variant, fit, monomials_at
from parallel3d.model.recompute import FULL, NONE, Recompute, parse
from parallel3d.model.spec import Attention, KeptMemory, LayerCost, LayerSpec, MatMul, Shape, Work
from parallel3d.models.transformers.tally import (
    Held,
    Operations,
    Tally,
    fused_kernels,
    key_of,
    without,
)
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.recompute import run_again

_LONGEST = 8192
_CLOSE = 0.01  # how far memory and traffic of the last shape may be from the predicted ones
_NEGLIGIBLE = 1e-3  # relative to the largest number
_TYPES = (torch.bfloat16, torch.float32)
# Indices of monomials: those of most blocks, and of all.
_LINEAR = (0, 1, 2, 3)
_ALL = (0, 1, 2, 3, 4, 5)


class _NoSeeds(RandomKey):
    """A key that seeds no generator: there is none on the meta device."""

    def seed_generator(self, place: str, tp_rank: int, device: torch.device) -> None:
        """Do nothing."""


class Setting(NamedTuple):
    """How a layer runs: a variant of its cost."""

    group: dist.ProcessGroup
    sequence_parallel: bool
    recompute: Recompute

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.group.size()


@dataclass(frozen=True)
class Pass:
    """The operations and memory of one forward and backward, in one training type."""

    forward: Operations
    backward: Operations
    saved: Held
    peak: Held
    resident: Held


class Layer:
    """One layer on the meta device, ready to run at shapes of one sequence length."""

    def __init__(self, spec: LayerSpec, setting: Setting, dtype: torch.dtype, seq: int) -> None:
        context = LayerContext(
            setting.group,
            _NoSeeds(0),
            sequence_parallel=setting.sequence_parallel,
            recompute=setting.recompute,
        )
        kind = resolve_name(spec.build)
        if hasattr(kind, "prepare"):  # here tensors have memory, like those of pipeline/stages
            kind.prepare(spec.config)
        with torch.device("meta"):
            module: nn.Module = kind(spec.config, spec.name, context)
        self.module = module.to(dtype)
        self.setting = setting
        self.dtype = dtype
        self.hidden = spec.config.hidden_size
        self.seq = seq
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.known = {key_of(tensor) for tensor in tensors}
        self.resident = self._first_run()

    def _first_run(self) -> Held:
        """Return the memory that stays from the first forward on; it is known from now on."""
        x = self._input(1)
        tally = Tally(self.known | {key_of(x)}, self.dtype)
        with tally, fused_kernels(tally):
            self._forward(x, tally)
        stays = tally.living()
        self.known |= stays.keys()
        self.kept = tally  # a storage that is known must not be freed, or its key is used again
        own = sum(held.own for held in stays.values())
        return Held(own, sum(held.other for held in stays.values()))

    def _input(self, batch: int) -> Tensor:
        seq = self.seq // self.setting.tp if self.setting.sequence_parallel else self.seq
        x = torch.empty(batch, seq, self.hidden, dtype=self.dtype, device="meta")
        return x.requires_grad_()

    def _forward(self, x: Tensor, tally: Tally) -> Tensor:
        def copy() -> Tensor:
            """Return x in memory that is counted, as that of an input is; nobody else keeps it."""
            own = x * 1
            tally.start_pass()
            return own

        if self.setting.recompute == FULL and torch.is_grad_enabled():
            y = run_again(self.module, copy(), None)
        else:
            y = self.module(copy())
        result: Tensor = y if isinstance(y, Tensor) else y[0]
        return result

    def run(self, batch: int) -> Pass:
        """Run forward and backward on a microbatch."""
        x = self._input(batch)
        known = self.known | {key_of(x)}
        tally = Tally(known, self.dtype)
        saved: dict[int, Held] = {}
        self.module.zero_grad()
        with tally, fused_kernels(tally) as norms:

            def pack(tensor: Tensor) -> Tensor:
                key = key_of(tensor)
                held = tally.held_by(tensor)
                if key not in known:
                    saved[key] = replace(held, unfused=norms.get(key, 0))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = self._forward(x, tally)
            forward = tally.start_pass()
            middle = tally.time + 1
            y.backward(torch.empty_like(y))
            backward = tally.start_pass()
        result = key_of(y)
        gradients = {key_of(p.grad) for p in self.module.parameters() if p.grad is not None}
        peaks = [
            tally.most(0, middle, gradients),
            tally.most(middle, tally.time, gradients | {result}),
        ]
        peak = max(peaks, key=lambda held: held.total)
        kept = Held(
            sum(held.own for held in saved.values()),
            sum(held.other for held in saved.values()),
            sum(held.unfused for held in saved.values()),
        )
        return Pass(forward, backward, kept, peak, self.resident)


def measured(
    spec: LayerSpec,
    groups: Mapping[int, dist.ProcessGroup],
    recomputes: Sequence[Recompute] = (NONE,),
    longest: int = _LONGEST,
) -> MeasuredCost:
    """Return the cost of a block, measured with and without sequence parallelism.

    - `spec`: its `build` is called, its `cost` is not.
    - `groups`: the tensor-parallel group of each size, from `make_fake_groups`; one of size 1.
    - `recomputes`: kinds of recomputation besides NONE.
    - `longest`: the most tokens of a sample that the layer can run.

    Raises ValueError if a cost is no polynomial of the microbatch's shape.
    """
    kinds = [kind for kind in recomputes if kind != NONE]
    variants: list[Variant] = []
    for tp, group in sorted(groups.items()):
        for split in [False, True] if tp > 1 else [False]:
            plain = _Runs(spec, Setting(group, split, NONE))
            variants.append(_measure(plain, plain, longest))
            for kind in kinds:
                runs = _Runs(spec, Setting(group, split, kind))
                variants.append(_measure(runs, plain, longest))
    return MeasuredCost(tuple(variants))


class _Passes(NamedTuple):
    """The passes of one shape in both training types."""

    half: Pass
    single: Pass


class _Runs:
    """The passes of a layer in one setting, at any shape."""

    def __init__(self, spec: LayerSpec, setting: Setting) -> None:
        self.spec = spec
        self.setting = setting
        self._layers: dict[int, list[Layer]] = {}
        self._passes: dict[Shape, _Passes] = {}

    def at(self, shape: Shape) -> _Passes:
        """Return the passes at a shape, each measured once."""
        seq = shape.seq
        if seq not in self._layers:
            self._layers[seq] = [Layer(self.spec, self.setting, dtype, seq) for dtype in _TYPES]
        if shape not in self._passes:
            self._passes[shape] = _Passes(*[layer.run(shape.batch) for layer in self._layers[seq]])
        return self._passes[shape]


def _measure(runs: _Runs, plain: _Runs, longest: int) -> Variant:
    """Return one variant; `plain` are the runs without recomputation.

    It is fitted with few monomials, and if they do not predict one more shape, with all; then with
    equal products as one, because a loop over tokens has as many of them.
    """
    setting = runs.setting
    shapes = _shapes(setting.tp, longest)
    check = shapes.pop()
    problems: list[str] = []
    for used, is_merged in ((_LINEAR, False), (_ALL, False), (_LINEAR, True), (_ALL, True)):
        fitted = shapes[: len(used)]
        costs = [_cost(runs, plain, shape, is_merged) for shape in fitted]
        monomials = [monomials_at(shape) for shape in fitted]
        try:
            polynomials = fit(monomials, costs, used)
        except ValueError as error:
            problems = [str(error)]
            continue
        variant = Variant(
            setting.tp,
            setting.sequence_parallel,
            str(setting.recompute),
            costs[0],
            polynomials,
            runs.at(check).half.forward.has_dropout,
        )
        predicted = variant.fitted(monomials_at(check))
        problems = _differences(_cost(runs, plain, check, is_merged), predicted)
        if not problems:
            return variant
    where = f"{runs.spec.name} on {setting.tp} ranks"
    raise ValueError(f"the cost of {where} is no polynomial: {'; '.join(problems)}")


def _shapes(tp: int, longest: int) -> list[Shape]:
    """Return as many shapes as monomials are used at most, and one to check the fit.

    Batches are above 1, where torch needs fewer copies.
    """
    unit = max(tp, longest // (4 * tp) * tp)
    sizes = [(2, 4), (4, 4), (2, 2), (4, 2), (2, 1), (4, 1), (3, 3)]
    return [Shape(batch, n * unit) for batch, n in sizes]


def _cost(runs: _Runs, plain: _Runs, shape: Shape, is_merged: bool) -> LayerCost:
    """Return the cost at one shape; `plain` are the runs without recomputation.

    - `is_merged`: products of the same matrix sizes are one.
    """
    half, single = runs.at(shape)
    kept = plain.at(shape).half
    forward = _work(half.forward)
    again = Work()
    backward_collectives = tuple(kept.backward.collectives)
    if runs.setting.recompute != NONE:
        before = kept.backward
        after = half.backward
        again = Work(
            tuple(without(after.products, before.products)),
            _together(after.attentions),
            after.traffic - before.traffic,
            tuple(without(after.collectives, before.collectives)),
        )
    if is_merged:
        forward = replace(forward, matmuls=_merged(forward.matmuls))
        again = replace(again, matmuls=_merged(again.matmuls))
    saved = half.saved.kept_as(single.saved)
    working = half.peak.kept_as(single.peak) - saved
    unfused = kept.saved.unfused - half.saved.unfused
    return LayerCost(
        0,
        forward,
        again,
        backward_collectives,
        saved,
        replace(working, unfused=unfused),
        half.resident.kept_as(single.resident),
    )


def _work(operations: Operations) -> Work:
    attention = _together(operations.attentions)
    collectives = tuple(operations.collectives)
    return Work(tuple(operations.products), attention, operations.traffic, collectives)


def _merged(products: Sequence[MatMul]) -> tuple[MatMul, ...]:
    """Return products of which those with the same k, n and batch are one with all rows."""
    rows: dict[tuple[int, int, int], int] = {}
    for m, k, n, batch in products:
        rows[k, n, batch] = rows.get((k, n, batch), 0) + m
    return tuple(MatMul(m, *sizes) for sizes, m in rows.items())


def _together(attentions: Sequence[Attention]) -> Attention | None:
    """Return several attentions of one layer as one with the heads of all."""
    if not attentions:
        return None
    first = attentions[0]
    heads = sum(attention.heads for attention in attentions)
    return first._replace(heads=heads, kv_heads=sum(a.kv_heads for a in attentions))


def _differences(cost: LayerCost, predicted: LayerCost) -> list[str]:
    """Return where a prediction is wrong: far in memory or traffic, or not equal in others."""
    differences = []
    if _operations(cost) != _operations(predicted):
        differences.append(f"{_operations(cost)}, not {_operations(predicted)}")
    negligible = _NEGLIGIBLE * max(map(abs, _sizes(cost)))
    for number, value in zip(_sizes(cost), _sizes(predicted), strict=True):
        if abs(number - value) > max(negligible, _CLOSE * abs(number)):
            differences.append(f"{number}, not {value}")
    return differences


def _operations(cost: LayerCost) -> LayerCost:
    """Return the cost without memory and traffic."""
    empty = KeptMemory()
    return replace(
        cost,
        forward=replace(cost.forward, traffic=0),
        recomputed=replace(cost.recomputed, traffic=0),
        saved=empty,
        working=empty,
        resident=empty,
    )


def _sizes(cost: LayerCost) -> list[int]:
    """Return memory (bytes, in both types) and traffic (elements)."""
    moments = [cost.saved, cost.saved + cost.working, cost.resident]
    held = [moment.bytes(size) for moment in moments for size in (2, 4)]
    return [*held, cost.forward.traffic, cost.forward.traffic + cost.recomputed.traffic]


def layers_of(section: dict[str, Any]) -> list[LayerSpec]:
    """Return one layer of each kind of a model, without the embedding and the head.

    Their costs are written (`transformer_cost`).

    - `section`: the model's section of a config.
    """
    _, *blocks, _ = models.layers(models.config_class(section["family"])(**section))
    kinds: list[LayerSpec] = []
    for block in blocks:
        known = [(kind.build, kind.cost) for kind in kinds]
        if (block.build, block.cost) not in known:
            kinds.append(block)
    return kinds


def measured_layers(
    layers: Sequence[LayerSpec],
    tps: Sequence[int],
    recomputes: Sequence[Recompute],
    longest: int = _LONGEST,
) -> dict[str, MeasuredCost]:
    """Return the measured cost of each layer, by its name; the arguments are those of `measured`.

    - `tps`: numbers of tensor-parallel ranks besides 1.
    """
    groups = make_fake_groups([1, *tps])
    return {layer.name: measured(layer, groups, recomputes, longest) for layer in layers}


def answer(request: str) -> str:
    """Return the `MeasuredCost` of each layer of `layers_of`, by its name, as JSON.

    - `request`: {"model": {...}, "ranks": [1, 2], "recompute": ["none", "full"]}.
    """
    asked = json.loads(request)
    layers = layers_of(asked["model"])
    kinds = [parse(kind) for kind in asked["recompute"]]
    longest = min(_LONGEST, layers[0].config.max_position_embeddings)
    try:
        costs = measured_layers(layers, asked["ranks"], kinds, longest)
    finally:
        if dist.is_initialized():  # the next request has other groups
            dist.destroy_process_group()
    return COSTS.dump_json(costs).decode()


COSTS = TypeAdapter(dict[str, MeasuredCost])
"""Reads and writes the answer."""
