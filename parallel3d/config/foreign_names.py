"""Names of settings in Hugging Face's Trainer and Megatron-LM, and ours for the same.

They are said where such a name stands in a config or on the command line. docs/coming-from.md has
the rest of the way.
"""

from parallel3d.base.reader import table_of

OURS = table_of(
    """
    # Hugging Face's Trainer
    per_device_train_batch_size            train_micro_batch_size_per_gpu
    per_gpu_train_batch_size               train_micro_batch_size_per_gpu
    per_device_eval_batch_size \
        train_micro_batch_size_per_gpu = the size in training, which evaluations share
    max_steps                              parallel3d.train.steps
    num_train_epochs                       parallel3d.train.epochs
    learning_rate                          optimizer.params.lr
    adam_beta1                             optimizer.params.betas
    adam_beta2                             optimizer.params.betas
    adam_epsilon                           optimizer.params.eps
    lr_scheduler_type                      parallel3d.train.lr_schedule.type
    warmup_ratio \
        parallel3d.train.lr_schedule.warmup_steps = the ratio times the steps
    max_grad_norm                          gradient_clipping
    gradient_checkpointing                 parallel3d.pipeline.activation_checkpointing
    save_steps                             parallel3d.checkpoint.every
    save_total_limit                       parallel3d.checkpoint.keep
    resume_from_checkpoint                 parallel3d.checkpoint.resume
    eval_steps                             parallel3d.train.evaluate_every
    logging_steps                          steps_per_print
    report_to                              parallel3d.run.trackers
    output_dir                             parallel3d.run.directory
    run_name                               parallel3d.run.name
    dataloader_num_workers                 parallel3d.data.read_ahead
    torch_compile                          parallel3d.train.compile
    model_name_or_path                     parallel3d.model.from_pretrained
    max_seq_length                         parallel3d.data.sequence_length
    block_size                             parallel3d.data.sequence_length
    eval_strategy                          parallel3d.train.evaluate_every
    evaluation_strategy                    parallel3d.train.evaluate_every
    save_strategy                          parallel3d.checkpoint.every
    logging_dir                            parallel3d.run.directory
    logging_strategy                       steps_per_print
    optim                                  optimizer.type
    lr_scheduler_kwargs                    parallel3d.train.lr_schedule
    data_seed                              parallel3d.train.seed
    max_length                             parallel3d.data.sequence_length
    dataset_name                           parallel3d.data.name
    dataset_config_name                    parallel3d.data.subset
    dataset_text_field                     parallel3d.data.text_field
    train_file                             parallel3d.data.paths
    validation_file                        parallel3d.data.validation
    streaming                              parallel3d.data.stream
    tokenizer_name                         parallel3d.data.tokenizer
    preprocessing_num_workers              parallel3d.data.workers
    dataloader_prefetch_factor             parallel3d.data.read_ahead
    full_determinism                       parallel3d.train.deterministic
    ddp_timeout                            parallel3d.train.timeout_seconds
    eval_on_start                          parallel3d.train.evaluate_every
    save_only_model                        parallel3d.run.save_weights
    # GPT-2's config.json
    n_embd                                 parallel3d.model.hidden_size
    n_layer                                parallel3d.model.num_hidden_layers
    n_head                                 parallel3d.model.num_attention_heads
    n_positions                            parallel3d.model.max_position_embeddings
    n_ctx                                  parallel3d.model.max_position_embeddings
    d_model                                parallel3d.model.hidden_size
    # Megatron-LM
    micro_batch_size                       train_micro_batch_size_per_gpu
    global_batch_size                      train_batch_size
    train_iters                            parallel3d.train.steps
    train_samples \
        parallel3d.train.steps = the samples over the global batch
    min_lr \
        parallel3d.train.lr_schedule.min_ratio = min_lr over the peak
    lr_decay_style                         parallel3d.train.lr_schedule.type
    lr_warmup_iters                        parallel3d.train.lr_schedule.warmup_steps
    lr_warmup_samples \
        parallel3d.train.lr_schedule.warmup_steps = the samples over the global batch
    lr_decay_iters                         parallel3d.train.steps
    clip_grad                              gradient_clipping
    tensor_model_parallel_size             parallel3d.mesh.tp
    pipeline_model_parallel_size           parallel3d.mesh.pp
    context_parallel_size                  parallel3d.mesh.cp
    expert_model_parallel_size             parallel3d.mesh.ep
    num_distributed_optimizer_instances    parallel3d.mesh.dp_shards = dp over this number
    num_layers_per_virtual_pipeline_stage \
        parallel3d.pipeline.stages_per_rank = the layers of a rank over this number
    virtual_pipeline_model_parallel_size   parallel3d.pipeline.stages_per_rank
    num_virtual_stages_per_pipeline_rank   parallel3d.pipeline.stages_per_rank
    tensor_parallel_size                   parallel3d.mesh.tp
    pipeline_parallel_size                 parallel3d.mesh.pp
    data_parallel_size                     parallel3d.mesh.dp
    expert_parallel_size                   parallel3d.mesh.ep
    recompute_granularity                  parallel3d.pipeline.activation_checkpointing
    recompute_method                       parallel3d.pipeline.activation_checkpointing
    recompute_num_layers                   parallel3d.pipeline.activation_checkpointing
    recompute_activations                  parallel3d.pipeline.activation_checkpointing
    recompute_modules                      parallel3d.pipeline.activation_checkpointing
    cpu_offloading                         parallel3d.pipeline.offload_activations
    optimizer_cpu_offload                  zero_optimization.offload_optimizer
    overlap_grad_reduce                    zero_optimization.overlap_comm
    overlap_param_gather                   parallel3d.pipeline.weights
    adam_eps                               optimizer.params.eps
    lr_warmup_fraction \
        parallel3d.train.lr_schedule.warmup_steps = the fraction times the steps
    lr_wsd_decay_iters                     parallel3d.train.lr_schedule.decay_steps
    lr_wsd_decay_style                     parallel3d.train.lr_schedule.type
    rampup_batch_size                      parallel3d.train.batch_schedule
    init_method_std                        parallel3d.model.initializer_range
    norm_epsilon                           parallel3d.model.rms_norm_eps
    layernorm_epsilon                      parallel3d.model.layer_norm_epsilon
    attention_dropout                      parallel3d.model.attn_pdrop
    hidden_dropout                         parallel3d.model.resid_pdrop
    untie_embeddings_and_output_weights    parallel3d.model.tie_word_embeddings = false
    group_query_attention                  parallel3d.model.num_key_value_heads
    qk_layernorm                           parallel3d.model.qk_norm
    window_size                            parallel3d.model.sliding_window
    make_vocab_size_divisible_by           parallel3d.model.vocab_size = the padded number of tokens
    padded_vocab_size                      parallel3d.model.vocab_size
    use_distributed_optimizer              zero_optimization.stage
    num_layers                             parallel3d.model.num_hidden_layers
    ffn_hidden_size                        parallel3d.model.intermediate_size
    num_query_groups                       parallel3d.model.num_key_value_heads
    kv_channels                            parallel3d.model.head_dim
    rotary_base                            parallel3d.model.rope_theta
    seq_length                             parallel3d.data.sequence_length
    data_path                              parallel3d.data.paths
    train_data_path                        parallel3d.data.paths
    valid_data_path                        parallel3d.data.validation
    data_cache_path                        parallel3d.data.cache
    reset_position_ids                     parallel3d.data.isolate_documents
    reset_attention_mask                   parallel3d.data.isolate_documents
    tokenizer_model                        parallel3d.data.tokenizer
    tokenizer_type                         parallel3d.data.tokenizer
    vocab_file                             parallel3d.data.tokenizer
    merge_file                             parallel3d.data.tokenizer
    load                                   parallel3d.checkpoint.resume
    save                                   parallel3d.run.directory
    exit_interval                          parallel3d.train.stop_after
    distributed_timeout_minutes            parallel3d.train.timeout_seconds = 60 times the minutes
    profile_step_start                     parallel3d.train.profile.start
    deterministic_mode                     parallel3d.train.deterministic
    check_for_nan_in_loss_and_grad         parallel3d.train.on_nonfinite
    initial_loss_scale                     fp16.initial_scale_power = the scale's power of two
    tensorboard_dir                        parallel3d.run.trackers
    wandb_project                          parallel3d.run.trackers
    save_interval                          parallel3d.checkpoint.every
    eval_interval                          parallel3d.train.evaluate_every
    eval_iters \
        parallel3d.train.evaluate_samples = the iterations times the global batch
    log_interval                           steps_per_print
    # DeepSpeed-MoE's and Megatron's switches of experts
    moe                                    parallel3d.model.family = "moe", and parallel3d.mesh.ep
    moe_grouped_gemm                       parallel3d.model.family = "moe"
    moe_router_topk                        parallel3d.model.num_experts_per_tok
    moe_aux_loss_coeff                     parallel3d.model.router_aux_loss_coef
    moe_z_loss_coeff                       parallel3d.model.router_z_loss_coef
    moe_expert_capacity_factor             parallel3d.model.capacity_factor
    moe_ffn_hidden_size                    parallel3d.model.moe_intermediate_size
    moe_layer_freq                         parallel3d.model.decoder_sparse_step
    ep_size                                parallel3d.mesh.ep
    # Hybrid sharding in torchtitan, OLMo-core, NeMo and VeOmni
    data_parallel_shard_degree             parallel3d.mesh.dp_shards
    data_parallel_replicate_degree         parallel3d.mesh.dp_shards = dp over this number
    num_replicas                           parallel3d.mesh.dp_shards = dp over this number
    dp_replicate_size                      parallel3d.mesh.dp_shards = dp over this number
    dp_shard_size                          parallel3d.mesh.dp_shards
    """
)
