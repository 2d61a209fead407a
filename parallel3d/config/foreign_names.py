"""Names of settings in Hugging Face's Trainer and Megatron-LM, and ours for the same.

They are said where such a name stands in a config or on the command line. docs/coming-from.md has
the rest of the way.
"""

_LR = "optimizer.params.lr"
_LR_SCHEDULE = "parallel3d.train.lr_schedule"
_MODEL = "parallel3d.model"
_STEPS = "parallel3d.train.steps"
_RECOMPUTE = "parallel3d.pipeline.activation_checkpointing"
_MICRO = "train_micro_batch_size_per_gpu"
_BETAS = "optimizer.params.betas"

OURS = {
    # Hugging Face's Trainer
    "per_device_train_batch_size": _MICRO,
    "per_gpu_train_batch_size": _MICRO,
    "per_device_eval_batch_size": "parallel3d.train.evaluate_samples",
    "max_steps": _STEPS,
    "num_train_epochs": "parallel3d.train.epochs",
    "learning_rate": _LR,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": "optimizer.params.eps",
    "lr_scheduler_type": f"{_LR_SCHEDULE}.type",
    "warmup_ratio": f"{_LR_SCHEDULE}.warmup_steps",
    "max_grad_norm": "gradient_clipping",
    "gradient_checkpointing": _RECOMPUTE,
    "save_steps": "parallel3d.checkpoint.every",
    "save_total_limit": "parallel3d.checkpoint.keep",
    "resume_from_checkpoint": "parallel3d.checkpoint.resume",
    "eval_steps": "parallel3d.train.evaluate_every",
    "logging_steps": "steps_per_print",
    "report_to": "parallel3d.run.trackers",
    "output_dir": "parallel3d.run.directory",
    "run_name": "parallel3d.run.name",
    "dataloader_num_workers": "parallel3d.data.read_ahead",
    "torch_compile": "parallel3d.train.compile",
    "model_name_or_path": f"{_MODEL}.from_pretrained",
    "max_seq_length": "parallel3d.data.sequence_length",
    "block_size": "parallel3d.data.sequence_length",
    # Megatron-LM
    "micro_batch_size": _MICRO,
    "global_batch_size": "train_batch_size",
    "train_iters": _STEPS,
    "train_samples": _STEPS,
    "min_lr": f"{_LR_SCHEDULE}.min_ratio",
    "lr_decay_style": f"{_LR_SCHEDULE}.type",
    "lr_warmup_iters": f"{_LR_SCHEDULE}.warmup_steps",
    "lr_warmup_samples": f"{_LR_SCHEDULE}.warmup_steps",
    "lr_decay_iters": _STEPS,
    "clip_grad": "gradient_clipping",
    "tensor_model_parallel_size": "parallel3d.mesh.tp",
    "pipeline_model_parallel_size": "parallel3d.mesh.pp",
    "context_parallel_size": "parallel3d.mesh.cp",
    "expert_model_parallel_size": "parallel3d.mesh.ep",
    "num_layers_per_virtual_pipeline_stage": "parallel3d.pipeline.stages_per_rank",
    "recompute_granularity": _RECOMPUTE,
    "use_distributed_optimizer": "zero_optimization.stage",
    "num_layers": f"{_MODEL}.num_hidden_layers",
    "ffn_hidden_size": f"{_MODEL}.intermediate_size",
    "num_query_groups": f"{_MODEL}.num_key_value_heads",
    "kv_channels": f"{_MODEL}.head_dim",
    "rotary_base": f"{_MODEL}.rope_theta",
    "seq_length": "parallel3d.data.sequence_length",
    "data_path": "parallel3d.data.paths",
    "train_data_path": "parallel3d.data.paths",
    "tokenizer_model": "parallel3d.data.tokenizer",
    "save_interval": "parallel3d.checkpoint.every",
    "eval_interval": "parallel3d.train.evaluate_every",
    "eval_iters": "parallel3d.train.evaluate_samples",
    "log_interval": "steps_per_print",
    # DeepSpeed-MoE's and Megatron's switches of experts
    "moe": f'{_MODEL}.family = "moe", and parallel3d.mesh.ep',
    "moe_grouped_gemm": f'{_MODEL}.family = "moe"',
    "moe_router_topk": f"{_MODEL}.num_experts_per_tok",
    "ep_size": "parallel3d.mesh.ep",
}
