"""A config's open pipeline.weights, "auto"; the planner says what it becomes (report/choose)."""

from parallel3d.config import RunConfig


def leaves_weights_open(config: RunConfig) -> bool:
    """Whether parallel3d.pipeline.weights is "auto" at ZeRO-3, the only stage that uses it."""
    return config.zero_optimization.stage == 3 and config.pipeline.weights == "auto"


def with_weights(config: RunConfig, weights: str, note: str) -> RunConfig:
    """The config with parallel3d.pipeline.weights set, and the note that says so."""
    pipeline = config.pipeline.model_copy(update={"weights": weights})
    block = config.parallel3d.model_copy(update={"pipeline": pipeline})
    return config.model_copy(update={"parallel3d": block}).with_notes(*config.notes, note)
