"""The keys of DeepSpeed 0.19.8 that are not settings here: accepted values and refusals.

A value is accepted and dropped if it describes what parallel3d does anyway, or turns off a feature
that parallel3d does not have. Any other value is refused with a reason.
tests/config/test_deepspeed_keys.py compares the tables with the installed DeepSpeed.
"""

from parallel3d.config.switched_blocks import SWITCHED_BLOCKS
from parallel3d.config.unused_key import ANY, Key

_TIMERS = (
    {},
    *({"synchronized": s} for s in (True, False)),
    *({"enabled": e} for e in (True, False)),
    *({"enabled": e, "synchronized": s} for e in (True, False) for s in (True, False)),
)
_ONE_BIT_PARAMS = (
    "freeze_step",
    "cuda_aware",
    "comm_backend_name",
    "var_freeze_step",
    "var_update_scaler",
    "local_step_scaler",
    "local_step_clipper",
    "max_coeff",
    "min_coeff",
    "coeff_beta",
    "factor_max",
    "factor_min",
    "factor_threshold",
)
_LOG_LEVELS = (None, "debug", "info", "warning", "error", "critical")
_RECOMPUTE = "parallel3d.pipeline.activation_checkpointing"
_GONE = "was removed in DeepSpeed 0.19; remove it"
_METRICS = "is not used: metrics.jsonl records loss, speed, memory and MFU of every step; remove it"
_OWN_LOOP = "is not used: parallel3d scales and reduces the gradients itself; remove it"
_CHECKPOINT = "is not used: parallel3d writes its own checkpoint format; remove it"
_MASTERS = "is not supported: master weights and moments are fp32; remove it"


_COPIES = (
    "is not supported; remove it, and set parallel3d.mesh.dp_shards, which shards all states over "
    "so many dp ranks, and keeps copies on the others"
)


_EITHER = Key("must be true or false, and has no effect; remove it", (True, False))
_NO_EFFECT = Key("has no effect; remove it", (ANY,))
_ONE_BIT = Key("is for 1-bit optimizers, which are not supported; remove it")
TOP_LEVEL = SWITCHED_BLOCKS | {
    "activation_checkpointing": Key(
        f"is not used; set {_RECOMPUTE}",
        # The number of checkpoints matters to contiguous_memory_optimization only. Synchronizing at
        # each, or timing it, does not change results.
        items={
            "partition_activations": (False,),
            "number_checkpoints": (ANY,),
            "contiguous_memory_optimization": (False,),
            "synchronize_checkpoint_boundary": (True, False),
            "profile": (True, False),
            "cpu_checkpointing": (False,),
        },
        reasons={
            "partition_activations": "is not supported: stored activations are not partitioned "
            "over tp; set parallel3d.mesh.sequence_parallel, which stores only each rank's part",
            "contiguous_memory_optimization": "is not supported: activations are not copied to a "
            "common buffer; remove it",
            "cpu_checkpointing": f'is not used; set {_RECOMPUTE} = "full" and '
            'parallel3d.pipeline.offload_activations = "cpu"',
        },
    ),
    "bfloat16": Key('is the old name of "bf16", which is set too; remove it'),
    "checkpoint": Key(
        f"{_CHECKPOINT}, or set parallel3d.checkpoint",
        items={
            "tag_validation": ("Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL"),
            "load_universal": (False,),
            "use_node_local_storage": (False,),
            "checkpoint_serialization": (True,),
            "writer": (None,),
            "parallel_write": ({}, {"pipeline_stage": False}),
        },
    ),
    "compression_training": Key(_GONE),
    "data_parallel_size": Key("is not used; set parallel3d.mesh.dp"),
    "data_types": Key(
        "must be fp32: gradients are accumulated and reduced in fp32 so that results do not depend "
        "on the mesh, and parameters and buffers use the run's precision; remove it",
        items={
            "grad_accum_dtype": (None, "fp32"),
            "param_dtype": (None,),
            "buffer_dtype": (None,),
            "keep_in_fp32_modules": ("auto",),
        },
    ),
    "dataloader_drop_last": _EITHER,
    "datastates_ckpt": Key(_CHECKPOINT, (False, None)),
    "disable_allgather": Key(
        "is not supported: every rank needs the updated weights; remove it", (False,)
    ),
    "disable_python_gc": Key(
        "is not supported: Python's garbage collection stays on; remove it", (False,)
    ),
    "dump_state": _EITHER,
    "gradient_allreduce_op": Key(_OWN_LOOP, ("mean",)),
    "gradient_predivide_factor": Key(_OWN_LOOP, (1,)),
    "graph_harvesting": Key(_GONE, (False,)),
    "log_level": Key(
        "must be a log level, and has no effect: DeepSpeed logs errors only; remove it", _LOG_LEVELS
    ),
    "managed_gradient_accumulation": Key(_OWN_LOOP, (True,)),
    "memory_breakdown": _EITHER,
    "pipeline": Key(
        "is not used: DeepSpeed's pipeline engine does not run; set parallel3d.pipeline",
        items={
            "stages": (None, "auto"),
            "partition": ("best",),
            "seed_layers": (False,),
            "activation_checkpoint_interval": (0,),
            "pipe_partitioned": (True,),
            "grad_partitioned": (True,),
        },
    ),
    "prescale_gradients": _EITHER,  # gradients are reduced in fp32, so only rounding could differ
    "seq_parallel_communication_data_type": Key(
        "is not used: it is for DeepSpeed-Ulysses; remove it", (None, "fp32")
    ),
    "sequence_parallel_size": Key(
        "is not used: it is for DeepSpeed-Ulysses; set parallel3d.mesh.cp", (1,)
    ),
    "sparse_attention": Key(_GONE),
    "sparse_gradients": Key(_GONE, (False,)),
    "tensor_parallel": Key(
        "is not used: parallel3d shards its own layers; set parallel3d.mesh.tp",
        items={"autotp_size": (0, 1)},
    ),
    # DeepSpeed's throughput line is never printed.
    "timers": Key(_METRICS, items={"throughput": _TIMERS}),
    "use_data_before_expert_parallelism": Key(
        "is not used: mesh.ep ranks are always within dp; remove it, and set parallel3d.mesh.ep",
        (False,),
    ),
    "vocabulary_size": Key("is not used; set parallel3d.model.vocab_size", (None,)),
    "weight_quantization": Key("is not supported: it is for inference; remove it"),
    "zero_allow_untested_optimizer": _EITHER,
    "zero_force_ds_cpu_optimizer": Key(
        "must be false: torch's Adam updates in host memory if DeepSpeed's cannot be compiled; "
        "remove it",
        (False,),
    ),
}

