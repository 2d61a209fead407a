"""The keys of DeepSpeed 0.19.8 that are no settings of parallel3d: what each may say, and why.

A value that says what parallel3d does anyway, or switches off what it does not have, is left out;
any other is refused with the reason. tests/config/test_deepspeed_keys.py compares the tables with
the installed DeepSpeed.
"""

from dataclasses import dataclass, field
from typing import Any

from parallel3d.base.section import ABSENT

ANY: Any = object()  # every value


@dataclass(frozen=True)
class Key:
    """A DeepSpeed key that is not a setting, and why values are refused: "rule; remedy"."""

    reason: str
    values: tuple[Any, ...] = ()
    items: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    switch: str = ""
    reasons: dict[str, str] = field(default_factory=dict)

    def refused(self, value: Any) -> Any:
        """The part of `value` that is refused; ABSENT if nothing is."""
        if any(_same(value, v) for v in self.values):
            return ABSENT
        if not isinstance(value, dict) or not (self.switch or self.items):
            return value
        if self.switch:
            return ABSENT if value.get(self.switch, False) is False else value
        return {k: v for k, v in value.items() if not self._accepts(k, v)} or ABSENT

    def _accepts(self, item: str, value: Any) -> bool:
        return any(v is ANY or _same(value, v) for v in self.items.get(item, ()))


