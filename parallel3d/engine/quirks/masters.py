"""DeepSpeed 0.19.8's masters, where they need not be: weights in fp32 are their own."""

from typing import Any

from torch import Tensor


def share_with_weights(optimizer: Any) -> None:
    """Let a master be the weights that it is of, where both lie on one device in one type.

    DeepSpeed copies these, too, and keeps 4 bytes an element of this rank's share for nothing: it
    has Adam write the master, and copies it into the weights after. To be called before the first
    step.
    """
    is_zero3 = hasattr(optimizer, "fp16_groups")
    settings = ("offload_optimizer", "offload_param") if is_zero3 else ("cpu_offload",)
    if any(getattr(optimizer, name) for name in settings):
        return  # on a CPU both would lie on one device all the same
    if is_zero3:
        masters, weights = (
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups_flat,
        )
    else:
        masters = optimizer.single_partition_of_fp32_groups
        weights = [
            parts[group.rank()]
            for parts, group in zip(
                optimizer.parallel_partitioned_bit16_groups,
                optimizer.real_dp_process_group,
                strict=True,
            )
        ]
    for master, own in zip(masters, weights, strict=True):
        if own is not None and _alike(master, own):
            master.data = own.data
    if not is_zero3:
        optimizer._link_all_hp_params()  # it has views of the masters


def _alike(master: Tensor, weights: Tensor) -> bool:
    return (
        master.dtype == weights.dtype
        and master.device == weights.device
        and master.shape == weights.shape
    )
