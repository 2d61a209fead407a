"""nanotron's YAML (github.com/huggingface/nanotron, `nanotron.config.Config`)."""

from parallel3d.extras.foreign.rules import Rule, dropped, missing, same

_P = "parallel3d"
_MODEL = "model.model_config"
_RATE = "optimizer.learning_rate_scheduler"
_STAGE = "data_stages.data"
_DATA = "data_stages.data.dataset"

TABLE: dict[str, Rule] = {
    # The model
    f"{_MODEL}.is_llama_config": Rule(f"{_P}.model.family@family", {True: "llama"}),
    f"{_MODEL}.is_qwen2_config": Rule(f"{_P}.model.family@family", {True: "llama"}),
    **missing(f"{_MODEL}.is_starcoder2_config", "no such family", False, verdict="REFUSED"),
    **same(
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
        "max_position_embeddings vocab_size rms_norm_eps rope_theta rope_scaling "
        "tie_word_embeddings attention_bias",
        f"{_P}.model",
        f"{_MODEL}.",
    ),
    "model.init_method.std": Rule(f"{_P}.model.initializer_range"),
    "model.dtype": Rule(
        "bf16.enabled",
        {"bfloat16": True, "float32": False},
        why="not here, where it is fp32: set bf16 or fp16",
    ),
    **missing(f"{_MODEL}.hidden_act", "silu is the only one", "silu", verdict="REFUSED"),
    **missing(f"{_MODEL}.moe_config", "write family moe by hand", verdict="REFUSED"),
    f"{_MODEL}.no_rope_layer": Rule(f"{_P}.model.no_rope_layer_interval@no_rope_layers"),
    **missing(
        f"{_MODEL}.rope_interleaved {_MODEL}.interleaved_rotary",
        "pairs are i and i + half: the same model with rows of query and key in another order",
        False,
    ),
    **missing(f"{_MODEL}.sliding_window_size", "attention sees the whole sequence"),
    **missing(f"{_MODEL}.flex_attention_mask", "see parallel3d.data.isolate_documents"),
    f"{_MODEL}._use_doc_masking": Rule(f"{_P}.data.isolate_documents"),
    **missing(f"{_MODEL}.z_loss_enabled", "the loss has no z term", False),
    **missing("model.init_method.use_mup", "see parallel3d.model.parametrization", False),
    **missing(
        "model.init_method.path checkpoints.resume_checkpoint_path",
        "weights come over through Hugging Face: set model.from_pretrained",
    ),
    **missing(
        "model.init_method.scaling_method",
        "std / sqrt(2 x layers) before the residual",
        "NUM_LAYERS",
    ),
    **dropped(f"{_MODEL}.initializer_range", "nanotron starts with model.init_method.std"),
    **dropped(f"{_MODEL}.z_loss_coefficient", "belongs to z_loss_enabled"),
    **dropped(
        f"{_MODEL}.bos_token_id {_MODEL}.eos_token_id {_MODEL}.pad_token_id", "the tokenizer's"
    ),
    **dropped(f"{_MODEL}.use_cache {_MODEL}.pretraining_tp", "for inference only"),
    **dropped("model.make_vocab_size_divisible_by", "vocabularies are cut without padding"),
    # The optimizer
    f"{_RATE}.learning_rate": Rule("optimizer.params.lr"),
    f"{_RATE}.min_decay_lr": Rule(f"{_P}.train.lr_schedule.min_ratio@min_lr"),
    f"{_RATE}.lr_warmup_steps": Rule(f"{_P}.train.lr_schedule.warmup_steps@warmup_steps"),
    **missing(f"{_RATE}.lr_warmup_style", "the warm-up is linear", "linear"),
    f"{_RATE}.lr_decay_style": Rule(f"{_P}.train.lr_schedule.type@style"),
    f"{_RATE}.lr_decay_steps": Rule(f"{_P}.train.lr_schedule.decay_steps@decay_steps"),
    f"{_RATE}.lr_decay_starting_step": Rule(f"{_P}.train.lr_schedule.decay_steps@start"),
    **{
        f"{block}.adam_{name}": Rule(f"optimizer.params.{ours}")
        for block in ("optimizer.optimizer_factory", "optimizer")
        for name, ours in (("beta1", "betas@beta1"), ("beta2", "betas@beta2"), ("eps", "eps"))
    },
    **missing("optimizer.optimizer_factory.name", "AdamW is the only one", "adamW", "adam"),
    "optimizer.weight_decay": Rule("optimizer.params.weight_decay"),
    **missing("optimizer.weight_decay_exclude_named_params", "matrices decay, vectors do not", []),
    "optimizer.clip_grad": Rule("gradient_clipping"),
    "optimizer.zero_stage": Rule("zero_optimization.stage"),
    **missing("optimizer.accumulate_grad_in_fp32", "gradients are added in fp32", True),
    # The mesh
    **same("dp pp tp", f"{_P}.mesh", "parallelism."),
    "parallelism.tp_mode": Rule(
        f"{_P}.mesh.sequence_parallel", {"REDUCE_SCATTER": True, "ALL_REDUCE": False}
    ),
    "parallelism.pp_engine": Rule(
        f"{_P}.pipeline.schedule", {"1f1b": "one_f_one_b", "afab": "gpipe"}
    ),
    "parallelism.recompute_layer": Rule(
        f"{_P}.pipeline.activation_checkpointing", {True: "full", False: "none"}
    ),
    **missing("parallelism.expert_parallel_size", "write family moe by hand", 1, verdict="REFUSED"),
    "parallelism.context_parallel_size": Rule(f"{_P}.mesh.cp"),
    # Tokens and text
    "tokens.sequence_length": Rule(f"{_P}.data.sequence_length"),
    "tokens.micro_batch_size": Rule("train_micro_batch_size_per_gpu"),
    "tokens.batch_accumulation_per_replica": Rule("gradient_accumulation_steps"),
    "tokens.train_steps": Rule(f"{_P}.train.steps@steps"),
    "tokens.val_check_interval": Rule(f"{_P}.train.evaluate_every", lambda steps: max(0, steps)),
    "tokenizer.tokenizer_name_or_path": Rule(f"{_P}.data.tokenizer@tokenizer"),
    **missing("tokenizer.tokenizer_revision", "name a folder with that revision"),
    **missing("tokenizer.tokenizer_max_length", "documents of any length are packed"),
    f"{_DATA}.hf_dataset_or_datasets": Rule(f"{_P}.data.name"),
    f"{_DATA}.hf_dataset_splits": Rule(f"{_P}.data.split"),
    f"{_DATA}.hf_dataset_config_name": Rule(f"{_P}.data.subset"),
    f"{_DATA}.text_column_name": Rule(f"{_P}.data.text_field"),
    f"{_DATA}.dataset_folder": Rule(
        f"{_P}.data.paths@files",
        lambda names: [f"{name}/*.ds" for name in ([names] if type(names) is str else names)],
    ),
    f"{_DATA}.dataset_weights": Rule(f"{_P}.data.mixture@weights"),
    **missing(f"{_DATA}.dataset_path", 'arrays of ids: data.source "tokens" with data.paths'),
    **missing(f"{_DATA}.pad_samples_to_global_batch_size", "samples are not padded", False),
    **missing(f"{_DATA}.dataset_max_tokens", "all tokens are used"),
    **missing("data_stages.start_training_step", "the first stage starts at once", 0, 1),
    **missing("data_stages[1:]", "a run has one mixture; start another from a checkpoint of it"),
    **dropped(
        f"{_DATA}.token_size_in_bytes",
        "2, or 4 for vocabularies above 65,536 (parallel3d.data.token_dtype)",
    ),
    **dropped(f"{_DATA}.tokenizer_name {_DATA}.vocab_size", "as tokenizer and model say"),
    **dropped(f"{_STAGE}.seed", "parallel3d.train.seed orders the samples"),
    **dropped(
        f"{_STAGE}.num_loading_workers {_DATA}.dataset_overwrite_cache {_DATA}.use_json_format "
        f"{_DATA}.dataset_processing_num_proc_per_process {_DATA}.return_positions "
        f"{_DATA}.use_old_brrr_dataloader {_DATA}.dataset_read_path {_DATA}.skip_in_stream "
        f"{_DATA}.shuffle_files",
        "see docs/data.md: text is tokenised once and shuffled",
    ),
    **dropped("data_stages.name", "a label"),
    **dropped("tokens.limit_val_batches", "set parallel3d.train.evaluate_samples"),
    **dropped("tokens.limit_test_batches", "see parallel3d.data.validation"),
    # The rest
    "general.seed": Rule(f"{_P}.train.seed"),
    "checkpoints.checkpoint_interval": Rule(f"{_P}.checkpoint.every"),
    **dropped("general.project general.run", "set parallel3d.run.name"),
    **dropped(
        "general.step general.consumed_train_samples general.benchmark_csv_path "
        "general.ignore_sanity_checks",
        "for nanotron's own use",
    ),
    **dropped(
        "checkpoints.checkpoints_path checkpoints.checkpoints_path_is_shared_file_system "
        "checkpoints.save_initial_state checkpoints.save_final_state checkpoints.load_optimizer "
        "checkpoints.load_lr_scheduler s3_upload",
        "see parallel3d.checkpoint and parallel3d.run",
    ),
    **dropped(
        "logging.iteration_step_info_interval logging.log_level logging.log_level_replica "
        "logging.monitor_model_states metrics_logging",
        "see steps_per_print and run.trackers",
    ),
    **dropped("lighteval", "see docs/huggingface.md"),
    **dropped("profiler", "set parallel3d.train.profile"),
    **dropped(
        f"{_MODEL}._attn_implementation {_MODEL}._fused_rms_norm {_MODEL}._fused_rotary_emb "
        f"{_MODEL}._use_qkv_packed model.ddp_bucket_cap_mb optimizer.torch_adam_is_fused "
        "optimizer.optimizer_factory.torch_adam_is_fused parallelism.tp_recompute_allgather "
        "parallelism.tp_linear_async_communication parallelism.moe_layer_recompute",
        "the device and the mesh decide",
    ),
}
# One data set for the whole run, as older files have it, instead of stages
TABLE |= {
    setting.removeprefix("data_stages."): rule
    for setting, rule in TABLE.items()
    if setting.startswith(_STAGE)
}
DEFAULTS: dict[str, object] = {
    "model.dtype": "bfloat16",
    f"{_MODEL}.rms_norm_eps": 1e-6,
    f"{_RATE}.lr_decay_style": "linear",
    "optimizer.clip_grad": 0.0,
    "general.seed": 42,
}


def complete(values: dict[str, object]) -> None:
    """Combine the decay rates of the moments."""
    values["optimizer.params.betas"] = [values.get("@beta1", 0.9), values.get("@beta2", 0.999)]
