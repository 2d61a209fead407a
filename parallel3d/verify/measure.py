"""Differences of a small run on ranks of this machine from the reference."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from safetensors import safe_open
from torch import Tensor

from parallel3d.config import RunConfig, ZeroConfig
from parallel3d.engine.op_builds import load_async_io, load_cpu_adam
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import tied_names
from parallel3d.pipeline.executor import Microbatch
from parallel3d.tensor.segments import Segments
from parallel3d.train.assembly import Assembly
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import Reference, first_weights

# fp32 is equality up to rounding. In half precision the errors are those of the type itself.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-1, "fp16": 1e-1}


@dataclass(frozen=True)
class ReferenceErrors:
    """The largest differences from the reference."""

    loss: float  # relative
    grad_norm: float  # relative
    weight: float  # of `weight_error`
    evaluation: float = 0.0  # relative, of the loss without training
    samples: float = 0.0  # share of tokens that another batch should have
    masks: float = 0.0  # share of dropout's masks that agree or differ where they must not
    accumulation: float = 0.0  # precision of the type that gradients are added up in, if not fp32
    counters: float = 0.0  # 1 if the optimizer's or the loss scaler's are not an unbroken run's

    def within(self, tolerance: float) -> bool:
        """True if no error is beyond a tolerance; a NaN is."""
        return not self.beyond(tolerance)

    def beyond(self, tolerance: float) -> dict[str, float]:
        """The errors that are larger than rounding explains, by name; a NaN is one."""
        rounded = ("loss", "grad_norm", "weight", "evaluation")
        return {
            name: size
            for name, size in asdict(self).items()
            if not size <= (tolerance if name in rounded else 0.0)
        }

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}  norm {self.grad_norm:.1e}  weights {self.weight:.1e}"


def compile_operators(config: RunConfig) -> None:
    """Have DeepSpeed's operators compiled that the config needs, before any rank's time runs.

    Minutes on a machine that has never had them; says so on standard error. Raises TrainingError
    where they cannot be.
    """
    zero = config.zero_optimization
    if zero.offload_optimizer.device != "none" or zero.offload_param.device == "nvme":
        run_locally(_compile_operators, 1, zero, timeout=1800)


def _compile_operators(rank: int, zero: ZeroConfig) -> None:
    mesh, say = Mesh(), partial(print, file=sys.stderr, flush=True)
    if zero.offload_optimizer.device != "none":
        load_cpu_adam(mesh, say)
    if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        load_async_io(mesh, say)


def weight_error(config: RunConfig, weights: Sequence[dict[str, float]]) -> float:
    """The error of the weights from what `weight_errors` gives on each rank: absolute in fp32.

    In half precision, where Adam's first steps turn rounding into whole steps of single weights,
    it is relative: to how far training moved the reference.
    """
    if config.precision == "fp32":
        return worst(w["largest"] for w in weights)
    off, moved = (sum(w[k] for w in weights) for k in ("squared_distance", "squared_way"))
    return math.sqrt(off / moved)


def worst(errors: Any) -> float:
    """The largest number; a NaN is larger than any, although max() does not say so."""
    errors = list(errors)
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def relative(found: list[float], expected: list[float]) -> list[float]:
    """Relative differences, step by step."""
    return [abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True)]


def microbatches(
    batch: tuple[Tensor, Tensor, Tensor | None], config: RunConfig, mesh: Mesh
) -> list[Microbatch]:
    """Cut the share of this dp coordinate out of a global batch, in microbatches."""
    share = config.micro_batch_size * config.num_microbatches
    start = share * mesh.coord("dp")

    def cut(x: Tensor) -> list[Tensor]:
        return list(x[start : start + share].split(config.micro_batch_size))

    tokens, labels, documents = batch
    found = [
        Microbatch(mine.to(mesh.device), theirs.to(mesh.device))
        for mine, theirs in zip(cut(tokens), cut(labels), strict=True)
    ]
    if documents is None:
        return found
    return [
        microbatch._replace(segments=Segments.of(own).on(mesh.device))
        for microbatch, own in zip(found, cut(documents), strict=True)
    ]


def weight_errors(parts: Assembly, config: RunConfig, reference: Reference) -> dict[str, float]:
    """Differences of this rank's weights from the reference's, and how far training moved those."""
    largest, squared_distance, squared_way = 0.0, 0.0, 0.0
    # Only half precision is compared by the way; in fp32 drawing the start again costs a step.
    first = first_weights(config) if config.precision != "fp32" else {}
    originals = tied_names(parts.layers)
    with safe_open(reference.weights, "pt") as file:
        for held in parts.engine.held:
            name, cut = originals.get(held.name, held.name), held.cut
            expected = file.get_tensor(name)
            start = first.get(name, expected)
            if cut.dim is not None:
                where = cut.dim, cut.start, cut.stop - cut.start
                expected, start = expected.narrow(*where), start.narrow(*where)
            difference = parts.engine.full_parameter(held).cpu() - expected
            largest = worst([largest, float(difference.abs().max())])
            squared_distance += float(difference.square().sum())
            squared_way += float((expected - start).square().sum())
    return {"largest": largest, "squared_distance": squared_distance, "squared_way": squared_way}
