"""Bytes that a rank holds for good: parameters, gradients and optimizer states, counted."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def held_bytes(engine: Any, parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Bytes of "parameters" (in the training type), "gradients" and "optimizer" (fp32 masters and
    moments; on the host with offload) that this rank holds, each storage counted once."""
    optimizer = engine.optimizer
    weights = [getattr(p, "ds_tensor", p.data) for p in parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if hasattr(optimizer, "fp16_groups"):
        masters = list(optimizer.fp32_partitioned_groups_flat)
        gradients += list(
            optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values()
        )
    else:
        masters = list(optimizer.single_partition_of_fp32_groups)
        gradients += [
            g for group in (optimizer.averaged_gradients or {}).values() for g in group or ()
        ]
    gradients += [m.grad for m in masters if m.grad is not None]
    states = [s for state in optimizer.optimizer.state.values() for s in state.values()]
    moments = [s for s in states if isinstance(s, Tensor) and s.numel() > 1]
    return {
        "parameters": _bytes(weights),
        "gradients": _bytes(gradients),
        "optimizer": _bytes([*masters, *moments]),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
