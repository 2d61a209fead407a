"""One case of verify on the ranks of a mesh: the trainer's own loop trains, evaluates and saves.

Dropout's masks depend on the mesh, so they have no reference. An extra step with dropout on records
the state of the generator each time a mask is drawn.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from parallel3d.base.reader import JsonObject
from parallel3d.checkpoint import chunk_runs, chunks, disk
from parallel3d.checkpoint.find import find_named
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import CompleteConfig
from parallel3d.config.learning_rate import rate
from parallel3d.engine.quirks import updating
from parallel3d.engine.quirks.nvme import swapping_small_tensors
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import transformer_cost
from parallel3d.models.moe.blocks import Router
from parallel3d.pipeline.executor import Microbatch
from parallel3d.tensor import loss
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.loss import vocab_parallel_loss
from parallel3d.tensor.norm import LayerNorm, RMSNorm
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.rotary import Rotary
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.train.metrics import MetricsWriter
from parallel3d.train.observers import observed_trainer
from parallel3d.train.start import Start
from parallel3d.verify import definitions
from parallel3d.verify.dropout_masks import Masks, share_of_wrong, watched
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import (
    ReferenceErrors,
    WeightErrors,
    microbatches,
    relative_distance,
    weight_error,
    weight_errors,
    worst,
)
from parallel3d.verify.reference import HALF, SEED, Reference, corpus_of, relative
from parallel3d.verify.shrink import BLOCK, STEPS

# Thresholds of the library that a small run would not reach: owner, name, value.
THRESHOLDS: tuple[tuple[object, str, int], ...] = (
    (loss, "_ROWS", 2**8),
    (updating, "PART", 2**8),
    (chunk_runs, "SMALLEST", 2**6),
    (chunks, "STAGING_BYTES", 2**12),
    (disk, "BLOCK", 2**12),
)
SAVED_STEPS = STEPS - 1  # the run is saved after these; the resumed run makes the last step
HELD_SECONDS = 20.0  # most that a save is held back until the step after it is done
DROPOUT = 0.5
DROPPED_STEPS = 2  # with dropout on, whose masks must differ
VECTOR_SIZE = 32  # elements that are not all numbers of half precision by chance
NORM_SIZE = 256  # features of the norms that are compared alone, and their tokens


@dataclass(frozen=True)
class CaseTask:
    """The work of a case besides training."""

    saves: Path | None = None  # folder to save a checkpoint to
    resumes: Path | None = None  # folder to resume from
    drops: bool = False  # also run a step with dropout and record its masks


class Reduced(TorchDispatchMode):
    """Record the coarsest type in which collectives add tensors up inside the context."""

    eps = 0.0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "c10d" and "reduce" in func.__name__:
            for x in tree_flatten(args)[0]:
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize < 4:
                    self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class RankFindings:
    """The errors that one rank measured, and what the parent compares between ranks or runs."""

    loss: float
    grad_norm: float
    weights: WeightErrors
    others: dict[str, float]
    """More of `ReferenceErrors`, by name."""
    counters: JsonObject
    """Adam's and the loss scaler's after the last step."""
    masks: Masks | None


def checked(
    config: CompleteConfig,
    reference: Reference,
    task: CaseTask,
    *,
    function: Callable[..., RankFindings] | None = None,
    counters: JsonObject | None = None,
    timeout: float = 300,
) -> tuple[ReferenceErrors, JsonObject]:
    """Run `check` on every rank of a resolved config's mesh; return its errors and counters.

    - `function`: called on each rank in place of `check`
    - `counters`: those that an unbroken run ends with; compared if not None

    Raises TrainingError if a rank fails.
    """
    findings: list[RankFindings] = run_locally(
        function or check, config.mesh.sizes.ranks, config, reference, task, timeout=timeout
    )
    masks = [f.masks for f in findings if f.masks is not None]
    errors = ReferenceErrors(
        loss=worst(f.loss for f in findings),
        grad_norm=worst(f.grad_norm for f in findings),
        weight=weight_error(config, [f.weights for f in findings]),
        way=relative_distance([f.weights for f in findings]) if config.precision == "fp32" else 0.0,
        masks=share_of_wrong(masks, config.num_microbatches * DROPPED_STEPS),
        counters=float(any(counters not in (None, f.counters) for f in findings)),
        start=reference.start,
        settings=float(reference.settings),
        **{name: worst(f.others[name] for f in findings) for name in findings[0].others},
    )
    return errors, findings[0].counters


def check(rank: int, config: CompleteConfig, reference: Reference, task: CaseTask) -> RankFindings:
    """Train a small config on its course as one rank and compare with the reference."""
    mesh = Mesh(**config.mesh.groups)
    torch.set_num_threads(1)  # more threads slow such small products down
    with swapping_small_tensors(2 * BLOCK), low_thresholds(config):
        parts = assemble(config, mesh, seed=SEED)
        findings = CaseRun(parts, config, mesh, reference).compared(task)
    mesh.barrier()
    parts.engine.close()
    return findings


def _scale_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square of the relative errors of rows' scales."""
    scales = ((y.double() - exact) * exact).mean(-1)
    return float(scales.square().mean().sqrt())


