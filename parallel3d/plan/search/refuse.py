"""Refusals of a request that cannot be planned, with what to ask instead."""

from difflib import get_close_matches
from typing import Any

from parallel3d.base.section import Problem, Problems
from parallel3d.plan.search.candidates import (
    DEVICES,
    RECOMPUTES,
    WEIGHTS,
    MeshSizes,
    flows,
    meshes,
    orders,
    problem_of,
)
from parallel3d.plan.search.plans import CHOICES, Request
from parallel3d.schedule import schedules


def refuse_empty(request: Request) -> None:
    """Raise ConfigError if the request has no possible mesh, or no schedule on any mesh."""
    possible = [flow for mesh in meshes(request) for flow in flows(request, mesh)]
    if any(orders(request, flow) for flow in possible):
        return
    fixed, devices = request.fixed, request.devices
    asked = ", ".join(f"{name}={value}" for name, value in fixed.items())
    mesh = MeshSizes(fixed.get("pp", 1), fixed.get("dp", 1), fixed.get("tp", 1))
    size = mesh.pp * mesh.dp * mesh.tp
    if possible:
        rule, remedy = f"no schedule can be run with {asked}", "fix less, or something else"
    elif devices % size:
        rule = f"{asked} is a mesh of {size} ranks or a multiple, which {devices} devices are not"
        remedy = f"use a number of devices that {size} divides, or fix less"
    elif size == devices and (problem := problem_of(request, mesh)):
        rule, remedy = f"{problem.path} = {problem.value}: {problem.rule}", problem.remedy
    else:
        rule = (
            f"no mesh of {devices} devices divides the model's heads and layers and "
            f"{request.global_batch_size} samples a step" + (f" with {asked}" if asked else "")
        )
        remedy = "use another number of devices or another train_batch_size" + (
            ", or fix less" if asked else ""
        )
    raise Problems([Problem("--devices", devices, rule, remedy)], "the plan")


def check_fixed(fixed: dict[str, Any]) -> None:
    """Raise ConfigError for a fixed choice that is not one of the planner's choices."""
    allowed: dict[str, tuple[Any, ...]] = {
        "schedule": schedules.names(),
        "recompute": RECOMPUTES,
        "zero_stage": (0, 1, 2, 3),
        "gradient_reduction": ("auto", "per_step", "per_microbatch"),
        "weights": ("auto", *WEIGHTS),
        "offload_optimizer": DEVICES,
        "offload_param": DEVICES,
        "sequence_parallel": (True, False),
    }
    problems = []
    for name, value in fixed.items():
        path = f"--fix {name}"
        if name not in CHOICES:
            known = ", ".join(CHOICES)
            near = get_close_matches(name, CHOICES, n=1)
            remedy = f'the nearest one is "{near[0]}"' if near else f"use {known}"
            problems.append(Problem(path, value, "is no choice of the planner", remedy))
        elif name in allowed and not any(_same(value, choice) for choice in allowed[name]):
            words = ", ".join(str(choice).lower() for choice in allowed[name])
            problems.append(Problem(path, value, "is not one of its values", f"use {words}"))
        elif name not in allowed and (type(value) is not int or value < 1):
            problems.append(Problem(path, value, "must be a whole number", "use 1 or more"))
    if problems:
        raise Problems(problems, "the plan")


def _same(value: Any, choice: Any) -> bool:
    """Whether two values are equal and of one type: 1, 1.0 and true are not."""
    return type(value) is type(choice) and bool(value == choice)
