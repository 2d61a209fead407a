"""Remedies for faults of DeepSpeed 0.19.8 under a pipeline, one function each.

With them one plain engine per rank, whose data-parallel group is its stage's, trains the whole
mesh. docs/deepspeed.md has the measurements; tests/engine/test_quirks.py removes each remedy and
checks that the fault comes back.
"""

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import cpuinfo
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime import compiler
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch import nn

from parallel3d.engine.quirks.experts import NAME
from parallel3d.model.optimizers import MATRIX
from parallel3d.model.parametrization import Rate, Role
from parallel3d.tensor.cut import HeldParameter, cut_parameter, is_of_experts


def _do_nothing(*_: object) -> None:
    """Stand for a function of DeepSpeed that is skipped."""


def skip_trace_check() -> None:
    """Do not compare ZeRO-3's traces of ranks: a stage's layers run in one order on all of them.

    DeepSpeed broadcasts over the *world* inside forward. Pipeline stages run it at different times,
    so the run hangs. No setting disables the check.
    """
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = _do_nothing


def skip_shared_memory_operator() -> None:
    """Do not compile DeepSpeed's shared-memory all-reduce, 20 s of g++ only for inference."""
    # By import, because the attribute `deepspeed.comm.torch` is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = _do_nothing  # type: ignore[attr-defined]