@contextmanager
def low_thresholds(config: CompleteConfig) -> Iterator[None]:
    """Lower the library's thresholds inside the context, so that a small run takes every path."""
    logits = 64 * int(config.model.vocab_size)  # 64 tokens at a time
    with ExitStack() as stack:
        for owner, name, value in (*THRESHOLDS, (transformer_cost, "LOGITS_AT_ONCE", logits)):
            stack.enter_context(patch.object(owner, name, value))
        yield


def go_on(parts: Assembly, mesh: Mesh, state: RunState, folder: Path, step: int) -> Position:
    """Load the checkpoint of a step in `folder`; return the position to go on from."""
    checkpoint = find_named(folder, step, mesh)
    position = state.position_in(checkpoint.state, checkpoint.folder, lambda text: None)
    load(checkpoint, engine=parts.engine, mesh=mesh, layers=parts.layers)
    return position


class CaseRun:
    """One rank of a case."""

    def __init__(
        self, parts: Assembly, config: CompleteConfig, mesh: Mesh, reference: Reference
    ) -> None:
        self.parts = parts
        self.config = config
        self.mesh = mesh
        self.reference = reference
        self.corpus = corpus_of(config, Path(reference.weights).parent)
        self.batch: list[Microbatch] = []
        """The batch of the last step."""
        self.stepped = Event()
        """Set after the last step."""
        self.eps = [0.0]
        self.wrong = [0.0]
        self.masters = [0.0]
        self.unlike = [0.0]
        # Gradients are averaged in fp32; those of activations, which tp and cp add up, are not.
        self.averages_in_fp32 = (
            config.communication_data_type in (None, "fp32")
            and config.mesh.tp == config.mesh.cp == 1
            and config.precision in HALF
        )
        self.reduced = Reduced()  # type: ignore[no-untyped-call]
        for held in parts.engine.held:
            held.parameter.register_post_accumulate_grad_hook(self._note_type)

    def _note_type(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.eps.append(torch.finfo(parameter.grad.dtype).eps)

    def compared(self, task: CaseTask) -> RankFindings:
        """Train, evaluate, and return the differences from the reference."""
        position = Position()
        if task.resumes:
            position = go_on(
                self.parts,
                self.mesh,
                RunState(self.config, self.corpus),
                task.resumes,
                SAVED_STEPS,
            )
            self._look_at_masters()
        with self._watching(task.drops):
            lines = self._trained(position, task.saves)
        self._look_at_masters()
        counters = self.parts.engine.states.counters()
        weights = weight_errors(self.parts, self.config, self.reference)
        masks = self._dropped(self.batch, self.config.num_steps) if task.drops else None
        first = position.step
        right = self.reference
        steps = range(first + 1, self.config.num_steps + 1)
        per_step = right.course.steps[0].tokens
        counted = [(step, step * per_step.numel()) for step in steps]
        by_step = {line["step"]: line for line in lines}

        def said(name: str) -> list[float]:
            """Return a number of each step; NaN where a line has none."""
            values = [by_step.get(step, {}).get(name) for step in steps]
            return [math.nan if value is None else value for value in values]

        rates = relative(said("lr"), right.course.rates[first:])
        return RankFindings(
            loss=worst(relative(said("loss"), right.losses[first:])),
            grad_norm=worst(relative(said("grad_norm"), right.grad_norms[first:])),
            weights=weights,
            others={
                "evaluation": worst(relative(said("held_out_loss")[-1:], [right.evaluation])),
                "lines": float([(x["step"], x["tokens"]) for x in lines] != counted),
                "accumulation": max(self.eps) if max(self.eps) > 1e-6 else 0.0,
                "samples": max(self.wrong),
                "rates": worst([self._compare_rates(), *rates]),
                "masters": max(self.masters),
                "reduction": self.reduced.eps,
                "scale": abs(
                    self.parts.engine.loss_scale
                    / definitions.loss_scale(self.config.fp16, self.config.num_steps)
                    - 1
                ),
                "turns": self._compare_turns(),
                "norms": self._compare_norms(),
                "weights": max(self.unlike),
                "routers": self._compare_routers(),
                "token_losses": self._compare_token_losses(),
            },
            counters=counters,
            masks=masks,
        )

    @contextmanager
    def _watching(self, drops: bool) -> Iterator[None]:
        """Look at each batch that is trained on; turn dropout on where it must have no effect."""
        executor = self.parts.executor
        evaluator = self.parts.evaluator
        train = executor.run
        evaluate = evaluator.run

        def trained(batch: list[Microbatch], step: int) -> torch.Tensor:
            self.batch = batch
            self._compare(batch, step)
            with self.reduced if self.averages_in_fp32 else nullcontext():
                loss = train(batch, step)
            self._look_at_sums()
            return loss

        def evaluated(batch: list[Microbatch]) -> torch.Tensor:
            self.stepped.set()
            with watched(self.parts.stages.module, (0, 0), False, DROPOUT if drops else 0.0):
                return evaluate(batch)

        with patch.object(executor, "run", trained), patch.object(evaluator, "run", evaluated):
            yield

    def _trained(self, position: Position, saves: Path | None) -> list[dict[str, Any]]:
        """Let the trainer run from a position to the end; return its lines of metrics.

        A save in the background is written when the step after it is done, whose state it must not
        have.
        """
        parts = self.parts
        behind = self.config.checkpoint.asynchronous
        write = disk.write_file

        def write_late(*args: Any, **options: Any) -> Any:
            self.stepped.wait(HELD_SECONDS if behind else 0)
            return write(*args, **options)

        with (
            TemporaryDirectory() as own,
            closing(MetricsWriter(Path(own))) as writer,
            patch.object(disk, "write_file", write_late),
        ):
            places = [DiskPlace(self.mesh, saves)] if saves else []
            start = Start(
                config=self.config,
                settings={},
                folder=Path(own),
                digest="",
                corpus=self.corpus,
                position=position,
                places=places,
            )
            saver = None
            if saves:
                saver = Saver(parts.engine, self.mesh, parts.layers, places, asynchronous=behind)
            observed_trainer(start, self.mesh, parts, writer=writer, saver=saver).run()
            return [json.loads(line) for line in writer.path.read_text().splitlines()]

    def _look_at_sums(self) -> None:
        """Record half precision's eps if it holds all of a norm's or bias's summed gradient.

        All microbatches add to each of its elements, so that a sum in fp32 needs more bits.
        """
        engine = self.parts.engine
        dtype = HALF.get(self.config.precision)
        offloads = engine.settings.zero.offload_optimizer.device != "none"
        if dtype is None or offloads or self.config.num_microbatches == 1:
            return
        for piece, gradient in engine.states.gradients():
            is_vector = len(piece.held.spec.shape) == 1 and piece.numel >= VECTOR_SIZE
            has_values = is_vector and 0 < float(gradient.abs().max()) < math.inf
            if has_values and torch.equal(gradient, gradient.to(dtype).to(gradient.dtype)):
                self.eps.append(torch.finfo(dtype).eps)

    def _look_at_masters(self) -> None:
        """Record the share of masters, and of each kind of the optimizer's state, that half
        precision holds: all, if they were rounded. Record how many weights are not their masters,
        rounded to the nearest.
        """
        states = self.parts.engine.states
        dtype = HALF.get(self.config.precision, torch.bfloat16)
        values: dict[str, list[torch.Tensor]] = {}
        for number in range(len(states.blocks)):
            with states.opened(number) as pieces:
                for place, piece in zip(states.blocks[number], pieces, strict=True):
                    for kind, value in piece.items():
                        values.setdefault(kind, []).append(value[value != 0])
                    if self.config.zero_optimization.offload_param.device == "none":
                        weights = place.held.parameter.data.flatten()[place.start :]
                        own = getattr(place.held.parameter, "ds_tensor", weights)[: place.numel]
                        self.unlike.append(float((piece["master"].to(own) != own).float().mean()))
        for own in map(torch.cat, values.values()):
            self.masters.append(float((own == own.to(dtype)).sum()) / max(1, len(own)))

    def _compare_turns(self) -> float:
        """Return the largest difference of rotary positions that one rounding does not explain."""
        right = self.reference.turns
        dtype = self.parts.engine.settings.dtype
        layers = [m for m in self.parts.stages.module.modules() if isinstance(m, Rotary)]
        if right is None or not layers:
            return 0.0
        half = right.shape[-1] // 2
        unit = torch.zeros(1, 1, *right.shape[1:], dtype=dtype)
        unit[..., :half] = 1  # turns into cos and sin
        turned, _ = layers[0](unit, unit)
        off = turned[0, 0].float() - torch.cat((right[0, :, :half], right[1, :, :half]), -1)
        worst_off = float(off.abs().max())
        return worst_off if worst_off > max(1e-4, torch.finfo(dtype).eps) else 0.0

    def _compare_norms(self) -> float:
        """Return the largest error of the norms' scale that one rounding does not explain.

        A mean in half precision scales whole tokens by less than the rounding of a feature, which
        hides it in the loss; over many features the rounding averages out.
        """
        dtype = self.parts.engine.settings.dtype
        worst_off = 0.0
        modules = self.parts.stages.module.modules()
        context = LayerContext(self.mesh.alone.group, RandomKey(0))
        for kind in {type(m) for m in modules if isinstance(m, (LayerNorm, RMSNorm))}:
            norm = kind(NORM_SIZE, eps=1e-6, context=context).to(dtype).requires_grad_(False)
            norm.weight.fill_(1)
            if isinstance(norm, LayerNorm):
                norm.bias.zero_()
            x = torch.randn(NORM_SIZE, NORM_SIZE, generator=torch.Generator().manual_seed(SEED))
            x = x.to(dtype)  # [tokens, features]
            normalise = F.layer_norm if isinstance(norm, LayerNorm) else F.rms_norm
            exact = normalise(x.double(), (NORM_SIZE,), eps=norm.eps)
            off = _scale_error(norm(x), exact)
            rounding = _scale_error(exact.to(dtype), exact)
            if off > max(1e-6, 2 * rounding):
                worst_off = max(worst_off, off)
        return worst_off

    def _compare_routers(self) -> float:
        """Return the largest error of routers' scores of some tokens, which are fp32's.

        Half precision changes the choice of few of the small model's tokens.
        """
        modules = self.parts.stages.module.modules()
        if not any(isinstance(module, Router) for module in modules):
            return 0.0
        router = Router(self.config.model).to(self.parts.engine.settings.dtype)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(SEED)
        num_experts, size = router.weight.shape
        both = torch.randn(NORM_SIZE + num_experts, size, generator=generator) / size**0.25
        x, weight = both.to(router.weight.dtype).split([NORM_SIZE, num_experts])
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.zero_()
            router.weight.copy_(weight)
            routing = router(x)
        exact = x.double() @ weight.double().t()  # [tokens, experts]
        shares = exact.sigmoid() if router.config.router == "sigmoid" else exact.softmax(-1)
        shares = shares / shares.sum(-1, keepdim=True)
        off = [routing.logits - exact, routing.shares - shares]
        return max(float(difference.abs().max()) for difference in off)

    def _compare_token_losses(self) -> float:
        """Return the mean error of tokens' losses, by rounded logits, in nats."""
        generator = torch.Generator().manual_seed(SEED)
        both = torch.randn(2, NORM_SIZE, NORM_SIZE, generator=generator)
        x, weight = both.to(self.parts.engine.settings.dtype)
        labels = torch.arange(NORM_SIZE)
        context = LayerContext(self.mesh.alone.group, RandomKey(0))
        x = x / NORM_SIZE**0.5  # [tokens, features], for logits of about 1
        found = vocab_parallel_loss(x, weight, labels, vocab_size=NORM_SIZE, context=context)
        exact = F.cross_entropy((x @ weight.t()).double(), labels, reduction="none")
        return float((found - exact).abs().mean())

    def _compare_rates(self) -> float:
        """Return the largest relative difference of the learning rates of the user's schedule."""
        if self.reference.schedule is None:
            return 0.0
        schedule = self.reference.schedule
        expected = self.reference.rates
        off = max(abs(rate(schedule, step) - lr) for step, lr in expected.items())
        return off / float(schedule.optimizer.params.lr)

    def _compare(self, batch: list[Microbatch], step: int) -> None:
        """Record the share of a step's tokens, labels and positions that differ from the course."""
        expected = microbatches(self.reference.course.steps[step], self.config, self.mesh)
        for read, right in zip(batch, expected, strict=True):
            pairs = [(read.tokens, right.tokens), (read.labels, right.labels)]
            pairs.append((read.weights, right.weights))
            if read.segments is not None and right.segments is not None:
                pairs.append((read.segments.positions, right.segments.positions))
            for a, b in pairs:
                if a is not None and b is not None:
                    self.wrong.append(float((a != b).float().mean()))

    def _dropped(self, batch: list[Microbatch], step: int) -> Masks:
        """Run two steps on one batch with dropout on, and return the masks that they drew."""
        coords = self.mesh.samples.coord, self.mesh.tensor.coord
        split = self.config.mesh.sequence_parallel
        with watched(self.parts.stages.module, coords, split, DROPOUT) as masks:
            for later in range(DROPPED_STEPS):
                self.parts.executor.run(batch, step + later)
        return masks
