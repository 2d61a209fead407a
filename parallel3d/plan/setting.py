"""The planner's input: one way to run one model, as data."""

from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.config.parallel3d_block import gathered_for, reduces_once
from parallel3d.model.spec import LayerSpec, Recompute, Shape
from parallel3d.schedule.sharding import Weights

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Device = Literal["none", "cpu", "nvme"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # an activation or weight outside the products


@dataclass(frozen=True)
class Software:
    """A training program's properties that its memory and speed depend on.

    The default is this project's engine; others are programs whose published runs the planner is
    checked against. Each field is a fact about a program, none is fitted.
    """

    name: str = "parallel3d"
    attention: Literal["flash", "classic"] = "flash"
    """"classic" writes the scores to memory: seq x seq for each head."""
    causal_skips: bool = True
    """Whether the attention kernel leaves out the masked half."""
    handles_small: bool = True
    """ZeRO-3: whether parameters that are too small to be sharded cost the program's time, too.
    DeepSpeed's hooks do: a step of ds.json on two ranks takes 0.70 s with its threshold, 0.84 with
    0, and 0.34 at ZeRO-1."""
    overlaps_gather: bool = False
    """ZeRO-3: whether gathers run behind computes."""
    overlaps_reduction: bool = False
    """Whether gradients are reduced behind the backward pass."""
    overlaps_tensor: bool = False
    """Whether tensor-parallel collectives run behind matrix products, in forwards too. Ours do in
    backwards alone (train.overlap), which a plan leaves out: no GPU has measured how much."""
    overlaps_offload: bool = False
    """Whether offload traffic runs behind computes."""
    overlaps_sends: bool = False
    """Whether messages between pipeline stages run behind computes of other microbatches."""
    scatters_sends: bool = False
    """Whether the tp ranks each send a part of what goes to the next stage, and gather it there."""
    one_ring: bool = False
    """ZeRO-3: whether its collectives pass from node to node by one network interface only."""
    fused: bool = False
    """Whether memory-bound operators that follow one another are one kernel."""
    hopper: bool = True
    """Whether its attention kernel is written for Hopper and later, not only for Ampere."""
    gradient_bytes: int = 4
    """Bytes of an accumulated gradient."""
    reduction_bytes: int = 4
    """Bytes of a gradient on its way through the reduction."""


ENGINE = Software()


@dataclass(frozen=True)
class Buffers:
    """DeepSpeed's buffer sizes, in elements, under DeepSpeed's names."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000


@dataclass(frozen=True)
class Setting:
    """One way to run one model: its layers, batch, mesh, schedule, ZeRO stage and precision.

    `shape`: one microbatch of one data-parallel rank. `num_microbatches`: of a step.
    `reduces_once`: whether gradients are reduced once a step. `weights`: how long ZeRO-3's stay
    gathered.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    shape: Shape
    num_microbatches: int
    _: KW_ONLY
    pp: int = 1
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    schedule: str = "gpipe"
    stages_per_rank: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    zero_stage: int = 3
    reduces_once: bool = True
    weights: Weights = "per_microbatch"
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    buffers: Buffers = Buffers()
    software: Software = ENGINE

    @property
    def cp(self) -> int:
        """Number of context-parallel ranks: 1 in this engine, other programs may have more."""
        return 1

    @property
    def holds_weights(self) -> bool:
        """Whether ZeRO-3's weights stay gathered for more than one microbatch."""
        return self.zero_stage == 3 and self.weights != "per_microbatch"

    @property
    def persistence(self) -> int:
        """Size up to which ZeRO-3 keeps a parameter whole: 0 where the program gathers weights."""
        return 0 if self.holds_weights else self.buffers.stage3_param_persistence_threshold

    @property
    def recomputed_share(self) -> float:
        """Fraction of the layers that are recomputed in the way `recompute` names."""
        return 1.0

    @property
    def devices(self) -> int:
        """Number of devices in the whole mesh."""
        return self.pp * self.dp * self.tp * self.cp

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.shape.batch * self.num_microbatches * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.shape.seq

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        return sum(layer.num_params for layer in self.layers)

    @classmethod
    def from_config(cls, config: RunConfig) -> "Setting":
        """The setting of a resolved config, whose mesh, batch and vocabulary are known."""
        zero, pipeline, mesh = config.zero_optimization, config.pipeline, config.mesh
        assert isinstance(mesh.dp, int), "resolve(world_size) comes first"
        return cls(
            layers=layers_of(config.model), hidden_size=config.model.hidden_size,
            shape=Shape(config.micro_batch_size, config.data.sequence_length),
            num_microbatches=config.num_microbatches, pp=mesh.pp, dp=mesh.dp, tp=mesh.tp,
            sequence_parallel=mesh.sequence_parallel, schedule=pipeline.schedule,
            stages_per_rank=pipeline.stages_per_rank, recompute=pipeline.activation_checkpointing,
            precision=config.precision, zero_stage=zero.stage,
            reduces_once=reduces_once(zero.stage, pipeline.gradient_reduction),
            weights=gathered_for(pipeline.weights),
            offload_optimizer=zero.offload_optimizer.device,
            offload_param=zero.offload_param.device,
            software=Software(
                reduction_bytes=BYTES[config.communication_data_type or "fp32"],
                scatters_sends=pipeline.scatter_activations,
            ),
            buffers=Buffers(**{name: getattr(zero, name) for name in Buffers.__annotations__}),
        )  # fmt: skip

    def but(self, **changes: Any) -> Self:
        """A copy of this setting with some fields changed."""
        return replace(self, **changes)


@lru_cache(maxsize=64)
def layers_of(model: Any) -> tuple[LayerSpec, ...]:
    """A model's layers, made once: settings of one model share the layer objects."""
    return tuple(models.layers(model))


def leaves_weights_open(config: RunConfig) -> bool:
    """Whether parallel3d.pipeline.weights is "auto" at ZeRO-3, the only stage that uses it."""
    return config.zero_optimization.stage == 3 and config.pipeline.weights == "auto"


def with_weights(config: RunConfig, weights: str, note: str) -> RunConfig:
    """The config with parallel3d.pipeline.weights set, and the note that says so."""
    pipeline = config.pipeline.model_copy(update={"weights": weights})
    block = config.parallel3d.model_copy(update={"pipeline": pipeline})
    return config.model_copy(update={"parallel3d": block}).with_notes(*config.notes, note)