def _same(a: Any, b: Any) -> bool:
    """Equality as in JSON, where 1 is 1.0 but not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


_TIMERS = (
    *({"enabled": e} for e in (True, False)),
    *({"enabled": e, "synchronized": s} for e in (True, False) for s in (True, False)),
)
_LOG_LEVELS = (None, "debug", "info", "warning", "error", "critical")
_RECOMPUTE = "parallel3d.pipeline.activation_checkpointing"
_REMOVED = "was removed from DeepSpeed 0.19"
_METRICS = "is not used: metrics.jsonl has loss, speed, memory and MFU of each step; remove it"
_OWN_LOOP = "is not used: parallel3d divides and reduces the gradients itself; remove it"
_CHECKPOINT = "is not used: parallel3d writes its own files; remove it"
_FP32 = "must be fp32: gradients are added up and reduced in fp32, so that they do not depend on"
_NO_EXPERTS = "has no meaning here: no model family has experts; remove it"
_MASTERS = "is not possible: master weights and moments are fp32; remove it"
_NO_COMPILE = "is not used: the model is not compiled; remove it"


def _either(why: str) -> Key:
    """A key of which neither value changes anything."""
    return Key(f"must be true or false, although {why}; remove it", (True, False))


TOP_LEVEL = {
    "activation_checkpointing": Key(
        f"is not used; set {_RECOMPUTE}",
        # How many there are matters to contiguous_memory_optimization alone; to wait for the device
        # at each, or to time it, changes no number.
        items={
            "partition_activations": (False,),
            "number_checkpoints": (ANY,),
            "contiguous_memory_optimization": (False,),
            "synchronize_checkpoint_boundary": (True, False),
            "profile": (True, False),
            "cpu_checkpointing": (False,),
        },
        reasons={
            "partition_activations": "is not possible: activations are not cut over tp afterwards; "
            "set parallel3d.mesh.sequence_parallel, which keeps the part alone",
            "contiguous_memory_optimization": "is not supported: activations have no buffer of "
            "their own; remove it",
            "cpu_checkpointing": "is not supported: activations stay on the device; remove it, or "
            f'set {_RECOMPUTE} = "full", which keeps the least',
        },
    ),
    "amp": Key(f"{_REMOVED}; use bf16", switch="enabled"),
    "autotuning": Key(
        "is not possible: it starts the script anew to search; remove it", switch="enabled"
    ),
    "bfloat16": Key('is the old name of "bf16", which is there too; remove it'),
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
    "compile": Key(_NO_COMPILE, switch="deepcompile"),
    "compression_training": Key(f"{_REMOVED}; remove it"),
    "curriculum_learning": Key(f"{_REMOVED}; remove it", switch="enabled"),
    "data_efficiency": Key(
        "is not used: the order of samples is parallel3d's; remove it", switch="enabled"
    ),
    "data_parallel_size": Key("is not used; set parallel3d.mesh.dp"),
    "data_types": Key(
        f"{_FP32} the mesh, and parameters and buffers have the run's precision; remove it",
        items={
            "grad_accum_dtype": (None, "fp32"),
            "param_dtype": (None,),
            "buffer_dtype": (None,),
            "keep_in_fp32_modules": ("auto",),
        },
    ),
    "dataloader_drop_last": _either("every batch is full"),
    "datastates_ckpt": Key(_CHECKPOINT, (False, None)),
    "disable_allgather": Key(
        "is not possible: every rank needs the new weights; remove it", (False,)
    ),
    "disable_python_gc": Key("is not used: collecting garbage stays on; remove it", (False,)),
    "dump_state": _either("config.json in the run's folder has all settings"),
    "eigenvalue": Key(f"{_REMOVED}; remove it", switch="enabled"),
    "elasticity": Key(f"{_REMOVED}; set train_micro_batch_size_per_gpu", switch="enabled"),
    "expert_parallel": Key(_NO_EXPERTS, switch="enabled"),
    "gradient_allreduce_op": Key(_OWN_LOOP, ("mean",)),
    "gradient_predivide_factor": Key(_OWN_LOOP, (1,)),
    "graph_harvesting": Key(f"{_REMOVED}; remove it", (False,)),
    "hybrid_engine": Key("is not used: it is for RLHF; remove it", switch="enabled"),
    "log_level": Key("is not used: DeepSpeed's log is kept to errors; remove it", _LOG_LEVELS),
    "managed_gradient_accumulation": Key(_OWN_LOOP, (True,)),
    "memory_breakdown": _either("metrics.jsonl has the peak memory of each step"),
    "nebula": Key(f"{_REMOVED}; remove it", switch="enabled"),
    "pipeline": Key(
        "is not used: DeepSpeed's own pipeline does not run; set parallel3d.pipeline",
        items={
            "stages": (None, "auto"),
            "partition": ("best",),
            "seed_layers": (False,),
            "activation_checkpoint_interval": (0,),
            "pipe_partitioned": (True,),
            "grad_partitioned": (True,),
        },
    ),
    "prescale_gradients": Key(
        "is not possible: parallel3d divides and reduces the gradients itself, in fp32; to divide "
        "them before the sum would only round them differently; remove it",
        (False,),
    ),
    "progressive_layer_drop": Key(f"{_REMOVED}; remove it", switch="enabled"),
    "quantize_training": Key(f"{_REMOVED}; remove it", switch="enabled"),
    "seq_parallel_communication_data_type": Key(
        "is not used: it is for DeepSpeed-Ulysses; remove it", (None, "fp32")
    ),
    "sequence_parallel_size": Key(
        "is not used: it is for DeepSpeed-Ulysses; set parallel3d.mesh.sequence_parallel", (1,)
    ),
    "sparse_attention": Key(f"{_REMOVED}; remove it"),
    "sparse_gradients": Key(f"{_REMOVED}; remove it", (False,)),
    "tensor_parallel": Key(
        "is not used: parallel3d cuts its own layers; set parallel3d.mesh.tp",
        items={"autotp_size": (0, 1)},
    ),
    # DeepSpeed's own line is never printed, on or off.
    "timers": Key(_METRICS, items={"throughput": _TIMERS}),
    "torch_autocast": Key("is not used: the whole model has one type; use bf16", switch="enabled"),
    "use_data_before_expert_parallelism": Key(_NO_EXPERTS, (False,)),
    "vocabulary_size": Key("is not used; set parallel3d.model.vocab_size", (None,)),
    "weight_quantization": Key("is not used: it is for inference; remove it"),
    "zero_allow_untested_optimizer": _either("parallel3d brings its own optimizer, and tests it"),
    "zero_force_ds_cpu_optimizer": Key(
        "cannot be promised: torch's Adam steps in host memory where DeepSpeed's cannot be "
        "compiled; remove it",
        (False,),
    ),
}

_SAVED = "weights are saved whole if parallel3d.run.save_weights says so"
_QUANTISED = "is part of ZeRO++: what is quantised does not train to the numbers of one process"

_ALL_OFFLOADED = "is not possible: all of the optimizer's state is offloaded, or none; remove it"

# By the dotted path of the section that the keys stand in.
BY_SECTION: dict[str, dict[str, Key]] = {
    "": TOP_LEVEL,
    "aio": {
        "use_gds": Key("is not supported: it needs NVIDIA's GPUDirect Storage; remove it", (False,))
    },
    "bf16": {
        "bf16_master_weights_and_grads": Key(_MASTERS, (False,)),
        "bf16_optimizer_states": Key(_MASTERS, (False,)),
        "check_grad_overflow": Key(
            "must be true: a gradient that is not finite stops the run; remove it", (True,)
        ),
        "immediate_grad_update": Key(_OWN_LOOP, (False,)),
    },
    "fp16": {
        "auto_cast": _either("what goes into the model are token ids"),
        "fp16_master_weights_and_grads": Key(_MASTERS, (False,)),
    },
    "optimizer": {"legacy_fusion": Key("is for LAMB, which is not supported; remove it", (False,))},
    "optimizer.params": {
        "adam_w_mode": Key(
            "must be true: weight decay is decoupled, as in AdamW; remove it", (True,)
        ),
        "amsgrad": Key("is not supported: DeepSpeed's Adams do not have it; remove it", (False,)),
        "bias_correction": Key(
            "must be true: the moments' bias is always corrected; remove it", (True,)
        ),
        "foreach": Key("is not used: torch chooses the fastest implementation; remove it", (None,)),
        "fp32_optimizer_states": Key(_MASTERS.replace("possible", "a choice"), (True,)),
        "fused": Key("is not used: it is on wherever the device has it; remove it", (None,)),
        "max_grad_norm": Key("is not used; set gradient_clipping", (None, 0)),
    },
    "scheduler.params": {
        "cycle_min_mom": Key("is not used: the betas are constant; remove it", (0.8,)),
        "cycle_max_mom": Key("is not used: the betas are constant; remove it", (0.9,)),
        "decay_mom_rate": Key("is not used: the betas are constant; remove it", (0,)),
        # Resuming is parallel3d's, not the file's.
        "last_batch_iteration": Key(
            "is not used: a run starts at its first step; remove it", (-1,)
        ),
    },
    "zero_optimization": {
        "compute_grad_norm": Key(
            "must be true: each step reports its gradient norm; remove it", (True,)
        ),
        "cpu_offload": Key(
            'is deprecated; use "offload_optimizer": {"device": "cpu"}', (False, None)
        ),
        "cpu_offload_param": Key(
            'is deprecated; use "offload_param": {"device": "cpu"}', (False, None)
        ),
        "cpu_offload_use_pin_memory": Key(
            "is deprecated, DeepSpeed does not read it; use offload_optimizer.pin_memory", (None,)
        ),
        "elastic_checkpoint": Key(_CHECKPOINT, (False,)),
        "leaf_module": Key(
            "is not used: no layer is a leaf to ZeRO-3; use stage3_module_granularity_threshold",
            items=dict.fromkeys(("classes", "names", "name_suffixes"), ([],)),
        ),
        "legacy_stage1": Key(
            "is the old stage 1, which DeepSpeed no longer has; remove it", (False,)
        ),
        "load_from_fp32_weights": Key(_CHECKPOINT, (True,)),
        "memory_efficient_linear": _either("parallel3d's own linear layers save that memory"),
        "mics_hierarchical_params_gather": Key(f"{_REMOVED}; remove it", (False,)),
        "mics_shard_size": Key(f"{_REMOVED}; remove it", (-1,)),
        "pipeline_loading_checkpoint": Key(_CHECKPOINT, (False,)),
        "round_robin_gradients": Key(
            "is not possible: with it DeepSpeed 0.19.8 reads fp32 weights from wrong places "
            "(link_hp_params), so what is saved would be wrong; remove it",
            (False,),
        ),
        "save_muon_momentum_buffer_in_memory": Key("has no effect on Adam; remove it", (False,)),
        "stage3_gather_16bit_weights_on_model_save": _either(_SAVED),
        "stage3_gather_fp16_weights_on_model_save": _either(_SAVED),
        "zenflow": Key(
            "is not possible: it steps on stale gradients, so results change; remove it", (None,)
        ),
        "zero_hpz_partition_size": Key(
            "is part of ZeRO++, whose groups are neighbouring ranks, not a stage's; remove it", (1,)
        ),
        "zero_quantized_gradients": Key(f"{_QUANTISED}; remove it", (False,)),
        "zero_quantized_nontrainable_weights": Key(f"{_QUANTISED}; remove it", (False,)),
        "zero_quantized_weights": Key(f"{_QUANTISED}; remove it", (False,)),
        "zeropp_loco_param": Key(f"{_REMOVED}; remove it", (None,)),
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": Key(
            "belongs to super_offload, which is not supported; remove it", (0.8,)
        ),
        "ratio": Key(_ALL_OFFLOADED, (1,)),
        "super_offload": Key(
            "is not supported: it is for one kind of chip (GH200); remove it", (False,)
        ),
    },
}
# Why values are refused, by the path of the block and by the key.
REASONS = {
    section: {name: key.reason for name, key in keys.items()}
    for section, keys in BY_SECTION.items()
} | {name: key.reasons for name, key in TOP_LEVEL.items() if key.reasons}
