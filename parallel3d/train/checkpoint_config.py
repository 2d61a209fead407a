"""The config of an evaluation: a checkpoint's own, or another file's, for the launched ranks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel3d.base import reader
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.checkpoint.manifest import STATE, read_state
from parallel3d.config import RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.mesh.launch import Launch


def checkpoint_in(path: Path) -> Path:
    """The folder of the checkpoint at a path: the path itself, or the newest of a run.

    Raises CheckpointError where there is none, and for a folder of transformers.
    """
    try:
        return find_checkpoints(path)[0]
    except CheckpointError:
        if any(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path}: is a model's folder without a checkpoint, of which evaluate.py reads "
                "none; give the run that it came from, or one of its checkpoints"
            ) from None
        raise


def evaluation_config(
    checkpoint: Path,
    launch: Launch,
    *,
    file: str | None = None,
    overrides: Sequence[str] = (),
    samples: int | None = None,
) -> RunConfig:
    """Return the unresolved config by which a checkpoint is evaluated.

    It is that of its run, or of `file`, with `overrides`; `samples` replaces
    train.evaluate_samples. One process is a mesh of 1 x 1 x 1; for a run's own config dp takes what
    pp and tp leave. Raises ConfigError, also for another model.
    """
    theirs = read_state(checkpoint).get("config")
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{checkpoint / STATE}: has no config; use another checkpoint")
    raw = reader.read(reader.find(file)) if file else json.loads(json.dumps(theirs))
    mesh = _mesh_of(raw)
    apply_overrides(raw, overrides)
    asked = {axis for axis, size in _mesh_of(raw).items() if size != mesh.get(axis)}
    _place(raw, launch.world_size, asked, is_theirs=file is None)
    if samples is not None:
        reader.set_values(raw, [("parallel3d.train.evaluate_samples", str(samples))])
    config = RunConfig.from_dict(raw, file or str(checkpoint / STATE))
    trained = RunConfig.from_dict(theirs, str(checkpoint / STATE))
    for name, there, here in _differing(trained.model, config.model):
        raise ConfigError(
            f"parallel3d.model.{name} = {json.dumps(here)}: {checkpoint} was trained with "
            f"{json.dumps(there)}; "
            "give the model as it was trained, or leave --config out"
        )
    return config


def _mesh_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The block of the mesh; an empty one where it is "plan", or wrong, which is said later."""
    block = raw.get("parallel3d")
    mesh = block.get("mesh") if isinstance(block, dict) else None
    return dict(mesh) if isinstance(mesh, dict) else {}


def _place(raw: dict[str, Any], world_size: int, asked: set[str], is_theirs: bool) -> None:
    """Set the mesh of `raw` for so many ranks, but for the axes that the command line has set."""
    mesh, block = _mesh_of(raw), raw.get("parallel3d")
    if not mesh or not isinstance(block, dict):
        return
    changed: dict[str, Any] = {}
    if world_size == 1:
        changed = {"pp": 1, "dp": "auto", "tp": 1}
        pipeline = block.get("pipeline")
        if isinstance(pipeline, dict) and "pp" not in asked:
            # Which stages there are on one rank changes nothing.
            block["pipeline"] = pipeline | {"schedule": "gpipe", "stages_per_rank": 1}
    elif is_theirs:
        changed = {"dp": "auto"}
    changed = {axis: size for axis, size in changed.items() if axis not in asked}
    block["mesh"] = mesh | changed
    given = [raw.get(n) for n in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    if "dp" in changed and all(isinstance(number, int) for number in given):
        raw.pop("train_batch_size", None)  # it may be for another dp


def _differing(trained: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each setting of the model that may change its numbers: name, theirs, ours, as in JSON."""
    theirs, mine = (model.model_dump(mode="json") for model in (trained, ours))
    for name in mine if trained.family == ours.family else ("family",):
        # Where weights begin and what is dropped is training's; a corpus says what "auto" is.
        is_trainings = name in ("from_pretrained", "initializer_range") or name.endswith("_pdrop")
        if not is_trainings and mine[name] not in (theirs[name], "auto"):
            yield name, theirs[name], mine[name]
