"""Construction of a run's model, engine and executors, for every command that trains."""

import logging
from collections import Counter
from dataclasses import dataclass

from parallel3d import models
from parallel3d.base.say import Say
from parallel3d.config import CompleteConfig
from parallel3d.config.parallel3d_block import MeshConfig, PipelineConfig
from parallel3d.engine import Engine, EngineSettings
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import LayerSpec, Shape
from parallel3d.pipeline.executor import Evaluator, Executor
from parallel3d.pipeline.stages import BuiltStages, build_stages
from parallel3d.schedule.schedule import Schedule, add_sharding
from parallel3d.schedule.schedules import make_evaluation, make_schedule
from parallel3d.tensor.attention import prefer_flash_3
from parallel3d.tensor.compiled import mode_on

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """The model, engine and executors of one rank.

    `executor` trains; `evaluator` runs the same stages forward only.
    """

    layers: list[LayerSpec]
    shape: Shape
    schedule: Schedule
    stages: BuiltStages
    engine: Engine
    executor: Executor
    evaluator: Evaluator

    @property
    def flops_per_token(self) -> float:
        """The model's FLOPs per token, forward and backward."""
        return sum(layer.cost(self.shape).train_flops for layer in self.layers) / self.shape.tokens

    @property
    def side_losses(self) -> Counter[str]:
        """The number of layers with each side loss."""
        return Counter(name for layer in self.layers for name in layer.side_losses)


def assemble(
    config: CompleteConfig,
    mesh: Mesh,
    *,
    say: Say = _log.info,
    seed: int | None = None,
    settings: EngineSettings | None = None,
) -> Assembly:
    """Build a resolved config's stages, engine and executors on this rank of `mesh`.

    `settings` are the engine's, by default those of the config.

    Raises ConfigError or ScheduleError if the settings cannot be combined.
    """
    pulse.doing("building the model")
    settings = settings or EngineSettings.from_config(config)
    own = config.parallel3d
    layers, shape, schedule, stages = build(
        config, mesh, settings, seed=own.train.seed if seed is None else seed
    )
    owners = schedule.pp_coord_of_stage[0], schedule.pp_coord_of_stage[-1]
    engine = Engine(
        stages.module,
        stages.held,
        settings,
        mesh=mesh,
        say=say,
        owners=owners,
        layers=stages.module.layers,
    )
    weights = settings.weights if settings.holds_weights else "per_microbatch"

    def make(num_microbatches: int) -> Schedule:
        schedule = _schedule(own.pipeline, mesh, num_microbatches)
        return add_sharding(schedule, weights, settings.reduces_once)

    training = make(schedule.num_microbatches)
    hidden = hidden_shape(config.mesh, shape, own.model.hidden_size)
    executor = Executor(
        training, mesh, engine, key=stages.key, hidden_shape=hidden, make_schedule=make
    )
    forwards = add_sharding(make_evaluation(schedule), weights, False)
    evaluator = Evaluator(forwards, mesh, engine, key=stages.key, hidden_shape=hidden)
    return Assembly(layers, shape, training, stages, engine, executor, evaluator)


def build(
    config: CompleteConfig, mesh: Mesh, settings: EngineSettings, *, seed: int | None
) -> tuple[list[LayerSpec], Shape, Schedule, BuiltStages]:
    """Return a resolved config's layers and shape, its schedule, and this rank's stages.

    Without a seed the weights are not initialised. Raises ConfigError or ScheduleError if the
    settings cannot be combined.
    """
    own = config.parallel3d
    sizes = config.mesh
    layers = models.layers(own.model)
    shape = Shape(settings.micro_batch_size, own.data.sequence_length)
    schedule = _schedule(own.pipeline, mesh, config.num_microbatches)
    stages = build_stages(
        layers,
        schedule,
        settings,
        mesh=mesh,
        shape=shape,
        seed=seed,
        activation_checkpointing=own.pipeline.activation_checkpointing,
        offload_activations=own.pipeline.offload_activations == "cpu",
        sequence_parallel=sizes.sequence_parallel,
        overlap=own.train.overlap,
        compiles=mode_on(mesh.device, own.train.compile),
    )
    prefer_flash_3(stages.module, mesh.device, isolated=own.data.isolate_documents)
    return layers, shape, schedule, stages


def _schedule(pipeline: PipelineConfig, mesh: Mesh, num_microbatches: int) -> Schedule:
    return make_schedule(
        pipeline.schedule, mesh.pipeline.size, num_microbatches, pipeline.stages_per_rank
    )


def hidden_shape(mesh: MeshConfig, shape: Shape, hidden_size: int) -> tuple[int, int, int]:
    """Return the shape of tensors between stages: [batch, seq, hidden], or a rank's part."""
    seq = shape.seq // (mesh.cp * (mesh.tp if mesh.sequence_parallel else 1))
    return shape.batch, seq, hidden_size
