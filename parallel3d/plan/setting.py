"""The planner's input: one way to run one model, as data."""

from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Literal, NamedTuple, Self

from parallel3d import models
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import ResolvedConfig, RunConfig, ZeroConfig
from parallel3d.config.deepspeed import OptimizerConfig, describe_offload
from parallel3d.config.hardware import Kernels
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.matrices import NewtonSchulz
from parallel3d.model.parametrization import Role
from parallel3d.model.recompute import NONE, SUBLAYERS, Recompute
from parallel3d.model.spec import LayerSpec, Shape, count_params
from parallel3d.schedule.sharding import Weights

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Device = Literal["none", "cpu", "nvme"]
DEVICES: tuple[Device, ...] = ("none", "cpu", "nvme")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # an activation or weight outside the products
_EMA_BYTES = 12  # the master is read, the average read and written
TOKEN_BYTES = 16  # a token and its label, int64


@dataclass(frozen=True)
class Software:
    """Properties of a training program that determine its memory and speed.

    The defaults describe this project's engine. Other values describe the programs whose published
    runs the planner is checked against. Every field is a fact about a program; none is fitted.
    """

    name: str = "parallel3d"
    attention: Literal["flash", "classic"] = "flash"
    """"classic" writes the scores to memory: seq x seq for each head."""
    causal_skips: bool = True
    """True if the attention kernel skips the masked half."""
    handles_small: bool = True
    """ZeRO-3: True if parameters that are too small to be sharded still cost host time. They do
    with DeepSpeed's hooks: a step of ds.json on two ranks takes 0.70 s with its threshold, 0.84 s
    with 0, and 0.34 s at ZeRO-1."""
    overlaps_gather: bool = False
    """ZeRO-3: True if gathers overlap with computes."""
    overlaps_reduction: bool = False
    """True if gradient reductions overlap with the backward pass."""
    overlaps_tensor: bool = False
    """True if tensor-parallel collectives overlap with matrix products, in forwards too. This
    engine overlaps them in backwards (train.overlap), which plans ignore until a GPU has measured
    the gain."""
    exposes_forward: bool = False
    """True if tensor-parallel collectives overlap in backwards only."""
    overlaps_offload: bool = False
    """True if offload traffic overlaps with computes."""
    overlaps_sends: bool = False
    """True if messages between pipeline stages overlap with computes of other microbatches."""
    scatters_sends: bool = False
    """True if each tp rank sends its part of a message to the next stage, which gathers them, as
    Megatron-LM does; this engine's stages exchange parts under sequence parallelism only."""
    passes_keys: bool = False
    """True if context-parallel ranks pass keys and values on around a ring, behind the computes
    (arXiv:2310.01889); this engine gathers them, in forwards and again in backwards."""
    one_ring: bool = False
    """ZeRO-3: True if collectives use only one network interface between nodes."""
    kernels: Kernels = "eager"
    """The program's class: "eager" runs a kernel for each operator; "compiled" (torch.compile, XLA)
    fuses consecutive memory-bound operators; "tuned" (Megatron-LM, Transformer Engine) has fused
    kernels that were written by hand."""
    hopper: bool = True
    """True if the attention kernel is written for Hopper and later, not only for Ampere."""
    gradient_bytes: int = 4
    """Bytes of an accumulated gradient element."""
    reduction_bytes: int = 4
    """Bytes of a gradient element during its reduction."""
    waits_for_counts: bool = True
    """Divided experts: True if the host waits for the number of rows that other ranks send, once a
    layer, so that it cannot launch kernels ahead of the device."""
    fuses_accumulation: bool = False
    """True if the products of weight gradients add to the accumulated ones themselves, so that a
    part of the traffic remains, as with other fused operators (`Curves.fused`)."""
    bucket: float = inf
    """Gradient elements that one collective reduces."""


ENGINE = Software()


