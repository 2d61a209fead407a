"""One DeepSpeed engine a rank, holding all of the rank's stages."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from parallel3d.engine import build, quirks
from parallel3d.engine.parameters import HeldParameter
from parallel3d.engine.settings import EngineSettings
from parallel3d.errors import ConfigError
from parallel3d.mesh import Mesh

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The gradient's true norm over the mesh before clipping, and whether a step was taken."""

    grad_norm: float
    applied: bool


class _ModelParallelUnit:
    """The mesh in DeepSpeed's words: its `mp` is all that shares one copy of the model."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._mesh.ranks("dp")

    def get_data_parallel_rank(self) -> int:
        return self._mesh.coord("dp")

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.size("dp")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group("model")

    def get_model_parallel_rank(self) -> int:
        return self._mesh.coord("model")

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.size("model")


def building(settings: EngineSettings, mesh: Mesh) -> AbstractContextManager[Any]:
    """The context in which a stage's modules are made.

    Under ZeRO-3 each module is cut over the data-parallel group as soon as it is made, so a stage
    never exists whole on a rank; what a module allocates is not filled before it is cut.
    """
    _quiet_deepspeed()
    quirks.skip_shared_memory_operator()
    if not settings.shards_parameters:
        return _plain_building(settings.dtype, mesh.device)
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed.zero.Init(
        data_parallel_group=mesh.group("dp"),
        config_dict_or_path=settings.deepspeed_config(mesh.size("dp")),
        # No dtype: an explicit fp32 becomes bf16 where the device has no fp16 (0.19.8).
        mpu=_ModelParallelUnit(mesh),
    )


@contextmanager
def _plain_building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


def local_shard(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """This rank's part of a parameter, flat, and the index of its first element.

    The part that ZeRO-3 left here, or the whole parameter under the other stages; counted in
    the flattened tensor-parallel part.
    """
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter.data.view(-1), 0
    return shard.data, shard.numel() * parameter.ds_process_group.rank()  # type: ignore[attr-defined]


class _Module(nn.Module):
    """What DeepSpeed sees: the stages of this rank, called by their number."""

    def __init__(self, stages: nn.Module, ballast: quirks.Ballast) -> None:
        super().__init__()
        self.stages, self.ballast = stages, ballast

    def forward(self, *inputs: Any) -> Tensor:
        result: Tensor = self.stages(*inputs)
        return result


class Engine:
    """Forward, backward, gradient reduction, clipping and step of this rank's stages.

    `stages(stage, *inputs)` runs one stage; `held` names its parameters. Raises ConfigError if the
    stages cannot be run together.
    """

    def __init__(
        self,
        stages: nn.Module,
        held: Sequence[HeldParameter],
        settings: EngineSettings,
        mesh: Mesh,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        self.held, self.settings, self.mesh = tuple(held), settings, mesh
        quirks.bind_trace_check(mesh.group("dp"), mesh.device)
        quirks.count_once(self.held)
        if settings.precision != "fp32":
            quirks.accumulate_in_fp32(self.held)
        with building(settings, mesh):
            ballast = quirks.Ballast()
        self._module = _Module(stages, ballast)
        offload = settings.offload_optimizer == "cpu"
        optimizer = build.make_optimizer(
            quirks.param_groups(self.held, ballast, settings.weight_decay),
            settings.lr,
            settings.betas,
            settings.eps,
            cpu_adam=offload and build.load_cpu_adam(mesh, say),
            device=mesh.device,
        )
        with quirks.without_muon():
            self._deepspeed, *_ = deepspeed.initialize(
                model=self._module,
                optimizer=optimizer,
                config=settings.deepspeed_config(mesh.size("dp")),
                mpu=_ModelParallelUnit(mesh),
                dist_init_required=False,
            )
        self._check_groups()
        self._counters = quirks.ReleaseCounters()
        self._tied = [h.parameter for h in self.held if h.tied_across]
        self._deferred: quirks.DeferredReduction | None = None
        if settings.gradient_reduction == "per_microbatch" and self._tied:
            self._deferred = quirks.DeferredReduction(self._deepspeed, self._tied)

    def forward(self, stage: int, *inputs: Tensor) -> Tensor:
        """Run a stage for training."""
        if not self._module.training:
            self._module.train()
        output: Tensor = self._deepspeed(stage, *inputs)
        self._counters.save(self._module, stage)
        return output

    def evaluate(self, stage: int, *inputs: Tensor) -> Tensor:
        """Run a stage without dropout and without gradients."""
        if self._module.training:
            self._module.eval()
        with torch.no_grad():
            output: Tensor = self._deepspeed(stage, *inputs)
        return output

    def backward(self, output: Tensor, grad: Tensor | None = None) -> None:
        """Backward from a stage's output, given its gradient; from the loss, given none."""
        quirks.start_backward(self._deepspeed)
        self._counters.restore()
        if grad is None:
            self._deepspeed.backward(output)
        else:
            output.backward(grad)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """One step's forwards and backwards; on leaving, the gradients are summed and reduced."""
        if self.settings.gradient_reduction == "per_step":
            with self._deepspeed.coalesce_grad_reduction():
                try:
                    yield
                except BaseException:
                    quirks.abandon_coalescing(self._deepspeed)
                    raise
                self._sum_over_ends([p.grad for p in self._tied if p.grad is not None])
            return
        # DeepSpeed may take any backward for the last: it copies gradients to an offloaded
        # optimizer at the end of the step, when we say so.
        self._deepspeed.set_gradient_accumulation_boundary(False)
        yield
        if self._deferred is not None:
            self._sum_over_ends(self._deferred.gradients())
            self._deferred.flush()
        self._deepspeed.set_gradient_accumulation_boundary(True)
        self._deepspeed.optimizer.finalize_gradient_accumulation_boundary()

    def _sum_over_ends(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.mesh.ends)

    def step(self, lr: float) -> StepResult:
        """Clip by the norm over the whole mesh and update the weights."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = lr
        self._deepspeed.step()
        norm = self._deepspeed.get_global_grad_norm()
        return StepResult(
            grad_norm=float("nan") if norm is None else float(norm),
            applied=bool(self._deepspeed.was_step_applied()),
        )

    def full_parameter(self, held: HeldParameter) -> Tensor:
        """The fp32 value of this tp rank's part of a parameter.

        Collective over the data-parallel group: each of its ranks gets it.
        """
        value = safe_get_full_fp32_param(held.parameter)
        assert value is not None
        return value.detach().reshape(held.cut.local_shape).to(self.mesh.device)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds of parameters, gradients and optimizer states."""
        from parallel3d.engine import memory

        return memory.held_bytes(self._deepspeed, [h.parameter for h in self.held])

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers."""
        self._deepspeed.destroy()

    def _check_groups(self) -> None:
        """Stages with unequal optimizer groups give a wrong norm and then hang; see them first."""
        optimizer = self._deepspeed.optimizer
        groups = optimizer.fp16_groups if hasattr(optimizer, "fp16_groups") else None
        mine = len(groups if groups is not None else optimizer.bit16_groups)
        counts = [int(row[0]) for row in self.mesh.gather_floats([mine])]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"zero_optimization.sub_group_size cuts the stages into unequal numbers of "
                f"optimizer groups ({sorted(set(counts))}); make it larger"
            )


def _quiet_deepspeed() -> None:
    deepspeed_logger.setLevel(logging.ERROR)
    # DeepSpeed calls torch's collectives by names that torch has since changed.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
