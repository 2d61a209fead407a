"""The keys that DeepSpeed 0.19.8 knows and parallel3d does not support (yet), each with its reason.

tests/gloo/test_deepspeed_keys.py compares these tables, with the supported keys, to the installed
version: a key that a later DeepSpeed adds fails there until it is supported or refused here.
"""

_NOT_YET = "is not yet supported by parallel3d"
_REMOVED = "was removed from DeepSpeed 0.19"
_OWN_METRICS = "is not used: parallel3d writes metrics.jsonl; remove it"
_OWN_LOOP = f"{_NOT_YET}, which reduces gradients itself; remove it"
_OWN_CHECKPOINT = "is not used: parallel3d writes its own files; remove it"

TOP_LEVEL = {
    "activation_checkpointing": "is not used; set parallel3d.pipeline.activation_checkpointing",
    "aio": f"{_NOT_YET}: it tunes NVMe offload; remove it",
    "amp": f"{_REMOVED}; use bf16",
    "autotuning": f"{_NOT_YET}: it starts other processes to search; remove it",
    "bfloat16": 'is the old name of "bf16"; use "bf16"',
    "checkpoint": _OWN_CHECKPOINT,
    "comet": _OWN_METRICS,
    "comms_logger": f"{_NOT_YET}; remove it",
    "communication_data_type": f"{_NOT_YET}: gradients are reduced in fp32; remove it",
    "compile": f"{_NOT_YET}; remove it",
    "compression_training": f"{_REMOVED}; remove it",
    "csv_monitor": _OWN_METRICS,
    "curriculum_learning": f"{_REMOVED}; remove it",
    "data_efficiency": f"{_NOT_YET}: the order of samples is parallel3d's; remove it",
    "data_types": f"{_NOT_YET}: gradients are accumulated in fp32; remove it",
    "dataloader_drop_last": "is not used: every batch is full; remove it",
    "datastates_ckpt": _OWN_CHECKPOINT,
    "disable_allgather": _OWN_LOOP,
    "disable_python_gc": f"{_NOT_YET}; remove it",
    "dump_state": f"{_NOT_YET}: config.json in the run's folder has the settings; remove it",
    "eigenvalue": f"{_REMOVED}; remove it",
    "elasticity": f"{_REMOVED}; remove it and set train_micro_batch_size_per_gpu",
    "expert_parallel": f"{_NOT_YET}; remove it",
    "flops_profiler": _OWN_METRICS,
    "gradient_allreduce_op": _OWN_LOOP,
    "gradient_predivide_factor": _OWN_LOOP,
    "graph_harvesting": f"{_REMOVED}; remove it",
    "hybrid_engine": f"{_NOT_YET}: it is for RLHF; remove it",
    "log_level": f"{_NOT_YET}; remove it",
    "managed_gradient_accumulation": _OWN_LOOP,
    "memory_breakdown": _OWN_METRICS,
    "nebula": f"{_REMOVED}; remove it",
    "pipeline": "is not used: DeepSpeed's own pipeline does not run; set parallel3d.pipeline",
    "prescale_gradients": _OWN_LOOP,
    "progressive_layer_drop": f"{_REMOVED}; remove it",
    "quantize_training": f"{_REMOVED}; remove it",
    "scheduler": f"{_NOT_YET}; use parallel3d.train.lr_schedule",
    "seq_parallel_communication_data_type": f"{_NOT_YET}; remove it",
    "sequence_parallel_size": f"{_NOT_YET}; remove it",
    "data_parallel_size": "is not used; set parallel3d.mesh.dp",
    "sparse_attention": f"{_REMOVED}; remove it",
    "sparse_gradients": f"{_REMOVED}; remove it",
    "tensor_parallel": "is not used: parallel3d cuts its own layers; set parallel3d.mesh.tp",
    "tensorboard": "is not used; set parallel3d.run.tensorboard",
    "timers": _OWN_METRICS,
    "torch_autocast": f"{_NOT_YET}; use bf16",
    "use_data_before_expert_parallelism": f"{_NOT_YET}; remove it",
    "vocabulary_size": "is not used; set parallel3d.model.vocab_size",
    "wall_clock_breakdown": _OWN_METRICS,
    "wandb": f"{_NOT_YET}; use parallel3d.run.tensorboard",
    "weight_quantization": f"{_NOT_YET}; remove it",
    "zero_allow_untested_optimizer": f"{_NOT_YET}: Adam is tested; remove it",
    "zero_force_ds_cpu_optimizer": f"{_NOT_YET}: parallel3d chooses the CPU Adam; remove it",
}

