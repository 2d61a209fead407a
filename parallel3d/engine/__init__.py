"""All of DeepSpeed: forward, backward, step, norm, shards (the only package that imports it)."""

from parallel3d.engine.engine import Engine, StepResult, building
from parallel3d.engine.parameters import HeldParameter
from parallel3d.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "HeldParameter", "StepResult", "building"]
