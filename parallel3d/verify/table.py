"""The report of verify: run every mesh and print its differences from the reference."""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from rich.console import Console

from parallel3d import models
from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.reader import JsonObject
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.data import weighs_tokens, weight_changes
from parallel3d.models.common import pretrained_of
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.idle import idle_settings
from parallel3d.verify.measure import (
    TOLERANCE,
    ReferenceErrors,
    Tolerance,
    compile_operators,
)
from parallel3d.verify.reference import prepare, prepare_long
from parallel3d.verify.settings import (
    ELSEWHERE,
    NOT_PROVED,
    PROVED,
    Feature,
    acts,
    listed_settings,
)
from parallel3d.verify.shrink import EXACT, LONG, drops_out, in_fp32, resuming_pair, shrink, why_not

STATES = (PROVED, ELSEWHERE, NOT_PROVED)


def features(
    config: RunConfig, small: CompleteConfig, idle: Collection[str] = ()
) -> tuple[Feature, ...]:
    """Return the features of a config in the order of their settings, and each changed setting.

    - `small`: the config that is trained in its place on the first mesh.
    - `idle`: the paths of settings that change nothing there.
    """
    pipeline = config.pipeline
    data = config.data
    model = config.model
    zero = config.zero_optimization
    train = config.train
    bits = config.train.check_bits
    parts = data.mixture if data.source == "mixture" else (data,)
    changes = any(len(weight_changes(part)) > 1 for part in parts)
    weighs = any(map(weighs_tokens, parts))
    devices = (zero.offload_optimizer.device, zero.offload_param.device)
    balancing = ("router_aux_loss_coef", "router_z_loss_coef", "score_bias_rate")
    skips = train.on_nonfinite != "stop" or train.on_spike != "ignore"
    # Whether the config has it, its name, and the test that has it if it is not proved here.
    rows: tuple[tuple[object, str, str], ...] = (
        (True, f"pipeline.schedule = {pipeline.schedule}", ""),
        (True, f"pipeline.weights = {pipeline.weights}", ""),
        (True, f"activation_checkpointing = {pipeline.activation_checkpointing}", ""),
        (pipeline.offload_activations != "none", "offload_activations", ""),
        (True, f"ZeRO stage {zero.stage}", ""),
        (devices != ("none", "none"), f"offload to {', '.join(devices)}", ""),
        (True, f"precision {config.precision}", ""),
        (getattr(config.optimizer.params, "weight_decay", 0), "which parameters decay", ""),
        (
            config.optimizer.type == "muon",
            "optimizer.params.coefficients",
            "tests/config/test_muon.py",
        ),
        (config.gradient_clipping, "gradient_clipping", ""),
        (not config.scheduler, f"train.lr_schedule.type = {train.lr_schedule.type}", ""),
        (config.scheduler, "scheduler", "tests/config/test_learning_rates.py"),
        (config.precision == "fp16", "a growing loss scale", ""),
        (config.precision == "fp16", "a step that overflows", "tests/engine/test_fp16.py"),
        (True, f"model.family = {model.family}", ""),
        (
            True,
            "mean and standard deviation of first weights",
            "tests/models/test_recorded_initial_values.py"
            if model.family == "transformers"
            else "",
        ),
        (acts(small), "model.parametrization", ""),
        (drops_out(config), "where dropout's masks agree and differ", ""),
        (drops_out(config), "dropout's scale", "tests/tensor/test_dropout.py"),
        (drops_out(config), "dropout's probabilities", "tests/models/test_model.py"),
        (
            any(getattr(model, name, 0) for name in balancing),
            "losses and biases that balance experts",
            "tests/pipeline/test_experts.py",
        ),
        (
            pretrained_of(model),
            "import of model.from_pretrained",
            "tests/huggingface/test_import.py",
        ),
        (config.mesh.sequence_parallel, "mesh.sequence_parallel", ""),
        (config.mesh.ep > 1, f"mesh.ep = {config.mesh.ep}", ""),
        (
            config.mesh.cp > 1,
            f"mesh.cp = {config.mesh.cp} (or name such a mesh by --meshes)",
            "tests/verify/test_parity.py",
        ),
        (train.batch_schedule, "train.batch_schedule", "tests/train/test_batch_phases.py"),
        (
            train.batch_schedule,
            "losses and gradients of steps of other sizes",
            "tests/pipeline/test_changing_microbatches.py",
        ),
        (
            train.batch_lr != "none",
            f"train.batch_lr = {train.batch_lr}",
            "tests/config/test_batch_schedule.py",
        ),
        (skips, "batches that are left out", "tests/train/test_bad_steps.py"),
        (True, "loss, norm, rate, step and tokens in metrics.jsonl", ""),
        (True, "order of samples, labels", ""),
        (data.fim, "data.fim", "tests/data/test_fim.py"),
        (data.isolate_documents, "data.isolate_documents", ""),
        (data.balance_microbatches, "data.balance_microbatches", ""),
        (data.packing != "none", f"data.packing = {data.packing}", "tests/verify/test_packing.py"),
        (data.source == "mixture", "shares of data.mixture", ""),
        (changes, "weights of data.mixture that change", "tests/data/test_mixing.py"),
        (weighs, "labels that count unequally", ""),
        (True, f"reading data.source = {data.source}", "tests/data/test_sources.py"),
        (True, "held-out losses", ""),
        (
            True,
            "losses of validation sets and of a mixture's parts, standard errors",
            "tests/train/test_evaluation.py",
        ),
        (True, "bits per byte", "tests/data/test_evaluation.py"),
        (True, "a resume, on another mesh if several are run", ""),
        (config.checkpoint.asynchronous, "saves while training goes on", ""),
        (
            config.checkpoint.in_memory_every,
            "checkpoint.in_memory_every",
            "tests/checkpoint/test_in_memory.py",
        ),
        (bits.every or bits.recompute_every, "train.check_bits", "tests/train/test_check_bits.py"),
        (train.noise_scale_every, "train.noise_scale_every", "tests/train/test_gradient_noise.py"),
        (train.compile not in ("auto", "none"), f"train.compile = {train.compile}", ""),
        (True, "weights saved at the end", "tests/huggingface/test_from_ranks.py"),
        (True, "export", "tests/huggingface/test_export.py"),
        (True, "kernels of a GPU", "tests/gpu/test_numbers.py"),
    )
    listed = []
    for is_used, name, test in rows:
        if is_used:
            listed.append(Feature(name, ELSEWHERE if test else PROVED, test))
    size = f"the model's own width, and samples of more than {LONG.sequence_length} tokens"
    names = {feature.name for feature in listed}
    settings = [x for x in listed_settings(config, small, idle) if x.name not in names]
    return *listed, Feature(size, NOT_PROVED), *settings


