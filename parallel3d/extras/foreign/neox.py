"""GPT-NeoX's YAML: its own settings, with DeepSpeed's under their own names beside them."""

from typing import Any

from parallel3d.extras.foreign.rules import Rule, dropped, missing, renamed, same

_FULL = ("global", "flash")


TABLE: dict[str, Rule] = {
    # The mesh
    **renamed(
        """
        model_parallel_size  parallel3d.mesh.tp
        sequence_parallel    parallel3d.mesh.sequence_parallel
        """
    ),
    "pipe_parallel_size": Rule("parallel3d.mesh.pp", lambda size: max(1, size)),
    "context_parallel_size": Rule("parallel3d.mesh.cp", lambda size: max(1, size)),
    **dropped("pipe_partition_method", "layers are placed on stages by their cost"),
    # The model
    **renamed(
        """
        num_layers         parallel3d.model.num_hidden_layers
        num_kv_heads       parallel3d.model.num_key_value_heads
        intermediate_size  parallel3d.model.intermediate_size@inner
        expansion_factor   parallel3d.model.intermediate_size@expansion
        mlp_multiple_of    parallel3d.model.intermediate_size@multiple
        layernorm_epsilon  parallel3d.model@layer_norm_eps
        rms_norm_epsilon   parallel3d.model@rms_norm_eps
        rotary_pct         parallel3d.model.config@rotary_pct
        rotary_emb_base    parallel3d.model@rope_theta
        gpt_j_residual     parallel3d.model.config@parallel_residual
        init_method_std    parallel3d.model.initializer_range
        hidden_dropout     parallel3d.model@dropout
        attention_dropout  parallel3d.model.attn_pdrop@attention_dropout
        """
    ),
    **same("hidden_size num_attention_heads max_position_embeddings", "parallel3d.model"),
    "norm": Rule(
        "parallel3d.model.family@norm",
        {
            "layernorm": "layernorm",
            "rmsnorm": "rmsnorm",
            "te_layernorm": "layernorm",
            "te_rmsnorm": "rmsnorm",
        },
        verdict="REFUSED",
    ),
    "pos_emb": Rule(
        "parallel3d.model.family@position",
        {"learned": "learned", "rotary": "rotary"},
        verdict="REFUSED",
    ),
    "no_weight_tying": Rule("parallel3d.model.tie_word_embeddings", lambda untied: not untied),
    **missing("gpt_j_tied", "attention and MLP have a norm each", False, verdict="REFUSED"),
    "activation": Rule(
        "parallel3d.model.family@mlp",
        {"gelu": "gelu", "swiglu": "swiglu", "silu": "silu"},
        verdict="REFUSED",
    ),
    "mlp_type": Rule("parallel3d.model.family@mlp_type", {"llama": "llama"}, plain=("regular",)),
    "bias_gelu_fusion": Rule("parallel3d.model.config@gelu", {True: "gelu_fast", False: "gelu"}),
    **dict.fromkeys(
        ("use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms"),
        Rule("parallel3d.model.family@bias", plain=(True,)),
    ),
    **missing("use_qk_layernorm", "no LayerNorm on query and key", False, verdict="REFUSED"),
    "attention_config": Rule(
        "@attention",
        lambda parts: [_FULL.index(name) for names, _ in parts for name in names],
        why="attention is full in all layers",
        verdict="REFUSED",
    ),
    **missing("sliding_window_width", "attention sees the whole sequence"),
    **missing("init_method", "weights start normal, with initializer_range", "normal"),
    **missing(
        "output_layer_init_method",
        "initializer_range / sqrt(2 x layers) before the residual",
        "scaled_normal",
    ),
    **missing("use_mup", "see parallel3d.model.parametrization", False),
    **dropped(
        "mup_lr mup_std mup_d_model_base mup_hidden_size mup_save save_base_shapes "
        "base_shapes_file mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult "
        "mup_rp_embedding_mult mup_width_scale coord_check coord_check_nsteps coord_check_nseeds",
        "belong to use_mup",
    ),
    **missing(
        "num_experts moe_num_experts moe_expert_parallel_size moe_top_k",
        "write family moe by hand",
        0,
        1,
        verdict="REFUSED",
    ),
    **dropped("make_vocab_size_divisible_by", "vocabularies are cut without padding"),
    # The optimizer
    **renamed(
        """
        weight_decay    optimizer.params.weight_decay
        min_lr          parallel3d.train.lr_schedule.min_ratio@min_lr
        lr_decay_iters  parallel3d.train.lr_schedule@end
        warmup          parallel3d.train.lr_schedule.warmup_steps@warmup_fraction
        """
    ),
    **missing("optimizer.type", "AdamW is the only one", "Adam", "AdamW", "CPU_Adam"),
    **dropped("optimizer.params.max_grad_norm", "as gradient_clipping says"),
    "lr_decay_style": Rule(
        "parallel3d.train.lr_schedule.type@style",
        {"linear": "linear", "cosine": "cosine", "constant": "constant"},
    ),
    **dropped(
        "override_lr_scheduler use_checkpoint_lr_scheduler", "a resumed run goes on by itself"
    ),
    "zero_optimization.cpu_offload": Rule(
        "zero_optimization.offload_optimizer.device", {True: "cpu"}, plain=(False,)
    ),
    # Batch, length and precision
    **renamed(
        """
        seq_length   parallel3d.data.sequence_length
        train_iters  parallel3d.train.steps@steps
        gas          gradient_accumulation_steps
        """
    ),
    "precision": Rule(
        "bf16.enabled", {"bfloat16": True, "fp32": False}, why='set "fp16": {"enabled": true}'
    ),
    **missing("fp16.type", 'set "bf16": {"enabled": true}, without fp16', "fp16"),
    **dropped("fp16.fp16", "as fp16.enabled says"),
    **missing("fp32_allreduce", "gradients are averaged in fp32", True),
    "checkpoint_activations": Rule(
        "parallel3d.pipeline.activation_checkpointing", {True: "full", False: "none"}
    ),
    **dropped(
        "checkpoint_num_layers checkpoint_in_cpu synchronize_each_layer contiguous_checkpointing",
        "each layer is recomputed by itself",
    ),
    **dropped("partition_activations", "see parallel3d.mesh.sequence_parallel"),
    **dropped(
        "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion "
        "bias_dropout_fusion rope_fusion layernorm_fusion rmsnorm_fusion fused_dropout "
        "output_layer_parallelism attention_softmax_in_fp32 apply_query_key_layer_scaling "
        "use_cpu_initialization num_workers",
        "the device and the mesh decide",
    ),
    # Data
    **renamed(
        """
        train_data_weights    parallel3d.data.mixture@weights
        vocab_file            parallel3d.data.tokenizer@tokenizer_path
        reset_attention_mask  parallel3d.data.isolate_documents
        """
    ),
    **dict.fromkeys(
        ("data_path", "train_data_paths"),
        Rule("parallel3d.data.paths@files", lambda paths: [paths] if type(paths) is str else paths),
    ),
    **dropped(
        "valid_data_paths valid_data_weights test_data_paths test_data_weights split",
        "text is held out; see parallel3d.data.held_out_fraction and parallel3d.data.validation",
    ),
    **missing("data_impl", "files are mapped into memory", "mmap", "infer"),
    "tokenizer_type": Rule(
        "parallel3d.data.tokenizer@tokenizer",
        {"GPT2BPETokenizer": "gpt2", "HFTokenizer": "folder", "SPMTokenizer": "folder"},
        why="set parallel3d.data.tokenizer",
    ),
    **dropped("merge_file", "is in the tokenizer's folder"),
    # Evaluation, checkpoints and output
    **renamed(
        """
        eval_interval      parallel3d.train.evaluate_every
        checkpoint_factor  parallel3d.checkpoint.every
        save_interval      parallel3d.checkpoint.every
        seed               parallel3d.train.seed
        """
    ),
    **dropped("eval_iters", "set parallel3d.train.evaluate_samples"),
    "extra_save_iters": Rule(
        "parallel3d.checkpoint.at", lambda steps: [step for step in steps if step > 0]
    ),
    "keep_last_n_checkpoints": Rule("parallel3d.checkpoint.keep", lambda number: max(2, number)),
    **missing(
        "finetune", "weights come over through Hugging Face: set model.from_pretrained", False
    ),
    **dropped("save load", "see parallel3d.checkpoint and parallel3d.run"),
    **dropped(
        "log_interval log_dir tensorboard_dir use_wandb wandb_project wandb_group wandb_team "
        "wandb_host wandb_run_name log_grad_norm log_param_norm log_optimizer_states",
        "see steps_per_print and run.trackers",
    ),
    **dropped(
        "hostfile launcher deepspeed_mpi deepspeed_slurm distributed_backend num_nodes num_gpus "
        "master_addr master_port include exclude",
        "the launcher's",
    ),
}
DEFAULTS: dict[str, object] = {
    "norm": "layernorm",
    "pos_emb": "learned",
    "activation": "gelu",
    "bias_gelu_fusion": False,
    "gpt_j_residual": False,
    "no_weight_tying": False,
    "rotary_pct": 1.0,
    "weight_decay": 0.1,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "warmup": 0.01,
    "seed": 1234,
    "tokenizer_type": "GPT2BPETokenizer",
    "optimizer.params.lr": 0.001,
    "zero_optimization.stage": 0,
}


def complete(values: dict[str, Any]) -> None:
    """Choose the MLP and its width, as GPT-NeoX's `ParallelMLP` and `LLaMAParallelMLP` do."""
    values.setdefault("@bias", True)
    hidden = values.get("parallel3d.model.hidden_size", 0)
    inner = values.get("@inner", int(values.get("@expansion", 4) * hidden))
    if values.get("@mlp") == "swiglu":  # 2/3 of the width, in halves that are rounded up
        multiple = values.get("@multiple", 256)
        inner = -(-(inner * 2 // 3) // (2 * multiple)) * multiple
    elif values.get("@mlp_type") == "llama":  # 8/3 x hidden_size, rounded up, as in family llama
        values["@mlp"] = "swiglu"
    if inner != 4 * hidden:
        values["parallel3d.model.intermediate_size"] = inner
