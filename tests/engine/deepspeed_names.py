"""The private names of DeepSpeed that the engine uses, and the versions that have them.

`pyproject.toml` allows the versions that have all of them and pass tests/engine. DeepSpeed may
rename or drop a private name in any release, and a remedy that sets an attribute which nothing
reads is no remedy. test_names.py compares the list with the engine's code and with the DeepSpeed
that is installed.
"""

TRIED = ("0.19.5", "0.19.6", "0.19.7", "0.19.8")
"""The versions in whose code the names were looked up."""

FIRST_VERSION = {
    # ZeRO-1 and 2: DeepSpeedZeroOptimizer
    "_add_full_reduction_to_compact_grad_partition": "0.19.8",
    "_add_to_grad_partition_buffer": "0.19.8",
    "_get_compact_grad_partition_slice": "0.19.8",
    "_gradient_reduction_buffer_dtype": "0.19.8",
    "_link_all_hp_params": "0.19.5",
    "accumulated_grads_in_cpu": "0.19.5",
    "averaged_gradients": "0.19.5",
    "bit16_groups": "0.19.5",
    "grad_position": "0.19.5",
    "parallel_partitioned_bit16_groups": "0.19.5",
    "partition_size": "0.19.5",
    "process_gradients": "0.19.5",
    "real_dp_process_group": "0.19.5",
    "reduce_ipg_grads": "0.19.5",
    "reduction_stream": "0.19.5",
    "round_robin_bit16_groups": "0.19.5",
    "round_robin_bit16_offsets": "0.19.7",
    "setup_buckets": "0.19.5",
    "single_partition_of_fp32_groups": "0.19.5",
    "update_lp_params": "0.19.5",
    # ZeRO-3: DeepSpeedZeroOptimizer_Stage3
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": "0.19.5",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": "0.19.5",
    "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": "0.19.5",
    "_get_norm_groups": "0.19.5",
    "_get_param_partition_group": "0.19.5",
    "_get_param_partition_rank": "0.19.5",
    "_partition_all_parameters": "0.19.5",
    "_reassign_or_swap_out_partitioned_parameters": "0.19.5",
    "_swappable_optimizer_subgroup": "0.19.5",
    "_unflatten_partitioned_parameters": "0.19.5",
    "fp16_groups": "0.19.5",
    "fp16_partitioned_groups_flat": "0.19.5",
    "fp16_partitioned_groups_flat_numel": "0.19.5",
    "fp32_partitioned_groups_flat": "0.19.5",
    "ipg_buckets": "0.19.5",
    "optimizer_swapper": "0.19.5",
    "parameter_offload": "0.19.5",
    "partition_grads": "0.19.5",
    "reduce_and_partition_stream": "0.19.5",
    "sub_group_to_group_id": "0.19.5",
    # Both
    "_coalesce_grad_reduction": "0.19.5",
    "_grad_acc_hooks": "0.19.5",
    "_update_scale": "0.19.5",
    "clear_backward_seen_flag": "0.19.5",
    "combine_grad_norm_groups": "0.19.8",
    "get_param_id": "0.19.5",
    "gradient_accumulation_dtype": "0.19.5",
    "micro_step_id": "0.19.5",
    "overlapping_partition_gradients_reduce_epilogue": "0.19.5",
    "reduce_ready_partitions_and_remove_grads": "0.19.5",
    "unscale_and_clip_grads": "0.19.5",
    # Parameters and modules
    "_convert_to_deepspeed_param": "0.19.5",
    "_remove_module_hooks": "0.19.5",
    "ds_grads_remaining": "0.19.5",
    "ds_numel": "0.19.5",
    "ds_opt_adam": "0.19.5",
    "ds_pipe_replicated": "0.19.5",
    "ds_process_group": "0.19.5",
    "ds_shape": "0.19.5",
    "ds_status": "0.19.5",
    "ds_tensor": "0.19.5",
    "ds_zero_partition_process_group": "0.19.5",
    "nvme_swapper": "0.19.5",
    # The coordinator of gathers
    "_PartitionedParameterCoordinator__allgather_stream": "0.19.5",
    "_PartitionedParameterCoordinator__param_order": "0.19.5",
    "_PartitionedParameterCoordinator__params_to_release": "0.19.5",
    "_PartitionedParameterCoordinator__step_id_module_fetched_for": "0.19.5",
    "_PartitionedParameterCoordinator__submodule_order": "0.19.5",
    "_PartitionedParameterCoordinator__trace_mode": "0.19.5",
    "assert_ints_same_as_other_ranks": "0.19.5",
    # The engine, its groups, swapping and building
    "_EXPERT_DATA_PARALLEL_GROUP": "0.19.5",
    "_EXPERT_PARALLEL_GROUP": "0.19.5",
    "_adjust_for_misaligned_lengths": "0.19.5",
    "_flush_coalesced_reduction_zero12": "0.19.5",
    "_flush_coalesced_reduction_zero3": "0.19.5",
    "_manual_backward_expected": "0.19.5",
    "build_shm_op": "0.19.5",
    "installed_ops": "0.19.5",
}
"""Each private name -> the first of the versions tried that has it; all later ones have it."""