def summary(listed: Sequence[Feature]) -> str:
    """Return the features as text: a line for those proved, for each test, and for the rest."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, state, test in listed:
        names.setdefault((state, test), []).append(name)
    lines = []
    for state, test in sorted(names, key=lambda key: (STATES.index(key[0]), key[1])):
        where = f" ({test})" if test else ""
        lines.append(f"{state}: {'; '.join(names[state, test])}{where}")
    return "\n".join(lines)


LONG_TASK = CaseTask()
EXACT_TASK = CaseTask()
"""A run of a config of half precision in fp32, where rounding hides no mistake."""
_COLUMNS = ("mesh", "loss", "gradient norm", "weights", "evaluation", "")


def verify(
    config: RunConfig, meshes: Sequence[MeshSizes], folder: Path, console: Console, chosen: bool
) -> JsonObject:
    """Compare each mesh with the reference, print a line for each, and return the JSON report.

    A mesh that cannot run the config is skipped with the reason; if it was `chosen` by the user,
    ConfigError is raised. Raises ConfigError, too, if no mesh is left.
    """
    torch.set_num_threads(1)  # more threads slow such small products down
    runnable = []
    for mesh in meshes:
        reason = why_not(config, mesh)
        if reason:
            if chosen:
                raise ConfigError(f"mesh {mesh}: {reason}")
            console.print(f"{mesh!s:<16}not run: {reason}")
        else:
            runnable.append(mesh)
    if not runnable:
        raise ConfigError("none of the meshes can run this config; choose others with --meshes")
    first = shrink(config, tuple(runnable), str(folder))[runnable[0]]
    model = first.model
    console.print(
        f"small {model.family} model: {models.num_params(model):,} parameters, "
        f"{model.num_hidden_layers} blocks, {model.num_attention_heads} heads; "
        f"{first.global_batch_size} samples a step, {first.train.steps} steps\n"
        "Largest differences from plain transformers in one process:\n"
    )
    console.print(_row(*_COLUMNS))
    try:
        compile_operators(first)
    except TrainingError as error:
        raise ConfigError(str(error).rstrip().splitlines()[-1]) from error
    small, reference = prepare(config, runnable, folder)
    drops = drops_out(config)
    tolerance = max(reference.tolerances.values(), default=TOLERANCE[config.precision])
    saved, resumed = resuming_pair(runnable)
    tasks = [
        (mesh, CaseTask(saves=folder if mesh == saved else None, drops=drops)) for mesh in runnable
    ]
    tasks.append((resumed, CaseTask(resumes=folder)))
    tasks.append((min(runnable, key=lambda mesh: (mesh.tp == 1, mesh.ranks)), LONG_TASK))
    exact = config
    exact_small = small
    exact_reference = reference
    meshes_in_fp32: list[MeshSizes] = []
    if config.precision != "fp32":
        exact = in_fp32(config)
        with_most_axes = max(runnable, key=lambda mesh: (sum(n > 1 for n in mesh), mesh.ranks))
        meshes_in_fp32 = list(dict.fromkeys([runnable[0], with_most_axes]))
        (folder / "fp32").mkdir(exist_ok=True)
        exact_small, exact_reference = prepare(exact, meshes_in_fp32, folder / "fp32", EXACT)
        tasks += [(mesh, EXACT_TASK) for mesh in meshes_in_fp32]
    cases: list[JsonObject] = []
    counters: JsonObject | None = None
    for mesh, task in tasks:
        raised = ""
        run = small[mesh]
        right = reference
        known = counters
        if task is LONG_TASK:
            run, right = prepare_long(config, mesh, folder)
            known = None
        elif task is EXACT_TASK:
            run = exact_small[mesh]
            right = exact_reference
            known = None
        try:
            errors, ended = checked(run, right, task, counters=known)
            counters = ended if task.saves else counters
        except TrainingError as failure:
            errors = ReferenceErrors(*[float("inf")] * 3)
            raised = str(failure)
        bounds = right.tolerances or TOLERANCE["fp32"]
        cases.append(
            _case(config, mesh, errors, bounds)
            | {
                "resumed_from": str(saved) if task.resumes else None,
                "sequence_length": run.data.sequence_length,
                "precision": run.precision,
                "error": raised or None,
            }
        )
        beyond = ", ".join(errors.beyond(bounds))
        verdict = f"DIFFERS ({beyond})" if beyond else "equal"
        if raised:
            verdict = "FAILED"
        numbers = (errors.loss, errors.grad_norm, errors.weight, errors.evaluation)
        shown = f"{saved} > {mesh}" if task.resumes else str(mesh)
        if task is LONG_TASK:
            shown += " long"
        elif task is EXACT_TASK:
            shown += " fp32"
        console.print(_row(shown, *(f"{x:.1e}" for x in numbers), verdict))
        if raised:
            console.print(raised.rstrip())
    meshes_in_words = "1 mesh" if len(runnable) == 1 else f"{len(runnable)} meshes"
    compared = {
        config.precision: f"{meshes_in_words}, a run saved on {saved} and resumed on "
        f"{resumed}, and a step of {LONG.sequence_length} tokens with ids up to "
        f"{LONG.vocab_size:,}"
    }
    if meshes_in_fp32:
        compared["fp32"] = " and ".join(map(str, meshes_in_fp32))
    for precision, what in compared.items():
        is_equal = all(case["passed"] for case in cases if case["precision"] == precision)
        bound = tolerance if precision == config.precision else TOLERANCE["fp32"]
        console.print(
            f"{'equal' if is_equal else 'NOT EQUAL'} to one process in {precision}, within "
            f"{bound:.1g}: {what}"
        )
    passed = all(case["passed"] for case in cases)
    idle = idle_settings(exact, exact_small[runnable[0]], exact_reference, folder)
    listed = features(config, small[runnable[0]], idle)
    console.print(summary(listed))
    return {
        "passed": passed,
        "tolerance": tolerance,
        "cases": cases,
        "features": [feature._asdict() for feature in listed],
    }


def _row(*cells: str) -> str:
    return "".join(
        f"{cell:<{width}}" for cell, width in zip(cells, (16, 11, 15, 11, 12, 8), strict=True)
    )


def _case(
    config: RunConfig,
    mesh: MeshSizes,
    errors: ReferenceErrors,
    tolerance: Tolerance,
) -> JsonObject:
    return {
        "mesh": str(mesh),
        "schedule": config.pipeline.schedule,
        "zero_stage": config.zero_optimization.stage,
        "offload": _offload(config),
        "loss_error": errors.loss,
        "grad_norm_error": errors.grad_norm,
        "weight_error": errors.weight,
        "passed": errors.within(tolerance),
        "beyond": errors.beyond(tolerance),
    }


def _offload(config: RunConfig) -> str:
    zero = config.zero_optimization
    where = {"optimizer": zero.offload_optimizer.device, "parameters": zero.offload_param.device}
    return ", ".join(f"{k} on {v}" for k, v in where.items() if v != "none") or "none"
