"""The settings of one ds.json: DeepSpeed's and those of the "parallel3d" block."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from parallel3d.base.masking import mask_values
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import PositiveCount, Refusal, Section
from parallel3d.config import deepspeed, deepspeed_keys, parallel3d_block
from parallel3d.config.deepspeed import (
    AioConfig,
    Bf16Config,
    Fp16Config,
    OptimizerConfig,
    ZeroConfig,
)
from parallel3d.config.foreign_names import OURS
from parallel3d.config.monitors import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from parallel3d.config.parallel3d_block import (
    Parallel3DConfig,
)
from parallel3d.config.scheduler import SCHEDULER


class RunSettings(Section):
    """One ds.json: DeepSpeed's keys with DeepSpeed's meaning, and the "parallel3d" block."""

    refused: ClassVar[Mapping[str, Mapping[str, Refusal]]] = deepspeed_keys.UNUSED
    foreign: ClassVar[Mapping[str, str]] = OURS

    train_batch_size: PositiveCount | None = None
    """Samples per step: micro batch x accumulation x dp. As in DeepSpeed, a size that is not set is
    computed from the others. A run that resumes keeps its batch unless this is set."""
    train_micro_batch_size_per_gpu: PositiveCount | None = None
    """Samples per microbatch, on each data-parallel rank."""
    gradient_accumulation_steps: PositiveCount | None = None
    """Microbatches per step, which pass through the pipeline together."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping."""
    steps_per_print: PositiveCount = 10
    """Steps between progress lines if standard error is not a terminal."""
    wall_clock_breakdown: bool = False
    """Print how a step's time divides up, every steps_per_print steps."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """FLOPs of one step."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Table of one step's communication, by group."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard files in output_path; parallel3d.run.trackers writes them to the run's folder."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """One CSV file per metric."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    comet: CometConfig = CometConfig()
    """Comet."""
    bf16: Bf16Config = Bf16Config()
    """Training in bfloat16; without bf16 and fp16, training is in fp32."""
    fp16: Fp16Config = Fp16Config()
    """Training in fp16 with a loss scale, for devices without bf16."""
    communication_data_type: Literal["fp32", "bf16"] | None = None
    """Precision in which gradients are averaged over dp; null means fp32. "bf16" (bf16 training
    only) halves the traffic; gradients of microbatches, tp ranks and tied weights are still added
    in fp32."""
    aio: AioConfig = AioConfig()
    """Asynchronous I/O for NVMe offload."""
    optimizer: OptimizerConfig = Field(
        examples=[deepspeed.EXAMPLE, "--optimizer.params.lr 3e-4 on the command line"]
    )
    """The optimizer and its parameters."""
    scheduler: Annotated[Any, PlainValidator(SCHEDULER)] = None
    """One of DeepSpeed's learning-rate schedules; replaces parallel3d.train.lr_schedule."""
    zero_optimization: ZeroConfig = ZeroConfig(stage=0)
    """Sharding and offload of the training state; stage 0 if missing, as in DeepSpeed."""
    parallel3d: Parallel3DConfig = Field(examples=[parallel3d_block.EXAMPLE])
    """All settings that are not DeepSpeed's."""

    @property
    def settings(self) -> dict[str, object]:
        """DeepSpeed's settings and those of the "parallel3d" block, in one dictionary."""
        return dict(self) | dict(self.parallel3d)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as one JSON object with all defaults; `from_dict` reads it back."""
        return self.model_dump(mode="json")

    def to_public_dict(self) -> JsonObject:
        """Return the config as `to_dict` does, with the passwords of URLs masked, to be written."""
        return {key: mask_values(value) for key, value in self.to_dict().items()}
