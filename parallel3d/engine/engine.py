"""One DeepSpeed engine per rank, which holds all of the rank's stages."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from parallel3d.base.errors import ConfigError
from parallel3d.base.say import Say
from parallel3d.config.deepspeed import OffloadOptimizerConfig, OffloadParamConfig
from parallel3d.engine import op_builds, swap
from parallel3d.engine.construction import building, model_parallel_unit, with_swap_folder
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.gathering import GatheredWeights, Layers
from parallel3d.engine.optimizer_states import OptimizerStates, masters_of, places_of
from parallel3d.engine.quirks import core, experts, fp16, nvme, streams, tracing, updating
from parallel3d.engine.reduction import Reduction
from parallel3d.engine.score_biases import ScoreBiases
from parallel3d.engine.whole_matrices import WholeMatrices, find_matrices
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.tensor.cut import HeldParameter
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import StageOutput
from parallel3d.tensor.weight_gradients import accumulate_in_place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step.

    - `norm`: the gradient's norm over the whole mesh before clipping. It stays on the device;
      reading `grad_norm` waits for it.
    - `applied`: whether the weights were updated.
    - `overflow`: an fp16 gradient overflowed at `loss_scale` (1 outside fp16), so every rank
      skipped the step and lowers the scale.
    - `own_squares`: the part that this rank counts of the sum of squares of its dp coordinate's own
      gradient, times `loss_scale` squared; 0 without `measure_own_gradient`.
    """

    norm: Tensor | float
    applied: bool
    overflow: bool = False
    loss_scale: float = 1.0
    own_squares: Tensor | float = 0.0

    @cached_property
    def grad_norm(self) -> float:
        """The norm as a number."""
        return float(self.norm)


class _Module(nn.Module):
    """The module that DeepSpeed wraps: this rank's stages, called by their number."""

    def __init__(self, stages: nn.Module, placeholders: core.Placeholders) -> None:
        super().__init__()
        self.stages = stages
        self.placeholders = placeholders

    def forward(self, *inputs: Tensor | int, **options: object) -> Tensor:
        result: Tensor = self.stages(*inputs, **options)
        return result


