"""The config that a ladder's runs share, and each run's batch in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Problem, Problems
from parallel3d.models.common import divisor_below


def shared_model(base: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Settings of the model that all sizes share, its vocabulary a number.

    `source` is the ladder's file, for messages. Raises ConfigError where the base has no model or
    no length of a sample, says what is the ladder's to say, or has another thing for a block that
    the ladder writes into.
    """
    block = base.get("parallel3d")
    model = block.get("model") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(model, dict):
        raise ConfigError(f'{source}: base: has no block "parallel3d" with a "model"; write both')
    _refuse_no_objects(base, block, source)
    _refuse_own_length(block, source)
    data = block.get("data")
    seq = data.get("sequence_length") if isinstance(data, dict) else None
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 1:
        rule, remedy = "must be a number of tokens", "write it"
        path = "base.parallel3d.data.sequence_length"
        raise Problems([Problem(path, seq, rule, remedy)], str(source))
    return {**model, "vocab_size": _vocabulary(block, model, source)}


def _refuse_no_objects(base: Mapping[str, Any], block: Mapping[str, Any], source: Path) -> None:
    found = [
        (f"base.parallel3d.{key}", block[key])
        for key in ("train", "checkpoint", "run", "mesh")
        if key in block and not (key == "mesh" and block[key] == "plan")
    ]
    if "optimizer" in base:
        optimizer = base["optimizer"]
        found.append(("base.optimizer", optimizer))
        if isinstance(optimizer, dict) and "params" in optimizer:
            found.append(("base.optimizer.params", optimizer["params"]))
    problems = []
    for path, value in found:
        if not isinstance(value, dict):
            rule = "must be an object" + (', or "plan"' if path.endswith(".mesh") else "")
            problems.append(Problem(path, value, rule, "write {...}, or leave it out"))
    if problems:
        raise Problems(problems, str(source))


def _refuse_own_length(block: Mapping[str, Any], source: Path) -> None:
    train = block.get("train", {})
    for key in ("steps", "max_tokens", "epochs", "lr_schedule", "stop_after"):
        if key in train:
            rule, remedy = "is the ladder's to say", "remove it; see budgets and schedule"
            path = f"base.parallel3d.train.{key}"
            raise Problems([Problem(path, train[key], rule, remedy)], str(source))


def _vocabulary(block: Mapping[str, Any], model: Mapping[str, Any], source: Path) -> int:
    """The vocabulary of all sizes, a number: the model's, else that of the tokenizer to train."""
    size = model.get("vocab_size", "auto")
    if size == "auto":
        data = block.get("data", {})
        own = (
            data.get("tokenizer", "train") in ("train", "none") if isinstance(data, dict) else True
        )
        size = data.get("vocab_size", 4096) if own and isinstance(data, dict) else "auto"
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        rule, remedy = "must be a number, the same for all sizes", "write it"
        path = "base.parallel3d.model.vocab_size"
        raise Problems([Problem(path, size, rule, remedy)], str(source))
    return size


def write_batch(
    raw: dict[str, Any], block: dict[str, Any], *, batch: int, dp: int, rate: float
) -> None:
    """Write the learning rate and the global batch, in microbatches no larger than the base's."""
    micro = raw.pop("train_micro_batch_size_per_gpu", None)
    raw.pop("gradient_accumulation_steps", None)
    raw["train_batch_size"] = batch
    if block.get("mesh") != "plan":
        share = batch // dp
        most = micro if isinstance(micro, int) and micro > 0 else share
        raw["train_micro_batch_size_per_gpu"] = divisor_below(share, min(most, share) + 1)
    optimizer = raw.setdefault("optimizer", {"type": "AdamW", "params": {}})
    optimizer.setdefault("params", {})["lr"] = float(f"{rate:.4g}")


def ranks_of(mesh: Any, devices: int) -> tuple[int, int]:
    """Processes of a mesh, and the number of them that split a batch; 1 where that is planned."""
    if mesh == "plan":
        return devices, 1
    sizes = {axis: mesh.get(axis, 1) for axis in ("pp", "tp")}
    rest = 1
    for size in sizes.values():
        rest *= size if isinstance(size, int) and size > 0 else 1
    dp = mesh.get("dp", "auto")
    if not isinstance(dp, int) or dp < 1:
        dp = max(1, devices // rest)
    return rest * dp, dp