ZERO = {
    "allgather_partitions": f"{_NOT_YET}: DeepSpeed's default (true) is used; remove it",
    "compute_grad_norm": f"{_NOT_YET}: the gradient norm is always reported; remove it",
    "cpu_offload": 'is deprecated; use "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": f"{_NOT_YET}; offload the optimizer instead",
    "cpu_offload_use_pin_memory": "is deprecated; use offload_optimizer.pin_memory",
    "elastic_checkpoint": _OWN_CHECKPOINT,
    "enable_sanity_checks": f"{_NOT_YET}; remove it",
    "ignore_unused_parameters": f"{_NOT_YET}: every parameter is used; remove it",
    "leaf_module": f"{_NOT_YET}; remove it",
    "legacy_stage1": f"{_NOT_YET}; remove it",
    "load_from_fp32_weights": _OWN_CHECKPOINT,
    "log_trace_cache_warnings": f"{_NOT_YET}; remove it",
    "memory_efficient_linear": f"{_NOT_YET}: the tensor-parallel layers are our own; remove it",
    "mics_hierarchical_params_gather": f"{_REMOVED}; remove it",
    "mics_shard_size": f"{_REMOVED}; remove it",
    "override_module_apply": f"{_NOT_YET}; remove it",
    "parameter_alignment": f"{_NOT_YET}; remove it",
    "pipeline_loading_checkpoint": _OWN_CHECKPOINT,
    "reduce_scatter": f"{_NOT_YET}: DeepSpeed's default (true) is used; remove it",
    "round_robin_gradients": f"{_NOT_YET}; remove it",
    "save_muon_momentum_buffer_in_memory": f"{_NOT_YET}: the optimizer is Adam; remove it",
    "stage3_allgather_sequential": f"{_NOT_YET}; remove it",
    "stage3_gather_16bit_weights_on_model_save": "is not used; set parallel3d.run.save_weights",
    "stage3_gather_fp16_weights_on_model_save": "is not used; set parallel3d.run.save_weights",
    "stage3_model_persistence_threshold": f"{_NOT_YET}; use stage3_param_persistence_threshold",
    "stage3_module_granularity_threshold": f"{_NOT_YET}; remove it",
    "stage3_use_all_reduce_for_fetch_params": f"{_NOT_YET}; remove it",
    "use_multi_rank_bucket_allreduce": f"{_NOT_YET}; remove it",
    "zenflow": f"{_NOT_YET}; remove it",
    "zero_hpz_partition_size": f"{_NOT_YET}: it is part of ZeRO++; remove it",
    "zero_quantized_gradients": f"{_NOT_YET}: it is part of ZeRO++; remove it",
    "zero_quantized_nontrainable_weights": f"{_NOT_YET}: it is part of ZeRO++; remove it",
    "zero_quantized_weights": f"{_NOT_YET}: it is part of ZeRO++; remove it",
    "zeropp_loco_param": f"{_REMOVED}; remove it",
}

OFFLOAD_OPTIMIZER = {
    "buffer_count": f"{_NOT_YET}: it is for NVMe; remove it",
    "cpuadam_cores_perc": f"{_NOT_YET}; remove it",
    "fast_init": f"{_NOT_YET}: it is for NVMe; remove it",
    "nvme_path": f"{_NOT_YET}: it is for NVMe; remove it",
    "pipeline_read": f"{_NOT_YET}: it is for NVMe; remove it",
    "pipeline_write": f"{_NOT_YET}: it is for NVMe; remove it",
    "ratio": f"{_NOT_YET}: all of the state is offloaded; remove it",
    "super_offload": f"{_NOT_YET}; remove it",
}

OFFLOAD_PARAM = dict.fromkeys(
    ("buffer_count", "buffer_size", "max_in_cpu", "nvme_path", "pin_memory"),
    f"{_NOT_YET}; offload the optimizer instead",
)

BF16 = dict.fromkeys(
    ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    f"{_NOT_YET}: master weights and moments are fp32; remove it",
) | {
    "check_grad_overflow": f"{_NOT_YET}: a non-finite loss stops the run; remove it",
    "immediate_grad_update": _OWN_LOOP,
}

FP16 = dict.fromkeys(
    (
        "auto_cast",
        "consecutive_hysteresis",
        "fp16_master_weights_and_grads",
        "hysteresis",
        "initial_scale_power",
        "loss_scale",
        "loss_scale_window",
        "min_loss_scale",
    ),
    f"{_NOT_YET}, as is fp16; use bf16",
)

OPTIMIZER = {"legacy_fusion": f"{_NOT_YET}; remove it"}

ADAM_PARAMS = {
    "adam_w_mode": f"{_NOT_YET}: weight decay is decoupled; remove it",
    "amsgrad": f"{_NOT_YET}; remove it",
    "bias_correction": f"{_NOT_YET}: it is always on; remove it",
    "foreach": f"{_NOT_YET}; remove it",
    "fp32_optimizer_states": f"{_NOT_YET}: moments are fp32; remove it",
    "fused": f"{_NOT_YET}; remove it",
    "max_grad_norm": "is not used; set gradient_clipping",
    "torch_adam": f"{_NOT_YET}: parallel3d chooses Adam's implementation; remove it",
}
# Sections that the DeepSpeed part of the file has, by dotted path.
BY_SECTION = {
    "": TOP_LEVEL,
    "bf16": BF16,
    "fp16": FP16,
    "optimizer": OPTIMIZER,
    "optimizer.params": ADAM_PARAMS,
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
}
