"""A list of what a run of verify proves about a config, and what it does not look at."""

from typing import NamedTuple

from parallel3d.config import RunConfig
from parallel3d.config.data import weight_changes
from parallel3d.model.parametrization import parametrization_of
from parallel3d.models.common import pretrained_of
from parallel3d.verify.shrink import LONG, drops_out

PROVED, ELSEWHERE, NOT_PROVED = "proved", "tested elsewhere", "not proved"


class Feature(NamedTuple):
    """A feature of a config and how far it is proved.

    `test` is the path in the repository of the test that has it if `verify` has not.
    """

    name: str
    state: str
    test: str = ""


def features(config: RunConfig) -> tuple[Feature, ...]:
    """Return the features of a config, in the order of their settings."""
    pipeline, zero, data, model = (
        config.pipeline,
        config.zero_optimization,
        config.data,
        config.model,
    )
    mup = parametrization_of(model).type != "standard"
    parts = data.mixture if data.source == "mixture" else (data,)
    changes = any(len(weight_changes(part)) > 1 for part in parts)
    weighs = any(part.label_field or part.weight_field for part in parts)
    devices = (zero.offload_optimizer.device, zero.offload_param.device)
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
            config.optimizer.file == "muon",
            "optimizer.params.coefficients",
            "tests/config/test_muon.py",
        ),
        (config.gradient_clipping, "gradient_clipping", ""),
        (not config.scheduler, f"train.lr_schedule.type = {config.train.lr_schedule.type}", ""),
        (config.scheduler, "scheduler", "tests/config/test_learning_rates.py"),
        (config.precision == "fp16", "a growing loss scale", ""),
        (config.precision == "fp16", "a step that overflows", "tests/engine/test_fp16.py"),
        (True, f"model.family = {model.family}", ""),
        (True, "mean and standard deviation of first weights", ""),
        (mup, "model.parametrization", ""),
        (drops_out(config), "where dropout's masks agree and differ", ""),
        (drops_out(config), "dropout's scale", "tests/tensor/test_dropout.py"),
        (drops_out(config), "dropout's probabilities", "tests/models/test_model.py"),
        (
            any(
                getattr(model, name, 0)
                for name in ("router_aux_loss_coef", "router_z_loss_coef", "score_bias_rate")
            ),
            "losses and biases that balance experts",
            "tests/models/test_moe.py",
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
        (config.train.batch_schedule, "train.batch_schedule", "tests/train/test_batch_phases.py"),
        (True, "order of samples, labels", ""),
        (data.fim, "data.fim", "tests/data/test_fim.py"),
        (data.isolate_documents, "data.isolate_documents", ""),
        (data.balance_microbatches, "data.balance_microbatches", ""),
        (data.packing != "none", f"data.packing = {data.packing}", "tests/verify/test_packing.py"),
        (data.source == "mixture", "shares of data.mixture", ""),
        (changes, "weights of data.mixture that change", "tests/data/test_mixing.py"),
        (weighs, "labels that count unequally", ""),
        (True, f"reading data.source = {data.source}", "tests/data/test_sources.py"),
        (True, "held-out losses", "tests/train/test_evaluation.py"),
        (True, "a resume, on another mesh if several are run", ""),
        (config.train.compile != "none", f"train.compile = {config.train.compile}", ""),
        (True, "export", "tests/huggingface/test_export.py"),
        (True, "kernels of a GPU", "tests/gpu/test_numbers.py"),
    )
    listed = [Feature(n, ELSEWHERE if test else PROVED, test) for has, n, test in rows if has]
    size = f"the model's own width, and samples of more than {LONG.sequence_length} tokens"
    return *listed, Feature(size, NOT_PROVED)


def summary(config: RunConfig) -> str:
    """Return the features as text: those that are proved in one line, a line for each other."""
    listed = features(config)
    lines = [f"{PROVED}: " + "; ".join(f.name for f in listed if f.state == PROVED)]
    for name, state, test in listed:
        if state != PROVED:
            lines.append(f"{state}: {name}" + (f" ({test})" if test else ""))
    return "\n".join(lines)
