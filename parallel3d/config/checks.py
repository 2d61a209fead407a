"""Rules between several settings of a config.

A check's parameters name the settings that it compares; it runs if all of them are valid.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import signature

from parallel3d.base.section import Problem
from parallel3d.config import deepspeed_checks, mesh_checks, train_checks
from parallel3d.config.model_checks import MODEL_CHECKS
from parallel3d.config.parallel3d_block import PLAN

_signature = cache(signature)  # the planner checks thousands of meshes


def find_problems(settings: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each rule that the settings break.

    - `settings`: valid settings of both blocks by name, such as "mesh" and "bf16".
    """
    problems: list[Problem] = []
    settings = {**settings, "is_planned": settings.get("mesh") == PLAN}
    if settings["is_planned"]:
        del settings["mesh"]  # checks of the mesh wait until it is planned
    for check in CHECKS:
        names = _signature(check).parameters
        if settings.keys() >= names.keys():
            problems += check(**{name: settings[name] for name in names})
    return problems


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    *MODEL_CHECKS,
    mesh_checks.check_layers,
    mesh_checks.check_schedule,
    mesh_checks.check_reduction,
    train_checks.check_noise_scale,
    train_checks.check_tasks,
    train_checks.check_compile,
    train_checks.check_recomputation,
    train_checks.check_rewind,
    train_checks.check_batch,
    mesh_checks.check_copies,
    mesh_checks.check_fallbacks,
    mesh_checks.check_plan,
    train_checks.check_length,
    train_checks.check_batch_schedule,
    train_checks.check_batch_sizes,
    train_checks.check_lr_schedule,
    train_checks.check_scheduler,
    train_checks.check_profile,
    deepspeed_checks.check_precision,
    deepspeed_checks.check_communication_type,
    deepspeed_checks.check_offload,
    deepspeed_checks.check_nvme,
    deepspeed_checks.check_optimizer,
)
