"""Every setting of a config that differs from its default, and how far verify proves it.

A setting is proved if the small runs have its own value, act by it, and a mistake in it changes
what is compared: tests/verify/test_settings.py plants mistakes. A setting that is in no table here
is listed as not proved.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from parallel3d.base.masking import mask_values
from parallel3d.base.section import Section
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.verify.schedule import schedule_of

PROVED = "proved"
ELSEWHERE = "tested elsewhere"
NOT_PROVED = "not proved"
_LONGEST_VALUE = 48  # characters


class Feature(NamedTuple):
    """A feature of a config and how far it is proved.

    `test` is the path in the repository of the test that has it if `verify` has not.
    """

    name: str
    state: str
    test: str = ""


# Settings that the small runs keep, by their path or the block that they are in. A mistake in one
# changes losses, norms, weights, or what else is compared.
_KEPT = {
    "bf16.enabled",
    "fp16.enabled",
    "optimizer.type",
    "optimizer.params.betas",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "pipeline.schedule",
    "pipeline.stages_per_rank",
    "pipeline.gradient_reduction",
    "pipeline.weights",
    "pipeline.activation_checkpointing",
    "pipeline.offload_activations",
    "mesh.sequence_parallel",
    "data.isolate_documents",
    "data.balance_microbatches",
    "checkpoint.asynchronous",
}
_OPTIMIZER = {"momentum", "nesterov", "ns_steps", "scale", "per_head", "clip"}
_SCHEDULE = {"type", "warmup_steps", "min_ratio", "decay_steps"}
# A longer path goes before the block that it is in.
_TESTS = {
    "aio": "tests/engine/test_offload.py",
    "checkpoint": "tests/train/test_resume.py",
    "checkpoint.at": "tests/checkpoint/test_manifest.py",
    "checkpoint.in_memory_every": "tests/checkpoint/test_in_memory.py",
    "checkpoint.keep": "tests/checkpoint/test_manifest.py",
    "comet": "tests/train/test_trackers.py",
    "comms_logger": "tests/train/test_profiler.py",
    "communication_data_type": "tests/engine/test_communication_type.py",
    "csv_monitor": "tests/train/test_trackers.py",
    "data.cache": "tests/data/test_cache.py",
    "data.fim": "tests/data/test_fim.py",
    "data.held_out_fraction": "tests/data/test_split.py",
    "data.name": "tests/data/test_hub.py",
    "data.packing": "tests/verify/test_packing.py",
    "data.paths": "tests/data/test_sources.py",
    "data.source": "tests/data/test_sources.py",
    "data.split": "tests/data/test_hub.py",
    "data.stream": "tests/data/test_streams.py",
    "data.subset": "tests/data/test_hub.py",
    "data.text_field": "tests/data/test_rows.py",
    "data.tokenizer": "tests/data/test_tokenizer.py",
    "data.validation": "tests/data/test_validation.py",
    "flops_profiler": "tests/train/test_profiler.py",
    "fp16": "tests/engine/test_fp16.py",
    "run": "tests/train/test_claim.py",
    "run.hardware": "tests/train/test_peak_flops.py",
    "run.published": "tests/huggingface/test_beside.py",
    "run.save_weights": "tests/huggingface/test_from_ranks.py",
    "run.tensorboard": "tests/train/test_trackers.py",
    "run.trackers": "tests/train/test_trackers.py",
    "scheduler": "tests/config/test_learning_rates.py",
    "tensorboard": "tests/train/test_trackers.py",
    "train.batch_lr": "tests/config/test_batch_schedule.py",
    "train.batch_schedule": "tests/train/test_batch_phases.py",
    "train.check_bits": "tests/train/test_check_bits.py",
    "train.deterministic": "tests/train/test_deterministic.py",
    "train.evaluate_every": "tests/train/test_evaluation.py",
    "train.evaluate_samples": "tests/train/test_evaluation.py",
    "train.max_skips": "tests/train/test_bad_steps.py",
    "train.noise_scale_every": "tests/train/test_gradient_noise.py",
    "train.on_nonfinite": "tests/train/test_bad_steps.py",
    "train.on_spike": "tests/train/test_bad_steps.py",
    "train.profile": "tests/train/test_profiler.py",
    "train.spike_score": "tests/train/test_bad_steps.py",
    "train.stop_after": "tests/train/test_stopping.py",
    "wandb": "tests/train/test_trackers.py",
    "wall_clock_breakdown": "tests/train/test_profiler.py",
    "zero_optimization.contiguous_gradients": "tests/engine/test_zero_stages.py",
}


def listed_settings(
    config: RunConfig, small: CompleteConfig, idle: Collection[str]
) -> Iterator[Feature]:
    """Yield a feature for each setting of a config that is not its default.

    - `small`: the config that verify trains in its place.
    - `idle`: the paths of settings that change nothing there (idle.py).
    """
    for path, value in changed_settings(config):
        name = path.removeprefix("parallel3d.")
        text = str(mask_values(value))
        if len(text) > _LONGEST_VALUE:
            text = f"{text[: _LONGEST_VALUE - 3]}..."
        if path.endswith("api_key"):
            text = "***"
        state = PROVED
        test = ""
        if path in idle or not is_proved(name, path, config, small):
            test = _test_of(name)
            state = ELSEWHERE if test else NOT_PROVED
        yield Feature(f"{name} = {text}", state, test)


def is_proved(name: str, path: str, config: RunConfig, small: CompleteConfig) -> bool:
    """Return True if verify's runs have a setting, and see a mistake in it unless it is idle there.

    - `name`: the setting without "parallel3d.", `path`: with it.
    """
    block, _, key = name.rpartition(".")
    if name == "zero_optimization.overlap_comm":
        # Only without shards is a gradient reduced while others are still computed.
        return bool(config.zero_optimization.overlap_comm) and small.zero_optimization.stage == 0
    if block == "model.parametrization":
        return acts(small) and key not in ("base_width", "base_head_size", "base_depth")
    if block == "train.lr_schedule" and config.scheduler is None:
        # The rates are those of the config's own schedule at its own length.
        own = getattr(schedule_of(config, small).train.lr_schedule, key)
        return key in _SCHEDULE and bool(own == getattr(config.train.lr_schedule, key))
    if block == "model" or (block == "optimizer.params" and key in _OPTIMIZER):
        if key == "family":
            return True
        return bool(value_at(small, path) == value_at(config, path))
    return name in _KEPT and value_at(small, path) == value_at(config, path)


def acts(small: CompleteConfig) -> bool:
    """Return True if the small model is not its own base, where muP changes nothing."""
    mup = getattr(small.model, "parametrization", None)
    if mup is None or mup.type != "mup":
        return False
    return bool(mup.base_width != small.model.hidden_size)


def value_at(section: Any, path: str) -> Any:
    """Return the value at a path into sections; None where one of them is missing."""
    for key in path.split("."):
        section = getattr(section, key, None)
    return section


def changed_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of the settings that differ from their default, or have none."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, Section):
            yield from changed_settings(value, f"{prefix}{key}.")
        elif default is PydanticUndefined or value != default:
            yield f"{prefix}{key}", value


def _test_of(name: str) -> str:
    """Return the test of a setting, or of the block that it is in; "" if none is known."""
    while name:
        if name in _TESTS:
            return _TESTS[name]
        name = name.rpartition(".")[0]
    return ""