@dataclass(frozen=True, eq=False)
class Workload:
    """The part of a setting that no search changes: the model, and how a program trains it.

    Caches have it in their keys: a request has one, which is compared by its identity.

    - `seq`: tokens of a sample.
    - `optimizer`: the config's section.
    - `buffers`: the config's zero_optimization, of which only DeepSpeed's buffer sizes are read.
    - `ep_imbalance`: tokens on the busiest of the ranks that divide the experts, relative to the
      mean.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    seq: int
    _: KW_ONLY
    precision: Precision = "bf16"
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig.model_validate({"params": {"lr": 1e-3}})
    )
    buffers: ZeroConfig = field(default_factory=lambda: ZeroConfig(stage=0))
    ep_imbalance: float = 1.0
    offload_activations: bool = False
    has_ema: bool = False
    """True if an average of the weights is kept (train.ema)."""
    software: Software = ENGINE
    can_recompute: tuple[str, ...] = SUBLAYERS
    """Parts of a layer that may be recomputed alone."""

    @classmethod
    def of(cls, config: RunConfig) -> "Workload":
        """Return what all meshes of a run share."""
        own = config.parallel3d
        return cls(
            layers_of(own.model),
            own.model.hidden_size,
            own.data.sequence_length,
            precision=config.precision,
            optimizer=config.optimizer,
            buffers=config.zero_optimization,
            ep_imbalance=own.plan.ep_imbalance,
            offload_activations=own.pipeline.offload_activations == "cpu",
            has_ema=own.train.ema is not None,
            software=Software(
                # "auto" may find no Triton, and what it gains is not measured: 2 % by the curves.
                kernels="eager" if own.train.compile in ("auto", "none") else "compiled",
                reduction_bytes=BYTES[config.communication_data_type or "fp32"],
            ),
            can_recompute=getattr(own.model, "can_recompute", SUBLAYERS),
        )

    @cached_property
    def bytes_per_element(self) -> int:
        """Bytes of one element of a weight or an activation."""
        return BYTES[self.precision]

    def state_bytes(self, role: Role | None = None) -> int:
        """Return the bytes of an element's master weight, optimizer state and average."""
        return optimizers.state_bytes(self.optimizer.type, role, self.has_ema)

    @cached_property
    def step_bytes(self) -> int:
        """Bytes that an update reads and writes for each element."""
        average = _EMA_BYTES if self.has_ema else 0
        return optimizers.load(self.optimizer.type).STEP_BYTES + average

    @cached_property
    def newton_schulz(self) -> NewtonSchulz | None:
        """The optimizer's work on each hidden matrix, if it needs whole ones."""
        return getattr(self.optimizer.params, "newton_schulz", None)

    @property
    def num_params(self) -> int:
        """Number of parameters of the model; a tied weight counts once."""
        return count_params(self.layers)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that each token uses."""
        return count_params(self.layers, active=True)


class Flow(NamedTuple):
    """A mesh with its micro batch size, recomputation and sequence parallelism.

    - `micro_batch`: samples of one microbatch of one data-parallel rank.
    - `ep`: dp ranks that divide the experts among them.
    """

    mesh: MeshSizes
    micro_batch: int = 1
    recompute: Recompute = NONE
    sequence_parallel: bool = False
    ep: int = 1


class Order(NamedTuple):
    """A schedule's name, and the number of stages on each rank."""

    stages_per_rank: int = 1
    schedule: str = "gpipe"


class ActionOrder(NamedTuple):
    """A schedule with its sizes, which determine the order of each rank's actions."""

    schedule: str
    pp: int
    num_microbatches: int
    stages_per_rank: int


class ZeroState(NamedTuple):
    """A ZeRO stage with its reduction and offloads. The simplest sorts first.

    - `reduces_once`: True if gradients are reduced once per step.
    - `weights`: how long ZeRO-3's weights stay gathered.
    - `copies`: the copies of what is sharded, with mesh.dp_shards.
    """

    num_offloads: int
    zero_stage: int
    reduces_once: bool
    offload_optimizer: Device
    offload_param: Device
    weights: Weights = "per_microbatch"  # used by ZeRO-3 only
    copies: int = 1

    @classmethod
    def of(
        cls,
        zero_stage: int,
        reduces_once: bool,
        optimizer: Device = "none",
        param: Device = "none",
        weights: Weights = "per_microbatch",
        copies: int = 1,
    ) -> "ZeroState":
        """Return a stage with its offloads, which are counted; `weights` counts at ZeRO-3."""
        num_offloads = DEVICES.index(optimizer) + DEVICES.index(param)
        if zero_stage != 3:
            weights = "per_microbatch"
        return cls(num_offloads, zero_stage, reduces_once, optimizer, param, weights, copies)

    @property
    def sums_copies_late(self) -> bool:
        """True if gradients are reduced each microbatch, but over the copies once a step."""
        return self.copies > 1 and self.zero_stage == 3 and not self.reduces_once

    @property
    def holds_weights(self) -> bool:
        """True if ZeRO-3's weights stay gathered for more than one microbatch."""
        return self.zero_stage == 3 and self.weights != "per_microbatch"

    @property
    def offload(self) -> str:
        """The offloads in words."""
        return describe_offload(self.offload_optimizer, self.offload_param)


