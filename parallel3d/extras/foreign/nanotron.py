"""nanotron's YAML (github.com/huggingface/nanotron, `nanotron.config.Config`)."""

from parallel3d.base.reader import JsonObject
from parallel3d.extras.foreign.rules import Rule, dropped, missing, renamed, same

TABLE: dict[str, Rule] = {
    # The model
    **renamed(
        """
        model.init_method.std                parallel3d.model.initializer_range
        model.model_config.no_rope_layer     parallel3d.model.config@no_rope_layers
        model.model_config._use_doc_masking  parallel3d.data.isolate_documents
        """
    ),
    "model.model_config.is_llama_config": Rule("parallel3d.model.family@family", {True: "llama"}),
    "model.model_config.is_qwen2_config": Rule("parallel3d.model.family@family", {True: "llama"}),
    **missing(
        "model.model_config.is_starcoder2_config", "no such family", False, verdict="REFUSED"
    ),
    **same(
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
        "max_position_embeddings vocab_size rms_norm_eps rope_theta rope_scaling "
        "tie_word_embeddings attention_bias",
        "parallel3d.model",
        "model.model_config.",
    ),
    "model.dtype": Rule(
        "bf16.enabled",
        {"bfloat16": True, "float32": False},
        why="not here, where it is fp32: set bf16 or fp16",
    ),
    **missing("model.model_config.hidden_act", "silu is the only one", "silu", verdict="REFUSED"),
    **missing("model.model_config.moe_config", "write family moe by hand", verdict="REFUSED"),
    **missing(
        "model.model_config.rope_interleaved model.model_config.interleaved_rotary",
        "pairs are i and i + half: the same model with rows of query and key in another order",
        False,
    ),
    **missing("model.model_config.sliding_window_size", "attention sees the whole sequence"),
    **missing("model.model_config.flex_attention_mask", "see parallel3d.data.isolate_documents"),
    **missing("model.model_config.z_loss_enabled", "the loss has no z term", False),
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
    **dropped("model.model_config.initializer_range", "nanotron starts with model.init_method.std"),
    **dropped("model.model_config.z_loss_coefficient", "belongs to z_loss_enabled"),
    **dropped(
        "model.model_config.bos_token_id model.model_config.eos_token_id "
        "model.model_config.pad_token_id",
        "the tokenizer's",
    ),
    **dropped(
        "model.model_config.use_cache model.model_config.pretraining_tp", "for inference only"
    ),
    **dropped("model.make_vocab_size_divisible_by", "vocabularies are cut without padding"),
    # The optimizer
    **renamed(
        """
        optimizer.learning_rate_scheduler.learning_rate  optimizer.params.lr
        optimizer.optimizer_factory.adam_beta1           optimizer.params.betas@beta1
        optimizer.optimizer_factory.adam_beta2           optimizer.params.betas@beta2
        optimizer.optimizer_factory.adam_eps             optimizer.params.eps
        optimizer.adam_beta1                             optimizer.params.betas@beta1
        optimizer.adam_beta2                             optimizer.params.betas@beta2
        optimizer.adam_eps                               optimizer.params.eps
        optimizer.weight_decay                           optimizer.params.weight_decay
        optimizer.clip_grad                              gradient_clipping
        optimizer.zero_stage                             zero_optimization.stage
        """
    ),
    "optimizer.learning_rate_scheduler.min_decay_lr": Rule(
        "parallel3d.train.lr_schedule.min_ratio@min_lr"
    ),
    "optimizer.learning_rate_scheduler.lr_warmup_steps": Rule(
        "parallel3d.train.lr_schedule.warmup_steps@warmup_steps"
    ),
    **missing(
        "optimizer.learning_rate_scheduler.lr_warmup_style", "the warm-up is linear", "linear"
    ),
    "optimizer.learning_rate_scheduler.lr_decay_style": Rule(
        "parallel3d.train.lr_schedule.type@style"
    ),
    "optimizer.learning_rate_scheduler.lr_decay_steps": Rule(
        "parallel3d.train.lr_schedule.decay_steps@decay_steps"
    ),
    "optimizer.learning_rate_scheduler.lr_decay_starting_step": Rule(
        "parallel3d.train.lr_schedule.decay_steps@start"
    ),
    **missing("optimizer.optimizer_factory.name", "AdamW is the only one", "adamW", "adam"),
    **missing("optimizer.weight_decay_exclude_named_params", "matrices decay, vectors do not", []),
    **missing("optimizer.accumulate_grad_in_fp32", "gradients are added in fp32", True),
    # The mesh
    "parallelism.context_parallel_size": Rule("parallel3d.mesh.cp"),
    **same("dp pp tp", "parallel3d.mesh", "parallelism."),
    "parallelism.tp_mode": Rule(
        "parallel3d.mesh.sequence_parallel", {"REDUCE_SCATTER": True, "ALL_REDUCE": False}
    ),
    "parallelism.pp_engine": Rule(
        "parallel3d.pipeline.schedule", {"1f1b": "one_f_one_b", "afab": "gpipe"}
    ),
    "parallelism.recompute_layer": Rule(
        "parallel3d.pipeline.activation_checkpointing", {True: "full", False: "none"}
    ),
    **missing("parallelism.expert_parallel_size", "write family moe by hand", 1, verdict="REFUSED"),
    # Tokens and text
    **renamed(
        """
        tokens.sequence_length                           parallel3d.data.sequence_length
        tokens.micro_batch_size                          train_micro_batch_size_per_gpu
        tokens.batch_accumulation_per_replica            gradient_accumulation_steps
        tokens.train_steps                               parallel3d.train.steps@steps
        tokenizer.tokenizer_name_or_path                 parallel3d.data.tokenizer@tokenizer
        data_stages.data.dataset.hf_dataset_or_datasets  parallel3d.data.name
        data_stages.data.dataset.hf_dataset_splits       parallel3d.data.split
        data_stages.data.dataset.hf_dataset_config_name  parallel3d.data.subset
        data_stages.data.dataset.text_column_name        parallel3d.data.text_field
        data_stages.data.dataset.dataset_weights         parallel3d.data.mixture@weights
        """
    ),
    "tokens.val_check_interval": Rule(
        "parallel3d.train.evaluate_every", lambda steps: max(0, steps)
    ),
    **missing("tokenizer.tokenizer_revision", "name a folder with that revision"),
    **missing("tokenizer.tokenizer_max_length", "documents of any length are packed"),
    "data_stages.data.dataset.dataset_folder": Rule(
        "parallel3d.data.paths@files",
        lambda names: [f"{name}/*.ds" for name in ([names] if type(names) is str else names)],
    ),
    **missing(
        "data_stages.data.dataset.dataset_path",
        'arrays of ids: data.source "tokens" with data.paths',
    ),
    **missing(
        "data_stages.data.dataset.pad_samples_to_global_batch_size", "samples are not padded", False
    ),
    **missing("data_stages.data.dataset.dataset_max_tokens", "all tokens are used"),
    **missing("data_stages.start_training_step", "the first stage starts at once", 0, 1),
    **missing("data_stages[1:]", "a run has one mixture; start another from a checkpoint of it"),
    **dropped(
        "data_stages.data.dataset.token_size_in_bytes",
        "2, or 4 for vocabularies above 65,536 (parallel3d.data.token_dtype)",
    ),
    **dropped(
        "data_stages.data.dataset.tokenizer_name data_stages.data.dataset.vocab_size",
        "as tokenizer and model say",
    ),
    **dropped("data_stages.data.seed", "parallel3d.train.seed orders the samples"),
    **dropped(
        "data_stages.data.num_loading_workers data_stages.data.dataset.dataset_overwrite_cache "
        "data_stages.data.dataset.use_json_format "
        "data_stages.data.dataset.dataset_processing_num_proc_per_process "
        "data_stages.data.dataset.return_positions "
        "data_stages.data.dataset.use_old_brrr_dataloader "
        "data_stages.data.dataset.dataset_read_path data_stages.data.dataset.skip_in_stream "
        "data_stages.data.dataset.shuffle_files",
        "see docs/data.md: text is tokenised once and shuffled",
    ),
    **dropped("data_stages.name", "a label"),
    **dropped("tokens.limit_val_batches", "set parallel3d.train.evaluate_samples"),
    **dropped("tokens.limit_test_batches", "see parallel3d.data.validation"),
    # The rest
    **renamed(
        """
        general.seed                     parallel3d.train.seed
        checkpoints.checkpoint_interval  parallel3d.checkpoint.every
        """
    ),
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
        "model.model_config._attn_implementation model.model_config._fused_rms_norm "
        "model.model_config._fused_rotary_emb model.model_config._use_qkv_packed "
        "model.ddp_bucket_cap_mb optimizer.torch_adam_is_fused "
        "optimizer.optimizer_factory.torch_adam_is_fused parallelism.tp_recompute_allgather "
        "parallelism.tp_linear_async_communication parallelism.moe_layer_recompute",
        "the device and the mesh decide",
    ),
}
# One data set for the whole run, as older files have it, instead of stages
TABLE |= {
    setting.removeprefix("data_stages."): rule
    for setting, rule in TABLE.items()
    if setting.startswith("data_stages.data")
}
DEFAULTS: JsonObject = {
    "model.dtype": "bfloat16",
    "model.model_config.rms_norm_eps": 1e-6,
    "optimizer.learning_rate_scheduler.lr_decay_style": "linear",
    "optimizer.clip_grad": 0.0,
    "general.seed": 42,
}


def complete(values: JsonObject) -> None:
    """Combine the decay rates of the moments."""
    values["optimizer.params.betas"] = [values.get("@beta1", 0.9), values.get("@beta2", 0.999)]
