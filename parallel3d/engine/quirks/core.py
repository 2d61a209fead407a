"""What DeepSpeed 0.19.8 does under a pipeline, and the remedy for each: one function a quirk.

With these remedies one plain engine a rank, whose data-parallel group is its stage's, trains the
whole mesh. docs/deepspeed.md has the measurements; tests/engine/test_quirks.py takes each remedy
away and sees the fault come back.
"""

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import cpuinfo
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from torch import nn

from parallel3d.model.parametrization import Rate, Role
from parallel3d.tensor.cut import HeldParameter


def bind_trace_check(group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare ZeRO-3's forward trace inside the stage's data-parallel group.

    DeepSpeed broadcasts over the *world* inside forward; pipeline stages get there at different
    times, and the run hangs. No setting gates the check.
    """

    def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
        size = dist.get_world_size(group)
        mine = torch.tensor([len(ints), hash(tuple(ints))], device=device)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everyone, mine, group=group)
        if any(not torch.equal(mine, other) for other in everyone):
            raise RuntimeError(
                "the data-parallel ranks of a stage run their layers in different orders"
            )

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = assert_ints_same_as_other_ranks


def skip_shared_memory_operator() -> None:
    """Do not compile DeepSpeed's shared-memory all-reduce: 20 s of g++ for inference only."""
    # `deepspeed.comm.torch` as an attribute is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


@contextmanager
def without_muon() -> Iterator[None]:
    """Keep DeepSpeed from importing its Muon optimizer, and inductor with it (0.7 s a rank).

    It imports it only to ask whether our optimizer is one; nothing is an instance of the stand-in.
    """
    name = "deepspeed.runtime.zero.muon.muon_optimizer"
    stand_in = ModuleType(name)
    stand_in.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})  # type: ignore[attr-defined]
    there = sys.modules.setdefault(name, stand_in)
    try:
        yield
    finally:
        if there is stand_in:
            del sys.modules[name]


def read_cpu_quickly() -> None:
    """Answer DeepSpeed about the CPU from /proc: py-cpuinfo takes 1.1 s on each rank."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        vendor, flags = fields.get("vendor_id", ""), fields.get("flags", "").split()
        answer = {"arch": "X86_64", "vendor_id_raw": vendor, "flags": flags}
        cpuinfo.get_cpu_info = lambda: answer


def accumulation_steps() -> int:
    """The number of accumulation steps that DeepSpeed is told: 1, whatever the config says.

    A direct `output.backward(grad)` divides by this number on *every* stage; the executor divides
    the loss once, on the last.
    """
    return 1


def start_backward(engine: Any) -> None:
    """Have a backward add to the gradients of the backward before.

    DeepSpeed counts micro-steps in `forward`; in F1 F2 B1 B2 the second backward would overwrite
    the first one's gradients without a word.
    """
    engine.optimizer.clear_backward_seen_flag()


def accumulate_from_zero(engine: Any) -> None:
    """Start a step's reduced gradients at zero, and let every backward of the step add to them.

    DeepSpeed lets a step's first backward overwrite the last step's gradients, and later ones add:
    what the first backward of a rank's *other* stages gives was added to the last step's.
    """
    optimizer = engine.optimizer
    kept: dict[Any, torch.Tensor] = getattr(
        optimizer,
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        getattr(optimizer, "accumulated_grads_in_cpu", {}),
    )
    for gradient in kept.values():
        gradient.zero_()
    optimizer.micro_step_id = 1


def count_once(held: Iterable[HeldParameter]) -> None:
    """Mark the parameters whose elements this rank counts in the gradient norm.

    DeepSpeed counts a parameter if `model_parallel` is set on it, or if the model-parallel rank is
    0; ZeRO-1 and 2 also skip what carries `ds_pipe_replicated`.
    """
    for h in held:
        h.parameter.model_parallel = h.counts  # type: ignore[attr-defined]
        if h.copy:
            h.parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


class Ballast(nn.Module):
    """One element in each optimizer group, so that every stage has the same groups.

    DeepSpeed drops an empty group, and computes the norm with one all-reduce a group over the whole
    model: stages with unequal numbers of groups give a wrong norm, then hang. Its gradient is
    always zero.
    """

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        for group in range(groups):
            self.register_parameter(f"group_{group}", nn.Parameter(torch.zeros(1)))


def group_kinds(rates: Mapping[Role | None, Rate]) -> list[tuple[Rate, bool]]:
    """Return the rates and the weight decay of each optimizer group: two groups for each rate.

    They follow from the rates of the roles, so they are the same on every stage.
    """
    return [(rate, decays) for rate in dict.fromkeys(rates.values()) for decays in (True, False)]


def param_groups(
    held: Iterable[HeldParameter], ballast: Ballast, weight_decay: float, eps: float,
    rates: Mapping[Role | None, Rate],
) -> list[dict[str, Any]]:  # fmt: skip
    """The optimizer groups of `group_kinds`, each with its weight decay: defaults differ."""
    held, groups = list(held), []
    for (rate, decays), weight in zip(group_kinds(rates), ballast.parameters(), strict=True):
        ours = [h for h in held if rates[h.spec.role] == rate and h.spec.weight_decay == decays]
        decay = weight_decay * rate.weight_decay if decays else 0.0
        params = [*(h.parameter for h in ours), weight]
        groups.append({"params": params, "weight_decay": decay, "eps": eps * rate.eps})
    return groups


def accumulate_in_fp32(held: Iterable[HeldParameter]) -> None:
    """Add up the microbatches' gradients in fp32, whatever the parameter's type.

    DeepSpeed adds them up in `param.grad`, in bf16: 32 microbatches then lose what one keeps.
    """
    for h in held:
        h.parameter.grad_dtype = torch.float32


class ReleaseCounters:
    """DeepSpeed's count of the gradients that a module still awaits, one set per microbatch.

    Each module has one counter, which every forward resets. After F1 F2 B1 it is used up, and from
    the second backward on nothing is released: the whole stage stays gathered.
    """

    def __init__(self) -> None:
        self._counts: dict[nn.Module, int] = {}
        self._stages: set[int] = set()

    def save(self, module: nn.Module, stage: int) -> None:
        """Keep the counters as a stage's first forward left them; later forwards give the same."""
        if stage in self._stages:
            return
        self._stages.add(stage)
        for m in module.modules():
            if "ds_grads_remaining" in vars(m):
                self._counts.setdefault(m, vars(m)["ds_grads_remaining"])

    def restore(self) -> None:
        """Set the saved counters again before a backward."""
        for module, count in self._counts.items():
            module.ds_grads_remaining = count  # type: ignore[assignment]


