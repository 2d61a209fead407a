"""A list of what a run of verify proves about a config, and what it does not look at."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from parallel3d.config import RunConfig
from parallel3d.verify.shrink import LONG, drops_out

State = Literal["proved", "tested elsewhere", "not proved"]


class Feature(NamedTuple):
    """A feature of a config: its settings, whether it is proved, and the test that has it if not.

    `test` is a path in the repository; "" if the feature is proved or nothing tests it.
    """

    name: str
    state: State
    test: str = ""


def features(config: RunConfig) -> tuple[Feature, ...]:
    """Return the features of a config, in the order of their settings."""
    return tuple(_features(config))


def summary(config: RunConfig) -> str:
    """Return the features as text: a line for each state, and one for each test."""
    listed = features(config)
    proved = [feature.name for feature in listed if feature.state == "proved"]
    lines = ["proved: " + "; ".join(proved)]
    for feature in listed:
        if feature.state != "proved":
            where = f" ({feature.test})" if feature.test else ""
            lines.append(f"{feature.state}: {feature.name}{where}")
    return "\n".join(lines)


def _features(config: RunConfig) -> Iterator[Feature]:
    pipeline, zero, data, train = (
        config.pipeline,
        config.zero_optimization,
        config.data,
        config.train,
    )
    yield Feature(f"pipeline.schedule = {pipeline.schedule}", "proved")
    yield Feature(f"pipeline.weights = {pipeline.weights}", "proved")
    yield Feature(
        f"pipeline.activation_checkpointing = {pipeline.activation_checkpointing}", "proved"
    )
    yield Feature(f"zero_optimization.stage = {zero.stage}", "proved")
    for name in ("offload_optimizer", "offload_param"):
        if (device := getattr(zero, name).device) != "none":
            yield Feature(f"zero_optimization.{name} = {device}", "proved")
    yield Feature(f"precision {config.precision}", "proved")
    yield from _optimizer(config)
    yield Feature(f"model.family = {config.model.family}", "proved")
    yield Feature("first weights, by mean and standard deviation", "proved")
    if drops_out(config):
        yield Feature("dropout: masks that differ and agree where they must", "proved")
        yield Feature("dropout: its scale", "tested elsewhere", "tests/tensor/test_dropout.py")
    parametrization: Any = getattr(config.model, "parametrization", None)
    if parametrization is not None and parametrization.type != "standard":
        yield Feature(f"model.parametrization.type = {parametrization.type}", "proved")
    if getattr(config.model, "from_pretrained", None) is not None:
        test = "tests/huggingface/test_import.py"
        yield Feature("model.from_pretrained: the import", "tested elsewhere", test)
    if config.mesh.sequence_parallel:
        yield Feature("mesh.sequence_parallel", "proved")
    yield Feature("data: order of samples, labels", "proved")
    if data.isolate_documents:
        yield Feature("data.isolate_documents", "proved")
    if data.source == "mixture":
        yield Feature("data.mixture: its shares", "proved")
    parts = data.mixture if data.source == "mixture" else (data,)
    if any(part.label_field or part.weight_field for part in parts):
        yield Feature("data: tokens that count unequally", "proved")
    source = f"data.source = {data.source}: reading it"
    yield Feature(source, "tested elsewhere", "tests/data/test_sources.py")
    yield Feature("held-out losses", "tested elsewhere", "tests/train/test_evaluation.py")
    yield Feature("checkpoint: a resume on another mesh", "proved")
    if train.compile != "none":
        yield Feature(f"train.compile = {train.compile}", "proved")
    yield Feature("export", "tested elsewhere", "tests/huggingface/test_export.py")
    size = f"more than {LONG.sequence_length} tokens in a sample, {LONG.vocab_size:,} ids"
    yield Feature(f"sizes: {size}, or the model's own width", "not proved")
    yield Feature("kernels and streams of a GPU", "tested elsewhere", "tests/gpu/test_numbers.py")


def _optimizer(config: RunConfig) -> Iterator[Feature]:
    if config.optimizer.params.weight_decay:
        yield Feature("optimizer: which parameters decay", "proved")
    if config.gradient_clipping:
        yield Feature("gradient_clipping", "proved")
    if config.scheduler is not None:
        test = "tests/config/test_learning_rates.py"
        yield Feature(f"scheduler.type = {config.scheduler.type}", "tested elsewhere", test)
    else:
        yield Feature(f"train.lr_schedule.type = {config.train.lr_schedule.type}", "proved")
    if config.precision == "fp16":
        test = "tests/engine/test_fp16.py"
        yield Feature("fp16: a growing loss scale", "proved")
        yield Feature("fp16: a step that overflows", "tested elsewhere", test)
