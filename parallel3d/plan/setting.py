"""The planner's input: one way to run one model, as data."""

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple, Self

from parallel3d import models
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import ResolvedConfig, RunConfig, ZeroConfig
from parallel3d.config.hardware import Kernels
from parallel3d.model.config import ModelConfig
from parallel3d.model.matrices import NewtonSchulz
from parallel3d.model.recompute import NONE, Recompute
from parallel3d.model.spec import LayerSpec, Shape, count_params
from parallel3d.schedule.sharding import Weights

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Device = Literal["none", "cpu", "nvme"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # an activation or weight outside the products
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
    bucket: float = inf
    """Gradient elements that one collective reduces."""


ENGINE = Software()
DEFAULT_BUFFERS = ZeroConfig(stage=0)


@dataclass(frozen=True)
class Setting:
    """One way to run one model: its layers, batch, mesh, schedule, ZeRO stage and precision.

    - `shape`: of one microbatch of one data-parallel rank.
    - `num_microbatches`: per step.
    - `reduces_once`: True if gradients are reduced once per step.
    - `weights`: how long ZeRO-3's weights stay gathered.
    - `ep`: dp ranks that divide the experts among them. `ep_imbalance`: tokens on the busiest of
      them relative to the mean.
    - `optimizer`: the name of its file. `newton_schulz`: its work on each hidden matrix, if it
      needs whole ones.
    - `buffers`: the config's zero_optimization, of which only DeepSpeed's buffer sizes are read.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    shape: Shape
    num_microbatches: int
    _: KW_ONLY
    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    ep_imbalance: float = 1.0
    sequence_parallel: bool = False
    schedule: str = "gpipe"
    stages_per_rank: int = 1
    recompute: Recompute = NONE
    precision: Precision = "bf16"
    zero_stage: int = 3
    reduces_once: bool = True
    weights: Weights = "per_microbatch"
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    offload_activations: bool = False
    optimizer: str = "adamw"
    newton_schulz: NewtonSchulz | None = None
    buffers: ZeroConfig = DEFAULT_BUFFERS
    software: Software = ENGINE

    @property
    def action_order(self) -> tuple[str, int, int, int]:
        """The schedule's name, pp, microbatches and stages per rank: its programs' order."""
        return self.schedule, self.pp, self.num_microbatches, self.stages_per_rank

    @property
    def shards(self) -> int:
        """Number of ranks that share ZeRO's state; programs with hierarchical ZeRO have fewer."""
        return self.dp * self.cp

    @property
    def holds_weights(self) -> bool:
        """True if ZeRO-3's weights stay gathered for more than one microbatch."""
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
    def mesh(self) -> MeshSizes:
        """The sizes of the mesh."""
        return MeshSizes(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.mesh.ranks

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
        """Number of parameters of the model; a tied weight counts once."""
        return count_params(self.layers)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that each token uses."""
        return count_params(self.layers, active=True)

    @classmethod
    def of_run(cls, config: RunConfig, batch: int) -> "Setting":
        """Return what all meshes of a run share, on one device with a microbatch of `batch`."""
        own = config.parallel3d
        return cls(
            layers=layers_of(own.model),
            hidden_size=own.model.hidden_size,
            shape=Shape(batch, own.data.sequence_length),
            num_microbatches=1,
            ep_imbalance=own.plan.ep_imbalance,
            precision=config.precision,
            offload_activations=own.pipeline.offload_activations == "cpu",
            optimizer=config.optimizer.file,
            newton_schulz=getattr(config.optimizer.params, "newton_schulz", None),
            software=Software(
                kernels="eager" if own.train.compile == "none" else "compiled",
                reduction_bytes=BYTES[config.communication_data_type or "fp32"],
            ),
            buffers=config.zero_optimization,
        )

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> "Setting":
        """Return the setting of a config whose vocabulary is known, too.

        With train.batch_schedule its step is that of the largest batch.
        """
        zero = config.zero_optimization
        pipeline = config.pipeline
        mesh = config.mesh
        micro = config.micro_batch_size
        return cls.of_run(config, micro).but(
            num_microbatches=config.largest_batch // (micro * mesh.sizes.dp),
            pp=mesh.pp,
            dp=mesh.sizes.dp,
            cp=mesh.cp,
            tp=mesh.tp,
            ep=mesh.ep,
            sequence_parallel=mesh.sequence_parallel,
            schedule=pipeline.schedule,
            stages_per_rank=pipeline.stages_per_rank,
            recompute=pipeline.activation_checkpointing,
            zero_stage=zero.stage,
            reduces_once=pipeline.reduces_once(zero.stage),
            weights=pipeline.gathered_weights,
            offload_optimizer=zero.offload_optimizer.device,
            offload_param=zero.offload_param.device,
        )

    def but(self, **changes: Any) -> Self:
        """Return a copy of this setting with some fields changed."""
        assert changes.keys() <= vars(self).keys()
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)  # a search copies 100,000: replace takes longer
        return copy


class RankShare(NamedTuple):
    """The fields of a setting that determine what a layer computes and saves on one rank.

    Caches have it as their key: most of the settings that a search compares share it.

    - `batch`: samples of one microbatch. `seq`: a context-parallel rank's part of their tokens.
    """

    batch: int
    seq: int
    hidden_size: int
    cp: int
    tp: int
    ep: int
    ep_imbalance: float
    sequence_parallel: bool
    precision: Precision
    offload_activations: bool

    @classmethod
    def of(cls, setting: Setting) -> "RankShare":
        """Return a rank's share of a setting's layers."""
        return cls(
            setting.shape.batch,
            setting.shape.seq // setting.cp,
            setting.hidden_size,
            setting.cp,
            setting.tp,
            setting.ep,
            setting.ep_imbalance,
            setting.sequence_parallel,
            setting.precision,
            setting.offload_activations,
        )

    @property
    def shape(self) -> Shape:
        """The shape of a microbatch on the rank."""
        return Shape(self.batch, self.seq)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a microbatch, which stages pass on to each other."""
        parts = self.tp if self.sequence_parallel else 1
        return self.batch * self.seq * self.hidden_size * self.bytes_per_element // parts


@lru_cache(maxsize=64)
def layers_of(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return a model's layers, built once: settings of one model share the layer objects."""
    return tuple(models.layers(model))


def leaves_weights_open(config: RunConfig) -> bool:
    """Return True if parallel3d.pipeline.weights is "auto" at ZeRO-3, the only stage using it."""
    return config.zero_optimization.stage == 3 and config.parallel3d.pipeline.weights == "auto"
