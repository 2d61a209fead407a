"""The config of an evaluation: the checkpoint's own or another file, on the launched ranks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel3d.base import reader
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.manifest import STATE, read_state
from parallel3d.config import RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.mesh.launch import Launch
from parallel3d.model.config import ModelConfig

_MESH = "parallel3d.mesh"


def evaluation_config(
    checkpoint: Path,
    launch: Launch,
    *,
    file: str | None = None,
    overrides: Sequence[str] = (),
    samples: int | None = None,
) -> RunConfig:
    """Return the unresolved config for evaluating a checkpoint.

    It is the config of the checkpoint's run, or `file` if given, with `overrides` applied;
    `samples` replaces train.evaluate_samples. On one process the mesh is 1 x 1 x 1. With the run's
    own config dp takes the ranks that the other axes leave. Raises ConfigError for a wrong setting,
    and if the model differs from the trained one.
    """
    own_config = read_state(checkpoint).get("config")
    if not isinstance(own_config, dict):
        raise CheckpointError(f"{checkpoint / STATE}: has no config; use another checkpoint")
    raw = reader.read(reader.find(file)) if file else json.loads(json.dumps(own_config))
    mesh = dict(reader.block_at(raw, _MESH))
    apply_overrides(raw, overrides)
    changed = {axis for axis, size in reader.block_at(raw, _MESH).items() if size != mesh.get(axis)}
    _place(raw, launch.world_size, overridden_axes=changed, is_own_config=file is None)
    if samples is not None:
        reader.set_values(raw, [("parallel3d.train.evaluate_samples", str(samples))])
    config = RunConfig.from_dict(raw, file or str(checkpoint / STATE))
    trained = RunConfig.from_dict(own_config, str(checkpoint / STATE))
    for name, there, here in _differing(trained.model, config.model):
        raise ConfigError(
            f"parallel3d.model.{name} = {json.dumps(here)}: {checkpoint} was trained with "
            f"{json.dumps(there)}; use the model as it was trained, or leave out --config"
        )
    return config


def _place(
    raw: dict[str, Any], world_size: int, overridden_axes: set[str], is_own_config: bool
) -> None:
    """Set the mesh of `raw` for `world_size` ranks, except `overridden_axes`."""
    mesh, block = reader.block_at(raw, _MESH), reader.block_at(raw, "parallel3d")
    if not mesh:  # "plan", or invalid, which is reported later
        return
    changed: dict[str, Any] = {}
    if world_size == 1:
        changed = {"pp": 1, "dp": "auto", "cp": 1, "tp": 1, "ep": 1}
        pipeline = block.get("pipeline")
        if isinstance(pipeline, dict) and "pp" not in overridden_axes:
            # On one rank the schedule and the stages do not change the numbers.
            block["pipeline"] = pipeline | {"schedule": "gpipe", "stages_per_rank": 1}
    elif is_own_config:
        changed = {"dp": "auto"}
    changed = {axis: size for axis, size in changed.items() if axis not in overridden_axes}
    block["mesh"] = mesh | changed
    if isinstance(train := block.get("train"), dict):  # an evaluation has one batch size
        train |= {"batch_schedule": [], "batch_lr": "none"}
    batch_sizes = [
        raw.get(n) for n in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    if "dp" in changed and all(isinstance(number, int) for number in batch_sizes):
        raw.pop("train_batch_size", None)  # it may belong to another dp


def _differing(
    trained: ModelConfig, evaluated: ModelConfig
) -> Iterator[tuple[str, object, object]]:
    """Yield each differing model setting that can change results: name, trained, evaluated."""
    trained_values, evaluated_values = (
        model.model_dump(mode="json") for model in (trained, evaluated)
    )
    for name in evaluated_values if trained.family == evaluated.family else ("family",):
        # Initialisation and dropout affect training only; the corpus decides what "auto" means.
        is_trainings = name in ("from_pretrained", "initializer_range") or name.endswith("_pdrop")
        if not is_trainings and evaluated_values[name] not in (trained_values[name], "auto"):
            yield name, trained_values[name], evaluated_values[name]
