"""Settings of a run: frozen, strictly typed, documented under each field, without torch."""

from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.config.document import help_text, settings
from parallel3d.config.parallel3d_block import LrScheduleConfig, MeshConfig, Parallel3DConfig
from parallel3d.config.run import CompleteConfig, ResolvedConfig, RunConfig

__all__ = [
    "CompleteConfig",
    "LrScheduleConfig",
    "MeshConfig",
    "Parallel3DConfig",
    "ResolvedConfig",
    "RunConfig",
    "ZeroConfig",
    "help_text",
    "settings",
]
