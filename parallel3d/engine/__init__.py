"""DeepSpeed's forward, backward, step, norm and shards: the only package that imports DeepSpeed."""

import os

import torch

if torch.accelerator.current_accelerator() is None:  # torch was built for CPUs
    # DeepSpeed looks for an accelerator when it is imported, and prints a warning if it has to
    # guess. Where there may be one, mesh/device has already set this variable.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from parallel3d.engine.construction import building, plain_building, writing
from parallel3d.engine.engine import Engine, ForwardEngine, StepResult, forward_settings
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.optimizer_states import ParameterPiece, Update
from parallel3d.engine.reduction import moments
from parallel3d.tensor.cut import HeldParameter

__all__ = [
    "Engine",
    "EngineSettings",
    "ForwardEngine",
    "HeldParameter",
    "ParameterPiece",
    "StepResult",
    "Update",
    "building",
    "forward_settings",
    "moments",
    "plain_building",
    "writing",
]