_FULL_WEIGHTS = Key(
    "must be true, false or auto, and has no effect; set parallel3d.run.save_weights",
    (True, False, "auto"),
)
_GATHERS = (
    "is not supported: weights are all-gathered; remove it, or set parallel3d.pipeline.weights"
)
_QUANTIZED = Key("is part of ZeRO++: quantization would change results; remove it", (False,))

# By the dotted path of the block that has the keys.
BY_SECTION: dict[str, dict[str, Key]] = {
    "": TOP_LEVEL,
    "aio": {
        "thread_count": Key('is the old name of "intra_op_parallelism"; use that'),
        "use_gds": Key("is not supported: it needs NVIDIA GPUDirect Storage; remove it", (False,)),
    },
    "bf16": {
        "bf16_master_weights_and_grads": Key(_MASTERS, (False,)),
        "bf16_optimizer_states": Key(_MASTERS, (False,)),
        "check_grad_overflow": Key(
            "must be true: a gradient that is not finite stops the run; remove it", (True,)
        ),
        "immediate_grad_update": Key(_OWN_LOOP, (False,)),
    },
    "comms_logger": dict.fromkeys(("verbose", "debug"), _NO_EFFECT),
    "flops_profiler": dict.fromkeys(
        ("module_depth", "top_modules", "recompute_fwd_factor", "detailed", "output_file"),
        _NO_EFFECT,
    ),
    "fp16": {"auto_cast": _EITHER, "fp16_master_weights_and_grads": Key(_MASTERS, (False,))},
    "optimizer": {"legacy_fusion": Key("is for LAMB, which is not supported; remove it", (False,))},
    "optimizer.params": {
        "adam_w_mode": Key(
            "must be true: weight decay is decoupled, as in AdamW; remove it", (True,)
        ),
        "amsgrad": Key(
            "is not supported: DeepSpeed's Adam does not implement it; remove it", (False,)
        ),
        "bias_correction": Key(
            "must be true: the bias of the moments is always corrected; remove it", (True,)
        ),
        "foreach": Key("is not used: torch chooses the fastest implementation; remove it", (None,)),
        "fp32_optimizer_states": Key(
            "must be true: master weights and moments are fp32; remove it", (True,)
        ),
        "fused": Key("is not used: Adam is fused wherever the device allows; remove it", (None,)),
        "ns_method": Key(
            'must be "standard": the Gram iteration loses digits; remove it', ("standard",)
        ),
        "max_grad_norm": Key("is not used; set gradient_clipping", (None, 0)),
        "set_grad_none": _EITHER,
        "torch_adam": _EITHER,  # on the device it is torch's anyway
        **dict.fromkeys(_ONE_BIT_PARAMS, _ONE_BIT),
    },
    "scheduler.params": {
        "last_batch_iteration": Key(
            "is not used: a resumed run continues its schedule by itself; remove it", (-1,)
        )
    },
    "zero_optimization": {
        "allgather_partitions": Key(
            "must be true: updated weights are all-gathered; remove it", (True,)
        ),
        "compute_grad_norm": Key(
            "must be true: every step reports its gradient norm; remove it", (True,)
        ),
        "cpu_offload": Key(
            'is deprecated; use "offload_optimizer": {"device": "cpu"}', (False, None)
        ),
        "cpu_offload_param": Key(
            'is deprecated; use "offload_param": {"device": "cpu"}', (False, None)
        ),
        "cpu_offload_use_pin_memory": Key(
            "is deprecated and ignored by DeepSpeed; use offload_optimizer.pin_memory", (None,)
        ),
        "elastic_checkpoint": Key(_CHECKPOINT, (False,)),
        "enable_sanity_checks": Key(
            "is not supported: a run tests itself at its start; remove it", (False,)
        ),
        "ignore_unused_parameters": _EITHER,
        "leaf_module": Key(
            "is not used: no module is a ZeRO-3 leaf; remove it",
            items=dict.fromkeys(("classes", "names", "name_suffixes"), ([],)),
        ),
        "legacy_stage1": Key(
            "is the old stage 1, which DeepSpeed has removed; remove it", (False,)
        ),
        "load_from_fp32_weights": Key(_CHECKPOINT, (True,)),
        "log_trace_cache_warnings": _EITHER,
        "memory_efficient_linear": _EITHER,
        "mics_hierarchical_params_gather": Key(_GONE, (False,)),
        "mics_shard_size": Key(_COPIES, (-1,)),
        "override_module_apply": _EITHER,
        "parameter_alignment": Key("is not supported: ZeRO packs parameters; remove it", (False,)),
        "pipeline_loading_checkpoint": Key(_CHECKPOINT, (False,)),
        "reduce_scatter": Key(
            "must be true: a gradient is reduced to the rank that owns it; remove it", (True,)
        ),
        "round_robin_gradients": Key(
            "is not supported: with it, DeepSpeed 0.19.8 reads fp32 weights from wrong places "
            "(link_hp_params), so saved weights would be wrong; remove it",
            (False,),
        ),
        "save_muon_momentum_buffer_in_memory": Key(
            "is not used: Muon's momentum is where offload_optimizer puts it; remove it", (False,)
        ),
        "stage3_allgather_sequential": Key(_GATHERS, (False,)),
        "stage3_gather_16bit_weights_on_model_save": _FULL_WEIGHTS,
        "stage3_gather_fp16_weights_on_model_save": _FULL_WEIGHTS,
        "stage3_model_persistence_threshold": Key(
            "is not supported; set stage3_param_persistence_threshold", (2**63 - 1,)
        ),
        "stage3_module_granularity_threshold": Key(_GATHERS, (0,)),
        "stage3_use_all_reduce_for_fetch_params": Key(_GATHERS, (False,)),
        "zenflow": Key(
            "is not supported: its stale gradients would change results; remove it", (None,)
        ),
        "zero_hpz_partition_size": Key(_COPIES, (1,)),
        "zero_quantized_gradients": _QUANTIZED,
        "zero_quantized_nontrainable_weights": _QUANTIZED,
        "zero_quantized_weights": _QUANTIZED,
        "zeropp_loco_param": Key(_GONE, (None,)),
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": Key(
            "belongs to super_offload, which is not supported; remove it", (0.8,)
        ),
        "fast_init": Key(
            "is not supported: with parameters on NVMe it starts from wrong weights; remove it",
            (False,),
        ),
        "ratio": Key(
            "must be 1: the optimizer state is offloaded completely or not at all; remove it", (1,)
        ),
        "super_offload": Key("is not supported: it is specific to GH200; remove it", (False,)),
    },
}
_DEEPSEEK = "was removed: only models of DeepSeek have it; remove it"
_ARCHITECTURE = 'was removed; use the family "transformers" with a model_type'
# Settings of ours in earlier releases, whose runs have their values in config.json.
REMOVED: dict[str, dict[str, Key]] = {
    "parallel3d.mesh": {
        "cp_ring": Key(
            "was removed: keys and values are gathered, which is faster; remove it", (False,)
        )
    },
    "parallel3d.pipeline": {
        "scatter_activations": Key(
            "was removed: with sequence parallelism each tp rank sends only its part; remove it, "
            "and set parallel3d.mesh.sequence_parallel",
            (False,),
        )
    },
    "parallel3d.train": {
        "check_layers": Key(
            "was removed, with the check of layers at startup; remove it, and run `parallel3d "
            "verify` to compare the layers with one process"
        )
    },
    "parallel3d.model": {
        "mlp_only_layers": Key(
            "was removed; set first_k_dense_replace or decoder_sparse_step", ([],)
        ),
        "attention_sinks": Key(f'{_ARCHITECTURE} such as "granite_swa" or "gpt_oss"'),
        "no_rope_layer_interval": Key(f'{_ARCHITECTURE} such as "smollm3"'),
        "post_norm": Key(f'{_ARCHITECTURE} such as "olmo2"'),
    },
    "parallel3d.model.rope_scaling": {
        "truncate": Key("was removed: ranges begin at whole pairs of features; remove it", (True,)),
        "mscale": Key(_DEEPSEEK, (None,)),
        "mscale_all_dim": Key(_DEEPSEEK, (None,)),
    },
}
# All of them, by the dotted path of the block that has the keys.
UNUSED = BY_SECTION | REMOVED