class Engine:
    """Forward, backward, gradient reduction, clipping and optimizer step of this rank's stages.

    - `stages`: a module; `stages(stage, *inputs)` runs one stage. If gradients are reduced inside
      a backward, it also gets the callback `on_input_grad` (`Reduction.on_input_grad`).
    - `held`: the stages' parameters and their global names.
    - `deepspeed`: DeepSpeed's engine of the stages; its optimizer holds masters and states.
    - `owners`: pipeline coordinates of the first and the last stage, whose weights may be tied.
    - `layers`: the layers of each stage, by which `gather`, `release` and `reduce` work. None means
      that there is only stage 0.

    Raise ConfigError if the stages cannot be run together.
    """

    def __init__(
        self,
        stages: nn.Module,
        held: Sequence[HeldParameter],
        settings: EngineSettings,
        *,
        mesh: Mesh,
        say: Say = _log.info,
        owners: tuple[int, int] = (0, -1),
        layers: Layers | None = None,
    ) -> None:
        self.held = tuple(held)
        self.settings = settings
        self.mesh = mesh
        file = optimizers.load(settings.optimizer.type)
        self._kinds = core.group_kinds(
            settings.rates, file.WHOLE_MATRICES, divides_experts=mesh.experts.size > 1
        )
        pair = mesh.join_pair(*(coord % mesh.pipeline.size for coord in owners))
        core.skip_trace_check()
        is_sharded = settings.zero.stage > 0
        core.count_once(self.held)
        if not is_sharded:
            experts.count_on_first_owner(self.held, mesh)
        if settings.precision != "fp32":
            core.accumulate_in_fp32(self.held)
        first = self.held[0].parameter if self.held else None
        with building(settings, mesh, say=say, beside=first):
            placeholders = core.Placeholders(self._kinds, mesh.experts.group)
        self._module = _Module(stages, placeholders)
        device = settings.zero.offload_optimizer.device
        offloads = device != "none"
        if offloads:
            op_builds.use_host_threads(mesh.device, mesh.local_size, say)
        optimizer = file.make(
            core.param_groups(
                self.held,
                placeholders,
                settings.weight_decay,
                settings.eps,
                settings.rates,
                self._kinds,
            ),
            settings.optimizer.params,
            device=mesh.device,
            cpu_adam=offloads and file.CPU_ADAM and op_builds.load_cpu_adam(mesh, say),
        )
        if device == "nvme":
            nvme.align_gradients()
            settings = with_swap_folder(settings, "offload_optimizer", mesh, say)
        shards = mesh.shards if is_sharded else mesh.alone
        model = mesh.model if is_sharded else mesh.whole_model
        sharding: AbstractContextManager[None] = nullcontext()
        if is_sharded and not settings.shards_parameters:
            sharding = experts.sharded_by_zero12(self._module.parameters(), mesh)
        with sharding:
            self.deepspeed, *_ = deepspeed.initialize(
                model=self._module,
                optimizer=optimizer,
                config=settings.deepspeed_config(shards.size, sum(h.elements for h in self.held)),
                mpu=model_parallel_unit(model, shards),
                dist_init_required=False,
            )
        self._check_groups()
        if file.WHOLE_MATRICES:
            self._find_matrices(optimizer)
        zero = self.deepspeed.optimizer
        updating.share_with_weights(zero)
        updating.leave_overflow_to_norm(zero)
        streams.prioritize_reductions(zero)
        if settings.shards_parameters:
            streams.keep_gradients_until_reduced(zero)
            experts.add_norms_of_owners(zero, mesh)
        if settings.overlap_update and device == "cpu":
            updating.copy_weights_in_parts(zero, mesh.device)
        self._finish_scale = fp16.grow_scale_after_step(zero)
        self._counters = core.ReleaseCounters()
        self.averages = True
        """True if the average of the weights, where one is kept, follows the next update."""
        self.timed = False
        self.step_seconds = 0.0
        """The seconds of the last step, if `timed`."""
        layers = {0: [stages]} if layers is None else layers
        self._weights = GatheredWeights(self.deepspeed, layers) if settings.holds_weights else None
        hooks_gather = settings.shards_parameters and not settings.holds_weights
        self._traces = tracing.Traces(self.deepspeed) if hooks_gather else None
        self._score_biases = ScoreBiases(zero, stages, self.held, mesh.replicas)
        with_gradients = [h for h in self.held if h.spec.role != "balance"]
        self._reduction = Reduction(
            self.deepspeed, with_gradients, layers, settings=settings, mesh=mesh, owners=pair
        )
        in_backward = settings.reduces_in_backward
        self._options = {"on_input_grad": self._reduction.on_input_grad} if in_backward else {}

    def gather(self, stage: int) -> None:
        """Start to gather a stage's ZeRO-3 weights; a no-op if DeepSpeed's hooks gather them."""
        if self._weights:
            self._weights.gather(stage)

    def wait_for_weights(self, stage: int) -> None:
        """Wait for the weights that `gather` has started to gather."""
        if self._weights:
            self._weights.wait(stage)

    def release(self, stage: int) -> None:
        """Free a stage's gathered weights."""
        if self._weights:
            self._weights.release(stage)

    def reduce(self, stage: int) -> None:
        """Reduce a stage's gradients over the mesh, after its last backward of the step."""
        self._reduction.reduce(stage)

    def measure_own_gradient(self) -> None:
        """Measure `StepResult.own_squares` in the next step, on the device."""
        self._reduction.own_squares = torch.zeros((), device=self.mesh.device)

    @contextmanager
    def measuring(
        self, segments: Mapping[str, Sequence[tuple[int, int]]]
    ) -> Iterator[dict[str, Tensor]]:
        """Measure this rank's gradients of a step before dp averages them, on the device.

        `segments` has by parameter the first elements and lengths of parts of the flat gradient.
        Yield what `moments` returns for each, [segments, 2].
        """
        self._reduction.segments = segments
        self._reduction.moments = {}
        try:
            yield self._reduction.moments
        finally:
            self._reduction.segments = {}

    def accumulation(self) -> AbstractContextManager[None]:
        """Return the context of a step's forwards and backwards; gradients are reduced on exit."""
        self._score_biases.forget_counts()
        return self._reduction.accumulation()

    def forward(self, stage: int, *inputs: Tensor | Segments | None) -> StageOutput:
        """Run a stage for training."""
        if not self._module.training:
            self._module.train()
        hooks = not self.settings.runs_without_hooks
        output: StageOutput = self._run(stage, *inputs, hooks=hooks)
        return output

    def evaluate(self, stage: int, *inputs: Tensor | Segments | None) -> Tensor:
        """Run a stage without dropout and without gradients."""
        if self._module.training:
            self._module.eval()
        with torch.no_grad():
            output: Tensor = self._run(stage, *inputs, hooks=self._traces is not None)
        return output

    def _run(self, stage: int, *inputs: Tensor | Segments | None, hooks: bool) -> Any:
        self.wait_for_weights(stage)
        options = self._options if self._module.training else {}
        if hooks and self._traces:
            self._traces.begin(stage, "forward")
        run = self.deepspeed if hooks else self._module.stages
        output = run(stage, *inputs, **options)
        if hooks and self._module.training and self._weights is None:
            self._counters.save(self._module, stage)
        return output

    def backward(
        self,
        output: Tensor,
        grad: Tensor | None = None,
        *,
        side_loss: Tensor | None = None,
        stage: int = 0,
        last: bool = False,
    ) -> None:
        """Run a stage's backward from an output gradient, or from a loss if `grad` is None.

        - `side_loss` []: a loss of the stage beside an output with a gradient.
        - `last`: this backward completes the stage's gradients of the step.
        """
        scale = self.deepspeed.optimizer.scale_if_loss
        # In one pass with the output, so that activations are recomputed once.
        side = [] if side_loss is None else [scale(side_loss)]
        grads = [grad, *(None for _ in side)]
        if self.settings.runs_without_hooks:
            scaled = scale(output) if grad is None else output
            with (
                accumulate_in_place(),
                self._reduction.last_backward(stage) if last else nullcontext(),
            ):
                torch.autograd.backward([scaled, *side], grads)
            return
        core.start_backward(self.deepspeed)
        self._counters.restore()
        if self._traces:
            self._traces.begin(stage, "backward")
        if grad is None:
            self.deepspeed.backward(output)
        else:
            fp16.expect_scaled_gradient(self.deepspeed)
            torch.autograd.backward([output, *side], grads)

    @property
    def loss_scale(self) -> float:
        """The factor of a loss in `backward`; output gradients passed to it already carry it."""
        return float(self.deepspeed.optimizer.loss_scale)

    def step(self, lr: float, is_kept: Callable[[Tensor], bool] | None = None) -> StepResult:
        """Clip gradients by their norm over the whole mesh, and update the weights.

        `lr` is multiplied by the rate of each optimizer group. `is_kept` is asked before anything
        is updated, with the norm on the device, and must answer alike on every rank; after False
        the gradients are dropped. It is not asked if gradients overflow.
        """
        optimizer = self.deepspeed.optimizer
        for group, kind in zip(optimizer.param_groups, self._kinds, strict=True):
            group["lr"] = lr * group.get("factor", 1.0) * kind.rate.lr
        began = self._now()
        squares = self._reduction.own_squares
        self._reduction.own_squares = None
        scale = self.loss_scale
        asking: AbstractContextManager[list[Tensor]] = nullcontext([])
        if is_kept:
            asking = updating.asking_before_update(optimizer, is_kept)
        with asking as refused, self._score_biases.moved_after_update(), self._averaging():
            self.deepspeed.step()
        if self.settings.shards_parameters:
            streams.gather_after_update(optimizer)
        self._finish_scale()
        norm = refused[0] if refused else self.deepspeed.get_global_grad_norm()
        applied = bool(self.deepspeed.was_step_applied())
        if not applied:
            fp16.forget_skipped_gradients(optimizer)
        self.step_seconds = self._now() - began
        overflow = self.settings.precision == "fp16" and not applied and not refused
        return StepResult(
            norm=float("nan") if norm is None else norm,
            applied=applied,
            overflow=overflow,
            loss_scale=scale,
            own_squares=0.0 if squares is None else squares,
        )

    def _now(self) -> float:
        """Return the time in seconds; if steps are timed, wait for the device first."""
        if self.timed:
            torch.get_device_module(self.mesh.device).synchronize()
        return time.perf_counter()

    def full_parameter(self, held: HeldParameter) -> Tensor:
        """Return the fp32 value of this tp rank's part of a parameter; collective over dp."""
        value: Tensor | None = safe_get_full_fp32_param(held.parameter)
        assert value is not None
        return value.detach().reshape(held.cut.local_shape).to(self.mesh.device)

    @cached_property
    def states(self) -> OptimizerStates:
        """This rank's masters and optimizer state, which a checkpoint saves."""
        file = optimizers.file_of(self.settings.optimizer.type)
        return OptimizerStates(self.deepspeed, self.held, file, self.settings.ema is not None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the weights be their averages inside, and again what they were; collective over dp.

        Not for training. An error inside ends the run, so the weights are not put back after it.
        """
        self._exchange_averages()
        yield
        self._exchange_averages()

    def _exchange_averages(self) -> None:
        self.states.exchange_averages()
        if self.settings.shards_parameters:
            streams.gather_after_update(self.deepspeed.optimizer)

    def _averaging(self) -> AbstractContextManager[None]:
        """Return the context of an update, in which the averages follow."""
        if self.settings.ema is None:
            return nullcontext()
        return self.states.averaging(self.settings.ema.decay if self.averages else 1.0)

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers, and remove the files of this process's engines."""
        self.deepspeed.destroy()
        swap.remove_folders()

    def _find_matrices(self, optimizer: Any) -> None:
        """Give an optimizer of whole matrices those of each of its groups."""
        zero = self.deepspeed.optimizer
        stage = self.mesh.join_stage()
        matrices = find_matrices(
            self.held,
            places_of(zero, self.held),
            mesh=self.mesh,
            stage=stage,
            sharded=self.settings.zero.stage > 0,
            per_head=getattr(self.settings.optimizer.params, "per_head", False),
        )
        for index, master in enumerate(masters_of(zero)):
            if self._kinds[updating.group_of(zero, index)].matrices:
                own = [matrix for matrix in matrices if matrix.group == index]
                optimizer.matrices[master] = WholeMatrices(own, stage, self.mesh.device)
        if getattr(self.settings.optimizer.params, "clip", "all") == "adam_only":
            unclipped = [number for number, kind in enumerate(self._kinds) if kind.matrices]
            updating.leave_unclipped(zero, unclipped)

    def _check_groups(self) -> None:
        """Raise ConfigError if stages differ in their number of optimizer groups.

        DeepSpeed would compute a wrong gradient norm, and then hang.
        """
        optimizer = self.deepspeed.optimizer
        num_groups = len(getattr(optimizer, "fp16_groups", None) or optimizer.bit16_groups)
        counts = [int(row[0]) for row in self.mesh.messages.gather_floats([num_groups])]
        if len(set(counts)) > 1:
            raise ConfigError(
                "zero_optimization.sub_group_size splits the stages into different numbers of "
                f"optimizer groups ({sorted(set(counts))}); use a larger value"
            )


class ForwardEngine:
    """This rank's stages for evaluation only, built with the same `settings`.

    If parameters are sharded over dp (ZeRO-3), DeepSpeed gathers them layer by layer.
    """

    def __init__(self, stages: nn.Module, settings: EngineSettings, mesh: Mesh) -> None:
        self.settings = settings
        self._run: Any = stages.eval()
        self.deepspeed: deepspeed.DeepSpeedEngine | None = None
        if settings.shards_parameters:
            core.skip_trace_check()
            self.deepspeed, *_ = deepspeed.initialize(
                model=stages,
                config=settings.deepspeed_config(mesh.shards.size),
                mpu=model_parallel_unit(mesh.model, mesh.shards),
                dist_init_required=False,
            )
            self._run = self.deepspeed

    def evaluate(self, stage: int, *inputs: Tensor | Segments | None) -> Tensor:
        """Run a stage without dropout and without gradients."""
        with torch.no_grad():
            output: Tensor = self._run(stage, *inputs)
        return output

    def wait_for_weights(self, stage: int) -> None:
        """Do nothing: DeepSpeed gathers the weights in the forward."""

    def close(self) -> None:
        """Free DeepSpeed's hooks and buffers, and remove its files."""
        if self.deepspeed is not None:
            self.deepspeed.destroy()
        swap.remove_folders()


def forward_settings(settings: EngineSettings) -> EngineSettings:
    """Return settings for stages that only run forward, sharded over dp if `settings` are."""
    offload = settings.zero.offload_param if settings.shards_parameters else OffloadParamConfig()
    zero = settings.zero.model_copy(
        update={
            "stage": 3 if settings.shards_parameters else 0,
            "offload_optimizer": OffloadOptimizerConfig(),
            "offload_param": offload,
        }
    )
    once = settings.reduces_once or zero.stage == 0
    return replace(settings, zero=zero, weights="per_microbatch", reduces_once=once)
