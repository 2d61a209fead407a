"""What the planner's tests plan: small models, products without parameters, any setting."""

from dataclasses import fields, replace
from typing import Any, get_args

from hypothesis import strategies as st

from parallel3d.base.mesh_sizes import AXES, MeshSizes
from parallel3d.config import hardware
from parallel3d.config.hardware import Figure, Link
from parallel3d.model.recompute import FULL, NONE, SELECTIVE, Recompute
from parallel3d.model.spec import LayerCost, LayerSpec, MatMul, Shape, Work
from parallel3d.models.gpt.spec import Config
from parallel3d.plan.setting import (
    DEVICES,
    Flow,
    Setting,
    Software,
    Workload,
    ZeroState,
    layers_of,
)
from parallel3d.plan.time.operators import Curves
from parallel3d.schedule.schedules import names, why_not
from parallel3d.schedule.sharding import Weights

A100 = hardware.load("a100-80gb")
GPT = Config(
    family="gpt",
    hidden_size=1024,
    num_hidden_layers=14,
    num_attention_heads=16,
    vocab_size=50304,
    max_position_embeddings=1024,
)
# Nothing costs anything but the FLOPs of products.
IDEAL = replace(
    Curves(),
    **{f.name: 0.0 for f in fields(Curves) if f.name.startswith("overhead")},
    matmul=1.0,
    wave=0.0,
    depth=0.0,
    latency=0.0,
)


def figure(value: float) -> Figure:
    """A number for a test."""
    return Figure(value=value, source="this test")


def link(bandwidth: float, latency: float = 0.0) -> Link:
    """A link for a test."""
    return Link(bandwidth=figure(bandwidth), latency=figure(latency))


def layer(index: int, product: MatMul) -> LayerSpec:
    """A layer without parameters that is one product."""

    def cost(
        shape: Shape, tp: int = 1, sequence_parallel: bool = False, recompute: Recompute = NONE
    ) -> LayerCost:
        return LayerCost(product.flops, Work((product,)))

    return LayerSpec(f"layer{index}", (), cost, "nowhere:Layer", config=product)


def products(num_stages: int, *sizes: int) -> tuple[LayerSpec, ...]:
    """One layer for each stage, its product's inner size taken in turn from `sizes`."""
    return tuple(layer(i, MatMul(64, sizes[i % len(sizes)], 64)) for i in range(num_stages))


def new_setting(
    layers: tuple[LayerSpec, ...],
    hidden_size: int,
    shape: Shape,
    num_microbatches: int,
    **choices: Any,
) -> Setting:
    """A setting of one rank at ZeRO-3, with some fields of its parts, by their names."""
    workload = Workload(layers, hidden_size, shape.seq)
    flow = Flow(MeshSizes(), shape.batch)
    setting = Setting(workload, num_microbatches, flow, state=ZeroState.of(3, True))
    return changed(setting, **choices)


def changed(setting: Setting, **choices: Any) -> Any:
    """A copy of a setting with some fields of its parts changed, by their names."""
    flow = setting.flow
    if axes := {axis: choices.pop(axis) for axis in AXES if axis in choices}:
        choices["mesh"] = MeshSizes(**(flow.mesh._asdict() | axes))
    parts: dict[str, Any] = {}
    for name in ("flow", "order", "state"):
        part = getattr(setting, name)
        own = {field: choices.pop(field) for field in part._fields if field in choices}
        parts[name] = part._replace(**own)
    _, *state = parts["state"]
    offloads = DEVICES.index(state[2]) + DEVICES.index(state[3])
    parts["state"] = ZeroState(offloads, *state)
    names = {field.name for field in fields(Workload)} & choices.keys()
    if own := {name: choices.pop(name) for name in names}:
        parts["workload"] = replace(setting.workload, **own)
    return replace(setting, **parts, **choices)


def shape_of(setting: Setting) -> Shape:
    """The shape of a setting's microbatch."""
    return Shape(setting.flow.micro_batch, setting.workload.seq)


@st.composite
def any_setting(draw: st.DrawFn) -> Setting:
    """A setting of a small GPT that some schedule can run, of this engine or of another program."""
    pp = draw(st.sampled_from((1, 2, 3, 4)))
    count = draw(st.integers(1, 12))
    orders = [(n, v) for n in names() for v in (1, 2, 3) if not why_not(n, pp, count, v)]
    schedule, per_rank = draw(st.sampled_from(orders))
    zero = draw(st.integers(0, 3))
    offload = st.sampled_from(("none", "cpu", "nvme") if zero else ("none",))
    software = Software(
        attention=draw(st.sampled_from(("flash", "classic"))),
        overlaps_gather=draw(st.booleans()),
        overlaps_reduction=draw(st.booleans()),
        overlaps_tensor=draw(st.booleans()),
        overlaps_offload=draw(st.booleans()),
    )
    return new_setting(
        layers_of(GPT),
        GPT.hidden_size,
        Shape(draw(st.integers(1, 4)), draw(st.sampled_from((128, 1024)))),
        count,
        pp=pp,
        dp=draw(st.sampled_from((1, 2, 5, 8, 64))),
        tp=draw(st.sampled_from((1, 2, 8, 16))),
        cp=draw(st.sampled_from((1, 1, 2))),
        sequence_parallel=draw(st.booleans()),
        schedule=schedule,
        stages_per_rank=per_rank,
        recompute=draw(st.sampled_from((NONE, SELECTIVE, FULL))),
        precision=draw(st.sampled_from(("bf16", "fp16"))),
        zero_stage=zero,
        reduces_once=draw(st.booleans()) or zero == 0,
        weights=draw(st.sampled_from(get_args(Weights))),
        offload_optimizer=draw(offload),
        offload_param=draw(offload) if zero == 3 else "none",
        software=software,
    )