class DeferredReduction:
    """Parameters kept out of each microbatch's reduction, and reduced at the end of the step.

    The two gradients of a weight tied over two stages must meet before ZeRO cuts them up, and the
    sum of partial ones over tp would else cost a collective a microbatch. The last reduction looks
    to ZeRO like one more microbatch, in which these alone have gradients.
    """

    def __init__(self, engine: Any, parameters: list[nn.Parameter]) -> None:
        self._optimizer = engine.optimizer
        self._parameters = {id(p): p for p in parameters}
        self._kept: dict[int, torch.Tensor] = {}
        self._zero3 = hasattr(self._optimizer, "fp16_groups")
        hook = "reduce_ready_partitions_and_remove_grads" if self._zero3 else "process_gradients"
        self._reduce = getattr(self._optimizer, hook)
        setattr(self._optimizer, hook, self._reduce_or_keep)

    def _reduce_or_keep(self, parameter: nn.Parameter, *group: int) -> None:
        if id(parameter) not in self._parameters:
            self._reduce(parameter, *group)
        elif not self._zero3:  # ZeRO-3 itself leaves the gradient where autograd adds to it
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            # DeepSpeed reduces at the backward's end even where nothing else is left to reduce.
            self._optimizer.setup_buckets()
            kept = self._kept.get(id(parameter))
            self._kept[id(parameter)] = grad if kept is None else kept.add_(grad)

    def put_back(self) -> None:
        """Put the gradients kept back, summed over microbatches, on their parameters again."""
        for key, grad in self._kept.items():
            self._parameters[key].grad = grad
        self._kept.clear()

    def flush(self) -> None:
        """Reduce the gradients that were kept back."""
        self._optimizer.clear_backward_seen_flag()
        if self._zero3:
            self._optimizer.micro_step_id = 0  # they have no earlier share to be added to
            for parameter in self._parameters.values():
                self._reduce(parameter)
        else:
            for group, members in enumerate(self._optimizer.bit16_groups):
                for parameter in members:
                    if id(parameter) in self._parameters:
                        self._reduce(parameter, group)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def abandon_coalescing(engine: Any) -> None:
    """Leave `coalesce_grad_reduction` after an error without its collectives: no peer joins."""
    engine._flush_coalesced_reduction_zero12 = lambda optimizer: None
    engine._flush_coalesced_reduction_zero3 = lambda optimizer: None


def forget_modules() -> None:
    """Let go of a closed engine's modules: DeepSpeed keeps the root of each in a global list."""
    parameter_offload.FWD_MODULE_STACK.clear()
