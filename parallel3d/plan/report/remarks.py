"""Remarks on DeepSpeed's buffer sizes that take much memory, each with a better size."""

from collections.abc import Iterator
from dataclasses import replace

from parallel3d.config.hardware import Hardware
from parallel3d.plan.memory.peak import Memory, at
from parallel3d.plan.search.remedy import gib
from parallel3d.plan.setting import Setting

LARGE = 0.05
"""Share of a rank's device memory from which a buffer is remarked upon."""
_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "sub_group_size",
)


def on_buffers(setting: Setting, memory: Memory, hardware: Hardware | None) -> Iterator[str]:
    """A line for each DeepSpeed buffer size that makes the fullest rank LARGE times larger.

    The memory due to a size is the difference from the same rank with the size set to the model's
    largest layer, which is the most that is reduced or gathered at once.
    """
    layer = largest_layer(setting)
    for name in _SIZES:
        size = getattr(setting.buffers, name)
        if size <= layer:
            continue
        lower = setting.but(buffers=replace(setting.buffers, **{name: layer}))
        saved = memory.total - at(lower, memory.pp_coord, hardware).total
        if saved >= LARGE * memory.total:
            yield (
                f"{gib(saved)} GiB: DeepSpeed's {name} = {size:,} elements; lower it to that of "
                f"the largest layer: --zero_optimization.{name} {layer}"
            )


def largest_layer(setting: Setting) -> int:
    """Parameters of the largest layer on a tensor-parallel rank, rounded up to two digits."""
    exact = max(sum(p.elements(setting.tp) for p in layer.params) for layer in setting.layers)
    unit: int = 10 ** max(0, len(str(exact)) - 2)
    return -(-exact // unit) * unit