GPIPE = Order()
PLAIN = ZeroState.of(0, True)  # nothing sharded, nothing offloaded
Choices = tuple[Flow, Order, ZeroState]


@dataclass(frozen=True)
class Setting:
    """One way to run a workload: its mesh, microbatches, schedule and ZeRO state.

    - `num_microbatches`: per step.
    """

    workload: Workload
    num_microbatches: int
    flow: Flow
    order: Order = GPIPE
    state: ZeroState = PLAIN

    @property
    def choices(self) -> Choices:
        """The flow, order and state, which a search varies."""
        return self.flow, self.order, self.state

    @property
    def mesh(self) -> MeshSizes:
        """The sizes of the mesh."""
        return self.flow.mesh

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages on all ranks."""
        return self.flow.mesh.pp * self.order.stages_per_rank

    @property
    def actions(self) -> ActionOrder:
        """The schedule with its sizes."""
        stages_per_rank, schedule = self.order
        return ActionOrder(schedule, self.flow.mesh.pp, self.num_microbatches, stages_per_rank)

    @property
    def shards(self) -> int:
        """Number of ranks that share ZeRO's state; programs with hierarchical ZeRO have fewer."""
        return self.mesh.dp * self.mesh.cp // self.state.copies

    @property
    def persistence(self) -> int:
        """Size up to which ZeRO-3 keeps a parameter whole: 0 where the program gathers weights."""
        if self.state.holds_weights:
            return 0
        return self.workload.buffers.stage3_param_persistence_threshold

    @property
    def recomputed_share(self) -> float:
        """Fraction of the layers that are recomputed in the way the flow names."""
        return 1.0

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.flow.micro_batch * self.num_microbatches * self.mesh.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.workload.seq

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> "Setting":
        """Return the setting of a config whose vocabulary is known, too.

        With train.batch_schedule its step is that of the largest batch.
        """
        zero = config.zero_optimization
        pipeline = config.parallel3d.pipeline
        mesh = config.mesh
        sizes = mesh.sizes
        micro = config.micro_batch_size
        recompute = pipeline.activation_checkpointing
        return cls(
            Workload.of(config),
            config.largest_batch // (micro * sizes.dp),
            Flow(sizes, micro, recompute, mesh.sequence_parallel, mesh.ep),
            Order(pipeline.stages_per_rank, pipeline.schedule),
            ZeroState.of(
                zero.stage,
                pipeline.reduces_once(zero.stage),
                zero.offload_optimizer.device,
                zero.offload_param.device,
                pipeline.gathered_weights,
                mesh.num_copies,
            ),
        )

    def recomputing(self, recompute: Recompute) -> Self:
        """Return this setting with another recomputation."""
        return replace(self, flow=self.flow._replace(recompute=recompute))

    def gathering(self, weights: Weights) -> Self:
        """Return this setting with ZeRO-3's weights gathered for another time."""
        return replace(self, state=self.state._replace(weights=weights))


class RankShare(NamedTuple):
    """The part of a setting that determines what a layer computes and saves on one rank.

    Caches have it as their key: most of the settings that a search compares share it.

    - `batch`: samples of one microbatch.
    """

    workload: Workload
    batch: int
    cp: int
    tp: int
    ep: int
    sequence_parallel: bool

    @classmethod
    def of(cls, setting: Setting) -> "RankShare":
        """Return a rank's share of a setting's layers."""
        flow = setting.flow
        _, _, cp, tp = flow.mesh
        return cls(setting.workload, flow.micro_batch, cp, tp, flow.ep, flow.sequence_parallel)

    @property
    def shape(self) -> Shape:
        """The shape of a microbatch on the rank, which has a part of its tokens with cp."""
        return Shape(self.batch, self.workload.seq // self.cp)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of a weight or an activation."""
        return self.workload.bytes_per_element

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a microbatch, which stages pass on to each other."""
        work = self.workload
        parts = self.tp if self.sequence_parallel else 1
        tokens = self.batch * (work.seq // self.cp)
        return tokens * work.hidden_size * work.bytes_per_element // parts


@lru_cache(maxsize=64)
def layers_of(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return a model's layers, built once: settings of one model share the layer objects."""
    return tuple(models.layers(model))


def leaves_weights_open(config: RunConfig) -> bool:
    """Return True if parallel3d.pipeline.weights is "auto" at ZeRO-3, the only stage using it."""
    return config.zero_optimization.stage == 3 and config.parallel3d.pipeline.weights == "auto"
