"""Settings of a run: frozen, strict, typed, documented under each field, and free of torch."""

from parallel3d.base.explain import SettingDoc
from parallel3d.config.data import DataConfig
from parallel3d.config.deepspeed import (
    AdamParams,
    Bf16Config,
    OffloadOptimizerConfig,
    OptimizerConfig,
    ZeroConfig,
)
from parallel3d.config.document import help_text, settings
from parallel3d.config.parallel3d_block import (
    LrScheduleConfig,
    MeshConfig,
    OutputConfig,
    Parallel3DConfig,
    PipelineConfig,
    TrainConfig,
)
from parallel3d.config.run import RunConfig

__all__ = [
    "AdamParams",
    "Bf16Config",
    "DataConfig",
    "LrScheduleConfig",
    "MeshConfig",
    "OffloadOptimizerConfig",
    "OptimizerConfig",
    "OutputConfig",
    "Parallel3DConfig",
    "PipelineConfig",
    "RunConfig",
    "SettingDoc",
    "TrainConfig",
    "ZeroConfig",
    "help_text",
    "settings",
]
