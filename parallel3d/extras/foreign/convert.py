"""Turn a file of another framework into our config, with a row for each of its settings."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.config import document
from parallel3d.extras.foreign import megatron, nanotron, neox
from parallel3d.extras.foreign.rules import Row, Rule, Verdict

# norm, positions, MLP, biases
_FAMILIES = {
    ("layernorm", "learned", "gelu", True): "gpt",
    ("layernorm", "rotary", "gelu", True): "neox",
    ("rmsnorm", "rotary", "swiglu", False): "llama",
}
# Values by name that not every family has: their settings, the others' only value, and the verdict
# if it is another one. No settings: the family has no use for the value.
_OF_FAMILIES: dict[str, tuple[dict[str, Sequence[str]], object, Verdict]] = {
    "@norm_eps": (
        {"gpt": ["layer_norm_epsilon"], "neox": ["layer_norm_eps"], "llama": ["rms_norm_eps"]},
        None,
        "REFUSED",
    ),
    "@layer_norm_eps": (
        {"gpt": ["layer_norm_epsilon"], "neox": ["layer_norm_eps"], "llama": []},
        None,
        "REFUSED",
    ),
    "@rms_norm_eps": ({"gpt": [], "neox": [], "llama": ["rms_norm_eps"]}, None, "REFUSED"),
    "@rope_theta": (
        {"gpt": [], "neox": ["rotary_emb_base"], "llama": ["rope_theta"]},
        None,
        "REFUSED",
    ),
    "@rotary_pct": ({"gpt": [], "neox": ["rotary_pct"]}, 1, "REFUSED"),
    "@no_rope_layers": ({"gpt": [], "llama": ["no_rope_layer_interval"]}, None, "REFUSED"),
    "@parallel_residual": ({"neox": ["use_parallel_residual"]}, False, "REFUSED"),
    "@gelu": ({"neox": ["activation"], "llama": []}, "gelu_fast", "DIFFERS"),
    "@dropout": ({"gpt": ["embd_pdrop", "resid_pdrop"]}, 0, "DIFFERS"),
    "@attention_dropout": ({"gpt": ["attn_pdrop"]}, 0, "DIFFERS"),
}
_UNKNOWN = Rule(why="is not in the table", verdict="UNKNOWN")
_UNREAD = Rule(why="depends on a run of the script", verdict="UNKNOWN")


def convert(paths: Sequence[str]) -> tuple[dict[str, Any], list[Row]]:
    """Return our config for a file of another framework, and a row for each of its settings.

    The config is not checked: `RunConfig.from_dict` does that. Raises ConfigError if a file is none
    of nanotron, GPT-NeoX or Megatron-LM.

    - `paths`: one file, or several YAML files of GPT-NeoX, which belong together.
    """
    framework, settings = _read(paths)
    if not settings.keys() & framework.TABLE.keys():
        raise ConfigError(
            f"{paths[0]}: has no setting of nanotron, GPT-NeoX or Megatron-LM; name another file "
            "(docs/coming-from.md)"
        )
    table = {doc.path: Rule(doc.path) for doc in document.settings()} | framework.TABLE
    rows = []
    values = dict[str, Any]()
    for setting, value in settings.items():
        rule = table.get(setting, _UNKNOWN)
        if type(value) is megatron.Unread and rule.verdict != "dropped":
            rule = _UNREAD
        rows.append(rule.apply(setting, value, "taken", values))
    for setting, value in framework.DEFAULTS.items():
        if settings.get(setting) is None and table[setting].key not in values:
            rows.append(table[setting].apply(setting, value, "assumed", values))
    framework.complete(values)
    for add in (_add_model, _add_schedule, _add_data):
        rows += add(values, "datatrove" if framework is nanotron else "megatron")
    values.setdefault("parallel3d.pipeline.schedule", "one_f_one_b")
    ours = [(path, json.dumps(value)) for path, value in values.items() if path[0] != "@"]
    config: dict[str, Any] = {}
    reader.set_values(config, sorted(ours, key=lambda pair: pair[0].startswith("parallel3d")))
    return config, rows


def _read(paths: Sequence[str]) -> tuple[ModuleType, JsonObject]:
    blocks: JsonObject = {}
    for path in paths:
        text = reader.text_of(Path(path))
        if not path.endswith((".yml", ".yaml")):
            return megatron, megatron.arguments(text)
        blocks |= _block(path, text)
    framework = nanotron if "parallelism" in blocks else neox
    return framework, _flat(blocks, framework.TABLE)


def _block(path: str, text: str) -> JsonObject:
    try:
        block = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}; write valid YAML") from None
    if not isinstance(block, dict):
        raise ConfigError(f"{path}: has no settings; write a block of settings in YAML")
    return block


def _flat(blocks: JsonObject, table: dict[str, Rule], prefix: str = "") -> JsonObject:
    """Return nested settings by dotted path, down to the paths that `table` has.

    GPT-NeoX's hyphens become underscores. Of a list of blocks, the first is taken apart.
    """
    settings: dict[str, Any] = {}
    for key, value in blocks.items():
        path = f"{prefix}{key}".replace("-", "_")
        if path == "data_stages" and isinstance(value, list) and value:
            settings[f"{path}[1:]"] = value[1:] or None
            value = value[0]
        if isinstance(value, dict) and path not in table:
            settings |= _flat(value, table, f"{path}.")
        else:  # YAML 1.1 reads 1e-4 as a text
            settings[path] = reader.value(value) if isinstance(value, str) else value
    return settings


def _add_model(values: dict[str, Any], _: str) -> Iterator[Row]:
    parts: Any = tuple(values.get(name) for name in ("@norm", "@position", "@mlp", "@bias"))
    family = values.get("@family", _FAMILIES.get(parts))
    if family is None:
        yield Row("REFUSED", "the architecture", parts, why="no family has all of it")
        return
    values["parallel3d.model.family"] = family
    for name, (fields, only, verdict) in _OF_FAMILIES.items():
        if family not in fields and values.get(name, only) != only:
            yield Row(verdict, f"{family}'s {name[1:]}", values[name], why=f"is always {only}")
        if name in values:
            values |= {
                f"parallel3d.model.{field}": values[name] for field in fields.get(family, ())
            }
    limit = "parallel3d.model.max_position_embeddings"
    length = values.get("parallel3d.data.sequence_length", 0)
    if family != "gpt" and length > values.get(limit, length):
        values[limit] = length
        yield Row("assumed", "positions", length, limit, "as long as the sequences")


def _add_schedule(values: dict[str, Any], _: str) -> Iterator[Row]:
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "parallel3d.mesh.dp")
    batch = values.get("train_batch_size", prod(values.get(size, 0) for size in sizes))
    for name in ("@steps", "@warmup_steps", "@end"):
        samples = values.get(f"{name} in samples", 0)
        if samples and batch:
            values[name] = samples // batch
        elif samples:
            yield Row("UNKNOWN", f"{name[1:]} in samples", samples, why="of an unknown batch")
    steps = values.get("@steps")
    style = values.get("@style", "constant")
    if steps is None:
        return  # the config's check says that the run has no length
    end = values.get("@end", steps)
    warmup = values.get("@warmup_steps", round(values.get("@warmup_fraction", 0) * end))
    start = values.get("@start", end - values["@last"] if "@last" in values else warmup)
    end = start + values["@decay_steps"] if "@decay_steps" in values else end
    is_late = start > warmup or style in ("1-sqrt", "wsd")
    shape = values.get("@shape", style)
    values |= {"parallel3d.train.steps": steps, "parallel3d.train.lr_schedule.warmup_steps": warmup}
    if style == "constant" or start >= steps:
        return
    values["parallel3d.train.lr_schedule.type"] = "wsd" if is_late else style
    if is_late:
        values["parallel3d.train.lr_schedule.decay_steps"] = min(end, steps) - start
    if is_late and shape != "1-sqrt":
        yield Row("DIFFERS", "shape of the decay", shape, why='that of "wsd" is 1 - sqrt')
    if end != steps:
        yield Row("DIFFERS", "last step of the decay", end, why=f"the run's last, {steps}")
    if lr := values.get("optimizer.params.lr"):
        values["parallel3d.train.lr_schedule.min_ratio"] = round(values.get("@min_lr", lr) / lr, 6)


def _add_data(values: dict[str, Any], token_format: str) -> Iterator[Row]:
    files = values.get("@files", [])
    source = "parallel3d.data.source"
    if len(files) > 1:
        values[source] = "mixture"
        weights = values.get("@weights") or [1] * len(files)
        values["parallel3d.data.mixture"] = [
            {"source": token_format, "paths": [file], "weight": weight}
            for file, weight in zip_longest(files, weights, fillvalue=1)
        ]
    elif files:
        values |= {source: token_format, "parallel3d.data.paths": files}
    elif "parallel3d.data.name" in values:
        values[source] = "hub"
    else:
        values[source] = "python-stdlib"
        yield Row("assumed", "data", "python-stdlib", source, "stands in: the file shows no data")
    kind = values.get("@tokenizer", "train")
    path = str(values.get("@tokenizer_path", ""))
    kinds = {"path": path or "train", "folder": path.rpartition("/")[0] or "."}
    values["parallel3d.data.tokenizer"] = kinds.get(kind, kind)
