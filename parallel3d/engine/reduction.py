"""Sum the gradients of a rank's stages over the mesh."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.gathering import Layers
from parallel3d.engine.quirks import core, reducing, scattering
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.cut import HeldParameter


class Reduction:
    """Reduces a step's gradients: partial ones over tp, tied ones over `owners`, all over dp.

    - Once per step: `reduce(stage)` reduces a stage's gradients, and leaving `accumulation` the
      rest. With `overlap_comm`, layers that fill a bucket are reduced inside `last_backward`.
    - After each microbatch: DeepSpeed's hooks reduce, except partial and tied gradients, which are
      reduced on leaving `accumulation`.

    `owners` is the group of the ranks that hold the first and the last stage.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        held: Sequence[HeldParameter],
        layers: Layers,
        *,
        settings: EngineSettings,
        mesh: Mesh,
        owners: dist.ProcessGroup | None,
    ) -> None:
        self._deepspeed = engine
        self._held = tuple(held)
        self._settings = settings
        self.mesh = mesh
        self._owners = owners
        self._of_stage = _complete_with(layers, self._held)
        self._index: dict[nn.Parameter, int] = {}  # a shared weight has its first layer's
        for of_stage in layers.values():
            for index, layer in enumerate(of_stage):
                for parameter in layer.parameters():
                    self._index.setdefault(parameter, index)
        self._last: int | None = None  # the stage whose last backward runs
        # If asked for, the sum of squares of the gradients that dp will average; copies count once.
        self.own_squares: Tensor | None = None
        # If asked for, the moments of these segments of flat gradients before dp averages them.
        self.segments: Mapping[str, Sequence[tuple[int, int]]] = {}
        self.moments: dict[str, Tensor] = {}
        # Only at ZeRO-0, which DeepSpeed does not average: to be called when the step needs them.
        self._averages: list[Callable[[], None]] = []
        self._bucket = settings.zero.reduce_bucket_size
        self._waiting: dict[int, HeldParameter] = {}  # not yet reduced in this step
        self._deferred: core.DeferredReduction | None = None
        summed = [h.parameter for h in self._held if h.tied_across or h.partial]
        if summed and not settings.reduces_once:
            self._deferred = core.DeferredReduction(engine, summed)
        if settings.shards_parameters:
            reducing.average_in_one_buffer(
                engine.optimizer, settings.reduction_dtype, mesh.copies, settings.reduces_once
            )
        elif settings.reduces_once:
            reducing.reduce_in_gradients_type(engine.optimizer)
        # gloo's reduce-scatter is an all-reduce that copies a part.
        is_user_set = not settings.zero.use_multi_rank_bucket_allreduce
        self._scattered_in: torch.dtype | None = None
        if settings.zero.stage in (1, 2) and mesh.backend != "gloo" and not is_user_set:
            self._scattered_in = settings.reduction_dtype
            scattering.scatter_even_buckets(engine.optimizer)
        if mesh.copies.size > 1 and not settings.shards_parameters:
            reducing.average_over_copies(engine.optimizer, mesh.copies)
        if settings.runs_without_hooks:
            reducing.remove_gradient_hooks(engine.optimizer)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Run a step's forwards and backwards inside this context; reduce gradients on exit."""
        if not self._settings.reduces_once:
            yield from self._each_microbatch()
            return
        self._waiting = {id(h.parameter): h for h in self._held}
        if self._settings.runs_without_hooks:
            reducing.begin(self._deepspeed)
            yield
            self._reduce(list(self._waiting.values()))
            reducing.finish(self._deepspeed)
            return
        with self._deepspeed.coalesce_grad_reduction():
            try:
                yield
            except BaseException:
                core.abandon_coalescing(self._deepspeed)
                raise
            self.sum_partial(self._waiting.values())

    def reduce(self, stage: int) -> None:
        """Reduce a stage's gradients after its last backward; collective over dp, and over tp."""
        self._reduce([h for h in self._of_stage[stage] if id(h.parameter) in self._waiting])

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """Run the stage's last backward of the step inside this context."""
        self._last = stage
        try:
            yield
        finally:
            self._last = None

    def on_input_grad(self, stage: int, index: int, grad: Tensor) -> None:
        """Reduce later layers if they fill a bucket; autograd calls it in a stage's backward.

        The input of layer `index` has its gradient, so all later layers are complete. The layer
        itself may not be: a branch that begins with a weight can still be running.
        """
        if stage != self._last:
            return
        ready = [
            h
            for h in self._of_stage[stage]
            if id(h.parameter) in self._waiting and self._index[h.parameter] > index
        ]
        if sum(h.elements for h in ready) >= self._bucket:
            # DeepSpeed reduces on a stream of its own; our averages at ZeRO-0 have only started.
            self._reduce(ready, later=self._settings.zero.stage == 0)

    def _reduce(self, held: Sequence[HeldParameter], later: bool = False) -> None:
        """Reduce these gradients; `later`: pass them to DeepSpeed once their averages are there."""
        self._finish_average()
        self.sum_partial(held)
        reduce = partial(self._reduce_by_zero, [h.parameter for h in held])
        if later:
            self._averages.append(reduce)
        else:
            reduce()
        for h in held:
            self._waiting.pop(id(h.parameter), None)

    def _reduce_by_zero(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let DeepSpeed reduce complete gradients, which a reduce-scatter may have averaged."""
        averages: AbstractContextManager[None] = nullcontext()
        if self._scattered_in is not None:
            optimizer = self._deepspeed.optimizer
            averages = scattering.averaged(optimizer, parameters, self._scattered_in)
        with averages:
            reducing.reduce_now(self._deepspeed, parameters)

    def _finish_average(self) -> None:
        """Finish the averages that a backward has started, and pass them to DeepSpeed."""
        for finish in self._averages:
            finish()
        self._averages = []

    def _each_microbatch(self) -> Iterator[None]:
        core.accumulate_from_zero(self._deepspeed)
        # DeepSpeed must not take any backward for the last of the step. It copies gradients to an
        # offloaded optimizer at the boundary, which is set below.
        self._deepspeed.set_gradient_accumulation_boundary(False)
        yield
        if self._deferred is not None:
            self._deferred.put_back()
            self.sum_partial(self._held)
            self._deferred.flush()
        if self._settings.shards_parameters and self.mesh.copies.size > 1:
            reducing.sum_over_copies(
                self._deepspeed.optimizer, self._settings.reduction_dtype, self.mesh.copies
            )
        self._deepspeed.set_gradient_accumulation_boundary(True)
        self._deepspeed.optimizer.finalize_gradient_accumulation_boundary()

    def sum_partial(self, held: Iterable[HeldParameter]) -> None:
        """Sum partial gradients over tp, tied ones over their owners, before ZeRO shards them."""
        held = list(held)
        partial = [_grad(h) for h in held if h.partial]
        if partial and self.mesh.tensor.size > 1:
            all_reduce_coalesced(partial, self.mesh.tensor.group)
        tied = [_grad(h) for h in held if h.tied_across]
        if tied:
            assert self._owners is not None
            all_reduce_coalesced(tied, self._owners)
        if self.own_squares is not None:
            for h in held:
                if h.counts:
                    self.own_squares += _grad(h).float().square().sum()
        if self.segments:
            for h in held:
                flat = _grad(h).flatten()
                parts = [moments(flat.narrow(0, *segment)) for segment in self.segments[h.name]]
                self.moments[h.name] = torch.stack(parts)
        if self._settings.zero.stage == 0:
            self.average_over_replicas(held)

    def average_over_replicas(self, held: Iterable[HeldParameter]) -> None:
        """Average over replicas in buckets; in a last backward, without waiting.

        An expert's gradient is a sum over the tokens of all ranks that send it some, and so it is
        divided by the number of those ranks, not of its replicas.
        """
        ranks = self.mesh.replicas.size
        if ranks == 1:
            return
        for replicas, same in groupby(held, key=attrgetter("replicas")):
            bucket: list[Tensor] = []
            for h in same:
                grad = _grad(h).div_(ranks)
                if replicas.size == 1:
                    continue
                if bucket and sum(g.numel() for g in bucket) + grad.numel() > self._bucket:
                    self._average(bucket, replicas.group)
                    bucket = []
                bucket.append(grad)
            if bucket:
                self._average(bucket, replicas.group)

    def _average(self, bucket: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        finish = start_all_reduce(bucket, group, self._settings.reduction_dtype)
        if self._last is None:
            finish()
        else:
            self._averages.append(finish)


def moments(values: Tensor) -> Tensor:
    """Return the sum of some values and that of their squares, [2] in double precision."""
    wide = values.double()
    return torch.stack([wide.sum(), wide.square().sum()])


def _complete_with(
    layers: Layers, held: Sequence[HeldParameter]
) -> dict[int, tuple[HeldParameter, ...]]:
    """Return the parameters whose gradients each stage's own backwards complete.

    Weights that another stage has too are left out.
    """
    parameters: dict[int, set[nn.Parameter]] = {}
    uses = Counter[nn.Parameter]()  # the number of stages with each parameter
    for stage, of_stage in layers.items():
        parameters[stage] = set()
        for layer in of_stage:
            parameters[stage].update(layer.parameters())
        uses.update(parameters[stage])
    own = [h for h in held if uses[h.parameter] == 1 and not h.tied_across]
    return {
        stage: tuple(h for h in own if h.parameter in of_stage)
        for stage, of_stage in parameters.items()
    }


def _grad(held: HeldParameter) -> Tensor:
    grad = held.parameter.grad
    assert grad is not None, f"{held.name} has no gradient"
    return grad


def start_all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Callable[[], None]:
    """Start one all-reduce of tensors of one dtype, sent as `dtype`.

    Return a function that waits for it and writes the sums into the tensors.
    """
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(dtype or tensors[0].dtype)
    work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    return finish


def all_reduce_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one dtype over a group, in place, in one all-reduce."""
    start_all_reduce(tensors, group)()
