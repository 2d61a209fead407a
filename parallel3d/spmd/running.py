"""One layer's forward and backward as one rank runs them, on the meta device (floor 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parallel3d.config import RunConfig
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.reduction import Reduction
from parallel3d.model.spec import LayerSpec
from parallel3d.pipeline import stages as building
from parallel3d.spmd.trace import Program, Ref, Tracer
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.held import HeldParameter
from parallel3d.tensor.segments import Segments

_BATCH = 2  # samples: of one alone many orders of dims are the same
_LONGEST = (
    64  # tokens of a sample for each tp rank: more tell no more, and a head takes them in parts
)


@dataclass(frozen=True)
class LayerRun:
    """The program of one rank, and the values of it that are looked at."""

    program: Program
    num_before_sums: int
    module: nn.Module
    held: tuple[HeldParameter, ...]
    parameters: dict[str, Ref]
    given: tuple[Ref, ...]
    """What flows in, and what the layer's result has for a gradient."""
    inputs: tuple[Ref, ...]
    """Tokens, labels, documents."""
    result: Ref
    gradient: Ref | None
    """Of what flows in."""
    gradients: dict[str, Ref]


def run_layer(
    config: RunConfig, layer: LayerSpec, place: str, rank: int, dp_coord: int = 0
) -> LayerRun:
    """Run a layer as tp rank `rank`; `place`: whether it is the model's "first", "last" or not.

    Raises whatever the layer raises.
    """
    mesh, tracer = config.mesh, Tracer(rank, config.mesh.tp, dp_coord)
    mode = config.pipeline.activation_checkpointing
    selective = mode == "selective"
    context = LayerContext(tracer.group, tracer.key, mesh.sequence_parallel, selective)
    settings = EngineSettings.from_config(config)
    with torch.device("meta"):
        module = building._make(layer, context).to(settings.dtype)
        held = tuple(building._held(layer, module, context))
        seq = min(config.data.sequence_length, _LONGEST * mesh.tp)
        tokens = torch.zeros(_BATCH, seq, dtype=torch.int64)
        here = seq // mesh.tp if mesh.sequence_parallel else seq
        segments = _segments(seq) if config.data.isolate_documents else None
        flowing = torch.zeros(_BATCH, here, config.model.hidden_size, dtype=settings.dtype)
    flowing.requires_grad_()
    tracer.name_layers(module, layer.name)
    again = {module} if (place, mode) == ("middle", "full") else set()
    stages = building.Stages({0: [module]}, again)
    x = tokens if place == "first" else flowing
    labels = tokens if place == "last" else None
    with tracer:
        result = stages(0, x, labels, segments)
    gradient = torch.empty_like(result)
    with tracer:
        torch.autograd.backward(result, gradient)
    num_before_sums = len(tracer.program.nodes)
    grads = {h.name: h.parameter.grad for h in held}
    ref = tracer.program.ref
    run = LayerRun(
        tracer.program,
        num_before_sums,
        module,
        held,
        {h.name: ref(h.parameter) for h in held},
        (ref(flowing), ref(gradient)),
        tuple(ref(t) for t in (tokens, *([segments.positions] if segments else ()))),
        ref(result),
        ref(flowing.grad) if flowing.grad is not None else None,
        {name: ref(grad) for name, grad in grads.items() if grad is not None},
    )
    _sum(held, tracer, settings)
    return run


def _segments(seq: int) -> Segments:
    """Two documents in each sample."""
    lengths = (seq // 2, seq - seq // 2) * _BATCH
    positions = torch.zeros(_BATCH, seq, dtype=torch.int64)
    return Segments(positions, torch.zeros(len(lengths) + 1, dtype=torch.int32), lengths)


def _sum(held: Sequence[HeldParameter], tracer: Tracer, settings: EngineSettings) -> None:
    """What the engine does with a stage's gradients before data parallelism takes them."""
    mesh = SimpleNamespace(
        size=lambda axis: tracer.group.size() if axis == "tp" else 1,
        group=lambda axis: tracer.group,
    )
    engine: Any = SimpleNamespace(_mesh=mesh, _settings=settings, _owners=None)
    with tracer:
        Reduction._sum(engine, [h for h in held if h.parameter.grad is not None])
