"""The forwards of this rank's stages alone: no gradients, and no optimizer or its states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from parallel3d.engine import swap
from parallel3d.engine.construction import ModelParallelUnit, swap_folder
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh


class ForwardEngine:
    """Stages of this rank, built with the same `settings`, for evaluation alone.

    Parameters that are cut over dp (ZeRO-3) are gathered layer by layer, by DeepSpeed.
    """

    def __init__(self, stages: nn.Module, settings: EngineSettings, mesh: Mesh) -> None:
        self.settings = settings
        self._run: Any = stages.eval()
        self._deepspeed: Any = None
        self._folder: Path | None = None
        if settings.shards_parameters:
            core.bind_trace_check(mesh.group("dp"), mesh.device)
            first = next(stages.parameters(), None)
            self._folder = swap_folder(first) if isinstance(first, nn.Parameter) else None
            self._deepspeed, *_ = deepspeed.initialize(
                model=stages,
                config=settings.deepspeed_config(mesh.size("dp")),
                mpu=ModelParallelUnit(mesh, "dp"),
                dist_init_required=False,
            )
            self._run = self._deepspeed

    def evaluate(self, stage: int, *inputs: Tensor | None) -> Tensor:
        """Run a stage without dropout and without gradients."""
        with torch.no_grad():
            output: Tensor = self._run(stage, *inputs)
        return output

    def wait_for_weights(self, stage: int) -> None:
        """Wait for nothing: DeepSpeed gathers the weights in the forward."""

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers, and remove its files."""
        if self._deepspeed is not None:
            self._deepspeed.destroy()
        if self._folder is not None:
            swap.remove_folder(self._folder)


def forward_settings(settings: EngineSettings) -> EngineSettings:
    """The engine's settings for stages that are only run forward.

    They are cut over dp where those of the training are, and else whole.
    """
    stage = 3 if settings.shards_parameters else 0
    offload = settings.offload_param if stage == 3 else "none"
    return replace(
        settings, zero_stage=stage, offload_optimizer="none", optimizer_options={},
        offload_param=offload, weights="per_microbatch",
    )  # fmt: skip
