"""Runs every mesh and says how far each is from the reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import models
from parallel3d.config import RunConfig
from parallel3d.errors import ConfigError, TrainingError
from parallel3d.verify.measure import TOLERANCE, Errors, compile_operators, measure
from parallel3d.verify.reference import train_reference
from parallel3d.verify.shrink import Sizes, shrink, why_not

_COLUMNS = ("mesh", "loss", "gradient norm", "weights", "")


def verify(
    config: RunConfig, meshes: Sequence[Sizes], folder: Path, console: Console, chosen: bool
) -> dict[str, Any]:
    """Compare each mesh with the reference, say so line by line, and give the JSON report.

    A mesh on which the config cannot run is left out, with the reason, unless it was `chosen`.
    Raises ConfigError.
    """
    torch.set_num_threads(1)  # tiny products on many threads spend their time waiting
    runnable = []
    for mesh in meshes:
        if reason := why_not(config, mesh):
            if chosen:
                raise ConfigError(f"mesh {_name(mesh)}: {reason}")
            console.print(f"{_name(mesh):<8}not run: {reason}")
        else:
            runnable.append(mesh)
    if not runnable:
        raise ConfigError("none of the meshes can run this config; give others by --meshes")
    small = shrink(config, tuple(runnable), str(folder))
    _print_head(config, small[runnable[0]], console)
    try:
        compile_operators(small[runnable[0]])
    except TrainingError as error:
        raise ConfigError(str(error).rstrip().splitlines()[-1]) from error
    reference = train_reference(small[runnable[0]], folder)
    tolerance = TOLERANCE[config.precision]
    cases = []
    for mesh in runnable:
        raised = ""
        try:
            errors = measure(small[mesh], reference)
        except TrainingError as failure:
            errors, raised = Errors(*[float("inf")] * 3), str(failure)
        passed = errors.within(tolerance)
        cases.append(_case(config, mesh, errors, passed))
        said = "equal" if passed else "DIFFERS"
        numbers = (f"{x:.1e}" for x in (errors.loss, errors.grad_norm, errors.weight))
        console.print(_row(_name(mesh), *numbers, said))
        if raised:
            console.print(raised.rstrip())
    passed = all(case["passed"] for case in cases)
    word = "equal" if passed else "NOT EQUAL"
    console.print(f"{word} to one process, within {tolerance:g}: {len(cases)} meshes")
    return {"passed": passed, "tolerance": tolerance, "cases": cases}


def _print_head(config: RunConfig, small: RunConfig, console: Console) -> None:
    """What is compared with what."""
    model, zero = small.model, config.zero_optimization
    total = sum(layer.num_params for layer in models.layers(model))
    console.print(
        f"{model.family} in small: {total:,} parameters, {model.num_hidden_layers} blocks, "
        f"{model.num_attention_heads} heads; {small.global_batch_size} samples a step, "
        f"{small.train.steps} steps"
    )
    flow = [
        f"schedule {config.pipeline.schedule}, stages a rank {config.pipeline.stages_per_rank}",
        f"activation checkpointing {config.pipeline.activation_checkpointing}",
        *(["sequence parallel"] if config.mesh.sequence_parallel else []),
        *(["documents isolated"] if config.data.isolate_documents else []),
    ]
    state = [
        f"ZeRO-{zero.stage}",
        f"offload {_offload(config)}",
        config.precision,
        f"reduction {config.pipeline.gradient_reduction}",
    ]
    console.print("; ".join(flow))
    console.print("; ".join(state))
    console.print("largest differences from plain transformers on one process:\n")
    console.print(_row(*_COLUMNS))


def _row(*cells: str) -> str:
    return "".join(
        f"{cell:<{width}}" for cell, width in zip(cells, (8, 11, 15, 11, 8), strict=True)
    )


def _case(config: RunConfig, mesh: Sizes, errors: Errors, passed: bool) -> dict[str, Any]:
    zero = config.zero_optimization
    return {
        "mesh": _name(mesh),
        "schedule": config.pipeline.schedule,
        "zero_stage": zero.stage,
        "offload": _offload(config),
        "loss_error": errors.loss,
        "grad_norm_error": errors.grad_norm,
        "weight_error": errors.weight,
        "passed": passed,
    }


def _offload(config: RunConfig) -> str:
    zero = config.zero_optimization
    where = {"optimizer": zero.offload_optimizer.device, "parameters": zero.offload_param.device}
    return ", ".join(f"{k} on {v}" for k, v in where.items() if v != "none") or "none"


def _name(mesh: Sizes) -> str:
    return "x".join(map(str, mesh))
