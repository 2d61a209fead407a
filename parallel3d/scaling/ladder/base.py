"""The config that a ladder's runs share, and each run's batch in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Problem, Problems
from parallel3d.models.common import divisor_below

_OWN = ("steps", "max_tokens", "epochs", "lr_schedule", "stop_after")  # a ladder says these itself


def shared_model(base: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return settings of the model that all sizes share, its vocabulary a number.

    `source` is the ladder's file, for messages. Raises ConfigError where the base has no model or
    no length of a sample, has settings that are the ladder's, or has something else than a block
    where the ladder writes into one.
    """
    block = base.get("parallel3d")
    model = block.get("model") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(model, dict):
        raise ConfigError(f'{source}: base: has no block "parallel3d" with a "model"; write both')
    if found := list(_no_objects(base, block)):
        raise Problems(found, str(source))
    data, train = block.get("data"), block.get("train", {})
    data = data if isinstance(data, dict) else {}
    found = [
        Problem(
            f"base.parallel3d.train.{key}", train[key], "is the ladder's to say",
            "remove it; see budgets and schedule",
        )
        for key in _OWN
        if key in train
    ]  # fmt: skip
    own_tokenizer = data.get("tokenizer", "train") in ("train", "none")
    vocab = model.get("vocab_size", "auto")
    if vocab == "auto" and own_tokenizer:  # that of the tokenizer to train
        vocab = data.get("vocab_size", 4096)
    for path, value, rule in (
        ("data.sequence_length", data.get("sequence_length"), "must be a number of tokens"),
        ("model.vocab_size", vocab, "must be a number, the same for all sizes"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found.append(Problem(f"base.parallel3d.{path}", value, rule, "write it"))
    if found:
        raise Problems(found, str(source))
    return {**model, "vocab_size": vocab}


def _no_objects(base: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[Problem]:
    blocks = {key: block.get(key, {}) for key in ("train", "checkpoint", "run", "mesh")}
    found = {f"base.parallel3d.{key}": value for key, value in blocks.items()}
    found["base.optimizer"] = optimizer = base.get("optimizer", {})
    if isinstance(optimizer, dict):
        found["base.optimizer.params"] = optimizer.get("params", {})
    for path, value in found.items():
        is_mesh = path.endswith(".mesh")
        if not isinstance(value, dict) and not (is_mesh and value == "plan"):
            rule = 'must be an object, or "plan"' if is_mesh else "must be an object"
            yield Problem(path, value, rule, "write {...}, or leave it out")


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
    """Return the processes of a mesh, and how many of them split a batch; 1 where it is planned."""
    if mesh == "plan":
        return devices, 1
    pp, dp, tp = (mesh.get(axis, "auto") for axis in ("pp", "dp", "tp"))
    rest = 1
    for size in (pp, tp):
        rest *= size if isinstance(size, int) and size > 0 else 1
    if not isinstance(dp, int) or dp < 1:
        dp = max(1, devices // rest)
    return rest * dp, dp
