"""Differences of a small run on ranks of this machine from the reference."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from parallel3d import models
from parallel3d.config import CompleteConfig
from parallel3d.data.deal import deal
from parallel3d.engine.op_builds import load_async_io, load_cpu_adam
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.model.spec import tied_names
from parallel3d.pipeline.executor import Microbatch
from parallel3d.tensor.segments import Segments
from parallel3d.train.assembly import Assembly
from parallel3d.verify import definitions
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import FIRST, Batch, Reference

# fp32: equal up to rounding. Half precision: what the type's own rounding explains, compared with
# fp64; `verify` itself compares with a run of the same precision (`Reference.tolerances`).
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-1, "fp16": 1e-1}

Tolerance = float | Mapping[str, float]
"""The bound of an error: of all alike, or by name."""


@dataclass(frozen=True)
class ReferenceErrors:
    """The largest differences between a run and the reference."""

    loss: float
    """Relative."""
    grad_norm: float
    """Relative."""
    weight: float
    """See `weight_error`."""
    evaluation: float = 0.0
    """Relative error of the loss in evaluation."""
    samples: float = 0.0
    """Share of tokens that differ from the course's."""
    masks: float = 0.0
    """Share of dropout masks that are wrong, see `share_of_wrong`."""
    accumulation: float = 0.0
    """eps of the type that gradients are summed in; 0 for fp32."""
    counters: float = 0.0
    """1 if counters of the optimizer or loss scaler differ after a resume."""
    rates: float = 0.0
    """Relative error of the learning rates of the config's own schedule."""
    start: float = 0.0
    """Distance of the first weights from the family's rule, in standard errors."""
    masters: float = 0.0
    """Largest share of masters or moments that half precision would hold."""
    scale: float = 0.0
    """Relative error of fp16's loss scale after the last step."""
    reduction: float = 0.0
    """eps of the type that gradients are averaged in; 0 for fp32."""
    turns: float = 0.0
    """Error of rotary positions' cos and sin, beyond one rounding."""
    way: float = 0.0
    """fp32: see `relative_distance`."""
    weights: float = 0.0
    """Share of a weight's elements that are not their masters, rounded."""
    settings: float = 0.0
    """How many of the config's settings the reference has otherwise."""
    token_losses: float = 0.0
    """Mean error of tokens' losses by rounded logits, in nats."""
    routers: float = 0.0
    """Largest error of a router's scores of experts."""
    norms: float = 0.0
    """Relative error of the scale of a normalised token, beyond one rounding."""
    lines: float = 0.0
    """1 if lines of metrics.jsonl count other steps or tokens."""

    def within(self, tolerance: Tolerance) -> bool:
        """Return True if no error exceeds its bound; a NaN does."""
        return not self.beyond(tolerance)

    def beyond(self, tolerance: Tolerance) -> dict[str, float]:
        """Return the errors above their bounds, by name; a NaN counts as one.

        `tolerance` bounds loss, gradient norm, weights and evaluation, together or by name.
        """
        names = ("loss", "grad_norm", "weight", "evaluation")
        if isinstance(tolerance, float):
            tolerance = dict.fromkeys(names, tolerance)
        bounds = {
            **tolerance,
            "way": 1e-3,
            "token_losses": 1e-4,
            "routers": 1e-4,
            "rates": 1e-9,
            "start": 5.0,
            "masters": 0.5,
        }
        errors = asdict(self)
        return {name: size for name, size in errors.items() if not size <= bounds.get(name, 0.0)}


def compile_operators(config: CompleteConfig) -> None:
    """Compile the DeepSpeed operators that the config needs, before any rank's timeout runs.

    Takes minutes the first time on a machine, and prints so on standard error. Raises TrainingError
    if compilation fails.
    """
    zero = config.zero_optimization
    if zero.offload_optimizer.device != "none" or zero.offload_param.device == "nvme":
        run_locally(_compile_operators, 1, config, timeout=1800)


def _compile_operators(rank: int, config: CompleteConfig) -> None:
    mesh = Mesh()
    say = partial(print, file=sys.stderr, flush=True)
    zero = config.zero_optimization
    uses_adam = optimizers.load(config.optimizer.type).CPU_ADAM
    if uses_adam and zero.offload_optimizer.device != "none":
        load_cpu_adam(mesh, say)
    if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        load_async_io(mesh, say)


