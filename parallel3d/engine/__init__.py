"""DeepSpeed's forward, backward, step, norm and shards: the only package that imports DeepSpeed."""

import os

import torch

if torch.accelerator.current_accelerator() is None:  # this build of torch knows of none
    # DeepSpeed asks at its import; without an answer it looks around and prints a warning. Where
    # there may be one, the mesh has told it (mesh/device): an import asks no machine.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from parallel3d.engine.construction import building, writing
from parallel3d.engine.engine import Engine, ForwardEngine, StepResult, forward_settings
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.optimizer_states import KINDS, ParameterPiece
from parallel3d.tensor.cut import HeldParameter

__all__ = [
    "KINDS", "Engine", "EngineSettings", "ForwardEngine", "HeldParameter", "ParameterPiece",
    "StepResult", "building", "forward_settings", "writing",
]  # fmt: skip