def leave_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile`, whose compiler takes 0.8 s per rank to load.

    Every engine imports it, to compare its optimizer's class. It is not used (docs/muon.md).
    """
    with patch.object(compiler, "compile", lambda: lambda function: function):
        import_module("deepspeed.runtime.zero.muon.original_muon")


def read_cpu_info_from_proc() -> None:
    """Answer DeepSpeed's questions about the CPU from /proc: py-cpuinfo takes 1.1 s per rank."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fields = {}
        for line in lines:
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()

        def answer() -> dict[str, object]:
            return {
                "arch": "X86_64",
                "vendor_id_raw": fields.get("vendor_id", ""),
                "flags": fields.get("flags", "").split(),
            }

        cpuinfo.get_cpu_info = answer


def start_backward(engine: DeepSpeedEngine) -> None:
    """Make the next backward add to the gradients of the previous one.

    DeepSpeed counts micro-steps in `forward`. In F1 F2 B1 B2 the second backward would silently
    overwrite the first one's gradients.
    """
    engine.optimizer.clear_backward_seen_flag()


def accumulate_from_zero(engine: DeepSpeedEngine) -> None:
    """Set the reduced gradients to zero, and make every backward of the step add to them.

    In DeepSpeed a step's first backward overwrites the previous step's gradients and later ones
    add. The first backward of a rank's *other* stages would then add to the previous step's.
    """
    optimizer = engine.optimizer
    gradients: dict[object, torch.Tensor] = getattr(
        optimizer,
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        getattr(optimizer, "accumulated_grads_in_cpu", {}),
    )
    for gradient in gradients.values():
        gradient.zero_()
    optimizer.micro_step_id = 1


def count_once(held: Iterable[HeldParameter]) -> None:
    """Mark the parameters that this rank counts in the gradient norm.

    DeepSpeed counts a parameter if `model_parallel` is set on it or if the model-parallel rank is
    0. ZeRO-1 and 2 skip parameters with `ds_pipe_replicated`.
    """
    for h in held:
        h.parameter.model_parallel = h.counts  # type: ignore[attr-defined]
        if h.copy:
            h.parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


class Placeholders(nn.Module):
    """One unused parameter in each optimizer group, so that all stages have the same groups.

    DeepSpeed drops empty groups, and computes the norm with one all-reduce per group over the whole
    model. Stages with different numbers of groups compute a wrong norm and then hang. The gradients
    of these parameters are always zero.
    """

    def __init__(self, kinds: Sequence["GroupKind"], owners: dist.ProcessGroup) -> None:
        super().__init__()
        for group, kind in enumerate(kinds):
            over = (0, owners) if kind.experts else None
            parameter = cut_parameter((owners.size() if kind.experts else 1,), experts=over)
            self.register_parameter(f"group_{group}", parameter)
            parameter.data.zero_()


class GroupKind(NamedTuple):
    """The common properties of the parameters of an optimizer group.

    - `matrices`: they are hidden matrices, which the optimizer needs whole.
    - `experts`: ranks hold different experts, and only their own replicas average the gradients.
    """

    rate: Rate
    decays: bool
    matrices: bool = False
    experts: bool = False


def group_kinds(
    rates: Mapping[Role | None, Rate], whole_matrices: bool, divides_experts: bool
) -> list[GroupKind]:
    """Return the kind of each optimizer group.

    There are two groups for each distinct rate of a role, so all stages have the same groups. An
    optimizer of whole matrices has groups of its own for hidden ones, and so have the matrices and
    the biases of experts that ranks divide among them.
    """
    kinds: list[GroupKind] = []
    for role, rate in rates.items():
        matrices = whole_matrices and role == MATRIX
        for decays in (True, False):
            kind = GroupKind(rate, decays, matrices)
            if kind not in kinds:
                kinds.append(kind)
    if divides_experts:
        kinds.append(GroupKind(rates[MATRIX], True, whole_matrices, True))
        kinds.append(GroupKind(rates[None], False, experts=True))
    return kinds


def param_groups(
    held: Iterable[HeldParameter],
    placeholders: Placeholders,
    weight_decay: float,
    eps: float,
    rates: Mapping[Role | None, Rate],
    kinds: Sequence[GroupKind],
) -> list[dict[str, object]]:
    """Return an optimizer group of each kind with explicit weight decay: defaults differ."""
    groups = []
    whole_matrices = any(kind.matrices for kind in kinds)
    of_kind = defaultdict[GroupKind, list[nn.Parameter]](list)
    for h in held:
        matrices = whole_matrices and h.spec.role == MATRIX
        divided = is_of_experts(h.parameter)
        kind = GroupKind(rates[h.spec.role], h.spec.weight_decay, matrices, divided)
        of_kind[kind].append(h.parameter)
    left_out = of_kind.keys() - set(kinds)
    assert not left_out, f"no group for parameters of {left_out}"
    for kind, weight in zip(kinds, placeholders.parameters(), strict=True):
        group: dict[str, object] = {
            "params": [*of_kind[kind], weight],
            "weight_decay": weight_decay * kind.rate.weight_decay if kind.decays else 0.0,
            "eps": eps * kind.rate.eps,
            "decays": kind.decays,
            "matrices": kind.matrices,
        }
        if kind.experts:
            group |= {"moe": True, "name": NAME}
        groups.append(group)
    return groups


def accumulate_in_fp32(held: Iterable[HeldParameter]) -> None:
    """Accumulate the microbatches' gradients in fp32, whatever the parameter's dtype.

    DeepSpeed accumulates them in `param.grad` in bf16, which rounds each partial sum.
    """
    for h in held:
        h.parameter.grad_dtype = torch.float32


class ReleaseCounters:
    """Restores DeepSpeed's counters of outstanding gradients before each backward.

    DeepSpeed has one counter per module, which every forward resets. After F1 F2 B1 it is used up:
    the second backward releases nothing, and the whole stage stays gathered.
    """

    def __init__(self) -> None:
        self._counts: dict[nn.Module, int] = {}
        self._stages: set[int] = set()

    def save(self, module: nn.Module, stage: int) -> None:
        """Save the counters after a stage's first forward; later forwards would set the same."""
        if stage in self._stages:
            return
        self._stages.add(stage)
        for m in module.modules():
            if "ds_grads_remaining" in vars(m):
                self._counts.setdefault(m, vars(m)["ds_grads_remaining"])

    def restore(self) -> None:
        """Restore the saved counters before a backward."""
        for module, count in self._counts.items():
            module.ds_grads_remaining = count  # type: ignore[assignment]


class DeferredReduction:
    """Keeps parameters out of each microbatch's reduction and reduces them at the step's end.

    The two gradients of a tied weight must be summed before ZeRO shards them, and summing partial
    gradients over tp would otherwise take a collective per microbatch. To ZeRO the reduction at the
    end looks like one more microbatch in which only these parameters have gradients.
    """

    def __init__(self, engine: DeepSpeedEngine, parameters: list[nn.Parameter]) -> None:
        self._optimizer = engine.optimizer
        self._parameters = {id(p): p for p in parameters}
        self._gradients: dict[int, torch.Tensor] = {}
        self._zero3 = hasattr(self._optimizer, "fp16_groups")
        hook = "reduce_ready_partitions_and_remove_grads" if self._zero3 else "process_gradients"
        self._reduce = getattr(self._optimizer, hook)
        setattr(self._optimizer, hook, self._reduce_or_defer)

    def _reduce_or_defer(self, parameter: nn.Parameter, *group: int) -> None:
        if id(parameter) not in self._parameters:
            self._reduce(parameter, *group)
        elif not self._zero3:  # at ZeRO-3 the gradient stays in `param.grad` anyway
            grad = parameter.grad
            parameter.grad = None
            assert grad is not None
            # DeepSpeed reduces at the backward's end, even if there is nothing else to reduce.
            self._optimizer.setup_buckets()
            total = self._gradients.get(id(parameter))
            self._gradients[id(parameter)] = grad if total is None else total.add_(grad)

    def put_back(self) -> None:
        """Set the deferred gradients, summed over microbatches, as their parameters' gradients."""
        for key, grad in self._gradients.items():
            self._parameters[key].grad = grad
        self._gradients.clear()

    def flush(self) -> None:
        """Reduce the deferred gradients."""
        self._optimizer.clear_backward_seen_flag()
        if self._zero3:
            self._optimizer.micro_step_id = 0  # there are no earlier gradients to add to
            for parameter in self._parameters.values():
                self._reduce(parameter)
        else:
            for group, members in enumerate(self._optimizer.bit16_groups):
                for parameter in members:
                    if id(parameter) in self._parameters:
                        self._reduce(parameter, group)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def abandon_coalescing(engine: DeepSpeedEngine) -> None:
    """Skip the collectives of `coalesce_grad_reduction` after an error: no peer would join."""
    engine._flush_coalesced_reduction_zero12 = _do_nothing
    engine._flush_coalesced_reduction_zero3 = _do_nothing