class WeightErrors(NamedTuple):
    """The differences of one rank's weights from the reference's."""

    largest: float
    """The largest absolute difference."""
    squared_distance: float
    squared_way: float
    """The squared distance between the reference's first and last weights."""


def weight_error(config: CompleteConfig, weights: Sequence[WeightErrors]) -> float:
    """Return the error of the weights over all ranks, given `weight_errors` of each.

    In fp32 it is the largest absolute difference. In half precision Adam's first steps turn
    rounding into full steps of single weights, so it is the distance between the trained weights
    relative to the distance that training moved the reference.
    """
    if config.precision == "fp32":
        return worst(errors.largest for errors in weights)
    return relative_distance(weights)


def relative_distance(weights: Sequence[WeightErrors]) -> float:
    """Return the distance between the trained weights over the way that the reference went."""
    distance = sum(errors.squared_distance for errors in weights)
    way = sum(errors.squared_way for errors in weights)
    return math.sqrt(distance / way)


def worst(errors: Iterable[float]) -> float:
    """Return the largest number, inf if any is not finite (max() would ignore a NaN)."""
    errors = list(errors)
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def microbatches(
    batch: Sequence[Tensor | None], config: CompleteConfig, mesh: Mesh
) -> list[Microbatch]:
    """Return the microbatches of this dp coordinate from a global batch."""
    share = config.micro_batch_size * config.num_microbatches
    start = share * mesh.samples.coord
    tokens, labels, documents, weights = Batch(*batch)  # type: ignore[arg-type]
    rows: slice | list[int] = slice(start, start + share)
    if config.data.balance_microbatches:
        assert documents is not None, "balanced microbatches need isolated documents"
        most = models.most_keys(config.model, tokens.shape[-1])
        hands = definitions.balanced(documents, config.micro_batch_size, mesh.samples.size, most)
        rows = hands[mesh.samples.coord]

    def cut(x: Tensor) -> list[Tensor]:
        return list(x[rows].split(config.micro_batch_size))

    segments = None if documents is None else list(map(Segments.of, cut(documents)))
    cp = mesh.context
    if cp.size > 1:
        documents = torch.zeros_like(tokens) if documents is None else documents
        most = models.most_keys(config.model, tokens.shape[-1])
        places = torch.from_numpy(deal(documents.numpy(), cp.size, most))  # [samples, cp, seq / cp]
        dealt = zip(cut(documents), cut(places), strict=True)
        segments = [Segments.of(*both, cp.group) for both in dealt]
        own_places = places[:, cp.coord]
        tokens = tokens.gather(1, own_places)
        labels = labels.gather(1, own_places)
        weights = None if weights is None else weights.gather(1, own_places)
    tensors = {"tokens": tokens, "labels": labels, "weights": weights}
    fields: dict[str, Iterable[Any]] = {}
    for name, x in tensors.items():
        if x is not None:
            fields[name] = [part.to(mesh.device) for part in cut(x)]
    if segments is not None:
        fields["segments"] = [own.on(mesh.device) for own in segments]
    each = zip(*fields.values(), strict=True)
    return [Microbatch(**dict(zip(fields, own, strict=True))) for own in each]


def weight_errors(parts: Assembly, config: CompleteConfig, reference: Reference) -> WeightErrors:
    """Compare this rank's weights with the reference's: differences, and how far those moved."""
    largest = 0.0
    squared_distance = 0.0
    squared_way = 0.0
    originals = tied_names(parts.layers)
    folder = Path(reference.weights).parent
    with safe_open(reference.weights, "pt") as file, safe_open(folder / FIRST, "pt") as first:
        for held in parts.engine.held:
            name = originals.get(held.name, held.name)
            cut = held.cut
            expected = cut.part_of(file.get_tensor(name))
            start = cut.part_of(first.get_tensor(name))
            difference = parts.engine.full_parameter(held).cpu() - expected
            largest = worst([largest, float(difference.abs().max())])
            squared_distance += float(difference.square().sum())
            squared_way += float((expected - start).square().sum())
    return WeightErrors(largest, squared_distance, squared_way)
