"""Arguments of Hugging Face's Trainer: JSON, YAML, the Python call, or a script's command line.

The names are those of transformers' `TrainingArguments` and of its examples' `run_clm.py`
(`ModelArguments`, `DataTrainingArguments`); a DeepSpeed file beside them keeps its settings.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.extras.foreign.megatron import Unread
from parallel3d.extras.foreign.rules import Rule, dropped, missing, renamed

_LR_SCHEDULE = "parallel3d.train.lr_schedule"
_DATA = "parallel3d.data"
_MODEL = "parallel3d.model"
_SOURCES = {".txt": "text", ".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
_SWITCH: dict[object, object] = {True: True, False: False}
_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "optimizer", "scheduler"}
# Classes of arguments whose names do not end with "TrainingArguments".
_CALLS = ("SFTConfig", "CPTConfig", "ModelArguments", "DataTrainingArguments")


def _stage_of_fsdp(words: object) -> int:
    names = " ".join(words) if isinstance(words, list) else str(words)
    stages = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0}
    return next(stages[name] for name in names.split() if name in stages)


def _pairs(text: str) -> dict[str, object]:
    """Return the fields of `config_overrides`: "n_embd=10,resid_pdrop=0.2"."""
    pairs = dict(pair.split("=", 1) for pair in text.split(","))
    return {name.strip(): _number(value.strip()) for name, value in pairs.items()}


def _number(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)


def _trackers(names: object) -> list[str]:
    given = [names] if isinstance(names, str) else list(names)  # type: ignore[call-overload]
    known = ("tensorboard", "wandb", "comet_ml", "mlflow")
    return [name for name in given if name in known]


TABLE: dict[str, Rule] = {
    # Batch and length
    **renamed(
        """
        per_device_train_batch_size  train_micro_batch_size_per_gpu
        per_gpu_train_batch_size     train_micro_batch_size_per_gpu
        gradient_accumulation_steps  gradient_accumulation_steps
        num_train_epochs             parallel3d.train.epochs
        """
    ),
    "max_steps": Rule("parallel3d.train.steps@steps", plain=(-1,)),
    **missing("auto_find_batch_size", "the batch is fixed; see parallel3d plan", False),
    # The optimizer
    **renamed(
        """
        learning_rate                        optimizer.params.lr
        weight_decay                         optimizer.params.weight_decay
        adam_beta1                           optimizer.params.betas@beta1
        adam_beta2                           optimizer.params.betas@beta2
        adam_epsilon                         optimizer.params.eps
        max_grad_norm                        gradient_clipping
        warmup_steps                         parallel3d.train.lr_schedule.warmup_steps@warmup
        warmup_ratio                         parallel3d.train.lr_schedule.warmup_steps@warmup_ratio
        lr_scheduler_kwargs.min_lr           parallel3d.train.lr_schedule.min_ratio@min_lr
        lr_scheduler_kwargs.min_lr_rate      parallel3d.train.lr_schedule.min_ratio@min_lr_rate
        lr_scheduler_kwargs.min_lr_ratio     parallel3d.train.lr_schedule.min_ratio@min_lr_rate
        lr_scheduler_kwargs.num_decay_steps  parallel3d.train.lr_schedule.decay_steps@last
        lr_scheduler_kwargs.decay_type       parallel3d.train.lr_schedule.type@shape
        """
    ),
    **missing(
        "optim",
        "AdamW and Muon are the optimizers",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "adamw_apex_fused",
        "adamw",
    ),
    **missing("optim_args optim_target_modules adafactor", "belong to another optimizer", False),
    "lr_scheduler_type": Rule(
        f"{_LR_SCHEDULE}.type@style",
        {
            "linear": "linear",
            "cosine": "cosine",
            "cosine_with_min_lr": "cosine",
            "constant": "constant",
            "constant_with_warmup": "constant",
            "warmup_stable_decay": "wsd",
        },
        why='is none of "constant", "linear", "cosine" and "wsd"',
    ),
    # Precision and memory
    "bf16": Rule("bf16.enabled", _SWITCH),
    "fp16": Rule("fp16.enabled", _SWITCH),
    "tf32": Rule("parallel3d.train.tf32", _SWITCH),
    "gradient_checkpointing": Rule(
        "parallel3d.pipeline.activation_checkpointing", {True: "full", False: "none"}
    ),
    "activation_offloading": Rule(
        "parallel3d.pipeline.offload_activations", {True: "cpu"}, plain=(False,)
    ),
    "torch_compile": Rule("parallel3d.train.compile", {True: "block"}, plain=(False,)),
    "fsdp": Rule(
        "zero_optimization.stage",
        _stage_of_fsdp,
        plain=("", False),
        why="is none of full_shard and shard_grad_op; set zero_optimization.stage",
    ),
    **missing("label_smoothing_factor", "the loss is plain cross-entropy", 0, verdict="REFUSED"),
    **missing("neftune_noise_alpha", "embeddings get no noise"),
    **missing("group_by_length", "documents are packed into sequences of one length", False),
    **missing("use_peft lora_r lora_alpha lora_target", "all weights train", False),
    **missing("finetuning_type", "all weights train", "full"),
    **missing("load_in_4bit load_in_8bit quantization_bit", "weights train unquantized", False),
    # The model and its data
    **renamed(
        """
        model_name_or_path   parallel3d.model.from_pretrained
        model_type           parallel3d.model.config@model_type
        tokenizer_name       parallel3d.data.tokenizer@tokenizer_path
        block_size           parallel3d.data.sequence_length
        max_seq_length       parallel3d.data.sequence_length
        max_length           parallel3d.data.sequence_length
        model_max_length     parallel3d.data.sequence_length
        cutoff_len           parallel3d.data.sequence_length
        dataset_name         parallel3d.data.name
        dataset_config_name  parallel3d.data.subset
        dataset_config       parallel3d.data.subset
        dataset_train_split  parallel3d.data.split
        text_column_name     parallel3d.data.text_field
        dataset_text_field   parallel3d.data.text_field
        train_file           parallel3d.data.paths@train_file
        seed                 parallel3d.train.seed
        """
    ),
    "model_revision": Rule(f"{_MODEL}.from_pretrained@revision", plain=("main",)),
    "config_overrides": Rule(f"{_MODEL}.config@overrides", _pairs),
    **missing("config_name", f"write its config.json as {_MODEL}.config, with family transformers"),
    **missing("validation_file", f"see {_DATA}.validation"),
    "validation_split_percentage": Rule(
        f"{_DATA}.held_out_fraction", lambda percent: float(percent) / 100
    ),
    **missing("packing", "documents are packed into sequences", True),
    **missing("max_train_samples", "set parallel3d.train.max_tokens"),
    **missing("data_seed", "train.seed orders the samples"),
    # Evaluation, checkpoints and output
    **renamed(
        """
        eval_steps     parallel3d.train.evaluate_every@eval_steps
        save_steps     parallel3d.checkpoint.every@save_steps
        logging_steps  steps_per_print@logging_steps
        output_dir     parallel3d.run.directory
        run_name       parallel3d.run.name
        """
    ),
    "eval_strategy": Rule(
        "parallel3d.train.evaluate_every@eval_strategy",
        {"steps": "steps", "no": "no"},
        why="set parallel3d.train.evaluate_every in steps",
    ),
    "save_strategy": Rule(
        "parallel3d.checkpoint.every@save_strategy",
        {"steps": "steps", "no": "no"},
        why="set parallel3d.checkpoint.every in steps",
    ),
    "save_total_limit": Rule("parallel3d.checkpoint.keep", lambda number: max(2, number)),
    "report_to": Rule("parallel3d.run.trackers", _trackers),
    "deepspeed": Rule(why="its settings are in the config", verdict="dropped"),
}
TABLE["evaluation_strategy"] = TABLE["eval_strategy"]
TABLE |= {
    **missing(
        "metric_for_best_model load_best_model_at_end",
        "checkpoints are kept by step (parallel3d.checkpoint.keep)",
        False,
    ),
    **missing("push_to_hub", "upload the run's weights/ by huggingface_hub", False),
    **dropped(
        "do_train do_eval do_predict overwrite_output_dir overwrite_cache resume_from_checkpoint "
        "ignore_data_skip save_only_model save_safetensors save_on_each_node "
        "restore_callback_states_from_checkpoint",
        "a run trains, evaluates and resumes by itself",
    ),
    **dropped(
        "logging_dir logging_strategy logging_first_step logging_nan_inf_filter log_level "
        "log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen "
        "include_tokens_per_second skip_memory_metrics report_tokens plot_loss trackio_space_id "
        "project",
        "see steps_per_print and run.trackers",
    ),
    **dropped(
        "per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps eval_delay "
        "eval_on_start prediction_loss_only max_eval_samples batch_eval_metrics "
        "eval_do_concat_batches include_for_metrics include_inputs_for_metrics "
        "dataset_test_split bf16_full_eval fp16_full_eval keep_linebreaks",
        "see parallel3d.train.evaluate_every and evaluate_samples",
    ),
    **dropped(
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last "
        "dataloader_persistent_workers dataloader_prefetch_factor preprocessing_num_workers "
        "dataset_num_proc remove_unused_columns label_names length_column_name "
        "accelerator_config use_fast_tokenizer cache_dir eos_token pad_token padding_free "
        "packing_strategy eval_packing streaming token use_auth_token low_cpu_mem_usage "
        "use_cache train_sampling_strategy",
        "text is tokenized once, packed and shuffled (docs/data.md)",
    ),
    **dropped(
        "no_cuda use_cpu use_mps_device use_ipex jit_mode_eval local_rank ddp_backend "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_timeout "
        "tpu_num_cores tpu_metrics_debug debug mp_parameters fsdp_config fsdp_min_num_params "
        "fsdp_transformer_layer_cls_to_wrap half_precision_backend fp16_backend fp16_opt_level "
        "torch_compile_backend torch_compile_mode torchdynamo torch_empty_cache_steps "
        "use_liger_kernel liger_kernel_config gradient_checkpointing_kwargs full_determinism "
        "attn_implementation torch_dtype dtype parallelism_config average_tokens_across_devices "
        "past_index model_init_kwargs flash_attn enable_liger_kernel",
        "the device and the mesh decide",
    ),
    **dropped(
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token hub_model_id "
        "hub_strategy hub_token hub_private_repo hub_always_push hub_revision greater_is_better",
        "belong to settings that have no counterpart",
    ),
    **missing("trust_remote_code", "code from a hub never runs", False),
    **dropped(
        "num_gpus num_nodes nproc_per_node nnodes node_rank master_addr master_port include "
        "exclude hostfile rdzv_backend rdzv_endpoint rdzv_id standalone config_file num_processes "
        "num_machines machine_rank main_process_port main_process_ip mixed_precision",
        "the launcher's",
    ),
}
DEFAULTS: JsonObject = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "save_steps": 500,
}


def is_trainers(settings: Mapping[str, object]) -> bool:
    """Return True if some settings have names that Trainer has and a DeepSpeed file has not."""
    return bool(settings.keys() & (TABLE.keys() - {"gradient_accumulation_steps", "bf16", "fp16"}))


def call_arguments(text: str, path: str) -> JsonObject:
    """Return the keywords of the calls of `TrainingArguments` and its kin in a Python file.

    The file is parsed, not run: a value that is no literal, and no name of one, is `Unread`. The
    names of the model and the data set of `from_pretrained` and `load_dataset` are read, too.

    - `text`: the file, or the bare call.
    - `path`: its name, for messages.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not Python: {error}; name another file") from None
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
    arguments: JsonObject = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        positional = [_literal(value, names) for value in node.args]
        if called.endswith("TrainingArguments") or called in _CALLS:
            for keyword in node.keywords:
                if keyword.arg:
                    arguments[keyword.arg] = _literal(keyword.value, names)
            if positional:
                arguments.setdefault("output_dir", positional[0])
        elif called == "from_pretrained" and positional:
            is_tokenizer = "Tokenizer" in ast.unparse(node.func)
            arguments.setdefault(
                "tokenizer_name" if is_tokenizer else "model_name_or_path", positional[0]
            )
        elif called == "load_dataset" and positional:
            arguments.setdefault("dataset_name", positional[0])
            if positional[1:]:
                arguments.setdefault("dataset_config_name", positional[1])
    return arguments


