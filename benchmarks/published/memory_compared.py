"""The planner's memory compared with published runs, runs that ran out of memory included."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published import rows as published
from benchmarks.published.program_memory import Holds, parts_of
from benchmarks.published.rows import PublishedRun
from parallel3d.plan.memory.peak import ALLOCATOR, CONTEXT

GIB = 2**30  # the sources print it as GB or GiB: each divides by 1024 three times

_FSDP2 = Holds(
    # torchtitan: parameters in fp32 are sharded with Adam's two moments, and gathered in bf16;
    # metrics.py reports the most that torch's allocator reserved, the table the most over ranks.
    # The loss is F.cross_entropy on logits.float(), whose bf16 logits are freed before backward:
    # then log-softmax and two gradients. Under tensor parallelism it is loss_parallel
    # (torch/distributed/tensor/parallel/loss.py), whose backward holds four tensors in fp32.
    weight=4,
    states=8,
    logit=12,
    logit_tp=16,
)
_HOLDS: Mapping[str, Holds] = {
    "FSDP2": _FSDP2,
    # bf16 logits and their gradient
    "FSDP2, compiled loss": replace(_FSDP2, logit=4, logit_tp=None),
    "FSDP2, async tp": _FSDP2,
    "nanotron": Holds(
        # nanotron optim/gradient_accumulator.py: fp32 master, moments and gradients; gradients in
        # bf16 until they are accumulated, or in DDP's buckets. sharded_cross_entropy of fp32
        # logits. Greedy placement by get_block_compute_costs. logging: of world rank 0.
        bucket=2,
        logit=10,
        placement="greedy",
        reports="first",
    ),
    "Megatron-DeepSpeed": Holds(
        # DeepSpeed 0.5, runtime/zero/stage2.py (ZeRO-1, too): fp32 master, moments and gradient of
        # the partition, and its fp16 gradients side by side (copy_grads_in_partition); a reduction
        # bucket of 500,000,000 fp16 gradients. mpu/cross_entropy.py clones the fp32 logits; the
        # pipeline engine keeps those of its other buffer (runtime/pipe/engine.py). tr3m-1B3.md
        # gives what nvidia-smi shows on the first node.
        states=16,
        partition=2,
        fixed=1_000_000_000,
        logit=14,
        reports="first",
        of_device=True,
    ),
    "Megatron-LM 2021": Holds(
        # megatron/optimizer: fp16 weights and gradients; fp32 master, gradients and moments.
        states=16,
        logit=10,
        reports="first",
        of_device=True,
    ),
}


class Compared(NamedTuple):
    """A run's memory in bytes: measured, predicted of tensors, and predicted beside tensors."""

    row: PublishedRun
    measured: float
    tensors: int
    context: int

    def error(self, allocator: float = ALLOCATOR) -> float:
        """Predicted over measured memory less 1, with the allocator's share in the prediction."""
        return (self.tensors * (1 + allocator) + self.context) / self.measured - 1


def holds_of(row: PublishedRun) -> Holds | None:
    """The bytes that the program of a row holds; None where the program is not described."""
    return _HOLDS.get(row.setting.workload.software.name)


def compare(row: PublishedRun) -> Compared | None:
    """A row's measured memory beside the planner's; None if the row has no memory figure."""
    holds = holds_of(row)
    if row.memory_gb is None or holds is None:
        return None
    ranks = [sum(parts.values()) for parts in parts_of(row.setting, holds)]
    tensors = ranks[0] if holds.reports == "first" else max(ranks)
    return Compared(row, row.memory_gb * GIB, tensors, CONTEXT if holds.of_device else 0)


def fits(row: PublishedRun) -> bool | None:
    """Whether the planner says that a row's fullest rank fits its device."""
    holds = holds_of(row)
    if holds is None:
        return None
    fullest = max(sum(parts.values()) for parts in parts_of(row.setting, holds, row.hardware))
    return fullest <= row.hardware.memory_bytes.value


def validate_memory(table: Path | str | Sequence[PublishedRun]) -> dict[str, Any]:
    """Errors of the planner's memory on published runs, over all and by source.

    Errors are relative to what was measured. The one number that is fitted, the allocator's share,
    is here for each group the one that fits the *other* groups best. Raises ConfigError where the
    table cannot be read.
    """
    rows = published.read(table)[0] if isinstance(table, (Path, str)) else table
    compared: list[Compared] = []
    said_to_fit: list[PublishedRun] = []
    said_not_to_fit: list[PublishedRun] = []
    for row in rows:
        memory = compare(row)
        if memory is not None:
            compared.append(memory)
        is_said_to_fit = fits(row)
        if is_said_to_fit is True:
            said_to_fit.append(row)
        elif is_said_to_fit is False:
            said_not_to_fit.append(row)
    groups = sorted({c.row.group for c in compared})
    shares = {group: _best_share(compared, group) for group in groups}
    errors = [(c.row, c.error(shares[c.row.group])) for c in compared]
    judged = [*said_to_fit, *said_not_to_fit]
    sources: dict[str, list[float]] = defaultdict(list)
    for row, error in errors:
        sources[row.source].append(error)
    return _summary([error for _, error in errors]) | {
        "out_of_memory_rows": sum(row.out_of_memory for row in judged),
        "said_to_fit": [row.line for row in said_to_fit if row.out_of_memory],
        "ran_rows": sum(not row.out_of_memory for row in judged),
        "ran_but_said_not_to_fit": [row.line for row in said_not_to_fit if not row.out_of_memory],
        "allocator": {"used": ALLOCATOR} | shares,
        "sources": {source: _summary(of_source) for source, of_source in sources.items()},
    }


def _best_share(compared: Sequence[Compared], without: str) -> float:
    """Return the allocator's share with the least mean error over the groups but one."""
    others = [c for c in compared if c.row.group != without]
    if not others:
        return ALLOCATOR
    shares = [percent / 100 for percent in range(41)]
    return min(shares, key=lambda share: sum(abs(c.error(share)) for c in others))


def _summary(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"rows": 0, "mean_error": None, "worst_error": None, "bias": None}
    return {
        "rows": len(errors),
        "mean_error": sum(map(abs, errors)) / len(errors),
        "worst_error": max(map(abs, errors)),
        "bias": sum(errors) / len(errors),
    }
