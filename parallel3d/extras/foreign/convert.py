"""Turn a file of another framework into our config, with a row for each of its settings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import Problems
from parallel3d.config import RunConfig, document
from parallel3d.extras.foreign import copies, megatron, nanotron, neox, trainer
from parallel3d.extras.foreign.rules import Row, Rule, Verdict
from parallel3d.models import earlier

_MODEL = "parallel3d.model"
_FAMILY = f"{_MODEL}.family"
_LR_SCHEDULE = "parallel3d.train.lr_schedule"
_INTERVAL = "no_rope_layer_interval"
# norm, positions, MLP, biases; "neox" has become the family "transformers" (models/earlier.py)
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
    "@no_rope_layers": ({"gpt": [], "llama": [_INTERVAL]}, None, "REFUSED"),
    "@parallel_residual": ({"neox": ["use_parallel_residual"]}, False, "REFUSED"),
    "@gelu": ({"neox": ["activation"], "llama": []}, "gelu_fast", "DIFFERS"),
    "@dropout": ({"gpt": ["embd_pdrop", "resid_pdrop"]}, 0, "DIFFERS"),
    "@attention_dropout": ({"gpt": ["attn_pdrop"]}, 0, "DIFFERS"),
}
_STAND_IN = {
    "family": "gpt",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 2**20,
}
# Settings that a Trainer has not, though others of the framework have the names of Trainer's.
_OF_MEGATRON = {"num-layers", "global-batch-size", "tensor-model-parallel-size"}
_OF_NEOX = {"num_layers", "pipe_parallel_size", "model_parallel_size", "pos_emb"}
_UNKNOWN = Rule(why="is not in the table", verdict="UNKNOWN")
_UNREAD = Rule(why="depends on a run of the script", verdict="UNKNOWN")


def convert(paths: Sequence[str]) -> tuple[dict[str, Any], list[Row]]:
    """Return our config for a file of another framework, and a row for each of its settings.

    The config is not checked: `RunConfig.from_dict` does that. Raises ConfigError if a file is none
    of nanotron, GPT-NeoX, Megatron-LM or Hugging Face's Trainer.

    - `paths`: one file, or several that belong together: YAML files of GPT-NeoX, or a Trainer's
      arguments and their DeepSpeed file.
    """
    framework, settings = _read(paths)
    if not settings.keys() & framework.TABLE.keys():
        raise ConfigError(
            f"{paths[0]}: has no setting of nanotron, GPT-NeoX, Megatron-LM or Hugging Face's "
            "Trainer; name another file (docs/coming-from.md)"
        )
    table = {doc.path: Rule(doc.path) for doc in document.settings()} | framework.TABLE
    if framework is trainer:
        table |= trainer.overruled(settings)
    rows = []
    values = dict[str, Any]()
    for setting, value in settings.items():
        rule = table.get(setting) or copies.rule_of(setting) or _UNKNOWN
        if type(value) is megatron.Unread and rule.verdict != "dropped":
            rule = _UNREAD
        rows.append(rule.apply(setting, value, "taken", values))
    for setting, value in framework.DEFAULTS.items():
        if settings.get(setting) is None and table[setting].key not in values:
            rows.append(table[setting].apply(setting, value, "assumed", values))
    framework.complete(values)
    for add in (_add_model, _add_schedule, _add_data, copies.add):
        rows += add(values, "datatrove" if framework is nanotron else "megatron")
    values.setdefault("parallel3d.pipeline.schedule", "one_f_one_b")
    ours = [(path, json.dumps(value)) for path, value in values.items() if path[0] != "@"]
    config: dict[str, Any] = {}
    reader.set_values(config, sorted(ours, key=lambda pair: pair[0].startswith("parallel3d")))
    if values.get(_FAMILY) == "neox":
        with suppress(Problems):  # the config's check says what is missing
            config["parallel3d"]["model"], _ = earlier.translated(config["parallel3d"]["model"])
        rows = [row._replace(path=_in_config(row.path, earlier.FIELDS)) for row in rows]
    elif f"{_MODEL}.{_INTERVAL}" in values:
        block = config["parallel3d"]["model"]
        config["parallel3d"]["model"] = _smollm3(block)
        rows = [
            row._replace(path=_in_config(row.path, dict(zip(block, block, strict=True))))
            for row in rows
        ]
    return config, rows


def _in_config(path: str, names: Mapping[str, str]) -> str:
    """Return where a setting of the model is in the family of any decoder."""
    section, _, name = path.rpartition(".")
    if section != _MODEL or name not in names or name in ("family", "vocab_size"):
        return path
    return f"{_MODEL}.config.{names[name]}"


def _smollm3(block: dict[str, Any]) -> dict[str, Any]:
    """Return a "model" block of the family "llama" with layers without positions as SmolLM3's."""
    hidden = block.get("hidden_size", 0)
    config = {
        "model_type": "smollm3",
        "num_key_value_heads": block.get("num_attention_heads"),
        "intermediate_size": -(-8 * hidden // (3 * 256)) * 256,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    } | {name: value for name, value in block.items() if name not in ("family", "vocab_size")}
    kept = {"vocab_size": block["vocab_size"]} if "vocab_size" in block else {}
    return {"family": "transformers", "config": config} | kept


def check(config: JsonObject, path: str) -> list[str]:
    """Check a converted config; return the settings that only the run can read.

    A model on the hub needs the network: the rest is checked with another one in its place.

    - `path`: the file it comes from, for messages.
    """
    name = reader.value_at(config, f"{_MODEL}.from_pretrained")
    unread = []
    if isinstance(name, str) and not Path(name).expanduser().is_dir():
        unread = [f"{_MODEL}.from_pretrained = {name}"]
        block = reader.block_at(config, "parallel3d") | {"model": _STAND_IN}
        config = config | {"parallel3d": block}
    RunConfig.from_dict(config, source=f"the config of {path}")
    return unread


def _read(paths: Sequence[str]) -> tuple[ModuleType, JsonObject]:
    """Return the framework that the files belong to, and their settings by dotted path."""
    blocks: JsonObject = {}
    for path in paths:
        text = reader.text_of(Path(path))
        suffix = Path(path).suffix
        if suffix in (".yml", ".yaml"):
            blocks |= _block(path, text)
        elif suffix == ".json" or text.lstrip().startswith("{"):
            blocks = _joined(blocks, reader.parse(text, path), path)
        elif suffix == ".py":
            blocks |= trainer.call_arguments(text, path)
        else:
            arguments = megatron.arguments(text)
            named = {name.replace("-", "_"): value for name, value in arguments.items()}
            if not trainer.is_trainers(named) or arguments.keys() & _OF_MEGATRON:
                return megatron, arguments
            blocks |= named
    if "parallelism" in blocks:
        return nanotron, _flat(blocks, nanotron.TABLE)
    names = {name.replace("-", "_") for name in blocks}
    if trainer.is_trainers(dict.fromkeys(names)) and not names & _OF_NEOX:
        return trainer, _flat(trainer.with_deepspeed(blocks, paths), trainer.TABLE)
    _refuse_ours(paths[0], blocks)
    return neox, _flat(blocks, neox.TABLE)


def _joined(blocks: JsonObject, more: JsonObject, path: str) -> JsonObject:
    """Return the settings of two files, such as a DeepSpeed file's and a Trainer's arguments.

    Raises ConfigError if one has two values; "auto" takes the other's. A block of DeepSpeed whose
    name is also an argument, such as bf16, stands beside it by the paths of its settings.
    """
    blocks_beside: JsonObject = {}
    first = {**blocks}
    second = {**more}
    for name in blocks.keys() & more.keys():
        for own, others in ((first, more), (second, blocks)):
            if isinstance(own[name], dict) and not isinstance(others[name], dict):
                blocks_beside |= reader.flat({name: own.pop(name)})
    joined = blocks_beside | first  # the arguments complete them
    for name, value in second.items():
        other = joined.get(name, "auto")
        if "auto" not in (value, other) and value != other:
            raise ConfigError(
                f"{path}: {name} = {value!r}, where the file before has {other!r}; make them "
                'equal, or write "auto" in the DeepSpeed file'
            )
        if name not in joined or value != "auto":
            joined[name] = value
    return joined


def _refuse_ours(path: str, blocks: JsonObject) -> None:
    """Raise ConfigError if a file is a config of parallel3d already, or of DeepSpeed alone."""
    if "parallel3d" in blocks:
        raise ConfigError(
            f"{path}: is a config of parallel3d; run it: deepspeed launch/train.py --config {path}"
        )
    deepspeeds = {doc.path.split(".")[0] for doc in document.settings()}
    names = {name.replace("-", "_") for name in blocks}
    if names & neox.TABLE.keys() or not names & deepspeeds:
        return
    block = {
        "model": {"from_pretrained": "FOLDER or owner/name"},
        "data": {"source": "jsonl", "paths": ["FILES"], "sequence_length": 1024},
        "train": {"steps": 1000},
    }
    raise ConfigError(
        f"{path}: is a DeepSpeed config, which parallel3d reads as it is; add a block to it, "
        f'"parallel3d": {json.dumps(block)}, with your model, data and length (docs/config.md), '
        "and run it: deepspeed launch/train.py --config "
        f"{path}. If it belongs to a Trainer, name the Trainer's arguments beside it"
    )


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
    if f"{_MODEL}.from_pretrained" in values or f"{_MODEL}.config" in values:
        yield from _add_length(values)  # the model's own config.json has the sizes
        return
    parts: Any = tuple(values.get(name) for name in ("@norm", "@position", "@mlp", "@bias"))
    family = values.get("@family", _FAMILIES.get(parts))
    if family is None and not any(parts):
        why = "the file names none; add model_name_or_path, a folder or a name on the hub"
        yield Row("REFUSED", "the model", None, why=why)
        return
    if family is None:
        yield Row("REFUSED", "the architecture", parts, why="no family has all of it")
        return
    values[_FAMILY] = family
    if family == "neox":
        why = "start with initializer_range, as transformers' GPT-NeoX does, not with less"
        yield Row("DIFFERS", "weights before the residual", "scaled by depth", why=why)
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


def _add_length(values: dict[str, Any]) -> Iterator[Row]:
    """Assume the length of a Trainer's samples as run_clm.py does: 1,024, or what the model has."""
    path = "parallel3d.data.sequence_length"
    if path in values:
        return
    settings = values.get(f"{_MODEL}.config", {})
    file = Path(str(values.get(f"{_MODEL}.from_pretrained", ""))).expanduser() / "config.json"
    if file.is_file():
        settings = reader.read(file)
    most = settings.get("max_position_embeddings", settings.get("n_positions", 1024))
    values[path] = min(1024, most) if isinstance(most, int) else 1024
    yield Row("assumed", "block_size", values[path], path, "as run_clm.py does")


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
        yield from _add_schedule_of_epochs(values, style)
        return
    end = values.get("@end", steps)
    warmup = values.get("@warmup_steps", round(values.get("@warmup_fraction", 0) * end))
    start = values.get("@start", end - values["@last"] if "@last" in values else warmup)
    end = start + values["@decay_steps"] if "@decay_steps" in values else end
    is_late = start > warmup or style in ("1-sqrt", "wsd")
    shape = values.get("@shape", style)
    values |= {"parallel3d.train.steps": steps, "parallel3d.train.lr_schedule.warmup_steps": warmup}
    if style == "constant" or start >= steps:
        return
    _set_decay(values, "wsd" if is_late else style)
    if is_late:
        values["parallel3d.train.lr_schedule.decay_steps"] = min(end, steps) - start
    if is_late and shape != "1-sqrt":
        yield Row("DIFFERS", "shape of the decay", shape, why='that of "wsd" is 1 - sqrt')
    if end != steps:
        yield Row("DIFFERS", "last step of the decay", end, why=f"the run's last, {steps}")


def _set_decay(values: dict[str, Any], style: str) -> None:
    """Set the type of the schedule, and its last rate relative to the peak, if that is known."""
    values[f"{_LR_SCHEDULE}.type"] = style
    rate = values.get("optimizer.params.lr")
    if isinstance(rate, int | float) and rate:
        values[f"{_LR_SCHEDULE}.min_ratio"] = round(values.get("@min_lr", rate) / rate, 6)


def _add_schedule_of_epochs(values: dict[str, Any], style: str) -> Iterator[Row]:
    """Add the schedule of a run whose steps are known once its text is tokenized.

    A run without a length is left to the config's check.
    """
    if "parallel3d.train.epochs" not in values:
        return
    if "@warmup_steps" in values:
        values[f"{_LR_SCHEDULE}.warmup_steps"] = values["@warmup_steps"]
    elif fraction := values.get("@warmup_fraction"):
        why = f"a fraction of unknown steps; set {_LR_SCHEDULE}.warmup_steps"
        yield Row("DIFFERS", "warm-up", fraction, why=why)
    if style != "constant":
        _set_decay(values, style)


def _add_data(values: dict[str, Any], token_format: str) -> Iterator[Row]:
    files = values.get("@files", [])
    source = "parallel3d.data.source"
    if source in values:
        pass  # a Trainer's files
    elif len(files) > 1:
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