def _literal(node: ast.expr, names: Mapping[str, ast.expr]) -> object:
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unread(ast.unparse(node))


def with_deepspeed(blocks: JsonObject, paths: Sequence[str]) -> JsonObject:
    """Return the arguments after the settings of their DeepSpeed file, which they complete.

    The file is the one that `deepspeed` names, beside the arguments or in the working folder, or
    one of `paths`. Raises ConfigError if it does not exist.
    """
    named = blocks.get("deepspeed")
    if isinstance(kwargs := blocks.get("lr_scheduler_kwargs"), str):
        blocks = blocks | {"lr_scheduler_kwargs": reader.parse(kwargs, "lr_scheduler_kwargs")}
    if isinstance(named, dict):
        return _merged(named, blocks)
    has_file = bool(_OF_DEEPSPEED & blocks.keys())
    if not isinstance(named, str) or isinstance(named, Unread) or has_file:
        return blocks
    for folder in [PurePath(paths[0]).parent, PurePath()]:
        file = Path(folder / named)
        if file.is_file():
            return _merged(reader.read(file), blocks)
    raise ConfigError(
        f"deepspeed = {named}: no such file; name it before the arguments: "
        f"parallel3d convert config PATH/TO/{PurePath(named).name} {paths[0]}"
    )


def _merged(deepspeeds: JsonObject, arguments: JsonObject) -> JsonObject:
    """Return DeepSpeed's settings and the arguments; raise ConfigError where they contradict."""
    merged: JsonObject = {}
    for name, value in reader.flat(deepspeeds).items():
        given = arguments.get(name, value)
        if "auto" not in (value, given) and given != value:
            raise ConfigError(
                f"{name} = {given!r}: the DeepSpeed file has {value!r}; make them equal, or write "
                '"auto" there'
            )
        merged[name] = value
    return merged | arguments


def overruled(settings: Mapping[str, object]) -> dict[str, Rule]:
    """Return other rules for arguments that another setting makes void, or contradicts.

    As in transformers' `HfTrainerDeepSpeedConfig`, a value of the DeepSpeed file must be "auto" or
    the Trainer's own.
    """
    rules: dict[str, Rule] = {}
    steps = settings.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        rules |= dropped("num_train_epochs", "max_steps counts")
    if any(name.split(".")[0] == "scheduler" for name in settings):
        rules |= dropped(
            "lr_scheduler_type warmup_steps warmup_ratio", "the DeepSpeed file has a scheduler"
        )
    for name in settings.keys() & TABLE.keys():
        rule = TABLE[name]
        theirs = settings.get(rule.path, "auto")
        if name == rule.path or theirs == "auto":
            continue
        ours: dict[str, object] = {}
        rule.apply(name, settings[name], "taken", ours)
        if ours and ours[rule.key] != theirs:
            why = f'the DeepSpeed file has {theirs}; make them equal, or write "auto" there'
            rules[name] = Rule(why=why, verdict="REFUSED")
    return rules


def complete(values: dict[str, Any]) -> None:
    """Combine betas, warm-up, model, data, and when a run evaluates and saves."""
    if "optimizer.params.betas" not in values or {"@beta1", "@beta2"} & values.keys():
        values["optimizer.params.betas"] = [values.get("@beta1", 0.9), values.get("@beta2", 0.999)]
    warmup = values.get("@warmup") or 0
    ratio = values.get("@warmup_ratio") or 0
    if 0 < warmup < 1:  # transformers 5 reads a fraction here
        ratio = warmup
    elif warmup:
        ratio = 0
        values["@warmup_steps"] = int(warmup)
    if ratio:
        values["@warmup_fraction"] = ratio
    rate = values.get("optimizer.params.lr")
    if "@min_lr_rate" in values and isinstance(rate, float):
        values["@min_lr"] = values["@min_lr_rate"] * rate
    values.setdefault("@min_lr", 0.0)
    _complete_model(values)
    _complete_output(values)


def _complete_model(values: dict[str, Any]) -> None:
    model = values.get(f"{_MODEL}.from_pretrained")
    if model and "@revision" in values:
        values[f"{_MODEL}.from_pretrained"] = f"{model}@{values['@revision']}"
    if not model and "@model_type" in values:
        values[f"{_MODEL}.family"] = "transformers"
        values[f"{_MODEL}.config"] = {
            "model_type": values["@model_type"],
            **values.get("@overrides", {}),
        }
    values["@tokenizer"] = "path"
    values.setdefault("@tokenizer_path", model or "train")
    if files := values.get("@train_file"):
        names = [files] if isinstance(files, str) else list(files)
        values[f"{_DATA}.paths"] = names
        values[f"{_DATA}.source"] = _SOURCES.get(PurePath(names[0]).suffix, "text")


def _complete_output(values: dict[str, Any]) -> None:
    every = values.get("@logging_steps", 0)
    if every and every >= 1:
        values["steps_per_print"] = int(every)
    saves = values.get("@save_steps", 0)
    if values.get("@save_strategy", "steps") == "steps" and saves >= 1:
        values["parallel3d.checkpoint.every"] = int(saves)
    evaluations = values.get("@eval_steps") or every
    if values.get("@eval_strategy") == "steps" and evaluations and evaluations >= 1:
        values["parallel3d.train.evaluate_every"] = int(evaluations)
